"""One model with several depths against one model for each depth.

    python recipes/benchmarks/cut_first.py denoiser
    python recipes/benchmarks/cut_first.py minilm --minilm FOLDER --rt_polarity FOLDER

The rival of an exit is the model that is cut to that depth first and then fine-tuned. It needs a run for each depth;
the other arms serve every depth from one run:

- cut K: the first K layers alone, with the same steps; "cut K, same compute" takes L / K times as many;
- plain: the whole model, whose lower layers are not trained to be read;
- default, whole path: `objective="descent"` with the default strength and with `descent_strength=1`;
- deep supervision: the sum of the losses of all layers;
- sorted: one depth a step, in turn (after Sorted fine-tuning, arXiv 2309.08968, with the cut-offs one by one).

Each arm has its own best learning rate, by the loss of its last layer on rows that are neither trained on nor
reported. The first seed chooses it. Where another seed breaks down at that rate, the next best one is taken for all
seeds. Finished runs are kept in `--output`, a JSON line each, and are not repeated.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from harness import InTurn, Runs, fit
from runs_to_specification import TASKS
from transformers import set_seed

from hf_descent.early_exit import truncate


RESULTS = Path(__file__).parent / "results" / "cut_first.jsonl"
RATES = {"denoiser": (5e-4, 1e-3, 2e-3, 4e-3), "minilm": (5e-5, 1e-4, 2e-4)}
BROKEN = 2.0  # a seed whose loss is so many times that of the first has broken down


def arms(depth: int) -> dict[str, dict]:
    """The settings of each arm; `keep` is the number of layers to which a model is cut first."""
    chosen = {
        "plain": {"objective": "erm"},
        "default": {"objective": "descent"},
        "whole path": {"objective": "descent", "descent_strength": 1.0},
        "deep supervision": {"objective": "deep_supervision"},
        "sorted": {
            "objective": "fixed",
            "exit_targets": dict.fromkeys(range(1, depth), 1.0),  # names the layers below the last
            "fixed_multipliers": [0.0] * (depth - 1),
            "dual_warmup_steps": 0.0,
            "normalize_weights": True,
            "callbacks": [InTurn],
        },
    }

    for layer in range(1, depth):
        chosen[f"cut {layer}"] = {"objective": "erm", "keep": layer}
        longer = {"objective": "erm", "keep": layer, "longer": depth / layer}
        chosen[f"cut {layer}, same compute"] = longer

    return chosen


def train(name: str, options: argparse.Namespace, settings: dict, rate: float, seed: int) -> dict:
    """Losses and metric of every layer of one run, on the rows to select on and to report on."""
    task = TASKS[name]
    settings = dict(settings)
    keep = settings.pop("keep", None)
    longer = settings.pop("longer", 1.0)

    task.make(options)  # reads the data, once
    set_seed(seed)  # the head is drawn after it
    model, (rows, select, report), config, extra = task.make(options)
    if keep is not None:
        model = truncate(model, keep)

    config.update(
        learning_rate=rate,
        per_device_train_batch_size=task.batch,
        max_steps=round(task.steps_of(options) * longer),
        seed=seed,
    )
    config.update(settings)
    trainer, seconds = fit(model, rows, config, **extra)

    measure = {
        "gamma": config.get("noise_gamma", 0.0),
        "metric": task.metric,
        "problem": None,
        "batch_size": 32,
    }
    chosen = trainer.evaluate_layers(select, **measure)
    shown = trainer.evaluate_layers(report, **measure)
    return {
        "select": chosen.losses.tolist(),
        "report": shown.losses.tolist(),
        "values": shown.values.tolist(),
        "seconds": seconds,
    }


def runs(options: argparse.Namespace) -> Iterator[tuple[str, float, int, dict]]:
    """Arm, learning rate, seed and result of every run: the first seed at all rates, the others at the best one at
    which none of them breaks down."""
    finished = Runs(options.output)
    chosen = arms(TASKS[options.task].num_layers)
    first, *others = options.seeds

    def run(arm: str, rate: float, seed: int) -> dict:
        key = {"task": options.task, "arm": arm, "rate": rate, "seed": seed, "smoke": options.smoke}
        return finished.get(key, lambda: train(options.task, options, chosen[arm], rate, seed))

    wanted = chosen if options.arms is None else options.arms
    rates = RATES[options.task] if options.rates is None else options.rates
    for arm in wanted:
        losses = {}
        for rate in rates:
            result = run(arm, rate, first)
            losses[rate] = last_loss(result)
            yield arm, rate, first, result

        for rate in sorted(losses, key=losses.get):
            results = [run(arm, rate, seed) for seed in others]

            for seed, result in zip(others, results):
                yield arm, rate, seed, result
            if all(last_loss(result) < BROKEN * losses[rate] for result in results):
                break


def last_loss(result: dict) -> float:
    """Of the last layer on the rows to select on."""
    return float(np.nan_to_num(result["select"][-1], nan=np.inf))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=RATES)
    parser.add_argument("--arms", nargs="+", help="all where not given")
    parser.add_argument("--rates", type=float, nargs="+", help="the task's own where not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minilm", help="folder of the encoder all-MiniLM-L6-v2")
    parser.add_argument("--rt_polarity", help="folder with train, validation and test.parquet")
    parser.add_argument("--output", default=str(RESULTS), help="finished runs, read and added to")
    parser.add_argument("--smoke", action="store_true", help="four steps, to see that it works")
    options = parser.parse_args(argv)
    if options.task == "minilm" and not (options.minilm and options.rt_polarity):
        parser.error("minilm needs --minilm and --rt_polarity.")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    for arm, rate, seed, result in runs(options):
        losses = [round(loss, 4) for loss in result["report"]]
        print(f"{arm}, {rate:g}, seed {seed}: {losses}, {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
