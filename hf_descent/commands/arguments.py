"""How the commands get their arguments: flags, a recipe's file, and the record of the run that is measured."""

import argparse
import dataclasses
import os
from collections.abc import Collection, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml


# What `--help` says of the arguments of the descent and of Trainer; it leaves out the others.
SHORT_HELP = {
    "objective": "descent, erm (plain training), deep_supervision, layerskip, ...",
    "descent_alpha": "line, steps, or the paper's step size",
    "exit_targets": "'{3: 0.05}': layer 3 may lose 5 %%",
    "loss_targets": "'{3: 0.4}': layer 3 must lie below 0.4",
    "descent_strength": "share of an even descent that is asked for",
    "constrained_layers": "the layers to constrain",
    "max_last_layer_rise": "how far the last layer's loss may rise",
    "dual_learning_rate": "how fast the multipliers move",
    "readout_token_fraction": "share of the tokens that layers read",
    "noise_gamma": "noise on the inputs in training",
    "eval_gammas": "noise levels to measure at",
    "model_name_or_path": "model on the Hub or in a folder",
    "pooling": "what reads a layer: the model's head, or a linear layer on [CLS] or the mean",
    "use_peft": "train adapters (LoRA)",
    "overwrite_output_dir": "start afresh in a used folder",
    "with_plain": "train plainly, too, and compare",
    "prompt_format": "alpaca's templates, or the chat template",
    "load_in_4bit": "weights in 4 bits",
    "dtype": "type of the weights",
    "dataset_name": "data set on the Hub",
    "train_file": "csv, tsv, json or parquet file",
    "validation_file": "rows to choose by",
    "test_file": "rows for the final report",
    "label_column": "column of the class",
    "max_eval_samples": "evaluate on so many rows",
    "max_seq_length": "tokens to keep of a text",
    "output_dir": "folder of the run",
    "learning_rate": "of the optimizer",
    "num_train_epochs": "passes over the training rows",
    "max_steps": "steps, in place of epochs",
    "per_device_train_batch_size": "rows in a step, per process",
    "max_length": "tokens to keep of a row",
    "seed": "random seed",
    "eval_strategy": "when to evaluate",
    "save_strategy": "when to save",
    "load_best_model_at_end": "keep the best checkpoint",
    "resume_from_checkpoint": "true, or the folder of a checkpoint",
    "report_to": "trackers",
    "push_to_hub": "upload the model",
}
# What `--help` leaves out of the arguments of models and data.
RARE = {
    "split_seed", "dataset_config_name", "train_split", "validation_split", "test_split", "text_pair_column",
    "validation_split_percentage", "max_train_samples", "lora_r", "lora_target_modules", "unrolled_layers",
    "freeze_embeddings", "lora_alpha", "lora_dropout",
    "model_revision", "attn_implementation", "lora_target_parameters", "lora_modules_to_save", "lora_task_type",
    "use_rslora", "use_dora", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "bnb_4bit_quant_storage", "attention_step", "dictionary_size", "shared_dictionary", "sparsity", "coupling",
    "curvature", "loss_gamma", "noise_draws", "validation_percentage", "split_gap", "num_frames", "frame_size",
    "patch_size", "cache_dir", "readout",
}  # fmt: skip
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
    width = partial(argparse.ArgumentDefaultsHelpFormatter, max_help_position=33)
    parser_kwargs.setdefault("formatter_class", width)
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
    """The help: a group for each dataclass, the descent's first, and each flag once. It shows the arguments that most
    runs need, in a line or two each; all texts and arguments where `shows_all`."""
    from ..configs import DescentArguments

    groups = {dtype.__doc__.splitlines()[0].rstrip("."): dtype for dtype in argument_types}
    is_training = issubclass(argument_types[-1], DescentArguments)
    parser.add_argument(
        "--help_all",
        action="help",
        help="list and explain all arguments" if is_training else argparse.SUPPRESS,
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
            is_short = is_training and not shows_all
            has_short_help = dtype is DescentArguments or title == "Trainer"
            is_hidden = action.dest in RARE or (has_short_help and action.dest not in SHORT_HELP)
            if action.const is False or (
                is_short and is_hidden
            ):  # a flag is turned off by its value
                action.help = argparse.SUPPRESS
                continue
            action.option_strings = action.option_strings[:1]
            if is_short:
                first_sentence = action.help.split(". ")[0].rstrip(".")
                action.help = SHORT_HELP.get(action.dest, first_sentence)
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
