import json
import re

import pandas as pd
import pytest
from architectures import MODELS, build
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from tiny.models import bert, llama
from tiny.tokenizers import word_tokenizer

from hf_descent.data.text import (
    DataArguments,
    align_classes,
    load_text_classification,
    most_tokens,
    tokenize,
)


ROWS = [{"text": f"row {i} of many", "label": i % 2} for i in range(40)]


def write(path, rows):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


@pytest.fixture
def train_file(tmp_path):
    return write(tmp_path / "train.parquet", ROWS)


def rows_of(split):
    names = split.features["labels"].names
    return sorted((row["text"], names[row["labels"]]) for row in split)


def test_validation_is_drawn_from_train_once_for_all_seeds(train_file):
    splits, again, other = (
        load_text_classification(
            DataArguments(train_file=train_file, validation_split_percentage=25, split_seed=seed)
        )
        for seed in (0, 0, 1)
    )
    assert (len(splits["train"]), len(splits["validation"])) == (30, 10)
    assert (
        rows_of(splits["validation"])
        == rows_of(again["validation"])
        != rows_of(other["validation"])
    )
    assert sorted([*splits["train"]["text"], *splits["validation"]["text"]]) == sorted(
        row["text"] for row in ROWS
    )


def test_limits_draw_at_random_and_spare_the_test_split_from_training(tmp_path):
    ordered = write(tmp_path / "train.parquet", sorted(ROWS, key=lambda row: row["label"]))
    test = write(
        tmp_path / "test.parquet", [{"text": f"unseen {i}", "label": i % 2} for i in range(20)]
    )
    splits = load_text_classification(
        DataArguments(train_file=ordered, test_file=test, max_train_samples=16, max_eval_samples=4)
    )
    assert {name: len(rows) for name, rows in splits.items()} == {
        "train": 16,
        "validation": 2,
        "test": 4,
    }
    assert set(splits["train"]["labels"]) == {
        0,
        1,
    }  # the file is sorted by class: its first 16 rows are all of one
    args = DataArguments(train_file=ordered, validation_file=ordered, max_train_samples=16)
    for rows in load_text_classification(args).values():
        assert len(set(rows["labels"][:8])) == 2
    assert all(row.startswith("unseen") for row in splits["test"]["text"])
    assert not any(
        row.startswith("unseen")
        for row in [*splits["train"]["text"], *splits["validation"]["text"]]
    )


def test_pairs_and_column_names(tmp_path):
    rows = [{"premise": f"p{i}", "hypothesis": f"h{i}", "gold": i % 3, "id": i} for i in range(30)]
    args = DataArguments(
        train_file=write(tmp_path / "train.json", rows), text_column="premise", text_pair_column="hypothesis",
        label_column="gold",
    )  # fmt: skip
    train = load_text_classification(args)["train"]
    assert train.column_names == ["text", "text_pair", "labels"]
    assert all(
        int(row["text"][1:]) % 3 == row["labels"] and row["text_pair"] == "h" + row["text"][1:]
        for row in train
    )


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (
            ["pos", "neg", "pos"],
            ["neutral", "neg", "pos"],
            [2, 1, 2],
        ),  # one class of the model does not occur
        (["b", "a", "b"], ["b", "a"], [0, 1, 0]),  # in the order of another data set
        ([2, 0, 2], ["LABEL_0", "LABEL_1", "LABEL_2"], [2, 0, 2]),
        ([0, 1, 0], ["negative", "positive"], [0, 1, 0]),
        (
            ["pos", "neg", "pos"],
            ["LABEL_0", "LABEL_1"],
            [1, 0, 1],
        ),  # nothing else is known of the model's
        (["positive", "negative", "positive"], ["POSITIVE", "NEGATIVE"], [0, 1, 0]),
        (["a", "A", "a"], ["A", "a"], [1, 0, 1]),
        (["a", "A", "a"], ["A", "b"], None),
        ([1, 2, 3], ["LABEL_0", "LABEL_1", "LABEL_2"], [0, 1, 2]),  # counted from 1
        (["pos", "neg", "pos"], ["good", "bad"], None),  # the order of neither is known
        ([1, 2, 3], ["a", "b"], None),
        ([0, 1, 0], ["0.0", "1.0"], [0, 1, 0]),  # as floats of former versions were named
        ([1, 0, 1], ["False", "True"], [1, 0, 1]),
        (["true", "false", "true"], ["0", "1"], None),
        ([0, 1, 0], ["01", "02", "10"], None),
        ([0, 1, 0], ["1", "2", "3"], None),  # the class "1" of the model is not its number 1
    ],
)
def test_labels_are_numbered_as_the_model_does(tmp_path, labels, classes, expected):
    path = write(
        tmp_path / "rows.csv", [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)]
    )
    splits = load_text_classification(
        DataArguments(train_file=path, validation_file=path, test_file=path)
    )
    id2label = dict(enumerate(classes))
    if expected is None:
        with pytest.raises(ValueError, match=r"The data has the classes .*, and the model \["):
            align_classes(splits, id2label)
        return
    rows = align_classes(splits, id2label)["test"]
    assert [label for _, label in sorted(zip(rows["text"], rows["labels"]))] == expected


def test_classes_without_names_are_taken_in_order_with_a_warning(tmp_path, caplog):
    path = write(
        tmp_path / "rows.csv", [{"text": "a", "label": "pos"}, {"text": "b", "label": "neg"}]
    )
    splits = load_text_classification(DataArguments(train_file=path, validation_file=path))
    align_classes(splits, {0: "neg", 1: "pos"})
    assert "in their order" not in caplog.text
    align_classes(splits, {0: "LABEL_0", 1: "LABEL_1"})
    assert "in their order: LABEL_0 is 'neg', LABEL_1 is 'pos'." in caplog.text


@pytest.mark.parametrize(
    ("labels", "classes", "meaning"),
    [
        ([1, 2], ["neg", "neu", "pos"], "1 is 'neu', 2 is 'pos'"),
        ([1, 2], ["LABEL_0", "LABEL_1", "LABEL_2"], "1 is 'LABEL_1', 2 is 'LABEL_2'"),
        ([0, 2], ["neg", "neu", "pos"], None),
        (["pos", "neu"], ["neg", "neu", "pos"], None),
        ([1, 2], ["0", "1", "2"], None),
    ],
)
def test_numbers_that_may_count_from_1_are_said(tmp_path, caplog, labels, classes, meaning):
    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate(labels)]
    path = write(tmp_path / "rows.csv", rows)
    splits = load_text_classification(DataArguments(train_file=path, validation_file=path))
    align_classes(splits, dict(enumerate(classes)))
    if meaning is None:
        assert "count from 1" not in caplog.text
    else:
        assert f"0 does not occur: {meaning}. If they count from 1" in caplog.text


@pytest.mark.parametrize(
    ("names", "labels", "classes", "expected"),
    [
        (
            ["1", "2", "3"],
            [0, 1],
            ["LABEL_0", "LABEL_1", "LABEL_2"],
            [0, 1],
        ),  # a few rows, counted as all of them
        (
            ["neg", "pos", "unsup"],
            [0, 1, 0],
            ["pos", "neg"],
            [1, 0, 1],
        ),  # a class that does not occur has no number
    ],
)
def test_named_classes_keep_their_meaning(names, labels, classes, expected):
    features = Features({"text": Value("string"), "labels": ClassLabel(names=names)})
    rows = Dataset.from_dict({"text": ["a"] * len(labels), "labels": labels}, features=features)
    aligned = align_classes(DatasetDict(train=rows), dict(enumerate(classes)))
    assert aligned["train"]["labels"][:] == expected


@pytest.mark.parametrize("name", ["train[1].csv", "trai?.csv", "*.csv"])
def test_a_file_name_is_no_pattern(tmp_path, name):
    for file, word in (("train1.csv", "other"), ("train.csv", "other"), (name, "own")):
        write(tmp_path / file, [{"text": f"{word} {i}", "label": i} for i in range(2)])
    path = str(tmp_path / name)
    splits = load_text_classification(DataArguments(train_file=path, validation_file=path))
    assert rows_of(splits["train"]) == [("own 0", "0"), ("own 1", "1")]


def test_hub_splits_keep_their_class_names(monkeypatch):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"])})
    hub = {
        ("train", None): Dataset.from_dict(
            {"text": ["a", "b", "c", "d"] * 10, "label": [1, 1, 0, -1] * 10}, features
        ),
        ("held_out", None): Dataset.from_dict({"text": ["e", "f"], "label": [1, 0]}, features),
    }
    monkeypatch.setattr(
        "hf_descent.data.splits.load_dataset", lambda name, config, split: hub[split, config]
    )
    splits = load_text_classification(
        DataArguments(dataset_name="someone/reviews", test_split="held_out")
    )
    assert rows_of(splits["test"]) == [("e", "pos"), ("f", "neg")]
    assert len(splits["train"]) + len(splits["validation"]) == 30
    assert {("c", "neg"), ("a", "pos")} < set(rows_of(splits["train"]))


def test_a_data_set_that_datasets_cannot_read_is_named(tmp_path):
    (tmp_path / "train.csv").write_text("text,label,x\n" + "a,1,1\n" * 11_000 + "b,0,oops\n")
    with pytest.raises(ValueError, match="whose examples `datasets` cannot read .*`train_file`"):
        load_text_classification(DataArguments(dataset_name=str(tmp_path)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give `dataset_name`"),
        ({"train_file": "nowhere.csv"}, "nowhere.csv"),
        ({"train_file": "rows.xlsx"}, "ends in one of .csv"),
        ({"dataset_name": "a/b", "test_file": "test.csv"}, "need `train_file`"),
        (
            {"train_file": "TRAIN", "text_column": "review"},
            "no column \\['review'\\]; it has \\['text', 'label'\\]",
        ),
        ({"train_file": "TRAIN", "text_column": "label"}, "Two of text, labels are in one column"),
        (
            {"train_file": "TRAIN", "text_column": "label", "label_column": "text"},
            "40 examples whose label is not a str",
        ),
    ],
)
def test_bad_arguments_are_named(train_file, arguments, message):
    arguments = {
        name: train_file if value == "TRAIN" else value for name, value in arguments.items()
    }
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_text_classification(DataArguments(**arguments))


@pytest.fixture
def tokenizer():
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 6
    return tokenizer


def test_tokenize_cuts_but_does_not_pad(tokenizer):
    rows = {"text": ["w0 w1", "w2 " * 9], "text_pair": ["w2", "w0"], "labels": [0, 1]}
    splits = DatasetDict(train=Dataset.from_dict(rows))
    for limit, expected in ((6, [[2, 3, 4], [4] * 5 + [2]]), (3, [[2, 3, 4], [4, 4, 2]])):
        rows = tokenize(splits, tokenizer, limit)["train"]
        assert (
            rows["input_ids"][:] == expected
            and rows["labels"][:] == [0, 1]
            and "text" not in rows.column_names
        )


@pytest.mark.parametrize("texts", [["", ""], ["w0", ""], ["w0", " \n"]])
def test_texts_without_a_token_are_named(tokenizer, texts):
    splits = DatasetDict(
        train=Dataset.from_dict({"text": ["w0"], "labels": [0]}),
        test=Dataset.from_dict({"text": texts, "labels": [0, 1]}),
    )
    blank = re.escape(repr(sorted({text for text in texts if not text.strip()})))
    with pytest.raises(ValueError, match=f"no token of some examples of the test split.* {blank}"):
        tokenize(splits, tokenizer, 6)


def test_lengths_beyond_a_limit_are_refused(tokenizer):
    looked_up, rotated = bert(), llama()  # with 32 and 64 positions
    for model in (looked_up, rotated):
        assert [most_tokens(tokenizer, model, given) for given in (None, 3)] == [6, 3]
    with pytest.raises(ValueError, match="`max_seq_length` is 7; .* 6 tokens at most"):
        most_tokens(tokenizer, looked_up, 7)
    tokenizer.model_max_length = int(1e30)
    assert [most_tokens(tokenizer, model) for model in (looked_up, rotated)] == [32, 64]
    assert most_tokens(tokenizer, rotated, 65) == 65
    with pytest.raises(ValueError, match="`max_seq_length` is 33; .* 32 tokens at most"):
        most_tokens(tokenizer, looked_up, 33)
    with pytest.raises(ValueError, match="neither tokenizer nor model states a limit"):
        most_tokens(tokenizer, build("BloomForCausalLM", MODELS["BloomForCausalLM"]))
