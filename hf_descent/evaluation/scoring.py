"""What every evaluation shares: batches, a model's loss and metric as sums over items, results on disk."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, SequenceFeatureExtractor
from transformers.data import default_data_collator
from transformers.trainer_utils import RemoveColumnsCollator
from transformers.utils import ModelOutput, find_labels

from ..files import whole_file
from ..losses.label_checks import check_labels
from ..losses.layerwise import TokenStatistics
from ..losses.task import TaskLoss, loss_from_logits
from ..readout.labels import IGNORE_INDEX, aligned, are_token_labels, with_named_outputs
from ..readout.replay import output_logits
from ..readout.stack import inner_model
from .sums import fingerprint_of_tensors


Metric = str | Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def greater_is_better(metric: Metric) -> bool:
    """Whether more of a metric is better: as it, or the function it is a partial of, says; else yes, but for rmse."""
    function = getattr(metric, "func", metric)
    return getattr(metric, "greater_is_better", getattr(function, "greater_is_better", metric != "rmse"))


def name_of(function: Callable) -> str:
    """What results call a function of one's own (or a partial of one, or an object that is called)."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


class Scorer:
    """Loss and metric of one model's outputs, as float64 sums that add up over batches and processes.

    Args:
        model (`nn.Module`): the unwrapped model (a `PeftModel`, too).
        metric (`str` or function): "accuracy" (integer labels, of samples or tokens; of multi-label classification,
            each of its labels), "rmse" (floating labels), or a function (logits `[..., classes]`, labels `[...]` with
            -100 where there is none) -> (sum, count); its attribute `greater_is_better` says whether more is better
            (yes where it has none).
        scale (`float`): factor of the rmse, such as 255 for images in [0, 1].
        label_names (sequence of `str`, *optional*): the label arguments; `None`: the ones that `Trainer` finds.
        layer_loss_fn (function, *optional*): (outputs, labels, num_items_in_batch) -> mean loss, in place of the
            model's own; or Trainer's label smoother.
        readout (function, *optional*): readout(model, hidden, inputs) -> logits, where training used one.

    Raises:
        ValueError: an unknown metric; in use, a batch without labels or labels that do not suit the metric.
    """

    def __init__(
        self,
        model: nn.Module,
        metric: Metric = "accuracy",
        scale: float = 1.0,
        label_names: Sequence[str] | None = None,
        layer_loss_fn: Callable[..., torch.Tensor] | None = None,
        readout: Callable | None = None,
    ):
        if isinstance(metric, str) and metric not in ("accuracy", "rmse"):
            raise ValueError(
                f"`metric` is {metric!r}; use 'accuracy', 'rmse' or a function (logits, labels) -> (sum, count)."
            )
        if isinstance(metric, str):
            self.metric_name = metric
            self._metric = {"accuracy": _accuracy, "rmse": _squared_error}[metric]
        else:
            self.metric_name, self._metric = name_of(metric), metric
        self.greater_is_better = greater_is_better(metric)
        self.scale = scale
        self._given, self._model = model, inner_model(model)
        self._label_names = find_labels(type(self._model)) if label_names is None else label_names
        self._probe = partial(
            TaskLoss.probe, model, label_names=self._label_names, loss_fn=layer_loss_fn, readout=readout
        )
        self._task: TaskLoss | None = None  # unknown before the first batch
        self._checks_labels = layer_loss_fn is None and readout is None

    def __call__(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> torch.Tensor:
        """(metric sum, metric count, loss sum, items) of one batch; float64 `[4]` on the CPU."""
        logits, labels = self._scored(outputs, inputs)
        items = int(self.task(inputs).count(inputs))
        loss_sum = self._loss(outputs, inputs) * items if items else 0.0  # the mean over no items is not a number
        if self._metric is _accuracy and self._is_multi_label:
            logits, labels = torch.stack([-logits, logits], dim=-1), (labels > 0.5).long()  # two classes for each
        total, count = self._metric(logits, labels)
        return torch.tensor([float(total), float(count), loss_sum, items], dtype=torch.float64)

    def task(self, inputs: Mapping[str, Any]) -> TaskLoss:
        """The task loss, found out on the first batch."""
        if self._task is None:
            self._task = self._probe(with_named_outputs(self._model, inputs))
        return self._task

    def check(self, inputs: Mapping[str, Any]) -> None:
        """ValueError where the labels of a batch are none that the model's own loss takes."""
        name = self._label_name(inputs)
        if self._checks_labels and name is not None:
            check_labels(self._model, name, inputs[name])

    def model_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the model is given of a batch, as in training."""
        self.check(inputs)
        return with_named_outputs(self._model, self.task(inputs).model_inputs(inputs))

    @property
    def needs_logits(self) -> bool:
        """Whether the metric is more than how many of the labelled tokens are predicted right."""
        return self._metric is not _accuracy or self._is_multi_label

    def of_tokens(self, tokens: TokenStatistics) -> tuple[torch.Tensor, torch.Tensor]:
        """What `self(...)` and `sample_losses` give, of predictions of tokens whose logits are not made."""
        count = len(tokens.losses)
        sums = torch.tensor([float(tokens.hits.sum()), count, float(tokens.losses.sum()), count], dtype=torch.float64)
        size = int(tokens.samples.max()) + 1 if count else 0
        counts = torch.bincount(tokens.samples, minlength=size)  # [samples]
        losses = tokens.losses.new_zeros(size).index_add_(0, tokens.samples, tokens.losses)
        return sums, (losses[counts > 0] / counts[counts > 0]).cpu()

    def fingerprints(self, inputs: Mapping[str, Any]) -> tuple[str, str]:
        """Short texts that tell batches apart: by their signal and their labels, which models of any architecture
        have, and by all their tensors."""
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        names = [getattr(self._model, "main_input_name", "input_ids"), *self._label_names]
        data = fingerprint_of_tensors((name, tensors[name]) for name in names if name in tensors)
        return data, fingerprint_of_tensors(sorted(tensors.items()))

    def parts(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any], count: int) -> list[torch.Tensor]:
        """What `self(outputs, inputs)` gives for each of `count` copies of the batch `inputs`, run as one."""
        logits = output_logits(outputs)
        return [self(self._from_logits(part, inputs), inputs) for part in logits.chunk(count)]

    def scores_logits(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
        """Whether the logits alone, one row for each of the batch's samples, give the loss of these outputs."""
        tensors = (x for x in inputs.values() if torch.is_tensor(x))
        logits, rows = output_logits(outputs), {len(x) if x.ndim else 0 for x in tensors}
        try:
            return rows == {len(logits)} and np.isclose(
                self._loss(self._from_logits(logits, inputs), inputs), self._loss(outputs, inputs), rtol=1e-4
            )
        except Exception:  # whatever a loss of one's own does without the outputs that it needs
            return False

    def _from_logits(self, logits, inputs) -> ModelOutput:
        if not self.task(inputs).uses_model_loss:
            return ModelOutput(logits=logits)
        return ModelOutput(loss=loss_from_logits(self._model, logits, inputs.get("labels")), logits=logits)

    def sample_losses(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> torch.Tensor:
        """Mean loss of each sample over its own items, float32 `[samples]`; samples without items are left out.

        Cross-entropy for integer labels, mean squared error for floating ones (binary cross-entropy where
        `config.problem_type` says multi-label). ValueError where labels and logits do not belong to each other.
        """
        logits, labels = self._scored(outputs, inputs)
        if not labels.is_floating_point():
            if logits.shape[:-1] != labels.shape:
                raise ValueError(
                    f"{type(self._model).__name__} has logits of shape {list(logits.shape)} for labels of shape "
                    f"{list(labels.shape)}: there is no loss of each sample. `evaluate` has the layers' losses."
                )
            smoother = self.task(inputs).smoother
            smoothing = 0.0 if smoother is None else smoother.epsilon
            losses = _cross_entropy(logits, labels, smoothing).reshape(len(labels), -1).sum(1)  # [batch]
            counts = (labels != IGNORE_INDEX).reshape(len(labels), -1).sum(1)  # [batch]
            return losses[counts > 0] / counts[counts > 0]
        logits = logits.float().reshape(labels.shape)
        loss = F.binary_cross_entropy_with_logits if self._is_multi_label else F.mse_loss
        return loss(logits, labels, reduction="none").reshape(len(labels), -1).mean(1)

    @property
    def _is_multi_label(self) -> bool:
        problem = getattr(getattr(self._model, "config", None), "problem_type", None)
        return problem == "multi_label_classification"

    def _loss(self, outputs, inputs) -> float:
        task = self.task(inputs)
        return float(task(outputs, inputs, None if task.loss_fn is None else task.count(inputs)))

    def _scored(self, outputs, inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits `[..., classes]` and the labels `[...]` that they predict."""
        logits = output_logits(outputs)
        if inputs.get("start_positions") is not None:
            # As the models do: negative positions count as the first token, those past the end are left out.
            positions = [inputs["start_positions"].view(-1), inputs["end_positions"].view(-1)]
            labels = torch.stack(positions, dim=1).clamp(min=0)  # [batch, 2]
            return logits.transpose(1, 2), labels.where(labels < logits.shape[1], IGNORE_INDEX)
        if inputs.get("shift_labels") is not None:
            return logits, inputs["shift_labels"]
        name = self._label_name(inputs)
        if name is None:
            raise ValueError(f"A batch has the keys {sorted(inputs)} but no labels; add one of {self._label_names}.")
        labels = inputs[name]
        if not are_token_labels(labels) or logits.dim() != 3:
            # A single logit is a number to models, though labels are whole: as a class it would always be the first.
            return logits, labels.float() if torch.is_tensor(labels) and logits.shape[-1] == 1 else labels
        return aligned(self._given, logits, labels, self.task(inputs).shifts_labels)

    def _label_name(self, inputs) -> str | None:
        return next((name for name in self._label_names if inputs.get(name) is not None), None)


class Result:
    """A dataclass of float64 arrays and plain values that can be written to disk and read back."""

    def __post_init__(self):
        for field in fields(self):
            if field.type in (np.ndarray, np.ndarray | None) and (value := getattr(self, field.name)) is not None:
                setattr(self, field.name, np.asarray(value, dtype=np.float64))

    def to_json(self, path: str):
        """Write the attributes, whole or not at all."""
        with whole_file(path) as file:
            json.dump(asdict(self), file, default=np.ndarray.tolist)

    @classmethod
    def from_json(cls, path: str):
        """The result that `to_json` wrote."""
        with open(path, encoding="utf-8") as file:
            return cls(**json.load(file))


def metric_value(metric: str, scale: float, sums: np.ndarray) -> np.ndarray:
    """The metric from (metric sum, metric count, loss sum, items), `[..., 4]` -> `[...]`."""
    mean = sums[..., 0] / sums[..., 1]
    return scale * np.sqrt(mean) if metric == "rmse" else mean


def mean_loss(sums: np.ndarray) -> np.ndarray:
    """The mean loss from (metric sum, metric count, loss sum, items), `[..., 4]` -> `[...]`."""
    return sums[..., 2] / sums[..., 3]


def prepare_collator(
    model: nn.Module,
    data_collator: Callable | None,
    processing_class: Any | None,
    label_names: Sequence[str] | None = None,
    remove_unused_columns: bool = True,
) -> Callable[[list[Mapping[str, Any]]], Mapping[str, Any]]:
    """Rows to a batch as `Trainer` collates: columns that the model does not take are dropped, unless a collator of
    one's own needs them."""
    if data_collator is None:
        can_pad = isinstance(processing_class, PreTrainedTokenizerBase | SequenceFeatureExtractor)
        data_collator = DataCollatorWithPadding(processing_class) if can_pad else default_data_collator
    if not remove_unused_columns:
        return data_collator
    arguments = inspect.signature(type(inner_model(model)).forward).parameters
    return RemoveColumnsCollator(data_collator, [*arguments, *(label_names or ()), "label", "label_ids"])


def numbered_batches(
    dataset: Dataset | DataLoader, collate: Callable, batch_size: int, first: int = 0, step: int = 1
) -> Iterable[tuple[int, Any]]:
    """(index, batch) of the batches `first`, `first + step`, ... of `dataset` in its own order.

    The batches of a `DataLoader` are taken as they are; of a data set with a length, the others are not loaded.
    ValueError where `batch_size` is below 1, or `dataset` several under their names.
    """
    if isinstance(dataset, Mapping):  # as `Trainer` takes them
        raise ValueError(f"`dataset` holds {', '.join(map(repr, dataset))}; give one of them.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` is {batch_size}; give at least one sample a batch.")
    # A torch `IterableDataset` may have a length, and still no rows by number.
    if isinstance(dataset, DataLoader | IterableDataset) or not hasattr(dataset, "__len__"):
        loader = dataset if isinstance(dataset, DataLoader) else DataLoader(dataset, batch_size, collate_fn=collate)
        return islice(enumerate(loader), first, None, step)
    return _Numbered(dataset, collate, batch_size, range(first, math.ceil(len(dataset) / batch_size), step))


@dataclass
class _Numbered:
    """Batches with their indices, listed no more than loaded beforehand; with a length for the progress bar."""

    dataset: Dataset
    collate: Callable
    batch_size: int
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        rows = range(len(self.dataset))
        batches = (rows[index * self.batch_size : (index + 1) * self.batch_size] for index in self.indices)
        return zip(self.indices, DataLoader(self.dataset, batch_sampler=batches, collate_fn=self.collate))


def noise_key(draw: int, gamma: float, batch: int) -> tuple[int, int, int]:
    """Key of [`EmbeddingNoise.reseed`]: by the level itself, so that grids that share a level share its noise."""
    return draw, round(gamma * 1e6), batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Eval mode without gradients, each module's own mode restored; gives the device that inputs belong on."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        for module, training in modes.items():
            module.training = training


def _accuracy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if labels.is_floating_point():
        raise ValueError(
            "`metric` is 'accuracy' but the labels are numbers, not classes; use 'rmse' or a function "
            "(logits, labels) -> (sum, count)."
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"`metric` is 'accuracy', but there is no prediction for each label: logits are of shape "
            f"{list(logits.shape)}, labels of {list(labels.shape)}. Give a function (logits, labels) -> (sum, count)."
        )
    largest, found = logits.max(-1)  # not a number where a logit is not, of which `found` would be some class
    hits = torch.where(largest.isnan() & (labels != IGNORE_INDEX), torch.nan, (found == labels).float())
    return hits.sum(), (labels != IGNORE_INDEX).sum()


def _squared_error(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    if not labels.is_floating_point():
        raise ValueError(
            "`metric` is 'rmse' but the labels are integers; use 'accuracy' or a function "
            "(logits, labels) -> (sum, count)."
        )
    return F.mse_loss(logits.float().reshape(labels.shape), labels.float(), reduction="sum"), labels.numel()


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """`logits` `[..., classes]`, `labels` `[...]` -> `[...]`, 0 where ignored."""
    losses = F.cross_entropy(
        logits.float().flatten(0, -2),
        labels.flatten(),
        ignore_index=IGNORE_INDEX,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return losses.view(labels.shape)
