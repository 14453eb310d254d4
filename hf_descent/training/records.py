"""What a run keeps count of: of the present optimizer step, of the present evaluation, and of itself."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from transformers import Trainer

from ..evaluation import Certificate
from ..evaluation.row_sums import RowSums
from ..evaluation.scoring import Result
from ..losses.constant import ConstantPredictor
from ..losses.layerwise import MeasuredLosses, StepLosses
from ..losses.task import TaskLoss


def evaluation_sets(trainer: Trainer) -> dict[str, Any]:
    """The data sets of evaluations in training by their names, a single one as "eval_dataset"."""
    given = trainer.eval_dataset
    sets = given if isinstance(given, dict) else {"eval_dataset": given}
    return {name: rows for name, rows in sets.items() if rows is not None}


def name_of_set(trainer: Trainer, dataset) -> str | None:
    """The name of the evaluation set that `evaluate(dataset)` would take; `None` for other data."""
    given = trainer.eval_dataset if dataset is None else dataset
    if isinstance(given, str) and isinstance(trainer.eval_dataset, dict):
        given = trainer.eval_dataset.get(given)
    sets = evaluation_sets(trainer)
    return next((name for name, rows in sets.items() if rows is given), None)


def reduced(trainer: Trainer, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over processes."""
    args = trainer.args
    return (
        trainer.accelerator.reduce(tensor.to(args.device), "sum") if args.world_size > 1 else tensor
    )


@dataclass
class StepSums:
    """The sums of one optimizer step over its micro-batches, in this process."""

    items: torch.Tensor | None = (
        None  # of the step, over micro-batches and processes, where counted; a scalar
    )
    # [layers + 1], this process's part of f_1..f_L, and the shares of what was read: over all processes they are 1 or,
    # where each micro-batch is a mean, the number of those with labels.
    read: torch.Tensor | None = None
    final: torch.Tensor | None = None  # the last micro-batch's part of f_L, a scalar
    micro_batches: int = 0  # that were read so far
    is_whole: bool = False  # whether the step has one micro-batch, whose labels may change after they were counted

    def share(self, count: torch.Tensor) -> torch.Tensor:
        """The share that a micro-batch of `count` items has in those of the step, a scalar tensor."""
        count = count.float()
        return count / (count if self.items is None or self.is_whole else self.items).clamp(min=1)

    def add(self, losses: StepLosses, share: torch.Tensor) -> None:
        """Count a micro-batch more, with its `share`."""
        read = torch.cat([losses.sums, share.to(losses.sums)[None]])
        self.read = read if self.read is None else self.read + read
        self.final = losses.sums[-1]
        self.micro_batches += 1


def counted_step(
    trainer: Trainer, task: TaskLoss | None, batches: Sequence[Mapping[str, Any]]
) -> StepSums:
    """The sums of a step, of which the items of its micro-batches are known."""
    counts = [count for batch in batches if task and (count := task.count(batch)) is not None]
    items = (
        reduced(trainer, sum(count.to(trainer.args.device) for count in counts)) if counts else None
    )
    is_whole = (
        len(batches) == trainer.args.world_size == 1 and items is not None and not task.takes_items
    )
    return StepSums(items, is_whole=is_whole)


@dataclass(frozen=True)
class LayerTotals:
    """What an evaluation has read so far, in this process."""

    rows: RowSums = field(default_factory=RowSums)
    items: torch.Tensor | int = 0
    batches: int = 0
    labels: ConstantPredictor | None = None  # of which the loss at chance is known

    def plus(
        self, measured: MeasuredLosses, labels: ConstantPredictor | None = None
    ) -> "LayerTotals":
        """These, with a batch more."""
        return LayerTotals(
            self.rows.plus(measured.rows, measured.is_split),
            self.items + measured.items,
            self.batches + 1,
            labels if labels is None else labels.plus(self.labels),
        )


@dataclass
class RunRecord:
    """What is recorded of a run, for its summary and its card."""

    resumed_from: str | None = None  # the checkpoint that it goes on from
    started: float | None = None  # time of day at which training started, in seconds; `None` before
    searched: bool = False  # whether a search chose settings by evaluations of this trainer
    certificate: Certificate | None = None  # of the last `evaluate`
    by_strategy: bool = False  # whether the present evaluation is one that `eval_strategy` asks for
    also_selected: bool = (
        False  # whether the data of the present evaluation is that of evaluations in training
    )
    # f_L of plain training beside this, by the names of evaluation sets.
    plain_losses: dict[str, float] = field(default_factory=dict)
    # The name of the evaluation set that the present evaluation is on; `None` for other data.
    evaluating: str | None = None
    seen: set[int] = field(default_factory=set)  # this and the next: see [`~holdout.check_parts`]
    evaluated: dict[str, list[int]] = field(default_factory=dict)
    certificates: dict[int, Certificate] = field(
        default_factory=dict
    )  # of the last step and of the best one so far
    measured: dict[str, Result] = field(
        default_factory=dict
    )  # last, beside `certificate`, by the names of the files
    step_starts: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def keep_certificate(
        self, certificate: Certificate | None, step: int, best_step: int | None
    ) -> None:
        """Keep an evaluation's `certificate`, where it has one, for `step`, and beside it the best model's alone."""
        if certificate is not None:
            kept = (
                {best_step: self.certificates[best_step]} if best_step in self.certificates else {}
            )
            self.certificate, self.certificates = certificate, kept | {step: certificate}
        # What comes next may come by neither `evaluate` nor `predict`.
        self.also_selected = False
        self.evaluating = None

    @property
    def results(self) -> dict[str, Result]:
        """What was measured, by the names of the files."""
        return self.measured | ({} if self.certificate is None else {"verdict": self.certificate})

    @property
    def step_seconds(self) -> float | None:
        """Median time of an optimizer step, data loading and logging included."""
        times = [after - before for before, after in pairwise(self.step_starts)]
        return statistics.median(times) if times else None
