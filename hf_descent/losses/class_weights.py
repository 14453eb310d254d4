"""Whether a loss is a cross-entropy, and how it weighs the classes, found out by trying it on labels of our own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers.utils import ModelOutput

from ..readout.labels import IGNORE_INDEX, names_of_labels
from ..readout.replay import output_logits, probing
from ..readout.stack import map_tensors
from .chance import FEW_CLASSES, unmeasurable
from .task import TaskLoss


MOST_FORWARD = 64  # classes tried in a model's own loss, which takes a forward for every few
LEAST_LABELS = 8  # to try a loss on
TOLERANCE = 1e-4  # of a loss without weights
WEIGHTED_TOLERANCE = 1e-3  # of one with weights, which were measured
HALF_PRECISION_TOLERANCE = 0.02


@dataclass
class ClassWeights:
    """How a cross-entropy weighs its labels.

    Attributes:
        values (float64 `[classes]`): the weight of each class.
        divides (`bool`): whether the sum of losses is divided by the weights of the labels, as `F.cross_entropy` does,
            in place of their number.
    """

    values: np.ndarray
    divides: bool = False

    def of(self, labels: torch.Tensor) -> torch.Tensor:
        """The weight of each label, in their shape; of ignored ones 0."""
        values = torch.tensor(self.values, dtype=torch.float32, device=labels.device)
        # A custom readout may have more classes than the model's outputs, by which the weights were found.
        known = labels.clamp(0, len(values) - 1)
        return torch.where(labels == IGNORE_INDEX, 0.0, values[known])


def find_class_weights(
    task: TaskLoss,
    inputs: Mapping[str, Any],
    outputs: Any,
    is_multi_label: bool,
    label_smoothing: float,
) -> ClassWeights | None:
    """The weights of the classes in a task loss; `None` where they are all alike. ValueError where the loss is no
    cross-entropy, or a weighted one of independent classes or of too many to try.

    Args:
        inputs (dict): a short batch.
        outputs: the model's, on this batch.
        is_multi_label (`bool`): whether classes are independent, and labels 0 or 1 for each.
        label_smoothing (`float`): of the cross-entropy.
    """
    classes = output_logits(outputs).shape[-1]
    settings = (task, inputs, classes, is_multi_label, label_smoothing)
    if LossTrial(*settings, least_labels=min(classes, LEAST_LABELS)).is_cross_entropy():
        return None

    trial = LossTrial(*settings, least_labels=LEAST_LABELS)
    weights = None
    if trial.can_find_weights:
        weights = _of_classes(trial)
    if weights is not None and (np.isfinite(weights.values) & (weights.values > 0)).all():
        # Without the rounding errors of this batch: a resumed run measures on another.
        rounded = [float(f"{value:.4g}") for value in weights.values.flat]
        weights.values = np.array(rounded).reshape(weights.values.shape)
        if trial.is_cross_entropy(weights):
            return weights

    raise unmeasurable("a loss that is no cross-entropy, weighted or not")


class LossTrial:
    """Calls a task loss on labels of our own, and compares it with a (binary) cross-entropy.

    As [`find_class_weights`]; `least_labels` are the labels that it takes at least, of rows repeated.
    """

    def __init__(
        self,
        task: TaskLoss,
        inputs: Mapping[str, Any],
        classes: int,
        is_multi_label: bool,
        label_smoothing: float,
        least_labels: int,
    ):
        self._task = task
        self._name, *_ = names_of_labels(inputs, task.label_names)
        self._label_smoothing = label_smoothing
        self.is_multi_label = is_multi_label
        self.classes = classes
        self._most = MOST_FORWARD if task.loss_fn is None else FEW_CLASSES  # classes to try
        # The weights of a vocabulary are not looked for.
        self._is_vocabulary = inputs[self._name].dim() > 1 and classes > FEW_CLASSES

        counted = int(inputs[self._name].ne(IGNORE_INDEX).sum())
        repeats = math.ceil(least_labels / max(1, counted))

        def repeated(value):
            return value.repeat_interleave(repeats, 0) if value.dim() else value

        self._inputs = map_tensors(repeated, dict(inputs))
        self._custom_outputs = None  # on which a custom loss is tried
        self.labels = self._inputs[self._name]
        self.counted = self.labels != IGNORE_INDEX

    @property
    def can_find_weights(self) -> bool:
        """Whether each class can be tried; a label smoother knows no weights."""
        if self.is_multi_label or self._task.smoother is not None:
            return False
        return self.classes <= self._most

    def is_cross_entropy(self, weights: ClassWeights | None = None) -> bool:
        """Whether the loss is the cross-entropy with these weights, as far as it is tried."""
        return all(self._is_equal(labels, weights) for labels in self._labels_to_try())

    def losses(self, labels: torch.Tensor) -> tuple[float, np.ndarray, np.ndarray]:
        """The loss on labels of classes, the unweighted cross-entropy of each that counts, and these; `[items]`."""
        loss, logits, labels = self.call(torch.where(self.counted, labels, IGNORE_INDEX))
        return float(loss), *self._cross_entropies(logits, labels)

    def call(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss on `labels`, and the logits and labels that it compares."""
        batch = {**self._inputs, self._name: labels.to(self.labels)}
        items = None
        if self._task.loss_fn is None:
            outputs = self._model_outputs(batch)
        else:
            items = self._task.count(batch)
            if self._custom_outputs is None:
                self._custom_outputs = _far_apart(self._model_outputs(batch))
            outputs = self._custom_outputs

        try:
            loss = self._task(outputs, batch, items)
        except TypeError:  # it is no loss at all, whatever f_0 is
            raise
        except Exception as error:
            raise unmeasurable(
                f"a custom loss that fails on logits of its own ({error})"
            ) from error
        return loss, *self._task.predictions(outputs, batch)

    def _labels_to_try(self) -> Iterator[torch.Tensor]:
        """Several classes at once, since in the mean over one class its weight cancels."""
        if self.is_multi_label:
            yield self.labels
            yield torch.ones_like(self.labels)  # a weight of any class shows
            generator = torch.Generator().manual_seed(0)
            for _ in range(3):
                yield torch.randint(2, self.labels.shape, generator=generator)
        elif self._is_vocabulary:
            yield self.labels
        else:
            places = (self.counted.flatten().cumsum(0) - 1).view_as(self.counted)
            # The next labels begin with the last class of those before.
            step = max(1, int(self.counted.sum()) - 1)
            for first in range(0, min(self.classes, self._most), step):
                yield torch.where(self.counted, (places + first) % self.classes, IGNORE_INDEX)

    def _is_equal(self, labels: torch.Tensor, weights: ClassWeights | None) -> bool:
        loss, logits, labels = self.call(labels)
        if self.is_multi_label:
            expected = float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))
        else:
            losses, labels = self._cross_entropies(logits, labels)  # [items]
            divisor = len(losses)
            if weights is not None:
                of_labels = weights.values[labels]
                losses = of_labels * losses
                divisor = of_labels.sum() if weights.divides else divisor
            expected = losses.sum() / divisor

        tolerance = TOLERANCE if weights is None else WEIGHTED_TOLERANCE
        if loss.dtype.itemsize < 4:
            tolerance = HALF_PRECISION_TOLERANCE
        # One that is no number, as of a batch without labels, says nothing.
        return not abs(float(loss) - expected) > tolerance * expected

    def _cross_entropies(
        self, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        counts = labels != IGNORE_INDEX
        labels = labels[counts]
        losses = F.cross_entropy(
            logits[counts].float(),
            labels,
            reduction="none",
            label_smoothing=self._label_smoothing,
        )
        return losses.cpu().double().numpy(), labels.cpu().numpy()

    def _model_outputs(self, batch: Mapping[str, Any]) -> Any:
        with probing(self._task.model):
            return self._task.model(**self._task.model_inputs(batch))


def _far_apart(outputs: Any) -> ModelOutput:
    """Logits of our own: of a fresh model all losses are alike, weighted ones, too."""
    logits = output_logits(outputs).float()
    numbers = torch.arange(logits.numel(), device=logits.device).view_as(logits)
    return ModelOutput(logits=3 * numbers.sin())


def _of_classes(trial: LossTrial) -> ClassWeights | None:
    """From batches of one class, and where its weight cancels in them, of two."""
    alone = np.ones(trial.classes)
    for label in range(trial.classes):
        loss, losses, _ = trial.losses(torch.full_like(trial.labels, label))
        alone[label] = loss / losses.mean()

    if not np.allclose(alone, 1, rtol=WEIGHTED_TOLERANCE):
        return ClassWeights(alone)

    place = (trial.counted.flatten().cumsum(0) - 1).view_as(trial.counted)
    values = np.ones(trial.classes)
    for label in range(1, trial.classes):
        loss, losses, labels = trial.losses(torch.where(place % 2 == 0, label, 0))
        of_first = losses[labels == 0]
        of_label = losses[labels == label]
        # loss (w n + n_0) = w sum + sum_0
        difference = loss * len(of_label) - of_label.sum()
        if abs(difference) < 1e-4 * len(of_label):  # whatever the weight, the loss is the same
            return None
        values[label] = (of_first.sum() - loss * len(of_first)) / difference

    return ClassWeights(values, divides=True)
