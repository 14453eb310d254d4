"""The commands that the smoke recipes' READMEs give, and what a run of one wrote."""

import json
import re
import shlex

from programs import ROOT


SMOKE = ROOT / "recipes" / "smoke"


def smoke_command(recipe):
    """The words after `hf-descent` of the READMEs' command for a recipe, named by the end of its path."""
    texts = "\n".join(path.read_text() for path in sorted(SMOKE.rglob("README.md")))
    lines = re.findall(r"^hf-descent (.*)$", texts, re.MULTILINE)
    return next(
        words
        for words in map(shlex.split, lines)
        if any(word.endswith(f"smoke/{recipe}") for word in words)
    )


def results_of(folder, name="all_results"):
    return json.loads((folder / f"{name}.json").read_text())
