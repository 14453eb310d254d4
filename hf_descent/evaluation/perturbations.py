"""Perturbations that happen in practice, to see whether robustness to Gaussian noise carries over.

Each maps (row of the data set, rate in [0, 1], generator) to a new row, for `noise_curve(..., perturbation=...)`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {
    letter: row[max(0, place - 1) : place] + row[place + 1 : place + 2]
    for row in KEYBOARD
    for place, letter in enumerate(row)
}


class Typos:
    """Typing errors in the texts of a row (see [`misspell`]), then tokens, as many as `max_length` at most."""

    name = "typos"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None):
        self.tokenizer = tokenizer
        self.max_length = max_length

    def __call__(
        self, row: Mapping[str, Any], level: float, generator: np.random.Generator
    ) -> dict[str, Any]:
        perturbed = dict(row)
        texts = []
        for name in ("text", "text_pair"):
            if name in row:
                texts.append(misspell(perturbed.pop(name), level, generator))
        perturbed.update(self.tokenizer(*texts, truncation=True, max_length=self.max_length))
        return perturbed


def misspell(text: str, rate: float, generator: np.random.Generator) -> str:
    """`text` with typing errors, each letter of which goes wrong with probability `rate`.

    A wrong letter is left out, doubled, swapped with the next character, or replaced by a neighbour on an English
    keyboard (where it has one), with equal chances.
    """
    is_wrong, kinds, choices = generator.random((3, len(text)))
    typed = []
    place = 0
    while place < len(text):
        letter = text[place]
        following = text[place + 1 : place + 2]
        step = 1
        if letter.isalpha() and is_wrong[place] < rate:
            errors = ["", letter * 2, following + letter]
            near = NEIGHBOURS.get(letter.lower())
            if near:
                neighbour = near[int(choices[place] * len(near))]
                errors.append(neighbour.upper() if letter.isupper() else neighbour)
            kind = int(kinds[place] * len(errors))
            letter = errors[kind]
            if kind == 2:  # the next character was typed, too
                step = 2
        typed.append(letter)
        place += step
    return "".join(typed)


def salt_and_pepper(
    row: Mapping[str, Any], level: float, generator: np.random.Generator
) -> dict[str, Any]:
    """Dead pixels: a share `level` of the values in `pixel_values` becomes the image's least or greatest one. The
    `labels`, which a denoiser is to restore, stay clean."""
    pixels = np.asarray(row["pixel_values"]).copy()
    is_dead = generator.random(pixels.shape) < level
    extremes = np.where(generator.random(pixels.shape) < 0.5, pixels.min(), pixels.max())
    pixels[is_dead] = extremes[is_dead]

    perturbed = {"labels": row["pixel_values"], **row}
    perturbed["pixel_values"] = pixels
    return perturbed
