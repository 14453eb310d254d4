"""Rows that a tiny model learns in a few steps."""

import torch
from torch.utils.data import IterableDataset
from transformers import default_data_collator

from tiny.models import VOCAB


def classification_data(count=64, num_labels=3, length=10, seed=0, pad=True):
    """Sequences whose third token tells the label; padded to different lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        label = int(torch.randint(num_labels, (1,), generator=generator))
        ids = torch.randint(10, VOCAB, (length,), generator=generator)
        ids[2] = 3 + label
        real = int(torch.randint(5, length + 1, (1,), generator=generator)) if pad else length
        mask = (torch.arange(length) < real).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": label})
    return rows


def toy_rows(count, seed=0):
    """Shorter sequences of one length, whose third token tells the label."""
    return classification_data(count, length=8, seed=seed, pad=False)


def language_data(count=32, length=12, seed=0, ragged=True):
    """Counting sequences modulo the vocabulary; different numbers of labelled tokens per row."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        ids = (torch.randint(VOCAB, (1,), generator=generator) + torch.arange(length)) % VOCAB
        mask = torch.ones(length, dtype=torch.long)
        labels = ids.clone()
        if ragged:
            unlabelled = int(torch.randint(0, length - 2, (1,), generator=generator))
            labels[:unlabelled] = -100
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


class Stream(IterableDataset):
    """Rows without a length; those of an iterator can be read once."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def batches(rows, size=8):
    """The rows in order, as batches of tensors."""
    for start in range(0, len(rows), size):
        yield default_data_collator(rows[start : start + size])
