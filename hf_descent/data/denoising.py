"""Converts videos to the inputs of a denoiser, and its outputs back to frames."""

from functools import partial
from itertools import islice

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoImageProcessor

from .patches import check_patch_size, collate, collate_images, frame_rows, from_patches, patch_rows, to_patches
from .video import VideoArguments


SHUFFLE_BUFFER = 10_000  # rows held to draw from where videos are streamed


class PatchTask:
    """Rows are the patches `[frames, values]` of a clip at one place; a clip is a batch of them."""

    pixel_range = 1.0  # of the model's input

    def __init__(self, data_args: VideoArguments):
        self.patch_size, self.frame_size = data_args.patch_size, data_args.frame_size
        check_patch_size(self.frame_size, self.patch_size)
        self.collate = collate

    def rows(self, clips: Dataset | IterableDataset) -> Dataset | IterableDataset:
        """The rows of a split of clips."""
        return patch_rows(clips, self.patch_size)

    def preprocess(self, frames: np.ndarray) -> np.ndarray:
        """The clean frames in [0, 1] that the model should restore, `[frames, height, width]`, from uint8 frames."""
        return frames / 255

    def inputs(self, clip: np.ndarray) -> torch.Tensor:
        """The model's input for a clip of such frames, noisy or not."""
        return to_patches(torch.from_numpy(clip).float(), self.patch_size)

    def frames(self, outputs: torch.Tensor) -> np.ndarray:
        """The inverse of `inputs`."""
        return from_patches(outputs, self.frame_size).numpy()


class ImageTask:
    """Rows are frames, made into images by the model's own processor; a clip is a batch of them. As [`PatchTask`]."""

    def __init__(self, model_name_or_path: str):
        self.processor = processor = AutoImageProcessor.from_pretrained(model_name_or_path)
        self.mean, self.std = 0.0, 1.0
        if processor.do_normalize:
            # One scale for all channels, or the RMSE would weigh them differently.
            self.mean, self.std = float(np.mean(processor.image_mean)), float(np.mean(processor.image_std))
            processor.image_mean, processor.image_std = [self.mean] * 3, [self.std] * 3
        self.pixel_range = 1 / self.std
        self.collate = partial(collate_images, image_processor=self.processor)

    def rows(self, clips: Dataset | IterableDataset) -> Dataset | IterableDataset:
        return frame_rows(clips)

    def preprocess(self, frames: np.ndarray) -> np.ndarray:
        # A processor sets the size of its images: they are restored in that.
        return self.frames(self.collate([{"pixel_values": frame} for frame in torch.tensor(frames)])["pixel_values"])

    def inputs(self, clip: np.ndarray) -> torch.Tensor:
        images = (torch.from_numpy(clip).float() - self.mean) / self.std  # [frames, height, width]
        return images[:, None].expand(-1, 3, -1, -1)

    def frames(self, outputs: torch.Tensor) -> np.ndarray:
        return (outputs.mean(1) * self.std + self.mean).numpy()


def draw_rows(rows: Dataset | IterableDataset, split: str, args: VideoArguments) -> Dataset | IterableDataset | list:
    """The rows of a split in random order, as many as the arguments allow."""
    limit = args.max_train_samples if split == "train" else args.max_eval_samples
    if isinstance(rows, Dataset):
        rows = rows.shuffle(seed=args.split_seed)
        return rows if limit is None else rows.select(range(min(limit, len(rows))))
    rows = rows.shuffle(seed=args.split_seed, buffer_size=SHUFFLE_BUFFER)
    # A list, since a stream is shuffled anew for every epoch and would begin with other rows.
    return rows if limit is None else list(rows.take(limit))


def some_clips(clips: Dataset | IterableDataset, count: int) -> list[dict]:
    """Rows spread evenly over a split; the first ones of a stream."""
    if isinstance(clips, Dataset):
        clips = clips.select(np.linspace(0, len(clips), 2 * min(count, len(clips)) + 1).astype(int)[1::2])
    return list(islice(clips.with_format("numpy"), count))
