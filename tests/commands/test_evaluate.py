"""`hf-descent evaluate` on saved models: the numbers are those of the library's functions, the files are all there."""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny.files import WORDS, save_tiny_model
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from hf_descent import cli, noise_curve
from hf_descent.commands.evaluate import InstructionArguments, language_task
from hf_descent.data.alpaca import completion_labels, format_prompt
from hf_descent.evaluation import Certificate, LayerProfile, NoiseCurve
from hf_descent.evaluation.comparison import Run
from hf_descent.readout.labels import IGNORE_INDEX
from hf_descent.runs import RunFolder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    sides = (WORDS[:3], WORDS[3:6])
    rows = [f"{sides[i % 2][i % 3]} was the film,{i % 2}" for i in range(60)]
    (folder / "rows.csv").write_text("\n".join(["text,label", *rows]))
    save_tiny_model(folder / "base")
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=2)
        model.config.id2label = {0: "1", 1: "0"}
        for parameter in model.parameters():
            parameter.data *= 8
        model.save_pretrained(folder / f"run-{seed}")
        tokenizer.save_pretrained(folder / f"run-{seed}")
    summary = {
        "noise_gamma": 0.5, "objective": "descent", "arguments": {"objective": "descent", "seed": 4},
        "alpha": [0.1] * 3, "initial_loss_bound": 0.7, "num_layers": 3, "constrained_layers": [1, 2, 3],
        "chance_loss": 0.69, "warmup_layer_losses": [0.65, 0.6, 0.4], "multipliers": [0.0, 0.25, 0.5],
        "select_rows": 60,
    }  # fmt: skip
    (folder / "run-1" / "descent_config.json").write_text(json.dumps(summary))
    (folder / "recipe.yaml").write_text(
        f"train_file: {folder}/rows.csv\ntest_file: {folder}/rows.csv\nmax_seq_length: 3\nlearning_rate: 1e-5\n"
        "eval_gammas: [0.0, 0.5, 1.0]\nper_device_eval_batch_size: 10\nobjective: descent\n"
    )
    return folder


def test_two_classifiers_on_the_data_of_a_recipe(workplace, capsys):
    names = [str(workplace / f"run-{seed}") for seed in (0, 1)]
    flags = [
        "--draws",
        "2",
        "--confidence",
        "0.9",
    ]
    for name in names:
        cli.main(["evaluate", name, "--config", str(workplace / "recipe.yaml"), *flags])
    printed = capsys.readouterr().out
    curves = [NoiseCurve.from_json(f"{name}/noise_curve.json") for name in names]
    tokenizer = AutoTokenizer.from_pretrained(names[1])
    rows = [line.rsplit(",", 1) for line in (workplace / "rows.csv").read_text().splitlines()[1:]]
    rows = [
        {
            **tokenizer(text, truncation=True, max_length=3),
            "labels": 1 - int(label),
        }  # as the model names its classes
        for text, label in rows
    ]
    data = Dataset.from_list(rows).shuffle(seed=0)
    model = AutoModelForSequenceClassification.from_pretrained(names[1])
    settings = {"draws": 2, "batch_size": 10, "processing_class": tokenizer}
    expected = noise_curve(model, data, [0.0, 0.5, 1.0], gamma_train=0.5, **settings)
    np.testing.assert_allclose(curves[1].losses, expected.losses, rtol=1e-5)
    assert str(curves[1]) in printed
    assert [curve.gamma_train for curve in curves] == [None, 0.5]
    assert curves[0].settings["data"] == curves[1].settings["data"]

    clean = LayerProfile.from_json(f"{names[1]}/layer_profile.json")
    assert clean.losses[-1] == pytest.approx(expected.losses[0, 0], rel=1e-5)
    assert clean.problem["initial_loss_bound"] == 0.7  # as in its training
    certificate = Certificate.from_json(f"{names[1]}/verdict.json")
    assert str(certificate) in printed and certificate.confidence == 0.9
    assert certificate.multipliers == [0.0, 0.25, 0.5] and not certificate.also_selected
    assert LayerProfile.from_json(f"{names[1]}/layer_profile_gamma_0.5.json").gamma == 0.5
    cli.main(
        [
            "compare",
            f"plain={names[0]}",
            f"ours={names[1]}",
            "--output_dir",
            str(workplace / "comparison"),
        ]
    )
    assert "ours against plain: not tested" in capsys.readouterr().out


def test_profiles_are_named_by_their_level_and_none_is_left_of_an_earlier_evaluation(
    workplace, monkeypatch
):
    name = workplace / "run-1"
    argv = ["evaluate", str(name), "--config", str(workplace / "recipe.yaml"), "--draws", "1"]
    argv += ["--eval_gammas", "0", "1"]
    cli.main([*argv, "--profile_gammas", "0", "0.25", "0"])
    clean, noisy = (
        LayerProfile.from_json(name / f"layer_profile{end}.json") for end in ("", "_gamma_0.25")
    )
    assert (clean.gamma, noisy.gamma) == (0.0, 0.25)
    assert Certificate.from_json(name / "verdict_gamma_0.25.json").gamma == 0.25
    results = ("layer_", "verdict", "noise_curve")
    former = {file.name for file in name.iterdir() if file.name.startswith(results)}
    kept = {file.name for file in name.iterdir()} - former  # a killed call leaves none
    with monkeypatch.context() as patch:
        patch.setattr(LayerProfile, "certificate", lambda *args, **facts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli.main([*argv, "--profile_gammas", "2"])
    assert {file.name for file in name.iterdir()} == kept
    recipe = (workplace / "recipe.yaml").read_text().replace("test_file", "validation_file")
    (workplace / "validation.yaml").write_text(recipe)
    cli.main([*argv, "--config", str(workplace / "validation.yaml"), "--profile_gammas", "0"])
    assert Certificate.from_json(
        name / "verdict.json"
    ).also_selected  # these rows may have chosen the checkpoint
    rows, others = f"{workplace}/rows.csv", f"{workplace}/others.csv"
    for record, given, marked in (
        ({"train_file": rows}, [], True),
        ({"train_file": others}, [], False),
        ({"train_file": others, "validation_file": rows}, [], True),
        ({"train_file": rows, "validation_file": others}, ["--train_file", rows], True),
    ):
        (name / "_data.json").write_text(json.dumps(record))
        recipe = (
            ["evaluate", str(name), "--max_seq_length", "3", "--eval_gammas", "0"]
            if given
            else argv
        )
        cli.main([*recipe, *given, "--profile_gammas", "0"])
        assert Certificate.from_json(name / "verdict.json").also_selected == marked
    (name / "_data.json").unlink()
    cli.main([*argv, "--profile_gammas", "2", "1", "2"])
    assert {file.name for file in name.glob("layer_profile*")} == {
        f"layer_profile_gamma_{x}.json" for x in (1, 2)
    }
    assert not (name / "verdict.json").exists()


def test_a_run_on_the_hub_is_measured_as_one_in_a_folder(workplace, tmp_path, monkeypatch):
    """From the Hub's cache, as it lies there after a download."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--someone--run"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(workplace / "run-1", repository / "snapshots" / ("0" * 40))
    flags = ["--draws", "1", "--eval_gammas", "0", "1", "--results_dir", str(tmp_path / "results")]
    cli.main(["evaluate", "someone/run", "--config", str(workplace / "recipe.yaml"), *flags])
    assert (
        Certificate.from_json(tmp_path / "results" / "run" / "verdict_gamma_0.5.json").gamma == 0.5
    )
    assert (
        NoiseCurve.from_json(tmp_path / "results" / "run" / "noise_curve.json").gamma_train == 0.5
    )
    found, local = (
        Run.load(str(tmp_path / "results" / "run")),
        RunFolder(workplace / "run-1").summary,
    )
    assert found.seed == 4 and found.summary["arguments"] == local["arguments"]


def test_a_model_without_a_summary_is_not_taken_for_one_of_its_name(workplace, tmp_path):
    plain = shutil.copytree(workplace / "run-0", tmp_path / "run-1")
    flags = [
        "--config",
        str(workplace / "recipe.yaml"),
        "--draws",
        "1",
        "--results_dir",
        str(tmp_path / "results"),
    ]
    cli.main(["evaluate", str(workplace / "run-1"), *flags])
    assert Run.load(str(tmp_path / "results" / "run-1")).summary["objective"] == "descent"
    cli.main(["evaluate", str(plain), *flags])
    assert Run.load(str(tmp_path / "results" / "run-1")).summary.keys() == {"versions"}


def test_completions_of_a_language_model(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "w0"
    tokenizer.save_pretrained(tmp_path / "model")
    model = llama().eval()
    model.save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"w7 w{i}", "input": "", "output": f"w8 w{i} w9"} for i in range(1, 11)]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    flags = [
        "--train_file",
        str(tmp_path / "rows.json"),
        "--test_file",
        str(tmp_path / "rows.json"),
    ]
    flags += ["--eval_gammas", "0", "1", "--results_dir", str(tmp_path / "results")]
    cli.main(["evaluate", str(tmp_path / "model"), *flags])
    curve = NoiseCurve.from_json(str(tmp_path / "results" / "model" / "noise_curve.json"))

    right = count = 0
    for row in rows:
        prompt = format_prompt(row["instruction"])
        ids = tokenizer(prompt)["input_ids"] + tokenizer(f"{row['output']} w0")["input_ids"]
        ids, start = ids[:64], len(tokenizer(prompt)["input_ids"])
        with torch.no_grad():
            predicted = model(torch.tensor([ids])).logits[0].argmax(-1)[start - 1 : -1]
        right += int((predicted == torch.tensor(ids[start:])).sum())
        count += len(ids) - start
    assert curve.metric == "accuracy"
    assert curve.values[0, 0] == pytest.approx(right / count)
    (tmp_path / "model" / "descent_config.json").write_text(
        '{"arguments": {"truncation_mode": "keep_end"}}'
    )
    with pytest.raises(
        ValueError, match="labels of `assistant_only_loss` or `truncation_mode` need"
    ):
        cli.main(["evaluate", str(tmp_path / "model"), *flags])


def test_prompts_without_room_for_an_answer_are_counted(tmp_path, capsys):
    word_tokenizer().save_pretrained(tmp_path / "model")
    llama().save_pretrained(tmp_path / "model")  # with 64 positions
    questions = ["w1", "w2", " ".join(["w3"] * 60)]
    rows = [{"instruction": question, "output": "w8 w9"} for question in questions]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    args = InstructionArguments(train_file=str(tmp_path / "rows.json"))
    args.validation_file = args.train_file
    assert len(language_task(str(tmp_path / "model"), args).rows) == 2
    reported = (
        "Dropped 1 of the 3 validation examples: their prompts leave no room for an answer in 64"
    )
    assert reported in capsys.readouterr().out


def test_labels_of_completions_are_those_that_trl_trains_on(tmp_path):
    trl = pytest.importorskip("trl")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", *letters, "ĊĊ"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")
    # An end that is there already, and a token that joins the prompt's end and the completion's start.
    rows = [
        {"prompt": "Say a:\n", "completion": completion} for completion in ("b", "b</s>", "\nb")
    ]
    args = trl.SFTConfig(str(tmp_path), report_to="none", use_cpu=True)
    model = llama(vocab_size=len(tokenizer))
    trainer = trl.SFTTrainer(
        model, args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    for row, made in zip(rows, trainer.train_dataset, strict=True):
        found = completion_labels(row, tokenizer)
        assert (found["input_ids"], found["labels"]) == (made["input_ids"], made["labels"])
        cut = completion_labels(row, tokenizer, limit=8)
        assert (cut["input_ids"], cut["labels"]) == (made["input_ids"][:8], made["labels"][:8])
        assert cut["attention_mask"] == [1] * len(cut["labels"]) and IGNORE_INDEX in cut["labels"]


def test_what_cannot_be_evaluated_is_said(tmp_path, workplace):
    with pytest.raises(ValueError, match="The model is missing"):
        cli.main(["evaluate", "--config", str(workplace / "recipe.yaml")])
    model = bert()
    model.config.architectures = None
    model.bert.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match="is a BertModel; give architectures that end in"):
        cli.main(["evaluate", str(tmp_path / "encoder")])
    run = str(workplace / "run-0")
    with pytest.raises(
        ValueError, match="The model is .*run-0, .*run-0: `hf-descent evaluate MODE"
    ):
        cli.main(["evaluate", run, run])


def test_plain_training_is_judged_by_what_its_arguments_state(workplace, tmp_path):
    """Also where it was not evaluated, so that its record holds no problem; plain `Trainer` states nothing."""
    for name, arguments in (
        ("erm", {"exit_targets": {"1": 0.2}, "objective": "erm"}),
        ("stock", {}),
    ):
        shutil.copytree(workplace / "run-0", tmp_path / name)
        summary = {"objective": "erm", "arguments": arguments}
        (tmp_path / name / "descent_config.json").write_text(json.dumps(summary))
        flags = ["--config", str(workplace / "recipe.yaml"), "--draws", "1"]
        cli.main(["evaluate", str(tmp_path / name), *flags])
    verdict = Certificate.from_json(str(tmp_path / "erm" / "verdict.json"))
    losses = LayerProfile.from_json(str(tmp_path / "erm" / "layer_profile.json")).losses
    assert verdict.rows == ["exit_1"]
    assert verdict.asked == pytest.approx([1.2 * losses[-1]], rel=1e-6)
    assert verdict.reached == pytest.approx([losses[0]], rel=1e-6)
    assert Run.load(str(tmp_path / "erm")).certificate is not None
    assert not (tmp_path / "stock" / "verdict.json").exists()
