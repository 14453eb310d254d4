"""Whatever the batch is: a step that a naive reference agrees with, or an error that says why."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny.models import VOCAB, bert, llama
from tiny.training import config, trained


deterministic = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
)
IDS = st.integers(0, VOCAB - 1)
ODD_IDS = st.sampled_from([-1, VOCAB, 2**31, 2**62])
DTYPES = st.sampled_from(
    [torch.int64] * 15 + [torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32]
)
ERRORS = (ValueError, TypeError, IndexError, RuntimeError)


def table(draw, rows, columns, values):
    return torch.tensor(
        draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    ).view(rows, columns)


@st.composite
def batches(draw, language):
    """Inputs and labels of any size, also none, ragged by their masks, with labels ignored or impossible."""
    rows = draw(st.integers(0, 4))
    length = draw(st.sampled_from([0, 1, 1, 2, 5, 32]))
    odd = draw(st.integers(0, 3)) == 0
    ids = table(draw, rows, length, st.one_of(IDS, ODD_IDS) if odd else IDS)
    lengths = torch.tensor(
        draw(st.lists(st.integers(1, max(length, 1)), min_size=rows, max_size=rows))
    )
    mask = (
        (torch.arange(length) < lengths[:, None]).long()
        if rows
        else torch.zeros(0, length, dtype=torch.long)
    )
    classes = VOCAB if language else 3
    values = [st.integers(0, classes - 1), st.just(-100)]
    if draw(st.integers(0, 3)) == 0:
        values.append(st.sampled_from([-1, -101, classes, 2**31, 2**62]))
    values = st.just(-100) if draw(st.integers(0, 5)) == 0 else st.one_of(values)
    labels = table(draw, rows, length, values) if language else table(draw, rows, 1, values)[:, 0]
    return {
        "input_ids": ids.to(draw(DTYPES)), "attention_mask": mask.to(draw(DTYPES)), "labels": labels.to(draw(DTYPES))
    }  # fmt: skip


def naive_losses(model, batch, language):
    """Layer losses in plain torch, mean over the labels that are not ignored; none where there is no such label."""
    with torch.no_grad():
        labels = batch["labels"]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if language:
            hidden = model.model(**inputs, output_hidden_states=True).hidden_states[1:-1]
            recorded = []
            handle = model.model.layers[-1].register_forward_hook(
                lambda m, a, out: recorded.append(out)
            )
            model(**inputs)
            handle.remove()
            logits = [
                model.lm_head(model.model.norm(h))[:, :-1].flatten(0, 1)
                for h in [*hidden, *recorded]
            ]
            labels = labels[:, 1:].flatten()
        else:
            states = model.bert(**inputs, output_hidden_states=True).hidden_states[1:]
            logits = [model.classifier(model.bert.pooler(hidden)) for hidden in states]
        if not (count := labels.ne(-100).sum()):
            return None
        return [
            (F.cross_entropy(logit, labels.long(), reduction="sum") / count).item()
            for logit in logits
        ]


def one_step(folder, model, batch):
    args = config(
        folder, max_steps=1, remove_unused_columns=False, learning_rate=0.0, dual_optim="sgd"
    )
    return trained(model, args, train_dataset=[0] * 8, data_collator=lambda rows: dict(batch))


@pytest.mark.slow
@pytest.mark.parametrize("language", [False, True], ids=["classification", "language"])
def test_any_batch_gives_a_right_step_or_an_error(tmp_path, language):
    outcomes = {"step": 0, "error": 0}
    said = []

    @deterministic
    @given(batches(language))
    def check(batch):
        model = llama() if language else bert()
        before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
        try:
            trainer = one_step(tmp_path, model, batch)
        except ERRORS as error:
            outcomes["error"] += 1
            said.append(str(error))
            return
        outcomes["step"] += 1
        expected = naive_losses(model, batch, language)
        logs = trainer.state.log_history[0]
        if expected is not None:
            assert [logs[f"layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
                expected, rel=1e-4, abs=1e-6
            )
        else:
            assert "layer_loss_1" not in logs and trainer.multipliers.steps == 0
        assert (
            torch.isfinite(trainer.multipliers.values).all()
            and (trainer.multipliers.values >= 0).all()
        )
        torch.testing.assert_close(
            model.state_dict(), before, rtol=0, atol=0
        )  # at rate 0: no gradient was spoilt

    check()

    assert min(outcomes.values()) > 3 and all(said)
