"""Makes the dual side of a run, once its layers were found."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer

from ..constraints.saved_state import STATE_NAME, read_state
from ..constraints.state import DualState
from ..logs import get_logger
from ..losses.chance_probe import find_chance_loss
from ..losses.layerwise import LayerLosses
from ..losses.task import TaskLoss
from ..readout.replay import output_loss, probing
from ..runs import RunFolder
from .chance import measure_chance
from .holdout import HeldOutRows, shuffled
from .preparation import loaded_from


logger = get_logger(__name__)


def has_state(checkpoint: str | None) -> bool:
    """Whether a checkpoint holds the state of a dual side."""
    if checkpoint is None:
        return False
    return os.path.isfile(os.path.join(checkpoint, STATE_NAME))


def make_dual(
    trainer: Trainer,
    layers: LayerLosses,
    inputs: Mapping[str, Any],
    dual_dataset,
    checkpoint: str | None,
) -> DualState:
    """The dual side of a run: loaded from the `checkpoint` that the run goes on from, else a new one. If the model is
    only evaluated and the arguments state no problem, it is the one that the model was trained on.

    The multipliers move by the losses on `dual_dataset`, or on the training examples. `inputs` is a batch to try the
    model on.
    """
    inputs = layers.task.short(inputs)
    _warn_of_half_precision(layers.task, inputs)

    resumes_dual = has_state(checkpoint)
    summary: Mapping[str, Any] = {}  # of the run that made a model which is only evaluated
    chance = None
    if resumes_dual:
        chance = _saved_chance(checkpoint)
    elif not trainer.is_in_train:
        summary = RunFolder(loaded_from(trainer.model)).summary
        chance = summary.get("chance_loss")
    if chance is None:
        chance = _measured_chance(trainer, layers, inputs)

    dual = DualState(
        trainer.args,
        layers.num_layers,
        trainer.state.max_steps,
        # Without a state to go on from, the warm-up begins now.
        start_step=0 if resumes_dual else trainer.state.global_step,
        chance=chance,
        device=trainer.args.device,
        held_out=_dual_examples(trainer, dual_dataset),
    )

    if resumes_dual:
        dual.load(checkpoint)
    elif checkpoint is not None:
        logger.warning(f"{checkpoint} has no saved multipliers: they start from 0, with a warm-up.")
    elif not trainer.is_in_train:
        dual.take_saved_problem(summary)
    return dual


def _saved_chance(checkpoint: str) -> float | None:
    """The loss of the best constant prediction that is saved in a checkpoint with a dual side; `None` if it was not
    known."""
    _, settings = read_state(checkpoint)
    if settings["problem"] is None:
        return None
    return settings["problem"].get("chance_loss")


def _measured_chance(
    trainer: Trainer, layers: LayerLosses, inputs: Mapping[str, Any]
) -> float | None:
    """The loss of the best constant prediction on the data at hand. If it cannot be measured: ValueError if it was to
    be the f_0 of a training, else `None`."""
    args = trainer.args
    task = layers.task
    is_constrained = trainer.is_in_train and args.objective_class.is_constrained
    is_needed = is_constrained and args.initial_loss_bound == "auto"

    chance_loss = layers.chance_loss
    try:
        if chance_loss is None:  # looked for again, since the error says why there is none
            chance_loss = find_chance_loss(task, inputs, _outputs(task, inputs))
        return measure_chance(trainer, task, chance_loss, _rows_at_hand(trainer))
    except ValueError:
        if is_needed:
            raise
        return None


def _warn_of_half_precision(task: TaskLoss, inputs: Mapping[str, Any]) -> None:
    loss = output_loss(_outputs(task, inputs))
    digits = {torch.bfloat16: 3, torch.float16: 4}
    if isinstance(loss, torch.Tensor) and loss.dtype in digits:
        logger.warning(
            f"The model computes its loss in {loss.dtype}, which has {digits[loss.dtype]} digits: too few for small "
            "violations. Load the model in float32 and set `bf16=True` (mixed precision)."
        )


def _outputs(task: TaskLoss, inputs: Mapping[str, Any]) -> Any:
    """The outputs of the model; training goes on as if it had not been called."""
    with probing(task.model):
        return task.model(**task.model_inputs(inputs))


def _rows_at_hand(trainer: Trainer):
    """The data of the present training or evaluation."""
    loader = trainer.callback_handler.eval_dataloader  # `None` if only `prediction_step` was called
    if trainer.is_in_train or loader is None:
        return trainer.train_dataset
    return getattr(loader, "dataset", None)


def _dual_examples(trainer: Trainer, dual_dataset) -> HeldOutRows | None:
    """The examples of `dual_dataset` in random order; `None` if the multipliers move by the training examples, or do
    not move."""
    args = trainer.args
    if dual_dataset is None or not trainer.is_in_train:
        return None
    if not args.objective_class.moves_multipliers:
        return None
    return HeldOutRows(trainer, shuffled(dual_dataset, args))
