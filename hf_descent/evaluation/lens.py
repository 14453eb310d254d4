"""The lens: what every layer of a model knows already, without training. It measures the loss and metric of each layer
by the model's own head, how sure its predictions are, and how large its hidden states are.

Reading hidden states by the model's head: nostalgebraist (2020), "interpreting GPT: the logit lens".
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, Dataset

from ..constraints.problem import AT_CHANCE
from ..losses.layerwise import find_layer_losses
from ..losses.rows import RowLosses
from ..losses.task import TaskLoss
from ..readout.labels import IGNORE_INDEX
from ..readout.replay import Readout, evaluating
from .intervals import loss_radii
from .profiles import layer_profile
from .row_sums import RowSums
from .scoring import Evaluation, Result, format_table


NEAR = 1.05  # times the last layer's loss


@dataclass
class Lens(Result):
    """What each of L layers knows, on held-out data. Layer l is at index l-1; `..._radii` are half-widths of 95 %
    intervals.

    Attributes:
        metric (`str`): name of the metric.
        losses, loss_radii (float64 `[L]`): the task loss, by the model's own head.
        values, value_radii (float64 `[L]`): the metric.
        entropies, entropy_radii (float64 `[L]`): mean entropy of the predictions, in nats: 0 is sure.
        norms, norm_radii (float64 `[L]`): mean Euclidean norm of the hidden states of all tokens.
        items (`int`): labelled examples or tokens.
        chance (`float`, *optional*): the least loss of a constant prediction of these labels, where it is known.
        fitted_losses, fitted_radii (float64 `[L]`, *optional*): the task loss, read through a map that was fitted to
            each layer in front of the head.
    """

    metric: str
    losses: np.ndarray
    loss_radii: np.ndarray
    values: np.ndarray
    value_radii: np.ndarray
    entropies: np.ndarray
    entropy_radii: np.ndarray
    norms: np.ndarray
    norm_radii: np.ndarray
    items: int
    chance: float | None = None
    fitted_losses: np.ndarray | None = None
    fitted_radii: np.ndarray | None = None

    @property
    def measures(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Each measure's title -> its values and the half-widths of their intervals, `[L]` each."""
        return {
            "loss": (self.losses, self.loss_radii),
            self.metric: (self.values, self.value_radii),
            "entropy": (self.entropies, self.entropy_radii),
            "norm": (self.norms, self.norm_radii),
        }

    def rows(self) -> list[list[str]]:
        """The cells of a table: a row of titles, then a row for each layer."""
        titles = ["layer"]
        columns = [[f"{layer}" for layer in range(1, len(self.losses) + 1)]]
        measures = dict(self.measures)
        if self.fitted_losses is not None:
            fitted = (self.fitted_losses, self.fitted_radii)
            measures = {"loss": measures.pop("loss"), "fitted loss": fitted, **measures}
        for title, (values, radii) in measures.items():
            titles += [title, "+- (95 %)"]
            columns.append([f"{value:.4g}" for value in values])
            columns.append(["-" if np.isnan(radius) else f"{radius:.2g}" for radius in radii])
        return [titles, *map(list, zip(*columns))]

    @property
    def summary(self) -> str:
        """The findings, in one or two sentences."""
        depth = len(self.losses)
        last = self.losses[-1]
        if not np.isfinite(last):
            return f"The last layer's loss is {last}: there is nothing to compare layers with."
        near = self._first_near(self.losses)
        if near == depth:
            text = (
                f"No layer before the last has a loss within 5 % of the last layer's ({last:.4g})."
            )
        else:
            text = f"Layer {near} of {depth} is the first whose loss is within 5 % of the last layer's ({last:.4g})."
        if self.fitted_losses is not None:
            text += f" Through the fitted maps it is layer {self._first_near(self.fitted_losses)}."
        if self.chance:
            guessing = int((self.losses >= AT_CHANCE * self.chance).sum())
            who = "Every layer does"
            if guessing:
                who = f"{guessing} of {depth} layers do no"
            text += f" {who} better than guessing (loss {self.chance:.4g})."
        return text

    def _first_near(self, losses: np.ndarray) -> int:
        """The first layer whose loss in `losses` is near that of the last one."""
        return int(np.argmax(losses <= NEAR * self.losses[-1])) + 1

    def __str__(self) -> str:
        return format_table(self.rows())


LayerOutputs = Callable[[Mapping[str, Any]], Iterable[Any]]


def lens(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    fitted: LayerOutputs | None = None,
    **settings,
) -> Lens:
    """Measure loss, metric, entropy and norm of every layer of `model`, through the readout that its layers share.

    Args:
        model (`nn.Module`): a classifier or a language model, on its device.
        dataset (`Dataset` or `DataLoader`): labelled held-out examples.
        fitted (function, *optional*): gives the outputs of every layer for a batch, read in another way, such as
            `fit_lens(model, train).layer_outputs`. Their losses stand beside those by the head alone.
        settings: `batch_size`, `processing_class`, `data_collator` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError as of [`~evaluation.profiles.layer_profile`], or for labels that are no classes.
    """
    profile = layer_profile(model, dataset, **settings)
    entropies, norms = _sums_of_rows(Evaluation(model, dataset, **settings))
    mean_entropies, entropy_radii = _means(entropies)
    mean_norms, norm_radii = _means(norms)

    fitted_losses = None
    fitted_radii = None
    if fitted is not None:
        rows = _loss_sums_of_rows(Evaluation(model, dataset, **settings), fitted)
        fitted_losses = rows[:, :-1].sum(axis=0) / rows[:, -1].sum()
        fitted_radii = loss_radii(rows)

    return Lens(
        metric=profile.metric,
        losses=profile.losses,
        loss_radii=profile.loss_radii,
        values=profile.values,
        value_radii=profile.value_radii,
        entropies=mean_entropies,
        entropy_radii=entropy_radii,
        norms=mean_norms,
        norm_radii=norm_radii,
        items=round(entropies[:, -1].sum()),
        chance=profile.chance,
        fitted_losses=fitted_losses,
        fitted_radii=fitted_radii,
    )


def _loss_sums_of_rows(evaluation: Evaluation, layer_outputs: LayerOutputs) -> np.ndarray:
    """For each row the sums of its losses at every layer, and its items, as in a layer profile; float64
    `[rows, L + 1]`."""
    rows = RowSums()
    row_losses = None
    with evaluating(evaluation.model):
        for _, inputs in evaluation.batches("Fitted readout"):
            if row_losses is None:
                layers = find_layer_losses(
                    evaluation.model, inputs, evaluation.task, needs_logits=True
                )
                row_losses = RowLosses(evaluation.task, layers.chance_loss)

            sums = []
            splits = []
            for outputs in layer_outputs(inputs):
                sums.append(evaluation.loss_sums(outputs, inputs)[0])
                splits.append(row_losses.split(outputs, inputs))

            items = evaluation.task.count(inputs)
            means = torch.tensor(sums, device=items.device) / items.clamp(min=1)  # [layers]
            rows = rows.plus(*row_losses.joined(splits, means, items))

    return rows.gathered(over_processes=False).sums


def _sums_of_rows(evaluation: Evaluation) -> tuple[np.ndarray, np.ndarray]:
    """For each row the sums of its entropies, and of its norms, at every layer; float64 `[rows, L + 1]` each. The last
    columns have the numbers that were added up."""
    entropies = []
    norms = []
    reader = None
    with evaluating(evaluation.model):
        for _, inputs in evaluation.batches("Entropy and norm"):
            if reader is None:
                reader = Readout.probe(evaluation.model, inputs, evaluation.readout)
            of_batch = _read(reader, evaluation.task, inputs)
            entropies.append(of_batch[0])
            norms.append(of_batch[1])

    return np.concatenate(entropies), np.concatenate(norms)


def _read(
    reader: Readout, task: TaskLoss, inputs: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """[`_sums_of_rows`] of one batch."""
    entropies = []
    norms = []

    def on_layer(layer: int, outputs: Any, hidden: torch.Tensor) -> None:
        entropies.append(_entropies(outputs, inputs, task))
        norms.append(_norms(hidden, inputs))

    with reader.attach(on_layer):
        reader.model(**task.model_inputs(inputs))
    return _joined(entropies), _joined(norms)


def _entropies(outputs: Any, inputs: Mapping[str, Any], task: TaskLoss) -> torch.Tensor:
    """The sum of the entropies of each row's predictions, and their number, `[rows, 2]`."""
    logits, labels = task.predictions(outputs, inputs)
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        raise ValueError(
            "The labels are no classes; the lens reads classifiers and language models."
        )
    found = []
    for row_logits, row_labels in zip(logits, labels):  # a row at a time: there may be many words
        counted = row_labels.reshape(-1) != IGNORE_INDEX
        predictions = row_logits.reshape(-1, logits.shape[-1])[counted].float()  # [items, classes]
        entropy = Categorical(logits=predictions, validate_args=False).entropy()
        found.append(torch.stack([entropy.sum(), counted.sum()]))
    return torch.stack(found)


def _norms(hidden: torch.Tensor, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The sum of the norms of each row's hidden states, without padding, and their number, `[rows, 2]`."""
    norms = hidden.float().norm(dim=-1).flatten(1)  # [batch, seq]
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != norms.shape:
        mask = torch.ones_like(norms)
    return torch.stack([(norms * mask).sum(1), mask.sum(1)], dim=1)


def _joined(layers: list[torch.Tensor]) -> np.ndarray:
    """Sums and counts `[rows, 2]` of each layer, joined to the sums of all layers, and the counts; `[rows, L + 1]`."""
    sums = [layer[:, 0] for layer in layers]
    return torch.stack([*sums, layers[-1][:, 1]], dim=1).double().cpu().numpy()


def _means(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The means over items of sums over rows `[rows, L + 1]`, and half-widths of their intervals, `[L]` each."""
    rows = rows[rows[:, -1] > 0]
    return rows[:, :-1].sum(axis=0) / rows[:, -1].sum(), loss_radii(rows)
