import logging
from types import SimpleNamespace

import pytest
import torch
from tiny.data import Stream, classification_data
from tiny.models import bert
from tiny.training import config, dual_step, trained, watch

from hf_descent import DescentTrainer
from hf_descent.constraints.state import DualState
from hf_descent.training.callbacks import show_messages, training_line
from hf_descent.training.checks import report_layers_at_chance


DATA = classification_data(32)


@pytest.mark.parametrize("data", [DATA, Stream(DATA)], ids=["sized", "stream"])
def test_slacks_start_afresh_with_every_pass_over_the_data(tmp_path, data):
    callback, seen = watch("on_step_end", lambda *_: trainer.multipliers.slack_moments.steps)
    args = config(tmp_path, max_steps=10, resilience=1.0, resilience_form="slack")
    trainer = DescentTrainer(bert(), args, train_dataset=data, callbacks=[callback])
    trainer.train()
    seen = dict(enumerate(seen, start=1))  # by step
    assert trainer.multipliers.slack_moments.steps == 2
    if data is not DATA:
        assert seen[5] == seen[9] == 1
    if data is DATA:  # of which the last step is known: a callback that saves there comes after
        assert seen[4] == seen[8] == 0 < seen[5]


def test_messages_are_shown_from_the_level_that_was_chosen_on(tmp_path, monkeypatch):
    logger = logging.getLogger("hf_descent")
    for name, value in (("level", logging.NOTSET), ("handlers", []), ("propagate", False)):
        monkeypatch.setattr(logger, name, value)
    for level, shown in (("passive", logging.INFO), ("error", logging.ERROR)):
        show_messages(config(tmp_path, log_level=level))
        assert logger.level == shown and len(logger.handlers) == 1


def test_the_console_shows_one_line_for_a_logging_step(tmp_path, capsys):
    args = config(tmp_path, max_steps=4, logging_steps=2, dual_warmup_steps=3)
    trainer = trained(bert(), args, train_dataset=DATA)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    logs = [log for log in trainer.state.log_history if "loss" in log]

    assert len(lines) == len(logs) == 2
    assert {"layer_loss_1", "violation_1", "multiplier_1"} <= logs[1].keys()  # for the trackers

    for line, log in zip(lines, logs, strict=True):
        violations = {layer: log[f"violation_{layer}"] for layer in (1, 2, 3)}
        behind = max(violations, key=violations.get)
        loss = log[f"layer_loss_{behind}"]
        limit = loss - violations[behind]
        assert f"step {log['step']}/4 | f_L {log['loss']:.3g} | " in line
        assert f"layer {behind}, loss {loss:.3g} (asked {limit:.3g})" in line
        assert ("multipliers" in line) == (log["step"] > 2)

    multipliers = [logs[1][f"multiplier_{layer}"] for layer in (1, 2, 3)]

    assert len({f"{value:.3g}" for value in multipliers}) == 1
    assert f"all multipliers {multipliers[0]:.3g}" in lines[1]
    assert f"acted on {logs[1]['max_acting_violation']:.3g}" in lines[1]


def test_the_line_of_a_penalty_names_no_multipliers(tmp_path, capsys):
    args = config(tmp_path, objective="hinge", max_steps=1, logging_steps=1, dual_warmup_steps=0)
    trained(bert(), args, train_dataset=DATA)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert "acted on" in line and "multiplier" not in line


@pytest.mark.parametrize(
    ("multipliers", "shown"),
    [([7.92], "multiplier 7.92"), ([0, 0], "all multipliers 0"), ([0, 7.92], "multipliers 0 to 7.92")],
)  # fmt: skip
def test_the_console_gives_one_number_where_there_is_one(multipliers, shown):
    logs = {"loss": 0.5, "max_acting_violation": 0.1, "learning_rate": 0.1}
    for layer, multiplier in enumerate(multipliers, start=1):
        logs[f"layer_loss_{layer}"] = 0.7
        logs[f"violation_{layer}"] = 0.2
        logs[f"multiplier_{layer}"] = multiplier
    assert f" | {shown} | lr 0.1" in training_line(logs, 1, 2)


def test_the_violation_that_training_acts_on_has_its_margin(tmp_path):
    args = config(
        tmp_path, max_steps=2, logging_steps=2, descent_alpha=None, loss_targets={2: 1.0}, target_margin=0.25,
        dual_warmup_steps=0,
    )  # fmt: skip
    trainer = trained(bert(), args, train_dataset=DATA)
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    assert log["max_violation"] == pytest.approx(log["layer_loss_2"] - 1)
    assert log["max_acting_violation"] == pytest.approx(log["layer_loss_2"] - 0.75)
    assert training_line(log, 2, 2).count("|") == 5


@pytest.mark.parametrize(
    ("violation", "expected"),
    [
        (-0.02, "nearest to what it is asked: layer 2, loss 0.321 (asked 0.341)"),
        (0.019, "furthest behind: layer 2, loss 0.321 (asked 0.302)"),
    ],
)
def test_the_line_of_a_step_names_a_loss_and_its_limit(violation, expected):
    logs = {"loss": 0.3, "layer_loss_1": 0.5, "layer_loss_2": 0.321}
    violations = {"violation_1": -0.1, "violation_exit_2": violation}
    assert f" | {expected}" in training_line({**logs, **violations}, 1, 2)


def test_the_line_of_held_out_examples_has_their_loss_and_their_limit(tmp_path):
    """Training learns its rows by heart; violations are those of rows that it does not see."""
    held_out = [{**row, "labels": i % 3} for i, row in enumerate(classification_data(200, seed=3))]
    args = config(
        tmp_path, descent_alpha=None, loss_targets={1: 0.5}, max_steps=8, learning_rate=2e-2
    )
    trainer = DescentTrainer(
        bert(), args, train_dataset=classification_data(8), dual_dataset=held_out
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "violation_bound_1" in log]
    for log in logs:
        line = training_line(log, log["step"], 8)
        loss = log["dual_layer_loss_1"]
        assert f"layer 1, held-out loss {loss:.3g} (asked 0.5)" in line
    assert logs[-1]["layer_loss_1"] < 0.9 * logs[-1]["dual_layer_loss_1"]


@pytest.mark.parametrize("logs", [{}, {"eval_loss": 1.0}, {"loss": 1.0}, {"train_runtime": 1.0}])
def test_logs_without_constraints_are_printed_as_they_are(logs):
    assert training_line(logs, 1, 2) is None


def test_layers_that_stay_at_chance_are_said_whenever_it_happens(tmp_path, caplog):
    """The last layer learns late: long after the warm-up, and a tenth of the run."""
    readout = SimpleNamespace(readout=None, model=bert())
    args = config(tmp_path, descent_alpha="line", dual_warmup_steps=5)
    state = DualState(args, 3, 100, 0, chance=1.0)
    with caplog.at_level(logging.INFO):
        for step in range(100):
            dual_step(state, torch.tensor([1.0, 1.0, 1.0 if step < 50 else 0.3]), step)
            report_layers_at_chance(readout, state, step + 1)
    (told,) = [record.message for record in caplog.records if "still at chance" in record.message]
    assert "After 51 steps 2 of 3 layers" in told and 'readout="mean"' in told
