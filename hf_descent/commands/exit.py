"""`hf-descent exit MODEL`: what a trained model is worth, and what it costs, when it stops early."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import DataCollatorForSeq2Seq
from transformers.hf_argparser import HfArg

from ..data.alpaca import PromptFormat, completion_labels, prompt_ids, read_instructions
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
from ..loading import best_device, load_model, load_tokenizer, position_limit
from ..runs import RunFolder, tables
from .arguments import parse_models


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
    model, tokenizer = load_model(name).to(best_device()), load_tokenizer(name)
    if hasattr(
        model, "merge_and_unload"
    ):  # an adapter: its layers are taken away with those of its base
        model = model.merge_and_unload()
    measure = (
        _classifier if "ForSequenceClassification" in type(model).__name__ else _language_model
    )
    results = measure(model, tokenizer, args, data_args)
    RunFolder(folder).write(results)
    print(f"{tables(results)}\n\nWritten to {folder}")


def _classifier(
    model, tokenizer, args: ExitArguments, data_args: DataArguments
) -> dict[str, Result]:
    dataset = load_text_classification(data_args)
    dataset["train"] = dataset["train"].select(
        [0]
    )  # all that is left for it to do is to name the columns
    limit = most_tokens(tokenizer, model, data_args.max_seq_length)
    dataset = tokenize(align_classes(dataset, model.config.id2label), tokenizer, limit)
    if "test" not in dataset:
        halves = dataset["validation"].train_test_split(0.5, seed=data_args.split_seed)
        dataset["validation"], dataset["test"] = halves["train"], halves["test"]
    settings = {"processing_class": tokenizer, "batch_size": args.batch_size, "progress": True}
    fast = ConfidenceExit(model).calibrate(dataset["validation"], args.max_loss, **settings)
    return {
        "exit_profile": exit_profile(model, dataset["test"], repeats=args.repeats, **settings),
        "confidence_exit": fast.evaluate(dataset["test"], repeats=args.repeats, **settings),
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
