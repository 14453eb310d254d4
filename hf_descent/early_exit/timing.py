"""Wall-clock times of several calls, measured in turns."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..logs import progress_bar


def turns(
    calls: list[Callable[[], Any]], repeats: int, device: torch.device, progress: bool
) -> np.ndarray:
    """Median wall-clock seconds of each of `calls`, `[calls]`. Each round times all of them, one after the other; a
    first round warms up. ValueError if `repeats` is below 1."""
    if repeats < 1:
        raise ValueError(f"`repeats` is {repeats}; give the number of timings, at least 1.")
    seconds = np.empty((len(calls), repeats + 1))
    order = [*np.ndindex(repeats + 1, len(calls))]
    for repeat, index in progress_bar(order, progress, desc="Timing"):
        start = time.perf_counter()
        calls[index]()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds[index, repeat] = time.perf_counter() - start
    return np.median(seconds[:, 1:], axis=1)
