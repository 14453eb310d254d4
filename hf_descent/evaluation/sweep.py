"""What a noise curve is made of: one batch, scored at every level and draw."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device
from accelerate.utils.memory import clear_device_cache

from ..readout.replay import Readout
from ..readout.tape import config_flags, switched_off
from .scoring import noise_key


@dataclass
class Rows:
    """The rows of one batch, perturbed and collated for a level and a draw."""

    rows: list[Mapping[str, Any]]
    first: int
    perturbation: Callable
    seed: int
    collate: Callable
    device: torch.device

    def inputs(self, gamma: float, draw: int) -> Mapping[str, Any]:
        rows = []
        for number, row in enumerate(self.rows, start=self.first):
            stream = np.random.SeedSequence(self.seed, spawn_key=noise_key(draw, gamma, number))
            rows.append(self.perturbation(row, gamma, np.random.default_rng(stream)))
        return send_to_device(self.collate(rows), self.device)


class Sweep:
    """Scores one batch after the other at every level and draw."""

    def __init__(self, model, scorer, gammas, draws, noise, readout, cells_per_forward):
        self.model, self.scorer, self.noise, self.readout = model, scorer, noise, readout
        self.gammas, self.draws, self.reader = gammas, draws, None
        on_cpu = next(model.parameters()).device.type == "cpu"
        self.together = cells_per_forward or (1 if on_cpu else len(gammas) * draws)
        self.may_combine: bool | None = None if noise is not None and readout is None else False
        # What makes a mixture of experts add its router's loss to that of the task.
        self.router_flags = config_flags(model.modules(), ["output_router_logits"])

    def __call__(self, index: int, inputs_of: Callable[[float, int], Mapping[str, Any]]) -> np.ndarray:
        """Sums `[levels, draws, 4]` of batch `index`; `inputs_of(gamma, draw)` gives its inputs."""
        sums = np.zeros((len(self.gammas), self.draws, 4))
        cells = [
            (level, draw) for level, gamma in enumerate(self.gammas) for draw in range(self.draws if gamma else 1)
        ]
        while cells:
            # The clean level, which comes first, goes alone; so does the first forward, which shows what may combine.
            count = self.together if self.may_combine and self.gammas[cells[0][0]] else 1
            group, gamma = cells[:count], self.gammas[cells[0][0]]
            try:
                scores = self._scores(index, group, inputs_of(gamma, group[0][1]))
            except torch.OutOfMemoryError:
                if len(group) == 1:
                    raise
                clear_device_cache()
                self.together = len(group) // 2
                continue
            for (level, draw), score in zip(group, scores):
                sums[level, draw if self.gammas[level] else slice(None)] = score
            del cells[: len(group)]
        return sums

    def _scores(self, index, group, inputs) -> list[torch.Tensor]:
        given = self.scorer.model_inputs(inputs)
        if self.readout is not None and self.reader is None:
            self.reader = Readout.probe(self.model, given, self.readout)
        gamma = self.gammas[group[0][0]]
        parts = ((self.gammas[level], noise_key(draw, self.gammas[level], index)) for level, draw in group)
        noise = self.noise.split(*parts) if self.noise is not None and gamma > 0 else nullcontext()
        with noise, switched_off(self.router_flags):
            if self.readout is not None:
                return self.reader.read(given, partial(self.scorer, inputs=inputs), [self.reader.num_layers])
            if len(group) > 1:
                copies = {
                    name: torch.cat([value] * len(group)) if torch.is_tensor(value) else value
                    for name, value in given.items()
                }
                return self.scorer.parts(self.model(**copies), inputs, len(group))
            outputs = self.model(**given)
        score = self.scorer(outputs, inputs)
        if self.may_combine is None:
            self.may_combine = self.scorer.scores_logits(outputs, inputs)
        return [score]
