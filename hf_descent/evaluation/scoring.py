"""Shared by all evaluations: batches, the loss and metric of a model as sums over items, results on disk."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, SequenceFeatureExtractor
from transformers.data import default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator, has_length

from ..files import read_json, write_json
from ..logs import progress_bar
from ..losses.task import TaskLoss
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.labels import IGNORE_INDEX, documents_of
from ..readout.linear_cross_entropy import TokenStatistics
from ..readout.stack import inner_model
from .fingerprints import fingerprint_of_examples, fingerprint_of_tensors, sample_of


Metric = str | Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
CUSTOM = "a function (logits, labels) -> (sum, count)"


def greater_is_better(metric: Metric) -> bool:
    """Whether more of a metric is better. A function says so by an attribute of this name; by default more is better,
    except for "rmse"."""
    default = metric != "rmse"
    function = getattr(metric, "func", metric)
    return getattr(metric, "greater_is_better", getattr(function, "greater_is_better", default))


def name_of(function: str | Callable) -> str:
    """The name of a function in results: its own, also in a partial, or that of its class."""
    function = getattr(function, "func", function)
    if isinstance(function, str):
        return function
    return getattr(function, "__name__", type(function).__name__)


@dataclass
class Evaluation:
    """A model on held-out data: its batches, and the loss and metric of its outputs as sums over items.

    Args:
        model (`nn.Module`): unwrapped, on its device (a `PeftModel`, too).
        dataset (`Dataset` or `DataLoader`): labelled held-out data; a `DataLoader`'s batches are taken as they are.
        metric (`str` or function): "accuracy" (integer labels of samples or tokens, or multi-label ones), "rmse"
            (floating labels), or a function (logits `[..., classes]`, labels `[...]` with -100 where there is none) ->
            (sum, count), whose attribute `greater_is_better` may be False.
        scale (`float`): factor of the rmse, such as 255 for images in [0, 1].
        data_collator, processing_class, remove_unused_columns: as in `Trainer`.
        batch_size (`int`): samples per batch; the noise depends on it.
        label_names (sequence of `str`, *optional*): the label arguments. Default: those that `Trainer` finds.
        layer_loss_fn (function, *optional*): (outputs, labels, num_items_in_batch) -> mean loss, in place of the
            model's own; or Trainer's label smoother.
        readout (function, *optional*): readout(model, hidden, inputs) -> logits, if training used one.
        accelerator (`Accelerator`, *optional*): share the batches among its processes, all of which must call.
        progress (`bool`): show a progress bar over batches.

    ValueError for an unknown metric. When it is used, ValueError for a batch without labels, or with labels that do
    not suit the metric.
    """

    model: nn.Module
    dataset: Dataset | DataLoader
    metric: Metric = "accuracy"
    scale: float = 1.0
    data_collator: Callable | None = None
    processing_class: Any | None = None
    remove_unused_columns: bool = True
    batch_size: int = 32
    label_names: Sequence[str] | None = None
    layer_loss_fn: Callable[..., torch.Tensor] | None = None
    readout: Callable | None = None
    accelerator: Accelerator | None = None
    progress: bool = False
    task: TaskLoss | None = field(default=None, init=False)  # found out on the first batch

    def __post_init__(self):
        if isinstance(self.metric, str) != (name_of(self.metric) in ELEMENTWISE):
            raise ValueError(
                f"`metric` is {self.metric!r}; use 'accuracy', 'rmse' or {CUSTOM} of another name."
            )

        if isinstance(self.dataset, Mapping):  # as `Trainer` takes them
            raise ValueError(
                f"`dataset` holds {', '.join(map(repr, self.dataset))}; give one of them."
            )

        if self.batch_size < 1:
            raise ValueError(
                f"`batch_size` is {self.batch_size}; give at least one sample a batch."
            )

        self._inner = inner_model(self.model)
        self._collate = self.data_collator
        if self._collate is None:
            self._collate = default_data_collator
            if isinstance(
                self.processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor
            ):
                self._collate = DataCollatorWithPadding(self.processing_class)

        if self.remove_unused_columns:
            arguments = inspect.signature(type(self._inner).forward).parameters
            columns = [*arguments, *(self.label_names or ()), "label", "label_ids"]
            self._collate = RemoveColumnsCollator(self._collate, columns)

    @property
    def needs_logits(self) -> bool:
        """Whether the metric needs logits. For the accuracy [`TokenStatistics`] are enough."""
        return self.metric != "accuracy"

    def batches(self, title: str = "") -> Iterator[tuple[int, Mapping[str, Any]]]:
        """(index, inputs) of this process's batches, as the model takes them."""
        loader = self.dataset
        if not isinstance(loader, DataLoader):
            loader = DataLoader(loader, int(self.batch_size), collate_fn=self._collate)

        first = 0
        step = 1
        if self.accelerator is not None:
            first = self.accelerator.process_index
            step = self.accelerator.num_processes

        total = None
        if has_length(loader):
            total = math.ceil((len(loader) - first) / step)

        numbered = islice(enumerate(loader), first, None, step)
        for index, batch in progress_bar(numbered, self.progress, desc=title, total=total):
            yield index, self._prepare(batch)

    def fingerprint_of_rows(self) -> str | None:
        """The fingerprint of a sample of the rows, as trainings record it. The data set must have a length."""
        examples = DataLoader(sample_of(self.dataset), collate_fn=self._collate)
        return fingerprint_of_examples(len(self.dataset), examples)

    def _prepare(self, batch):
        inputs = send_to_device(batch, next(self.model.parameters()).device)
        if self.task is None:
            self.task = TaskLoss.probe(
                self.model,
                inputs,
                label_names=self.label_names,
                loss_fn=self.layer_loss_fn,
                readout=self.readout,
            )
        return inputs

    def loss_sums(self, outputs: Any, inputs: Mapping[str, Any]) -> np.ndarray:
        """(loss sum, items) of one batch, from the model's `outputs`; float64 `[2]`."""
        items = self.task.count(inputs)
        if not items:  # the mean over no items is not a number
            return np.zeros(2)
        # As Trainer gives a custom loss the items of the batch.
        given_items = None if self.task.loss_fn is None else items
        loss = float(self.task(outputs, inputs, given_items))
        return np.array([loss * int(items), int(items)])

    def metric_sums(self, outputs: Any, inputs: Mapping[str, Any]) -> np.ndarray:
        """(metric sum, metric count) of each row of one batch, float64 `[rows, 2]`. In packed texts a row is a
        document.

        `outputs` are the model's, or [`TokenStatistics`] if no logits are made. If a metric of rows does not add up to
        that of the batch, the whole batch is in the first row, and the others are zero.
        """
        if isinstance(outputs, TokenStatistics):
            labels = self.task.predicted_labels(inputs)
            counts = labels.ne(IGNORE_INDEX)
            hits = counts.float().masked_scatter(counts, outputs.hits.float())
            return _added_up(hits, counts, inputs)

        logits, labels = self._scored(outputs, inputs)
        if not isinstance(self.metric, str):
            return self._called_on_each(logits, labels)
        return _added_up(*ELEMENTWISE[self.metric](logits, labels), inputs)

    def _called_on_each(self, logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
        """A custom metric's sums over each row, or over the batch."""
        rows = []
        for row in range(len(labels)):
            of_row = slice(row, row + 1)
            rows.append(self.metric(logits[of_row], labels[of_row]))

        sums = np.array(rows, dtype=np.float64)  # [rows, 2]
        total = np.array(self.metric(logits, labels), dtype=np.float64)
        if not np.allclose(sums.sum(axis=0), total, rtol=1e-4, equal_nan=True):
            sums = np.zeros_like(sums)
            sums[0] = total
        return sums

    def _scored(self, outputs: Any, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits and labels that the metric takes. Each of several labels per row becomes two classes."""
        logits, labels = self.task.predictions(outputs, inputs)
        # The first forward may find out the `problem_type`.
        problem = getattr(getattr(self._inner, "config", None), "problem_type", None)
        if self.metric == "accuracy" and problem == "multi_label_classification":
            return torch.stack([-logits, logits], dim=-1), (labels > 0.5).long()
        return logits, labels

    def fingerprint(self, inputs: Mapping[str, Any]) -> str:
        """A short text that differs for other data. It depends on the signal and the labels, so not on the kind of
        model."""
        names = [getattr(self._inner, "main_input_name", "input_ids"), *self.task.label_names]
        return fingerprint_of_tensors(
            (name, inputs[name]) for name in names if torch.is_tensor(inputs.get(name))
        )


class Result:
    """A dataclass of float64 arrays and plain values that can be written to disk and read back."""

    def __post_init__(self):
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if attribute.type in (np.ndarray, np.ndarray | None) and value is not None:
                setattr(self, attribute.name, np.asarray(value, dtype=np.float64))

    def to_json(self, path: str):
        """Write the attributes, whole or not at all."""
        write_json(path, asdict(self), indent=None, default=np.ndarray.tolist)

    @classmethod
    def from_json(cls, path: str):
        """The result that `to_json` wrote. Attributes that only former versions had are left out."""
        names = {attribute.name for attribute in fields(cls)}
        values = read_json(path)
        return cls(**{name: value for name, value in values.items() if name in names})


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A table as text. The first column is aligned to the left; "-" stands for NaN."""
    rows = [["-" if cell.startswith("nan") else cell for cell in row] for row in rows]
    first, *others = zip(*rows)
    columns = [_aligned(first, str.ljust), *(_aligned(column, str.rjust) for column in others)]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a table in Markdown, titles first."""
    titles, *others = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([titles, "|---" * len(rows[0]) + "|", *others])


def _aligned(cells: Sequence[str], align: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, cells))
    return [align(cell, width) for cell in cells]


def metric_value(metric: str, scale: float, sums: np.ndarray) -> np.ndarray:
    """The metric from (metric sum, metric count), `[..., 2]` -> `[...]`."""
    mean = sums[..., 0] / sums[..., 1]
    return scale * np.sqrt(mean) if metric == "rmse" else mean


def metric_of_rows(metric: str, scale: float, rows: np.ndarray) -> np.ndarray:
    """The part of each row in the metric, `[n, ..., 2]` -> `[n, ...]`: their mean is the metric.

    The metric is a mean over items, or its root; a part is the first order of what the row adds (the delta method).
    """
    totals = rows.sum(axis=0)
    value = metric_value(metric, scale, totals)  # [...]
    mean = totals[..., 0] / totals[..., 1]
    off = (rows[..., 0] - mean * rows[..., 1]) / rows[..., 1].mean(axis=0)  # [n, ...]
    if metric == "rmse":
        off = off * scale**2 / np.where(value > 0, 2 * value, 1.0)
    return value + off


def noisy(
    noise: EmbeddingNoise | None, gamma: float, draw: int, batch: int
) -> AbstractContextManager:
    """Within it the input of the model has the noise of this level, draw and batch; none at level 0."""
    if noise is None or not gamma:
        return nullcontext()
    # The key has the level itself, so that grids that share a level share its noise.
    return noise.at(gamma, draw, round(gamma * 1e6), batch)


def _added_up(values: torch.Tensor, counts: torch.Tensor, inputs: Mapping[str, Any]) -> np.ndarray:
    """The sums of values and counts, `[rows, ...]` each, over each row or document, float64 `[rows, 2]`."""
    both = torch.stack([values.float(), counts.float()], dim=-1)
    positions = inputs.get("position_ids")
    if counts.dim() == 2 and positions is not None and positions.shape[-1] >= counts.shape[1]:
        documents, count = documents_of(inputs, counts)
        sums = both.new_zeros(count, 2).index_add(0, documents.flatten(), both.flatten(0, 1))
    else:
        sums = both.reshape(len(both), -1, 2).sum(dim=1)
    return sums.cpu().double().numpy()


def _hits(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each label is predicted, and whether there is one."""
    if labels.is_floating_point():
        raise ValueError(
            f"`metric` is 'accuracy' but the labels are numbers, not classes; use 'rmse' or {CUSTOM}."
        )

    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`metric` is 'accuracy', but there is no prediction for each label: logits are of shape "
            f"{list(logits.shape)}, labels of {list(labels.shape)}. Use {CUSTOM}."
        )

    largest, predicted = logits.max(-1)
    is_labelled = labels != IGNORE_INDEX
    hits = (predicted == labels).float()
    # If a logit is NaN, `predicted` is just some class.
    return torch.where(largest.isnan() & is_labelled, torch.nan, hits), is_labelled


def _squared_errors(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not labels.is_floating_point():
        raise ValueError(
            f"`metric` is 'rmse' but the labels are integers; use 'accuracy' or {CUSTOM}."
        )
    errors = logits.float().reshape(labels.shape) - labels.float()
    return errors.square(), torch.ones_like(errors)


# The metrics by name: what maps logits and labels to a value and a count for each label.
ELEMENTWISE = {"accuracy": _hits, "rmse": _squared_errors}
