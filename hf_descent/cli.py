"""`hf-descent COMMAND ...`, also as `python -m hf_descent.cli` (the form that `accelerate launch -m` takes).

[`Command`] says what a command is; `COMMANDS` lists them. Modules are imported only when their command is called.
What a command cannot do raises ValueError.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import yaml

from . import __version__
from .commands import COMMANDS, Command
from .commands.arguments import TRAINING, refuse
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

    ValueError if a command, a recipe or a flag is wrong, or several processes run a command that is for one.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="hf-descent",
        usage="hf-descent COMMAND [arguments]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train transformers whose every layer lowers the task loss, and measure their layers.\n"
        f"{command_list()}",
        epilog=f"`hf-descent COMMAND --help` lists the arguments of a command. {', '.join(TRAINING)} also run\n"
        "in several processes: `accelerate launch -m hf_descent.cli COMMAND ...`.",
    )
    parser.error = refuse
    parser.add_argument("--version", action="version", version=f"hf_descent {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(words if words else ["--help"])
    _check_processes(args.command)

    command = COMMANDS[args.command]
    return command, command.parse(args.arguments)


def _check_processes(command: str) -> None:
    """ValueError if each of several processes would do the whole work of `command`, over the others' files."""
    if "LOCAL_RANK" not in os.environ:  # some clusters set the size alone, in every container
        return
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and command not in TRAINING:
        raise ValueError(
            f"`hf-descent {command}` works in one process; several are for {', '.join(TRAINING)}."
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line (by default this process's)."""
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
    """One line about an error, on stderr."""
    words = str(error).split()
    extra = EXTRAS.get(getattr(error, "name", None))
    if extra is not None:
        words[-1] += ":"
        words.append(INSTALL.format(extra))
    line = " ".join(["hf-descent: error:", *words, "(`hf-descent --debug ...` shows where)"])
    print(line, file=sys.stderr)


if __name__ == "__main__":
    console()
