"""However a step's items are cut into micro-batches, the step is the same."""

from types import SimpleNamespace

import pytest
import torch
from tiny.data import Stream, batches, classification_data, language_data
from tiny.models import bert, llama
from tiny.oracles import naive_layer_losses
from tiny.training import InOrder, config
from transformers import Trainer, default_data_collator

from hf_descent import DescentTrainer
from hf_descent.training.records import items_of_step


def run(tmp_path, model, data, batch, layer_loss_fn=None, **arguments):
    settings = {
        "per_device_train_batch_size": batch, "gradient_accumulation_steps": 8 // batch, "max_steps": 5,
        "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "descent_alpha": 0.4, "dual_learning_rate": 0.2,
        "fixed_multipliers": [0.5, 0.3, 0.7],
    }  # fmt: skip
    args = config(tmp_path, **settings | arguments)
    trainer = InOrder(model, args, train_dataset=data, layer_loss_fn=layer_loss_fn)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return trainer, logs


@pytest.mark.parametrize(
    "objective",
    [
        "erm",
        "descent",
        "deep_supervision",
        "layerskip",
        "fixed",
        pytest.param("descent-smoothed", id="smoothed"),
    ],
)
@pytest.mark.parametrize("task", ["classification", "language"])
def test_1x8_4x2_and_8x1_agree(tmp_path, objective, task):
    objective, _, smoothed = objective.partition("-")
    arguments = {"objective": objective, "label_smoothing_factor": 0.1 if smoothed else 0.0}
    make, data = (
        (bert, classification_data()) if task == "classification" else (llama, language_data())
    )
    sizes = (8, 2, 1) if objective == "descent" else (8, 2)
    runs = [run(tmp_path, make(), data, size, max_steps=3, **arguments) for size in sizes]
    (reference, logs) = runs[0]
    others = runs[1:]

    for trainer, other_logs in others:
        assert [log["loss"] for log in other_logs] == pytest.approx(
            [log["loss"] for log in logs], rel=1e-5
        )
        norms = [log["grad_norm"] for log in logs]
        assert [log["grad_norm"] for log in other_logs] == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(
            trainer.model.state_dict(), reference.model.state_dict(), rtol=1e-4, atol=1e-6
        )
        if objective == "descent":
            torch.testing.assert_close(
                reference.multipliers.values, trainer.multipliers.values, rtol=1e-4, atol=1e-6
            )
            assert reference.multipliers.values.max() > 0.1


@pytest.mark.parametrize("objective", ["erm", "descent"])
def test_smoothed_labels_of_a_model_that_takes_no_items(tmp_path, objective):
    norms = []
    for batch in (8, 2):
        model = llama()
        model.accepts_loss_kwargs = False
        settings = {"objective": objective, "label_smoothing_factor": 0.1, "max_steps": 3}
        _, logs = run(tmp_path, model, language_data(), batch, **settings)
        norms.append([log["grad_norm"] for log in logs])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_labels_that_are_masked_at_random_on_the_device_train_as_by_trainer(tmp_path):
    norms = []

    for base in (Trainer, DescentTrainer):

        class Masking(base):
            def _prepare_inputs(self, inputs):
                inputs = super()._prepare_inputs(inputs)
                return dict(
                    inputs,
                    labels=inputs["labels"].where(torch.rand(inputs["labels"].shape) < 0.5, -100),
                )

        model = llama()
        model.accepts_loss_kwargs = False
        trainer = Masking(
            model, config(tmp_path, dual_warmup_steps=6), train_dataset=language_data()
        )
        trainer.train()
        norms.append([log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log])

    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


class LateLabels:
    """Labels that Trainer does not see when it counts."""

    def _prepare_inputs(self, inputs):
        inputs = dict(super()._prepare_inputs(inputs))
        if "answers" in inputs:
            inputs["labels"] = inputs.pop("answers")
        return inputs


def with_answers(rows):
    batch = dict(default_data_collator(rows))
    batch["answers"] = batch.pop("labels")
    return batch


def with_some_answers(rows):
    """The first of two micro-batches has its labels."""
    if rows[0]["input_ids"][0] == language_data()[0]["input_ids"][0]:
        return default_data_collator(rows)
    return with_answers(rows)


@pytest.mark.parametrize(
    ("collate", "bound"), [(with_answers, "auto"), (with_answers, 5.0), (with_some_answers, 5.0)]
)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_labels_that_come_too_late_to_be_counted_are_refused(
    tmp_path, collate, bound, accumulation
):
    class Late(LateLabels, InOrder):
        pass

    args = config(
        tmp_path,
        initial_loss_bound=bound,
        gradient_accumulation_steps=accumulation,
        remove_unused_columns=False,
    )
    trainer = Late(llama(), args, train_dataset=language_data(ragged=False), data_collator=collate)
    with pytest.raises(ValueError, match="`_prepare_inputs`.*add them in the collator"):
        trainer.train()


def test_a_process_without_labels_takes_part_in_the_count():
    """Plain training of two processes, each of which adds its own number."""
    summed = []

    def reduce(tensor, operation):
        summed.append(tensor.item())
        return tensor + 3

    processes = SimpleNamespace(num_processes=2, device="cpu", reduce=reduce)
    task = SimpleNamespace(takes_items=False, count=lambda batch: batch["count"])

    assert items_of_step(processes, task, [{"count": torch.tensor(5)}, {"count": None}]) == 8
    assert items_of_step(processes, task, [{"count": None}]) is None
    assert summed == [5, 0]


@pytest.mark.parametrize("accumulation", [1, 4])
def test_plain_training_takes_late_labels_as_trainer_does(tmp_path, accumulation):
    logs = []
    for base in (Trainer, DescentTrainer):

        class Late(LateLabels, base):
            pass

        args = config(
            tmp_path,
            objective="erm",
            descent_alpha=None,
            max_steps=3,
            gradient_accumulation_steps=accumulation,
            remove_unused_columns=False,
            logging_steps=1,
        )
        trainer = Late(
            bert(), args, train_dataset=classification_data(), data_collator=with_answers
        )
        trainer.train()
        logs.append(
            [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        )

    assert logs[1] == logs[0] and len(logs[0]) == 3


def test_a_micro_batch_without_any_label_counts_for_nothing(tmp_path, readouts):
    data = language_data(ragged=False)
    for row in data[::4]:
        row["labels"] = torch.full_like(row["labels"], -100)
    reference, _ = run(tmp_path, llama(), data, 8, objective="descent")
    trainer, _ = run(tmp_path, llama(), data, 1, objective="descent")
    assert readouts() == ["tiles"]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    torch.testing.assert_close(
        reference.multipliers.values, trainer.multipliers.values, rtol=1e-4, atol=1e-6
    )


def by_items(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("loss", [None, by_items])
@pytest.mark.parametrize("objective", ["descent", "deep_supervision"])
def test_a_step_without_any_label_measures_nothing(tmp_path, objective, loss, caplog):
    """Its layer losses are no zeros, which would meet every constraint."""
    data = language_data(ragged=False)

    for row in data[16:24]:  # the third of five steps
        row["labels"] = torch.full_like(row["labels"], -100)

    trainer, _ = run(tmp_path, llama(), data, 8, loss, objective=objective, dual_optim="sgd")

    assert "not finite" not in caplog.text

    logs = {log["step"]: log for log in trainer.state.log_history if "grad_norm" in log}

    assert "layer_loss_1" in logs[2] and "layer_loss_1" not in logs[3]

    losses = torch.tensor(
        [[logs[step][f"layer_loss_{layer}"] for layer in (1, 2, 3)] for step in (1, 2, 4, 5)]
    )
    if objective == "descent":
        first = trainer.state.log_history[-1][
            "train_max_violation"
        ]  # of the average over the steps
        assert first == pytest.approx(losses[:, 0].mean().item() - 0.6, rel=0.05)
        assert trainer.multipliers.steps == 4
        assert logs[4]["multiplier_1"] > logs[2]["multiplier_1"] > 0


def test_data_without_a_length_that_end_within_a_step_do_not_count_twice(tmp_path):
    """24 rows are a step of 16 and half of one; Trainer keeps the gradient of the half for the epoch after."""
    model = bert().eval()
    rows = classification_data(24)
    _, logs = run(
        tmp_path, bert(), Stream(rows), 8, objective="descent", gradient_accumulation_steps=2
    )

    assert len(logs) == 5

    for log in logs[:2]:
        with torch.no_grad():
            expected = naive_layer_losses(model, next(batches(rows[:16], 16))).tolist()
        assert [log[f"layer_loss_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
            expected, rel=0.02
        )


def test_a_loss_function_of_ones_own_is_averaged_over_items_whether_it_takes_their_number_or_not(
    tmp_path,
):
    weight = torch.tensor([1.0, 2.0, 0.5])

    def mean(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(
            outputs["logits"], labels, weight, reduction="none"
        ).mean()

    def total(outputs, labels, num_items_in_batch=None):
        losses = torch.nn.functional.cross_entropy(
            outputs["logits"], labels, weight, reduction="none"
        )
        return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch

    finals = []

    for function in (mean, total):
        for batch in (8, 2):
            trainer, _ = run(tmp_path, bert(), classification_data(), batch, function)
            finals.append((trainer.multipliers.values, trainer.model.classifier.weight.detach()))
    for final in finals[1:]:
        torch.testing.assert_close(final, finals[0], rtol=1e-4, atol=1e-6)
