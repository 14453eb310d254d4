"""`hf-descent compare RUN...`: a table, paired tests with their outcome in words, and the paper's figures."""

import argparse
import os

from ..evaluation.comparison import compare
from ..evaluation.plots import save_comparison


def add_arguments(parser: argparse.ArgumentParser):
    runs = "folders of evaluated runs; grouped by the names before `=`, or by their own without the seed at the end"
    parser.add_argument("runs", nargs="+", metavar="[GROUP=]RUN", help=runs)
    parser.add_argument(
        "--baseline", help="the group to compare with; the first one where not given"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.95, help="level at which all outcomes hold together"
    )
    curves = "the curve to compare: noise_curve, typos_curve or salt_and_pepper_curve"
    parser.add_argument("--curve", default="noise_curve", help=curves)
    parser.add_argument(
        "--output_dir", default="comparison", help="folder for comparison.json and the figures"
    )


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
    comparison = compare(runs, args.baseline, args.confidence, args.curve)
    files = save_comparison(comparison, args.output_dir)
    print(f"{comparison}\n\nWritten to {args.output_dir}: {', '.join(files)}")
