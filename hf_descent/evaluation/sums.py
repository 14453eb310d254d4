"""Sums over blocks of the data, over processes, and on disk while they grow."""

import hashlib
import inspect
import json
import os
import time
from collections.abc import Iterable, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets.fingerprint import Hasher
from torch import nn
from torch.distributed.tensor import DTensor

from ..files import whole_file
from .uncertainty import BLOCKS


SAVE_SECONDS = 30  # between two saves of a growing sum


class BlockSums:
    """(metric sum, metric count, loss sum, items) of each block of the data, batch by batch.

    Args:
        shape (sequence of `int`): what the sums are over, besides blocks: levels and draws, or layers.
        accelerator (`Accelerator`, *optional*): batches are shared among its processes, in turn.
        path (`str`, *optional*): one process keeps the growing sums in `<path>.partial`, and goes on from there.
        key: anything that JSON can hold; partial sums with another key are not used.
    """

    def __init__(
        self,
        shape: Sequence[int],
        accelerator: Accelerator | None = None,
        path: str | None = None,
        key: Any = None,
    ):
        self.step = 1 if accelerator is None else accelerator.num_processes
        self.next_index = 0 if accelerator is None else accelerator.process_index
        self._blocks = np.zeros((BLOCKS, *shape, 4))
        self._marks: list[tuple] = []  # (index, *marks) of the batches counted
        self._key = json.dumps(key, sort_keys=True)
        self._path = f"{path}.partial" if path is not None and self.step == 1 else None
        self._saved = time.monotonic()
        if self._path is not None and os.path.isfile(self._path):
            with np.load(self._path) as partial:
                if "marks" in partial and str(partial["key"]) == self._key:
                    self._blocks, self.next_index = partial["blocks"], int(partial["next_index"])
                    self._marks = [(index, *marks) for index, marks in enumerate(partial["marks"].tolist())]

    def add(self, index: int, sums: np.ndarray, *marks: str):
        """Count the sums `[*shape, 4]` of batch `index`, which each of `marks` tells from others."""
        self._blocks[index % BLOCKS] += sums
        self._marks.append((index, *marks))
        self.next_index = index + self.step
        if self._path is not None and time.monotonic() - self._saved > SAVE_SECONDS:
            marks = [marks for _, *marks in self._marks]
            with whole_file(self._path, "wb") as file:
                np.savez(file, blocks=self._blocks, next_index=self.next_index, key=self._key, marks=marks)
            self._saved = time.monotonic()

    def total(self) -> np.ndarray:
        """The sums of the blocks that hold data, over all processes, `[blocks, *shape, 4]`.

        Raises:
            ValueError: nothing was counted.
        """
        blocks = sum(gather_object([self._blocks])) if self.step > 1 else self._blocks
        counts = blocks[..., [1, 3]]
        if not (counts.sum(axis=0) > 0).all():
            raise ValueError("`dataset` is empty or holds no labels that count; give labelled held-out data.")
        return blocks[counts.reshape(BLOCKS, -1).any(axis=1)]

    def fingerprints(self) -> list[str]:
        """Of each mark, a short text that tells the data apart, over all processes."""
        return fingerprints_of(gather_object(self._marks) if self.step > 1 else self._marks)

    def forget(self):
        """Remove the partial sums, once the result itself is on disk."""
        if self._path is not None and os.path.isfile(self._path):
            os.remove(self._path)


def fingerprints_of(marks: Iterable[tuple]) -> list[str]:
    """One short text for each mark of batches, (index, *marks) each, in any order."""
    indices, *kinds = zip(*sorted(marks))
    return [hashlib.sha256(repr(list(zip(indices, kind))).encode()).hexdigest()[:16] for kind in kinds]


def fingerprint_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One short text of named tensors: their shapes and all their bytes."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def fingerprint_of_functions(*functions: Any) -> str | None:
    """A short text of functions, or objects that are called: their code and what they hold (closures, defaults,
    attributes), but not the code of what they call; `None` where that cannot be told. Some may be names, or not given.
    """
    inner = [inspect.unwrap(getattr(function, "func", function)) for function in functions]  # of partials
    if any(map(inspect.ismethod, inner)):  # what it is bound to may be a whole trainer, its model included
        return None
    try:
        return Hasher.hash([functions, *map(_source, inner)])
    except Exception:  # whatever pickling the things that they hold raises
        return None


def _source(function: Any) -> Any:
    """What pickling leaves out of what can be imported, of which it keeps the name alone."""
    if inspect.isfunction(function):
        return function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)
    classes = [kind for kind in type(function).__mro__ if kind.__module__.split(".")[0] not in ("builtins", "torch")]
    held = [item for kind in classes for item in vars(kind).items()]
    kept = FunctionType | int | float | str
    return [(name, getattr(value, "__code__", value)) for name, value in held if isinstance(value, kept)]


def weights_fingerprint(model: nn.Module) -> str:
    """A short text that tells models with different weights or buffers apart; with sharded ones all processes call."""
    named = (*model.named_parameters(), *model.named_buffers())
    return fingerprint_of_tensors((name, x.full_tensor() if isinstance(x, DTensor) else x) for name, x in named)
