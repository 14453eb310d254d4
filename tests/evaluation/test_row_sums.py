"""What is kept of the rows of an evaluation: the same however they were batched, and at most so much of it."""

import numpy as np
import pytest
import torch

from hf_descent.evaluation import row_sums
from hf_descent.evaluation.price import on_same_rows
from hf_descent.evaluation.row_sums import RowSums, rounded


def read(rows, size):
    found = RowSums()
    for start in range(0, len(rows), size):
        found = found.plus(torch.from_numpy(rows[start : start + size]))
    return found


def test_rows_are_kept_whatever_the_batch_size_and_those_without_items_left_out():
    rows = np.random.default_rng(0).random((40, 3))
    rows[::4] = 0
    for size in (1, 7, 40):
        sums, whole_batches, _ = read(rows, size).gathered(False)
        np.testing.assert_array_equal(sums, rows[rows[:, -1] > 0])
        assert whole_batches == 0


def test_more_rows_are_added_up_in_groups_which_keep_means_and_their_error(monkeypatch):
    """Neighbours are opposites here: groups of consecutive rows would hide the spread."""
    monkeypatch.setattr(row_sums, "MOST_ROWS", 1000)
    monkeypatch.setattr(row_sums, "GROUPS", 500)
    losses = np.where(np.arange(20_000) % 2, 1.4, 0.0)
    rows = np.column_stack([losses, np.ones_like(losses)])
    sums, *_ = read(rows, 64).gathered(False)
    assert len(sums) == 500
    np.testing.assert_allclose(sums.sum(0), rows.sum(0))
    off = sums[:, 0] - sums[:, 1] * losses.mean()
    error = off.std(ddof=1) / np.sqrt(500) / sums[:, 1].mean()
    assert 0.9 < error / (losses.std() / np.sqrt(20_000)) < 1.1


@pytest.mark.parametrize("size", [4, 8])
def test_rows_of_several_processes_are_joined_in_the_order_of_the_data(monkeypatch, size):
    """Else rows of one evaluation would be compared with other rows of another, in other batches or processes."""
    rows = np.random.default_rng(0).random((50, 2)) + 0.1
    batches = [rows[start : start + size] for start in range(0, len(rows), size)]
    parts = [batches[0::3], batches[1::3], batches[2::3], []]
    earlier = [[part[:, :2] * 2 for part in mine] for mine in parts]

    def gather(mine):
        # A process without a batch does not know the number of layers.
        return [(mine, 1, [before]) for mine, before in zip(parts, earlier)]

    monkeypatch.setattr(row_sums, "gather_object", gather)
    sums, whole_batches, (beside,) = RowSums().gathered()
    np.testing.assert_array_equal(sums, rows)
    np.testing.assert_array_equal(beside, 2 * rows)
    assert whole_batches == 4
    monkeypatch.setattr(row_sums, "MOST_ROWS", 40)
    sums, *_ = RowSums().gathered()
    np.testing.assert_allclose(sums.sum(0), rows.sum(0))
    assert 40 < len(sums) < 50


def test_an_earlier_reading_of_some_batches_is_put_beside_their_rows():
    rows = np.random.default_rng(0).random((20, 3)) + 0.1
    rows[9] = 0  # has no items
    earlier = {0: torch.full((8, 2), 5.0), 1: torch.full((7, 2), 6.0), 2: torch.full((4, 2), 7.0)}
    found = read(rows, 8).gathered(False, [earlier])
    (beside,) = found.earlier
    # The second batch had other rows then.
    assert beside[:, 0].tolist() == [5] * 8 + [0] * 7 + [7] * 4 and len(found.sums) == 19


def test_an_earlier_reading_of_grouped_rows_is_kept_and_compared_without_pairs(monkeypatch):
    monkeypatch.setattr(row_sums, "MOST_ROWS", 100)
    monkeypatch.setattr(row_sums, "GROUPS", 50)
    rows = np.random.default_rng(0).uniform(1, 1.1, (400, 2))
    rows[:, -1] = 1
    earlier = {
        number: torch.from_numpy(rows[start : start + 8] * [0.9, 1])
        for number, start in enumerate(range(0, 400, 8))
    }
    found = read(rows, 8).gathered(False, [earlier])
    assert len(found.sums) <= 50 and len(found.earlier[0]) == 400
    (reference,) = on_same_rows(["before"], found.earlier, len(found.sums))
    assert reference.rows is None and reference.loss == pytest.approx(0.9 * rows[:, 0].mean())
    assert reference.is_exceeded(found.sums, share=0.05)
    assert not reference.is_exceeded(found.sums, share=0.15)


def test_batches_that_could_not_be_split_are_counted():
    found = RowSums().plus(torch.ones(4, 2)).plus(torch.ones(1, 2), torch.tensor(False))
    assert found.gathered(False).whole_batches == 1


def test_seven_digits_are_kept():
    values = np.array([[123456.789, -0.0012345678, 0.0, 3.0]])
    np.testing.assert_allclose(rounded(values), [[123456.8, -0.001234568, 0.0, 3.0]], rtol=1e-12)
