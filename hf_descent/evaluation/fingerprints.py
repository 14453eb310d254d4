"""Fingerprints of data: short texts by which results tell whether they are of the same data in the same batches."""

import hashlib
from collections.abc import Iterable

import torch
from accelerate import Accelerator

from .row_sums import of_all_processes


class Fingerprint:
    """A short text that differs for other data, and for other batches of the same data; the processes of `accelerator`
    share the batches."""

    def __init__(self, accelerator: Accelerator | None = None):
        self._accelerator = accelerator
        self._batches: list[tuple[int, str]] = []  # index and fingerprint

    def add(self, index: int, batch: str) -> None:
        """Add the fingerprint of batch `index`."""
        self._batches.append((index, batch))

    def text(self) -> str:
        """The text of the batches of all processes, each of which calls."""
        batches = sorted(of_all_processes(self._batches, self._accelerator))
        return digest_of(repr(batches))


def digest_of(text: str) -> str:
    """A short text that differs for another `text`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A short text of named tensors: their shapes and all their bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
