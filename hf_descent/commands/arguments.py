"""How the commands get their arguments: flags, a recipe's file, and the record of the run that is measured."""

import argparse
import dataclasses
import os
from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml


# Trainer's own arguments that every help lists.
COMMON = (
    "output_dir", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "max_length",
    "seed", "eval_strategy", "save_strategy", "load_best_model_at_end", "resume_from_checkpoint", "report_to",
    "push_to_hub",
)  # fmt: skip
# Given one of these, a command takes none of the others from a record: together they say which rows are measured.
SOURCES = (
    "dataset_name", "dataset_config_name", "train_split", "validation_split", "test_split", "train_file",
    "validation_file", "test_file", "train_files", "test_files",
)  # fmt: skip
HELP = {"-h", "--help", "--help_all"}
TRAINING = (
    "classify",
    "denoise",
    "sft",
)  # the commands that train, and share their work among processes


def refuse(message: str) -> NoReturn:
    """In the place of a parser's `error`, which would print how the command is used first."""
    raise ValueError(message)


def recorded(models: Sequence[str], told: Collection[str]) -> dict[str, Any]:
    """What the records of `models` say of arguments that are not `told`; ValueError where two records differ."""
    told, found = {*told, *(SOURCES if set(SOURCES) & set(told) else ())}, {}
    for model in models:
        for name, value in record_of(model).items():
            if name not in told and found.setdefault(name, value) != value:
                both = f"{found[name]!r} in the training of one of {list(models)} and {value!r} in that of another"
                raise ValueError(f"`{name}` was {both}: say which by `--{name}`.")
    return found


def record_of(model: str) -> dict[str, Any]:
    """The arguments of data that a run recorded, but for those that had no value; of a checkpoint, those of its run.

    Older runs, and those that come from the Hub, tell of their files nothing but names: they name no sources.
    """
    from ..runs import RunFolder  # takes seconds: not for `hf-descent --help`

    summary, folder = RunFolder(model).summary, Path(model).resolve()
    known = RunFolder(folder.parent if folder.name.startswith("checkpoint-") else folder).read(
        RunFolder.DATA
    )
    if not known:
        known = {
            name: value
            for name, value in summary.get("command", {}).items()
            if name not in (*SOURCES, "dtype")
        }
        known = {
            "max_seq_length": summary.get("arguments", {}).get("max_length")
        } | known  # as SFT calls it
    # What is drawn from the rows of training is none of the rows that are measured.
    return {
        name: value
        for name, value in known.items()
        if value is not None and name != "max_train_samples"
    }


def absolute(name: str, value: Any) -> Any:
    """The argument `name` of data with its paths made absolute, so that it can be read from anywhere."""
    if isinstance(value, list):
        return [absolute(name, item) for item in value]
    is_path = name.endswith(("_file", "_files", "_dir")) or (
        name == "dataset_name" and os.path.exists(value or "")
    )
    return os.path.abspath(value) if value and is_path and "://" not in value else value


def parse_recipe(
    argument_types: Sequence[type], argv: Sequence[str], models: Sequence[str] = (), **parser_kwargs
) -> tuple:
    """Parses flags into dataclasses, by `transformers.HfArgumentParser`; a YAML file named by `--config` gives
    defaults, and flags win over it. ValueError where the file is no mapping, or a name or kind of value is unknown.

    What neither gives is that of the records of `models`, finished runs. The file may then be the recipe of their
    training: what else it sets is left out.
    """
    from transformers import HfArgumentParser  # takes seconds: not for `hf-descent --help`

    # Abbreviated flags are off: a typo should fail, and not set whatever it happens to abbreviate.
    config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    config_parser.error = refuse
    config_parser.add_argument(
        "--config", help="YAML file with values for any of the arguments; flags win over it."
    )
    parser_kwargs.setdefault("usage", f"{parser_kwargs.get('prog', '')} [--config RECIPE] [flags]")
    parser = HfArgumentParser(
        argument_types, parents=[config_parser], allow_abbrev=False, **parser_kwargs
    )
    parser.error = refuse
    config_path, values = config_parser.parse_known_args(argv)[0].config, {}
    if HELP & {*argv}:
        _arrange(parser, argument_types, "--help_all" in argv)
    fields = {
        field.name for dtype in argument_types for field in dataclasses.fields(dtype) if field.init
    }
    if config_path is not None:
        with open(config_path, "rb") as file:
            values = yaml.safe_load(file)
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise ValueError(f"{config_path} must hold lines of the form `argument: value`.")
        if models:
            values = {name: value for name, value in values.items() if name in fields}
        elif unknown := sorted(set(values) - fields):
            raise ValueError(
                f"{config_path} sets {unknown}, which `{parser.prog}` does not have: check the spelling."
            )
    hints = {name: hint for dtype in argument_types for name, hint in get_type_hints(dtype).items()}
    values = {
        name: _as_flag(name, value, hints[name], config_path) for name, value in values.items()
    }
    flags = {word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    known = recorded(models, flags | values.keys()) if models else {}
    values = {name: value for name, value in known.items() if name in fields} | values
    # argparse converts a default given as a string by its field's type, so YAML's "1e-5" (a string there) is fine.
    parser.set_defaults(**values)
    for action in parser._actions:
        action.required = action.required and action.dest not in values
    *parsed, _, unknown = parser.parse_args_into_dataclasses(
        list(argv), True, look_for_args_file=False
    )
    if unknown:
        raise ValueError(
            f"`{parser.prog}` does not have {unknown}: check the spelling (`{parser.prog} --help`)."
        )
    return tuple(parsed)


def _as_flag(name: str, value: Any, hint: Any, path: str) -> Any:
    """The value of the argument `name` in the YAML file `path`, one of a list as a list; a number of another type than
    the argument's as text, which argparse converts. ValueError where it is of a kind that the argument does not take.
    """
    from ..configs import JSON_ARGUMENTS

    kinds = {get_origin(kind) or kind for kind in (hint, *get_args(hint))}
    if list in kinds and str not in kinds and isinstance(value, str | float | int):
        return [value]
    if isinstance(value, str) or name in JSON_ARGUMENTS or type(value) in kinds:
        return value
    if isinstance(value, bool | int | float):
        return "no" if value is False else str(value)  # the word "no" is False in YAML
    raise ValueError(
        f"{path} sets `{name}` to {value!r}; give a single value, or leave the line out."
    )


def _arrange(
    parser: argparse.ArgumentParser, argument_types: Sequence[type], shows_all: bool
) -> None:
    """The help: a group for each dataclass, the descent's first, and each flag once, with the first sentence of its
    text; of Trainer's arguments the common ones. All texts and arguments where `shows_all`."""
    from ..configs import DescentArguments

    groups = {dtype.__doc__.splitlines()[0].rstrip("."): dtype for dtype in argument_types}
    is_training = issubclass(argument_types[-1], DescentArguments)
    parser.add_argument(
        "--help_all",
        action="help",
        help="list and explain all" if is_training else argparse.SUPPRESS,
    )
    if is_training:
        *others, (_, trainer) = groups.items()
        groups = {
            "Descent constraints and noise": DescentArguments,
            **dict(others),
            "Trainer": trainer,
        }
    options = parser._optionals._group_actions
    for title, dtype in groups.items():
        group, names = (
            parser.add_argument_group(title),
            {field.name for field in dataclasses.fields(dtype)},
        )
        for action in [action for action in options if action.dest in names]:
            options.remove(action)
            group._group_actions.append(action)
            is_rare = title == "Trainer" and not shows_all and action.dest not in COMMON
            if is_rare or action.const is False:  # a flag is turned off by its value, too
                action.help = argparse.SUPPRESS
                continue
            action.option_strings = action.option_strings[:1]
            action.help = (
                action.help.split(". ")[0].rstrip(".")
                if is_training and not shows_all
                else action.help
            )
            action.help += " (required)" * action.required
            if action.choices is None:
                action.metavar = "{true,false}" if action.const else "VALUE"
    for action in parser._actions:
        action.default = argparse.SUPPRESS if action.default is None else action.default


def models_of(argv: Sequence[str]) -> list[str]:
    """The words before the first flag."""
    return list(takewhile(lambda word: not word.startswith("-"), argv))


def parse_models(
    argument_types: Sequence[type],
    argv: Sequence[str],
    prog: str,
    description: str,
    most: int | None = 1,
) -> tuple:
    """Parses `MODEL... [--config RECIPE] [flags]` (see [`parse_recipe`]) into the models and the dataclasses;
    ValueError where there is no model, or more than `most`."""
    models, usage = (
        models_of(argv),
        f"{prog} MODEL{'' if most else '...'} [--config RECIPE] [flags]",
    )
    if not HELP & {*argv} and not 0 < len(models) <= (most or len(models)):
        raise ValueError(f"The models are {models or 'missing'}: `{usage}`.")
    kwargs = {"prog": prog, "usage": usage, "description": description}
    return models, *parse_recipe(argument_types, argv[len(models) :], models, **kwargs)
