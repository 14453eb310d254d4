"""Which evaluation a card shows, and what it says of the rows that were evaluated."""

import json
import re

import pytest
from cards import read, results_of, trained
from tiny.data import Stream, classification_data
from tiny.models import bert
from tiny.training import config
from tiny.training import trained as train

from hf_descent import DescentTrainer, cli
from hf_descent.early_exit import ExitProfile
from hf_descent.evaluation.certificates import ALSO_SELECTED
from hf_descent.hub.facts import collect
from hf_descent.runs import RunFolder


TRAIN = classification_data(16)
CHOSE = "chosen its checkpoint"  # what a card says of rows that did


def text_of(trainer):
    """The card that it writes now."""
    trainer.create_model_card()
    return read(RunFolder(trainer.args.output_dir).path)[1]


def verdict_of(trainer):
    trainer.create_model_card()
    return json.loads(RunFolder(trainer.args.output_dir).path.joinpath("verdict.json").read_text())


# ---- of this training alone ----


@pytest.fixture
def measured(tmp_path):
    """A trainer with results of all kinds, and a card."""
    trainer = trained(tmp_path, eval_gammas=[0, 1])
    trainer.evaluate_robustness()
    trainer.evaluate_layers()
    trainer.save_metrics("test", {"test_accuracy": 0.99})
    trainer.create_model_card(license="mit")
    return trainer


def test_a_result_whose_file_is_gone_is_no_longer_shown(tmp_path, measured):
    profile = ExitProfile("accuracy", [0.5, 0.6, 0.7], [1, 1, 1], [1, 2, 3], 8)
    profile.to_json(tmp_path / "exit_profile.json")
    cli.main(["card", str(tmp_path)])
    assert str(profile) in read(tmp_path)[1]

    (tmp_path / "exit_profile.json").unlink()
    cli.main(["card", str(tmp_path)])
    _, text = read(tmp_path)
    assert str(profile) not in text
    assert "layers.png" in text


@pytest.mark.parametrize("again", ["the same trainer", "another trainer"])
def test_what_a_former_training_left_is_not_said_of_this_model(tmp_path, measured, again):
    trainer = measured
    if again == "the same trainer":
        trainer.train()
    else:
        trainer = trained(tmp_path, learning_rate=0.02)

    trainer.create_model_card()
    card, text = read(tmp_path)
    assert card.data.eval_results is None
    assert "No evaluation was recorded" in text
    assert "![" not in text
    assert f"| `learning_rate` | {trainer.args.learning_rate} |" in text
    assert card.data.license == "mit"  # which people gave


@pytest.mark.usefixtures("measured")
def test_metrics_in_one_file_with_those_of_a_former_training_are_shown_alone(tmp_path):
    trainer = trained(tmp_path, learning_rate=0.02)
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})
    (tmp_path / "model_card.json").unlink()
    cli.main(["card", str(tmp_path)])
    assert results_of(read(tmp_path)[0]) == {"accuracy": 0.5}


@pytest.mark.parametrize("folder", ["run", "elsewhere"])
def test_a_trainer_that_only_evaluates_leaves_the_word_to_the_training(tmp_path, folder):
    trained(tmp_path / "run", learning_rate=0.03).create_model_card(tags="mine")
    settings = json.loads((tmp_path / "run/descent_config.json").read_text())

    model = type(bert()).from_pretrained(tmp_path / "run")
    rows = classification_data(8)
    trainer = DescentTrainer(model, config(tmp_path / folder), eval_dataset=rows)
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()

    assert json.loads((tmp_path / folder / "descent_config.json").read_text()) == settings
    card, text = read(tmp_path / folder)
    assert "| `learning_rate` | 0.03 |" in text
    assert results_of(card)["loss"] == pytest.approx(metrics["eval_loss"], rel=1e-3)
    assert ("mine" in card.data.tags) == (folder == "run")


# ---- metrics beside profiles and curves ----


@pytest.mark.parametrize(("factor", "shown"), [(1.0, True), (1.005, False)])
def test_metrics_are_shown_beside_a_profile_of_the_same_loss(tmp_path, factor, shown):
    trainer = trained(tmp_path, save_strategy="no")
    profile = trainer.evaluate_layers()
    RunFolder(tmp_path).write({"layer_profile": profile})
    loss = factor * float(profile.losses[-1])
    trainer.save_metrics("eval", {"eval_accuracy": 0.5, "eval_layer_loss_3": loss})
    assert bool(collect(tmp_path)["evaluation"]) == shown


@pytest.fixture
def profile_of_other_rows(tmp_path):
    """The folder of a run with a profile; its evaluation is of the same rows, its test of others."""
    trainer = trained(tmp_path, save_strategy="no")
    profile = trainer.evaluate_layers(classification_data(8, seed=9))
    RunFolder(tmp_path).write({"layer_profile": profile})
    loss = float(profile.losses[-1])
    metrics = {
        "eval": {"eval_accuracy": 0.25, "eval_layer_loss_3": loss},
        "test": {"test_accuracy": 0.75, "test_layer_loss_3": 2 * loss},
    }
    for split, values in metrics.items():
        (tmp_path / f"{split}_results.json").write_text(json.dumps(values))
    return tmp_path


def test_metrics_of_other_rows_do_not_hide_those_of_the_rows_of_the_profile(profile_of_other_rows):
    card = collect(profile_of_other_rows)
    assert card["split"] == "validation"
    assert card["evaluation"]["eval_accuracy"] == 0.25


def test_metrics_of_other_rows_alone_are_not_shown_beside_a_profile(profile_of_other_rows):
    (profile_of_other_rows / "eval_results.json").unlink()
    card = collect(profile_of_other_rows)
    assert card["split"] is None
    assert card["evaluation"] is None


def test_areas_are_those_of_the_newest_curve(tmp_path):
    trainer = trained(tmp_path, save_strategy="no", noise_sigma=1.0)
    curve = trainer.evaluate_robustness(gammas=[0, 2], gamma_train=None)
    RunFolder(tmp_path).write({"noise_curve": curve})
    metrics = {"eval_accuracy_auc": 0.4, "eval_accuracy_auc_ood": 0.3, "eval_roc_auc": 0.9}
    trainer.save_metrics("eval", metrics)

    found = collect(tmp_path)["evaluation"]
    assert found["eval_accuracy_auc"] == curve.auc
    assert found["eval_accuracy_auc_ood"] is None
    assert found["eval_roc_auc"] == 0.9  # of no curve


# ---- rows that chose the checkpoint ----


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """A trainer that went back to its best model; at such a rate training only spoils it."""
    args = config(
        tmp_path_factory.mktemp("best"),
        max_steps=6,
        learning_rate=0.5,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
    )
    rows = classification_data(16, seed=5)
    trainer = train(bert(), args, train_dataset=TRAIN, eval_dataset=rows)
    assert trainer.state.best_global_step < 6
    return trainer


@pytest.fixture(scope="module")
def best_card(best):
    """Card, text and verdict, before anything was measured after training."""
    best.create_model_card()
    folder = RunFolder(best.args.output_dir).path
    return *read(folder), json.loads((folder / "verdict.json").read_text())


def test_the_card_of_the_best_model_holds_that_model_s_evaluation(best, best_card):
    card, _, verdict = best_card
    loss = results_of(card)["loss"]
    assert loss == pytest.approx(best.evaluate()["eval_loss"], rel=1e-3)
    assert loss == pytest.approx(verdict["losses"][-1], rel=1e-3)


def test_a_card_says_that_the_rows_of_its_verdict_chose_the_model(best_card):
    _, text, verdict = best_card
    assert verdict["also_selected"]
    assert CHOSE in text


def test_a_card_says_what_the_rows_were_used_for(best, best_card):
    _, text, _ = best_card
    summary = RunFolder(best.args.output_dir).summary
    assert summary["train_rows"] == summary["select_rows"] == 16

    used_for = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))
    assert used_for["trained the weights"] == "16"
    assert used_for["moved the multipliers"] == "the same"
    assert used_for["evaluated in training, to choose by"] == "16"
    assert used_for["the verdict"] == "16 labels"


@pytest.mark.parametrize("measure", ["evaluate", "evaluate_layers"])
@pytest.mark.parametrize(
    ("rows", "chose"),
    [(classification_data(16, seed=6), False), (None, True)],
    ids=["rows of their own", "rows that chose"],
)
def test_the_newest_rows_are_those_that_a_card_speaks_of(best, measure, rows, chose):
    getattr(best, measure)(rows)
    assert (CHOSE in text_of(best)) == chose


CHOSEN_BY = classification_data(32, seed=5)
OTHERS = classification_data(32, seed=6)


@pytest.mark.parametrize(
    ("rows", "strategy", "chose"),
    [
        (list(CHOSEN_BY), "steps", True),
        (CHOSEN_BY[:9], "steps", True),
        ([*OTHERS, CHOSEN_BY[0]], "steps", True),
        (OTHERS, "steps", False),
        (list(CHOSEN_BY), "no", False),
    ],
    ids=["all", "some", "one among others", "none", "no evaluations"],
)
def test_rows_of_evaluations_in_training_are_told_by_what_is_in_them(
    tmp_path, rows, strategy, chose
):
    args = config(tmp_path, max_steps=1, eval_strategy=strategy, eval_steps=1)
    trainer = train(bert(), args, train_dataset=TRAIN, eval_dataset=CHOSEN_BY)
    for measure in (trainer.evaluate, trainer.evaluate_layers):
        measure(rows)
        assert verdict_of(trainer)["also_selected"] == chose


@pytest.mark.parametrize(
    ("rows", "chose"),
    [(None, True), (classification_data(8, seed=9), False)],
    ids=["rows that chose", "others"],
)
def test_a_verdict_that_is_made_of_a_profile_says_whether_its_rows_chose_the_checkpoint(
    rows, chose, tmp_path
):
    trainer = trained(tmp_path, eval_strategy="steps", eval_steps=1)
    RunFolder(tmp_path).write({"layer_profile": trainer.evaluate_layers(rows)})
    (tmp_path / "verdict.json").unlink(missing_ok=True)
    assert (ALSO_SELECTED in collect(tmp_path)["verdict"]["text"]) == chose


# ---- several evaluation sets ----

SETS = {"a": Stream(TRAIN), "b": classification_data(16)}


def of_sets(folder):
    args = config(folder, max_steps=2, eval_strategy="steps", eval_steps=2)
    return DescentTrainer(bert(), args, train_dataset=TRAIN, eval_dataset=SETS)


def test_a_card_names_each_of_several_data_sets(tmp_path):
    trainer = of_sets(tmp_path)
    metrics = trainer.evaluate()
    assert "eval_a_model_preparation_time" in metrics  # which Trainer logs before training
    trainer.create_model_card()
    assert results_of(read(tmp_path)[0]) == {
        "a_loss": pytest.approx(metrics["eval_a_loss"], rel=1e-3),
        "b_loss": pytest.approx(metrics["eval_b_loss"], rel=1e-3),
    }


def test_several_data_sets_of_evaluations_in_training_chose_the_checkpoint(tmp_path):
    trainer = of_sets(tmp_path)
    trainer.train()
    assert verdict_of(trainer)["also_selected"]
    assert "on held-out data (`eval_b`)" in text_of(trainer)
    for rows in (SETS, SETS["a"]):
        trainer.evaluate(rows)
        assert verdict_of(trainer)["also_selected"]
    assert "Measured on held-out data:" in text_of(trainer)


def test_rows_that_nobody_can_count_are_not_counted(tmp_path):
    trainer = of_sets(tmp_path)
    trainer.train()
    trainer.save_model()
    assert "select_rows" not in RunFolder(tmp_path).summary
