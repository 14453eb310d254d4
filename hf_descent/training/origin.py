"""What tells data sets apart, by their rows: a short text that does not depend on where they lie."""

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..evaluation.fingerprints import fingerprint_of_tensors
from ..readout.stack import unwrapped
from .chance import collated, drawing_apart


logger = logging.get_logger(__name__)

SAMPLE = 64  # rows of a data set: two that differ in a twentieth hardly ever agree in all of them


def fingerprint_of_rows(trainer: Trainer, data) -> str | None:
    """A short text that differs for other data: of their length, and of a sample of rows as the trainer collates them.

    `None` where it cannot be told: of a stream, and of rows that are others each time they are read.
    """
    if isinstance(data, IterableDataset) or not has_length(data):
        return None
    try:
        first = _fingerprint_of_sample(trainer, data)
        second = _fingerprint_of_sample(trainer, data)
    except Exception as error:  # only the loader of a user's own trainer can read these rows
        logger.info(f"The rows of {type(data).__name__} cannot be compared with others: {error!r}.")
        return None
    return first if first == second else None


def _fingerprint_of_sample(trainer: Trainer, data) -> str | None:
    with drawing_apart(trainer, unwrapped(trainer.model)):
        # One by one, since padding depends on the other rows of a batch.
        tensors = [
            (f"{len(data)} {name}", value)
            for row in collated(trainer, data, SAMPLE, batch_size=1)
            for name, value in row.items()
            if torch.is_tensor(value)
        ]
    return fingerprint_of_tensors(tensors) if tensors else None
