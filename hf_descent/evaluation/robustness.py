"""The noise curve: a model's metric and loss against the noise level of its input."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from ..noise import EmbeddingNoise
from ..readout import Readout
from .scoring import Metric, Result, Scorer, check_scored, evaluating, noise_key, prepare_batches, read_layers


@dataclass
class NoiseCurve(Result):
    """Metric and loss at G noise levels, for repeated noise draws.

    Attributes:
        metric (`str`): name of the metric.
        gammas (float64 `[G]`): increasing noise levels, in units of the clean signal's standard deviation.
        values (float64 `[G, draws]`): the metric; level 0 repeats its one value.
        losses (float64 `[G, draws]`): the task loss.
        gamma_train (`float`, *optional*): the training level; up to it a level is in-distribution (ID), above it
            out-of-distribution (OOD).
    """

    metric: str
    gammas: np.ndarray
    values: np.ndarray
    losses: np.ndarray
    gamma_train: float | None = None

    def __post_init__(self):
        for name in ("gammas", "values", "losses"):
            setattr(self, name, np.asarray(getattr(self, name), dtype=np.float64))

    @property
    def mean(self) -> np.ndarray:
        """Mean of the metric over draws, `[G]`."""
        return self.values.mean(axis=1)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the metric over draws (n - 1), `[G]`; not a number for a single draw."""
        if self.values.shape[1] == 1:
            return np.full(len(self.values), np.nan)
        return (self.values - self.values[:, :1]).std(axis=1, ddof=1)  # shifted: exactly 0 for equal draws

    @property
    def auc(self) -> float:
        """Area under the mean metric over the levels (trapezoid rule), the paper's summary for classification."""
        return float(np.trapezoid(self.mean, self.gammas))

    @property
    def auc_over_range(self) -> float:
        """The AUC divided by the range of levels: an average of the metric, comparable between grids."""
        return self._average(self.gammas[0], self.gammas[-1])

    @property
    def retention(self) -> float | None:
        """`auc_over_range` divided by the clean metric; `None` without level 0."""
        return self.auc_over_range / float(self.mean[0]) if self.gammas[0] == 0.0 else None

    @property
    def auc_id(self) -> float | None:
        """Average of the metric over the levels up to `gamma_train` (interpolated there); `None` if there are none."""
        if self.gamma_train is None or self.gamma_train < self.gammas[0]:
            return None
        return self._average(self.gammas[0], min(self.gamma_train, self.gammas[-1]))

    @property
    def auc_ood(self) -> float | None:
        """Average of the metric over the levels above `gamma_train` (interpolated there); `None` if there are none."""
        if self.gamma_train is None or self.gamma_train >= self.gammas[-1]:
            return None
        return self._average(max(self.gamma_train, self.gammas[0]), self.gammas[-1])

    def _average(self, low: float, high: float) -> float:
        """Mean of the piecewise linear curve over [low, high]; its value where they coincide."""
        inside = self.gammas[(self.gammas > low) & (self.gammas < high)]
        grid = np.array([low, *inside, high])
        curve = np.interp(grid, self.gammas, self.mean)
        return float(np.trapezoid(curve, grid) / (high - low)) if high > low else float(curve[0])

    def to_dict(self) -> dict[str, float]:
        """Flat Python floats for logging: `<metric>@<gamma>`, `loss@<gamma>` and the summaries that exist."""
        levels = {}
        for gamma, value, loss in zip(self.gammas, self.mean, self.losses.mean(axis=1)):
            levels |= {f"{self.metric}@{gamma:g}": float(value), f"loss@{gamma:g}": float(loss)}
        summaries = {name: getattr(self, name) for name in ("auc", "auc_over_range", "retention", "auc_id", "auc_ood")}
        return levels | {f"{self.metric}_{name}": value for name, value in summaries.items() if value is not None}

    def __str__(self) -> str:
        rows = [f"{'gamma':>8} {self.metric:>12} {'+-':>10} {'loss':>12}"]
        for gamma, value, spread, loss in zip(self.gammas, self.mean, self.std, self.losses.mean(axis=1)):
            rows.append(f"{gamma:8.4g} {value:12.5g} {spread:10.2g} {loss:12.5g}")
        return "\n".join([*rows, f"AUC {self.auc:.5g}, over the range {self.auc_over_range:.5g}"])


def noise_curve(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    gammas: Sequence[float],
    *,
    metric: Metric = "accuracy",
    scale: float = 1.0,
    data_collator: Callable | None = None,
    processing_class: Any | None = None,
    batch_size: int = 32,
    draws: int = 3,
    seed: int = 0,
    sigma: float | None = None,
    gamma_train: float | None = None,
    label_names: Sequence[str] | None = None,
    layer_loss_fn: Callable[..., torch.Tensor] | None = None,
    readout: Callable | None = None,
    progress: bool = False,
) -> NoiseCurve:
    """Metric and loss of `model` at every noise level, each with `draws` draws of the noise.

    The noise depends on (seed, draw, level, batch) alone, so models that embed the same batches to the same shape are
    compared under common random numbers. Each batch is collated once, used for all levels and dropped: memory does not
    grow with the data set.

    Args:
        model (`nn.Module`): unwrapped, on its device; evaluated in eval mode, which is undone afterwards.
        dataset (`Dataset` or `DataLoader`): labelled held-out data; a `DataLoader`'s batches are taken as they are.
        gammas (sequence of `float`): noise levels >= 0, in units of `sigma`.
        metric, scale, label_names, layer_loss_fn: see [`~evaluation.scoring.Scorer`].
        data_collator, processing_class: as in `Trainer`.
        batch_size (`int`): samples per batch; it is part of what fixes the noise.
        draws (`int`): noise draws per level (level 0 is evaluated once).
        seed, sigma: see [`EmbeddingNoise`].
        gamma_train (`float`, *optional*): the training level, to tell ID from OOD.
        readout (function, *optional*): readout(model, hidden, inputs) -> logits, where training used one.
        progress (`bool`): show a progress bar over batches.

    Raises:
        ValueError: no levels, negative levels, no draws, an empty dataset, labels that do not suit the metric.
    """
    gammas = sorted({float(gamma) for gamma in gammas})
    if not gammas or draws < 1:
        raise ValueError(f"`gammas` is {gammas} and `draws` is {draws}; give at least one noise level and one draw.")
    noise = EmbeddingNoise(model, (gammas[0], gammas[-1]), seed, sigma) if gammas != [0.0] else nullcontext()
    scorer = Scorer(model, metric, scale, label_names, layer_loss_fn)
    batches = prepare_batches(model, dataset, data_collator, processing_class, batch_size, label_names)
    sums = torch.zeros(len(gammas), draws, 4, dtype=torch.float64)

    with evaluating(model) as device:
        for index, batch in enumerate(tqdm(batches, desc="Noise curve", disable=not progress)):
            inputs = send_to_device(batch, device)
            given = scorer.model_inputs(inputs, readout)
            if readout is not None and index == 0:
                reader = Readout.probe(model, given, readout)
            for level, gamma in enumerate(gammas):
                for draw in range(draws if gamma else 1):
                    if gamma:
                        noise.gamma = gamma
                        noise.reseed(*noise_key(draw, gamma, index))
                    with noise if gamma else nullcontext():
                        if readout is None:
                            score = scorer(model(**given), inputs)
                        else:
                            (score,) = read_layers(reader, given, partial(scorer, inputs=inputs), [reader.num_layers])
                    sums[level, draw if gamma else slice(None)] += score
    check_scored(sums)
    return NoiseCurve(
        scorer.metric_name, np.array(gammas), scorer.value(sums), sums[..., 2] / sums[..., 3], gamma_train
    )
