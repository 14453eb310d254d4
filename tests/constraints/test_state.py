"""The dual side of a run: its warm-up, when the multipliers move, early stopping, and what is saved."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny.data import batches, classification_data
from tiny.models import bert, llama
from tiny.oracles import naive_layer_losses
from tiny.training import InOrder, config, dual_step, trained
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_descent import DescentTrainer
from hf_descent.configs import DescentArguments
from hf_descent.constraints.state import DualState
from hf_descent.readout.replay import Readout
from hf_descent.runs import RunFolder
from hf_descent.training.objective import LayerObjective
from hf_descent.training.records import StepTotals


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


def test_fractional_warm_up_counts_all_steps(tmp_path):
    trainer = trained(
        bert(), config(tmp_path, max_steps=10, dual_warmup_steps=0.35), train_dataset=DATA
    )
    first = next(log["step"] for log in trainer.state.log_history if log.get("multiplier_1", 0) > 0)
    assert first == 5  # ceil(3.5) = 4 inactive steps


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"descent_alpha": 0.4, "initial_loss_bound": 0.9}, {}),
        ({"constrained_layers": [1, 3]}, {"negative_weights": "keep"}),
    ],
)
def test_fixed_multipliers_of_a_run_weigh_the_losses_of_another_under_its_constraints(
    tmp_path, given, own
):
    args = config(tmp_path / "constrained", dual_learning_rate=0.3, **given)
    constrained = trained(bert(), args, InOrder, train_dataset=DATA)
    constrained.save_model()
    args = config(
        tmp_path / "fixed",
        objective="fixed",
        fixed_multipliers=str(tmp_path / "constrained"),
        **own,
    )
    fixed = trained(bert(), args, InOrder, train_dataset=DATA)
    assert torch.equal(fixed.multipliers.values, constrained.multipliers.values)
    assert fixed.problem.state_dict() == constrained.problem.state_dict()
    weights = (
        constrained.problem.weights(constrained.multipliers.values)
        .clamp(min=-math.inf if own else 0)
        .tolist()
    )
    assert [fixed.state.log_history[0][f"weight_{layer}"] for layer in (1, 2, 3)] == pytest.approx(
        weights
    )


def test_the_dual_step_is_skipped_with_the_optimizers(tmp_path):
    class Overflow(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            trainer.optimizer._is_overflow = state.global_step in (2, 3)

    trainer = InOrder(
        bert(), config(tmp_path, dual_optim="sgd"), train_dataset=DATA, callbacks=[Overflow()]
    )
    trainer.train()
    values = [log["multiplier_1"] for log in trainer.state.log_history if "multiplier_1" in log]
    assert trainer.multipliers.steps == 4 and len(set(values)) == len(values)


@pytest.mark.parametrize("reads_held_out", [False, True])
def test_a_skipped_step_ends_the_warm_up_and_reads_held_out_rows(reads_held_out):
    """As the first steps of a float16 scaler; the losses of a skipped step do not count."""
    turns = []

    def read(layers, turn):
        turns.append(turn)
        return torch.tensor([0.6, 0.4, 0.2])

    held_out = SimpleNamespace(count=200, layer_losses=read) if reads_held_out else None
    args = DescentArguments(dual_warmup_steps=80, initial_loss_bound=0.7)
    dual = DualState(args, 3, 200, 0, 0.69, held_out=held_out)
    objective = LayerObjective(SimpleNamespace(num_layers=3), dual)

    for step in range(100):
        skips = step in (79, 96)
        losses = [9.0, 9.0, 9.0, 1.0] if skips else [0.6, 0.4, 0.2, 1.0]
        objective.dual_step(StepTotals(step, sums=torch.tensor(losses)), skipped=skips)

    assert dual.settled().warmup_losses.tolist() == pytest.approx([0.6, 0.4, 0.2])
    assert dual.settled().averages.means.tolist() == pytest.approx([0.6, 0.4, 0.2])
    assert turns == (list(range(13)) if reads_held_out else [])
    assert dual.multipliers.steps == (24 if reads_held_out else 19)


def test_a_non_finite_loss_skips_the_duals_and_is_reported_once(tmp_path, caplog, monkeypatch):
    # The loss counts its calls, of which a run for several layers makes one.
    monkeypatch.setattr(Readout, "check_batching", lambda *_: None)

    def poisoned(outputs, labels, num_items_in_batch=None):
        loss = F.cross_entropy(outputs["logits"], labels, reduction="mean")
        # The value alone is spoilt, so that the weights stay finite.
        return loss + float("nan") if trainer.state.global_step == 4 else loss

    args = config(tmp_path, max_steps=8, learning_rate=0.0, dual_optim="sgd")
    trainer = InOrder(bert(), args, train_dataset=DATA, compute_loss_func=poisoned)
    trainer.train()
    assert torch.isfinite(trainer.multipliers.values).all()
    assert caplog.text.count("was not finite") == 1
    assert trainer.state.global_step == 8 and trainer.multipliers.steps == 7


def shifted_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch


def test_auto_bound_of_a_loss_of_one_s_own_over_a_vocabulary(tmp_path):
    rows = torch.randint(600, (32, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = {
        "initial_loss_bound": "auto",
        "dual_warmup_steps": 2,
        "max_steps": 3,
        "readout_token_fraction": 1.0,
    }

    def run(loss):
        return trained(
            llama(vocab_size=600),
            config(tmp_path, **args),
            InOrder,
            train_dataset=data,
            compute_loss_func=loss,
        )

    bounds = [run(loss).problem.initial_loss_bound for loss in (None, shifted_loss)]
    assert bounds[0] == bounds[1] == pytest.approx(math.log(600), rel=0.05)
    with pytest.raises(ValueError, match="measured for a loss that is no cross-entropy"):
        run(lambda *given, **items: shifted_loss(*given, **items) ** 2)


def test_a_layer_without_weight_cannot_spoil_the_objective(tmp_path):
    state = DualState(config(tmp_path, constrained_layers=[1, 3]), 3, 6, 0)
    assert state.objective_at(0).value(torch.tensor([1.0, math.inf, 0.5]), torch.ones(())) == 0.5


def test_auto_is_known_from_the_start_and_follows_the_loss_of_the_last_layer(tmp_path):
    args = config(
        tmp_path,
        descent_alpha="auto",
        initial_loss_bound=4.0,
        dual_warmup_steps=2,
        dual_optim="sgd",
    )
    logs = [
        log
        for log in trained(bert(), args, InOrder, train_dataset=DATA).state.log_history
        if "loss" in log
    ]
    average, values = 0.0, [0.0, 0.0]
    for step, log in enumerate(logs, start=1):
        average = 0.98 * average + 0.02 * log["loss"]
        level = average / (1 - 0.98**step)
        for layer in (1, 2):
            violation = log[f"layer_loss_{layer}"] - 4 * (level / 4) ** (0.5 * layer / 3)
            assert log[f"violation_{layer}"] == pytest.approx(violation, abs=1e-5)
            if step > 2:
                values[layer - 1] = max(0.0, values[layer - 1] + 0.02 * violation / 4)
            assert log[f"multiplier_{layer}"] == pytest.approx(values[layer - 1], abs=1e-6)
        assert "violation_3" not in log  # the last layer lies on the line


def test_early_stopping_does_not_end_a_run_whose_rows_are_not_met_yet(tmp_path):
    learned = trained(bert(), config(tmp_path, objective="erm", max_steps=60), train_dataset=DATA)
    # Nothing changes any more: one row is met at once, so that patience runs out, and one never.
    for targets, steps in (({"exit_targets": {1: 1.0}}, 6), ({"loss_targets": {1: 1e-6}}, 12)):
        args = config(
            tmp_path, max_steps=12, descent_alpha=None, eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, load_best_model_at_end=True, metric_for_best_model="feasible_score", learning_rate=0.0,
            **targets,
        )  # fmt: skip
        stopping = [EarlyStoppingCallback(early_stopping_patience=2)]
        trainer = trained(
            learned.model, args, train_dataset=DATA, eval_dataset=DATA, callbacks=stopping
        )
        assert trainer.state.global_step == steps


@pytest.mark.parametrize("held_out", [False, True])
def test_the_closing_report_is_about_the_last_tenth_of_the_run_to_the_step(
    tmp_path, caplog, held_out
):
    """Losses that fall from step to step; constraints act in the last 7 % of the second run only."""
    losses = (
        torch.rand(400, 3, generator=torch.Generator().manual_seed(0))
        + torch.linspace(3, 1, 400)[:, None]
    )

    class Rows:
        count = 200

        def layer_losses(self, layers, turn):
            return losses[8 * turn]

    for warm_up, first in ((0, 360), (372, 372)):
        args = config(
            tmp_path, descent_alpha=None, loss_targets={2: 0.5}, dual_warmup_steps=warm_up, initial_loss_bound=4.0,
        )  # fmt: skip
        state = DualState(args, 3, 400, 0, held_out=Rows() if held_out else None)
        for step in range(400):
            dual_step(state, losses[step], step)
        steps = [step for step in range(first, 400) if not held_out or step % 8 == 0]
        reached = losses[steps].mean(0)[1].item()
        assert state.report()["train_max_violation"] == pytest.approx(reached - 0.5, rel=1e-5)
        data = "batches of held-out examples" if held_out else "training batches"
        is_too_few = len(steps) <= 5  # to say that f_L is below chance
        told = "f_L is not clearly below chance" if is_too_few else "NOT every constraint"
        assert f"On the last {len(steps)} {data} {told}" in caplog.text
        advice = caplog.records[-1].message.splitlines()[-1]
        assert (advice == "These steps are too few to tell.") == is_too_few
        assert f"bound_2              0.5{reached:>12.4g}           0" in caplog.text
        resumed = DualState(args, 3, 400, 0, held_out=Rows() if held_out else None)
        resumed.load_state_dict(*state.state_dict())
        assert resumed.report() == state.report()


def test_a_run_too_short_for_its_constraints_is_not_advised_to_ask_for_less(tmp_path, caplog):
    """The mean f_L is above f_0 to the end, so that nothing was asked of layer 1."""
    state = DualState(config(tmp_path, descent_alpha=None, initial_loss_bound=1.0), 2, 100, 0)
    for step in range(100):
        losses = [0.9, 0.5] if step >= 80 else [20.0, 20.0]
        dual_step(state, torch.tensor(losses), step)
    state.report()
    assert "NOT every constraint" in caplog.text
    assert caplog.records[-1].message.endswith("no constraint acts yet: train longer.")


def test_the_advice_is_about_layers_at_chance_before_it_is_about_targets(tmp_path, caplog):
    args = config(tmp_path, descent_alpha=None, exit_targets={2: 0.1}, dual_warmup_steps=0)
    state = DualState(args, 3, 100, 0, chance=1.0)
    for step in range(100):
        dual_step(state, torch.tensor([1.0, 1.0, 0.3]), step)

    state.report("Read all tokens.")
    message = caplog.records[-1].message
    assert message.endswith("Constrained layers are at chance. Read all tokens.")
    assert "descent share" not in message  # nothing was asked of it

    state.report()
    assert "Constrained layers are at chance. Ask for less" in caplog.records[-1].message


def test_held_out_losses_that_are_not_finite_are_said_to_move_nothing(tmp_path, caplog):
    class Rows:
        def layer_losses(self, layers, turn):
            return torch.tensor([1.0, math.nan, 0.5])

    args = config(tmp_path, descent_alpha=None, loss_targets={2: 0.1}, dual_warmup_steps=0)
    state = DualState(args, 3, 100, 0, held_out=Rows())
    for step in range(9):
        dual_step(state, torch.tensor([1.0, 0.9, 0.5]), step)
    state.logs(9)
    assert "The loss of layer 2 was not finite; such losses do not move" in caplog.text
    assert not state.multipliers.values.any()


def test_a_run_whose_constraints_never_act_has_no_closing_report(tmp_path, caplog):
    state = DualState(config(tmp_path, dual_warmup_steps=50), 3, 20, 0)
    for step in range(20):
        dual_step(state, torch.ones(3), step)
    assert state.report() == {} and "constraint  " not in caplog.text


def test_a_multiplier_of_zero_is_not_said_to_rise(tmp_path, caplog):
    state = DualState(
        config(tmp_path, descent_alpha=None, loss_targets={1: 0.5}, dual_warmup_steps=99), 3, 109, 0
    )
    for step in range(
        109
    ):  # met since the multipliers move, but not by the mean over the last 50 steps
        dual_step(state, torch.full((3,), 0.9 if step < 99 else 0.4), step)
    assert not state.multipliers.values.any() and not caplog.text


@pytest.mark.parametrize("settings", [{}, {"descent_alpha": "auto", "initial_loss_bound": "auto"}])
def test_a_run_with_fixed_weights_is_judged_by_the_same_rows(tmp_path, settings):
    args = config(tmp_path, objective="deep_supervision", dual_warmup_steps=2, **settings)
    trainer = trained(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
    assert {"eval_feasible", "eval_max_violation", "eval_largest_rise"} <= trainer.evaluate().keys()
    assert (
        "train_max_violation" in trainer.state.log_history[-2]
        and not trainer.multipliers.values.any()
    )


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        (
            {
                "objective": "deep_supervision",
                "penalty_coefficient": 0.4,
                "constrained_layers": [2],
            },
            lambda f: 0.4 * f[1] + f[3],
        ),
    ],
)
def test_a_step_on_fixed_weights_is_one_on_their_sum_written_out(tmp_path, settings, objective):
    args = config(
        tmp_path, max_steps=1, optim="sgd", learning_rate=0.1, max_grad_norm=0.0, **settings
    )
    trainer, model = InOrder(bert(num_layers=4), args, train_dataset=DATA), bert(num_layers=4)
    trainer.train()
    losses = naive_layer_losses(model, next(batches(DATA)))
    objective(losses).backward()
    for after, parameter in zip(trainer.model.parameters(), model.parameters()):
        torch.testing.assert_close(after, parameter - 0.1 * parameter.grad)
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(losses[-1].item(), rel=1e-4)
    if (
        settings["objective"] == "deep_supervision"
    ):  # what is logged of a curriculum is that of the next step
        assert [logged[f"weight_{layer}"] for layer in (1, 2, 3, 4)] == pytest.approx(
            [0, 0.4, 0, 1]
        )


@pytest.mark.parametrize(
    ("alpha", "match"), [([0.1, 0.2], "has 2 values"), ("auto", "layer 1 has no gradient")]
)
def test_auto_does_not_put_off_the_checks_to_the_end_of_warm_up(tmp_path, alpha, match):
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    args = config(tmp_path, descent_alpha=alpha, initial_loss_bound="auto", dual_warmup_steps=4)
    trainer = DescentTrainer(model, args, train_dataset=DATA)
    with pytest.raises(ValueError, match=match):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("objective", ["erm", "descent"])
def test_numbers_of_any_kind_can_be_saved(tmp_path, objective):
    numbers = {
        "weight_decay": np.float32(0.5), "num_train_epochs": np.int64(1), "learning_rate": torch.tensor(0.25),
        "max_grad_norm": np.float32(2), "max_steps": np.int64(-1),
    }  # fmt: skip
    args = config(tmp_path, objective=objective, save_strategy="steps", save_steps=1, **numbers)
    trained(bert(), args, train_dataset=DATA[:16]).save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        saved = RunFolder(folder).summary["arguments"]
        assert {name: saved[name] for name in numbers} == numbers


def test_what_cannot_be_written_leaves_the_summary_before_it_whole(tmp_path):
    RunFolder(tmp_path).write_summary({"seed": 1})
    with pytest.raises(TypeError):
        RunFolder(tmp_path).write_summary({"seed": 2, "command": object()})
    assert RunFolder(tmp_path).summary["seed"] == 1


def test_a_warm_up_longer_than_the_run_is_said(tmp_path, caplog):
    DescentTrainer(bert(), config(tmp_path, dual_warmup_steps=500), train_dataset=DATA).train()
    assert "never act" in caplog.text
