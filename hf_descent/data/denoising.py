"""Converts videos to the inputs of a denoiser, and its outputs back to frames."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageToImage, PreTrainedModel

from ..models import ViTForDenoising
from .patches import frame_rows, from_patches, patch_rows, to_patches


class DenoisingTask:
    """The form in which a denoiser takes frames."""

    pixel_range = 1.0  # of the model's input

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch of rows: `pixel_values` and the clean `labels`, of one shape.

        The trainer's noise perturbs `pixel_values` alone. A row that is perturbed itself has its clean pixels as
        `labels`.
        """
        given = self.batch([torch.as_tensor(row["pixel_values"]) for row in rows])
        clean = self.batch([row["labels"] for row in rows]) if "labels" in rows[0] else given
        return {"pixel_values": given, "labels": clean}

    def preprocess(self, frames: np.ndarray) -> np.ndarray:
        """The clean frames in [0, 1] that the model should restore, `[frames, height, width]`, from uint8 frames."""
        return frames / 255


class PatchTask(DenoisingTask):
    """Rows are the patches `[frames, values]` of a clip at one place; a clip is a batch of them."""

    def __init__(self, frame_size: int, patch_size: int):
        self.patch_size, self.frame_size = patch_size, frame_size
        if frame_size % patch_size:
            raise ValueError(f"`frame_size` {frame_size} must be a multiple of the patch size, {patch_size}.")

    def rows(self, clips: Dataset) -> Dataset:
        """The rows of a split of clips."""
        return patch_rows(clips, self.patch_size)

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """The model's input for the pixels of rows, `[batch, frames, values]`."""
        return torch.stack(list(pixels)).float() / 255

    def inputs(self, clip: np.ndarray) -> torch.Tensor:
        """The model's input for a clip of clean or noisy frames in [0, 1]."""
        return to_patches(torch.from_numpy(clip).float(), self.patch_size)

    def frames(self, outputs: torch.Tensor) -> np.ndarray:
        """The inverse of `inputs`."""
        return from_patches(outputs, self.frame_size).numpy()


class ImageTask(DenoisingTask):
    """Rows are frames, made into images by the model's own processor; a clip is a batch of them. As [`PatchTask`]."""

    def __init__(self, model_name_or_path: str):
        self.processor = processor = AutoImageProcessor.from_pretrained(model_name_or_path)
        self.mean, self.std = 0.0, 1.0
        if processor.do_normalize:
            # One scale for all channels, or the RMSE would weigh them differently.
            self.mean, self.std = float(np.mean(processor.image_mean)), float(np.mean(processor.image_std))
            processor.image_mean, processor.image_std = [self.mean] * 3, [self.std] * 3
        self.pixel_range = 1 / self.std

    def rows(self, clips: Dataset) -> Dataset:
        return frame_rows(clips)

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        images = [frame[None].expand(3, -1, -1) for frame in pixels]  # [3, height, width] each
        return self.processor(images, return_tensors="pt", input_data_format="channels_first")["pixel_values"]

    def preprocess(self, frames: np.ndarray) -> np.ndarray:
        # A processor sets the size of its images: they are restored in that.
        return self.frames(self.batch(torch.tensor(frames)))

    def inputs(self, clip: np.ndarray) -> torch.Tensor:
        images = (torch.from_numpy(clip).float() - self.mean) / self.std  # [frames, height, width]
        return images[:, None].expand(-1, 3, -1, -1)

    def frames(self, outputs: torch.Tensor) -> np.ndarray:
        return (outputs.mean(1) * self.std + self.mean).numpy()


def load_denoiser(name: str, frame_size: int) -> tuple[PreTrainedModel, DenoisingTask]:
    """A saved denoiser in eval mode, and the form in which it takes frames of that height and width."""
    model = AutoModelForImageToImage.from_pretrained(name)
    if isinstance(model, ViTForDenoising):
        return model, ImageTask(name)
    return model, PatchTask(frame_size, math.isqrt(model.config.hidden_size))
