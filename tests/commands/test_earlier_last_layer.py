"""The commands judge f_L by what it was before training where they read the same rows, and only there."""

import json

import pytest
from tiny.files import WORDS, save_tiny_model
from tiny.models import llama
from tiny.tokenizers import tokenizer

from hf_descent import cli
from hf_descent.evaluation import LayerProfile
from hf_descent.evaluation.price import START, WARMUP
from hf_descent.runs import RunFolder


FLAGS = [
    *("--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--max_steps", "6"),
    *("--learning_rate", "1e-3"),
]


def train_classifier(folder, *more):
    save_tiny_model(folder / "base")
    for name, count in (("train", 64), ("validation", 40), ("other", 40)):
        shift = 3 if name == "other" else 0
        lines = [
            f"{' '.join(WORDS[(7 * i + j + shift) % len(WORDS)] for j in range(9))},{i % 2}"
            for i in range(count)
        ]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    model = ["--model_name_or_path", str(folder / "base"), "--max_seq_length", "8"]
    cli.main(["classify", *model, *FLAGS, *files_of(folder, "csv"), *more])
    return "csv"


def train_language_model(folder):
    tok = tokenizer(False)
    tok.save_pretrained(folder / "base")
    config = {"vocab_size": len(tok), "max_position_embeddings": 320}
    llama(**config).save_pretrained(folder / "base")
    for name, count in (("train", 64), ("validation", 32), ("other", 32)):
        shift = 7 if name == "other" else 0
        rows = [
            {"instruction": f"Add {i + shift}.", "input": "", "output": f"{i}"}
            for i in range(count)
        ]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    model = ["--model_name_or_path", str(folder / "base"), "--max_length", "320", "--bf16", "false"]
    cli.main(["sft", *model, *FLAGS, *files_of(folder, "json"), "--eos_token", "</s>"])
    return "json"


def files_of(folder, ending):
    names = ["--train_file", f"{folder}/train.{ending}"]
    names += ["--validation_file", f"{folder}/validation.{ending}"]
    return [*names, "--output_dir", str(folder / "run")]


def test_the_price_is_known_again_when_both_runs_are_evaluated_alike(tmp_path, capsys):
    """Batches of another size are other data, of which the command says what to do."""
    train_classifier(tmp_path, "--with_plain", "--per_device_eval_batch_size", "8")
    run = str(tmp_path / "run")
    flags = ["--draws", "1", "--eval_gammas", "0", "--per_device_eval_batch_size", "16"]

    cli.main(["evaluate", run, *flags])
    printed = capsys.readouterr().out
    assert "price unknown" in printed.splitlines()[-3]
    assert f"Next: `hf-descent evaluate {run}/_plain` with the same flags" in printed

    cli.main(["evaluate", f"{run}/_plain", *flags])
    cli.main(["evaluate", run, *flags])
    assert "price unknown" not in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize("train", [train_classifier, train_language_model])
def test_a_rise_on_the_rows_of_training_makes_a_verdict_not_met(tmp_path, train):
    ending = train(tmp_path)
    run = RunFolder(tmp_path / "run")

    def profile():
        return LayerProfile.from_json(tmp_path / "run" / "layer_profile.json")

    def verdict():
        return profile().certificate()

    # Of the training's own command, in pairs.
    assert verdict().price.of_other_data == []
    assert all(reference["rows"] is not None for reference in profile().references)

    cli.main(["evaluate", str(tmp_path / "run"), "--draws", "1", "--eval_gammas", "0"])
    assert verdict().price.references.keys() == {START, WARMUP}
    assert verdict().price.of_other_data == []
    assert verdict().price.exceeded is None

    # As if f_L had been lower before training.
    summary = run.summary
    summary["last_layer_losses"][START]["upper"] = 0.1
    run.write_summary(summary)
    cli.main(["evaluate", str(tmp_path / "run"), "--draws", "1", "--eval_gammas", "0"])
    assert verdict().price.exceeded == START
    assert verdict().outcome == "not met"

    others = ["--train_file", f"{tmp_path}/train.{ending}"]
    others += ["--validation_file", f"{tmp_path}/other.{ending}"]
    cli.main(["evaluate", str(tmp_path / "run"), *others, "--draws", "1", "--eval_gammas", "0"])
    assert verdict().price.of_other_data == [START, WARMUP]
    assert verdict().price.exceeded is None
