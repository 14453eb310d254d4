"""What the trainer adds to Trainer's callbacks: the dual step, a figure, a readable progress bar. And its messages."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.integration_utils import (
    TensorBoardCallback,
    TrackioCallback,
    rewrite_logs,
)
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import has_length

from ..configs import LAYER_LOSS, PER_LAYER
from ..constraints.objectives import UNCONSTRAINED
from ..evaluation import Certificate
from ..extras import is_installed


def show_messages(args: TrainingArguments) -> None:
    """Show what this package logs from `args.log_level` on; by default ("passive") what was chosen or found, too."""
    logger = logging.getLogger("hf_descent")
    if args.log_level != "passive":
        logger.setLevel(args.get_process_log_level())
    elif logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


def add_callbacks(trainer: Trainer, callback: "DescentCallback") -> None:
    """Add `callback`, and the progress bar below in place of Trainer's; once."""
    callbacks = {type(each): each for each in trainer.callback_handler.callbacks}
    if DescentCallback not in callbacks:
        # First of all: others may save a checkpoint at the end of a step.
        trainer.callback_handler.callbacks.insert(0, callback)
    # By exact type: a progress bar of the user's own stays.
    if ProgressCallback in callbacks:
        trainer.remove_callback(callbacks[ProgressCallback])
        trainer.add_callback(DescentProgressCallback)


@dataclass(eq=False, repr=False)
class DescentCallback(TrainerCallback):
    """Calls back after the optimizer's step and after every epoch, and gives TensorBoard and Trackio a figure of the
    layer losses with every evaluation, beside the scalars.

    Early stopping by `feasible_score` does not end a run before its constraints are met: multipliers that are rising
    still may meet them, at first at the price of the score.
    """

    after_step: Callable[[bool], None]  # of whether the gradient scaler of float16 skipped the step
    after_epoch: Callable[[], None]
    certificate: Callable[[], Certificate | None]  # that of the last evaluation
    others: list[TrainerCallback]  # the trainer's
    scale: float | None = None  # of the gradients, before the optimizer's step

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.scale = scaler.get_scale() if (scaler := getattr(optimizer, "scaler", None)) else None

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # accelerate does not see it where a fused optimizer itself leaves the weights as they are.
        self.after_step(self.scale is not None and optimizer.scaler.get_scale() < self.scale)

    def on_step_end(self, args, state, control, **kwargs):
        # Not on_epoch_end, which comes after the checkpoint of the epoch's last step.
        if state.epoch == int(state.epoch):
            self.after_epoch()

    def on_epoch_end(self, args, state, control, train_dataloader=None, **kwargs):
        # Of data without a length Trainer does not know the last step, and counts the whole run as one epoch.
        if not (has_length(train_dataloader) or control.should_training_stop):
            self.after_epoch()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics = metrics or {}
        chosen_by = f"eval_{(args.metric_for_best_model or '').removeprefix('eval_')}"
        if chosen_by.endswith("feasible_score") and metrics.get(chosen_by, 0.0) < 0:
            for callback in self.others:
                if isinstance(callback, EarlyStoppingCallback):
                    callback.early_stopping_patience_counter = (
                        -1
                    )  # it is about to count this evaluation
        # Each logged the scalars before, so that its run is open.
        trackers = [
            each for each in self.others if isinstance(each, TensorBoardCallback | TrackioCallback)
        ]
        names = [name for name in metrics if LAYER_LOSS.search(name)]
        draws = is_installed("matplotlib")
        if not (trackers and names and draws and state.is_world_process_zero):
            return

        from ..evaluation.plots import pixels, plot_evaluation

        facts = self.certificate(), args.gamma_train, args.objective not in UNCONSTRAINED
        image = pixels(plot_evaluation([metrics[name] for name in names], *facts))
        ((name, image),) = rewrite_logs({LAYER_LOSS.sub("layer_losses", names[0]): image}).items()
        for tracker in trackers:
            if isinstance(tracker, TrackioCallback):
                import trackio

                trackio.log({name: trackio.Image(image), "train/global_step": state.global_step})
            elif tracker.tb_writer is not None:
                tracker.tb_writer.add_image(name, image, state.global_step, dataformats="HWC")
                tracker.tb_writer.flush()


class DescentProgressCallback(ProgressCallback):
    """Leaves the values of single layers to the trackers: a line of 4 L numbers is not readable."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        short = {name: value for name, value in (logs or {}).items() if not PER_LAYER.search(name)}
        super().on_log(args, state, control, logs=short, **kwargs)
