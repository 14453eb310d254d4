"""`hf-descent COMMAND --launch ddp ...`: the same command in every process that `accelerate launch` starts.

Short for `accelerate launch --config_file recipes/accelerate_configs/ddp.yaml -m hf_descent.cli COMMAND ...`, which
takes all of accelerate's flags; of these the short form knows the ones that differ from machine to machine.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path


CONFIGS = Path(__file__).parent / "accelerate_configs"
FLAGS = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")


def launch_arguments(argv: Sequence[str]) -> list[str] | None:
    """The command line for `accelerate launch` that `argv` is short for; `None` where `--launch` is not in it.

    Raises:
        ValueError: `--launch` names neither a config of ours nor a file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--launch")
    config, rest = parser.parse_known_args(argv)
    if config.launch is None:
        return None
    path = CONFIGS / f"{config.launch}.yaml"
    if not path.is_file():
        path = Path(config.launch)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise ValueError(f"`--launch` is {config.launch!r}: give one of {names}, or a file by `accelerate config`.")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}")
    flags, rest = parser.parse_known_args(rest)
    given = [part for flag in FLAGS if (value := getattr(flags, flag)) for part in (f"--{flag}", value)]
    return ["--config_file", str(path), *given, "-m", "hf_descent.cli", *rest]


def launch(arguments: Sequence[str]) -> None:
    """Start the processes and wait for them."""
    from accelerate.commands.launch import launch_command, launch_command_parser

    launch_command(launch_command_parser().parse_args(arguments))
