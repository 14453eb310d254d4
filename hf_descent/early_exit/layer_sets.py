"""Which layers a model can do without: nested sets of layers, found on some held-out rows and measured on others.

A model that stops early leaves out its last layers. Those in the middle are often worth less. The search is greedy: it
leaves out, one after the other, the layer without which the loss on the search rows is least. Every set contains the
next one, so one search gives a model for every size. Nothing is trained; see [`~early_exit.HealingTrainer`] for that.

Leaving out blocks in the middle: Gromov et al. (2024), "The Unreasonable Ineffectiveness of the Deeper Layers", arXiv
2403.17887; Men et al. (2024), "ShortGPT", arXiv 2403.03853.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..evaluation.scoring import (
    Evaluation,
    Result,
    format_table,
    mean_loss,
    metric_value,
    name_of,
)
from ..evaluation.sums import radius
from ..logs import progress_bar
from ..readout.replay import Readout, evaluating
from .truncation import check_layers, skipping


@dataclass
class LayerSetProfile(Result):
    """What a model is worth with only some of its layers, on held-out data; the first of n sets is all layers.

    Attributes:
        layers (`list[list[int]]`): the n sets, 1-based.
        metric (`str`): name of the metric.
        losses, values (float64 `[n]`): the task loss and the metric.
        ratios (float64 `[n]`): each loss over that of all layers.
        ratio_radii (float64 `[n]`): half-widths of the 95 % intervals of the ratios.
        items (`int`): labelled rows or tokens that were read.
    """

    layers: list[list[int]]
    metric: str
    losses: np.ndarray
    values: np.ndarray
    ratios: np.ndarray
    ratio_radii: np.ndarray
    items: int

    def smallest(self, max_rise: float) -> list[int]:
        """The smallest set whose loss is shown, with 95 % confidence, to be at most `max_rise` (a share) above that of
        all layers; all layers where none is."""
        fits = (self.ratios + self.ratio_radii <= 1 + max_rise).tolist()
        sets = [kept for kept, is_shown in zip(self.layers, fits) if is_shown]
        return min(sets, key=len, default=self.layers[0])

    def __str__(self) -> str:
        rows = [["layers", "left out", "loss", "of all layers", "+- (95 %)", self.metric]]
        everything = self.layers[0]
        for index, kept in enumerate(self.layers):
            dropped = sorted(set(everything) - set(kept))
            rows.append(
                [
                    f"{len(kept)}",
                    spans(dropped) if dropped else "none",
                    f"{self.losses[index]:.4g}",
                    f"{self.ratios[index]:.3f}",
                    f"{self.ratio_radii[index]:.2g}",
                    f"{self.values[index]:.4g}",
                ]
            )
        return format_table(rows)


def spans(layers: Sequence[int]) -> str:
    """Layers as people write them: "1-12,19-30"."""
    parts = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)


def layers_in(text: str) -> list[int]:
    """The layers that a text such as "1-12,19-30" names; ValueError where it names none."""
    found = []
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            last = last if dash else first
            found.extend(range(int(first), int(last) + 1))
    except ValueError:
        found = []
    if not found:
        raise ValueError(f"`layers` is {text!r}; name layers as in '1-12,19-30'.")
    return found


def find_layer_sets(
    model: nn.Module, dataset: Dataset | DataLoader, fewest: int, **settings
) -> list[list[int]]:
    """Nested sets of layers, from all L down to `fewest`: without the others the loss on `dataset` is least.

    It reads `dataset` some L times for each layer that is left out: a few hundred rows are enough. They must be others
    than those of the verdict.

    Args:
        model (`nn.Module`): with a stack of layers, on its device.
        dataset (`Dataset` or `DataLoader`): labelled rows.
        fewest (`int`): layers of the smallest set, at least 1.
        settings: `batch_size`, `processing_class`, `progress` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError where the layers cannot be left out, or `fewest` is out of range.
    """
    progress = settings.pop("progress", False)
    evaluation = Evaluation(model, dataset, **settings)
    batches = [batch for _, batch in evaluation.batches()]
    stack = Readout.probe(model, batches[0]).stack
    kept = check_layers(range(1, stack.num_layers + 1), stack)
    if fewest not in kept:
        raise ValueError(f"`fewest` is {fewest!r}; the model has 1 to {stack.num_layers} layers.")

    def loss_with(layers: Sequence[int]) -> float:
        with skipping(stack, layers):
            sums = sum(evaluation.score(model(**batch), batch) for batch in batches)
        return float(mean_loss(sums.numpy()))

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
    model: nn.Module, dataset: Dataset | DataLoader, layers: Sequence[Sequence[int]], **settings
) -> LayerSetProfile:
    """Loss and metric of `model` with each of several sets of `layers`, on `dataset`; all layers come first.

    Arguments and errors are as of [`find_layer_sets`].
    """
    evaluation = Evaluation(model, dataset, **settings)
    stack = None
    blocks = []
    with evaluating(model):
        for _, batch in evaluation.batches("Sets of layers"):
            if stack is None:
                stack = Readout.probe(model, batch).stack
                everything = list(range(1, stack.num_layers + 1))
                sets = [check_layers(kept, stack) for kept in layers]
                sets = [everything, *(kept for kept in sets if kept != everything)]
            found = []
            for kept in sets:
                with skipping(stack, kept):
                    found.append(evaluation.score(model(**batch), batch))
            blocks.append(torch.stack(found))  # [sets, 4]
    blocks = torch.stack(blocks).numpy()  # [batches, sets, 4]
    total = blocks.sum(axis=0)

    def ratios(sums: np.ndarray) -> np.ndarray:
        losses = mean_loss(sums)  # [sets]
        return losses / losses[0]

    metric = name_of(evaluation.metric)
    return LayerSetProfile(
        layers=sets,
        metric=metric,
        losses=mean_loss(total),
        values=metric_value(metric, evaluation.scale, total),
        ratios=ratios(total),
        ratio_radii=np.broadcast_to(radius(ratios, blocks), len(sets)),
        items=round(total[0, 3]),
    )
