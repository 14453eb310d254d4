"""The loss of the best constant prediction on the training labels, estimated before the first step.

That loss is f_0 where `initial_loss_bound` is "auto", and judges one that was given. It is known for the (binary)
cross-entropy and the squared error, so a loss is compared with these on a real batch.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset, Subset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..configs import levels_of
from ..losses.constant import ConstantPredictor, unmeasurable
from ..losses.task import TaskLoss
from ..readout.replay import probing
from ..readout.tape import assigned
from .records import reduced


SEED = (
    0  # of the rows, and of what a collator draws: runs that differ by their seed have the same f_0
)


def is_readable_once(dataset) -> bool:
    """Whether what is read of a data set is gone, as from a generator."""
    return not has_length(dataset) and iter(dataset) is iter(dataset)


@contextmanager
def drawing_apart(trainer: Trainer, model: nn.Module, seed: int = SEED):
    """Training goes on as if nothing had been drawn inside; collators may have a generator of their own."""
    collator = trainer.data_collator
    generators = [(collator, "generator")] if hasattr(collator, "generator") else []
    with probing(model), assigned(generators, copy.deepcopy(getattr(collator, "generator", None))):
        transformers.set_seed(seed)
        yield


def measure_chance(trainer: Trainer, task: TaskLoss, predictor: ConstantPredictor, data) -> float:
    """The loss of the best constant prediction of the labels of `data`, as the trainer's collator makes them; of a
    denoiser that of its noisy input, where it is less.

    ValueError where the data can be read only once, or has no two labels.
    """
    args = trainer.args
    if data is None or is_readable_once(data):
        raise unmeasurable("data that can be read only once")
    low, high = (2 * levels_of("noise_gamma", args.noise_gamma))[:2]
    mean_square = (low**2 + low * high + high**2) / 3  # of a level drawn between them
    is_noisy = predictor.signal is not None and mean_square > 0
    with drawing_apart(trainer, task.model):
        predictor = replace(
            predictor, noise_variance=mean_square * trainer.noise_sigma() ** 2 if is_noisy else 0.0
        )
        chance = chance_of_batches(task, predictor, collated(trainer, data, predictor.enough))
    # One value for all, also where each process has a part of a stream to itself.
    return reduced(trainer, torch.tensor(chance, dtype=torch.float64)).item() / args.world_size


def chance_of_batches(
    task: TaskLoss, predictor: ConstantPredictor, batches: Iterable[Mapping[str, Any]]
) -> float:
    """The loss of the best constant prediction of the first labels of `batches`, as many as are `enough`."""
    predictor, missing = replace(predictor), predictor.enough  # a copy, to count in
    for batch in batches:
        if (answers := task.answers(batch)) is None:
            raise unmeasurable("batches that get their labels later")
        missing -= predictor.update(answers, batch.get(predictor.signal))
        if missing <= 0:
            break
    return predictor.loss()


def collated(trainer: Trainer, data, most_rows: int) -> Iterator[Mapping[str, Any]]:
    """Batches of at most `most_rows` rows as training collates them, the same on all processes: spread evenly over the
    data, in random order; of a stream the first."""
    is_stream = isinstance(data, IterableDataset) or not has_length(data)
    if not is_stream:
        chosen = np.linspace(0, len(data) - 1, min(len(data), most_rows)).astype(int)
        data = Subset(data, np.random.default_rng(SEED).permutation(chosen).tolist())
    collate = trainer.get_test_dataloader(
        data
    ).collate_fn  # leaves columns out that the model does not take
    rows = islice(data, most_rows) if is_stream else map(data.__getitem__, range(len(data)))
    while batch := list(islice(rows, trainer.args.train_batch_size)):
        yield collate(batch)
