"""What an evaluation keeps of each row of the data: the sums of its losses or its metric, and the number of items.

A row is an example, or a document of packed texts. Intervals made of rows depend neither on their order nor on how
they were batched or shared among processes. Two evaluations of the same data have their rows in the same order, so
that they can be compared in pairs.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


MOST_ROWS = 2**15  # if there are more, they are added up in groups drawn at random
GROUPS = 2**12


class GatheredRows(NamedTuple):
    """The rows of all processes that have items."""

    sums: np.ndarray  # float64 [rows, layers + 1], in the order of the data or in groups
    whole_batches: int  # how many of these are whole batches
    # For each earlier reading float64 [rows, 2], its loss and items of the rows, before they were grouped, and zeros
    # for rows that it left out.
    earlier: list[np.ndarray]


@dataclass(frozen=True)
class RowSums:
    """The sums of the rows that this process has read."""

    parts: tuple[torch.Tensor, ...] = ()  # [rows, layers + 1] each: losses and, last, items
    # The number of batches whose loss could not be split into rows; each counts as one row. A scalar tensor.
    whole_batches: torch.Tensor | int = 0

    def plus(self, sums: torch.Tensor, is_split: torch.Tensor | bool = True) -> "RowSums":
        """The sums with the rows of one more batch, `[rows, layers + 1]`."""
        is_whole = 1 - torch.as_tensor(is_split, device=sums.device).int()
        return RowSums((*self.parts, sums), self.whole_batches + is_whole)

    def gathered(
        self, over_processes: bool = True, earlier: Sequence[Mapping[int, torch.Tensor]] = ()
    ) -> GatheredRows:
        """The rows of all processes; every process calls it. More than `MOST_ROWS` rows are added up in groups.

        `earlier` are readings of some batches of the same data in this process: batch number -> `[rows, 2]`.
        """
        mine = (
            [part.cpu().double().numpy() for part in self.parts],
            int(self.whole_batches),
            [self._beside(reading) for reading in earlier],
        )
        processes = gather_object([mine]) if over_processes else [mine]
        rows = _in_order([parts for parts, _, _ in processes])
        whole_batches = sum(count for _, count, _ in processes)
        has_items = rows[:, -1] > 0
        readings = zip(*(beside for _, _, beside in processes))
        beside = [_in_order(parts)[has_items] for parts in readings]
        kept = rows
        if len(rows) > MOST_ROWS:
            kept = _grouped(rows)
        return GatheredRows(kept[kept[:, -1] > 0], whole_batches, beside)

    def _beside(self, reading: Mapping[int, torch.Tensor]) -> list[np.ndarray]:
        """An earlier reading of these parts, `[rows, 2]` each; zeros for batches that it left out, or that had other
        rows."""
        parts = []
        for number, part in enumerate(self.parts):
            earlier = reading.get(number)
            if earlier is None or earlier.shape != (len(part), 2):
                earlier = torch.zeros(len(part), 2)
            parts.append(earlier.cpu().double().numpy())
        return parts


class MetricRows:
    """(metric sum, metric count) of each row of the data, whose batches the processes of `accelerator` share."""

    def __init__(self, accelerator: Accelerator | None = None):
        self._accelerator = accelerator
        self._batches: list[tuple[int, np.ndarray]] = []  # index and [rows, ..., 2]

    def add(self, index: int, sums: np.ndarray) -> None:
        """Add the rows `[rows, ..., 2]` of batch `index`."""
        self._batches.append((index, sums))

    def gathered(self) -> np.ndarray:
        """The rows of all processes that count something, in the order of the data, `[rows, ..., 2]`.

        Every process calls it. More than `MOST_ROWS` rows are added up in groups. ValueError if nothing counts.
        """
        batches = of_all_processes(self._batches, self._accelerator)
        batches.sort(key=lambda batch: batch[0])
        parts = [sums for _, sums in batches]
        if not parts:
            raise no_labels()

        rows = np.concatenate(parts)
        if len(rows) > MOST_ROWS:
            rows = _grouped(rows)

        counts = rows[..., 1].reshape(len(rows), -1)
        if not (counts.sum(axis=0) > 0).all():
            raise no_labels()
        return rows[counts.any(axis=1)]


def of_all_processes(values: list, accelerator: Accelerator | None) -> list:
    """The lists of all processes of `accelerator`, one after the other; every process calls it."""
    if accelerator is None or accelerator.num_processes == 1:
        return list(values)
    return gather_object(values)


def no_labels() -> ValueError:
    """The error for data on which nothing can be measured."""
    return ValueError(
        "`dataset` is empty or has no labels that count; give labelled held-out data."
    )


def _in_order(processes: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """The rows of all processes in the order of the data. The processes take its batches in turns."""
    turns = itertools.zip_longest(*processes)
    known = [part for turn in turns for part in turn if part is not None]
    if not known:
        return np.zeros((0, 1))
    return np.concatenate(known)


def _grouped(rows: np.ndarray) -> np.ndarray:
    """The sums of `GROUPS` groups of rows `[n, ...]`, drawn at random, alike for all data of as many rows."""
    drawn = np.random.default_rng(0).integers(GROUPS, size=len(rows))
    groups = np.zeros((GROUPS, *rows.shape[1:]))
    np.add.at(groups, drawn, rows)
    return groups


def rounded(sums: np.ndarray) -> np.ndarray:
    """The sums with seven digits, as float32 has them, so that their file stays small."""
    size = np.floor(np.log10(np.abs(sums), where=sums != 0, out=np.zeros_like(sums)))
    unit = 10.0 ** (6 - size)
    return np.round(sums * unit) / unit
