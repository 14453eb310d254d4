"""Turns a column of labels into numbers of classes, by one rule for all files.

- A label is a text, a whole number or a boolean. Its class has one name whatever its type (see [`class_name`]): `1`
  for 1, 1.0 and the texts `1` and `1.0`, `True` for true and the text `TRUE`, and any other text as it is, but for
  blanks around it. `01`, `+1` and `1e3` are such texts. The labels of a `ClassLabel` are its names.
- Rows without a label (none, a blank text, not-a-number, and -1 in a `ClassLabel`, where it stands for "unknown") are
  left out, and their count is reported. A -1 or -100 elsewhere may be meant so or be a class, and is refused. A number
  with a fraction is refused.
- If all classes are numbers, they are in the order of numbers; all others are in that of texts. The classes of a
  `ClassLabel` keep their order.
"""

import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset
from transformers.utils import logging

from .splits import column_values, name_rows


logger = logging.get_logger(__name__)

MOST_CLASSES_NAMED = 20  # in one message

WHOLE = re.compile(r"(-?[1-9]\d*|-?0)(\.0+)?", re.ASCII)  # 1 and 1.0, not 01 and 1e3
BOOLEANS = {"false": "False", "true": "True"}
UNKNOWN = ("-1", "-100")  # people write these for "no label"; the second is PyTorch's
NO_CLASS = "which is no class: give classes; for numbers write a script with `num_labels=1`"
Label = str | bool | int | float


def class_name(label: Label) -> str:
    """The name of a label's class, the same for all types in which files store it."""
    text = str(label).strip()
    match = WHOLE.fullmatch(text)
    if match is not None:
        return str(int(match[1]))
    return BOOLEANS.get(text.casefold(), text)


def is_whole(name: str) -> bool:
    """Whether the name of a class is a whole number."""
    return WHOLE.fullmatch(name) is not None


def missing_labels(rows: Dataset, split: str, column: str) -> dict[int, str]:
    """Why a row has no label, by the index of the row. ValueError for a value that no class can have, or that may
    stand for "no label"."""
    is_named = isinstance(rows.features["labels"], ClassLabel)
    missing = {}
    for index, value in enumerate(column_values(rows, "labels")):
        reason = _no_label(value, is_named)
        if reason is not None:
            missing[index] = reason
            continue

        fault = _fault(value)
        if fault is not None:
            place = f"The column `{column}` of the {split} split holds {reprlib.repr(value)}"
            raise ValueError(f"{place} ({name_rows([index])}), {fault}.")
    return missing


def _no_label(value: Any, is_named: bool) -> str | None:
    is_nan = isinstance(value, float) and math.isnan(value)
    if value is None or is_nan:  # both are None in a json column of several types
        return "no value or NaN"
    if isinstance(value, str) and not value.strip():
        return "blank"
    if is_named and value == -1:
        return "-1 in a `ClassLabel`"
    return None


def _fault(value: Any) -> str | None:
    """Why a value cannot be a label."""
    if not isinstance(value, Label):
        kind = type(value).__name__
        return f"a {kind}: give one class per example, as a text, a whole number or a boolean"
    if isinstance(value, str) and len(value.strip().splitlines()) > 1:
        return "which has several lines: in a csv file a quote may be out of place"
    if class_name(value) in UNKNOWN:
        return "which may mean 'no label' or be a class: drop these examples, or rename the class"
    if isinstance(value, float) and not value.is_integer():
        return NO_CLASS
    return None


def class_labels(splits: Mapping[str, Dataset], column: str) -> dict[str, Dataset]:
    """The splits, "train" among them, with their column `labels` as a `ClassLabel` of the classes in training, which
    are shown on the screen with their counts.

    All rows have a label (see [`missing_labels`]). Messages name the `column` of the files. ValueError if training
    has one class, the labels are numbers with a fraction, or a class of another split does not occur in training.
    """
    names = {split: label_names(rows) for split, rows in splits.items()}
    classes = _in_order(set(names["train"]), column)
    if len(classes) < 2:
        raise ValueError(
            f"The labelled training examples are all of one class, {classes} (column `{column}`): name another "
            "`label_column`, or add examples of other classes."
        )
    feature = splits["train"].features["labels"]
    if isinstance(feature, ClassLabel):
        classes = feature.names

    for split, names_of_split in names.items():
        unknown = sorted(set(names_of_split) - set(classes))
        if unknown:
            raise ValueError(
                f"The {split} split has the classes [{listed(unknown)}] (column `{column}`), which the training split "
                f"does not: [{listed(classes)}]. Write the labels of all splits alike, and drop examples of classes "
                "that training lacks."
            )
    _report_classes(names["train"], classes)
    return {split: encode_labels(rows, names[split], classes) for split, rows in splits.items()}


def label_names(rows: Dataset) -> list[str]:
    """The class name of each row."""
    feature = rows.features["labels"]
    if isinstance(feature, ClassLabel):
        return feature.int2str(rows["labels"][:])
    return [class_name(label) for label in column_values(rows, "labels")]


def _in_order(names: set[str], column: str) -> list[str]:
    """Names of classes in order: by number if all are numbers, else as texts. ValueError if a number has a
    fraction."""
    if all(map(is_whole, names)):
        return sorted(names, key=int)

    try:
        measured = [name for name in names if not float(name).is_integer()]
    except ValueError:  # a text
        return sorted(names)
    if measured:
        raise ValueError(f"A label of the column `{column}` is {min(measured)!r}, {NO_CLASS}.")
    return sorted(names)


def encode_labels(
    rows: Dataset,
    names: Sequence[str],
    classes: Sequence[str],
    key: Callable[[str], str] = str,
) -> Dataset:
    """The rows with `labels` as a `ClassLabel` of `classes`, by the `names` of theirs, each of which is among them."""
    numbers = {key(name): number for number, name in enumerate(classes)}
    labels = [numbers[key(name)] for name in names]
    feature = ClassLabel(names=list(classes))
    return rows.remove_columns("labels").add_column("labels", labels, feature=feature)


def _report_classes(names: Sequence[str], classes: Sequence[str]) -> None:
    """Shows the classes and their counts, so that two spellings of one class catch the eye. Of many classes the rarest
    come first: a misspelling is rare."""
    counts = Counter(names)
    order = ""
    if len(classes) > MOST_CLASSES_NAMED:
        classes = sorted(classes, key=lambda name: counts[name])
        order = ", the rarest first"
    report = listed(classes, lambda name: f"{name!r}: {counts[name]}")
    logger.warning(f"{len(names)} labelled examples of {len(classes)} classes{order}: {report}.")


def listed(names: Sequence, show: Callable[[Any], str] = repr) -> str:
    """The first names, each as `show` writes it, and how many more there are."""
    shown = ", ".join(map(show, names[:MOST_CLASSES_NAMED]))
    more = len(names) - MOST_CLASSES_NAMED
    if more > 0:
        shown += f" and {more} more"
    return shown
