"""Checks of the training and evaluation rows, before any training time is spent."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..extras import is_dataset
from ..loading import has_position_table, position_limit
from ..readout.labels import IGNORE_INDEX
from ..readout.stack import inner_model
from .evaluation_sets import evaluation_sets
from .holdout import check_dual_dataset


logger = logging.get_logger(__name__)


def check_data(trainer: Trainer, readout, dual_dataset) -> None:
    """ValueError if training could learn nothing from the rows or their labels, or parts of the data share rows."""
    rows = trainer.train_dataset
    if rows is not None and has_length(rows) and not len(rows):
        raise ValueError("`train_dataset` has no examples: check the filters that it went through.")
    # Other collators, losses and readouts may make classes of any labels.
    is_stock = getattr(trainer.data_collator, "__module__", "").startswith("transformers.")
    if is_stock and trainer.compute_loss_func is None and readout is None:
        parts = {"train_dataset": rows, **evaluation_sets(trainer.eval_dataset)}
        for name, data in parts.items():
            _check_classes(trainer.model, name, data, trainer.label_names)
    if dual_dataset is not None:
        check_dual_dataset(trainer, dual_dataset)


def _check_classes(model: nn.Module, argument: str, data: Any, label_names: Sequence[str]) -> None:
    """ValueError if labels, one per row, are whole numbers that are no classes of `model`, a classifier of
    transformers or of this package. Training would fail late, or abort a GPU's process."""
    classes = _number_of_classes(inner_model(model))
    name = _label_column(data, label_names)
    if classes is None or name is None:
        return
    if is_dataset(data):
        labels = np.asarray(data.with_format("numpy")[name][:])
    else:
        labels = np.asarray([row.get(name) for row in data])

    if labels.dtype.kind not in "iu":
        return

    is_class = (labels >= 0) & (labels < classes)
    wrong = labels[~is_class & (labels != IGNORE_INDEX)]
    if wrong.size:
        raise ValueError(
            f"`{name}` in `{argument}` has {wrong[0]}, but {type(inner_model(model)).__name__} takes whole numbers, 0 "
            f"to {classes - 1}, and {IGNORE_INDEX}: change it, or load the model with more `num_labels`."
        )


def _number_of_classes(model: nn.Module) -> int | None:
    """How many classes a known classifier has; `None` for other models, and if the labels are no classes."""
    kind = type(model)
    if not kind.__module__.startswith(("transformers.models.", "hf_descent.models.")):
        return None
    if not kind.__name__.endswith("Classification") or model.config.num_labels <= 1:
        return None
    if model.config.problem_type in ("regression", "multi_label_classification"):
        return None
    return model.config.num_labels


def _label_column(data: Any, label_names: Sequence[str]) -> str | None:
    """The column or key that has one label per row, in data that is cheap to read; `None` if there is none."""
    is_stored = is_dataset(data) and data.format["type"] != "custom"
    if not (is_stored or isinstance(data, list)) or not len(data):
        return None
    first = data[0]
    if not isinstance(first, Mapping):
        return None
    # If there is no other, a collator takes "label".
    for name in (*label_names, "label"):
        if name in first:
            return name if np.ndim(first[name]) == 0 else None
    return None


def check_positions(trainer: Trainer, dataset, name: str) -> None:
    """ValueError if a sequence of a tokenised data set is longer than the model's table of positions."""
    positions = position_limit(trainer.model)
    if positions is None or not has_position_table(trainer.model):
        return
    # If rows hold several documents, positions start afresh with each.
    if trainer.padding_free and "seq_lengths" in dataset.column_names:
        longest = max(map(max, dataset["seq_lengths"]))
    else:
        longest = max(map(len, dataset["input_ids"]))

    if longest > positions:
        raise ValueError(
            f"The {name} dataset has a sequence of {longest} tokens, but {type(trainer.model).__name__} has "
            f"{positions} positions; set `max_length` to at most that (it is {trainer.args.max_length})."
        )


def report_dropped(kept, given, name: str, max_length: int | None) -> None:
    """Log once how many examples of `given` TRL has left out of `kept`, and why."""
    count = len(given) - len(kept)
    if 0 < count < len(given):  # if none is left, the next check raises
        logger.warning_once(
            f"TRL dropped {count} of the {len(given)} examples of the {name} dataset: no token with a label is within "
            f"`max_length`={max_length}, as where the prompt alone is that long. To keep them raise `max_length`, or "
            "set `truncation_mode='keep_end'`."
        )


def check_some_labels(dataset, name: str, max_length: int | None) -> None:
    """ValueError if no token of a tokenised data set has a label."""
    if not any(set(row["labels"]) - {IGNORE_INDEX} for row in dataset):
        given = f"The {name} dataset has no token with a label after masking and cutting to `max_length`={max_length}"
        raise ValueError(f"{given}: raise `max_length`, or see to the completions.")
