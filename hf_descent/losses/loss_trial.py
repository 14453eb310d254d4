"""Whether a loss is a cross-entropy, found out by trying it on labels of our own."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

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
TOLERANCE = 1e-4
HALF_PRECISION_TOLERANCE = 0.02


def check_cross_entropy(
    task: TaskLoss,
    inputs: Mapping[str, Any],
    outputs: Any,
    is_multi_label: bool,
    label_smoothing: float,
) -> None:
    """ValueError where a task loss is no (binary) cross-entropy that weighs all classes alike.

    Args:
        inputs (dict): a short batch.
        outputs: the model's, on this batch.
        is_multi_label (`bool`): whether classes are independent, and labels 0 or 1 for each.
        label_smoothing (`float`): of the cross-entropy.
    """
    classes = output_logits(outputs).shape[-1]
    trial = LossTrial(task, inputs, classes, is_multi_label, label_smoothing)
    if not all(trial.is_equal(labels) for labels in trial.labels_to_try()):
        raise unmeasurable("a loss that is no cross-entropy, or weighs its classes")


class LossTrial:
    """Calls a task loss on labels of our own, and compares it with a (binary) cross-entropy.

    As [`check_cross_entropy`]; the rows of a short batch are repeated where they have too few labels.
    """

    def __init__(
        self,
        task: TaskLoss,
        inputs: Mapping[str, Any],
        classes: int,
        is_multi_label: bool,
        label_smoothing: float,
    ):
        self._task = task
        self._name, *_ = names_of_labels(inputs, task.label_names)
        self._label_smoothing = label_smoothing
        self._is_multi_label = is_multi_label
        self._classes = classes
        # The classes of a vocabulary are not tried one by one.
        self._is_vocabulary = inputs[self._name].dim() > 1 and classes > FEW_CLASSES

        counted = int(inputs[self._name].ne(IGNORE_INDEX).sum())
        repeats = math.ceil(min(classes, LEAST_LABELS) / max(1, counted))

        def repeated(value):
            return value.repeat_interleave(repeats, 0) if value.dim() else value

        self._inputs = map_tensors(repeated, dict(inputs))
        self._custom_outputs = None  # on which a custom loss is tried
        self._labels = self._inputs[self._name]

    def labels_to_try(self) -> Iterator[torch.Tensor]:
        """Several classes at once, since in the mean over one class its weight cancels."""
        if self._is_multi_label:
            yield self._labels
            yield torch.ones_like(self._labels)  # a weight of any class shows
            generator = torch.Generator().manual_seed(0)
            for _ in range(3):
                yield torch.randint(2, self._labels.shape, generator=generator)
        elif self._is_vocabulary:
            yield self._labels
        else:
            counted = self._labels != IGNORE_INDEX
            places = (counted.flatten().cumsum(0) - 1).view_as(counted)
            most = MOST_FORWARD if self._task.loss_fn is None else FEW_CLASSES
            # The next labels begin with the last class of those before.
            step = max(1, int(counted.sum()) - 1)
            for first in range(0, min(self._classes, most), step):
                yield torch.where(counted, (places + first) % self._classes, IGNORE_INDEX)

    def is_equal(self, labels: torch.Tensor) -> bool:
        """Whether the loss on `labels` is the cross-entropy."""
        loss, logits, labels = self._call(labels)
        if self._is_multi_label:
            expected = float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))
        else:
            counted = labels != IGNORE_INDEX
            expected = float(
                F.cross_entropy(
                    logits[counted].float(),
                    labels[counted],
                    label_smoothing=self._label_smoothing,
                )
            )

        tolerance = TOLERANCE if loss.dtype.itemsize >= 4 else HALF_PRECISION_TOLERANCE
        # One that is no number, as of a batch without labels, says nothing.
        return not abs(float(loss) - expected) > tolerance * expected

    def _call(self, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss on `labels`, and the logits and labels that it compares."""
        batch = {**self._inputs, self._name: labels.to(self._labels)}
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

    def _model_outputs(self, batch: Mapping[str, Any]) -> Any:
        with probing(self._task.model):
            return self._task.model(**self._task.model_inputs(batch))


def _far_apart(outputs: Any) -> ModelOutput:
    """Logits of our own: of a fresh model all losses are alike, weighted ones, too."""
    logits = output_logits(outputs).float()
    numbers = torch.arange(logits.numel(), device=logits.device).view_as(logits)
    return ModelOutput(logits=3 * numbers.sin())
