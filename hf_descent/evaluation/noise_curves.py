"""The noise curve: a model's metric and loss against the noise level of its input."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers.trainer_utils import has_length

from ..configs import levels_of
from ..constraints.arguments import as_python
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.replay import Readout, evaluating
from ..readout.tape import config_flags, switched_off
from .fingerprints import Fingerprint
from .intervals import half_widths
from .row_sums import MetricRows, no_labels, of_all_processes, rounded
from .scoring import (
    Evaluation,
    Result,
    format_table,
    greater_is_better,
    metric_of_rows,
    metric_value,
    name_of,
    noisy,
)


SUMMARIES = ("auc", "auc_over_range", "auc_id", "auc_ood", "mean_over_levels")


@dataclass
class NoiseCurve(Result):
    """Metric and loss at G noise levels, for repeated draws of the noise. `noise_curve.json` has the attributes as
    keys.

    Attributes:
        metric (`str`): name of the metric.
        gammas (float64 `[G]`): increasing noise levels, in units of the clean signal's standard deviation.
        values (float64 `[G, draws]`): the metric; level 0 repeats its one value.
        losses (float64 `[G, draws]`): the task loss.
        gamma_train (`float`, *optional*): the training level; levels up to it are in-distribution (ID), others
            out-of-distribution (OOD).
        parts (float64 `[rows, G]`, *optional*): the part of each row of the data in `mean`, which is the mean of the
            parts. All confidence intervals come from them.
        scale (`float`): factor by which the rmse was multiplied.
        greater_is_better (`bool`): whether more of the metric is better.
        settings (`dict`): seed, draws, batch size, samples (where the data has a length), sigma, perturbation and a
            fingerprint of the data. Curves with equal seed, batch size and data have common random numbers.
    """

    metric: str
    gammas: np.ndarray
    values: np.ndarray
    losses: np.ndarray
    gamma_train: float | None = None
    parts: np.ndarray | None = None
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
        if self.gamma_train is None or self.gamma_train < self.gammas[0]:
            return None
        return self._average(self.gammas[0], min(self.gamma_train, self.gammas[-1]))

    @property
    def auc_ood(self) -> float | None:
        """Average of the metric over the levels above `gamma_train` (interpolated there); `None` if there are none."""
        if self.gamma_train is None or self.gamma_train >= self.gammas[-1]:
            return None
        return self._average(max(self.gamma_train, self.gammas[0]), self.gammas[-1])

    def radius(self, name: str, confidence: float = 0.95) -> np.ndarray | float:
        """Half-width of the confidence interval of the property `name` (`"mean"` `[G]`, `"auc"`, ...), over the choice
        of the data and the draws of the noise. NaN with too few examples, or if the property is `None`."""
        if self.parts is None:
            return float("nan")
        return half_widths(self.parts_of(name), confidence)

    def parts_of(self, name: str) -> np.ndarray:
        """The part of each row of the data in the property `name`, which is the mean of the parts; `[rows, ...]`."""
        # Every summary is linear in the curve, so its values on curves that are 1 at one level say all about it.
        units = np.eye(len(self.gammas))
        curves = [replace(self, values=unit[:, None], parts=None) for unit in units]
        weights = np.array([getattr(curve, name) for curve in curves], dtype=float)  # [G, ...]
        return self.parts @ weights

    def _average(self, low: float, high: float) -> float:
        """Mean of the piecewise linear curve over [low, high]; its value there if they coincide."""
        inside = self.gammas[(self.gammas > low) & (self.gammas < high)]
        grid = np.array([low, *inside, high])
        curve = np.interp(grid, self.gammas, self.mean)
        if high <= low:
            return float(curve[0])
        return float(np.trapezoid(curve, grid) / (high - low))

    def to_dict(self) -> dict[str, float]:
        """Flat Python floats for logging: `<metric>@<gamma>`, `loss@<gamma>` and the summaries that exist."""
        numbers = {}
        for gamma, value, loss in zip(self.gammas, self.mean, self.mean_losses):
            numbers[f"{self.metric}@{gamma:g}"] = float(value)
            numbers[f"loss@{gamma:g}"] = float(loss)

        for name in SUMMARIES:
            value = getattr(self, name)
            has_area = name != "auc" or len(self.gammas) > 1
            if value is not None and has_area:
                numbers[f"{self.metric}_{name}"] = value

        error = self.radius("auc_over_range")
        if np.isfinite(error):
            numbers[f"{self.metric}_auc_over_range_radius"] = float(error)

        return numbers

    def __str__(self) -> str:
        table = [["noise", self.metric, "+- (95 %)", "loss"]]
        radius = np.broadcast_to(self.radius("mean"), self.mean.shape)
        for gamma, value, error, loss in zip(self.gammas, self.mean, radius, self.mean_losses):
            table.append([f"{gamma:.4g}", f"{value:.5g}", f"{error:.2g}", f"{loss:.5g}"])

        text = format_table(table)
        if len(self.gammas) == 1:
            return text

        text += f"\nArea under the curve {self.auc:.5g}; "
        text += f"{self.metric} averaged over the range {self.auc_over_range:.5g}"
        error = self.radius("auc_over_range")
        if np.isfinite(error):
            text += f" +- {error:.2g} (95 %)"

        return text


def noise_curve(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    gammas: float | Sequence[float],
    *,
    draws: int = 3,
    seed: int = 0,
    sigma: float | None = None,
    gamma_train: float | Sequence[float] | None = None,
    noise: EmbeddingNoise | None = None,
    **settings,
) -> NoiseCurve:
    """Measure metric and loss of `model` at every noise level, each with `draws` draws of the noise.

    The noise depends only on (seed, draw, level, batch) and the kind of device, so that models which embed the same
    batches to the same shape are compared under the same noise. Each batch is collated once. The model's mode is
    restored.

    Args:
        model, dataset: see [`~evaluation.scoring.Evaluation`].
        gammas (`float` or sequence of `float`): noise levels >= 0, in units of `sigma`.
        draws (`int`): noise draws per level (level 0 is evaluated once).
        seed, sigma: see [`EmbeddingNoise`].
        gamma_train (`float` or `(float, float)`, *optional*): the training level, of a range the upper end.
        noise ([`EmbeddingNoise`], *optional*): noise with its own seed and sigma; its level is not used.
        settings: `metric`, `batch_size`, `data_collator` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    Returns the [`NoiseCurve`]. ValueError if there are no levels, draws or examples, the labels do not suit the
    metric, or `noise` is attached already.
    """
    gammas = sorted(set(levels_of("gammas", gammas)))
    trained = levels_of("gamma_train", () if gamma_train is None else gamma_train)
    _check_arguments(gammas, draws, noise)
    if noise is None and any(gammas):
        noise = EmbeddingNoise(model, gammas[-1], seed, sigma)

    evaluation = Evaluation(model, dataset, **settings)
    noisy_model = _NoisyModel(evaluation, noise)
    rows = MetricRows(evaluation.accelerator)
    losses = np.zeros((len(gammas), draws, 2))  # loss sums, items
    fingerprint = Fingerprint(evaluation.accelerator)
    # Its router's loss, which a mixture of experts adds, is no part of the task loss.
    router_flags = config_flags(model.modules(), ["output_router_logits"])
    with evaluating(model), switched_off(router_flags):
        for index, inputs in evaluation.batches("Noise curve"):
            fingerprint.add(index, evaluation.fingerprint(inputs))
            metric_sums, loss_sums = noisy_model.sums(inputs, index, gammas, draws)
            rows.add(index, metric_sums)
            losses += loss_sums

    metric_rows = rows.gathered()  # [rows, levels, draws, 2]
    losses = sum(of_all_processes([losses], evaluation.accelerator))
    if not (losses[..., 1] > 0).all():
        raise no_labels()
    metric = name_of(evaluation.metric)
    scale = float(evaluation.scale)
    conditions = {
        "seed": seed if noise is None else noise.seed,
        "draws": draws,
        "batch_size": getattr(dataset, "batch_size", evaluation.batch_size),
        "samples": None,
        "data": fingerprint.text(),
        "sigma": None if noise is None else noise.sigma,
        "perturbation": "gaussian" if noise is None else noise.name,
    }
    if has_length(dataset) and not isinstance(dataset, DataLoader):
        conditions["samples"] = len(dataset)

    return NoiseCurve(
        metric,
        gammas=np.array(gammas),
        values=metric_value(metric, scale, metric_rows.sum(axis=0)),
        losses=losses[..., 0] / losses[..., 1],
        gamma_train=max(trained, default=None),
        parts=rounded(metric_of_rows(metric, scale, metric_rows).mean(axis=-1)),
        scale=scale,
        greater_is_better=greater_is_better(evaluation.metric),
        settings={name: as_python(value) for name, value in conditions.items()},  # for JSON
    )


def _check_arguments(
    gammas: list[float],
    draws: int,
    noise: EmbeddingNoise | None,
) -> None:
    if not gammas or not 0 <= gammas[0] <= gammas[-1] < math.inf or draws < 1:
        raise ValueError(
            f"`gammas` is {gammas}, `draws` is {draws}; give one or more of each, levels from 0 on."
        )

    if noise is not None and noise.is_attached:
        raise ValueError(
            "`noise` is attached to the model, and would perturb every level; remove it first."
        )


class _NoisyModel:
    """A model with noise on its input."""

    def __init__(self, evaluation: Evaluation, noise: EmbeddingNoise | None):
        self._evaluation = evaluation
        self._noise = noise
        self._readout: Readout | None = None  # found on the first batch

    def sums(
        self, inputs: Mapping[str, Any], index: int, gammas: Sequence[float], draws: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(metric sum, metric count) of each row `[rows, levels, draws, 2]`, and (loss sum, items) of the batch
        `[levels, draws, 2]`."""
        metric_sums = []
        loss_sums = []
        for gamma in gammas:
            for draw in range(draws):
                if gamma or draw == 0:  # without noise, one draw stands for all
                    outputs = self.outputs(inputs, index, gamma, draw)
                    of_rows = self._evaluation.metric_sums(outputs, inputs)
                    of_batch = self._evaluation.loss_sums(outputs, inputs)
                metric_sums.append(of_rows)
                loss_sums.append(of_batch)

        shape = (len(gammas), draws, 2)
        return np.stack(metric_sums, axis=1).reshape(-1, *shape), np.reshape(loss_sums, shape)

    def outputs(self, inputs: Mapping[str, Any], index: int, gamma: float, draw: int) -> Any:
        """The model's outputs, or those of the custom readout of its last layer."""
        task = self._evaluation.task
        model = self._evaluation.model
        model_inputs = task.model_inputs(inputs)
        if self._evaluation.readout is None:
            with noisy(self._noise, gamma, draw, index):
                return model(**model_inputs)

        if self._readout is None:
            self._readout = Readout.probe(model, model_inputs, self._evaluation.readout)
            task.check_loss_function()
        with noisy(self._noise, gamma, draw, index):
            return self._readout.last_outputs(model_inputs)
