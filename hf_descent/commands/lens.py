"""`hf-descent lens MODEL --data FILE`: what every layer of any model knows; the model is not trained."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from transformers.hf_argparser import HfArg

from ..data.splits import check_arguments
from ..data.text import DataArguments
from ..early_exit.tuned_lens import fit_lens
from ..evaluation.lens import Lens, lens
from ..evaluation.plots import plot_lens, save_figure
from ..evaluation.scoring import markdown_table
from ..files import atomic_write
from ..runs import RunFolder
from .arguments import parse_model
from .closing import next_step
from .held_out import (
    HeldOutArguments,
    classifier_rows,
    is_classifier,
    language_rows,
    load_whole_model,
    results_folder,
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
class LensArguments(HeldOutArguments):
    """What to read."""

    fit: Literal["none", "affine"] = HfArg(
        default="none",
        help=(
            "affine: also fit a linear map between each layer and the head, on training examples (of `train_file`, or "
            "of a run), and show the loss through it."
        ),
    )
    batch_size: int = HfArg(default=8, help="Examples in a batch.")

    def __post_init__(self):
        check_arguments(self, {"batch_size": 1})


parse = partial(parse_model, (LensArguments, DataArguments))


def run(name: str, args: LensArguments, data_args: DataArguments) -> None:
    """Print the table, and write it as json and as a page with a figure into the output folder."""
    folder = results_folder(name, args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # raises its errors now, not after the measurement
    model = load_whole_model(name)
    fits = args.fit != "none"
    read = classifier_rows if is_classifier(model) else language_rows
    rows = read(name, model, args, data_args, trains=fits, chooses=False)

    settings = {"batch_size": args.batch_size, "progress": True, **rows.settings}
    fitted = None
    if fits:
        fitted = fit_lens(model, rows.train, **settings).layer_outputs
    measured = lens(model, rows.test, fitted, **settings)

    RunFolder(folder).write({"lens": measured})
    save_figure(plot_lens(measured), folder, "lens")
    with atomic_write(folder / "lens.md") as file:
        file.write(page(measured, Path(name).name))
    print(f"{measured}\n\nWritten to {folder}: lens.md, lens.json, lens.png, lens.svg")
    print(measured.summary)
    print(next_step(f"exit {name}", "measures what stopping early costs and gains"))


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
