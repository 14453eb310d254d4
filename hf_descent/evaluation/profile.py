"""The layer profile: loss and metric of the shared readout at every layer, and whether each sample descends."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..configs import levels_of
from ..constraints.problem import MIN_ROWS, DescentProblem
from ..losses.layerwise import find_layer_losses
from ..noise.embedding_noise import EmbeddingNoise
from .scoring import (
    Metric,
    Result,
    Scorer,
    evaluating,
    mean_loss,
    metric_value,
    name_of,
    noise_key,
    numbered_batches,
    prepare_collator,
)
from .sums import BlockSums
from .uncertainty import radius


@dataclass
class LayerProfile(Result):
    """Loss and metric at each of L layers, on held-out data; layer l at index l-1.

    The keys of `layer_profile.json` are the attributes.

    Attributes:
        metric (`str`): name of the metric.
        losses (float64 `[L]`): f_l, averaged over items.
        values (float64 `[L]`): the metric read out at each layer.
        sample_losses (float64 `[samples, L]`): f_l(x_n), the mean over the items of sample n, where it has any.
        gamma (`float`): noise level of the input.
        violations (float64 `[L]`, *optional*): g_l of the problem, in units of the loss; at most 0 is satisfied.
        max_violation (`float`, *optional*): the largest violation over the constrained layers.
        feasible (`bool`, *optional*): whether no violation exceeds the tolerance and no constrained layer is at chance
            ([`DescentProblem`]); never on fewer than 8 samples.
        problem (`dict`, *optional*): the arguments of the [`DescentProblem`].
        tolerance (`float`): largest violation that counts as feasible, in units of the loss.
        blocks (float64 `[B, L, 4]`, *optional*): (metric sum, metric count, loss sum, items) over each of up to 32
            blocks of the data, the source of every confidence interval.
        scale (`float`): factor of the rmse.
        data (`str`, *optional*): fingerprint of the data (main input and labels, in batches).
    """

    metric: str
    losses: np.ndarray
    values: np.ndarray
    sample_losses: np.ndarray
    gamma: float = 0.0
    violations: np.ndarray | None = None
    max_violation: float | None = None
    feasible: bool | None = None
    problem: dict[str, Any] | None = None
    tolerance: float = 0.0
    blocks: np.ndarray | None = None
    scale: float = 1.0
    data: str | None = None

    @property
    def ending(self) -> str:
        """Of the name of its file among those of other noise levels: `layer_profile`, `layer_profile_gamma_0.5`."""
        return f"_gamma_{self.gamma:g}" if self.gamma else ""

    @property
    def ratios(self) -> np.ndarray:
        """rho_l(x_n) = f_l(x_n) / f_{l-1}(x_n) for l = 2..L (0 / 0 counts as 1), `[samples, L - 1]`."""
        before, after = self.sample_losses[:, :-1], self.sample_losses[:, 1:]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(after == before, 1.0, after / before)

    @property
    def descending_share(self) -> float:
        """Share of (sample, layer) steps whose loss falls, rho < 1; not a number for a single layer."""
        return float(np.mean(self.ratios < 1.0)) if self.ratios.size else float("nan")

    @property
    def constrained_layers(self) -> list[int]:
        """The constrained layers of the problem, 1-based; none without a problem."""
        return [] if self.problem is None else self.problem["constrained_layers"]

    def radius(self, name: str, confidence: float = 0.95, comparisons: int = 1) -> np.ndarray | float:
        """Half-width `[L]` of the confidence intervals of `"losses"`, `"values"` or `"violations"`, over the choice of
        the data and the noise; of `comparisons` intervals that hold together. Not a number without two blocks."""
        return radius(self._statistic(name), self.blocks, confidence, comparisons)

    def _statistic(self, name: str) -> Callable[[np.ndarray], np.ndarray]:
        """Maps sums `[L, 4]` to the attribute that a profile with these sums has."""
        if name == "violations":
            problem = DescentProblem(**self.problem)
            return lambda sums: problem.violations(torch.from_numpy(mean_loss(sums))).numpy()
        return {"losses": mean_loss, "values": partial(metric_value, self.metric, self.scale)}[name]

    def to_dict(self) -> dict[str, float]:
        """Flat Python floats for logging; layers are numbered from 1, `feasible` is 0 or 1."""
        flat = {}
        for layer, (loss, value) in enumerate(zip(self.losses, self.values), start=1):
            flat |= {f"layer_loss_{layer}": float(loss), f"layer_{self.metric}_{layer}": float(value)}
        if self.ratios.size:
            flat["ratio_mean"], flat["ratio_median"] = float(np.mean(self.ratios)), float(np.median(self.ratios))
            flat["descending_share"] = self.descending_share
        if self.violations is not None:
            flat |= {"max_violation": self.max_violation, "feasible": float(self.feasible)}
        return flat

    def __str__(self) -> str:
        columns = {"loss": "losses", self.metric: "values"}
        if self.violations is not None:
            columns["violation"] = "violations"
        rows = [f"{'layer':>6}" + "".join(f" {name:>12} {'+- (95 %)':>10}" for name in columns)]
        errors = {name: np.broadcast_to(self.radius(name), self.losses.shape) for name in columns.values()}
        for layer in range(len(self.losses)):
            cells = (f" {getattr(self, name)[layer]:12.5g} {errors[name][layer]:10.2g}" for name in columns.values())
            rows.append(f"{layer + 1:6d}" + "".join(cells))
        if self.ratios.size:
            rows.append(
                f"per-sample ratios: mean {np.mean(self.ratios):.3g}, median {np.median(self.ratios):.3g}, "
                f"{self.descending_share:.1%} of steps descend"
            )
        return "\n".join(rows)


def layer_profile(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    *,
    gamma: float = 0.0,
    **settings,
) -> LayerProfile:
    """Loss and metric of `model` at every layer, through the readout that its layers share.

    f_l is the model's own loss, averaged over the items of the data set. The per-sample losses behind the ratios are
    computed from the logits: cross-entropy, or mean squared error for floating labels. They are all that grows with
    the data set: L numbers a sample.

    Args:
        model (`nn.Module`): unwrapped, on its device; evaluated in eval mode, which is undone afterwards.
        dataset (`Dataset` or `DataLoader`): labelled held-out data; a `DataLoader`'s batches are taken as they are.
        gamma (`float`): noise level of the input; the noise is that of `noise_curve`'s first draw.
        settings: see [`~evaluation.profile.layer_profiles`].

    Raises:
        ValueError: no shared readout, an empty or unlabelled data set, a bad noise level, labels that do not suit the
            metric.
    """
    return layer_profiles(model, dataset, [gamma], **settings)[0]


def layer_profiles(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    gammas: Sequence[float],
    *,
    problem: DescentProblem | Mapping[str, Any] | None = None,
    tolerance: float = 0.0,
    metric: Metric = "accuracy",
    scale: float = 1.0,
    data_collator: Callable | None = None,
    processing_class: Any | None = None,
    remove_unused_columns: bool = True,
    batch_size: int = 32,
    seed: int = 0,
    sigma: float | None = None,
    label_names: Sequence[str] | None = None,
    layer_loss_fn: Callable[..., torch.Tensor] | None = None,
    readout: Callable | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = False,
) -> list[LayerProfile]:
    """The [`layer_profile`] at each of several noise levels, from one pass over the data.

    Args:
        gammas (sequence of `float`): noise levels of the input, in the order of the result.
        problem ([`DescentProblem`] or its arguments, *optional*): constraints to check the losses against.
        tolerance (`float`): largest violation that counts as feasible, in units of the loss.
        readout (function, *optional*): readout(model, hidden, inputs) -> logits, where training used one.
        Others: see [`noise_curve`].

    Raises:
        ValueError: as [`layer_profile`]; a `problem` of another number of layers.
    """
    gammas = levels_of("gammas", gammas)
    problem = DescentProblem(**problem) if isinstance(problem, Mapping) else problem
    noise = EmbeddingNoise(model, (min(gammas), max(gammas)), seed, sigma) if any(gammas) else None
    scorer = Scorer(model, metric, label_names, layer_loss_fn, readout)
    collate = prepare_collator(model, data_collator, processing_class, label_names, remove_unused_columns)
    batches = numbered_batches(
        dataset, collate, batch_size, accelerator, progress="Layer profile" if progress else None
    )
    sums, layers, samples = BlockSums(accelerator), None, []  # samples: (batch, losses [levels, samples, layers])
    with evaluating(model) as device:
        for index, batch in batches:
            inputs = scorer.prepare(send_to_device(batch, device))
            if layers is None:
                layers = find_layer_losses(
                    model, inputs, scorer.task, readout=readout, needs_logits=scorer.needs_logits
                )
                if problem is not None and problem.num_layers != layers.num_layers:
                    raise ValueError(
                        f"`problem` is of {problem.num_layers} layers, but {type(model).__name__} has "
                        f"{layers.num_layers}; give the problem of this model."
                    )

            def score(outputs, inputs):
                return scorer(outputs, inputs), scorer.sample_losses(outputs, inputs)

            scores, losses = [], []
            for gamma in gammas:
                with noise.split((gamma, noise_key(0, gamma, index))) if gamma else nullcontext():
                    found = layers.measure(model, inputs, score, keep_logits=False).scores
                scores.append(torch.stack([layer_sums for layer_sums, _ in found]))  # [layers, 4]
                losses.append(torch.stack([losses for _, losses in found], dim=1))  # [samples, layers]
            sums.add(index, torch.stack(scores).numpy(), scorer.fingerprint(inputs))
            samples.append((index, torch.stack(losses).double().numpy()))
    blocks, fingerprint = sums.total(), sums.fingerprint()  # [blocks, levels, layers, 4]
    if accelerator is not None and accelerator.num_processes > 1:
        samples = sorted(gather_object(samples), key=lambda numbered: numbered[0])
    samples = np.concatenate([losses for _, losses in samples], axis=1)  # [levels, samples, layers]
    return [
        _profile(
            name_of(metric), float(scale), blocks[:, level], samples[level], gamma, problem, tolerance, fingerprint
        )
        for level, gamma in enumerate(gammas)
    ]


def _profile(metric, scale, blocks, sample_losses, gamma, problem, tolerance, data) -> LayerProfile:
    total = blocks.sum(axis=0)  # [layers, 4]
    profile = LayerProfile(
        metric,
        mean_loss(total),
        metric_value(metric, scale, total),
        sample_losses,
        gamma,
        blocks=blocks,
        scale=scale,
        data=data,
    )
    if problem is None:
        return profile
    arguments, losses = problem.state_dict(), torch.from_numpy(profile.losses)
    problem = DescentProblem(**arguments)  # the given one may be on a device
    return replace(
        profile,
        violations=problem.violations(losses).numpy(),
        max_violation=problem.max_violation(losses).item(),
        feasible=len(sample_losses) >= MIN_ROWS and problem.feasible(losses, tolerance),
        problem=arguments,
        tolerance=tolerance,
    )
