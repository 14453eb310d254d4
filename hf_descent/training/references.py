"""The loss of the last layer before training and at the end of the warm-up, on the rows of evaluations.

A verdict says what the constraints cost by it. One reading costs no more than a plain forward of 2,048 rows of each
evaluation set in each process.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..evaluation.price import START, WARMUP, Reference
from ..evaluation.side_by_side import known_difference
from ..files import atomic_write
from ..logs import get_logger
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
from .origin import Origin, fingerprint_of_rows


logger = get_logger(__name__)


MOST_ROWS = 2048  # of one evaluation set in one reading
FILE = "last_layer_losses.safetensors"


@dataclass
class ReadSet:
    """The last layer on an evaluation set.

    Attributes:
        readings (`list`): one [`Reading`] of each process.
        rows: the data set; `None` where the trainer does not have it any more.
        data (`str`, *optional*): see [`fingerprint_of_rows`]; `None` where it is not known.
    """

    readings: list[Reading]
    rows: Any = None
    data: str | None = None

    @property
    def losses(self) -> np.ndarray:
        """The losses of all rows and their items, float64 `[rows, 2]`; zeros for a row that does not count."""
        parts = [part for reading in self.readings for part in reading.values()]
        return torch.cat([torch.zeros(1, 2), *parts]).double().numpy()

    def is_of(self, rows: Any, data: str | None) -> bool:
        """Whether this is the data set `rows`, or has the fingerprint `data`."""
        if rows is not None and self.rows is rows:
            return True
        return data is not None and self.data == data


class LastLayerReferences:
    """What was read so far: by the time of reading, the evaluation sets by their names."""

    def __init__(self):
        self._sets: dict[str, dict[str, ReadSet]] = {}

    def times(self) -> list[str]:
        """When the last layer was read."""
        return list(self._sets)

    def read(self, trainer: Trainer, layers: LayerLosses, time: str) -> None:
        """Read the last layer of the model as it is now; every process calls it. Streams are left out."""
        by_name = {}
        for name, rows in evaluation_sets(trainer.eval_dataset).items():
            if not has_length(rows):
                continue
            reading = _last_layer(trainer, layers, rows)
            readings = [{number: part.cpu() for number, part in reading.items()}]
            if trainer.args.world_size > 1:
                readings = gather_object(readings)
            by_name[name] = ReadSet(readings, rows, self._data_of(trainer, rows))
        self._sets[time] = by_name

    def _data_of(self, trainer: Trainer, rows: Any) -> str | None:
        """The fingerprint of a data set, found out at its first reading."""
        for sets in self._sets.values():
            for known in sets.values():
                if known.rows is rows:
                    return known.data
        return fingerprint_of_rows(trainer, rows)

    def of_process(self, rows: Any, process: int, processes: int) -> dict[str, Reading]:
        """By the time, the readings of the data set `rows` by a process; none where it was not read by as many
        `processes`."""
        by_time = {}
        for time, sets in self._sets.items():
            for known in sets.values():
                if known.rows is rows and len(known.readings) == processes:
                    by_time[time] = known.readings[process]
        return by_time

    def has_read(self, rows: Any) -> bool:
        """Whether the data set `rows` is one of those that were read."""
        return any(known.rows is rows for sets in self._sets.values() for known in sets.values())

    def unpaired(self, rows: Any = None, data: str | None = None) -> list[Reference]:
        """What was read, for a verdict whose rows cannot be paired with those read: of the data set `rows`, of the set
        with the fingerprint `data`, or else of the first set, which is then one of other data."""
        references = []
        for time, sets in self._sets.items():
            if not sets:
                continue
            own = [known for known in sets.values() if known.is_of(rows, data)]
            chosen = own[0] if own else next(iter(sets.values()))
            losses = chosen.losses
            if (losses[:, 1] > 0).any():
                references.append(
                    Reference.measured(time, losses, is_same_data=bool(own), is_paired=False)
                )
        return references

    def save(self, folder: str) -> None:
        """Write what was read into a checkpoint."""
        names = []
        tensors = {}
        data = {}
        for time, sets in self._sets.items():
            data[time] = {name: known.data for name, known in sets.items()}
            for name, known in sets.items():
                for process, reading in enumerate(known.readings):
                    for number, part in reading.items():
                        tensors[f"{len(names)}"] = part.contiguous()
                        names.append([time, name, process, number])
        if tensors:
            metadata = {"names": json.dumps(names), "data": json.dumps(data)}
            with atomic_write(os.path.join(folder, FILE), "wb") as file:
                file.write(save(tensors, metadata=metadata))

    @classmethod
    def load(cls, folder: str, trainer: Trainer) -> "LastLayerReferences":
        """What a checkpoint holds; nothing where it is older than this file. A set of the trainer's `eval_dataset` is
        that of the checkpoint where both have the same name and the same rows."""
        references = cls()
        path = os.path.join(folder, FILE)
        if not os.path.isfile(path):
            return references

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            data = json.loads(metadata.get("data", "{}"))  # not in files of former versions
            for index, (time, name, process, number) in enumerate(json.loads(metadata["names"])):
                sets = references._sets.setdefault(time, {})
                known = sets.setdefault(name, ReadSet([], data=data.get(time, {}).get(name)))
                while len(known.readings) <= process:
                    known.readings.append({})
                known.readings[process][number] = file.get_tensor(f"{index}")

        for name, rows in evaluation_sets(trainer.eval_dataset).items():
            references._recognise(name, rows, fingerprint_of_rows(trainer, rows))
        return references

    def _recognise(self, name: str, rows: Any, data: str | None) -> None:
        """Take the data set `rows` with the fingerprint `data` for the one of that name that was read, where it is."""
        read = [sets[name] for sets in self._sets.values() if name in sets]
        for known in read:
            if data is not None and known.data == data:
                known.rows = rows
        if any(known.rows is None for known in read):
            logger.warning(
                f"The evaluation set {name!r} may have other examples than before the checkpoint: verdicts on it show "
                "the earlier losses of the last layer, and do not judge by them."
            )

    def summary(self) -> dict[str, dict[str, Any]]:
        """In plain values, by the time: f_L on the first set, the upper end of its interval, and the set's
        fingerprint."""
        by_time = {}
        for reference in self.unpaired():
            first = next(iter(self._sets[reference.name].values()))
            by_time[reference.name] = {
                "loss": reference.loss,
                "upper": reference.upper,
                "data": first.data,
            }
        return by_time


def references_of(summary: Mapping[str, Any], data: str | None, reading: Origin) -> list[Reference]:
    """Those in the `descent_config.json` of a run, for a verdict on rows with the fingerprint `data`; none where the
    model is read or scored otherwise than in the run (`reading`)."""
    if known_difference(summary.get("origin"), reading) is not None:
        return []

    references = []
    for name, values in summary.get("last_layer_losses", {}).items():
        is_same_data = data is not None and values.get("data") == data
        references.append(
            Reference(name, values["loss"], values["upper"], is_same_data=is_same_data)
        )
    return references


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
