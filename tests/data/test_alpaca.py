import json

import pytest
from datasets import Dataset
from tiny.tokenizers import tokenizer
from tokenizers.processors import TemplateProcessing

from hf_descent.data.alpaca import (
    AlpacaArguments,
    completion_labels,
    format_prompt,
    load_alpaca,
    prompt_ids,
    read_instructions,
)


ROWS = [
    {
        "instruction": f"Double {i}.",
        "input": "" if i % 2 else f"of {i}",
        "output": str(2 * i) if i else "",
    }
    for i in range(41)
]


@pytest.fixture
def train_file(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(ROWS))
    return str(tmp_path / "train.json")


def test_rows_become_alpacas_prompts(train_file, caplog):
    splits = load_alpaca(
        AlpacaArguments(train_file=train_file, validation_split_percentage=25),
        tokenizer(chat=False),
    )
    assert [len(splits[name]) for name in ("train", "validation")] == [30, 10]
    assert (
        "Dropped 1 of the 41 train examples: they are without `output` (empty: 1; example 1)"
        in caplog.text
    )
    rows = {row["completion"]: row["prompt"] for name in splits for row in splits[name]}
    assert rows["6"] == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDouble 3.\n\n### Response:\n"
    )
    assert rows["8"] == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n"
        "### Instruction:\nDouble 4.\n\n### Input:\nof 4\n\n### Response:\n"
    )


def test_outputs_of_blanks_alone_are_none(tmp_path, caplog):
    outputs = ["2", "", "  ", "\n\t", None, " 4 "]
    rows = [{"instruction": "Double.", "output": output} for output in outputs]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    args = AlpacaArguments(train_file=str(path), validation_file=str(path))
    splits = load_alpaca(args, tokenizer(chat=False))
    assert splits["train"]["completion"][:] == ["2", " 4 "]
    assert (
        "Dropped 4 of the 6 train examples: they are without `output` (empty: 3, no value: 1"
        in caplog.text
    )

    pairs = read_instructions(str(path), "auto", tokenizer(), ["input", "output"])
    answered = [pair["completion"] for pair in pairs if pair["completion"]]
    assert [messages[0]["content"] for messages in answered] == ["2", " 4 "]


@pytest.mark.parametrize("with_input", ["train", "validation"])
def test_a_split_may_have_no_input(tmp_path, with_input):
    files = {}
    for split in ("train", "validation"):
        row = {"instruction": "Double.", "output": "2"}
        if split == with_input:
            row["input"] = "of 1"
        path = tmp_path / f"{split}.jsonl"
        path.write_text(json.dumps(row))
        files[f"{split}_file"] = str(path)
    splits = load_alpaca(AlpacaArguments(**files), tokenizer(chat=False))
    for split, rows in splits.items():
        assert rows.column_names == ["prompt", "completion"]
        assert ("of 1" in rows["prompt"][0]) == (split == with_input)


def test_one_row_is_too_few_to_hold_out(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"instruction": "Double.", "output": "2"}))
    with pytest.raises(ValueError, match="one example, .*give validation examples"):
        load_alpaca(AlpacaArguments(train_file=str(path)), tokenizer(chat=False))


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_answers_stay_as_they_are_written(tmp_path, suffix):
    outputs = ["007", "1e3", "2020-01-01", "NA", "null", "-1", " 5", "true"]
    rows = [
        {"instruction": str(i), "output": output, "unused": ""} for i, output in enumerate(outputs)
    ]
    rows[3]["unused"] = 3
    path = tmp_path / f"train{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        separator = "\t" if suffix == ".tsv" else ","
        lines = [rows[0].keys(), *(map(str, row.values()) for row in rows)]
        path.write_text("\n".join(map(separator.join, lines)))
    splits = load_alpaca(AlpacaArguments(train_file=str(path)), tokenizer(chat=False))
    read = {row["completion"] for name in splits for row in splits[name]}
    assert read == set(outputs)


def test_a_chat_template_takes_the_place_of_alpacas(train_file):
    splits = load_alpaca(AlpacaArguments(train_file=train_file), tokenizer())
    rows = {row["completion"][0]["content"]: row for name in splits for row in splits[name]}
    assert rows["8"]["prompt"] == [{"role": "user", "content": "Double 4.\n\nof 4"}]
    assert rows["6"] == {
        "prompt": [{"role": "user", "content": "Double 3."}],
        "completion": [{"role": "assistant", "content": "6"}],
    }
    plain = load_alpaca(AlpacaArguments(train_file=train_file, prompt_format="alpaca"), tokenizer())
    assert isinstance(plain["train"][0]["prompt"], str)


def test_input_is_optional_and_the_hub_has_a_default(monkeypatch):
    rows = Dataset.from_list(
        [{"instruction": f"Double {i}.", "output": str(2 * i), "more": 1} for i in range(1, 21)]
    )
    opened = []
    monkeypatch.setattr(
        "hf_descent.data.splits.load_dataset", lambda *args, **kwargs: opened.append(args) or rows
    )
    splits = load_alpaca(AlpacaArguments(), tokenizer(chat=False))
    assert opened == [("tatsu-lab/alpaca", None)]
    assert splits["train"].column_names == ["prompt", "completion"]
    assert format_prompt("Double 3.") == format_prompt("Double 3.", "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": None, "output": "a"}, "1 examples whose instruction is not a string"),
        ({"instruction": "a", "output": 0}, "1 examples whose output is not a string"),
        ({"instruction": "a", "input": 0, "output": "b"}, "1 examples whose input is not a string"),
        ({"instruction": "a", "output": ""}, "no example with a value of `output`"),
        (
            {"question": "a", "answer": "b"},
            r"no column \['instruction', 'output'\]; it has \['question', 'answer'\]",
        ),
    ],
)
def test_rows_that_are_no_texts_are_refused(tmp_path, row, message):
    path = tmp_path / "train.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        load_alpaca(AlpacaArguments(train_file=str(path)), tokenizer())


def test_a_prompt_has_no_end_of_text_where_the_tokenizer_adds_one():
    own = tokenizer(chat=False)
    plain = own("Add 1.")["input_ids"]
    own._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert prompt_ids("Add 1.", own) == [1, *plain]
    assert completion_labels({"prompt": "Add 1.", "completion": None}, own)["labels"] == [
        1,
        *plain,
        2,
    ]
