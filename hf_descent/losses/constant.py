"""The least loss that a prediction can have that ignores its input, from statistics of the labels."""

import math

import numpy as np
import torch
from scipy.special import digamma, entr, hyperu


class ConstantPredictor:
    """Running statistics of the labels, and the loss of the best constant prediction of them.

    Integer labels give the entropy of their distribution (negative values are ignored labels), labels of several
    independent classes (`multi_label`) the mean binary entropy, floating labels the variance (mean squared error).

    Args:
        num_classes (`int`): size of the last dimension of the logits.
        label_smoothing (`float`): smoothing of the targets, as `label_smoothing_factor`.
        multi_label (`bool`): whether floating labels are independent classes rather than numbers.
        scale (`float`): the task loss in units of the loss named above (a sum instead of a mean, say).
        positions (`bool`): whether the labels are the two ends of extractive answers, `[batch, 2]`, over whose losses
            the task averages: the classes are positions in a sequence, up to the last one seen.
        noise_variance (`float`): variance of the noise that training adds to the `signal` given to `update`.
    """

    def __init__(
        self,
        num_classes: int,
        label_smoothing: float = 0.0,
        multi_label: bool = False,
        scale: float = 1.0,
        positions: bool = False,
        noise_variance: float = 0.0,
    ):
        self.positions = positions
        self.num_classes = num_classes
        self.scale = scale
        self.label_smoothing = label_smoothing
        self.multi_label = multi_label
        self.noise_variance = noise_variance
        # Counts [classes], of positions [2, classes]; of floating labels count, sum and sum of squares [3, dims], with
        # a signal also the sum of squares of their difference from it [4, dims].
        self.moments: torch.Tensor | None = None

    def update(self, labels: torch.Tensor, signal: torch.Tensor | None = None) -> int:
        """Count a batch of labels, of any shape; of `positions` `[batch, 2]`. The number of labels, or of rows of
        floating labels.

        `signal`, shaped as floating labels, is a denoiser's input without the noise of training: predicting just that
        is the trivial prediction where it is better than a constant one.
        """
        labels = labels.detach().cpu()
        if labels.is_floating_point():
            rows = labels.reshape(len(labels), -1).double()  # [batch, dims]
            powers = [torch.ones_like(rows), rows, rows.square()]
            if signal is not None:
                powers.append((signal.detach().cpu().reshape(len(labels), -1).double() - rows).square())
            moments, number = torch.stack(powers).sum(1), len(rows)  # [3 or 4, dims]
        else:
            kinds = labels.reshape(-1, 2 if self.positions else 1).unbind(-1)  # [labels] each
            kinds = [kind[(kind >= 0) & (kind < self.num_classes)] for kind in kinds]
            moments = torch.stack([kind.bincount(minlength=self.num_classes) for kind in kinds]).double()
            moments, number = moments if self.positions else moments[0], len(kinds[0])
        self.moments = moments if self.moments is None else self.moments + moments
        return number

    def loss(self) -> float:
        """The least loss on the labels seen, in units of the task loss; ValueError where there were none, or all were
        alike."""
        loss = 0.0 if self.moments is None else float(self._loss(self.moments.numpy()))
        if not (math.isfinite(loss) and loss > 0):
            raise ValueError(
                f"`initial_loss_bound='auto'` found a constant prediction with loss {loss} on the training labels: "
                "there are no labels, or all are alike. Check the data, or set `initial_loss_bound` to a number."
            )
        return loss

    def _loss(self, moments: np.ndarray) -> float:
        if self.positions:  # no answer ends beyond the longest text
            return self.scale * np.mean(
                [entropy(counts[: np.max(counts.nonzero(), initial=0) + 1]) for counts in moments]
            )
        if moments.ndim == 1:
            return self.scale * entropy(moments, self.label_smoothing)
        count, total, squares, *difference = moments  # [dims] each
        mean = total / count
        if self.multi_label:
            return self.scale * np.mean(entr(mean) + entr(1 - mean))
        least = np.mean(squares / count - mean**2)
        if difference:
            own = np.mean(difference[0] / count) + self.noise_variance
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
