"""Splits of a data set: from a Hub name or local files to training, validation and test rows."""

import glob
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError


FILE_TYPES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class SplitArguments:
    """Where the rows come from, which are held out, and how many are used."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set on the Hub. Not used where `train_file` is given."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_split: str = field(default="train", metadata={"help": "Split of the data set to train on."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Split of the data set to choose settings and checkpoints on."}
    )
    test_split: str | None = field(
        default=None, metadata={"help": "Split of the data set for the final report, read once, after training."}
    )
    train_file: str | None = field(
        default=None, metadata={"help": "Local csv, json or parquet file in place of `train_split`."}
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same for `validation_split`."})
    test_file: str | None = field(default=None, metadata={"help": "The same for `test_split`."})
    validation_split_percentage: float = field(
        default=5.0,
        metadata={"help": "Share of the training rows, in percent, held out where no validation rows are given."},
    )
    split_seed: int = field(
        default=0,
        metadata={
            "help": "Seed of that draw and of `max_*_samples`. Not `seed`: runs that differ by it share their data."
        },
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many rows, drawn at random."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on this many validation and test rows, drawn at random."}
    )

    def __post_init__(self):
        if self.train_file is None and (self.validation_file or self.test_file):
            raise ValueError("`validation_file` and `test_file` need `train_file`: files and Hub splits do not mix.")
        for name in ("train_file", "validation_file", "test_file"):
            if getattr(self, name) is not None:
                _file_type(name, getattr(self, name))
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(
                f"`validation_split_percentage` is {self.validation_split_percentage}; it must lie between 0 and 100."
            )
        for name in ("max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; give a positive number or leave it out.")


def load_splits(args: SplitArguments) -> dict[str, Dataset]:
    """The splits that are given: "train" and, where there are any, "validation" and "test".

    Raises:
        ValueError: no data is named, or a file is missing or cannot be read.
    """
    if args.train_file is not None:
        files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
        return {name: load_file(f"{name}_file", path) for name, path in files.items() if path is not None}
    if args.dataset_name is None:
        raise ValueError("No data: give `dataset_name` (on the Hub) or `train_file` (a local file).")
    names = {"train": args.train_split, "validation": args.validation_split, "test": args.test_split}
    return {
        name: load_dataset(args.dataset_name, args.dataset_config_name, split=split)
        for name, split in names.items()
        if split is not None
    }


def hold_out(splits: dict[str, Dataset], args: SplitArguments) -> DatasetDict:
    """Draws validation rows from the training rows if there are none; keeps as many of each as `args` allows.

    Held-out rows are shuffled: intervals over blocks of rows assume it, and files are often sorted by class.

    Raises:
        ValueError: there are too few training rows to hold some out.
    """
    if "validation" not in splits:
        share = args.validation_split_percentage / 100
        halves = splits["train"].train_test_split(share, seed=args.split_seed)
        splits = {**splits, "train": halves["train"], "validation": halves["test"]}
    for name, rows in splits.items():
        limit = args.max_train_samples if name == "train" else args.max_eval_samples
        limit = len(rows) if limit is None else min(limit, len(rows))
        if name != "train" or limit < len(rows):
            splits[name] = rows.shuffle(seed=args.split_seed).select(range(limit))
    return DatasetDict(splits)


def load_file(argument: str, path: str) -> Dataset:
    """The rows of a csv, json or parquet file, local or on the Hub (`hf://...`).

    Raises:
        ValueError: `path`, which `argument` gives, has another ending, is missing, cannot be read or has no row.
    """
    file_type = _file_type(argument, path)
    if "://" not in path and not Path(path).is_file():
        raise ValueError(f"`{argument}` is {path!r}, and there is no such file.")
    # By default pandas reads the texts "null" and "NA" as missing values.
    options = {"keep_default_na": False} if file_type == "csv" else {}
    try:
        # Brackets and the like in a name would make it a pattern, which other files match.
        return load_dataset(file_type, data_files=glob.escape(path), split="train", **options)
    except (DatasetGenerationError, ValueError) as error:
        raise ValueError(
            f"`{argument}` is {path!r}, which cannot be read as {file_type} ({error.__cause__ or error}); give rows "
            "in UTF-8 under columns of different names."
        ) from error


def check_texts(rows: Dataset, name: str, source: str, kind: Any = str) -> None:
    """ValueError where a row of the column `name` holds no string; `kind` may be `str | None`."""
    if broken := sum(not isinstance(text, kind) for text in rows[name]):
        raise ValueError(f"{source} has {broken} rows whose {name} is not a string; repair or drop them.")


def _file_type(argument: str, path: str) -> str:
    if Path(path).suffix not in FILE_TYPES:
        raise ValueError(f"`{argument}` is {path!r}; give a file that ends in one of {', '.join(FILE_TYPES)}.")
    return FILE_TYPES[Path(path).suffix]
