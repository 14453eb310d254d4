"""`hf-descent COMMAND --launch ddp ...`: the same command in every process that `accelerate launch` starts.

Short for `accelerate launch --config_file recipes/accelerate_configs/ddp.yaml -m hf_descent.cli COMMAND ...`, which
takes all of accelerate's flags; of these the short form knows the ones that differ from machine to machine.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from .arguments import TRAINING, refuse


CONFIGS = Path(__file__).parent / "accelerate_configs"
FLAGS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def launch_arguments(argv: Sequence[str]) -> list[str] | None:
    """The command line for `accelerate launch` that `argv` is short for; `None` where `--launch` is not in it.
    ValueError where it names no config, or one for fewer processes or machines than the command is to work on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse
    for flag in ("launch", *FLAGS):
        parser.add_argument(f"--{flag}", type=int if flag.startswith("num_") else str)
    flags, rest = parser.parse_known_args(argv)
    if flags.launch is None:
        return None

    path = _config_file(flags.launch)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if values is None:
        values = {}
    processes = flags.num_processes
    if processes is None:
        processes = values.get("num_processes", 1)
    if rest and not rest[0].startswith("-"):
        check_processes(rest[0], int(processes))
    if values.get("main_process_port") == 0:
        _check_port(flags, path)

    launched = ["--config_file", str(path)]
    for flag in FLAGS:
        value = getattr(flags, flag)
        if value is not None:
            launched += [f"--{flag}", str(value)]

    return [*launched, "-m", "hf_descent.cli", *rest]


def _config_file(name: str) -> Path:
    """The config of accelerate that comes with this package under a name, or the file of that name."""
    for path in (CONFIGS / f"{name}.yaml", Path(name)):
        if path.is_file():
            return path
    names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
    raise ValueError(
        f"`--launch` is {name!r}: give one of {names}, or a file by `accelerate config`."
    )


def _check_port(flags: argparse.Namespace, path: Path) -> None:
    """ValueError where several machines would each choose their own port."""
    if flags.main_process_port is None and flags.num_machines not in (None, 1):
        raise ValueError(
            f"`--num_machines` is {flags.num_machines}, and {path.name} lets each machine choose its port: take the "
            "config that ends in `_multi_node`, or give `--main_process_port`."
        )


def check_processes(command: str, processes: int) -> None:
    """ValueError where each of several processes would do the whole work of `command`, over the others' files."""
    if processes > 1 and command not in TRAINING:
        raise ValueError(
            f"`hf-descent {command}` works in one process; several are for {', '.join(TRAINING)}."
        )


def launch(arguments: Sequence[str]) -> None:
    """Start the processes and wait for them; SystemExit, with the status of the first that failed."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(arguments))
    except ChildFailedError as error:
        failure = error.get_first_failure()[1]
        print(failure.message, file=sys.stderr)
        sys.exit(failure.exitcode)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
