"""What the benchmarks share: what is compared takes turns in one process, and a figure is a ratio within one turn."""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback, TrainerCallback

from hf_descent import DescentConfig, DescentTrainer


class Clock(TrainerCallback):
    """Wall and processor seconds of each step of training, the optimizer's and the dual step included; of the first
    one from the beginning of training on: layers are found on its batch before it begins."""

    def __init__(self):
        self.steps, self._start = [], None

    def on_train_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter(), time.process_time()

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = self._start or (time.perf_counter(), time.process_time())

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append(
            (time.perf_counter() - self._start[0], time.process_time() - self._start[1])
        )
        self._start = None


class InTurn(TrainerCallback):
    """One depth a step, in turn: the loss of one exit alone is minimised, or that of the last layer.

    With `objective="fixed"` and `normalize_weights`. Sorted fine-tuning (arXiv 2309.08968) trains nested models so.
    """

    MOST = 1e6  # a weight beside which the last layer's own weight of 1 is nothing

    def __init__(self, trainer):
        self._trainer = trainer

    def on_step_begin(self, args, state, control, **kwargs):
        weights = self._trainer.multipliers.values
        weights.zero_()
        turn = state.global_step % (len(weights) + 1)
        if turn < len(weights):
            weights[turn] = self.MOST


class RisingWeights(TrainerCallback):
    """The weights of the constraints rise from 0 to `most` with the steps, whatever the losses are.

    With `objective="fixed"`.
    """

    def __init__(self, trainer, most: float = 1.0):
        self._trainer = trainer
        self._most = most

    def on_step_begin(self, args, state, control, **kwargs):
        self._trainer.multipliers.values.fill_(self._most * state.global_step / state.max_steps)


def parser(description: str, **sizes: int) -> argparse.ArgumentParser:
    """Of a benchmark with these sizes, whose defaults are given, and with rounds, threads and a file for results."""
    found = argparse.ArgumentParser(description=description.split("\n")[0])
    for name, default in {**sizes, "rounds": 5, "threads": 2}.items():
        found.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    found.add_argument("--output", type=Path, help="JSON file for the results")
    return found


def take_turns(
    arms: Mapping[str, Callable[[], Any]], rounds: int, warm_ups: int = 1
) -> dict[str, list]:
    """What each arm measures in each round, after those that warm up; where time runs out (TimeoutError), in the
    rounds that came to their end."""
    found = []
    try:
        for _ in range(warm_ups + rounds):
            found.append({name: measure() for name, measure in arms.items()})
    except TimeoutError:
        if len(found) <= warm_ups:
            raise
    return {name: [turn[name] for turn in found[warm_ups:]] for name in arms}


def ratios(
    seconds: Mapping[str, Sequence[float]], baseline: str
) -> dict[str, tuple[float, float, float]]:
    """Quartiles of each arm's ratio to the baseline in the same round."""
    return {
        name: quartiles([value / other for value, other in zip(values, seconds[baseline])])
        for name, values in seconds.items()
    }


def report(
    seconds: Mapping[str, Sequence[float]], baseline: str, output: Path | None = None, **facts: Any
) -> None:
    """Prints median and quartiles of each arm's seconds, and of their ratios to the baseline's of the same round; with
    an `output`, writes every number and the `facts` as JSON."""
    for name, (least, ratio, most) in ratios(seconds, baseline).items():
        low, middle, high = quartiles(seconds[name])
        print(
            f"{name:28} {middle:.3f} s (quartiles {low:.3f} to {high:.3f}), ratio {ratio:.3f} ({least:.3f} to "
            f"{most:.3f}) in {len(seconds[name])} rounds"
        )
    write(output, seconds=seconds, **facts)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float(low), float(middle), float(high)


def fit(model, rows, settings: dict, **extra) -> tuple[DescentTrainer, float]:
    """A quiet trained trainer, of which `settings["callbacks"]` are made, and the processor seconds that it took."""
    settings = {"save_strategy": "no", **settings}
    callbacks = settings.pop("callbacks", [])
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": "none", "disable_tqdm": True, "log_level": "error"}
        args = DescentConfig(folder, use_cpu=True, logging_steps=100, **quiet, **settings)
        trainer = DescentTrainer(model, args, train_dataset=rows, **extra)
        trainer.remove_callback(PrinterCallback)
        for callback in callbacks:
            trainer.add_callback(callback(trainer))
        start = time.process_time()
        trainer.train()
        return trainer, time.process_time() - start


def commit() -> str:
    """The commit of the code."""
    describe = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(describe, capture_output=True, text=True).stdout.strip()


class Runs:
    """Finished runs in a file of JSON lines, by their settings, each with the commit of its code."""

    def __init__(self, path: str):
        self._path = path
        self._known = {}
        self._commit = commit()
        if os.path.exists(path):
            with open(path) as file:
                for line in map(json.loads, file):
                    self._known[json.dumps(line["settings"], sort_keys=True)] = line

    def all(self) -> list[dict]:
        return list(self._known.values())

    def get(self, settings: dict, make: Callable[[], dict]) -> dict:
        key = json.dumps(settings, sort_keys=True)
        if key not in self._known:
            # Six digits are enough for the tables.
            found = json.loads(
                json.dumps(make()), parse_float=lambda digits: float(f"{float(digits):.6g}")
            )
            self._known[key] = found = {"settings": settings, **found, "commit": self._commit}
            with open(self._path, "a") as file:
                file.write(json.dumps(found) + "\n")
        return self._known[key]


def write(output: Path | None, **facts: Any) -> None:
    """Writes the facts as JSON, with the device and the version of torch; of a path its last part."""
    if output is not None:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        facts = {"device": device, "torch": torch.__version__, **facts}
        output.write_text(
            json.dumps(facts, indent=1, default=lambda path: getattr(path, "name", str(path)))
        )
