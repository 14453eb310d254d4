"""Writes docs/results.md from the numbers that the benchmarks left in recipes/benchmarks/results.

    python docs/results_page.py

The text is docs/results.md.in, in which a line `<!-- table NAME -->` becomes what the runs say.
"""

import contextlib
import importlib.util
import json
import re
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import Path

import numpy as np


DOCS = Path(__file__).parent
BENCHMARKS = DOCS.parent / "recipes" / "benchmarks"
RESULTS = BENCHMARKS / "results"


@cache
def script(name: str):
    """A benchmark as a module."""
    if str(BENCHMARKS) not in sys.path:  # they import one another
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spread(values, digits: int, scale: float = 1.0) -> str:
    """Mean and standard deviation over seeds; of one seed the value."""
    values = scale * np.asarray(values, float)
    mean = f"{values.mean():.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {values.std(ddof=1):.{digits}f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def at_best_rate(runs: list[dict]) -> tuple[float, list[dict]]:
    """An arm's best learning rate by the last layer's loss on the select rows, and its runs there, one per seed."""
    rates = defaultdict(list)
    for run in runs:
        rates[run["settings"]["rate"]].append(run)
    most = max(map(len, rates.values()))  # only the best ones were trained with every seed
    whole = [rate for rate, found in rates.items() if len(found) == most]
    best = min(whole, key=lambda rate: np.mean([run["select"][-1] for run in rates[rate]]))
    return best, rates[best]


def controlled(task: str) -> dict[str, tuple[float, list[dict]]]:
    """Of a task, each arm's best learning rate, and its runs there."""
    arms = defaultdict(list)
    for run in map(json.loads, (RESULTS / "controlled.jsonl").read_text().splitlines()):
        if run["settings"]["task"] == task:
            arms[run["settings"]["arm"]].append(run)
    return {arm: at_best_rate(runs) for arm, runs in arms.items()}


def denoisers(*tasks: str) -> str:
    gammas = list(script("controlled").GAMMAS[tasks[0]])
    level = gammas.index(0.15)
    header = [
        "arm", "learning rate", "f_3 / f_5", "noise 0.15", "no noise", "0.25 to 1, mean", "salt and pepper", "blur",
    ]  # fmt: skip
    on_video = tasks != ("photos",)
    header += ["another video, noise 0.15"] if on_video else []
    rows = []
    for task, arm, (rate, runs) in [
        (each, *item) for each in tasks for item in controlled(each).items()
    ]:
        tests = [run["test"] for run in runs]
        curves = np.array([test["noise"] for test in tests])  # [seeds, levels]
        cells = [curves[:, level], curves[:, 0], curves[:, level + 1 :].mean(1)]
        cells += [[test[name][0] for test in tests] for name in ("salt and pepper", "blur")]
        cells += [[run["another video"]["noise"][level] for run in runs]] if on_video else []
        exits = [test["losses"][2] / test["losses"][4] for test in tests]
        name = arm if len(tasks) == 1 else f"{MODELS[task]}: {arm}"
        rows.append([name, f"{rate:g}", spread(exits, 2), *(spread(cell, 2) for cell in cells)])
    return markdown(header, rows)


def texts() -> str:
    header = [
        "arm", "learning rate", "seeds", "f_6", "f_3", "accuracy", "at layer 3", "noise 1", "noise 2", "typos",
        "the other data",
    ]  # fmt: skip
    rows = []
    others = {"imdb": ("IMDb", "rt-polarity"), "rt_polarity": ("rt-polarity", "imdb")}
    for task, arm, (rate, runs) in [
        (each, *item) for each in others for item in controlled(each).items()
    ]:
        name, other = others[task]
        tests = [run["test"] for run in runs]
        losses = [spread([test["losses"][layer] for test in tests], 3) for layer in (-1, 2)]
        cells = [[test["accuracy"][layer] for test in tests] for layer in (-1, 2)]
        cells += [[test["noise"][index] for test in tests] for index in (2, 4)]
        cells += [
            [test["typos"][0] for test in tests],
            [run[other]["accuracy"][-1] for run in runs],
        ]
        shares = [spread(cell, 1, 100) for cell in cells]
        rows.append([f"{name}: {arm}", f"{rate:g}", f"{len(runs)}", *losses, *shares])
    return markdown(header, rows)


def finished_runs() -> str:
    return str(RESULTS / "runs_to_specification.jsonl")


def from_finished(benchmark, ask, task: str, arm: str, seeds, budget: int = 8):
    """What `ask` finds out of the options of a benchmark of specifications, without a further run."""
    benchmark.train = None
    words = ["--tasks", task, "--arms", arm, "--seeds", *map(str, seeds), "--budget", str(budget)]
    for name in ("minilm", "rt_polarity", "imdb", "stories260k", "alpaca"):  # which are not needed
        words += [f"--{name}", "-"]
    with contextlib.redirect_stdout(None):  # it says what it finds
        return ask(benchmark.parse([*words, "--output", finished_runs()]))


def specification() -> str:
    """Of every task and arm what each seed took, from the finished runs alone."""
    benchmark, rows = script("runs_to_specification"), []
    for task, (seeds, arms, budget) in SPECIFICATIONS.items():
        kind, number = task.split("_")
        for arm in arms:
            searches = from_finished(
                benchmark,
                lambda options: list(benchmark.searches(options)),
                task,
                arm,
                seeds,
                budget,
            )
            found = [runs for *_, runs in searches]
            met = list(map(benchmark.found_by, found))
            exits = benchmark.EXITS[kind][number]

            def excess(run, exits=exits):
                return run["broke"], max(
                    run["certify"][k - 1] / run["certify"][-1] / (1 + eps)
                    for k, eps in exits.items()
                )

            shown = [run for run in met if run] or [min(runs, key=excess) for runs in found]
            ratios = [
                spread([r["certify"][k - 1] / r["certify"][-1] for r in shown], 3) for k in exits
            ]
            asked = ", ".join(f"f_{k} <= {1 + eps:g} f_L" for k, eps in exits.items())
            counts = ", ".join(
                f"{len(runs)}" if done else f"not in {len(runs)}" for runs, done in zip(found, met)
            )
            first = [
                run["met"] for runs in found for run in runs[: len(benchmark.LEARNING_RATES[kind])]
            ]
            at_once = f"{sum(first)} of {len(first)}"
            last = spread([run["certify"][-1] for run in shown], 3)
            metric = spread([run["values"][-1] for run in shown], 4)
            seconds = spread([sum(run["seconds"] for run in runs) for runs in found], 0)
            rows.append(
                [
                    kind,
                    asked,
                    arm.replace("_", " "),
                    counts,
                    at_once,
                    last,
                    ", ".join(ratios),
                    metric,
                    seconds,
                ]
            )
    header = [
        "task", "asked", "arm", "runs of each seed", "first runs that met it", "f_L", "f_k / f_L",
        "metric at the last", "seconds",
    ]  # fmt: skip
    return markdown(header, rows)


def holds() -> str:
    """How often the settings that a search found meet the specification with another seed."""
    benchmark = script("runs_to_specification")
    tables = [
        from_finished(benchmark, benchmark.holds, task, "ours", seeds)
        for task, seeds in HOLDS.items()
    ]
    cells = [
        [cell.strip() for cell in table.splitlines()[-1].strip("|").split("|")] for table in tables
    ]
    return (
        "; ".join(
            f"{task}: {met} searches met it, {pairs} pairs hold" for task, _, met, pairs in cells
        )
        + "."
    )


def deep_classifier() -> str:
    """Of SmolLM2's 30 layers those that show the course, each cell with one value per seed."""
    arms, layers, rows = controlled("smollm2"), (5, 10, 15, 17, 20, 25, 29, 30), []
    for name, what in (("losses", "loss"), ("accuracy", "accuracy")):
        for arm, (rate, runs) in arms.items():
            cells = [
                " / ".join(f"{run['test'][name][layer - 1]:.3f}" for run in runs)
                for layer in layers
            ]
            rows.append([f"{arm}, {what}", f"{rate:g}", *cells])
    return markdown(["layer", "learning rate", *map(str, layers)], rows)


def defaults() -> str:
    benchmark = script("runs_to_specification")
    runs = [
        run
        for run in benchmark.Runs(finished_runs()).all()
        if run["settings"]["task"].endswith("_defaults")
    ]
    usual, rows = {"task", "exits", "rate", "seed", "steps", "objective"}, []
    for kind in benchmark.DEFAULT_RATES:
        arms = defaultdict(list)
        for run in (run for run in runs if run["settings"]["task"] == f"{kind}_defaults"):
            others = {name: value for name, value in run["settings"].items() if name not in usual}
            changed = "".join(f", `{name}` {value}" for name, value in others.items())
            arms["plain" if run["settings"]["objective"] == "erm" else f"defaults{changed}"].append(
                run
            )
        for name, own in sorted(arms.items(), key=lambda pair: pair[0] != "plain"):
            rate, found = at_best_rate(own)
            middle = (len(found[0]["certify"]) + 1) // 2
            met = f"{sum(run['met'] for run in found)} of {len(found)}"
            share = spread([run["share"] for run in found], 2)
            cells = [spread([run[key][layer - 1] for run in found], 3) for key in ("certify", "values")
                     for layer in (middle, len(found[0]["certify"]))]  # fmt: skip
            rows.append([kind, name, f"{rate:g}", met, share, *cells])
    header = [
        "task",
        "arm",
        "learning rate",
        "met",
        "share",
        "f_3",
        "f_L",
        "metric at layer 3",
        "at the last",
    ]
    return markdown(header, rows)


def steps() -> str:
    rows = []
    for name, (file, arm, plain) in STEPS.items():
        found = json.loads((RESULTS / file).read_text())
        if "runs" in found:  # several steps in each round
            seconds, _ = script("lm_step").rounds_of(found["runs"])
        else:
            seconds = found["seconds"]
        ratios = [one / other for one, other in zip(seconds[arm], seconds[plain])]
        low, middle, high = script("harness").quartiles(ratios)
        shown = (
            f"{low:.2f} to {high:.2f}"
            if len(ratios) > 3
            else ", ".join(f"{ratio:.2f}" for ratio in ratios)
        )
        rows.append([name, f"{middle:.2f}", f"{len(ratios)}: {shown}"])
    return markdown(
        [
            "what",
            "time, plain training or evaluation = 1",
            "rounds: quartiles of ratios (of three: each)",
        ],
        rows,
    )


MODELS = {"dust": "DUST", "vit": "ViT"}
SEARCHED = ("ours", "fixed", "quadratic", "hinge", "deep_supervision")
SPECIFICATIONS = {  # seeds, arms and most runs of each task
    "denoiser_easy": ((3, 4, 5), SEARCHED, 8),
    "denoiser_two": ((3, 4, 5), SEARCHED, 8),
    "denoiser_one": ((3, 4, 5), SEARCHED, 8),
    "minilm_one": ((4, 5, 6), SEARCHED, 8),
    "minilm_two": ((4, 5, 6), ("ours", "fixed", "quadratic"), 8),
    "imdb_one": ((4, 5, 6), ("ours", "fixed"), 5),
    "lm_one": ((4, 5, 6), ("ours", "fixed"), 5),
}
HOLDS = dict.fromkeys(("denoiser_easy", "denoiser_two", "denoiser_one", "minilm_one"), range(3, 8))
STEPS = {
    "step of a classifier": ("classifier_step.json", "descent", "stock Trainer"),
    "step of a language model, default": ("lm_step.json", "subsampled", "erm"),
    "step of a language model, all tokens": ("lm_step.json", "exact", "erm"),
    "step of a denoiser": ("denoiser_step.json", "descent+noise", "erm+noise"),
    "evaluation of all layers, language model": (
        "evaluation.json",
        "all layers",
        "plain evaluation",
    ),
}
TABLES = {
    "runs to specification": specification, "holds": holds, "defaults": defaults, "steps": steps,
    "photos": partial(denoisers, "photos"), "video": partial(denoisers, "video"), "texts": texts,
    "other denoisers": partial(denoisers, "dust", "vit"), "deep classifier": deep_classifier,
}  # fmt: skip


def page() -> str:
    text = (DOCS / "results.md.in").read_text()
    return re.sub(r"<!-- table (.+?) -->", lambda match: TABLES[match[1]](), text)


if __name__ == "__main__":
    (DOCS / "results.md").write_text(page())
