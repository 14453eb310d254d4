"""The layer losses of the last steps, one by one, so that a report can say exactly which steps its means are over."""

import numpy as np


class LossWindow:
    """The layer losses `[L]` of the last `size` steps that were added.

    Args:
        size (`int`): the greatest number of steps kept.
        num_layers (`int`): number of layers L.
    """

    def __init__(self, size: int, num_layers: int):
        self.size = max(size, 1)
        self.count = 0  # steps added so far
        self._rows = np.full((self.size, num_layers), np.nan, dtype=np.float32)

    def add(self, layer_losses: np.ndarray) -> None:
        """Add the losses `[L]` of a step. If one is not finite, the step takes its place but counts for nothing."""
        self._rows[self.count % self.size] = layer_losses
        self.count += 1

    @property
    def rows(self) -> np.ndarray:
        """The losses of the steps kept, in their order, without those that count for nothing; `[steps, L]`."""
        rows = self.kept
        return rows[np.isfinite(rows).all(axis=1)]

    @property
    def kept(self) -> np.ndarray:
        """The losses of the steps kept, in their order; `[steps, L]`, a copy."""
        steps = np.arange(max(0, self.count - self.size), self.count)
        return self._rows[steps % self.size]

    def restore(self, rows: np.ndarray) -> None:
        """Take over the last `size` steps that another window `kept`; ValueError for another number of layers."""
        if rows.ndim != 2 or rows.shape[1] != self._rows.shape[1]:
            raise ValueError(f"the losses of the last steps have shape {list(rows.shape)}")
        self.count = 0
        self._rows.fill(np.nan)
        for row in rows[-self.size :]:
            self.add(row)


def is_below(losses: np.ndarray, bound: float) -> bool:
    """Whether the mean of `losses` `[steps]` is below `bound` by twice its standard error; False for 5 or fewer."""
    if len(losses) <= 5:
        return False
    error = losses.std(ddof=1) / len(losses) ** 0.5
    return bool(losses.mean() + 2 * error < bound)
