"""Splits of a data set: from a Hub name or local files to training, validation and test examples."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from .reading import load_file


logger = logging.get_logger(__name__)

MOST_ROWS_NAMED = 5  # in one message
ROWS_AT_ONCE = 1000


def check_arguments(args: Any, limits: Mapping[str, float | tuple[float, float]]) -> None:
    """ValueError if an argument is below its limit in `limits`, or not between its two limits there, or none of the
    choices of its type."""
    for name, limit in limits.items():
        _check_number(name, getattr(args, name), limit)

    for argument in fields(args):
        value = getattr(args, argument.name)
        choices = get_args(argument.type)
        if get_origin(argument.type) is Literal and value not in choices:
            raise ValueError(f"`{argument.name}` is {value!r}; choose one of {', '.join(choices)}.")


def _check_number(name: str, value: Any, limit: float | tuple[float, float]) -> None:
    """ValueError if a number, or one of a list, is beyond a limit. `None` passes."""
    numbers = value
    if not isinstance(value, list):
        numbers = [value]
    least = limit
    most = math.inf
    allowed = f"at least {limit}"
    if isinstance(limit, tuple):
        least, most = limit
        allowed = f"numbers from {least:g} to {most:g}"
    if not all(number is None or least <= number <= most for number in numbers):
        raise ValueError(f"`{name}` is {value}; give {allowed}.")


@dataclass
class RowArguments:
    """How many rows are used, and which seed draws them."""

    split_seed: int = HfArg(
        default=0,
        help="Seed that draws the examples. Runs with another `seed` still use the same examples.",
    )
    max_train_samples: int | None = HfArg(
        default=None, help="Train on at most so many examples, drawn at random."
    )
    max_eval_samples: int | None = HfArg(
        default=None, help="Evaluate on at most so many examples of each split, drawn at random."
    )

    def __post_init__(self):
        check_arguments(self, dict.fromkeys(("max_train_samples", "max_eval_samples"), 1))

    def limit(self, split: str, rows: Dataset) -> int:
        """The number of rows of a split that are used."""
        limit = self.max_eval_samples
        if split == "train":
            limit = self.max_train_samples
        if limit is None:
            return len(rows)
        return min(limit, len(rows))

    def draw(self, split: str, rows: Dataset) -> Dataset:
        """The rows of a split in random order, as many as are used."""
        return rows.shuffle(seed=self.split_seed).select(range(self.limit(split, rows)))


@dataclass
class SplitArguments(RowArguments):
    """Where the rows come from, and which are held out."""

    dataset_name: str | None = HfArg(
        default=None, help="Data set on the Hub. Not used where `train_file` is given."
    )
    dataset_config_name: str | None = HfArg(default=None, help="Configuration of the data set.")
    train_split: str = HfArg(default="train", help="Split of the data set to train on.")
    validation_split: str | None = HfArg(
        default=None, help="Split to choose settings and checkpoints on."
    )
    test_split: str | None = HfArg(
        default=None, help="Split for the final report, read after training."
    )
    train_file: str | None = HfArg(
        default=None, help="Local csv, tsv, json or parquet file in place of `train_split`."
    )
    validation_file: str | None = HfArg(default=None, help="The same for `validation_split`.")
    test_file: str | None = HfArg(default=None, help="The same for `test_split`.")
    validation_split_percentage: float = HfArg(
        default=5.0,
        help="Percent of the training examples to hold out if you give no validation examples.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_arguments(self, {"validation_split_percentage": (0.1, 99)})
        if self.train_file is None and (self.validation_file or self.test_file):
            raise ValueError(
                "`validation_file` and `test_file` need `train_file`: give it, too, or Hub splits alone."
            )


def load_splits(args: SplitArguments, columns: Sequence[str]) -> dict[str, Dataset]:
    """Load the splits that are given: "train", and perhaps "validation" and "test". `columns` will be used of them.
    ValueError if no data is named."""
    if args.train_file is not None:
        files = {
            "train": args.train_file,
            "validation": args.validation_file,
            "test": args.test_file,
        }
        return {
            name: load_file(f"{name}_file", path, columns)
            for name, path in files.items()
            if path is not None
        }

    if args.dataset_name is None:
        raise ValueError(
            "No data: give `dataset_name` (on the Hub) or `train_file` (a local file)."
        )

    names = {
        "train": args.train_split,
        "validation": args.validation_split,
        "test": args.test_split,
    }
    return {
        name: _load_named(args.dataset_name, args.dataset_config_name, split)
        for name, split in names.items()
        if split is not None
    }


def _load_named(name: str, config: str | None, split: str) -> Dataset:
    """A split of a data set on the Hub or in a folder, with the types that `datasets` gives it; ValueError if it
    cannot be read."""
    try:
        return load_dataset(name, config, split=split)
    except DatasetGenerationError as error:
        cause = error
        if error.__cause__ is not None:
            cause = error.__cause__
        raise ValueError(
            f"`dataset_name` is {name!r}, whose examples `datasets` cannot read ({cause}); give its files by "
            "`train_file`, `validation_file` and `test_file`."
        ) from error


def hold_out(splits: dict[str, Dataset], args: SplitArguments) -> DatasetDict:
    """Draw validation examples from the training examples if there are none, and keep as many of each as `args`
    allows.

    Held-out rows are shuffled, since files are often sorted by class.
    """
    if "validation" not in splits:
        if len(splits["train"]) < 2:
            raise ValueError(
                "The training split has one example, and none can be held out of it: give validation examples, too."
            )

        halves = splits["train"].train_test_split(
            args.validation_split_percentage / 100, seed=args.split_seed
        )
        splits = {**splits, "train": halves["train"], "validation": halves["test"]}

    for name, rows in splits.items():
        if name != "train" or args.limit(name, rows) < len(rows):
            splits[name] = args.draw(name, rows)
    return DatasetDict(splits)


def select_columns(rows: Dataset, columns: Mapping[str, str], split: str, remedy: str) -> Dataset:
    """The rows with only the columns `columns.values()`, renamed to `columns.keys()`; ValueError if one is missing."""
    missing = [column for column in columns.values() if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"The {split} split has no column {missing}; it has {rows.column_names}. {remedy}"
        )

    if len(set(columns.values())) < len(columns):
        raise ValueError(
            f"Two of {', '.join(columns)} are in one column, {columns}: name one for each."
        )
    rows = rows.select_columns(list(columns.values()))
    return rows.rename_columns({column: name for name, column in columns.items() if column != name})


def drop_rows(rows: Dataset, reasons: Mapping[int, str], split: str, column: str) -> Dataset:
    """Leave out the rows whose index has a reason, and show how many and why. ValueError if no row is left, since none
    has a value of `column`."""
    if len(rows) == 0:
        raise ValueError(f"The {split} split has no examples.")

    counts = ", ".join(f"{reason}: {count}" for reason, count in Counter(reasons.values()).items())

    if len(reasons) == len(rows):
        raise ValueError(f"The {split} split has no example with a value of `{column}` ({counts}).")
    if not reasons:
        return rows

    logger.warning(
        f"Dropped {len(reasons)} of the {len(rows)} {split} examples: they are without `{column}` "
        f"({counts}; {name_rows(reasons)})."
    )
    return rows.select([index for index in range(len(rows)) if index not in reasons])


def column_values(rows: Dataset, name: str) -> Iterator[Any]:
    """The values of a column, read in batches: one by one is slow, and all at once may not fit."""
    for batch in rows.select_columns([name]).iter(ROWS_AT_ONCE):
        yield from batch[name]


def name_rows(indices: Collection[int]) -> str:
    """Rows in words, by their place in the file or split, counted from 1 below the line of column names."""
    numbers = [str(index + 1) for index in sorted(indices)]
    if len(numbers) == 1:
        return f"example {numbers[0]}"
    named = ", ".join(numbers[:MOST_ROWS_NAMED])
    more = len(numbers) - MOST_ROWS_NAMED
    if more > 0:
        named += f" and {more} more"
    return f"examples {named}"


def check_texts(
    rows: Dataset,
    source: str,
    *names: str,
    optional: Sequence[str] = (),
    ignored: Collection[int] = (),
) -> None:
    """ValueError if a column of `names` is missing, or a value is no string. Columns in `optional` may be missing, or
    have `None`. Rows whose index is in `ignored` are not looked at."""
    for name in (*names, *optional):
        if name not in rows.column_names and name in optional:
            continue
        if name not in rows.column_names:
            raise ValueError(f"{source} has no column {name!r}; it has {rows.column_names}.")

        allowed = (str, type(None)) if name in optional else str

        broken = [
            index
            for index, text in enumerate(column_values(rows, name))
            if index not in ignored and not isinstance(text, allowed)
        ]
        if broken:
            raise ValueError(
                f"{source} has {len(broken)} examples whose {name} is not a string ({name_rows(broken)}); repair or "
                "drop them."
            )
