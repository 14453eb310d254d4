"""Perturbations that happen in practice, for reading off whether robustness to Gaussian noise carries over.

A perturbation maps (row of the data set, level, generator) to a new row; `noise_curve(..., perturbation=...)` gives
each row a generator of its own, keyed by seed, draw, level and the row's index, so that all models get the same
errors. Levels are rates in [0, 1].
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase


KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {letter: row[max(0, i - 1) : i] + row[i + 1 : i + 2] for row in KEYBOARD for i, letter in enumerate(row)}


class Typos:
    """Typing errors, then tokens: the perturbation of a text classifier's raw rows.

    Each letter goes wrong with probability `level`: it is left out, doubled, swapped with the next character, or
    replaced by its neighbour on an English keyboard (letters off that keyboard: one of the first three), with equal
    chances. At level 0 the text is only tokenised.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): the model's.
        max_length (`int`, *optional*): tokens to keep; the tokenizer's own limit where not given.
    """

    name = "typos"
    columns = ("text", "text_pair")  # that hold text, in the order in which the model takes them

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int | None = None):
        self.tokenizer, self.max_length = tokenizer, max_length

    def __call__(self, row: Mapping[str, Any], level: float, generator: np.random.Generator) -> dict[str, Any]:
        texts = [row[column] for column in self.columns if column in row]
        if not texts:
            raise ValueError(f"A row has the columns {sorted(row)} and no text; typos need one of {self.columns}.")
        texts = [misspell(text, level, generator) for text in texts]
        kept = {name: value for name, value in row.items() if name not in self.columns}
        return {**kept, **self.tokenizer(*texts, truncation=True, max_length=self.max_length)}


def misspell(text: str, rate: float, generator: np.random.Generator) -> str:
    """`text` with typing errors, one for a letter with probability `rate`. See [`Typos`]."""
    _check_rate(rate)
    wrong, kinds, choices = (
        generator.random(len(text)) < rate,
        generator.random(len(text)),
        generator.random(len(text)),
    )
    characters, i = [], 0
    while i < len(text):
        letter = text[i]
        if not (wrong[i] and letter.isalpha()):
            characters.append(letter)
        else:
            near = NEIGHBOURS.get(letter.lower(), "")
            kind = int(kinds[i] * (4 if near else 3))
            if kind == 1:
                characters.append(letter * 2)
            elif kind == 2:
                characters.append(text[i + 1 : i + 2] + letter)
                i += 1
            elif kind == 3:
                other = near[int(choices[i] * len(near))]
                characters.append(other.upper() if letter.isupper() else other)
        i += 1
    return "".join(characters)


def salt_and_pepper(row: Mapping[str, Any], level: float, generator: np.random.Generator) -> dict[str, Any]:
    """Dead pixels: a share `level` of the values in `pixel_values` becomes the image's least or greatest one."""
    _check_rate(level)
    pixels = np.asarray(row["pixel_values"]).copy()
    dead = generator.random(pixels.shape) < level
    low, high = pixels.min(), pixels.max()
    pixels[dead] = np.where(generator.random(pixels.shape) < 0.5, low, high)[dead]
    return {**row, "pixel_values": pixels}


salt_and_pepper.name = "salt_and_pepper"


def _check_rate(rate: float):
    if not 0 <= rate <= 1:
        raise ValueError(f"The level of a perturbation is {rate}; it is the share of letters or pixels, from 0 to 1.")
