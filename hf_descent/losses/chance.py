"""The least loss that a prediction can have that ignores its input, from statistics of the labels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object

from ..special import digamma, entr, scaled_exponential_integral
from .task import TaskLoss


if TYPE_CHECKING:
    from .class_weights import ClassWeights


SMALLEST = 1e-12
FEW_CLASSES = 1000  # of more, many are seen rarely or never
FEW_LABELS = 2_000
MANY_LABELS = 100_000  # for many classes, and for tokens: those of one text are alike


@dataclass
class ChanceLoss:
    """Running statistics of labels, and the loss of the best constant prediction of them.

    That loss is for the `kind` "classes", whole labels (negative ones are ignored), their entropy; for "positions",
    the two ends of extractive answers, `[batch, 2]`, the mean of their entropies over the positions up to the last one
    seen, or of even odds of all places in a text, where it is less; for "multi_label", independent classes, the mean
    binary entropy; for "numbers" the variance. The "classes" may have weights.
    """

    num_classes: int  # size of the last dimension of the logits
    kind: str = "classes"
    label_smoothing: float = 0.0  # of the classes, as `label_smoothing_factor`
    scale: float = 1.0  # the task loss of numbers in units of the mean squared error
    noise_variance: float = 0.0  # of the noise that the model's input gets beside that in the data
    # Name of a denoiser's input, which predicts its labels by itself, or of the texts.
    signal: str | None = None
    enough: int = FEW_LABELS  # how many labels tell the loss
    weights: "ClassWeights | None" = None  # of classes, where the loss has such
    rounding: float = 0.0  # by what share the model may round its loss down, in half precision
    # Counts [1 or 2, classes], of answers with a signal also those of the lengths of their texts [3, classes]; of
    # floating labels number, sum and sum of squares [3, dims], with a signal also the sum of squares of their
    # difference from it [4, dims].
    moments: torch.Tensor | None = None

    def of_batch(self, task: TaskLoss, inputs: Mapping[str, Any]) -> "ChanceLoss":
        """The statistics of one batch, before which the model may have been put into half precision."""
        *_, head = task.model.parameters()
        rounding = self.rounding
        if head.is_floating_point():
            rounding = max(rounding, torch.finfo(head.dtype).eps)

        statistics = replace(self, moments=None, rounding=rounding)
        statistics.update(task.answers(inputs), inputs.get(self.signal))
        return statistics

    def plus(self, other: "ChanceLoss | None") -> "ChanceLoss":
        """These statistics, with others of the same task; none where labels differ in shape."""
        if other is None:
            return self
        if self.moments is None or other.moments is None:
            return replace(self, moments=None)
        if self.moments.shape != other.moments.shape:
            return replace(self, moments=None)
        return replace(self, moments=self.moments + other.moments)

    def update(self, labels: torch.Tensor, signal: torch.Tensor | None = None) -> int:
        """Count a batch of labels, of any shape; their number, or that of the rows of floating labels.

        `signal`, a denoiser's input without the noise of training, is predicted where it is better than a constant.
        """
        if labels.is_floating_point():
            number = len(labels)
            moments = _moments_of_numbers(labels, signal)
        else:
            ends = self._ends(labels)
            number = len(ends[0])
            if signal is not None:
                length = min(signal.shape[1], self.num_classes - 1)
                ends.append(np.full_like(ends[0], length))
            counts = [np.bincount(end, minlength=self.num_classes) for end in ends]
            moments = torch.from_numpy(np.stack(counts).astype(np.float64))

        if self.moments is None:
            self.moments = moments
        elif self.moments.shape == moments.shape:
            self.moments = self.moments + moments
        else:
            raise unmeasurable("labels that are numbers in examples of several lengths")

        return number

    def _ends(self, labels: torch.Tensor) -> list[np.ndarray]:
        """The whole labels that count, `[labels]`; of answers one array for each end."""
        per_answer = 2 if self.kind == "positions" else 1
        ends = labels.cpu().numpy().reshape(-1, per_answer).T
        return [end[(end >= 0) & (end < self.num_classes)] for end in ends]

    def estimate(self) -> float:
        """The least loss on labels like those seen, which are a sample, in units of the task loss; ValueError unless
        they differ."""
        loss = self._least(estimates=True)
        if not 0 < loss < math.inf:
            raise ValueError(
                f"`initial_loss_bound='auto'` found a constant prediction with loss {loss} on the training labels: "
                "there are no labels, or all are alike. Check the data, or set `initial_loss_bound` to a number."
            )
        return loss

    def lower_bound(self) -> float:
        """What no constant prediction of just these labels stays below, nor a denoiser's input itself; 0 where there
        is nothing to predict. Of many classes, of which labels show but some, it is an estimate, too."""
        has_many_classes = self.kind == "classes" and self.num_classes > FEW_CLASSES
        return (1 - self.rounding) * self._least(estimates=has_many_classes)

    def _least(self, estimates: bool) -> float:
        """The least loss; with `estimates` of labels of which these are but a sample."""
        if self.moments is None:
            return 0.0
        moments = list(self.moments.numpy())
        if self.kind == "numbers":
            loss = self._of_numbers(moments, estimates)
        elif self.kind == "multi_label":
            loss = self._of_independent_classes(moments)
        elif self.kind == "positions":
            loss = self._of_answers(moments, estimates)
        elif self.weights is not None:
            loss = self._of_weighted_classes(moments[0])
        else:
            loss = self._entropy(moments[0], estimates)

        return float(loss)

    def _of_numbers(self, moments: list[np.ndarray], estimates: bool) -> float:
        number, total, squares, *difference = moments  # [dims] each
        mean = total / number
        least = np.mean(squares / number - mean**2)
        if difference:
            of_signal = np.mean(difference[0] / number) + self.noise_variance
            # For f_0 a loss of 0 says that the input is no noisy version of the labels.
            is_noisy = of_signal > 0 or not estimates
            if is_noisy and of_signal < least:
                least = of_signal
        return self.scale * least

    def _of_independent_classes(self, moments: list[np.ndarray]) -> float:
        number, total, _ = moments  # [classes] each
        mean = total / number
        return np.mean(entr(mean) + entr(1 - mean))

    def _of_weighted_classes(self, counts: np.ndarray) -> float:
        """The best constant prediction gives each class its share of all weights."""
        masses = self.weights.values * counts  # [classes]
        divisor = masses.sum() if self.weights.divides else counts.sum()
        return masses.sum() / max(divisor, SMALLEST) * _entropy_of_frequencies(masses, 0.0)

    def _of_answers(self, moments: list[np.ndarray], estimates: bool) -> float:
        # No answer ends beyond the longest text.
        moments = [counts[: np.max(counts.nonzero(), initial=0) + 1] for counts in moments]
        least = np.mean([self._entropy(counts, estimates) for counts in moments[:2]])
        if len(moments) > 2:
            lengths = moments[2]
            even_odds = np.log(np.arange(1, len(lengths))) @ lengths[1:] / lengths.sum()
            least = min(least, even_odds)
        return least

    def _entropy(self, counts: np.ndarray, estimates: bool) -> float:
        if estimates:
            return entropy(counts, self.label_smoothing)
        return _entropy_of_frequencies(counts, self.label_smoothing)


def _moments_of_numbers(labels: torch.Tensor, signal: torch.Tensor | None) -> torch.Tensor:
    """Sums over the rows of floating labels; see `ChanceLoss.moments`."""
    rows = labels.cpu().double().reshape(len(labels), -1)  # [batch, dims]
    powers = [torch.ones_like(rows), rows, rows.square()]
    if signal is not None:
        powers.append((signal.cpu().double().reshape(rows.shape) - rows).square())
    return torch.stack(powers).sum(1)


def entropy(counts: np.ndarray, label_smoothing: float = 0.0) -> float:
    """The entropy in nats of a distribution, from the `counts` `[classes]` of labels drawn from it.

    The frequencies' own entropy is too low where many classes are seen rarely or never. Chao, Wang and Jost (2013),
    "Entropy and the species accumulation curve", equation 4, correct that exactly for what was seen, and for the rest
    by how many classes are left to be seen. Their bound for that number is low for a vocabulary, the number of all
    unseen classes too high, so it is the harmonic mean of the two here.
    """
    size = counts.sum()
    if not size:
        return 0.0
    classes = len(counts)
    seen = counts[counts > 0]
    once = np.sum(counts == 1)
    unseen = classes - len(seen)

    nats = np.sum(seen / size * (digamma(size) - digamma(seen)))
    if once and unseen:
        bound = (size - 1) / size * _unseen_bound(once, np.sum(counts == 2))
        left = 2 / (1 / np.clip(bound, 1, unseen) + 1 / unseen)
        # The sum over k >= size of what is unseen after k labels, divided by k: once / size at first, and less by the
        # share once / (once + size * left) with each label.
        decay = size * math.log1p(once / (size * left))
        nats += once / size * scaled_exponential_integral(decay)  # the integral for the sum

    nats = min(nats, math.log(classes))
    if not label_smoothing:
        return nats

    # The mass of what was seen once (Good and Turing) is shared by these classes and the unseen ones.
    rare = (counts == 1) | ((counts == 0) & (once > 0))
    frequencies = np.where(rare, once / max(rare.sum(), 1), counts) / size
    smoothed = (1 - label_smoothing) * frequencies + label_smoothing / classes
    bias = (1 - label_smoothing) * (nats - entr(frequencies).sum())
    return min(entr(smoothed).sum() + bias, math.log(classes))


def _unseen_bound(once: int, twice: int) -> float:
    """The least number of unseen classes, from how many were seen once and twice (Chao 1984), for a large sample."""
    if twice:
        return once**2 / (2 * twice)
    return once * (once - 1) / 2


def _entropy_of_frequencies(counts: np.ndarray, label_smoothing: float) -> float:
    frequencies = counts / max(counts.sum(), SMALLEST)
    return entr((1 - label_smoothing) * frequencies + label_smoothing / len(counts)).sum()


def chance_of(labels: ChanceLoss | None, of_all: bool = True) -> float | None:
    """The least loss of a constant prediction of the labels counted by all processes (`of_all`) or by this one, which
    all call; `None` where it is not known."""
    parts = gather_object([labels]) if of_all else [labels]
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return reduce(ChanceLoss.plus, known).lower_bound()


def unmeasurable(what: str) -> ValueError:
    return ValueError(
        f"`initial_loss_bound='auto'` cannot be measured for {what}; set it to the loss of a constant prediction."
    )
