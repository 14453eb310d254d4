"""`python -m recipes.reproduce TABLE`: run, resume and collect what one table or figure of the paper shows."""

import argparse
import dataclasses
import glob
import importlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from .collect import collect
from .runner import Job, Options, jobs, same_for_all
from .scales import ARMS, MODELS, SCALES, TEXT, VIDEO
from .tables import TABLES, Panel


# What makes a run the one that its folder and its table say it is.
FIXED = {
    "architecture", "dataset_config_name", "dataset_name", "eval_gammas", "model_name_or_path", "noise_gamma",
    "objective", "output_dir", "seed", "test_file", "test_files", "train_file", "train_files", "validation_file",
    *(model.depth for model in MODELS.values() if model.depth),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    tables = "\n".join(f"  {name:9} {table.title}" for name, table in TABLES.items())
    found = argparse.ArgumentParser(
        prog="python -m recipes.reproduce",
        description=__doc__.split(": ", 1)[1],
        epilog=f"tables:\n{tables}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("table", choices=TABLES, metavar="table", help="one of the tables below")
    found.add_argument("--scale", choices=SCALES, default="cpu", help="size of models and data (cpu)")
    found.add_argument("--output_dir", default="runs/reproduce", help="folder for runs and results (runs/reproduce)")
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="training seeds (0 1 2)")
    found.add_argument("--n_trials", type=int, default=5, help="runs of each arm's search; 0: recipes' settings (5)")
    found.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="ways of training (all); ablations have theirs"
    )
    found.add_argument(
        "--panels", nargs="+", default=[], metavar="WORD", help="only the panels with one of these parts in their name"
    )
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
        f"between them; NAME: {', '.join((*TEXT, 'alpaca', *VIDEO))}, or alpaca_eval with a file of instructions",
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
    found.add_argument("--dry_run", action="store_true", help="list the commands and what is finished; run nothing")
    found.add_argument("--collect_only", action="store_true", help="collect the panels that are finished; run nothing")
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
    for flag, given, known in (
        ("model", args.model, MODELS),
        ("data", args.data, (*TEXT, "alpaca", "alpaca_eval", *VIDEO)),
    ):
        for name, *_ in given:
            if name not in known:
                command.error(f"`--{flag} {name}`: the names are {', '.join(known)}.")
    if len(set(args.seeds)) < len(args.seeds):
        command.error(
            f"`--seeds {' '.join(map(str, args.seeds))}`: each is a run of every arm, and one stands there twice."
        )
    table = TABLES[args.table]
    options = Options(
        SCALES[args.scale],
        Path(args.output_dir) / args.scale,
        dict(args.model),
        {name: paths for name, *paths in args.data},
        tuple(args.seeds),
        args.n_trials,
        dict(args.set),
        tuple(args.panels),
    )
    arms = [arm for arm in ARMS if arm in args.arms]
    panels = list(table.panels(options.scale, arms))
    for word in args.panels:
        if panels and not any(panel.has(word) for panel in panels):
            names = ", ".join(panel.name for panel in panels)
            command.error(f"`--panels {word}`: {args.table} has {names}; a word is one or more whole parts of a name.")
    panels, left_out = possible(panels, options)
    for mistake in mistakes(panels, options):
        command.error(mistake)

    def of(chosen: Sequence[Panel]):
        return jobs(chosen, options, table.shows == "answers", table.shows == "settings")

    if args.dry_run:
        for job in of(panels):
            print("done " if job.finished() else "to do", job)
        for name, why in left_out.items():
            print(f"left out: {name} ({why})")
        return
    if args.collect_only:
        unfinished = {panel.name: "not finished" for panel in panels if not all(job.finished() for job in of([panel]))}
        panels, left_out = [panel for panel in panels if panel.name not in unfinished], left_out | unfinished
    if not panels:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"Nothing is left of {args.table} ({why or 'it has none of these arms'}).")
    if not args.collect_only:
        run(of(panels))
    print(f"Written to {collect(args.table, table, panels, options, left_out)}")


def possible(panels, options: Options) -> tuple[list[Panel], dict[str, str]]:
    """The panels that can be run with what is given, and of the others what they lack."""
    found, left_out = [], {}
    for panel in panels:
        if not options.panels or any(map(panel.has, options.panels)):
            lacking = {options.missing(way) for ways in panel.groups.values() for way in ways} - {None}
            if lacking:
                left_out[panel.name] = f"needs {' and '.join(sorted(lacking))}"
            else:
                found.append(panel)
    return found, left_out


def mistakes(panels: Sequence[Panel], options: Options) -> Iterator[str]:
    """What is wrong with the settings, files and models given, so that no command has to find it out hours later."""
    commands = {way.spec.command for panel in panels for ways in panel.groups.values() for way in ways}
    arms = sorted({way.arm for panel in panels for ways in panel.groups.values() for way in ways})
    for given, value in options.settings.items():
        arm, dot, name = given.rpartition(".")
        if dot and panels and arm not in arms:
            yield f"`--set {given}={value}`: the arms are {', '.join(arms)}; one of them, or none, before the dot."
        if name in FIXED:
            yield (
                f"`--set {given}={value}`: leave it out; `--panels`, `--arms`, `--scale`, `--model`, `--data`, "
                "`--seeds` and `--output_dir` say which runs there are."
            )
        for command in sorted(commands):
            if dot and name in same_for_all(command):
                yield f"`--set {given}={value}`: all arms take the same rows and batches; leave the arm out."
            kinds = importlib.import_module(f"hf_descent.commands.{command}").argument_types
            if not any(each.init and each.name == name for kind in kinds for each in dataclasses.fields(kind)):
                yield f"`--set {given}={value}`: `hf-descent {command}` has no such setting; check the spelling."
    for name, paths in options.data.items():
        most = {"alpaca_eval": 1, **dict.fromkeys(VIDEO, 2)}.get(name, 3)
        if not 1 <= len(paths) <= most:
            yield f"`--data {name}` has {len(paths)} files after it: give 1 to {most}; commas join several videos."
        for path in [part for words in paths for part in (words.split(",") if name in VIDEO else [words])]:
            if not (Path(path).exists() or (glob.glob(path) if name in VIDEO else "://" in path)):
                yield f"`--data {name} {path}`: there is no such file."
    for name, path in options.models.items():
        if not Path(path).exists() and not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):  # of the Hub
            yield f"`--model {name} {path}`: there is no such folder."


def run(commands: Sequence[Job]) -> None:
    for job in commands:
        if not job.finished():
            print(f"\n{job}", flush=True)
            job.run()


if __name__ == "__main__":
    main()
