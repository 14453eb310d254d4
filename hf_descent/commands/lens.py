"""`hf-descent lens MODEL --data FILE`: what every layer of any model knows, without training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.hf_argparser import HfArg

from ..data.alpaca import PromptFormat
from ..data.reading import load_file
from ..data.splits import check_arguments
from ..data.text import DataArguments
from ..evaluation.lens import Lens, lens
from ..evaluation.plots import plot_lens, save_figure
from ..files import atomic_write
from ..loading import load_tokenizer
from ..runs import RunFolder
from .arguments import SOURCES, parse_models
from .closing import next_step
from .held_out import (
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

Each layer is read by the model's own head, on {items} labelled rows or tokens. *Loss* and *{metric}* are those of the
model if it stopped after the layer. *Entropy* says how sure its predictions are, in nats: 0 is sure. *Norm* is the
mean length of the hidden states. +- is half of a 95 % interval.
"""


@dataclass
class LensArguments:
    """What to read."""

    data: str | None = HfArg(
        default=None,
        help=(
            "csv, tsv, json or parquet file of held-out rows; a language model needs one. Default: the test rows of a "
            "run, or half of its validation rows."
        ),
    )
    output_dir: str | None = HfArg(
        default=None,
        help="Folder for the results. Default: the model's own, or this one for a model on the Hub.",
    )
    batch_size: int = HfArg(default=8, help="Rows in a batch.")
    image_column: str = HfArg(
        default="image",
        help="Image classifiers: column of the images, or of the numbers that the model reads.",
    )
    prompt_format: PromptFormat = HfArg(
        default="auto", help="Form of the prompts, if the file has a column `instruction`."
    )

    def __post_init__(self):
        check_arguments(self, {"batch_size": 1})


parse = partial(parse_models, (LensArguments, DataArguments))


def run(models: list[str], args: LensArguments, data_args: DataArguments) -> None:
    """Prints the table, and writes it as json and as a page with a figure into the output folder."""
    (name,) = models
    folder = results_folder(name, args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # raises here what it would after the measurement
    model = load_whole_model(name)
    if is_classifier(model):
        rows, settings = _classifier_rows(name, model, args, data_args)
    else:
        rows, settings = _language_rows(name, model, args, data_args)

    measured = lens(model, rows, batch_size=args.batch_size, progress=True, **settings)

    RunFolder(folder).write({"lens": measured})
    save_figure(plot_lens(measured), folder, "lens")
    with atomic_write(folder / "lens.md") as file:
        file.write(page(measured, Path(name).name))
    print(f"{measured}\n\nWritten to {folder}: lens.md, lens.json, lens.png, lens.svg")
    print(measured.summary)
    print(next_step(f"exit {name}", "measures what stopping early costs and gains"))


def _classifier_rows(
    name: str, model: PreTrainedModel, args: LensArguments, data_args: DataArguments
) -> tuple[Any, dict]:
    """The rows of the file, or the test rows of a run, and the settings of an evaluation that reads them."""
    if args.data is None:
        held_out = classifier_rows(name, model, data_args, args.image_column)
        return held_out.test, held_out.settings
    # The file stands for all splits. That of training only says which classes there are.
    sources = dict.fromkeys(SOURCES & vars(data_args).keys())
    sources["train_split"] = data_args.train_split
    files = {f"{split}_file": args.data for split in ("train", "validation", "test")}
    data_args = replace(data_args, **{**sources, **files})
    held_out = classifier_rows(name, model, data_args, args.image_column)
    return held_out.test, held_out.settings


def _language_rows(
    name: str, model: PreTrainedModel, args: LensArguments, data_args: DataArguments
) -> tuple[Any, dict]:
    """The instructions or texts of the file, and the settings of an evaluation that reads them."""
    if args.data is None:
        raise ValueError(f"{name!r} is a language model: give a file of texts by `--data`.")
    tokenizer = load_tokenizer(name)
    if "instruction" in load_file("data", args.data, []).column_names:
        pairs = read_answered(args.data, args.prompt_format, tokenizer)
    else:
        pairs = read_texts("data", args.data, data_args.text_column)
    limit = tokens_to_read(model, data_args)
    rows = labelled_rows(pairs[: data_args.max_eval_samples], tokenizer, limit)
    return rows, {"data_collator": collator_of(tokenizer)}


def page(measured: Lens, model: str) -> str:
    """The result as Markdown, beside the figure `lens.png`."""
    return PAGE.format(
        model=model,
        summary=measured.summary,
        table=markdown_table(measured.rows()),
        items=measured.items,
        metric=measured.metric,
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, titles first."""
    titles, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([titles, "|---" * len(rows[0]) + "|", *others])
