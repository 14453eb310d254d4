"""Early exit per sample: a classifier's confident samples leave the batch, and later layers run on the others only."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import binom, norm
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset
from transformers.utils import ModelOutput

from ..evaluation.scoring import Result
from ..readout.labels import IGNORE_INDEX, labels_of
from ..readout.replay import Readout, evaluating, output_logits, probing
from ..readout.stack import intercepted
from ..readout.tape import Tape, off_in_replay, switched_off, taped
from .profile import load_batches, rows_of, turns


MAX_THRESHOLDS = 1000  # candidates tried in a calibration


@dataclass
class ConfidenceReport(Result):
    """A classifier with and without early exit, on the same batches.

    Attributes:
        accuracy, full_accuracy: with early exit, and of the last layer for all samples.
        exit_shares (float64 `[L]`): share of the samples that leave after each layer.
        speedup: median ratio of the wall-clock times of a pass over the data, timed in turns.
        threshold, batch_size: the settings.
    """

    accuracy: float
    full_accuracy: float
    exit_shares: np.ndarray
    speedup: float
    threshold: float
    batch_size: int

    @property
    def mean_layers(self) -> float:
        """Layers that a sample passes, on average."""
        return float(self.exit_shares @ np.arange(1, len(self.exit_shares) + 1))

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.1%}" for share in self.exit_shares)
        return (
            f"entropy < {self.threshold:.4g}: accuracy {self.accuracy:.4f} ({self.full_accuracy:.4f} without "
            f"early exit), {self.mean_layers:.2f} of {len(self.exit_shares)} layers a sample, "
            f"{self.speedup:.2f} times as fast in batches of {self.batch_size}\n"
            f"leaving after layer 1, 2, ...: {shares}"
        )


class ConfidenceExit:
    """A classifier each of whose samples stops at the first layer that is sure of it.

    A layer is sure where its uncertainty is below `threshold`: the entropy of the class probabilities divided by the
    logarithm of their number, from 0 to 1. Later layers run on the rest of the batch; an accelerator synchronizes
    after each layer to know its size.

    Args:
        model (`nn.Module`): a classifier with logits `[batch, classes]`, on its device; run in eval mode.
        threshold (`float`, *optional*): uncertainty below which a layer is sure (0: never); [`calibrate`] sets it.

    Raises:
        ValueError: a bad `threshold`, or a model of several labels a sample.

    Example:

    ```python
    fast = ConfidenceExit(model).calibrate(validation, max_loss=0.01, processing_class=tokenizer)
    fast(**batch).logits  # [batch, classes], each row from the layer in `.exit_layers`
    ```
    """

    def __init__(self, model: nn.Module, threshold: float | None = None):
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` is {threshold}; an uncertainty lies between 0 and 1.")
        if getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification":
            raise ValueError(f"{type(model).__name__} gives several labels a sample: use `truncate`.")
        self.model, self.threshold = model, threshold
        # Names of the inputs -> place of a tensor in a layer's call -> its batch dimension, as met so far.
        self._batch_dims: dict[frozenset[str], dict[str, int | None]] = {}

    def __call__(self, **inputs) -> ModelOutput:
        """The model's `logits` `[batch, classes]`, each row read out at the layer in `exit_layers` `[batch]`.

        ValueError for no threshold, or a model without a shared readout, class logits or a batch dimension in what its
        layers pass.
        """
        if self.threshold is None:
            raise ValueError("`threshold` is not set: give it, or call `calibrate` with validation data first.")
        inputs = _without_labels(inputs)
        reader = Readout.probe(self.model, inputs)
        dims = self._batch_dims.setdefault(frozenset(inputs), {})
        forward = partial(_ShrinkingForward, reader, inputs, dims, self.threshold)
        with evaluating(self.model), switched_off(off_in_replay(self.model, reader.stack)):
            try:
                return forward().run()
            except KeyError:  # a tensor met for the first time
                dims |= _find_batch_dims(reader, inputs)
                return forward().run()

    def calibrate(
        self, dataset: Dataset | DataLoader, max_loss: float = 0.01, confidence: float = 0.95, **settings
    ) -> "ConfidenceExit":
        """Set the threshold that runs the fewest layers among those that cost at most `max_loss` of the accuracy.

        Fewer samples give a stricter threshold. Ends with [`check`] on one batch.

        Args:
            dataset (`Dataset` or `DataLoader`): labelled validation data, not the test data.
            max_loss (`float`): accuracy that may be lost, as a difference (0.01: 0.90 becomes 0.89).
            confidence (`float`): probability that no more is lost on other such data; in [0.5, 1).
            settings: `batch_size`, `processing_class`, `data_collator` of [`~evaluation.scoring.Evaluation`].

        ValueError as when called, and for no data or a bad `max_loss` or `confidence`.
        """
        if not (max_loss >= 0 and 0.5 <= confidence < 1):
            raise ValueError(
                f"`max_loss` is {max_loss} and `confidence` is {confidence}; give the accuracy that may be lost, such "
                "as 0.01, and a probability from 0.5 to below 1."
            )
        logits, labels, first = [], [], None
        with evaluating(self.model):
            for batch in load_batches(self.model, dataset, **settings):
                labels.append(_labels(batch))
                inputs = _without_labels(batch)
                first = first or inputs
                layers = Readout.probe(self.model, inputs).read(inputs, _class_logits)
                logits.append(torch.stack(layers).float())  # [layers, batch, classes]
        logits, labels = torch.cat(logits, dim=1), torch.cat(labels)
        logits, labels = logits[:, labels != IGNORE_INDEX], labels[labels != IGNORE_INDEX]
        correct = (logits.argmax(-1) == labels).cpu().numpy()  # [layers, samples]
        unsure = _uncertainty(logits).cpu().numpy()  # [layers, samples]
        unsure[-1] = -1.0  # there all leave
        self.threshold = _loosest_threshold(unsure, correct, max_loss, confidence)
        self.check(first)
        return self

    def evaluate(self, dataset: Dataset | DataLoader, repeats: int = 3, **settings) -> ConfidenceReport:
        """Accuracy and wall-clock time with and without early exit, in turns over the same batches, all in memory.

        `settings` as for [`calibrate`]; ValueError for no threshold, an empty `dataset` or `repeats` below 1.
        """
        batches = list(load_batches(self.model, dataset, **settings))
        with evaluating(self.model) as device:
            labels = torch.cat([_labels(batch) for batch in batches])
            batches = [_without_labels(batch) for batch in batches]
            outputs = [self(**batch) for batch in batches]
            full = torch.cat([_class_logits(self.model(**batch)) for batch in batches])
            calls = [lambda: [self(**batch) for batch in batches], lambda: [self.model(**batch) for batch in batches]]
            seconds = turns(calls, repeats, device)  # [2, repeats]
        exits, logits = (torch.cat([output[key] for output in outputs]) for key in ("exit_layers", "logits"))
        num_layers = Readout.probe(self.model, batches[0]).num_layers
        known = labels != IGNORE_INDEX
        return ConfidenceReport(
            accuracy=(logits.argmax(-1) == labels)[known].float().mean().item(),
            full_accuracy=(full.argmax(-1) == labels)[known].float().mean().item(),
            exit_shares=np.bincount(exits.cpu().numpy(), minlength=num_layers + 1)[1:] / len(exits),
            speedup=float(np.median(seconds[1] / seconds[0])),
            threshold=float(self.threshold),
            batch_size=rows_of(self.model, batches[0]),
        )

    def check(self, inputs: Mapping[str, Any]) -> None:
        """ValueError where, on one batch, a row's logits depend on which other samples are still in the batch."""
        output = self(**inputs)
        with evaluating(self.model):
            layers = torch.stack(Readout.probe(self.model, inputs).read(inputs, _class_logits))
        expected = layers[output.exit_layers - 1, torch.arange(len(output.logits))]  # [batch, classes]
        if not torch.allclose(output.logits.float(), expected.float(), rtol=1e-2, atol=1e-3):
            error = (output.logits - expected).abs().max().item()
            raise ValueError(
                f"Logits of {type(self.model).__name__} change by {error:.3g} when other samples leave the batch: its "
                "layers mix samples. Use `truncate`, which ends all samples at one layer."
            )


class _ShrinkingForward:
    """One forward of a batch, each of whose layers runs on the rows that have not left; what the model passes between
    its layers keeps the size of the batch, with the last states of the rows that left."""

    def __init__(self, reader, inputs, batch_dims, threshold):
        self.reader, self.inputs, self.batch_dims, self.threshold = reader, inputs, batch_dims, threshold
        self.tape = Tape(reader.model, reader.stack, run_layer=self.run_layer)
        self.rows = torch.arange(rows_of(reader.model, inputs), device=next(reader.model.parameters()).device)
        self.exit_layers = torch.full_like(self.rows, reader.num_layers)  # [batch]
        self.logits = None  # [batch, classes], of the rows that have left

    def run(self) -> ModelOutput:
        with taped(self.tape, lambda args, kwargs, outputs: None):
            logits = _class_logits(self.reader.model(**self.inputs))
        if self.logits is not None:
            logits = torch.where((self.exit_layers < self.reader.num_layers)[:, None], self.logits, logits)
        return ModelOutput(logits=logits, exit_layers=self.exit_layers)

    def run_layer(self, call, args, kwargs, layer):
        if layer > 1 and len(self.rows):
            self.let_leave(layer - 1)
        if len(self.rows) == len(self.exit_layers):
            self.output = call(*args, **kwargs)
        elif len(self.rows):
            args, kwargs = _map_with_path(self.take, "in", (args, kwargs))
            self.output = _map_with_path(self.put, "out", call(*args, **kwargs), self.output)
        return self.output

    def let_leave(self, layer):
        logits = _class_logits(self.tape.replay((), self.inputs, layer))  # [batch, classes]
        sure = _uncertainty(logits[self.rows].float()) < self.threshold
        gone = self.rows[sure]
        self.logits = torch.zeros_like(logits) if self.logits is None else self.logits
        self.logits[gone], self.exit_layers[gone] = logits[gone], layer
        self.rows = self.rows[~sure]

    def take(self, path, tensor):
        return tensor if (dim := self.batch_dims[path]) is None else tensor.index_select(dim, self.rows)

    def put(self, path, tensor, before):
        return tensor if (dim := self.batch_dims[path]) is None else before.index_copy(dim, self.rows, tensor)


def _find_batch_dims(reader, inputs) -> dict[str, int | None]:
    """Where samples lie in the tensors that layers take and give: the dimension that doubles when the batch does."""
    size = rows_of(reader.model, inputs)
    rows = {name: x for name, x in inputs.items() if torch.is_tensor(x) and x.shape[:1] == (size,)}
    doubled = {**inputs, **{name: torch.cat([value, value]) for name, value in rows.items()}}
    seen: list[dict[str, torch.Size]] = []

    def log(module, call, *args, **kwargs):
        output = call(*args, **kwargs)
        for kind, tree in (("in", (args, kwargs)), ("out", output)):
            _map_with_path(lambda path, tensor: seen[-1].update({path: tensor.shape}), kind, tree)
        return output

    with intercepted(reader.stack.layers, log), probing(reader.model):
        for batch in (inputs, doubled):
            seen.append({})
            reader.model(**batch)
    dims: dict[str, int | None] = {}
    for path, shape in seen[0].items():
        changed = [dim for dim, length in enumerate(seen[1][path]) if length != shape[dim]]
        if len(changed) > 1 or any(shape[dim] != size for dim in changed):
            raise ValueError(
                f"The layers of {type(reader.model).__name__} pass tensors of shape {list(shape)} for {size} samples, "
                "which have no batch dimension. Use `truncate`."
            )
        dims[path] = changed[0] if changed else None
    return dims


def _map_with_path(function, kind, tree, *others):
    """`tree` with `function(path, tensor, ...)` applied to its tensors and those at the same place of `others`."""

    def apply(path, leaf, *rest):
        return function(kind + pytree.keystr(path), leaf, *rest) if isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_map_with_path(apply, tree, *others)


def _loosest_threshold(unsure: np.ndarray, correct: np.ndarray, max_loss: float, confidence: float) -> float:
    """From uncertainties and hits `[layers, samples]`; 0.0 where every threshold may cost too much.

    Fixed-sequence testing (Angelopoulos et al., 2021, "Learn then Test", arXiv 2110.01052): candidates are tested from
    the strictest to the first that fails, and so need no correction for their number.
    """
    met = np.unique(unsure[unsure >= 0])
    candidates = np.append((met[1:] + met[:-1]) / 2, 1.0)  # between them, so that rounding moves no sample
    if len(candidates) > MAX_THRESHOLDS:
        candidates = np.quantile(candidates, np.linspace(0, 1, MAX_THRESHOLDS))
    loosest, quantile = 0.0, norm.ppf(confidence)
    for threshold in candidates:
        exits = (unsure < threshold).argmax(0)  # [samples], the first sure layer
        lost = correct[-1] - np.take_along_axis(correct, exits[None], axis=0)[0].astype(float)  # -1, 0 or 1
        # Were all the differences losses, their number would be binomial, of which few are far from normal.
        net = max(lost.sum(), 0.0)
        if binom.cdf(net, len(lost), max_loss) > 1 - confidence:
            break
        lost = np.append(lost, 1.0)  # one more than seen: that none of a few samples is lost proves little
        if lost.mean() + quantile * lost.std() / math.sqrt(len(lost)) > max_loss:
            break
        loosest = float(threshold)
    return loosest


def _uncertainty(logits: torch.Tensor) -> torch.Tensor:
    """`[..., classes]` -> `[...]`, between 0 (sure) and 1."""
    return torch.special.entr(logits.softmax(-1)).sum(-1) / math.log(logits.shape[-1])


def _class_logits(outputs) -> torch.Tensor:
    logits = output_logits(outputs)
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(f"`model` has logits of shape {list(logits.shape)}; early exit needs [batch, classes].")
    return logits


def _labels(inputs) -> torch.Tensor:
    labels = labels_of(inputs, ["labels", "label"])
    if labels is None or labels.is_floating_point():
        raise ValueError("The data has no `labels` that are classes; early exit needs them.")
    return labels


def _without_labels(inputs) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if "label" not in name}
