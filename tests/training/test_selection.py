"""Which checkpoint is kept: the rule's definition on small cases, and in a real run."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny import bert, classification_data, config
from transformers import EarlyStoppingCallback

from hf_descent import DescentTrainer
from hf_descent.training.selection import best_candidate


def test_the_worse_rank_decides():
    # Ranks by loss 1 2 3 4, by violation 4 3 1 1: the worse ones are 4 3 3 4, and loss breaks the tie.
    assert best_candidate([0.1, 0.2, 0.3, 0.4], [0.5, 0.1, 0.0, -1.0]) == 1
    # Satisfied candidates share a rank, so that the loss alone decides among them.
    assert best_candidate([0.3, 0.1, 0.2], [-0.5, 0.0, -9.0]) == 1
    assert best_candidate([0.3], [1.0]) == 0
    # One that diverged does not change which of the others is best.
    for loss, violation in ((float("nan"), 0.0), (0.05, float("nan")), (float("inf"), float("inf"))):
        assert best_candidate([loss, 0.4, 0.2, 0.3], [violation, 0.0, 0.0, 0.0]) == 2
    with pytest.raises(ValueError, match="give"):
        best_candidate([0.1, 0.2], [0.1])


def test_a_run_keeps_the_best_candidate(tmp_path):
    data = classification_data(32)
    args = config(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="best_candidate", greater_is_better=False,
        dual_learning_rate=1.0, learning_rate=0.05,
    )  # fmt: skip
    trainer = DescentTrainer(bert(num_layers=2), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    losses, violations = ([entry[name] for entry in evaluations] for name in ("eval_loss", "eval_max_violation"))
    best = best_candidate(losses, violations) + 1
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best - 1], rel=1e-5)
    assert np.unique(losses).size > 1


@pytest.mark.parametrize("save_strategy", ["best", "steps"])
def test_the_best_candidate_is_loaded_where_it_changes_backwards(tmp_path, save_strategy):
    table = {2: (0.5, 0.3), 4: (0.4, 0.5), 6: (0.6, 0.4)}  # the second is best of two, the first of all three

    class Measured(DescentTrainer):
        def evaluate(self, *args, **kwargs):
            loss, violation = table[self.state.global_step]
            self.log(metrics := {"eval_loss": loss, "eval_max_violation": violation, "eval_feasible": 0.0})
            return metrics

    args = config(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy=save_strategy, save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="best_candidate", greater_is_better=False,
    )  # fmt: skip
    trainer = Measured(
        bert(num_layers=2), args, train_dataset=classification_data(48), eval_dataset=classification_data(8)
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(value.equal(saved[name]) for name, value in trainer.model.state_dict().items() if name in saved)


def test_the_least_violation_is_chosen_among_those_that_are_known(tmp_path):
    args = config(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="max_violation", descent_alpha="auto", dual_warmup_steps=3,
    )  # fmt: skip
    data = classification_data(32)
    trainer = DescentTrainer(bert(), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    logs = {log["step"]: log for log in trainer.state.log_history if "eval_max_violation" in log}
    assert min(logs) == 3
    assert trainer.state.best_global_step == min(logs, key=lambda step: logs[step]["eval_max_violation"])


def test_early_stopping_needs_a_metric(tmp_path):
    args = config(tmp_path, eval_strategy="steps", eval_steps=1, metric_for_best_model="best_candidate")
    data = classification_data(8)
    trainer = DescentTrainer(bert(), args, train_dataset=data, eval_dataset=data, callbacks=[EarlyStoppingCallback(1)])
    with pytest.raises(ValueError, match="EarlyStoppingCallback needs a metric: choose by 'feasible_score'"):
        trainer.train()


def test_the_best_candidate_is_one_that_was_kept(tmp_path):
    """A rank may go back to a step whose checkpoint is gone."""
    found = iter([(0.8, 0.2), (0.6, 0.1), (0.9, 0.5), (0.3, 0.4), (0.8, 0.6), (0.5, 0.6)])

    class Scripted(DescentTrainer):
        def evaluation_loop(self, *args, **kwargs):
            output = super().evaluation_loop(*args, **kwargs)
            output.metrics["eval_loss"], output.metrics["eval_max_violation"] = next(found)
            return output

    data = classification_data(16)
    args = config(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="best_candidate", save_total_limit=2,
    )  # fmt: skip
    trainer = Scripted(bert(num_layers=2), args, train_dataset=data, eval_dataset=data)
    trainer.train()
    state = trainer.state
    assert state.best_model_checkpoint.endswith(f"checkpoint-{state.best_global_step}")
    kept = load_file(f"{state.best_model_checkpoint}/model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in trainer.model.state_dict().items() if name in kept)


def test_patience_with_feasibility_does_not_run_out_in_warm_up(tmp_path):
    data = classification_data(32)
    args = config(
        tmp_path, descent_alpha="auto", initial_loss_bound="auto", dual_warmup_steps=8, max_steps=10,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="feasible_score",
    )  # fmt: skip
    stopping = EarlyStoppingCallback(2)
    trainer = DescentTrainer(bert(), args, train_dataset=data, eval_dataset=data, callbacks=[stopping])
    trainer.train()
    assert trainer.problem is not None and trainer.state.best_global_step >= 8


DATA = classification_data(16)
WITHOUT_LABELS = [{name: value for name, value in row.items() if name != "labels"} for row in DATA]


def choosing_trainer(tmp_path, metric, held_out, **settings):
    args = config(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, metric_for_best_model=metric, **settings)
    return DescentTrainer(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=held_out)


@pytest.mark.parametrize(
    ("objective", "held_out", "metric", "match"),
    [
        *(("erm", DATA, metric, "'erm'` reads no layers: choose by the loss")
          for metric in ("feasible_score", "eval_best_candidate", "layer_loss_2", "max_violation")),
        ("erm", {"a": DATA, "b": DATA}, "a_feasible_score", "reads no layers"),
        ("descent", {"a": DATA, "b": DATA}, "eval_max_violation", "choose by 'a_max_violation' or 'b_max_violation'"),
        ("descent", {"a": DATA}, "best_candidate", "choose by 'a_feasible_score', or give one `eval_dataset`"),
    ],
)  # fmt: skip
def test_a_choice_by_what_no_evaluation_has_is_refused_before_the_first_step(
    tmp_path, objective, held_out, metric, match
):
    trainer = choosing_trainer(tmp_path, metric, held_out, objective=objective)
    with pytest.raises(ValueError, match=f"`metric_for_best_model` is '{metric}'.*{match}"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_metric_of_one_s_own_may_end_as_those_of_layers_do(tmp_path):
    trainer = choosing_trainer(tmp_path, "share_feasible", DATA, objective="erm")
    trainer.compute_metrics = lambda prediction: {"share_feasible": 0.5}
    trainer.train()
    assert trainer.state.best_metric == 0.5


def test_a_choice_is_judged_by_what_a_trial_makes_of_the_settings(tmp_path):
    pytest.importorskip("optuna")
    trainer = choosing_trainer(tmp_path, "a_feasible_score", {"a": DATA, "b": DATA}, objective="erm")
    trainer.model_init = lambda: bert(num_layers=2)
    best = trainer.hyperparameter_search(
        lambda trial: {"objective": "descent"}, lambda metrics: metrics["eval_a_feasible_score"], n_trials=1
    )
    assert best.objective == trainer.state.best_metric


def test_a_run_without_candidates_says_so(tmp_path):
    with pytest.raises(ValueError, match="has no `eval_max_violation`: give an `eval_dataset` with labels"):
        choosing_trainer(tmp_path, "best_candidate", WITHOUT_LABELS).train()
