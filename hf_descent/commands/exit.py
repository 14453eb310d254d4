"""`hf-descent exit MODEL`: what a trained model is worth, and what it costs, when it stops early."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from datasets import DatasetDict
from transformers import DataCollatorForSeq2Seq, PreTrainedModel
from transformers.hf_argparser import HfArg

from ..data.alpaca import PromptFormat, completion_labels, prompt_ids, read_instructions
from ..data.images import ImageCollator, load_image_classification
from ..data.reading import load_file
from ..data.splits import check_arguments, check_texts
from ..data.text import (
    DataArguments,
    align_classes,
    load_text_classification,
    most_tokens,
    tokenize,
)
from ..early_exit import ConfidenceExit, exit_profile, speculation_profile
from ..evaluation.scoring import Result
from ..loading import (
    best_device,
    load_image_processor,
    load_model,
    load_tokenizer,
    position_limit,
)
from ..runs import RunFolder, tables
from .arguments import SOURCES, parse_models, record_of
from .closing import next_step


@dataclass
class ExitArguments:
    """What is measured: of classifiers early exit per sample, of language models drafts by their own first layers."""

    output_dir: str | None = HfArg(
        default=None, help="Folder for the tables; None: the model's, if local."
    )
    max_loss: float = HfArg(
        default=0.01, help="Accuracy that early exit may cost, a share of all samples."
    )
    batch_size: int = HfArg(default=32, help="Samples in a batch, also when timed.")
    repeats: int = HfArg(default=3, help="Timings of each exit; the median counts.")
    text_file: str | None = HfArg(
        default=None, help="Language models: file with held-out texts in `text_column`."
    )
    instructions: str | None = HfArg(
        default=None, help="In its place a file of instructions, as of `generate`."
    )
    prompt_format: PromptFormat = HfArg(
        default="auto", help="Form of the instructions' prompts, as in training."
    )
    prompts: int = HfArg(
        default=8, help="Language models: texts or instructions that are continued."
    )
    prompt_length: int | None = HfArg(
        default=None, help="Language models: cut these to so many tokens."
    )
    max_new_tokens: int = HfArg(default=64, help="Language models: tokens generated for each.")
    image_column: str = HfArg(
        default="image",
        help="Image classifiers: column of the images, or of the numbers that the model reads.",
    )
    shortlist: int | None = HfArg(
        default=None, help="Draft from so many most frequent tokens; None: what is best."
    )

    def __post_init__(self):
        counts = (
            "batch_size",
            "repeats",
            "prompts",
            "prompt_length",
            "max_new_tokens",
            "shortlist",
        )
        check_arguments(self, dict.fromkeys(counts, 1) | {"max_loss": 0})


parse = partial(parse_models, (ExitArguments, DataArguments))


def run(models: list[str], args: ExitArguments, data_args: DataArguments) -> None:
    """Prints the tables, and writes them as json into the output folder.

    A classifier's threshold is calibrated on the validation rows, and all is reported on the test rows; without any,
    each gets one half of the former. Where a language model cannot draft with its own layers, the reason is printed.
    """
    (name,) = models
    folder = Path(args.output_dir or (name if Path(name).is_dir() else "."))
    folder.mkdir(parents=True, exist_ok=True)  # raises here what it would after the measurement
    model = load_model(name, images=True).to(best_device())
    if hasattr(model, "merge_and_unload"):  # an adapter's layers are cut with those of its base
        model = model.merge_and_unload()
    architecture = type(model).__name__
    if architecture.endswith("ForImageClassification"):
        results = _image_classifier(name, model, args, data_args)
    elif "ForSequenceClassification" in architecture:
        results = _text_classifier(name, model, args, data_args)
    else:
        results = _language_model(model, load_tokenizer(name), args, data_args)
    RunFolder(folder).write(results)
    print(f"{tables(results)}\n\nWritten to {folder}")
    profile = results.get("exit_profile")
    layer = profile.cheapest() if profile is not None else None
    if layer is not None and layer < len(profile.values):
        print(next_step(f"export {name} --layer {layer} --output_dir DIR", "writes the cut model"))
    print(next_step(f"card {folder}", "writes the model card"))


def _text_classifier(
    name: str, model: PreTrainedModel, args: ExitArguments, data_args: DataArguments
) -> dict[str, Result]:
    tokenizer = load_tokenizer(name)
    dataset = load_text_classification(data_args)
    _warn_of_training_rows(name, data_args)
    # All that is left for the training rows to do is to name the columns.
    dataset["train"] = dataset["train"].select([0])
    limit = most_tokens(tokenizer, model, data_args.max_seq_length)
    dataset = tokenize(align_classes(dataset, model.config.id2label), tokenizer, limit)
    return _classifier(model, dataset, args, data_args, processing_class=tokenizer)


def _image_classifier(
    name: str, model: PreTrainedModel, args: ExitArguments, data_args: DataArguments
) -> dict[str, Result]:
    dataset = load_image_classification(data_args, args.image_column, data_args.label_column)
    _warn_of_training_rows(name, data_args)
    dataset = align_classes(dataset, model.config.id2label)
    collator = ImageCollator(model, load_image_processor(name), dataset["validation"])
    settings = {"data_collator": collator, "remove_unused_columns": False}
    return _classifier(model, dataset, args, data_args, **settings)


def _warn_of_training_rows(name: str, data_args: DataArguments) -> None:
    """Say where the rows to measure on are drawn from those of training, and no record says how that drew its own."""
    is_named = data_args.validation_split or data_args.validation_file
    if not is_named and not record_of(name).keys() & {*SOURCES}:
        print(
            "The validation rows are drawn from those of the training split, on which the model may have been "
            "trained: name others by `--validation_split` or `--validation_file`.\n"
        )


def _classifier(
    model: PreTrainedModel,
    dataset: DatasetDict,
    args: ExitArguments,
    data_args: DataArguments,
    **settings,
) -> dict[str, Result]:
    """The exits of a classifier on its prepared `dataset`; `settings` as for [`exit_profile`]."""
    validation = dataset["validation"]
    test = dataset.get("test")
    if test is None:
        halves = validation.train_test_split(0.5, seed=data_args.split_seed)
        validation, test = halves["train"], halves["test"]
    settings = {"batch_size": args.batch_size, "progress": True, **settings}
    fast = ConfidenceExit(model).calibrate(validation, args.max_loss, **settings)
    return {
        "exit_profile": exit_profile(model, test, repeats=args.repeats, **settings),
        "confidence_exit": fast.evaluate(test, repeats=args.repeats, **settings),
    }


def _language_model(
    model, tokenizer, args: ExitArguments, data_args: DataArguments
) -> dict[str, Result]:
    if (args.text_file is None) == (args.instructions is None):
        raise ValueError(
            f"`text_file` is {args.text_file}; a language model takes either that or `instructions`."
        )
    if args.instructions:
        pairs = read_instructions(
            args.instructions, args.prompt_format, tokenizer, ["input", "output"]
        )
    else:
        column = data_args.text_column
        texts = load_file("text_file", args.text_file, [column])
        check_texts(texts, args.text_file, column)
        pairs = [{"prompt": text, "completion": None} for text in texts[column]]
    answered = [pair for pair in pairs if pair["completion"]]
    if 0 < len(answered) < len(pairs):  # a prompt has another loss than an answer
        print(
            f"Dropped {len(pairs) - len(answered)} of the {len(pairs)} rows: they are without `output`."
        )
    pairs = (answered or pairs)[: data_args.max_eval_samples]
    positions = position_limit(model) or math.inf
    limit = min(data_args.max_seq_length or 512, positions)
    cut = args.prompt_length or int(
        min(limit, max(positions - args.max_new_tokens, positions / 2))
    )  # room to answer
    rows = [
        completion_labels(pair, tokenizer, limit) | {"prompt": pair["prompt"]} for pair in pairs
    ]
    shortest = args.prompt_length or 1
    long_enough = [row for row in rows if len(row["input_ids"]) > shortest]
    if not long_enough:
        raise ValueError(
            f"`prompt_length` is {shortest}; no text, cut to {limit} tokens, is longer."
        )
    if too_short := len(rows) - len(long_enough):
        print(f"Dropped {too_short} of the {len(rows)} rows: they have at most {shortest} tokens.")
    rows = long_enough
    prompts = [
        torch.tensor([prompt_ids(row["prompt"], tokenizer)[:cut]]) for row in rows[: args.prompts]
    ]
    tokenizer.padding_side = "right"
    shared = {"repeats": args.repeats, "progress": True}
    collator = DataCollatorForSeq2Seq(tokenizer)
    results = {
        "exit_profile": exit_profile(
            model, rows, data_collator=collator, batch_size=args.batch_size, **shared
        )
    }
    # Of rows that are not continued, where there are some: the model may know the words of those that are.
    counts = Counter(
        token for row in rows[args.prompts :] or rows for token in row["labels"] if token >= 0
    )
    shared["shortlist"] = (
        [token for token, _ in counts.most_common(args.shortlist)] if args.shortlist else counts
    )
    shared["max_new_tokens"] = min(args.max_new_tokens, positions - max(map(torch.numel, prompts)))
    try:
        results["speculation_profile"] = speculation_profile(model, prompts, **shared)
    except ValueError as error:  # as of a single layer; what was measured before is kept
        print(f"No speculation profile: {error}\n")
    return results
