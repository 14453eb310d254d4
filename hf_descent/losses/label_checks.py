"""Refuses labels that a model's own loss does not take: they would end training late, or abort a GPU's process."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import nn

from ..readout.labels import IGNORE_INDEX
from ..readout.stack import inner_model


# With one label per row; "TokenClassification" has one per token.
ROW_CLASSIFIERS = tuple(f"For{kind}Classification" for kind in ("Sequence", "Image", "Audio", "Video"))


def check_labels(model: nn.Module, name: str, labels: Any, where: str = "") -> None:
    """ValueError where the loss of `model`, a class of transformers or of ours, does not take `labels`, a tensor or a
    column's values."""
    model = inner_model(model)
    kind, problem = type(model).__name__, getattr(getattr(model, "config", None), "problem_type", None)
    known = type(model).__module__.startswith(("transformers.models.", "hf_descent.models."))
    if not known or kind.endswith("ForCTC") or problem == "regression":
        return
    classifies, of_rows = kind.endswith("Classification"), kind.endswith(ROW_CLASSIFIERS)
    head = model.get_output_embeddings()
    classes = model.config.num_labels if classifies else head.out_features if type(head) is nn.Linear else 0
    if isinstance(labels, torch.Tensor):
        labels = (labels.float() if labels.is_floating_point() else labels).cpu()
    values = np.asarray(labels)
    if classes < 2 or not values.size or values.dtype.kind not in "biufU":
        return
    whole, several = values.dtype.kind in "iu", problem == "multi_label_classification"
    found, wanted = f"`{name}`{where} has {values.flat[0].item()!r}", f"{kind} takes whole numbers, 0 to {classes - 1}"
    if values.dtype.kind == "U":
        raise ValueError(f"{found}, but {wanted}: number the classes, as `Dataset.class_encode_column` does.")
    if of_rows and several and whole:
        raise ValueError(f"{found}, but `problem_type={problem!r}` takes floats, {classes} a row, 0.0 or 1.0.")
    if of_rows and not several and values.ndim == 1 and not whole:
        raise ValueError(f"{found}, but {wanted}: convert them, or load the model with `num_labels=1` for regression.")
    if of_rows and values.ndim == 2 and values.shape[1] > 1 and whole:
        raise ValueError(
            f"`{name}`{where} has {values.shape[1]} whole numbers a row, but {wanted}, one a row: give that, or "
            "floats and `problem_type='multi_label_classification'` in the config."
        )
    # Language models may mark labels by other numbers below 0.
    wrong = (
        values[(values >= classes) | ((values < 0) & (values != IGNORE_INDEX) & classifies)] if whole else values[:0]
    )
    if wrong.size:
        remedy = "load the model with more `num_labels`" if classifies else "resize its token embeddings"
        raise ValueError(f"`{name}`{where} has {wrong[0]}, but {wanted}, and {IGNORE_INDEX}: change it, or {remedy}.")


def check_datasets(model: nn.Module, datasets: Mapping[str, Any], label_names: Iterable[str]) -> None:
    """As [`check_labels`] for `datasets` by their argument, where a column or a list holds one label per row."""
    if not type(inner_model(model)).__name__.endswith(ROW_CLASSIFIERS):
        return
    for argument, data in datasets.items():
        is_dataset = isinstance(data, Dataset) and data.format["type"] != "custom"
        if not (is_dataset or isinstance(data, list)) or not data or not isinstance(first := data[0], Mapping):
            continue
        # A collator takes "label" where there is no other, and makes whole numbers of true and false.
        name = next((name for name in (*label_names, "label") if name in first), None)
        if name is None or np.ndim(first[name]):
            continue
        if is_dataset:
            # The whole table first: the rows of a shuffle or a selection are slow to read.
            values = data.data.column(name).unique().to_numpy(zero_copy_only=False)
            with suppress(ValueError):
                if values.dtype.kind in "iuf":
                    check_labels(model, name, values)
                    continue
        values = np.asarray(data.with_format("numpy")[name][:] if is_dataset else [row.get(name) for row in data])
        check_labels(model, name, values.astype(int) if values.dtype == bool else values, f" in `{argument}`")
