"""The problem that a model is judged by."""

from types import SimpleNamespace

import numpy as np
import pytest
from tiny.data import classification_data
from tiny.models import bert, spread
from tiny.training import config, trained

from hf_descent import DescentProblem, DescentTrainer, layer_profile
from hf_descent.constraints.objectives import OBJECTIVES
from hf_descent.evaluation import LayerProfile
from hf_descent.losses.chance import entropy
from hf_descent.runs import RunFolder


DATA = classification_data(420)
FRESH = classification_data(300, seed=1)
TRAIN = classification_data(200, pad=False)
HELD_OUT = classification_data(80, seed=1, pad=False)


def f_0_of(rows):
    """The loss of guessing the labels by their frequencies."""
    return entropy(np.bincount([row["labels"] for row in rows]))


# ---- what the arguments state, whatever trains the model ----

EXITS = {"exit_targets": {1: 0.5, 2: 0.25}}
CASES = [
    *((objective, EXITS) for objective in OBJECTIVES),
    ("erm", {"loss_targets": {2: 0.9}}),
    ("erm", {"descent_alpha": "steps", "descent_strength": 0.4}),
    *((objective, {}) for objective in OBJECTIVES[:4]),
]


def stated(asked, bound):
    """The problem that training arguments state for three layers, with this f_0."""
    descends_by_itself = "line" if not asked else None
    return DescentProblem(
        alpha=asked.get("descent_alpha", descends_by_itself),
        initial_loss_bound=bound,
        num_layers=3,
        chance_loss=bound,
        descent_strength=asked.get("descent_strength", 0.5),
        exit_targets=asked.get("exit_targets"),
        loss_targets=asked.get("loss_targets"),
    )


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{list(case[1])}")
def judged(request, tmp_path_factory):
    """A model of one objective, its verdict, and the one that the stated problem gives it."""
    objective, asked = request.param
    settings = {"descent_alpha": None, **asked}
    if objective == "fixed":
        settings["fixed_multipliers"] = [0.1] * stated(asked, 1.0).num_rows
    args = config(
        tmp_path_factory.mktemp("judged"),
        objective=objective,
        max_steps=20,
        initial_loss_bound="auto",
        per_device_eval_batch_size=8,
        **settings,
    )
    trainer = trained(bert(), args, train_dataset=TRAIN, eval_dataset=HELD_OUT)
    metrics = trainer.evaluate()
    found = trainer.evaluate_layers().certificate()
    trainer.save_model()

    problem = stated(asked, f_0_of(TRAIN))
    profile = layer_profile(trainer.model, HELD_OUT, batch_size=8, problem=problem)
    return SimpleNamespace(
        objective=objective,
        asked=asked,
        metrics=metrics,
        found=found,
        problem=problem,
        expected=profile.certificate(),
        saved=DescentProblem.saved_in(RunFolder(args.output_dir).summary),
    )


def test_the_same_script_gets_the_same_verdict_whatever_its_objective(judged):
    assert judged.found.rows == judged.expected.rows
    assert judged.found.verdicts == judged.expected.verdicts
    np.testing.assert_allclose(judged.found.asked, judged.expected.asked, rtol=1e-4)
    np.testing.assert_allclose(judged.found.reached, judged.expected.reached, rtol=1e-4)


def test_a_verdict_has_the_multipliers_of_what_has_some(judged):
    has_multipliers = judged.found.multipliers is not None
    assert has_multipliers == (judged.objective in ("descent", "fixed"))


def test_an_evaluation_says_whether_the_stated_problem_is_met(judged):
    if judged.objective == "erm" and not judged.asked:
        assert not any("layer" in name or "feasible" in name for name in judged.metrics)
        return

    assert judged.metrics["eval_feasible"] == judged.expected.feasible
    violation = judged.metrics["eval_max_violation"]
    assert violation == pytest.approx(judged.expected.max_violation, abs=1e-4)


def test_the_stated_problem_is_saved(judged):
    assert judged.saved.rows == judged.problem.rows
    assert judged.saved.initial_loss_bound == pytest.approx(judged.problem.initial_loss_bound)


def test_plain_training_is_judged_where_nothing_was_evaluated_before(tmp_path):
    args = config(
        tmp_path,
        objective="erm",
        descent_alpha=None,
        initial_loss_bound="auto",
        exit_targets={1: 0.5},
    )
    trainer = trained(bert(), args, train_dataset=TRAIN, eval_dataset=HELD_OUT)
    assert trainer.evaluate_layers().certificate().rows == ["exit_1"]
    assert trainer.problem.chance_loss == pytest.approx(f_0_of(TRAIN))


def test_targets_of_layers_that_the_model_has_not_are_refused_for_plain_training_too(tmp_path):
    with pytest.raises(ValueError, match="`exit_targets`.*layers 1 to 2"):
        DescentTrainer(bert(), config(tmp_path, objective="erm", exit_targets={3: 0.1}))


def test_targets_that_cannot_be_judged_are_told(tmp_path, caplog):
    def custom(outputs, labels, num_items_in_batch=None):
        return outputs.logits.square().mean()

    args = config(tmp_path, objective="erm", initial_loss_bound="auto", exit_targets={1: 0.1})
    trainer = DescentTrainer(bert(), args, eval_dataset=HELD_OUT, layer_loss_fn=custom)
    trainer.evaluate()
    assert "targets are not judged" in caplog.text


# ---- the rows that it is judged on ----


def test_a_model_that_is_only_evaluated_is_judged_by_each_set_alone(tmp_path):
    """f_0 is that of the set's own labels, whichever came first."""
    of_class = [[row for row in FRESH if row["labels"] == label] for label in (0, 1)]
    sets = {"balanced": FRESH, "skewed": [*of_class[0], *of_class[1][:5]]}
    args = config(tmp_path, descent_alpha="line", initial_loss_bound="auto")

    def evaluated(*names):
        """Of each set in this order: its f_0 and its largest violation."""
        chosen = {name: sets[name] for name in names}
        trainer = DescentTrainer(spread(bert()), args, eval_dataset=chosen)
        found = {}
        for name in names:
            violation = trainer.evaluate(name)["eval_max_violation"]
            found[name] = (trainer.problem.initial_loss_bound, violation)
        return found

    found = evaluated("balanced", "skewed")
    assert evaluated("skewed", "balanced") == found
    for name, rows in sets.items():
        assert found[name][0] == pytest.approx(f_0_of(rows))


@pytest.fixture(scope="module")
def trained_on_data(tmp_path_factory):
    args = config(tmp_path_factory.mktemp("run"), max_steps=4)
    return trained(bert(), args, train_dataset=DATA, eval_dataset=FRESH)


@pytest.mark.parametrize(("rows", "also_selected"), [(FRESH, False), (DATA, True)])
def test_a_profile_of_the_trainer_gives_the_verdict_that_its_card_has(
    tmp_path, trained_on_data, rows, also_selected
):
    profile = trained_on_data.evaluate_layers(rows)
    profile.to_json(str(tmp_path / "profile.json"))
    read = LayerProfile.from_json(str(tmp_path / "profile.json"))
    for verdict in (profile.certificate(), read.certificate()):
        assert str(verdict) == str(trained_on_data._run.record.certificate)
        assert verdict.also_selected == also_selected
        assert verdict.multipliers == trained_on_data.multipliers.values.tolist()


def test_multipliers_of_other_constraints_are_not_those_of_a_verdict(tmp_path, trained_on_data):
    """Layer 1's is no multiplier of the exit at layer 1, nor the reverse."""
    exit_1 = DescentProblem(None, 1.0, 3, exit_targets={1: 0.5})
    verdict = trained_on_data.evaluate_layers(problem=exit_1).certificate()
    assert verdict.rows == ["exit_1"]
    assert verdict.multipliers is None

    args = config(tmp_path, max_steps=1, descent_alpha=None, exit_targets={1: 0.5})
    trainer = trained(bert(), args, train_dataset=DATA)
    layers = DescentProblem(0.3, 1.0, 3)
    assert trainer.evaluate_layers(FRESH, problem=layers).certificate().multipliers is None
