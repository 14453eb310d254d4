"""The weights of classes in a cross-entropy, found out by trying the loss on labels of our own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.utils import ModelOutput

from ..readout.labels import IGNORE_INDEX
from ..readout.replay import output_logits, probing
from ..readout.stack import map_tensors
from .task import TaskLoss


MOST_FORWARD = 64  # classes tried in a model's own loss, which takes a forward for each
MOST_CALLS = 1000  # and in a custom loss
LEAST_LABELS = 8  # to try a loss on
TOLERANCE = 1e-3


@dataclass
class ClassWeights:
    """How a cross-entropy weighs its labels.

    Attributes:
        values (float64 `[classes]`): the weight of each class; of several labels a row `[2, classes]`, the weights of
            labels that are 0, and of those that are 1.
        divides (`bool`): whether the sum of losses is divided by the weights of the labels, as `F.cross_entropy` does,
            in place of their number.
    """

    values: np.ndarray
    divides: bool = False

    def of(self, labels: torch.Tensor) -> torch.Tensor:
        """The weight of each label, in their shape; of ignored ones 0."""
        values = torch.tensor(self.values, dtype=torch.float32, device=labels.device)
        if values.dim() == 2:  # labels between 0 and 1 are a part of each
            return torch.where(labels > 0.5, values[1], values[0])
        # A custom readout may have more classes than the model's outputs, by which the weights were found.
        known = labels.clamp(0, len(values) - 1)
        return torch.where(labels == IGNORE_INDEX, 0.0, values[known])


def find_class_weights(
    task: TaskLoss, inputs: Mapping[str, Any], name: str, outputs: Any, multi_label: bool
) -> ClassWeights | None:
    """The weights of the task loss on a batch with labels `name` and the model's outputs on it; `None` where it is no
    weighted cross-entropy, or of too many classes to try."""
    classes = output_logits(outputs).shape[-1]
    most = MOST_FORWARD
    if task.loss_fn is not None:
        most = MOST_CALLS
    if task.smoother is not None or classes > most:
        return None

    trial = _Trial(task, inputs, name)
    find_weights = _of_binary_labels if multi_label else _of_classes
    weights = find_weights(trial, classes)
    if weights is None or not (np.isfinite(weights.values) & (weights.values > 0)).all():
        return None
    # Without the rounding errors of this batch: a resumed run measures on another.
    rounded = [float(f"{value:.4g}") for value in weights.values.flat]
    weights.values = np.array(rounded).reshape(weights.values.shape)
    if not _agrees(trial, weights, classes, multi_label):
        return None
    return weights


class _Trial:
    """Calls a loss on labels of our own."""

    def __init__(self, task: TaskLoss, inputs: Mapping[str, Any], name: str):
        counted = int(inputs[name].ne(IGNORE_INDEX).sum())
        repeats = max(2, -(-LEAST_LABELS // max(1, counted)))

        def repeated(value):
            if not value.dim():
                return value
            return value.repeat_interleave(repeats, 0)

        self._task = task
        self._name = name
        self._inputs = map_tensors(repeated, dict(inputs))
        self._outputs = None  # that a custom loss is tried on
        self.counted = self._inputs[name] != IGNORE_INDEX

    @property
    def labels(self) -> torch.Tensor:
        return self._inputs[self._name]

    def __call__(self, labels: torch.Tensor) -> tuple[float, torch.Tensor, torch.Tensor]:
        """The loss, and the logits and labels that it compares."""
        batch = {**self._inputs, self._name: labels}
        if self._task.loss_fn is None:
            outputs = self._model_outputs(batch)
            loss = self._task(outputs, batch, None)
        else:
            if self._outputs is None:
                self._outputs = _far_apart(self._model_outputs(batch))
            outputs = self._outputs
            loss = self._task(outputs, batch, self._task.count(batch))
        return float(loss), *self._task.predictions(outputs, batch)

    def _model_outputs(self, batch):
        with probing(self._task.model):
            return self._task.model(**self._task.model_inputs(batch))


def _far_apart(outputs: Any) -> ModelOutput:
    """Logits of our own: of a fresh model all losses are alike, weighted ones, too."""
    logits = output_logits(outputs).float()
    numbers = torch.arange(logits.numel(), device=logits.device).view_as(logits)
    return ModelOutput(logits=3 * numbers.sin())


def _of_classes(trial: _Trial, classes: int) -> ClassWeights | None:
    """From batches of one class, and where its weight cancels in them, of two."""
    alone = np.ones(classes)
    for label in range(classes):
        loss, losses, _ = _losses(trial, torch.full_like(trial.labels, label))
        alone[label] = loss / losses.mean()

    if not np.allclose(alone, 1, rtol=TOLERANCE):
        return ClassWeights(alone)

    place = (trial.counted.flatten().cumsum(0) - 1).view_as(trial.counted)
    values = np.ones(classes)
    for label in range(1, classes):
        loss, losses, labels = _losses(trial, torch.where(place % 2 == 0, label, 0))
        first = losses[labels == 0]
        other = losses[labels == label]
        # loss (w n + n_0) = w sum + sum_0
        difference = loss * len(other) - other.sum()
        if abs(difference) < 1e-4 * len(other):  # whatever the weight, the loss would be the same
            return None
        values[label] = (first.sum() - loss * len(first)) / difference

    return ClassWeights(values, divides=True)


def _losses(trial: _Trial, labels: torch.Tensor) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss on the labels, and the unweighted losses of those that count, with these; each `[items]`."""
    labels = torch.where(trial.counted, labels, IGNORE_INDEX).to(trial.labels)
    loss, logits, labels = trial(labels)
    labelled = labels != IGNORE_INDEX
    labels = labels[labelled]
    losses = F.cross_entropy(logits[labelled].double(), labels, reduction="none")
    return loss, losses.cpu().numpy(), labels.cpu().numpy()


def _of_binary_labels(trial: _Trial, classes: int) -> ClassWeights | None:
    """From the equations of batches in which one label of a class is 1, in some rows or in all."""
    zeros = torch.zeros_like(trial.labels)
    patterns = [zeros]
    for label in range(classes):
        everywhere = zeros.clone()
        everywhere[:, label] = 1
        somewhere = zeros.clone()
        somewhere[: len(zeros) // 2, label] = 1
        patterns += [everywhere, somewhere]

    equations = []
    totals = []
    for pattern in patterns:
        loss, logits, labels = trial(pattern)
        terms = _binary_terms(logits, labels)  # [2, rows, classes]
        equations.append(terms.sum(axis=1).ravel())
        totals.append(loss * labels.numel())

    solution, _, rank, _ = np.linalg.lstsq(np.array(equations), np.array(totals))
    if rank < 2 * classes:
        return None
    return ClassWeights(solution.reshape(2, classes))


def _binary_terms(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """The unweighted losses of labels that are 0, and of those that are 1; float64 `[2, rows, classes]`."""
    logits = logits.double()
    labels = labels.double()
    terms = torch.stack([(1 - labels) * F.softplus(logits), labels * F.softplus(-logits)])
    return terms.cpu().numpy()


def _agrees(trial: _Trial, weights: ClassWeights, classes: int, multi_label: bool) -> bool:
    """Whether the loss is that of these weights on other labels, too."""
    values = 2 if multi_label else classes
    weighted_loss = _weighted_binary_loss if multi_label else _weighted_loss
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        labels = torch.randint(values, trial.labels.shape, generator=generator).to(trial.labels)
        loss, expected = weighted_loss(trial, labels, weights)
        if not np.isclose(loss, expected, rtol=TOLERANCE):
            return False
    return True


def _weighted_binary_loss(
    trial: _Trial, labels: torch.Tensor, weights: ClassWeights
) -> tuple[float, float]:
    """The loss on the labels, and what it would be with these weights."""
    loss, logits, labels = trial(labels)
    terms = weights.values[:, None] * _binary_terms(logits, labels)
    return loss, terms.sum() / labels.numel()


def _weighted_loss(
    trial: _Trial, labels: torch.Tensor, weights: ClassWeights
) -> tuple[float, float]:
    """As `_weighted_binary_loss`, of labels that are classes."""
    loss, losses, labels = _losses(trial, labels)
    of_labels = weights.values[labels]
    divisor = of_labels.sum() if weights.divides else len(losses)
    return loss, (of_labels * losses).sum() / divisor
