"""Makes inputs of a denoiser from the clips of a video: patches at one place over time, or whole frames."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from datasets import Array2D, Dataset, Features
from transformers import AutoImageProcessor, AutoModelForImageToImage, PreTrainedModel

from ..loading import weights_of
from ..models import ViTForDenoising
from .video import CLIPS_AT_ONCE


class DenoisingTask:
    """The form in which a denoiser takes frames."""

    pixel_range = 1.0  # of the model's input

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch of rows: `pixel_values`, which alone the trainer's noise perturbs, and the clean `labels` of that
        shape, which rows that are perturbed themselves bring with them."""
        pixels = self.batch([torch.as_tensor(row["pixel_values"]) for row in rows])

        clean = pixels
        if "labels" in rows[0]:
            clean = self.batch([row["labels"] for row in rows])
        return {"pixel_values": pixels, "labels": clean}


class PatchTask(DenoisingTask):
    """Rows are the patches `[frames, values]` of a clip at one place."""

    def __init__(self, patch_size: int):
        self.patch_size = patch_size

    def rows(self, clips: Dataset) -> Dataset:
        """One row per clip and place: `pixel_values`, uint8 `[num_frames, patch_size ** 2]`, in torch format."""
        num_frames, size, _ = clips.features["frames"].shape
        if size % self.patch_size:
            raise ValueError(
                f"`patch_size` is {self.patch_size}; give one that divides `frame_size`, {size}."
            )

        def cut(frames):
            patches = to_patches(torch.from_numpy(np.stack(frames)), self.patch_size)
            return patches.flatten(0, 1).numpy()  # [clips * places, frames, values]

        return _expand(clips, cut, (num_frames, self.patch_size**2))

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """The model's input for the pixels of rows, `[batch, frames, values]`."""
        return torch.stack(list(pixels)).float() / 255


class ImageTask(DenoisingTask):
    """Rows are frames, made into images by the model's own processor; see [`PatchTask`]."""

    def __init__(self, model_name_or_path: str):
        processor = AutoImageProcessor.from_pretrained(model_name_or_path)
        if processor.do_normalize:
            # One scale for all channels, or the RMSE would weigh them differently.
            scale = float(np.mean(processor.image_std))
            processor.image_mean = [float(np.mean(processor.image_mean))] * 3
            processor.image_std = [scale] * 3
            self.pixel_range = 1 / scale
        self.processor = processor

    @staticmethod
    def rows(clips: Dataset) -> Dataset:
        """One row per frame: `pixel_values`, uint8 `[height, width]`, in torch format."""
        return _expand(clips, np.concatenate, clips.features["frames"].shape[1:])

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        images = [frame[None].expand(3, -1, -1) for frame in pixels]  # [3, height, width] each
        return self.processor(images, return_tensors="pt", input_data_format="channels_first")[
            "pixel_values"
        ]


def load_denoiser(name: str) -> tuple[PreTrainedModel, DenoisingTask]:
    """A saved denoiser in eval mode, and the form in which it takes frames."""
    with weights_of(name):
        model = AutoModelForImageToImage.from_pretrained(name)
    if isinstance(model, ViTForDenoising):
        return model, ImageTask(name)
    return model, PatchTask(math.isqrt(model.config.hidden_size))


def to_patches(frames: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Clips `[..., frames, height, width]` -> their patches `[..., places, frames, patch_size ** 2]`, row by row."""
    patches = frames.unflatten(-1, (-1, patch_size)).unflatten(
        -3, (-1, patch_size)
    )  # [..., T, rows, p, columns, p]
    # [..., rows * columns, T, p * p]
    return patches.movedim((-4, -2), (-5, -4)).flatten(-2).flatten(-4, -3)


def _expand(clips: Dataset, cut: Callable, shape: tuple[int, ...]) -> Dataset:
    """The rows that `cut` makes from the frames of some clips, as `pixel_values` of a `shape`."""
    rows = clips.with_format("numpy").map(
        lambda batch: {"pixel_values": cut(batch["frames"])},
        batched=True,
        batch_size=CLIPS_AT_ONCE,
        remove_columns=clips.column_names,
        features=Features({"pixel_values": Array2D(shape, "uint8")}),
    )
    return rows.with_format("torch")
