"""What a run counts in an optimizer step and in an evaluation, and what it records for its summary and card."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..evaluation import Certificate, LayerProfile, NoiseCurve
from ..evaluation.row_sums import RowSums
from ..evaluation.scoring import Result
from ..losses.chance import ChanceLoss
from ..losses.layerwise import BatchLosses, MicroBatchLosses
from ..losses.task import TaskLoss
from ..runs import RunFolder


VERDICT_NAME = "descent_verdict.json"  # in a checkpoint, of its model


def reduced(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """The sum over processes."""
    if accelerator.num_processes == 1:
        return tensor
    return accelerator.reduce(tensor.to(accelerator.device), "sum")


@dataclass
class StepTotals:
    """The optimizer step that is being taken, in this process: what was read, and the factors of its losses.

    A step minimises the mean over its items, of all micro-batches and processes. So the mean over a micro-batch is
    multiplied by

    1. the micro-batch's `share` of the items of the step. This makes it a part: all parts add up to the mean of the
       step.
    2. the number of processes (`over_processes`). DDP and Trainer's log take the mean over processes, where parts have
       to be added up.

    Trainer would also divide by the number of micro-batches. `scaled_for_accumulation` keeps it from that.

    If the items of the step were not counted, both factors are 1, and Trainer or the loop divides by the number of
    micro-batches.

    In a trainer, this is who makes the loss of a micro-batch a part of the step's:

    | training | micro-batches of all processes | loss | who |
    |---|---|---|---|
    | reads the layers | one | ignores the items | nobody: it is the mean of the step already |
    | reads the layers | one | takes the items | this package, which gives the loss the items of the step |
    | reads the layers | several | any | this package |
    | plain | one | any | Trainer |
    | plain | several | takes the items | Trainer |
    | plain | several | ignores the items, or is given none | this package, by `_scales_plain_loss` of the trainer |

    TRL's SFTTrainer divides all losses of plain training itself.
    """

    number: int = 0  # optimizer steps before this one
    # The items of the step, over micro-batches and processes, a scalar; `None` if they were not counted.
    items: torch.Tensor | None = None
    processes: int = 1  # whose gradients are averaged
    # [layers + 1]: the sums over this process's micro-batches of their parts of f_1..f_L, and of their shares. Over
    # all processes the shares add up to 1 if `items` are known, else to the number of micro-batches with labels.
    sums: torch.Tensor | None = None
    last_layer_part: torch.Tensor | None = None  # the latest micro-batch's part of f_L, a scalar
    micro_batches: int = 0  # read so far

    def divisor(self, count: torch.Tensor) -> torch.Tensor:
        """The items of the step; if they were not counted, the `count` of items of a micro-batch."""
        return count if self.items is None else self.items

    def share(self, count: torch.Tensor) -> torch.Tensor:
        """The share of a micro-batch of `count` items, a scalar tensor; 0 without items. If the items of the step were
        not counted, it is `True` or `False`, and counts as 1 or 0."""
        if self.items is None:
            return count > 0
        return count / self.items.clamp(min=1)

    def over_processes(self, part: torch.Tensor) -> torch.Tensor:
        """The part of a micro-batch, so that the mean over processes is the sum of their parts."""
        return part if self.items is None else part * self.processes

    def add(self, losses: MicroBatchLosses, share: torch.Tensor) -> None:
        """Add the layer losses of a micro-batch, and its `share`."""
        parts = torch.cat([losses.parts, share.to(losses.parts).unsqueeze(0)])  # [layers + 1]
        if self.sums is not None:
            parts = self.sums + parts
        self.sums = parts
        self.last_layer_part = losses.parts[-1]
        self.count_micro_batch()

    def count_micro_batch(self) -> None:
        """Count a micro-batch more."""
        self.micro_batches += 1


def items_of_step(
    accelerator: Accelerator, task: TaskLoss | None, batches: Sequence[Mapping[str, Any]]
) -> torch.Tensor | None:
    """The items of a step, over micro-batches and processes; every process calls it. `None` if the task is not known,
    no loss needs them, or this process has no labels yet."""
    if task is None:
        return None
    if len(batches) == 1 and accelerator.num_processes == 1 and not task.takes_items:
        # The loss is the mean of this one micro-batch. Its items are counted later, after `_prepare_inputs`, which may
        # still mask labels.
        return None

    counts = [task.count(batch) for batch in batches]
    counts = [count.to(accelerator.device) for count in counts if count is not None]
    if counts:
        return reduced(accelerator, sum(counts))

    # The other processes wait for this one in their all-reduce, so it adds 0. It does not take their sum: its own
    # micro-batches may get labels later, in `_prepare_inputs`, and the sum lacks these. Trainer scales its losses.
    reduced(accelerator, torch.zeros((), dtype=torch.int64, device=accelerator.device))
    return None


@dataclass(frozen=True)
class EvaluationTotals:
    """What an evaluation has read so far, in this process."""

    rows: RowSums = field(default_factory=RowSums)
    items: torch.Tensor | int = 0
    batches: int = 0
    labels: ChanceLoss | None = None  # their statistics, which give the loss at chance

    def plus(self, losses: BatchLosses, labels: ChanceLoss | None = None) -> "EvaluationTotals":
        """The totals with one more batch."""
        if labels is not None:
            labels = labels.plus(self.labels)
        return EvaluationTotals(
            self.rows.plus(losses.rows, losses.is_split),
            self.items + losses.items,
            self.batches + 1,
            labels,
        )


@dataclass(frozen=True)
class Evaluation:
    """The facts about one call of `evaluate` or `predict`."""

    rows: Any = None  # the data set, or the dict of several sets
    # Whether training has used some of the rows, or chooses its checkpoint by them.
    overlaps_training: bool = False
    in_training_loop: bool = False  # whether it runs during training, not before or after it
    plain: LayerProfile | None = None  # the profile of plain training on the same rows, if known
    # Whether its `rows` are a dict; then the call has a call for each set inside it.
    has_several_sets: bool = False
    # Of several sets, only the one that chooses the best model keeps its verdict, if one does.
    keeps_verdict: bool = True


@dataclass
class RunRecord:
    """What is recorded of a run, for its summary and its card."""

    resumed_from: str | None = None  # the checkpoint that it goes on from
    # Time of day at which training started, in seconds; `None` if the trainer only evaluates.
    started: float | None = None
    searched: bool = False  # whether a search chose settings by evaluations of this trainer
    # See `origin_of`; `None` if the trainer only evaluates.
    origin: dict[str, str | None] | None = None
    # `id` of an evaluation set -> the set itself, so that no other object gets this `id`, and the layer profile of
    # plain training on it; `None` if there is none.
    plain_profiles: dict[int, tuple[Any, LayerProfile | None]] = field(default_factory=dict)
    # File name -> the optimizer step after which the last measurement for that file was made, and that measurement.
    measured: dict[str, tuple[int, Result]] = field(default_factory=dict)
    # The names of the files that were written for a card.
    written: set[str] = field(default_factory=set)

    @property
    def certificate(self) -> Certificate | None:
        """The last verdict on the model."""
        _, certificate = self.measured.get("verdict", (None, None))
        return certificate

    def keep_certificate(self, certificate: Certificate, step: int) -> None:
        """Keep the `certificate` of the model after `step`."""
        self.measured["verdict"] = (step, certificate)

    def keep_curve(self, curve: NoiseCurve, step: int) -> None:
        """Keep a noise curve of the model after `step`."""
        self.measured["noise_curve"] = (step, curve)

    def keep_profile(self, profile: LayerProfile, step: int) -> None:
        """Keep a layer profile of the model after `step`, and its certificate where the problem is known."""
        self.measured["layer_profile"] = (step, profile)
        if profile.problem is not None:
            self.keep_certificate(profile.certificate(), step)

    def results(self, step: int) -> dict[str, Result]:
        """The measurements of the model after `step`, by file name."""
        return {
            name: result for name, (of_step, result) in self.measured.items() if of_step == step
        }

    def write(self, run: RunFolder, step: int) -> None:
        """Write the measurements of the model after `step`, and remove the files of an earlier model."""
        results = self.results(step)
        for name in self.written - results.keys():
            Path(run.path, f"{name}.json").unlink(missing_ok=True)
        run.write(results)
        self.written = set(results)

    def save(self, folder: str, step: int) -> None:
        """Save the verdict on the model of a checkpoint, if it was evaluated before it was saved."""
        path = Path(folder, VERDICT_NAME)
        path.unlink(missing_ok=True)
        verdict = self.results(step).get("verdict")
        if verdict is not None:
            verdict.to_json(str(path))

    def load(self, folder: str) -> None:
        """Take over the verdict on the model of a checkpoint, if one was saved."""
        path = Path(folder, VERDICT_NAME)
        if path.is_file():
            self.keep_certificate(Certificate.from_json(str(path)), _step_of(folder))

    def go_back_to(self, folder: str, step: int) -> None:
        """Keep only the measurements of a checkpoint's model, which from now on is the model after `step`."""
        self.load(folder)
        results = self.results(_step_of(folder))
        self.measured = {name: (step, result) for name, result in results.items()}


def _step_of(folder: str) -> int:
    """The optimizer step after which a checkpoint was saved."""
    return TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME)).global_step
