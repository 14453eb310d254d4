"""How the commands get their arguments: flags, a recipe's file, and the record of the run that is measured."""

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


SOURCES = (
    "dataset_name", "dataset_config_name", "train_split", "validation_split", "test_split", "train_file",
    "validation_file", "test_file", "data_layout", "data_dir", "train_files", "test_files",
)  # fmt: skip


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
    from ..runs import RunFolder  # takes seconds: not for `hf-descent --help`

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
