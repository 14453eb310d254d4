"""Metric and measured latency of a model at every exit layer."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..evaluation import layer_profile
from ..evaluation.scoring import Evaluation, Result, format_table, greater_is_better
from ..readout.replay import evaluating
from .truncation import truncate


@dataclass
class ExitProfile(Result):
    """Metric, loss and latency of a model cut after each of its L layers; layer l at index l-1.

    Attributes:
        metric (`str`), greater_is_better (`bool`): name of the metric, and whether more of it is better.
        values, losses (float64 `[L]`): the metric and the task loss on held-out data.
        seconds (float64 `[L]`): wall-clock seconds per sample of the standalone truncated model.
        batch_size (`int`), device (`str`): samples per batch, and where it was measured.
    """

    metric: str
    values: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    batch_size: int
    device: str = "cpu"
    greater_is_better: bool = True

    @property
    def speedups(self) -> np.ndarray:
        """Latency of the whole model over that of each exit, `[L]`."""
        return self.seconds[-1] / self.seconds

    def cheapest(self, share: float = 0.99) -> int:
        """The first layer whose metric is at least `share` of the last layer's; at most 1 / `share` of it, where less
        is better."""
        last = self.values[-1]
        enough = self.values >= share * last if self.greater_is_better else share * self.values <= last
        return int(np.argmax([*enough[:-1], True])) + 1

    def __str__(self) -> str:
        rows = [["layer", self.metric, "loss", "ms/sample", "speed-up"]]
        for layer, (value, loss, seconds, speedup) in enumerate(
            zip(self.values, self.losses, self.seconds, self.speedups), start=1
        ):
            rows.append([f"{layer}", f"{value:.5g}", f"{loss:.5g}", f"{1e3 * seconds:.4g}", f"{speedup:.2f}x"])
        table, layer = format_table(rows), self.cheapest()
        return (
            f"{table}\n99 % of the last layer's {self.metric} from layer {layer} of {len(self.values)} on, "
            f"{self.speedups[layer - 1]:.2f} times as fast (batches of {self.batch_size} on {self.device})"
        )


def exit_profile(
    model: nn.Module, dataset: Dataset | DataLoader, *, timing_batches: int = 4, repeats: int = 3, **settings
) -> ExitProfile:
    """Metric of every exit on all of `dataset`, and latency of the truncated models on its first batches.

    Each truncated model is timed in turns with the whole one; its latency is the whole one's times the median ratio.

    Args:
        model (`nn.Module`): a model that [`truncate`] can cut, on its device; one shorter copy at a time is held.
        dataset (`Dataset` or `DataLoader`): labelled held-out data.
        timing_batches (`int`), repeats (`int`): batches that are timed, and timings of each model.
        settings: `metric`, `batch_size`, `processing_class` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError as of [`truncate`] and [`layer_profile`], or for a number below 1.
    """
    if timing_batches < 1 or repeats < 1:
        raise ValueError(f"`timing_batches` is {timing_batches} and `repeats` is {repeats}; both must be at least 1.")
    profile = layer_profile(model, dataset, **settings)
    ratios, whole = [], []
    with evaluating(model) as device:
        batches = list(islice(load_batches(model, dataset, **settings), timing_batches))
        samples = sum(rows_of(model, batch) for batch in batches)
        for layer in range(1, len(profile.losses) + 1):
            short = truncate(model, layer, batches[0]) if layer < len(profile.losses) else model
            pairs = turns([lambda short=short: _run(short, batches), lambda: _run(model, batches)], repeats, device)
            ratios.append(np.median(pairs[0] / pairs[1]))
            whole.extend(pairs[1])
    return ExitProfile(
        profile.metric,
        profile.values,
        profile.losses,
        np.median(whole) / samples * np.array([*ratios[:-1], 1.0]),
        rows_of(model, batches[0]),
        str(device),
        greater_is_better(settings.get("metric", "accuracy")),
    )


def load_batches(model: nn.Module, dataset: Dataset | DataLoader, **settings) -> Iterator[dict[str, Any]]:
    """Batches of `dataset` in order, collated as `Trainer` does, on the model's device; ValueError for none."""
    batch = None
    for _, batch in Evaluation(model, dataset, **settings).batches():
        yield dict(batch)
    if batch is None:
        raise ValueError("`dataset` is empty; give labelled held-out data.")


def rows_of(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Samples of a batch: a `DataLoader` has a batch size of its own."""
    main = batch.get(getattr(model, "main_input_name", "input_ids"))
    return len(next(iter(batch.values())) if main is None else main)


def turns(calls: list[Callable[[], Any]], repeats: int, device: torch.device) -> np.ndarray:
    """Wall-clock seconds of `calls`, timed one after the other in each round, `[calls, repeats]`; ValueError where
    `repeats` is below 1. One more round comes first, to warm up."""
    if repeats < 1:
        raise ValueError(f"`repeats` is {repeats}; give the number of timings, at least 1.")
    seconds = np.empty((len(calls), repeats + 1))
    for repeat in range(repeats + 1):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            seconds[index, repeat] = time.perf_counter() - start
    return seconds[:, 1:]


def _run(model, batches):
    for batch in batches:
        model(**batch)
