"""What the evaluation of a trainer needs beside its model: which rows count, which data, with which settings."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend, find_batch_size, slice_tensors
from torch import nn
from transformers import DataCollatorWithFlattening, Trainer
from transformers.utils import logging

from ..configs import DescentArguments, levels_of
from ..constraints.objectives import UNCONSTRAINED
from ..constraints.problem import largest_rise
from ..constraints.state import DescentState
from ..evaluation.certificates import MIN_BLOCKS, Certificate, certify, share_of_blocks
from ..losses.constant import ConstantPredictor, chance_of, predictor_of
from ..losses.layerwise import LayerLosses
from ..readout.replay import Readout, probing
from ..readout.stack import inner_model
from .checks import check_supported
from .preparation import find_layers, shared_batch
from .records import LayerTotals, evaluation_sets


logger = logging.get_logger(__name__)

UNKNOWN_SCORE = -1e9  # below that of any model that has learned something, also when steps are added to it
HIDDEN_OUTPUTS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def rows_counted_once(trainer: Trainer, inputs) -> int | None:
    """How many rows of a last evaluation batch are not repeats that fill it up; `None` for any other batch."""
    args, loader = trainer.args, trainer.accelerator.gradient_state
    if args.world_size == 1 or not loader.end_of_dataloader:
        return None
    if loader.remainder <= 0 or isinstance(trainer.data_collator, DataCollatorWithFlattening):
        return None  # of data without a length, or in batches without padding, repeats cannot be told
    rows = find_batch_size(inputs)
    return min(max(loader.remainder - args.process_index * rows, 0), rows)


def ignored_outputs(model: nn.Module, keys: list[str] | None) -> list[str]:
    """`keys`, or Trainer's own, and hidden states: those asked for in a config would pile up as predictions."""
    config = getattr(model, "config", None)
    keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if keys is None else keys
    return [*keys, *HIDDEN_OUTPUTS]


def readout_without_labels(
    trainer: Trainer, layers: LayerLosses | None, readout: Callable, model: nn.Module, inputs
) -> Readout:
    """The custom `readout` for a batch without labels: that of `layers` where they are known, else found on this batch
    alone, which does not show what labels the loss predicts."""
    model = trainer.accelerator.unwrap_model(model)
    if layers is not None and layers.readout.fits(model):
        return layers.readout
    return Readout.probe(model, trainer._prepare_inputs(inputs), readout)


class PlainLayers:
    """The layers of plain training, read beside an evaluation of Trainer's, whose numbers and random draws stay.

    In training, and where it fails, as with models and data of which plain training need not know, there are none.

    Args:
        trainer: whose evaluation it is.
        loss_method: the `compute_loss` of the class that the mixin stands before.
    """

    def __init__(self, trainer: Trainer, loss_method: Callable):
        self._trainer, self._loss_method = trainer, loss_method
        self._fails = trainer.is_in_train  # there, evaluations cost what Trainer's do
        self._layers, self._constant, self._totals = None, None, LayerTotals()

    def add(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Read the layers on a batch of the evaluation."""
        if self._fails:
            return
        trainer, args = self._trainer, self._trainer.args
        own_rows, inputs = rows_counted_once(trainer, inputs), trainer._prepare_inputs(inputs)
        inner = trainer.accelerator.unwrap_model(model)
        try:
            with probing(inner), trainer.compute_loss_context_manager():
                if self._layers is None:
                    self._find(inner, shared_batch(inputs, trainer))
                # On every process, also for no rows: a forward may gather parameters.
                rows = inputs if own_rows is None else slice_tensors(inputs, slice(max(own_rows, 1)))
                measured = self._layers.measure(model, rows, keep_logits=False)
            if own_rows != 0:
                labels = self._constant and self._constant.of_batch(self._layers.task, rows)
                self._totals = self._totals.plus(measured, args.process_index, args.world_size, labels)
        except Exception as error:
            self._fails = True
            logger.info_once(f"The evaluation of plain training leaves the layers out: {error}")

    def metrics(self, prefix: str, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Layer losses, descent share and largest rise, where the layers were read. `reduce` sums a tensor over
        processes."""
        if reduce(torch.tensor(float(self._fails or self._layers is None))).item():
            return {}
        totals = reduce(self._totals.over(self._layers.num_layers, self._trainer.args.device))
        return layer_metrics(None, totals, self._totals.labels, prefix)[0]

    def _find(self, model, inputs):
        trainer = self._trainer
        own_loss = not type(trainer).compute_loss.__module__.startswith("hf_descent.")
        # Of a batch without padding nobody can tell the rows that fill it up.
        repeats = trainer.args.world_size > 1 and getattr(trainer, "padding_free", False)
        if own_loss or repeats or trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError("the loss, the compiled model or the batches are not for single layers.")
        check_supported(trainer, self._loss_method)
        task = trainer._find_task(model, inputs, is_shared=True)
        self._constant = predictor_of(task, inputs)
        self._layers = find_layers(trainer, model, inputs, task, readout=None, token_statistics=False)


def layer_metrics(
    dual: DescentState | None,
    totals: torch.Tensor,
    labels: ConstantPredictor | None,
    prefix: str,
    step: int = 0,
    also_selected: bool = False,
) -> tuple[dict[str, float], Certificate | None]:
    """The metrics of an evaluation that read the layers, and its certificate, where the problem is known.

    `feasible_score` is one number to choose a checkpoint by; greater is better. Where every row is met it is positive,
    and the greater, the smaller f_L is. Else it is minus the `shortfall` of the [`Certificate`], a little less for a
    greater f_L. Models whose layers are not shown to be better than chance come last, the latest one first.

    Args:
        dual ([`DescentState`], *optional*): the problem and its multipliers; `None` of plain training, of which there
            is no verdict, and whose loss is Trainer's.
        totals (`torch.Tensor` of shape `[B, L + 1]`): of each block of the data the sums of the layer losses, and the
            items.
        labels ([`ConstantPredictor`], *optional*): statistics of the labels of this process's batches.
        prefix (`str`): of the metrics' names.
        step (`int`): optimizer steps so far.
        also_selected (`bool`): see [`Certificate`].
    """
    blocks = totals.cpu().double().numpy()
    blocks = blocks[blocks[:, -1] > 0]
    if not len(blocks):
        return {}, None
    blocks = np.stack([blocks[:, :-1], np.broadcast_to(blocks[:, -1:], blocks[:, :-1].shape)], axis=-1)  # [B, L, 2]
    losses = torch.from_numpy(blocks[..., 0].sum(0) / blocks[..., 1].sum(0))  # [layers]
    metrics = {f"layer_loss_{layer}": loss for layer, loss in enumerate(losses.tolist(), start=1)}
    if dual is not None:  # Trainer averages batches; f_L is an average over items
        metrics |= {"loss": losses[-1].item(), "feasible": 0.0, "feasible_score": UNKNOWN_SCORE + step}
    certificate, chance = None, chance_of(labels)
    if dual is None or dual.problem is None:
        share = share_of_blocks(blocks, chance)
    else:
        if len(blocks) < MIN_BLOCKS and dual.args.objective not in UNCONSTRAINED:
            logger.warning_once(
                f"Evaluation data of {len(blocks)} batches is too little for a verdict on the constraints: give "
                f"{MIN_BLOCKS} or more, or set a smaller `per_device_eval_batch_size`."
            )
        facts = {"chance": chance, "also_selected": also_selected, "data_name": prefix}
        certificate = certify(dual.problem, blocks, multipliers=dual.multipliers.values, **facts)
        metrics["max_violation"], metrics["feasible"] = certificate.max_violation, float(certificate.feasible)
        share = certificate.descent_share
        if certificate.has_learned and math.isfinite(score := _score(certificate, losses)):
            metrics["feasible_score"] = score
    metrics |= {"descent_share": share, "largest_rise": largest_rise(losses)}
    return {f"{prefix}_{name}": value for name, value in metrics.items() if value is not None}, certificate


def _score(certificate: Certificate, losses: torch.Tensor) -> float:
    last = losses[-1].item()
    score = 1 / (1 + last) if last >= 0 else 1 - last
    return score if certificate.feasible else -(certificate.shortfall + 1e-3 / (1 + score))


def chosen_levels(args: DescentArguments, gammas) -> list[float]:
    """The noise levels of an evaluation: `gammas`, or those of the config; ValueError where there are none."""
    gammas = args.eval_gammas if gammas is None else gammas
    gammas = [] if gammas is None else levels_of("gammas", gammas)
    if not gammas:
        raise ValueError("No noise levels: give `gammas`, or set `eval_gammas` in the config.")
    return gammas


def is_of_training(trainer: Trainer, dataset) -> bool:
    """Whether `evaluate(dataset)` is on the data of evaluations in training, which may choose the checkpoint."""
    sets = [trainer.eval_dataset, *evaluation_sets(trainer).values()]
    own = dataset is None or isinstance(dataset, str) or any(dataset is each for each in sets)
    return own and trainer.args.eval_strategy != "no"


def chosen_dataset(known, dataset):
    """The data set that `evaluate(dataset)` would take, of the trainer's own `known`; ValueError where it is none."""
    if isinstance(known, dict) and (dataset is None or isinstance(dataset, str)):
        if dataset not in known:
            raise ValueError(f"`eval_dataset` is {dataset!r}; give one of {', '.join(map(repr, known))}.")
        return known[dataset]
    dataset = known if dataset is None else dataset
    if dataset is None or isinstance(dataset, dict | str):
        raise ValueError(f"`eval_dataset` is {dataset!r}; give one dataset.")
    return dataset


def settings(trainer: Trainer, readout) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments of [`noise_curve`] and [`layer_profile`] that make them measure as `evaluate`."""
    accelerator = trainer.accelerator
    shards_parameters = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if accelerator.mixed_precision != "no" and not shards_parameters and not accelerator._models:
        # Before the first turn of `evaluate`, mixed precision is not yet in the model's forward.
        accelerator.prepare_model(trainer.model, evaluation_mode=True)
    model = accelerator.unwrap_model(trainer.model)
    config = getattr(inner_model(model), "config", None)
    # As transformers' own losses tell regression.
    problem = getattr(config, "problem_type", None)
    classifies = "ForSequenceClassification" in type(model).__name__
    is_regression = problem == "regression" or (problem is None and classifies and config.num_labels == 1)
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
