"""Whether data sets share rows, as far as can be told without reading them.

Rows count as shared if they are the same objects, or lie at the same place in memory. Rows that are equal but stored
twice are not found.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Subset

from ..extras import is_dataset


def share_rows(first: Any, second: Any) -> bool:
    """Whether two data sets are known to have a row in common.

    It finds the same data set, a `Subset` of it, a slice of a list, the results of `select`, `filter` and
    `train_test_split` on a `datasets.Dataset`, and equal preparations of the same `datasets.Dataset`.
    """
    first, first_indices = _whole_and_part(first)
    second, second_indices = _whole_and_part(second)
    if first is None or second is None:
        return False
    if isinstance(first, list) and isinstance(second, list):
        rows = {id(row) for row in _chosen(first, first_indices)}
        return any(id(row) in rows for row in _chosen(second, second_indices))
    if first is second or _have_one_fingerprint(first, second):
        if first_indices is None or second_indices is None:
            return True
        return bool(np.isin(first_indices, second_indices).any())

    if is_dataset(first) and is_dataset(second):
        return _share_memory(first, first_indices, second, second_indices)
    return False


def _whole_and_part(data: Any) -> tuple[Any, np.ndarray | None]:
    """The data set that `data` is a part of, and the indices of its rows there (`None`: all of them)."""
    if isinstance(data, DataLoader):
        data = data.dataset
    indices = None
    while isinstance(data, Subset):
        part = np.asarray(data.indices, dtype=np.int64)
        indices = part if indices is None else part[indices]
        data = data.dataset
    return data, indices


def _chosen(rows: list, indices: Sequence[int] | None) -> list:
    if indices is None:
        return rows
    return [rows[index] for index in indices]


def _have_one_fingerprint(first: Any, second: Any) -> bool:
    if not (is_dataset(first) and is_dataset(second)):
        return False
    return first._fingerprint == second._fingerprint


def _share_memory(
    first: Any,
    first_indices: np.ndarray | None,
    second: Any,
    second_indices: np.ndarray | None,
) -> bool:
    """Whether two `datasets.Dataset` have a row of a column at the same place in memory."""
    columns = [name for name in first.column_names if name in second.column_names]
    if not columns:
        return False

    first_places = _places(first, columns[0], first_indices)
    second_places = _places(second, columns[0], second_indices)
    # Almost always no address is shared, and there is no need to look at single rows.
    shared = np.intersect1d(first_places[:, 0], second_places[:, 0])
    if not len(shared):
        return False

    rows = {tuple(place) for place in first_places.tolist()}
    return any(tuple(place) in rows for place in second_places.tolist())


def _places(dataset: Any, column: str, indices: np.ndarray | None) -> np.ndarray:
    """The place of each row in memory, `[rows, 2]`: the address of the buffer that holds its part of the column, and
    its number in there."""
    places = [np.empty((0, 2), dtype=np.int64)]
    for chunk in dataset.data.column(column).chunks:
        address = next((part.address for part in chunk.buffers() if part is not None), None)
        if address is None:  # all values are `None`
            continue
        numbers = np.arange(chunk.offset, chunk.offset + len(chunk))
        places.append(np.stack([np.full(len(chunk), address), numbers], axis=1))

    found = np.concatenate(places)
    if dataset._indices is not None and len(found):
        found = found[dataset._indices.column(0).to_numpy()]
    if indices is not None and len(found):
        found = found[indices]
    return found
