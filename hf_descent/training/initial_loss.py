"""The loss of the best constant prediction on the training labels, measured before the first step.

That loss is f_0 where `initial_loss_bound` is "auto", and judges one that was given. It is known for the (binary)
cross-entropy and the squared error, so a loss is compared with these on a real batch.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.data import IterableDataset, Subset
from transformers import Trainer
from transformers.trainer_utils import has_length
from transformers.utils import ModelOutput

from ..configs import levels_of
from ..losses.constant import ConstantPredictor
from ..losses.task import TaskLoss
from ..readout.labels import labels_of
from ..readout.replay import has_router_loss, output_logits, output_loss, probing
from ..readout.stack import inner_model


MAX_POSITIONS = 2**16  # answers are counted up to there: the first batch does not tell how long others are
FEW_CLASSES, FEW_LABELS, MANY_LABELS = 1000, 2_000, 100_000  # of as many classes, and of more
SEED = 0  # of the rows, and of what a collator draws: runs that differ by their seed have the same f_0


def is_readable_once(dataset) -> bool:
    """Whether what is read of a data set is gone, as from a generator."""
    return not has_length(dataset) and iter(dataset) is iter(dataset)


@contextmanager
def drawing_apart(trainer: Trainer, model: nn.Module, seed: int = SEED):
    """Training goes on as if nothing had been drawn inside; collators may have a generator of their own."""
    collator = trainer.data_collator
    generator = copy.deepcopy(getattr(collator, "generator", None))
    with probing(model):
        transformers.set_seed(seed)
        try:
            yield
        finally:
            if hasattr(collator, "generator"):
                collator.generator = generator


def measure_chance(
    trainer: Trainer,
    task: TaskLoss,
    inputs: Mapping[str, Any],
    outputs: Any,
    reduce: Callable[[torch.Tensor], torch.Tensor],
    dataset=None,
) -> float:
    """The loss of the best constant prediction of the labels of `dataset` (`train_dataset` where not given), as the
    trainer's collator makes them; of a denoiser that of its noisy input, where it is less.

    2,000 labels are read, of more than 1,000 classes 100,000: from rows all over the data, of a stream its first.
    The model has `outputs` on the batch `inputs`, and is not run on those. `reduce` sums a tensor over processes.

    ValueError where no least value is known for the loss, the data can be read only once, or has no two labels.
    """
    args, data = trainer.args, trainer.train_dataset if dataset is None else dataset
    if data is None or is_readable_once(data):
        raise _unmeasurable("data that can be read only once")

    def noise_variance():
        low, high = (2 * levels_of("noise_gamma", args.noise_gamma))[:2]
        mean_square = (low**2 + low * high + high**2) / 3  # of a level drawn between them
        return mean_square * trainer.noise_sigma() ** 2 if mean_square else 0.0

    with drawing_apart(trainer, task.model):
        chance = chance_of_batches(task, inputs, outputs, partial(collated, trainer, data), noise_variance)
    # One value for all, also where each process has a part of a stream to itself.
    return reduce(torch.tensor(chance, dtype=torch.float64)).item() / args.world_size


def chance_of_batches(task: TaskLoss, inputs, outputs, batches: Callable[[int], Iterable], noise_variance) -> float:
    """As [`measure_chance`], of the first labels of `batches(how many are needed)`; of a denoiser with noise of
    `noise_variance()`."""
    label_smoothing = 0.0 if task.smoother is None else task.smoother.epsilon
    predictor = _predictor(task, inputs, outputs, label_smoothing)
    labels, name = labels_of(inputs, task.label_names), getattr(inner_model(task.model), "main_input_name", None)
    signal = inputs.get(name) if predictor.kind == "numbers" else None
    is_denoiser = signal is not None and signal.is_floating_point() and signal.shape == labels.shape
    predictor.noise_variance = noise_variance() if is_denoiser else 0.0
    missing = MANY_LABELS if predictor.kind == "classes" and predictor.num_classes > FEW_CLASSES else FEW_LABELS
    for batch in batches(missing):
        missing -= predictor.update(task.answers(batch), batch[name] if is_denoiser else None)
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
    collate = trainer.get_test_dataloader(data).collate_fn  # leaves columns out that the model does not take
    rows = islice(data, most_rows) if is_stream else map(data.__getitem__, range(len(data)))
    while batch := list(islice(rows, trainer.args.train_batch_size)):
        yield collate(batch)


def _unmeasurable(what: str) -> ValueError:
    return ValueError(
        f"`initial_loss_bound='auto'` cannot be measured for {what}; set it to the loss of a constant prediction."
    )


@torch.no_grad()
def _predictor(task, inputs, outputs, label_smoothing) -> ConstantPredictor:
    """ValueError where the loss is none of those whose least value is known."""
    logits, labels = output_logits(outputs), labels_of(inputs, task.label_names)
    given, classes = [name for name in task.label_names if inputs.get(name) is not None], logits.shape[-1]
    if "start_positions" in inputs:  # of extractive question answering; Trainer's smoother knows nothing of it
        if task.loss_fn is not None:
            raise _unmeasurable("a custom loss of answers")
        return ConstantPredictor(MAX_POSITIONS, "positions")
    if len(given) > 1:
        raise _unmeasurable(f"a loss of several labels ({', '.join(given)})")
    if labels.is_floating_point() and labels.numel() != logits.numel():
        raise _unmeasurable(f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}")
    if classes == 1 and not labels.is_floating_point():
        raise _unmeasurable("whole labels of a single logit, which models take for numbers (give them as floats)")
    problem_type = getattr(getattr(task.model, "config", None), "problem_type", None)
    multi_label = problem_type == "multi_label_classification"
    if labels.is_floating_point() and not multi_label:
        return ConstantPredictor(classes, "numbers", scale=_loss_scale(task, inputs, labels, logits))
    label_smoothing = 0.0 if task.loss_fn is not None else label_smoothing
    if not has_router_loss(outputs):
        _check_cross_entropy(task, inputs, outputs, multi_label, label_smoothing)
    return ConstantPredictor(classes, "multi_label" if multi_label else "classes", label_smoothing)


def _check_cross_entropy(task, inputs, outputs, multi_label, label_smoothing) -> None:
    """ValueError where the loss on a batch is not the (binary) cross-entropy that is taken for it."""
    if task.loss_fn is not None:
        # Of a fresh model all losses are alike, weighted ones too: the custom loss is tried on logits far apart.
        logits = output_logits(outputs).float()
        outputs = ModelOutput(logits=3 * torch.arange(logits.numel(), device=logits.device).sin().view_as(logits))
    try:
        loss = task(outputs, inputs, task.count(inputs) if task.loss_fn is not None else None)
    except TypeError:  # it is no loss at all, whatever f_0 is
        raise
    except Exception as error:
        raise _unmeasurable(f"a custom loss that fails on logits of its own ({error})") from error
    logits, labels = task.predictions(outputs, inputs)
    if multi_label:
        expected = F.binary_cross_entropy_with_logits(logits.float(), labels.float())
    elif logits.shape[:-1] != labels.shape:
        raise _unmeasurable(f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}")
    else:
        expected = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), label_smoothing=label_smoothing)
    if abs(loss - expected) > (1e-3 if task.loss_fn is not None else 0.02) * expected:
        raise _unmeasurable(f"a loss that is {loss:.4g} where the cross-entropy is {expected:.4g}")


def _loss_scale(task, inputs, labels, logits) -> float:
    """The loss of numbers in units of the mean squared error, measured on one batch."""
    residual = labels - labels.mean(0, keepdim=True)
    if not residual.any():  # a batch of one
        residual = torch.ones_like(labels)
    name = next(name for name in (*task.label_names, "labels") if inputs.get(name) is labels)
    scales = []
    for factor in (1.0, 2.0):
        # The loss of a residual r, whatever the prediction, is the loss of the labels `prediction + r`.
        batch = {**inputs, name: logits.reshape(labels.shape).to(labels) + factor * residual}
        if task.loss_fn is not None:
            loss = task(ModelOutput(logits=logits), batch, task.count(batch))
        else:
            with probing(task.model):
                loss = output_loss(task.model(**batch))
        scales.append((loss / (factor * residual).square().mean()).item())
    if not (math.isfinite(scales[0]) and scales[0] > 0 and math.isclose(*scales, rel_tol=0.02)):
        raise _unmeasurable("a loss of numbers that is not proportional to the squared error")
    return float(f"{scales[0]:.5g}")  # without the rounding errors of this batch: a resumed run measures on another
