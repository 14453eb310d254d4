"""Converts videos to the inputs of a denoiser."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoImageProcessor, AutoModelForImageToImage, PreTrainedModel

from ..models import ViTForDenoising
from .patches import frame_rows, patch_rows


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


class PatchTask(DenoisingTask):
    """Rows are the patches `[frames, values]` of a clip at one place."""

    def __init__(self, patch_size: int):
        self.patch_size = patch_size

    def rows(self, clips: Dataset) -> Dataset:
        """The rows of a split of clips."""
        return patch_rows(clips, self.patch_size)

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        """The model's input for the pixels of rows, `[batch, frames, values]`."""
        return torch.stack(list(pixels)).float() / 255


class ImageTask(DenoisingTask):
    """Rows are frames, made into images by the model's own processor. As [`PatchTask`]."""

    def __init__(self, model_name_or_path: str):
        self.processor = processor = AutoImageProcessor.from_pretrained(model_name_or_path)
        if processor.do_normalize:
            # One scale for all channels, or the RMSE would weigh them differently.
            mean, std = float(np.mean(processor.image_mean)), float(np.mean(processor.image_std))
            processor.image_mean, processor.image_std = [mean] * 3, [std] * 3
            self.pixel_range = 1 / std

    def rows(self, clips: Dataset) -> Dataset:
        return frame_rows(clips)

    def batch(self, pixels: Sequence[torch.Tensor]) -> torch.Tensor:
        images = [frame[None].expand(3, -1, -1) for frame in pixels]  # [3, height, width] each
        return self.processor(images, return_tensors="pt", input_data_format="channels_first")["pixel_values"]


def load_denoiser(name: str) -> tuple[PreTrainedModel, DenoisingTask]:
    """A saved denoiser in eval mode, and the form in which it takes frames."""
    model = AutoModelForImageToImage.from_pretrained(name)
    if isinstance(model, ViTForDenoising):
        return model, ImageTask(name)
    return model, PatchTask(math.isqrt(model.config.hidden_size))
