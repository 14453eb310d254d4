import copy
from contextlib import suppress

import numpy as np
import pytest
import torch
from tiny.data import classification_data, language_data
from tiny.models import VOCAB, bert, llama
from tiny.oracles import assert_equal_runs
from tiny.training import config, fitted, watch
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback, default_data_collator

from hf_descent import DescentProblem, DescentTrainer, Multipliers
from hf_descent.losses import layerwise
from hf_descent.losses.layerwise import find_layer_losses
from hf_descent.losses.task import TaskLoss
from hf_descent.readout.head import HeadReadout


LAYERS = 3


def rows(count, seed=0):
    """Token sequences whose next token follows from the last, with prompts of different lengths left unlabelled."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for index in range(count):
        first = int(torch.randint(3, VOCAB, (1,), generator=generator))
        ids = [(first * 3**k) % (VOCAB - 3) + 3 for k in range(9)]
        prompt = index % 4
        data.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return data


def trainer(tmp_path, *, model=None, compute_metrics=None, compute_loss_func=None, **given):
    args = config(
        tmp_path,
        **{
            "descent_alpha": 0.2, "initial_loss_bound": 3.0, "dual_warmup_steps": 5, "max_steps": 50,
            "per_device_train_batch_size": 4, "logging_steps": 1000, **given,
        },
    )  # fmt: skip
    made = DescentTrainer(
        model or llama(LAYERS), args, train_dataset=rows(64), eval_dataset=rows(10, seed=1),
        compute_metrics=compute_metrics, compute_loss_func=compute_loss_func,
    )  # fmt: skip
    callback, made.history = watch("on_step_end", lambda *_: made.multipliers.values.clone())
    made.add_callback(callback)
    return made


def logged_losses(trainer):
    """[logs, layers]"""
    names = [f"layer_loss_{layer}" for layer in (1, 2, 3)]
    return torch.tensor(
        [[log[name] for name in names] for log in trainer.state.log_history if names[0] in log]
    )


@pytest.fixture
def no_tiles(monkeypatch):
    def refuse(*args, **kwargs):
        raise ValueError("Not here.")

    def switch():
        monkeypatch.setattr(HeadReadout, "probe", refuse)

    return switch


SETTINGS = {
    "descent": {}, "keep": {"negative_weights": "keep", "dual_learning_rate": 0.2},
    "auto": {"descent_alpha": "auto", "initial_loss_bound": "auto", "loss_targets": {1: 0.5}},
    "some layers": {"constrained_layers": [1, 3]},
    "accumulation": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "noise": {"noise_gamma": 0.3, "noise_sigma": 0.02},
    "deep supervision": {"objective": "deep_supervision", "penalty_coefficient": 0.3}, "hinge": {"objective": "hinge"},
    "quadratic": {"objective": "quadratic", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_steps_follow_the_replay(tmp_path, no_tiles, readouts, setting):
    tiled = fitted(trainer(tmp_path, max_steps=20, **SETTINGS[setting]))
    metrics = tiled.evaluate()
    no_tiles()
    replayed = fitted(trainer(tmp_path, max_steps=20, **SETTINGS[setting]))
    assert readouts() == ["tiles", "replay"]
    multipliers = torch.stack(replayed.history)  # [steps, layers]
    assert (multipliers > 0).any() == (replayed.args.objective == "descent")
    torch.testing.assert_close(torch.stack(tiled.history), multipliers, rtol=1e-3, atol=1e-4)
    expected = replayed.evaluate()
    assert metrics.keys() == expected.keys()
    for name in ("eval_loss", *(f"eval_layer_loss_{layer}" for layer in (1, 2, 3))):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_router_s_loss_is_weighed_as_in_the_replay(tmp_path, no_tiles, readouts, smoothing):
    def trained():
        torch.manual_seed(0)
        sizes = {
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": LAYERS,
        }
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        router = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **router))
        settings = {"label_smoothing_factor": smoothing, "per_device_train_batch_size": 2}
        settings |= {
            "gradient_accumulation_steps": 2,
            "max_steps": 6,
            "logging_steps": 1,
            "dual_warmup_steps": 1,
        }
        return fitted(trainer(tmp_path, model=model, **settings))

    tiled = trained()
    no_tiles()
    replayed = trained()
    assert readouts() == ["tiles", "replay"]
    torch.testing.assert_close(logged_losses(tiled), logged_losses(replayed), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(
        tiled.model.state_dict(), replayed.model.state_dict(), rtol=1e-3, atol=1e-4
    )


def test_steps_follow_a_naive_loop(tmp_path):
    plain = {
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    tiled = trainer(tmp_path, resilience=0.05, max_steps=30, **plain)
    model = copy.deepcopy(tiled.model)
    batches = []
    step = tiled.training_step
    tiled.training_step = lambda model, inputs, *args: (
        batches.append(inputs),
        step(model, inputs, *args),
    )[1]
    tiled.train()

    problem, multipliers = (
        DescentProblem(0.2, 3.0, LAYERS),
        Multipliers(LAYERS, 0.02, optim="adam", resilience=0.05),
    )
    states = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: states.append(output))
    for index, batch in enumerate(batches):
        states.clear()
        model.model(batch["input_ids"])
        labels = batch["labels"][:, 1:]
        logits = [
            model.lm_head(model.model.norm(state))[:, :-1].transpose(1, 2) for state in states
        ]
        losses = torch.stack([F.cross_entropy(each, labels) for each in logits])
        objective = (
            losses[-1] if index < 5 else problem.weights(multipliers.values).clamp(min=0) @ losses
        )
        model.zero_grad()
        objective.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        if index >= 5:
            multipliers.step(problem.violations(losses.detach()) / 3.0)
        torch.testing.assert_close(tiled.history[index], multipliers.values, rtol=1e-4, atol=1e-5)
    assert multipliers.values.max() > 0.1
    torch.testing.assert_close(tiled.model.state_dict(), model.state_dict(), rtol=1e-3, atol=1e-4)


# ---- sampled tokens ----


def test_sampled_run_resumes_bit_for_bit(tmp_path):
    settings = {"readout_token_fraction": 0.5, "max_steps": 12, "dual_warmup_steps": 2}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    straight = fitted(trainer(tmp_path / "straight", **settings))
    trainer(tmp_path / "parts", save_strategy="steps", save_steps=5, **settings).train()
    resumed = fitted(
        trainer(tmp_path / "parts", **settings), str(tmp_path / "parts" / "checkpoint-5")
    )
    assert_equal_runs(straight, resumed)


def drawn_tokens(monkeypatch, made):
    """(seed of the generator, labelled tokens, shape of the samples) of each read of a run, and of what follows."""
    seen, tokens = [], HeadReadout.tokens

    def watch(self, inputs, fraction=1.0, generator=None, same=False):
        found = tokens(self, inputs, fraction, generator, same)
        seed = None if generator is None else generator.initial_seed()
        seen.append((seed, len(found.rows), None if found.samples is None else found.samples.shape))
        return found

    monkeypatch.setattr(HeadReadout, "tokens", watch)
    with suppress(KeyboardInterrupt):
        made.train()
    return seen


def test_every_micro_batch_draws_its_own_tokens_and_a_second_run_those_of_the_first(
    tmp_path, monkeypatch
):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    made = trainer(tmp_path, readout_token_fraction=0.5, **settings)
    first = [seed for seed, *_ in drawn_tokens(monkeypatch, made) if seed is not None]
    assert len(first) == len(set(first)) == 4
    monkeypatch.undo()
    assert [seed for seed, *_ in drawn_tokens(monkeypatch, made) if seed is not None] == first


def test_tokens_are_not_drawn_from_the_stream_of_the_noise(tmp_path, monkeypatch):
    made = trainer(
        tmp_path, max_steps=1, noise_gamma=0.3, noise_sigma=1.0, readout_token_fraction=0.5
    )
    seed = drawn_tokens(monkeypatch, made)[-1][0]
    streams = [np.random.SeedSequence(made.args.seed, spawn_key=(0, 0, draw)) for draw in range(3)]
    assert seed not in [int(stream.generate_state(1, np.uint64)[0]) for stream in streams]


@pytest.mark.parametrize(("rows", "num_samples"), [(0.2, 1), ("steps", 1), ("auto", LAYERS - 1)])
@pytest.mark.parametrize(
    ("fraction", "large", "share"),
    [(None, False, None), (None, True, 0.1), (0.5, False, 0.5), (1.0, True, None)],
)
def test_which_tokens_are_read(tmp_path, monkeypatch, fraction, large, share, rows, num_samples):
    """Layers that are compared, on the same ones."""
    monkeypatch.setattr(layerwise, "LARGE_VOCABULARY", VOCAB if large else VOCAB + 1)
    settings = {
        "readout_token_fraction": fraction,
        "descent_alpha": rows,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    seen = drawn_tokens(monkeypatch, trainer(tmp_path, max_steps=2, **settings))
    drawn = [each for each in seen if each[0] is not None]
    assert (
        len(drawn) == 2 * (1 + 2) and drawn[1:3] == drawn[4:6]
    )  # a step, and the batches of an evaluation, twice
    for step, (_, count, sampled) in zip(2 * [num_samples, 1, 1], drawn):
        assert sampled == (None if share is None else (step, round(share * count)))


@pytest.mark.parametrize("event", ["on_step_end", "on_train_end"])
def test_evaluations_after_training_read_all_tokens_however_it_ended(tmp_path, monkeypatch, event):
    made, ends = trainer(tmp_path, readout_token_fraction=0.5, max_steps=1), TrainerCallback()

    def end(*args, **kwargs):
        raise KeyboardInterrupt

    setattr(ends, event, end)
    made.add_callback(ends)
    seen = drawn_tokens(monkeypatch, made)
    made.evaluate()
    assert [sampled is not None for *_, sampled in seen].count(True) == 1  # the step's


def test_all_of_several_evaluation_sets_are_read_on_a_sample_by_eval_strategy(
    tmp_path, monkeypatch
):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 1}
    made = trainer(tmp_path, readout_token_fraction=0.5, **settings)
    made.eval_dataset = {"first": rows(8), "second": rows(8, seed=1)}
    drawn = drawn_tokens(monkeypatch, made)
    sampled = [samples is not None for *_, samples in drawn]
    # A reading of each set before the first step, the step, and a batch of each set by `eval_strategy`.
    assert sampled[-3:] == [True] * 3


def test_sampled_losses_are_the_full_ones_on_average(tmp_path):
    def losses(steps, **kwargs):
        """[steps, layers] of the same rows in every step, by a model that does not change."""
        made = trainer(tmp_path, max_steps=steps, logging_steps=1, learning_rate=0.0, **kwargs)
        made.train_dataset = rows(4)
        made.train()
        return logged_losses(made)

    errors = losses(40, readout_token_fraction=0.25) - losses(1)  # [steps, layers]
    assert (
        errors.shape == (40, LAYERS) and errors[:, -1].abs().max() < 1e-5
    )  # the last layer is read on all
    lower = errors[:, :-1]
    assert (lower.std(0) > 0).all() and (lower.mean(0).abs() < 4 * lower.std(0) / 40**0.5).all()


def test_a_compute_loss_that_asks_for_outputs_in_training_gets_logits(tmp_path):
    seen = []

    class Watched(DescentTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            with torch.no_grad():
                seen.append((outputs.logits, model(input_ids=inputs["input_ids"]).logits))
            return (loss, outputs) if return_outputs else loss

    args = trainer(tmp_path, max_steps=1).args
    Watched(llama(LAYERS), args, train_dataset=rows(8)).train()
    torch.testing.assert_close(*seen[0])


# ---- evaluation ----


def test_metrics_get_the_models_own_logits(tmp_path):
    seen = []
    made = fitted(
        trainer(
            tmp_path, max_steps=1, compute_metrics=lambda prediction: seen.append(prediction) or {}
        )
    )
    made.evaluate()
    ids = torch.tensor([row["input_ids"] for row in rows(10, seed=1)])
    with torch.no_grad():
        expected = made.model.eval()(ids).logits
    torch.testing.assert_close(torch.tensor(seen[0].predictions), expected)


# ---- where it does not apply ----


def test_a_fraction_of_tokens_needs_tiles(tmp_path):
    args = config(tmp_path, max_steps=1, readout_token_fraction=0.5)
    made = DescentTrainer(bert(), args, train_dataset=classification_data(8))
    with pytest.raises(ValueError, match="readout_token_fraction"):
        made.train()


def test_large_vocabularies_are_read_on_a_sample_of_the_tokens():
    """An unbiased one, the same for one key; the last layer on all."""
    rows = language_data(48)
    model, batch = llama(vocab_size=VOCAB).eval(), default_data_collator(rows)
    layers = find_layer_losses(model, batch, TaskLoss.probe(model, batch), token_fraction=0.3)
    with torch.no_grad():
        whole = layers.evaluation_losses(model, batch)
        samples = [
            layers.evaluation_losses(model, batch, key=(draw % 40,)).means for draw in range(41)
        ]
    assert torch.equal(samples[0], samples[40]) and not torch.equal(samples[0], samples[1])
    errors = torch.stack(samples[:40]) - whole.means  # [draws, layers]
    assert errors[:, -1].abs().max() < 1e-5 and (errors[:, :-1].std(0) > 0).all()
    assert (errors[:, :-1].mean(0).abs() < 4 * errors[:, :-1].std(0) / 40**0.5).all()
