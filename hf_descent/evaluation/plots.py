"""The paper's figures from your own runs, readable in greyscale: groups differ by line and marker, not by colour.

- `plot_layers`: loss of every layer (figures 1 and 7), without noise and under it;
- `plot_curves`: metric against the noise level (figures 1 and 4);
- `plot_duals`: multipliers and violations over the steps of one run;
- `plot_ratios`: per-sample ratios of consecutive layer losses (figure 12);
- `plot_ablation`: metric at three noise levels against a setting, such as alpha (figures 5 and 14) or the dual rate
  (figure 15);
- `plot_strip` and `save_gif`: what denoisers make of a noisy clip.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ..files import plain, whole_file
from .comparison import Comparison, Run, descent_level, shared_levels


STYLES = (
    {"color": "black", "linestyle": "-", "marker": "o"},
    {"color": "black", "linestyle": "--", "marker": "s"},
    {"color": "0.5", "linestyle": "-", "marker": "^"},
    {"color": "0.5", "linestyle": ":", "marker": "D"},
    {"color": "black", "linestyle": "-.", "marker": "v"},
    {"color": "0.7", "linestyle": "--", "marker": "x"},
    {"color": "black", "linestyle": ":", "marker": "*"},
    {"color": "0.5", "linestyle": "-.", "marker": "<"},
    {"color": "0.7", "linestyle": "-", "marker": "P"},
    {"color": "0.5", "linestyle": "--", "marker": ">"},
)
LINES = ("-", "--", "-.", ":", (0, (1, 3)))
FILES = re.compile(r"(metric_against_noise|layer_losses|ratios|duals_\w+|ablation_\w+)\.(png|svg)")
GIF_FRAME_MS = 100
ABLATED = {"descent_alpha": "alpha", "dual_learning_rate": "dual learning rate"}


def save_comparison(comparison: Comparison, folder: str) -> list[str]:
    """Writes `comparison.json`, `comparison.txt` and all figures into a folder; returns the files' names."""
    os.makedirs(folder, exist_ok=True)
    contents = {
        "comparison.json": json.dumps(plain(comparison.to_dict()), indent=1),
        "comparison.txt": str(comparison),
    }
    for name, content in contents.items():
        with whole_file(os.path.join(folder, name)) as file:
            file.write(f"{content}\n")
    return [*contents, *save_figures(comparison, folder)]


def save_figures(comparison: Comparison, folder: str) -> list[str]:
    """Draws every figure that the runs have the data for; writes each as PNG and SVG and returns the files' names.
    Figures of an earlier comparison in the folder are removed."""
    groups = comparison.groups
    figures = {"metric_against_noise": plot_curves(groups)}
    if shared_levels(groups):
        figures["layer_losses"] = plot_layers(groups)
        figures["ratios"] = plot_ratios(groups)
    for name, runs in groups.items():
        if any(value for entry in runs[0].history for key, value in entry.items() if key.startswith("multiplier_")):
            figures[f"duals_{_file_name(name)}"] = plot_duals(runs[0], name)
    for setting in ABLATED:
        runs = _alike_but_for((run for group in groups.values() for run in group), setting)
        if len({_setting(run, setting) for run in runs}) > 2:
            figures[f"ablation_{setting}"] = plot_ablation(runs, setting)
    for file in filter(FILES.fullmatch, os.listdir(folder)):
        os.remove(os.path.join(folder, file))  # of other runs, perhaps, which may have had more of them
    files = []
    for name, figure in figures.items():
        for ending in ("png", "svg"):
            files.append(f"{name}.{ending}")
            figure.savefig(os.path.join(folder, files[-1]), dpi=150)
    return files


def plot_curves(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Metric against the noise level, mean over runs; bands from least to greatest (a single run: 95 % interval)."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for number, ((name, runs), style) in enumerate(zip(groups.items(), cycle(STYLES))):
        values = np.stack([run.curve.mean for run in runs])  # [runs, levels]
        low, high = values.min(axis=0), values.max(axis=0)
        if len(runs) == 1:
            error = runs[0].curve.radius("mean")
            low, high = values[0] - error, values[0] + error
        _line(axes, runs[0].curve.gammas, values.mean(axis=0), low, high, name, style, number, len(groups))
    curve = runs[0].curve
    for gamma in sorted({run.curve.gamma_train for runs in groups.values() for run in runs} - {None, 0.0}):
        axes.axvline(gamma, color="0.8", zorder=0)
        axes.annotate(
            "training level", (gamma, 0.01), xycoords=("data", "axes fraction"), color="0.4", size=8, ha="right"
        )
    kind = curve.settings.get("perturbation", "gaussian")
    of_noise = kind == "gaussian" or curve.settings.get("sigma") is not None
    xlabel = "noise level, in units of sigma" if of_noise else f"rate of {kind.replace('_', ' ')}"
    axes.set(xlabel=xlabel, ylabel=curve.metric)
    _legend(figure, axes)
    return figure


def plot_layers(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Loss of every layer, one panel for each noise level that all runs have a profile of."""
    gammas = shared_levels(groups)
    figure = Figure(figsize=(3 + 4 * len(gammas), 4), layout="constrained")
    panels = figure.subplots(1, len(gammas), sharey=True, squeeze=False)[0]
    for axes, gamma in zip(panels, gammas):
        for number, ((name, runs), style) in enumerate(zip(groups.items(), cycle(STYLES))):
            losses = np.stack([run.profiles[gamma].losses for run in runs])  # [runs, layers]
            layers = np.arange(1, losses.shape[1] + 1)
            low, high = losses.min(axis=0), losses.max(axis=0)
            _line(axes, layers, losses.mean(axis=0), low, high, name, style, number, len(groups))
        axes.set(xlabel="layer", title=_level(gamma))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].set_ylabel("held-out loss")
    _legend(figure, panels[0])
    return figure


def plot_ratios(groups: Mapping[str, Sequence[Run]]) -> Figure:
    """Histograms of f_l(x) / f_(l-1)(x) over samples and layers at one noise level (see `descent_level`); what lies
    beyond 2 is counted in the last bin."""
    gamma = descent_level(groups)
    rows = -(-len(groups) // 2)
    figure = Figure(figsize=(8, 1 + 2 * rows), layout="constrained")
    panels = figure.subplots(rows, min(2, len(groups)), sharex=True, sharey=True, squeeze=False).flat
    bins = np.linspace(0, 2, 41)
    for axes, (name, runs) in zip(panels, groups.items()):
        ratios = np.concatenate([run.profiles[gamma].ratios.ravel() for run in runs])
        counts, _ = np.histogram(ratios.clip(max=2), bins)
        axes.stairs(counts / len(ratios), bins, color="0.5", fill=True)
        axes.axvline(1, color="black", linestyle=":", linewidth=1)
        axes.set_title(f"{name}\nmedian {np.median(ratios):.2f}, {np.mean(ratios < 1):.0%} descend", size=9)
        axes.set_xlim(0, 2)
    for axes in panels[len(groups) :]:
        axes.remove()
    figure.supxlabel(f"loss of a sample after a layer / before it, {_level(gamma)}")
    figure.supylabel("share of steps")
    return figure


def plot_duals(run: Run, name: str = "") -> Figure:
    """Multipliers and violations of one run over its steps, layers from dark (first) to light (last)."""
    entries = [entry for entry in run.history if "multiplier_1" in entry]
    steps = [entry["step"] for entry in entries]
    count = sum(key.startswith("multiplier_") for key in entries[0])
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, quantity in zip(figure.subplots(1, 2), ("multiplier", "violation")):
        for layer, line in zip(range(1, count + 1), cycle(LINES)):
            values = [entry[f"{quantity}_{layer}"] for entry in entries]
            shade = str(0.75 * (layer - 1) / max(1, count - 1))
            axes.plot(steps, values, color=shade, linestyle=line, label=f"layer {layer}")
        axes.set(xlabel="optimizer step", ylabel=quantity)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.axhline(0, color="0.8", zorder=0)
    axes.legend(frameon=False, ncols=1 + count // 9, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.suptitle(name)
    return figure


def plot_ablation(runs: Sequence[Run], setting: str) -> Figure:
    """Metric against a setting of training, at the least noise level, the middle one and the largest; mean and
    standard deviation over the runs with the same value."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    curve = runs[0].curve
    values = sorted({_setting(run, setting) for run in runs})
    for level, style in zip((0, len(curve.gammas) // 2, -1), STYLES):
        metric = [
            np.array([run.curve.mean[level] for run in runs if _setting(run, setting) == value]) for value in values
        ]
        spread = [found.std(ddof=1) if len(found) > 1 else 0.0 for found in metric]
        label = f"noise level {curve.gammas[level]:g}"
        axes.errorbar(values, np.array([found.mean() for found in metric]), spread, label=label, capsize=3, **style)
    axes.set(xlabel=ABLATED.get(setting, setting), ylabel=curve.metric)
    if min(values) > 0 and max(values) > 20 * min(values):
        axes.set_xscale("log")
    axes.legend(frameon=False)
    return figure


def plot_strip(clean: np.ndarray, others: Mapping[str, np.ndarray], title: str) -> Figure:
    """The clean frame `[height, width]` and the others in a row, with maps of their absolute errors below.

    All maps share one scale, which ends at the largest error but for the last 1% of the noisy frame's.
    """
    errors = {name: np.abs(frame - clean) for name, frame in others.items()}
    largest = max(np.quantile(next(iter(errors.values())), 0.99), 1e-3)
    figure = Figure(figsize=(2.2 * (1 + len(others)), 5), layout="constrained")
    axes = figure.subplots(2, 1 + len(others))
    axes[0, 0].imshow(clean, cmap="gray", vmin=0, vmax=1)
    axes[0, 0].set_title("clean")
    for column, (name, frame) in enumerate(others.items(), start=1):
        axes[0, column].imshow(frame, cmap="gray", vmin=0, vmax=1)
        axes[0, column].set_title(f"{name}\nRMSE {255 * np.sqrt(np.square(errors[name]).mean()):.1f}")
        image = axes[1, column].imshow(errors[name], cmap="gray_r", vmin=0, vmax=largest)
    figure.colorbar(image, ax=axes[1, -1], label="absolute error")
    for ax in axes.flat:
        ax.set_axis_off()
    figure.suptitle(title)
    return figure


def save_gif(path: str, columns: Sequence[np.ndarray]) -> None:
    """Clips `[frames, height, width]` in [0, 1] side by side, as a GIF that repeats."""
    pixels = (np.concatenate(columns, axis=2).clip(0, 1) * 255).round().astype(np.uint8)  # [frames, height, all]
    first, *rest = [Image.fromarray(frame) for frame in pixels]
    first.save(path, save_all=True, append_images=rest, duration=GIF_FRAME_MS, loop=0)


def _level(gamma: float) -> str:
    return f"noise level {gamma:g}" if gamma else "without noise"


def _alike_but_for(runs: Iterable[Run], setting: str) -> list[Run]:
    """The constrained runs that differ in `setting` and their seed alone, the largest such set."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        if run.summary.get("objective") == "descent" and setting in run.settings:
            others = {name: value for name, value in run.settings.items() if name != setting}
            alike.setdefault(str(others), []).append(run)
    return max(alike.values(), key=len, default=[])


def _setting(run: Run, name: str) -> float:
    """A setting as a number; the mean over layers where there is one for each (or where it was "auto")."""
    value = run.summary.get("arguments", {}).get(name)
    if value == "auto":
        value = run.summary.get("alpha" if name == "descent_alpha" else name)
    return float(np.mean(value))


def _line(axes: Axes, x, mean, low, high, label: str, style: Mapping[str, str], number: int, groups: int):
    """A line with a band; with bars side by side among many groups, whose bands would hide one another."""
    if groups <= 3:
        axes.plot(x, mean, label=label, markersize=4, **style)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.1, linewidth=0)
    else:
        aside = 0.008 * (number - (groups - 1) / 2) * (x[-1] - x[0])
        errors = np.stack([mean - low, high - mean]).clip(min=0)  # [2, points], but for rounding
        axes.errorbar(x + aside, mean, errors, label=label, markersize=4, elinewidth=0.7, capsize=2, **style)


def _legend(figure: Figure, axes: Axes):
    """Beside the panels: inside them it would hide lines."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, handlelength=3.5, loc="outside right upper")


def _file_name(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)
