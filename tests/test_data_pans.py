"""Pans over photographs whose brightness is the column, so that every pixel says where it was taken."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_descent.data import pans


WIDTH = 100


@pytest.fixture
def columns(monkeypatch):
    """Maps `held_out` to clips of columns `[clips, frames, rows, columns]`."""
    photo = np.broadcast_to(255 * np.arange(WIDTH) / WIDTH, (3, 40, WIDTH)).transpose(1, 2, 0)
    monkeypatch.setattr(pans, "load_sample_images", lambda: SimpleNamespace(images=[photo, photo]))
    return lambda held_out: WIDTH * pans.photo_pans(64, held_out).double().unflatten(-1, (pans.PATCH_SIZE,) * 2)


@pytest.mark.parametrize("held_out", [False, True])
def test_a_window_moves_at_constant_speed(columns, held_out):
    found = columns(held_out)
    places = torch.arange(pans.PATCH_SIZE).double()
    torch.testing.assert_close(found, (found[..., :1, :1] + places).expand_as(found), atol=1e-4, rtol=0)
    steps = found[:, 1:, 0, 0] - found[:, :-1, 0, 0]  # [clips, frames - 1]
    torch.testing.assert_close(steps, steps[:, :1].expand_as(steps), atol=1e-4, rtol=0)
    assert 0.5 < steps.abs().max() <= pans.MAX_SPEED + 1e-4
    assert len(steps[:, 0].unique()) == 64


def test_no_pixel_is_in_both_splits_and_every_call_gives_the_same(columns):
    border = WIDTH * (1 - pans.HELD_OUT_SHARE)
    assert columns(False).max() <= border - 1 and columns(True).min() >= border
    assert torch.equal(columns(True), columns(True))
