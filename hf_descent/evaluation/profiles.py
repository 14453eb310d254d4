"""The layer profile: loss and metric of the shared readout at every layer."""

from collections.abc import Mapping, Sequence
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
from ..losses.chance import chance_of
from ..losses.layerwise import LayerLosses, find_layer_losses
from ..noise.embedding_noise import EmbeddingNoise
from ..readout.replay import evaluating
from .certificates import LEAST_BLOCKS, Certificate, certify, half_widths
from .intervals import LEAST_ROWS, proportion_radii
from .price import Reference, on_same_rows
from .row_sums import RowSums, rounded
from .scoring import Evaluation, Result, format_table, metric_value, name_of, noisy
from .sums import BlockSums, Fingerprint, radius


@dataclass
class LayerProfile(Result):
    """Loss and metric at each of L layers, on held-out data; layer l at index l-1, as in `layer_profile.json`.

    Attributes:
        metric (`str`): name of the metric.
        losses (float64 `[L]`): f_l, averaged over items (labelled rows, tokens or numbers).
        values (float64 `[L]`): the metric read out at each layer.
        gamma (`float`): noise level of the input.
        problem (`dict`, *optional*): the arguments of the [`DescentProblem`].
        blocks (float64 `[B, L, 4]`, *optional*): (metric sum, metric count, loss sum, items) over each of up to 32
            blocks of the data, the source of the intervals of the metric, unless it is a share of the rows.
        scale (`float`): factor of the rmse.
        data (`str`, *optional*): fingerprint of the data (main input and labels, in batches).
        chance (`float`, *optional*): the least loss of a constant prediction of these labels, where it is known.
        facts (`dict`): what a verdict on `problem` says of the training, see [`certify`].
        row_sums (float64 `[rows, L + 1]`, *optional*): of each row of the data the sums of its losses and its items,
            the source of the intervals of the loss and of the verdict; profiles of version 0.2 have blocks alone.
        whole_batches (`int`): how many of these rows are whole batches, whose loss cannot be told by row.
        references (`list`): f_L at earlier times of the run, see [`certify`].
        batch_size (`int`, *optional*): of the batches that `data` tells of.
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
    facts: dict[str, Any] = field(default_factory=dict)
    row_sums: np.ndarray | None = None
    whole_batches: int = 0
    references: list[Reference | Mapping[str, Any]] = field(default_factory=list)
    batch_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.facts is None:  # in files of former versions
            self.facts = {}

    @property
    def ending(self) -> str:
        """The end of its file's name: "" without noise (`layer_profile`), else as in `layer_profile_gamma_0.5`."""
        return f"_gamma_{self.gamma:g}" if self.gamma else ""

    def certificate(self, confidence: float = 0.95, **facts: Any) -> Certificate:
        """The verdict: what each row of the problem asked, and whether it is met; `facts` as for [`certify`], in place
        of the profile's. ValueError without a problem."""
        if self.problem is None:
            raise ValueError(
                "The profile has no constraints to judge: it was measured without `problem`, or the loss at chance is "
                "not known. Give `problem`."
            )

        known = {"references": self.references, "whole_batches": self.whole_batches}
        known.update(self.facts)
        known.update(facts)
        rows, least_rows = self._rows()
        return certify(
            DescentProblem(**self.problem),
            rows,
            confidence,
            self.gamma,
            chance=self.chance,
            least_rows=least_rows,
            items=round(self.blocks[:, -1, 3].sum()),
            **known,
        )

    def keep_plain(self, loss: float) -> None:
        """Have verdicts on this profile tell the price beside plain training, whose f_L on the same data is `loss`."""
        self.facts["plain"] = loss

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
        if self.problem is not None:
            return self.certificate().descent_share
        depth = len(self.losses)
        if not self.chance or depth < 2:
            return None
        line = DescentProblem("line", self.chance, depth, chance_loss=self.chance)
        return replace(self, problem=line.state_dict()).certificate().descent_share

    @property
    def _counts_rows(self) -> bool:
        """Whether the metric is the share of rows that are right, so that its interval needs no blocks."""
        if self.metric != "accuracy" or self.row_sums is None or self.blocks is None:
            return False
        return self.blocks[:, -1, 1].sum() == len(self.row_sums) and self.whole_batches == 0

    def radius(self, name: str, confidence: float = 0.95) -> np.ndarray:
        """Half-width `[L]` of the confidence intervals of `"losses"` or `"values"`, over the choice of the data and
        the noise; not a number where there is too little data."""
        if name == "values" and self._counts_rows:
            return proportion_radii(self.values, len(self.row_sums), confidence)
        if name == "values":
            statistic = partial(metric_value, self.metric, self.scale)
            return np.broadcast_to(radius(statistic, self.blocks, confidence), self.losses.shape)
        if self.blocks is None:
            return np.full(self.losses.shape, np.nan)
        rows, least_rows = self._rows()
        return half_widths(rows, confidence, least_rows)

    def to_dict(self) -> dict[str, float]:
        """Flat Python floats for logging; layers are numbered from 1, `feasible` is 0 or 1."""
        numbers = {
            "largest_rise": largest_rise(torch.from_numpy(self.losses)),
            "descent_share": self.descent_share,
        }
        for layer, (loss, value) in enumerate(zip(self.losses, self.values), start=1):
            numbers[f"layer_loss_{layer}"] = loss
            numbers[f"layer_{self.metric}_{layer}"] = value
        if self.problem is not None:
            verdict = self.certificate()
            numbers["max_violation"] = verdict.max_violation
            numbers["feasible"] = verdict.feasible
        return {name: float(number) for name, number in numbers.items() if number is not None}

    def __str__(self) -> str:
        table = [["layer", "loss", "+- (95 %)", self.metric, "+- (95 %)"]]
        columns = zip(self.losses, self.radius("losses"), self.values, self.radius("values"))
        for layer, (loss, loss_error, value, error) in enumerate(columns, start=1):
            numbers = [f"{loss:.5g}", f"{loss_error:.2g}", f"{value:.5g}", f"{error:.2g}"]
            table.append([f"{layer}", *numbers])
        text = format_table(table)
        share = self.descent_share
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
        readings (mapping): earlier losses of the last layer on the same batches without noise, by their time. Each
            maps the number of a batch to `[rows, 2]`: for each row the sum of its losses, and its items.
        settings: `metric`, `batch_size`, `data_collator` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError for no shared readout, an empty or unlabelled data set, a bad noise level, labels that do not suit the
    metric, or a `problem` of another number of layers.
    """
    gammas = levels_of("gammas", gammas)
    if isinstance(problem, Mapping):
        problem = DescentProblem(**problem)

    noise = None
    if any(gammas):
        noise = EmbeddingNoise(model, (min(gammas), max(gammas)), seed, sigma)

    evaluation = Evaluation(model, dataset, **settings)
    sums = BlockSums(evaluation.accelerator)
    fingerprint = Fingerprint(evaluation.accelerator)
    rows = [RowSums() for _ in gammas]
    layers = None
    labels = None
    with evaluating(model):
        for index, inputs in evaluation.batches("Layer profile"):
            if layers is None:
                layers = _layers_of(evaluation, inputs, problem)
            if layers.chance_loss is not None:
                labels = layers.chance_loss.of_batch(evaluation.task, inputs).plus(labels)

            scores = []
            for level, gamma in enumerate(gammas):
                with noisy(noise, gamma, 0, index):
                    measured = layers.evaluation_losses(
                        model, inputs, evaluation.score, keep_logits=False
                    )
                scores.append(torch.stack(measured.scores))  # [layers, 4]
                rows[level] = rows[level].plus(measured.rows, measured.is_split)
            sums.add(index, torch.stack(scores).numpy())
            fingerprint.add(index, evaluation.fingerprint(inputs))

    blocks = sums.total()  # [blocks, levels, layers, 4]
    data = fingerprint.text()
    is_shared = evaluation.accelerator is not None
    metric = name_of(evaluation.metric)
    scale = float(evaluation.scale)
    profiles = []
    for level, gamma in enumerate(gammas):
        if labels is not None:
            variance = 0.0 if noise is None else (gamma * noise.sigma) ** 2
            labels = replace(labels, noise_variance=variance)
        gathered = rows[level].gathered(is_shared, list(readings.values()))
        row_sums = gathered.sums
        profiles.append(
            LayerProfile(
                metric,
                losses=row_sums[:, :-1].sum(axis=0) / row_sums[:, -1].sum(),
                values=metric_value(metric, scale, blocks[:, level].sum(axis=0)),
                gamma=gamma,
                problem=None if problem is None else problem.state_dict(),
                blocks=blocks[:, level],
                scale=scale,
                data=data,
                chance=chance_of(labels, is_shared),
                row_sums=rounded(row_sums),
                whole_batches=gathered.whole_batches,
                references=[] if gamma else on_same_rows(readings, gathered.earlier),
                batch_size=getattr(dataset, "batch_size", evaluation.batch_size),
            )
        )

    return profiles


def _layers_of(
    evaluation: Evaluation, inputs: Mapping[str, Any], problem: DescentProblem | None
) -> LayerLosses:
    """The layers of a model, found on its first batch; ValueError where `problem` is of another number of them."""
    layers = find_layer_losses(
        evaluation.model,
        inputs,
        evaluation.task,
        readout=evaluation.readout,
        needs_logits=evaluation.needs_logits,
    )
    if problem is not None and problem.num_layers != layers.num_layers:
        raise ValueError(
            f"`problem` is of {problem.num_layers} layers, but the model has {layers.num_layers}: give the model's."
        )

    return layers


def fingerprint_of(model: nn.Module, dataset: Dataset | DataLoader, **settings) -> str:
    """The `data` of a [`LayerProfile`] of the same arguments; it reads the data without the model."""
    settings["progress"] = False
    evaluation = Evaluation(model, dataset, **settings)
    fingerprint = Fingerprint(evaluation.accelerator)
    with evaluating(model):
        for index, inputs in evaluation.batches():
            fingerprint.add(index, evaluation.fingerprint(inputs))
    return fingerprint.text()
