"""The error of figures measured on held-out data: sums over blocks of the data, and the jackknife over them.

Batch i goes to block i modulo `BLOCKS`, and sums are kept per block: their memory does not grow with the data, and any
statistic of sums (a ratio over tokens, a root, an area under a curve, the difference of two models on the same
batches) gets its standard error by leaving out one block at a time. Noise is drawn anew for each batch, so the error
covers both the choice of the samples and the draws of the noise.

Assumed: blocks are independent and alike, as they are when the data is in random order. Data sorted by label gives
intervals too wide with few batches, too narrow with many. The commands shuffle held-out rows.

Source: Quenouille (1956), Tukey (1958): the delete-a-group jackknife.
"""

from collections.abc import Callable

import numpy as np
from scipy import stats


BLOCKS = 32


def pseudo_values(statistic: Callable[[np.ndarray], np.ndarray], blocks: np.ndarray) -> np.ndarray:
    """The share of each block in `statistic(sums)`, `[blocks, ...]`; for a mean over equal blocks, the blocks' means.

    Args:
        statistic (function): maps sums `[...]` to an array.
        blocks (float `[blocks, ...]`): the sums of each block, none of them empty.
    """
    count, total = len(blocks), blocks.sum(axis=0)
    left_out = np.stack([statistic(total - block) for block in blocks])  # [blocks, ...]
    return count * statistic(total) - (count - 1) * left_out


def check_confidence(confidence: float) -> None:
    """ValueError unless it is a level."""
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` is {confidence}; give a level between 0 and 1, such as 0.95.")


def radius(
    statistic: Callable[[np.ndarray], np.ndarray], blocks: np.ndarray | None, confidence: float = 0.95
) -> np.ndarray | float:
    """Half-width of the two-sided t interval of `statistic`; not a number where there are fewer than two blocks."""
    check_confidence(confidence)
    if blocks is None or len(blocks) < 2:
        return float("nan")
    values = pseudo_values(statistic, blocks)
    error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return stats.t.ppf(1 - (1 - confidence) / 2, len(values) - 1) * error
