"""From what a column of labels holds to the numbers of classes, by one rule for all files.

- A label is a text, a whole number or a boolean. Its class has one name whatever its type (see [`class_name`]): `1`
  for 1, 1.0 and the texts `1` and `1.0`, `True` for true and the text `TRUE`, and any other text as it is, but for
  blanks around it. `01`, `+1` and `1e3` are such texts. If some label of some split is a number, true is `1` and false
  is `0`.
- Rows without a label (none, a blank text, not-a-number, and -1 in a `ClassLabel`, where it stands for "unknown") are
  left out, and their count is reported. A -1 or -100 elsewhere may be meant so or be a class, and is refused; so is
  `nan`, `NA` or the like among numbers. A number with a fraction is refused.
- If all classes are numbers, they are in the order of numbers; all others are in that of texts.
- A `ClassLabel` has names. In a split beside it labels are its names, or its numbers if no name says another number
  (as `true` for 0 does). True and false are never its numbers: they are its names `true` and `false` or `1` and `0`,
  and without such names they are refused.
"""

import math
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any

from datasets import ClassLabel, Dataset
from transformers.utils import logging

from .splits import column_values, name_rows


logger = logging.get_logger(__name__)

MOST_CLASSES_NAMED = 20  # in a message
MOST_CHARACTERS = 60  # of the name of a class, there

WHOLE = re.compile(r"(-?[1-9]\d{,99}|-?0)(\.0+)?", re.ASCII)  # 1 and 1.0, not 01 and 1e3
NUMBER = re.compile(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d{1,9})?", re.ASCII | re.IGNORECASE)
DASHES = dict.fromkeys(
    map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"), "-"
)  # like a minus
BOOLEANS = {"false": 0, "true": 1}
UNKNOWN = (-1, -100)  # what people write for "no label", of which the second is PyTorch's
# Beside numbers: such words, their case and other characters aside (`n/a`, `<NA>`), marks alone (`?`), `\N`, and
# errors of spreadsheets (`#REF!`).
NO_VALUE = re.compile(
    r"\W*(na|nan|nat|none|null|nil|inf|infinity|missing|unknown|undefined|unlabell?ed|)\W*|n\Wa\W?|\\n|#.*"
)
NO_CLASS = "which is no class: give classes; for numbers write a script with `num_labels=1`"
Label = str | bool | int | float | Decimal


def whole_number(label: Label) -> int | None:
    """The whole number that a label is, also as a float or a text; None for others, booleans among them."""
    if isinstance(label, bool):
        return None
    if isinstance(label, str):
        match = WHOLE.fullmatch(label)
        if match is None:
            return None
        return int(match[1])
    if math.isfinite(label) and label == int(label):
        return int(label)
    return None


def boolean(label: Label) -> int | None:
    """1 for true and 0 for false, also as a text; None for others."""
    if isinstance(label, bool):
        return int(label)
    if isinstance(label, str):
        return BOOLEANS.get(label.casefold())
    return None


def number_of(label: Label) -> int | None:
    """The whole number that a label is, if false is 0 and true is 1; None for others."""
    number = whole_number(label)
    if number is None:
        return boolean(label)
    return number


def written_number(text: str) -> Decimal | None:
    """The number that a text is written like, `01`, `1,5` and one with a dash for minus too; None for others."""
    text = text.strip().translate(DASHES)
    if NUMBER.fullmatch(text) is None:
        return None
    return Decimal(text.replace(",", "."))


def is_numeric(name: str) -> bool:
    """Whether a name is written like a number (see [`written_number`])."""
    return written_number(name) is not None


def class_name(label: Label, has_numbers: bool) -> str:
    """The name of a label's class, the same for all types in which files store it. `has_numbers`: whether some label
    of the splits is a number, so that true is 1."""
    truth = boolean(label)
    if truth is not None and has_numbers:
        return str(truth)
    if truth is not None:
        return str(bool(truth))

    number = whole_number(label)
    if number is not None:
        return str(number)
    return str(label)


def class_key(name: str) -> str:
    """By which classes of different files are the same: 1.0 and 1, true and 1, and whatever the case."""
    name = name.strip().casefold()
    number = number_of(name)
    if number is None:
        return name
    return str(number)


def missing_labels(rows: Dataset, split: str, column: str) -> dict[int, str]:
    """Why a row has no label, by the index of the row. ValueError for a value that no class can have, or that may
    stand for "no label"."""
    feature = rows.features["labels"]
    is_named = isinstance(feature, ClassLabel)
    missing = {}
    for index, value in enumerate(column_values(rows, "labels")):
        reason = _no_label(value, is_named)
        if reason is not None:
            missing[index] = reason
            continue

        fault = _fault(value, feature)
        if fault is not None:
            place = f"The column `{column}` of the {split} split holds {reprlib.repr(value)}"
            raise ValueError(f"{place} ({name_rows([index])}), {fault}.")
    return missing


def _no_label(value: Any, is_named: bool) -> str | None:
    is_nan = isinstance(value, float | Decimal) and math.isnan(value)
    if value is None or is_nan:  # both are None in a json column of several types
        return "no value or NaN"
    if isinstance(value, str) and not value.strip():
        return "blank"
    if is_named and value == -1:
        return "-1 in a `ClassLabel`"
    return None


def _fault(value: Any, feature: Any) -> str | None:
    """Why a value cannot be a label."""
    if not isinstance(value, Label):
        kind = type(value).__name__
        return f"a {kind}: give one class per example, as a text, a whole number or a boolean"
    if isinstance(value, str) and re.search(r"[\r\n]", value.strip()):
        return "which has several lines: write the class in one line; in a csv file a quote may be out of place"
    if isinstance(feature, ClassLabel):
        if 0 <= value < feature.num_classes:
            return None
        return f"and its `ClassLabel` has the numbers 0 to {feature.num_classes - 1}"

    number = value
    if isinstance(value, str):
        number = written_number(value)  # -1e0 and -01, too
    if number in UNKNOWN:
        return "which may mean 'no label' or be a class: drop these examples, or rename the class"
    if isinstance(value, float | Decimal) and whole_number(value) is None:
        return NO_CLASS
    return None


def named_labels(labels: Sequence[Label], classes: Sequence[str]) -> dict[tuple, str]:
    """The names that labels have beside a `ClassLabel` of `classes`, by type and label (1, 1.0 and True are equal).

    Either all labels are names, or they are places of names, beside which true and false are found by name. Labels
    for which there is no name are not there.
    """
    has_places = are_places(classes)
    by_name = {}
    by_place = {}

    for label in labels:
        key = (type(label), label)
        name = _same_name(label, classes)
        place = whole_number(label)
        if name is not None:
            by_name[key] = name
        if name is not None and boolean(label) is not None:
            by_place[key] = name
        if has_places and place in range(len(classes)):
            by_place[key] = classes[place]

    if len(by_name) == len(labels):
        return by_name
    return by_place


def _same_name(label: Label, classes: Sequence[str]) -> str | None:
    """The name of a `ClassLabel` that a label is: the same text, or the only one with its number. True is 1, too."""
    if label in classes:
        return label
    truth = boolean(label)
    if truth is not None:
        same = [name for name in classes if number_of(name) == truth]
    else:
        number = whole_number(label)
        same = [name for name in classes if number is not None and whole_number(name) == number]
    if len(same) != 1:
        return None
    return same[0]


def are_places(classes: Sequence[str]) -> bool:
    """Whether numbers can be places of names: none of these is a number, or a `true` or `false` at another place."""
    return not any(map(is_numeric, classes)) and all(
        boolean(name) in (None, place) for place, name in enumerate(classes)
    )


class LabelColumn:
    """The labels of a split: those of the file, or the `names` that its `ClassLabel` gives them.

    `rows` are without those that were left out, whose places in the file `left_out` gives.
    """

    def __init__(self, rows: Dataset, left_out: Collection[int] = ()):
        feature = rows.features["labels"]
        values = list(column_values(rows, "labels"))
        places = range(len(rows) + len(left_out))
        self.places = [place for place in places if place not in left_out]

        self.names: list[str] | None = None
        if isinstance(feature, ClassLabel):
            self.names = feature.names
            values = feature.int2str(values)
        else:
            values = map(_stripped, values)
        self.labels: list[Label] = list(values)
        # By type: 1, 1.0 and True are equal.
        self.distinct = list({(type(label), label): label for label in self.labels}.values())

    def are_named_by(self, classes: Sequence[str]) -> bool:
        """Whether each label has a name beside a `ClassLabel` of `classes` (see [`named_labels`])."""
        return len(named_labels(self.distinct, classes)) == len(self.distinct)

    def class_names(self, has_numbers: bool, named: Sequence[str] | None = None) -> list[str]:
        """The name of every row's class, beside a split whose `ClassLabel` has the names `named`."""
        if self.names is not None:
            return self.labels

        names = {(type(label), label): class_name(label, has_numbers) for label in self.distinct}
        is_known = named is None or set(names.values()) <= set(named)
        if not is_known and self.are_named_by(named):
            names = named_labels(self.distinct, named)
        return [names[type(label), label] for label in self.labels]


def _stripped(label: Label) -> Label:
    if isinstance(label, str):
        return label.strip()
    return label


def class_labels(
    splits: Mapping[str, Dataset], column: str, left_out: Mapping[str, Collection[int]]
) -> dict[str, Dataset]:
    """The splits, "train" among them, with their column `labels` as a `ClassLabel` of the classes in training, which
    are shown on the screen with their counts.

    All rows have a label (see [`missing_labels`]). Messages name the `column` of the files and the rows there, from
    which those at `left_out` of each split are gone. ValueError where training has one class, the labels seem to be
    measured numbers or hold `nan` among numbers, or a class of another split does not occur in training.
    """
    columns = {name: LabelColumn(rows, left_out[name]) for name, rows in splits.items()}
    unnamed = {name: labels for name, labels in columns.items() if labels.names is None}
    _check_numbers(unnamed, column)
    numbers = {whole_number(label) for labels in unnamed.values() for label in labels.distinct}
    numbers.discard(None)
    has_numbers = bool(numbers)

    given_names = _given_names(columns, has_numbers)
    names = {
        split: labels.class_names(has_numbers, given_names) for split, labels in columns.items()
    }
    classes = sorted(set(names["train"]))
    if len(classes) < 2:
        raise ValueError(
            f"The labelled training examples are all of one class, {classes} (column `{column}`): name another "
            "`label_column`, or add examples of other classes."
        )
    if given_names is not None:
        classes = given_names
    elif all(whole_number(name) is not None for name in classes):
        classes.sort(key=int)

    for split, labels in columns.items():
        _check_known(names[split], labels.places, classes, split, column)
    if given_names is not None:
        warn_of_counting_from_1(numbers, given_names, f"the column `{column}`")
    _report_classes(names["train"], classes)
    return {split: encode_labels(rows, names[split], classes) for split, rows in splits.items()}


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


def _check_numbers(columns: Mapping[str, LabelColumn], column: str) -> None:
    """ValueError where all labels are numbers but for some that say "no value", or some have a fraction."""
    labels = [label for labels in columns.values() for label in labels.distinct]
    texts = [label for label in labels if isinstance(label, str)]
    others = [text for text in texts if not is_numeric(text) and boolean(text) is None]
    if not others:
        _check_fractions(texts, columns, column)
    elif len(others) < len(labels) and all(NO_VALUE.fullmatch(each.casefold()) for each in others):
        raise ValueError(
            f"The labels are numbers or booleans but for {others[0]!r} ({_place(others[0], columns, column)}), which "
            "may mean 'no label' or be a class: leave these cells empty, or rename the class."
        )


def _check_fractions(texts: Sequence[str], columns: Mapping[str, LabelColumn], column: str) -> None:
    for text in texts:
        number = written_number(text)
        if number is not None and number != number.to_integral_value():
            raise ValueError(f"A label is {text!r} ({_place(text, columns, column)}), {NO_CLASS}.")


def _place(label: Label, columns: Mapping[str, LabelColumn], column: str) -> str:
    """Where a label occurs first."""
    for split, labels in columns.items():
        if label in labels.labels:
            row = labels.places[labels.labels.index(label)]
            return f"column `{column}` of the {split} split, {name_rows([row])}"
    raise ValueError(f"No split has the label {label!r}.")


def _check_known(
    names: Sequence[str], places: Sequence[int], classes: Sequence[str], split: str, column: str
) -> None:
    """ValueError where some `names` of a split, whose rows are at `places` in its file, are none of `classes`."""
    unknown = sorted(set(names) - set(classes))
    if not unknown:
        return
    first = next(place for place, name in zip(places, names) if name in unknown)
    place = f"column `{column}`, first in {name_rows([first])}"
    raise ValueError(
        f"The {split} split has the classes [{listed(unknown)}] ({place}), which the training split does not: "
        f"[{listed(classes)}]. Write the labels of all splits alike (true and false are no numbers of a "
        "`ClassLabel`), and drop examples of classes that training lacks."
    )


def warn_of_counting_from_1(numbers: Collection[int], classes: Sequence[str], source: str) -> None:
    """Says on the screen which of `classes` the numbers in a `source` stand for if they are their places and 0 is not
    among them, so that they may count from 1."""
    if not numbers or 0 in numbers or not are_places(classes):
        return
    meaning = listed(sorted(numbers), lambda number: f"{number} is {classes[number]!r}")
    logger.warning(
        f"The numbers in {source} count the names of classes from 0, but 0 does not occur: {meaning}. If they count "
        "from 1, subtract 1 or write the names."
    )


def _report_classes(names: Sequence[str], classes: Sequence[str]) -> None:
    """Shows the classes and their counts, so that two spellings of one class catch the eye. Of many classes the rarest
    come first: a misspelling is rare."""
    counts = Counter(names)
    order = ""
    if len(classes) > MOST_CLASSES_NAMED:
        classes = sorted(classes, key=lambda name: counts[name])
        order = ", the rarest first"
    report = listed(classes, lambda name: f"{_spelled(name)}: {counts[name]}")
    logger.warning(
        f"The training data has {len(names)} labelled examples of {len(classes)} classes{order}: {report}."
    )


def _spelled(name: str) -> str:
    """A name in quotes; with numbers of characters where its accents stand alone, which look the same."""
    if len(name) > MOST_CHARACTERS:
        name = f"{name[:MOST_CHARACTERS]}..."
    if unicodedata.is_normalized("NFC", name):
        return repr(name)
    return ascii(name)


def listed(names: Sequence, show: Callable[[Any], str] = _spelled) -> str:
    """The first names, each as `show` gives it, and how many more there are."""
    shown = ", ".join(map(show, names[:MOST_CLASSES_NAMED]))
    more = len(names) - MOST_CLASSES_NAMED
    if more > 0:
        shown += f" and {more} more"
    return shown


def _given_names(columns: Mapping[str, LabelColumn], has_numbers: bool) -> list[str] | None:
    """The names of classes that a `ClassLabel` gives: that of training, or that of another split which names all the
    training labels, if these are not such names themselves."""
    train = columns["train"]
    if train.names is not None:
        return train.names
    own_names = set(train.class_names(has_numbers))
    for column in columns.values():
        if column.names is None or own_names <= set(column.names):
            continue
        if train.are_named_by(column.names):
            return column.names
    return None
