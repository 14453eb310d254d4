"""Which checkpoint is kept: the rule's definition on small cases, and in a real run."""

import pytest
from tiny.data import classification_data, language_data
from tiny.models import bert, llama, spread
from tiny.training import config, trained
from transformers import TrainerCallback

from hf_descent import DescentTrainer
from hf_descent.evaluation import Certificate, LayerProfile
from hf_descent.training.records import VERDICT_NAME


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


STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}


def spoiled(folder, **settings):
    """A trainer whose best model is that of an early step: at such a rate training only spoils the model."""
    args = config(folder, max_steps=6, learning_rate=0.5, **STEPS, **settings)
    held_out = classification_data(40, seed=5)
    return DescentTrainer(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=held_out)


def loss_of_step(trainer, name, step):
    logs = [log for log in trainer.state.log_history if name in log]
    return next(log[name] for log in logs if log["step"] == step)


@pytest.mark.parametrize("objective", ["descent", "erm"])
def test_a_run_resumed_after_its_best_step_ends_with_the_verdict_of_that_step(tmp_path, objective):
    settings = {"load_best_model_at_end": True, "objective": objective, "descent_alpha": "line"}
    spoiled(tmp_path, **settings).train()
    trainer = spoiled(tmp_path, **settings)
    trainer.train(str(tmp_path / "checkpoint-4"))
    best = trainer.state.best_global_step
    assert best == 2

    trainer.create_model_card()
    verdict = Certificate.from_json(str(tmp_path / "verdict.json"))
    assert verdict.losses[-1] == pytest.approx(loss_of_step(trainer, "eval_loss", best), rel=1e-6)


class MeasureAfter(TrainerCallback):
    """Measures layers and noise after the steps that are given."""

    def __init__(self, *steps):
        self.steps = steps
        self.profiles = {}

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            self.profiles[state.global_step] = self.trainer.evaluate_layers()
            self.trainer.evaluate_robustness(gammas=[0, 1])
            self.trainer.create_model_card()  # as TRL does at a checkpoint


@pytest.mark.parametrize(
    ("settings", "steps", "kept"),
    [
        pytest.param({}, [2], None, id="the last model"),
        pytest.param({}, [2, 6], 6, id="the last model, measured"),
        pytest.param({"load_best_model_at_end": True}, [2], 2, id="the best model, measured"),
        pytest.param({"load_best_model_at_end": True}, [3], None, id="the best model"),
        pytest.param({"load_best_model_at_end": True}, [6], None, id="the best model and the last"),
    ],
)
def test_a_card_shows_what_was_measured_of_the_weights_alone(tmp_path, settings, steps, kept):
    trainer = spoiled(tmp_path, **settings)
    measure = MeasureAfter(*steps)
    measure.trainer = trainer
    trainer.add_callback(measure)
    trainer.train()
    best = trainer.state.best_global_step
    assert best == 2 or not settings

    trainer.create_model_card()
    assert (tmp_path / "noise_curve.json").exists() == (kept is not None)
    assert (tmp_path / "layer_profile.json").exists() == (kept is not None)
    if kept is not None:
        profile = LayerProfile.from_json(str(tmp_path / "layer_profile.json"))
        assert profile.losses.tolist() == measure.profiles[kept].losses.tolist()

    now = trainer.evaluate_layers()
    trainer.create_model_card()
    profile = LayerProfile.from_json(str(tmp_path / "layer_profile.json"))
    assert profile.losses.tolist() == now.losses.tolist()


def test_a_run_resumed_at_its_end_has_the_verdict_of_its_last_evaluation(tmp_path):
    spoiled(tmp_path).train()
    trainer = spoiled(tmp_path)
    trainer.train(str(tmp_path / "checkpoint-6"))
    trainer.create_model_card()
    verdict = Certificate.from_json(str(tmp_path / "verdict.json"))
    assert verdict.losses[-1] == pytest.approx(loss_of_step(trainer, "eval_loss", 6), rel=1e-6)


def test_a_checkpoint_that_was_not_evaluated_has_no_verdict_of_an_earlier_step(tmp_path):
    args = config(
        tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=1
    )  # fmt: skip
    trained(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=DATA)
    found = [(tmp_path / f"checkpoint-{step}" / VERDICT_NAME).exists() for step in range(1, 5)]
    assert found == [False, True, False, True]


@pytest.mark.parametrize("chosen", ["a", "a_b", "b", "same_as_a"])
def test_the_verdict_is_on_the_evaluation_set_that_chooses_the_model(tmp_path, chosen):
    sets = {name: classification_data(40, seed=seed) for seed, name in enumerate(("a", "a_b", "b"))}
    sets["same_as_a"] = sets["a"]
    args = config(
        tmp_path, max_steps=4, load_best_model_at_end=True, metric_for_best_model=f"{chosen}_loss",
        **STEPS,
    )  # fmt: skip
    trainer = trained(bert(num_layers=2), args, train_dataset=DATA, eval_dataset=sets)

    def data_of_verdict():
        trainer.create_model_card()
        return Certificate.from_json(str(tmp_path / "verdict.json")).data_name

    assert data_of_verdict() == f"eval_{chosen}"
    trainer.evaluate()
    assert data_of_verdict() == f"eval_{chosen}"
    for name in sets:  # asked for by itself
        trainer.evaluate(sets[name], metric_key_prefix=name)
        assert data_of_verdict() == name


def test_an_evaluation_before_the_first_step_reads_the_tokens_of_later_ones(tmp_path):
    args = config(
        tmp_path, max_steps=1, learning_rate=0.0, eval_on_start=True, eval_strategy="steps",
        eval_steps=1, readout_token_fraction=0.25,
    )  # fmt: skip
    rows = language_data(24)
    trainer = trained(spread(llama()), args, train_dataset=rows, eval_dataset=rows)
    logs = [log for log in trainer.state.log_history if "eval_layer_loss_1" in log]
    assert [log["step"] for log in logs] == [0, 1]
    for name in ("eval_layer_loss_1", "eval_layer_loss_2"):
        assert logs[0][name] == logs[1][name]
    assert logs[1]["eval_layer_loss_1"] != trainer.evaluate()["eval_layer_loss_1"]
