"""Which checkpoint is kept: the rule's definition on small cases, and in a real run."""

import pytest
from tiny import bert, classification_data, config, trained

from hf_descent import DescentTrainer


def test_the_least_violation_is_chosen(tmp_path):
    args = config(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, metric_for_best_model="max_violation", descent_alpha="auto", dual_warmup_steps=3,
    )  # fmt: skip
    data = classification_data(32)
    trainer = trained(bert(), args, train_dataset=data, eval_dataset=data)
    logs = {log["step"]: log for log in trainer.state.log_history if "eval_max_violation" in log}
    assert trainer.state.best_global_step == min(
        logs, key=lambda step: logs[step]["eval_max_violation"]
    )


DATA = classification_data(16)


def choosing_trainer(tmp_path, metric, held_out, **settings):
    args = config(
        tmp_path,
        max_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model=metric,
        **settings,
    )
    return DescentTrainer(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=held_out)


@pytest.mark.parametrize(
    ("objective", "metric"),
    [("descent", "eval_max_violation"), ("descent", "loss"), ("erm", "loss"), ("erm", "accuracy")],
)
def test_a_choice_between_several_evaluation_sets_names_one_before_the_first_step(
    tmp_path, objective, metric
):
    trainer = choosing_trainer(tmp_path, metric, {"a": DATA, "b": DATA}, objective=objective)
    name = metric.removeprefix("eval_")
    with pytest.raises(
        ValueError, match=f"`metric_for_best_model` is '{metric}'.*sets a, b.*such as 'a_{name}'"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_best_model_of_several_evaluation_sets_needs_a_metric(tmp_path):
    sets = {"a": DATA, "b": DATA}
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args = config(tmp_path, max_steps=1, load_best_model_at_end=True, **steps)
    trainer = DescentTrainer(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=sets)
    with pytest.raises(ValueError, match="`metric_for_best_model` is 'loss'.*'a_loss'"):
        trainer.train()
    assert trainer.state.global_step == 0
    args.metric_for_best_model = "eval_b_loss"
    trainer.train()
    assert trainer.state.best_global_step == 1


class Averaging(DescentTrainer):
    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        return dict(metrics, eval_loss=0.5)


def test_a_trainer_may_make_one_metric_of_several_sets(tmp_path):
    args = config(tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1)
    args.metric_for_best_model = "loss"
    args.greater_is_better = False
    sets = {"a": DATA, "b": DATA}
    trainer = Averaging(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=sets)
    trainer.train()
    assert trainer.state.best_metric == 0.5


def test_a_metric_of_one_s_own_may_end_as_those_of_layers_do(tmp_path):
    trainer = choosing_trainer(tmp_path, "share_feasible", DATA, objective="erm")
    trainer.compute_metrics = lambda prediction: {"share_feasible": 0.5}
    trainer.train()
    assert trainer.state.best_metric == 0.5


def test_a_choice_is_judged_by_what_a_trial_makes_of_the_settings(tmp_path):
    pytest.importorskip("optuna")
    trainer = choosing_trainer(
        tmp_path, "a_feasible_score", {"a": DATA, "b": DATA}, objective="erm"
    )
    trainer.model_init = lambda: bert(num_layers=2)
    best = trainer.hyperparameter_search(
        lambda trial: {"objective": "descent"},
        lambda metrics: metrics["eval_a_feasible_score"],
        n_trials=1,
    )
    assert best.objective == trainer.state.best_metric
