"""The noise curve: a model's metric and loss against the noise level of its input."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import has_length

from ..configs import levels_of
from ..constraints.problem import as_python
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.replay import Readout, evaluating
from ..readout.tape import config_flags, switched_off
from .scoring import (
    Evaluation,
    Result,
    format_table,
    greater_is_better,
    mean_loss,
    metric_value,
    name_of,
    noise_key,
)
from .sums import BlockSums, pseudo_values, radius


Perturbation = Callable[[Mapping, float, np.random.Generator], Mapping]
SUMMARIES = ("auc", "auc_over_range", "auc_id", "auc_ood", "mean_over_levels")


@dataclass
class NoiseCurve(Result):
    """Metric and loss at G noise levels, for repeated noise draws; `noise_curve.json` has the attributes as keys.

    Attributes:
        metric (`str`): name of the metric.
        gammas (float64 `[G]`): increasing noise levels, in units of the clean signal's standard deviation, or rates.
        values (float64 `[G, draws]`): the metric; level 0 repeats its one value.
        losses (float64 `[G, draws]`): the task loss.
        gamma_train (`float`, *optional*): the training level; levels up to it are in-distribution (ID), others
            out-of-distribution (OOD).
        blocks (float64 `[B, G, draws, 4]`, *optional*): (metric sum, metric count, loss sum, items) over each block of
            the data, the source of every confidence interval.
        scale (`float`): factor of the rmse.
        greater_is_better (`bool`): whether more of the metric is better.
        settings (`dict`): seed, draws, batch size, samples (where the data has a length), sigma, perturbation and a
            fingerprint of the data. Curves with equal seed, batch size and data have common random numbers.
    """

    metric: str
    gammas: np.ndarray
    values: np.ndarray
    losses: np.ndarray
    gamma_train: float | None = None
    blocks: np.ndarray | None = None
    scale: float = 1.0
    greater_is_better: bool = True
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> np.ndarray:
        """Mean of the metric over draws, `[G]`."""
        return self.values.mean(axis=1)

    @property
    def clean(self) -> float | None:
        """The metric at level 0; `None` without that level."""
        return float(self.mean[0]) if self.gammas[0] == 0.0 else None

    @property
    def mean_losses(self) -> np.ndarray:
        """Mean of the loss over draws, `[G]`."""
        return self.losses.mean(axis=1)

    @property
    def std(self) -> np.ndarray:
        """Standard deviation of the metric over draws (n - 1), `[G]`; not a number for a single draw."""
        if self.values.shape[1] == 1:
            return np.full(len(self.values), np.nan)
        return (self.values - self.values[:, :1]).std(
            axis=1, ddof=1
        )  # shifted: exactly 0 for equal draws

    @property
    def auc(self) -> float:
        """Area under the mean metric over the levels (trapezoid rule), the paper's summary for classification."""
        return float(np.trapezoid(self.mean, self.gammas))

    @property
    def auc_over_range(self) -> float:
        """The AUC divided by the range of levels: an average of the metric, comparable between grids."""
        return self._average(self.gammas[0], self.gammas[-1])

    @property
    def mean_over_levels(self) -> float:
        """Mean of the metric over the levels, the paper's summary for denoising."""
        return float(self.mean.mean())

    @property
    def auc_id(self) -> float | None:
        """Average of the metric over the levels up to `gamma_train` (interpolated there); `None` if there are none."""
        exists = self.gamma_train is not None and self.gamma_train >= self.gammas[0]
        return (
            self._average(self.gammas[0], min(self.gamma_train, self.gammas[-1]))
            if exists
            else None
        )

    @property
    def auc_ood(self) -> float | None:
        """Average of the metric over the levels above `gamma_train` (interpolated there); `None` if there are none."""
        exists = self.gamma_train is not None and self.gamma_train < self.gammas[-1]
        return (
            self._average(max(self.gamma_train, self.gammas[0]), self.gammas[-1])
            if exists
            else None
        )

    def radius(self, name: str, confidence: float = 0.95) -> np.ndarray | float:
        """Half-width of the confidence interval of the property `name` (`"mean"` `[G]`, `"auc"`, ...), over the choice
        of the data and the draws of the noise; not a number without two blocks or where the property is `None`."""
        return radius(self._statistic(name), self.blocks, confidence)

    def pseudo_values(self, name: str) -> np.ndarray:
        """The share of each block of the data in the property `name`, `[B, ...]` (see `sums`)."""
        return pseudo_values(self._statistic(name), self.blocks)

    def _statistic(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """Maps sums `[G, draws, 4]` to the property that a curve with these sums has."""

        def statistic(sums):
            values = metric_value(self.metric, self.scale, sums)
            curve = replace(self, values=values, losses=mean_loss(sums), blocks=None)
            return np.asarray(
                getattr(curve, name), dtype=float
            )  # of a summary that is `None`: not a number

        return statistic

    def _average(self, low: float, high: float) -> float:
        """Mean of the piecewise linear curve over [low, high]; its value where they coincide."""
        inside = self.gammas[(self.gammas > low) & (self.gammas < high)]
        grid = np.array([low, *inside, high])
        curve = np.interp(grid, self.gammas, self.mean)
        return float(np.trapezoid(curve, grid) / (high - low)) if high > low else float(curve[0])

    def to_dict(self) -> dict[str, float]:
        """Flat Python floats for logging: `<metric>@<gamma>`, `loss@<gamma>` and the summaries that exist."""
        levels = {}
        for gamma, value, loss in zip(self.gammas, self.mean, self.mean_losses):
            levels |= {f"{self.metric}@{gamma:g}": float(value), f"loss@{gamma:g}": float(loss)}
        summaries = {
            name: getattr(self, name) for name in SUMMARIES if name != "auc" or len(self.gammas) > 1
        }
        if np.isfinite(error := self.radius("auc_over_range")):
            summaries["auc_over_range_radius"] = float(error)
        return levels | {
            f"{self.metric}_{name}": value for name, value in summaries.items() if value is not None
        }

    def __str__(self) -> str:
        rows = [["gamma", self.metric, "+- (95 %)", "sd of draws", "loss"]]
        radius = np.broadcast_to(self.radius("mean"), self.mean.shape)
        for gamma, value, error, spread, loss in zip(
            self.gammas, self.mean, radius, self.std, self.mean_losses
        ):
            rows.append(
                [f"{gamma:.4g}", f"{value:.5g}", f"{error:.2g}", f"{spread:.2g}", f"{loss:.5g}"]
            )
        area, error = (
            f"AUC {self.auc:.5g}, over the range {self.auc_over_range:.5g}",
            self.radius("auc_over_range"),
        )
        area += f" +- {error:.2g} (95 %)" if np.isfinite(error) else ""
        return format_table(rows) + (f"\n{area}" if len(self.gammas) > 1 else "")


def noise_curve(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    gammas: float | Sequence[float],
    *,
    draws: int = 3,
    seed: int = 0,
    sigma: float | None = None,
    gamma_train: float | Sequence[float] | None = None,
    perturbation: Perturbation | None = None,
    noise: EmbeddingNoise | None = None,
    **settings,
) -> NoiseCurve:
    """Metric and loss of `model` at every noise level, each with `draws` draws of the noise.

    The noise depends on (seed, draw, level, batch) and the kind of device alone: models that embed the same batches to
    the same shape are compared under common random numbers. Each batch is collated once. The model's mode is restored.

    Args:
        model, dataset: see [`~evaluation.scoring.Evaluation`].
        gammas (`float` or sequence of `float`): noise levels >= 0, in units of `sigma`.
        draws (`int`): noise draws per level (level 0 is evaluated once).
        seed, sigma: see [`EmbeddingNoise`].
        gamma_train (`float` or `(float, float)`, *optional*): the training level, of a range the upper end.
        perturbation (function, *optional*): perturbation(row, level, generator) -> row, in place of the Gaussian noise
            (see [`~evaluation.perturbations`]); rows are collated for every level and draw. Results call it by its
            attribute `name`, or else by the function's name.
        noise ([`EmbeddingNoise`], *optional*): noise with its own seed and sigma; its level is not used.
        settings: `metric`, `batch_size`, `data_collator` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError for no levels or draws, an empty dataset, labels that do not suit the metric, `perturbation` with
    `noise` or a `DataLoader`, or `noise` that is attached already.
    """
    gammas = sorted(set(levels_of("gammas", gammas)))
    gamma_train = max(
        levels_of("gamma_train", () if gamma_train is None else gamma_train), default=None
    )
    if not gammas or not 0 <= gammas[0] <= gammas[-1] < math.inf or draws < 1:
        raise ValueError(
            f"`gammas` is {gammas}, `draws` is {draws}; give one or more of each, levels from 0 on."
        )
    if perturbation is not None and (noise is not None or isinstance(dataset, DataLoader)):
        raise ValueError(
            "`perturbation` changes rows before they are collated; give a data set, and no `noise`."
        )
    if noise is not None and noise.is_attached:
        raise ValueError(
            "`noise` is attached to the model, and would perturb every level; remove it first."
        )
    if noise is None and perturbation is None and any(gammas):
        noise = EmbeddingNoise(model, gammas[-1], seed, sigma)
    evaluation = Evaluation(model, dataset, **settings)
    sums, readout = BlockSums(evaluation.accelerator), None
    cells = [
        (level, draw) for level, gamma in enumerate(gammas) for draw in range(draws if gamma else 1)
    ]
    # Its router's loss, which a mixture of experts adds, is no part of the task loss.
    router_flags = config_flags(model.modules(), ["output_router_logits"])
    with evaluating(model), switched_off(router_flags):
        for index, batch in evaluation.batches("Noise curve", as_rows=perturbation is not None):
            scores, fingerprint = np.zeros((len(gammas), draws, 4)), None
            for level, draw in cells:
                gamma, inputs, noisy = gammas[level], batch, nullcontext()
                if perturbation is not None:
                    first = index * evaluation.batch_size
                    inputs = evaluation.collate(
                        _perturbed(batch, first, gamma, draw, seed, perturbation)
                    )
                elif gamma:
                    noisy = noise.at(gamma, *noise_key(draw, gamma, index))
                fingerprint = fingerprint or evaluation.fingerprint(inputs)
                given = evaluation.task.model_inputs(inputs)
                if evaluation.readout is not None and readout is None:
                    readout = Readout.probe(model, given, evaluation.readout)
                    evaluation.task.check_loss_function()
                with noisy:
                    outputs = model(**given) if readout is None else readout.read_last(given)
                scores[level, draw if gamma else slice(None)] = evaluation.score(outputs, inputs)
            sums.add(index, scores, fingerprint)
    blocks = sums.total()
    total = blocks.sum(axis=0)  # [levels, draws, 4]
    metric, scale, kind = name_of(evaluation.metric), float(evaluation.scale), noise or perturbation
    conditions = {
        "seed": seed if noise is None else noise.seed,
        "draws": draws,
        "batch_size": getattr(dataset, "batch_size", evaluation.batch_size),
        "samples": len(dataset)
        if has_length(dataset) and not isinstance(dataset, DataLoader)
        else None,
        "data": sums.fingerprint(),
        "sigma": None if noise is None else noise.sigma,
        "perturbation": "gaussian" if kind is None else getattr(kind, "name", name_of(kind)),
    }
    conditions = {name: as_python(value) for name, value in conditions.items()}  # for JSON
    found = np.array(gammas), metric_value(metric, scale, total), mean_loss(total)
    return NoiseCurve(
        metric, *found, gamma_train, blocks, scale, greater_is_better(evaluation.metric), conditions
    )


def _perturbed(rows, first, gamma, draw, seed, perturbation) -> list[Mapping[str, Any]]:
    """The rows of a batch, numbered from `first`, perturbed at one level; equal numbers get equal errors."""
    keys = [noise_key(draw, gamma, number) for number in range(first, first + len(rows))]
    streams = (np.random.SeedSequence(seed, spawn_key=key) for key in keys)
    return [
        perturbation(row, gamma, np.random.default_rng(stream))
        for row, stream in zip(rows, streams)
    ]
