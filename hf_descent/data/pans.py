"""Short pans over two photographs that come with scikit-learn: real images, known motion, nothing to download."""

import numpy as np
import torch

from ..extras import extra_needed


with extra_needed("The bundled photographs"):
    from scipy.ndimage import map_coordinates
    from sklearn.datasets import load_sample_images


LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
HELD_OUT_SHARE = 0.25  # share of each photograph's columns, at its right edge
PATCH_SIZE = 8  # side of the square window, in pixels
NUM_FRAMES = 10
MAX_SPEED = 1.0  # in either direction, in pixels per frame


def photo_pans(num_clips: int, held_out: bool = False) -> torch.Tensor:
    """Make clips of a window that moves over a gray photograph at constant speed, by bilinear interpolation.

    They are float32 `[num_clips, NUM_FRAMES, PATCH_SIZE ** 2]` in [0, 1], the same at every call. Training clips and
    `held_out` clips lie in separate regions of the photographs, so that no pixel is in both."""
    photos = np.stack(load_sample_images().images) @ LUMA / 255  # [photos, height, width]
    height, width = photos.shape[1:]
    border = round(width * (1 - HELD_OUT_SHARE))
    left = 0
    right = border
    if held_out:
        left = border
        right = width
    times = np.arange(NUM_FRAMES) - (NUM_FRAMES - 1) / 2  # [frames]

    low = MAX_SPEED * times[-1]
    margin = low + PATCH_SIZE + 1  # interpolation reads one pixel beyond the window

    generator = np.random.default_rng([0, held_out])
    photo = generator.integers(len(photos), size=(num_clips, 1, 1, 1))
    start = generator.uniform(
        (low, left + low), (height - margin, right - margin), size=(num_clips, 2)
    )
    speed = generator.uniform(-MAX_SPEED, MAX_SPEED, size=(num_clips, 2))

    corner = start[:, None] + speed[:, None] * times[:, None]  # [clips, frames, (row, column)]
    row, column = np.moveaxis(corner, -1, 0)[..., None, None]  # [clips, frames, 1, 1]
    window = np.arange(PATCH_SIZE)
    places = np.broadcast_arrays(
        photo, row + window[:, None], column + window
    )  # [clips, frames, patch, patch] each
    clips = map_coordinates(photos, places, order=1)  # [clips, frames, patch, patch]
    return torch.from_numpy(clips.reshape(num_clips, NUM_FRAMES, -1)).float()
