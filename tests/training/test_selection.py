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
    ("objective", "held_out", "metric"),
    [
        *(("erm", DATA, metric) for metric in ("feasible_score", "layer_loss_2", "max_violation")),
        ("descent", {"a": DATA, "b": DATA}, "eval_max_violation"),
    ],
)
def test_a_choice_by_what_no_evaluation_has_is_refused_before_the_first_step(
    tmp_path, objective, held_out, metric
):
    trainer = choosing_trainer(tmp_path, metric, held_out, objective=objective)
    with pytest.raises(
        ValueError, match=f"`metric_for_best_model` is '{metric}', which evaluations need not have"
    ):
        trainer.train()
    assert trainer.state.global_step == 0


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
