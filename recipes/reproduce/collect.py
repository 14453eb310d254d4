"""The results of finished runs: one JSON and one Markdown table, with each panel's comparison and figures."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hf_descent.evaluation.comparison import Run, compare, shared_levels
from hf_descent.evaluation.plots import save_comparison

from .experiments import TABLES, Panel, Way
from .runner import Options, facts, jobs, study


# Command -> the paper's summary of a noise curve, with its name there.
SUMMARIES = {
    "classify": ("auc", "AUC"),
    "denoise": ("mean_over_levels", "mean RMSE"),
    "sft": ("auc", "AUC"),
}


def collect(
    table: str, panels: Sequence[Panel], options: Options, left_out: Mapping[str, str]
) -> Path:
    """Writes `results.json`, `results.md` and each panel's comparison and figures; returns their folder.

    Args:
        panels: those whose runs are finished.
        left_out (mapping): of the other panels, what they lack.
    """
    folder = options.folder / table
    folder.mkdir(parents=True, exist_ok=True)
    made = [{name: job.record()[name] for name in facts()} for job in jobs(panels, options)]
    result = {
        "table": table,
        "title": TABLES[table]["title"],
        **{
            name: value
            for name, value in asdict(options).items()
            if name not in ("scale", "folder")
        },
        "runs": [each for index, each in enumerate(made) if each not in made[:index]],
        "panels": [compared(panel, options, folder / panel.name) for panel in panels],
        "left_out": dict(left_out),
    }
    (folder / "results.json").write_text(json.dumps(result, indent=1, default=str))
    (folder / "results.md").write_text(render(result))
    return folder


def compared(panel: Panel, options: Options, folder: Path) -> dict[str, Any]:
    """What is known of each way of training, and how it differs from the first; figures go into `folder`."""
    seeds = options.seeds
    folders = {
        row: [str(options.results_folder(way, seed)) for seed in seeds]
        for row, way in panel.ways.items()
    }
    runs = {row: [Run.load(each) for each in found] for row, found in folders.items()}
    verdicts, figures = [], []
    if len(folders) > 1:  # `--arms` may leave one
        comparison = compare(folders)
        figures = [
            name for name in save_comparison(comparison, str(folder)) if name.endswith(".png")
        ]
        verdicts = [str(each) for each in comparison.differences]
    # The descent is compared at the greatest shared level at which a run was trained, or at the least.
    levels, trained = (
        shared_levels(runs),
        {run.gamma_train for found in runs.values() for run in found},
    )
    level = max((gamma for gamma in levels if gamma in trained), default=min(levels, default=None))
    summary, title = SUMMARIES[next(iter(panel.ways.values())).command]
    rows = {}
    for row, way in panel.ways.items():
        profiles = [run.profiles[level] for run in runs[row]]
        rows[row] = {
            "way": asdict(way),
            "search": study(way, options),
            "gammas": runs[row][0].curve.gammas.tolist(),
            "metric": [run.curve.mean.tolist() for run in runs[row]],
            "summary": [getattr(run.curve, summary) for run in runs[row]],
            "average": [run.curve.auc_over_range for run in runs[row]],
            "feasible": [run.feasible for run in runs[row]],
            "layer_losses": [profile.losses.tolist() for profile in profiles],
            "train_seconds": [run.summary.get("train_seconds") for run in runs[row]],
            "published": None if options.scale["needs_paths"] else published(way),
        }
    return {
        "name": panel.name, "summary": title, "metric": runs[row][0].curve.metric, "profile_gamma": level,
        "rows": rows, "verdicts": verdicts, "figures": figures,
    }  # fmt: skip


def published(way: Way) -> float | None:
    """The paper's figure (tables 3 and 4), for plain and for constrained training."""
    column = {"erm+noise": "unconstrained", "descent": "constrained"}.get(way.arm)
    column = "unconstrained" if way.arm == "erm" and way.gamma == 0 else column
    key = [way.data, way.model, "" if way.layers is None else str(way.layers), f"{way.gamma:g}"]
    with (Path(__file__).parent / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if column and not way.changes and list(row.values())[:4] == key:
                return float(row[column])
    return None


# ---- Markdown ----


def render(result: Mapping[str, Any]) -> str:
    """The results as Markdown; figures are links relative to the folder of the results."""
    made = "; ".join(
        f"commit {run['commit']}, {run['date']}, {run['machine']}" for run in result["runs"]
    )
    lines = [
        f"# {result['title']}",
        "",
        f"`{result['table']}`, made at {made}; seeds {', '.join(map(str, result['seeds']))}; searches of "
        f"{result['n_trials']} runs per arm on validation rows.",
    ]
    for name in ("data", "models", "settings"):
        if result[name]:
            lines += ["", f"{name.capitalize()} given: {_listed(result[name])}."]
    for panel in result["panels"]:
        lines += ["", f"## {panel['name']}", "", *_panel(panel)]
    if result["left_out"]:
        lines += [
            "",
            "## Left out",
            "",
            *(f"- {name}: {why}" for name, why in result["left_out"].items()),
        ]
    return "\n".join(lines) + "\n"


def _panel(panel: Mapping[str, Any]) -> list[str]:
    rows = panel["rows"]
    first = next(iter(rows.values()))
    gammas = first["gammas"]
    few = sorted({0, len(gammas) // 2, len(gammas) - 1})
    header = [
        "",
        f"{panel['summary']} over [{gammas[0]:g}, {gammas[-1]:g}]",
        "average over the range",
    ]
    header += [f"{panel['metric']} at {gammas[index]:g}" for index in few]
    header += ["feasible", "step time", "published"]
    lines = [_row(header), "|---" * len(header) + "|"]
    for name, row in rows.items():
        metric = np.array(row["metric"])  # [seeds, levels]
        known = [value for value in row["feasible"] if value is not None]
        cells = [
            name,
            _spread(row["summary"]),
            _spread(row["average"]),
            *(_spread(metric[:, index]) for index in few),
        ]
        cells.append(f"{sum(known)} of {len(known)}" if known else "")
        timed = None not in row["train_seconds"] + first["train_seconds"]
        cells.append(
            f"x{np.mean(row['train_seconds']) / np.mean(first['train_seconds']):.2f}"
            if timed
            else ""
        )
        cells.append("" if row["published"] is None else f"{row['published']:g}")
        lines.append(_row(cells))
    lines += ["", *(f"- {text}" for text in panel["verdicts"])]
    for name, row in rows.items():
        if row["search"]:
            best, gamma = row["search"]["trials"][0], row["search"]["gamma"]
            feasible = {None: "", True: ", feasible", False: ", not feasible"}[best["feasible"]]
            lines.append(
                f"- {name}: {_listed(best['settings'])} ({best['value']:.4g} at {gamma:g}{feasible})."
            )
    return [*lines, "", *(f"![{name}]({panel['name']}/{name})" for name in panel["figures"])]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" +- {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{spread}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {v:.3g}" if isinstance(v, float) else f"{name} {v}" for name, v in values.items()
    )
