"""The clips of a video as what denoisers take: patches at one place over time, or whole frames."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from datasets import Array2D, Dataset, Features, IterableDataset


BYTES_AT_ONCE = 2**28  # Arrow has no place for 2**31 in one write


def to_patches(frames: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Clips `[..., frames, height, width]` -> their patches `[..., places, frames, patch_size ** 2]`, row by row.

    Raises:
        ValueError: height or width is no multiple of `patch_size`.
    """
    for size in frames.shape[-2:]:
        check_patch_size(size, patch_size)
    patches = frames.unflatten(-1, (-1, patch_size)).unflatten(-3, (-1, patch_size))  # [..., T, rows, p, columns, p]
    return patches.movedim((-4, -2), (-5, -4)).flatten(-2).flatten(-4, -3)  # [..., rows * columns, T, p * p]


def from_patches(patches: torch.Tensor, height: int) -> torch.Tensor:
    """The inverse of [`to_patches`], exactly: `[..., places, frames, values]` -> `[..., frames, height, width]`."""
    size = round(patches.shape[-1] ** 0.5)
    rows = height // size
    patches = patches.unflatten(-3, (rows, -1)).unflatten(-1, (size, size))  # [..., rows, columns, T, p, p]
    return patches.movedim((-5, -4), (-4, -2)).flatten(-2).flatten(-3, -2)


def patch_rows(clips: Dataset | IterableDataset, patch_size: int) -> Dataset | IterableDataset:
    """One row per clip and place: `pixel_values`, uint8 `[num_frames, patch_size ** 2]`, in torch format."""
    num_frames = clips.features["frames"].shape[0]
    features = Features({"pixel_values": Array2D((num_frames, patch_size**2), "uint8")})
    return _expand(clips, partial(_cut_patches, patch_size=patch_size), features)


def frame_rows(clips: Dataset | IterableDataset) -> Dataset | IterableDataset:
    """One row per frame: `pixel_values`, uint8 `[height, width]`, in torch format."""
    features = Features({"pixel_values": Array2D(clips.features["frames"].shape[1:], "uint8")})
    return _expand(clips, _cut_frames, features)


def collate(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of patch rows: `pixel_values` and `labels`, both the clean patches in [0, 1] `[batch, frames, values]`.

    The trainer's noise perturbs `pixel_values` and leaves the labels clean. Rows that are perturbed themselves have
    the clean patches as `labels`.
    """
    return _given_and_clean(rows, lambda patches: torch.stack(patches).float() / 255)


def collate_images(rows: Sequence[dict[str, torch.Tensor]], image_processor) -> dict[str, torch.Tensor]:
    """A batch of frame rows, made into color images by a model's own image processor `[batch, 3, height, width]`."""

    def processed(frames):
        images = [frame[None].expand(3, -1, -1) for frame in frames]
        return image_processor(images, return_tensors="pt", input_data_format="channels_first")["pixel_values"]

    return _given_and_clean(rows, processed)


def _given_and_clean(rows, batch_of) -> dict[str, torch.Tensor]:
    given = batch_of([torch.as_tensor(row["pixel_values"]) for row in rows])
    clean = batch_of([row["labels"] for row in rows]) if "labels" in rows[0] else given
    return {"pixel_values": given, "labels": clean}


def check_patch_size(frame_size: int, patch_size: int) -> None:
    """ValueError unless frames of that height or width can be cut into whole patches."""
    if frame_size % patch_size:
        raise ValueError(
            f"Frames of {frame_size} pixels cannot be cut into patches of `patch_size` {patch_size}: give a "
            "divisor, or another `frame_size`."
        )


def _expand(clips, cut, features: Features):
    given = {"batched": True, "batch_size": min(50, rows_at_once(clips.features["frames"].shape))}
    if isinstance(clips, Dataset):
        given["writer_batch_size"] = rows_at_once(features["pixel_values"].shape)
    rows = clips.with_format("numpy").map(cut, remove_columns=list(clips.features), features=features, **given)
    return rows.with_format("torch")


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows of bytes of this shape are held or written together."""
    return max(1, min(1000, BYTES_AT_ONCE // math.prod(shape)))


def _cut_patches(batch: dict[str, np.ndarray], patch_size: int) -> dict[str, np.ndarray]:
    patches = to_patches(torch.from_numpy(np.stack(batch["frames"])), patch_size)  # [clips, places, T, values]
    return {"pixel_values": patches.flatten(0, 1).numpy()}


def _cut_frames(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"pixel_values": np.concatenate(batch["frames"])}
