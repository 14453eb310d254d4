"""Splits of a data set: from a Hub name or local files to training, validation and test rows."""

import glob
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers.hf_argparser import HfArg
from transformers.utils import logging


logger = logging.get_logger(__name__)

MISSING = (
    None,
    -1,
    "",
)  # -1 among the named classes of a `ClassLabel`; an empty field of a csv file
FILE_TYPES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def check_arguments(args: Any, limits: Mapping[str, float | tuple[float, float]]) -> None:
    """ValueError where a number of an argument is less than `limits` gives for its name, or not between the two that
    it gives, or where an argument is none of the choices of its type."""
    for name, limit in limits.items():
        least, most = limit if isinstance(limit, tuple) else (limit, math.inf)
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if not all(each is None or least <= each <= most for each in values):
            given = (
                f"at least {least:g}" if most == math.inf else f"numbers from {least:g} to {most:g}"
            )
            raise ValueError(f"`{name}` is {value}; give {given}.")
    for argument in fields(args):
        value, choices = getattr(args, argument.name), get_args(argument.type)
        if get_origin(argument.type) is Literal and value not in choices:
            raise ValueError(f"`{argument.name}` is {value!r}; choose one of {', '.join(choices)}.")


@dataclass
class RowArguments:
    """How many rows are used, and which seed draws them."""

    split_seed: int = HfArg(
        default=0, help="Seed of draws of rows. Not `seed`: runs that differ in it share rows."
    )
    max_train_samples: int | None = HfArg(
        default=None, help="Train on so many rows, drawn at random."
    )
    max_eval_samples: int | None = HfArg(
        default=None, help="Evaluate on so many rows of each split, drawn at random."
    )

    def __post_init__(self):
        check_arguments(self, dict.fromkeys(("max_train_samples", "max_eval_samples"), 1))

    def limit(self, split: str, rows: Dataset) -> int:
        """How many of the rows of a split are used."""
        limit = self.max_train_samples if split == "train" else self.max_eval_samples
        return len(rows) if limit is None else min(limit, len(rows))

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
        default=None, help="Local csv, json or parquet file in place of `train_split`."
    )
    validation_file: str | None = HfArg(default=None, help="The same for `validation_split`.")
    test_file: str | None = HfArg(default=None, help="The same for `test_split`.")
    validation_split_percentage: float = HfArg(
        default=5.0,
        help="Share of the training rows, in percent, to hold out where no validation rows are given.",
    )

    def __post_init__(self):
        super().__post_init__()
        check_arguments(self, {"validation_split_percentage": (0.1, 99)})
        if self.train_file is None and (self.validation_file or self.test_file):
            raise ValueError(
                "`validation_file` and `test_file` need `train_file`: give it, too, or Hub splits alone."
            )


def load_splits(args: SplitArguments) -> dict[str, Dataset]:
    """The splits that are given: "train" and perhaps "validation" and "test"; ValueError where no data is named."""
    if args.train_file is not None:
        files = {
            "train": args.train_file,
            "validation": args.validation_file,
            "test": args.test_file,
        }
        return {
            name: load_file(f"{name}_file", path)
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
        name: load_dataset(args.dataset_name, args.dataset_config_name, split=split)
        for name, split in names.items()
        if split is not None
    }


def hold_out(splits: dict[str, Dataset], args: SplitArguments) -> DatasetDict:
    """Draws validation rows from the training rows if there are none; keeps as many of each as `args` allows.

    Held-out rows are shuffled: intervals over blocks of rows assume it, and files are often sorted by class.
    """
    if "validation" not in splits:
        halves = splits["train"].train_test_split(
            args.validation_split_percentage / 100, seed=args.split_seed
        )
        splits = {**splits, "train": halves["train"], "validation": halves["test"]}
    for name, rows in splits.items():
        if name != "train" or args.limit(name, rows) < len(rows):
            splits[name] = args.draw(name, rows)
    return DatasetDict(splits)


def load_file(argument: str, path: str) -> Dataset:
    """The rows of a csv, json or parquet file, local or on the Hub (`hf://...`); ValueError where `path`, which
    `argument` gives, has another ending or cannot be read."""
    file_type = FILE_TYPES.get(Path(path).suffix)
    if file_type is None:
        raise ValueError(
            f"`{argument}` is {path!r}; give a file that ends in one of {', '.join(FILE_TYPES)}."
        )
    # By default pandas reads the texts "null" and "NA" as missing, and `a, b` as a value with a blank.
    options = {"keep_default_na": False, "skipinitialspace": True} if file_type == "csv" else {}
    try:
        # Brackets and the like in a name would make it a pattern, which other files match.
        return load_dataset(file_type, data_files=glob.escape(path), split="train", **options)
    except (
        DatasetGenerationError,
        ValueError,
        StopIteration,
    ) as error:  # the last of an empty json file
        raise ValueError(
            f"`{argument}` is {path!r}, which cannot be read as {file_type} ({error.__cause__ or error}); give rows "
            "in UTF-8 under columns of different names."
        ) from error


def select_rows(rows: Dataset, columns: Mapping[str, str], split: str, remedy: str) -> Dataset:
    """The columns `columns.values()` under the names `columns.keys()`, of the rows that have a value of the last one;
    ValueError where a column is missing, or no row has that value."""
    if missing := [column for column in columns.values() if column not in rows.column_names]:
        raise ValueError(
            f"The {split} split has no column {missing}; it has {rows.column_names}. {remedy}"
        )
    if len({*columns.values()}) < len(columns):
        raise ValueError(
            f"Two of {', '.join(columns)} are in one column, {columns}: name one for each."
        )
    rows = rows.select_columns(list(columns.values()))
    rows = rows.rename_columns({column: name for name, column in columns.items() if column != name})
    *_, (name, column) = columns.items()
    keep = [index for index, value in enumerate(rows[name]) if value not in MISSING]
    if not keep:
        raise ValueError(f"The {split} split has no row with a value of `{column}`.")
    if len(keep) < len(rows):
        logger.info(
            f"Dropped {len(rows) - len(keep)} of the {len(rows)} {split} rows: they are without `{column}`."
        )
        rows = rows.select(keep)
    return rows


def check_texts(rows: Dataset, source: str, *names: str, optional: Sequence[str] = ()) -> None:
    """ValueError where a column of `names` is missing or a value is no string; `optional` ones may be, or be None."""
    for name in (*names, *(each for each in optional if each in rows.column_names)):
        if name not in rows.column_names:
            raise ValueError(f"{source} has no column {name!r}; it has {rows.column_names}.")
        if broken := sum(
            not (isinstance(text, str) or (text is None and name in optional))
            for text in rows[name]
        ):
            raise ValueError(
                f"{source} has {broken} rows whose {name} is not a string; repair or drop them."
            )
