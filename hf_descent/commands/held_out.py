"""Loads the rows that `exit` and `lens` read, for a classifier of texts or images, or a language model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from ..data.alpaca import PromptFormat, completion_labels, read_instructions
from ..data.images import ImageCollator, load_image_classification
from ..data.reading import load_file
from ..data.splits import check_texts
from ..data.text import DataArguments, align_classes, load_for_model
from ..loading import (
    best_device,
    load_image_processor,
    load_model,
    load_tokenizer,
    position_limit,
)
from .arguments import SOURCES, record_of


# Rows to choose layers by. Each layer that is left out takes about L passes over them.
SEARCH_ROWS = 256
Pair = Mapping[str, Any]  # a `prompt` and its `completion`, or `None`


@dataclass
class HeldOutArguments:
    """Which examples are read, and where the results go."""

    data: str | None = HfArg(
        default=None,
        help=(
            "csv, tsv, json or parquet file of held-out examples: texts, or instructions if it has a column "
            "`instruction`. A language model needs one. Default: the test examples of a run, or half of its "
            "validation examples."
        ),
    )
    output_dir: str | None = HfArg(
        default=None,
        help="Folder for the results. Default: MODEL, or the current folder if MODEL is on the Hub.",
    )
    image_column: str = HfArg(
        default="image",
        help="Images: their column, or that of the numbers that the model reads.",
    )
    prompt_format: PromptFormat = HfArg(
        default="auto", help="Language models: form of the prompts; choose that of the training."
    )


@dataclass
class HeldOutRows:
    """Rows to choose by, rows to report on, and the settings of an evaluation that reads them.

    `train` are the examples of training, for a command that trains.
    """

    validation: Dataset | list
    test: Dataset | list
    settings: dict[str, Any]
    train: Dataset | list | None = None


def load_whole_model(name: str) -> PreTrainedModel:
    """Load a classifier of texts or images, or a language model, on this machine's device. Adapters are merged, since
    their layers are read and cut with those of their base."""
    model = load_model(name, images=True).to(best_device())
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    return model


def is_classifier(model: PreTrainedModel) -> bool:
    name = type(model).__name__
    return "ForSequenceClassification" in name or name.endswith("ForImageClassification")


def classifier_rows(
    name: str,
    model: PreTrainedModel,
    args: HeldOutArguments,
    data_args: DataArguments,
    trains: bool,
    chooses: bool,
) -> HeldOutRows:
    """The validation and test examples of a classifier, and those of training if the command `trains`. If it `chooses`
    by examples, it reports on others. Without test examples the validation examples are halved."""
    if args.data is not None:
        data_args = _of_file(args.data, data_args, trains, chooses)
    if type(model).__name__.endswith("ForImageClassification"):
        dataset = load_image_classification(data_args, args.image_column, data_args.label_column)
        dataset = align_classes(dataset, model.config.id2label)
        collator = ImageCollator(model, load_image_processor(name), dataset["validation"])
        settings = {"data_collator": collator, "remove_unused_columns": False}
    else:
        tokenizer = load_tokenizer(name)
        dataset = load_for_model(data_args, tokenizer, model, with_training=trains)
        settings = {"processing_class": tokenizer}
    _warn_of_training_rows(name, data_args)

    # Without test examples one half of the others is for the report.
    validation = dataset["validation"]
    test = dataset.get("test")
    if test is None:
        halves = validation.train_test_split(0.5, seed=data_args.split_seed)
        validation = halves["train"]
        test = halves["test"]
    return HeldOutRows(validation, test, settings, dataset["train"])


def _of_file(data: str, data_args: DataArguments, trains: bool, chooses: bool) -> DataArguments:
    """The arguments with which the file `data` gives all examples but those of training. If nothing is trained, the
    file also says which classes there are."""
    sources = dict.fromkeys(SOURCES & vars(data_args).keys())
    sources["train_split"] = data_args.train_split
    sources["train_file"] = train_file(data_args) if trains else data
    sources["validation_file"] = data
    sources["test_file"] = None if chooses else data
    return replace(data_args, **sources)


def train_file(data_args: DataArguments) -> str:
    if data_args.train_file is None:
        raise ValueError(
            "`train_file` is not given, and examples of training are needed: give a file like `data`."
        )
    return data_args.train_file


def _warn_of_training_rows(name: str, data_args: DataArguments) -> None:
    """Warn if the rows to measure are drawn from those of training, and no record says how training drew its own."""
    is_named = data_args.validation_split or data_args.validation_file
    if not is_named and not record_of(name).keys() & {*SOURCES}:
        print(
            "Warning: the validation examples are drawn from the training split, so the model may have been trained "
            "on them. Name other examples by `--validation_split` or `--validation_file`.\n"
        )


def language_rows(
    name: str,
    model: PreTrainedModel,
    args: HeldOutArguments,
    data_args: DataArguments,
    trains: bool,
    chooses: bool,
) -> HeldOutRows:
    """The instructions or texts of the file as test examples, and those of the file of training if the command
    `trains`. If it `chooses` by examples, it does so on the first half, or as much of that as a search reads."""
    if args.data is None:
        raise ValueError(
            f"{name!r} is a language model: give a file of texts or instructions by `--data`."
        )
    tokenizer = load_tokenizer(name)
    limit = _tokens_to_read(model, data_args)

    def read(argument: str, path: str, most: int | None) -> list[dict[str, Any]]:
        columns = load_file(argument, path, ["instruction", data_args.text_column]).column_names
        if "instruction" in columns:
            pairs = _read_answered(path, args.prompt_format, tokenizer)
        else:
            pairs = _read_texts(argument, path, data_args.text_column)
        return _labelled_rows(pairs[:most], tokenizer, limit)

    train = None
    if trains:
        train = read("train_file", train_file(data_args), data_args.max_train_samples)
    rows = read("data", args.data, data_args.max_eval_samples)
    count = min(SEARCH_ROWS, len(rows) // 2) if chooses else 0
    if chooses and not count:
        raise ValueError("There is a single example; give some to choose by, and others.")
    tokenizer.padding_side = "right"
    settings = {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    return HeldOutRows(rows[:count], rows[count:], settings, train)


def _read_texts(argument: str, path: str, column: str) -> list[Pair]:
    """The texts of a file, which `argument` gives, as prompts without a completion."""
    texts = load_file(argument, path, [column])
    check_texts(texts, path, column)
    return [{"prompt": text, "completion": None} for text in texts[column]]


def _read_answered(path: str, prompt_format: str, tokenizer: PreTrainedTokenizerBase) -> list[Pair]:
    """The instructions of a file. If some have an answer, only those: an answer has another loss than a prompt."""
    pairs = read_instructions(path, prompt_format, tokenizer, ["input", "output"])
    answered = [pair for pair in pairs if pair["completion"]]

    if not answered:
        return pairs
    if len(answered) < len(pairs):
        print(
            f"Dropped {len(pairs) - len(answered)} of the {len(pairs)} examples: they have no `output`."
        )
    return answered


def _labelled_rows(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, limit: int
) -> list[dict[str, Any]]:
    """Token ids and labels of each pair, cut to `limit` tokens. Pairs of a single token are dropped; ValueError if
    none is longer."""
    rows = [completion_labels(pair, tokenizer, limit) for pair in pairs]
    long_enough = [row for row in rows if len(row["input_ids"]) > 1]
    if not long_enough:
        raise ValueError(
            f"No text, cut to {limit} tokens, has more than one token: give longer texts."
        )

    if len(long_enough) < len(rows):
        count = len(rows) - len(long_enough)
        print(f"Dropped {count} of the {len(rows)} examples: they have fewer than 2 tokens.")

    return long_enough


def _tokens_to_read(model: PreTrainedModel, data_args: DataArguments) -> int:
    """The number of tokens of a text on which a language model is measured."""
    chosen = 512 if data_args.max_seq_length is None else data_args.max_seq_length
    positions = position_limit(model)
    return chosen if positions is None else min(chosen, positions)


def empty_folder(argument: str, path: str) -> Path:
    """The folder for a model that an argument names; ValueError if something is in it."""
    folder = Path(path)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"`{argument}` {path!r} is not empty; name another.")
    return folder


def results_folder(name: str, output_dir: str | None) -> Path:
    """The folder for results about the model `name`: `output_dir`, or the model's own, or the present one."""
    if output_dir is not None:
        return Path(output_dir)
    return Path(name) if Path(name).is_dir() else Path(".")
