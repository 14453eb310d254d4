"""What the evaluation of a trainer needs beside its model: which rows count, which data, with which settings."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size, slice_tensors
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.utils import logging

from ..constraints.problem import largest_rise
from ..constraints.state import DualState
from ..evaluation import LayerProfile
from ..evaluation.certificates import Certificate, certify
from ..evaluation.intervals import LEAST_ROWS
from ..evaluation.price import Reference, on_same_rows, with_paired
from ..losses.chance import ChanceLoss, chance_of
from ..readout.labels import labels_of
from ..readout.replay import Readout
from ..readout.stack import inner_model, unwrapped
from ..readout.tape import assigned
from .preparation import loss_of_its_own
from .records import EvaluationTotals, reduced


logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class CountedRows:
    """The rows of an evaluation batch that count. Several processes fill up the last batch with repeats, which do not.

    Attributes:
        number (`int`, *optional*): how many of the first rows count. The others repeat earlier rows. `None`: all
            count.
    """

    number: int | None = None

    @property
    def are_all(self) -> bool:
        return self.number is None

    @property
    def are_none(self) -> bool:
        return self.number == 0

    def of(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """These rows of a batch, but at least one: every process has to run the model, since a forward may gather
        parameters."""
        if self.number is None:
            return inputs
        return slice_tensors(inputs, slice(max(self.number, 1)))


def counted_rows(trainer: Trainer, inputs: Mapping[str, Any]) -> CountedRows:
    """The rows that count in a batch which an evaluation has just got from its data loader."""
    args = trainer.args
    # Accelerate keeps the position of the data loader there.
    loading = trainer.accelerator.gradient_state
    if args.world_size == 1 or not loading.end_of_dataloader:
        return CountedRows()
    if loading.remainder == 0 or args.dataloader_drop_last:
        return CountedRows()

    if loading.remainder < 0 or isinstance(trainer.data_collator, DataCollatorWithFlattening):
        logger.warning_once(
            "Some examples of the last evaluation batch may count twice. Several processes fill it up with repeated "
            "ones, and these cannot be recognised in a stream that each process reads (`dispatch_batches=False`), "
            "nor in batches without padding."
        )
        return CountedRows()
    rows = find_batch_size(inputs)
    return CountedRows(min(max(loading.remainder - args.process_index * rows, 0), rows))


def is_labelled(inputs: Mapping[str, Any], label_names: Sequence[str]) -> bool:
    """Whether a batch has a tensor of labels."""
    return isinstance(labels_of(inputs, label_names), torch.Tensor)


def ignored_outputs(model: nn.Module, keys: list[str] | None) -> list[str]:
    """`keys`, or Trainer's own, and hidden states, which would pile up as predictions if the config asks for them."""
    if keys is None:
        config = getattr(model, "config", None)
        keys = getattr(config, "keys_to_ignore_at_inference", ["cache", "past_key_values"])
    return [*keys, "hidden_states", "encoder_hidden_states", "decoder_hidden_states"]


def without_persistent_workers(args: TrainingArguments) -> AbstractContextManager:
    """Within it, Trainer makes a new data loader. With persistent workers, it would reuse the loader of the first
    unnamed data set for all others."""
    return assigned([(args, "dataloader_persistent_workers")], False)


# An earlier reading of the last layer in one process: batch number -> [rows, 2], the sum of the row's loss over its
# items, and their number.
Reading = dict[int, torch.Tensor]


class EarlierLosses(NamedTuple):
    """f_L at earlier times, which a verdict compares with f_L now."""

    references: Sequence[Reference] = ()  # one for each time, to compare the means
    # Time -> how this process has read these very rows then. With it the verdict compares row by row instead.
    readings: Mapping[str, Reading] = MappingProxyType({})


class EvaluatedRows(NamedTuple):
    """The losses that an evaluation has read in all processes."""

    # float64 [rows, layers + 1]: for each row with items, the sums of its layer losses, and the number of its items.
    sums: np.ndarray
    items: int
    # How many entries of `sums` are whole batches, since their rows could not be told apart.
    whole_batches: int = 0
    references: Sequence[Reference] = ()  # losses of the last layer at earlier times


def gathered(
    accelerator: Accelerator,
    totals: EvaluationTotals,
    earlier: EarlierLosses,
) -> EvaluatedRows:
    """What all processes have read in their `totals`, with the `earlier` losses of the last layer on the same data;
    every process calls it."""
    readings = earlier.readings
    rows = totals.rows.gathered(accelerator.num_processes > 1, list(readings.values()))
    items = reduced(accelerator, torch.as_tensor(totals.items))

    paired = on_same_rows(readings, rows.earlier, len(rows.sums))
    references = with_paired(earlier.references, paired)
    return EvaluatedRows(rows.sums, int(items), rows.whole_batches, references)


def layer_metrics(
    dual: DualState,
    rows: EvaluatedRows,
    labels: ChanceLoss | None,
    prefix: str,
    overlaps_training: bool = False,
    plain: LayerProfile | None = None,
    reads_one_token: bool = False,
) -> tuple[dict[str, float], Certificate | None]:
    """The metrics of an evaluation that read the layers, and its certificate if the problem is known.

    `labels` are statistics of the labels of this process's batches. `plain` is the profile of plain training on the
    same rows. `reads_one_token` is as in [`certify`].
    """
    sums = rows.sums
    if not len(sums):
        return {}, None

    losses = torch.from_numpy(sums[:, :-1].sum(axis=0) / sums[:, -1].sum())  # [layers]
    metrics = {f"layer_loss_{layer}": loss for layer, loss in enumerate(losses.tolist(), start=1)}
    # Trainer averages batches; f_L is an average over items.
    metrics["loss"] = losses[-1].item()
    metrics["feasible"] = 0.0
    metrics["largest_rise"] = largest_rise(losses)

    certificate = None
    if dual.problem is not None:
        certificate = certify(
            dual.problem,
            sums,
            chance=chance_of(labels),
            items=rows.items,
            data_name=prefix,
            whole_batches=rows.whole_batches,
            references=rows.references,
            plain=plain,
            reads_one_token=reads_one_token,
            **facts_of(dual, dual.problem.state_dict(), overlaps_training),
        )
        metrics["max_violation"] = certificate.max_violation
        metrics["feasible"] = float(certificate.feasible)
        metrics["descent_share"] = certificate.descent_share
        if len(sums) < LEAST_ROWS and dual.objective.is_constrained:
            logger.warning_once(
                f"{len(sums)} examples are too few for a verdict on the constraints: give {LEAST_ROWS} or more."
            )

    metrics["feasible_score"] = feasible_score(metrics["loss"], certificate)
    named = {f"{prefix}_{name}": value for name, value in metrics.items() if value is not None}
    return named, certificate


def feasible_score(last_loss: float, certificate: Certificate | None) -> float:
    """One number to choose a checkpoint by; greater is better.

    If every constraint is met, it is above 0, and falls as f_L rises. If not, but the layers have learned, it is
    between -1 and 0, and falls as the `shortfall` of the worst layer rises (see [`Certificate`]); f_L counts for
    little. Models that have learned nothing are between -2 and -1, by f_L alone.
    """
    if not math.isfinite(last_loss):
        return -2.0

    # The greater, the smaller f_L is.
    height = 1 - last_loss
    if last_loss >= 0:
        height = 1 / (1 + last_loss)
    share = height / (1 + height)  # the same, in (0, 1)
    if certificate is None or not certificate.has_learned:
        return share - 2
    if certificate.feasible:
        return height

    miss = certificate.shortfall + 1e-3 * (1 - share)
    if not math.isfinite(miss):
        return -1.0
    return -miss / (1 + miss)


def facts_of(
    dual: DualState | None, problem: dict[str, Any], overlaps_training: bool
) -> dict[str, Any]:
    """The facts about training that a verdict on `problem` reports; some only if training had the same problem."""
    facts: dict[str, Any] = {"also_selected": overlaps_training}
    if dual is not None:
        facts["max_last_layer_rise"] = dual.args.max_last_layer_rise
        facts["has_price"] = not dual.objective.is_plain
    if dual is not None and dual.problem is not None and dual.problem.state_dict() == problem:
        ascent = dual.settled()
        warmup_losses = torch.from_numpy(ascent.warmup_losses)
        facts["warmup_share"] = dual.problem.descent_share(warmup_losses)
        multipliers = ascent.multipliers.values
        if dual.objective.has_multipliers or multipliers.any():
            facts["multipliers"] = multipliers.tolist()
    return facts


@contextmanager
def read_by(
    function: Callable, readout: Readout | None, model: nn.Module, inputs: Mapping[str, Any]
) -> Iterator[None]:
    """Within it, the logits of `model` come from the custom readout `function`. `readout` is the readout of the
    layers, if they were found."""
    bare = unwrapped(model)
    if readout is None or not readout.fits(bare):
        # Used for this batch only: without labels it is not known whether they are shifted.
        readout = Readout.probe(bare, inputs, function)
    with readout.attach(lambda *_: None, [readout.num_layers]):
        yield


def chosen_dataset(known, dataset):
    """The data set that `evaluate(dataset)` would take; `known` is the trainer's own. ValueError if it is not one."""
    if isinstance(known, dict) and dataset is None:
        names = ", ".join(map(repr, known))
        raise ValueError(f"The trainer has several evaluation sets: name one of them, {names}.")
    if isinstance(known, dict) and isinstance(dataset, str):
        if dataset not in known:
            names = ", ".join(map(repr, known))
            raise ValueError(f"`eval_dataset` is {dataset!r}; give one of {names}.")
        return known[dataset]

    if dataset is None:
        dataset = known
    if dataset is None:
        raise ValueError("The trainer has no `eval_dataset`: give one.")

    if isinstance(dataset, str):
        raise ValueError(
            f"`eval_dataset` is {dataset!r}, but the trainer has no sets with names: give a dataset."
        )
    if isinstance(dataset, dict):
        raise ValueError(
            f"`eval_dataset` is a dict of {', '.join(map(str, dataset))}; give one dataset of them."
        )
    return dataset


def model_and_settings(trainer: Trainer, readout) -> tuple[nn.Module, dict[str, Any]]:
    """The model, prepared for evaluation, and arguments with which [`noise_curve`] and [`layer_profile`] measure as
    `evaluate` does."""
    accelerator = trainer.accelerator
    shards_parameters = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if accelerator.mixed_precision != "no" and not shards_parameters and not accelerator._models:
        # Before the first turn of `evaluate`, mixed precision is not yet in the model's forward.
        accelerator.prepare_model(trainer.model, evaluation_mode=True)

    model = unwrapped(trainer.model)
    arguments = {
        "metric": "accuracy",
        "data_collator": trainer.data_collator,
        "batch_size": trainer.args.eval_batch_size,
        "label_names": trainer.label_names,
        "layer_loss_fn": loss_of_its_own(trainer),
        "readout": readout,
        "remove_unused_columns": trainer.args.remove_unused_columns,
        "accelerator": accelerator,
        "progress": trainer.is_world_process_zero() and not trainer.args.disable_tqdm,
    }
    if _predicts_numbers(model):
        arguments["metric"] = "rmse"

    # Processes that gather parameters together cannot share the batches unevenly: each goes through all.
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and plugin.zero_stage == 3):
        arguments["accelerator"] = None
    return model, arguments


def _predicts_numbers(model: nn.Module) -> bool:
    """Whether a model is a denoiser, or a regression model as transformers' own losses recognise it."""
    name = type(model).__name__
    if name.endswith("Denoising"):
        return True
    config = getattr(inner_model(model), "config", None)
    problem = getattr(config, "problem_type", None)
    if problem is None and re.search("For(Sequence|Image|Video)Classification", name):
        return config.num_labels == 1
    return problem == "regression"
