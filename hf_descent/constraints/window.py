"""The layer losses of the last steps, one by one, so that a report can say exactly which steps its means are over."""

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np


class LossWindow:
    """The layer losses `[L]` of the last `size` steps that were added.

    Args:
        size (`int`): the greatest number of steps kept.
        num_layers (`int`): number of layers L.
    """

    def __init__(self, size: int, num_layers: int):
        self._num_layers = num_layers
        self._rows: deque[array] = deque(maxlen=max(size, 1))  # each in float32

    def add(self, layer_losses: Sequence[float]) -> None:
        """Add the losses `[L]` of a step. If one is not finite, the step takes its place but counts for nothing."""
        self._rows.append(array("f", layer_losses))

    @property
    def rows(self) -> np.ndarray:
        """The losses of the steps kept, in their order, without those that count for nothing; `[steps, L]`."""
        rows = self.kept
        return rows[np.isfinite(rows).all(axis=1)]

    @property
    def kept(self) -> np.ndarray:
        """The losses of the steps kept, in their order; `[steps, L]`, a copy."""
        return np.array(self._rows, dtype=np.float32).reshape(-1, self._num_layers)

    def restore(self, rows: np.ndarray) -> None:
        """Take over the last `size` steps that another window `kept`; ValueError for another number of layers."""
        if rows.ndim != 2 or rows.shape[1] != self._num_layers:
            raise ValueError(f"the losses of the last steps have shape {list(rows.shape)}")
        self._rows.clear()
        for row in rows.tolist():
            self.add(row)


def is_below(losses: np.ndarray, bound: float) -> bool:
    """Whether the mean of `losses` `[steps]` is below `bound` by twice its standard error; False for 5 or fewer."""
    if len(losses) <= 5:
        return False
    error = losses.std(ddof=1) / len(losses) ** 0.5
    return bool(losses.mean() + 2 * error < bound)
