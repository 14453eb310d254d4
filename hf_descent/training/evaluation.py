"""What the evaluation of a trainer needs beside its model: which rows count, which data, with which settings."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend, find_batch_size, slice_tensors
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer
from transformers.utils import logging

from ..constraints.objectives import UNCONSTRAINED, WITH_MULTIPLIERS
from ..constraints.problem import largest_rise
from ..constraints.state import DescentState
from ..evaluation.certificates import MIN_BLOCKS, Certificate, certify
from ..losses.constant import ConstantPredictor, chance_of
from ..losses.layerwise import LayerLosses, layers_and_predictor
from ..readout.replay import probing
from ..readout.stack import inner_model, unwrapped
from .checks import check_supported, is_of_layers
from .judging import chance_in_training, judging_state
from .preparation import find_task, shared_batch
from .records import LayerTotals


logger = logging.get_logger(__name__)

UNKNOWN_SCORE = (
    -1e9
)  # below that of any model that has learned something, also when steps are added to it


def rows_counted_once(trainer: Trainer, inputs) -> int | None:
    """How many rows of a last evaluation batch are not repeats that fill it up; `None` for any other batch."""
    args, loader = trainer.args, trainer.accelerator.gradient_state
    if args.world_size == 1 or not loader.end_of_dataloader:
        return None
    if loader.remainder == 0 or args.dataloader_drop_last:
        return None
    if loader.remainder < 0 or isinstance(trainer.data_collator, DataCollatorWithFlattening):
        logger.warning_once(
            "Some rows of the last evaluation batch may count twice: those that fill it up for all processes cannot "
            "be told in a stream that each process reads (`dispatch_batches=False`), nor in batches without padding."
        )
        return None
    rows = find_batch_size(inputs)
    return min(max(loader.remainder - args.process_index * rows, 0), rows)


def ignored_outputs(model: nn.Module, keys: list[str] | None) -> list[str]:
    """`keys`, or Trainer's own, and hidden states: those asked for in a config would pile up as predictions."""
    config = getattr(model, "config", None)
    keys = (
        getattr(config, "keys_to_ignore_at_inference", ["cache", "past_key_values"])
        if keys is None
        else keys
    )
    return [*keys, "hidden_states", "encoder_hidden_states", "decoder_hidden_states"]


class LayersBeside:
    """The layers of plain training, read on each batch of an evaluation after Trainer, whose numbers and random draws
    stay; those below the last on a sample of the tokens, as in training. Where they cannot be read, the log says why.

    `loss_method` is as for `check_supported`, `is_trained` says whether the trainer has trained the model or is at it,
    and `before` is what the last evaluation has read, perhaps of these layers.
    """

    def __init__(
        self,
        trainer: Trainer,
        loss_method: Callable,
        is_trained: bool,
        before: "LayersBeside | LayerTotals",
    ):
        self._trainer = trainer
        self._loss_method = loss_method
        self._is_trained = is_trained
        self._totals = LayerTotals()
        self._found: tuple[LayerLosses | None, ConstantPredictor | None] | None = getattr(
            before, "_found", None
        )
        # Of the training labels. Not in training, which a collator that draws by itself would make another.
        self._chance: float | None = getattr(before, "_chance", None)

    def _find(self, model, inputs):
        trainer = self._trainer
        own_loss = not type(trainer).compute_loss.__module__.startswith("hf_descent.")
        try:
            if own_loss or trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
                raise ValueError("its loss is overridden, or its model compiled.")
            check_supported(trainer, self._loss_method)
            inputs = shared_batch(inputs, trainer)
            task = find_task(trainer, model, inputs)
            sample = {
                "token_fraction": trainer.args.readout_token_fraction,
                "seed": trainer.args.seed,
            }
            layers, constant = layers_and_predictor(model, inputs, task, **sample)
            if layers.readout.stack.adds_images:
                raise ValueError("batches with images could not be read.")
            return layers, constant
        except Exception as error:  # of models and data of which plain training need not know
            self._report_unread(error)
            return None, None

    def _report_unread(self, error: Exception) -> None:
        """ValueError where this run needs what cannot be read; else a log, louder where targets are not judged."""
        args = self._trainer.args
        chosen_by = args.metric_for_best_model or ""
        if is_of_layers(chosen_by):
            raise ValueError(
                f"`metric_for_best_model` is {chosen_by!r}, but the layers cannot be read: {error}"
            ) from error
        text = f"The evaluation of plain training leaves the layers out: {error}"
        if args.exit_targets or args.loss_targets:
            logger.warning(f"{text} So the targets are not judged.")
        else:
            logger.info(text)

    def read(self, model, inputs) -> None:
        """Read a batch; every process calls it for each of its batches."""
        trainer, own_rows = self._trainer, rows_counted_once(self._trainer, inputs)
        if not trainer._is_labelled(inputs):
            return
        inputs, place = (
            trainer._prepare_inputs(inputs),
            (trainer.args.process_index, self._totals.batches),
        )
        with probing(unwrapped(model)), trainer.compute_loss_context_manager():
            layers, constant = self._found or (None, None)
            if self._found is None or not (layers is None or layers.readout.fits(unwrapped(model))):
                layers, constant = self._found = self._find(unwrapped(model), inputs)
            if layers is None:
                return
            inputs = inputs if own_rows is None else slice_tensors(inputs, slice(max(own_rows, 1)))
            measured = layers.measure(model, inputs, keep_logits=False, key=place)
        if own_rows != 0:
            labels = constant and constant.of_batch(layers.task, inputs)
            self._totals = self._totals.plus(measured, place[0], trainer.args.world_size, labels)

    @property
    def totals(self) -> LayerTotals:
        """What was read, in this process."""
        return self._totals

    def judging_state(self) -> DescentState | None:
        """The problem that the layers are judged by; `None` where they were not read. All processes call it."""
        layers, constant = self._found or (None, None)
        if layers is None:
            return None
        if self._is_trained and not self._trainer.is_in_train and self._chance is None:
            self._chance = chance_in_training(self._trainer, layers.task, constant)
        chance = chance_of(self._totals.labels)
        if self._chance is not None:
            chance = self._chance
        return judging_state(self._trainer, layers.num_layers, chance, self._is_trained)


def layer_metrics(
    dual: DescentState,
    totals: torch.Tensor,
    labels: ConstantPredictor | None,
    prefix: str,
    step: int,
    also_selected: bool = False,
) -> tuple[dict[str, float], Certificate | None]:
    """The metrics of an evaluation that read the layers, and its certificate, where the problem is known.

    `feasible_score` is one number to choose a checkpoint by; greater is better. Where every row is met it is positive,
    and the greater, the smaller f_L is. Else it is minus the `shortfall` of the [`Certificate`], a little less for a
    greater f_L. Models whose layers are not shown to be better than chance come last: the latest first, then by f_L.

    `totals` `[B, L + 1]` are of each block of the data the sums of the layer losses, and the items; `labels` are
    statistics of the labels of this process's batches; `step` counts the optimizer steps so far.
    """
    blocks = totals.cpu().double().numpy()
    blocks = blocks[blocks[:, -1] > 0]
    if not len(blocks):
        return {}, None
    blocks = np.stack(
        [blocks[:, :-1], np.broadcast_to(blocks[:, -1:], blocks[:, :-1].shape)], axis=-1
    )  # [B, L, 2]
    losses = torch.from_numpy(blocks[..., 0].sum(0) / blocks[..., 1].sum(0))  # [layers]
    # Trainer averages batches; f_L is an average over items.
    metrics = {f"layer_loss_{layer}": loss for layer, loss in enumerate(losses.tolist(), start=1)}
    last = losses[-1].item()
    height = 1 / (1 + last) if last >= 0 else 1 - last  # the greater, the smaller f_L is
    unknown = UNKNOWN_SCORE + step + (height / (1 + height) if math.isfinite(height) else 0.0)
    metrics |= {"loss": last, "feasible": 0.0, "feasible_score": unknown}
    certificate, metrics["largest_rise"] = None, largest_rise(losses)
    if dual.problem is not None:
        if len(blocks) < MIN_BLOCKS and dual.args.objective not in UNCONSTRAINED:
            logger.warning_once(
                f"Evaluation data of {len(blocks)} batches is too little for a verdict on the constraints: give "
                f"{MIN_BLOCKS} or more, or set a smaller `per_device_eval_batch_size`."
            )
        facts = facts_of(dual, dual.problem.state_dict(), also_selected)
        certificate = certify(
            dual.problem, blocks, chance=chance_of(labels), data_name=prefix, **facts
        )
        metrics["max_violation"], metrics["feasible"] = (
            certificate.max_violation,
            float(certificate.feasible),
        )
        metrics["descent_share"] = certificate.descent_share
        miss = certificate.shortfall + 1e-3 / (1 + height)
        if certificate.has_learned and math.isfinite(miss):
            metrics["feasible_score"] = height if certificate.feasible else -miss
    return {
        f"{prefix}_{name}": value for name, value in metrics.items() if value is not None
    }, certificate


def facts_of(
    dual: DescentState | None, problem: dict[str, Any], also_selected: bool
) -> dict[str, Any]:
    """The facts of training that a verdict on `problem` reports; some only where it is that of the training."""
    facts = {"also_selected": also_selected}
    if dual is not None and dual.problem is not None and dual.problem.state_dict() == problem:
        facts["warmup_share"] = dual.problem.descent_share(dual.warmup_losses)
        multipliers = dual.multipliers.values
        if dual.args.objective in WITH_MULTIPLIERS or multipliers.any():
            facts["multipliers"] = multipliers.tolist()
    return facts


def chosen_dataset(known, dataset):
    """The data set that `evaluate(dataset)` would take, of the trainer's own `known`; ValueError where it is none."""
    if isinstance(known, dict) and (dataset is None or isinstance(dataset, str)):
        if dataset not in known:
            raise ValueError(
                f"`eval_dataset` is {dataset!r}; give one of {', '.join(map(repr, known))}."
            )
        return known[dataset]
    dataset = known if dataset is None else dataset
    if dataset is None or isinstance(dataset, dict | str):
        raise ValueError("`eval_dataset` is missing, or a dict or a name; give one dataset.")
    return dataset


def settings(trainer: Trainer, readout) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments of [`noise_curve`] and [`layer_profile`] that make them measure as `evaluate`."""
    accelerator = trainer.accelerator
    shards_parameters = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if accelerator.mixed_precision != "no" and not shards_parameters and not accelerator._models:
        # Before the first turn of `evaluate`, mixed precision is not yet in the model's forward.
        accelerator.prepare_model(trainer.model, evaluation_mode=True)
    model = unwrapped(trainer.model)
    config = getattr(inner_model(model), "config", None)
    # Regression, as transformers' own losses recognise it.
    problem = getattr(config, "problem_type", None)
    classifies = re.search("For(Sequence|Image|Video)Classification", type(model).__name__)
    is_regression = problem == "regression" or (
        problem is None and classifies is not None and config.num_labels == 1
    )
    is_regression = is_regression or type(model).__name__.endswith("Denoising")
    # Processes that gather parameters together cannot share the batches unevenly: each goes through all.
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    gathers = trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and plugin.zero_stage == 3)
    return model, {
        "metric": "rmse" if is_regression else "accuracy",
        "data_collator": trainer.data_collator,
        "batch_size": trainer.args.eval_batch_size,
        "label_names": trainer.label_names,
        "layer_loss_fn": trainer.compute_loss_func or trainer.label_smoother,
        "readout": readout,
        "remove_unused_columns": trainer.args.remove_unused_columns,
        "accelerator": None if gathers else accelerator,
        "progress": trainer.is_world_process_zero() and not trainer.args.disable_tqdm,
    }
