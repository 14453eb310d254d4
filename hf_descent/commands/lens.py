"""`hf-descent lens MODEL --data FILE`: what every layer of any model knows; the model is not trained."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from ..data.alpaca import PromptFormat
from ..data.reading import load_file
from ..data.splits import check_arguments
from ..data.text import DataArguments
from ..early_exit.tuned_lens import fit_lens
from ..evaluation.lens import Lens, lens
from ..evaluation.plots import plot_lens, save_figure
from ..evaluation.scoring import markdown_table
from ..files import atomic_write
from ..loading import load_tokenizer
from ..runs import RunFolder
from .arguments import SOURCES, parse_model
from .closing import next_step
from .held_out import (
    HeldOutRows,
    classifier_rows,
    collator_of,
    is_classifier,
    labelled_rows,
    load_whole_model,
    read_answered,
    read_texts,
    results_folder,
    tokens_to_read,
)


PAGE = """\
# What each layer of {model} knows

{summary}

![Loss, metric, entropy and norm of each layer](lens.png)

{table}

Each layer is read by the model's own head, on {items} labelled examples or tokens. *Loss* and *{metric}* are those of
the model if it stopped after the layer. *Entropy* says how sure its predictions are, in nats: 0 is sure. *Norm* is the
mean length of the hidden states. +- is half of a 95 % interval.
"""
FITTED = """
*Fitted loss* is read through an affine map of each layer in front of the head. The maps learned on other examples to
predict what the last layer predicts. Where it is far below the loss, the layer knows more than the head can read.
"""


@dataclass
class LensArguments:
    """What to read."""

    data: str | None = HfArg(
        default=None,
        help=(
            "csv, tsv, json or parquet file of held-out examples; a language model needs one. Default: the test "
            "examples of a run, or half of its validation examples."
        ),
    )
    fit: Literal["none", "affine"] = HfArg(
        default="none",
        help=(
            "affine: also fit a linear map between each layer and the head, on training examples (of `train_file`, or "
            "of a run), and show the loss through it."
        ),
    )
    output_dir: str | None = HfArg(
        default=None,
        help="Folder for the results. Default: MODEL, or the current folder if MODEL is on the Hub.",
    )
    batch_size: int = HfArg(default=8, help="Examples in a batch.")
    image_column: str = HfArg(
        default="image",
        help="Image classifiers: column of the images, or of the numbers that the model reads.",
    )
    prompt_format: PromptFormat = HfArg(
        default="auto", help="Form of the prompts, if the file has a column `instruction`."
    )

    def __post_init__(self):
        check_arguments(self, {"batch_size": 1})


parse = partial(parse_model, (LensArguments, DataArguments))


def run(name: str, args: LensArguments, data_args: DataArguments) -> None:
    """Prints the table, and writes it as json and as a page with a figure into the output folder."""
    folder = results_folder(name, args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # raises here what it would after the measurement
    model = load_whole_model(name)
    if is_classifier(model):
        rows = _classifier_rows(name, model, args, data_args)
    else:
        rows = _language_rows(name, model, args, data_args)

    settings = {"batch_size": args.batch_size, "progress": True, **rows.settings}
    fitted = None
    if args.fit != "none":
        fitted = fit_lens(model, rows.train, **settings).layer_outputs
    measured = lens(model, rows.test, fitted, **settings)

    RunFolder(folder).write({"lens": measured})
    save_figure(plot_lens(measured), folder, "lens")
    with atomic_write(folder / "lens.md") as file:
        file.write(page(measured, Path(name).name))
    print(f"{measured}\n\nWritten to {folder}: lens.md, lens.json, lens.png, lens.svg")
    print(measured.summary)
    print(next_step(f"exit {name}", "measures what stopping early costs and gains"))


def _classifier_rows(
    name: str, model: PreTrainedModel, args: LensArguments, data_args: DataArguments
) -> HeldOutRows:
    """The rows of the file, or the test examples of a run; with `fit` also examples of training."""
    fits = args.fit != "none"
    if args.data is None:
        return classifier_rows(name, model, data_args, args.image_column, fits)
    # The file stands for all splits. Where nothing is fitted, that of training only says which classes there are.
    sources = dict.fromkeys(SOURCES & vars(data_args).keys())
    sources["train_split"] = data_args.train_split
    files = {f"{split}_file": args.data for split in ("train", "validation", "test")}
    if fits:
        files["train_file"] = _train_file(args, data_args)
    data_args = replace(data_args, **{**sources, **files})
    return classifier_rows(name, model, data_args, args.image_column, fits)


def _train_file(args: LensArguments, data_args: DataArguments) -> str:
    if data_args.train_file is None:
        raise ValueError(
            f"`fit` is {args.fit!r}, which needs examples of training: give a file like `data` by `train_file`."
        )
    return data_args.train_file


def _language_rows(
    name: str, model: PreTrainedModel, args: LensArguments, data_args: DataArguments
) -> HeldOutRows:
    """The instructions or texts of the file; with `fit` also those of the file of training."""
    if args.data is None:
        raise ValueError(f"{name!r} is a language model: give a file of texts by `--data`.")
    tokenizer = load_tokenizer(name)
    limit = tokens_to_read(model, data_args)

    def read(argument: str, path: str, most: int | None) -> list[dict[str, Any]]:
        columns = load_file(argument, path, ["instruction", data_args.text_column]).column_names
        if "instruction" in columns:
            pairs = read_answered(path, args.prompt_format, tokenizer)
        else:
            pairs = read_texts(argument, path, data_args.text_column)
        return labelled_rows(pairs[:most], tokenizer, limit)

    train = None
    if args.fit != "none":
        path = _train_file(args, data_args)
        train = read("train_file", path, data_args.max_train_samples)
    test = read("data", args.data, data_args.max_eval_samples)
    return HeldOutRows([], test, {"data_collator": collator_of(tokenizer)}, train)


def page(measured: Lens, model: str) -> str:
    """The result as Markdown, beside the figure `lens.png`."""
    text = PAGE.format(
        model=model,
        summary=measured.summary,
        table=markdown_table(measured.rows()),
        items=measured.items,
        metric=measured.metric,
    )
    if measured.fitted_losses is not None:
        text += FITTED
    return text
