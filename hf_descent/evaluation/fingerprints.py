"""Fingerprints: short texts that are the same for the same data in the same batches."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import Dataset, Subset

from .row_sums import of_all_processes


# Rows sampled of a data set. Data sets that differ in a twentieth of their rows hardly ever agree in all of these.
SAMPLED_ROWS = 64
SEED = 0  # seed of the order of a sample


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
        """The text of the batches of all processes; every process calls it."""
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


def sample_of(data: Dataset | list, most_rows: int = SAMPLED_ROWS) -> Subset:
    """At most `most_rows` rows of data: spread evenly over them, in a random order that is always the same."""
    chosen = np.linspace(0, len(data) - 1, min(len(data), most_rows)).astype(int)
    return Subset(data, np.random.default_rng(SEED).permutation(chosen).tolist())


def fingerprint_of_examples(count: int, examples: Iterable[Mapping[str, Any]]) -> str | None:
    """A short text of some of the `count` examples of a data set; `None` if they hold no tensors. Each is collated by
    itself, since padding depends on the other rows of a batch."""
    tensors = [
        (f"{count} {name}", value)
        for example in examples
        for name, value in sorted(example.items())  # columns may come in any order
        if torch.is_tensor(value) and not _is_mask_of_all(name, value)
    ]
    return fingerprint_of_tensors(tensors) if tensors else None


def _is_mask_of_all(name: str, value: torch.Tensor) -> bool:
    """Whether this is a mask that hides nothing, which some collators leave out."""
    return name == "attention_mask" and bool(value.all())
