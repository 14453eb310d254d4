"""Fills the tables of the documents from the numbers in recipes/benchmarks/results.

    python docs/results_page.py

A document has `<!-- table NAME -->` and `<!-- end table -->` where a table stands. This script replaces what is
between the two lines by what `TABLES[NAME]` makes of the results. One number stands in a cell.
"""

import contextlib
import importlib.util
import itertools
import json
import re
import sys
from collections import defaultdict
from functools import cache, partial
from pathlib import Path

import numpy as np


ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "recipes" / "benchmarks"
RESULTS = BENCHMARKS / "results"
MARKED = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end table -->)", re.DOTALL)


# Reading the results


def lines_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


@cache
def recorded(name: str) -> dict:
    """A table of single measurements, as they were noted with their command and commit."""
    (table,) = [table for table in lines_of("recorded.jsonl") if table["name"] == name]
    return table


def rows_of(name: str) -> list[dict]:
    table = recorded(name)
    return [dict(zip(table["columns"], row)) for row in table["rows"]]


@cache
def script(name: str):
    """A benchmark as a module."""
    if str(BENCHMARKS) not in sys.path:  # they import one another
        sys.path.append(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at_best_rate(runs: list[dict]) -> tuple[float, list[dict]]:
    """An arm's best learning rate by the last layer's loss on the select rows, and its runs there."""
    rates = defaultdict(list)
    for run in runs:
        rates[run["settings"]["rate"]].append(run)
    most = max(len(found) for found in rates.values())  # only the best ones have every seed
    complete = [rate for rate, found in rates.items() if len(found) == most]
    best = min(complete, key=lambda rate: np.mean([run["select"][-1] for run in rates[rate]]))
    return best, rates[best]


@cache
def controlled(task: str) -> dict[str, tuple[float, list[dict]]]:
    """Of a task, each arm's best learning rate, and its runs there; arms of a kind follow one another."""
    arms = defaultdict(list)
    for run in lines_of("controlled.jsonl"):
        if run["settings"]["task"] == task:
            arms[run["settings"]["arm"]].append(run)
    return {arm: at_best_rate(arms[arm]) for arm in sorted(arms, key=place_of_arm)}


def place_of_arm(arm: str) -> tuple[int, str]:
    first, _, change = arm.partition(",")
    return ARMS_IN_ORDER.index(first), change


ARMS_IN_ORDER = (
    "plain", "plain training", "descent", "paper", "alpha 0.3", "layer 2 hard", "layer 3 hard",
    "exits at 10 and 15", "hinge", "deep supervision", "layerskip", "cut first",
    "cut to 15 layers first", "cut to 10 layers first",
)  # fmt: skip


# Writing tables


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def mean(values, digits: int, scale: float = 1.0) -> str:
    return f"{scale * np.mean(values):.{digits}f}"


def deviation(values, digits: int) -> str:
    """The standard deviation over the seeds; nothing for one seed."""
    return f"{np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""


def means_with_spread(header, names, cells, digits, scale=1.0) -> str:
    """A row of means for each name, and a last row with the largest standard deviation of each column.

    `cells` has, for each name, one list of values over the seeds for each column of numbers.
    """
    rows = [
        [*name, *(mean(cell, digits, scale) for cell in columns)]
        for name, columns in zip(names, cells)
    ]
    spread = [
        f"{scale * max(np.std(cell, ddof=1) for cell in column):.{digits}f}"
        for column in zip(*cells)
    ]
    blank = [""] * (len(names[0]) - 1)
    return markdown(header, [*rows, ["*largest standard deviation*", *blank, *spread]])


def shown(value, digits: int | None = None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:g}" if digits is None else f"{value:.{digits}f}"


def table_of(name: str, columns: dict[str, str], digits=None, where=None) -> str:
    """A recorded table's `columns` (theirs: ours), of the rows for which `where` holds."""
    rows = [row for row in rows_of(name) if where is None or where(row)]
    digits = digits or {}
    cells = [[shown(row[column], digits.get(column)) for column in columns] for row in rows]
    return markdown(list(columns.values()), cells)


# Denoisers and texts, each arm at its own best learning rate


def denoiser_columns(
    runs: list[dict], plain: list[dict], level: int, on_video: bool
) -> list[list[float]]:
    tests = [run["test"] for run in runs]
    curves = np.array([test["noise"] for test in tests])  # [seeds, levels]
    columns = [
        exit_ratios(tests, plain),
        curves[:, level],
        curves[:, 0],
        curves[:, level + 1 :].mean(1),
        [test["salt and pepper"][0] for test in tests],
        [test["blur"][0] for test in tests],
    ]
    if on_video:
        columns.append([run["another video"]["noise"][level] for run in runs])
    return columns


def exit_ratios(tests: list[dict], plain: list[dict]) -> list[float]:
    """f_3 / f_5; of a model that was cut to 3 layers first with plain training's f_5."""
    last_of_plain = np.mean([run["test"]["losses"][4] for run in plain])
    ratios = []
    for test in tests:
        last = last_of_plain
        if len(test["losses"]) == 5:
            last = test["losses"][4]
        ratios.append(test["losses"][2] / last)
    return ratios


SAME_AS_PLAIN = ("plain, early stopping",)  # the page says so


def name_of_arm(arm: str) -> str:
    """An arm of `controlled.py` as the pages call it; what follows its first comma says how it is changed."""
    first, comma, change = arm.partition(",")
    names = {"descent": "default", "paper": "paper's form"}
    return names.get(first, first) + comma + change


def denoisers(task: str) -> str:
    on_video = task != "photos"
    level = list(script("controlled").GAMMAS[task]).index(0.15)
    header = ["arm", "f_3 / f_5", "noise 0.15", "no noise", "more noise", "salt and pepper", "blur"]
    if on_video:
        header.append("another video")
    arms = {arm: found for arm, found in controlled(task).items() if arm not in SAME_AS_PLAIN}
    names = [[name_of_arm(arm)] for arm in arms]
    _, plain = arms["plain"]
    cells = [denoiser_columns(runs, plain, level, on_video) for _, runs in arms.values()]
    if not on_video:  # its models that are cut first are compared at layer 3
        header.insert(1, "f_3")
        for columns, (_, runs) in zip(cells, arms.values()):
            columns.insert(0, [run["test"]["losses"][2] for run in runs])
    return means_with_spread(header, names, cells, 2)


def denoiser_summary() -> str:
    level = list(script("controlled").GAMMAS["photos"]).index(0.15)
    rows = []
    for arm, name in {
        "plain": "plain training",
        "descent": "constrained, default",
        "alpha 0.3, detach": "constrained, every layer 30 % lower than the one before",
        "deep supervision": "deep supervision",
    }.items():
        _, runs = controlled("photos")[arm]
        _, plain = controlled("photos")["plain"]
        exit_cost, at_training_noise, clean, *_ = denoiser_columns(runs, plain, level, False)
        rows.append([name, mean(exit_cost, 2), mean(at_training_noise, 2), mean(clean, 2)])
    return markdown(
        ["training", "loss at layer 3, last layer = 1", "error at the training noise", "error without noise"], rows
    )  # fmt: skip


def texts() -> str:
    header = [
        "data", "arm", "accuracy", "at layer 3", "noise 1", "noise 2", "typos", "other data",
    ]  # fmt: skip
    names, cells = [], []
    for task, data, other in (("imdb", "IMDb", "rt_polarity"), ("rt_polarity", "rt-polarity", "imdb")):  # fmt: skip
        other = {"rt_polarity": "rt-polarity"}.get(other, other)
        for arm, (_, runs) in controlled(task).items():
            tests = [run["test"] for run in runs]
            names.append([data, name_of_arm(arm)])
            cells.append(
                [
                    [test["accuracy"][-1] for test in tests],
                    [test["accuracy"][2] for test in tests],
                    [test["noise"][2] for test in tests],
                    [test["noise"][4] for test in tests],
                    [test["typos"][0] for test in tests],
                    [run[other]["accuracy"][-1] for run in runs],
                ]
            )
    return means_with_spread(header, names, cells, 1, scale=100)


def text_losses() -> str:
    names, cells = [], []
    for task, data in (("imdb", "IMDb"), ("rt_polarity", "rt-polarity")):
        for arm, (_, runs) in controlled(task).items():
            names.append([data, name_of_arm(arm)])
            losses = [[run["test"]["losses"][layer] for run in runs] for layer in (2, -1)]
            cells.append(losses)
    return means_with_spread(["data", "arm", "f_3", "f_6"], names, cells, 3)


def deep_classifier(what: str, layers=(5, 10, 15, 17, 20, 25, 30), shows_rivals=True) -> str:
    """Of SmolLM2's 30 layers those that show the course, the mean of two seeds; of a model that was cut first those
    that it has. Other ways to exits have one run each."""
    courses = {}
    for arm, (_, runs) in controlled("smollm2").items():
        courses[arm] = np.mean([run["test"][what] for run in runs], axis=0)
    if shows_rivals:
        values = {"losses": "certify", "accuracy": "values"}[what]
        for run in lines_of("runs_to_specification.jsonl"):
            if run["settings"]["task"] == "smollm2_two":
                arm = "sorted" if run["settings"].get("in_turn") else run["settings"]["objective"]
                courses[ARMS[arm]] = run[values]

    names = {"descent": "constrained, default"}
    rows = []
    for arm, course in courses.items():
        cells = [f"{course[layer - 1]:.3f}" if layer <= len(course) else "" for layer in layers]
        rows.append([names.get(arm, arm), *cells])
    return markdown(["training", *(f"layer {layer}" for layer in layers)], rows)


# Runs to a specification


def finished_runs() -> str:
    return str(RESULTS / "runs_to_specification.jsonl")


def from_finished(benchmark, ask, task: str, arm: str, seeds, budget: int = 8, **settings):
    """What `ask` finds out of the options of a benchmark of specifications, without a further run."""
    benchmark.train = None
    words = ["--tasks", task, "--arms", arm, "--seeds", *map(str, seeds), "--budget", str(budget)]
    for name in ("minilm", "rt_polarity", "imdb", "stories260k", "alpaca"):  # which are not needed
        words += [f"--{name}", "-"]
    words += ["--settings", json.dumps(settings)]
    with contextlib.redirect_stdout(None):  # it says what it finds
        return ask(benchmark.parse([*words, "--output", finished_runs()]))


@cache
def searches(task: str, arm: str, seeds: tuple[int, ...] = (), limit: str = "") -> list[list[dict]]:
    """The runs that the search of each seed took."""
    if arm == "ours_one_more":
        return one_run_more(task)
    usual_seeds, _, budget = SPECIFICATIONS[task]
    arm, changed = CHANGED_ARMS.get(arm, (arm, {}))
    benchmark = script("runs_to_specification")
    found = from_finished(
        benchmark,
        lambda options: list(benchmark.searches(options)),
        task,
        arm,
        seeds or usual_seeds,
        budget,
        **LIMITS[limit or limit_of(task)],
        **changed,
    )
    return [runs for *_, runs in found]


def one_run_more(task: str) -> list[list[dict]]:
    """The searches of constraints that met the exits at once, each with the run that would have come next.

    It has the lower learning rate, and twice the dual rate and margin.
    """
    benchmark = script("runs_to_specification")
    seeds, _, budget = SPECIFICATIONS[task]
    lower_rate = min(benchmark.task_of(task).rates)

    def ask(options) -> list[list[dict]]:
        found = []
        for *_, seed, runs in benchmark.searches(options):
            run = benchmark.runner(options, task, "ours", seed)
            found.append([*runs, run((2.0,), lower_rate)])
        return found

    return from_finished(benchmark, ask, task, "ours", seeds, budget)


def limit_of(task: str) -> str:
    """The limit on the rise of the last layer's loss with which a task was measured."""
    return "2 %" if task.startswith("denoiser") else "none"


def asked_of(task: str) -> str:
    exits = script("runs_to_specification").exits_of(task)
    return ", ".join(f"f_{layer} <= {1 + excess:g} f_L" for layer, excess in exits.items())


def excess_of(run: dict, exits: dict) -> tuple:
    """By how much a run misses its exits; runs that broke down come last."""
    ratios = [run["certify"][k - 1] / run["certify"][-1] / (1 + eps) for k, eps in exits.items()]
    return run["broke"], max(ratios)


def against_plain(task: str, runs: list[dict]) -> str:
    """By how much f_L of the runs is above that of plain training at its best learning rate."""
    last = [run["certify"][-1] for run in runs]
    plain = last_losses_of_plain(task, [run["settings"]["seed"] for run in runs])
    return f"{100 * (np.mean(last) / np.mean(plain) - 1):+.1f} %"


def last_losses_of_plain(task: str, seeds: list[int]) -> list[float]:
    """f_L of plain training with these seeds; with others where it did not run with all seeds of the searches."""
    kind = task.split("_")[0]
    seeds_of_searches, _, _ = SPECIFICATIONS[task]

    whole = {}  # by seed: the whole model that stands beside those that were cut first
    for run in lines_of("runs_to_specification.jsonl"):
        settings = run["settings"]
        if settings["task"].startswith(f"{kind}_") and "cut_first" in settings:
            whole[settings["seed"]] = run["certify"][-1]
    if whole.keys() >= set(seeds_of_searches):
        return [whole[seed] for seed in seeds]

    _, runs = at_best_rate(defaults_runs(kind)["plain"])
    return [run["certify"][-1] for run in runs]


def specification() -> str:
    """Of every task and arm what its searches took, and what the runs that met it (or came nearest) reached."""
    benchmark, rows = script("runs_to_specification"), []
    for task, (_, arms, _) in SPECIFICATIONS.items():
        kind = task.split("_")[0]
        exits = benchmark.exits_of(task)
        case = [MODELS[kind], asked_of(task)]
        for arm in arms:
            found = searches(task, arm)
            met = [benchmark.found_by(runs) for runs in found]
            nearest = [min(runs, key=lambda run: excess_of(run, exits)) for runs in found]
            shown_runs = [run for run in met if run] or nearest
            ratios = [
                mean([run["certify"][k - 1] / run["certify"][-1] for run in shown_runs], 3)
                for k in exits
            ]
            last = [run["certify"][-1] for run in shown_runs]
            rows.append(
                [
                    *case,
                    ARMS[arm],
                    f"{sum(map(bool, met))} of {len(met)}",
                    str(sum(map(len, found))),
                    mean(last, 3),
                    deviation(last, 3),
                    against_plain(task, shown_runs),
                    *[*ratios, ""][:2],
                ]
            )
            case = ["", ""]  # in the first of its rows alone
    header = [
        "model", "asked", "training", "seeds that met it", "runs in all", "f_L", "spread",
        "f_L against plain", "first exit / f_L", "second exit / f_L",
    ]  # fmt: skip
    return markdown(header, rows)


def rivals() -> str:
    """Exits of one model beside models that are cut first: what a search costs, and the losses that it ends with."""
    benchmark = script("runs_to_specification")
    rows = []
    for task, arms in RIVALS.items():
        kind = task.split("_")[0]
        exits = benchmark.exits_of(task)
        case = [MODELS[kind], asked_of(task)]
        for arm in arms:
            found = searches(task, arm)
            met = [run for run in map(benchmark.found_by, found) if run]
            shown_runs = met
            if not met:
                shown_runs = [min(runs, key=lambda run: excess_of(run, exits)) for runs in found]

            losses = [mean([run["certify"][k - 1] for run in shown_runs], 3) for k in exits]
            losses += [""] * (MOST_EXITS - len(losses))
            compute = [compute_of(task, arm, runs) for runs in found]
            models = 1
            if arm in benchmark.CUT_FIRST:
                models += len(exits)
            rows.append(
                [
                    *case,
                    ARMS[arm],
                    f"{len(met)} of {len(found)}",
                    str(models),
                    mean(compute, 1),
                    *losses,
                    mean([run["certify"][-1] for run in shown_runs], 3),
                ]
            )
            case = ["", ""]  # in the first of its rows alone
    header = ["model", "asked", "training", "seeds that met it", "models", "compute"]
    return markdown([*header, "first exit", "second exit", "f_L"], rows)


def compute_of(task: str, arm: str, runs: list[dict]) -> float:
    """What a search computed in its steps, as a number of trainings of the whole model."""
    benchmark = script("runs_to_specification")
    if arm not in benchmark.CUT_FIRST:
        return len(runs)

    depth = benchmark.task_of(task).num_layers
    shares = [layer / depth for layer in benchmark.exits_of(task)]
    if benchmark.CUT_FIRST[arm] == "same compute":
        shares = [1.0] * len(shares)
    return len(benchmark.task_of(task).rates) * (1 + sum(shares))


def exits() -> str:
    """The searches of constraints and of fixed weights beside each other."""
    benchmark, rows = script("runs_to_specification"), []
    for task in SPECIFICATIONS:
        cells = []
        for arm in ("ours", "fixed"):
            found = searches(task, arm)
            met = [run for run in map(benchmark.found_by, found) if run]
            cells += [f"{len(met)} of {len(found)}", str(sum(map(len, found)))]
            if arm == "ours":
                cells.append(against_plain(task, met))
        rows.append([MODELS[task.split("_")[0]], asked_of(task), *cells])
    header = [
        "model", "asked", "constrained: seeds met", "runs", "price", "fixed weights: seeds met", "runs",
    ]  # fmt: skip
    return markdown(header, rows)


def holds() -> str:
    """How often the settings that a search found meet the specification with another seed."""
    benchmark, rows = script("runs_to_specification"), []
    for task, limits in HOLDS.items():
        pairs = dict.fromkeys(LIMITS, "")
        for limit in limits:
            settings = LIMITS[limit]
            table = from_finished(
                benchmark, benchmark.holds, task, "ours", SEEDS_TO_HOLD, **settings
            )
            *_, last = table.splitlines()
            _, _, met, pairs[limit] = [cell.strip() for cell in last.strip("|").split("|")]
        rows.append([MODELS[task.split("_")[0]], asked_of(task), met, *pairs.values()])
    header = ["model", "asked", "searches that met it", "pairs that hold", "without limit"]
    return markdown(header, rows)


def defaults_runs(kind: str) -> dict[str, list[dict]]:
    """The runs of a task by arm: plain training, the defaults, and the defaults with other settings."""
    usual = {"task", "exits", "rate", "seed", "steps", "objective"}
    arms = defaultdict(list)
    for run in lines_of("runs_to_specification.jsonl"):
        settings = run["settings"]
        if settings["task"] != f"{kind}_defaults":
            continue
        changed = []
        for name, value in settings.items():
            if name == "max_last_layer_rise" and value is None:
                changed.append("no limit")
            elif name == "dual_holdout":
                changed.append(f"{100 * value:g} % held out")
            elif name not in usual:
                changed.append(f"`{name}` {value}")
        name = "plain" if settings["objective"] == "erm" else ", ".join(["defaults", *changed])
        arms[name].append(run)
    return dict(sorted(arms.items(), key=lambda pair: pair[0] != "plain"))


def defaults() -> str:
    rows = []
    for kind in MODELS:
        model = MODELS[kind]
        for name, own in defaults_runs(kind).items():
            _, found = at_best_rate(own)
            last = len(found[0]["certify"])
            middle = (last + 1) // 2
            rows.append(
                [
                    model,
                    name,
                    f"{sum(run['met'] for run in found)} of {len(found)}",
                    mean([run["share"] for run in found], 2),
                    mean([run["certify"][middle - 1] for run in found], 3),
                    mean([run["certify"][-1] for run in found], 3),
                    mean([run["values"][middle - 1] for run in found], 3),
                    mean([run["values"][-1] for run in found], 3),
                ]
            )
            model = ""  # in the first of its rows alone
    header = [
        "model", "training", "met", "descent share", "f_3", "f_L", "metric at layer 3",
        "metric at the last layer",
    ]  # fmt: skip
    return markdown(header, rows)


def price() -> str:
    """What the defaults change at the last layer and at the middle one."""
    rows = []
    for kind in MODELS:
        arms = defaults_runs(kind)
        _, plain = at_best_rate(arms["plain"])
        _, ours = at_best_rate(arms[DEFAULTS_OF[limit_of(kind)]])
        losses = [np.mean([run["certify"][-1] for run in runs]) for runs in (plain, ours)]
        rise = 100 * (losses[1] / losses[0] - 1)
        values = [
            mean([run["values"][layer] for run in runs], 3)
            for layer in (2, -1)
            for runs in (plain, ours)
        ]
        rows.append([f"{MODELS[kind]} ({METRICS[kind]})", f"{rise:+.1f} %", *values])
    header = [
        "model (metric)", "price", "layer 3, plain", "layer 3, constrained",
        "last layer, plain", "last layer, constrained",
    ]  # fmt: skip
    return markdown(header, rows)


# Time


def ratios_of(file: str, arm: str, plain: str) -> list[float]:
    found = json.loads((RESULTS / file).read_text())
    if "runs" in found:  # several steps in each round
        seconds, _ = script("lm_step").rounds_of(found["runs"])
    else:
        seconds = found["seconds"]
    return [one / other for one, other in zip(seconds[arm], seconds[plain])]


def steps() -> str:
    rows = []
    for name, (file, arm, plain) in STEPS.items():
        ratios = ratios_of(file, arm, plain)
        quartiles = script("harness").quartiles(ratios)
        low, middle, high = (f"{value:.2f}" for value in quartiles)
        rows.append([name, middle, low, high, str(len(ratios))])
    return markdown(["what", "time, plain = 1", "lower quartile", "upper quartile", "rounds"], rows)


def time() -> str:
    rows = [
        [name, mean([script("harness").quartiles(ratios_of(*of))[1]], 2)]
        for name, of in STEPS.items()
    ]
    rows.append([DEEP_EVALUATION, shown(last_evaluations()[DEEP_CASE]["ratio"], 2)])
    for row in rows_of("gpu steps"):
        if row["step"].startswith("ours") and row["case"] in GPU_CASES:
            name = f"{GPU_CASES[row['case']]}, {row['step'].removeprefix('ours').strip(', ')}"
            rows.append([name.strip(", "), shown(row["ratio, both rounds"], 2)])
    return markdown(["what", "time, plain = 1"], rows)


def smollm2_exits(rates: str) -> str:
    """Two seeds' mean of each arm, and each rate, without noise; runs of older code are left out."""
    rows = defaultdict(list)
    for row in rows_of("SmolLM2, exits"):
        old = row["arm"] == "LayerSkip" and row["commit"] == "ccc0a0d"
        if row["dual rate"] or (row["trained weights"] == "adapters") != (rates == "adapters") or old:  # fmt: skip
            continue
        rows[row["arm"], row["learning rate"]].append(row)
    columns = ["f_10", "f_15", "f_25", "f_30", "token accuracy at 15", "token accuracy at 30"]
    digits = [2, 2, 2, 2, 2, 2]
    cells = []
    for (arm, rate), runs in sorted(rows.items(), key=lambda item: (ORDER.index(item[0][0]), item[0][1])):  # fmt: skip
        numbers = [mean([run[c] for run in runs], d) for c, d in zip(columns, digits)]
        certified = [run["certified f_15 / f_30"] for run in runs]
        least = mean(certified, 2) if all(certified) else "none"
        cells.append([of_language_model(arm), f"{rate:g}", str(len(runs)), *numbers, least])
    header = ["training", "learning rate", "seeds", *columns, "least certified f_15 / f_30"]
    return markdown(header, cells)


def of_language_model(arm: str) -> str:
    """What an arm of SmolLM2 as a language model trains: its recipes name the layers."""
    names = {
        "descent": "exits at 10 and 15",
        "deep supervision": "deep supervision of layers 10, 15 and 30",
    }
    return names.get(arm, arm)


def smollm2_noise() -> str:
    rows = defaultdict(list)
    for row in rows_of("SmolLM2, noise"):
        rows[row["noise of training"], row["arm"]].append(row)
    levels = ["0", "0.25", "0.5", "0.75", "1", "1.5"]
    cells = []
    for (trained, arm), runs in sorted(rows.items(), key=lambda item: item[0][0]):
        accuracies = [mean([run[level] for run in runs], 3) for level in levels]
        cells.append([of_language_model(arm), f"{trained:g}", str(len(runs)), *accuracies])
    return markdown(["training", "its noise", "seeds", *(f"noise {level}" for level in levels)], cells)  # fmt: skip


def gpu_steps() -> str:
    """A case stands in the first of its rows alone."""
    table = table_of(
        "gpu steps",
        {
            "case": "case",
            "step": "step",
            "s a step": "s a step",
            "ratio, both rounds": "time, plain = 1",
            "peak memory, stock Trainer = 1": "peak memory, plain = 1",
            "start in steps": "extra time before the first step, in steps",
        },
        digits={"ratio, both rounds": 2, "peak memory, stock Trainer = 1": 2},
    )
    for case in {row["case"] for row in rows_of("gpu steps")}:
        first, *others = table.split(f"| {case} |")
        table = f"{first}| {case} |" + "| |".join(others)
    return table


def launches() -> str:
    header = ["model", "plain step", "our step", "ratio", "our aim"]
    header += ["plain batch of evaluation", "ours", "ratio"]
    rows = []
    for case in json.loads((RESULTS / "launches.json").read_text())["cases"].values():
        cells = [case["title"]]
        for what in ("step", "evaluation"):
            plain, ours = case[what]["plain"], case[what]["ours"]
            cells += [f"{plain:,}", f"{ours:,}", f"{ours / plain:.2f}"]
        asked = "" if case["asked"] is None else f"{case['asked']:.2f}"
        cells.insert(4, asked)
        rows.append(cells)
    return markdown(header, rows)


def launch_times() -> str:
    cases = json.loads((RESULTS / "launches.json").read_text())["cases"].values()
    header = ["model", "time, plain = 1", "lower quartile", "upper quartile", "our aim"]
    rows = []
    for case in cases:
        asked = ""
        if case["asked_time"] is not None:
            asked = f"{case['asked_time']:.2f}"
        rows.append([case["title"], *(f"{value:.2f}" for value in _middle_first(case)), asked])
    return markdown(header, rows)


def launches_beyond() -> str:
    """What a step of BERT has beyond one of plain training."""
    beyond = json.loads((RESULTS / "launches.json").read_text())["cases"]["bert"]["beyond"]
    rows = [
        [place, *(str(beyond[what].get(place, "")) for what in ("kernels", "calls"))]
        for place in beyond["kernels"] | beyond["calls"]
    ]
    return markdown(["where", "kernels", "calls"], rows)


def _middle_first(case: dict) -> tuple[float, float, float]:
    low, middle, high = case["time"]
    return middle, low, high


def step_machines() -> str:
    """The least and the greatest ratio of a step over the machines and days it was measured on."""
    cases = ("classifier", "language model, default", "language model, all tokens", "denoiser")
    rows = []
    for case in cases:
        ratios = [
            row["ratio to plain training"] for row in rows_of("step times") if row["case"] == case
        ]
        numbers = (min(ratios), np.median(ratios), max(ratios))
        rows.append([case, *(f"{number:.2f}" for number in numbers), str(len(ratios))])
    return markdown(["step", "least", "median", "greatest", "measurements"], rows)


def classifier_memory() -> str:
    """The peak memory of a classifier's step, whose layers are read by replay."""
    runs = json.loads((RESULTS / "classifier_memory.json").read_text())["runs"]
    plain, ours = (np.median([run["peak"] for run in runs[name]]) for name in ("erm", "exact"))
    cells = [f"{plain / 2**20:,.0f}", f"{ours / 2**20:,.0f}", f"{ours / plain:.3f}"]
    return markdown(["plain, MB", "ours, MB", "ratio"], [cells])


def operators() -> str:
    columns = {
        "step on all tokens": "step on all tokens",
        "s of processor time": "s a step",
        "stock Trainer = 1": "time, plain = 1",
        "peak memory, stock Trainer = 1": "peak memory, plain = 1",
    }
    return table_of("language model operators", columns)


def evaluations() -> str:
    last = last_evaluations()
    columns = {
        "case": "evaluation",
        "ratio": "time, plain evaluation = 1",
        "lower quartile": "lower quartile",
        "upper quartile": "upper quartile",
    }
    return table_of("evaluation times", columns, where=lambda row: row == last[row["case"]])


def last_evaluations() -> dict[str, dict]:
    """The last measurement of each case."""
    return {row["case"]: row for row in rows_of("evaluation times")}


def compiled() -> str:
    columns = {
        "step": "step",
        "BERT, stock Trainer = 1": "BERT, plain = 1",
        "Llama, stock Trainer = 1": "Llama, plain = 1",
    }
    return table_of("compiled layers", columns, digits=dict.fromkeys(list(columns)[1:], 2))


def token_fraction() -> str:
    table = recorded("token fraction")
    return table_of("token fraction", {column: column for column in table["columns"]})


def passes() -> str:
    columns = ("noise", "input", "1 pass", "2 passes", "3 passes", "chosen", "mixed")
    return table_of("passes", {column: column for column in columns}, dict.fromkeys(columns, 2))


def false_positives() -> str:
    columns = ("seeds", "pairing", "found", "of", "share", "95 % upper bound")
    return table_of("false positives", {column: column for column in columns})


def dual_traffic() -> str:
    columns = ("model", "dual side, bytes", "gradients, bytes")
    return table_of("dual traffic", {column: column for column in columns})


def levers() -> str:
    """What was tried to bring MiniLM's layer 3 lower, but for learning rates of single layers."""
    columns = {
        "": "training",
        "f_3": "f_3",
        "f_L": "f_L",
        "accuracy at layer 3": "accuracy at layer 3",
        "at the last": "accuracy at the last layer",
    }
    digits = dict.fromkeys(list(columns)[1:], 3)
    table = table_of(
        "learning rates by layer on MiniLM", columns, digits, lambda row: "twice" not in row[""]
    )
    return table.replace(", one rate", "").replace("a row for", "a constraint on")


def onnx() -> str:
    columns = ("layers of 6", "ms", "time, all layers = 1")
    return table_of("onnx", {column: column for column in columns})


def all_of(name: str, digits: int | None = None) -> str:
    """A recorded table as it is, its numbers but those of the first column with `digits`."""
    first, *others = recorded(name)["columns"]
    columns = {column: column for column in (first, *others)}
    return table_of(name, columns, dict.fromkeys(others, digits))


def smollm2_gpu(*columns: str) -> str:
    rows = [
        [of_language_model(row["arm"]), *(shown(row[column]) for column in columns)]
        for row in rows_of("SmolLM2, an epoch on a GPU")
    ]
    return markdown(["training", *columns], rows)


MODELS = {"denoiser": "denoiser", "minilm": "MiniLM", "imdb": "MiniLM, IMDb", "lm": "tiny Llama"}
METRICS = {"denoiser": "rmse", "minilm": "accuracy", "imdb": "accuracy", "lm": "token accuracy"}
CHANGED_ARMS = {"ours_normalised": ("ours", {"normalize_weights": True})}
ARMS = {
    "ours": "constrained",
    "ours_normalised": "constrained, weights sum to 1",
    "ours_one_more": "constrained, one run more",
    "fixed": "fixed weights",
    "quadratic": "quadratic penalty",
    "hinge": "hinge penalty",
    "deep_supervision": "deep supervision",
    "rising": "weights rising from 0 to 20",
    "layerskip": "LayerSkip",
    "sorted": "one depth a step, in turn",
    "cut_first": "cut first, same steps",
    "cut_first_longer": "cut first, same compute",
}
SEARCHED = ("ours", "fixed", "quadratic", "hinge", "deep_supervision")
ORDER = ["plain training", "descent", "deep supervision", "LayerSkip"]
SPECIFICATIONS = {  # seeds, arms and most runs of each task
    "denoiser_easy": ((3, 4, 5), SEARCHED, 8),
    "denoiser_two": ((3, 4, 5), SEARCHED, 8),
    "denoiser_one": ((3, 4, 5), SEARCHED, 8),
    "minilm_one": ((4, 5, 6), SEARCHED, 8),
    "minilm_two": ((4, 5, 6), ("ours", "fixed", "quadratic"), 8),
    "imdb_one": ((4, 5, 6), ("ours", "fixed"), 5),
    "lm_one": ((4, 5, 6), ("ours", "fixed"), 5),
}
EVERY_ARM = (
    "ours",
    "fixed",
    "rising",
    "deep_supervision",
    "layerskip",
    "sorted",
    "cut_first",
    "cut_first_longer",
)
RIVALS = {
    "denoiser_one": ("ours", "ours_normalised", *EVERY_ARM[1:]),
    "denoiser_two": ("ours", "ours_one_more", *EVERY_ARM[1:]),
    "minilm_one": (
        "ours",
        "fixed",
        "deep_supervision",
        "layerskip",
        "sorted",
        "cut_first",
        "cut_first_longer",
    ),
    "minilm_two": ("ours", "fixed", "layerskip", "sorted", "cut_first"),
    "imdb_one": ("ours", "fixed", "layerskip", "sorted", "cut_first"),
}
MOST_EXITS = 2  # of what is asked
LIMITS = {"2 %": {}, "none": {"max_last_layer_rise": None}}  # on the rise of f_L: settings
DEFAULTS_OF = {"2 %": "defaults", "none": "defaults, no limit"}
HOLDS = {  # the limits with which a task was measured
    "denoiser_easy": ("2 %", "none"),
    "denoiser_two": ("2 %", "none"),
    "denoiser_one": ("2 %", "none"),
    "minilm_one": ("none",),
}
SEEDS_TO_HOLD = tuple(range(3, 8))
STEPS = {
    "step of a classifier, 12 layers": ("classifier_step.json", "descent", "stock Trainer"),
    "step of a language model, 8 layers": ("lm_step.json", "subsampled", "erm"),
    "the same, read on all tokens": ("lm_step.json", "exact", "erm"),
    "step of a denoiser, 7 layers": ("denoiser_step.json", "descent+noise", "erm+noise"),
    "evaluation, language model, 6 layers": (
        "evaluation.json",
        "all layers",
        "plain evaluation",
    ),
}
DEEP_CASE = "language model of 30 layers, every token"
DEEP_EVALUATION = "evaluation, language model, 30 layers"
GPU_CASES = {
    "Llama 3.1 8B's shape, LoRA, bfloat16, 1 x 2,048 tokens": "step of Llama 3.1 8B, GPU",
    "BERT base, 32 rows of 128 tokens, float32": "step of BERT base, GPU",
}


def defaults_by_kind() -> str:
    """What the limit on the last layer's loss costs and leaves, by kind of model."""
    return markdown(*script("defaults").table(lines_of("defaults.jsonl")))


def price_by_kind() -> str:
    """The price of the defaults, that of the same without a limit on the last layer's loss, and the share of gain."""
    header, lines = script("defaults").table(lines_of("defaults.jsonl"))
    lines = [dict(zip(header, line)) for line in lines]
    free = {line["kind"]: line for line in lines if line["arm"] == "no limit"}
    rows = [
        [line["kind"], line["price"], free[line["kind"]]["price"], line["share of gain"]]
        for line in lines
        if line["arm"] == "defaults" and line["kind"] in free
    ]
    return markdown(["kind", "price", "at 0.02, no limit", "share of gain"], rows)


def language_model_exits() -> str:
    """An exit of language models at several dual rates, beside plain training."""
    return markdown(*script("defaults").exit_table(lines_of("defaults.jsonl")))


def exits_of_language_models() -> str:
    """The exits that language models were asked for with constraints, and what each reached."""
    llama = [
        runs[-1]["certify"][2] / runs[-1]["certify"][-1] for runs in searches("lm_one", "ours")
    ]
    steps = script("runs_to_specification").TASKS["lm"].steps
    training = f"all weights, {steps:,} steps"
    rows = [["tiny Llama", "3 of 5", training, str(len(llama)), "1.25", mean(llama, 2)]]

    lora = [
        run["losses"][3] / run["losses"][-1]
        for run in lines_of("defaults.jsonl")
        if run["settings"]["kind"] == "lora" and run["settings"]["arm"] == "exit"
    ]
    steps = script("defaults").STEPS["lora"]
    rows.append(
        ["tiny Llama", "4 of 5", f"LoRA, {steps} steps", str(len(lora)), "1.25", mean(lora, 2)]
    )

    (epoch,) = [row for row in rows_of("SmolLM2, an epoch on a GPU") if row["arm"] == "descent"]
    training = f"all weights, {epoch['steps']} steps, about an epoch"
    rows.append(["SmolLM2-135M", "15 of 30", training, "1", "1.1", f"{epoch['f_15 / f_30']:.2f}"])

    adapters = [
        row["f_15"] / row["f_30"]
        for row in rows_of("SmolLM2, exits")
        if row["arm"] == "descent" and row["trained weights"] == "adapters" and not row["dual rate"]
    ]
    training = "LoRA of rank 16, 300 steps"
    rows.append(
        ["SmolLM2-135M", "15 of 30", training, str(len(adapters)), "1.1", mean(adapters, 2)]
    )

    header = ["model", "layer of the exit", "training", "seeds", "ratio asked", "ratio reached"]
    return markdown(header, rows)


def best_runs(name: str, task: str) -> dict[str, list[dict]]:
    """Of each arm of a task the runs at its best learning rate."""
    arms = defaultdict(list)
    for run in lines_of(name):
        if run["settings"]["task"] == task:
            arms[run["settings"]["arm"]].append(run)
    return {arm: at_best_rate(runs)[1] for arm, runs in arms.items()}


def depths(task: str) -> str:
    """The loss at every depth: of arms that train one model for all of them, and of one model for each."""
    arms = best_runs("cut_first.jsonl", task)
    depth = len(arms["plain"][0]["report"])
    rows = one_model_for_all(arms, depth) + one_model_each(arms, depth)

    def seconds(models: list[list[dict]]) -> float:
        return sum(np.mean([run["seconds"] for run in runs]) for runs in models)

    lines = []
    for name, models, losses in rows:
        cost = seconds(models) / seconds([arms["plain"]])
        cells = [mean(cell, 3) if cell else "" for cell in losses]
        lines.append([name, str(len(models)), f"{cost:.1f}", *cells])

    if len(arms["plain"]) > 1:
        trained = [losses for name, _, losses in rows if name != "plain"]
        lines.append(
            ["*largest standard deviation, without plain*", "", "", *spread(trained, depth)]
        )
    header = ["training", "models", "time, plain = 1"]
    return markdown([*header, *(f"f_{layer}" for layer in range(1, depth + 1))], lines)


def spread(losses_of_rows: list[list[list[float]]], depth: int) -> list[str]:
    """The largest standard deviation over the seeds at each depth."""
    cells = []
    for layer in range(depth):
        deviations = [
            np.std(losses[layer], ddof=1) for losses in losses_of_rows if len(losses[layer]) > 1
        ]
        cells.append(f"{max(deviations):.3f}")
    return cells


def one_model_for_all(arms: dict[str, list[dict]], depth: int) -> list[tuple]:
    """Name, the runs of its one model, and the losses of each layer over the seeds."""
    rows = []
    for arm, name in ONE_MODEL.items():
        if arm in arms:
            losses = [[run["report"][layer] for run in arms[arm]] for layer in range(depth)]
            rows.append((name, [arms[arm]], losses))
    return rows


def one_model_each(arms: dict[str, list[dict]], depth: int) -> list[tuple]:
    """The same of a model for each depth, as far as there are runs of it; that of all layers is plain training's."""
    rows = []
    for ending, name in ONE_MODEL_EACH.items():
        models = [arms.get(f"cut {layer}{ending}", []) for layer in range(1, depth)]
        if not any(models):
            continue
        models.append(arms["plain"])
        losses = [[run["report"][-1] for run in runs] for runs in models]
        rows.append((name, [runs for runs in models if runs], losses))
    return rows


def layer_sets() -> str:
    """Language models with some of their layers, before and after healing; of other texts the perplexity. Runs that
    differ in the seed alone are a line, which has their mean."""
    lines = defaultdict(list)
    for run in sorted(lines_of("layer_sets.jsonl"), key=_order_of_layer_set):
        settings = {name: value for name, value in run["settings"].items() if name != "seed"}
        lines[json.dumps(settings, sort_keys=True)].append(run)

    header = ["model", "layers", "number", "steps of healing", "seeds", "minutes of one core"]
    header += ["loss, whole model = 1, before", "after healing"]
    header += ["same token, before", "same token, after"]
    header += ["perplexity, whole model", "perplexity, after"]

    rows = []
    for runs in lines.values():
        settings = runs[0]["settings"]
        layers = script("layer_sets").layers_in(settings["layers"])
        cells = [HEALED_MODELS[settings["model"]], f"{settings['layers']} kept", str(len(layers))]
        cells += [str(settings["steps"]), str(len(runs))]
        cells.append(mean([run["seconds"] / 60 for run in runs], 0))
        for name in ("ratio", "agreement"):
            cells += [_of_sets(runs, when, name) for when in ("before", "after")]
        texts = [run.get("text", {}) for run in runs]
        cells += [_of_sets(texts, when, "perplexity") for when in ("whole", "after")]
        rows.append(cells)
    return markdown(header, rows)


HEALED_MODELS = {"smollm2-135m": "SmolLM2 135M", "gemma-3-270m": "Gemma 3 270M"}


def _order_of_layer_set(run: dict) -> tuple:
    settings = run["settings"]
    number = len(script("layer_sets").layers_in(settings["layers"]))
    return list(HEALED_MODELS).index(settings["model"]), number, settings["steps"]


def _of_sets(measures: list[dict], when: str, name: str) -> str:
    """The mean of a measure in a cell, which stays empty where there is none."""
    if when not in measures[0]:
        return ""
    digits = 1 if name == "perplexity" else 2
    return mean([of_run[when][name] for of_run in measures], digits)


def exit_heads() -> str:
    """stories260K with an exit head, alone and with the layers below, at the rate that was run with every seed."""
    arms = defaultdict(lambda: defaultdict(list))
    for run in lines_of("exit_heads.jsonl"):
        settings = run["settings"]
        arm = (settings["exit_head"], settings.get("train_all", False))
        arms[arm][settings["rate"]].append(run)

    rows = []
    for arm in itertools.product(("norm", "affine", "block"), (False, True)):
        exit_head, train_all = arm
        runs = max(arms[arm].values(), key=len)
        trained = "exit head"
        if train_all:
            trained = "all layers"
        losses = [run["after"]["ratio"] for run in runs]
        cells = [exit_head, trained, mean([run["before"]["ratio"] for run in runs], 2)]
        cells += [mean(losses, 3), f"{np.std(losses, ddof=1):.3f}"]
        cells.append(mean([run["after"]["agreement"] for run in runs], 2))
        rows.append(cells)

    header = ["exit head", "trained", "loss, whole model = 1, before", "after"]
    return markdown([*header, "standard deviation", "same token"], rows)


ONE_MODEL = {
    "plain": "plain",
    "default": "constrained, default",
    "whole path": "constrained, `descent_strength` 1",
    "deep supervision": "deep supervision",
    "sorted": "one depth a step, in turn",
}
ONE_MODEL_EACH = {
    "": "cut first, a model for each depth, same steps",
    ", same compute": "cut first, a model for each depth, same compute",
}


def exits_under_the_limit() -> str:
    """The searches for the denoiser's exits with the limit on the last layer's loss and without it."""
    benchmark, rows = script("runs_to_specification"), []
    for task, limits in HOLDS.items():
        if not task.startswith("denoiser"):
            continue
        for limit in limits:
            found = searches(task, "ours", SEEDS_TO_HOLD, limit)
            met = [run for run in map(benchmark.found_by, found) if run]
            first = [[runs[index]["met"] for runs in found] for index in (0, 1)]
            rows.append(
                [
                    asked_of(task),
                    limit,
                    f"{len(met)} of {len(found)}",
                    str(sum(map(len, found))),
                    *(f"{sum(of_rate)} of {len(found)}" for of_rate in first),
                    mean([run["certify"][-1] for run in met], 3),
                ]
            )

    rates = [f"met at {rate:g}" for rate in benchmark.TASKS["denoiser"].rates]
    header = ["asked", "limit", "seeds that met it", "runs in all", *rates, "f_L"]
    return markdown(header, rows)


TABLES = {
    "depths of the denoiser": partial(depths, "denoiser"),
    "depths of MiniLM": partial(depths, "minilm"),
    "layer sets": layer_sets,
    "exit heads": exit_heads,
    "exits": exits,
    "exits and models cut first": rivals,
    "price": price,
    "time": time,
    "runs to specification": specification,
    "holds": holds,
    "defaults": defaults,
    "defaults by kind": defaults_by_kind,
    "price by kind": price_by_kind,
    "exits under the limit": exits_under_the_limit,
    "language model exits": language_model_exits,
    "exits of language models": exits_of_language_models,
    "steps": steps,
    "classifier memory": classifier_memory,
    "operators": operators,
    "evaluations": evaluations,
    "compiled": compiled,
    "token fraction": token_fraction,
    "passes": passes,
    "false positives": false_positives,
    "dual traffic": dual_traffic,
    "levers": levers,
    "onnx": onnx,
    "demo": partial(all_of, "demo", 2),
    "demo error": partial(
        table_of,
        "demo, error",
        {"training": "training", "clean": "no noise", "ID": "as in training", "OOD": "more noise"},
        {"clean": 2, "ID": 2, "OOD": 2},
    ),
    "imdb-minilm": partial(all_of, "imdb-minilm", 3),
    "alpaca-stories260k": partial(all_of, "alpaca-stories260k", 3),
    "video-ut": partial(all_of, "video-ut", 2),
    "smollm2 GPU": partial(
        smollm2_gpu,
        "steps",
        "f_10",
        "f_15",
        "f_25",
        "f_30",
        "f_15 / f_30",
        "token accuracy at 15",
        "token accuracy at 30",
    ),
    "smollm2 GPU summary": partial(smollm2_gpu, "steps", "f_15", "f_30", "f_15 / f_30"),
    "step machines": step_machines,
    "gpu": gpu_steps,
    "launches": launches,
    "launch times": launch_times,
    "launches beyond": launches_beyond,
    "denoiser summary": denoiser_summary,
    "photos": partial(denoisers, "photos"),
    "video": partial(denoisers, "video"),
    "DUST": partial(denoisers, "dust"),
    "ViT": partial(denoisers, "vit"),
    "texts": texts,
    "text losses": text_losses,
    "deep classifier accuracy": partial(deep_classifier, "accuracy"),
    "deep classifier loss": partial(deep_classifier, "losses"),
    "deep classifier summary": partial(deep_classifier, "accuracy", (10, 15, 30), False),
    "smollm2 exits": partial(smollm2_exits, "all"),
    "smollm2 adapters": partial(smollm2_exits, "adapters"),
    "smollm2 noise": smollm2_noise,
}


def documents() -> list[Path]:
    """Every document that has a generated table."""
    candidates = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    candidates += (ROOT / "recipes").rglob("README.md")
    return [path for path in candidates if MARKED.search(path.read_text())]


def filled(text: str) -> str:
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", text)


if __name__ == "__main__":
    for document in documents():
        document.write_text(filled(document.read_text()))
