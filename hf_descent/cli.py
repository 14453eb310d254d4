"""`hf-descent COMMAND ...`, also as `python -m hf_descent.cli` (the form that `accelerate launch -m` takes).

[`Command`] says what a command is; `COMMANDS` lists them. Modules are imported only when their command is called.
What a command cannot do raises ValueError. `--launch` starts a training in several processes (`commands/launch.py`).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from . import __version__
from .commands import COMMANDS, Command
from .commands.arguments import TRAINING, refuse
from .commands.launch import check_processes, launch, launch_arguments
from .extras import EXTRAS, INSTALL


# What a user can mend. Others, and RuntimeErrors but for those of a tracker that is not installed, are our faults.
ERRORS_OF_USERS = (
    ValueError,
    TypeError,
    KeyError,
    OSError,
    ImportError,
    RuntimeError,
    yaml.YAMLError,
)


def command_list() -> str:
    """The commands by their groups, for the help."""
    lines = []
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        lines.append(f"\n{group}:")
        for name, command in COMMANDS.items():
            if command.group == group:
                lines.append(f"  {name:10} {command.summary}")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[Command, tuple]:
    """Turns a command line (by default this process's) into the command and the arguments of its `run`.

    ValueError where a command, a recipe or a flag is wrong, or several processes run a command that is for one.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hf-descent",
        usage="hf-descent COMMAND [arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train transformers whose every layer lowers the task loss, and measure their layers.\n"
        f"{command_list()}",
        epilog=f"`hf-descent COMMAND --help` lists the arguments of a command. {', '.join(TRAINING)} take\n"
        "--launch CONFIG (ddp, fsdp2, zero3, ... or a file) to train in several processes.",
    )
    parser.error = refuse
    parser.add_argument("--version", action="version", version=f"hf_descent {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(words if words else ["--help"])
    if "LOCAL_RANK" in os.environ:  # some clusters set the size alone, in every container
        check_processes(args.command, int(os.environ.get("WORLD_SIZE", 1)))

    command = COMMANDS[args.command]
    return command, command.parse(args.arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line (by default this process's), or starts the processes that `--launch` asks for."""
    launched = launch_arguments(sys.argv[1:] if argv is None else argv)
    if launched is not None:
        launch(launched)
        return
    command, arguments = parse_arguments(argv)
    command.run(*arguments)

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        # Threads of a process group that is still there can abort the interpreter's end.
        distributed.destroy_process_group()


def console() -> None:
    """[`main`], but errors of the user end in one line on stderr and exit status 2, unless `--debug` comes first."""
    try:
        main()
    except ERRORS_OF_USERS as error:
        misses_tracker = "Callback requires" in str(error)
        is_fault = isinstance(error, RuntimeError) and not misses_tracker
        if is_fault or sys.argv[1:2] == ["--debug"]:
            raise
        _tell(error)
        sys.exit(2)


def _tell(error: Exception) -> None:
    """One line about an error: on stderr, or for the launcher, which tells it once for all processes."""
    words = str(error).split()
    extra = EXTRAS.get(getattr(error, "name", None))
    if extra is not None:
        words[-1] += ":"
        words.append(INSTALL.format(extra))
    line = " ".join(["hf-descent: error:", *words, "(`hf-descent --debug ...` shows where)"])

    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        Path(file).write_text(json.dumps({"message": line}), encoding="utf-8")
    else:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    console()
