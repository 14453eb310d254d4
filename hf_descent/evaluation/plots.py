"""The paper's figures from your own runs, readable in greyscale: groups differ by line and marker, not by colour."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..extras import extra_needed
from ..files import atomic_write, plain
from .certificates import Certificate
from .comparison import Comparison, Run, shared_levels
from .lens import Lens


with extra_needed("A figure"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator


COLORS = ("black", "0.5", "0.7")
LINES = ("-", "--", "-.", ":")
MARKERS = "os^Dvx*<P>"
STYLES = [
    {"color": COLORS[number % 3], "linestyle": LINES[number % 4], "marker": marker, "markersize": 4}
    for number, marker in enumerate(MARKERS)
]
# Inside the axes it would hide lines.
LEGEND = {"frameon": False, "handlelength": 3.5, "loc": "outside right upper"}


def save_comparison(comparison: Comparison, folder: str) -> list[str]:
    """Writes `comparison.json`, `comparison.txt` and figures (PNG, SVG) of what was measured; returns their names."""
    os.makedirs(folder, exist_ok=True)
    values = json.dumps(plain(comparison.to_dict()), indent=1)
    contents = {"comparison.json": values, "comparison.txt": str(comparison)}
    for name, content in contents.items():
        with atomic_write(os.path.join(folder, name)) as file:
            file.write(f"{content}\n")

    files = list(contents)
    files += save_figure(plot_curves(comparison.groups), folder, "metric_against_noise")
    if shared_levels(comparison.groups):
        files += save_figure(plot_layers(comparison.groups), folder, "layer_losses")
    return files


def save_figure(figure: Figure, folder: str | os.PathLike, name: str) -> list[str]:
    """Writes a figure as PNG and SVG; returns the files' names."""
    metadata = {f"{name}.png": {}, f"{name}.svg": {"Date": None}}
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same figure is the same file
        for file, facts in metadata.items():
            figure.savefig(os.path.join(folder, file), dpi=150, metadata=facts)
    return list(metadata)


def plot_curves(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Metric against the noise level, as in the paper's figures 1 and 4. Lines are means over runs, and bars reach
    from the least run to the greatest; for a single run they are its 95 % interval."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for place, (name, runs) in enumerate(groups.items()):
        curve = runs[0].curve
        error = 0.0
        if len(runs) == 1:
            error = curve.radius("mean")
        metrics = [run.curve.mean for run in runs]
        _line(axes, curve.gammas, metrics, error, place, label=name, shift=_shift(place, groups))

    trained = {run.curve.gamma_train for runs in groups.values() for run in runs}
    for gamma in trained - {None, 0.0}:
        axes.axvline(gamma, color="0.8", zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "ha": "right"}
        axes.text(gamma, 0.01, "training level ", **place, color="0.4", size=8)

    levels = "noise level (1: the standard deviation of the clean input)"
    axes.set(xlabel=levels, ylabel=curve.metric)
    figure.legend(*axes.get_legend_handles_labels(), **LEGEND)
    return figure


def plot_layers(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Loss of every layer, as in the paper's figures 1 and 7, with a panel for each noise level that all runs have a
    profile of. Bars are as in `plot_curves`. Short lines show what each row asked of its layer, the mean over runs
    that have the same rows."""
    gammas = shared_levels(groups)
    trained = {_level_of_training(run) for runs in groups.values() for run in runs}
    figure = Figure(figsize=(3 + 4 * len(gammas), 4), layout="constrained")
    panels = figure.subplots(1, len(gammas), sharey=True, squeeze=False)[0]
    for axes, gamma in zip(panels, gammas):
        for place, (name, runs) in enumerate(groups.items()):
            profiles = [run.profiles[gamma] for run in runs]
            losses = [profile.losses for profile in profiles]
            error = 0.0
            if len(runs) == 1:
                error = profiles[0].loss_radii

            layers = np.arange(1, len(losses[0]) + 1)
            _line(axes, layers, losses, error, place, label=name, shift=_shift(place, groups))
            if runs[0].was_constrained and profiles[0].problem is not None:
                judged = [profile for profile in profiles if profile.problem is not None]
                verdicts = [profile.certificate() for profile in judged]
                draw_asked(axes, verdicts, _style(place)["color"], f"{name}: asked")
        axes.set(xlabel="layer", title=_title(gamma, trained))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    panels[0].set_ylabel("loss on held-out data")
    ends = np.array([axes.dataLim.intervaly for axes in panels])
    if 0 < 10 * ends.min() < ends.max():  # small losses stay apart
        panels[0].set_yscale("log")

    figure.legend(*panels[0].get_legend_handles_labels(), **LEGEND)
    return figure


def _level_of_training(run: Run) -> float:
    return 0.0 if run.gamma_train is None else run.gamma_train


def plot_lens(lens: Lens) -> Figure:
    """Loss, metric, entropy and norm of every layer, a panel each, with 95 % intervals."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = figure.subplots(2, 2).flat
    layers = np.arange(1, len(lens.losses) + 1)
    for axes, (title, (values, radii)) in zip(panels, lens.measures.items()):
        _line(axes, layers, [values], np.nan_to_num(radii), 0)
        axes.set(xlabel="layer", ylabel=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    if lens.fitted_losses is not None:
        radii = np.nan_to_num(lens.fitted_radii)
        _line(figure.axes[0], layers, [lens.fitted_losses], radii, 1, "fitted")
        figure.axes[0].legend(frameon=False)
    if lens.chance:
        figure.axes[0].axhline(lens.chance, color="0.7", linestyle=":", zorder=0)
        figure.axes[0].text(1, lens.chance, "guessing", color="0.4", size=8, va="bottom")
    return figure


def draw_asked(axes: Axes, certificates: Sequence[Certificate], color: str, label: str) -> None:
    """A short line for each row at the loss that it asks for: the mean over certificates of the same rows."""
    rows = certificates[0].rows
    layers = [int(name.split("_")[-1]) for name in rows]
    alike = [certificate for certificate in certificates if certificate.rows == rows]
    asked = np.mean([certificate.asked for certificate in alike], axis=0)
    axes.plot(layers, asked, color=color, linestyle="none", marker="_", markersize=14, label=label)


def _title(gamma: float, trained: Collection[float]) -> str:
    title = "without noise"
    if gamma:
        title = f"noise level {gamma:g}"
    if gamma in trained:
        title += " (training level)"
    return title


def _style(place: int) -> dict[str, Any]:
    return STYLES[place % len(STYLES)]


def _shift(place: int, groups: Collection[str]) -> float:
    """By what share of the width a line is shifted, so that bars do not overlap."""
    return 0.008 * (place - (len(groups) - 1) / 2)


def _line(
    axes: Axes,
    x: np.ndarray,
    runs: Sequence[np.ndarray],
    error: np.ndarray | float,
    place: int,
    label: str = "",
    shift: float = 0.0,
) -> None:
    """The mean of the runs, `[points]` each, and bars from the least to the greatest, widened by `error`."""
    mean = np.mean(runs, axis=0)
    spread = np.stack([mean - np.min(runs, axis=0), np.max(runs, axis=0) - mean])  # [2, points]
    bars = spread.clip(min=0) + error
    moved = x + shift * (x[-1] - x[0])
    axes.errorbar(moved, mean, bars, label=label, elinewidth=0.7, capsize=2, **_style(place))
