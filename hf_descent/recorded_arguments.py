"""What is recorded of a run's arguments, by which its way of training is told from others."""

import dataclasses
import os
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from .configs import DescentArguments
from .constraints.problem import as_python


# Recorded at their defaults, too, beside the arguments of this package.
TRAINING_ARGUMENTS = (
    "gradient_accumulation_steps", "label_smoothing_factor", "learning_rate", "lr_scheduler_type", "max_grad_norm",
    "max_steps", "neftune_noise_alpha", "num_train_epochs", "optim", "per_device_train_batch_size", "seed",
    "warmup_steps", "weight_decay", "world_size",
)  # fmt: skip
# Those that make no way of training another: folders, names, reports, evaluations, what is saved, and hardware.
LEFT_OUT = re.compile(
    r"(activation|ddp|eval|fsdp|hub|logging|save|torch_compile|trackio)(_.*)?|gradient_checkpointing(_kwargs)?|"
    r"accelerator_config|dataloader_(?!drop_last).*|dataset_num_proc|deepspeed|enable_jit_checkpoint|local_rank|"
    r"pad_to_multiple_of|parallelism_config|torch_empty_cache_steps|use_cpu|"
    r"batch_eval_metrics|(bf|fp)16_full_eval|debug|disable_tqdm|do_(train|eval|predict)|include_(for_metrics|num_.*)|"
    r"log_(level.*|on_each_node)|output_dir|per_device_eval_batch_size|prediction_loss_only|project|push_to_hub|"
    r"report_to|run_name|skip_memory_metrics|ignore_data_skip|restore_callback_states.*|resume_from_checkpoint"
)
SECRETS = re.compile(r"(^|(?<!eos)(?<!pad)_)(token|key|password|secret)$")


def training_arguments(args: DescentArguments) -> dict[str, Any]:
    """The arguments that make one way of training another, the seed among them, in JSON values: this package's and
    `TRAINING_ARGUMENTS`, and of the others those that are not at their defaults; "unset" stands for `None` there."""
    names = [*(argument.name for argument in dataclasses.fields(DescentArguments)), *TRAINING_ARGUMENTS]
    recorded = {name: as_python(getattr(args, name)) for name in names}
    for argument in dataclasses.fields(args):
        name, default = argument.name, argument.default
        if name in recorded or LEFT_OUT.fullmatch(name) or SECRETS.search(name) or not argument.init:
            continue
        if argument.default_factory is not dataclasses.MISSING:
            default = argument.default_factory()
        if (value := json_value(getattr(args, name))) != json_value(default):
            recorded[name] = "unset" if value is None else value  # None would be taken for what is not recorded
    return recorded


def json_value(value: Any) -> Any:
    """A JSON value of an argument, without its secrets; of a path its last part, since seeds of one training may start
    from anywhere."""
    value = as_python(value)
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items() if not SECRETS.search(str(name))}
    if isinstance(value, list):
        return [json_value(item) for item in value]
    value = value.value if isinstance(value, Enum) else value
    if isinstance(value, str) and os.path.exists(value):
        return os.path.basename(os.path.abspath(value))
    # Where an object lies in memory is another place in every process.
    return value if isinstance(value, str | int | float | None) else re.sub(r" at 0x\w+", "", str(value))
