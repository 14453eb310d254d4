"""Refuses labels that are no classes of the model: training would end late, or abort a GPU's process."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from ..readout.labels import IGNORE_INDEX
from ..readout.stack import inner_model


def check_labels(model: nn.Module, name: str, labels: Any, where: str = "") -> None:
    """ValueError where `labels`, a tensor or a column's values, hold whole numbers that are no classes of `model`, a
    classifier of transformers or of ours."""
    if not _classifies(model) or (isinstance(labels, torch.Tensor) and labels.is_floating_point()):
        return
    model = inner_model(model)
    classes, values = model.config.num_labels, np.asarray(labels.cpu() if torch.is_tensor(labels) else labels)
    if classes < 2 or values.dtype.kind not in "iu":
        return
    wrong = values[(values >= classes) | ((values < 0) & (values != IGNORE_INDEX))]
    if wrong.size:
        raise ValueError(
            f"`{name}`{where} has {wrong.flat[0]}, but {type(model).__name__} takes whole numbers, 0 to "
            f"{classes - 1}, and {IGNORE_INDEX}: change it, or load the model with more `num_labels`."
        )


def check_datasets(model: nn.Module, datasets: Mapping[str, Any], label_names: Iterable[str]) -> None:
    """As [`check_labels`] for `datasets` by their argument, where a column or a list holds one label per row."""
    if not _classifies(model):
        return
    for argument, data in datasets.items():
        is_dataset = isinstance(data, Dataset) and data.format["type"] != "custom"
        if not (is_dataset or isinstance(data, list)) or not data or not isinstance(first := data[0], Mapping):
            continue
        # A collator takes "label" where there is no other, and makes whole numbers of true and false.
        name = next((name for name in (*label_names, "label") if name in first), None)
        if name is not None and not np.ndim(first[name]):
            values = np.asarray(data.with_format("numpy")[name][:] if is_dataset else [row.get(name) for row in data])
            check_labels(model, name, values, f" in `{argument}`")


def _classifies(model: nn.Module) -> bool:
    """Whether the labels of `model` are its classes."""
    model = inner_model(model)
    known = type(model).__module__.startswith(("transformers.models.", "hf_descent.models."))
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    is_classifier = known and type(model).__name__.endswith("Classification")
    return is_classifier and problem not in ("regression", "multi_label_classification")
