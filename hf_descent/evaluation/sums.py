"""Sums over blocks of the data, the error of figures made of them, and fingerprints of data.

Batch i goes to block i modulo `BLOCKS`, so the memory of the sums does not grow with the data. Any statistic of sums
(a ratio over tokens, a root, an area under a curve, the difference of two models on the same batches) gets its
standard error by the jackknife: leaving out one block at a time. Noise is drawn anew for each batch, so the error
covers both the choice of the samples and the draws of the noise.

Assumed: blocks are independent and alike, as they are when the data is in random order. Data sorted by label gives
intervals too wide with few batches, too narrow with many. The commands shuffle held-out rows. Losses of layers and the
accuracy of a classifier have intervals made of rows instead (see `intervals`).

Source: Quenouille (1956), Tukey (1958): the delete-a-group jackknife.
"""

import hashlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from ..special import student_t_quantile


BLOCKS = 32


def pseudo_values(statistic: Callable[[np.ndarray], np.ndarray], blocks: np.ndarray) -> np.ndarray:
    """The share of each of `blocks`, sums `[blocks, ...]` of which none is of no data, in the array `statistic(sums)`;
    `[blocks, ...]`. For a mean over equal blocks, the blocks' means."""
    count = len(blocks)
    total = blocks.sum(axis=0)
    left_out = np.stack([statistic(total - block) for block in blocks])  # [blocks, ...]
    return count * statistic(total) - (count - 1) * left_out


def check_confidence(confidence: float) -> None:
    """ValueError unless it is a level."""
    if not 0 < confidence < 1:
        raise ValueError(
            f"`confidence` is {confidence}; give a level between 0 and 1, such as 0.95."
        )


def radius(
    statistic: Callable[[np.ndarray], np.ndarray],
    blocks: np.ndarray | None,
    confidence: float = 0.95,
) -> np.ndarray | float:
    """Half-width of the two-sided t interval of `statistic`; not a number where there are fewer than two blocks."""
    check_confidence(confidence)
    if blocks is None or len(blocks) < 2:
        return float("nan")
    values = pseudo_values(statistic, blocks)
    error = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return student_t_quantile(1 - (1 - confidence) / 2, len(values) - 1) * error


class BlockSums:
    """(metric sum, metric count, loss sum, items) over each block of the data, whose batches the processes of
    `accelerator` share."""

    def __init__(self, accelerator: Accelerator | None = None):
        self._gather = _gathering(accelerator)
        self._sums: dict[int, np.ndarray] = {}  # block -> [..., 4]

    def add(self, index: int, sums: np.ndarray) -> None:
        """Add the sums `[..., 4]` of batch `index`."""
        block = index % BLOCKS
        self._sums[block] = self._sums.get(block, 0.0) + sums

    def total(self) -> np.ndarray:
        """The sums of the blocks that hold data, over all processes, `[blocks, ..., 4]`; ValueError without items."""
        processes = self._gather([self._sums])
        numbers = sorted(set().union(*processes))
        blocks = [sum(sums[number] for sums in processes if number in sums) for number in numbers]
        counts = np.array(blocks)[..., [1, 3]] if blocks else np.zeros((1, 2))
        if not (counts.sum(axis=0) > 0).all():
            raise ValueError(
                "`dataset` is empty or has no labels that count; give labelled held-out data."
            )

        has_items = counts.reshape(len(blocks), -1).any(axis=1)
        return np.array(blocks)[has_items]


class Fingerprint:
    """A short text that differs for other data, and for other batches of the same data; the processes of `accelerator`
    share the batches."""

    def __init__(self, accelerator: Accelerator | None = None):
        self._gather = _gathering(accelerator)
        self._batches: list[tuple[int, str]] = []  # index and fingerprint

    def add(self, index: int, batch: str) -> None:
        """Add the fingerprint of batch `index`."""
        self._batches.append((index, batch))

    def text(self) -> str:
        """The text of the batches of all processes, each of which calls."""
        batches = sorted(self._gather(self._batches))
        return hashlib.sha256(repr(batches).encode()).hexdigest()[:16]


def _gathering(accelerator: Accelerator | None) -> Callable[[list], list]:
    """What puts the lists of all processes together."""
    if accelerator is None or accelerator.num_processes == 1:
        return list
    return gather_object


def fingerprint_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A short text of named tensors: their shapes and all their bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
