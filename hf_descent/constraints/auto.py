"""The "auto" problem: f_0 from the labels, the step sizes from the loss that the model reaches in warm-up.

f_0 is the loss of the best constant predictor, measured on the labels of the warm-up batches; the step sizes alpha are
the geometric schedule that leads from f_0 to the level that f_L reaches at the end of warm-up, so that the problem is
one that this model can solve on this task. `descent_strength` scales the logarithm of the total decrease asked for: 1
asks the last layer to stay at its warm-up level, 0.5 for half of that decrease.
"""

import math
from collections.abc import Callable

import torch


MIN_LABELS = 20  # fewer may all be alike by chance
# The least total decrease asked for, as f_L / f_0: without it a model that is no better than a constant at the end of
# warm-up would get alpha <= 0.
MAX_LOSS_RATIO = 0.98


def geometric_alpha(initial_loss_bound: float, final_loss: float, num_constraints: int, strength: float) -> float:
    """Step size alpha with (1 - alpha)^n = (f_L / f_0)^strength, for n constraints; in (0, 1).

    Raises:
        ValueError: `final_loss`, f_L, is not finite, or not of the sign of `initial_loss_bound`, f_0.
    """
    ratio = final_loss / initial_loss_bound
    if not math.isfinite(ratio) or ratio <= 0:
        raise ValueError(
            f"The loss at the end of warm-up is {final_loss} and f_0 is {initial_loss_bound}: no descent schedule "
            "leads from one to the other. Set `descent_alpha` and `initial_loss_bound` to numbers."
        )
    return 1.0 - min(ratio, MAX_LOSS_RATIO) ** (strength / num_constraints)


class ConstantPredictor:
    """Running statistics of the labels, and the loss of the best constant predictor on them.

    Integer labels give the entropy of their distribution (negative values are ignored labels), with Good and Turing's
    estimate for the classes that were seen once or never; labels of several independent classes (`multi_label`) give
    the mean binary entropy, floating labels the variance (mean squared error).
    The statistics stay on the device of the labels; `loss` reads them back.

    Args:
        num_classes (`int`): size of the last dimension of the logits.
        label_smoothing (`float`): smoothing of the targets, as `label_smoothing_factor`.
        multi_label (`bool`): whether floating labels are independent classes rather than numbers.
        scale (`float`): the task loss in units of the loss named above (a sum instead of a mean, say).
        positions (`bool`): whether the labels are the two ends of extractive answers, `[batch, 2]`, over whose losses
            the task averages: the classes are positions in a sequence, up to the last one seen.
    """

    def __init__(
        self,
        num_classes: int,
        label_smoothing: float = 0.0,
        multi_label: bool = False,
        scale: float = 1.0,
        positions: bool = False,
    ):
        self.positions = positions
        self.num_classes = num_classes
        self.scale = scale
        self.label_smoothing = label_smoothing
        self.multi_label = multi_label
        # Counts [classes], of positions [2, classes]; of floating labels count, sum, sum of squares [3, dims].
        self.moments = None

    def update(self, labels: torch.Tensor) -> None:
        """Count a batch of labels, of any shape; of `positions` `[batch, 2]`."""
        precision = torch.float32 if labels.device.type == "mps" else torch.float64
        if labels.is_floating_point():
            rows = labels.detach().reshape(len(labels), -1).to(precision)  # [batch, dims]
            moments = torch.stack([torch.ones_like(rows), rows, rows.square()]).sum(1)  # [3, dims]
        else:
            kinds = labels.detach().reshape(-1, 2 if self.positions else 1).unbind(-1)  # [labels] each
            moments = torch.zeros(len(kinds), self.num_classes, dtype=precision, device=labels.device)
            for row, flat in zip(moments, kinds):
                counted = (flat >= 0) & (flat < self.num_classes)
                row.index_add_(0, flat.clamp(0, self.num_classes - 1), counted.to(precision))
            moments = moments if self.positions else moments[0]
        self.moments = moments if self.moments is None else self.moments + moments

    def loss(self, reduce: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> float:
        """The loss of the best constant predictor on the labels seen, in units of the task loss.

        `reduce` sums a tensor over processes. ValueError where there were no labels, or all were alike.
        """
        if self.moments is not None:
            self.moments = reduce(self.moments)
        loss = 0.0 if self.moments is None else self._loss()
        if not (math.isfinite(loss) and loss > 0):
            raise ValueError(
                f"`initial_loss_bound='auto'` found a constant predictor with loss {loss} on the labels of warm-up: "
                "there were no labels, or all were alike. Shuffle the data, or set `initial_loss_bound` to the loss "
                "of a constant prediction."
            )
        return loss

    def _loss(self) -> float:
        if self.positions:
            return sum(map(self._loss_of_classes, self.moments)) / len(self.moments)
        if self.moments.dim() == 2:
            count, total, square = self.moments  # [dims] each
            mean = total / count
            if self.multi_label:
                return self.scale * _entropy(torch.stack([mean, 1 - mean], dim=-1)).mean().item()
            return self.scale * (square / count - mean.square()).mean().item()
        return self._loss_of_classes(self.moments)

    def _loss_of_classes(self, counts: torch.Tensor) -> float:
        if counts.max() == counts.sum() >= MIN_LABELS or not counts.any():
            return 0.0
        if self.positions:
            counts = counts[: counts.nonzero().max() + 1]  # no answer ends beyond the longest text
        probabilities = _probabilities(counts)
        smoothed = (1 - self.label_smoothing) * probabilities + self.label_smoothing / len(probabilities)
        # Frequencies underestimate the entropy by about as much (Miller and Madow).
        bias = ((counts > 1).sum() - 1).clamp(min=0) / (2 * counts.sum())
        return self.scale * (_entropy(smoothed) + bias).clamp(max=math.log(len(probabilities))).item()


def _probabilities(counts: torch.Tensor) -> torch.Tensor:
    """The classes' probabilities `[classes]` from how often they were seen.

    Frequencies alone would underestimate the entropy of many classes (a vocabulary, say), of which few labels show
    but some. What was seen once stands for what was not seen, by Good and Turing's estimate: all of these share evenly
    the mass of the former, and of one label more as long as a class is unseen. Where every class was seen twice these
    are the frequencies.
    """
    rare = counts <= 1
    mass = counts[rare].sum() + (counts == 0).any()
    counts = torch.where(rare, mass / rare.sum().clamp(min=1), counts)
    return counts / counts.sum()


def _entropy(probabilities: torch.Tensor) -> torch.Tensor:
    return -torch.xlogy(probabilities, probabilities).sum(-1)
