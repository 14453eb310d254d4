"""How the commands get their arguments: flags, a recipe's file, and the record of the run that is measured."""

import argparse
import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml


# What `--help` of a command that trains says of its arguments; it leaves out the others.
SHORT_HELP = {
    "objective": "descent, erm (plain training), deep_supervision, layerskip, ...",
    "descent_alpha": "what each layer must reach: line, steps, or a number (the paper's alpha)",
    "exit_targets": "'{3: 0.05}': layer 3 may have 5 %% more loss than the last layer",
    "loss_targets": "'{3: 0.4}': loss of layer 3 at most 0.4",
    "descent_strength": "0 to 1: how much of an even fall of the loss over the layers to ask for",
    "constrained_layers": "the layers to constrain, such as 3 6",
    "max_last_layer_rise": "constraints give way if the last layer's loss rises by more than this share",
    "dual_learning_rate": "how fast layers that fall short gain weight",
    "readout_token_fraction": "share of the tokens to read lower layers on",
    "noise_gamma": "noise on training inputs",
    "eval_gammas": "noise levels to evaluate at",
    "model_name_or_path": "model on the Hub or in a folder",
    "pooling": "what reads a layer: the model's head, or a linear layer on [CLS] or the mean",
    "architecture": "kind of the denoiser",
    "num_layers": "number of layers of UT and DUST",
    "use_peft": "train adapters (LoRA)",
    "overwrite_output_dir": "start afresh in a folder that is not empty",
    "with_plain": "train plainly first, and compare",
    "prompt_format": "alpaca's templates, or the chat template",
    "load_in_4bit": "weights in 4 bits",
    "dtype": "type of the weights",
    "dataset_name": "data set on the Hub",
    "train_file": "csv, tsv, json or parquet file",
    "train_files": "videos: files, folders of frames, or patterns of them",
    "test_files": "videos for the report after training",
    "split_by": "hold out whole videos, or the end of each",
    "validation_file": "examples that can choose a checkpoint",
    "test_file": "examples for the verdict after training",
    "text_column": "column of the text",
    "label_column": "column of the class",
    "max_train_samples": "train on at most so many examples",
    "max_eval_samples": "evaluate on at most so many examples",
    "max_seq_length": "tokens to keep of a text",
    "output_dir": "folder of the run",
    "learning_rate": "step size of the optimizer",
    "num_train_epochs": "passes over the training data",
    "max_steps": "steps, in place of epochs",
    "per_device_train_batch_size": "examples in a step, per process",
    "max_length": "tokens to keep of an example",
    "seed": "random seed",
    "eval_strategy": "when to evaluate",
    "save_strategy": "when to save",
    "load_best_model_at_end": "keep the best checkpoint",
    "resume_from_checkpoint": "true, or the folder of a checkpoint",
    "report_to": "tracker, such as tensorboard",
    "push_to_hub": "upload the model",
}
# If one of these is given, a command takes none of the others from a record: together they say which rows are
# measured.
SOURCES = (
    "dataset_name", "dataset_config_name", "train_split", "validation_split", "test_split", "train_file",
    "validation_file", "test_file", "train_files", "test_files",
)  # fmt: skip
HELP = {"-h", "--help", "--help_all"}
TRAINING = (
    "classify",
    "denoise",
    "sft",
)  # the commands that train, and may do so in several processes


def refuse(message: str) -> NoReturn:
    """Takes the place of a parser's `error`, which would print the usage first."""
    raise ValueError(message)


def recorded(model: str, told: Collection[str]) -> dict[str, Any]:
    """The arguments in the record of `model`, without those that are `told`."""
    left_out = set(told)
    if left_out.intersection(SOURCES):
        left_out.update(SOURCES)
    return {name: value for name, value in record_of(model).items() if name not in left_out}


def record_of(model: str) -> dict[str, Any]:
    """The arguments of data that a run recorded, without those that had no value. For a checkpoint, those of its run.

    Older runs, and runs from the Hub, record only the names of their files, so they name no sources.
    """
    from ..runs import RunFolder  # takes seconds: not for `hf-descent --help`

    folder = Path(model).resolve()
    run = folder.parent if folder.name.startswith("checkpoint-") else folder
    record = RunFolder(run).read(RunFolder.DATA)
    if not record:
        record = _record_in_summary(RunFolder(model).summary)
    # What is drawn from the examples of training is none of the rows that are measured.
    record.pop("max_train_samples", None)
    return {name: value for name, value in record.items() if value is not None}


def _record_in_summary(summary: Mapping[str, Any]) -> dict[str, Any]:
    record = {"max_seq_length": summary.get("arguments", {}).get("max_length")}  # as SFT calls it
    for name, value in summary.get("command", {}).items():
        if name not in SOURCES and name != "dtype":
            record[name] = value
    return record


def absolute(name: str, value: Any) -> Any:
    """The value of the data argument `name` with absolute paths, so that it can be read from anywhere."""
    if isinstance(value, list):
        return [absolute(name, item) for item in value]
    if not value or "://" in str(value):
        return value
    is_path = name.endswith(("_file", "_files", "_dir"))
    if is_path or (name == "dataset_name" and os.path.exists(value)):
        return os.path.abspath(value)
    return value


def parse_recipe(
    argument_types: Sequence[type],
    argv: Sequence[str],
    prog: str,
    description: str = "",
    usage: str | None = None,
    model: str | None = None,
) -> tuple:
    """Parse flags into dataclasses, by `transformers.HfArgumentParser`. A YAML file named by `--config` gives
    defaults, and flags win over it. ValueError if the file is no mapping, or a name or kind of value is unknown.

    Values that neither gives come from the record of `model`, a finished run. The file may then be the recipe of its
    training: its other settings are left out.
    """
    config_parser = _config_parser()
    path = config_parser.parse_known_args(argv)[0].config
    parser = _recipe_parser(argument_types, config_parser, prog, description, usage)
    if HELP.intersection(argv):
        _arrange(parser, argument_types, shows_all="--help_all" in argv)

    hints = {}
    for dtype in argument_types:
        hints.update(get_type_hints(dtype))
    values = {}
    if path is not None:
        recipe = _read_recipe(path, _names(argument_types), prog, leaves_out=model is not None)
        values = {name: _as_flag(name, value, hints[name], path) for name, value in recipe.items()}
    if model is not None:
        told = [*values, *_flags_in(argv)]
        for name, value in recorded(model, told).items():
            if name in _names(argument_types):
                values.setdefault(name, value)

    # argparse converts a default given as a string by its field's type, so YAML's "1e-5" (a string there) is fine.
    parser.set_defaults(**values)
    for action in parser._actions:
        action.required = action.required and action.dest not in values
    *parsed, _, unknown = parser.parse_args_into_dataclasses(
        list(argv), return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ValueError(f"`{prog}` does not have {unknown}: check the spelling (`{prog} --help`).")

    return tuple(parsed)


def _config_parser() -> argparse.ArgumentParser:
    # Abbreviated flags are off: a typo should fail, and not set the flag that it happens to abbreviate.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse
    parser.add_argument(
        "--config", help="YAML file with values for any of the arguments; flags win over it."
    )
    return parser


def _recipe_parser(
    argument_types: Sequence[type],
    config_parser: argparse.ArgumentParser,
    prog: str,
    description: str,
    usage: str | None,
) -> argparse.ArgumentParser:
    from transformers import HfArgumentParser  # takes seconds: not for `hf-descent --help`

    parser = HfArgumentParser(
        argument_types,
        parents=[config_parser],
        allow_abbrev=False,
        prog=prog,
        description=description,
        usage=f"{prog} [--config RECIPE] [flags]" if usage is None else usage,
        formatter_class=partial(argparse.ArgumentDefaultsHelpFormatter, max_help_position=33),
    )
    parser.error = refuse
    return parser


def _names(argument_types: Sequence[type]) -> set[str]:
    """The names of the arguments that can be set."""
    return {
        field.name for dtype in argument_types for field in dataclasses.fields(dtype) if field.init
    }


def _flags_in(argv: Sequence[str]) -> set[str]:
    """The names of the arguments that a command line sets."""
    return {word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")}


def _read_recipe(path: str, names: set[str], prog: str, leaves_out: bool) -> dict[str, Any]:
    """The values of the arguments `names` in a YAML file. Others are left out if `leaves_out`, else ValueError."""
    with open(path, "rb") as file:
        values = yaml.safe_load(file)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold lines of the form `argument: value`.")
    unknown = sorted(values.keys() - names)
    if unknown and not leaves_out:
        raise ValueError(
            f"{path} sets {unknown}, which `{prog}` does not have: check the spelling."
        )
    return {name: value for name, value in values.items() if name in names}


def _as_flag(name: str, value: Any, hint: Any, path: str) -> Any:
    """The value of the argument `name` in the YAML file `path`. For a list argument, a single value becomes a list. A
    number of another type becomes text, which argparse converts. ValueError if the argument does not take its kind.
    """
    from ..configs import JSON_ARGUMENTS

    kinds = {get_origin(kind) or kind for kind in (hint, *get_args(hint))}
    if list in kinds and str not in kinds and isinstance(value, str | float | int):
        return [value]
    if isinstance(value, str) or name in JSON_ARGUMENTS or type(value) in kinds:
        return value
    if value is False:
        return "no"  # the word "no" is False in YAML
    if isinstance(value, bool | int | float):
        return str(value)

    raise ValueError(
        f"{path} sets `{name}` to {value!r}; give a single value, or leave the line out."
    )


def _arrange(
    parser: argparse.ArgumentParser, argument_types: Sequence[type], shows_all: bool
) -> None:
    """Arrange the help: a group for each dataclass, the descent's first, and each flag once. It shows the arguments
    that most runs need, in a line or two each; with `shows_all`, all arguments and full texts."""
    from ..configs import DescentArguments

    is_training = issubclass(argument_types[-1], DescentArguments)
    parser.add_argument(
        "--help_all",
        action="help",
        help="list and explain all arguments" if is_training else argparse.SUPPRESS,
    )

    groups = {dtype.__doc__.splitlines()[0].rstrip("."): dtype for dtype in argument_types}
    if is_training:
        *others, (_, trainer) = groups.items()
        groups = {
            "Descent constraints and noise": DescentArguments,
            **dict(others),
            "Trainer": trainer,
        }

    is_short = is_training and not shows_all
    for title, dtype in groups.items():
        group = parser.add_argument_group(title)
        for action in _moved(parser, group, dtype):
            if is_short:
                action.help = SHORT_HELP.get(action.dest, argparse.SUPPRESS)
            _describe(action)

    for action in parser._actions:
        if action.default is None:
            action.default = argparse.SUPPRESS


def _moved(parser: argparse.ArgumentParser, group: Any, dtype: type) -> list[argparse.Action]:
    """The flags of a dataclass, moved into its group of the help."""
    names = {field.name for field in dataclasses.fields(dtype)}
    options = parser._optionals._group_actions
    moved = [action for action in options if action.dest in names]
    for action in moved:
        options.remove(action)
        group._group_actions.append(action)
    return moved


def _describe(action: argparse.Action) -> None:
    """Give a flag that the help shows one name."""
    if action.help == argparse.SUPPRESS:
        return
    if action.const is False:  # `--no_...`: a flag is turned off by its value
        action.help = argparse.SUPPRESS
        return
    action.option_strings = action.option_strings[:1]
    if action.required:
        action.help += " (required)"
    if action.choices is None:
        action.metavar = "{true,false}" if action.const else "VALUE"


def first_word(argv: Sequence[str], what: str, usage: str) -> str | None:
    """The one word before the first flag. Without it, `None` if the help is asked for, else ValueError."""
    words = list(takewhile(lambda word: not word.startswith("-"), argv))
    if len(words) == 1:
        return words[0]
    if HELP.intersection(argv):
        return None
    named = ", ".join(words) if words else "missing"
    raise ValueError(f"The {what} is {named}: `{usage}`.")


def parse_model(
    argument_types: Sequence[type], argv: Sequence[str], prog: str, description: str
) -> tuple:
    """Parse `MODEL [--config RECIPE] [flags]` (see [`parse_recipe`]) into the model and the dataclasses; ValueError
    if there is not one model."""
    usage = f"{prog} MODEL [--config RECIPE] [flags]"
    description = f"{description}. MODEL is the output folder of a run, or a name on the Hub."
    model = first_word(argv, "model", usage)
    flags = argv if model is None else argv[1:]
    return model, *parse_recipe(argument_types, flags, prog, description, usage, model)
