"""`hf-descent COMMAND ...`, also as `python -m hf_descent.cli` (the form that `accelerate launch -m` takes).

A command is a module of this package. It either trains from a recipe and exposes `argument_types` (dataclasses, which
give the flags, and whose values a `--config` file may set) with `run(*dataclass_instances)`, or is a plain tool and
exposes `add_arguments(parser)` with `run(args)`, or parses a grammar of its own by `parse(argv, prog, description)`
for `run(*parsed)`. What a command cannot do raises ValueError. Modules are imported only when their command is called.
`--launch` starts a training in several processes (`commands/launch.py`).
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from . import __version__
from .commands.arguments import TRAINING, parse_recipe, refuse
from .commands.launch import check_processes, launch, launch_arguments
from .extras import EXTRAS, INSTALL


COMMANDS = {
    "demo": "train plain, constrained and deeply supervised denoisers on bundled photographs, and compare them",
    "classify": "fine-tune a text classifier from a recipe",
    "sft": "fine-tune a language model on instructions from a recipe",
    "generate": "answer instructions with a language model, under noise if asked for",
    "evaluate": "measure trained models under noise and at every layer, on the same held-out rows",
    "compare": "compare evaluated runs: table, paired tests with their outcome in words, figures",
    "plan": "estimate the memory and operations that a recipe will need, without weights, data or GPU",
    "tune": "search the settings of a recipe on validation rows, under noise",
    "denoise": "train a video denoiser from a recipe",
    "exit": "report what a trained model is worth, and costs, when it stops early",
    "lens": "show what every layer of any model knows, without training: loss, metric, entropy and norm",
    "show": "open a local page: type a text, see every layer's prediction, the exit and the effect of noise",
    "export": "write a model's first layers as a checkpoint, and print how to serve it, also as a draft",
    "card": "write the model card of a run from what was measured, and upload it where asked to",
    "env": "print versions and devices, for a bug report",
}


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[Any, tuple]:
    """Turns a command line (by default this process's) into the command's module and the arguments of its `run`.

    ValueError where a command, a recipe or a flag is wrong, or several processes run a command that is for one.
    """
    parser = argparse.ArgumentParser(
        prog="hf-descent",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train transformers whose layers are constrained to descend.",
        epilog="commands:\n"
        + "\n".join(f"  {name:10} {summary}" for name, summary in COMMANDS.items())
        + f"\n\n{', '.join(TRAINING)} take --launch CONFIG (ddp, fsdp2, zero3, ... or a file), for several processes",
    )
    parser.error = refuse
    parser.add_argument("--version", action="version", version=f"hf_descent {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="command", help="one of the commands below"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="`hf-descent command --help` lists them"
    )
    args = parser.parse_args((sys.argv[1:] if argv is None else argv) or ["--help"])
    if "LOCAL_RANK" in os.environ:  # some clusters set the size alone, in every container
        check_processes(args.command, int(os.environ.get("WORLD_SIZE", 1)))

    module = importlib.import_module(f"hf_descent.commands.{args.command}")
    prog, summary = f"hf-descent {args.command}", COMMANDS[args.command]
    if hasattr(module, "parse"):
        return module, module.parse(args.arguments, prog=prog, description=summary)
    if hasattr(module, "argument_types"):
        return module, parse_recipe(
            module.argument_types, args.arguments, prog=prog, description=summary
        )
    command_parser = argparse.ArgumentParser(prog=prog, description=summary, allow_abbrev=False)
    command_parser.error = refuse
    module.add_arguments(command_parser)
    return module, (command_parser.parse_args(args.arguments),)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line (by default this process's), or starts the processes that `--launch` asks for."""
    if launched := launch_arguments(sys.argv[1:] if argv is None else argv):
        launch(launched)
        return
    module, arguments = parse_arguments(argv)
    module.run(*arguments)
    if (distributed := sys.modules.get("torch.distributed")) and distributed.is_initialized():
        # Threads of a process group that is still there can abort the interpreter's end.
        distributed.destroy_process_group()


def console() -> None:
    """[`main`], but errors of the user end in one line on stderr and exit status 2, unless `--debug` comes first."""
    try:
        main()
    except (
        ValueError,
        TypeError,
        KeyError,
        OSError,
        ImportError,
        RuntimeError,
        yaml.YAMLError,
    ) as error:
        is_fault = isinstance(error, RuntimeError) and "Callback requires" not in str(
            error
        )  # a tracker's package
        if is_fault or sys.argv[1:2] == ["--debug"]:
            raise
        if extra := EXTRAS.get(getattr(error, "name", None)):
            error = f"{error}: {INSTALL.format(extra)}"
        line = " ".join(
            ["hf-descent: error:", *str(error).split(), "(`hf-descent --debug ...` shows where)"]
        )
        if file := os.environ.get(
            "TORCHELASTIC_ERROR_FILE"
        ):  # the launcher tells it, once for all processes
            Path(file).write_text(json.dumps({"message": line}), encoding="utf-8")
        else:
            print(line, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    console()
