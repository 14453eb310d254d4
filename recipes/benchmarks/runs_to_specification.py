"""How many training runs it takes until a specification holds on held-out data: constraints against tuned weights.

    python recipes/benchmarks/runs_to_specification.py [--tasks TASK ...] [--arms ARM ...] [--seeds 0 1 2] [--budget 8]

A specification gives layers k < L an exit, f_k <= (1 + eps_k) f_L; it is met when every row of `Certificate` is. The
arms, whole runs each:

- ours: `OURS`; a run that misses is followed by one with twice the dual rate and twice the margin;
- fixed: f_L + sum_k c_k f_k with constant weights;
- quadratic: f_L + c/2 sum_k [violation_k]^2;
- plain: training without any of it, for comparison.

The coefficients start at 1. Those of exits that are missed grow tenfold, and a coefficient at which training breaks
down is bisected on a log scale, each exit's by itself (the penalty has one for all). Each arm begins with one run per
learning rate, which count, and goes on at the better one. Learning rate and coefficients are chosen on rows (select)
that are neither trained on nor certified; only the end of the search is read off the certify rows. `--refine` runs
then look for the least coefficients (a common factor) that still meet it.

Finished runs are kept in `--output`, one JSON line each, and are not repeated.
"""

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import torch
from transformers import AutoTokenizer, PrinterCallback, set_seed

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.commands import demo
from hf_descent.constraints.problem import DescentProblem
from hf_descent.data.pans import photo_pans
from hf_descent.data.text import DataArguments, load_text_classification, tokenize
from hf_descent.models import LinearReadoutForSequenceClassification


# Those of the denoiser are fixed on seed 100, by the rule in README.md; those of MiniLM are not yet chosen by it.
EXITS = {
    "denoiser": {"one": {3: 0.16}, "two": {2: 0.35, 4: 0.08}},
    "minilm": {"one": {3: 0.1}, "two": {2: 0.2, 4: 0.05}},
}
ARMS = ("plain", "ours", "fixed", "quadratic")
LEARNING_RATES = {"denoiser": (1e-3, 2e-3), "minilm": (5e-5, 1e-4)}
STEPS = {"denoiser": 600, "minilm": 150}
NUM_LAYERS = {"denoiser": 5, "minilm": 6}
CHANCE = {"denoiser": 1.0, "minilm": math.log(2)}  # losses of the noisy input, and of balanced classes
OURS = {"dual_learning_rate": 0.4, "dual_warmup_steps": 0.0, "target_margin": 0.05}
GROWTH = 10.0  # of a coefficient whose row is missed


def settings_of(arm: str, exits: dict[int, float], coefficients: tuple[float, ...]) -> dict:
    """The arguments of `DescentConfig` that make an arm."""
    if arm == "plain":
        return {"objective": "erm"}
    if arm == "ours":
        growing = {name: coefficients[0] * OURS[name] for name in ("dual_learning_rate", "target_margin")}
        return {"objective": "descent", "exit_targets": exits, **OURS, **growing}
    weights = {"fixed_multipliers": list(coefficients)} if arm == "fixed" else {"penalty_coefficient": coefficients[0]}
    margin = {"target_margin": OURS["target_margin"]} if arm == "quadratic" else {}
    return {"objective": arm, "exit_targets": exits, "dual_warmup_steps": 0.0, **weights, **margin}


class Coefficients:
    """The search of an arm: what the next run tries."""

    def __init__(self, arm: str, num_exits: int):
        self.grows_by = 2.0 if arm == "ours" else GROWTH
        count = num_exits if arm == "fixed" else 1
        self.values = (1.0,) * count
        self._low, self._high = [0.0] * count, [math.inf] * count

    def after(self, missed: list[bool], broke: bool) -> None:
        """Take in a run: which exits it missed (all of them where it missed none of the rows that may be looked at),
        and whether training broke down."""
        missed = missed if any(missed) else [True] * len(missed)
        missed = missed if len(self.values) > 1 else [any(missed)]
        if broke:  # blamed on the coefficients that have grown, where any has
            grown = [low > 0 for low in self._low]
            missed = grown if any(grown) else [True] * len(grown)
        values = list(self.values)
        for index in (index for index, is_changed in enumerate(missed) if is_changed):
            value = values[index]
            (self._high if broke else self._low)[index] = value
            low, high = self._low[index], self._high[index]
            between = math.sqrt(low * high) if low and math.isfinite(high) else None
            values[index] = between or (value / self.grows_by if broke else value * self.grows_by)
        self.values = tuple(values)


def search(
    arm: str,
    num_exits: int,
    rates: tuple[float, ...],
    budget: int,
    refine: int,
    run: Callable[[tuple[float, ...], float], dict],
) -> list[dict]:
    """The runs of an arm until one meets the specification, at most `budget`, and `refine` more."""
    coefficients = Coefficients(arm, num_exits)
    runs = [run(coefficients.values, rate) for rate in rates]
    # A learning rate that meets it goes first, then the lower f_L; read off the select rows.
    best = min(runs, key=lambda found: (any(found["missed"]), found["broke"], found["select"][-1]))
    rate, last = rates[runs.index(best)], best
    while arm != "plain" and not any(found["met"] for found in runs) and len(runs) < budget:
        coefficients.after(last["missed"], last["broke"])
        last = run(coefficients.values, rate)
        runs.append(last)
    if arm in ("plain", "ours") or not any(found["met"] for found in runs):
        return runs
    met = best if best["met"] else next(found for found in runs if found["met"])
    high, low = 1.0, 1 / GROWTH  # common factors of the coefficients that are met and, as it is assumed, are not
    for _ in range(refine):
        factor = math.sqrt(low * high)
        runs.append(run(tuple(factor * value for value in met["coefficients"]), met["rate"]) | {"refines": True})
        low, high = (low, factor) if runs[-1]["met"] else (factor, high)
    return runs


# ---- tasks ----


@cache
def pans() -> tuple[torch.Tensor, ...]:
    """Clips for training, selection and certificate, of one law: all from the same region of the photographs."""
    return photo_pans(6144).split([4096, 512, 1536])


def denoiser(seed: int, smoke: bool):
    train, *held_out = pans()
    model, config = demo.denoiser(train, 4 if smoke else STEPS["denoiser"])
    return model, [demo.rows_of(clips[: 64 if smoke else None]) for clips in (train, *held_out)], config, {}


@cache
def sentences(folder: str, model_path: str):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    files = {f"{name}_file": os.path.join(folder, f"{name}.parquet") for name in ("train", "validation", "test")}
    data = tokenize(load_text_classification(DataArguments(label_column="label", **files)), tokenizer, 64)
    return tokenizer, [data[name] for name in ("train", "validation", "test")]


def minilm(seed: int, smoke: bool, model_path: str, folder: str):
    tokenizer, rows = sentences(folder, model_path)
    set_seed(seed)  # the head is drawn here
    model = LinearReadoutForSequenceClassification.from_encoder(model_path, "mean", num_labels=2)
    return model, rows, {"lr_scheduler_type": "linear", "warmup_steps": 0.06}, {"processing_class": tokenizer}


def train(task: str, options: argparse.Namespace, exits: dict, settings: dict, rate: float, seed: int) -> dict:
    """One run: layer losses on the select and the certify rows, which rows are met there, seconds of training."""
    kind, steps = task.split("_")[0], 4 if options.smoke else STEPS[task.split("_")[0]]
    set_seed(seed)
    paths = (options.minilm, options.rt_polarity) if kind == "minilm" else ()
    model, (rows, select, certify), config, extra = {"denoiser": denoiser, "minilm": minilm}[kind](
        seed, options.smoke, *paths
    )
    with tempfile.TemporaryDirectory() as folder:
        args = DescentConfig(
            output_dir=folder,
            learning_rate=rate,
            per_device_train_batch_size=32,
            max_steps=steps,
            seed=seed,
            save_strategy="no",
            report_to="none",
            logging_steps=max(1, steps // 10),
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
            **config,
            **settings,
        )
        trainer = DescentTrainer(model, args, train_dataset=rows, **extra)
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
        problem = DescentProblem(None, CHANCE[kind], NUM_LAYERS[kind], exit_targets=exits)
        gamma = config.get("noise_gamma", 0.0)
        shared = {"gamma": gamma, "problem": problem, "batch_size": 32}
        shared["metric"] = "accuracy" if kind == "minilm" else "rmse"
        profiles = [trainer.evaluate_layers(data, **shared) for data in (select, certify)]
    verdicts = [profile.certificate() for profile in profiles]
    found = {
        "select": profiles[0].losses.tolist(),
        "certify": profiles[1].losses.tolist(),
        "values": profiles[1].values.tolist(),
        "verdicts": [verdict.verdicts for verdict in verdicts],
        "radii": verdicts[1].radii.tolist(),
        "met": verdicts[1].feasible,
        "multipliers": None if trainer.multipliers is None else trainer.multipliers.values.tolist(),
        "seconds": seconds,
    }
    return found | {
        "missed": [verdict != "met" for verdict in found["verdicts"][0]],
        "broke": not (np.isfinite(profiles[0].losses).all() and profiles[0].losses[-1] < problem.chance),
    }


class Runs:
    """Finished runs in a file of JSON lines, by their settings."""

    def __init__(self, path: str):
        self._path, self._known = path, {}
        if os.path.exists(path):
            with open(path) as file:
                for line in map(json.loads, file):
                    self._known[json.dumps(line["settings"], sort_keys=True)] = line

    def get(self, settings: dict, make: Callable[[], dict]) -> dict:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._known:
            self._known[key] = {"settings": settings, **make()}
            with open(self._path, "a") as file:
                file.write(json.dumps(self._known[key]) + "\n")
        return self._known[key]


def searches(options: argparse.Namespace) -> Iterator[tuple[str, str, int, list[dict]]]:
    """Task, arm, seed and runs of every search."""
    finished = Runs(options.output)
    for seed, task, arm in itertools.product(options.seeds, options.tasks, options.arms):
        kind, number = task.split("_")
        exits = EXITS[kind][number]

        def run(coefficients, rate, task=task, arm=arm, seed=seed, kind=kind, exits=exits):
            chosen = settings_of(arm, exits, coefficients)
            steps = 4 if options.smoke else STEPS[kind]
            key = {"task": task, "exits": exits, "rate": rate, "seed": seed, "steps": steps, **chosen}
            found = finished.get(key, lambda: train(task, options, exits, chosen, rate, seed))
            print(f"{task}, {arm}, seed {seed}, {rate:g}, {coefficients}: {'met' if found['met'] else 'missed'}, "
                  f"{[round(loss, 4) for loss in found['certify']]}", flush=True)  # fmt: skip
            return found | {"coefficients": coefficients, "rate": rate}

        rates = LEARNING_RATES[kind]
        yield task, arm, seed, search(arm, len(exits), rates, options.budget, options.refine, run)


def table(found: list[tuple[str, str, int, list[dict]]]) -> str:
    """Of every search: runs until the specification was met, how many of the first runs (one per learning rate) met
    it, f_L and exits of the run that did, the least f_L of such a run after `--refine`, seconds of training."""
    names = ["task", "arm", "seed", "runs", "met by first", "f_L", "f_k / f_L", "f_L refined", "seconds"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for task, arm, seed, runs in found:
        counted = [run for run in runs if "refines" not in run]
        exits = [int(layer) for layer in EXITS[task.split("_")[0]][task.split("_")[1]]]
        # Of learning rates that both meet it, the one with the lower loss on the select rows.
        met = min((run for run in counted if run["met"]), key=lambda run: run["select"][-1], default=None)
        shown = met or min(counted, key=lambda run: run["select"][-1])
        last = shown["certify"][-1]
        ratios = ", ".join(f"{shown['certify'][layer - 1] / last:.3f}" for layer in exits)
        first = f"{sum(run['met'] for run in counted[: len(LEARNING_RATES[task.split('_')[0]])])}"
        refined = min((run["certify"][-1] for run in runs if run["met"]), default=math.nan)
        number = f"{len(counted)}" if met else f"not in {len(counted)}"
        seconds = sum(run["seconds"] for run in counted)
        lines.append(
            f"| {task} | {arm} | {seed} | {number} | {first} | {last:.4f} | {ratios} | {refined:.4f} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tasks = [f"{kind}_{number}" for kind in EXITS for number in EXITS[kind]]
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=["denoiser_one", "denoiser_two"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=8, help="runs of an arm at most, before --refine")
    parser.add_argument("--refine", type=int, default=0, help="runs after the specification is met")
    parser.add_argument("--output", default="runs_to_specification.jsonl", help="finished runs; read and appended to")
    parser.add_argument("--minilm", help="folder of the encoder all-MiniLM-L6-v2")
    parser.add_argument("--rt_polarity", help="folder with train.parquet, validation.parquet, test.parquet")
    parser.add_argument("--smoke", action="store_true", help="four steps on a few rows, to see that it works")
    options = parser.parse_args(argv)
    if any(task.startswith("minilm") for task in options.tasks) and not (options.minilm and options.rt_polarity):
        parser.error("The tasks of minilm need --minilm and --rt_polarity.")
    return options


def main(argv: list[str] | None = None) -> str:
    options = parse(argv)
    torch.set_num_threads(1)
    return table(list(searches(options)))


if __name__ == "__main__":
    print(main())
