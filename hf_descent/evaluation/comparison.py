"""Whether one way of training is better than another: groups of runs, paired tests, a verdict.

Seeds and blocks of held-out data are crossed, as readers and cases are in a reader study, and the test is that of
reader studies: the variance of the difference is the seeds' part, plus the blocks' part beyond the interaction of
both. A difference must be significant by that variance, by the seeds' part alone and by the data's part alone, since
few seeds may agree by chance. Runs with the same seeds on both sides are paired by seed; otherwise the seed variances
of both sides are added (Welch). All runs must have been evaluated on the same batches with the same noise.

Source: Dorfman, Berbaum, Metz (1992), Investigative Radiology 27: 723-731; Hillis (2007), Statistics in Medicine 26:
596-619, for the degrees of freedom.
"""

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..configs import upper_level
from ..extras import extra_needed
from ..runs import RunFolder
from .certificates import Certificate
from .noise_curves import NoiseCurve
from .profiles import LayerProfile
from .scoring import format_table
from .sums import check_confidence


PRIMARY = "auc_over_range"
# Columns of the table: summary of the curve -> heading.
SUMMARIES = {
    "clean": "no noise",
    PRIMARY: "average",
    "auc_id": "as in training",
    "auc_ood": "more noise",
}
COMMON = (
    "seed",
    "perturbation",
    "batch_size",
    "samples",
    "data",
)  # settings of a curve that fix rows and noise


@dataclass
class Run:
    """One trained model's results."""

    folder: str  # where they were read
    curve: NoiseCurve | None
    profiles: dict[float, LayerProfile] = field(default_factory=dict)  # by noise level
    summary: dict[str, Any] = field(
        default_factory=dict
    )  # `descent_config.json`; empty where there is none

    @classmethod
    def load(cls, folder: str, curve: str = "noise_curve", needs_curve: bool = True) -> "Run":
        """Reads a run's folder; ValueError where it `needs_curve` and holds none of that name of its last training."""
        run = RunFolder(folder)
        curves = run.results(NoiseCurve, curve)
        if needs_curve and not curves:
            fault = f"{folder} holds no {curve}.json of its last training; run `hf-descent evaluate {folder}`."
            raise ValueError(fault if run.path.is_dir() else f"There is no folder {folder!r}.")
        profiles = {
            profile.gamma: profile for profile in run.results(LayerProfile, "layer_profile*")
        }
        return cls(folder, next(iter(curves), None), profiles, run.summary)

    @property
    def seed(self) -> int | None:
        """The seed of the training, where it is recorded."""
        return self.summary.get("arguments", {}).get("seed")

    @property
    def feasible(self) -> bool | None:
        """Whether the constraints, which a baseline was not trained to meet, hold on held-out rows at the training
        level; `None` without constraints, without a profile at that level, or where version 0.1 measured it, whose
        "feasible" asked for less."""
        return self.certificate and self.certificate.feasible

    @property
    def certificate(self) -> Certificate | None:
        """What each row asked and reached there; `None` as for `feasible`."""
        profile = self.profiles.get(self.gamma_train or 0.0)
        if profile is None or profile.problem is None:
            return None
        if self.is_of_0_1 and profile.chance is None:
            return None
        return profile.certificate()

    @property
    def is_of_0_1(self) -> bool:
        """Whether version 0.1 trained it."""
        return str(self.summary.get("versions", {}).get("hf_descent", "")).startswith("0.1.")

    @property
    def gamma_train(self) -> float | None:
        """The (largest) level of the training noise, also where the curve is of another perturbation."""
        return upper_level(self.summary.get("noise_gamma", self.curve and self.curve.gamma_train))


def shared_levels(groups: Mapping[str, Sequence[Run]]) -> list[float]:
    """The noise levels, in increasing order, at which all runs of all groups have a profile of their layers."""
    return sorted(
        set.intersection(*(set(run.profiles) for runs in groups.values() for run in runs))
    )


@dataclass
class Difference:
    """How much better one group of runs is than another: the metric, averaged over the noise levels.

    For a single run on either side `radius` is infinite and `p_value` is not a number.
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
        return "better" if (self.estimate > 0) == self.greater_is_better else "worse"

    def __str__(self) -> str:
        names, level = f"{self.group} against {self.baseline}", f"{100 * self.confidence:.4g} %"
        if not np.isfinite(self.estimate):
            return f"{names}: open. A run has a {self.metric} that is not finite."
        words = {"open": "open", "not significant": "no statistically significant difference"}
        verdict = words.get(
            self.verdict, f"{self.group} is {self.verdict}, statistically significant"
        )
        radius, how = self.radius, "paired by seed" if self.paired else "seeds not paired"
        how = f"p = {self.p_value:.2g}, {how}"
        if self.verdict == "open":
            radius, how = (
                self.data_radius,
                "over the choice of the data alone. Train at least two seeds of each",
            )
        figure = f"{self.metric} averaged over the noise levels, {self.estimate:+.4g} +- {radius:.2g}, {how}"
        return f"{names}: {verdict} at {level} ({figure})."


def check_comparable(runs: Sequence[Run]):
    """ValueError unless all curves were measured on the same batches, levels and noise draws."""

    def conditions(curve):
        counts = None if curve.blocks is None else curve.blocks[..., 1].tolist()
        found = {
            "metric": curve.metric,
            "scale": curve.scale,
            "levels": curve.gammas.tolist(),
            "items": counts,
        }
        return found | {name: curve.settings.get(name) for name in COMMON}

    first, known = runs[0], conditions(runs[0].curve)
    for run in runs:
        if other := [name for name, value in conditions(run.curve).items() if value != known[name]]:
            raise ValueError(
                f"{run.folder} and {first.folder} were not evaluated on the same data, levels and noise ({other} "
                "differ; another tokenizer makes other data of texts): run `hf-descent evaluate` on both alike."
            )
    if first.curve.blocks is None or len(first.curve.blocks) < 2:
        raise ValueError(
            "All data went into one batch; evaluate with a smaller `--per_device_eval_batch_size`."
        )


def difference(
    groups: Mapping[str, Sequence[Run]], baseline: str, group: str, confidence: float = 0.95
) -> Difference:
    """How much better the runs of `group` are than those of `baseline`, averaged over the noise levels."""
    sides = [sorted(groups[name], key=lambda run: str(run.seed)) for name in (baseline, group)]
    seeds = [[run.seed for run in side] for side in sides]
    paired = seeds[0] == seeds[1] and None not in seeds[0] and len(set(seeds[0])) == len(seeds[0])
    before, after = (
        np.stack([run.curve.pseudo_values(PRIMARY) for run in side]) for side in sides
    )  # [seeds, blocks]
    # Each side's own mean is what is reported; pseudo-values differ from it by the jackknife's correction of bias.
    means = [np.mean([getattr(run.curve, PRIMARY) for run in side]) for side in sides]
    estimate = float(means[1] - means[0])
    tables = [after - before] if paired else [before, after]

    with extra_needed("The comparison of runs"):
        from scipy import stats

    blocks = before.shape[1]
    of_data = (after.mean(axis=0) - before.mean(axis=0)).var(ddof=1) / blocks
    quantile = 1 - (1 - confidence) / 2
    data_radius = float(stats.t.ppf(quantile, blocks - 1) * np.sqrt(of_data))
    radius, p_value, freedom = np.inf, np.nan, 0.0
    if min(map(len, tables)) > 1:
        # Of every table: the variance of its mean over seeds, and the interaction's part in its mean over blocks.
        of_seeds = np.array([table.mean(axis=1).var(ddof=1) / len(table) for table in tables])
        interaction = sum(_interaction(table) / table.size for table in tables)
        total = of_seeds.sum()
        freedoms = np.array([len(table) - 1 for table in tables])
        freedom = total**2 / (of_seeds**2 / freedoms).sum() if total else 1.0
        both = total + max(0.0, of_data - interaction)
        # Few seeds may agree by chance, and hide the data's part: by the seeds, by both, and by the data alone.
        tests = [
            (total, freedom),
            (both, freedom * (both / total) ** 2 if total else freedom),
            (of_data, blocks - 1),
        ]
        radius, freedom = max(
            (stats.t.ppf(quantile, freedom) * np.sqrt(part), freedom) for part, freedom in tests
        )
        p_value = max(
            float(
                2 * stats.t.sf(abs(estimate) / np.sqrt(part), freedom) if part else estimate == 0.0
            )
            for part, freedom in tests
        )
    curve = sides[0][0].curve
    found = estimate, float(radius), data_radius, p_value, float(freedom), paired, confidence
    return Difference(baseline, group, curve.metric, *found, curve.greater_is_better)


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
        """The largest noise level of training, the same for all groups; `None` where no run has one."""
        levels = [run.curve.gamma_train for runs in self.groups.values() for run in runs]
        return max((level for level in levels if level is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: each group's folders, seeds and summaries (mean, deviation over seeds), and the verdicts."""
        groups = {name: self._summary(runs) for name, runs in self.groups.items()}
        verdicts = [
            {**vars(found), "verdict": found.verdict, "text": str(found)}
            for found in self.differences
        ]
        return {"groups": groups, "differences": verdicts}

    def __str__(self) -> str:
        rows, missed = [["", "runs", *SUMMARIES.values(), "noise unit", "feasible"]], []
        for name, runs in self.groups.items():
            found = self._summary(runs)
            counts = ", ".join(f"{row} ({count})" for row, count in found["missed"].items())
            missed += [f"Rows that runs of {name} miss: {counts}"] if counts else []
            unjudged = "of 0.1: not judged" if any(run.is_of_0_1 for run in runs) else ""
            feasible = (
                unjudged if found["feasible"] is None else "{} of {}".format(*found["feasible"])
            )
            rows.append(
                [
                    name,
                    str(len(runs)),
                    *(_format(*found[each]) for each in (*SUMMARIES, "sigma")),
                    feasible,
                ]
            )
        title = f"{self.differences[0].metric}, mean +- standard deviation over seeds."
        if self.gamma_train is not None:
            title += (
                f" As in training: noise levels up to {self.gamma_train:g}; more noise: beyond."
            )
        title += " A level of 1 is the noise unit, the standard deviation of the clean input."
        return "\n".join([title, format_table(rows), *missed, "", *map(str, self.differences)])

    def _summary(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Of a group (mean, deviation) of each summary, (feasible, judged) runs, and by row how many runs miss it."""
        curves = [replace(run.curve, gamma_train=self.gamma_train) for run in runs]
        found = {"runs": [run.folder for run in runs], "seeds": [run.seed for run in runs]}
        columns = {name: [getattr(curve, name) for curve in curves] for name in SUMMARIES}
        columns["sigma"] = [curve.settings.get("sigma") for curve in curves]
        for name, column in columns.items():
            values = np.array(column, dtype=float)  # of None: not a number
            found[name] = values.mean(), values.std(ddof=1) if len(values) > 1 else np.nan
        certificates = [each for each in (run.certificate for run in runs) if each is not None]
        feasible = [each.feasible for each in certificates]
        missed = Counter(
            row
            for each in certificates
            for row, said in zip(each.rows, each.verdicts)
            if said != "met"
        )
        return found | {
            "feasible": (sum(feasible), len(feasible)) if feasible else None,
            "missed": dict(missed),
        }


def compare(
    runs: Sequence[str] | Mapping[str, Sequence[str]],
    baseline: str | None = None,
    confidence: float = 0.95,
    curve: str = "noise_curve",
) -> Comparison:
    """Reads runs and tests every group of them against a baseline.

    Args:
        runs (sequence of `str`, or mapping): folders of evaluated runs, grouped by their names without the number at
            the end, the seed (`descent-1`, `descent-2`); or the groups themselves, name -> folders.
        baseline (`str`, *optional*): name of the group to compare with; the first where not given.
        confidence (`float`): level at which all verdicts hold together (Bonferroni over the groups).
        curve (`str`): which curve: "noise_curve", or that of a perturbation ("typos_curve").

    ValueError for a folder that was not evaluated, two runs of a group with the same seed, fewer than two groups, runs
    that were not evaluated alike, or a bad confidence.
    """
    check_confidence(confidence)
    if not isinstance(runs, Mapping):
        folders, runs = runs, {}
        for folder in folders:
            runs.setdefault(group_of(folder), []).append(folder)
    groups = {
        name: [Run.load(folder, curve) for folder in folders] for name, folders in runs.items()
    }
    check_comparable([run for group in groups.values() for run in group])
    for name, group in groups.items():
        seeds = [run.seed for run in group if run.seed is not None]
        if len(set(seeds)) < len(seeds):
            raise ValueError(
                f"The runs of {name!r} have the seeds {seeds}: the same run, or one of another training, would count "
                "as another seed. Give each once, and say which belong together by GROUP=RUN."
            )
    baseline = next(iter(groups)) if baseline is None else baseline
    if baseline not in groups or len(groups) < 2:
        raise ValueError(
            f"The groups are {list(groups)} and `baseline` is {baseline!r}; give runs of at least two ways of "
            "training (GROUP=RUN where the names of the folders do not tell them), and a baseline among them."
        )
    groups = {baseline: groups[baseline]} | groups
    level = 1 - (1 - confidence) / (len(groups) - 1)
    return Comparison(
        groups, [difference(groups, baseline, name, level) for name in groups if name != baseline]
    )


def group_of(folder: str) -> str:
    """The name of a run's group: that of its folder, without the seed at the end."""
    name = os.path.basename(os.path.normpath(folder))
    return re.sub(r"[-_=](seed[-_=]?)?\d+$", "", name).strip("_")


def _format(mean: float, deviation: float) -> str:
    if not np.isfinite(mean):
        return "-"
    return f"{mean:.4g}" + (f" +- {deviation:.2g}" if np.isfinite(deviation) else "")
