"""`hf-descent exit MODEL`: how good a trained model is with fewer layers, and how fast."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.hf_argparser import HfArg

from ..data.splits import check_arguments
from ..data.text import DataArguments
from ..early_exit import (
    ConfidenceExit,
    ExitProfile,
    HealingTrainer,
    LayerSetProfile,
    exit_profile,
    find_layer_sets,
    layer_set_profile,
)
from ..early_exit.layer_sets import spans
from ..evaluation import Certificate
from ..loading import is_text_model, load_image_processor, load_tokenizer
from ..runs import RunFolder, tables
from .arguments import parse_model
from .closing import next_step, verdict_of
from .held_out import (
    SEARCH_ROWS,
    HeldOutArguments,
    HeldOutRows,
    classifier_rows,
    empty_folder,
    is_classifier,
    language_rows,
    load_whole_model,
    results_folder,
)


HEALING_BATCH = 8  # training examples in a step


@dataclass
class ExitArguments(HeldOutArguments):
    """What to measure.

    By default the model stops after each layer; with `fewest_layers`, any layers are left out.
    """

    fewest_layers: int | None = HfArg(
        default=None,
        help="Search for layers to leave out, one at a time, until this many are left.",
    )
    heal: str | None = HfArg(
        default=None,
        help="With `fewest_layers`: train what is left to predict what all layers do, and save it in this folder.",
    )
    exit_head: Literal["layers", "norm", "affine", "block"] = HfArg(
        default="layers",
        help=(
            "With `heal`: what to train. layers: those after the first one left out. The others: no search; keep the "
            "first `fewest_layers` layers, and train only this, put between them and the head. A block is one more "
            "layer."
        ),
    )
    heal_steps: int = HfArg(default=200, help="With `heal`: steps of 8 training examples.")
    heal_learning_rate: float = HfArg(
        default=3e-4,
        help="With `heal`: the highest learning rate. Raise it for a norm or an affine map.",
    )
    max_rise: float = HfArg(
        default=0.05,
        help="With `fewest_layers`: the share by which the loss may rise.",
    )
    max_loss: float = HfArg(
        default=0.01,
        help="Classifiers: share of all samples that early exit may get wrong in addition.",
    )
    batch_size: int = HfArg(default=32, help="Samples in a batch, also for the timing.")
    repeats: int = HfArg(default=3, help="How often each exit is timed; the median counts.")

    def __post_init__(self):
        counts = ("batch_size", "repeats", "fewest_layers", "heal_steps")
        shares = ("max_loss", "max_rise", "heal_learning_rate")
        limits = dict.fromkeys(counts, 1)
        limits.update(dict.fromkeys(shares, 0))
        check_arguments(self, limits)
        if self.exit_head != "layers" and self.heal is None:
            raise ValueError(
                f"`exit_head` is {self.exit_head!r}, and nothing is trained: give `heal`, a folder."
            )
        if self.heal is not None:
            if self.fewest_layers is None:
                raise ValueError(
                    f"`heal` is {self.heal!r}, and no layers are left out: give `fewest_layers`."
                )
            if torch.cuda.device_count() > 1:
                raise ValueError(
                    f"`heal` is {self.heal!r}, and several GPUs are visible: set `CUDA_VISIBLE_DEVICES=0`."
                )
            empty_folder("heal", self.heal)


parse = partial(parse_model, (ExitArguments, DataArguments))


def run(name: str, args: ExitArguments, data_args: DataArguments) -> None:
    """Print the tables, and write them as json into the output folder.

    A classifier's threshold is calibrated, and layers are chosen, on the validation examples; all is reported on the
    test examples. The training examples heal.
    """
    folder = results_folder(name, args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)  # raises its errors now, not after the measurement
    model = load_whole_model(name)
    is_sorting = is_classifier(model)
    read = classifier_rows if is_sorting else language_rows
    trains = args.heal is not None
    chooses = is_sorting or args.fewest_layers is not None
    rows = read(name, model, args, data_args, trains, chooses)

    settings = {"batch_size": args.batch_size, "progress": True, **rows.settings}
    if args.fewest_layers is not None:
        results = {"layer_sets": _layer_sets(name, model, rows, args, settings)}
    else:
        results = {}
        results["exit_profile"] = exit_profile(model, rows.test, repeats=args.repeats, **settings)
        if is_sorting:
            fast = ConfidenceExit(model).calibrate(rows.validation, args.max_loss, **settings)
            results["confidence_exit"] = fast.evaluate(rows.test, repeats=args.repeats, **settings)
    RunFolder(folder).write(results)

    print(f"{tables(results)}\n\nWritten to {folder}")
    if args.heal is not None:
        _close_healed(args.heal, results["layer_sets"])
    elif args.fewest_layers is not None:
        _close_sets(name, results["layer_sets"])
    else:
        _close_exits(name, results["exit_profile"])
        print(next_step(f"card {folder}", "writes the model card"))


def _close_exits(name: str, profile: ExitProfile) -> None:
    verdict = verdict_of(name)
    layer = profile.shown()
    if verdict is not None:
        print("The table is about the metric alone. The verdict is on the constraints of the run:")
        print(verdict.headline)
        if verdict.feasible and layer is None:
            layer = _first_exit(verdict)
    if layer is not None:
        command = f"export {name} --layer {layer} --output_dir DIR"
        print(next_step(command, f"writes the model with {layer} layers"))


def _first_exit(verdict: Certificate) -> int | None:
    """The first layer that a run was asked to stop at, by a target; `None` if there is none."""
    layers = [int(name.split("_")[-1]) for name in verdict.rows if "_" in name]
    return min(layers, default=None)


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


def _close_healed(folder: str, profile: LayerSetProfile) -> None:
    everything, kept = profile.layers
    print(profile.headline)
    print(f"{len(kept)} of {len(everything)} layers, {spans(kept)}, are healed and in {folder}.")
    if is_text_model(folder):
        print(next_step(f"show {folder}", "shows what its layers predict"))


def _layer_sets(
    name: str, model: PreTrainedModel, rows: HeldOutRows, args: ExitArguments, settings: dict
) -> LayerSetProfile:
    """The sets that the search finds. If a model is healed, only the smallest one."""
    if args.heal is None:
        sets = _found_sets(model, rows, args, settings)
        return layer_set_profile(model, rows.test, sets, args.max_rise, **settings)

    if args.exit_head == "layers":
        layers = _found_sets(model, rows, args, settings)[-1]
    else:
        layers = list(range(1, args.fewest_layers + 1))
    trainer = _healed(name, model, layers, rows, args)
    sets = [trainer.layers]
    return layer_set_profile(model, rows.test, sets, args.max_rise, [trainer.model], **settings)


def _found_sets(
    model: PreTrainedModel, rows: HeldOutRows, args: ExitArguments, settings: dict
) -> list[list[int]]:
    search_rows = rows.validation
    if not isinstance(search_rows, list):
        search_rows = search_rows.select(range(min(SEARCH_ROWS, len(search_rows))))
    return find_layer_sets(model, search_rows, args.fewest_layers, **settings)


def _healed(
    name: str, model: PreTrainedModel, layers: list[int], rows: HeldOutRows, args: ExitArguments
) -> HealingTrainer:
    """The trainer that has healed the model with these layers; the model is in the folder `args.heal`."""
    training = TrainingArguments(
        args.heal,
        max_steps=args.heal_steps,
        learning_rate=args.heal_learning_rate,
        warmup_steps=math.ceil(0.05 * args.heal_steps),
        per_device_train_batch_size=HEALING_BATCH,
        remove_unused_columns=rows.settings.get("remove_unused_columns", True),
        logging_steps=max(1, args.heal_steps // 10),
        save_strategy="no",
        report_to="none",
    )
    processing = rows.settings.get("processing_class")
    if processing is None:
        processing = _processing(name, model)

    exit_head = None if args.exit_head == "layers" else args.exit_head
    no_layer_follows = exit_head is None and layers[-1] == len(layers)
    dtype = model.dtype
    trainer = HealingTrainer(
        model.float(),  # the small steps of the optimizer would be lost in 16 bits
        training,
        layers=layers,
        exit_head=exit_head,
        train_all=no_layer_follows,
        train_dataset=rows.train,
        data_collator=rows.settings.get("data_collator"),
        processing_class=processing,
    )
    trainer.train()
    trainer.model.to(dtype)
    trainer.save_model()
    return trainer


def _processing(name: str, model: PreTrainedModel) -> Any:
    """The tokenizer or image processor, to be saved with a model."""
    if type(model).__name__.endswith("ForImageClassification"):
        return load_image_processor(name)
    return load_tokenizer(name)
