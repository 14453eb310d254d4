"""Trainer with layerwise descent constraints: what happens in one optimizer step.

Per micro-batch, `compute_loss` runs the model once with its readout attached: inside that forward the tail of the
model is replayed on every layer's hidden state, which gives f_1..f_L. The objective is their weighted sum
(`constraints/objectives.py`). After the optimizer's step the layer losses of all micro-batches and processes are added
up, and the multipliers take one step (`constraints/state.py`). Everything else is Trainer's.
"""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import ProgressCallback

from .configs import DescentConfig
from .constraints.multipliers import Multipliers
from .constraints.state import DescentState
from .hub.push import ModelCardMixin
from .losses.task import averages_over_rows, count_items, loss_from_logits, loss_of_ones_own, predicted_labels
from .noise.embedding_noise import EmbeddingNoise
from .readout.replay import Readout, has_router_loss, output_logits, output_loss
from .readout.stack import inner_model
from .training.callbacks import DescentProgressCallback, StepCallback, show_messages
from .training.checkpoints import CheckpointMixin
from .training.evaluation_step import EvaluationMixin
from .training.fused_step import FusedStepMixin
from .training.preparation import PreparationMixin
from .training.search import SearchMixin


class DescentMixin(FusedStepMixin, PreparationMixin, EvaluationMixin, CheckpointMixin, SearchMixin, ModelCardMixin):
    """Descent constraints for any class derived from [`~transformers.Trainer`]; put it first among the bases.

    With `objective="erm"` and no noise nothing changes, but for the scale of losses that ignore `num_items_in_batch`
    under gradient accumulation or several processes: those are averaged over the items of the whole batch here. What
    stays is Trainer's: its `eval_loss` is a mean over batches, and it adds a router's loss once per micro-batch. The
    other objectives average both over items.
    """

    _name = "Descent"
    _tag_names = ["hf_descent", "descent"]
    _paper = {
        "title": "A Constrained Optimization Perspective of Unrolled Transformers",
        "id": "2601.17257",
        "citation": (
            "@article{porras2026constrained,\n"
            "  title={A Constrained Optimization Perspective of Unrolled Transformers},\n"
            "  author={Porras-Valenzuela, Javier and Hadou, Samar and Ribeiro, Alejandro},\n"
            "  journal={arXiv preprint arXiv:2601.17257},\n  year={2026}\n}"
        ),
    }
    config_class = DescentConfig

    def __init__(
        self,
        model=None,
        args=None,
        *positional,
        readout: Callable[[nn.Module, torch.Tensor, Mapping[str, Any]], torch.Tensor] | None = None,
        layer_loss_fn: Callable[..., torch.Tensor] | None = None,
        **keywords,
    ):
        args = self.config_class.from_training_arguments(args or self.config_class(output_dir="tmp_trainer"))
        if layer_loss_fn is not None:
            if keywords.get("compute_loss_func") is not None:
                raise ValueError("Give `layer_loss_fn` or `compute_loss_func`, not both: either scores every layer.")
            keywords["compute_loss_func"] = layer_loss_fn
        self._readout_fn = readout
        self._state: DescentState | None = None
        self._readout: Readout | None = None
        self._noise: EmbeddingNoise | None = None
        self._resumed_from: str | None = None
        self._takes_items: bool | None = None
        self._is_prepared_plain = False
        self._items: torch.Tensor | None = None  # items of the optimizer step, over micro-batches and processes
        self._micro_step = 0
        self._layer_sums: torch.Tensor | None = None  # [layers], this process's part of the step's layer losses
        self._step_starts: deque[float] = deque(maxlen=1000)
        self._training_started: float | None = None  # time of day, in seconds
        show_messages(args)
        super().__init__(model, args, *positional, **keywords)
        self._follow_layers()

    def _follow_layers(self) -> None:
        """Refuse what a run that reads layers cannot do, and add its callbacks once; plain training needs neither."""
        if not self._reads_layers:
            return
        self._refuse_unsupported()
        callbacks = {type(callback): callback for callback in self.callback_handler.callbacks}
        if StepCallback not in callbacks:
            # First of all: others may save a checkpoint at the end of a step.
            self.callback_handler.callbacks.insert(0, StepCallback(self))
        # By exact type: a progress bar of the user's own stays.
        if ProgressCallback in callbacks:
            self.remove_callback(callbacks[ProgressCallback])
            self.add_callback(DescentProgressCallback)

    @property
    def _reads_layers(self) -> bool:
        return self.args.objective != "erm" or self._readout_fn is not None

    @property
    def _step_seconds(self) -> float | None:
        """Median time of an optimizer step, data loading and logging included."""
        times = [after - before for before, after in pairwise(self._step_starts)]
        return statistics.median(times) if times else None

    @property
    def multipliers(self) -> Multipliers | None:
        """The Lagrange multipliers; `multipliers.values` is `[L]`, layer l at index l-1. `None` before training."""
        return None if self._state is None else self._state.multipliers

    @property
    def problem(self):
        """The [`DescentProblem`] being solved; `None` before it is known ("auto": until warm-up ends)."""
        return None if self._state is None else self._state.problem

    # ---- one optimizer step ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        start = time.perf_counter()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:  # of data without a length Trainer goes on asking
            self._step_starts.append(start)
        self._micro_step = 0
        self._items = None
        if self._reads_layers and self._readout is None and batches and self._count_items(batches[0]) is not None:
            # Before anything is counted: what a label counts is found out here, too.
            self._prepare(self.model_wrapped, self._prepare_inputs(batches[0]))
        if self._layer_sums is not None:
            # Not after a step: where data without a length end within one, Trainer adds the rest to the next one.
            self._layer_sums.zero_()
        if self.state.global_step >= self.state.max_steps:
            # Resumed at its end, where Trainer itself would take one step more.
            self.control.should_training_stop = True
            return [], None
        if not self._stock_scaling_is_right:
            counts = [count.to(device) for batch in batches if (count := self._count_items(batch)) is not None]
            self._items = self._reduce(sum(counts)) if counts else None
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples, device):
        if not (self._reads_layers or self._is_prepared_plain) and batch_samples:
            self._prepare_plain(batch_samples[0])
        return super()._get_num_items_in_batch(batch_samples, device)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._reported_loss = None
        if model.training:
            self._keeps_logits = return_outputs
        labelled = self._count_items(inputs) is not None
        constrained = self._reads_layers and (model.training or labelled)
        if constrained and not labelled:
            raise ValueError(
                f"A training batch has no tensor of labels (looked for {', '.join(self.label_names) or 'labels'}; "
                f"found {', '.join(inputs)}); every layer's loss needs it. Columns of text, and those that "
                f"{type(inner_model(self.model)).__name__} does not take, were dropped: give labels as numbers, to a "
                "model with a head (`AutoModelFor...`)."
            )
        # What is found out on the first batch comes before the noise, whose draws it must not use up.
        if constrained:
            self._prepare(model, inputs)
        asks = labelled and not self._stock_scaling_is_right and (model.training or not constrained)
        # Trainer counts no items for a model that takes none, though a label smoother would.
        miscaled = asks and (num_items_in_batch is None or not self._loss_takes_items(model, inputs))
        with self._training_noise(model) if model.training else contextlib.nullcontext():
            if constrained:
                loss, outputs = self._descent_loss(model, inputs)
            elif not (miscaled and model.training):
                # In evaluation, too, Trainer would multiply any loss by the number of processes, given items.
                return super().compute_loss(model, inputs, return_outputs, None if miscaled else num_items_in_batch)
            else:
                share = self._share_of_items(inputs)
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
                loss = torch.where(share > 0, loss, 0.0) * share
                self.loss_is_scaled_for_ga = True
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        self._reported_loss, of_class = None, self.loss_is_scaled_for_ga
        try:
            objective = super().training_step(*args, **kwargs)
        finally:
            self.loss_is_scaled_for_ga = of_class  # a subclass may say it of its own loss
        if self._reads_layers and self._reported_loss is None:
            raise ValueError(
                f"`{type(self).__name__}.compute_loss` did not come to `DescentMixin.compute_loss`, so no layer was "
                "read. Give your loss as `layer_loss_fn(outputs, labels, num_items_in_batch=None)` instead."
            )
        # The `loss` of the log is the task loss f_L; the objective itself moves with the multipliers.
        return objective if self._reported_loss is None else self._reported_loss

    def _descent_loss(self, model, inputs) -> tuple[torch.Tensor, Any]:
        """The objective of a micro-batch (in evaluation: f_L) and the model's outputs."""
        training, step, state, num_layers = (
            model.training,
            self.state.global_step,
            self._state,
            self._readout.num_layers,
        )
        unwrapped, self._scored = self.accelerator.unwrap_model(model), True
        count = self._count_items(inputs)
        share = self._share_of_items(inputs) if training else torch.ones((), device=count.device)
        weighted = state.weighted_layers(step) if training else []

        if training and state.needs_labels and (self.state.epoch or 0) < state.labels_until:
            state.constant_predictor.update(self._predicted_labels(inputs))
        if self._fused is not None:
            return self._fused_loss(model, inputs, share, weighted)

        labels = inputs.get("labels")
        takes_items = training and self._loss_takes_items(model, inputs)
        # With the `items` of the whole step the losses are sums over the micro-batch divided by them, else means of
        # the micro-batch, to be weighted by its share. DDP averages gradients over processes, hence the world size in
        # both. In evaluation a loss function of one's own gets the items of the batch, as from Trainer.
        items = self._items.clamp(min=1) if takes_items else None  # a sum over none is 0
        if not training and self.compute_loss_func is not None:
            items = count
        losses: list[torch.Tensor] = []

        def score(layer, outputs, hidden):
            if layer in trained and layer < num_layers and not hidden.requires_grad:
                raise self._readout.without_gradient(layer)
            losses.append(self._task_loss(unwrapped, outputs, labels, items))

        trained = state.trained_layers if training else []
        unweighted = [layer for layer in range(1, num_layers + 1) if layer not in weighted]
        withheld = () if self._model_scores else ("labels",) if self._readout_fn is None else self.label_names
        model_inputs = {name: value for name, value in inputs.items() if name not in withheld}
        if takes_items and self.model_accepts_loss_kwargs:
            model_inputs["num_items_in_batch"] = items
        with self._readout.attach(score, no_grad_layers=unweighted if training else ()):
            outputs = model(**model_inputs)

        parts = torch.stack(losses).float()  # [layers]
        if not training:
            self._eval_sums += torch.cat([torch.where(count > 0, parts.detach() * count, 0.0), count[None]])
            return parts[-1], outputs
        parts = parts * self.args.world_size if takes_items else torch.where(share > 0, parts, 0.0) * share
        self._layer_sums = self._layer_sums + parts.detach() / self.args.world_size
        objective = state.objective(parts, step, share)
        if self._model_scores and has_router_loss(outputs):
            # A router's loss is no part of any f_l (the readout replayed layer L without it); it enters the objective
            # as the model itself weighs it.
            objective = objective + (outputs["loss"] - losses[-1]) * share
        self._reported_loss = parts[-1].detach()
        self.loss_is_scaled_for_ga = True
        return objective, outputs

    def _task_loss(self, model, outputs, labels, items=None, shifts_labels=None) -> torch.Tensor:
        """The loss that Trainer would take from these outputs; a smoother's labels are shifted as found in training,
        where not told."""
        if self.compute_loss_func is not None:
            loss = loss_of_ones_own(self.compute_loss_func, model, outputs, labels, items)
            if not (isinstance(loss, torch.Tensor) and loss.shape == () and loss.is_floating_point()):
                kind = f"{loss.dtype} of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
                raise TypeError(
                    f"`layer_loss_fn` (or `compute_loss_func`) returned {kind} for the outputs of one layer; return a "
                    "floating-point tensor without dimensions, such as the mean over the batch."
                )
            return loss
        if self.label_smoother is not None and labels is not None:
            shifts_labels = self._loss_shifts_labels if shifts_labels is None else shifts_labels
            return self.label_smoother(outputs, labels, shift_labels=shifts_labels, num_items_in_batch=items)
        if self._readout_fn is not None:
            return loss_from_logits(model, output_logits(outputs), labels, items)
        loss = output_loss(outputs)
        if loss is None:
            raise ValueError(
                f"{type(model).__name__} returns no loss for a batch with labels; give one as `layer_loss_fn(outputs, "
                "labels, num_items_in_batch=None)`."
            )
        return loss

    def _after_optimizer_step(self) -> None:
        if self._layer_sums is None:
            return
        # Every process reduces, also for a step that the gradient scaler skips, so that none waits for another.
        layer_losses = self._reduce(self._layer_sums)
        if not self.accelerator.optimizer_step_was_skipped:
            self._state.dual_step(layer_losses, self.state.global_step, self._items)
        if self.args.stop_on_nonfinite and self._state.has_faults:
            self.control.should_training_stop = True

    def _after_epoch(self) -> None:
        if self._state is not None and self.args.slack_restart:
            self._state.restart_slacks()

    # ---- items ----

    def _count_items(self, inputs) -> torch.Tensor | None:
        of_rows = self._model_scores and averages_over_rows(inner_model(self.model))
        return count_items(inputs, self.label_names, self._loss_shifts_labels, of_rows)

    def _predicted_labels(self, inputs) -> torch.Tensor:
        """What a constant prediction would be of: of an extractive answer, both ends `[batch, 2]`."""
        if inputs.get("start_positions") is not None and inputs.get("end_positions") is not None:
            return torch.stack([inputs["start_positions"], inputs["end_positions"]], dim=-1)
        return predicted_labels(inputs, self.label_names, self._loss_shifts_labels)

    def _share_of_items(self, inputs) -> torch.Tensor:
        """This micro-batch's share of the items of the step, times the number of processes; a scalar tensor."""
        count = self._count_items(inputs).float()
        return count / (count if self._items is None else self._items.clamp(min=1)) * self.args.world_size

    @property
    def _stock_scaling_is_right(self) -> bool:
        args = self.args
        return not self._reads_layers and args.gradient_accumulation_steps == 1 and args.world_size == 1

    @property
    def _model_scores(self) -> bool:
        """Whether the loss is the one that the model's forward returns."""
        return self.compute_loss_func is None and self.label_smoother is None and self._readout_fn is None

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor.to(self.args.device), "sum") if self.args.world_size > 1 else tensor

    def _inner_training_loop(self, batch_size=None, *args, **kwargs):
        # A new trial, or a new batch size, starts with fresh duals; its arguments were set one by one.
        self.args.check_descent_arguments()
        self._follow_layers()
        self._check_choice()
        self._check_data()
        self._state = self._readout = self._noise = self._takes_items = None
        self._is_prepared_plain = False
        self._layer_sums = self._eval_sums = self._items = None
        self._step_starts.clear()
        self._resumed_from = kwargs.get("resume_from_checkpoint")
        # What was measured before is of another model.
        self._training_started, self._noise_curve, self._layer_profile = time.time(), None, None
        if self.args.world_size > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            # An evaluation before training leaves this mark on the bare model, which DDP would then not wrap: every
            # process would train a model of its own.
            vars(self.model).pop("_is_accelerate_prepared", None)
        return super()._inner_training_loop(batch_size, *args, **kwargs)

    def _finalize_training(self, *args, **kwargs):
        # Resumed at its end, a run reads no batch on which to find the layers and the scale of the noise.
        if self._reads_layers and self._state is None:
            self.get_batch_samples(iter(self.get_train_dataloader()), 1, self.args.device)
        self._training_noise(self.model)
        return super()._finalize_training(*args, **kwargs)

    # ---- logs ----

    def log(self, logs, start_time=None):
        if self._state is not None and "loss" in logs:
            logs.update(self._state.logs(self.state.global_step) | self._threshold_logs())
        elif self._state is not None and "train_runtime" in logs:
            logs.update(self._state.verdict())
        super().log(logs, start_time)


class DescentTrainer(DescentMixin, Trainer):
    """[`~transformers.Trainer`] whose model lowers the task loss with every layer (arXiv 2601.17257, Algorithm 1).

    Args:
        model, args, ...:
            As for [`~transformers.Trainer`]; plain `TrainingArguments` get the defaults of [`DescentConfig`].
        readout (`Callable`, *optional*, keyword only):
            `readout(model, hidden, inputs) -> logits`, read off every layer's hidden state `[batch, seq, hidden]` in
            place of the model's own tail, e.g. one linear layer on the first token.
        layer_loss_fn (`Callable`, *optional*, keyword only):
            `layer_loss_fn(outputs, labels, num_items_in_batch=None) -> loss`, the loss of every layer's outputs; the
            model's own where not given; a floating-point scalar tensor. The same contract as `compute_loss_func`.

    Raises:
        ValueError: the model, the loss or a setting is one with which its layers cannot be constrained; when the
            trainer is made, or on the first batch, of training or evaluation.
        TypeError: `layer_loss_fn` returns anything but a floating-point scalar tensor.

    Example:

    ```python
    trainer = DescentTrainer(model, DescentConfig(output_dir="out"), train_dataset=train, eval_dataset=test)
    trainer.train()
    trainer.multipliers.values  # [L]
    ```
    """
