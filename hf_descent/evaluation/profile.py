"""The layer profile: loss and metric of the shared readout at every layer, and whether each sample descends."""

from collections.abc import Callable, Mapping, Sequence
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
from ..problem import DescentProblem
from ..readout import Readout
from .scoring import Metric, Result, Scorer, check_scored, evaluating, noise_key, prepare_batches, read_layers


@dataclass
class LayerProfile(Result):
    """Loss and metric at each of L layers, on held-out data; layer l at index l-1.

    Attributes:
        metric (`str`): name of the metric.
        losses (float64 `[L]`): f_l, averaged over items.
        values (float64 `[L]`): the metric read out at each layer.
        sample_losses (float64 `[samples, L]`): f_l(x_n), the mean over the items of sample n, where it has any.
        gamma (`float`): noise level of the input.
        violations (float64 `[L]`, *optional*): g_l of the problem, in units of the loss; at most 0 is satisfied.
        max_violation (`float`, *optional*): the largest violation over the constrained layers.
        feasible (`bool`, *optional*): whether no violation exceeds the tolerance.
    """

    metric: str
    losses: np.ndarray
    values: np.ndarray
    sample_losses: np.ndarray
    gamma: float = 0.0
    violations: np.ndarray | None = None
    max_violation: float | None = None
    feasible: bool | None = None

    def __post_init__(self):
        for name in ("losses", "values", "sample_losses", "violations"):
            if getattr(self, name) is not None:
                setattr(self, name, np.asarray(getattr(self, name), dtype=np.float64))

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
        header = f"{'layer':>6} {'loss':>12} {self.metric:>12}"
        rows = [header if self.violations is None else f"{header} {'violation':>12}"]
        for layer, (loss, value) in enumerate(zip(self.losses, self.values), start=1):
            row = f"{layer:6d} {loss:12.5g} {value:12.5g}"
            rows.append(row if self.violations is None else f"{row} {self.violations[layer - 1]:12.3g}")
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
    problem: DescentProblem | None = None,
    tolerance: float = 0.0,
    metric: Metric = "accuracy",
    scale: float = 1.0,
    data_collator: Callable | None = None,
    processing_class: Any | None = None,
    batch_size: int = 32,
    seed: int = 0,
    sigma: float | None = None,
    label_names: Sequence[str] | None = None,
    layer_loss_fn: Callable[..., torch.Tensor] | None = None,
    readout: Callable | None = None,
    progress: bool = False,
) -> LayerProfile:
    """Loss and metric of `model` at every layer, through the readout that its layers share.

    f_l is the model's own loss, averaged over the items of the data set. The per-sample losses behind the ratios are
    computed from the logits: cross-entropy, or mean squared error for floating labels. They are all that grows with
    the data set: L numbers a sample.

    Args:
        model (`nn.Module`): unwrapped, on its device; evaluated in eval mode, which is undone afterwards.
        dataset (`Dataset` or `DataLoader`): labelled held-out data; a `DataLoader`'s batches are taken as they are.
        gamma (`float`): noise level of the input; the noise is that of `noise_curve`'s first draw.
        problem ([`DescentProblem`], *optional*): constraints to check the losses against.
        tolerance (`float`): largest violation that counts as feasible, in units of the loss.
        readout (function, *optional*): readout(model, hidden, inputs) -> logits, where training used one.
        Others: see [`noise_curve`].

    Raises:
        ValueError: no shared readout, an empty or unlabelled data set, a bad noise level, labels that do not suit the
            metric.
    """
    noise = EmbeddingNoise(model, gamma, seed, sigma) if gamma else nullcontext()
    scorer = Scorer(model, metric, scale, label_names, layer_loss_fn)
    batches = prepare_batches(model, dataset, data_collator, processing_class, batch_size, label_names)
    sums, sample_losses = torch.zeros(1, 4), []

    with evaluating(model) as device:
        for index, batch in enumerate(tqdm(batches, desc="Layer profile", disable=not progress)):
            inputs = send_to_device(batch, device)
            given = scorer.model_inputs(inputs, readout)
            if index == 0:
                reader = Readout.probe(model, given, readout)
            if gamma:
                noise.reseed(*noise_key(0, gamma, index))
            with noise:
                layers = read_layers(reader, given, partial(_score, scorer, inputs))
            sums = sums + torch.stack([layer_sums for layer_sums, _ in layers])  # [layers, 4]
            sample_losses.append(torch.stack([losses for _, losses in layers], dim=1))  # [batch, layers]
    check_scored(sums)
    losses = sums[:, 2] / sums[:, 3]  # [layers]
    profile = LayerProfile(
        scorer.metric_name, losses, scorer.value(sums), torch.cat(sample_losses).double(), gamma=float(gamma)
    )
    if problem is not None:
        problem = DescentProblem(**problem.state_dict())  # on the CPU, wherever the trainer keeps its own
        profile.violations = problem.violations(losses).numpy()
        profile.max_violation = float(problem.max_violation(losses))
        profile.feasible = problem.feasible(losses, tolerance)
    return profile


def _score(scorer: Scorer, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return scorer(outputs, inputs), scorer.sample_losses(outputs, inputs).cpu()
