"""Early exit per sample: confident samples leave the batch, and later layers run only on the others."""

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.utils import ModelOutput, logging

from ..evaluation.scoring import Evaluation, Result
from ..extras import extra_needed
from ..readout.labels import IGNORE_INDEX, labels_of
from ..readout.replay import Readout, evaluating, output_logits
from ..readout.stack import map_tensors
from ..readout.tape import off_in_replay, switched_off
from .partial import PartialForward
from .timing import turns


logger = logging.get_logger(__name__)

MAX_THRESHOLDS = 1000  # candidates tried in a calibration


@dataclass
class ConfidenceReport(Result):
    """A classifier with and without early exit, on the same batches.

    Attributes:
        accuracy, full_accuracy: the accuracy with early exit, and with all samples read at the last layer.
        exit_shares (float64 `[L]`): share of the samples that leave after each layer.
        speedup: how many times faster a pass over the data is with early exit, by median wall-clock times.
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
        """The number of layers that a sample passes, on average."""
        return float(self.exit_shares @ np.arange(1, len(self.exit_shares) + 1))

    def __str__(self) -> str:
        if self.threshold == 0:
            return (
                f"No sample stops early (threshold 0): accuracy {self.accuracy:.4f}, {len(self.exit_shares)} layers a "
                "sample. Every early exit may lose more accuracy than you allow: use the whole model, "
                "calibrate with more data, or allow a larger `max_loss`"
            )
        shares = ", ".join(f"{share:.1%}" for share in self.exit_shares)
        return (
            f"entropy < {self.threshold:.4g}: accuracy {self.accuracy:.4f} ({self.full_accuracy:.4f} without "
            f"early exit), {self.mean_layers:.2f} of {len(self.exit_shares)} layers a sample, "
            f"{self.speedup:.2f} times as fast in batches of {self.batch_size}\n"
            f"leaving after layer 1, 2, ...: {shares}"
        )


class ConfidenceExit:
    """Run a classifier so that each sample stops at the first layer that is sure of it.

    A layer is sure if its uncertainty is below `threshold`. Uncertainty is the entropy of the class probabilities
    divided by the logarithm of the number of classes, from 0 to 1. Later layers run only on the rest of the batch. The
    cost: embeddings, norm and head run once per layer, and an accelerator synchronizes after each layer.

    Args:
        model (`nn.Module`): a classifier with logits `[batch, classes]`, on its device; it runs in eval mode.
        threshold (`float`, *optional*): uncertainty below which a layer is sure (0: never). [`calibrate`] finds one.

    ValueError if `threshold` is not in [0, 1], or the model gives a sample several labels.

    Example:

    ```python
    fast = ConfidenceExit(model).calibrate(validation, max_loss=0.01, processing_class=tokenizer)
    fast(**batch).logits  # [batch, classes], each row from the layer in `.exit_layers`
    ```
    """

    def __init__(self, model: nn.Module, threshold: float | None = None):
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` is {threshold}; an uncertainty lies between 0 and 1.")
        config = getattr(model, "config", None)
        if getattr(config, "problem_type", None) == "multi_label_classification":
            raise ValueError(
                f"{type(model).__name__} gives several labels a sample: use `truncate`."
            )
        self.model = model
        self.threshold = threshold

    def __call__(self, **inputs) -> ModelOutput:
        """Classify a batch. Returns `logits` `[batch, classes]`, and `exit_layers` `[batch]`, the layer at which each
        row was read.

        ValueError if there is no threshold, or the model has no shared readout, no class logits or no hidden states
        `[batch, ...]`.
        """
        if self.threshold is None:
            raise ValueError(
                "`threshold` is not set: give it, or call `calibrate` with validation data first."
            )
        inputs = {name: value for name, value in inputs.items() if "label" not in name}
        if self.threshold == 0:  # no layer is sure, so that none but the last need be read
            return self._read_whole(inputs)
        (rows, of_all), *later = self._read(inputs, self.threshold)
        logits = of_all.clone()  # [batch, classes]
        exit_layers = torch.ones_like(rows)  # [batch]
        for layer, (rows, of_rows) in enumerate(later, start=2):
            logits[rows] = of_rows
            exit_layers[rows] = layer
        return ModelOutput(logits=logits, exit_layers=exit_layers)

    def _read_whole(self, inputs) -> ModelOutput:
        num_layers = Readout.probe(self.model, inputs).num_layers
        with evaluating(self.model):
            logits = _class_logits(self.model(**inputs))
        exit_layers = torch.full(logits.shape[:1], num_layers, device=logits.device)
        return ModelOutput(logits=logits, exit_layers=exit_layers)

    def _read(self, inputs, threshold: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each layer, the rows that no layer before was sure of, by number, and their logits `[rows, classes]`."""
        reader = Readout.probe(self.model, inputs)
        forward = PartialForward(self.model, reader.stack)
        device = next(self.model.parameters()).device
        rows = torch.arange(find_batch_size(inputs), device=device)
        state = None  # the output of the layer before

        with (
            evaluating(self.model),
            switched_off(off_in_replay(self.model, reader.stack)),
            forward.attached(),
        ):
            for layer in range(1, reader.num_layers + 1):
                logits = _class_logits(forward(layer, layer, state, **inputs))
                if len(reader.stack.hidden_state(forward.output)) != len(rows):
                    name = type(self.model).__name__
                    raise ValueError(
                        f"{name}: the first dimension of its states is not the batch; use `truncate`."
                    )
                yield rows, logits

                unsure = ~(uncertainty(logits.float()) < threshold)  # [rows]
                rows = rows[unsure]
                inputs = _take(unsure, inputs)
                state = _take(unsure, forward.output)
                if not len(rows):
                    break

    def calibrate(
        self,
        dataset: Dataset | DataLoader,
        max_loss: float = 0.01,
        confidence: float = 0.95,
        **settings,
    ) -> "ConfidenceExit":
        """Set the threshold that runs the fewest layers and costs at most `max_loss` of the accuracy. Fewer samples
        give a stricter one.

        Args:
            dataset (`Dataset` or `DataLoader`): labelled validation data, not the test data.
            max_loss (`float`): accuracy that may be lost, as a difference in [0, 1] (0.01: 0.90 becomes 0.89).
            confidence (`float`): probability that no more is lost on other such data; in [0.5, 1).
            settings: `batch_size`, `processing_class`, `data_collator` of [`~evaluation.scoring.Evaluation`].

        Returns this object. ValueError if there is no data, `max_loss` or `confidence` is out of range, or the model
        cannot be read as when it is called.
        """
        if not (0 <= max_loss <= 1 and 0.5 <= confidence < 1):
            raise ValueError(
                f"`max_loss` is {max_loss}, `confidence` is {confidence}; give [0, 1] and [0.5, 1)."
            )
        correct = []
        unsure = []
        for inputs, labels in self._batches(dataset, settings):
            layers = [of_layer for _, of_layer in self._read(inputs, threshold=0.0)]
            known = labels != IGNORE_INDEX
            logits = torch.stack(layers).float()[:, known]  # [layers, samples, classes]
            correct.append((logits.argmax(-1) == labels[known]).cpu().numpy())
            unsure.append(uncertainty(logits).cpu().numpy())
        correct = np.concatenate(correct, axis=1)  # [layers, samples]
        unsure = np.concatenate(unsure, axis=1)  # [layers, samples]
        unsure[-1] = -1.0  # there all leave

        self.threshold = _loosest_threshold(unsure, correct, max_loss, confidence)
        if self.threshold == 0:
            samples = correct.shape[1]
            logger.warning(
                f"No early exit is shown to lose at most {max_loss:g} of the accuracy on these {samples} "
                "samples, so every sample will run through all layers. Give more data or a larger `max_loss`."
            )
        return self

    def evaluate(
        self, dataset: Dataset | DataLoader, repeats: int = 3, **settings
    ) -> ConfidenceReport:
        """Measure accuracy and wall-clock time with and without early exit, in turns over the same batches, all in
        memory.

        `settings` are as in [`calibrate`]. ValueError if there is no threshold, `dataset` is empty or `repeats` is
        below 1.
        """
        batches, labels = zip(*self._batches(dataset, settings))
        labels = torch.cat(labels)  # [samples]

        with evaluating(self.model) as device:
            outputs = [self(**batch) for batch in batches]
            full = torch.cat([_class_logits(self.model(**batch)) for batch in batches])

            calls = [
                lambda: [self(**batch) for batch in batches],
                lambda: [self.model(**batch) for batch in batches],
            ]
            seconds = turns(calls, repeats, device, settings.get("progress", False))  # [2]

        exits = torch.cat([output["exit_layers"] for output in outputs])  # [samples]
        logits = torch.cat([output["logits"] for output in outputs])  # [samples, classes]
        num_layers = Readout.probe(self.model, batches[0]).num_layers
        known = labels != IGNORE_INDEX
        return ConfidenceReport(
            accuracy=(logits.argmax(-1) == labels)[known].float().mean().item(),
            full_accuracy=(full.argmax(-1) == labels)[known].float().mean().item(),
            exit_shares=np.bincount(exits.cpu().numpy(), minlength=num_layers + 1)[1:] / len(exits),
            speedup=float(seconds[1] / seconds[0]),
            threshold=float(self.threshold),
            batch_size=find_batch_size(batches[0]),
        )

    def _batches(self, dataset, settings):
        """(inputs, labels `[batch]`) of each batch; ValueError if there is none, or labels are no classes."""
        batch = None
        for _, batch in Evaluation(self.model, dataset, **settings).batches("Early exit"):
            labels = labels_of(batch, ["labels", "label"])
            if labels is None or labels.is_floating_point():
                raise ValueError(
                    "The data has no `labels` that are classes; early exit needs them."
                )
            yield {name: value for name, value in batch.items() if "label" not in name}, labels
        if batch is None:
            raise ValueError("`dataset` is empty; give labelled held-out data.")


def _take(kept, tree):
    """`tree` with the rows `kept` `[rows]` of those tensors that have as many."""
    return map_tensors(
        lambda tensor: tensor[kept] if tensor.shape[:1] == kept.shape else tensor, tree
    )


def _loosest_threshold(
    unsure: np.ndarray, correct: np.ndarray, max_loss: float, confidence: float
) -> float:
    """The threshold by uncertainties and hits `[layers, samples]`; 0.0 if every threshold may cost too much.

    Fixed-sequence testing (Angelopoulos et al., 2021, "Learn then Test", arXiv 2110.01052): candidates are tested from
    the strictest to the first that fails, and so need no correction for their number.
    """
    with extra_needed("The calibration of exits by confidence"):
        from scipy.stats import binom

    met = np.unique(unsure[unsure >= 0])
    between = (met[1:] + met[:-1]) / 2  # so that rounding moves no sample
    candidates = np.append(between, 1.0)
    if len(candidates) > MAX_THRESHOLDS:
        candidates = np.quantile(candidates, np.linspace(0, 1, MAX_THRESHOLDS))

    quantile = statistics.NormalDist().inv_cdf(confidence)
    loosest = 0.0
    for threshold in candidates:
        exits = (unsure < threshold).argmax(0)  # [samples], the first sure layer
        correct_at_exit = np.take_along_axis(correct, exits[None], axis=0)[0]
        lost = correct[-1] - correct_at_exit.astype(float)  # -1, 0 or 1
        # If all differences were losses, their number would be binomial, which is far from normal if they are few.
        if binom.cdf(max(lost.sum(), 0.0), len(lost), max_loss) > 1 - confidence:
            break
        # One more loss than seen: that none of a few samples is lost proves little.
        lost = np.append(lost, 1.0)
        if lost.mean() + quantile * lost.std() / math.sqrt(len(lost)) > max_loss:
            break
        loosest = float(threshold)
    return loosest


def uncertainty(logits: torch.Tensor) -> torch.Tensor:
    """`[..., classes]` -> `[...]`, between 0 (sure) and 1."""
    return torch.special.entr(logits.softmax(-1)).sum(-1) / math.log(logits.shape[-1])


def _class_logits(outputs) -> torch.Tensor:
    logits = output_logits(outputs)
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"`model` has logits of shape {list(logits.shape)}; early exit needs [batch, classes]."
        )
    return logits
