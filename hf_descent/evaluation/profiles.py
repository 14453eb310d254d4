"""The layer profile: loss and metric of the shared readout at every layer."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..configs import levels_of
from ..constraints.problem import DescentProblem, largest_rise
from ..losses.constant import chance_of
from ..losses.layerwise import find_layer_losses
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.replay import evaluating
from .certificates import LEAST_BLOCKS, Certificate, certify
from .intervals import LEAST_ROWS, confidence_limits, values_of_rows
from .price import Reference
from .row_sums import RowSums, rounded
from .scoring import Evaluation, Result, format_table, metric_value, name_of, noise_key
from .sums import BlockSums, radius


@dataclass
class LayerProfile(Result):
    """Loss and metric at each of L layers, on held-out data; layer l at index l-1, as in `layer_profile.json`.

    Attributes:
        metric (`str`): name of the metric.
        losses (float64 `[L]`): f_l, averaged over items.
        values (float64 `[L]`): the metric read out at each layer.
        gamma (`float`): noise level of the input.
        problem (`dict`, *optional*): the arguments of the [`DescentProblem`].
        blocks (float64 `[B, L, 4]`, *optional*): (metric sum, metric count, loss sum, items) over each of up to 32
            blocks of the data, the source of the intervals of the metric.
        scale (`float`): factor of the rmse.
        data (`str`, *optional*): fingerprint of the data (main input and labels, in batches).
        chance (`float`, *optional*): the least loss of a constant prediction of these labels, where it is known.
        facts (`dict`, *optional*): those of the training that a verdict on `problem` tells, see [`certify`].
        row_sums (float64 `[rows, L + 1]`, *optional*): of each row of the data the sums of its losses and its items,
            the source of the intervals of the loss and of the verdict; profiles of version 0.2 have blocks alone.
        whole_batches (`int`): how many of these rows are whole batches, whose loss cannot be told by row.
        references (`list`): f_L at earlier times of the run, see [`certify`].
    """

    metric: str
    losses: np.ndarray
    values: np.ndarray
    gamma: float = 0.0
    problem: dict[str, Any] | None = None
    blocks: np.ndarray | None = None
    scale: float = 1.0
    data: str | None = None
    chance: float | None = None
    facts: dict[str, Any] | None = None
    row_sums: np.ndarray | None = None
    whole_batches: int = 0
    references: list[Reference | Mapping[str, Any]] = field(default_factory=list)

    @property
    def ending(self) -> str:
        """Of the name of its file among those of other noise levels: `layer_profile`, `layer_profile_gamma_0.5`."""
        return f"_gamma_{self.gamma:g}" if self.gamma else ""

    def certificate(self, confidence: float = 0.95, **facts: Any) -> Certificate:
        """The verdict: what each row of the problem asked, and whether it is met; `facts` as for [`certify`], in place
        of the profile's. ValueError without a problem."""
        if self.problem is None:
            raise ValueError(
                "Measured without `problem`, or with a loss at chance that is not known, nothing can be judged: give "
                "`problem`."
            )
        facts = (self.facts or {}) | {"whole_batches": self.whole_batches} | facts
        rows, least_rows = self._rows()
        return certify(
            DescentProblem(**self.problem),
            rows,
            confidence,
            self.gamma,
            chance=self.chance,
            least_rows=least_rows,
            items=round(self.blocks[:, -1, 3].sum()),
            **{"references": self.references} | facts,
        )

    def keep_plain(self, plain: "LayerProfile") -> None:
        """Have verdicts on this profile tell the price beside that of plain training on the same data."""
        self.facts = (self.facts or {}) | {"plain": float(plain.losses[-1])}

    def _rows(self) -> tuple[np.ndarray, int]:
        """What intervals of the loss are made of `[n, L + 1]`, and the least number of it."""
        if self.row_sums is not None:
            return self.row_sums, LEAST_ROWS
        return np.concatenate([self.blocks[..., 2], self.blocks[:, -1:, 3]], axis=1), LEAST_BLOCKS

    @property
    def feasible(self) -> bool | None:
        """Whether every row of the problem is met with confidence; `None` without a problem."""
        return None if self.problem is None else self.certificate().feasible

    @property
    def descent_share(self) -> float | None:
        """See [`DescentProblem`]; with constraints or without. `None` where f_L is not shown to be below chance."""
        problem, depth = self.problem, len(self.losses)
        if problem is None and self.chance and depth > 1:
            problem = DescentProblem(
                "line", self.chance, depth, chance_loss=self.chance
            ).state_dict()
        return (
            None if problem is None else replace(self, problem=problem).certificate().descent_share
        )

    def radius(self, name: str, confidence: float = 0.95) -> np.ndarray:
        """Half-width `[L]` of the confidence intervals of `"losses"` or `"values"`, over the choice of the data and
        the noise; not a number where there is too little data."""
        if name == "values":
            statistic = partial(metric_value, self.metric, self.scale)
            return np.broadcast_to(radius(statistic, self.blocks, confidence), self.losses.shape)
        if self.blocks is None:
            return np.full(self.losses.shape, np.nan)
        rows, least_rows = self._rows()
        _, of_rows = values_of_rows(lambda losses: losses, rows)
        lower, upper = confidence_limits(of_rows, confidence, least_rows)
        return np.where(np.isinf(upper - lower), np.nan, (upper - lower) / 2)

    def to_dict(self) -> dict[str, float]:
        """Flat Python floats for logging; layers are numbered from 1, `feasible` is 0 or 1."""
        found = {
            "largest_rise": largest_rise(torch.from_numpy(self.losses)),
            "descent_share": self.descent_share,
        }
        for layer, (loss, value) in enumerate(zip(self.losses, self.values), start=1):
            found |= {f"layer_loss_{layer}": loss, f"layer_{self.metric}_{layer}": value}
        if self.problem is not None:
            verdict = self.certificate()
            found |= {"max_violation": verdict.max_violation, "feasible": verdict.feasible}
        return {name: float(value) for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        columns = self.losses, self.radius("losses"), self.values, self.radius("values")
        rows = [["layer", "loss", "+- (95 %)", self.metric, "+- (95 %)"]]
        for layer, (loss, loss_error, value, error) in enumerate(zip(*columns), start=1):
            rows.append(
                [f"{layer}", f"{loss:.5g}", f"{loss_error:.2g}", f"{value:.5g}", f"{error:.2g}"]
            )
        text, share = format_table(rows), self.descent_share
        if share is not None:
            text += f"\ndescent share {share:.2f}, at f_L = {self.losses[-1]:.5g}"
        return text


def layer_profile(
    model: nn.Module, dataset: Dataset | DataLoader, *, gamma: float = 0.0, **settings
) -> LayerProfile:
    """Loss and metric of `model` at every layer, through the readout that its layers share.

    f_l is the model's own loss, averaged over the items of the data set. `gamma` is the noise level of the input; the
    noise is that of `noise_curve`'s first draw. Other arguments and errors: see
    [`~evaluation.profiles.layer_profiles`].
    """
    return layer_profiles(model, dataset, [gamma], **settings)[0]


def layer_profiles(
    model: nn.Module,
    dataset: Dataset | DataLoader,
    gammas: Sequence[float],
    *,
    problem: DescentProblem | Mapping[str, Any] | None = None,
    seed: int = 0,
    sigma: float | None = None,
    readings: Mapping[str, Mapping[int, torch.Tensor]] = MappingProxyType({}),
    **settings,
) -> list[LayerProfile]:
    """The [`layer_profile`] at each of several noise levels, from one pass over the data.

    Args:
        model, dataset: see [`~evaluation.scoring.Evaluation`].
        gammas (sequence of `float`): noise levels of the input, in the order of the result.
        problem ([`DescentProblem`] or its arguments, *optional*): constraints to check the losses against.
        seed, sigma: see [`EmbeddingNoise`].
        readings (mapping): of the last layer at earlier times on the same batches without noise, each `[rows, 2]` by
            the number of its batch: losses over items, and items.
        settings: `metric`, `batch_size`, `data_collator` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError for no shared readout, an empty or unlabelled data set, a bad noise level, labels that do not suit the
    metric, or a `problem` of another number of layers.
    """
    gammas = levels_of("gammas", gammas)
    problem = DescentProblem(**problem) if isinstance(problem, Mapping) else problem
    noise = EmbeddingNoise(model, (min(gammas), max(gammas)), seed, sigma) if any(gammas) else None
    evaluation = Evaluation(model, dataset, **settings)
    sums, layers, labels = BlockSums(evaluation.accelerator), None, None
    rows = [RowSums() for _ in gammas]
    with evaluating(model):
        for index, inputs in evaluation.batches("Layer profile"):
            if layers is None:
                layers = find_layer_losses(
                    model,
                    inputs,
                    evaluation.task,
                    readout=evaluation.readout,
                    needs_logits=evaluation.needs_logits,
                )
                if problem is not None and problem.num_layers != (depth := layers.num_layers):
                    fault = (
                        f"`problem` is of {problem.num_layers} layers, but the model has {depth}"
                    )
                    raise ValueError(f"{fault}: give the model's.")
            if layers.predictor is not None:
                labels = layers.predictor.of_batch(evaluation.task, inputs).plus(labels)
            scores = []
            for level, gamma in enumerate(gammas):
                with noise.at(gamma, *noise_key(0, gamma, index)) if gamma else nullcontext():
                    measured = layers.measure(model, inputs, evaluation.score, keep_logits=False)
                scores.append(torch.stack(measured.scores))  # [layers, 4]
                rows[level] = rows[level].plus(measured.rows, measured.is_split)
            sums.add(index, torch.stack(scores).numpy(), evaluation.fingerprint(inputs))
    blocks, fingerprint = sums.total(), sums.fingerprint()  # [blocks, levels, layers, 4]
    metric, scale = name_of(evaluation.metric), float(evaluation.scale)
    arguments = None if problem is None else problem.state_dict()
    shared = evaluation.accelerator is not None
    profiles = []
    for level, gamma in enumerate(gammas):
        variance = 0.0 if noise is None else (gamma * noise.sigma) ** 2
        found = rows[level].gathered(shared, list(readings.values()))
        references = [
            Reference.measured(time, earlier, is_same_data=True)
            for time, earlier in zip(readings, found.earlier)
            if gamma == 0 and (earlier[:, 1] > 0).any()
        ]
        row_sums = found.sums
        profiles.append(
            LayerProfile(
                metric,
                losses=row_sums[:, :-1].sum(axis=0) / row_sums[:, -1].sum(),
                values=metric_value(metric, scale, blocks[:, level].sum(axis=0)),
                gamma=gamma,
                problem=arguments,
                blocks=blocks[:, level],
                scale=scale,
                data=fingerprint,
                chance=chance_of(labels and replace(labels, noise_variance=variance), shared),
                row_sums=rounded(row_sums),
                whole_batches=found.whole_batches,
                references=references,
            )
        )
    return profiles
