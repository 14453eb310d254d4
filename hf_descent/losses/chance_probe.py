"""Finds out on a batch which loss a task has, so that its value at chance is known.

It is known for the (binary) cross-entropy, also with weights of classes, and for the squared error.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers.utils import ModelOutput

from ..readout.labels import labels_of, names_of_labels
from ..readout.replay import has_router_loss, output_logits, output_loss, probing
from ..readout.stack import inner_model
from .chance import FEW_CLASSES, FEW_LABELS, MANY_LABELS, ChanceLoss, unmeasurable
from .class_weights import find_class_weights
from .task import TaskLoss


MAX_POSITIONS = (
    2**16
)  # answers are counted up to there; the first batch does not tell their lengths


@torch.no_grad()
def find_chance_loss(task: TaskLoss, inputs: Mapping[str, Any], outputs: Any) -> ChanceLoss:
    """What measures the least loss of a constant prediction, found out on a batch and the model's outputs on it;
    ValueError where no least value is known for the loss."""
    logits = output_logits(outputs)
    labels = labels_of(inputs, task.label_names)
    if "start_positions" in inputs:
        return _of_answers(task, logits)
    if labels is None:
        raise unmeasurable("data without labels")

    _check_shapes(labels, logits)
    config = getattr(task.model, "config", None)
    is_multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    name, *_ = names_of_labels(inputs, task.label_names)
    if labels.is_floating_point() and not is_multi_label:
        return _of_numbers(task, inputs, name, logits)

    return _of_classes(task, inputs, name, outputs, is_multi_label)


def _check_shapes(labels: torch.Tensor, logits: torch.Tensor) -> None:
    if labels.is_floating_point() and labels.numel() != logits.numel():
        raise _of_other_shape(labels, logits)
    if logits.shape[-1] == 1 and not labels.is_floating_point():
        raise unmeasurable(
            "whole labels of a single logit, which models take for numbers (give them as floats)"
        )


def _of_other_shape(labels: torch.Tensor, logits: torch.Tensor) -> ValueError:
    return unmeasurable(
        f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
    )


def _rounding(logits: torch.Tensor) -> float:
    return torch.finfo(logits.dtype).eps


def _of_answers(task: TaskLoss, logits: torch.Tensor) -> ChanceLoss:
    """Of extractive question answering; Trainer's smoother knows nothing of it."""
    if task.loss_fn is not None:
        raise unmeasurable("a custom loss of answers")
    texts = getattr(inner_model(task.model), "main_input_name", None)
    return ChanceLoss(MAX_POSITIONS, "positions", signal=texts, rounding=_rounding(logits))


def _of_numbers(
    task: TaskLoss, inputs: Mapping[str, Any], name: str, logits: torch.Tensor
) -> ChanceLoss:
    labels = inputs[name]
    scale = _loss_scale(task, inputs, name, logits)
    chance_loss = ChanceLoss(logits.shape[-1], "numbers", scale=scale, rounding=_rounding(logits))
    signal = getattr(inner_model(task.model), "main_input_name", None)
    values = inputs.get(signal)
    if values is not None and values.is_floating_point() and values.shape == labels.shape:
        chance_loss.signal = signal  # of a denoiser
    return chance_loss


def _of_classes(
    task: TaskLoss, inputs: Mapping[str, Any], name: str, outputs: Any, is_multi_label: bool
) -> ChanceLoss:
    logits = output_logits(outputs)
    label_smoothing = 0.0
    if task.smoother is not None:
        label_smoothing = task.smoother.epsilon

    weights = None
    if not has_router_loss(outputs):
        scores, labels = task.predictions(outputs, inputs)
        if not is_multi_label and scores.shape[:-1] != labels.shape:
            raise _of_other_shape(labels, scores)
        weights = find_class_weights(task, inputs, outputs, is_multi_label, label_smoothing)

    enough = FEW_LABELS
    if not is_multi_label and (inputs[name].dim() > 1 or logits.shape[-1] > FEW_CLASSES):
        enough = MANY_LABELS

    return ChanceLoss(
        logits.shape[-1],
        "multi_label" if is_multi_label else "classes",
        label_smoothing,
        enough=enough,
        weights=weights,
        rounding=_rounding(logits),
    )


def _loss_scale(
    task: TaskLoss, inputs: Mapping[str, Any], name: str, logits: torch.Tensor
) -> float:
    """The loss of numbers, the labels `name`, in units of the mean squared error, measured on one batch."""
    labels = inputs[name]
    predicted = logits.reshape(labels.shape).to(labels)
    scales = []
    for residual in _residuals(labels):
        # The loss of a residual r, whatever the prediction, is the loss of the labels `prediction + r`.
        batch = {**inputs, name: predicted + residual}
        if task.loss_fn is not None:
            loss = task(ModelOutput(logits=logits), batch, task.count(batch))
        else:
            with probing(task.model):
                loss = output_loss(task.model(**batch))
        squares = (batch[name].float() - predicted.float()).square()  # as rounded
        scales.append((loss / squares.mean()).item())

    scale = scales[0]
    is_scale = math.isfinite(scale) and scale > 0
    if not is_scale or not np.allclose(scales, scale, rtol=0.02, atol=0):
        raise unmeasurable("a loss of numbers that is not proportional to the squared error")

    # Without the rounding errors of this batch: a resumed run measures on another.
    return float(f"{scale:.5g}")


def _residuals(labels: torch.Tensor) -> list[torch.Tensor]:
    """Errors of predictions on which a loss is compared with the squared error, of the shape of the labels."""
    residual = labels - labels.mean(0, keepdim=True)
    if not residual.any():  # a batch of one
        residual = torch.ones_like(labels)

    # A Huber loss is no squared error far off.
    far = 2
    if labels.dtype.itemsize > 2:
        far = 100

    tried = [residual, far * residual]

    # Each number may have a weight of its own.
    flat = residual.reshape(len(labels), -1)  # [rows, numbers]
    for place in range(0, flat.shape[1], math.ceil(flat.shape[1] / 8)):
        alone = torch.zeros_like(flat)
        alone[:, place] = flat.abs().max()
        tried.append(alone.view_as(labels))

    return tried
