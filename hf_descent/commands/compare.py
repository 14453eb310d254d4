"""`hf-descent compare RUN...`: a table, paired tests with their outcome in words, and the paper's figures."""

import argparse
import os
from collections.abc import Mapping, Sequence

from ..evaluation.comparison import Run, compare
from ..evaluation.plots import save_comparison
from ..evaluation.side_by_side import SideBySide, known_difference, seconds_in
from ..runs import RunFolder
from .closing import next_step


def run(args: argparse.Namespace):
    """Compare the runs, print the table and the outcomes, and write both and the figures into `args.output_dir`."""
    runs = grouped(args.runs)
    pairs = pair_of(runs)
    for pair in pairs:
        level = f" at noise level {pair.plain.gamma:g}" if pair.plain.gamma else ""
        print(f"Layers of both runs{level}\n{pair}\n")
    if pairs and not have_curves(runs):
        print(next_step("evaluate RUN", "measures a run under noise, which `compare` then tests"))
        return
    comparison = compare(runs, args.baseline, args.confidence)
    files = save_comparison(comparison, args.output_dir)
    print(f"{comparison}\n\nWritten to {args.output_dir}: {', '.join(files)}")
    print(next_step("card RUN", "writes the model card of the run that you keep"))


def grouped(words: Sequence[str]) -> Sequence[str] | dict[str, list[str]]:
    """The folders as they are given, or grouped if all are given as `GROUP=RUN`."""
    # Sweeps name folders by their settings, such as `lr=0.1`.
    named = [word for word in words if "=" in word and not os.path.isdir(word)]
    if not named:
        return words
    if len(named) < len(words):
        raise ValueError(f"`runs` is {words}; give all of them as GROUP=RUN, or none.")
    groups: dict[str, list[str]] = {}
    for word in named:
        group, _, folder = word.partition("=")
        groups.setdefault(group, []).append(folder)
    return groups


def folders_of(runs: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """The folders of all runs, grouped by name or not."""
    groups = runs.values() if isinstance(runs, Mapping) else [runs]
    return [folder for group in groups for folder in group]


def have_curves(runs: Sequence[str] | Mapping[str, Sequence[str]]) -> bool:
    """Whether all runs were measured under noise."""
    return all(RunFolder(folder).fresh("noise_curve.json") for folder in folders_of(runs))


def pair_of(runs: Sequence[str] | Mapping[str, Sequence[str]]) -> list[SideBySide]:
    """The layers of two runs side by side at each common noise level, if one of them is plain training. Empty for
    other runs, and if they were not measured on the same rows."""
    folders = folders_of(runs)
    if len(folders) != 2:
        return []
    plain, other = (Run.load(folder, needs_curve=False) for folder in folders)
    if not plain.was_trained_plainly:
        plain, other = other, plain
    if not plain.was_trained_plainly or other.objective is None or other.was_trained_plainly:
        return []

    seconds = (seconds_in(plain.folder), seconds_in(other.folder))
    difference = known_difference(other.summary.get("origin"), plain.summary.get("origin"))
    return [
        SideBySide(
            plain.profiles[gamma],
            other.profiles[gamma],
            other.objective.name,
            seconds,
            difference,
        )
        for gamma in sorted(plain.profiles.keys() & other.profiles.keys())
        if plain.profiles[gamma].data == other.profiles[gamma].data
    ]
