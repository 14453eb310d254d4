"""Pans over photographs whose brightness is the column, so that every pixel says where it was taken."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_descent.data import pans


WIDTH = 100


@pytest.fixture
def columns(monkeypatch):
    """Maps `held_out` to clips of columns `[clips, frames, rows, columns]`; of rows, with the last two swapped."""

    def clips(held_out, axis=1):
        photo = np.repeat(255 * np.indices((40, WIDTH))[axis, ..., None] / WIDTH, 3, axis=2)
        monkeypatch.setattr(
            pans, "load_sample_images", lambda: SimpleNamespace(images=[photo, photo])
        )
        found = WIDTH * pans.photo_pans(64, held_out).double().unflatten(-1, (pans.PATCH_SIZE,) * 2)
        return found if axis else found.mT

    return clips


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_window_moves_at_constant_speed(columns, held_out, axis):
    found = columns(held_out, axis)
    places = torch.arange(pans.PATCH_SIZE).double()
    torch.testing.assert_close(
        found, (found[..., :1, :1] + places).expand_as(found), atol=1e-4, rtol=0
    )
    steps = found[:, 1:, 0, 0] - found[:, :-1, 0, 0]  # [clips, frames - 1]
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps), atol=1e-4, rtol=0)
    assert 0.5 < steps.abs().max() <= pans.MAX_SPEED + 1e-4
    assert len(steps[:, 0].unique()) == 64


def test_no_pixel_is_in_both_splits_and_every_call_gives_the_same(columns):
    border = WIDTH * (1 - pans.HELD_OUT_SHARE)
    assert columns(False).max() <= border - 1 and columns(True).min() >= border
    assert torch.equal(columns(True), columns(True))
