"""Which layers a model can do without: nested sets of layers, found on some held-out examples and measured on others.

A model that stops early leaves out its last layers. Layers in the middle are often worth less. The search is greedy:
in each step it leaves out the layer without which the loss on the search rows is least. Every set contains the next
one, so one search gives a model for every size. Nothing is trained; see [`~early_exit.HealingTrainer`] for that.

Leaving out blocks in the middle: Gromov et al. (2024), "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv
2403.17887; Men et al. (2024), "ShortGPT", arXiv 2403.03853.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..constraints.problem import AT_CHANCE
from ..evaluation.certificates import MET, NOT_MET, NOT_SHOWN
from ..evaluation.intervals import confidence_limits, limits_above_chance, values_of_rows
from ..evaluation.price import percent
from ..evaluation.row_sums import RowSums
from ..evaluation.scoring import (
    Evaluation,
    Result,
    format_table,
    metric_value,
    name_of,
)
from ..logs import progress_bar
from ..losses.chance import chance_of
from ..losses.layerwise import find_layer_losses
from ..losses.rows import RowLosses
from ..losses.task import TaskLoss
from ..readout.labels import IGNORE_INDEX
from ..readout.replay import Readout, evaluating
from .truncation import check_layers, skipping


NO_ROWS = "`dataset` is empty; give labelled held-out data."


@dataclass
class LayerSetProfile(Result):
    """Loss and metric of a model with only some of its layers, on held-out data. The first of n sets is all layers.

    Attributes:
        layers (`list[list[int]]`): the n sets, 1-based, each smaller than the one before.
        metric (`str`): name of the metric.
        losses, values (float64 `[n]`): the task loss and the metric.
        ratios (float64 `[n]`): each loss over that of all layers.
        lower, upper (float64 `[n]`): ends of the 95 % intervals of the ratios; infinite if there are too few examples.
        items (`int`): labelled examples or tokens that were read.
        max_rise (`float`): the share by which the loss may rise, according to which sets are judged.
        chance (`float`, *optional*): the least loss of a constant prediction of these labels, if it is known.
        learned (`list[bool]`, *optional*): whether each set's loss is shown not to be at chance, as in a verdict.
        at_chance (`list[bool]`, *optional*): whether each set's loss is shown to be at chance.
        healed (`list[bool]`, *optional*): for each set, whether a model that was healed to it was measured.
        agreement (float64 `[n]`, *optional*): share of the labelled examples or tokens for which the set predicts
            the same class as all layers; `None` for models that predict numbers.
    """

    layers: list[list[int]]
    metric: str
    losses: np.ndarray
    values: np.ndarray
    ratios: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    items: int
    max_rise: float = 0.05
    chance: float | None = None
    learned: list[bool] | None = None
    at_chance: list[bool] | None = None
    healed: list[bool] | None = None
    agreement: np.ndarray | None = None

    def verdicts(self, max_rise: float | None = None) -> list[str]:
        """For each set, whether its loss is at most `max_rise` (by default the profile's) above that of all layers:
        "met" or "not met" if the intervals show it, else "not shown".

        A set at chance is "not met", and one that may be at chance is "not shown".
        """
        if max_rise is None:
            max_rise = self.max_rise
        limit = 1 + max_rise

        verdicts = []
        for index in range(len(self.layers)):
            if self.lower[index] > limit or (self.at_chance and self.at_chance[index]):
                verdicts.append(NOT_MET)
            elif self.upper[index] <= limit and self._may_have_learned(index):
                verdicts.append(MET)
            else:
                verdicts.append(NOT_SHOWN)
        return verdicts

    def _may_have_learned(self, index: int) -> bool:
        """Whether a set is shown not to be at chance; True if the loss at chance is not known."""
        if self.learned is not None:
            return self.learned[index]
        # Files of version 0.2 have no intervals of the losses.
        return not self.chance or self.losses[index] < AT_CHANCE * self.chance

    def smallest(self, max_rise: float | None = None) -> list[int]:
        """The smallest set that meets `max_rise` (by default the profile's), as all larger ones do; all layers where
        no other does. The sets are tested from the largest on, so that the choice is as sure as each verdict."""
        smallest = self.layers[0]
        for kept, verdict in zip(self.layers[1:], self.verdicts(max_rise)[1:]):
            if verdict != MET:
                break
            smallest = kept
        return smallest

    @property
    def headline(self) -> str:
        """The verdict on leaving out layers in one line, for the smallest set that is met, else for the first set."""
        index = self.layers.index(self.smallest())
        if index == 0:
            index = min(1, len(self.layers) - 1)
        price = percent(self.ratios[index] - 1)
        return f"VERDICT: {self.verdicts()[index].upper()}, price {price}"

    def __str__(self) -> str:
        asked = f"at most {100 * self.max_rise:+g} %"
        title = ["layers", "left out", "loss", "rise", "95 % interval", self.metric]
        if self.agreement is not None:
            title.append("as all layers")

        rows = [[*title, asked]]
        for index, verdict in enumerate(self.verdicts()):
            rows.append(self._row(index, verdict))
        return format_table(rows)

    def _row(self, index: int, verdict: str) -> list[str]:
        """The cells of a set; the whole model has neither rise nor verdict."""
        kept = self.layers[index]
        dropped = [layer for layer in self.layers[0] if layer not in kept]
        left_out = "none"
        rise = ""
        interval = ""
        if dropped:
            left_out = spans(dropped)
            rise = percent(self.ratios[index] - 1)
            interval = self._interval(index)
        else:
            verdict = ""
        if self.healed is not None and self.healed[index]:
            left_out += ", healed"

        row = [f"{len(kept)}", left_out, f"{self.losses[index]:.4g}", rise, interval]
        row.append(f"{self.values[index]:.4g}")
        if self.agreement is not None:
            row.append(f"{self.agreement[index]:.4g}")
        row.append(verdict)
        return row

    def _interval(self, index: int) -> str:
        """The interval of the rise of a set, in words; "-" if there are too few examples."""
        lower = 100 * (self.lower[index] - 1)
        upper = 100 * (self.upper[index] - 1)
        if not np.isfinite(upper - lower):
            return "-"
        return f"{lower:+.1f} to {upper:+.1f} %"


def spans(layers: Sequence[int]) -> str:
    """Layers in words: "1-12,19-30"."""
    parts = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def layers_in(text: str) -> list[int]:
    """The layers that a text such as "1-12,19-30" names; ValueError if it names none."""
    layers = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            if not dash:
                last = first
            layers.extend(range(int(first), int(last) + 1))
    except ValueError:
        layers = []
    if not layers:
        raise ValueError(f"`layers` is {text!r}; name layers as in '1-12,19-30'.")
    return layers


def find_layer_sets(
    model: nn.Module, dataset: Dataset | DataLoader, fewest: int, **settings
) -> list[list[int]]:
    """Find nested sets of layers, from all L down to `fewest`. Each step removes the layer that hurts least on
    `dataset`.

    It reads `dataset` about L times for each layer that is left out, so give it a few hundred rows. Take other rows
    for the verdict.

    Args:
        model (`nn.Module`): with a stack of layers, on its device.
        dataset (`Dataset` or `DataLoader`): labelled examples.
        fewest (`int`): layers of the smallest set, at least 1.
        settings: `batch_size`, `processing_class`, `progress` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError if the layers cannot be left out, `fewest` is out of range, or there are no rows.
    """
    progress = settings.pop("progress", False)
    evaluation = Evaluation(model, dataset, **settings)
    batches = [batch for _, batch in evaluation.batches()]
    if not batches:
        raise ValueError(NO_ROWS)
    stack = Readout.probe(model, batches[0]).stack
    kept = check_layers(range(1, stack.num_layers + 1), stack)
    if fewest not in kept:
        raise ValueError(f"`fewest` is {fewest!r}; the model has 1 to {stack.num_layers} layers.")

    def loss_with(layers: Sequence[int]) -> float:
        with skipping(stack, layers):
            total, items = sum(evaluation.loss_sums(model(**batch), batch) for batch in batches)
        return total / items

    sets = [kept]
    rounds = range(stack.num_layers - fewest)
    with evaluating(model):
        for _ in progress_bar(rounds, progress, desc="Leaving out layers"):
            candidates = [[layer for layer in kept if layer != left_out] for left_out in kept]
            losses = [loss_with(layers) for layers in candidates]
            kept = candidates[int(np.nanargmin(losses))]
            sets.append(kept)
    return sets


def layer_set_profile(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    layers: Sequence[Sequence[int]],
    max_rise: float = 0.05,
    healed: Sequence[nn.Module | None] = (),
    **settings,
) -> LayerSetProfile:
    """Measure loss and metric of `model` with each of several sets of `layers` on `dataset`. All layers come first.

    Args:
        model, dataset, settings: as in [`find_layer_sets`], which has the same errors.
        layers (sequence of sequences of `int`): the sets, each smaller than the one before.
        max_rise (`float`): the share by which the loss may rise.
        healed (sequence of `nn.Module`, *optional*): for each of `layers`, a model that was healed to it, to measure
            in its place; `None` for a set without one.
    """
    evaluation = Evaluation(model, dataset, **settings)
    totals = None
    with ExitStack() as in_evaluation:
        for measured_model in (model, *healed):
            if measured_model is not None:
                in_evaluation.enter_context(evaluating(measured_model))
        for _, batch in evaluation.batches("Sets of layers"):
            if totals is None:
                totals = _SetTotals(model, evaluation, batch, layers, healed)
            totals.add(batch)
    if totals is None:
        raise ValueError(NO_ROWS)
    return totals.profile(max_rise)


class _SetTotals:
    """The losses of the sets of layers on the batches so far; the first set is all layers."""

    def __init__(
        self,
        model: nn.Module,
        evaluation: Evaluation,
        batch: Mapping[str, Any],
        layers: Sequence[Sequence[int]],
        healed: Sequence[nn.Module | None],
    ):
        layer_losses = find_layer_losses(model, batch, evaluation.task, needs_logits=True)
        self._model = model
        self._evaluation = evaluation
        self._stack = layer_losses.readout.stack
        self._chance_loss = layer_losses.chance_loss
        self._row_losses = RowLosses(evaluation.task, self._chance_loss)

        everything = list(range(1, self._stack.num_layers + 1))
        self._sets = [everything]
        self._healed = [None]
        for kept, healed_model in zip_longest(layers, healed):
            kept = check_layers(kept, self._stack)
            if kept != everything:
                self._sets.append(kept)
                self._healed.append(healed_model)

        self._rows = RowSums()
        self._metric_sums = 0.0  # [sets, 2]: sums and counts
        self._items = 0
        self._agreed = 0.0  # [sets]
        self._labels = None

    def add(self, batch: Mapping[str, Any]) -> None:
        task = self._evaluation.task
        if self._chance_loss is not None:
            self._labels = self._chance_loss.of_batch(task, batch).plus(self._labels)

        metric_sums = []
        losses = []
        splits = []
        choices = []
        for kept, healed_model in zip(self._sets, self._healed):
            outputs = self._outputs(kept, healed_model, batch)
            metric_sums.append(self._evaluation.metric_sums(outputs, batch).sum(axis=0))
            losses.append(self._evaluation.loss_sums(outputs, batch)[0])
            splits.append(self._row_losses.split(outputs, batch))
            choices.append(_chosen_classes(task, outputs, batch))

        items = task.count(batch)
        means = torch.tensor(losses, device=items.device) / items.clamp(min=1)  # [sets]
        self._rows = self._rows.plus(*self._row_losses.joined(splits, means, items))
        self._metric_sums = self._metric_sums + np.stack(metric_sums)
        self._items += int(items)
        self._agreed = self._agreed + _agreement(choices)

    def _outputs(self, kept: list[int], healed_model: nn.Module | None, batch) -> Any:
        if healed_model is not None:
            return healed_model(**batch)
        with skipping(self._stack, kept):
            return self._model(**batch)

    def profile(self, max_rise: float) -> LayerSetProfile:
        row_sums = self._rows.gathered(over_processes=False).sums  # [rows, sets + 1]
        ratios, ratios_of_rows = values_of_rows(lambda losses: losses / losses[0], row_sums)
        lower, upper = confidence_limits(ratios_of_rows)

        learned = None
        at_chance = None
        chance = chance_of(self._labels, of_all=False)
        if chance:
            lowest, highest = limits_above_chance(row_sums, chance)
            learned = (highest < 0).tolist()
            at_chance = (lowest > 0).tolist()

        agreement = None
        if np.isfinite(self._agreed).all():  # of numbers it is not
            agreement = self._agreed / self._agreed[0]

        metric = name_of(self._evaluation.metric)
        return LayerSetProfile(
            layers=self._sets,
            metric=metric,
            losses=row_sums[:, :-1].sum(axis=0) / row_sums[:, -1].sum(),
            values=metric_value(metric, self._evaluation.scale, self._metric_sums),
            ratios=ratios,
            lower=lower,
            upper=upper,
            items=self._items,
            max_rise=max_rise,
            chance=chance,
            learned=learned,
            at_chance=at_chance,
            healed=[healed_model is not None for healed_model in self._healed],
            agreement=agreement,
        )


def _chosen_classes(task: TaskLoss, outputs, batch) -> torch.Tensor | None:
    """The likeliest class of each labelled row or token, `[items]`; `None` if the model does not predict classes."""
    logits, labels = task.predictions(outputs, batch)
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        return None
    return logits.argmax(-1)[labels != IGNORE_INDEX]


def _agreement(choices: Sequence[torch.Tensor | None]) -> np.ndarray:
    """How many classes are the same as those of the first set, `[sets]`; NaN if they are not known."""
    if choices[0] is None:
        return np.full(len(choices), np.nan)
    return np.array([float((chosen == choices[0]).sum()) for chosen in choices])
