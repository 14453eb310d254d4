"""What a training starts from, in short texts: its weights, its rows, and what reads and scores the model.

Results of two trainings are compared only if these agree. Arguments are not enough: another model, or other rows, may
be trained with the same arguments in the same folder.
"""

import functools
import inspect
import itertools
import math
import re
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..evaluation.fingerprints import (
    SAMPLED_ROWS,
    digest_of,
    fingerprint_of_examples,
    fingerprint_of_tensors,
)
from ..evaluation.scoring import name_of
from ..evaluation.side_by_side import ORIGIN, UNREAD, is_unread
from ..logs import get_logger
from ..readout.stack import inner_model, unwrapped
from ..readout.tape import assigned
from ..runs import RunFolder
from .chance import collated, drawing_apart


logger = get_logger(__name__)

SAMPLED_NUMBERS = 256  # numbers read of each tensor

# Data that cannot be compared with others -> a made-up name that stands for them while this process runs.
_made_up_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

Origin = dict[str, str | None]


def origin_of(
    trainer: Trainer,
    readout: Callable | None,
    checkpoint: str | None = None,
    reads_rows: bool = True,
) -> Origin:
    """What the training starts from: the present model, or with a `checkpoint` what that training had started from.

    A value is `None` if it is not known: the rows with `reads_rows=False`, and after a checkpoint the trained
    parameters, the rows, the readout or the loss if they have changed. Data that cannot be compared, such as a stream,
    are taken for those of the checkpoint. Empty if the checkpoint is of an earlier version.
    """
    model = unwrapped(trainer.model)
    present = {
        "weights": fingerprint_of_weights(model),
        "trained": _names_of_trained(model),
        "rows": _rows_of(trainer) if reads_rows else None,
        **scoring_of(trainer, readout),
    }
    if checkpoint is None:
        return present

    saved = RunFolder(checkpoint).summary.get("origin")
    if not saved:
        return {}
    if is_unread(saved["rows"]) and is_unread(present["rows"]):
        # Later calls without the checkpoint are to find the same name.
        _made_up_names[trainer.train_dataset] = saved["rows"]
        present["rows"] = saved["rows"]
    return _resumed(saved, present, checkpoint)


def _resumed(saved: Origin, present: Origin, checkpoint: str) -> Origin:
    """What the training of a checkpoint started from (`saved`), without what has changed by now (`present`)."""
    origin = {"weights": saved["weights"]}
    for name in ("trained", "rows", "readout", "loss"):
        is_as_before = saved.get(name) == present[name]
        origin[name] = present[name] if is_as_before else None
        if not (is_as_before or saved.get(name) is None):
            logger.warning(
                f"This training may have {ORIGIN[name]} than {checkpoint}: no plain run is compared with it."
            )
    return origin


def scoring_of(trainer: Trainer, readout: Callable | None) -> Origin:
    """The readout and the loss of a trainer, as short texts."""
    smoothing = trainer.args.label_smoothing_factor
    return scoring_by(trainer.model, readout, trainer.compute_loss_func, smoothing)


def scoring_by(
    model: nn.Module,
    readout: Callable | None = None,
    loss_fn: Callable | None = None,
    smoothing: float = 0.0,
) -> Origin:
    """A readout and a loss as short texts; the model's own, unless others are given."""
    pooling = getattr(getattr(inner_model(model), "config", None), "pooling", None)
    return {
        "readout": f"{pooling} {_source_of(readout)}",
        "loss": f"{smoothing} {_source_of(loss_fn)}",
    }


def _names_of_trained(model: nn.Module) -> str:
    """A short text of the names of the parameters that are trained."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return digest_of(repr(names))


def _rows_of(trainer: Trainer) -> str | None:
    """The fingerprint of the training examples, or a made-up name if they have none; `None` if there is neither."""
    data = trainer.train_dataset
    fingerprint = fingerprint_of_rows(trainer, data)
    if fingerprint is not None:
        return fingerprint
    try:
        return _made_up_names.setdefault(data, f"{UNREAD}{uuid.uuid4().hex}")
    except TypeError:  # no data, or of a kind that keeps no weak references
        return None


def fingerprint_of_rows(trainer: Trainer, data) -> str | None:
    """A short text that differs for other data. It depends on their length, and on a sample of rows as the trainer
    collates them.

    `None` for a stream, a loader, and rows that change each time they are read.
    """
    if isinstance(data, IterableDataset | DataLoader) or not has_length(data):
        return None
    try:
        first = _fingerprint_of_sample(trainer, data)
        second = _fingerprint_of_sample(trainer, data)
    except Exception as error:  # only the loader of a user's own trainer can read these rows
        logger.info(
            f"The examples of {type(data).__name__} cannot be compared with others: {error!r}."
        )
        return None
    return first if first == second else None


def _fingerprint_of_sample(trainer: Trainer, data) -> str | None:
    collator = trainer.data_collator
    generators = []
    if hasattr(collator, "generator") and hasattr(collator, "seed"):
        generators = [(collator, "generator")]  # the collator makes it anew from its seed
    with drawing_apart(trainer, unwrapped(trainer.model)), assigned(generators, None):
        examples = collated(trainer, data, SAMPLED_ROWS, batch_size=1)
        return fingerprint_of_examples(len(data), examples)


def fingerprint_of_weights(model: nn.Module) -> str | None:
    """A short text that differs for other weights, and for modules of other kinds or with other numbers (such as the
    rate of dropout). It reads a sample of each parameter and buffer.

    `None` if this process does not hold all of them (FSDP, ZeRO-3, the meta device).
    """
    sample = []
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        numbers = tensor.data
        is_whole = type(numbers) is torch.Tensor and numbers.layout is torch.strided
        if not is_whole or numbers.is_meta or not numbers.numel():
            return None
        step = math.ceil(numbers.numel() / SAMPLED_NUMBERS)
        shape = f"{name} {tuple(numbers.shape)} {numbers.dtype}"
        sample.append((shape, numbers.reshape(-1)[::step]))

    settings = [
        (name, type(module).__name__, _numbers_of(module)) for name, module in model.named_modules()
    ]
    return digest_of(f"{settings} {fingerprint_of_tensors(sample)}")


def _numbers_of(module: nn.Module) -> dict[str, Any]:
    """The floating-point attributes of a module, and its dicts of floats (such as the scales of adapters)."""
    numbers = {}
    for name, value in vars(module).items():
        # `neftune_noise_alpha` is an argument, and there only while training runs.
        if name.startswith(("_", "neftune")):
            continue
        parts = list(value.values()) if isinstance(value, dict) else [value]
        if parts and all(isinstance(part, float) for part in parts):
            numbers[name] = value
    return numbers


def _source_of(function: Callable | None) -> str:
    """The name of a function, and a digest of its source (if that is found) and of the arguments of a partial; "own"
    for `None`."""
    if function is None:
        return "own"
    inner = getattr(function, "func", function)  # it may be a partial
    try:
        source = inspect.getsource(inner if inspect.isroutine(inner) else type(inner))
    except (OSError, TypeError):
        source = ""
    if isinstance(function, functools.partial):
        source += re.sub(" at 0x[0-9a-f]+", "", f"{function.args} {function.keywords}")
    return f"{name_of(function)} {digest_of(source)}"
