"""`hf-descent exit MODEL`: what a trained model is worth, and what it costs, with fewer layers."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from ..data.alpaca import PromptFormat
from ..data.splits import check_arguments
from ..data.text import DataArguments
from ..early_exit import (
    ConfidenceExit,
    ExitProfile,
    LayerSetProfile,
    exit_profile,
    find_layer_sets,
    layer_set_profile,
)
from ..early_exit.layer_sets import spans
from ..evaluation.scoring import Result
from ..loading import load_tokenizer
from ..runs import RunFolder, tables
from .arguments import parse_models
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


SEARCH_ROWS = 256  # on which layers are left out; it takes some L passes over them for each layer


@dataclass
class ExitArguments:
    """What to measure.

    By default the model stops after each layer; with `fewest_layers`, any layers are left out.
    """

    output_dir: str | None = HfArg(
        default=None,
        help="Folder for the results. Default: the model's own, or this one for a model on the Hub.",
    )
    fewest_layers: int | None = HfArg(
        default=None,
        help="Search for layers to leave out, one at a time, until this many are left.",
    )
    max_rise: float = HfArg(
        default=0.05,
        help="With `fewest_layers`: largest rise of the loss to accept, as a share of it.",
    )
    max_loss: float = HfArg(
        default=0.01,
        help="Classifiers: accuracy that early exit may lose, as a share of all samples.",
    )
    batch_size: int = HfArg(default=32, help="Samples in a batch, also for the timing.")
    repeats: int = HfArg(default=3, help="How often each exit is timed; the median counts.")
    text_file: str | None = HfArg(
        default=None, help="Language models: file of held-out texts, in the column `text_column`."
    )
    instructions: str | None = HfArg(
        default=None, help="Language models: file of instructions, in place of `text_file`."
    )
    prompt_format: PromptFormat = HfArg(
        default="auto", help="Language models: form of the prompts; choose that of the training."
    )
    image_column: str = HfArg(
        default="image",
        help="Image classifiers: column of the images, or of the numbers that the model reads.",
    )

    def __post_init__(self):
        counts = ("batch_size", "repeats", "fewest_layers")
        check_arguments(self, {**dict.fromkeys(counts, 1), "max_loss": 0, "max_rise": 0})


parse = partial(parse_models, (ExitArguments, DataArguments))


def run(models: list[str], args: ExitArguments, data_args: DataArguments) -> None:
    """Prints the tables, and writes them as json into the output folder.

    A classifier's threshold is calibrated, and layers are chosen, on the validation rows; all is reported on the test
    rows.
    """
    (name,) = models
    folder = results_folder(name, args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # raises here what it would after the measurement
    model = load_whole_model(name)
    if is_classifier(model):
        rows = classifier_rows(name, model, data_args, args.image_column)
        results = _classifier(model, rows, args)
    else:
        results = _language_model(model, load_tokenizer(name), args, data_args)
    RunFolder(folder).write(results)

    print(f"{tables(results)}\n\nWritten to {folder}")
    if "layer_sets" in results:
        _close_sets(name, results["layer_sets"])
    else:
        _close_exits(name, results["exit_profile"])
        print(next_step(f"card {folder}", "writes the model card"))


def _close_exits(name: str, profile: ExitProfile) -> None:
    layer = profile.cheapest()
    depth = len(profile.values)
    if layer == depth:
        print(f"No layer before the last keeps 99 % of the {profile.metric}.")
        return
    speedup = profile.speedups[layer - 1]
    print(
        f"Layer {layer} of {depth} keeps 99 % of the {profile.metric} and is {speedup:.2f} times as fast."
    )
    print(next_step(f"export {name} --layer {layer} --output_dir DIR", "writes the cut model"))


def _close_sets(name: str, profile: LayerSetProfile) -> None:
    kept = profile.smallest()
    depth = len(profile.layers[0])
    rise = f"{100 * profile.max_rise:g} %"
    print(profile.headline)
    if len(kept) == depth:
        print(f"No layer is shown to be left out with a rise of the loss of at most {rise}.")
        print(next_step(f"exit {name}", "measures what stopping early costs and gains"))
        return
    print(
        f"{len(kept)} of {depth} layers are shown to be enough: the loss rises by at most {rise}."
    )
    command = f"export {name} --layers {spans(kept)} --output_dir DIR"
    print(next_step(command, "writes the shorter model"))


def _classifier(
    model: PreTrainedModel, rows: HeldOutRows, args: ExitArguments
) -> dict[str, Result]:
    settings = {"batch_size": args.batch_size, "progress": True, **rows.settings}
    if args.fewest_layers is not None:
        search_rows = rows.validation.select(range(min(SEARCH_ROWS, len(rows.validation))))
        return _layer_sets(model, search_rows, rows.test, args, settings)
    fast = ConfidenceExit(model).calibrate(rows.validation, args.max_loss, **settings)
    return {
        "exit_profile": exit_profile(model, rows.test, repeats=args.repeats, **settings),
        "confidence_exit": fast.evaluate(rows.test, repeats=args.repeats, **settings),
    }


def _layer_sets(
    model: PreTrainedModel, search_rows: Any, rows: Any, args: ExitArguments, settings: dict
) -> dict[str, Result]:
    sets = find_layer_sets(model, search_rows, args.fewest_layers, **settings)
    return {"layer_sets": layer_set_profile(model, rows, sets, args.max_rise, **settings)}


def _language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    args: ExitArguments,
    data_args: DataArguments,
) -> dict[str, Result]:
    if (args.text_file is None) == (args.instructions is None):
        raise ValueError(
            f"`text_file` is {args.text_file} and `instructions` {args.instructions}; a language model takes one of "
            "the two."
        )
    if args.instructions:
        pairs = read_answered(args.instructions, args.prompt_format, tokenizer)
    else:
        pairs = read_texts("text_file", args.text_file, data_args.text_column)

    limit = tokens_to_read(model, data_args)
    rows = labelled_rows(pairs[: data_args.max_eval_samples], tokenizer, limit)
    settings = {
        "data_collator": collator_of(tokenizer),
        "batch_size": args.batch_size,
        "progress": True,
    }

    if args.fewest_layers is not None:
        searched = min(SEARCH_ROWS, len(rows) // 2)
        if not searched:
            raise ValueError("There is a single row; give some to choose layers by, and others.")
        return _layer_sets(model, rows[:searched], rows[searched:], args, settings)

    return {"exit_profile": exit_profile(model, rows, repeats=args.repeats, **settings)}
