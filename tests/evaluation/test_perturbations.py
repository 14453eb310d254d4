"""Typing errors and dead pixels: how many, of which kinds, and that they are the same for every model."""

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_descent.evaluation.perturbations import NEIGHBOURS, Typos, misspell, salt_and_pepper


def generator(seed=0):
    return np.random.default_rng(seed)


def test_the_rate_is_the_share_of_letters_that_go_wrong():
    text = "x" * 20000  # the four kinds change the number of x by -1, 1, 0 and -1
    for rate in (0.1, 0.4):
        typed = misspell(text, rate, generator())
        lost = typed.count("x")
        assert 20000 - lost == pytest.approx(rate * 20000 / 4, rel=0.15)
        assert len(typed) - lost == pytest.approx(rate * 20000 / 4, rel=0.15)  # neighbours of x
        assert set(typed) == {"x", *NEIGHBOURS["x"]}
    assert misspell(text, 0.0, generator()) == text


def test_every_kind_of_error_occurs_and_only_letters_go_wrong():
    kinds = {misspell("ab", 1.0, generator(seed)) for seed in range(200)}
    assert {"", "aabb", "ba"} <= kinds
    assert any(set(word) <= {"s", "v", "n"} and len(word) == 2 for word in kinds)
    assert misspell("1 2, 3!", 1.0, generator()) == "1 2, 3!"
    assert {misspell("Q", 1.0, generator(seed)) for seed in range(50)} == {"", "QQ", "Q", "W"}
    assert misspell("ß", 1.0, generator()) in {"", "ßß", "ß"}


def test_typos_come_before_the_tokens():
    vocabulary = {"[UNK]": 0, "good": 1, "film": 2, "bad": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    typos = Typos(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"), max_length=3
    )
    row = {"text": "good good film bad", "labels": 1}
    assert typos(row, 0.0, generator())["input_ids"] == [1, 1, 2]
    wrong = typos(row, 0.9, generator())
    assert 0 in wrong["input_ids"]
    assert (wrong["labels"], "text" in wrong) == (1, False)
    assert typos(row, 0.9, generator()) == wrong
    pair = typos({"text": "good", "text_pair": "bad", "labels": 0}, 0.0, generator())
    assert pair["input_ids"] == [1, 3]


def test_salt_and_pepper_kills_the_stated_share_of_pixels():
    pixels = generator(1).normal(size=(3, 100, 100)).astype(np.float32)
    row = salt_and_pepper({"pixel_values": pixels, "labels": pixels}, 0.2, generator())
    changed = row["pixel_values"] != pixels
    assert changed.mean() == pytest.approx(0.2, rel=0.05)
    assert set(row["pixel_values"][changed]) == {pixels.min(), pixels.max()}
    assert (row["pixel_values"][changed] == pixels.max()).mean() == pytest.approx(0.5, abs=0.03)
    assert row["labels"] is pixels
    assert row["pixel_values"].dtype == np.float32
