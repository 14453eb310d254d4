"""Measures what each exit layer of a model is worth: metric, loss and latency."""

from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..evaluation import LayerProfile, layer_profile
from ..evaluation.intervals import limits_above_chance
from ..evaluation.scoring import Evaluation, Result, format_table, greater_is_better
from ..readout.replay import Readout, evaluating
from .partial import PartialForward
from .timing import turns


TIMED_BATCHES = 4


@dataclass
class ExitProfile(Result):
    """Metric, loss and latency of a model that stops after each of its L layers; layer l at index l-1.

    Attributes:
        metric (`str`), greater_is_better (`bool`): name of the metric, and whether more of it is better.
        values, losses (float64 `[L]`): the metric and the task loss on held-out data.
        seconds (float64 `[L]`): wall-clock seconds per sample.
        batch_size (`int`), device (`str`): samples per batch, and the device of the measurement.
        chance (`float`, *optional*): the loss of guessing (of the best constant prediction of these labels).
        kept_low (float64 `[L]`, *optional*): the share that each layer keeps of the last one's metric, by the lower
            ends of 95 % intervals.
        learned (`list[bool]`, *optional*): whether each layer's loss is shown to be below 98 % of `chance`.
    """

    metric: str
    values: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    batch_size: int
    device: str = "cpu"
    greater_is_better: bool = True
    chance: float | None = None
    kept_low: np.ndarray | None = None
    learned: list[bool] | None = None

    @property
    def speedups(self) -> np.ndarray:
        """How many times faster each exit is than the whole model, `[L]`."""
        return self.seconds[-1] / self.seconds

    @property
    def kept(self) -> np.ndarray:
        """What each layer keeps of the last one's metric, as a share, `[L]`. If less of the metric is better, it is
        the last layer's metric divided by the layer's. NaN or infinite if a metric is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.greater_is_better:
                return self.values / self.values[-1]
            return self.values[-1] / self.values

    def shown(self, share: float = 0.99) -> int | None:
        """The first layer before the last that keeps at least `share` of the last layer's metric and is not at chance,
        both with the confidence of a verdict; `None` if there is none."""
        if self.kept_low is None or self.learned is None:
            return None
        is_shown = (self.kept_low >= share) & np.array(self.learned)
        layers = np.flatnonzero(is_shown[:-1])
        return int(layers[0]) + 1 if len(layers) else None

    def __str__(self) -> str:
        rows = [["layer", self.metric, "kept", "at least (95 %)", "loss", "ms/sample", "speed-up"]]
        kept_low = self.kept_low
        if kept_low is None:
            kept_low = np.full(len(self.values), np.nan)
        columns = (self.values, self.kept, kept_low, self.losses, self.seconds, self.speedups)
        for layer, (value, kept, low, loss, seconds, speedup) in enumerate(zip(*columns), start=1):
            shares = [f"{100 * kept:.1f} %", f"{100 * low:.1f} %" if np.isfinite(low) else "-"]
            times = [f"{1e3 * seconds:.4g}", f"{speedup:.2f}x"]
            rows.append([f"{layer}", f"{value:.5g}", *shares, f"{loss:.5g}", *times])
        return (
            f"{format_table(rows)}\nBatches of {self.batch_size} on {self.device}. {self.headline}"
        )

    @property
    def headline(self) -> str:
        """The first exit that the examples show to be good, in words."""
        layer = self.shown()
        depth = len(self.values)
        if layer is None:
            return f"No layer before the last is shown to keep 99 % of the {self.metric}."
        return (
            f"Layer {layer} of {depth} is shown to keep 99 % of the {self.metric}, and is "
            f"{self.speedups[layer - 1]:.2f} times as fast."
        )


def exit_profile(
    model: nn.Module, dataset: Dataset | DataLoader, *, repeats: int = 3, **settings
) -> ExitProfile:
    """Measure the metric of every exit on `dataset`, and its latency on the first batches, with the exits timed in
    turns.

    Args:
        model (`nn.Module`): a model with a shared readout, on its device.
        dataset (`Dataset` or `DataLoader`): labelled held-out data.
        repeats (`int`): how often each exit is timed.
        settings: `metric`, `batch_size`, `processing_class` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError as in [`layer_profile`], and if `repeats` is below 1.
    """
    profile = layer_profile(model, dataset, **settings)
    evaluation = Evaluation(model, dataset, **settings | {"progress": False})
    batches = [dict(batch) for _, batch in islice(evaluation.batches(), TIMED_BATCHES)]
    forward = PartialForward(model, Readout.probe(model, batches[0]).stack)

    def run_to(layer: int) -> None:
        for batch in batches:
            forward(1, layer, **batch)

    with evaluating(model) as device, forward.attached():
        exits = range(1, len(profile.losses) + 1)
        calls = [partial(run_to, layer) for layer in exits]
        seconds = turns(calls, repeats, device, settings.get("progress", False))  # [layers]
    seconds /= sum(find_batch_size(batch) for batch in batches)
    return ExitProfile(
        metric=profile.metric,
        values=profile.values,
        losses=profile.losses,
        seconds=seconds,
        batch_size=find_batch_size(batches[0]),
        device=str(device),
        greater_is_better=greater_is_better(settings.get("metric", "accuracy")),
        chance=profile.chance,
        kept_low=profile.kept_low,
        learned=_learned(profile),
    )


def _learned(profile: LayerProfile) -> list[bool]:
    """Whether each layer's loss is shown not to be at chance; False for all if the loss at chance is not known."""
    if not profile.chance:
        return [False] * len(profile.losses)
    _, upper = limits_above_chance(profile.row_sums, profile.chance)
    return (upper < 0).tolist()
