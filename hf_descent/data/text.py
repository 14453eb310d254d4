"""Text classification data (IMDb, MNLI, or your own): from a Hub name or local files to tokenised splits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging


logger = logging.get_logger(__name__)

FILE_TYPES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
UNLABELLED = (None, -1, "", "-1")  # the Hub marks a row without a label by -1, a csv file by an empty field


@dataclass
class DataArguments:
    """Where the texts and labels come from, which columns hold them, and how many are used."""

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
    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    text_pair_column: str | None = field(
        default=None, metadata={"help": "Column of the second text, where there is one."}
    )
    label_column: str = field(default="label", metadata={"help": "Column of the class: integers or strings."})
    max_seq_length: int | None = field(
        default=None,
        metadata={"help": "Longer texts are cut to this many tokens; the tokenizer's limit where not given."},
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many rows, drawn at random."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on this many validation and test rows, drawn at random."}
    )

    def __post_init__(self):
        if self.train_file is None and (self.validation_file or self.test_file):
            raise ValueError("`validation_file` and `test_file` need `train_file`: files and Hub splits do not mix.")
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is not None and Path(path).suffix not in FILE_TYPES:
                raise ValueError(f"`{name}` is {path!r}; give a file that ends in one of {', '.join(FILE_TYPES)}.")
        if not 0 < self.validation_split_percentage < 100:
            raise ValueError(
                f"`validation_split_percentage` is {self.validation_split_percentage}; it must lie between 0 and 100."
            )
        for name in ("max_seq_length", "max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; give a positive number or leave it out.")


def load_text_classification(args: DataArguments) -> DatasetDict:
    """Loads the labelled rows of a text classification task.

    The classes are those of the training split: the names of a `ClassLabel` column, or the sorted values of any other.
    Rows without a label are dropped, and their number is logged.

    Returns:
        `DatasetDict`: "train", "validation" and, where it is given, "test", each with the columns `text`, `text_pair`
        (only for pairs) and `labels` (a `ClassLabel`).

    Raises:
        ValueError: no data is named; a file or column is missing; a text is missing; the labels are not classes, or a
            class of another split does not occur in training.
    """
    splits = _load_splits(args)
    columns = {"text": args.text_column, "text_pair": args.text_pair_column, "labels": args.label_column}
    columns = {name: column for name, column in columns.items() if column is not None}
    splits = {name: _labelled_rows(_select_columns(rows, columns, name), name) for name, rows in splits.items()}
    classes = _class_names(splits["train"])
    splits = {name: _encode_labels(rows, classes, name) for name, rows in splits.items()}

    if "validation" not in splits:
        halves = splits["train"].train_test_split(args.validation_split_percentage / 100, seed=args.split_seed)
        splits = {**splits, "train": halves["train"], "validation": halves["test"]}
    for name, rows in splits.items():
        limit = args.max_train_samples if name == "train" else args.max_eval_samples
        if limit is not None and limit < len(rows):
            # Files are often sorted by class: the first rows would all be of one.
            splits[name] = rows.shuffle(seed=args.split_seed).select(range(limit))
    return DatasetDict(splits)


def tokenize(
    dataset: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None = None
) -> DatasetDict:
    """Replaces the texts by token ids, unpadded (the collator pads each batch) and cut to `max_seq_length` tokens.

    Raises:
        ValueError: `max_seq_length` is beyond the tokenizer's limit, or neither gives one.
    """
    limit = tokenizer.model_max_length
    max_seq_length = max_seq_length or limit
    if max_seq_length > limit:
        raise ValueError(f"`max_seq_length` is {max_seq_length}, and the model takes at most {limit} tokens.")
    if max_seq_length > 10**6:  # transformers' way to say that a tokenizer states no limit
        raise ValueError("`max_seq_length` is not given, and the tokenizer states no limit of its own.")
    texts = [name for name in ("text", "text_pair") if name in dataset["train"].column_names]

    def encode(batch):
        return tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_seq_length)

    return dataset.map(encode, batched=True, remove_columns=texts, desc="Tokenising")


def _load_splits(args: DataArguments) -> dict[str, Dataset]:
    if args.train_file is not None:
        files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
        return {name: _load_file(name, path) for name, path in files.items() if path is not None}
    if args.dataset_name is None:
        raise ValueError("No data: give `dataset_name` (on the Hub) or `train_file` (a local file).")
    names = {"train": args.train_split, "validation": args.validation_split, "test": args.test_split}
    return {
        name: load_dataset(args.dataset_name, args.dataset_config_name, split=split)
        for name, split in names.items()
        if split is not None
    }


def _load_file(name: str, path: str) -> Dataset:
    if not Path(path).is_file():
        raise ValueError(f"`{name}_file` is {path!r}, and there is no such file.")
    file_type = FILE_TYPES[Path(path).suffix]
    # By default a csv text that reads "null" or "NA" would be taken for a missing value.
    options = {"keep_default_na": False} if file_type == "csv" else {}
    return load_dataset(file_type, data_files=path, split="train", **options)


def _select_columns(rows: Dataset, columns: dict[str, str], split: str) -> Dataset:
    """Gives the columns this package's names, and drops all others."""
    if missing := [column for column in columns.values() if column not in rows.column_names]:
        raise ValueError(
            f"The {split} split has no column {missing}; it has {rows.column_names}. Name the right ones by "
            "`text_column`, `text_pair_column` and `label_column`."
        )
    rows = rows.select_columns(list(columns.values()))
    return rows.rename_columns({column: name for name, column in columns.items() if column != name})


def _labelled_rows(rows: Dataset, split: str) -> Dataset:
    for name in (name for name in rows.column_names if name != "labels"):
        if broken := sum(not isinstance(text, str) for text in rows[name]):
            raise ValueError(f"The {split} split has {broken} rows whose {name} is not a string; repair or drop them.")
    keep = [index for index, label in enumerate(rows["labels"]) if label not in UNLABELLED]
    if dropped := len(rows) - len(keep):
        logger.info(f"Dropped {dropped} of the {len(rows)} {split} rows: they have no label.")
        rows = rows.select(keep)
    if not keep:
        raise ValueError(f"The {split} split has no labelled row.")
    return rows


def _class_names(train: Dataset) -> list[str]:
    feature = train.features["labels"]
    if isinstance(feature, ClassLabel):
        return feature.names
    values = set(train["labels"])
    if not all(isinstance(value, str | int) for value in values):
        raise ValueError("The labels must be classes: integers or strings, all of one type.")
    if len(values) < 2:
        raise ValueError(f"The labelled training rows are all of one class, {values}; -1 stands for 'no label'.")
    return [str(value) for value in sorted(values)]


def _encode_labels(rows: Dataset, classes: Sequence[str], split: str) -> Dataset:
    feature, values = rows.features["labels"], rows["labels"]
    names: list[Any] = feature.int2str(values[:]) if isinstance(feature, ClassLabel) else [str(v) for v in values]
    if unknown := sorted(set(names) - set(classes)):
        raise ValueError(f"The {split} split has the classes {unknown}, which the training split does not: {classes}.")
    indices = {name: index for index, name in enumerate(classes)}
    labels = [indices[name] for name in names]
    return rows.remove_columns("labels").add_column("labels", labels, feature=ClassLabel(names=list(classes)))
