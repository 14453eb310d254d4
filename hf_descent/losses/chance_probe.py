"""Finds out on a batch which loss a task has, so that its value at chance is known.

It is known for the (binary) cross-entropy, also with weights of classes, and for the squared error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.utils import ModelOutput

from ..readout.labels import IGNORE_INDEX, labels_of, names_of_labels
from ..readout.replay import has_router_loss, output_logits, output_loss, probing
from ..readout.stack import inner_model, map_tensors
from .chance import FEW_CLASSES, FEW_LABELS, MANY_LABELS, ChanceLoss, unmeasurable
from .class_weights import ClassWeights, find_class_weights
from .task import TaskLoss


MAX_POSITIONS = (
    2**16
)  # answers are counted up to there: the first batch does not tell their lengths
MOST_FORWARD = 64  # classes whose weights in a model's own loss are compared, which takes a forward for every few


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
        raise unmeasurable(
            f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
        )
    if logits.shape[-1] == 1 and not labels.is_floating_point():
        raise unmeasurable(
            "whole labels of a single logit, which models take for numbers (give them as floats)"
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

    enough = FEW_LABELS
    if not is_multi_label and (inputs[name].dim() > 1 or logits.shape[-1] > FEW_CLASSES):
        enough = MANY_LABELS

    return ChanceLoss(
        logits.shape[-1],
        "multi_label" if is_multi_label else "classes",
        label_smoothing,
        enough=enough,
        weights=_class_weights(task, inputs, name, outputs, is_multi_label, label_smoothing),
        rounding=_rounding(logits),
    )


def _class_weights(
    task: TaskLoss,
    inputs: Mapping[str, Any],
    name: str,
    outputs: Any,
    is_multi_label: bool,
    label_smoothing: float,
) -> ClassWeights | None:
    """The weights of classes in a loss that is a weighted cross-entropy; `None` where it has none. ValueError where it
    is no cross-entropy."""
    if has_router_loss(outputs):
        return None

    try:
        CrossEntropyCheck(task, name, is_multi_label, label_smoothing).of_each_class(
            inputs, outputs
        )
    except ValueError:
        weights = find_class_weights(task, inputs, name, outputs, is_multi_label)
        if weights is None:
            raise
        return weights

    return None


@dataclass(frozen=True)
class CrossEntropyCheck:
    """Compares a task loss with the (binary) cross-entropy of the labels `name`."""

    task: TaskLoss
    name: str
    is_multi_label: bool
    label_smoothing: float

    def of_each_class(self, inputs: Mapping[str, Any], outputs: Any) -> None:
        """ValueError where the loss is not the cross-entropy: on this batch, and with each class as a label."""
        labels = inputs[self.name]
        number = output_logits(outputs).shape[-1]
        most = min(number, MOST_FORWARD)
        if self.task.loss_fn is not None:
            most = min(number, FEW_CLASSES)
        if self.is_multi_label:
            self._compare(inputs, outputs)
            self._compare_one_by_one(inputs, outputs, torch.eye(number)[:most])
        elif labels.dim() > 1 and number > FEW_CLASSES:
            self._compare(inputs, outputs)
        else:
            self._compare_several_at_once(inputs, outputs, number, most)

    def _compare_one_by_one(
        self, inputs: Mapping[str, Any], outputs: Any, classes: torch.Tensor
    ) -> None:
        """Of independent classes each may have a weight; `classes` `[tried, classes]`."""
        labels = inputs[self.name]
        for one_class in classes:
            batch = {**inputs, self.name: one_class.to(labels).expand_as(labels)}
            if self.task.loss_fn is None:
                outputs = self._outputs(batch)
            self._compare(batch, outputs)

    def _compare_several_at_once(
        self, inputs: Mapping[str, Any], outputs: Any, number: int, most: int
    ) -> None:
        """In the mean over one class its weight cancels: each batch has several, the next one the last of them."""
        repeats = math.ceil(min(number, 8) / max(1, int(inputs[self.name].ne(IGNORE_INDEX).sum())))
        rows = map_tensors(
            lambda value: value.repeat_interleave(repeats, 0) if value.dim() else value,
            dict(inputs),
        )
        counted = rows[self.name] != IGNORE_INDEX

        step = max(1, int(counted.sum()) - 1)
        for first in range(0, most, step):
            classes = (counted.flatten().cumsum(0) - 1 + first).view_as(counted) % number
            rows[self.name] = torch.where(counted, classes, IGNORE_INDEX)
            if first == 0 or self.task.loss_fn is None:
                outputs = self._outputs(rows)
            self._compare(rows, outputs)

    def _outputs(self, inputs: Mapping[str, Any]) -> Any:
        with probing(self.task.model):
            return self.task.model(**self.task.model_inputs(inputs))

    def _compare(self, inputs: Mapping[str, Any], outputs: Any) -> None:
        if self.task.loss_fn is not None:
            # Of a fresh model all losses are alike, weighted ones too: try the custom loss on logits far apart.
            logits = output_logits(outputs).float()
            places = torch.arange(logits.numel(), device=logits.device)
            outputs = ModelOutput(logits=3 * places.sin().view_as(logits))
        loss = self._task_loss(inputs, outputs)
        expected = self._cross_entropy(*self.task.predictions(outputs, inputs))
        tolerance = 1e-4
        if loss.dtype.itemsize < 4:  # half precision rounds
            tolerance = 0.02
        if abs(loss - expected) > tolerance * expected:
            raise unmeasurable("a loss that is no cross-entropy, weighted or not")

    def _task_loss(self, inputs: Mapping[str, Any], outputs: Any) -> torch.Tensor:
        items = None
        if self.task.loss_fn is not None:
            items = self.task.count(inputs)
        try:
            return self.task(outputs, inputs, items)
        except TypeError:  # it is no loss at all, whatever f_0 is
            raise
        except Exception as error:
            raise unmeasurable(
                f"a custom loss that fails on logits of its own ({error})"
            ) from error

    def _cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.is_multi_label:
            return F.binary_cross_entropy_with_logits(logits.float(), labels.float())
        if logits.shape[:-1] != labels.shape:
            raise unmeasurable(
                f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
            )
        return F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), label_smoothing=self.label_smoothing
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
