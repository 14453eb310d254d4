"""What an evaluation keeps of each row of the data: the sum of its losses at every layer, and its items.

A row is an example; of packed texts a document. Intervals made of rows depend neither on their order nor on how they
were batched or shared among processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import gather_object


MOST_ROWS = 2**15  # of more, rows are added up in groups drawn at random
GROUPS = 2**12


class GatheredRows(NamedTuple):
    """The rows of all processes that have items."""

    sums: np.ndarray  # float64 [rows, layers + 1]
    whole_batches: int  # how many of these are whole batches
    # Of each earlier reading float64 [rows, 2], its loss and items of these very rows, and zeros of those that it left
    # out; none where not the same rows can be told.
    earlier: list[np.ndarray]


@dataclass(frozen=True)
class RowSums:
    """The sums of the rows that this process has read."""

    parts: tuple[torch.Tensor, ...] = ()  # [rows, layers + 1] each: losses and, last, items
    rows: int = 0  # in `parts`
    read: int = 0  # rows so far, grouped or not
    groups: np.ndarray | None = (
        None  # float64 [GROUPS, layers + 1], of rows before those in `parts`
    )
    # Batches whose loss could not be split into rows, each of which is then one row; a scalar tensor.
    whole_batches: torch.Tensor | int = 0

    def plus(self, sums: torch.Tensor, is_split: torch.Tensor | bool = True) -> "RowSums":
        """These, with the rows of one more batch, `[rows, layers + 1]`."""
        whole = 1 - torch.as_tensor(is_split, device=sums.device).int()
        more = replace(
            self,
            parts=(*self.parts, sums),
            rows=self.rows + len(sums),
            read=self.read + len(sums),
            whole_batches=self.whole_batches + whole,
        )
        if more.rows <= MOST_ROWS:
            return more
        first = more.read - more.rows
        groups = _grouped(more._array(), first, more.groups)
        return replace(more, parts=(), rows=0, groups=groups)

    def total(self) -> np.ndarray:
        """The sums over all rows of this process, float64 `[layers + 1]`; zeros `[1]` where it has none."""
        total = self._array().sum(axis=0)
        return total if self.groups is None else self.groups.sum(axis=0) + total

    def gathered(
        self, over_processes: bool = True, earlier: Sequence[Mapping[int, torch.Tensor]] = ()
    ) -> GatheredRows:
        """The rows of all processes, each of which calls; of more than `MOST_ROWS` rows, groups of them.

        `earlier` are readings of some batches of the same data in this process, `[rows, 2]` by their numbers.
        """
        mine = (
            self._array(),
            self.read,
            self.groups,
            int(self.whole_batches),
            [self._beside(reading) for reading in earlier],
        )
        found = gather_object([mine]) if over_processes else [mine]
        rows = [part for part, *_ in found if len(part)]
        groups = [part for _, _, part, *_ in found if part is not None]
        whole_batches = sum(count for *_, count, _ in found)
        if not rows and not groups:
            return GatheredRows(np.zeros((0, 1)), 0, [])

        if not groups and sum(map(len, rows)) <= MOST_ROWS:
            units = np.concatenate(rows)
            counted = units[:, -1] > 0
            readings = [np.concatenate(parts)[counted] for parts in zip(*(e for *_, e in found))]
            return GatheredRows(units[counted], whole_batches, readings)
        units = sum(groups) if groups else None
        for process, (part, read, *_) in enumerate(found):
            if len(part):
                units = _grouped(part, read - len(part) + 2**40 * process, units)
        return GatheredRows(units[units[:, -1] > 0], whole_batches, [])

    def _beside(self, reading: Mapping[int, torch.Tensor]) -> np.ndarray:
        """An earlier reading of these rows, `[rows, 2]`; zeros for batches that it left out or had otherwise."""
        found = [np.zeros((0, 2))]
        for number, part in enumerate(self.parts):
            earlier = reading.get(number)
            if earlier is not None and earlier.shape == (len(part), 2):
                found.append(earlier.cpu().double().numpy())
            else:
                found.append(np.zeros((len(part), 2)))
        return np.concatenate(found)

    def _array(self) -> np.ndarray:
        if not self.parts:
            return np.zeros((0, 1))
        return torch.cat(self.parts).cpu().double().numpy()


def _grouped(rows: np.ndarray, first: int, groups: np.ndarray | None) -> np.ndarray:
    """`groups` with these rows, which are numbered from `first`, each in a group that its number draws."""
    if groups is None:
        groups = np.zeros((GROUPS, rows.shape[1]))
    groups = groups.copy()
    np.add.at(groups, _drawn_groups(np.arange(first, first + len(rows))), rows)
    return groups


def _drawn_groups(numbers: np.ndarray) -> np.ndarray:
    """For each number one of the groups, as if drawn at random: by the mixing steps of the generator SplitMix64."""
    mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(GROUPS)


def rounded(sums: np.ndarray) -> np.ndarray:
    """Seven digits of each, as float32 has them, so that a file of them stays small."""
    size = np.floor(np.log10(np.abs(sums), where=sums != 0, out=np.zeros_like(sums)))
    unit = 10.0 ** (6 - size)
    return np.round(sums * unit) / unit
