"""The layer profile: loss and metric of the shared readout at every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from .certificates import Certificate, certify, plain_reference
from .fingerprints import Fingerprint
from .intervals import confidence_limits, half_widths, loss_radii, proportion_radii
from .price import Reference, on_same_rows
from .row_sums import MetricRows, RowSums, no_labels, of_all_processes, rounded
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


SHARE_IN_WORDS = (
    "1: every layer is on track from guessing to the last loss; 0: some layer only guesses"
)


@dataclass
class LayerProfile(Result):
    """Loss and metric on held-out data if the model stopped after each of its L layers; layer l is at index l-1.

    `print(profile)` shows the table, and `profile.certificate()` is the verdict on the constraints.

    Attributes:
        metric (`str`): name of the metric.
        losses (float64 `[L]`): f_l, averaged over items (labelled examples, tokens or numbers).
        values (float64 `[L]`): the metric of each layer.
        gamma (`float`): noise level of the input.
        problem (`dict`, *optional*): the arguments of the [`DescentProblem`].
        value_radii (float64 `[L]`, *optional*): half-widths of the 95 % intervals of `values`; NaN with too few
            examples.
        kept_low (float64 `[L]`, *optional*): lower ends of the 95 % intervals of what each layer keeps of the last
            layer's metric, as a share.
        items (`int`, *optional*): the number of items that the losses are averaged over.
        scale (`float`): factor by which the rmse was multiplied.
        data (`str`, *optional*): fingerprint of the data (main input and labels, in batches).
        chance (`float`, *optional*): the least loss of a constant prediction of these labels, if it is known.
        facts (`dict`): what a verdict on `problem` says about the training, see [`certify`].
        row_sums (float64 `[examples, L + 1]`, *optional*): for each example, the sum of its losses at each layer, and
            its items. The intervals of the losses and the verdict come from them.
        whole_batches (`int`): how many of these are whole batches, because the losses of single examples are not
            known.
        references (`list`): f_L at earlier times of the run, see [`certify`].
        batch_size (`int`, *optional*): the batch size with which `data` was computed.
    """

    metric: str
    losses: np.ndarray
    values: np.ndarray
    gamma: float = 0.0
    problem: dict[str, Any] | None = None
    value_radii: np.ndarray | None = None
    kept_low: np.ndarray | None = None
    items: int | None = None
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
        if self.row_sums is None:  # versions 0.1 and 0.2 kept no rows to judge by
            self.problem = None
        if self.value_radii is None:
            self.value_radii = np.full(self.losses.shape, np.nan)

    @property
    def ending(self) -> str:
        """The end of the name of its file: "" without noise (`layer_profile`), else as in
        `layer_profile_gamma_0.5`."""
        return f"_gamma_{self.gamma:g}" if self.gamma else ""

    def certificate(self, confidence: float = 0.95, **facts: Any) -> Certificate:
        """The verdict: what each constraint asked, and whether it is met.

        `facts` are as in [`certify`], and replace those of the profile. ValueError if there is no problem, or if the
        profile `plain` is of other data.
        """
        if self.problem is None:
            raise ValueError(
                "The profile has no constraints to judge: it was measured without `problem` or by an earlier version, "
                "or the loss at chance is not known. Measure it again, with `problem`."
            )

        if isinstance(facts.get("plain"), LayerProfile):
            self.check_same_data(facts["plain"])
        known = {"references": self.references, "whole_batches": self.whole_batches}
        known.update(self.facts)
        known.update(facts)
        return certify(
            DescentProblem(**self.problem),
            self.row_sums,
            confidence,
            self.gamma,
            chance=self.chance,
            items=self.items,
            **known,
        )

    def check_same_data(self, other: "LayerProfile") -> None:
        """ValueError if another profile is of other examples, other batches or another noise level."""
        if (other.data, other.gamma) != (self.data, self.gamma):
            raise ValueError(
                "The two profiles are not of the same examples in the same batches, at one noise level: measure both "
                "alike."
            )

    def keep_plain(self, plain: "LayerProfile") -> None:
        """Let verdicts on this profile tell the price. `plain` is the profile of plain training on the same data."""
        self.facts["plain"] = vars(plain_reference(plain))

    @property
    def feasible(self) -> bool | None:
        """Whether every constraint is met with confidence; `None` without a problem."""
        return None if self.problem is None else self.certificate().feasible

    @property
    def descent_share(self) -> float | None:
        """See [`DescentProblem.descent_share`]; it needs no constraints. `None` if f_L is not shown to be below
        chance."""
        if self.problem is not None:
            return self.certificate().descent_share
        depth = len(self.losses)
        if not self.chance or depth < 2 or self.row_sums is None:
            return None
        line = DescentProblem("line", self.chance, depth, chance_loss=self.chance)
        return replace(self, problem=line.state_dict()).certificate().descent_share

    @property
    def loss_radii(self) -> np.ndarray:
        """Half-widths `[L]` of the 95 % intervals of `losses`, over the choice of the data and the noise; NaN with too
        few examples."""
        if self.row_sums is None:
            return np.full(self.losses.shape, np.nan)
        return loss_radii(self.row_sums)

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
        columns = zip(self.losses, self.loss_radii, self.values, self.value_radii)
        for layer, (loss, loss_error, value, error) in enumerate(columns, start=1):
            numbers = [f"{loss:.5g}", f"{loss_error:.2g}", f"{value:.5g}", f"{error:.2g}"]
            table.append([f"{layer}", *numbers])
        text = format_table(table)
        share = self.descent_share
        if share is not None:
            text += f"\ndescent share {share:.2f} ({SHARE_IN_WORDS})"
        return text


def layer_profile(
    model: nn.Module, dataset: Dataset | DataLoader, *, gamma: float = 0.0, **settings
) -> LayerProfile:
    """Measure loss and metric of `model` at every layer, through the readout that its layers share.

    The losses are the model's own, averaged over the items of the data set. `gamma` is the noise level of the input,
    with the noise of the first draw of `noise_curve`. For other arguments and errors see
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
    """Measure the [`layer_profile`] at each of several noise levels, in one pass over the data.

    Args:
        model, dataset: see [`~evaluation.scoring.Evaluation`].
        gammas (sequence of `float`): noise levels of the input, in the order of the result.
        problem ([`DescentProblem`] or its arguments, *optional*): constraints to check the losses against.
        seed, sigma: see [`EmbeddingNoise`].
        readings (mapping): time -> earlier losses of the last layer on the same batches without noise. These map the
            number of a batch to `[rows, 2]`: for each row the sum of its losses, and its items.
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
    fingerprint = Fingerprint(evaluation.accelerator)
    metric_rows = MetricRows(evaluation.accelerator)
    rows = [RowSums() for _ in gammas]
    items = 0
    layers = None
    labels = None
    with evaluating(model):
        for index, inputs in evaluation.batches("Layer profile"):
            if layers is None:
                layers = _layers_of(evaluation, inputs, problem)
            if layers.chance_loss is not None:
                labels = layers.chance_loss.of_batch(evaluation.task, inputs).plus(labels)

            by_level = []
            for level, gamma in enumerate(gammas):
                with noisy(noise, gamma, 0, index):
                    measured = layers.evaluation_losses(
                        model, inputs, evaluation.metric_sums, keep_logits=False
                    )
                by_level.append(np.stack(measured.scores, axis=1))  # [rows, layers, 2]
                rows[level] = rows[level].plus(measured.rows, measured.is_split)

            items += int(measured.items)
            metric_rows.add(index, np.stack(by_level, axis=1))  # [rows, levels, layers, 2]
            fingerprint.add(index, evaluation.fingerprint(inputs))

    metric_sums = metric_rows.gathered()  # [rows, levels, layers, 2]
    items = sum(of_all_processes([items], evaluation.accelerator))
    if not items:
        raise no_labels()

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
                values=metric_value(metric, scale, metric_sums[:, level].sum(axis=0)),
                gamma=gamma,
                problem=None if problem is None else problem.state_dict(),
                value_radii=_value_radii(metric, scale, metric_sums[:, level]),
                kept_low=_kept_low(
                    metric_of_rows(metric, scale, metric_sums[:, level]),
                    greater_is_better(evaluation.metric),
                ),
                items=items,
                scale=scale,
                data=data,
                chance=chance_of(labels, is_shared),
                row_sums=rounded(row_sums),
                whole_batches=gathered.whole_batches,
                references=[] if gamma else on_same_rows(readings, gathered.earlier, len(row_sums)),
                batch_size=getattr(dataset, "batch_size", evaluation.batch_size),
            )
        )

    return profiles


def _value_radii(metric: str, scale: float, rows: np.ndarray) -> np.ndarray:
    """Half-widths `[L]` of the 95 % intervals of the metric from (sum, count) of each row, `[n, L, 2]`."""
    parts = metric_of_rows(metric, scale, rows)
    is_share_of_rows = metric == "accuracy" and (rows[..., 1] == 1).all()
    if is_share_of_rows:
        return proportion_radii(parts.mean(axis=0), len(parts))
    return half_widths(parts)


def _kept_low(parts: np.ndarray, is_greater_better: bool) -> np.ndarray:
    """Lower ends `[L]` of the 95 % intervals of what each layer keeps of the last one's metric, as a share.

    `parts` `[n, L]` is what each row adds to the metric. If less of the metric is better, a layer with twice the
    metric keeps half. NaN if a metric is 0.
    """
    values = parts.mean(axis=0)
    last = parts[:, -1:]
    if not values.all():
        return np.full_like(values, np.nan)

    if is_greater_better:
        kept = values / values[-1]
        excess = (parts - kept * last) / values[-1]
        unseen = (parts.min() - kept * last.max()) / values[-1]
    else:
        kept = values[-1] / values
        excess = (last - kept * parts) / values
        unseen = (last.min() - kept * parts.max(axis=0)) / values
    # One more row, on which the layer is as bad as on any and the last layer as good as on any: layers that agree on
    # all rows may differ on others.
    lower, _ = confidence_limits(np.vstack([excess, unseen]))
    low = kept + lower
    low[-1] = 1  # the last layer keeps all of itself
    return low


def _layers_of(
    evaluation: Evaluation, inputs: Mapping[str, Any], problem: DescentProblem | None
) -> LayerLosses:
    """The layers of a model, found on its first batch; ValueError if `problem` is of another number of layers."""
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
    """The `data` of a [`LayerProfile`] with the same arguments. It is found without running the model."""
    settings["progress"] = False
    evaluation = Evaluation(model, dataset, **settings)
    fingerprint = Fingerprint(evaluation.accelerator)
    with evaluating(model):
        for index, inputs in evaluation.batches():
            fingerprint.add(index, evaluation.fingerprint(inputs))
    return fingerprint.text()
