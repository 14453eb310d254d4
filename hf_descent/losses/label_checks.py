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
    """ValueError where `labels`, a tensor or a column's values, hold text or numbers that are no classes of `model`, a
    classifier or language model of transformers or of ours."""
    model = inner_model(model)
    kind, problem = type(model).__name__, getattr(getattr(model, "config", None), "problem_type", None)
    known = type(model).__module__.startswith(("transformers.models.", "hf_descent.models."))
    if not known or kind.endswith("ForCTC") or problem in ("regression", "multi_label_classification"):
        return
    classifies, head = kind.endswith("Classification"), model.get_output_embeddings()
    classes = model.config.num_labels if classifies else head.out_features if type(head) is nn.Linear else 0
    if isinstance(labels, torch.Tensor) and labels.is_floating_point():
        return
    values = np.asarray(labels.cpu() if isinstance(labels, torch.Tensor) else labels)
    if classes < 2 or values.dtype.kind not in "iuU":
        return
    remedy = "load the model with more `num_labels`" if classifies else "resize its token embeddings"
    if values.dtype.kind == "U":
        wrong, remedy = values, "number the classes, as `Dataset.class_encode_column` does"
    else:
        # Language models may mark labels by other numbers below 0.
        wrong = values[(values >= classes) | ((values < 0) & (values != IGNORE_INDEX) & classifies)]
    if wrong.size:
        raise ValueError(
            f"`{name}`{where} has {wrong.flat[0].item()!r}, but {kind} takes whole numbers, 0 to {classes - 1}, and "
            f"{IGNORE_INDEX}: change it, or {remedy}."
        )


def check_datasets(model: nn.Module, datasets: Mapping[str, Any], label_names: Iterable[str]) -> None:
    """As [`check_labels`] for `datasets` by their argument, where a column or a list holds one label per row."""
    if not type(inner_model(model)).__name__.endswith("Classification"):
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
