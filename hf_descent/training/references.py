"""The loss of the last layer before training and at the end of the warm-up, on the rows of evaluations.

A verdict derives the price of the constraints from it. A reading runs the model on a few rows of each evaluation set.
For each evaluation set, the two readings together cost at most about 4 % of a training that reads 2,048 rows or more.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import save
from torch.utils.data import DataLoader, IterableDataset
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
    CountedRows,
    Reading,
    counted_rows,
    is_labelled,
    without_persistent_workers,
)
from .evaluation_sets import evaluation_sets
from .holdout import reshard
from .origin import Origin, fingerprint_of_rows


logger = get_logger(__name__)


# How many rows of one evaluation set a process reads at one time. A step of training costs about three times the
# forward pass of a reading.
MOST_ROWS = 2048
LEAST_ROWS = 128
SHARE_OF_TRAINING = 1 / 16  # of the rows that training reads
FILE = "last_layer_losses.safetensors"


@dataclass
class ReadSet:
    """The last layer on an evaluation set at one time.

    Attributes:
        time (`str`): `START` or `WARMUP`.
        name (`str`): the name of the set.
        readings (`list`): one [`Reading`] of each process.
        rows: the data set; `None` if the trainer does not have it any more.
        data (`str`, *optional*): see [`fingerprint_of_rows`]; `None` if it is not known.
    """

    time: str
    name: str
    readings: list[Reading]
    rows: Any = None
    data: str | None = None

    @property
    def losses(self) -> np.ndarray:
        """The loss of each row, summed over its items, and their number: float64 `[rows, 2]`. Rows without items are
        zero. A zero row comes first, so that there is a row even if nothing was read."""
        parts = [part for reading in self.readings for part in reading.values()]
        return torch.cat([torch.zeros(1, 2), *parts]).double().numpy()

    def is_of(self, rows: Any, data: str | None) -> bool:
        """Whether this is the data set `rows`, or has the fingerprint `data`."""
        if rows is not None and self.rows is rows:
            return True
        return data is not None and self.data == data


class LastLayerReferences:
    """What was read of the last layer so far."""

    def __init__(self, sets: Iterable[ReadSet] = ()):
        self._sets = list(sets)  # in the order of their times

    def times(self) -> list[str]:
        """When the last layer was read."""
        return list(dict.fromkeys(known.time for known in self._sets))

    def read(self, trainer: Trainer, layers: LayerLosses, time: str) -> None:
        """Read the last layer of the model as it is now; every process calls it. Streams are left out."""
        for name, rows in evaluation_sets(trainer.eval_dataset).items():
            if not has_length(rows):
                continue
            reading = _last_layer(trainer, layers, rows)
            readings = [{number: part.cpu() for number, part in reading.items()}]
            if trainer.args.world_size > 1:
                readings = gather_object(readings)
            data = self._data_of(trainer, rows)
            self._sets.append(ReadSet(time, name, readings, rows, data))

    def _data_of(self, trainer: Trainer, rows: Any) -> str | None:
        """The fingerprint of a data set, found out at its first reading."""
        for known in self._sets:
            if known.rows is rows:
                return known.data
        return fingerprint_of_rows(trainer, rows)

    def of_process(self, rows: Any, process: int, processes: int) -> dict[str, Reading]:
        """The readings of the data set `rows` by a process, by their times. Empty if another number of `processes` has
        read it."""
        return {
            known.time: known.readings[process]
            for known in self._sets
            if known.rows is rows and len(known.readings) == processes
        }

    def has_read(self, rows: Any) -> bool:
        """Whether the data set `rows` is one of those that were read."""
        return any(known.rows is rows for known in self._sets)

    def unpaired(self, rows: Any = None, data: str | None = None) -> list[Reference]:
        """The earlier losses, for a verdict whose rows cannot be paired with those read.

        They are of the data set `rows`, of the set with the fingerprint `data`, or else of the first set, which then
        counts as other data.
        """
        references = []
        for time in self.times():
            sets = self._at(time)
            own = [known for known in sets if known.is_of(rows, data)]
            chosen, *_ = [*own, *sets]
            losses = chosen.losses
            if (losses[:, 1] > 0).any():
                references.append(
                    Reference.measured(time, losses, is_same_data=bool(own), is_paired=False)
                )
        return references

    def _at(self, time: str) -> list[ReadSet]:
        """The sets that were read at a time."""
        return [known for known in self._sets if known.time == time]

    def save(self, folder: str) -> None:
        """Write what was read into a checkpoint."""
        names = []
        tensors = {}
        for known in self._sets:
            for process, reading in enumerate(known.readings):
                for number, part in reading.items():
                    tensors[f"{len(names)}"] = part.contiguous()
                    names.append([known.time, known.name, process, number])
        if tensors:
            data = {
                time: {known.name: known.data for known in self._at(time)} for time in self.times()
            }
            metadata = {"names": json.dumps(names), "data": json.dumps(data)}
            with atomic_write(os.path.join(folder, FILE), "wb") as file:
                file.write(save(tensors, metadata=metadata))

    @classmethod
    def load(cls, folder: str, trainer: Trainer) -> "LastLayerReferences":
        """The readings in a checkpoint; none if an earlier version saved it. A set of the trainer's `eval_dataset` is
        the one in the checkpoint if both have the same name and the same rows."""
        path = os.path.join(folder, FILE)
        if not os.path.isfile(path):
            return cls()

        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            data = json.loads(metadata.get("data", "{}"))  # not in files of former versions
            sets = {}
            for index, (time, name, process, number) in enumerate(json.loads(metadata["names"])):
                fingerprint = data.get(time, {}).get(name)
                known = sets.setdefault(
                    (time, name), ReadSet(time, name, readings=[], data=fingerprint)
                )
                while len(known.readings) <= process:
                    known.readings.append({})
                known.readings[process][number] = file.get_tensor(f"{index}")

        references = cls(sets.values())
        for name, rows in evaluation_sets(trainer.eval_dataset).items():
            references._recognise(name, rows, fingerprint_of_rows(trainer, rows))
        return references

    def _recognise(self, name: str, rows: Any, data: str | None) -> None:
        """Note that the data set `rows` is the one that was read under this name, if it has the same fingerprint
        `data`."""
        read = [known for known in self._sets if known.name == name]
        for known in read:
            if data is not None and known.data == data:
                known.rows = rows
        if any(known.rows is None for known in read):
            logger.warning(
                f"The evaluation set {name!r} may have other examples than before the checkpoint: verdicts on it show "
                "the earlier losses of the last layer, and do not judge by them."
            )

    def summary(self) -> dict[str, dict[str, Any]]:
        """For each time, in plain values: f_L on the first set, the upper end of its interval, and the fingerprint of
        the set."""
        by_time = {}
        for reference in self.unpaired():
            time = reference.name
            first, *_ = self._at(time)
            by_time[time] = {
                "loss": reference.loss,
                "upper": reference.upper,
                "data": first.data,
            }
        return by_time


def references_of(summary: Mapping[str, Any], data: str | None, scoring: Origin) -> list[Reference]:
    """The references in the `descent_config.json` of a run, for a verdict on rows with the fingerprint `data`. None if
    the run read or scored its model in another way than `scoring`."""
    if known_difference(summary.get("origin"), scoring) is not None:
        return []

    references = []
    for name, values in summary.get("last_layer_losses", {}).items():
        is_same_data = data is not None and values.get("data") == data
        references.append(
            Reference(name, values["loss"], values["upper"], is_same_data=is_same_data)
        )
    return references


def moment_of_reading(step: int, active_from: int) -> str | None:
    """`START` or `WARMUP` if f_L is read before this step, else `None`."""
    if step == 0:
        return START
    if step == active_from:
        return WARMUP
    return None


def _last_layer(trainer: Trainer, layers: LayerLosses, rows) -> Reading:
    """The losses of the last layer on some batches of an evaluation, spread evenly over the data."""
    model = trainer.model_wrapped
    reading = {}
    with drawing_apart(trainer, unwrapped(model)), trainer.compute_loss_context_manager():
        with without_persistent_workers(trainer.args):
            loader = trainer.get_eval_dataloader(rows)
        rows_in_all = len(loader) * trainer.args.eval_batch_size
        stride = max(math.ceil(rows_in_all / _most_rows(trainer)), 1)
        for number, inputs, counted in _some_batches(trainer, loader, stride):
            if not is_labelled(inputs, trainer.label_names):
                continue

            inputs = counted.of(trainer._prepare_inputs(inputs))
            losses = layers.evaluation_losses(model, inputs, keep_logits=False, last_only=True)
            if not counted.are_none:
                reading[number] = losses.rows

    reshard(model)
    return reading


def _most_rows(trainer: Trainer) -> int:
    """How many rows of an evaluation set a reading takes in a process."""
    args = trainer.args
    steps = trainer.state.max_steps
    trained = steps * args.gradient_accumulation_steps * args.train_batch_size
    return min(MOST_ROWS, max(LEAST_ROWS, round(SHARE_OF_TRAINING * trained)))


def _some_batches(
    trainer: Trainer, loader, stride: int
) -> Iterator[tuple[int, Mapping[str, Any], CountedRows]]:
    """Every `stride`-th batch of a loader: its number, the batch, and its rows that count.

    Only these batches are fetched, and the last one, which repeated rows may fill up, is left out. A stream, or a
    loader that gets its batches from another process, is gone through as a whole.
    """
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    knows_places = isinstance(loader, DataLoaderShard) and not is_stream

    if knows_places and stride > 1 and len(loader) > 1:
        chosen = DataLoader(
            loader.dataset,
            batch_sampler=list(islice(loader.batch_sampler, 0, len(loader) - 1, stride)),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            multiprocessing_context=loader.multiprocessing_context,
        )
        for number, inputs in zip(count(0, stride), chosen):
            yield number, inputs, CountedRows()
        return

    for number, inputs in enumerate(loader):
        if number % stride == 0:
            yield number, inputs, counted_rows(trainer, inputs)
