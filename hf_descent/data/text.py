"""Text classification data (IMDb, MNLI, or your own): from a Hub name or local files to tokenised splits."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from ..loading import has_position_table, position_limit
from .labels import (
    class_labels,
    class_name,
    encode_labels,
    is_whole,
    label_names,
    listed,
    missing_labels,
)
from .splits import (
    SplitArguments,
    check_arguments,
    check_texts,
    column_values,
    drop_rows,
    hold_out,
    load_splits,
    select_columns,
)


logger = logging.get_logger(__name__)


@dataclass
class DataArguments(SplitArguments):
    """Where the texts and labels come from, which columns hold them, and how many are used."""

    text_column: str = HfArg(default="text", help="Column of the text.")
    text_pair_column: str | None = HfArg(
        default=None, help="Column of the second text, where there is one."
    )
    label_column: str = HfArg(
        default="label", help="Column of the class: texts, whole numbers or booleans."
    )
    max_seq_length: int | None = HfArg(
        default=None, help="Tokens to keep of a text; None: the tokenizer's limit."
    )

    def __post_init__(self):
        super().__post_init__()
        check_arguments(self, {"max_seq_length": 1})


def load_text_classification(args: DataArguments) -> DatasetDict:
    """Load the labelled examples of a text classification task: "train", "validation" and perhaps "test", each with
    the columns `text`, `text_pair` (only for pairs) and `labels` (a `ClassLabel`).

    The classes are those of the training split, by the rule of `hf_descent/data/labels.py`: the names of a
    `ClassLabel` column, or the sorted labels of any other column. Rows without a label are dropped; their number is
    shown. ValueError if no data is named, a column or a text is missing, a label is no class or may stand for "no
    label", or a class of another split does not occur in training.
    """
    columns = {"text": args.text_column}
    if args.text_pair_column is not None:
        columns["text_pair"] = args.text_pair_column
    columns["labels"] = args.label_column

    splits = load_splits(args, list(columns.values()))
    labelled = {name: _labelled_rows(rows, columns, name) for name, rows in splits.items()}
    return hold_out(class_labels(labelled, args.label_column), args)


def load_for_model(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    with_training: bool = False,
) -> DatasetDict:
    """Load the splits of [`load_text_classification`] as tokens, with the classes of a trained model. Unless
    `with_training`, "train" has a single example, which names the columns."""
    dataset = load_text_classification(args)
    if not with_training:
        dataset["train"] = dataset["train"].select([0])
    limit = most_tokens(tokenizer, model, args.max_seq_length)
    return tokenize(align_classes(dataset, model.config.id2label), tokenizer, limit)


def align_classes(dataset: DatasetDict, id2label: Mapping[int, str]) -> DatasetDict:
    """Renumber the labels of `dataset` as in the config of a trained model, by their names in any case; ValueError if
    the data has a class that the model has not.

    Labels that are numbers are the model's numbers, unless the names of its classes are numbers; a warning says which
    classes they stand for if 0 does not occur. If the model has default names (`LABEL_0`, ...), the names of the data
    keep their order, which a warning shows.
    """
    names = dataset["train"].features["labels"].names
    occurring = {
        names[label] for rows in dataset.values() for label in set(column_values(rows, "labels"))
    }
    classes = [str(id2label[number]) for number in range(len(id2label))]
    numbers = [str(number) for number in range(len(classes))]

    for key in (str, _in_any_case):
        if _is_part_of(occurring, classes, key):
            return _renumbered(dataset, classes, key)

    # By all names: a few rows may lack the one that shows that counting begins at 1.
    if _is_part_of(names, numbers, str) and not any(map(is_whole, classes)):
        _warn_of_counting_from_1(occurring, classes)
        return _renumbered(dataset, numbers, str)

    if len(names) == len(classes) and classes == [f"LABEL_{number}" for number in numbers]:
        meaning = listed(
            range(len(names)), lambda number: f"{classes[number]} is {names[number]!r}"
        )
        logger.warning(
            f"The classes of the model have no names. They are taken for those of the data in their order: {meaning}."
        )
        return dataset
    raise ValueError(
        f"The data has the classes {names}, and the model {classes}: rename those of the data."
    )


def _in_any_case(name: str) -> str:
    return class_name(name).casefold()


def _is_part_of(names: Collection[str], classes: Sequence[str], key: Callable[[str], str]) -> bool:
    """Whether each name is one of the classes by a `key` that keeps both apart."""
    keys = set(map(key, names))
    known = set(map(key, classes))
    return keys <= known and len(keys) == len(names) and len(known) == len(classes)


def _renumbered(
    dataset: DatasetDict, classes: Sequence[str], key: Callable[[str], str]
) -> DatasetDict:
    return DatasetDict(
        {
            split: encode_labels(rows, label_names(rows), classes, key)
            for split, rows in dataset.items()
        }
    )


def _warn_of_counting_from_1(names: Collection[str], classes: Sequence[str]) -> None:
    """Says on the screen which of `classes` the numbers stand for if 0 is not among them, so that they may count from
    1."""
    if "0" in names:
        return
    numbers = sorted(map(int, names))
    meaning = listed(numbers, lambda number: f"{number} is {classes[number]!r}")
    logger.warning(
        f"The numbers in the data count the names of classes from 0, but 0 does not occur: {meaning}. If they count "
        "from 1, subtract 1 or write the names."
    )


def most_tokens(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, max_seq_length: int | None = None
) -> int:
    """The number of tokens to keep of a text: `max_seq_length`, or the limit of tokenizer and model.

    ValueError if it is beyond a limit, or there is none at all. A model without a table of positions may take more
    than it states."""
    limit = tokenizer.model_max_length
    positions = position_limit(model)
    both = limit
    if positions:
        both = min(limit, positions)
    most = limit
    if has_position_table(model):
        most = both
    chosen = both
    if max_seq_length is not None:
        chosen = max_seq_length

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
    """Replace the texts by token ids, cut to `max_length` and not padded, since the collator pads each batch.

    ValueError names texts of which the tokenizer makes no token: a batch of them would have no length."""
    texts = [name for name in ("text", "text_pair") if name in dataset["train"].column_names]

    def encode(batch, split):
        tokens = tokenizer(*(batch[name] for name in texts), truncation=True, max_length=max_length)
        empty = [index for index, ids in enumerate(tokens["input_ids"]) if not ids]
        if empty:
            bare = sorted({batch[name][index] for index in empty for name in texts})
            raise ValueError(
                f"The tokenizer makes no token of some examples of the {split} split, whose texts are {bare}: drop "
                "these examples, or take a tokenizer that puts special tokens around a text."
            )
        return tokens

    return DatasetDict(
        {
            split: rows.map(
                encode,
                batched=True,
                fn_kwargs={"split": split},
                remove_columns=texts,
                desc="Tokenising",
            )
            for split, rows in dataset.items()
        }
    )


def _labelled_rows(rows: Dataset, columns: Mapping[str, str], split: str) -> Dataset:
    """The columns `text`, `text_pair` and `labels` of the rows that have a label."""
    remedy = "Name the right ones by `text_column`, `text_pair_column` and `label_column`."
    selected = select_columns(rows, columns, split, remedy)
    missing = missing_labels(selected, split, columns["labels"])
    texts = [column for name, column in columns.items() if name != "labels"]
    check_texts(rows, f"The {split} split", *texts, ignored=missing)
    return drop_rows(selected, missing, split, columns["labels"])
