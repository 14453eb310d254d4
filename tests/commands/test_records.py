"""Commands that measure a finished run take what they are not told from its record, as direct computations show."""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny.files import WORDS, save_tiny_model
from tiny.models import llama, spread
from tiny.sft import TOKENIZER, chats, make
from tiny.tokenizers import tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hf_descent import SFTDescentTrainer, cli
from hf_descent.commands.arguments import record_of
from hf_descent.data.alpaca import AlpacaArguments, completion_labels, load_alpaca
from hf_descent.early_exit import ExitProfile
from hf_descent.evaluation import LayerProfile, NoiseCurve


QUIET = ["--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--max_steps", "4"]
READ = [
    "--max_seq_length",
    "5",
    "--text_column",
    "sentence",
    "--label_column",
    "class",
    "--max_eval_samples",
    "20",
]


def write_rows(path, count):
    """Texts of 9 words, of which the first tell nothing."""
    lines = [
        f"{' '.join(WORDS[(7 * i + j) % len(WORDS)] for j in range(9))},{i % 2}"
        for i in range(count)
    ]
    path.write_text("\n".join(["sentence,class", *lines]))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    save_tiny_model(folder / "base")
    spread(AutoModel.from_pretrained(folder / "base")).save_pretrained(folder / "base")
    for name, count in (("train", 64), ("test", 32), ("other", 24)):
        write_rows(folder / f"{name}.csv", count)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # its paths are relative
        words = [
            "--model_name_or_path",
            "base",
            "--train_file",
            "train.csv",
            "--test_file",
            "test.csv",
            *READ,
            *QUIET,
        ]
        words += [
            "--output_dir",
            "run",
            "--split_seed",
            "3",
            "--eval_gammas",
            "[0, 0.5]",
            "--learning_rate",
            "1e-3",
        ]
        cli.main(["classify", *words, "--per_device_eval_batch_size", "10"])
    return folder / "run"


def direct(run, rows, length):
    """The loss of the run's model on rows of a file, cut to so many tokens."""
    tok, model = (
        AutoTokenizer.from_pretrained(run),
        AutoModelForSequenceClassification.from_pretrained(run),
    )
    losses = []
    for row in rows:
        inputs = tok(row["sentence"], truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            losses.append(model(**inputs, labels=torch.tensor([int(row["class"])])).loss.item())
    return np.mean(losses)


def rows_of(run, name, count=20):
    return Dataset.from_csv(str(run.parent / f"{name}.csv")).shuffle(seed=3).select(range(count))


def test_a_classifier_is_measured_as_it_was_trained(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = LayerProfile.from_json(run / "layer_profile.json")
    expected = direct(run, rows_of(run, "test"), 5)
    assert expected != pytest.approx(direct(run, rows_of(run, "test"), 32), rel=1e-3)
    cli.main(["exit", str(run), "--repeats", "1"])
    assert ExitProfile.from_json(run / "exit_profile.json").losses[-1] == pytest.approx(
        expected, rel=1e-5
    )
    cli.main(["evaluate", str(run), "--draws", "1"])
    curve, profile = (
        NoiseCurve.from_json(run / "noise_curve.json"),
        LayerProfile.from_json(run / "layer_profile.json"),
    )
    assert curve.losses[0, 0] == pytest.approx(expected, rel=1e-5) and curve.gammas.tolist() == [
        0.0,
        0.5,
    ]
    np.testing.assert_allclose(profile.losses, trained.losses, rtol=1e-5)
    assert profile.data == trained.data  # in the same batches, too
    assert str(run.parent) not in (run / "descent_config.json").read_text()  # which is uploaded


def test_flags_win_and_rows_that_are_named_are_not_mixed_with_recorded_ones(run, tmp_path):
    flags = ["--repeats", "1", "--output_dir", str(tmp_path)]
    cli.main(["exit", str(run), *flags, "--max_seq_length", "8"])
    found = ExitProfile.from_json(tmp_path / "exit_profile.json").losses[-1]
    assert found == pytest.approx(direct(run, rows_of(run, "test"), 8), rel=1e-5)
    files = [
        word
        for name in ("train", "validation")
        for word in (f"--{name}-file", str(run.parent / "other.csv"))
    ]
    cli.main(
        [
            "evaluate",
            str(run),
            *files,
            "--draws",
            "1",
            "--results_dir",
            str(tmp_path),
            "--eval_gammas",
            "0",
        ]
    )
    found = NoiseCurve.from_json(tmp_path / "run" / "noise_curve.json")
    assert found.losses[0, 0] == pytest.approx(direct(run, rows_of(run, "other"), 5), rel=1e-5)


def test_a_run_without_a_record_of_its_files_tells_how_they_were_read(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "_data.json").unlink()  # as of an older run, or one from the Hub
    files = [
        "--train_file",
        str(run.parent / "other.csv"),
        "--validation_file",
        str(run.parent / "other.csv"),
    ]
    cli.main(["exit", str(other), *files, "--repeats", "1", "--max_eval_samples", "20"])
    found = ExitProfile.from_json(other / "exit_profile.json")
    rows = rows_of(run, "other").train_test_split(0.5, seed=3)["test"]
    assert found.losses[-1] == pytest.approx(direct(run, rows, 5), rel=1e-5)


@pytest.mark.parametrize(
    "more", [[], ["--completion_only_loss", "false", "--label_smoothing_factor", "0.2"]]
)
def test_a_language_model_is_measured_as_in_its_training(tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    tok = tokenizer(chat=True)
    spread(llama(vocab_size=len(tok), max_position_embeddings=2048)).save_pretrained("base")
    tok.save_pretrained("base")
    rows = [
        {"instruction": f"Add {i}.", "output": " ".join(map(str, range(i, i + 9)))}
        for i in range(32)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    words = [
        "--model_name_or_path",
        "base",
        "--train_file",
        "rows.json",
        "--validation_file",
        "rows.json",
        *QUIET,
    ]
    words += [
        "--prompt_format",
        "alpaca",
        "--max_length",
        "190",
        "--output_dir",
        "run",
        "--learning_rate",
        "1e-3",
    ]
    cli.main(["sft", *words, "--eos_token", "</s>", "--bf16", "false", *more])
    trained = LayerProfile.from_json("run/layer_profile.json")
    cli.main(["evaluate", "run", "--draws", "1", "--eval_gammas", "0"])
    np.testing.assert_allclose(
        LayerProfile.from_json("run/layer_profile.json").losses, trained.losses, rtol=1e-5
    )
    (tmp_path / "texts.json").write_text(json.dumps([{"text": "A long text. " * 30}]))
    cli.main(["exit", "run", "--data", "texts.json", "--repeats", "1"])
    ids = AutoTokenizer.from_pretrained("run")("A long text. " * 30, return_tensors="pt")[
        "input_ids"
    ][:, :190]
    loss = AutoModelForCausalLM.from_pretrained("run")(ids, labels=ids).loss.item()
    assert ExitProfile.from_json("run/exit_profile.json").losses[-1] == pytest.approx(
        loss, rel=1e-5
    )


def test_chats_that_a_script_trained_on_are_measured_on_all_tokens_and_on_no_data_but_those_named(
    tmp_path,
):
    rows = chats(16)
    trainer = make(
        SFTDescentTrainer,
        tmp_path / "run",
        chats,
        eval_data=rows,
        max_steps=2,
        loss_targets={1: 9.0},
    )
    trainer.train()
    trainer.save_model()
    trained = trainer.evaluate_layers()
    with pytest.raises(ValueError, match="No data: give `dataset_name`"):
        cli.main(["evaluate", str(tmp_path / "run")])
    pairs = [
        dict(zip(("instruction", "output"), (turn["content"] for turn in row["messages"])))
        for row in rows
    ]
    (tmp_path / "rows.json").write_text(json.dumps(pairs))
    files = [
        word
        for name in ("train", "test")
        for word in (f"--{name}_file", str(tmp_path / "rows.json"))
    ]
    cli.main(["evaluate", str(tmp_path / "run"), *files, "--draws", "1", "--eval_gammas", "0"])
    found = LayerProfile.from_json(tmp_path / "run" / "layer_profile.json")
    np.testing.assert_allclose(found.losses, trained.losses, rtol=1e-5)


def test_rows_with_labels_of_their_own_are_measured_on_completions(tmp_path):
    pairs = [{"instruction": f"Say {i}", "output": f"one two {i}"} for i in range(16)]
    (tmp_path / "rows.json").write_text(json.dumps(pairs))
    files = {f"{name}_file": str(tmp_path / "rows.json") for name in ("train", "test")}
    rows = load_alpaca(AlpacaArguments(**files), TOKENIZER)["test"]
    rows = rows.map(
        completion_labels, fn_kwargs={"tokenizer": TOKENIZER}, remove_columns=rows.column_names
    )
    rows = rows.select_columns(["input_ids", "labels"])
    trainer = make(
        SFTDescentTrainer,
        tmp_path / "run",
        lambda: rows,
        eval_data=rows,
        max_steps=2,
        max_length=400,
    )
    trainer.train()
    trainer.save_model()
    words = [word for name, file in files.items() for word in (f"--{name}", file)]
    cli.main(["evaluate", str(tmp_path / "run"), *words, "--draws", "1", "--eval_gammas", "0"])
    found = LayerProfile.from_json(tmp_path / "run" / "layer_profile.json")
    np.testing.assert_allclose(found.losses, trainer.evaluate_layers().losses, rtol=1e-5)


def test_a_killed_run_in_the_folder_of_another_has_its_own_record(run, monkeypatch):
    folder = shutil.copytree(run, run.parent / "killed")
    monkeypatch.chdir(run.parent)
    argv = ["classify", "--model_name_or_path", "base", "--train_file", "other.csv", *READ, *QUIET]
    argv += ["--output_dir", "killed", "--overwrite_output_dir", "true", "--save_steps", "4"]
    with monkeypatch.context() as patch:
        patch.setattr(
            "transformers.Trainer.save_state", lambda trainer: 1 / 0
        )  # after its last checkpoint
        with pytest.raises(ZeroDivisionError):
            cli.main(argv)
    assert record_of(str(folder / "checkpoint-4"))["train_file"] == str(run.parent / "other.csv")
    cli.main(argv)
    assert not {"test_results.json", "noise_curve.json"} & {path.name for path in folder.iterdir()}
    assert "test_accuracy" not in json.loads((folder / "all_results.json").read_text())
