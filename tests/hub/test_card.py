"""Cards from real short runs of both trainers, what the Hub reads in them, and what they say when little is known."""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cards import read, trained
from datasets import Dataset
from tiny.data import Stream, classification_data, language_data
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer
from tiny.training import config

from hf_descent import DescentTrainer, cli
from hf_descent.configs import DescentArguments
from hf_descent.early_exit import ConfidenceReport, ExitProfile
from hf_descent.evaluation import Certificate, LayerProfile
from hf_descent.evaluation.certificates import ALSO_SELECTED
from hf_descent.hub.facts import collect, plain, write_card
from hf_descent.hub.render import answers, metrics_of, render, shown_settings
from hf_descent.runs import RunFolder


EXITS = {
    "exit_profile": ExitProfile("accuracy", [0.5, 0.6, 0.7], [1, 1, 1], [1, 2, 3], 8),
    "confidence_exit": ConfidenceReport(0.69, 0.7, [0.5, 0.25, 0.25], 2.0, 0.1, 8),
}


def results_of(card):
    return {result.metric_name: result.metric_value for result in card.data.eval_results}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained and evaluated run with its card."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    trainer = trained(folder, eval_gammas=[0, 0.5, 2])
    curve = trainer.evaluate_robustness()
    profile = trainer.evaluate_layers()
    metrics = trainer.evaluate()
    trainer.create_model_card(dataset="stanfordnlp/imdb", license="mit", language="en", tags="mine")
    card, text = read(folder)
    return SimpleNamespace(
        folder=folder,
        trainer=trainer,
        curve=curve,
        profile=profile,
        metrics=metrics,
        card=card,
        text=text,
        verdict=Certificate.from_json(folder / "verdict.json"),
    )


def test_the_metadata_of_a_card_are_those_of_the_run(run):
    data = run.card.data
    assert (data.license, data.language) == ("mit", "en")
    assert data.to_dict()["library_name"] == "transformers"
    assert data.datasets == ["stanfordnlp/imdb"]
    assert data.pipeline_tag == "text-classification"
    assert {"mine", "hf_descent", "descent"} <= set(data.tags)


def test_the_results_of_a_card_have_names_that_can_be_looked_up_and_four_digits(run):
    results = results_of(run.card)
    for gamma, mean in zip(("0.5", "2"), run.curve.mean[1:]):
        name = f"accuracy with input noise of level {gamma}"
        assert results[name] == pytest.approx(mean, rel=1e-3)
    assert not any("auc" in name for name in results)
    assert results["loss"] == pytest.approx(run.metrics["eval_loss"], rel=1e-3)
    assert all(value == float(f"{value:.4g}") for value in results.values())


def test_a_card_begins_with_the_verdict(run):
    beginning = run.text.split("## Load it")[0]
    assert f"**{run.verdict.headline}**\n\n- 0 of 3 layers" in beginning  # 16 rows are too few
    assert str(run.verdict) in beginning
    assert run.verdict.headline == "VERDICT: NOT SHOWN, price unknown"
    assert run.verdict.multipliers == run.trainer.multipliers.values.tolist()


def test_a_card_shows_what_was_measured_with_figures(run):
    assert str(run.profile) in run.text
    assert str(run.curve) in run.text
    for name in ("noise", "layers"):
        assert f"({name}.png)" in run.text
        assert (run.folder / f"{name}.svg").is_file()


def test_a_card_says_how_the_model_was_trained_and_is_loaded(run):
    assert "| `descent_alpha` | 0.3 |" in run.text
    assert "| `learning_rate` | 0.01 |" in run.text
    assert "2601.17257" in run.text
    assert 'AutoModelForSequenceClassification.from_pretrained("run")' in run.text
    assert "AutoTokenizer" in run.text


def test_the_command_adds_what_was_measured_later_and_keeps_what_was_said(tmp_path):
    trainer = trained(tmp_path, save_strategy="no")
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})
    trainer.save_metrics("test", {"test_accuracy": 0.25, "test_loss": 1.5, "test_runtime": 3.0})
    trainer.create_model_card(license="mit")
    RunFolder(tmp_path).write(EXITS)
    cli.main(
        [
            "card",
            str(tmp_path),
            "--limits",
            "A toy.",
            "--datasets",
            "a/road",
            "--test_data",
            "people",
        ]
    )
    card, text = read(tmp_path)
    assert "| metric, test data | value |" in text and results_of(card) == {
        "accuracy": 0.25,
        "loss": 1.5,
    }
    assert {result.dataset_name for result in card.data.eval_results} == {"people"}
    assert card.data.eval_results[0].dataset_split == "test" and card.data.datasets == ["a/road"]
    assert "- A toy." in text and card.data.license == "mit"
    assert all(str(result) in text for result in EXITS.values())
    cli.main(["card", str(tmp_path)])
    assert read(tmp_path)[1] == text


def test_what_a_former_training_left_or_is_gone_is_not_said_of_this_model(tmp_path):
    first = trained(tmp_path, eval_gammas=[0, 1])
    first.evaluate_robustness()
    first.evaluate_layers()
    first.save_metrics("test", {"test_accuracy": 0.99})
    first.create_model_card(license="mit")
    EXITS["exit_profile"].to_json(tmp_path / "exit_profile.json")
    cli.main(["card", str(tmp_path)])
    assert str(EXITS["exit_profile"]) in read(tmp_path)[1]
    (tmp_path / "exit_profile.json").unlink()
    cli.main(["card", str(tmp_path)])
    assert str(EXITS["exit_profile"]) not in read(tmp_path)[1] and "layers.png" in read(tmp_path)[1]
    first.train()  # the same trainer, and then another one
    for trainer in (first, trained(tmp_path, learning_rate=0.02)):
        trainer.create_model_card()
        card, text = read(tmp_path)
        assert (
            card.data.eval_results is None
            and "No evaluation was recorded" in text
            and "![" not in text
        )
        assert card.data.license == "mit"
        assert f"| `learning_rate` | {trainer.args.learning_rate} |" in text
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})  # into one file with the former training's
    (tmp_path / "model_card.json").unlink()
    cli.main(["card", str(tmp_path)])
    assert [result.metric_value for result in read(tmp_path)[0].data.eval_results] == [0.5]
    RunFolder(tmp_path).write({"layer_profile": (profile := trainer.evaluate_layers())})
    for same in (True, False):
        loss = profile.losses[-1] * (1 if same else 1.005)
        trainer.save_metrics("eval", {"eval_accuracy": 0.5, "eval_layer_loss_3": loss})
        assert bool(collect(tmp_path)["evaluation"]) == same
    trainer.save_metrics(
        "eval", {"eval_accuracy_auc": 0.4, "eval_accuracy_auc_ood": 0.3, "eval_roc_auc": 0.9}
    )
    RunFolder(tmp_path).write(
        {"noise_curve": (curve := trainer.evaluate_robustness(gammas=[0, 2], gamma_train=None))}
    )
    assert collect(tmp_path)["evaluation"] == {
        "eval_accuracy_auc": curve.auc, "eval_accuracy_auc_ood": None, "eval_roc_auc": 0.9,
    }  # fmt: skip


def test_a_card_answers_whether_the_model_may_stop_after_a_layer():
    rows = [
        ("exit_2", 1.2, "not met"),
        ("exit_3", 0.9, "met"),
        ("4", 0.5, "met"),
        ("5", 0.5, "not shown"),
    ]
    verdict = {
        "last_loss": 1.0,
        "rows": [dict(zip(("name", "reached", "verdict"), row)) for row in rows],
    }
    settings = {"exit_targets": {"2": 0.05, 3: 0.1}}  # keys of JSON are strings
    assert answers({"verdict": verdict, "settings": settings}) == [
        "**No, not after layer 2.** Its loss is 20.0 % above the last layer's; 5 % above was allowed.",
        "**Yes, after layer 3.** Its loss is 10.0 % below the last layer's; 10 % above was allowed.",
        "1 of 2 layers do what was asked of them.",
    ]
    assert answers({"settings": {}}) == []


def test_a_card_shows_settings_that_are_not_at_their_defaults():
    def shown(**settings):
        args = DescentArguments(**settings)
        recorded = dataclasses.asdict(args)
        recorded.update(dataclasses.asdict(args.dual_settings))
        return shown_settings(recorded).keys()

    dual_settings = {"dual_optim", "dual_learning_rate", "dual_warmup_steps", "target_margin"}
    assert shown() == {"objective"} | dual_settings
    assert shown(exit_targets={2: 0.1}) == {"objective", "exit_targets"} | dual_settings
    plain = shown(objective="erm", noise_gamma=0.5)
    assert plain == {"objective", "noise_gamma"}
    assert "penalty_coefficient" in shown(objective="deep_supervision", penalty_coefficient=0.3)
    assert "dual_learning_rate" not in shown(objective="deep_supervision")
    assert {"resilience", "resilience_form"} <= shown(resilience=0.1, resilience_form="slack")
    assert "negative_weights" in shown(descent_alpha=0.1, negative_weights="keep")


def test_a_card_without_evaluations_says_so(tmp_path):
    trained(tmp_path / "run", objective="erm").create_model_card()
    card, text = read(tmp_path / "run")
    assert "No evaluation was recorded" in text and "each layer were not measured" in text
    assert "No layer was constrained" in text and "Robustness was not measured" in text
    assert card.data.eval_results is None
    bert().save_pretrained(tmp_path / "bare")
    cli.main(["card", str(tmp_path / "bare")])
    assert "The settings of this run were not recorded" in read(tmp_path / "bare")[1]
    evaluation = {
        "eval_loss": 3.0,
        "eval_largest_rise": -0.1,
        "eval_layer_loss_1": 1.0,
        "eval_layer_loss_2": 0.9,
    }
    write_card(tmp_path / "bare", evaluation=evaluation)
    assert "the last layer's loss is 0.9," in read(tmp_path / "bare")[1]
    with pytest.raises(ValueError, match="holds no model"):
        cli.main(["card", str(tmp_path)])
    (tmp_path / "bare" / "eval_results.json").write_text("{")
    with pytest.raises(ValueError, match="eval_results.json cannot be read"):
        cli.main(["card", str(tmp_path / "bare")])


def test_the_card_of_the_best_model_holds_that_model_s_evaluation(tmp_path):
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    rows = classification_data(16)
    settings = config(
        tmp_path, max_steps=6, learning_rate=0.5, load_best_model_at_end=True, **steps
    )
    trainer = DescentTrainer(
        bert(), settings, train_dataset=rows, eval_dataset=classification_data(16, seed=5)
    )
    trainer.train()
    assert trainer.state.best_global_step < 6  # at such a rate training only spoils the model
    trainer.create_model_card()
    logged = results_of(read(tmp_path)[0])["loss"]
    assert logged == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-3)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["losses"][-1] == pytest.approx(logged, rel=1e-3)
    assert verdict["also_selected"] and "chosen its checkpoint" in read(tmp_path)[1]
    summary = RunFolder(tmp_path).summary
    assert summary["train_rows"] == summary["select_rows"] == 16
    rows_of = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", read(tmp_path)[1], re.MULTILINE))
    assert rows_of["trained the weights"] == rows_of["evaluated in training, to choose by"] == "16"
    assert (rows_of["moved the multipliers"], rows_of["the verdict"]) == ("the same", "16 labels")
    for rows, same in (
        (classification_data(16, seed=6), False),
        (None, True),
    ):  # rows of their own certify
        for measure in (trainer.evaluate, trainer.evaluate_layers):
            measure(rows)
            trainer.create_model_card()
            assert ("chosen its checkpoint" in read(tmp_path)[1]) == same


def test_rows_of_evaluations_in_training_are_told_by_what_is_in_them(tmp_path):
    def told(rows, strategy="steps"):
        settings = config(tmp_path, max_steps=1, eval_strategy=strategy, eval_steps=1)
        trainer = DescentTrainer(
            bert(), settings, train_dataset=classification_data(16), eval_dataset=chosen_by
        )
        trainer.train()
        trainer.evaluate(rows)
        by_loop = trainer._run.record.certificate.also_selected
        trainer.evaluate_layers(rows)
        assert trainer._run.record.certificate.also_selected == by_loop
        return by_loop

    chosen_by, others = classification_data(32, seed=5), classification_data(32, seed=6)
    assert told(list(chosen_by)) and told(chosen_by[:9]) and told([*others, chosen_by[0]])
    assert not told(others) and not told(list(chosen_by), "no")


def test_a_card_names_each_of_several_data_sets_and_those_of_training(tmp_path):
    def verdict():
        trainer.create_model_card()
        return json.loads((tmp_path / "verdict.json").read_text())

    sets = {"a": Stream(classification_data(16)), "b": classification_data(16)}
    settings = config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer = DescentTrainer(
        bert(), settings, train_dataset=classification_data(16), eval_dataset=sets
    )
    before = trainer.evaluate()
    assert "eval_a_model_preparation_time" in before  # before training, Trainer logs it
    trainer.create_model_card()
    assert results_of(read(tmp_path)[0]) == {
        f"{name}_loss": pytest.approx(before[f"eval_{name}_loss"], rel=1e-3) for name in sets
    }
    trainer.train()
    trainer.save_model()
    assert "select_rows" not in RunFolder(tmp_path).summary  # nobody can count them
    assert verdict()["also_selected"] and "on held-out data (`eval_b`)" in read(tmp_path)[1]
    for given in (sets, sets["a"]):
        trainer.evaluate(given)
        assert verdict()["also_selected"]
    assert "Measured on held-out data:" in read(tmp_path)[1]


def test_numpy_scalars_and_numbers_that_are_none_reach_neither_json_nor_the_index(tmp_path):
    bert().save_pretrained(tmp_path)
    evaluation = {
        "eval_loss": np.float32(0.5),
        "eval_accuracy": torch.tensor(0.25),
        "epoch": 3,
        "eval_feasible": 0.0,
    }
    evaluation |= {
        "eval_f1": math.nan,
        "eval_mcc": np.float64("inf"),
        "eval_max_violation": np.float64(0.125),
    }
    settings = {"a": np.int64(3), "b": {"c": (1, None)}}
    write_card(tmp_path, evaluation=evaluation, settings=settings, objective="descent")
    card, text = read(tmp_path)
    assert results_of(card) == {"loss": 0.5, "accuracy": 0.25}
    assert "| `a` | 3 |" in text and "was not measured on held-out data" in text
    assert json.loads((tmp_path / "model_card.json").read_text())["evaluation"]["eval_f1"] is None
    assert plain({1: (np.arange(2), float("inf"), np.bool_(True))}) == {"1": [[0, 1], None, True]}
    evaluation = {
        "eval_roc_auc": 0.9,
        "test_accuracy@0.5": 0.7,
        "eval_layer_loss_1": 2.0,
        "eval_runtime": 3.0,
    }
    evaluation |= {
        "test_accuracy_auc_over_range_radius": 0.02,
        "eval_samples": 8,
    }  # half a width of an interval
    assert metrics_of(evaluation | {"eval_f1_samples": 0.5}) == {"roc_auc": 0.9, "f1_samples": 0.5}


def test_trl_writes_this_card_at_checkpoints_and_takes_its_own_arguments(tmp_path):
    pytest.importorskip("trl")
    from hf_descent import SFTDescentConfig, SFTDescentTrainer

    arguments = {
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "save_steps": 1,
    }
    arguments |= {
        "descent_alpha": 0.1,
        "initial_loss_bound": 4.0,
        "dual_warmup_steps": 0,
        "max_length": None,
    }
    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in language_data(8)])
    arguments = SFTDescentConfig(output_dir=str(tmp_path / "sft"), **arguments)
    trainer = SFTDescentTrainer(
        llama(), arguments, train_dataset=rows, processing_class=word_tokenizer()
    )
    trainer.train()
    card, _ = read(tmp_path / "sft")  # written at a checkpoint
    assert card.data.pipeline_tag == "text-generation" and {"hf_descent", "sft", "trl"} <= set(
        card.data.tags
    )
    trainer.create_model_card(model_name="mine", dataset_name="tatsu-lab/alpaca", tags=["extra"])
    card, text = read(tmp_path / "sft")
    assert text.split("---\n", 2)[2].lstrip().startswith("# mine")
    assert card.data.datasets == ["tatsu-lab/alpaca"] and "extra" in card.data.tags


def test_a_trainer_that_only_evaluates_leaves_the_word_to_the_training(tmp_path):
    run = tmp_path / "run"
    trained(run, learning_rate=0.03).create_model_card(tags="mine")
    before = json.loads((run / "descent_config.json").read_text())
    model = type(bert()).from_pretrained(run)
    for folder in (run, tmp_path / "elsewhere"):
        trainer = DescentTrainer(model, config(folder), eval_dataset=classification_data(8))
        metrics = trainer.evaluate()
        trainer.save_model()
        trainer.create_model_card()
        assert json.loads((folder / "descent_config.json").read_text()) == before
        card, text = read(folder)
        assert "| `learning_rate` | 0.03 |" in text and results_of(card)["loss"] == pytest.approx(
            metrics["eval_loss"], rel=1e-3
        )
        assert ("mine" in card.data.tags) == (folder == run)


def test_a_card_names_a_custom_readout(tmp_path):
    def pooled(model, hidden, inputs):
        return model.classifier(hidden.mean(1))

    data = classification_data(16)
    trainer = DescentTrainer(
        bert(), config(tmp_path), train_dataset=data, eval_dataset=data, readout=pooled
    )
    trainer.train()
    trainer.create_model_card()
    _, text = read(tmp_path)
    assert "read by a custom readout (`pooled`)" in text and "the model's own head on" not in text
    assert "trained or measured by a custom readout" in text


def test_a_card_names_the_noise_of_its_layers(tmp_path):
    data = classification_data(16)
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.evaluate_layers(gamma=0.5)
    trainer.create_model_card()
    assert "on the output of each layer, at noise gamma 0.5:" in read(tmp_path)[1]


@pytest.mark.parametrize(
    ("base", "known"), [("someone/base", True), ("/of/another/machine", False)]
)
def test_a_folder_is_no_base_model(base, known, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert (collect(tmp_path).get("base_model") == base) == known
    assert (base in str(render(collect(tmp_path)))) == known


def test_a_card_holds_the_validation_results_of_a_denoiser(tmp_path):
    trained(tmp_path).save_metrics(
        "validation", {"validation_rmse@0.1": 3.0, "validation_mean_rmse": 4.0}
    )
    card = collect(tmp_path)
    assert card["split"] == "validation" and card["evaluation"]["validation_mean_rmse"] == 4.0


@pytest.mark.parametrize(
    ("architecture", "level"), [("UTForVideoDenoising", 0.5), ("BertForMaskedLM", 0.0)]
)
def test_the_card_of_a_denoiser_tells_what_it_does_to_noise(architecture, level, tmp_path):
    trained(tmp_path, noise_gamma=0.5)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    profiles = [
        LayerProfile("rmse", [0.5, 0.4, 0.3], [5.0, 4.0, 3.0], gamma) for gamma in (0.0, 0.5, 2.0)
    ]
    RunFolder(tmp_path).write({f"layer_profile{profile.ending}": profile for profile in profiles})
    assert collect(tmp_path)["layer_profile"]["gamma"] == level


@pytest.mark.parametrize(("rows", "chose"), [(None, True), (classification_data(8, seed=9), False)])
def test_a_verdict_that_is_measured_anew_says_whether_its_rows_chose_the_checkpoint(
    rows, chose, tmp_path
):
    trainer = trained(tmp_path, eval_strategy="steps", eval_steps=1)
    RunFolder(tmp_path).write({"layer_profile": trainer.evaluate_layers(rows)})
    (tmp_path / "verdict.json").unlink(missing_ok=True)
    assert (ALSO_SELECTED in collect(tmp_path)["verdict"]["text"]) == chose


def test_metrics_of_other_rows_than_those_of_the_profile_do_not_hide_metrics_of_these(tmp_path):
    trainer = trained(tmp_path, save_strategy="no")
    profile = trainer.evaluate_layers(classification_data(8, seed=9))
    RunFolder(tmp_path).write({"layer_profile": profile})
    last = f"layer_loss_{len(profile.losses)}"
    same = {"eval_accuracy": 0.25, f"eval_{last}": float(profile.losses[-1])}
    other = {"test_accuracy": 0.75, f"test_{last}": 2 * float(profile.losses[-1])}
    for prefix, metrics in (("eval", same), ("test", other)):
        (tmp_path / f"{prefix}_results.json").write_text(json.dumps(metrics))
    card = collect(tmp_path)
    assert (card["split"], card["evaluation"]["eval_accuracy"]) == ("validation", 0.25)

    (tmp_path / "eval_results.json").unlink()
    card = collect(tmp_path)
    assert card["split"] is None and card["evaluation"] is None
