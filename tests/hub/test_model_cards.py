"""The cards in model_cards/ are complete, and say nothing of where they were made."""

import json
import re
from pathlib import Path

import pytest
from cards import check_card
from huggingface_hub import ModelCard


CARDS = sorted((Path(__file__).parents[2] / "model_cards").glob("*/model_card.json"))
assert CARDS


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_a_card_is_complete_and_names_no_folder_of_the_machine(path):
    text, values = (path.parent / "README.md").read_text(encoding="utf-8"), json.loads(path.read_text("utf-8"))
    assert check_card(text) == []
    card = ModelCard.load(path.parent / "README.md")
    assert card.data.eval_results and card.data.datasets and card.data.license
    assert card.data.base_model or values["needs_package"]  # the package's own architectures start from nothing
    for figure in values["figures"]:
        assert (path.parent / figure).is_file() and f"]({figure})" in text
    made = text + path.read_text(encoding="utf-8")
    assert not any(word in made for word in ("/home/", "/root/", "/tmp/", "/Users/"))
    assert not re.search(r"(?<![\w.])/\w+/", made)  # no absolute path at all
