"""Text classification data (IMDb, MNLI, or your own): from a Hub name or local files to tokenised splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..loading import has_position_table, position_limit
from .splits import SplitArguments, check_texts, hold_out, load_splits


logger = logging.get_logger(__name__)

UNLABELLED = (None, -1, "")  # -1 among the named classes of a `ClassLabel`; an empty field of a csv file


@dataclass
class DataArguments(SplitArguments):
    """Where the texts and labels come from, which columns hold them, and how many are used."""

    text_column: str = field(default="text", metadata={"help": "Column of the text."})
    text_pair_column: str | None = field(
        default=None, metadata={"help": "Column of the second text, where there is one."}
    )
    label_column: str = field(default="label", metadata={"help": "Column of the class: integers or strings."})
    max_seq_length: int | None = field(
        default=None,
        metadata={"help": "Longer texts are cut to this many tokens; the tokenizer's limit where not given."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_seq_length is not None and self.max_seq_length < 1:
            raise ValueError(f"`max_seq_length` is {self.max_seq_length}; give a positive number or leave it out.")
        columns = [self.text_column, self.text_pair_column, self.label_column]
        if len(set(columns)) < len(columns):
            raise ValueError(
                f"`text_column`, `text_pair_column` and `label_column` are {columns}; give different columns."
            )


def load_text_classification(args: DataArguments) -> DatasetDict:
    """Loads the labelled rows of a text classification task.

    The classes are those of the training split: the names of a `ClassLabel` column, or the sorted values of any other.
    Rows without a label are dropped, and their number is logged.

    Returns:
        `DatasetDict`: "train", "validation" and, where it is given, "test", each with the columns `text`, `text_pair`
        (only for pairs) and `labels` (a `ClassLabel`).

    Raises:
        ValueError: no data is named; a file or column is missing; a text is missing; the labels are not classes, or
            hold a -1 that may be one; a class of another split does not occur in training.
    """
    splits = load_splits(args)
    columns = {"text": args.text_column, "text_pair": args.text_pair_column, "labels": args.label_column}
    columns = {name: column for name, column in columns.items() if column is not None}
    splits = {name: _labelled_rows(_select_columns(rows, columns, name), name, args) for name, rows in splits.items()}
    classes = _class_names(splits["train"])
    splits = {name: _encode_labels(rows, classes, name) for name, rows in splits.items()}

    return hold_out(splits, args)


def align_classes(dataset: DatasetDict, id2label: Mapping[int, str]) -> DatasetDict:
    """Renumbers the labels of `dataset` as a trained model's config does, by their names, whatever their case.

    Labels that are numbers are the model's numbers. If the model has default names (`LABEL_0`, ...), the names of the
    data keep their order.

    Raises:
        ValueError: the data has a class that the model has not.
    """
    names = dataset["train"].features["labels"].names
    occurring = {names[label] for rows in dataset.values() for label in set(rows["labels"])}
    classes = [str(id2label[number]) for number in range(len(id2label))]
    numbers = [str(number) for number in range(len(classes))]
    # Numbers by all the names, since a few rows may lack the one that shows that counting begins at 1.
    for known, given, key in ((classes, occurring, str), (classes, occurring, str.casefold), (numbers, names, str)):
        same = set(map(key, given)) <= set(map(key, known))
        if same and all(len(set(map(key, each))) == len(set(each)) for each in (given, known)):
            return DatasetDict({split: _encode_labels(rows, known, split, key) for split, rows in dataset.items()})
    if len(names) == len(classes) and classes == [f"LABEL_{number}" for number in numbers]:
        return dataset
    raise ValueError(
        f"The data has the classes {names}, and the model {classes}: give the data that the model was trained on, or "
        "rename its classes."
    )


def most_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, max_seq_length: int | None = None) -> int:
    """The number of tokens to keep of a text: `max_seq_length`, or the limit of tokenizer and model.

    A model without a table of positions may take more than its stated limit.

    Raises:
        ValueError: `max_seq_length` is beyond a limit, or nothing gives one.
    """
    limit, positions = tokenizer.model_max_length, position_limit(model)
    max_seq_length = max_seq_length or min(limit, positions or limit)
    if max_seq_length > limit:
        raise ValueError(f"`max_seq_length` is {max_seq_length}, and the tokenizer's limit is {limit} tokens.")
    if positions and max_seq_length > positions and has_position_table(model):
        raise ValueError(f"`max_seq_length` is {max_seq_length}, and the model has {positions} positions.")
    if max_seq_length > 10**6:  # transformers' way to say that a tokenizer states no limit
        raise ValueError("`max_seq_length` is not given, and neither tokenizer nor model states a limit.")
    return max_seq_length


def tokenize(dataset: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int) -> DatasetDict:
    """Replaces the texts by token ids, unpadded (the collator pads each batch) and cut to `max_length` of them.

    Raises:
        ValueError: a text has no token, as an empty one where the tokenizer adds none.
    """
    texts = [name for name in ("text", "text_pair") if name in dataset["train"].column_names]

    def encode(batch):
        encoded = tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_length)
        if [] in encoded["input_ids"]:  # a batch of such rows alone would end the run
            raise ValueError("A row has a text without a token: drop the rows whose text is empty.")
        return encoded

    return dataset.map(encode, batched=True, remove_columns=texts, desc="Tokenising")


def _select_columns(rows: Dataset, columns: dict[str, str], split: str) -> Dataset:
    """Renames the columns to `text`, `text_pair` and `labels`, and drops all others."""
    if missing := [column for column in columns.values() if column not in rows.column_names]:
        raise ValueError(
            f"The {split} split has no column {missing}; it has {rows.column_names}. Name the right ones by "
            "`text_column`, `text_pair_column` and `label_column`."
        )
    rows = rows.select_columns(list(columns.values()))
    return rows.rename_columns({column: name for name, column in columns.items() if column != name})


def _labelled_rows(rows: Dataset, split: str, args: DataArguments) -> Dataset:
    for name in (name for name in rows.column_names if name != "labels"):
        check_texts(rows, name, f"The {split} split")
    if any(isinstance(label, str) and label != label.strip() for label in rows["labels"]):
        # As of `a, b` in a csv file; the same class is not to be two.
        rows = rows.map(lambda row: {"labels": row["labels"] and row["labels"].strip()}, desc="Stripping labels")
    named = isinstance(rows.features["labels"], ClassLabel)  # -1 is not one of its classes
    marked = [label for label in rows["labels"] if str(label) in ("-1", "-100")]
    if marked and not named:
        source = getattr(args, f"{split}_file") or args.dataset_name
        raise ValueError(
            f"The column `{args.label_column}` of the {split} split ({source}) is {marked[0]} in {len(marked)} rows, "
            "which may mean 'no label', as on the Hub, or be a class: drop those rows, or give the class another name."
        )
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
    values = train["labels"][:]
    if odd := [value for value in values if not isinstance(value, str | int)]:
        raise ValueError(
            f"The labels must be classes, integers or strings, and are such as {odd[0]!r}: name another "
            "`label_column`, or cast it (whole numbers with gaps become fractions in pandas)."
        )
    values = set(values)
    if len(values) < 2:
        raise ValueError(f"The labelled training rows are all of one class, {values}.")
    return [str(value) for value in sorted(values)]


def _encode_labels(rows: Dataset, classes: Sequence[str], split: str, key: Callable[[str], str] = str) -> Dataset:
    feature, values = rows.features["labels"], rows["labels"]
    names: list[Any] = feature.int2str(values[:]) if isinstance(feature, ClassLabel) else [str(v) for v in values]
    indices = {key(name): index for index, name in enumerate(classes)}
    if unknown := sorted(name for name in set(names) if key(name) not in indices):
        raise ValueError(f"The {split} split has the classes {unknown}, which the training split does not: {classes}.")
    labels = [indices[key(name)] for name in names]
    return rows.remove_columns("labels").add_column("labels", labels, feature=ClassLabel(names=list(classes)))
