"""Text classification data (IMDb, MNLI, or your own): from a Hub name or local files to tokenised splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from ..loading import has_position_table, position_limit
from .splits import SplitArguments, check_arguments, check_texts, hold_out, load_splits, select_rows


@dataclass
class DataArguments(SplitArguments):
    """Where the texts and labels come from, which columns hold them, and how many are used."""

    text_column: str = HfArg(default="text", help="Column of the text.")
    text_pair_column: str | None = HfArg(
        default=None, help="Column of the second text, where there is one."
    )
    label_column: str = HfArg(default="label", help="Column of the class: integers or strings.")
    max_seq_length: int | None = HfArg(
        default=None, help="Tokens to keep of a text; None: the tokenizer's limit."
    )

    def __post_init__(self):
        super().__post_init__()
        check_arguments(self, {"max_seq_length": 1})


def load_text_classification(args: DataArguments) -> DatasetDict:
    """The labelled rows of a text classification task: "train", "validation" and, where it is given, "test", each with
    the columns `text`, `text_pair` (only for pairs) and `labels` (a `ClassLabel`).

    The classes are those of the training split: the names of a `ClassLabel` column, or the sorted values of any other.
    Rows without a label are dropped, and their number is logged. ValueError where no data is named, a column or a text
    is missing, the labels hold a -1 that may be a class, or a class of another split does not occur in training.
    """
    columns = {
        "text": args.text_column,
        "text_pair": args.text_pair_column,
        "labels": args.label_column,
    }
    columns = {name: column for name, column in columns.items() if column is not None}
    splits = {name: _labelled_rows(rows, columns, name) for name, rows in load_splits(args).items()}
    classes = _class_names(splits["train"])
    return hold_out(
        {name: _encode_labels(rows, classes, name) for name, rows in splits.items()}, args
    )


def align_classes(dataset: DatasetDict, id2label: Mapping[int, str]) -> DatasetDict:
    """Renumbers the labels of `dataset` as a trained model's config does, by their names, whatever their case;
    ValueError where the data has a class that the model has not.

    Labels that are numbers are the model's numbers. If the model has default names (`LABEL_0`, ...), the names of the
    data keep their order.
    """
    names = dataset["train"].features["labels"].names
    occurring = {names[label] for rows in dataset.values() for label in set(rows["labels"])}
    classes = [str(id2label[number]) for number in range(len(id2label))]
    numbers = [str(number) for number in range(len(classes))]
    # Numbers by all the names, since a few rows may lack the one that shows that counting begins at 1.
    for known, given, key in (
        (classes, occurring, str),
        (classes, occurring, str.casefold),
        (numbers, names, str),
    ):
        same = set(map(key, given)) <= set(map(key, known))
        if same and all(len(set(map(key, each))) == len(set(each)) for each in (given, known)):
            return DatasetDict(
                {split: _encode_labels(rows, known, split, key) for split, rows in dataset.items()}
            )
    if len(names) == len(classes) and classes == [f"LABEL_{number}" for number in numbers]:
        return dataset
    raise ValueError(
        f"The data has the classes {names}, and the model {classes}: rename those of the data."
    )


def most_tokens(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, max_seq_length: int | None = None
) -> int:
    """The number of tokens to keep of a text: `max_seq_length`, or the limit of tokenizer and model; ValueError where
    it is beyond a limit, or nothing gives one. A model without a table of positions may take more than it states."""
    limit, positions = tokenizer.model_max_length, position_limit(model)
    chosen = max_seq_length or min(limit, positions or limit)
    most = min(limit, positions) if positions and has_position_table(model) else limit
    if chosen > most:
        raise ValueError(
            f"`max_seq_length` is {chosen}; the tokenizer and the model take {most} tokens at most."
        )
    if chosen > 10**6:  # transformers' way to say that a tokenizer states no limit
        raise ValueError(
            "`max_seq_length` is not given, and neither tokenizer nor model states a limit."
        )
    return chosen


def tokenize(
    dataset: DatasetDict, tokenizer: PreTrainedTokenizerBase, max_length: int
) -> DatasetDict:
    """Replaces the texts by token ids, unpadded (the collator pads each batch) and cut to `max_length` of them."""
    texts = [name for name in ("text", "text_pair") if name in dataset["train"].column_names]

    def encode(batch):
        return tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_length)

    return dataset.map(encode, batched=True, remove_columns=texts, desc="Tokenising")


def _labelled_rows(rows: Dataset, columns: Mapping[str, str], split: str) -> Dataset:
    """The columns `text`, `text_pair` and `labels` of the rows that have a label."""
    label = columns["labels"]
    feature = rows.features.get(label)
    is_named = feature is None or isinstance(feature, ClassLabel)  # -1 is not one of its classes
    if not is_named and (marks := {str(each) for each in rows[label]} & {"-1", "-100"}):
        place = f"The column `{label}` of the {split} split holds {marks.pop()}"
        raise ValueError(
            f"{place}, which may mean 'no label' or be a class: drop these rows, or rename the class."
        )
    remedy = "Name the right ones by `text_column`, `text_pair_column` and `label_column`."
    rows = select_rows(rows, columns, split, remedy)
    check_texts(rows, f"The {split} split", *(columns.keys() - {"labels"}))
    return rows


def _class_names(train: Dataset) -> list[str]:
    if isinstance(feature := train.features["labels"], ClassLabel):
        return feature.names
    values = sorted(set(train["labels"]))
    if len(values) < 2:
        raise ValueError(f"The labelled training rows are all of one class, {values}.")
    if fractions := [value for value in values if isinstance(value, float) and value % 1]:
        raise ValueError(
            f"A label is {fractions[0]}: give classes; for numbers write a script with `num_labels=1`."
        )
    return [str(value) for value in values]


def _encode_labels(
    rows: Dataset, classes: Sequence[str], split: str, key: Callable[[str], str] = str
) -> Dataset:
    feature, values = rows.features["labels"], rows["labels"]
    names: list[Any] = (
        feature.int2str(values[:]) if isinstance(feature, ClassLabel) else [str(v) for v in values]
    )
    indices = {key(name): index for index, name in enumerate(classes)}
    if unknown := sorted(name for name in set(names) if key(name) not in indices):
        raise ValueError(
            f"The {split} split has the classes {unknown}, which the training split does not: {classes}."
        )
    labels = [indices[key(name)] for name in names]
    return rows.remove_columns("labels").add_column(
        "labels", labels, feature=ClassLabel(names=list(classes))
    )
