"""The clips of a video as what denoisers take: patches at one place over time, or whole frames."""

from collections.abc import Callable

import numpy as np
import torch
from datasets import Array2D, Dataset, Features


CLIPS_AT_ONCE = 50  # held and written together: Arrow has no place for 2**31 bytes in one write


def to_patches(frames: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Clips `[..., frames, height, width]` -> their patches `[..., places, frames, patch_size ** 2]`, row by row."""
    patches = frames.unflatten(-1, (-1, patch_size)).unflatten(-3, (-1, patch_size))  # [..., T, rows, p, columns, p]
    return patches.movedim((-4, -2), (-5, -4)).flatten(-2).flatten(-4, -3)  # [..., rows * columns, T, p * p]


def patch_rows(clips: Dataset, patch_size: int) -> Dataset:
    """One row per clip and place: `pixel_values`, uint8 `[num_frames, patch_size ** 2]`, in torch format."""

    def cut(batch):
        patches = to_patches(torch.from_numpy(np.stack(batch["frames"])), patch_size)  # [clips, places, T, values]
        return {"pixel_values": patches.flatten(0, 1).numpy()}

    return _expand(clips, cut, (clips.features["frames"].shape[0], patch_size**2))


def frame_rows(clips: Dataset) -> Dataset:
    """One row per frame: `pixel_values`, uint8 `[height, width]`, in torch format."""

    def cut(batch):
        return {"pixel_values": np.concatenate(batch["frames"])}

    return _expand(clips, cut, clips.features["frames"].shape[1:])


def _expand(clips: Dataset, cut: Callable, shape: tuple[int, ...]) -> Dataset:
    rows = clips.with_format("numpy").map(
        cut,
        batched=True,
        batch_size=CLIPS_AT_ONCE,
        remove_columns=clips.column_names,
        features=Features({"pixel_values": Array2D(shape, "uint8")}),
    )
    return rows.with_format("torch")
