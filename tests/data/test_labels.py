"""The rule for labels, by the classes that a model gets of a file."""

import datetime
import json
from decimal import Decimal
from itertools import product

import numpy as np
import pyarrow
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from pyarrow import parquet

from hf_descent.data.text import DataArguments, load_text_classification


NAMED = ClassLabel(names=["neg", "pos"])
DIGITS = ClassLabel(names=["1", "2"])


def write(path, labels, kind=None):
    """Rows `t0`, `t1`, ... with labels: as a csv or json file, or as parquet with a type or a `ClassLabel`."""
    texts = [f"t{i}" for i in range(len(labels))]
    if isinstance(kind, ClassLabel):
        features = Features({"text": Value("string"), "label": kind})
        Dataset.from_dict({"text": texts, "label": labels}, features=features).to_parquet(path)
    elif path.suffix == ".csv":
        lines = [f"{text},{label}" for text, label in zip(texts, labels)]
        path.write_text("\n".join(["text,label", *lines]))
    elif path.suffix == ".jsonl":
        rows = zip(texts, labels)
        path.write_text("\n".join(json.dumps({"text": text, "label": each}) for text, each in rows))
    else:
        table = {"text": texts, "label": pyarrow.array(labels, kind)}
        parquet.write_table(pyarrow.table(table), path)
    return str(path)


def load(train, test=None):
    """The splits "train" and "test", of one file unless two are given."""
    if test is not None:
        args = DataArguments(train_file=train, validation_file=train, test_file=test)
        return load_text_classification(args)
    splits = load_text_classification(DataArguments(train_file=train, validation_file=train))
    return {"train": splits["train"], "test": splits["validation"]}


def classes_of(rows):
    """The class of each row, in the order of the file."""
    numbers = dict(zip(rows["text"], rows["labels"]))
    names = rows.features["labels"].names
    return [names[numbers[text]] for text in sorted(numbers, key=lambda text: int(text[1:]))]


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["01", "1", "10"], ["01", "1", "10"], None),
        (["001", "1", "2"], ["001", "1", "2"], None),
        (["1e3", "1000"], ["1000", "1e3"], None),
        (["10", "9", "1"], ["1", "9", "10"], None),
        (["1.0", "0.0", "2.0"], ["0", "1", "2"], ["1", "0", "2"]),
        (["1", "0.0", "1.0"], ["0", "1"], ["1", "0", "1"]),
        (["True", "False"], ["False", "True"], None),
        (["1", "0", "true"], ["0", "1", "True"], ["1", "0", "True"]),
        (["NA", "null", "None", "nan"], ["NA", "None", "nan", "null"], None),
        (["1.10", "1.1.2"], ["1.1.2", "1.10"], None),
        (["+1", "1"], ["+1", "1"], None),
        (["2020-01-01", "2020-01-02"], ["2020-01-01", "2020-01-02"], None),
        (["pos ", " neg", "pos"], ["neg", "pos"], ["pos", "neg", "pos"]),
    ],
)
def test_texts_become_numbers_only_where_all_are_in_files_of_any_kind(
    tmp_path, labels, names, expected
):
    splits = load_text_classification(
        DataArguments(
            train_file=write(tmp_path / "rows.csv", labels),
            validation_file=write(tmp_path / "rows.jsonl", labels),
            test_file=write(tmp_path / "rows.parquet", labels),
        )
    )
    for rows in splits.values():
        assert rows.features["labels"].names == names
        assert classes_of(rows) == (expected or labels)


def test_a_late_label_does_not_change_the_early_ones(tmp_path):
    labels = [str(i % 2) for i in range(12_000)]
    labels[11_500] = "001"
    assert classes_of(load(write(tmp_path / "rows.csv", labels))["test"]) == labels


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([1.0, 0.0, 1.0], None),
        ([1, 0, 1], pyarrow.int8()),
        ([1, 0, 1], pyarrow.uint64()),
        ([1.0, 0.0, 1.0], pyarrow.float32()),
        (np.array([1, -0.0, 1], np.float16), None),
        (["1.0", "0.0", "1.0"], None),
        ([1, 0, 1], ClassLabel(num_classes=2)),
        (["1", "0", "1"], pyarrow.large_string()),
        (pyarrow.array(["1", "0", "1"]).dictionary_encode(), None),
    ],
)
def test_splits_may_differ_in_how_they_store_a_class(tmp_path, labels, kind):
    other = write(tmp_path / "other.parquet", labels, kind)
    whole = write(tmp_path / "whole.csv", [0, 1, 0])
    for splits in (load(whole, other), load(other, whole)):
        assert splits["test"].features["labels"].names == ["0", "1"]
    assert classes_of(load(whole, other)["test"]) == ["1", "0", "1"]


ALIKE = {
    "0": [0, 0.0, -0.0, "0", "0.0", "-0.0", " 0 "],
    "1": [1, 1.0, "1", "1.00"],
    "False": [False, "false", "FALSE"],
    "True": [True, "true", " True"],
    "maybe": ["maybe", "maybe "],
    "2020-01-01": ["2020-01-01"],
    "01": ["01"],
}


@pytest.mark.parametrize("classes", [["0", "1"], ["False", "True"], sorted(ALIKE)])
def test_labels_are_one_class_whatever_their_types(tmp_path, classes):
    """In one json file, and in splits of any kind."""
    labels = [label for name in classes for label in ALIKE[name]]
    expected = [name for name in classes for _ in ALIKE[name]]

    mixed = write(tmp_path / "mixed.jsonl", labels)
    csv = write(tmp_path / "rows.csv", labels)
    texts = write(tmp_path / "rows.parquet", list(map(str, labels)))
    for train, test in product([mixed, csv, texts], repeat=2):
        splits = load(train, test)
        assert splits["train"].features["labels"].names == classes
        assert classes_of(splits["train"]) == classes_of(splits["test"]) == expected


def test_json_values_of_several_types(tmp_path):
    path = write(tmp_path / "rows.jsonl", [1, 0.0, True, "1", None, "0"])
    assert classes_of(load(path)["test"]) == ["1", "0", "True", "1", "0"]
    path = write(tmp_path / "texts.jsonl", [1, 2.0, "neg", True])
    assert classes_of(load(path)["test"]) == ["1", "2", "neg", "True"]


@pytest.mark.parametrize(
    ("train", "train_kind", "test", "test_kind", "expected"),
    [
        ([0, 1], NAMED, ["pos", "neg"], None, ["pos", "neg"]),
        (["neg", "pos"], None, [1, 0], NAMED, ["pos", "neg"]),
        ([0, 1], NAMED, [0, 1], ClassLabel(names=["pos", "neg"]), ["pos", "neg"]),
        ([0, 1], DIGITS, [1, 2], None, ["1", "2"]),
        ([0, 1], DIGITS, [0, 1], None, None),
        ([0, 1], NAMED, [1, 0], None, None),
        ([0, 1], None, [1, 0], NAMED, None),
        ([0, 1], NAMED, [True, False], None, None),
    ],
)
def test_labels_beside_a_class_label(tmp_path, train, train_kind, test, test_kind, expected):
    train = write(tmp_path / "train.parquet", train, train_kind)
    test = write(tmp_path / "test.parquet", test, test_kind)
    if expected is None:
        with pytest.raises(
            ValueError,
            match="The test split has the classes .*, which the training .*labels of all splits alike",
        ):
            load(train, test)
        return
    splits = load(train, test)
    names = splits["train"].features["labels"].names
    assert names == splits["test"].features["labels"].names
    assert classes_of(splits["test"]) == expected


@pytest.mark.parametrize(
    ("labels", "kind", "report"),
    [
        ([1.0, float("nan"), 0.0, None], pyarrow.float64(), "no value or NaN: 2; examples 2, 4"),
        ([True, None, False, None], None, "no value or NaN: 2; examples 2, 4"),
        ([1, -1, 0, None], NAMED, "-1 in a `ClassLabel`: 1, no value or NaN: 1; examples 2, 4"),
        (["x", "", "y", "  "], None, "blank: 2; examples 2, 4"),
    ],
)  # fmt: skip
def test_rows_without_a_label_are_counted_on_the_screen(tmp_path, caplog, labels, kind, report):
    if kind is NAMED:
        labels = [0 if label == 1 else 1 if label == 0 else label for label in labels]
    splits = load(write(tmp_path / "rows.parquet", labels, kind))
    assert sorted(splits["test"]["text"]) == ["t0", "t2"]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    reports = [message for message in warnings if "labelled examples of" not in message]
    for split, message in zip(("train", "validation"), reports, strict=True):
        assert (
            f"Dropped 2 of the 4 {split} examples: they are without `label` ({report})" in message
        )


def test_the_classes_and_their_counts_are_on_the_screen(tmp_path, caplog):
    labels = ["pos", "Pos", '"pos"', "\u200bpos", "pos", "TRUE", "true"]
    load(write(tmp_path / "rows.jsonl", labels))
    (report,) = [record for record in caplog.records if "labelled examples" in record.message]
    assert report.levelname == "WARNING"  # what Python shows by default
    assert "7 labelled examples of 5 classes: " in report.message
    for name in (
        "'pos': 2",
        "'Pos': 1",
        "'\"pos\"': 1",
        r"'\u200bpos': 1",
        "'True': 2",
    ):
        assert name in report.message


def test_a_rare_spelling_is_named_among_many_classes(tmp_path, caplog):
    names = [f"k{number:02}" for number in range(30)]
    load(write(tmp_path / "train.csv", [*names, *names, "n/a"]))
    assert "61 labelled examples of 31 classes, the rarest first: 'n/a': 1, " in caplog.text


def test_many_classes_are_listed_in_short(tmp_path, caplog):
    load(write(tmp_path / "rows.csv", [*range(25), 24]))
    assert "26 labelled examples of 25 classes, the rarest first: '0': 1, '1': 1, " in caplog.text
    assert "'19': 1 and 5 more." in caplog.text and "'20'" not in caplog.text


@pytest.mark.parametrize("blank", ["", "  ", '""'])
def test_a_blank_csv_label_is_missing(tmp_path, caplog, blank):
    splits = load(write(tmp_path / "rows.csv", ["1", blank, "0"]))
    assert classes_of(splits["test"]) == ["1", "0"]
    assert "Dropped 1 of the 3 validation examples" in caplog.text


def test_many_dropped_rows_are_named_in_short(tmp_path, caplog):
    load(write(tmp_path / "rows.csv", ["1", "0", *[""] * 7]))
    assert "(blank: 7; examples 3, 4, 5, 6, 7 and 2 more)" in caplog.text


@pytest.mark.parametrize(
    ("suffix", "mark"),
    [
        *product([".jsonl", ".parquet"], [-1, -100, -1.0, -100.0]),
        *product([".csv"], ["-1", "-1.0", "-100"]),
        (".jsonl", "-1"),
    ],
)
def test_what_may_mean_no_label_is_refused(tmp_path, suffix, mark):
    others = {int: [0, 1], float: [0.0, 1.0], str: ["neg", "pos"]}[type(mark)]
    with pytest.raises(
        ValueError,
        match=r"train split holds .*-1.* \(example 2\), which may mean",
    ):
        load(write(tmp_path / f"rows{suffix}", [others[0], mark, others[1]]))


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([[0], [1]], None, r"holds \[0\] \(example 1\), a list: give one class per example"),
        ([[1.0, 0.0], [0.0, 1.0]], None, "a list: give one class per example"),
        ([{"a": 1}, {"a": 2}], None, "a dict: give one class per example"),
        ([b"a", b"b"], None, "a bytes: give one class per example"),
        ([datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)], None, "a date: give one class"),
        (["x", "1\nb\nc,0"], None, r"holds '1\\nb\\nc,0' \(example 2\), which has several lines"),
        ([0.5, 1.0], None, r"holds 0.5 \(example 1\), which is no class"),
        ([float("inf"), 1.0], None, "holds inf .* no class"),
        ([Decimal("1.5"), Decimal("1.0")], None, "a Decimal: give one class per example"),
        (["0.5", "1.0"], None, "label of the column `label` is '0.5', which is no class"),
        (["5e-1", "1.0"], None, "label of the column `label` is '5e-1', which is no class"),
        (["1", "0", "nan"], None, "label of the column `label` is 'nan', which is no class"),
        ([None, None], None, r"no example with a value of `label` \(no value or NaN: 2\)"),
        ([-1, -1], NAMED, r"no example with a value of `label` \(-1 in a `ClassLabel`: 2\)"),
        ([1.0, 1], None, "all of one class"),
        ([True, True], None, "all of one class"),
        ([0, 0], NAMED, r"all of one class, \['neg'\]"),
        ([0, 0], ClassLabel(names=["a"]), "all of one class"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path, labels, kind, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / "rows.parquet", labels, kind))


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (["1", "", "1"], None, r"one class, \['1'\] \(column `label`\): name another `label_column`"),
        (["1", "0"], ["", "1", "3"], r"classes \['3'\] \(column `label`\), which .* drop examples"),
    ],
)  # fmt: skip
def test_messages_name_the_column(tmp_path, train, test, message):
    train = write(tmp_path / "train.csv", train)
    with pytest.raises(ValueError, match=message):
        load_text_classification(
            DataArguments(
                train_file=train,
                validation_file=train,
                test_file=test and write(tmp_path / "test.csv", test),
            )
        )


@pytest.mark.parametrize("label", [[1], {"a": 1}])
def test_a_list_as_the_label_of_one_json_row_is_refused(tmp_path, label):
    row = write(tmp_path / "row.jsonl", [label])
    with pytest.raises(
        ValueError, match=r"\(example 1\), a (list|dict): give one class per example"
    ):
        load(write(tmp_path / "rows.csv", [0, 1]), row)


@pytest.mark.parametrize("others", [[1, 0], [1, 0.0], [True, False], ["1", "0"], [1, "x"]])
def test_not_a_number_in_json_is_no_label(tmp_path, caplog, others):
    rows = load(write(tmp_path / "rows.jsonl", [*others, float("nan")]))["test"]
    assert len(rows) == 2
    assert "they are without `label` (no value or NaN: 1; example 3)" in caplog.text


def test_one_list_among_json_labels_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds \[1, 2\] \(example 3\), a list"):
        load(write(tmp_path / "rows.jsonl", [1, 2, [1, 2]]))
