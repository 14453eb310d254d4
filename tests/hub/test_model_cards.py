"""The cards in model_cards/ are complete, and say nothing of where they were made."""

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from cards import check_card
from huggingface_hub import ModelCard


FOLDER = Path(__file__).parents[2] / "model_cards"
CARDS = sorted(FOLDER.glob("*/model_card.json"))
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


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_the_figures_show_the_numbers_of_the_card(path):
    card = json.loads(path.read_text("utf-8"))
    groups = runpy.run_path(str(FOLDER / "figures.py"))["groups_of"](path)
    for name, values in ((card["model_name"], card), (card["baseline"]["model_name"], card["baseline"])):
        (run,) = groups[name]
        (profile,) = run.profiles.values()
        np.testing.assert_array_equal(profile.losses, values["layer_profile"]["losses"])
        np.testing.assert_array_equal(run.curve.mean, values["noise_curve"]["mean"])
    (run,) = groups[card["model_name"]]
    (certificate,) = [profile.certificate() for profile in run.profiles.values()]
    violations = [card["layer_profile"]["violations"][int(row) - 1] for row in certificate.rows]
    np.testing.assert_allclose(certificate.reached - certificate.asked, violations, atol=1e-6)
    assert all((path.parent / f"{name}.{kind}").is_file() for name in ("layers", "noise") for kind in ("png", "svg"))
