"""`python -m recipes.reproduce TABLE`: run, resume and collect what a table or figure of the paper shows."""

import argparse
import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .collect import collect
from .experiments import ARMS, MODELS, SCALES, TABLES, Panel, panels
from .runner import Options, jobs, parse


DATA = {name for model in MODELS.values() for name in model["recipes"]} | {"alpaca_eval"}
MOST_LISTED = 60  # commands that `--dry_run` names one by one


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m recipes.reproduce",
        description=__doc__.split(": ", 1)[1],
        epilog="tables:\n"
        + "\n".join(f"  {name:9} {table['title']}" for name, table in TABLES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("table", choices=TABLES, metavar="table", help="one of the tables below")
    found.add_argument(
        "--scale", choices=SCALES, default="cpu", help="size of models and data (cpu)"
    )
    found.add_argument(
        "--output_dir",
        default="runs/reproduce",
        help="folder for runs and results (runs/reproduce)",
    )
    found.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="training seeds (0 1 2)"
    )
    found.add_argument(
        "--n_trials",
        type=int,
        default=5,
        help="runs of each arm's search; 0: recipes' settings (5)",
    )
    arms = "ways of training (all); ablations have theirs"
    found.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help=arms)
    names = "only the panels with one of these parts in their name"
    found.add_argument("--panels", nargs="+", default=[], metavar="WORD", help=names)
    found.add_argument(
        "--model",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "PATH"),
        help=f"a model in place of the recipe's; NAME: {', '.join(MODELS)}",
    )
    found.add_argument(
        "--data",
        nargs="+",
        action="append",
        default=[],
        metavar="WORD",
        help="a data set's name and its files: training, test and perhaps validation; of videos, patterns with commas "
        f"between them; NAME: {', '.join(sorted(DATA))}",
    )
    found.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        type=setting,
        metavar="[ARM.]NAME=VALUE",
        help="set in every run, or in those of an arm, and not searched",
    )
    found.add_argument(
        "--dry_run",
        action="store_true",
        help="say which commands are to be run and which are done (of a large table only how many); run nothing",
    )
    found.add_argument(
        "--collect_only",
        action="store_true",
        help="collect the panels that are finished; run nothing",
    )
    return found


def setting(word: str) -> tuple[str, Any]:
    """What one word after `--set` says."""
    name, sign, value = word.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=VALUE, as in max_steps=100")
    found = yaml.safe_load(value)
    return name, value if isinstance(found, bool) else found  # a strategy may be "no"


def main(argv: Sequence[str] | None = None) -> None:
    """Raises ValueError where nothing is left of the table, or a folder holds a run with other settings."""
    command = parser()
    args = command.parse_args(argv)
    data, seeds = {name: paths for name, *paths in args.data}, tuple(dict.fromkeys(args.seeds))
    folder = Path(args.output_dir) / args.scale
    options = Options(
        SCALES[args.scale], folder, dict(args.model), data, seeds, args.n_trials, dict(args.set)
    )
    for mistake in mistakes(options):
        command.error(mistake)
    found, left_out = _chosen(args, options)
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(
            f"Nothing is left of {args.table} ({why or 'no panel has this in its name'})."
        )

    for job in jobs(found, options):
        if job.kind in ("tune", "train"):  # a mistaken setting is not to be found out hours later
            parse(job.words)
    if args.dry_run:
        _print_plan(found, options, left_out)
        return

    if not args.collect_only:
        for job in jobs(found, options):
            if not job.finished():
                print(f"\n{job}", flush=True)
                job.run()
    print(f"Written to {collect(args.table, found, options, left_out)}")


def _chosen(args: argparse.Namespace, options: Options) -> tuple[list[Panel], dict[str, str]]:
    """The panels to run or collect, and why the others of the table are left out, by name."""
    found = []
    left_out = {}
    for panel in panels(args.table, options.scale, [arm for arm in ARMS if arm in args.arms]):
        if args.panels and not any(map(panel.has, args.panels)):
            continue

        lacking = {options.missing(way) for way in panel.ways.values()} - {None}
        if lacking:
            left_out[panel.name] = f"needs {' and '.join(sorted(lacking))}"
        elif args.collect_only and not all(job.finished() for job in jobs([panel], options)):
            left_out[panel.name] = "not finished"
        else:
            found.append(panel)
    return found, left_out


def _print_plan(found: Sequence[Panel], options: Options, left_out: Mapping[str, str]) -> None:
    """What is done and to do: the commands where they fit on a screen or two, else their number for each panel."""
    planned = list(jobs(found, options))
    if len(planned) <= MOST_LISTED:
        for job in planned:
            print("done " if job.finished() else "to do", job)
    else:
        for panel in found:
            _print_counts(panel, options)
        print(
            f"together: {len(planned)} commands, as panels share some. Name a panel with `--panels` to list its own."
        )
    for name, why in left_out.items():
        print(f"left out: {name} ({why})")


def _print_counts(panel: Panel, options: Options) -> None:
    of_panel = list(jobs([panel], options))
    kinds = Counter(job.kind for job in of_panel)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    done = sum(job.finished() for job in of_panel)
    print(f"{panel.name}: {counts}; {done} of {len(of_panel)} done")


def mistakes(options: Options) -> list[str]:
    """What is wrong with names and paths; of the settings the commands say it."""
    found = [
        f"`--model {name}`: the names are {', '.join(MODELS)}."
        for name in options.models.keys() - MODELS
    ]
    found += [
        f"`--data {name}`: the names are {', '.join(sorted(DATA))}."
        for name in options.data.keys() - DATA
    ]
    for given in options.settings:
        arm, dot, _ = given.rpartition(".")
        if dot and arm not in ARMS:
            found.append(f"`--set {given}=...`: the arms are {', '.join(ARMS)}.")
    for name, paths in options.data.items():
        for path in [part for words in paths for part in words.split(",")]:
            if "://" not in path and not glob.glob(path):
                found.append(f"`--data {name} {path}`: there is no such file.")
    return found


if __name__ == "__main__":
    main()
