"""Tests whether one way of training is better than another, from groups of runs that differ only in the seed.

Every seed is evaluated on every row of the held-out data, as every reader judges every case in a reader study. So the
test is the one of reader studies. The variance of the difference has a part of the seeds, and a part of the rows
beyond the interaction of both. A difference must be significant by their sum, and by each part alone, since few seeds
may agree by chance. Runs with the same seeds on both sides are paired by seed. Otherwise the seed variances of both
sides are added (Welch). All runs must have been evaluated on the same batches with the same noise.

Source: Dorfman, Berbaum, Metz (1992), Investigative Radiology 27: 723-731; Hillis (2007), Statistics in Medicine 26:
596-619, for the degrees of freedom.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..configs import upper_level
from ..constraints.objectives import Objective, objective_class
from ..extras import extra_needed
from ..runs import RunFolder
from .certificates import Certificate
from .intervals import check_confidence
from .noise_curves import NoiseCurve
from .profiles import LayerProfile
from .scoring import format_table


PRIMARY = "auc_over_range"
# Columns of the table: summary of the curve -> heading.
SUMMARIES = {
    "clean": "no noise",
    PRIMARY: "average",
    "auc_id": "as in training",
    "auc_ood": "more noise",
}
# Settings of a curve that fix its rows and noise.
COMMON = ("seed", "perturbation", "batch_size", "samples", "data")


@dataclass
class Run:
    """One trained model's results."""

    folder: str  # the results were read here
    curve: NoiseCurve | None
    profiles: dict[float, LayerProfile] = field(default_factory=dict)  # by noise level
    summary: dict[str, Any] = field(default_factory=dict)  # `descent_config.json`, if there is one

    @classmethod
    def load(cls, folder: str, needs_curve: bool = True) -> "Run":
        """Read the folder of a run; ValueError if it `needs_curve` and has none of its last training."""
        run = RunFolder(folder)
        curves = run.results(NoiseCurve, "noise_curve")
        if needs_curve and not run.path.is_dir():
            raise ValueError(f"There is no folder {folder!r}.")
        if needs_curve and not curves:
            raise ValueError(
                f"{folder} holds no noise_curve.json of its last training; run `hf-descent evaluate {folder}`. Plain "
                "training and another run need none where both were measured on the same examples: save a run by "
                "`trainer.save_model()` after `train_with_plain()`."
            )
        profiles = {
            profile.gamma: profile for profile in run.results(LayerProfile, "layer_profile*")
        }
        return cls(folder, next(iter(curves), None), profiles, run.summary)

    @property
    def seed(self) -> int | None:
        """The seed of the training, if it is recorded."""
        return self.summary.get("arguments", {}).get("seed")

    @property
    def objective(self) -> type[Objective] | None:
        """The class of the training's objective; `None` if it is not recorded."""
        name = self.summary.get("objective")
        if name is None:
            return None
        return objective_class(name)

    @property
    def was_trained_plainly(self) -> bool:
        return self.objective is not None and self.objective.is_plain

    @property
    def was_constrained(self) -> bool:
        """Whether the training had constraints, as far as is known."""
        return self.objective is None or self.objective.is_constrained

    @property
    def feasible(self) -> bool | None:
        """Whether the constraints hold on held-out examples at the training level (a baseline was not trained to meet
        them). `None` as for [`certificate`]."""
        verdict = self.certificate
        return None if verdict is None else verdict.feasible

    @property
    def certificate(self) -> Certificate | None:
        """The verdict at the noise level of training. `None` without constraints, or without a profile at that
        level."""
        profile = self.profiles.get(self.gamma_train or 0.0)
        if profile is None or profile.problem is None:
            return None
        return profile.certificate()

    @property
    def gamma_train(self) -> float | None:
        """The (largest) level of the training noise."""
        of_curve = None if self.curve is None else self.curve.gamma_train
        return upper_level(self.summary.get("noise_gamma", of_curve))


def shared_levels(groups: Mapping[str, Sequence[Run]]) -> list[float]:
    """The noise levels, in increasing order, at which all runs of all groups have a profile of their layers."""
    levels = [set(run.profiles) for runs in groups.values() for run in runs]
    return sorted(set.intersection(*levels))


@dataclass
class Difference:
    """How much better one group of runs is than another, by the metric averaged over the noise levels.

    With a single run on either side `radius` is infinite and `p_value` is NaN.
    """

    baseline: str
    group: str
    metric: str
    estimate: float  # group minus baseline
    radius: float  # half-width of the interval at `confidence`
    data_radius: float  # half-width over the choice of the data alone, for these very models
    p_value: float  # two-sided
    freedom: float  # degrees of freedom
    paired: bool  # whether runs were paired by seed
    confidence: float  # level of interval and verdict, after correction for the comparisons made
    greater_is_better: bool

    @property
    def verdict(self) -> str:
        """ "better", "worse", "not significant", or "open" for single runs and metrics that are not finite."""
        if not np.isfinite(self.radius):
            return "open"
        if abs(self.estimate) <= self.radius:
            return "not significant"
        if (self.estimate > 0) == self.greater_is_better:
            return "better"
        return "worse"

    def __str__(self) -> str:
        names = f"{self.group} against {self.baseline}"
        if not np.isfinite(self.estimate):
            return f"{names}: not comparable. A run has a {self.metric} that is not finite."

        level = f"{100 * self.confidence:.4g} %"
        figure = f"{self.metric} averaged over the noise levels, {self.estimate:+.4g} +- "
        if self.verdict == "open":
            figure += f"{self.data_radius:.2g}, over the choice of the data alone. Train at least two seeds of each"
            return f"{names}: not tested at {level} ({figure})."

        how = "seeds not paired"
        if self.paired:
            how = "paired by seed"
        figure += f"{self.radius:.2g}, p = {self.p_value:.2g}, {how}"
        verdict = f"{self.group} is {self.verdict}, statistically significant"
        if self.verdict == "not significant":
            verdict = "no statistically significant difference"

        return f"{names}: {verdict} at {level} ({figure})."


def check_comparable(runs: Sequence[Run]) -> None:
    """ValueError unless all curves were measured on the same batches, levels and noise draws."""
    first = runs[0]
    known = _conditions(first.curve)
    for run in runs:
        conditions = _conditions(run.curve)
        different = [name for name in known if conditions[name] != known[name]]
        if different:
            raise ValueError(
                f"{run.folder} and {first.folder} were not evaluated on the same data, levels and noise ({different} "
                "differ; another tokenizer makes other data of texts): run `hf-descent evaluate` on both alike."
            )

    if first.curve.parts is None or len(first.curve.parts) < 2:
        raise ValueError(
            f"{first.folder} was evaluated on too few examples to compare, or by an earlier version; run `hf-descent "
            "evaluate` on all runs again, with more examples."
        )


def _conditions(curve: NoiseCurve) -> dict[str, Any]:
    """The settings that curves must have in common to be compared."""
    conditions = {name: curve.settings.get(name) for name in COMMON}
    conditions["metric"] = curve.metric
    conditions["scale"] = curve.scale
    conditions["levels"] = curve.gammas.tolist()
    conditions["rows"] = None if curve.parts is None else len(curve.parts)
    return conditions


def difference(
    groups: Mapping[str, Sequence[Run]], baseline: str, group: str, confidence: float = 0.95
) -> Difference:
    """How much better the runs of `group` are than those of `baseline`, averaged over the noise levels."""
    before = sorted(groups[baseline], key=lambda run: str(run.seed))
    after = sorted(groups[group], key=lambda run: str(run.seed))
    estimate = float(_mean_average(after) - _mean_average(before))
    is_paired = _have_same_seeds(before, after)
    of_data, *with_seeds = _tests(_parts(before), _parts(after), is_paired)
    data_radius = of_data.radius(confidence)

    # Few seeds may agree by chance, and hide the part of the data, so the widest interval counts.
    radius = np.inf
    freedom = 0.0
    p_value = np.nan
    if with_seeds:
        tests = [of_data, *with_seeds]
        radius, freedom = max((test.radius(confidence), test.freedom) for test in tests)
        p_value = max(test.p_value(estimate) for test in tests)

    curve = before[0].curve
    return Difference(
        baseline,
        group,
        curve.metric,
        estimate,
        radius,
        data_radius,
        p_value,
        freedom,
        is_paired,
        confidence,
        curve.greater_is_better,
    )


def _have_same_seeds(before: Sequence[Run], after: Sequence[Run]) -> bool:
    """Whether two groups of runs, sorted by their seeds, can be paired by them."""
    seeds = [run.seed for run in before]
    is_known_and_unique = None not in seeds and len(set(seeds)) == len(seeds)
    return is_known_and_unique and seeds == [run.seed for run in after]


def _mean_average(runs: Sequence[Run]) -> float:
    return np.mean([getattr(run.curve, PRIMARY) for run in runs])


def _parts(runs: Sequence[Run]) -> np.ndarray:
    """The part of each row of the data in each run's average, `[seeds, rows]`."""
    return np.stack([run.curve.parts_of(PRIMARY) for run in runs])


class _Test(NamedTuple):
    """A two-sided t test of a difference."""

    variance: float
    freedom: float  # degrees of freedom

    def radius(self, confidence: float) -> float:
        """Half-width of the interval."""
        quantile = _student_t().ppf((1 + confidence) / 2, self.freedom)
        return float(quantile * np.sqrt(self.variance))

    def p_value(self, estimate: float) -> float:
        if not self.variance:  # every difference counts
            return float(estimate == 0.0)
        return float(2 * _student_t().sf(abs(estimate) / np.sqrt(self.variance), self.freedom))


def _student_t():
    with extra_needed("The comparison of runs"):
        from scipy import stats
    return stats.t


def _tests(before: np.ndarray, after: np.ndarray, is_paired: bool) -> list[_Test]:
    """Tests of the difference of two groups, from the parts of rows `[seeds, rows]`: over the data, and with several
    seeds also over the seeds, and over both."""
    count = before.shape[1]
    of_rows = after.mean(axis=0) - before.mean(axis=0)
    of_data = float(of_rows.var(ddof=1) / count)
    tests = [_Test(of_data, count - 1)]
    tables = [before, after]
    if is_paired:
        tables = [after - before]
    if min(map(len, tables)) < 2:
        return tests

    # Of every table: the variance of its mean over seeds, and the interaction's part in its mean over blocks.
    of_seeds = np.array([table.mean(axis=1).var(ddof=1) / len(table) for table in tables])
    interaction = sum(_interaction(table) / table.size for table in tables)
    total = float(of_seeds.sum())
    both = total + max(0.0, of_data - interaction)
    if not total:
        return [*tests, _Test(0.0, 1.0), _Test(both, 1.0)]

    freedoms = np.array([len(table) - 1 for table in tables])
    freedom = float(total**2 / (of_seeds**2 / freedoms).sum())
    return [*tests, _Test(total, freedom), _Test(both, freedom * (both / total) ** 2)]


def _interaction(table: np.ndarray) -> float:
    """Mean square of the interaction of rows and columns of a table without replication."""
    rest = (
        table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    )
    return float((rest**2).sum() / ((table.shape[0] - 1) * (table.shape[1] - 1)))


@dataclass
class Comparison:
    """Groups of runs, by their training, and how every other group differs from the first, the baseline."""

    groups: dict[str, list[Run]]
    differences: list[Difference]

    @property
    def gamma_train(self) -> float | None:
        """The largest noise level of training, the same for all groups; `None` if no run has one."""
        levels = [run.curve.gamma_train for runs in self.groups.values() for run in runs]
        return max((level for level in levels if level is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: each group's folders, seeds and summaries (mean, deviation over seeds), and the verdicts."""
        groups = {name: self._summary(runs) for name, runs in self.groups.items()}
        differences = [
            {**vars(difference), "verdict": difference.verdict, "text": str(difference)}
            for difference in self.differences
        ]
        return {"groups": groups, "differences": differences}

    def __str__(self) -> str:
        columns = dict(SUMMARIES)
        if len(self._noise_units) > 1:
            columns["sigma"] = "level 1"
        table = [["", "runs", *columns.values(), "constraints met"]]
        for name, runs in self.groups.items():
            summary = self._summary(runs)
            numbers = [_format(*summary[column]) for column in columns]
            feasible = ""
            if summary["feasible"] is not None:
                count, judged = summary["feasible"]
                feasible = f"{count} of {judged}"
            table.append([name, f"{len(runs)}", *numbers, feasible])

        title = f"{self.differences[0].metric}, mean +- standard deviation over seeds."
        if self.gamma_train is not None:
            title += (
                f" As in training: noise levels up to {self.gamma_train:g}; more noise: beyond."
            )

        title += " A level of 1 is the standard deviation of the clean input."
        lines = [title, format_table(table), "", *map(str, self.differences)]
        count = len(self.differences)
        if count > 1:
            level = self.differences[0].confidence
            lines.append(
                f"The level is {100 * level:.4g} % for each of the {count}, so that it is "
                f"{100 * (1 - count * (1 - level)):.4g} % for all together."
            )
        return "\n".join(lines)

    @property
    def _noise_units(self) -> set[float | None]:
        """The deviation of noise of level 1 in each run. On embeddings of texts it differs between models."""
        return {run.curve.settings.get("sigma") for runs in self.groups.values() for run in runs}

    def _summary(self, runs: Sequence[Run]) -> dict[str, Any]:
        """(mean, deviation) of each summary of a group, and its (feasible, judged) runs."""
        curves = [replace(run.curve, gamma_train=self.gamma_train) for run in runs]
        summary = {"runs": [run.folder for run in runs], "seeds": [run.seed for run in runs]}
        for name in SUMMARIES:
            summary[name] = _mean_and_deviation([getattr(curve, name) for curve in curves])

        summary["sigma"] = _mean_and_deviation([curve.settings.get("sigma") for curve in curves])

        verdicts = [run.certificate for run in runs if run.certificate is not None]
        summary["feasible"] = None
        if verdicts:
            summary["feasible"] = (sum(verdict.feasible for verdict in verdicts), len(verdicts))

        return summary


def _mean_and_deviation(values: Sequence[float | None]) -> tuple[float, float]:
    """Mean and deviation over seeds; NaN if a value is `None`, and for the deviation of a single value."""
    column = np.array(values, dtype=float)
    deviation = column.std(ddof=1) if len(column) > 1 else np.nan
    return column.mean(), deviation


def compare(
    runs: Sequence[str] | Mapping[str, Sequence[str]],
    baseline: str | None = None,
    confidence: float = 0.95,
) -> Comparison:
    """Read runs, and test every group of them against a baseline.

    Args:
        runs (sequence of `str`, or mapping): folders of evaluated runs, grouped by their names without the seed at the
            end (`descent-1`, `descent-2`); or the groups themselves, name -> folders.
        baseline (`str`, *optional*): name of the group to compare with. Default: the first.
        confidence (`float`): level at which all verdicts hold together (Bonferroni over the groups).

    ValueError for a folder that was not evaluated, two runs of a group with the same seed, fewer than two groups, runs
    that were not evaluated alike, or a bad confidence.
    """
    check_confidence(confidence)
    folders = runs if isinstance(runs, Mapping) else _grouped(runs)
    groups = {name: [Run.load(folder) for folder in group] for name, group in folders.items()}
    check_comparable([run for group in groups.values() for run in group])
    for name, group in groups.items():
        _check_seeds(name, group)

    if baseline is None:
        baseline = next(iter(groups))
    if baseline not in groups or len(groups) < 2:
        raise ValueError(
            f"The groups are {list(groups)} and `baseline` is {baseline!r}; give runs of at least two ways of "
            "training (GROUP=RUN where the names of the folders do not tell them), and a baseline among them."
        )

    others = [name for name in groups if name != baseline]
    level = 1 - (1 - confidence) / len(others)
    differences = [difference(groups, baseline, name, level) for name in others]
    return Comparison({name: groups[name] for name in (baseline, *others)}, differences)


def _grouped(folders: Sequence[str]) -> dict[str, list[str]]:
    """Folders of runs by their groups."""
    groups = {}
    for folder in folders:
        groups.setdefault(group_of(folder), []).append(folder)
    return groups


def _check_seeds(group: str, runs: Sequence[Run]) -> None:
    seeds = [run.seed for run in runs if run.seed is not None]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"The runs of {group!r} have the seeds {seeds}: the same run, or one of another training, would count "
            "as another seed. Give each once, and say which belong together by GROUP=RUN."
        )


def group_of(folder: str) -> str:
    """The name of a run's group: the name of its folder, without the seed at the end."""
    name = os.path.basename(os.path.normpath(folder))
    return re.sub(r"[-_=](seed[-_=]?)?\d+$", "", name).strip("_")


def _format(mean: float, deviation: float) -> str:
    if not np.isfinite(mean):
        return "-"
    if not np.isfinite(deviation):
        return f"{mean:.4g}"
    return f"{mean:.4g} +- {deviation:.2g}"
