"""The results of finished runs: JSON, Markdown and figures of one table."""

import csv
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_descent import cli
from hf_descent.evaluation.comparison import Run, descent_level

from .facts import facts, fingerprint, fingerprints
from .runner import Options, jobs, search_space
from .tables import Panel, Table, Way


# Command -> the paper's summary of a noise curve, with its name there.
SUMMARIES = {
    "classify": ("auc", "AUC"),
    "denoise": ("mean_over_levels", "mean RMSE"),
    "sft": ("auc", "AUC"),
}


def collect(name: str, table: Table, panels: Sequence[Panel], options: Options, left_out: Mapping[str, str]) -> Path:
    """Writes `results.json`, `results.md` and each panel's comparison and figures; returns their folder.

    Args:
        panels: those whose runs are finished.
        left_out (mapping): of the other panels, what they lack.
    """
    folder = options.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "table": name,
        "title": table.title,
        "seeds": list(options.seeds),
        "n_trials": options.n_trials,
        "models": {name: fingerprint(path) for name, path in options.models.items()},
        "data": fingerprints(options.data),
        "settings": dict(options.settings),
        "only_panels": options.panels,
        **facts(),
        "runs": origins(table, panels, options),
        "left_out": dict(left_out),
        "panels": [],
    }
    for panel in panels:
        if table.shows == "settings":
            groups = {group: {"search": study(ways[0], options)} for group, ways in panel.groups.items()}
            result["panels"].append({"name": panel.name, "groups": groups})
        else:
            result["panels"].append(compared(panel, options, folder))
    if table.shows == "answers":
        result["answers"] = {panel.name: answers(panel, options) for panel in panels}
    (folder / "results.json").write_text(json.dumps(result, indent=1, default=str))
    (folder / "results.md").write_text(render(result))
    return folder


def origins(table: Table, panels: Sequence[Panel], options: Options) -> list[dict[str, Any]]:
    """The different facts under which the panels' commands were last started: of other commits or machines than this
    one, where the runs went on over days."""
    done = jobs(panels, options, table.shows == "answers", table.shows == "settings")
    records = [json.loads(job.record.read_text()) for job in done]
    found = [{name: record[name] for name in facts()} for record in records]
    return [each for index, each in enumerate(found) if each not in found[:index]]


def study(found: Way, options: Options) -> dict[str, Any]:
    """The search's best trial, at which level it was judged, and of how many trials; nothing where none was asked
    for, or all is set."""
    path = options.study_folder(found) / "study.json"
    if not (search_space(found, options) and path.is_file()):
        return {}
    values = json.loads(path.read_text())
    return {"gamma": values["gamma"], "trials": len(values["trials"]), **values["trials"][0]}


def compared(panel: Panel, options: Options, folder: Path) -> dict[str, Any]:
    """The panel's comparison, and what is known of each group; figures go into a folder of its own."""
    ways = {}
    for group, found in panel.groups.items():
        way = best(found, options)
        ways[group if len(found) == 1 else f"{group}, {way.layers} layers"] = way
    folders = {group: [options.run_folder(found, seed) for seed in options.seeds] for group, found in ways.items()}
    words = [f"{group}={run}" for group, runs in folders.items() for run in runs]
    for figure in (folder / panel.name).glob("*.png"):
        figure.unlink()  # of other arms, perhaps
    verdicts = []
    if len(folders) > 1:  # `--arms` may leave one
        cli.main(["compare", *words, "--output_dir", str(folder / panel.name)])
        comparison = json.loads((folder / panel.name / "comparison.json").read_text())
        verdicts = [each["text"] for each in comparison["differences"]]
        verdicts += [comparison["note"]] if comparison["note"] else []

    summary, title = SUMMARIES[next(iter(ways.values())).spec.command]
    loaded = {group: [Run.load(str(run)) for run in runs] for group, runs in folders.items()}
    level = descent_level(loaded)
    if len(folders) > 1:
        plot_ratios(loaded, level).savefig(folder / panel.name / "ratios.png", dpi=150)
    groups = {}
    for group, found in ways.items():
        runs = loaded[group]
        groups[group] = {
            "way": asdict(found),
            "search": study(found, options),
            "gammas": runs[0].curve.gammas.tolist(),
            "metric": [run.curve.mean.tolist() for run in runs],
            summary: [getattr(run.curve, summary) for run in runs],
            "average": [run.curve.auc_over_range for run in runs],
            "feasible": [run.feasible for run in runs],
            "layer_losses": [run.profiles[level].losses.tolist() for run in runs],
            "descending_share": [run.profiles[level].descending_share for run in runs],
            "median_ratio": [float(np.median(run.profiles[level].ratios)) for run in runs],
            "step_seconds": [run.summary.get("step_seconds") for run in runs],
            "published": None if options.scale.needs_paths else published(found),
        }
    return {
        "name": panel.name,
        "summary": summary,
        "summary_title": title,
        "metric": runs[0].curve.metric,
        "profile_gamma": level,
        "groups": groups,
        "verdicts": verdicts,
        "figures": sorted(path.name for path in (folder / panel.name).glob("*.png")),
    }


def plot_ratios(groups: Mapping[str, Sequence[Run]], gamma: float) -> Figure:
    """Figure 12, histograms of f_l(x) / f_(l-1)(x) over samples and layers at one noise level;
    what lies beyond 2 is counted in the last bin."""
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
    figure.supxlabel(f"loss of a sample after a layer / before it, {f'noise level {gamma:g}'}")
    figure.supylabel("share of steps")
    return figure


def best(ways: Sequence[Way], options: Options) -> Way:
    """The way whose runs are best on validation rows; only denoisers are chosen so, by their mean RMSE there."""
    if len(ways) == 1:
        return ways[0]

    def validation(found: Way) -> float:
        results = [options.run_folder(found, seed) / "all_results.json" for seed in options.seeds]
        error = float(np.mean([json.loads(path.read_text())["validation_mean_rmse"] for path in results]))
        return error if math.isfinite(error) else math.inf  # a run that diverged compares with nothing

    return min(ways, key=validation)


def published(found: Way) -> float | None:
    """The paper's figure (tables 3 and 4), for plain and for constrained training."""
    column = {"erm+noise": "unconstrained", "descent": "constrained"}.get(found.arm)
    column = "unconstrained" if found.arm == "erm" and found.gamma == 0 else column
    key = [found.data, found.model, "" if found.layers is None else str(found.layers), f"{found.gamma:g}"]
    with (Path(__file__).parent / "published.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if column and not found.overrides and list(row.values())[:4] == key:
                return float(row[column])
    return None


def answers(panel: Panel, options: Options) -> list[dict[str, Any]]:
    """Each instruction with the answers of every group at every noise level."""
    found: dict[str, dict[str, Any]] = {}
    for group, ways in panel.groups.items():
        for path in sorted(options.run_folder(ways[0], options.seeds[0]).glob("answers-*.json")):
            for number, row in enumerate(json.loads(path.read_text()) if ".job" not in path.name else []):
                entry = found.setdefault(str(number), {"instruction": row["instruction"], "answers": {}})
                entry["answers"][f"{group}, noise level {path.stem.removeprefix('answers-')}"] = row["output"]
    return list(found.values())


# ---- Markdown ----


def render(result: Mapping[str, Any]) -> str:
    """The results as Markdown; figures are links relative to the folder of the results."""
    data = [f"{name}: {', '.join(files)}" for name, files in result["data"].items()] or ["from the Hub"]
    lines = [
        f"# {result['title']}",
        "",
        f"`{result['table']}`, collected {result['date']} at commit {result['commit']}; run at commit "
        f"{_different(result['runs'], 'commit')} on {_different(result['runs'], 'machine')}; seeds "
        f"{_listed(result['seeds'])}; searches of {result['n_trials']} runs per arm on validation rows.",
        "",
        f"Data: {'; '.join(data)}.",
    ]
    if result["settings"]:
        lines += ["", f"Set in every run: {_settings(result['settings'])}."]
    if result["only_panels"]:
        words = " or ".join(f"`{word}`" for word in result["only_panels"])
        lines += ["", f"Of this table, the parts with {words} in their name alone."]
    for panel in result["panels"]:
        lines += ["", f"## {panel['name']}", "", *(_comparison(panel) if "verdicts" in panel else _searches(panel))]
    for panel, entries in result.get("answers", {}).items():
        lines += ["", f"## Answers, {panel}"]
        for entry in entries:
            lines += ["", f"**{_one_line(entry['instruction'])}**", "", "| | answer |", "|---|---|"]
            lines += [f"| {group} | {_one_line(text)} |" for group, text in entry["answers"].items()]
    if result["left_out"]:
        lines += ["", "## Left out", "", *(f"- {name}: {why}" for name, why in result["left_out"].items())]
    return "\n".join(lines) + "\n"


def _comparison(panel: Mapping[str, Any]) -> list[str]:
    groups, summary = panel["groups"], panel["summary"]
    gammas = next(iter(groups.values()))["gammas"]
    few = sorted({0, len(gammas) // 2, len(gammas) - 1})
    title = f"{panel['summary_title']} over [{gammas[0]:g}, {gammas[-1]:g}]"
    levels = [f"{panel['metric']} at {gammas[index]:g}" for index in few]
    descending = f"steps that descend at {panel['profile_gamma']:g}"
    header = ["", title, "average over the range", *levels, "feasible", descending, "step time"]
    header += ["published"] * any(group["published"] is not None for group in groups.values())
    rows = []
    first = _mean(next(iter(groups.values()))["step_seconds"])
    for name, group in groups.items():
        metric = np.array(group["metric"])  # [seeds, levels]
        row = [name, _spread(group[summary]), _spread(group["average"]), *(_spread(metric[:, index]) for index in few)]
        known = [value for value in group["feasible"] if value is not None]
        seconds = _mean(group["step_seconds"])
        row += [f"{sum(known)} of {len(known)}" if known else "", f"{np.mean(group['descending_share']):.1%}"]
        row.append(f"x{seconds / first:.2f}" if first and seconds else "")
        if len(header) > len(row):
            row.append("" if group["published"] is None else f"{group['published']:g}")
        rows.append(row)
    lines = [
        _row(header),
        "|---" * len(header) + "|",
        *map(_row, rows),
        "",
        *(f"- {text}" for text in panel["verdicts"]),
    ]
    lines += ["", *_searches(panel)]
    return [*lines, "", *(f"![{_words(name)}]({panel['name']}/{name})" for name in panel["figures"])]


def _searches(panel: Mapping[str, Any]) -> list[str]:
    rows = []
    for name, group in panel["groups"].items():
        if found := group["search"]:
            values = [f"{found[key]:.4g}" for key in ("gamma", "value", "clean")]
            verdict = {None: "", True: "yes", False: "no"}[found["feasible"]]
            rows.append(_row([name, _settings(found["settings"]), *values, verdict, str(found["trials"])]))
    header = ["", "settings of the best trial", "judged at", "metric there", "without noise", "feasible", "trials"]
    return [_row(header), "|---" * len(header) + "|", *rows] if rows else ["No search: the recipes' settings."]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" +- {np.std(values, ddof=1):.2g}" if len(values) > 1 else ""
    return f"{np.mean(values):.4g}{spread}"


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else float(np.mean(values))


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))


def _different(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    return _listed(dict.fromkeys(run[name] for run in runs))


def _words(name: str) -> str:
    return Path(name).stem.replace("_", " ")


def _one_line(text: str) -> str:
    """Text in one cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
