"""The noise curve: a model's metric and loss against the noise level of its input."""

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers.trainer_utils import has_length

from ..configs import levels_of
from ..constraints.problem import as_python
from ..noise.embedding_noise import EmbeddingNoise
from .scoring import (
    Metric,
    Result,
    Scorer,
    evaluating,
    mean_loss,
    metric_value,
    name_of,
    numbered_batches,
    prepare_collator,
)
from .sums import BlockSums, fingerprint_of_functions, fingerprints_of, weights_fingerprint
from .sweep import Rows, Sweep
from .uncertainty import pseudo_values, radius


SUMMARIES = ("auc", "auc_over_range", "retention", "auc_id", "auc_ood", "mean_over_levels")


@dataclass
class NoiseCurve(Result):
    """Metric and loss at G noise levels, for repeated noise draws.

    The keys of `noise_curve.json` are the attributes.

    Attributes:
        metric (`str`): name of the metric.
        gammas (float64 `[G]`): increasing noise levels, in units of the clean signal's standard deviation (rates in
            [0, 1] for another perturbation).
        values (float64 `[G, draws]`): the metric; level 0 repeats its one value.
        losses (float64 `[G, draws]`): the task loss.
        gamma_train (`float`, *optional*): the training level; up to it a level is in-distribution (ID), above it
            out-of-distribution (OOD).
        blocks (float64 `[B, G, draws, 4]`, *optional*): (metric sum, metric count, loss sum, items) over each of up to
            32 blocks of the data, the source of every confidence interval.
        scale (`float`): factor of the rmse.
        greater_is_better (`bool`): whether more of the metric is better.
        settings (`dict`): seed, batch size, sigma, perturbation, samples (of data whose length says them) and
            fingerprints of the data (main input and labels), of all inputs and, for a file, the weights and the
            functions. Curves with equal seed, batch size and data have common random numbers.
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
    def mean_losses(self) -> np.ndarray:
        """Mean of the loss over draws, `[G]`."""
        return self.losses.mean(axis=1)

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
    def mean_over_levels(self) -> float:
        """Mean of the metric over the levels, the paper's summary for denoising."""
        return float(self.mean.mean())

    @property
    def retention(self) -> float | None:
        """`auc_over_range` divided by the clean metric; `None` without level 0, or where the metric is 0 there."""
        return self.auc_over_range / float(self.mean[0]) if self.gammas[0] == 0.0 and self.mean[0] else None

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
        of the data and the draws of the noise; not a number without two blocks, nor of a summary that is `None`."""
        return radius(self._statistic(name), self.blocks, confidence)

    def pseudo_values(self, name: str) -> np.ndarray:
        """The share of each block of the data in the property `name`, `[B, ...]` (see `uncertainty`)."""
        return pseudo_values(self._statistic(name), self.blocks)

    def _statistic(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """Maps sums `[G, draws, 4]` to the property that a curve with these sums has."""

        def statistic(sums):
            values = metric_value(self.metric, self.scale, sums)
            curve = replace(self, values=values, losses=mean_loss(sums), blocks=None)
            return np.asarray(getattr(curve, name), dtype=float)  # of a summary that is `None`: not a number

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
        summaries = {name: getattr(self, name) for name in SUMMARIES}
        if np.isfinite(error := self.radius("auc_over_range")):
            summaries["auc_over_range_radius"] = float(error)
        return levels | {f"{self.metric}_{name}": value for name, value in summaries.items() if value is not None}

    def to_csv(self, path: str):
        """One line for each level: metric with the half-width of its 95 % interval, spread over draws, loss."""
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["gamma", self.metric, "radius_95", "std_over_draws", "loss"])
            writer.writerows(zip(*(column.tolist() for column in self._columns())))

    def __str__(self) -> str:
        rows = [f"{'gamma':>8} {self.metric:>12} {'+- (95 %)':>10} {'draws':>10} {'loss':>12}"]
        for gamma, value, error, spread, loss in zip(*self._columns()):
            rows.append(f"{gamma:8.4g} {value:12.5g} {error:10.2g} {spread:10.2g} {loss:12.5g}")
        error = self.radius("auc_over_range")
        return "\n".join(
            [*rows, f"AUC {self.auc:.5g}, over the range {self.auc_over_range:.5g} +- {error:.2g} (95 %)"]
        )

    def _columns(self) -> tuple[np.ndarray, ...]:
        error = np.broadcast_to(self.radius("mean"), self.mean.shape)
        return self.gammas, self.mean, error, self.std, self.mean_losses


def noise_curve(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    gammas: float | Sequence[float],
    *,
    metric: Metric = "accuracy",
    scale: float = 1.0,
    data_collator: Callable | None = None,
    processing_class: Any | None = None,
    remove_unused_columns: bool = True,
    batch_size: int = 32,
    draws: int = 3,
    seed: int = 0,
    sigma: float | None = None,
    gamma_train: float | Sequence[float] | None = None,
    label_names: Sequence[str] | None = None,
    layer_loss_fn: Callable[..., torch.Tensor] | None = None,
    readout: Callable | None = None,
    perturbation: Callable[[Mapping, float, np.random.Generator], Mapping] | None = None,
    noise: EmbeddingNoise | None = None,
    cells_per_forward: int | None = None,
    accelerator: Accelerator | None = None,
    path: str | None = None,
    progress: bool = False,
) -> NoiseCurve:
    """Metric and loss of `model` at every noise level, each with `draws` draws of the noise.

    The noise depends on (seed, draw, level, batch) and the kind of device alone, so models that embed the same batches
    to the same shape are compared under common random numbers. Each batch is collated once, used for all levels and
    dropped: memory does not grow with the data set.

    Args:
        model (`nn.Module`): unwrapped, on its device; evaluated in eval mode, which is undone afterwards.
        dataset (`Dataset` or `DataLoader`): labelled held-out data; a `DataLoader`'s batches are taken as they are.
        gammas (`float` or sequence of `float`): noise levels >= 0, in units of `sigma`; an array or a tensor, too.
        metric, scale, label_names, layer_loss_fn: see [`~evaluation.scoring.Scorer`].
        data_collator, processing_class, remove_unused_columns: as in `Trainer`.
        batch_size (`int`): samples per batch; it is part of what fixes the noise.
        draws (`int`): noise draws per level (level 0 is evaluated once).
        seed, sigma: see [`EmbeddingNoise`].
        gamma_train (`float` or `(float, float)`, *optional*): the training level, of a range the upper end, to tell ID
            from OOD.
        readout (function, *optional*): readout(model, hidden, inputs) -> logits, where training used one.
        perturbation (function, *optional*): perturbation(row, level, generator) -> row, in place of the Gaussian noise
            (see [`~evaluation.perturbations`]); the rows of `dataset` are then collated for every level and draw. Its
            name in results is its attribute `name`, or else that of the function.
        noise ([`EmbeddingNoise`], *optional*): the kind of noise, with a seed and a sigma of its own; it stays as it
            is, and its own level does not count.
        cells_per_forward (`int`, *optional*): levels and draws evaluated in one forward, on copies of the batch. As
            many as fit into memory where not given and the model is on an accelerator, else 1. Models whose loss is no
            function of their logits take one.
        accelerator (`Accelerator`, *optional*): share the batches among its processes, all of which must call.
        path (`str`, *optional*): keep the curve there as JSON, with its CSV beside it. A call that was killed goes on
            where it was, and a finished curve of the same model, rows (all inputs) and settings is read, not
            measured again.
            Functions are the same where their own code and all that they hold are. Data without a length, a `noise` of
            a class derived from [`EmbeddingNoise`] and functions that cannot be compared (methods, and what cannot be
            pickled) are measured anew.
        progress (`bool`): show a progress bar over batches.

    Raises:
        ValueError: no levels, negative levels, no draws, an empty dataset, labels that do not suit the metric, a
            `path` that is a folder, a `perturbation` beside `noise`.
    """
    gammas = sorted(set(levels_of("gammas", gammas)))
    gamma_train = max(levels_of("gamma_train", () if gamma_train is None else gamma_train), default=None)
    scale = float(scale)
    if not gammas or not 0 <= gammas[0] <= gammas[-1] < math.inf or draws < 1 or (cells_per_forward or 1) < 1:
        raise ValueError(
            f"`gammas` is {gammas}, `draws` is {draws} and `cells_per_forward` {cells_per_forward}; give at least one "
            "noise level (finite, not negative), one draw and one cell."
        )
    if perturbation is not None and isinstance(dataset, DataLoader):
        raise ValueError(
            "`perturbation` changes rows before they are collated; give the data set, not a `DataLoader`."
        )
    if perturbation is not None and noise is not None:
        raise ValueError("`perturbation` and `noise` are given, and would both change the inputs; give one of them.")
    if noise is not None and noise.is_attached:
        raise ValueError("`noise` is attached to the model, and would perturb every level; remove it first.")
    alone = accelerator is None or accelerator.num_processes == 1
    is_main = accelerator is None or accelerator.is_main_process
    if path is not None:
        path = os.path.abspath(path)
        is_folder = [os.path.isdir(path)]
        if accelerator is not None:
            broadcast_object_list(is_folder)  # or the others would wait for the process that writes
        if is_folder[0]:
            raise ValueError(f"`path` is {path}, a folder; name a file in it, such as noise_curve.json.")
        if is_main:
            os.makedirs(os.path.dirname(path), exist_ok=True)
    noisy = gammas != [0.0] and perturbation is None
    if noisy and noise is None:
        noise = EmbeddingNoise(model, gammas[-1], seed, sigma)
    scorer = Scorer(model, metric, scale, label_names, layer_loss_fn, readout)
    collate = prepare_collator(model, data_collator, processing_class, label_names, remove_unused_columns)
    device = next(model.parameters()).device

    def inputs_of(index: int, batch: Any) -> Callable[[float, int], Mapping[str, Any]]:
        """(level, draw) -> the model's inputs of one batch."""
        if perturbation is not None:
            return Rows(batch, index * batch_size, perturbation, seed, collate, device).inputs
        inputs = send_to_device(batch, device)
        return lambda gamma, draw: inputs

    batches_from = partial(numbered_batches, dataset, collate if perturbation is None else list, batch_size)

    def marks(index: int, batch: Any) -> tuple[str, str]:
        return scorer.fingerprints(batch if perturbation is None else inputs_of(index, batch)(gammas[0], 0))

    known_length = has_length(dataset)
    settings = {
        "seed": seed if noise is None else noise.seed,
        "draws": draws,
        "batch_size": getattr(dataset, "batch_size", batch_size),
        "samples": len(dataset) if known_length and not isinstance(dataset, DataLoader) else None,  # not its batches
        "data": None,
        "inputs": None,
        "sigma": None if noise is None else noise.sigma,
        "perturbation": next(
            (getattr(kind, "name", name_of(kind)) for kind in (noise, perturbation) if kind is not None), "gaussian"
        ),
        "weights": None if path is None else weights_fingerprint(model),
    }
    settings = {name: as_python(value) for name, value in settings.items()}  # for JSON
    comparable = path is not None and alone and known_length and (noise is None or type(noise) is EmbeddingNoise)
    if comparable and any(map(callable, functions := (metric, layer_loss_fn, readout, perturbation))):
        settings["functions"] = fingerprint_of_functions(*functions)
        comparable = settings["functions"] is not None
    key = [gammas, scorer.metric_name, scale, gamma_train, settings]
    if comparable and os.path.isfile(path):
        curve = NoiseCurve.from_json(path)
        measured = curve.settings | {"data": None, "inputs": None}
        same = key == [curve.gammas.tolist(), curve.metric, curve.scale, curve.gamma_train, measured]
        numbered = ((index, *marks(index, batch)) for index, batch in batches_from())
        if same and [curve.settings["data"], curve.settings.get("inputs")] == fingerprints_of(numbered):
            os.utime(path)  # made before the last training, it is this model's all the same
            return curve

    if comparable:  # that partial sums are of these rows; their end is not to be read for it
        key.append(next((marks(index, batch) for index, batch in batches_from()), None))
    sums = BlockSums((len(gammas), draws), accelerator, path if comparable else None, key)
    sweep = Sweep(model, scorer, gammas, draws, noise, readout, cells_per_forward if perturbation is None else 1)
    with evaluating(model):
        for index, batch in tqdm(batches_from(sums.next_index, sums.step), desc="Noise curve", disable=not progress):
            sums.add(index, sweep(index, inputs_of(index, batch)), *(marks(index, batch) if known_length else ()))
    blocks = sums.total()
    if known_length:
        settings["data"], settings["inputs"] = sums.fingerprints()
    total = blocks.sum(axis=0)  # [levels, draws, 4]
    curve = NoiseCurve(
        scorer.metric_name,
        np.array(gammas),
        metric_value(scorer.metric_name, scale, total),
        mean_loss(total),
        gamma_train,
        blocks,
        scale,
        scorer.greater_is_better,
        settings,
    )
    if path is not None and is_main:
        curve.to_json(path)
        curve.to_csv(f"{os.path.splitext(path)[0]}.csv")
        sums.forget()
    return curve
