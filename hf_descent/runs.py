"""The folder of a run: the names of its result files, which of them are of its last training, and what it records."""

import dataclasses
import os
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

import hf_descent

from .configs import DescentArguments
from .constraints.arguments import as_python
from .files import find_json, read_json, write_json


logger = logging.get_logger(__name__)

# Recorded at their defaults, too, beside the arguments of this package.
TRAINING_ARGUMENTS = (
    "gradient_accumulation_steps", "label_smoothing_factor", "learning_rate", "lr_scheduler_type", "max_grad_norm",
    "max_steps", "neftune_noise_alpha", "num_train_epochs", "optim", "per_device_train_batch_size", "seed",
    "warmup_steps", "weight_decay", "world_size",
)  # fmt: skip
# Not recorded, since they change no training: folders, names, logs, evaluations, saves and hardware.
LEFT_OUT = {
    "accelerator_config", "batch_eval_metrics", "bf16_full_eval", "dataset_num_proc", "debug", "deepspeed",
    "disable_tqdm", "enable_jit_checkpoint", "fp16_full_eval", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "ignore_data_skip", "local_rank", "output_dir", "pad_to_multiple_of",
    "parallelism_config", "per_device_eval_batch_size", "prediction_loss_only", "project", "push_to_hub", "report_to",
    "resume_from_checkpoint", "run_name", "skip_memory_metrics", "torch_empty_cache_steps", "use_cpu",
}  # fmt: skip
LEFT_OUT_PREFIXES = (
    "activation_", "dataloader_", "ddp_", "do_", "eval_", "fsdp", "hub_", "include_", "log_", "logging_", "restore_",
    "save_", "torch_compile", "trackio_",
)  # fmt: skip
SECRETS = (
    "key",
    "password",
    "secret",
    "token",
)  # last words of the names of what is never recorded


class RunFolder:
    """The result files in a run's folder, `path`; a name on the Hub does for `summary`.

    Only results that are not older than the training in `descent_config.json` count. A folder without that file, or of
    a model that another trainer made, has no such time, so all of its results count.
    """

    SUMMARY = "descent_config.json"
    CARD = "model_card.json"
    # Where the data came from, and how it was read. It holds paths of this machine, so its name is one that neither
    # Trainer nor `card` uploads.
    DATA = "_data.json"
    # What `hf-descent evaluate` writes.
    EVALUATIONS = (
        "layer_profile*.json", "verdict*.json", "certificate*.json", "noise_curve.*", "typos_curve.*",
        "salt_and_pepper_curve.*", "privacy_curve.json",
    )  # fmt: skip

    def __init__(self, path: str | os.PathLike):
        self.name = os.fspath(path)
        self.path = Path(path)

    @property
    def summary(self) -> dict[str, Any]:
        """The contents of `descent_config.json`; empty if there is none. ValueError if it cannot be read."""
        return find_json(self.name, self.SUMMARY)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write `descent_config.json`, whole or not at all: `summary`, with versions of the libraries by default."""
        libraries = (hf_descent, torch, transformers)
        versions = {library.__name__: str(library.__version__) for library in libraries}
        # FSDP writes sharded weights later, and so makes no folder for whole ones.
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / self.SUMMARY, {"versions": versions, **summary})

    def fresh(self, pattern: str) -> list[Path]:
        """The files of that name (or pattern) that are results of the last training."""
        paths = sorted(self.path.glob(pattern))
        if not paths:
            return []

        started = self.summary.get("training_started", 0.0)
        fresh = []
        for path in paths:
            if path.stat().st_mtime >= started:
                fresh.append(path)
            else:
                logger.warning_once(
                    f"{path} is older than the training of this folder's model: it is left out."
                )

        return fresh

    def read(self, name: str) -> dict[str, Any]:
        """The contents of a fresh JSON file; empty if there is none."""
        return next(map(read_json, self.fresh(name)), {})

    def results(self, kind: type, pattern: str) -> list:
        """The fresh results of the class `kind` in the files `pattern`."""
        return [kind.from_json(str(path)) for path in self.fresh(f"{pattern}.json")]

    def write(self, results: Mapping[str, Any]) -> None:
        """Write results by their names, as JSON."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, result in results.items():
            result.to_json(str(self.path / f"{name}.json"))

    def remove_evaluations(self, *others: str) -> None:
        """Remove the results of an earlier evaluation, perhaps of other rows or weights, and files of `others`."""
        for pattern in (*self.EVALUATIONS, *others):
            for path in self.path.glob(pattern):
                path.unlink()


def tables(results: Mapping[str, Any]) -> str:
    """Results as people read them, each under its name."""
    return "\n\n".join(f"{name.replace('_', ' ')}\n{result}" for name, result in results.items())


def training_arguments(args: DescentArguments) -> dict[str, Any]:
    """The arguments that define a training, the seed among them, in JSON values: this package's and
    `TRAINING_ARGUMENTS`, and of the others those that are not at their defaults; "unset" stands for `None` there."""
    own_names = [argument.name for argument in dataclasses.fields(DescentArguments)]
    recorded = {}
    for name in (*own_names, *TRAINING_ARGUMENTS):
        recorded[name] = as_python(getattr(args, name))
    recorded.update(dataclasses.asdict(args.dual_settings))

    for argument in dataclasses.fields(args):
        name = argument.name
        if name in recorded or _is_left_out(name) or not argument.init:
            continue
        value = json_value(getattr(args, name))
        if value != _default(argument):
            # None would be taken for what is not recorded.
            recorded[name] = "unset" if value is None else value

    return recorded


def _is_left_out(name: str) -> bool:
    if name == "dataloader_drop_last":
        return False
    return name in LEFT_OUT or name.startswith(LEFT_OUT_PREFIXES) or _is_secret(name)


def _default(argument: dataclasses.Field) -> Any:
    """The default of an argument, in JSON values."""
    if argument.default_factory is not dataclasses.MISSING:
        return json_value(argument.default_factory())
    return json_value(argument.default)


def json_value(value: Any) -> Any:
    """A JSON value of an argument, without secrets; of a path its last part: seeds may start from anywhere."""
    value = as_python(value)
    if isinstance(value, Mapping):
        items = ((str(name), item) for name, item in value.items())
        return {name: json_value(item) for name, item in items if not _is_secret(name)}

    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str) and os.path.exists(value):
        return os.path.basename(os.path.abspath(value))
    if isinstance(value, str | int | float | None):
        return value

    # Where an object lies in memory is another place in every process.
    return re.sub(r" at 0x\w+", "", str(value))


def _is_secret(name: str) -> bool:
    return name.split("_")[-1] in SECRETS and name not in ("eos_token", "pad_token")
