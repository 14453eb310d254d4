"""Perturbations that happen in practice, to see whether robustness to Gaussian noise carries over.

Each maps (row of the data set, rate in [0, 1], generator) to a new row, for `noise_curve(..., perturbation=...)`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {
    letter: row[max(0, i - 1) : i] + row[i + 1 : i + 2]
    for row in KEYBOARD
    for i, letter in enumerate(row)
}


class Typos:
    """Typing errors in the texts of a row (see [`misspell`]), then tokens, as many as `max_length` at most."""

    name = "typos"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None):
        self.tokenizer, self.max_length = tokenizer, max_length

    def __call__(
        self, row: Mapping[str, Any], level: float, generator: np.random.Generator
    ) -> dict[str, Any]:
        kept = dict(row)
        texts = [
            misspell(kept.pop(name), level, generator)
            for name in ("text", "text_pair")
            if name in row
        ]
        return {**kept, **self.tokenizer(*texts, truncation=True, max_length=self.max_length)}


def misspell(text: str, rate: float, generator: np.random.Generator) -> str:
    """`text`, each letter of which goes wrong with probability `rate`: it is left out, doubled, swapped with the next
    character, or replaced by a neighbour on an English keyboard (where it has one), with equal chances."""
    wrong, kinds, choices = generator.random((3, len(text)))
    typed, i = "", 0
    while i < len(text):
        letter = text[i]
        errors = ["", letter * 2, text[i + 1 : i + 2] + letter]
        if near := NEIGHBOURS.get(letter.lower()):
            other = near[int(choices[i] * len(near))]
            errors.append(other.upper() if letter.isupper() else other)
        kind = int(kinds[i] * len(errors)) if letter.isalpha() and wrong[i] < rate else None
        typed += letter if kind is None else errors[kind]
        i += 2 if kind == 2 else 1
    return typed


def salt_and_pepper(
    row: Mapping[str, Any], level: float, generator: np.random.Generator
) -> dict[str, Any]:
    """Dead pixels: a share `level` of the values in `pixel_values` becomes the image's least or greatest one. What a
    denoiser is to restore, the `labels`, stays clean."""
    pixels = np.asarray(row["pixel_values"]).copy()
    dead = generator.random(pixels.shape) < level
    pixels[dead] = np.where(generator.random(pixels.shape) < 0.5, pixels.min(), pixels.max())[dead]
    return {"labels": row["pixel_values"], **row, "pixel_values": pixels}
