"""What the package's defaults cost and give, by kind of model: plain training against constraints, and other settings.

    python recipes/benchmarks/defaults.py --kinds lora decoder [--arms plain defaults ...] [--seeds 0 1 2] [--steps N]

Kinds of models, each at one learning rate, with few steps:

- lora, decoder: stories260K on Alpaca completions (300 steps of 8 rows), LoRA of rank 8 or all weights;
- smollm2: SmolLM2-135M on the same, LoRA of rank 8 (50 steps of 2 rows);
- encoder: MiniLM under the token mean on rt-polarity (300 steps of 16 rows);
- denoiser: that of `hf-descent demo` (600 steps of 32 clips).

The arms are in `ARMS`. Finished runs are kept in `--output`, one JSON line each, and are not repeated. The table has
the loss of the last layer, its price (how much higher it is than that of plain training with the same seed), and the
gain: the mean decrease of the other layers' losses, in logarithms, also as a share of what the constraints give
without a limit on the last layer's loss. The arms with an exit have a table of their own.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from datasets import load_dataset
from harness import Runs, fit
from peft import LoraConfig
from runs_to_specification import TASKS
from transformers import set_seed

from hf_descent import SFTDescentConfig, SFTDescentTrainer


ARMS = {
    "plain": {"objective": "erm"},
    "defaults": {},
    # The defaults before there was a limit, and before language models had a dual rate of their own.
    "no limit": {"max_last_layer_rise": None, "dual_learning_rate": 0.02},
    "dual rate 0.02": {"dual_learning_rate": 0.02},
    "dual rate 0.02, warm-up 0.1": {"dual_learning_rate": 0.02, "dual_warmup_steps": 0.1},
    "dual rate 0.005": {"dual_learning_rate": 0.005},
    "dual rate 0.002": {"dual_learning_rate": 0.002},
    "dual rate 0.001": {"dual_learning_rate": 0.001},
    "dual rate 0.0005": {"dual_learning_rate": 0.0005},
    "strength 0.25": {"descent_strength": 0.25},
    "exit": {"exit_targets": {4: 0.25}},
    "exit, dual rate 0.002": {"exit_targets": {4: 0.25}, "dual_learning_rate": 0.002},
    "exit, dual rate 0.0002": {"exit_targets": {4: 0.25}, "dual_learning_rate": 0.0002},
}
RATES = {"lora": 2e-3, "decoder": 3e-3, "smollm2": 5e-4, "encoder": 1e-4, "denoiser": 1e-3}
STEPS = {"lora": 300, "decoder": 300, "smollm2": 50, "encoder": 300, "denoiser": 600}
LANGUAGE_MODELS = {"lora": "stories260k", "decoder": "stories260k", "smollm2": "smollm2"}
OUTPUT = Path(__file__).parent / "results" / "defaults.jsonl"
COLUMNS = [
    "kind", "steps", "arm", "seeds", "first layer", "last layer", "price", "highest price", "gain", "share of gain",
]  # fmt: skip
EXIT_COLUMNS = ["kind", "steps", "arm", "seeds", "reached", "f_4 / f_L", "last layer", "price"]
GAIN_OF = "no limit"  # the arm whose share of the gain is 1


def as_completion(row: dict) -> dict:
    parts = [row["instruction"], row["input"]]
    return {"prompt": "\n".join(filter(None, parts)), "completion": " " + row["output"]}


@cache
def completions(folder: str):
    """2,400 rows to train on and 150 to measure on; the settings were chosen by the other 100 of the test file."""
    files = {name: os.path.join(folder, f"{name}.parquet") for name in ("train", "test")}
    data = load_dataset("parquet", data_files=files)
    train = data["train"].shuffle(0).select(range(2400))
    test = data["test"].select(range(100, 250))
    return [rows.map(as_completion, remove_columns=rows.column_names) for rows in (train, test)]


def train_decoder(kind: str, options: argparse.Namespace, settings: dict, seed: int, steps: int):
    """A trainer that was trained on Alpaca, the rows to measure on, and the processor seconds of training."""
    train, test = completions(options.alpaca)
    rows = 8
    if kind == "smollm2":  # of which a row takes a second of one core
        rows = 2
        test = test.select(range(20))

    lora = None
    if kind != "decoder":
        lora = LoraConfig(r=8, target_modules="all-linear")
    set_seed(seed)

    with tempfile.TemporaryDirectory() as folder:
        args = SFTDescentConfig(
            folder,
            max_steps=steps,
            per_device_train_batch_size=rows,
            max_length=128,
            learning_rate=RATES[kind],
            seed=seed,
            logging_steps=50,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        model = getattr(options, LANGUAGE_MODELS[kind])
        trainer = SFTDescentTrainer(
            model, args, train_dataset=train, eval_dataset=test, peft_config=lora
        )

        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        profile = trainer.evaluate_layers(problem=None)
    return trainer, profile, seconds


def train_other(kind: str, options: argparse.Namespace, settings: dict, seed: int, steps: int):
    """As `train_decoder`, of an encoder or a denoiser."""
    task = TASKS["denoiser"]
    if kind != "denoiser":
        task = TASKS["minilm"]

    task.make(options)  # reads the data, once
    set_seed(seed)
    model, (rows, _, test), given, extra = task.make(options)
    given.update(learning_rate=RATES[kind], per_device_train_batch_size=task.batch)
    given.update(settings, max_steps=steps, seed=seed)
    trainer, seconds = fit(model, rows, given, **extra)

    gamma = given.get("noise_gamma", 0.0)
    profile = trainer.evaluate_layers(
        test, gamma=gamma, metric=task.metric, problem=None, batch_size=32
    )
    return trainer, profile, seconds


def measure(kind: str, arm: str, options: argparse.Namespace, seed: int, steps: int) -> dict:
    train = train_other
    if kind in LANGUAGE_MODELS:
        train = train_decoder
    trainer, profile, seconds = train(kind, options, ARMS[arm], seed, steps)

    multipliers = None
    if trainer.multipliers is not None:
        multipliers = trainer.multipliers.values.tolist()
    return {
        "losses": profile.losses.tolist(),
        "values": profile.values.tolist(),
        "multipliers": multipliers,
        "seconds": seconds,
    }


def price(run: dict, plain: dict) -> float:
    """By what share the last layer's loss is higher than that of plain training."""
    return run["losses"][-1] / plain["losses"][-1] - 1


def gain(run: dict, plain: dict) -> float:
    """The mean decrease of the losses of the layers below the last, in logarithms, from those of plain training."""
    return float(np.mean(np.log(np.divide(plain["losses"], run["losses"]))[:-1]))


def means_of(of_arm: dict[int, dict], plain: dict[int, dict], most: dict[int, dict]) -> list[str]:
    """The cells of an arm, whose runs are given by seed: over the seeds that plain training has, too."""
    seeds = [seed for seed in of_arm if seed in plain]
    first, last = (np.mean([of_arm[seed]["losses"][layer] for seed in seeds]) for layer in (0, -1))
    cells = [f"{len(seeds)}", f"{first:.3f}", f"{last:.3f}"]

    if of_arm is plain:
        return [*cells, "-", "-", "-", "-"]

    prices = [price(of_arm[seed], plain[seed]) for seed in seeds]
    gains = [gain(of_arm[seed], plain[seed]) for seed in seeds]

    share = "-"
    both = [seed for seed in seeds if seed in most]
    if both:
        own = np.mean([gain(of_arm[seed], plain[seed]) for seed in both])
        full = np.mean([gain(most[seed], plain[seed]) for seed in both])
        share = f"{own / full:.2f}"
    return [
        *cells,
        f"{np.mean(prices):+.1%}",
        f"{max(prices):+.1%}",
        f"{np.mean(gains):.2f}",
        share,
    ]


def exit_means_of(of_arm: dict[int, dict], plain: dict[int, dict], exits: dict) -> list[str]:
    """The cells of an arm with one exit, over the seeds that plain training has, too; those of plain training itself
    say how far it is from the exit."""
    ((layer, excess),) = exits.items()
    seeds = [seed for seed in of_arm if seed in plain]
    last = [of_arm[seed]["losses"][-1] for seed in seeds]
    ratios = [of_arm[seed]["losses"][layer - 1] / of_arm[seed]["losses"][-1] for seed in seeds]

    reached = sum(ratio <= 1 + excess for ratio in ratios)
    prices = [price(of_arm[seed], plain[seed]) for seed in seeds]
    return [
        f"{len(seeds)}",
        f"{reached} of {len(seeds)}",
        f"{np.mean(ratios):.2f}",
        f"{np.mean(last):.3f}",
        f"{np.mean(prices):+.1%}",
    ]


def runs_by_kind(runs: Sequence[dict]) -> dict[tuple[str, int], dict[str, dict[int, dict]]]:
    """The runs by kind and number of steps, then by arm, then by seed; kinds in the order of `RATES`."""
    found = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        settings = run["settings"]
        found[settings["kind"], settings["steps"]][settings["arm"]][settings["seed"]] = run

    kinds = list(RATES)
    return dict(sorted(found.items(), key=lambda pair: (kinds.index(pair[0][0]), pair[0][1])))


def table(runs: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a line for each kind, number of steps and arm without an exit."""
    lines = []
    for (kind, steps), arms in runs_by_kind(runs).items():
        for arm, settings in ARMS.items():
            if arms["plain"].keys() & arms[arm].keys() and "exit_targets" not in settings:
                cells = means_of(arms[arm], arms["plain"], arms[GAIN_OF])
                lines.append([kind, str(steps), arm, *cells])
    return COLUMNS, lines


def exit_table(runs: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    """The same of the arms with an exit, and of plain training beside them."""
    with_exit = {arm: settings for arm, settings in ARMS.items() if "exit_targets" in settings}
    exits = ARMS["exit"]["exit_targets"]

    lines = []
    for (kind, steps), arms in runs_by_kind(runs).items():
        if not any(arms[arm] for arm in with_exit):
            continue
        for arm in ("plain", *with_exit):
            if arms["plain"].keys() & arms[arm].keys():
                cells = exit_means_of(arms[arm], arms["plain"], exits)
                lines.append([kind, str(steps), arm, *cells])
    return EXIT_COLUMNS, lines


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=RATES, default=["lora", "decoder"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["plain", "defaults"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", default=str(OUTPUT), help="finished runs; appended to")
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of those of the kind")
    parser.add_argument("--stories260k", help="folder of the language model stories260K")
    parser.add_argument("--smollm2", help="folder of the language model SmolLM2-135M")
    parser.add_argument("--alpaca", help="folder with train.parquet and test.parquet of Alpaca")
    parser.add_argument("--minilm", help="folder of the encoder all-MiniLM-L6-v2")
    parser.add_argument(
        "--rt_polarity", help="folder with train.parquet, validation.parquet, test.parquet"
    )
    parser.add_argument("--smoke", action="store_true", help="four steps, to see that it works")
    options = parser.parse_args(argv)

    needed = {kind: (model, "alpaca") for kind, model in LANGUAGE_MODELS.items()}
    needed["encoder"] = ("minilm", "rt_polarity")

    for kind in options.kinds:
        for name in needed.get(kind, ()):
            if not getattr(options, name):
                parser.error(f"The kind {kind} needs --{name}.")

    return options


def main(argv: list[str] | None = None) -> str:
    options = parse(argv)
    torch.set_num_threads(1)
    finished = Runs(options.output)
    for seed, kind, arm in itertools.product(options.seeds, options.kinds, options.arms):
        steps = STEPS[kind]
        if options.steps is not None:
            steps = options.steps
        if options.smoke:
            steps = 4
        key = {"kind": kind, "arm": arm, "seed": seed, "steps": steps, **ARMS[arm]}
        run = finished.get(key, partial(measure, kind, arm, options, seed, steps))
        print(kind, arm, seed, [round(loss, 3) for loss in run["losses"]], flush=True)

    tables = [table(finished.all()), exit_table(finished.all())]
    return "\n\n".join(markdown(columns, lines) for columns, lines in tables if lines)


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(main())
