"""Patches of frames; the rows made of them are tested with the clips of videos (test_data_video.py)."""

import pytest
import torch

from hf_descent.data.patches import from_patches, to_patches


def test_patches_are_cut_row_by_row_and_put_back_exactly():
    frames = torch.rand(3, 4, 16, 24)  # [clips, frames, height, width]
    patches = to_patches(frames, 8)
    assert patches.shape == (3, 6, 4, 64)
    for place in range(6):
        row, column = divmod(place, 3)
        expected = frames[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].flatten(2)
        assert torch.equal(patches[:, place], expected)
    assert torch.equal(from_patches(patches, 16), frames)
    assert torch.equal(from_patches(to_patches(frames[0], 2), 16), frames[0])
    with pytest.raises(ValueError, match="24 pixels .* `patch_size` 5"):
        to_patches(frames[..., :15, :], 5)
