"""The callbacks that the trainer adds, for the dual step and readable console lines, and the level of its messages."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import has_length

from ..configs import PER_LAYER
from .checkpoints import READABLE_STATE


def show_messages(args: TrainingArguments) -> None:
    """Show the messages of this package from `args.log_level` on; by default ("passive") from INFO on."""
    logger = logging.getLogger("hf_descent")
    if args.log_level != "passive":
        logger.setLevel(args.get_process_log_level())
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


# trainer_state.json has a copy of the multipliers among the states of callbacks. With
# `restore_callback_states_from_checkpoint=True` Trainer looks for a callback of that name, and warns if there is none.
ReadableState = type(READABLE_STATE, (TrainerCallback,), {})


def add_callbacks(trainer: Trainer, callback: "DescentCallback") -> None:
    """Add `callback` once, and put the console output below in place of Trainer's."""
    callbacks = {type(known): known for known in trainer.callback_handler.callbacks}

    if DescentCallback not in callbacks:
        # First of all: others may save a checkpoint at the end of a step.
        trainer.callback_handler.callbacks.insert(0, callback)
        if trainer.args.restore_callback_states_from_checkpoint:
            trainer.add_callback(ReadableState)

    replacements = {
        ProgressCallback: DescentProgressCallback,
        PrinterCallback: DescentPrinterCallback,
    }
    for stock, ours in replacements.items():
        if stock in callbacks:  # by exact type: one of the user's own stays
            trainer.remove_callback(callbacks[stock])
            trainer.add_callback(ours)


@dataclass(eq=False, repr=False)
class DescentCallback(TrainerCallback):
    """Moves the multipliers after every optimizer step. The trainer adds it; you need not.

    It calls the trainer's methods before training, after the optimizer's step and after every epoch.

    Early stopping by `feasible_score` does not end a run before its constraints are met. They are not met while the
    score is below 0. Multipliers that still rise may meet them, though the score gets worse at first.
    """

    before_training: Callable[[], None]
    # Gets whether the gradient scaler of float16 skipped the step.
    after_step: Callable[[bool], None]
    after_epoch: Callable[[], None]
    others: list[TrainerCallback]  # all callbacks of the trainer
    scale: float | None = None  # the gradient scale before the optimizer's step

    def on_train_begin(self, args, state, control, **kwargs):
        self.before_training()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        scaler = getattr(optimizer, "scaler", None)
        self.scale = None
        if scaler is not None:
            self.scale = scaler.get_scale()

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # accelerate misses the steps that a fused optimizer skips by itself.
        self.after_step(self.scale is not None and optimizer.scaler.get_scale() < self.scale)

    def on_step_end(self, args, state, control, **kwargs):
        # Not on_epoch_end, which comes after the checkpoint of the epoch's last step.
        if state.epoch == int(state.epoch):
            self.after_epoch()

    def on_epoch_end(self, args, state, control, train_dataloader=None, **kwargs):
        # If data have no length, Trainer does not know the last step of an epoch, and counts the whole run as one
        # epoch.
        if not (has_length(train_dataloader) or control.should_training_stop):
            self.after_epoch()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics is None:
            return
        metric = args.metric_for_best_model
        if metric is not None and metric.endswith("feasible_score"):
            metric = metric.removeprefix("eval_")
            if metrics.get(f"eval_{metric}", 0.0) < 0:
                self._put_off_stopping()

    def _put_off_stopping(self) -> None:
        for callback in self.others:
            if isinstance(callback, EarlyStoppingCallback):
                # It is about to count this evaluation.
                callback.early_stopping_patience_counter = -1


def training_line(
    logs: Mapping[str, Any], step: int, max_steps: int, has_multipliers: bool = True
) -> str | None:
    """The console's line for a logging step of training; `None` for other logs.

    It has the last layer's loss f_L, the layer that is furthest behind, the largest violation that training acts on
    (with the `target_margin` of targets), and the range of the multipliers, if the objective `has_multipliers`. If all
    constraints are met, the layer is the one nearest to what it is asked.
    """
    violations = _by_constraint("violation", logs)
    if "loss" not in logs or not violations:
        return None
    parts = [f"step {step}/{max_steps}", f"f_L {_number(logs['loss'])}"]

    name = max(violations, key=violations.get)
    layer = name.rsplit("_", 1)[-1]
    of = "loss"
    loss = logs[f"layer_loss_{layer}"]
    held_out = f"dual_layer_loss_{layer}"
    if held_out in logs:  # the violation is of this loss
        of = "held-out loss"
        loss = logs[held_out]
    asked = loss - violations[name]
    which = "furthest behind" if violations[name] > 0 else "nearest to what it is asked"
    parts.append(f"{which}: layer {layer}, {of} {_number(loss)} (asked {_number(asked)})")

    if "max_acting_violation" in logs:
        parts.append(f"largest violation acted on {_number(logs['max_acting_violation'])}")
        if has_multipliers:
            parts.append(_range_of("multiplier", _by_constraint("multiplier", logs).values()))
    if "learning_rate" in logs:
        parts.append(f"lr {_number(logs['learning_rate'])}")
    return " | ".join(parts)


def _by_constraint(name: str, logs: Mapping[str, Any]) -> dict[str, float]:
    """The values of a quantity that is logged for each constraint, by the constraint's name ("3", "exit_3")."""
    start = f"{name}_"
    return {
        key.removeprefix(start): float(value)
        for key, value in logs.items()
        if key.startswith(start) and PER_LAYER.search(key)
    }


def _range_of(name: str, values: Collection[float]) -> str:
    """Some values in words: the least and the greatest, or the one that all have."""
    least = _number(min(values))
    greatest = _number(max(values))
    if len(values) == 1:
        return f"{name} {least}"
    if least == greatest:
        return f"all {name}s {least}"
    return f"{name}s {least} to {greatest}"


def _number(value: Any) -> str:
    return f"{float(value):.3g}"


def _without_layers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logs without the values of single layers. Those are for trackers: 4 L numbers make no readable line."""
    return {name: value for name, value in logs.items() if not PER_LAYER.search(name)}


class DescentProgressCallback(ProgressCallback):
    """A progress bar that writes [`training_line`] in place of all logged values."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        has_multipliers = args.objective_class.has_multipliers
        line = training_line(logs, state.global_step, state.max_steps, has_multipliers)
        if line is None:
            super().on_log(args, state, control, logs=_without_layers(logs), **kwargs)
        elif state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line)


class DescentPrinterCallback(PrinterCallback):
    """Prints [`training_line`] in place of all logged values, where there is no progress bar."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        has_multipliers = args.objective_class.has_multipliers
        line = training_line(logs, state.global_step, state.max_steps, has_multipliers)
        if line is None:
            super().on_log(args, state, control, logs=_without_layers(logs), **kwargs)
        elif state.is_local_process_zero:
            print(line)
