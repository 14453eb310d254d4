"""Cards from real short runs of both trainers, what the Hub reads in them, and what they say when little is known."""

import json
import math

import numpy as np
import pytest
import torch
from cards import read, trained
from datasets import Dataset
from tiny import bert, classification_data, config, language_data, llama, word_tokenizer
from torch.utils.data import IterableDataset

from hf_descent import DescentTrainer, cli, layer_profile, noise_curve
from hf_descent.early_exit import ConfidenceReport, ExitProfile, SpeculationProfile
from hf_descent.evaluation.robustness import SUMMARIES
from hf_descent.hub.card import metrics_of, render
from hf_descent.hub.push import collect, plain, write_card
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.runs import RunFolder


def measure(model, folder, rows, split="test", gamma=0.0, metric="accuracy"):
    (folder / f"{split}_results.json").write_text(json.dumps({f"{split}_accuracy": 0.9}))
    layer_profile(model, rows, gamma=gamma).to_json(folder / "layer_profile.json")
    noise_curve(model, rows, [0, 1], metric=metric).to_json(folder / "noise_curve.json")


def results_of(card):
    return {result.metric_name: result.metric_value for result in card.data.eval_results}


def test_the_card_of_a_run_holds_its_results_layers_and_settings(tmp_path):
    trainer = trained(tmp_path / "run", eval_gammas=[0, 0.5, 2])
    curve = trainer.evaluate_robustness()
    metrics = trainer.evaluate()
    trainer.create_model_card(dataset="stanfordnlp/imdb", license="mit", language="en", tags="mine")
    card, text = read(tmp_path / "run")
    assert (card.data.license, card.data.language) == ("mit", "en")
    assert card.data.to_dict()["library_name"] == "transformers"
    assert card.data.datasets == ["stanfordnlp/imdb"] and card.data.pipeline_tag == "text-classification"
    assert {"mine", "hf_descent", "descent"} <= set(card.data.tags)
    found = results_of(card)
    for gamma, mean in zip(("0", "0.5", "2"), curve.mean):
        assert found[f"accuracy at noise gamma {gamma}"] == pytest.approx(mean)
        assert f"| {gamma} | {mean:.4g}" in text
    assert found["area under accuracy over noise gamma 0 to 2"] == pytest.approx(curve.auc)
    assert found["loss"] == pytest.approx(metrics["eval_loss"])
    previous, lead = 1.0, text.split("## Use")[0]
    for layer, multiplier in enumerate(trainer.multipliers.values.tolist(), start=1):
        loss = metrics[f"eval_layer_loss_{layer}"]
        assert f"| {layer} | {loss:.4g} |" in text
        row = f"| {layer} | {0.7 * previous:.4g} | {loss:.4g} | {0.03 * previous:.4g} | {multiplier:.4g} | not shown |"
        assert row in lead  # 16 rows are too few for a verdict
        previous = loss
    assert "**0 of 3** constraints on the layers are met on held-out data" in lead
    assert "| `descent_alpha` | 0.3 |" in text and "| `learning_rate` | 0.01 |" in text and "2601.17257" in text
    assert 'AutoModelForSequenceClassification.from_pretrained("run")' in text and "AutoTokenizer" in text
    assert (tmp_path / "run" / "noise.png").is_file() and (tmp_path / "run" / "noise.svg").is_file()


def test_the_command_adds_what_was_measured_later_and_the_baseline(tmp_path):
    for name in ("descent", "erm"):
        trainer = trained(tmp_path / name, objective=name)
        profile = layer_profile(trainer.model, classification_data(16), problem=trainer.problem)
        profile.to_json(tmp_path / name / "layer_profile.json")
        trainer.evaluate_robustness(gammas=[0, 1]).to_json(tmp_path / name / "noise_curve.json")
        trainer.save_metrics("eval", {"eval_accuracy": 0.5})
        trainer.save_metrics("test", {"test_accuracy": 0.25, "test_loss": 1.5, "test_runtime": 3.0})
    run = tmp_path / "descent"
    trainer.create_model_card()
    ExitProfile("accuracy", [0.5, 0.6, 0.7], [1, 1, 1], [1, 2, 3], 8).to_json(run / "exit_profile.json")
    ConfidenceReport(0.69, 0.7, [0.5, 0.25, 0.25], 2.0, 0.1, 8).to_json(run / "confidence_exit.json")
    SpeculationProfile([0.5, 0.9], [math.nan, 30], 20, [math.nan, 1]).to_json(run / "speculation_profile.json")
    cli.main(["card", str(run), "--baseline", str(tmp_path / "erm"), "--limits", "A toy.", "--license", "mit"])
    card, text = read(run)
    profile = json.loads((run / "layer_profile.json").read_text())
    other = json.loads((tmp_path / "erm" / "layer_profile.json").read_text())
    for layer in range(3):
        start = f"| {layer + 1} | {profile['losses'][layer]:.4g}"
        row = next(line for line in text.splitlines() if line.startswith(start))
        assert row.endswith(f"| {other['losses'][layer]:.4g} |")
    assert "| metric, test data | value | erm |" in text and "| accuracy | 0.25 | 0.25 |" in text
    assert results_of(card)["accuracy"] == 0.25 and card.data.eval_results[0].dataset_split == "test"
    assert "- A toy." in text and card.data.license == "mit"
    assert "of 3** constraints on the layers" in text
    assert "| 2 | 0.6 | 1.50x |" in text and "accuracy 0.6900 (0.7000 without early exit)" in text
    assert "| 1 | 50.0% | not timed |" in text and "| 2 | 90.0% | 1.50x |" in text
    assert "| `objective` | descent | erm |" in text and (run / "layers.png").is_file()
    again = text
    cli.main(["card", str(run)])  # what was said once is kept
    assert read(run)[1] == again


def test_a_baseline_stands_beside_a_run_only_where_it_was_measured_alike(tmp_path):
    def errors(logits, labels):
        return (logits.argmax(-1) != labels).sum(), labels.numel()

    settings = {
        "own": (0.0, "accuracy"), "noisy": (0.5, "accuracy"), "errors": (0.0, errors), "rows": (0.0, "accuracy"),
    }  # fmt: skip
    for name, (gamma, metric) in settings.items():
        trainer = trained(tmp_path / name, objective="erm", max_steps=1)
        data, split = classification_data(16, seed=int(name == "rows")), "eval" if name == "rows" else "test"
        measure(trainer.model, tmp_path / name, data, split, gamma, metric)
    noisy, other, rows = (
        collect(tmp_path / "own", tmp_path / name)["baseline"] for name in ("noisy", "errors", "rows")
    )
    assert rows["evaluation"] is None and rows["noise_curve"] is None and noisy["evaluation"] is not None
    assert noisy["layer_profile"] is None and noisy["noise_curve"]["metric"] == "accuracy"
    assert other["layer_profile"]["gamma"] == 0 and other["noise_curve"] is None
    assert rows["layer_profile"] is None
    path = tmp_path / "rows" / "layer_profile.json"
    old = {name: value for name, value in json.loads(path.read_text()).items() if name != "data"}
    path.write_text(json.dumps(old))  # as profiles were written that did not know their rows
    for own, baseline in (("own", "rows"), ("rows", "own")):
        assert collect(tmp_path / own, tmp_path / baseline)["baseline"]["layer_profile"] is not None


def test_a_baseline_that_a_card_has_kept_is_held_against_what_was_measured_since(tmp_path):
    names = ("evaluation", "noise_curve", "layer_profile")
    for name in ("erm", "descent"):
        trainer = trained(tmp_path / name, objective=name, max_steps=1)
        measure(trainer.model, tmp_path / name, classification_data(16))
    run, kept = tmp_path / "descent", tmp_path / "descent" / "model_card.json"
    write_card(run, tmp_path / "erm")
    card = json.loads(kept.read_text())
    assert all(collect(run)["baseline"][name] for name in names)
    measure(trainer.model, run, classification_data(16, seed=1), "eval")
    (run / "test_results.json").unlink()
    cli.main(["card", str(run)])
    found = json.loads(kept.read_text())["baseline"]
    assert [found[name] for name in names] == [None] * 3 and found["settings"] == card["baseline"]["settings"]


def test_results_whose_files_are_gone_are_not_said_again(tmp_path):
    trainer = trained(tmp_path, max_steps=1)
    measure(trainer.model, tmp_path, classification_data(16))
    ExitProfile("accuracy", [0.5, 0.6, 0.7], [1, 1, 1], [1, 2, 3], 8).to_json(tmp_path / "exit_profile.json")
    (tmp_path / "exits.png").touch()
    trainer.create_model_card(license="mit")
    text = read(tmp_path)[1]
    assert all(f"({name}.png)" in text for name in ("layers", "noise", "exits")) and "No losses per layer" not in text
    for name in ("layer_profile", "noise_curve", "exit_profile"):
        (tmp_path / f"{name}.json").unlink()
    cli.main(["card", str(tmp_path)])
    card, text = read(tmp_path)
    assert "![" not in text and "No losses per layer" in text and "were not measured; `hf-descent exit`" in text
    assert results_of(card) == {"accuracy": 0.9} and card.data.license == "mit"
    assert json.loads((tmp_path / "model_card.json").read_text())["figures"] == []


def test_a_card_without_evaluations_says_so(tmp_path):
    trained(tmp_path / "run", objective="erm").create_model_card()
    card, text = read(tmp_path / "run")
    assert "No evaluation was recorded" in text and "No losses per layer were recorded" in text
    assert "No layer was constrained" in text and "Robustness was not measured" in text
    assert card.data.eval_results is None
    model = bert()
    model.save_pretrained(tmp_path / "bare")
    cli.main(["card", str(tmp_path / "bare")])
    assert "not measured; `hf-descent exit` measures" in read(tmp_path / "bare")[1]
    UTForVideoDenoising(UTConfig(hidden_size=16)).save_pretrained(tmp_path / "video")
    cli.main(["card", str(tmp_path / "video")])  # the command `exit` does not take these
    assert "not measured; `hf_descent.early_exit.exit_profile` measures" in read(tmp_path / "video")[1]
    assert "The settings of this run were not recorded" in read(tmp_path / "bare")[1]
    with pytest.raises(ValueError, match="neither `config.json` nor"):
        cli.main(["card", str(tmp_path)])
    (tmp_path / "bare" / "eval_results.json").write_text("{")
    with pytest.raises(ValueError, match="eval_results.json cannot be read"):
        cli.main(["card", str(tmp_path / "bare")])


def test_a_card_names_the_results_of_several_data_sets_and_no_time_as_a_metric(tmp_path):
    rows = {"a": classification_data(8), "b": classification_data(8, seed=1)}
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=rows["a"], eval_dataset=rows)
    metrics = trainer.evaluate()
    assert "eval_a_model_preparation_time" in metrics  # before training, Trainer logs it
    trainer.create_model_card()
    card, text = read(tmp_path)
    assert results_of(card) == {f"{name}_loss": pytest.approx(metrics[f"eval_{name}_loss"]) for name in rows}
    assert "No losses per layer" in text  # there are two of each


def test_the_card_of_the_best_model_holds_that_model_s_evaluation(tmp_path):
    steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    rows = classification_data(16)
    settings = config(tmp_path, max_steps=6, learning_rate=0.5, load_best_model_at_end=True, **steps)
    trainer = DescentTrainer(bert(), settings, train_dataset=rows, eval_dataset=classification_data(16, seed=5))
    trainer.train()
    assert trainer.state.best_global_step < 6  # at such a rate training only spoils the model
    trainer.create_model_card()
    logged = results_of(read(tmp_path)[0])["loss"]
    assert logged == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["losses"][-1] == pytest.approx(logged, rel=1e-5)
    assert verdict["also_selected"] and "chosen its checkpoint" in read(tmp_path)[1]
    summary = RunFolder(tmp_path).summary
    assert summary["train_rows"] == summary["select_rows"] == 16
    for rows, same in ((classification_data(16, seed=6), False), (None, True)):  # rows of their own certify
        for measure in (trainer.evaluate, trainer.evaluate_layers):
            measure(rows)
            trainer.create_model_card()
            assert json.loads((tmp_path / "verdict.json").read_text())["also_selected"] == same
            assert ("chosen its checkpoint" in read(tmp_path)[1]) == same


def test_evaluation_sets_by_name_are_those_of_training_also_when_they_are_given(tmp_path):
    class Uncounted(IterableDataset):
        def __iter__(self):
            return iter(classification_data(16))

    sets = {"a": classification_data(16), "b": Uncounted()}
    settings = config(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2)
    trainer = DescentTrainer(bert(), settings, train_dataset=classification_data(16), eval_dataset=sets)
    trainer.train()
    trainer.save_model()
    assert "select_rows" not in RunFolder(tmp_path).summary  # nobody can count them
    for given in (sets, sets["a"]):
        trainer.evaluate(given)
        trainer.create_model_card()
        assert json.loads((tmp_path / "verdict.json").read_text())["also_selected"]


def test_a_card_says_what_was_constrained_and_at_which_noise(tmp_path):
    bert().save_pretrained(tmp_path)
    noise = {"metric": "accuracy", "gammas": [0, 1], "mean": [0.9, 0.8], "draws": 1, "gamma_train": 0.5}
    settings = {"constrained_layers": [2, 3], "noise_gamma": [0.1, 0.5]}
    values = {"constrained_layers": [2, 3], "multipliers": [0.0, 0.7, 0.0]}
    (tmp_path / "descent_config.json").write_text(json.dumps(values))
    layers = {"metric": "accuracy", "losses": [0.9, 0.6, 0.5], "values": [0.5, 0.6, 0.7], "gamma": 0.0}
    layers |= {"max_violation": 0.25, "feasible": False}
    facts = {"settings": settings, "noise_curve": noise, "datasets": ["a/road"], "test_data": "people"}
    write_card(tmp_path, objective="descent", evaluation={"eval_loss": 1.0}, layer_profile=layers, **facts)
    card, text = read(tmp_path)
    assert "| 1 | 0.9 | 0.5 |\n| 2 | 0.6 | 0.6 |\n| 3 | 0.5 | 0.7 |" in text
    assert "was not measured on held-out data" in text
    verdict = {
        "rows": ["2", "exit_2"], "asked": [0.8, 0.55], "reached": [0.6, 0.6], "radii": [0.01, None],
        "tolerances": [0.01, 0.0], "multipliers": [0.7, 0.1], "verdicts": ["met", "not shown"], "gamma": 0.5,
        "confidence": 0.95, "losses": [0.9, 0.6, 0.5], "descent_share": 0.7, "largest_rise": -0.1,
    }  # fmt: skip
    write_card(tmp_path, objective="descent", layer_profile=layers, verdict=verdict, **facts)
    text = read(tmp_path)[1]
    assert "| 2 | 0.8 | 0.6 ± 0.01 | 0.01 | 0.7 | met |\n| exit_2 | 0.55 | 0.6 | 0 | 0.1 | not shown |" in text
    assert "**1 of 2** constraints on the layers is met on held-out data, at noise gamma 0.5" in text
    assert "70% of an even descent" in text and text.index("not shown") < text.index("## Use")
    assert card.data.datasets == ["a/road"]
    assert {result.dataset_name for result in card.data.eval_results} == {"people"}
    assert "In training layers 2 3 were constrained" in text and "every layer" not in text
    assert "Trained at gamma between 0.1 and 0.5." in text
    (tmp_path / "descent_config.json").write_text(json.dumps({"alpha": None, "exit_targets": {"2": 0.05}}))
    write_card(tmp_path, objective="descent", settings={"exit_targets": {2: 0.05}})
    text = read(tmp_path)[1]
    assert "In training the layers with targets were constrained" in text and "every layer" not in text
    write_card(tmp_path, objective="hinge")
    assert "violations of the descent constraints were penalised" in read(tmp_path)[1]
    write_card(tmp_path, objective="deep_supervision", layer_profile=layers)  # trained to meet no problem
    text = read(tmp_path)[1]
    assert "not trained to meet them" in text or "No layer was constrained" in text


def test_numpy_scalars_and_numbers_that_are_none_reach_neither_json_nor_the_index(tmp_path):
    bert().save_pretrained(tmp_path)
    evaluation = {"eval_loss": np.float32(0.5), "eval_accuracy": torch.tensor(0.25), "epoch": 3, "eval_feasible": 0.0}
    evaluation |= {"eval_f1": math.nan, "eval_mcc": np.float64("inf"), "eval_max_violation": np.float64(0.125)}
    settings = {"a": np.int64(3), "b": {"c": (1, None)}}
    write_card(tmp_path, evaluation=evaluation, settings=settings, objective="descent")
    card, text = read(tmp_path)
    assert results_of(card) == {"loss": 0.5, "accuracy": 0.25}
    assert "| `a` | 3 |" in text
    assert json.loads((tmp_path / "model_card.json").read_text())["evaluation"]["eval_f1"] is None
    assert plain({1: (np.arange(2), float("inf"), np.bool_(True))}) == {"1": [[0, 1], None, True]}
    assert metrics_of({"eval_accuracy": 1, "eval_layer_loss_1": 2.0, "eval_runtime": 3.0, "epoch": 1.0}) == {
        "accuracy": 1
    }


def test_trl_writes_this_card_at_checkpoints_and_takes_its_own_arguments(tmp_path):
    pytest.importorskip("trl")
    from hf_descent import SFTDescentConfig, SFTDescentTrainer

    arguments = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 2, "save_steps": 1}
    arguments |= {"descent_alpha": 0.1, "initial_loss_bound": 4.0, "dual_warmup_steps": 0, "max_length": None}
    rows = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in language_data(8)])
    arguments = SFTDescentConfig(output_dir=str(tmp_path / "sft"), **arguments)
    trainer = SFTDescentTrainer(llama(), arguments, train_dataset=rows, processing_class=word_tokenizer())
    trainer.train()
    card, text = read(tmp_path / "sft")  # written at a checkpoint
    assert card.data.pipeline_tag == "text-generation" and {"hf_descent", "sft", "trl"} <= set(card.data.tags)
    assert "was not measured on held-out data" in text
    trainer.create_model_card(model_name="mine", dataset_name="tatsu-lab/alpaca", tags=["extra"])
    card, text = read(tmp_path / "sft")
    assert text.split("---\n", 2)[2].lstrip().startswith("# mine")
    assert card.data.datasets == ["tatsu-lab/alpaca"] and "extra" in card.data.tags


def test_what_a_former_training_left_in_the_folder_is_not_said_of_this_model(tmp_path):
    first = trained(tmp_path, eval_gammas=[0, 1])
    curve = first.evaluate_robustness()
    first.evaluate_layers()
    first.save_metrics("test", {"test_accuracy": 0.99})
    first.create_model_card(license="mit")
    ExitProfile("accuracy", [0.5, 0.6, 0.7], [1, 1, 1], [1, 2, 3], 8).to_json(tmp_path / "exit_profile.json")
    (tmp_path / "exits.png").touch()
    cli.main(["card", str(tmp_path)])
    assert f"| 1 | {curve.mean[1]:.4g}" in read(tmp_path)[1]
    first.train()  # the same trainer, and then another one
    for trainer in (first, trained(tmp_path, learning_rate=0.02)):
        trainer.create_model_card()
        card, text = read(tmp_path)
        assert card.data.eval_results is None and "No evaluation was recorded" in text and "exits.png" not in text
        assert "No losses per layer were recorded" in text and "![" not in text
        assert card.data.license == "mit"
        assert f"| `learning_rate` | {trainer.args.learning_rate} |" in text
    trainer.save_metrics("eval", {"eval_accuracy": 0.5})  # into one file with the former training's
    (tmp_path / "model_card.json").unlink()
    cli.main(["card", str(tmp_path)])
    assert [result.metric_value for result in read(tmp_path)[0].data.eval_results] == [0.5]


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
        assert "| `learning_rate` | 0.03 |" in text and f"| {before['multipliers'][0]:.4g} |" in text
        assert results_of(card)["loss"] == pytest.approx(metrics["eval_loss"])
        assert ("mine" in card.data.tags) == (folder == run)
    DescentTrainer(bert(), config(tmp_path / "other"), eval_dataset=classification_data(8)).create_model_card()
    _, text = read(tmp_path / "other")
    assert "The settings of this run were not recorded" in text and "No layer was constrained" in text


def test_a_card_names_a_custom_readout_and_the_noise_of_its_layers(tmp_path):
    def pooled(model, hidden, inputs):
        return model.classifier(hidden.mean(1))

    data = classification_data(16)
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=data, eval_dataset=data, readout=pooled)
    trainer.train()
    trainer.evaluate_layers(gamma=0.5)
    trainer.create_model_card()
    _, text = read(tmp_path)
    assert "read by a custom readout (`pooled`)" in text and "the model's own head on" not in text
    assert "Training used a custom readout" in text
    assert "on the output of layer l, at noise gamma 0.5." in text


@pytest.mark.parametrize(("base", "known"), [("someone/base", True), ("/of/another/machine", False)])
def test_a_folder_is_no_base_model(base, known, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert (collect(tmp_path).get("base_model") == base) == known
    assert (base in str(render(collect(tmp_path)))) == known


def test_metrics_that_sound_like_summaries_of_a_curve_are_shown():
    evaluation = {"eval_roc_auc": 0.9, "test_accuracy": 0.8, "test_accuracy@0.5": 0.7, "eval_retention": 0.5}
    evaluation |= {f"test_accuracy_{name}": 0.6 for name in (*SUMMARIES, "auc_over_range_radius")}
    assert metrics_of(evaluation) == {"roc_auc": 0.9, "accuracy": 0.8, "retention": 0.5}


def test_a_verdict_names_its_data_among_several_sets(tmp_path):
    rows = {name: classification_data(64, seed=seed) for seed, name in enumerate("ab")}
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=rows["a"], eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    trainer.create_model_card()
    assert "on held-out data (`eval_b`)" in read(tmp_path)[1]
    trainer.evaluate(rows["a"])
    trainer.create_model_card()
    assert "met on held-out data, each" in read(tmp_path)[1]
