"""From what a column of labels holds to the numbers of classes, by one rule for all files.

- A label is a text, a whole number or a boolean. Blanks around a text do not count. A float such as 1.0 is the whole
  number; one with a fraction is refused.
- Rows without a label (none, a blank text, not-a-number, and -1 in a `ClassLabel`, where it stands for "unknown") are
  left out, and their count is reported. A -1 or -100 elsewhere may be meant so or be a class, and is refused; so is
  `nan`, `NA` or the like among numbers.
- If all labels of all splits are whole numbers, also as texts (`1` or `1.0`, but not `01` or `1e3`), the classes are
  these numbers. If they are true and false, also as texts in whatever case, the classes are `False` and `True`; beside
  numbers they are 1 and 0. All other labels are texts, and each text is its own class.
- A `ClassLabel` has names. In a split beside it labels are its names, or its numbers if no name says another number
  (as `true` for 0 does).
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from datasets import ClassLabel, Dataset

from .splits import column_values, name_rows


WHOLE = re.compile(r"(-?[1-9]\d*|0)(\.0+)?", re.ASCII)  # 1 and 1.0, not 01 and 1e3
NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
BOOLEANS = {"false": 0, "true": 1}
UNKNOWN = (-1, -100)  # what people write for "no label", of which the second is PyTorch's
NO_VALUE = {"na", "n/a", "#n/a", "<na>", "nan", "none", "null", "nil", r"\n", "?", "-"}
NO_VALUE |= {"missing", "unknown", "unlabeled", "unlabelled"}
NO_CLASS = "which is no class: give classes; for numbers write a script with `num_labels=1`"
Label = str | bool | int | float | Decimal


def whole_number(label: Label) -> int | None:
    """The whole number that a label is, also as a float or a text; None for others, booleans among them."""
    if isinstance(label, bool):
        return None
    if isinstance(label, str):
        match = WHOLE.fullmatch(label)
        return int(match[1]) if match else None
    if isinstance(label, int):
        return label
    is_whole = math.isfinite(label) and label == int(label)
    return int(label) if is_whole else None


def boolean(label: Label) -> int | None:
    """1 for true and 0 for false, also as a text; None for others."""
    if isinstance(label, bool):
        return int(label)
    return BOOLEANS.get(label.casefold()) if isinstance(label, str) else None


def number_of(label: Label) -> int | None:
    """The whole number that a label is, if false is 0 and true is 1; None for others."""
    number = whole_number(label)
    return boolean(label) if number is None else number


def is_numeric(name: str) -> bool:
    """Whether a name is written like a number, `01` and `1,5` too."""
    return NUMBER.fullmatch(name.strip()) is not None


def class_text(label: Label, kind: str) -> str:
    """The name of a label's class, if the labels of all splits are of a `kind` (see `_kind`)."""
    if kind == "number":
        return str(number_of(label))
    if kind == "boolean":
        return str(bool(number_of(label)))
    if isinstance(label, str | bool):
        return str(label)
    return str(whole_number(label))


def class_key(name: str) -> str:
    """By which classes of different files are the same: 1.0 and 1, true and 1, and whatever the case."""
    number = number_of(name.strip())
    return name.strip().casefold() if number is None else str(number)


def missing_labels(rows: Dataset, split: str, column: str) -> dict[int, str]:
    """Why a row has no label, by the index of the row. ValueError for a value that no class can have, or that may
    stand for "no label"."""
    feature = rows.features["labels"]
    missing = {}
    for index, value in enumerate(column_values(rows, "labels")):
        if reason := _no_label(value, isinstance(feature, ClassLabel)):
            missing[index] = reason
        elif fault := _fault(value, feature):
            place = f"The column `{column}` of the {split} split holds {reprlib.repr(value)}"
            raise ValueError(f"{place} ({name_rows([index])}), {fault}.")
    return missing


def _no_label(value: Any, is_named: bool) -> str | None:
    if value is None:
        return "no value"
    if isinstance(value, str) and not value.strip():
        return "blank"
    if isinstance(value, float | Decimal) and math.isnan(value):
        return "not a number"
    if is_named and value == -1:
        return "-1 in a `ClassLabel`"
    return None


def _fault(value: Any, feature: Any) -> str | None:
    """Why a value cannot be a label."""
    if not isinstance(value, Label):
        kind = type(value).__name__
        return f"a {kind}: give one class per row, as a text, a whole number or a boolean"
    if isinstance(feature, ClassLabel):
        count = feature.num_classes
        is_class = 0 <= value < count
        return None if is_class else f"and its `ClassLabel` has the numbers 0 to {count - 1}"
    number = whole_number(value.strip() if isinstance(value, str) else value)
    is_written_number = isinstance(value, str) and is_numeric(value)
    if is_written_number:
        number = float(value.replace(",", "."))  # -1e0 and -01, too
    if number in UNKNOWN:
        return "which may mean 'no label' or be a class: drop these rows, or rename the class"
    if number is None and isinstance(value, float | Decimal):
        return NO_CLASS
    return None


class LabelColumn:
    """The labels of a split: those of the file, or the `names` that its `ClassLabel` gives them."""

    def __init__(self, rows: Dataset):
        feature, values = rows.features["labels"], list(column_values(rows, "labels"))
        self.names: list[str] | None = None
        if isinstance(feature, ClassLabel):
            self.names, values = feature.names, feature.int2str(values)
        else:
            values = [label.strip() if isinstance(label, str) else label for label in values]
        self.labels: list[Label] = values
        # By type: 1, 1.0 and True are equal.
        self.distinct = list({(type(label), label): label for label in values}.values())

    def are_numbers_of(self, classes: Sequence[str]) -> bool:
        """Whether the labels are the numbers of `classes`, whose names are no numbers themselves, nor true for 0."""
        if any(map(is_numeric, classes)):
            return False
        if any(boolean(name) not in (None, number) for number, name in enumerate(classes)):
            return False
        numbers = [number_of(label) for label in self.distinct]
        return all(number is not None and 0 <= number < len(classes) for number in numbers)

    def texts(self, kind: str, named: Sequence[str] | None = None) -> list[str]:
        """The name of every row's class, among splits of a `kind`, of which one has a `ClassLabel` of `named`."""
        if self.names is not None:
            return self.labels
        texts = [class_text(label, kind) for label in self.labels]
        if named is None or set(texts) <= set(named):
            return texts
        if self.are_numbers_of(named):
            return [named[number_of(label)] for label in self.labels]
        return texts


def class_labels(splits: Mapping[str, Dataset]) -> dict[str, Dataset]:
    """The splits, "train" among them, with their column `labels` as a `ClassLabel` of the classes in training.

    All rows have a label (see [`missing_labels`]). ValueError where training has one class, the labels seem to be
    measured numbers or hold `nan` among numbers, or a class of another split does not occur in training.
    """
    columns = {name: LabelColumn(rows) for name, rows in splits.items()}
    unnamed = [column for column in columns.values() if column.names is None]
    distinct = [label for column in unnamed for label in column.distinct]
    _check_numbers(distinct)
    kind = _kind(distinct)

    named = _given_names(columns)
    occurring = _occurring_classes(columns["train"], kind, named)
    classes = named or occurring
    return {
        split: encode_labels(splits[split], column.texts(kind, named), classes, split)
        for split, column in columns.items()
    }


def encode_labels(
    rows: Dataset,
    names: Sequence[str],
    classes: Sequence[str],
    split: str,
    key: Callable[[str], str] = str,
) -> Dataset:
    """The rows with `labels` as a `ClassLabel` of `classes`, by the `names` of theirs; ValueError for another name."""
    numbers = {key(name): number for number, name in enumerate(classes)}
    if unknown := sorted(name for name in set(names) if key(name) not in numbers):
        raise ValueError(
            f"The {split} split has the classes {unknown}, which the training split does not: {[*classes]}."
        )
    labels = [numbers[key(name)] for name in names]
    feature = ClassLabel(names=list(classes))
    return rows.remove_columns("labels").add_column("labels", labels, feature=feature)


def _check_numbers(labels: Sequence[Label]) -> None:
    """ValueError where all labels are numbers but for some that say "no value", or some have a fraction."""
    texts = [label for label in labels if isinstance(label, str)]
    others = [text for text in texts if not is_numeric(text) and boolean(text) is None]
    if others and len(others) < len(labels) and {*map(str.casefold, others)} <= NO_VALUE:
        raise ValueError(
            f"The labels are numbers or booleans but for {others[0]!r}, which may mean 'no label' or be a class: "
            "leave these cells empty, or rename the class."
        )
    if others:
        return
    for text in filter(is_numeric, texts):
        if float(text.replace(",", ".")) % 1:
            raise ValueError(f"A label is {text!r}, {NO_CLASS}.")


def _kind(labels: Sequence[Label]) -> str:
    """What all the labels are: "number" (booleans beside numbers count as 0 and 1), "boolean" or "text"."""
    if any(number_of(label) is None for label in labels):
        return "text"
    is_number = any(whole_number(label) is not None for label in labels)
    return "number" if is_number else "boolean"


def _given_names(columns: Mapping[str, LabelColumn]) -> list[str] | None:
    """The names of classes that a `ClassLabel` gives: that of training, or that of another split whose numbers the
    training labels are."""
    train = columns["train"]
    if train.names is not None:
        return train.names
    for column in columns.values():
        if column.names is not None and train.are_numbers_of(column.names):
            return column.names
    return None


def _occurring_classes(train: LabelColumn, kind: str, named: Sequence[str] | None) -> list[str]:
    is_number = kind == "number" and named is None
    classes = sorted(set(train.texts(kind, named)), key=int if is_number else str)
    if len(classes) < 2:
        raise ValueError(f"The labelled training rows are all of one class, {classes}.")
    return classes
