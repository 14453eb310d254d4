"""Text classification data (IMDb, MNLI, or your own): from a Hub name or local files to tokenised splits."""

from collections.abc import Mapping
from dataclasses import dataclass

from datasets import Dataset, DatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from ..loading import has_position_table, position_limit
from .labels import (
    are_places,
    class_key,
    class_labels,
    encode_labels,
    listed,
    missing_labels,
    warn_of_counting_from_1,
)
from .splits import (
    SplitArguments,
    check_arguments,
    check_texts,
    column_values,
    drop_rows,
    hold_out,
    load_splits,
    name_rows,
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
    """The labelled rows of a text classification task: "train", "validation" and, where it is given, "test", each with
    the columns `text`, `text_pair` (only for pairs) and `labels` (a `ClassLabel`).

    The classes are those of the training split, by the rule of `hf_descent/data/labels.py`: the names of a
    `ClassLabel` column, or the sorted labels of any other. Rows without a label are dropped; their number is shown.
    ValueError where no data is named, a column or a text is missing, a label is no class or may stand for "no label",
    or a class of another split does not occur in training.
    """
    columns = {"text": args.text_column}
    if args.text_pair_column is not None:
        columns["text_pair"] = args.text_pair_column
    columns["labels"] = args.label_column

    splits = load_splits(args, list(columns.values()))
    labelled = {name: _labelled_rows(rows, columns, name) for name, rows in splits.items()}
    left_out = {name: missing for name, (_, missing) in labelled.items()}
    kept = {name: rows for name, (rows, _) in labelled.items()}
    return hold_out(class_labels(kept, args.label_column, left_out), args)


def load_for_model(
    args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    with_training: bool = False,
) -> DatasetDict:
    """The splits of [`load_text_classification`] as tokens, with the classes of a trained model. Of the training rows
    there is one alone, which names the columns, unless they are asked for."""
    dataset = load_text_classification(args)
    if not with_training:
        dataset["train"] = dataset["train"].select([0])
    limit = most_tokens(tokenizer, model, args.max_seq_length)
    return tokenize(align_classes(dataset, model.config.id2label), tokenizer, limit)


def align_classes(dataset: DatasetDict, id2label: Mapping[int, str]) -> DatasetDict:
    """Renumbers the labels of `dataset` as a trained model's config does, by their names, whatever their case;
    ValueError where the data has a class that the model has not.

    Numbers and booleans are the same classes however they are written (1 and 1.0, true and 1). Labels that are
    numbers are the model's numbers, unless the names of its classes are numbers; a warning says which classes they
    stand for if 0 does not occur. If the model has default names (`LABEL_0`, ...), the names of the data keep their
    order, which a warning shows.
    """
    names = dataset["train"].features["labels"].names
    occurring = {
        names[label] for rows in dataset.values() for label in set(column_values(rows, "labels"))
    }
    classes = [str(id2label[number]) for number in range(len(id2label))]
    numbers = [str(number) for number in range(len(classes))]

    # Numbers by all the names, since a few rows may lack the one that shows that counting begins at 1.
    ways = [
        (classes, occurring, str),
        (classes, occurring, str.casefold),
        (classes, occurring, class_key),
    ]
    if are_places(classes):
        ways.append((numbers, names, str))

    for known, of_data, key in ways:
        known_keys = set(map(key, known))
        data_keys = set(map(key, of_data))
        is_unique = len(known_keys) == len(set(known)) and len(data_keys) == len(set(of_data))
        if data_keys <= known_keys and is_unique:
            if known is numbers:
                warn_of_counting_from_1(set(map(int, of_data)), classes, "the data")
            return DatasetDict(
                {split: _renumbered(rows, known, key) for split, rows in dataset.items()}
            )

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


def most_tokens(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, max_seq_length: int | None = None
) -> int:
    """The number of tokens to keep of a text: `max_seq_length`, or the limit of tokenizer and model; ValueError where
    it is beyond a limit, or nothing gives one. A model without a table of positions may take more than it states."""
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
    """Replaces the texts by token ids, unpadded (the collator pads each batch) and cut to `max_length` of them.
    ValueError naming texts of which the tokenizer makes no token at all: a batch of them would have no length."""
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


def _labelled_rows(
    rows: Dataset, columns: Mapping[str, str], split: str
) -> tuple[Dataset, dict[int, str]]:
    """The columns `text`, `text_pair` and `labels` of the rows that have a label, and why the other ones have none."""
    remedy = "Name the right ones by `text_column`, `text_pair_column` and `label_column`."
    selected = select_columns(rows, columns, split, remedy)
    missing = missing_labels(selected, split, columns["labels"])
    texts = [column for name, column in columns.items() if name != "labels"]
    check_texts(rows, f"The {split} split", *texts, ignored=missing)
    _report_blanks(rows.select_columns(texts), split, missing)
    return drop_rows(selected, missing, split, columns["labels"]), missing


def _report_blanks(texts: Dataset, split: str, ignored: Mapping[int, str]) -> None:
    """Says on the screen which rows have an empty text: they are kept, but hardly meant."""
    columns = [column_values(texts, name) for name in texts.column_names]
    blank = [
        index
        for index, values in enumerate(zip(*columns))
        if index not in ignored and not any(map(str.strip, values))
    ]
    if blank:
        logger.warning(
            f"{len(blank)} of the {len(texts)} {split} examples have an empty text ({name_rows(blank)}). They are "
            "kept."
        )


def _renumbered(rows: Dataset, classes: list[str], key) -> Dataset:
    names = rows.features["labels"].int2str(rows["labels"][:])
    return encode_labels(rows, names, classes, key)
