"""Whether one way of training is better than another: runs grouped by their training, paired tests, a verdict.

A verdict is about the way of training, so the training seed is the unit that is repeated, and the held-out data is a
second one: seeds and blocks of data are crossed, as readers and cases are in a reader study, and the test is that of
reader studies. For each seed and block the (jackknife) share of the metric's difference is taken. Its mean over seeds
and blocks is the difference; the variance of that mean is the seeds' part, and where the blocks differ by more than
the interaction of seeds and blocks explains, that excess; the degrees of freedom are the seeds' own, raised by the
data's part. A verdict must stand by that variance, by the seeds' part alone and by the variance over the choice of the
data alone, since few seeds may agree by chance. Runs with the same seeds on both sides are paired by seed; otherwise
the seed variances of the two sides are added (Welch).

All runs must have been evaluated on the same batches with the same noise (common random numbers).

Source: Dorfman, Berbaum, Metz (1992), Investigative Radiology 27: 723-731; Hillis (2007), Statistics in Medicine 26:
596-619, for the degrees of freedom.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from ..configs import upper_level
from ..constraints.objectives import UNCONSTRAINED
from ..runs import RunFolder
from .profile import LayerProfile
from .robustness import NoiseCurve
from .uncertainty import check_confidence


PRIMARY = "auc_over_range"
# Columns of the table: property of the curve -> heading.
SUMMARIES = {PRIMARY: "average", "auc_id": "ID", "auc_ood": "OOD"}
COMMON = ("seed", "perturbation", "batch_size", "samples", "data")  # settings of a curve that fix rows and noise
# Of a run's summary, beside its arguments.
TRAINED = ("model", "parameters", "train_rows", "pooling", "encoder", "readout")


@dataclass
class Run:
    """One trained model's results.

    Attributes:
        folder (`str`): where they were read.
        curve ([`NoiseCurve`]): its `noise_curve.json`.
        profiles (`dict[float, LayerProfile]`): noise level -> that `layer_profile*.json`.
        summary (`dict`): its `descent_config.json`; empty where there is none.
        history (`list[dict]`): the log of its `trainer_state.json`.
    """

    folder: str
    curve: NoiseCurve
    profiles: dict[float, LayerProfile] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: str, curve: str = "noise_curve") -> "Run":
        """Reads a run's folder; ValueError where it holds no curve of that name, or one of a former training."""
        run = RunFolder(folder)
        curves = run.results(NoiseCurve, curve)
        if not curves:
            raise ValueError(
                f"{folder} holds no {curve}.json of its last training; run `hf-descent evaluate {folder} --config "
                "RECIPE`."
            )
        profiles = {profile.gamma: profile for profile in run.results(LayerProfile, "layer_profile*")}
        return cls(folder, curves[0], profiles, run.summary, run.history)

    @property
    def seed(self) -> int | None:
        """The seed of the training, where its summary has it."""
        return self.summary.get("arguments", {}).get("seed")

    @property
    def feasible(self) -> bool | None:
        """Whether the constraints hold on the held-out rows at the level of training, where they were imposed; `None`
        where there were none, or without a profile at that level."""
        if self.summary.get("objective") in UNCONSTRAINED:
            return None
        profile = self.profiles.get(self.gamma_train or 0.0)
        return None if profile is None else profile.feasible

    @property
    def gamma_train(self) -> float | None:
        """The (largest) level of the training noise, also where the curve is of another perturbation."""
        return upper_level(self.summary.get("noise_gamma", self.curve.gamma_train))

    @property
    def settings(self) -> dict[str, Any]:
        """What it was trained with, but for the seed, the levels at which it was tested after training, the folder of
        frozen multipliers, which every seed has of its own, and where the encoder's folder lay."""
        arguments = self.summary.get("arguments", {})
        settings = {name: value for name, value in arguments.items() if name not in ("seed", "eval_gammas")}
        if settings.get("data_seed") == arguments.get("seed"):  # as where it is not given
            settings.pop("data_seed", None)
        if isinstance(settings.get("fixed_multipliers"), str):
            del settings["fixed_multipliers"]
        settings |= {name: self.summary[name] for name in TRAINED if name in self.summary}
        if os.path.isabs(settings.get("encoder", "")):  # seeds of one training may start from anywhere
            settings["encoder"] = os.path.basename(os.path.normpath(settings["encoder"]))
        return settings | self.summary.get("command", {})

    @property
    def arm(self) -> str:
        """A name for the way of training: objective and noise."""
        arguments = self.summary.get("arguments", {})
        if not arguments:
            return os.path.basename(os.path.normpath(self.folder))
        name = "neftune" if arguments.get("neftune_noise_alpha") else arguments["objective"]
        gamma = arguments.get("noise_gamma")
        return f"{name}+noise {gamma}" if upper_level(gamma) else name


def shared_levels(groups: Mapping[str, Sequence[Run]]) -> list[float]:
    """The noise levels, in increasing order, at which all runs of all groups have a profile of their layers."""
    return sorted(set.intersection(*(set(run.profiles) for runs in groups.values() for run in runs)))


def descent_level(groups: Mapping[str, Sequence[Run]]) -> float | None:
    """The shared level at which the runs' descent is compared: the greatest at which one was trained, or the least."""
    levels = shared_levels(groups)
    trained = {run.gamma_train for runs in groups.values() for run in runs}
    return max((gamma for gamma in levels if gamma in trained), default=min(levels, default=None))


@dataclass
class Difference:
    """How much better one group of runs is than another on one summary (an average over levels).

    Attributes:
        baseline, group (`str`): the groups.
        name (`str`): property of the curve.
        metric (`str`): name of the metric.
        estimate (`float`): group minus baseline.
        radius (`float`): half-width of the interval at `confidence`; infinite for a single run on either side.
        data_radius (`float`): half-width over the choice of the data alone, for these very models.
        p_value (`float`): of no difference, two-sided; not a number for a single run on either side.
        freedom (`float`): degrees of freedom.
        paired (`bool`): whether runs were paired by seed.
        confidence (`float`): level of the interval and of the verdict, after correction for the comparisons made.
        greater_is_better (`bool`): whether more of the metric is better.
    """

    baseline: str
    group: str
    name: str
    metric: str
    estimate: float
    radius: float
    data_radius: float
    p_value: float
    freedom: float
    paired: bool
    confidence: float
    greater_is_better: bool

    @property
    def verdict(self) -> str:
        """ "better", "worse", "no difference", or "open" for single runs and metrics that are not finite."""
        if not np.isfinite(self.radius):
            return "open"
        if abs(self.estimate) <= self.radius:
            return "no difference"
        return "better" if (self.estimate > 0) == self.greater_is_better else "worse"

    def __str__(self) -> str:
        level = f"{100 * self.confidence:.4g} %"
        figure = f"{self.metric} averaged over the noise levels, {self.estimate:+.4g}"
        if not np.isfinite(self.estimate):
            return f"{self.group} against {self.baseline}: open. A run has a {self.metric} that is not finite."
        if self.verdict == "open":
            return (
                f"{self.group} against {self.baseline}: open. With one run on a side the two models can be compared "
                f"({figure} +- {self.data_radius:.2g} over the choice of the data, {level}), but not the ways of "
                "training them: another seed may do the same. Train at least two seeds of each."
            )
        how = "paired by seed" if self.paired else "seeds not paired"
        words = {
            "no difference": f"no difference at {level}",
            "better": f"{self.group} is better, at {level}",
            "worse": f"{self.group} is worse, at {level}",
        }[self.verdict]
        figure += f" +- {self.radius:.2g}, p = {self.p_value:.2g}, {how}"
        return f"{self.group} against {self.baseline}: {words} ({figure})."


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that were trained alike but for the seed, by a name for their training; in the order of first appearance.

    Names are made longer by the settings that differ where two ways of training would have the same.
    """
    settings = {json.dumps([run.arm, run.settings], sort_keys=True): run for run in runs}
    names = {}
    for key, run in settings.items():
        alike = [other for other in settings.values() if other.arm == run.arm]
        differing = sorted(
            name for name in run.settings if len({str(other.settings.get(name)) for other in alike}) > 1
        )
        names[key] = ", ".join([run.arm, *(f"{name} {run.settings[name]}" for name in differing)])
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(names[json.dumps([run.arm, run.settings], sort_keys=True)], []).append(run)
    return groups


def check_comparable(runs: Sequence[Run]):
    """ValueError unless all curves were measured on the same batches, levels and noise draws."""
    first = runs[0].curve
    for run in runs:
        curve = run.curve
        same = (
            curve.metric == first.metric
            and np.array_equal(curve.gammas, first.gammas)
            and curve.blocks is not None
            and curve.blocks.shape == first.blocks.shape
            and np.array_equal(curve.blocks[..., 1], first.blocks[..., 1])
            and curve.scale == first.scale
            and all(curve.settings.get(name) == first.settings.get(name) for name in COMMON)
        )
        if not same:
            raise ValueError(
                f"{run.folder} and {runs[0].folder} were not evaluated on the same data, levels and noise: run "
                "`hf-descent evaluate` on both with the same arguments."
            )
    if len(first.blocks) < 2:
        raise ValueError("All data went into one batch; evaluate with a smaller `--per_device_eval_batch_size`.")


def difference(groups: Mapping[str, Sequence[Run]], baseline: str, group: str, confidence: float = 0.95) -> Difference:
    """How much better the runs of `group` are than those of `baseline`, averaged over the noise levels."""
    sides = [list(groups[baseline]), list(groups[group])]
    seeds = [[run.seed for run in side] for side in sides]
    paired = (
        None not in seeds[0] + seeds[1]
        and sorted(seeds[0]) == sorted(seeds[1])
        and len(set(seeds[0])) == len(seeds[0])
    )
    if paired:
        sides = [sorted(side, key=lambda run: run.seed) for side in sides]
    before, after = (np.stack([run.curve.pseudo_values(PRIMARY) for run in side]) for side in sides)  # [seeds, blocks]
    # Each side's own mean is what is reported; pseudo-values differ from it by the jackknife's correction of bias.
    means = [np.array([getattr(run.curve, PRIMARY) for run in side]) for side in sides]
    estimate = float(means[1].mean() - means[0].mean())
    blocks = before.shape[1]
    tables = [after - before] if paired else [before, after]
    counts = [len(table) for table in tables]

    of_data = (after.mean(axis=0) - before.mean(axis=0)).var(ddof=1) / blocks
    quantile = 1 - (1 - confidence) / 2
    data_radius = float(stats.t.ppf(quantile, blocks - 1) * np.sqrt(of_data))
    if min(counts) < 2:
        radius, p_value, freedom = np.inf, np.nan, 0.0
    else:
        # Of every table: the variance of its mean over seeds, and the interaction's part in its mean over blocks.
        of_seeds = np.array([table.mean(axis=1).var(ddof=1) / len(table) for table in tables])
        interaction = sum(_interaction(table) / table.size for table in tables)
        total = of_seeds.sum()
        freedom = total**2 / sum(part**2 / (count - 1) for part, count in zip(of_seeds, counts)) if total else 1.0
        both = total + max(0.0, of_data - interaction)
        # Few seeds may agree by chance, and hide the data's part: by the seeds, by both, and by the data alone.
        tests = [(total, freedom), (both, freedom * (both / total) ** 2 if total else freedom), (of_data, blocks - 1)]
        errors = [(np.sqrt(variance), freedom) for variance, freedom in tests]
        radius, freedom = max((float(stats.t.ppf(quantile, freedom) * error), freedom) for error, freedom in errors)
        p_value = max(_p_value(estimate, error, freedom) for error, freedom in errors)
    first = sides[0][0].curve
    return Difference(
        baseline=baseline,
        group=group,
        name=PRIMARY,
        metric=first.metric,
        estimate=estimate,
        radius=radius,
        data_radius=data_radius,
        p_value=p_value,
        freedom=float(freedom),
        paired=paired,
        confidence=confidence,
        greater_is_better=first.greater_is_better,
    )


def _p_value(estimate: float, error: float, freedom: float) -> float:
    return float(2 * stats.t.sf(abs(estimate) / error, freedom)) if error else float(estimate == 0.0)


def _interaction(table: np.ndarray) -> float:
    """Mean square of the interaction of rows and columns of a table without replication."""
    rest = table - table.mean(axis=1, keepdims=True) - table.mean(axis=0, keepdims=True) + table.mean()
    return float((rest**2).sum() / ((table.shape[0] - 1) * (table.shape[1] - 1)))


@dataclass
class Comparison:
    """Groups of runs against the first of them.

    Attributes:
        groups (`dict[str, list[Run]]`): the runs by their training; the first group is the baseline.
        differences (`list[Difference]`): of every other group from the baseline, on the average over all levels.
    """

    groups: dict[str, list[Run]]
    differences: list[Difference]

    @property
    def gamma_train(self) -> float | None:
        """The largest training level, which parts ID from OOD for all groups alike; `None` where no run has one."""
        levels = [run.curve.gamma_train for runs in self.groups.values() for run in runs]
        return max((level for level in levels if level is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: each group's folders, summaries (mean, deviation over seeds) and cost; verdicts; a note."""
        groups = {}
        for name, runs in self.groups.items():
            values = {"runs": [run.folder for run in runs], "seeds": [run.seed for run in runs]}
            values |= {summary: _spread(runs, summary, self.gamma_train) for summary in SUMMARIES}
            values |= {"clean": _clean(runs), "feasible": _feasible(runs), "step_seconds": _cost(runs)}
            groups[name] = values
        verdicts = [{**vars(found), "verdict": found.verdict, "text": str(found)} for found in self.differences]
        return {"groups": groups, "differences": verdicts, "note": self._sigma_note()}

    def __str__(self) -> str:
        width = max(len(name) for name in self.groups) + 2
        first = next(iter(self.groups.values()))[0].curve
        header = [f"{'':{width}}{'runs':>5}{'clean':>18}", *(f"{title:>18}" for title in SUMMARIES.values())]
        of_levels = "" if self.gamma_train is None else f"; ID: noise levels up to {self.gamma_train:g}, OOD: beyond"
        rows = [
            f"{first.metric}, mean +- standard deviation over seeds{of_levels}",
            "".join([*header, f"{'feasible':>10}{'s/step':>10}"]),
        ]
        base_cost = _cost(next(iter(self.groups.values())))
        for name, runs in self.groups.items():
            summaries = (_spread(runs, summary, self.gamma_train) for summary in SUMMARIES)
            cells = [_format(_clean(runs)), *map(_format, summaries)]
            feasible, cost = _feasible(runs), _cost(runs)
            feasible = "" if feasible is None else f"{feasible[0]} of {feasible[1]}"
            ratio = "" if cost is None or not base_cost else f"x{cost / base_cost:.2f}"
            rows.append(
                f"{name:{width}}{len(runs):5d}"
                + "".join(f"{cell:>18}" for cell in cells)
                + f"{feasible:>10}{ratio:>10}"
            )
        if note := self._sigma_note():
            rows.append(note)
        return "\n".join([*rows, "", *(str(found) for found in self.differences)])

    def _sigma_note(self) -> str:
        """That one noise level is not the same noise in all runs, where it is not; else nothing."""
        sigmas = {
            name: [sigma for run in runs if (sigma := run.curve.settings.get("sigma"))]
            for name, runs in self.groups.items()
        }
        known = [sigma for found in sigmas.values() for sigma in found]
        if not known or max(known) <= 1.01 * min(known):
            return ""
        words = {name: " ".join(dict.fromkeys(f"{sigma:.4g}" for sigma in found)) for name, found in sigmas.items()}
        named = ", ".join(f"{found} in {name}" for name, found in words.items())
        return f"A noise level is in units of sigma, which differs: {named}. For one sigma: `evaluate --noise_sigma`."


def compare(
    runs: Sequence[str] | Mapping[str, Sequence[str]],
    baseline: str | None = None,
    confidence: float = 0.95,
    curve: str = "noise_curve",
) -> Comparison:
    """Reads runs and tests every group of them against a baseline.

    Args:
        runs (sequence of `str`, or mapping): folders of evaluated runs, grouped by what they were trained with; or the
            groups themselves, name -> folders.
        baseline (`str`, *optional*): name of the group to compare with; the first where not given.
        confidence (`float`): level at which all verdicts hold together (Bonferroni over the groups).
        curve (`str`): which curve: "noise_curve", or that of a perturbation ("typos_curve").

    Raises:
        ValueError: a folder was not evaluated, or is given twice (or a copy of it), fewer than two groups, runs that
            were not evaluated alike, a confidence that is none.
    """
    check_confidence(confidence)
    folders = runs if not isinstance(runs, Mapping) else [folder for group in runs.values() for folder in group]
    given = [os.path.realpath(folder) for folder in folders]
    if twice := sorted({folder for folder in given if given.count(folder) > 1}):
        raise ValueError(f"`runs` has {twice} more than once, which would count as several seeds; give each once.")
    if isinstance(runs, Mapping):
        groups = {name: [Run.load(folder, curve) for folder in folders] for name, folders in runs.items()}
    else:
        groups = group_runs([Run.load(folder, curve) for folder in runs])
    for name, group in groups.items():
        for first, second in combinations(group, 2):
            if first.curve.settings.get("weights") == second.curve.settings.get("weights") is not None:
                raise ValueError(
                    f"`runs` has {first.folder} and {second.folder} in {name!r}, whose weights are the same: a copy "
                    "would count as another seed; give one of them."
                )
    check_comparable([run for group in groups.values() for run in group])
    baseline = next(iter(groups)) if baseline is None else baseline
    if baseline not in groups or len(groups) < 2:
        raise ValueError(
            f"The groups are {list(groups)} and `baseline` is {baseline!r}; give runs of at least two ways of "
            "training, and a baseline among them."
        )
    groups = {baseline: groups[baseline]} | groups
    level = 1 - (1 - confidence) / (len(groups) - 1)
    return Comparison(
        groups, [difference(groups, baseline, name, confidence=level) for name in groups if name != baseline]
    )


def _spread(runs, name, gamma_train) -> tuple[float, float]:
    curves = [replace(run.curve, gamma_train=gamma_train) for run in runs]
    return _mean_and_deviation(np.array([getattr(curve, name) for curve in curves], dtype=float))  # None: no number


def _clean(runs) -> tuple[float, float]:
    return _mean_and_deviation(np.array([run.curve.mean[0] if run.curve.gammas[0] == 0 else np.nan for run in runs]))


def _mean_and_deviation(values: np.ndarray) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def _feasible(runs) -> tuple[int, int] | None:
    """How many of the runs with a problem are feasible, and how many have one."""
    found = [run.feasible for run in runs if run.feasible is not None]
    return (sum(found), len(found)) if found else None


def _cost(runs) -> float | None:
    """Seconds of a training step, the mean over runs."""
    seconds = [run.summary["step_seconds"] for run in runs if "step_seconds" in run.summary]
    return float(np.mean(seconds)) if seconds else None


def _format(figure: tuple[float, float]) -> str:
    mean, deviation = figure
    if not np.isfinite(mean):
        return "-"
    return f"{mean:.4g}" + (f" +- {deviation:.2g}" if np.isfinite(deviation) else "")
