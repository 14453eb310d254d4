"""Sums over blocks of the data and over processes, and fingerprints of data and weights."""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor

from .uncertainty import BLOCKS


class BlockSums:
    """(metric sum, metric count, loss sum, items) over each block of the data, whose batches the processes of
    `accelerator` share."""

    def __init__(self, accelerator: Accelerator | None = None):
        self._gather = list if accelerator is None or accelerator.num_processes == 1 else gather_object
        self._sums: dict[int, np.ndarray] = {}  # block -> [..., 4]
        self._fingerprints: list[tuple[int, str]] = []  # (index, fingerprint) of each batch

    def add(self, index: int, sums: np.ndarray, fingerprint: str):
        """Add the sums `[..., 4]` of batch `index`, whose data has this fingerprint."""
        block = index % BLOCKS
        self._sums[block] = self._sums.get(block, 0.0) + sums
        self._fingerprints.append((index, fingerprint))

    def total(self) -> np.ndarray:
        """The sums of the blocks that hold data, over all processes, `[blocks, ..., 4]`; ValueError where no item was
        counted."""
        gathered = self._gather([self._sums])
        numbers = sorted(set().union(*gathered))
        blocks = [sum(sums[number] for sums in gathered if number in sums) for number in numbers]
        counts = np.array(blocks)[..., [1, 3]] if blocks else np.zeros((1, 2))
        if not (counts.sum(axis=0) > 0).all():
            raise ValueError("`dataset` is empty or holds no labels that count; give labelled held-out data.")
        return np.array(blocks)[counts.reshape(len(blocks), -1).any(axis=1)]

    def fingerprint(self) -> str:
        """A short text that differs for other data or other batches, over all processes."""
        return hashlib.sha256(repr(sorted(self._gather(self._fingerprints))).encode()).hexdigest()[:16]


def fingerprint_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A short text of named tensors: their shapes and all their bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def weights_fingerprint(model: nn.Module) -> str:
    """A short text that differs for other weights or buffers; with sharded ones all processes call."""
    named = (*model.named_parameters(), *model.named_buffers())
    return fingerprint_of_tensors((name, x.full_tensor() if isinstance(x, DTensor) else x) for name, x in named)
