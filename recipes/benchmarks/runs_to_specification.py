"""How many training runs it takes until a specification holds on held-out data: constraints against tuned weights.

    python recipes/benchmarks/runs_to_specification.py [--tasks TASK ...] [--arms ARM ...] [--seeds 0 1 2] [--budget 8]

A specification gives layers k < L an exit, f_k <= (1 + eps_k) f_L; it is met when every row of `Certificate` is. The
arms, whole runs each:

- ours: `OURS`; a run that misses is followed by one with twice the dual rate and twice the margin;
- fixed: f_L + sum_k c_k f_k with constant weights;
- quadratic, hinge: f_L + c/2 sum_k [violation_k]^2, or c sum_k [violation_k];
- deep_supervision: the sum of the losses of all layers, with nothing to search but the learning rate;
- layerskip: LayerSkip's loss, with weights that grow with depth; likewise;
- rising: weights on the exits that rise from 0 to 20 with the steps, whatever the losses are; likewise;
- sorted: one depth a step, the exits and the whole model in turn (Sorted fine-tuning, arXiv 2309.08968); likewise;
- cut_first: a model for each exit, cut to its depth and then fine-tuned, beside the whole one by plain training, whose
  f_L is that of the specification, each at its own best learning rate. With cut_first_longer a model of k layers
  takes L / k times as many steps, so that it costs what the whole one does;
- plain: training without any of it, for comparison.

The coefficients start at 1. Those of exits that are missed grow tenfold, and a coefficient at which training breaks
down is bisected on a log scale, each exit's by itself (the penalty has one for all). Each arm begins with one run per
learning rate, which count, and goes on at the better one. Learning rate and coefficients are chosen on rows (select)
that are neither trained on nor certified; only the end of the search is read off the certify rows. Finished runs are
kept in `--output`, one JSON line each, and are not repeated.
"""

import argparse
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from datasets import concatenate_datasets
from harness import InTurn, RisingWeights, Runs, fit
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    set_seed,
)

from hf_descent import DescentTrainer
from hf_descent.commands import demo
from hf_descent.constraints.problem import DescentProblem
from hf_descent.data.alpaca import AlpacaArguments, completion_labels, load_alpaca
from hf_descent.data.pans import photo_pans
from hf_descent.data.text import DataArguments, load_text_classification, tokenize
from hf_descent.early_exit import truncate
from hf_descent.evaluation.profiles import LayerProfile
from hf_descent.loading import load_tokenizer
from hf_descent.models import LinearReadoutForSequenceClassification


CUT_FIRST = {"cut_first": "same steps", "cut_first_longer": "same compute"}
WITHOUT_COEFFICIENTS = ("plain", "deep_supervision", "layerskip", "rising", "sorted", *CUT_FIRST)
ARMS = ("ours", "fixed", "quadratic", "hinge", *WITHOUT_COEFFICIENTS)
OBJECTIVES = {"plain": "erm", "ours": "descent"}  # of the arms that have another name
OURS = {
    "dual_optim": "pi",
    "dual_learning_rate": 0.04,
    "dual_warmup_steps": 0.0,
    "target_margin": 0.1,
}
MOST = 0.5  # of the dual rate and the margin, which a search of "ours" doubles
RISE_TO = 20.0  # about where the multipliers of "ours" end on the denoiser
SCHEDULES = {  # of weights that training sets step by step
    "sorted": {"normalize_weights": True, "in_turn": True},
    "rising": {"rise_to": RISE_TO},
}
GROWTH = 10.0  # of a coefficient whose row is missed
SMOKE_STEPS = 4
# A learning rate; of models that are cut first all those from which each takes its best one.
Rate = float | tuple[float, ...]


def settings_of(arm: str, exits: dict[int, float], coefficients: tuple[float, ...]) -> dict:
    """The arguments of `DescentConfig` that make an arm; `cut_first`, `in_turn` and `rise_to` are those of
    `train`."""
    if arm in CUT_FIRST:
        return {"objective": "erm", "cut_first": CUT_FIRST[arm]}
    if arm in SCHEDULES:
        return {
            "objective": "fixed",
            "exit_targets": exits,
            "fixed_multipliers": [0.0] * len(exits),
            "dual_warmup_steps": 0.0,
            **SCHEDULES[arm],
        }
    if arm in WITHOUT_COEFFICIENTS:
        return {"objective": OBJECTIVES.get(arm, arm)}
    settings = {"objective": OBJECTIVES.get(arm, arm)}
    if arm == "ours" and not exits:
        return settings

    settings["exit_targets"] = exits
    if arm == "ours":
        settings.update(OURS)
        for name in ("dual_learning_rate", "target_margin"):
            settings[name] = min(coefficients[0] * OURS[name], MOST)
        return settings

    settings["dual_warmup_steps"] = 0.0
    if arm == "fixed":
        settings["fixed_multipliers"] = list(coefficients)
    else:
        settings["penalty_coefficient"] = coefficients[0]
        settings["target_margin"] = OURS["target_margin"]
    return settings


class Coefficients:
    """The search of an arm: what the next run tries."""

    def __init__(self, arm: str, num_exits: int):
        self.grows_by = GROWTH
        if arm == "ours":
            self.grows_by = 2.0
        count = 1
        if arm == "fixed":
            count = num_exits
        self.values = (1.0,) * count
        self._low = [0.0] * count  # the largest value of each that was too small
        self._high = [math.inf] * count  # the smallest at which training broke down

    def after(self, missed: list[bool], broke: bool) -> None:
        """Take in a run: which exits it missed (all of them where it missed none of the rows that may be looked at),
        and whether training broke down."""
        changed = missed
        if len(self.values) == 1:
            changed = [True]
        if broke:  # blamed on the coefficients that have grown, where any has
            changed = [low > 0 for low in self._low]
        if not any(changed):
            changed = [True] * len(self.values)

        values = list(self.values)
        for index, is_changed in enumerate(changed):
            if is_changed:
                values[index] = self._next(index, broke)
        self.values = tuple(values)

    def _next(self, index: int, broke: bool) -> float:
        """The value after the present one of a coefficient, which was too small or broke training down."""
        value = self.values[index]
        if broke:
            self._high[index] = value
        else:
            self._low[index] = value

        if self._low[index] > 0 and math.isfinite(self._high[index]):
            return math.sqrt(self._low[index] * self._high[index])
        if broke:
            return value / self.grows_by
        return value * self.grows_by


def search(
    arm: str,
    num_exits: int,
    rates: tuple[Rate, ...],
    budget: int,
    run: Callable[[tuple[float, ...], Rate], dict],
) -> list[dict]:
    """The runs of an arm until one meets the specification, at most `budget`."""
    coefficients = Coefficients(arm, num_exits)
    runs = [run(coefficients.values, rate) for rate in rates]
    if arm in WITHOUT_COEFFICIENTS:
        return runs

    last = min(runs, key=distance)
    rate = rates[runs.index(last)]
    while not any(run_of["met"] for run_of in runs) and len(runs) < budget:
        if arm == "ours" and coefficients.values[0] * OURS["dual_learning_rate"] >= MOST:
            break  # a further run would have the same settings
        coefficients.after(last["missed"], last["broke"])
        last = run(coefficients.values, rate)
        runs.append(last)

    return runs


def distance(run: dict) -> tuple:
    """By what learning rates are ordered: one that meets the specification goes first, then what comes nearest, then
    the lower f_L; read off the select rows."""
    return any(run["missed"]), run["broke"], run["beyond"], run["select"][-1]


# ---- data and models ----

# A model, its rows to train on, to select on and to certify on, settings of the trainer, and its further arguments.
Made = tuple[PreTrainedModel, list, dict, dict]


@cache
def pans() -> tuple[torch.Tensor, ...]:
    """Clips for training, selection and certificate, of one law: all from the same region of the photographs."""
    return photo_pans(6144).split([4096, 512, 1536])


def denoiser(options: argparse.Namespace) -> Made:
    parts = pans()
    steps = TASKS["denoiser"].steps
    if options.smoke:
        steps = SMOKE_STEPS
        parts = [clips[:64] for clips in parts]

    model, settings = demo.denoiser(pans()[0], steps)
    return model, [demo.rows_of(clips) for clips in parts], settings, {}


def minilm_on_rt_polarity(options: argparse.Namespace) -> Made:
    files = {"train": "train", "validation": "validation", "test": "test"}
    return minilm(options.minilm, options.rt_polarity, files)


def minilm_on_imdb(options: argparse.Namespace) -> Made:
    return minilm(options.minilm, options.imdb, {"train": "train", "validation": "test"})


def minilm(encoder: str, folder: str, files: dict[str, str]) -> Made:
    """`files` has the parts of the data, and the names of the files that they are read from."""
    tokenizer, rows = texts(encoder, folder, tuple(files.items()))
    model = LinearReadoutForSequenceClassification.from_encoder(encoder, "mean", num_labels=2)
    settings = {"lr_scheduler_type": "linear", "warmup_steps": 0.06}
    return model, rows, settings, {"processing_class": tokenizer}


def smollm2(options: argparse.Namespace) -> Made:
    """The decoder as a classifier. It certifies on the test sentences of the recipe, as `controlled.jsonl` does."""
    path = options.smollm2
    files = (("train", "train"), ("test", "test"))
    tokenizer, rows = texts(path, options.rt_polarity, files, max_length=48)
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=2, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id
    )
    settings = {
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.06,
        "train_sampling_strategy": "group_by_length",
    }
    return model, rows, settings, {"processing_class": tokenizer}


@cache
def texts(model: str, folder: str, files: tuple[tuple[str, str], ...], max_length: int = 64):
    """Tokenizer and rows: 1,000 of the training file to select on; the other files to certify, of each all rows, or
    4,000."""
    tokenizer = load_tokenizer(model)
    paths = {f"{part}_file": os.path.join(folder, f"{name}.parquet") for part, name in files}
    arguments = DataArguments(label_column="label", max_eval_samples=4000, **paths)
    data = tokenize(load_text_classification(arguments), tokenizer, max_length)

    rows = data["train"].shuffle(seed=0)
    held_out = [data[part] for part, _ in files if part != "train"]
    train = rows.select(range(1000, len(rows)))
    select = rows.select(range(1000))
    return tokenizer, [train, select, concatenate_datasets(held_out)]


def lm(options: argparse.Namespace) -> Made:
    tokenizer, rows = instructions(options.stories260k, options.alpaca)
    model = AutoModelForCausalLM.from_pretrained(options.stories260k, dtype=torch.float32)
    extra = {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    return model, rows, {"lr_scheduler_type": "linear"}, extra


@cache
def instructions(model_path: str, file: str):
    tokenizer = load_tokenizer(model_path)
    arguments = AlpacaArguments(
        train_file=file, prompt_format="alpaca", validation_split_percentage=1
    )
    rows = load_alpaca(arguments, tokenizer)["train"].shuffle(seed=0)

    rows = rows.map(
        partial(completion_labels, tokenizer=tokenizer, limit=256), remove_columns=rows.column_names
    )
    rows = rows.filter(lambda row: max(row["labels"][1:]) >= 0)  # cut before its answer

    train = rows.select(range(1500, len(rows)))
    select = rows.select(range(500))
    certify = rows.select(range(500, 1500))
    return tokenizer, [train, select, certify]


# ---- tasks ----


@dataclass(frozen=True)
class Task:
    """A model and its data, how long it is trained, and what is asked of it.

    Attributes:
        make: gives model, rows and settings, by the options of the command.
        exits: by the name of each specification, the layers that get an exit, and the eps of each.
        rates: the learning rates that a search begins with.
        default_rates: those that are tried with the package's defaults.
        chance: the loss of a guess; `None` where it is measured.
        needs: the options that name its files.
    """

    make: Callable[[argparse.Namespace], Made]
    exits: dict[str, dict[int, float]]
    num_layers: int
    steps: int
    batch: int
    rates: tuple[float, ...]
    default_rates: tuple[float, ...]
    chance: float | None = None
    metric: str = "accuracy"
    needs: tuple[str, ...] = ()

    def steps_of(self, options: argparse.Namespace) -> int:
        if options.smoke:
            return SMOKE_STEPS
        return self.steps


# The hard exits of the denoiser are fixed on seed 100, by the rule in docs/results_exits.md; the others are not.
TASKS = {
    "denoiser": Task(
        make=denoiser,
        exits={"one": {3: 0.16}, "easy": {3: 0.25}, "two": {2: 0.35, 4: 0.08}},
        num_layers=5,
        steps=600,
        batch=32,
        rates=(1e-3, 2e-3),
        default_rates=(5e-4, 1e-3, 2e-3),
        chance=1.0,  # of the noisy input
        metric="rmse",
    ),
    "minilm": Task(
        make=minilm_on_rt_polarity,
        exits={"one": {3: 0.1}, "two": {2: 0.2, 4: 0.05}},
        num_layers=6,
        steps=300,
        batch=16,
        rates=(1e-4,),
        default_rates=(5e-5, 1e-4, 2e-4),
        chance=math.log(2),  # of balanced classes
        needs=("minilm", "rt_polarity"),
    ),
    "imdb": Task(
        make=minilm_on_imdb,
        exits={"one": {3: 0.1}},
        num_layers=6,
        steps=300,
        batch=16,
        rates=(1e-4,),
        default_rates=(5e-5, 1e-4, 2e-4),
        chance=math.log(2),
        needs=("minilm", "imdb"),
    ),
    "smollm2": Task(
        make=smollm2,
        exits={"two": {10: 0.25, 15: 0.1}},
        num_layers=30,
        steps=300,
        batch=16,
        rates=(1e-4,),
        default_rates=(5e-5, 1e-4, 2e-4),
        chance=math.log(2),
        needs=("smollm2", "rt_polarity"),
    ),
    "lm": Task(
        make=lm,
        exits={"one": {3: 0.25}},
        num_layers=5,
        steps=1200,
        batch=8,
        rates=(3e-3,),
        default_rates=(1e-3, 3e-3, 1e-2),
        needs=("stories260k", "alpaca"),
    ),
}


def task_of(name: str) -> Task:
    kind, _ = name.split("_")
    return TASKS[kind]


def exits_of(name: str) -> dict[int, float]:
    """What a specification such as "denoiser_one" asks; nothing for "denoiser_defaults"."""
    kind, specification = name.split("_")
    if specification == "defaults":
        return {}
    return TASKS[kind].exits[specification]


# ---- a run ----


def train(
    name: str, options: argparse.Namespace, exits: dict, settings: dict, rate: Rate, seed: int
) -> dict:
    """One run: layer losses on the select and the certify rows, which rows are met there, and processor seconds."""
    task = task_of(name)
    if "cut_first" in settings:
        is_longer = settings["cut_first"] == "same compute"
        trained = fit_each_depth(task, options, exits, is_longer, rate, seed)
    else:
        trained = fit_model(task, options, settings, rate, seed)

    problem = problem_of(task, exits, trained)
    select, certify = [
        replace(profile, problem=problem.state_dict()).certificate()
        for profile in (trained.select, trained.certify)
    ]

    losses = trained.select.losses
    has_learned = np.isfinite(losses).all() and losses[-1] < problem.chance
    multipliers = None
    if trained.trainer.multipliers is not None:
        multipliers = trained.trainer.multipliers.values.tolist()

    result = {
        "select": losses.tolist(),
        "certify": trained.certify.losses.tolist(),
        "values": trained.certify.values.tolist(),
        "verdicts": [select.verdicts, certify.verdicts],
        "radii": certify.radii.tolist(),
        "share": certify.descent_share,
        "met": certify.feasible,
        "multipliers": multipliers,
        "seconds": sum(trained.seconds),
        "missed": [verdict != "met" for verdict in select.verdicts],
        "broke": not has_learned,
    }
    if len(trained.seconds) > 1:
        result["seconds_each"] = trained.seconds
    return result


@dataclass
class Trained:
    """A trained model: what it reaches on the select and the certify rows, and processor seconds of each training that
    it took."""

    trainer: DescentTrainer
    select: LayerProfile
    certify: LayerProfile
    seconds: list[float]


def fit_model(
    task: Task,
    options: argparse.Namespace,
    settings: dict,
    rate: float,
    seed: int,
    depth: int | None = None,
    longer: float = 1.0,
) -> Trained:
    """One model, cut to `depth` layers first where that is given."""
    settings = dict(settings)
    if settings.pop("in_turn", False):
        settings["callbacks"] = [InTurn]
    rise_to = settings.pop("rise_to", None)
    if rise_to is not None:
        settings["callbacks"] = [partial(RisingWeights, most=rise_to)]

    task.make(options)  # reads the data, once
    set_seed(seed)  # the head is drawn after it
    model, (rows, select, certify), own, extra = task.make(options)

    if depth is not None:
        model = truncate(model, depth)

    own.update(learning_rate=rate, per_device_train_batch_size=task.batch, seed=seed)
    own.update(settings, max_steps=round(task.steps_of(options) * longer))
    trainer, seconds = fit(model, rows, own, **extra)

    evaluate = partial(
        trainer.evaluate_layers,
        gamma=own.get("noise_gamma", 0.0),
        metric=task.metric,
        problem=None,
        batch_size=32,
    )
    return Trained(trainer, evaluate(select), evaluate(certify), [seconds])


def fit_each_depth(
    task: Task, options: argparse.Namespace, exits: dict, is_longer: bool, rates: Rate, seed: int
) -> Trained:
    """The whole model by plain training, and one for each exit that is cut to its depth first. Their losses are those
    of one model, which has the exits' own models in place of its layers."""
    trained = fit_at_best_rate(task, options, rates, seed)
    for layer in exits:
        longer = 1.0
        if is_longer:
            longer = task.num_layers / layer
        short = fit_at_best_rate(task, options, rates, seed, layer, longer)
        trained.select = with_last_of(short.select, trained.select, layer)
        trained.certify = with_last_of(short.certify, trained.certify, layer)
        trained.seconds += short.seconds

    return trained


def fit_at_best_rate(
    task: Task,
    options: argparse.Namespace,
    rates: Rate,
    seed: int,
    depth: int | None = None,
    longer: float = 1.0,
) -> Trained:
    """Plain training at each learning rate, of which the lowest loss on the select rows is kept."""
    plain = {"objective": "erm"}
    runs = [fit_model(task, options, plain, rate, seed, depth, longer) for rate in rates]
    best = min(runs, key=last_loss)
    return replace(best, seconds=[run.seconds[0] for run in runs])


def last_loss(trained: Trained) -> float:
    return float(np.nan_to_num(trained.select.losses[-1], nan=np.inf))


def with_last_of(short: LayerProfile, whole: LayerProfile, layer: int) -> LayerProfile:
    """The profile of the whole model on some rows, with the last layer of a shorter one on the same rows in the place
    of `layer`."""
    losses = whole.losses.copy()
    values = whole.values.copy()
    row_sums = whole.row_sums.copy()  # [rows, L + 1], the last column has the items
    losses[layer - 1] = short.losses[-1]
    values[layer - 1] = short.values[-1]
    row_sums[:, layer - 1] = short.row_sums[:, -2]
    return replace(whole, losses=losses, values=values, row_sums=row_sums)


def problem_of(task: Task, exits: dict, trained: Trained) -> DescentProblem:
    """What is asked of a model: the exits, or else what the trainer asks, or the line for one that asks nothing."""
    chance = task.chance
    if chance is None:
        chance = trained.select.chance
    if exits:
        return DescentProblem(None, chance, task.num_layers, exit_targets=exits)
    if trained.trainer.problem is not None:
        return trained.trainer.problem
    return DescentProblem("line", chance, task.num_layers)


# ---- searches ----


@cache
def finished_in(path: str) -> Runs:
    """The finished runs of a file, which is read once."""
    return Runs(path)


def runner(
    options: argparse.Namespace, task: str, arm: str, seed: int
) -> Callable[[tuple[float, ...], Rate], dict]:
    """Makes a run of these coefficients at this learning rate, or finds it among the finished ones."""
    exits = exits_of(task)
    steps = task_of(task).steps_of(options)
    finished = finished_in(options.output)

    def run(coefficients, rate):
        chosen = settings_of(arm, exits, coefficients)
        if arm == "ours":
            chosen.update(options.settings)

        key = {"task": task, "exits": exits, "rate": rate, "seed": seed}
        key.update(chosen, steps=steps)
        of_run = finished.get(key, lambda: train(task, options, exits, chosen, rate, seed))
        losses = [round(loss, 4) for loss in of_run["certify"]]
        start = f"{task}, {arm}, seed {seed}, {rate}, {coefficients}"
        print(f"{start}: met: {of_run['met']}, {losses}", flush=True)

        select = of_run["select"]
        ratios = [select[layer - 1] / select[-1] / (1 + eps) for layer, eps in exits.items()]
        beyond = sum(max(0.0, math.log(ratio)) for ratio in ratios)
        return dict(of_run, coefficients=coefficients, rate=rate, beyond=beyond)

    return run


def searches(options: argparse.Namespace) -> Iterator[tuple[str, str, int, list[dict]]]:
    """Task, arm, seed and runs of every search."""
    for seed, task, arm in itertools.product(options.seeds, options.tasks, options.arms):
        run = runner(options, task, arm, seed)
        rates = task_of(task).rates
        if arm in CUT_FIRST:
            rates = (rates,)  # all in one run, which keeps the best one of each model
        yield task, arm, seed, search(arm, len(exits_of(task)), rates, options.budget, run)


def defaults(options: argparse.Namespace) -> str:
    """Plain training and the package's defaults, each at its best learning rate, which the select rows of the first
    seed choose."""
    lines = [
        "| task | arm | rate | seed | met | share | f_l | metric |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = options.seeds[0]

    for kind, arm in itertools.product(options.defaults, ("plain", "ours")):
        task = f"{kind}_defaults"
        run_first = runner(options, task, arm, first)
        tried = [run_first((1.0,), rate) for rate in TASKS[kind].default_rates]
        rate = min(tried, key=lambda found: found["select"][-1])["rate"]

        for seed in options.seeds:
            run = runner(options, task, arm, seed)((1.0,), rate)
            losses = " ".join(f"{value:.3f}" for value in run["certify"])
            values = " ".join(f"{value:.3f}" for value in run["values"])
            share = "-"
            if run["share"] is not None:
                share = f"{run['share']:.2f}"

            lines.append(
                f"| {kind} | {arm} | {rate:g} | {seed} | {run['met']} | {share} | {losses} | {values} |"
            )
    return "\n".join(lines)


def found_by(runs: list[dict]) -> dict | None:
    """The run with which a search ends: of learning rates that both meet the specification the one with the lower loss
    on the select rows; `None` where none did."""
    met = (run for run in runs if run["met"])
    return min(met, key=lambda run: run["select"][-1], default=None)


def trainings_in(runs: list[dict]) -> int:
    """How many models were trained: one in a run, or one for each depth."""
    return sum(len(run.get("seconds_each", [run["seconds"]])) for run in runs)


def table(options: argparse.Namespace) -> str:
    """Of every search: models trained until the specification was met, how many of the first runs (one per learning
    rate) met it, f_L and exits of the run that did, processor seconds."""
    names = ["task", "arm", "seed", "runs", "met by first", "f_L", "f_k / f_L", "seconds"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for task, arm, seed, runs in searches(options):
        number = str(trainings_in(runs))
        shown = found_by(runs)
        if shown is None:
            number = f"not in {trainings_in(runs)}"
            shown = min(runs, key=lambda run: (run["broke"], run["beyond"]))

        last = shown["certify"][-1]
        losses = [shown["certify"][layer - 1] for layer in exits_of(task)]
        ratios = ", ".join(f"{loss / last:.3f}" for loss in losses)
        first = sum(run["met"] for run in runs[: len(task_of(task).rates)])
        seconds = sum(run["seconds"] for run in runs)

        lines.append(
            f"| {task} | {arm} | {seed} | {number} | {first} | {last:.4f} | {ratios} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def holds(options: argparse.Namespace) -> str:
    """Of every task and arm: how many searches met the specification, and with how many of the other seeds the
    settings that they found meet it as well."""
    pairs = {}

    for task, arm, seed, runs in list(searches(options)):
        pairs.setdefault((task, arm), [])
        found = found_by(runs)
        if found is not None:
            others = [runner(options, task, arm, other) for other in options.seeds if other != seed]
            met = [run(found["coefficients"], found["rate"])["met"] for run in others]
            pairs[task, arm].append(met)

    lines = ["| task | arm | searches that met it | pairs that hold |", "|---|---|---|---|"]
    for (task, arm), found in pairs.items():
        held = f"{sum(map(sum, found))} of {sum(map(len, found))}"
        lines.append(f"| {task} | {arm} | {len(found)} of {len(options.seeds)} | {held} |")
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tasks = [f"{kind}_{name}" for kind, task in TASKS.items() for name in task.exits]
    parser.add_argument(
        "--tasks", nargs="+", choices=tasks, default=["denoiser_one", "denoiser_two"]
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=8, help="runs of an arm at most")
    parser.add_argument(
        "--output",
        default="runs_to_specification.jsonl",
        help="finished runs; read and appended to",
    )
    parser.add_argument("--minilm", help="folder of the encoder all-MiniLM-L6-v2")
    parser.add_argument(
        "--rt_polarity", help="folder with train.parquet, validation.parquet, test.parquet"
    )
    parser.add_argument("--imdb", help="folder with train.parquet and test.parquet")
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="of ours, in place of its own, as JSON"
    )
    parser.add_argument("--stories260k", help="folder of the language model stories260K")
    parser.add_argument("--smollm2", help="folder of the language model SmolLM2-135M")
    parser.add_argument("--alpaca", help="train.parquet of Stanford Alpaca")
    help = "compare the package's defaults to plain training, instead"
    parser.add_argument("--defaults", nargs="+", choices=TASKS, default=[], help=help)
    help = "train with the settings that each search found and every other seed, and count those that meet it, instead"
    parser.add_argument("--holds", action="store_true", help=help)
    parser.add_argument(
        "--smoke", action="store_true", help="four steps on a few rows, to see that it works"
    )
    options = parser.parse_args(argv)

    asked = options.defaults
    if not asked:
        asked = {name.split("_")[0] for name in options.tasks}
    for kind in asked:
        needs = TASKS[kind].needs
        if not all(getattr(options, name) for name in needs):
            parser.error(f"The tasks of {kind} need --{' and --'.join(needs)}.")

    return options


def main(argv: list[str] | None = None) -> str:
    options = parse(argv)
    torch.set_num_threads(1)
    if options.defaults:
        return defaults(options)
    if options.holds:
        return holds(options)
    return table(options)


if __name__ == "__main__":
    print(main())
