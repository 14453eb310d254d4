"""The loss of the last layer before training and at the end of the warm-up, on the rows of evaluations.

A verdict says what the constraints cost by it. One reading costs no more than a plain forward of 2,048 rows of each
evaluation set in each process.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..evaluation.price import START, WARMUP, Reference
from ..files import atomic_write
from ..losses.layerwise import LayerLosses
from ..readout.stack import unwrapped
from .chance import drawing_apart
from .evaluation import (
    Reading,
    is_labelled,
    rows_counted_once,
    without_persistent_workers,
    without_repeats,
)
from .evaluation_sets import evaluation_sets
from .holdout import reshard


MOST_ROWS = 2048  # of one evaluation set in one reading
FILE = "last_layer_losses.safetensors"


# One [`Reading`] of each process, by the name of the evaluation set.
ReadingsOfSets = dict[str, list[Reading]]


class LastLayerReferences:
    """What was read so far.

    Args:
        readings (mapping, *optional*): [`ReadingsOfSets`] by the time of reading, of a checkpoint.
        eval_dataset: the trainer's, whose sets those were.
    """

    def __init__(self, readings: dict[str, ReadingsOfSets] | None = None, eval_dataset: Any = None):
        if readings is None:
            readings = {}
        self._readings = readings
        # By the time and by the name, the data set: a trainer may get another one of the same name.
        self._rows = dict.fromkeys(readings, evaluation_sets(eval_dataset))

    def times(self) -> list[str]:
        """When the last layer was read."""
        return list(self._readings)

    def read(self, trainer: Trainer, layers: LayerLosses, time: str) -> None:
        """Read the last layer of the model as it is now; every process calls it. Streams are left out."""
        by_set = {}
        sets = evaluation_sets(trainer.eval_dataset)
        for name, rows in sets.items():
            if not has_length(rows):
                continue
            reading = _last_layer(trainer, layers, rows)
            readings = [{number: part.cpu() for number, part in reading.items()}]
            if trainer.args.world_size > 1:
                readings = gather_object(readings)
            by_set[name] = readings
        self._readings[time] = by_set
        self._rows[time] = sets

    def of_process(self, rows: Any, process: int, processes: int) -> dict[str, Reading]:
        """By the time, the readings of the data set `rows` by a process; none where it was not read by as many
        `processes`."""
        by_time = {}
        for time, sets in self._readings.items():
            for name, readings in sets.items():
                is_of_rows = self._rows[time].get(name) is rows
                if is_of_rows and len(readings) == processes:
                    by_time[time] = readings[process]
        return by_time

    def of_other_data(self) -> list[Reference]:
        """What was read, for a verdict on other data than that of evaluations: of the first set."""
        references = []
        for time, sets in self._readings.items():
            readings = next(iter(sets.values()), [])
            parts = [part for reading in readings for part in reading.values()]
            if not parts:
                continue
            rows = torch.cat(parts).double().numpy()  # [rows, 2]
            if (rows[:, 1] > 0).any():
                references.append(Reference.measured(time, rows, is_same_data=False))
        return references

    def _parts(self) -> Iterator[tuple[list, torch.Tensor]]:
        """The time, the set, the process and the number of each batch that was read, and its reading."""
        for time, sets in self._readings.items():
            for name, readings in sets.items():
                for process, reading in enumerate(readings):
                    for number, part in reading.items():
                        yield [time, name, process, number], part

    def save(self, folder: str) -> None:
        """Write what was read into a checkpoint."""
        names = []
        tensors = {}
        for index, (name, part) in enumerate(self._parts()):
            names.append(name)
            tensors[f"{index}"] = part.contiguous()
        if tensors:
            with atomic_write(os.path.join(folder, FILE), "wb") as file:
                file.write(save(tensors, metadata={"names": json.dumps(names)}))

    @classmethod
    def load(cls, folder: str, eval_dataset: Any) -> "LastLayerReferences":
        """What a checkpoint holds, of the sets of a trainer's `eval_dataset` by their names; nothing where it is older
        than this file."""
        by_time = {}
        path = os.path.join(folder, FILE)
        if not os.path.isfile(path):
            return cls()

        with safe_open(path, framework="pt") as file:
            names = json.loads(file.metadata()["names"])
            for index, (time, name, process, number) in enumerate(names):
                readings = by_time.setdefault(time, {}).setdefault(name, [])
                while len(readings) <= process:
                    readings.append({})
                readings[process][number] = file.get_tensor(f"{index}")
        return cls(by_time, eval_dataset)

    def summary(self) -> dict[str, dict[str, Any]]:
        """In plain values, by the time: f_L and the upper end of its interval."""
        return {
            reference.name: {"loss": reference.loss, "upper": reference.upper}
            for reference in self.of_other_data()
        }


def references_of(summary: Mapping[str, Any]) -> list[Reference]:
    """Those in the `descent_config.json` of a run."""
    losses = summary.get("last_layer_losses", {})
    return [Reference(name, **values) for name, values in losses.items()]


def time_to_read(step: int, active_from: int) -> str | None:
    """Before the step `step`, what time it is, where the last layer is to be read."""
    if step == 0:
        return START
    if step == active_from:
        return WARMUP
    return None


def _last_layer(trainer: Trainer, layers: LayerLosses, rows) -> Reading:
    """The losses of the last layer on some batches of an evaluation, spread evenly over it."""
    model = trainer.model_wrapped
    reading = {}
    with drawing_apart(trainer, unwrapped(model)), trainer.compute_loss_context_manager():
        with without_persistent_workers(trainer.args):
            loader = trainer.get_eval_dataloader(rows)
        stride = max(math.ceil(len(loader) * trainer.args.eval_batch_size / MOST_ROWS), 1)
        for number, inputs in enumerate(loader):
            own_rows = rows_counted_once(trainer, inputs)
            if number % stride or not is_labelled(inputs, trainer.label_names):
                continue

            inputs = without_repeats(trainer._prepare_inputs(inputs), own_rows)
            losses = layers.evaluation_losses(model, inputs, keep_logits=False, last_only=True)
            if own_rows != 0:
                reading[number] = losses.rows

    reshard(model)
    return reading
