"""The loss of the best constant prediction on the training labels, estimated before the first step.

If `initial_loss_bound` is "auto", this loss is f_0. If f_0 was given, this loss still decides whether a
layer is at chance. It is known for the (binary) cross-entropy and the squared error, so the task loss is compared with
these on a real batch.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..configs import levels_of
from ..evaluation.fingerprints import sample_of
from ..losses.chance import ChanceLoss, unmeasurable
from ..losses.task import TaskLoss
from ..readout.replay import probing
from ..readout.tape import assigned
from .records import reduced


# Draws the rows, and what a collator draws, so that runs that differ by their seed have the same f_0.
SEED = 0


def is_readable_once(dataset) -> bool:
    """Whether a data set can be read only once, as a generator."""
    return not has_length(dataset) and iter(dataset) is iter(dataset)


@contextmanager
def drawing_apart(trainer: Trainer, model: nn.Module, seed: int = SEED):
    """Within it, random numbers come from `seed`. Afterwards all generators, also a collator's own, are as before."""
    collator = trainer.data_collator
    generators = []
    if hasattr(collator, "generator"):
        generators.append((collator, "generator"))
    with probing(model), assigned(generators, copy.deepcopy(getattr(collator, "generator", None))):
        transformers.set_seed(seed)
        yield


def measure_chance(trainer: Trainer, task: TaskLoss, chance_loss: ChanceLoss, data) -> float:
    """The loss of the best constant prediction of the labels of `data`, as the trainer's collator makes them; for a
    denoiser, the loss of returning the noisy input, if lower.

    ValueError if the data can be read only once, or has no two labels.
    """
    if data is None or is_readable_once(data):
        raise unmeasurable("data that can be read only once")

    with drawing_apart(trainer, task.model):
        noise_variance = 0.0
        if chance_loss.signal is not None:
            noise_variance = _noise_variance(trainer)
        chance_loss = replace(chance_loss, noise_variance=noise_variance)
        batches = collated(trainer, data, chance_loss.enough)
        measure = partial(chance_of_batches, task, chance_loss, batches)
        return _mean_over_processes(trainer.accelerator, measure)


def _noise_variance(trainer: Trainer) -> float:
    """The mean variance of the noise of training, whose level is drawn from a range."""
    levels = levels_of("noise_gamma", trainer.args.noise_gamma)
    low = levels[0]
    high = levels[-1]
    mean_square = (low**2 + low * high + high**2) / 3
    if mean_square == 0:
        return 0.0
    return mean_square * trainer.noise_sigma() ** 2


def _mean_over_processes(accelerator: Accelerator, measure: Callable[[], float]) -> float:
    """The mean of what each process measures, so that all have one value even if each reads a part of a stream.

    If one process raises ValueError, all do.
    """
    failure = None
    try:
        value = measure()
    except ValueError as error:
        failure = error
        value = math.nan

    total = reduced(accelerator, torch.tensor(value, dtype=torch.float64)).item()
    if failure is not None:
        raise failure
    if math.isnan(total):
        raise unmeasurable("the examples of another process, whose error says why")
    return total / accelerator.num_processes


def chance_of_batches(
    task: TaskLoss, chance_loss: ChanceLoss, batches: Iterable[Mapping[str, Any]]
) -> float:
    """The loss of the best constant prediction of the first labels of `batches`, of which `chance_loss.enough` are
    read."""
    chance_loss = replace(chance_loss)  # a copy, to count in
    missing = chance_loss.enough
    for batch in batches:
        answers = task.answers(batch)
        if answers is None:
            raise unmeasurable("batches that get their labels later")
        missing -= chance_loss.update(answers, batch.get(chance_loss.signal))
        if missing <= 0:
            break
    return chance_loss.estimate()


def collated(
    trainer: Trainer, data, most_rows: int, batch_size: int | None = None
) -> Iterator[Mapping[str, Any]]:
    """Batches of at most `most_rows` rows as training collates them, the same on all processes.

    The rows are spread evenly over the data, in random order; of a stream they are the first. The batches have the
    size of training batches, unless `batch_size` is given.
    """
    if isinstance(data, IterableDataset) or not has_length(data):
        rows = islice(data, most_rows)
    else:
        data = sample_of(data, most_rows)
        rows = map(data.__getitem__, range(len(data)))

    # Leaves columns out that the model does not take.
    collate = trainer.get_test_dataloader(data).collate_fn

    size = trainer.args.train_batch_size
    if batch_size is not None:
        size = batch_size
    batch = list(islice(rows, size))
    while batch:
        yield collate(batch)
        batch = list(islice(rows, size))
