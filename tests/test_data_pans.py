import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_images

from hf_descent.data.pans import photo_pans


BORDER = 480  # column of the 640 from which on pixels are held out
PHOTOS = [image @ np.array([0.299, 0.587, 0.114]) / 255 for image in load_sample_images().images]


def locate(window, photo):
    """Sub-pixel (row, column) of a bilinearly interpolated 8x8 window in `photo`; None where it is not from there."""
    neighbourhoods = np.lib.stride_tricks.sliding_window_view(photo, (9, 9))
    distance = np.abs(neighbourhoods[..., :8, :8] - window).mean((2, 3))
    for flat in distance.ravel().argsort()[:30]:
        row, column = np.unravel_index(flat, distance.shape)
        corners = [neighbourhoods[row, column, i : i + 8, j : j + 8].ravel() for i in (0, 1) for j in (0, 1)]
        mix = np.linalg.lstsq(np.stack(corners, axis=1), window.ravel(), rcond=None)[0]
        error = np.abs(mix @ corners - window.ravel()).max()
        if error < 1e-5 and mix.min() > -1e-3:
            return row + mix[2] + mix[3], column + mix[1] + mix[3]
    return None


@pytest.mark.parametrize("held_out", [False, True])
def test_clips_are_steady_motions_inside_their_region(held_out):
    clips = photo_pans(60, held_out=held_out, num_frames=4, max_speed=2.0).double().numpy()
    assert clips.shape == (60, 4, 64)
    textured = clips[clips.std((1, 2)) > 0.1][:4]  # where places are not ambiguous
    for clip in textured:
        paths = [[locate(frame.reshape(8, 8), photo) for frame in clip] for photo in PHOTOS]
        (path,) = [np.array(path) for path in paths if None not in path]  # one photograph: [frames, (row, column)]
        steps = np.diff(path, axis=0)
        np.testing.assert_allclose(steps, steps[:1].repeat(3, axis=0), atol=0.02)
        assert 0 < np.abs(steps).max() <= 2.0
        first, last = path[:, 1].min(), path[:, 1].max() + 8
        assert (first >= BORDER) if held_out else (last < BORDER)


def test_the_seed_fixes_the_clips():
    assert torch.equal(photo_pans(5, seed=1), photo_pans(5, seed=1))
    assert not torch.equal(photo_pans(5, seed=1), photo_pans(5, seed=2))
    clips = photo_pans(500)
    assert clips.dtype == torch.float32
    assert 0 <= clips.min() < 0.1 < 0.9 < clips.max() <= 1


def test_motion_that_leaves_the_region_is_refused():
    with pytest.raises(ValueError, match="max|8 pixels.*20 pixels.*lower"):
        photo_pans(5, held_out=True, max_speed=20.0)
