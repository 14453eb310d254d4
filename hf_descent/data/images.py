"""Image classification data: from a Hub name or local files to labelled splits, and to what a classifier reads."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Image
from transformers import PreTrainedModel

from .labels import class_labels, missing_labels
from .splits import SplitArguments, drop_rows, hold_out, load_splits, select_columns


MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by the channels of an image, as Pillow calls them


def load_image_classification(
    args: SplitArguments, image_column: str, label_column: str
) -> DatasetDict:
    """Load the labelled examples of an image classification task: "train", "validation" and perhaps "test", each with
    the columns `image` and `labels` (a `ClassLabel`).

    ValueError if no data is named, or a column or a label is missing, as in `data/text.py`.
    """
    columns = {"image": image_column, "labels": label_column}
    remedy = "Name the right ones by `image_column` and `label_column`."
    labelled = {}
    for split, rows in load_splits(args, list(columns.values())).items():
        selected = select_columns(rows, columns, split, remedy)
        missing = missing_labels(selected, split, label_column)
        labelled[split] = drop_rows(selected, missing, split, label_column)
    return hold_out(class_labels(labelled, label_column), args)


class ImageCollator:
    """Makes batches of rows with an `image` and `labels`. The model's processor prepares images; numbers stay as they
    are.

    Args:
        model (`PreTrainedModel`): The classifier.
        processor (image processor, *optional*): The one that was saved with it.
        rows (`Dataset`): The rows that it will be given.

    ValueError if the rows hold images, and there is no processor.
    """

    def __init__(self, model: PreTrainedModel, processor: Any | None, rows: Dataset):
        self.mode = MODES.get(getattr(model.config, "num_channels", 3), "RGB")
        self.processor = None
        if not isinstance(rows.features["image"], Image):
            return
        self.processor = processor
        if processor is None:
            raise ValueError(
                "The data holds images, but no image processor is saved with the model: save the one of its training "
                "there (`save_pretrained`), or give a column of what the model reads."
            )

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        images = [row["image"] for row in rows]
        if self.processor is None:
            pixels = torch.from_numpy(np.asarray(images, dtype=np.float32))
        else:
            images = [image.convert(self.mode) for image in images]
            pixels = self.processor(images, return_tensors="pt")["pixel_values"]
        labels = torch.tensor([row["labels"] for row in rows])
        return {"pixel_values": pixels, "labels": labels}
