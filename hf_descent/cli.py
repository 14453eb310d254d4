"""`hf-descent COMMAND ...`, also as `python -m hf_descent.cli` (the form that `accelerate launch -m` takes).

A command is a module of this package. It either trains from a recipe and exposes `argument_types` (dataclasses, which
give the flags, and whose values a `--config` file may set) with `run(*dataclass_instances)`, or is a plain tool and
exposes `add_arguments(parser)` with `run(args)`, or parses a grammar of its own by `parse(argv, prog, description)`
for `run(*parsed)`. Modules are imported only when their command is called. `--launch` starts a training in
several processes (`commands/launch.py`).
"""

import argparse
import dataclasses
import importlib
import os
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .commands.launch import TRAINING, check_processes, launch, launch_arguments


COMMANDS = {
    "demo": "train plain, constrained and deeply supervised models on bundled real data, and compare them",
    "classify": "fine-tune a text classifier from a recipe",
    "sft": "fine-tune a language model on instructions from a recipe",
    "generate": "answer instructions with a language model, under noise if asked for",
    "evaluate": "measure trained models under noise and at every layer, on the same held-out rows",
    "compare": "table, paired tests, a verdict in words and figures from evaluated runs",
    "tune": "search the settings of a recipe on validation rows, under noise",
    "denoise": "train a video denoiser from a recipe",
    "exit": "report what a trained model is worth, and costs, when it stops early",
    "card": "write the model card of a run from what was measured, and upload it where asked to",
}


# Told one of these, a command takes none of the others from a record: they say together which rows are measured.
SOURCES = (
    "dataset_name", "dataset_config_name", "train_split", "validation_split", "test_split", "train_file",
    "validation_file", "test_file", "data_layout", "data_dir", "train_files", "test_files",
)  # fmt: skip


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[Any, tuple]:
    """Turns a command line into the command's module and the arguments of its `run`.

    Args:
        argv (sequence of `str`, *optional*):
            The command line without the program's name. `None`: that of this process.

    Raises:
        ValueError: a `--config` file cannot be read, or it or the command line sets something the command lacks; or
            the command works in one process, and this is one of several.
        SystemExit: by argparse, on an unknown command or a value of the wrong type.
    """
    parser = argparse.ArgumentParser(
        prog="hf-descent",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Train transformers whose layers are constrained to descend.",
        epilog="commands:\n"
        + "\n".join(f"  {name:10} {summary}" for name, summary in COMMANDS.items())
        + f"\n\n{', '.join(TRAINING)} take --launch CONFIG (ddp, fsdp2, zero3, ... or a file), for several processes",
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="`hf-descent command --help` lists them")
    args = parser.parse_args(argv)
    if "LOCAL_RANK" in os.environ:  # some clusters set the size alone, in every container
        check_processes(args.command, int(os.environ.get("WORLD_SIZE", 1)))

    module = importlib.import_module(f"hf_descent.commands.{args.command}")
    prog, summary = f"hf-descent {args.command}", COMMANDS[args.command]
    if hasattr(module, "parse"):
        return module, module.parse(args.arguments, prog=prog, description=summary)
    if hasattr(module, "argument_types"):
        return module, parse_recipe(module.argument_types, args.arguments, prog=prog, description=summary)
    command_parser = argparse.ArgumentParser(prog=prog, description=summary, allow_abbrev=False)
    module.add_arguments(command_parser)
    parsed = command_parser.parse_args(args.arguments)
    if hasattr(parsed, "model"):
        known = recorded([parsed.model], flags_of(args.arguments))
        command_parser.set_defaults(**{name: value for name, value in known.items() if hasattr(parsed, name)})
        parsed = command_parser.parse_args(args.arguments)
    return module, (parsed,)


def flags_of(argv: Sequence[str]) -> set[str]:
    """The names of the flags on a command line."""
    return {word[2:].split("=")[0] for word in argv if word.startswith("--")}


def recorded(models: Sequence[str], told: Collection[str]) -> dict[str, Any]:
    """What the records of `models` say of arguments that are not `told`; what no run recorded keeps its default.

    Raises:
        ValueError: two records differ.
    """
    told, found = {*told, *(SOURCES if set(SOURCES) & set(told) else ())}, {}
    for model in models:
        for name, value in record_of(model).items():
            if name not in told and found.setdefault(name, value) != value:
                raise ValueError(
                    f"`{name}` was {found[name]!r} in the training of one of {list(models)} and {value!r} in that of "
                    f"another: say which by `--{name}`."
                )
    return found


def record_of(model: str) -> dict[str, Any]:
    """The arguments of data that a run recorded, but for those that had no value; of a checkpoint, those of its run.

    Older runs, and those that come from the Hub, tell of their files nothing but names: they name no sources.
    """
    from .runs import RunFolder  # takes seconds: not for `hf-descent --help`

    summary, folder = RunFolder(model).summary, Path(model).resolve()
    known = RunFolder(folder.parent if folder.name.startswith("checkpoint-") else folder).read(RunFolder.DATA)
    if not known:
        known = {name: value for name, value in summary.get("command", {}).items() if name not in (*SOURCES, "dtype")}
        known = {"max_seq_length": summary.get("arguments", {}).get("max_length")} | known  # as SFT calls it
    # What is drawn from the rows of training is none of the rows that are measured.
    return {name: value for name, value in known.items() if value is not None and name != "max_train_samples"}


def absolute(name: str, value: Any) -> Any:
    """The argument `name` of data with its paths made absolute, so that it can be read from anywhere."""
    if isinstance(value, list):
        return [absolute(name, item) for item in value]
    is_path = name.endswith(("_file", "_files", "_dir")) or (name == "dataset_name" and os.path.exists(value or ""))
    return os.path.abspath(value) if value and is_path and "://" not in value else value


def parse_recipe(
    argument_types: Sequence[type],
    argv: Sequence[str],
    ignore_unknown_keys: bool = False,
    models: Sequence[str] = (),
    **parser_kwargs,
) -> tuple:
    """Parses flags into dataclasses; a YAML file named by `--config` gives defaults, and flags win over it.

    Args:
        argument_types (sequence of `type`):
            Dataclasses as `transformers.HfArgumentParser` takes them.
        argv (sequence of `str`):
            The flags.
        ignore_unknown_keys (`bool`):
            Pass over what else the file sets, as the recipe of another command does.
        models (sequence of `str`):
            Finished runs, whose records give what neither flags nor the file do.
        parser_kwargs:
            Passed to the parser (`prog`, `description`, ...).

    Raises:
        ValueError: the file is missing, is not a mapping, or has keys that no dataclass has; or a flag is unknown.
    """
    from transformers import HfArgumentParser  # takes seconds: not for `hf-descent --help`

    # Abbreviated flags are off: a typo should fail, and not set whatever it happens to abbreviate.
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.add_argument("--config", help="YAML file with values for any of the arguments; flags win over it.")
    parser = HfArgumentParser(argument_types, parents=[config_parser], allow_abbrev=False, **parser_kwargs)

    config_path, values = config_parser.parse_known_args(argv)[0].config, {}
    fields = {field.name for dtype in argument_types for field in dataclasses.fields(dtype) if field.init}
    if config_path is not None:
        values = load_recipe(config_path)
        if ignore_unknown_keys:
            values = {name: value for name, value in values.items() if name in fields}
        elif unknown := sorted(set(values) - fields):
            raise ValueError(f"{config_path} sets {unknown}, which `{parser.prog}` does not have: check the spelling.")
    known = recorded(models, flags_of(argv) | values.keys()) if models else {}
    values = {name: value for name, value in known.items() if name in fields} | values
    # argparse converts a default given as a string by its field's type, so YAML's "1e-5" (a string there) is fine.
    parser.set_defaults(**values)
    for action in parser._actions:
        action.required = action.required and action.dest not in values
    return parser.parse_args_into_dataclasses(list(argv), look_for_args_file=False)[:-1]


def check_least(args: Any, least: Mapping[str, float]) -> None:
    """ValueError where an argument named in `least` is given, and is not at least that."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and not value >= bound:
            raise ValueError(f"`{name}` is {value}; give at least {bound}, or leave it out.")


def writable_folder(argument: str, path: str | Path) -> Path:
    """The folder `path`, made where it is missing; ValueError where nothing can be written there, to be said before
    anything is measured."""
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"Nothing can be written into {str(path)!r} ({error.strerror}); name another folder by `{argument}`."
        ) from error
    return Path(path)


def load_recipe(path: str) -> dict[str, Any]:
    """Reads a recipe: a YAML mapping of argument names to values.

    Raises:
        ValueError: the file is missing or does not hold a mapping with string keys.
    """
    if not Path(path).is_file():
        raise ValueError(f"`--config` is {path!r}, and there is no such file.")
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold lines of the form `argument: value`.")
    return values


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command line (by default this process's), or starts the processes that `--launch` asks for."""
    if launched := launch_arguments(sys.argv[1:] if argv is None else argv):
        launch(launched)
        return
    module, arguments = parse_arguments(argv)
    module.run(*arguments)
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        # Threads of a process group that is still there can abort the interpreter's end.
        sys.modules["torch.distributed"].destroy_process_group()


if __name__ == "__main__":
    main()
