"""The paper's figures from your own runs, readable in greyscale: groups differ by line and marker, not by colour."""

import json
import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..constraints.objectives import UNCONSTRAINED
from ..extras import extra_needed
from ..files import atomic_write, plain
from .certificates import Certificate
from .comparison import Comparison, Run, shared_levels
from .lens import Lens


with extra_needed("A figure"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator


COLORS, LINES, MARKERS = ("black", "0.5", "0.7"), ("-", "--", "-.", ":"), "os^Dvx*<P>"
STYLES = [
    {"color": COLORS[number % 3], "linestyle": LINES[number % 4], "marker": marker, "markersize": 4}
    for number, marker in enumerate(MARKERS)
]
LEGEND = {
    "frameon": False,
    "handlelength": 3.5,
    "loc": "outside right upper",
}  # inside it would hide lines


def save_comparison(comparison: Comparison, folder: str) -> list[str]:
    """Writes `comparison.json`, `comparison.txt` and figures (PNG, SVG) of what was measured; returns their names."""
    os.makedirs(folder, exist_ok=True)
    values = json.dumps(plain(comparison.to_dict()), indent=1)
    contents = {"comparison.json": values, "comparison.txt": str(comparison)}
    for name, content in contents.items():
        with atomic_write(os.path.join(folder, name)) as file:
            file.write(f"{content}\n")
    figures = {"metric_against_noise": plot_curves(comparison.groups)}
    if shared_levels(comparison.groups):
        figures["layer_losses"] = plot_layers(comparison.groups)
    return [
        *contents,
        *(file for name, figure in figures.items() for file in save_figure(figure, folder, name)),
    ]


def save_figure(figure: Figure, folder: str | os.PathLike, name: str) -> list[str]:
    """Writes a figure as PNG and SVG; returns the files' names."""
    files = [f"{name}.png", f"{name}.svg"]
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same figure is the same file
        for file, metadata in zip(files, ({}, {"Date": None})):
            figure.savefig(os.path.join(folder, file), dpi=150, metadata=metadata)
    return files


def plot_curves(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Figures 1 and 4, metric against the noise level: mean over runs, bars from least to greatest (a single run: 95 %
    interval)."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, runs) in enumerate(groups.items()):
        error = runs[0].curve.radius("mean") if len(runs) == 1 else 0.0
        curve = runs[0].curve
        _line(
            axes, curve.gammas, [run.curve.mean for run in runs], error, name, number, len(groups)
        )
    for gamma in {run.curve.gamma_train for runs in groups.values() for run in runs} - {None, 0.0}:
        axes.axvline(gamma, color="0.8", zorder=0)
        place = {"transform": axes.get_xaxis_transform(), "ha": "right"}
        axes.text(gamma, 0.01, "training level ", **place, color="0.4", size=8)
    kind = curve.settings.get("perturbation", "gaussian")
    of_noise = kind == "gaussian" or curve.settings.get("sigma") is not None
    xlabel = "noise level, in units of sigma" if of_noise else f"rate of {kind.replace('_', ' ')}"
    axes.set(xlabel=xlabel, ylabel=curve.metric)
    figure.legend(*axes.get_legend_handles_labels(), **LEGEND)
    return figure


def plot_layers(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Figures 1 and 7, loss of every layer: a panel for each noise level that all runs have a profile of; bars as in
    `plot_curves`, and short lines at what each row asked of its layer, the mean over runs that have the same rows."""
    gammas, trained = (
        shared_levels(groups),
        {run.gamma_train or 0.0 for runs in groups.values() for run in runs},
    )
    figure = Figure(figsize=(3 + 4 * len(gammas), 4), layout="constrained")
    panels = figure.subplots(1, len(gammas), sharey=True, squeeze=False)[0]
    for axes, gamma in zip(panels, gammas):
        for number, (name, runs) in enumerate(groups.items()):
            losses, first = [run.profiles[gamma].losses for run in runs], runs[0].profiles[gamma]
            error = first.radius("losses") if len(runs) == 1 else 0.0
            _line(axes, np.arange(1, len(losses[0]) + 1), losses, error, name, number, len(groups))
            if runs[0].summary.get("objective") not in UNCONSTRAINED and first.problem is not None:
                asked = [
                    run.profiles[gamma].certificate()
                    for run in runs
                    if run.profiles[gamma].problem is not None
                ]
                draw_asked(axes, asked, STYLES[number % len(STYLES)]["color"], f"{name}: asked")
        axes.set(xlabel="layer", title=_title(gamma, trained))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("held-out loss")
    ends = np.array([axes.dataLim.intervaly for axes in panels])
    panels[0].set_yscale(
        "log" if 0 < 10 * ends.min() < ends.max() else "linear"
    )  # small losses stay apart
    figure.legend(*panels[0].get_legend_handles_labels(), **LEGEND)
    return figure


def plot_evaluation(
    losses: Sequence[float],
    certificate: Certificate | None = None,
    gamma_train: float = 0.0,
    constrained: bool = True,
) -> Figure:
    """The loss of every layer `[L]` in one evaluation without noise; of its certificate the 95 % intervals and, in a
    `constrained` training, what each row asked."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    _line(
        axes,
        np.arange(1, len(losses) + 1),
        [losses],
        certificate.loss_radii if certificate else 0.0,
        "",
        0,
        1,
    )
    if certificate and constrained:
        draw_asked(axes, [certificate])
        axes.legend(frameon=False)
    title = _title(0.0, {gamma_train}) + (
        f"; training level {gamma_train:g}" if gamma_train else ""
    )
    axes.set(xlabel="layer", ylabel="held-out loss", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def plot_lens(lens: Lens) -> Figure:
    """Loss, metric, entropy and norm of every layer, a panel each, with 95 % intervals."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = figure.subplots(2, 2).flat
    layers = np.arange(1, len(lens.losses) + 1)
    for axes, (title, (values, radii)) in zip(panels, lens.measures.items()):
        _line(axes, layers, [values], np.nan_to_num(radii), "", 0, 1)
        axes.set(xlabel="layer", ylabel=title)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if lens.chance:
        figure.axes[0].axhline(lens.chance, color="0.7", linestyle=":", zorder=0)
        figure.axes[0].text(1, lens.chance, "guessing", color="0.4", size=8, va="bottom")
    return figure


def draw_asked(
    axes: Axes, certificates: Sequence[Certificate], color: str = "black", label: str = "asked"
):
    """A short line for each row at the loss that it asks for: the mean over certificates of the same rows."""
    rows = certificates[0].rows
    layers = [int(name.split("_")[-1]) for name in rows]
    asked = np.mean([each.asked for each in certificates if each.rows == rows], axis=0)
    axes.plot(layers, asked, color=color, linestyle="none", marker="_", markersize=14, label=label)


def pixels(figure: Figure) -> np.ndarray:
    """A figure as an image, uint8 `[height, width, 3]`."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def _title(gamma: float, trained: Collection[float]) -> str:
    return (f"noise level {gamma:g}" if gamma else "without noise") + (
        " (training level)" if gamma in trained else ""
    )


def _line(
    axes: Axes,
    x: np.ndarray,
    runs: Sequence[np.ndarray],
    error,
    name: str,
    number: int,
    groups: int,
):
    """The mean of the runs, `[points]` each, bars from least to greatest; shifted, so that bars do not overlap."""
    mean = np.mean(runs, axis=0)
    bars = (
        np.stack([mean - np.min(runs, axis=0), np.max(runs, axis=0) - mean]).clip(min=0) + error
    )  # [2, points]
    shift = 0.008 * (number - (groups - 1) / 2) * (x[-1] - x[0])
    style = STYLES[number % len(STYLES)]
    axes.errorbar(x + shift, mean, bars, label=name, elinewidth=0.7, capsize=2, **style)
