"""What the evaluation of a trainer needs beside its model: which rows count, which data, with which settings."""

from typing import Any

from accelerate.utils import find_batch_size
from transformers import DataCollatorWithFlattening, Trainer
from transformers.utils import logging

from ..constraints.problem import as_python
from ..readout.stack import inner_model


logger = logging.get_logger(__name__)

HIDDEN_OUTPUTS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def rows_counted_once(trainer: Trainer, inputs) -> int | None:
    """How many rows of a last evaluation batch are not repeats that fill it up; `None` for any other batch."""
    args, loader = trainer.args, trainer.accelerator.gradient_state
    if args.world_size == 1 or not loader.end_of_dataloader:
        return None
    if loader.remainder < 0 and not args.dataloader_drop_last:
        logger.warning_once(
            "The evaluation data has no length and is split without `dispatch_batches`: rows that are repeated to "
            "fill its last batch may count twice."
        )
    if loader.remainder <= 0:
        return None
    if isinstance(trainer.data_collator, DataCollatorWithFlattening):
        logger.warning_once(
            "Batches are padding-free: rows that are repeated to fill the last batch of the evaluation data may count "
            "twice."
        )
        return None
    rows = find_batch_size(inputs)
    return min(max(loader.remainder - args.process_index * rows, 0), rows)


def chosen_dataset(known, dataset):
    """The data set that `evaluate(dataset)` would take, of the trainer's own `known`; ValueError where it is none."""
    numbers = as_python(dataset)
    if isinstance(numbers[0] if isinstance(numbers, list) and numbers else numbers, int | float):
        raise ValueError(f"`eval_dataset` is {numbers}; give a data set. Noise levels go by their name, `gammas`.")
    if isinstance(known, dict) and (dataset is None or isinstance(dataset, str)):
        if dataset not in known:
            raise ValueError(f"`eval_dataset` is {dataset!r}; give one of {', '.join(map(repr, known))}.")
        return known[dataset]
    dataset = known if dataset is None else dataset
    if dataset is None or isinstance(dataset, dict | str):
        raise ValueError(f"`eval_dataset` is {dataset!r}; give one dataset.")
    return dataset


def evaluation_settings(trainer: Trainer, model, readout, shards_parameters: bool) -> dict[str, Any]:
    """The arguments of [`noise_curve`] and [`layer_profile`] that make them measure as `trainer.evaluate` does."""
    config = getattr(inner_model(model), "config", None)
    # As transformers' own losses tell regression.
    problem = getattr(config, "problem_type", None)
    classifies = "ForSequenceClassification" in type(model).__name__
    is_regression = problem == "regression" or (problem is None and classifies and config.num_labels == 1)
    return {
        "metric": "rmse" if is_regression else "accuracy",
        "data_collator": trainer.data_collator,
        "batch_size": trainer.args.eval_batch_size,
        "label_names": trainer.label_names,
        "layer_loss_fn": trainer.compute_loss_func or trainer.label_smoother,
        "readout": readout,
        "remove_unused_columns": trainer.args.remove_unused_columns,
        # Processes that gather parameters together cannot share the batches unevenly: each goes through all.
        "accelerator": None if shards_parameters else trainer.accelerator,
        "progress": trainer.is_world_process_zero() and not trainer.args.disable_tqdm,
    }


def shards_parameters(trainer: Trainer) -> bool:
    """Whether a forward gathers parameters, so that all processes have to run equally many."""
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return trainer.is_fsdp_enabled or (trainer.is_deepspeed_enabled and plugin.zero_stage == 3)


def evaluated_model(trainer: Trainer):
    """The model as `evaluate` runs it: before its first turn, mixed precision is not yet in its forward."""
    accelerator = trainer.accelerator
    mixed = accelerator.mixed_precision != "no" and not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
    if mixed and not accelerator._models:
        accelerator.prepare_model(trainer.model, evaluation_mode=True)
    return accelerator.unwrap_model(trainer.model)
