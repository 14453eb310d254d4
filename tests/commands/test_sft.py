"""The `sft` command through the smoke recipes, as their README gives them."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from smoke import SMOKE, results_of, smoke_command
from tiny.models import bert, llama
from tiny.tokenizers import tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_descent import cli
from hf_descent.data.alpaca import format_prompt


ROWS = [
    {"instruction": f"Add {i}.", "input": "to 1" if i % 2 else "", "output": str(i + 1)}
    for i in range(32)
]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    for name, chat in (("plain", False), ("chat", True)):
        tok = tokenizer(chat)
        tok.save_pretrained(folder / name)
        llama(vocab_size=len(tok), max_position_embeddings=320).save_pretrained(folder / name)
    (folder / "train.json").write_text(json.dumps(ROWS))
    return folder


@pytest.fixture
def sft(workplace, tmp_path):
    """Runs the README's command of an arm, on the tiny model and rows, and gives its output folder."""

    def run(arm, *flags, model="plain"):
        words = [
            *smoke_command(f"alpaca/{arm}.yaml"),
            "--model_name_or_path",
            str(workplace / model),
        ]
        words += [
            "--train_file",
            str(workplace / "train.json"),
            "--output_dir",
            str(tmp_path / "out"),
        ]
        cli.main(
            [*words, "--max_length", "320", "--report_to", "none", "--disable_tqdm", "true", *flags]
        )
        return tmp_path / "out"

    return run


@pytest.mark.parametrize("arm", ["erm", "noise", "descent"])
def test_smoke_recipes_run(sft, arm, capsys):
    folder = sft(arm)
    recipe, results = yaml.safe_load((SMOKE / f"alpaca/{arm}.yaml").read_text()), results_of(folder)
    assert ("train_max_violation" in results) == (arm == "descent")
    profile, curve = results_of(folder, "layer_profile"), results_of(folder, "noise_curve")
    assert profile["losses"][-1] == pytest.approx(results["eval_loss"], rel=1e-4)
    if arm == "descent":
        assert results["eval_layer_loss_3"] == pytest.approx(results["eval_loss"], rel=1e-5)
    assert curve["gammas"] == recipe["eval_gammas"]
    assert curve["values"][0][0] == pytest.approx(results["eval_mean_token_accuracy"], abs=0.02)
    printed = capsys.readouterr().out
    assert "[no label] 'Below is an instruction" in printed and "</s>'" in printed
    scores = [f"{results[f'eval_{name}']:.4f}" for name in ("mean_token_accuracy", "loss")]
    assert ["validation", *scores] in [line.split() for line in printed.splitlines()]


def test_plain_training_stands_beside_without_noise_levels(sft, tmp_path, capsys):
    """Also in `compare`, of runs without a curve; counts of tokens start anew with each arm."""
    quick = ["--with_plain", "--max_steps", "4", "--noise_gamma", "0"]
    folder = sft("descent", *quick, "--save_strategy", "no", "--logging_steps", "1")
    (folder / "noise_curve.json").unlink()
    (folder / "_plain" / "noise_curve.json").unlink()
    printed = capsys.readouterr().out
    losses = [results_of(each, "layer_profile")["losses"] for each in (folder / "_plain", folder)]
    table = printed.split("Plain training and 'descent' side by side\n")[1]
    last = table.splitlines()[3].split()
    assert last[:3] == ["3", f"{losses[0][2]:.4g}", f"{losses[1][2]:.4g}"]
    assert printed.count("VERDICT: ") == table.count("\nVERDICT: ") == 1  # of this run, at the end
    cli.main(["compare", str(folder / "_plain"), str(folder)])
    assert table.splitlines()[3] in capsys.readouterr().out
    tokens = [
        [log["num_tokens"] for log in results_of(each, "trainer_state")["log_history"] if "loss" in log]
        for each in (folder / "_plain", folder)
    ]  # fmt: skip
    assert tokens[0] == tokens[1]
    assert not (tmp_path / "comparison").exists()


def test_the_saved_model_is_the_evaluated_one(sft, workplace):
    """Its loss on the completions alone, row by row and without TRL."""
    folder = sft("noise", "--validation_file", str(workplace / "train.json"))
    model, tok = AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer(False)
    total, hits, count = 0.0, 0, 0
    for row in ROWS:
        prompt = tok(format_prompt(row["instruction"], row["input"])).input_ids
        ids = torch.tensor([prompt + tok(row["output"] + "</s>").input_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        total += F.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum").item()
        hits += (logits.argmax(-1) == ids[0, len(prompt) :]).sum().item()
        count += ids.shape[1] - len(prompt)
    curve = results_of(folder, "noise_curve")
    assert curve["losses"][0][0] == pytest.approx(total / count, rel=1e-4)
    assert curve["values"][0][0] == pytest.approx(hits / count, rel=1e-6)
    assert model.config.noise_sigma > 0


def test_lora_chat_and_test_rows(sft, workplace):
    rows = str(workplace / "train.json")
    folder = sft("descent", "--use_peft", "--lora_r", "2", "--test_file", rows, model="chat")
    weights = load_file(folder / "adapter_model.safetensors")
    assert {weight.shape[0] for name, weight in weights.items() if "lora_A" in name} == {2}
    assert results_of(folder, "descent_config")["noise_sigma"] > 0
    command = ["evaluate", str(folder), "--config", str(SMOKE / "alpaca/descent.yaml")]
    command += [
        "--train_file",
        rows,
        "--test_file",
        rows,
        "--results_dir",
        str(workplace / "measured"),
    ]
    cli.main([*command, "--draws", "1", "--eval_gammas", "0", "1"])
    measured, trained = (
        results_of(path, "noise_curve") for path in (workplace / "measured" / folder.name, folder)
    )
    assert measured["losses"][0][0] == pytest.approx(trained["losses"][0][0], rel=1e-4)
    results = results_of(folder)
    assert {
        "eval_layer_loss_1",
        "test_layer_loss_1",
        "test_mean_token_accuracy",
        "test_accuracy_auc",
    } <= set(results)
    history = results_of(folder, "trainer_state")["log_history"]
    assert not any(name.startswith("test") for entry in history for name in entry)


def test_a_chat_template_from_a_file_is_that_of_the_prompts(sft, tmp_path, capsys):
    (tmp_path / "chat.jinja").write_text(tokenizer(True).chat_template)
    flags = [
        "--chat_template_path",
        str(tmp_path / "chat.jinja"),
        "--max_steps",
        "1",
        "--prompt_format",
        "auto",
    ]
    folder = sft("erm", *flags)
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer(True).chat_template
    printed = capsys.readouterr().out
    assert "Below is an instruction" not in printed
    assert "[no label] '<user>Add" in printed


def test_a_model_must_be_named(sft):
    with pytest.raises(ValueError, match="`model_name_or_path` is not given"):
        cli.main(["sft", "--output_dir", "unused", "--use_cpu", "--bf16", "false"])


def test_damaged_weights_are_named(sft, workplace):
    shutil.copytree(workplace / "plain", workplace / "damaged")
    (workplace / "damaged" / "model.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1"
    )
    with pytest.raises(ValueError, match="damaged' are damaged"):
        sft("erm", model="damaged")


def test_a_model_of_another_kind_is_refused(sft, workplace):
    bert().save_pretrained(workplace / "bert")
    with pytest.raises(
        ValueError, match="bert', a BertForSequenceClassification; give a language model"
    ):
        sft("erm", model="bert")
