"""Cards from real short runs of both trainers, what the Hub reads in them, and what they say when little is known."""

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cards import read, results_of, trained
from datasets import Dataset
from tiny.data import classification_data, language_data
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer
from tiny.training import config

from hf_descent import DescentTrainer, cli
from hf_descent.configs import DescentArguments
from hf_descent.early_exit import ConfidenceReport, ExitProfile
from hf_descent.evaluation import Certificate, LayerProfile
from hf_descent.hub.facts import collect, plain, write_card
from hf_descent.hub.render import answers, metrics_of, render, shown_settings
from hf_descent.runs import RunFolder


EXITS = {
    "exit_profile": ExitProfile("accuracy", [0.5, 0.6, 0.7], [1, 1, 1], [1, 2, 3], 8),
    "confidence_exit": ConfidenceReport(0.69, 0.7, [0.5, 0.25, 0.25], 2.0, 0.1, 8),
}


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


def test_the_command_adds_what_was_measured_later(tmp_path):
    trainer = trained(tmp_path, save_strategy="no")
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})
    trainer.save_metrics("test", {"test_accuracy": 0.25, "test_loss": 1.5, "test_runtime": 3.0})
    trainer.create_model_card()
    RunFolder(tmp_path).write(EXITS)

    cli.main(["card", str(tmp_path), "--test_data", "people"])
    card, text = read(tmp_path)
    assert "| metric, test data | value |" in text
    assert results_of(card) == {"accuracy": 0.25, "loss": 1.5}
    assert {result.dataset_name for result in card.data.eval_results} == {"people"}
    assert {result.dataset_split for result in card.data.eval_results} == {"test"}
    assert all(str(result) in text for result in EXITS.values())


def test_the_command_adds_what_people_know_and_keeps_what_they_said(tmp_path):
    trained(tmp_path, save_strategy="no").create_model_card(license="mit")
    cli.main(["card", str(tmp_path), "--limits", "A toy.", "--datasets", "a/road"])
    card, text = read(tmp_path)
    assert card.data.license == "mit"
    assert card.data.datasets == ["a/road"]
    assert "- A toy." in text

    cli.main(["card", str(tmp_path)])
    assert read(tmp_path)[1] == text


def test_a_card_answers_whether_the_model_may_stop_after_a_layer():
    rows = [
        {"name": "exit_2", "reached": 1.2, "verdict": "not met"},
        {"name": "exit_3", "reached": 0.9, "verdict": "met"},
        {"name": "4", "reached": 0.5, "verdict": "met"},
        {"name": "5", "reached": 0.5, "verdict": "not shown"},
    ]
    verdict = {"last_loss": 1.0, "rows": rows}
    settings = {"exit_targets": {"2": 0.05, 3: 0.1}}  # keys of JSON are strings
    assert answers({"verdict": verdict, "settings": settings}) == [
        "**No, not after layer 2.** Its loss is 20.0 % above the last layer's; 5 % above was allowed.",
        "**Yes, after layer 3.** Its loss is 10.0 % below the last layer's; 10 % above was allowed.",
        "1 of 2 layers do what was asked of them.",
    ]


def test_a_card_without_a_verdict_answers_nothing():
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
    assert "No evaluation was recorded" in text
    assert "each layer were not measured" in text
    assert "No layer was constrained" in text
    assert "Robustness was not measured" in text
    assert card.data.eval_results is None


def test_a_card_of_a_model_without_a_run_says_so(tmp_path):
    bert().save_pretrained(tmp_path)
    cli.main(["card", str(tmp_path)])
    assert "The settings of this run were not recorded" in read(tmp_path)[1]


def test_the_last_layer_s_loss_is_that_of_the_layers_where_the_evaluation_has_another(tmp_path):
    bert().save_pretrained(tmp_path)
    evaluation = {
        "eval_loss": 3.0,
        "eval_largest_rise": -0.1,
        "eval_layer_loss_1": 1.0,
        "eval_layer_loss_2": 0.9,
    }
    write_card(tmp_path, evaluation=evaluation)
    assert "the last layer's loss is 0.9," in read(tmp_path)[1]


def test_a_folder_without_a_model_has_no_card(tmp_path):
    with pytest.raises(ValueError, match="holds no model"):
        cli.main(["card", str(tmp_path)])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    bert().save_pretrained(tmp_path)
    (tmp_path / "eval_results.json").write_text("{")
    with pytest.raises(ValueError, match="eval_results.json cannot be read"):
        cli.main(["card", str(tmp_path)])


def test_numbers_of_any_kind_reach_the_index_and_json(tmp_path):
    bert().save_pretrained(tmp_path)
    evaluation = {
        "eval_loss": np.float32(0.5),
        "eval_accuracy": torch.tensor(0.25),
        "epoch": 3,
        "eval_feasible": 0.0,
        "eval_max_violation": np.float64(0.125),
    }
    settings = {"a": np.int64(3), "b": {"c": (1, None)}}
    write_card(tmp_path, evaluation=evaluation, settings=settings, objective="descent")
    card, text = read(tmp_path)
    assert results_of(card) == {"loss": 0.5, "accuracy": 0.25}
    assert "| `a` | 3 |" in text
    assert "was not measured on held-out data" in text
    assert plain({1: (np.arange(2), float("inf"), np.bool_(True))}) == {"1": [[0, 1], None, True]}


def test_what_is_no_number_reaches_neither_the_index_nor_json(tmp_path):
    bert().save_pretrained(tmp_path)
    evaluation = {"eval_loss": 0.5, "eval_f1": math.nan, "eval_mcc": np.float64("inf")}
    write_card(tmp_path, evaluation=evaluation)
    assert results_of(read(tmp_path)[0]) == {"loss": 0.5}
    written = json.loads((tmp_path / "model_card.json").read_text())["evaluation"]
    assert written["eval_f1"] is None
    assert written["eval_mcc"] is None


def test_metrics_are_what_tells_how_good_a_model_is():
    evaluation = {
        "eval_roc_auc": 0.9,
        "eval_f1_samples": 0.5,
        "test_accuracy@0.5": 0.7,
        "eval_layer_loss_1": 2.0,
        "eval_runtime": 3.0,
        "eval_samples": 8,
        "test_accuracy_auc_over_range_radius": 0.02,  # half a width of an interval
    }
    assert metrics_of(evaluation) == {"roc_auc": 0.9, "f1_samples": 0.5}


@pytest.fixture
def sft_trainer(tmp_path):
    pytest.importorskip("trl")
    from hf_descent import SFTDescentConfig, SFTDescentTrainer

    args = SFTDescentConfig(
        output_dir=str(tmp_path),
        report_to="none",
        use_cpu=True,
        bf16=False,
        max_steps=2,
        save_steps=1,
        descent_alpha=0.1,
        initial_loss_bound=4.0,
        dual_warmup_steps=0,
        max_length=None,
    )
    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in language_data(8)])
    trainer = SFTDescentTrainer(
        llama(), args, train_dataset=rows, processing_class=word_tokenizer()
    )
    trainer.train()
    return trainer


def test_trl_writes_this_card_at_checkpoints(tmp_path, sft_trainer):
    card, _ = read(tmp_path)
    assert card.data.pipeline_tag == "text-generation"
    assert {"hf_descent", "sft", "trl"} <= set(card.data.tags)


def test_a_card_takes_the_arguments_of_trl(tmp_path, sft_trainer):
    sft_trainer.create_model_card(
        model_name="mine", dataset_name="tatsu-lab/alpaca", tags=["extra"]
    )
    card, text = read(tmp_path)
    assert text.split("---\n", 2)[2].lstrip().startswith("# mine")
    assert card.data.datasets == ["tatsu-lab/alpaca"]
    assert "extra" in card.data.tags


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
    assert "read by a custom readout (`pooled`)" in text
    assert "the model's own head on" not in text
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
    metrics = {"validation_rmse@0.1": 3.0, "validation_mean_rmse": 4.0}
    trained(tmp_path).save_metrics("validation", metrics)
    card = collect(tmp_path)
    assert card["split"] == "validation"
    assert card["evaluation"]["validation_mean_rmse"] == 4.0


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
