"""`hf-descent compare RUN...`: a table, paired tests with their outcome in words, and the paper's figures."""

import argparse
import os
from collections.abc import Mapping, Sequence

from ..evaluation.comparison import Run, compare
from ..evaluation.plots import save_comparison
from ..evaluation.side_by_side import SideBySide
from ..runs import RunFolder
from .closing import next_step


def run(args: argparse.Namespace):
    """Compares the runs, prints the table and the outcomes, and writes both and the figures into `args.output_dir`."""
    runs = args.runs
    if named := [
        word for word in runs if "=" in word and not os.path.isdir(word)
    ]:  # sweeps name folders so
        if len(named) < len(runs):
            raise ValueError(f"`runs` is {args.runs}; give all of them as GROUP=RUN, or none.")
        runs = {}
        for word in named:
            group, _, folder = word.partition("=")
            runs.setdefault(group, []).append(folder)
    found = pair_of(runs)
    for pair in found:
        level = f" at noise level {pair.plain.gamma:g}" if pair.plain.gamma else ""
        print(f"Layers of both runs{level}\n{pair}\n")
    if found and not has_curve(runs, args.curve):
        return
    comparison = compare(runs, args.baseline, args.confidence, args.curve)
    files = save_comparison(comparison, args.output_dir)
    print(f"{comparison}\n\nWritten to {args.output_dir}: {', '.join(files)}")
    print(next_step("card RUN", "writes the model card of the run that you keep"))


def folders_of(runs: Sequence[str] | Mapping[str, Sequence[str]]) -> list[str]:
    """The folders of all runs, grouped by name or not."""
    groups = runs.values() if isinstance(runs, Mapping) else [runs]
    return [folder for group in groups for folder in group]


def has_curve(runs: Sequence[str] | Mapping[str, Sequence[str]], curve: str) -> bool:
    return any(RunFolder(folder).fresh(f"{curve}.json") for folder in folders_of(runs))


def pair_of(runs: Sequence[str] | Mapping[str, Sequence[str]]) -> list[SideBySide]:
    """Of two runs, one of which is plain training, the layers side by side at each common noise level; none of other
    runs, or where they were not measured on the same rows."""
    folders = folders_of(runs)
    if len(folders) != 2:
        return []
    first, second = (Run.load(folder, needs_curve=False) for folder in folders)
    if first.summary.get("objective") != "erm":
        first, second = second, first
    objective = second.summary.get("objective")
    if first.summary.get("objective") != "erm" or objective in (None, "erm"):
        return []
    return [
        SideBySide(first.profiles[gamma], second.profiles[gamma], objective)
        for gamma in sorted(first.profiles.keys() & second.profiles.keys())
        if first.profiles[gamma].data == second.profiles[gamma].data
    ]
