import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hub_server import Handler, serving
from peft import LoraConfig, get_peft_model
from programs import ROOT, python
from tiny.files import save_generator
from tiny.models import bert
from tiny.tokenizers import tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationConfig

from hf_descent import EmbeddingNoise
from hf_descent.data.alpaca import format_prompt
from recipes.reproduce import generate


ROWS = [
    {
        "instruction": f"Count to {i}{'!' * (i % 3)}",
        "dataset": "counting" if i % 2 else "helpful_base",
    }
    for i in range(7)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_generator(tmp_path_factory.mktemp("plain") / "tiny-model")


@pytest.fixture
def instructions(tmp_path):
    path = tmp_path / "instructions.json"
    path.write_text(json.dumps(ROWS))
    return str(path)


@pytest.fixture
def answers(model, instructions, tmp_path):
    def run(name="outputs.json", model=model, **flags):
        words = [
            model,
            "--output",
            str(tmp_path / name),
            "--instructions",
            instructions,
        ]
        flags = {"batch_size": 3, "max_new_tokens": 8} | flags
        generate.main(
            [*words, *(word for flag, value in flags.items() for word in (f"--{flag}", str(value)))]
        )
        return json.loads((tmp_path / name).read_text())

    return run


def test_the_file_is_alpaca_evals(answers, tmp_path, capsys):
    rows = answers("a/b.json")
    assert [list(row) for row in rows] == [["instruction", "output", "generator", "dataset"]] * len(
        ROWS
    )
    for row, given in zip(rows, ROWS):
        assert row["instruction"] == given["instruction"] and row["dataset"] == given["dataset"]
        assert row["generator"] == "tiny-model" and row["output"]
    assert os.listdir(tmp_path / "a") == ["b.json"]
    assert "7 answers of tiny-model" in capsys.readouterr().out
    assert answers("c.json", gamma=1.5, max_samples=2)[0]["generator"] == "tiny-model-gamma1.5"
    with pytest.raises(ValueError, match="exists already"):
        answers("c.json")


def naive_answer(model, index, seed, sigma):
    """To a row, without padding, by the model's own `generate` inside the noise."""
    tok = tokenizer(False)
    ids = tok(format_prompt(ROWS[index]["instruction"]), return_tensors="pt").input_ids
    noise = EmbeddingNoise(model, 1.5, seed=seed, sigma=sigma)
    noise.reseed(index)
    with noise:
        tokens = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8
        )
    return tok.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_answers_are_those_of_generate_under_the_same_noise(answers, model):
    rows = answers(batch_size=1, gamma=1.5, seed=3)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    for index, row in enumerate(rows):
        assert row["output"] == naive_answer(loaded, index, seed=3, sigma=0.5)
    assert [row["output"] for row in answers("clean.json", batch_size=1)] != [
        row["output"] for row in rows
    ]


@pytest.mark.parametrize(
    "own", [{"num_beams": 3, "num_return_sequences": 3}, {"return_dict_in_generate": True}]
)
def test_a_prompt_has_one_answer_whatever_the_model_returns_by_default(
    answers, model, tmp_path, own
):
    other = str(shutil.copytree(model, tmp_path / "tiny-model"))
    GenerationConfig.from_pretrained(other, **own).save_pretrained(other)
    assert answers("other.json", model=other) == answers()


def test_chat_templates_and_inputs_are_used(tmp_path, monkeypatch):
    seen = []
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"instruction": "Double.", "input": "7"}]))
    monkeypatch.setattr(
        generate,
        "answer",
        lambda model, tok, inputs, args: (
            seen.extend(tok.batch_decode(inputs["input_ids"])) or ["x"]
        ),
    )
    for chat, form in ((True, "auto"), (True, "alpaca"), (False, "auto")):
        folder = save_generator(tmp_path / f"model-{chat}", chat)
        tok = tokenizer(chat)
        tok.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
        tok.save_pretrained(folder)
        output = str(tmp_path / f"{len(seen)}.json")
        generate.main(
            [
                folder,
                "--output",
                output,
                "--instructions",
                str(path),
                "--prompt_format",
                form,
            ]
        )
    alpaca = "<s>" + format_prompt("Double.", "7")
    assert seen == ["<user>Double.\n\n7</s><assistant>", alpaca, alpaca]


def test_adapters_answer_under_the_noise_of_their_training(answers, model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(0)
    adapted = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval()
    adapted.save_pretrained(tmp_path / "lora")
    tokenizer(False).save_pretrained(tmp_path / "lora")
    (tmp_path / "lora" / "descent_config.json").write_text(json.dumps({"noise_sigma": 0.25}))
    row = answers(model=str(tmp_path / "lora"), max_samples=1, gamma=1.5)[0]
    found = [
        naive_answer(adapted, 0, seed=0, sigma=sigma) for sigma in (0.25, 0.5)
    ]  # its own, not the base model's
    assert row["output"] == found[0] != found[1] and row["generator"] == "lora-gamma1.5"


def test_refusals_name_the_remedy(answers, tmp_path, instructions):
    length = len(tokenizer(False)(format_prompt(ROWS[0]["instruction"])).input_ids)
    narrow = save_generator(tmp_path / "narrow", max_position_embeddings=length + 2)
    short, whole = (
        answers(f"{len(given)}.json", max_samples=1, **given) for given in ({"model": narrow}, {})
    )
    assert len(short[0]["output"]) <= 2 < len(whole[0]["output"])
    with pytest.raises(
        ValueError, match=f"Prompt 2 has {length + 2} tokens, .*full {length + 2} positions"
    ):
        answers(
            "z.json",
            model=save_generator(tmp_path / "full", max_position_embeddings=length + 2),
            batch_size=1,
        )
    bert().save_pretrained(tmp_path / "classifier")
    tokenizer(False).save_pretrained(tmp_path / "classifier")
    with pytest.raises(
        ValueError, match="a BertForSequenceClassification; give a causal language model"
    ):
        answers("y.json", model=str(tmp_path / "classifier"))
    assert not list(tmp_path.glob("y.json*"))
    Path(instructions).write_text(json.dumps([{"question": "a"}]))
    with pytest.raises(
        ValueError, match=r"instructions.json has no column 'instruction'; it has \['question'\]"
    ):
        answers("x.json")
    Path(instructions).write_text(json.dumps([{"instruction": None}]))
    with pytest.raises(ValueError, match="1 examples whose instruction is not a string"):
        answers("v.json")
    Path(instructions).write_text(json.dumps([{"instruction": "Double it", "input": 0}]))
    with pytest.raises(ValueError, match="1 examples whose input is not a string"):
        answers("u.json")


def test_the_documented_commands_parse():
    readme = (ROOT / "recipes/alpaca-eval/README.md").read_text()
    lines = re.findall(r"^python -m recipes.reproduce.generate (.*)$", readme, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        _, args = generate.parse(line.split())
        assert args.gamma == 1.5


# ---- the real alpaca_eval package ----


class Judge(Handler):
    """Prefers the answer with more different letters; a draw goes to the first."""

    prompts = []

    def do_POST(self):
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1][
            "content"
        ]
        self.prompts.append(prompt)
        first, second = re.search(
            "Answer m:\n(.*?)\n\nAnswer M:\n(.*?)\n\nWhich", prompt, re.DOTALL
        ).groups()
        letter = "M" if len(set(second)) > len(set(first)) else "m"
        message = {"role": "assistant", "content": letter}
        body = {
            "id": "0", "object": "chat.completion", "created": 0, "model": "judge",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }  # fmt: skip
        self.send(body, **{"Content-Type": "application/json"})


@pytest.fixture
def judge(monkeypatch):
    Judge.prompts.clear()
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with serving(Judge) as server:
        monkeypatch.setenv("OPENAI_API_BASE", f"{server.endpoint}/v1")
        yield


def letters(row):
    return len(set(row["output"]))


@pytest.mark.slow
def test_alpaca_eval_reads_the_file_and_agrees_on_the_win_rate(answers, judge, tmp_path):
    pytest.importorskip("alpaca_eval")
    reference, noisy = answers("all-erm.json"), answers("all-descent.json", gamma=3.0)
    kept = [
        index for index in range(len(ROWS)) if letters(reference[index]) != letters(noisy[index])
    ]  # no draws
    assert len(kept) > 2
    expected = 100 * np.mean([letters(noisy[index]) > letters(reference[index]) for index in kept])
    for name, rows in (("erm", reference), ("descent", noisy)):
        (tmp_path / f"{name}.json").write_text(json.dumps([rows[index] for index in kept]))
    (line,) = re.findall(
        r"^alpaca_eval (.*)$", (ROOT / "recipes/alpaca-eval/README.md").read_text(), re.MULTILINE
    )
    words = line.replace("runs/alpaca-eval", str(tmp_path)).replace("$PWD", str(ROOT)).split()
    words += ["--fn_metric", "get_winrate", "--sort_by", "win_rate", "--caching_path", "None"]
    python("-c", "from alpaca_eval.main import main; main()", *words, cwd=ROOT)
    assert len(Judge.prompts) == len(kept)
    board = pd.read_csv(tmp_path / "leaderboard.csv", index_col=0)
    assert board.index.tolist() == ["tiny-model-gamma3"]
    assert board.loc["tiny-model-gamma3", "win_rate"] == pytest.approx(expected)
    assert board.loc["tiny-model-gamma3", "n_total"] == len(kept)
