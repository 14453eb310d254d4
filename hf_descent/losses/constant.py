"""The least loss that a prediction can have that ignores its input, from statistics of the labels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from transformers.utils import ModelOutput

from ..readout.labels import IGNORE_INDEX, labels_of, names_of_labels
from ..readout.replay import has_router_loss, output_logits, output_loss, probing
from ..readout.stack import inner_model, map_tensors
from ..special import digamma, entr, scaled_exponential_integral
from .class_weights import ClassWeights, find_class_weights
from .task import TaskLoss


MAX_POSITIONS = (
    2**16
)  # answers are counted up to there: the first batch does not tell how long others are
SMALLEST = 1e-12
FEW_CLASSES = 1000  # of more, many are seen rarely or never
MOST_FORWARD = 64  # classes whose weights in a model's own loss are compared, which takes a forward for every few
FEW_LABELS, MANY_LABELS = (
    2_000,
    100_000,
)  # the latter of more classes, and of tokens: those of one text are alike


@dataclass
class ConstantPredictor:
    """Running statistics of labels, and the loss of the best constant prediction of them.

    That loss is for the `kind` "classes", whole labels (negative ones are ignored), their entropy; for "positions",
    the two ends of extractive answers, `[batch, 2]`, the mean of their entropies over the positions up to the last one
    seen, or of even odds of all places in a text, where it is less; for "multi_label", independent classes, the mean
    binary entropy; for "numbers" the variance. Classes may have weights.
    """

    num_classes: int  # size of the last dimension of the logits
    kind: str = "classes"
    label_smoothing: float = 0.0  # of the classes, as `label_smoothing_factor`
    scale: float = 1.0  # the task loss of numbers in units of the mean squared error
    noise_variance: float = 0.0  # of the noise that the model's input gets beside that in the data
    signal: str | None = (
        None  # name of a denoiser's input, which predicts its labels by itself, or of the texts
    )
    enough: int = FEW_LABELS  # how many labels tell the loss
    weights: ClassWeights | None = None  # of classes, where the loss has such
    rounding: float = 0.0  # by what share the model may round its loss down, in half precision
    # Counts [1 or 2, classes], of answers with a signal also those of the lengths of their texts [3, classes]; of
    # floating labels number, sum and sum of squares [3, dims], with a signal also the sum of squares of their
    # difference from it [4, dims].
    moments: torch.Tensor | None = None

    def of_batch(self, task: TaskLoss, inputs: Mapping[str, Any]) -> "ConstantPredictor":
        """The statistics of one batch, before which the model may have been put into half precision."""
        *_, head = task.model.parameters()
        rounding = torch.finfo(head.dtype).eps if head.is_floating_point() else 0.0
        found = replace(self, moments=None, rounding=max(self.rounding, rounding))
        found.update(task.answers(inputs), inputs.get(self.signal))
        return found

    def plus(self, other: "ConstantPredictor | None") -> "ConstantPredictor":
        """These statistics, with others of the same task; none where labels differ in shape."""
        if other is None:
            return self
        alike = (
            None not in (self.moments, other.moments) and self.moments.shape == other.moments.shape
        )
        return replace(self, moments=self.moments + other.moments if alike else None)

    def update(self, labels: torch.Tensor, signal: torch.Tensor | None = None) -> int:
        """Count a batch of labels, of any shape; their number, or that of the rows of floating labels.

        `signal`, a denoiser's input without the noise of training, is predicted where it is better than a constant.
        """
        if labels.is_floating_point():
            rows = labels.cpu().double().reshape(len(labels), -1)  # [batch, dims]
            powers = [torch.ones_like(rows), rows, rows.square()]
            if signal is not None:
                powers.append((signal.cpu().double().reshape(rows.shape) - rows).square())
            moments, number = torch.stack(powers).sum(1), len(rows)
        else:
            ends = (
                labels.cpu().reshape(-1, 2 if self.kind == "positions" else 1).unbind(-1)
            )  # [labels] each
            ends = [end[(end >= 0) & (end < self.num_classes)] for end in ends]
            if signal is not None:
                ends.append(torch.full_like(ends[0], min(signal.shape[1], self.num_classes - 1)))
            moments = torch.stack(
                [end.bincount(minlength=self.num_classes) for end in ends]
            ).double()
            number = len(ends[0])
        if self.moments is not None and self.moments.shape != moments.shape:
            raise unmeasurable("labels that are numbers in rows of several lengths")
        self.moments = moments if self.moments is None else self.moments + moments
        return number

    def loss(self) -> float:
        """The least loss on the labels seen, in units of the task loss; ValueError unless labels differ."""
        loss = 0.0 if self.moments is None else float(self._loss(*self.moments.numpy()))
        if not 0 < loss < math.inf:
            raise ValueError(
                f"`initial_loss_bound='auto'` found a constant prediction with loss {loss} on the training labels: "
                "there are no labels, or all are alike. Check the data, or set `initial_loss_bound` to a number."
            )
        return loss

    def least(self) -> float:
        """What no constant prediction of just these labels stays below, nor a denoiser's input itself; 0 where there
        is nothing to predict. Of many classes, of which labels show but some, it is an estimate as in `loss`."""
        estimates = self.kind == "classes" and self.num_classes > FEW_CLASSES
        least = (
            0.0 if self.moments is None else self._loss(*self.moments.numpy(), estimates=estimates)
        )
        return (1 - self.rounding) * float(least)

    def _loss(self, *moments: np.ndarray, estimates: bool = True) -> float:
        if self.kind == "positions":  # no answer ends beyond the longest text
            moments = [counts[: np.max(counts.nonzero(), initial=0) + 1] for counts in moments]
        if self.weights is not None:
            return self._weighted_loss(*moments)
        if self.kind in ("classes", "positions"):
            of_counts = entropy if estimates else _entropy_of_frequencies
            even = [
                np.log(np.arange(1, len(counts))) @ counts[1:] / counts.sum()
                for counts in moments[2:]
            ]
            return min(
                [
                    np.mean([of_counts(counts, self.label_smoothing) for counts in moments[:2]]),
                    *even,
                ]
            )
        number, total, squares, *difference = moments  # [dims] each
        mean = total / number
        if self.kind == "multi_label":
            return np.mean(entr(mean) + entr(1 - mean))
        least = np.mean(squares / number - mean**2)
        if difference:
            own = np.mean(difference[0] / number) + self.noise_variance
            # For f_0 a loss of 0 says that the input is no noisy version of the labels.
            least = own if (own > 0 or not estimates) and own < least else least
        return self.scale * least

    def _weighted_loss(self, *moments: np.ndarray) -> float:
        """The best constant prediction gives each class its share of all weights."""
        values = self.weights.values
        if self.kind == "multi_label":
            number, total, _ = moments  # [classes] each
            masses = values * np.stack([1 - total / number, total / number])  # [2, classes]
            return np.mean(masses.sum(0) * entr(masses / masses.sum(0)).sum(0))
        (counts,) = moments
        masses = values * counts  # [classes]
        divisor = masses.sum() if self.weights.divides else counts.sum()
        return masses.sum() / max(divisor, SMALLEST) * _entropy_of_frequencies(masses, 0.0)


def entropy(counts: np.ndarray, label_smoothing: float = 0.0) -> float:
    """The entropy in nats of a distribution, from the `counts` `[classes]` of labels drawn from it.

    The frequencies' own entropy is too low where many classes are seen rarely or never. Chao, Wang and Jost (2013),
    "Entropy and the species accumulation curve", equation 4, correct that exactly for what was seen, and for the rest
    by how many classes are left to be seen. Their bound for that number is low for a vocabulary, the number of all
    unseen classes too high, so it is the harmonic mean of the two here.
    """
    size, classes = counts.sum(), len(counts)
    if not size:
        return 0.0
    seen, once, twice = counts[counts > 0], np.sum(counts == 1), np.sum(counts == 2)
    found = np.sum(seen / size * (digamma(size) - digamma(seen)))
    unseen = classes - len(seen)
    if once and unseen:
        bound = (size - 1) / size * (once**2 / (2 * twice) if twice else once * (once - 1) / 2)
        left = 2 / (1 / np.clip(bound, 1, unseen) + 1 / unseen)
        # The sum over k >= size of what is unseen after k labels, divided by k: once / size at first, and less by the
        # share once / (once + size * left) with each label.
        decay = size * math.log1p(once / (size * left))
        found += once / size * scaled_exponential_integral(decay)  # the integral for the sum
    found = min(found, math.log(classes))
    if not label_smoothing:
        return found
    # The mass of what was seen once (Good and Turing) is shared by these classes and the unseen ones.
    rare = (counts == 1) | ((counts == 0) & (once > 0))
    frequencies = np.where(rare, once / max(rare.sum(), 1), counts) / size
    smoothed = (1 - label_smoothing) * frequencies + label_smoothing / classes
    bias = (1 - label_smoothing) * (found - entr(frequencies).sum())
    return min(entr(smoothed).sum() + bias, math.log(classes))


def _entropy_of_frequencies(counts: np.ndarray, label_smoothing: float) -> float:
    frequencies = counts / max(counts.sum(), SMALLEST)
    return entr((1 - label_smoothing) * frequencies + label_smoothing / len(counts)).sum()


def chance_of(labels: ConstantPredictor | None, of_all: bool = True) -> float | None:
    """The least loss of a constant prediction of the labels counted by all processes (`of_all`) or by this one, which
    all call; `None` where it is not known."""
    parts = [part for part in (gather_object([labels]) if of_all else [labels]) if part is not None]
    return reduce(ConstantPredictor.plus, parts).least() if parts else None


def unmeasurable(what: str) -> ValueError:
    return ValueError(
        f"`initial_loss_bound='auto'` cannot be measured for {what}; set it to the loss of a constant prediction."
    )


@torch.no_grad()
def find_predictor(task: TaskLoss, inputs: Mapping[str, Any], outputs: Any) -> ConstantPredictor:
    """What measures the least loss of a constant prediction, found out on a batch and the model's outputs on it;
    ValueError where no least value is known for the loss."""
    logits, labels = output_logits(outputs), labels_of(inputs, task.label_names)
    classes, make = (
        logits.shape[-1],
        partial(ConstantPredictor, rounding=torch.finfo(logits.dtype).eps),
    )
    if (
        "start_positions" in inputs
    ):  # of extractive question answering; Trainer's smoother knows nothing of it
        if task.loss_fn is not None:
            raise unmeasurable("a custom loss of answers")
        return make(
            MAX_POSITIONS,
            "positions",
            signal=getattr(inner_model(task.model), "main_input_name", None),
        )
    if labels is None:
        raise unmeasurable("data without labels")
    given, *_ = names_of_labels(inputs, task.label_names)
    if labels.is_floating_point() and labels.numel() != logits.numel():
        raise unmeasurable(
            f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
        )
    if classes == 1 and not labels.is_floating_point():
        raise unmeasurable(
            "whole labels of a single logit, which models take for numbers (give them as floats)"
        )
    config = getattr(task.model, "config", None)
    multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    if labels.is_floating_point() and not multi_label:
        name = getattr(inner_model(task.model), "main_input_name", None)
        signal = inputs.get(name)
        is_denoiser = (
            signal is not None and signal.is_floating_point() and signal.shape == labels.shape
        )
        scale = _loss_scale(task, inputs, given, logits)
        return make(classes, "numbers", scale=scale, signal=name if is_denoiser else None)
    label_smoothing = 0.0 if task.smoother is None else task.smoother.epsilon
    weights = None
    if not has_router_loss(outputs):
        try:
            _check_cross_entropy(task, inputs, given, outputs, multi_label, label_smoothing)
        except ValueError:
            weights = find_class_weights(task, inputs, given, outputs, multi_label)
            if weights is None:
                raise
    kind = "multi_label" if multi_label else "classes"
    needs_many = not multi_label and (labels.dim() > 1 or classes > FEW_CLASSES)
    enough = MANY_LABELS if needs_many else FEW_LABELS
    return make(classes, kind, label_smoothing, enough=enough, weights=weights)


def _check_cross_entropy(task, inputs, name, outputs, multi_label, label_smoothing) -> None:
    """ValueError where the loss on a batch with labels `name` is not the (binary) cross-entropy taken for it."""
    labels, number = inputs[name], output_logits(outputs).shape[-1]
    most = min(
        number, MOST_FORWARD if task.loss_fn is None else FEW_CLASSES
    )  # classes that are tried
    if multi_label or (labels.dim() > 1 and number > FEW_CLASSES):
        _compare_cross_entropy(task, inputs, outputs, multi_label, label_smoothing)
        for row in torch.eye(number)[:most] if multi_label else ():  # each class may have a weight
            batch = {**inputs, name: row.to(labels).expand_as(labels)}
            if task.loss_fn is None:
                with probing(task.model):
                    outputs = task.model(**task.model_inputs(batch))
            _compare_cross_entropy(task, batch, outputs, multi_label, label_smoothing)
        return
    repeats = math.ceil(min(number, 8) / max(1, int(labels.ne(IGNORE_INDEX).sum())))
    rows = map_tensors(lambda v: v.repeat_interleave(repeats, 0) if v.dim() else v, dict(inputs))
    counted = rows[name] != IGNORE_INDEX
    # In the mean over one class its weight cancels: each batch has several, of which the next one has the last.
    step = max(1, int(counted.sum()) - 1)
    for first in range(0, most, step):
        classes = (counted.flatten().cumsum(0) - 1 + first).view_as(counted) % number
        rows[name] = torch.where(counted, classes, IGNORE_INDEX)
        if first == 0 or task.loss_fn is None:
            with probing(task.model):
                outputs = task.model(**task.model_inputs(rows))
        _compare_cross_entropy(task, rows, outputs, multi_label, label_smoothing)


def _compare_cross_entropy(task, inputs, outputs, multi_label, label_smoothing) -> None:
    if task.loss_fn is not None:
        # Of a fresh model all losses are alike, weighted ones too: the custom loss is tried on logits far apart.
        logits = output_logits(outputs).float()
        outputs = ModelOutput(
            logits=3 * torch.arange(logits.numel(), device=logits.device).sin().view_as(logits)
        )
    try:
        loss = task(outputs, inputs, task.count(inputs) if task.loss_fn is not None else None)
    except TypeError:  # it is no loss at all, whatever f_0 is
        raise
    except Exception as error:
        raise unmeasurable(f"a custom loss that fails on logits of its own ({error})") from error
    logits, labels = task.predictions(outputs, inputs)
    if multi_label:
        expected = F.binary_cross_entropy_with_logits(logits.float(), labels.float())
    elif logits.shape[:-1] != labels.shape:
        raise unmeasurable(
            f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}"
        )
    else:
        expected = F.cross_entropy(
            logits.flatten(0, -2).float(), labels.flatten(), label_smoothing=label_smoothing
        )
    if (
        abs(loss - expected) > (0.02 if loss.dtype.itemsize < 4 else 1e-4) * expected
    ):  # which half precision rounds
        raise unmeasurable("a loss that is no cross-entropy, weighted or not")


def _loss_scale(task, inputs, name, logits) -> float:
    """The loss of numbers, the labels `name`, in units of the mean squared error, measured on one batch."""
    labels = inputs[name]
    residual = labels - labels.mean(0, keepdim=True)
    if not residual.any():  # a batch of one
        residual = torch.ones_like(labels)
    flat = residual.reshape(len(labels), -1)  # [rows, numbers]
    far = 100 if labels.dtype.itemsize > 2 else 2  # a Huber loss is no squared error far off
    tried, scales, predicted = (
        [residual, far * residual],
        [],
        logits.reshape(labels.shape).to(labels),
    )
    for place in range(
        0, flat.shape[1], math.ceil(flat.shape[1] / 8)
    ):  # each number may have a weight of its own
        alone = torch.zeros_like(flat)
        alone[:, place] = flat.abs().max()
        tried.append(alone.view_as(labels))
    for each in tried:
        # The loss of a residual r, whatever the prediction, is the loss of the labels `prediction + r`.
        batch = {**inputs, name: predicted + each}
        if task.loss_fn is not None:
            loss = task(ModelOutput(logits=logits), batch, task.count(batch))
        else:
            with probing(task.model):
                loss = output_loss(task.model(**batch))
        scales.append(
            (loss / (batch[name].float() - predicted.float()).square().mean()).item()
        )  # as rounded
    if not (
        math.isfinite(scales[0])
        and scales[0] > 0
        and np.allclose(scales, scales[0], rtol=0.02, atol=0)
    ):
        raise unmeasurable("a loss of numbers that is not proportional to the squared error")
    return float(
        f"{scales[0]:.5g}"
    )  # without the rounding errors of this batch: a resumed run measures on another
