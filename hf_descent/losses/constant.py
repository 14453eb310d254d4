"""The least loss that a prediction can have that ignores its input, from statistics of the labels."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import digamma, entr, hyperu


@dataclass
class ConstantPredictor:
    """Running statistics of labels, and the loss of the best constant prediction of them.

    Attributes:
        num_classes (`int`): size of the last dimension of the logits.
        kind (`str`): "classes", of whole labels (negative ones are ignored): the loss is their entropy; "positions",
            the two ends of extractive answers, `[batch, 2]`: the mean of their entropies over the positions up to the
            last one seen; "multi_label", independent classes: the mean binary entropy; "numbers": the variance.
        label_smoothing (`float`): smoothing of the classes, as `label_smoothing_factor`.
        scale (`float`): the task loss of numbers in units of the mean squared error.
        noise_variance (`float`): variance of the noise that training adds to the `signal` given to `update`.
    """

    num_classes: int
    kind: str = "classes"
    label_smoothing: float = 0.0
    scale: float = 1.0
    noise_variance: float = 0.0
    # Counts [1 or 2, classes]; of floating labels number, sum and sum of squares [3, dims], with a signal also the sum
    # of squares of their difference from it [4, dims].
    moments: torch.Tensor | None = None

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
            ends = labels.cpu().reshape(-1, 2 if self.kind == "positions" else 1).unbind(-1)  # [labels] each
            ends = [end[(end >= 0) & (end < self.num_classes)] for end in ends]
            moments = torch.stack([end.bincount(minlength=self.num_classes) for end in ends]).double()
            number = len(ends[0])
        self.moments = moments if self.moments is None else self.moments + moments
        return number

    def loss(self) -> float:
        """The least loss on the labels seen, in units of the task loss; ValueError where there were none, or all were
        alike."""
        loss = 0.0 if self.moments is None else float(self._loss(*self.moments.numpy()))
        if not 0 < loss < math.inf:
            raise ValueError(
                f"`initial_loss_bound='auto'` found a constant prediction with loss {loss} on the training labels: "
                "there are no labels, or all are alike. Check the data, or set `initial_loss_bound` to a number."
            )
        return loss

    def _loss(self, *moments: np.ndarray) -> float:
        if self.kind == "positions":  # no answer ends beyond the longest text
            moments = [counts[: np.max(counts.nonzero(), initial=0) + 1] for counts in moments]
        if self.kind in ("classes", "positions"):
            return np.mean([entropy(counts, self.label_smoothing) for counts in moments])
        number, total, squares, *difference = moments  # [dims] each
        mean = total / number
        if self.kind == "multi_label":
            return np.mean(entr(mean) + entr(1 - mean))
        least = np.mean(squares / number - mean**2)
        if difference:
            own = np.mean(difference[0] / number) + self.noise_variance
            least = own if 0 < own < least else least  # 0: the input is no noisy version of the labels
        return self.scale * least


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
        found += once / size * hyperu(1, 1, decay)  # e^x E1(x), the integral for the sum
    found = min(found, math.log(classes))
    if not label_smoothing:
        return found
    # The mass of what was seen once (Good and Turing) is shared by these classes and the unseen ones.
    rare = (counts == 1) | ((counts == 0) & (once > 0))
    frequencies = np.where(rare, once / max(rare.sum(), 1), counts) / size
    smoothed = (1 - label_smoothing) * frequencies + label_smoothing / classes
    bias = (1 - label_smoothing) * (found - entr(frequencies).sum())
    return min(entr(smoothed).sum() + bias, math.log(classes))
