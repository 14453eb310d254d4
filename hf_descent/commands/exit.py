"""`hf-descent exit MODEL`: what a trained model is worth, and what it costs, when it stops early."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import get_args

import torch
from matplotlib.figure import Figure
from transformers import DataCollatorForSeq2Seq

from ..data.splits import check_texts, load_file
from ..data.text import DataArguments, align_classes, load_text_classification, most_tokens, tokenize
from ..early_exit import (
    ConfidenceExit,
    ConfidenceReport,
    ExitProfile,
    SpeculationProfile,
    exit_profile,
    speculation_profile,
    truncate,
)
from ..evaluation.scoring import Result
from ..loading import best_device, load_model, load_tokenizer, position_limit
from ..runs import RunFolder, tables
from .arguments import check_least, writable_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="text classifier or causal language model: a folder, or a name on the Hub")
    parser.add_argument("--output_dir", help="folder for tables and figure; by default the model's, if it is one")
    parser.add_argument(
        "--max_loss", type=float, default=0.01, help="accuracy that early exit may cost, a share of all samples (0.01)"
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="that it costs no more on other data (0.95)")
    parser.add_argument("--batch_size", type=int, default=32, help="samples per batch, also when timed (32)")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each exit; the median counts (3)")
    parser.add_argument("--save_layer", type=int, help="also save the model cut after this layer, as a checkpoint")
    group = parser.add_argument_group("language models")
    group.add_argument("--text_file", help="csv, json or parquet file with held-out texts in `text_column`")
    group.add_argument("--prompts", type=int, default=8, help="texts whose beginnings are continued (8)")
    group.add_argument("--prompt_length", type=int, default=16, help="tokens of each beginning (16)")
    group.add_argument("--max_new_tokens", type=int, default=64, help="tokens generated for each (64)")
    group = parser.add_argument_group("data of classifiers, as in `hf-descent classify`")
    for field in dataclasses.fields(DataArguments):
        kind = field.type if isinstance(field.type, type) else get_args(field.type)[0]
        group.add_argument(f"--{field.name}", type=kind, default=field.default, help=field.metadata["help"])


def run(args: argparse.Namespace) -> None:
    """Prints the tables, and writes them as json with `exits.png` into the output folder.

    A classifier's threshold is calibrated on the validation rows, and everything is reported on the test rows. Where
    there are none, one half of the validation rows is for the one, and one half for the other.

    Where a language model cannot draft with its own layers, the reason is printed in place of its speculation profile.

    Raises:
        ValueError: a number is out of its range; the model is neither a classifier nor a causal language model, or the
            data does not fit it.
    """
    counts = ("batch_size", "repeats", "prompts", "prompt_length", "max_new_tokens", "max_eval_samples")
    check_least(args, dict.fromkeys((*counts, "max_seq_length"), 1))
    if not 0 <= args.max_loss < 1:
        raise ValueError(f"`max_loss` is {args.max_loss}; give a share of the samples below 1, such as 0.01.")
    folder = args.output_dir or (args.model if Path(args.model).is_dir() else ".")
    folder = writable_folder("output_dir", folder)
    model, tokenizer = load_model(args.model).to(best_device()), load_tokenizer(args.model)
    if hasattr(model, "merge_and_unload"):  # an adapter: its layers are taken away with those of its base
        model = model.merge_and_unload()
    if args.save_layer is not None:
        target = folder / f"layer-{args.save_layer}"
        truncate(model, args.save_layer).save_pretrained(target)
        tokenizer.save_pretrained(target)
    measure = _classifier if "ForSequenceClassification" in type(model).__name__ else _language_model
    results = measure(model, tokenizer, args)
    run = RunFolder(folder)
    run.write(results)
    plot(**results).savefig(run.path / run.EXITS_FIGURE, dpi=150)
    print(f"{tables(results)}\n\nWritten to {folder}")


def _classifier(model, tokenizer, args) -> dict[str, Result]:
    data_args = DataArguments(**{field.name: getattr(args, field.name) for field in dataclasses.fields(DataArguments)})
    dataset = load_text_classification(data_args)
    dataset["train"] = dataset["train"].select([0])  # all that is left for it to do is to name the columns
    limit = most_tokens(tokenizer, model, args.max_seq_length)
    dataset = tokenize(align_classes(dataset, model.config.id2label), tokenizer, limit)
    if "test" not in dataset:
        if len(dataset["validation"]) < 2:
            raise ValueError("The one validation row cannot be halved; give more, or a `test_file` or `test_split`.")
        halves = dataset["validation"].train_test_split(0.5, seed=args.split_seed)
        dataset["validation"], dataset["test"] = halves["train"], halves["test"]
    settings = {"processing_class": tokenizer, "batch_size": args.batch_size}
    fast = ConfidenceExit(model).calibrate(dataset["validation"], args.max_loss, args.confidence, **settings)
    return {
        "exit_profile": exit_profile(model, dataset["test"], repeats=args.repeats, **settings),
        "confidence_exit": fast.evaluate(dataset["test"], repeats=args.repeats, **settings),
    }


def _language_model(model, tokenizer, args) -> dict[str, Result]:
    if args.text_file is None:
        raise ValueError("`text_file` is None; a language model is measured on the texts of a file.")
    rows = load_file("text_file", args.text_file)
    if args.text_column not in rows.column_names:
        raise ValueError(f"`text_column` is {args.text_column!r}; {args.text_file} has {rows.column_names}.")
    rows = rows.select(range(min(len(rows), args.max_eval_samples or len(rows))))
    check_texts(rows, args.text_column, args.text_file)
    positions = position_limit(model) or math.inf
    limit = min(args.max_seq_length or 512, positions)
    ids = tokenizer(rows[args.text_column][:], truncation=True, max_length=limit)["input_ids"]
    ids = [row for row in ids if len(row) > args.prompt_length]
    if not ids:
        raise ValueError(
            f"No text of {args.text_file}, cut to {limit} tokens, is longer than `prompt_length` = "
            f"{args.prompt_length}; give a smaller one, or longer texts."
        )
    prompts = [torch.tensor([row[: args.prompt_length]]) for row in ids[: args.prompts]]
    tokenizer.padding_side = "right"
    results = {
        "exit_profile": exit_profile(
            model,
            [{"input_ids": row, "labels": row} for row in ids],
            data_collator=DataCollatorForSeq2Seq(tokenizer),
            batch_size=args.batch_size,
            repeats=args.repeats,
        )
    }
    new_tokens = min(args.max_new_tokens, positions - args.prompt_length)
    try:
        results["speculation_profile"] = speculation_profile(
            model, prompts, max_new_tokens=new_tokens, repeats=args.repeats
        )
    except ValueError as error:  # as of GPT-2; what was measured before is kept
        print(f"No speculation profile: {error}\n")
    return results


def plot(
    exit_profile: ExitProfile,
    confidence_exit: ConfidenceReport | None = None,
    speculation_profile: SpeculationProfile | None = None,
) -> Figure:
    """Metric against speed-up of every exit; early exit per sample as one more point; acceptance per exit layer."""
    figure = Figure(figsize=(9 if speculation_profile else 5, 3.6), layout="constrained")
    axes = figure.subplots(1, 2 if speculation_profile else 1, squeeze=False)[0]
    axes[0].plot(exit_profile.speedups, exit_profile.values, "o-", label="all samples stop at layer")
    for layer, (speedup, value) in enumerate(zip(exit_profile.speedups, exit_profile.values), start=1):
        axes[0].annotate(str(layer), (speedup, value), textcoords="offset points", xytext=(4, 4))
    if confidence_exit:
        axes[0].plot([confidence_exit.speedup], [confidence_exit.accuracy], "*", ms=12, label="each stops when sure")
    axes[0].set(xlabel="measured speed-up", ylabel=exit_profile.metric)
    axes[0].legend()
    if speculation_profile:
        layers = range(1, len(speculation_profile.acceptance) + 1)
        axes[1].plot(layers, speculation_profile.acceptance, "o-", label="accepted drafts")
        speedups = speculation_profile.tokens_per_second / speculation_profile.greedy_tokens_per_second
        axes[1].plot(layers, speedups, "s", label="speed-up of generation")
        axes[1].axhline(1.0, color="grey", lw=0.8)
        axes[1].set(xlabel="exit layer", xticks=list(layers))
        axes[1].legend()
    return figure
