"""`Trainer` with layerwise descent constraints: its hooks, each of which delegates.

What happens in one optimizer step: `compute_loss` reads the layer losses of a micro-batch (`losses/layerwise.py`) and
returns the objective, their weighted sum (`constraints/objectives.py`). After the optimizer's step the layer losses of
all micro-batches and processes are added up (`training/objective.py`), and the multipliers take one step
(`constraints/state.py`). Everything else is Trainer's.
"""

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import slice_tensors
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from .compat import own_scaling, scaled_for_accumulation
from .configs import DescentConfig
from .constraints.multipliers import Multipliers
from .constraints.problem import DescentProblem
from .constraints.state import STATE_NAME, DescentState
from .evaluation import LayerProfile, NoiseCurve, layer_profile, noise_curve
from .evaluation.side_by_side import SideBySide, plain_profile
from .hub.facts import write_card
from .hub.render import PAPER, TAGS
from .losses.task import TaskLoss
from .models import give_linear_readout
from .noise.embedding_noise import EmbeddingNoise
from .readout.labels import labels_of
from .readout.replay import Readout
from .readout.stack import unwrapped
from .runs import RunFolder, training_arguments
from .training import checkpoints, checks, evaluation, holdout, judging, preparation
from .training.callbacks import DescentCallback, add_callbacks, show_messages
from .training.card import card_facts, check_no_results, results_of_weights
from .training.evaluation import LayersBeside
from .training.objective import DescentObjective
from .training.plain_arm import train_both
from .training.records import LayerTotals, RunRecord, StepSums, counted_step, name_of_set
from .training.references import LastLayerReferences, time_to_read
from .training.search import default_objective


logger = logging.get_logger(__name__)


class DescentMixin:
    """Descent constraints for any class derived from [`~transformers.Trainer`]; put it first among the bases.

    With `objective="erm"` and no noise nothing changes, but for the scale of losses that ignore `num_items_in_batch`
    under gradient accumulation or several processes: those are averaged over the items of the whole batch here. As in
    Trainer, `eval_loss` is then a mean over batches, beside the layer losses; other objectives average over items.

    Attributes:
        command (`dict`): what defines this training beside the trainer's arguments, in JSON values; kept in
            `descent_config.json`.
    """

    _name = "Descent"
    _tag_names = TAGS
    _paper = PAPER
    config_class = DescentConfig
    logs_tokens = (
        False  # whether a subclass logs statistics of the last layer's tokens, by `_log_tokens`
    )
    command: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        model=None,
        args=None,
        *positional,
        readout: Callable[[nn.Module, torch.Tensor, Mapping[str, Any]], torch.Tensor]
        | str
        | None = None,
        layer_loss_fn: Callable[..., torch.Tensor] | None = None,
        dual_dataset=None,
        **keywords,
    ):
        args = self.config_class.from_training_arguments(
            args or self.config_class(output_dir="tmp_trainer")
        )
        checks.check_one_loss(layer_loss_fn, keywords.get("compute_loss_func"))
        if layer_loss_fn is not None:
            keywords["compute_loss_func"] = layer_loss_fn
        # "mean" and "cls" make the model one that reads so: what is trained and measured is what is saved.
        self._pooling = readout if isinstance(readout, str) else None
        self._readout = None if isinstance(readout, str) else readout
        self._dual_dataset = dual_dataset
        if model is not None:
            self._set_pooling(model)
        self._task: TaskLoss | None = None
        self._objective: DescentObjective | None = None
        self._noise: EmbeddingNoise | None = None
        self._step, self._evaluated, self._record = StepSums(), LayerTotals(), RunRecord()
        self._references = LastLayerReferences()
        self._judging: DescentState | None = None  # judges a model that was not trained under it
        show_messages(args)
        super().__init__(model, args, *positional, **keywords)
        self._add_callbacks()

    def _set_pooling(self, model: nn.Module) -> None:
        if self._pooling is not None:
            give_linear_readout(model, self._pooling)

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        self._set_pooling(model)
        return model

    def _add_callbacks(self) -> None:
        """Refuse what a run that reads layers cannot do, and add its callbacks once; plain training needs neither."""
        if not self._reads_layers:
            checks.check_targeted_layers(self)
            return
        checks.check_supported(self, super().compute_loss)
        certificate, others = lambda: self._record.certificate, self.callback_handler.callbacks
        add_callbacks(
            self,
            DescentCallback(self._after_optimizer_step, self._after_epoch, certificate, others),
        )

    @property
    def multipliers(self) -> Multipliers | None:
        """The Lagrange multipliers; `multipliers.values` is `[rows]` ([`DescentProblem`]). `None` before training."""
        return self._objective and self._objective.multipliers

    @property
    def problem(self) -> DescentProblem | None:
        """The [`DescentProblem`] being solved; of plain training the one that evaluations judge the model by. `None`
        before training, and after plain training before an evaluation."""
        dual = self._dual or self._judging
        return dual and dual.problem

    @property
    def _dual(self) -> DescentState | None:
        return self._objective and self._objective.dual

    @property
    def _reads_layers(self) -> bool:
        return self.args.objective != "erm" or self._readout is not None

    # ---- one optimizer step ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        start = time.perf_counter()
        if self._counts_by_task and self._task is None:
            epoch_iterator = self._with_task_found(epoch_iterator)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:  # of data without a length Trainer goes on asking
            self._record.step_starts.append(start)
        if batches and self._reads_layers:
            if self._objective is None:
                self._prepare_training(batches)
            if self._objective is not None:
                self._read_last_layer()

        self._step = StepSums()
        if self.state.global_step >= self.state.max_steps:
            # Resumed at its end, where Trainer itself would take one step more.
            self.control.should_training_stop = True
            return [], None
        if not self._stock_scaling_is_right:
            self._step = counted_step(self, self._task, batches)
        if self._objective is not None:
            self._objective.begin(self.state.global_step, self._step)
        return batches, num_items

    @property
    def _counts_by_task(self) -> bool:
        """Whether Trainer counts the labels of plain training, which takes the shift of the labels."""
        if self._reads_layers:
            return False
        has_own_loss = self.compute_loss_func is not None or self.label_smoother is not None
        return self.model_accepts_loss_kwargs or has_own_loss or not self._stock_scaling_is_right

    def _with_task_found(self, batches: Iterator) -> Iterator:
        """The same batches, after the task loss was found on the first one."""
        first = next(batches, None)
        if first is None:
            return iter(())
        if self._is_labelled(first):
            self._find_task(self.model_wrapped, preparation.prepared(self, first))
        return chain([first], batches)

    def _prepare_training(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Find out on the batches of a step what this run needs to know, before anything is counted."""
        labelled = [batch for batch in batches if self._is_labelled(batch)]
        if labelled:
            self._prepare(self.model_wrapped, preparation.prepared(self, labelled[0]))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        is_step = model.training and torch.is_grad_enabled()
        is_labelled = self._is_labelled(inputs)
        if not self._reads_layers or not (is_step or is_labelled):
            return self._plain_loss(model, inputs, return_outputs, num_items_in_batch)
        if not is_labelled:
            raise checks.without_labels(self, inputs)
        if not self._is_prepared(model):  # an evaluation's first batch, late labels, another model
            self._prepare(model, inputs)
        if not is_step:
            return self._evaluation_loss(model, inputs, return_outputs)

        with self._training_noise(model):
            losses = self._objective.read(model, inputs, keep_logits=return_outputs)
        self._log_tokens(inputs, losses.outputs, losses.tokens)
        objective = losses.objective * self.args.world_size  # DDP averages gradients over processes
        is_scaled = self._step.items is not None  # else each micro-batch is a mean
        objective = scaled_for_accumulation(self, objective, is_scaled, num_items_in_batch)
        return (objective, losses.outputs) if return_outputs else objective

    def _evaluation_loss(self, model, inputs, return_outputs):
        """f_L of a batch; the losses of all layers are added to those of the evaluation."""
        key = None
        if self._record.by_strategy:
            key = (self.args.process_index, self._evaluated.batches)
        measured = self._objective.layers.measure(
            model, inputs, keep_logits=return_outputs, key=key
        )
        labels = self._dual.constant and self._dual.constant.of_batch(self._task, inputs)
        self._evaluated = self._evaluated.plus(measured, labels)
        self._log_tokens(inputs, measured.outputs, measured.tokens)
        loss = torch.where(measured.items > 0, measured.means[-1], torch.nan)
        return (loss, measured.outputs) if return_outputs else loss

    def _plain_loss(self, model, inputs, return_outputs, num_items_in_batch):
        """Trainer's own loss; scaled right where Trainer's is not."""
        miscaled = self._is_labelled(inputs) and not (
            self._stock_scaling_is_right or self._reads_layers
        )
        if miscaled:
            # In evaluation, too, Trainer would multiply any loss by the number of processes, given items.
            task = self._find_task(model, inputs)
            miscaled = num_items_in_batch is None or not preparation.takes_items(self, task, inputs)
        with self._training_noise(model) if model.training else contextlib.nullcontext():
            if not (miscaled and model.training):
                return super().compute_loss(
                    model, inputs, return_outputs, None if miscaled else num_items_in_batch
                )
            share = self._step.share(task.count(inputs)) * self.args.world_size
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            loss = torch.where(share > 0, loss, 0.0) * share
            loss = scaled_for_accumulation(self, loss, True, num_items_in_batch)
            return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        micro_batches = self._step.micro_batches
        with own_scaling(self):
            objective = super().training_step(*args, **kwargs)
        if not self._reads_layers:
            self._step = replace(self._step, micro_batches=micro_batches + 1)
            return objective
        if self._step.micro_batches == micro_batches:
            raise checks.without_layers(self)
        # The `loss` of the log is the task loss f_L; the objective itself moves with the multipliers.
        return self._step.final * self.args.world_size

    def _get_dataloader(self, dataset, *args, is_training=False, **kwargs):
        dataset = holdout.split(dataset, self.args)[0] if is_training else dataset
        return super()._get_dataloader(dataset, *args, is_training=is_training, **kwargs)

    def _after_optimizer_step(self, skipped: bool) -> None:
        if self._objective is not None:
            self._objective.step(skipped or self.accelerator.optimizer_step_was_skipped)
            self._step = self._objective.sums

    def _after_epoch(self) -> None:
        if self._objective is not None and self.args.slack_restart:
            self.multipliers.restart_slacks()

    def _log_tokens(self, inputs, outputs, tokens) -> None:
        """For a subclass that logs statistics of the last layer's tokens."""

    # ---- what is found out once ----

    def _find_task(self, model, inputs, is_shared=False) -> TaskLoss:
        """The task loss, found out on a real batch; `is_shared`: all processes have that batch already."""
        if self._task is None:
            inputs = inputs if is_shared else preparation.shared_batch(inputs, self)
            self._task = preparation.find_task(self, unwrapped(model), inputs, self._readout)
            # Trainer decides by the name of the class, which is unreliable: GPT2LMHeadModel shifts, XLNet's does not.
            self._loss_shifts_labels = self._task.shifts_labels
        return self._task

    def _is_prepared(self, model) -> bool:
        """Whether the layers of this very model, with this head and these adapters, were found."""
        return self._objective is not None and self._objective.layers.readout.fits(unwrapped(model))

    def _prepare(self, model, inputs) -> None:
        """Find the layers on the first batch, anew where the model has become another; build or load the dual side."""
        model = unwrapped(model)
        if self._objective is not None:
            self._task = None  # the model has become another one
        inputs = preparation.shared_batch(inputs, self)
        task = self._find_task(model, inputs, is_shared=True)
        layers = preparation.find_layers(self, model, inputs, task, self._readout)
        dual = self._dual or preparation.make_dual(
            self, layers, inputs, self._dual_dataset, self._record.resumed_from
        )
        self._objective = DescentObjective.of(
            layers, dual, (self.args.process_index, self.args.world_size)
        )
        self._objective.begin(self.state.global_step, self._step)

    def _read_last_layer(self) -> None:
        """Before training and at the end of the warm-up: f_L on the evaluation sets, by which a verdict tells the
        price of the constraints."""
        time = time_to_read(self.state.global_step, self._dual.active_from)
        if time is not None and time not in self._references.times():
            self._references.read(self, self._objective.layers, time)

    def _training_noise(self, model):
        """The noise of a micro-batch as a context."""
        is_noisy = self.args.gamma_train > 0
        if self._noise is None and (
            is_noisy or self.args.eval_gammas
        ):  # sigma is that before training
            self._noise = EmbeddingNoise(
                unwrapped(model), self.args.noise_gamma, self.args.seed, self.noise_sigma()
            )
        if not is_noisy:
            return contextlib.nullcontext()
        # Keyed by where training stands, the noise of a resumed run needs no saved generator.
        self._noise.reseed(
            self.args.process_index, self.state.global_step, self._step.micro_batches
        )
        return self._noise

    def noise_sigma(self, model=None) -> float:
        """The deviation of the clean signal: given, saved with the model or estimated once; ValueError for none."""
        model = unwrapped(self.model) if model is None else model
        return preparation.find_sigma(self, model, self._record.resumed_from)

    # ---- items ----

    def _is_labelled(self, inputs) -> bool:
        return isinstance(labels_of(inputs, self.label_names), torch.Tensor)

    @property
    def _stock_scaling_is_right(self) -> bool:
        return (
            not self._reads_layers
            and self.args.gradient_accumulation_steps == 1
            and self.args.world_size == 1
        )

    # ---- evaluation ----

    def evaluate(self, eval_dataset=None, *args, **kwargs):
        self._record = replace(
            self._record,
            also_selected=holdout.is_of_training(self, eval_dataset, self._record),
            evaluating=name_of_set(self, eval_dataset),
        )
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset, *args, **kwargs):
        self._record = replace(
            self._record, also_selected=holdout.is_of_training(self, test_dataset, self._record)
        )
        return super().predict(test_dataset, *args, **kwargs)

    def _evaluate(self, *args, **kwargs):
        # By `eval_strategy`: those that others ask for read all tokens, also in training.
        self._record = replace(self._record, by_strategy=True)
        try:
            return super()._evaluate(*args, **kwargs)
        finally:
            self._record = replace(self._record, by_strategy=False)

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        self._objective = (
            self._record.started and self._objective
        )  # untrained: f_0 is that of these rows
        is_beside = not self._reads_layers and description == "Evaluation"
        is_trained = self._record.started is not None
        self._evaluated = (
            LayersBeside(self, super().compute_loss, is_trained, self._evaluated)
            if is_beside
            else LayerTotals()
        )
        output = super().evaluation_loop(
            dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
        )
        if self._reads_layers and not output.num_samples:
            raise ValueError(
                "The evaluation data has no rows: give some, or set `eval_strategy` to 'no'."
            )
        dual, totals = self._dual, self._evaluated
        if is_beside:
            dual = self._judging = self._evaluated.judging_state()
            totals = self._evaluated.totals
        if dual is not None:
            metrics, certificate = evaluation.layer_metrics(
                dual,
                evaluation.gathered(
                    self, totals, *self._earlier_last_layer(self._record.evaluating)
                ),
                totals.labels,
                metric_key_prefix,
                self._record.also_selected,
            )
            if is_beside:
                metrics.pop(f"{metric_key_prefix}_loss", None)  # Trainer's own stays
            plain = self._record.plain_losses.get(self._record.evaluating)
            if certificate is not None and plain is not None:
                certificate = certificate.with_plain(plain)
            self._record.keep_certificate(
                certificate, self.state.global_step, self.state.best_global_step
            )
            output.metrics.update(metrics)
            if certificate is not None and self.is_world_process_zero() and not self.is_in_train:
                logger.info(f"Verdict on the evaluation data:\n{certificate}")
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        if not self._reads_layers:
            prediction = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
            )
            if isinstance(self._evaluated, LayersBeside):
                self._evaluated.read(model, inputs)
            return prediction
        ignore_keys = evaluation.ignored_outputs(self.model, ignore_keys)
        predict = partial(
            super().prediction_step, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
        )
        if not self._is_labelled(inputs):
            if self._readout is None:
                return predict()
            readout, bare = self._objective and self._objective.layers.readout, unwrapped(model)
            if readout is None or not readout.fits(
                bare
            ):  # not kept: this batch does not show the labels' shift
                readout = Readout.probe(bare, self._prepare_inputs(inputs), self._readout)
            with readout.attach(
                lambda *_: None, [readout.num_layers]
            ):  # its logits are the model's
                return predict()
        before, own_rows = self._evaluated, evaluation.rows_counted_once(self, inputs)
        if prediction_loss_only:
            prediction = (self._evaluate_batch(model, self._prepare_inputs(inputs)), None, None)
        else:
            prediction = predict()
        # A batch whose rows are repeated in part is measured again, on its own rows alone; so is one for which
        # Seq2SeqTrainer calls the model by itself, since it generates.
        if own_rows is not None or self._evaluated is before:
            inputs, self._evaluated = self._prepare_inputs(inputs), before
            # On every process, also for no rows: a forward may gather parameters.
            self._evaluate_batch(
                model,
                inputs if own_rows is None else slice_tensors(inputs, slice(max(own_rows, 1))),
            )
            if own_rows == 0:
                self._evaluated = before
        return prediction

    def _evaluate_batch(self, model, inputs) -> torch.Tensor:
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach()

    def evaluate_robustness(self, eval_dataset=None, gammas=None, **kwargs) -> NoiseCurve:
        """Metric and loss of the model on noisy inputs, for each noise level; also logged under `eval_`.

        Args:
            eval_dataset: a dataset as `evaluate` takes it; the trainer's own where not given.
            gammas: noise levels, one or several; `args.eval_gammas` where not given.
            kwargs: passed to [`noise_curve`]. Its `seed` is not that of training: runs share the noise.

        ValueError for no levels, no data, or no scale for them (see [`noise_sigma`]); and as of [`noise_curve`].
        """
        gammas = self.args.eval_gammas if gammas is None else gammas
        if gammas is None:
            raise ValueError("No noise levels: give `gammas`, or set `eval_gammas` in the config.")
        model, settings = evaluation.settings(self, self._readout)
        is_noise = kwargs.get("perturbation") is None
        if (
            is_noise
        ):  # the levels of a perturbation are others than those of training, and of the card
            settings |= {"sigma": self.noise_sigma(model), "gamma_train": self.args.gamma_train}
        curve = noise_curve(model, self._held_out(eval_dataset), gammas, **{**settings, **kwargs})
        self.log({f"eval_{name}": value for name, value in curve.to_dict().items()})
        if is_noise:
            self._record.measured["noise_curve"] = curve
        return curve

    def evaluate_layers(self, eval_dataset=None, **kwargs) -> LayerProfile:
        """Loss and metric of the model at every layer, and whether the constraints, where known, are met there.

        Args:
            eval_dataset: a dataset as `evaluate` takes it; the trainer's own where not given.
            kwargs: passed to [`layer_profile`].

        ValueError for no data, or as of [`layer_profile`].
        """
        model, settings = evaluation.settings(self, self._readout)
        if kwargs.get("gamma"):
            settings["sigma"] = self.noise_sigma(model)
        has_references = not kwargs.get("gamma")  # without noise, as they were read
        readings, of_other_data = self._earlier_last_layer(name_of_set(self, eval_dataset))
        if has_references and self.args.world_size == 1:
            settings["readings"] = readings
        settings |= {"problem": self.problem} | kwargs
        profile = layer_profile(model, self._held_out(eval_dataset), **settings)
        if has_references and not profile.references:
            profile.references = of_other_data
        self._record.measured["layer_profile"] = profile
        dual = self._dual or self._judging
        if dual is None and "problem" not in kwargs:
            is_trained = self._record.started is not None
            dual = self._judging = judging.state_for_profile(self, profile, is_trained)
            profile.problem = dual.problem and dual.problem.state_dict()
        if profile.problem is not None:
            also_selected = holdout.is_of_training(self, eval_dataset, self._record)
            profile.facts = evaluation.facts_of(dual, profile.problem, also_selected)
            summary = {"arguments": training_arguments(self.args)}
            plain = plain_profile(self.args.output_dir, summary, profile)
            if plain is not None:
                profile.keep_plain(plain)
            self._record = replace(self._record, certificate=profile.certificate())
        return profile

    def _earlier_last_layer(self, name: str | None) -> tuple[dict, list]:
        """This process's earlier readings of the last layer on the evaluation set `name`, and what they say for other
        data."""
        return self._references.of_process(name, self), self._references.of_other_data()

    def _held_out(self, dataset):
        return evaluation.chosen_dataset(self.eval_dataset, dataset)

    # ---- a run and its checkpoints ----

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        resume_from_checkpoint = checkpoints.resolve(resume_from_checkpoint, self.args)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def train_with_plain(
        self, resume_from_checkpoint=None, eval_dataset=None, **settings
    ) -> SideBySide:
        """Train the model twice from the same start, first plainly, then as the arguments say, and compare the two.

        Both trainings have the same draws, order of the data, learning rate and steps; the trainer is left as by
        `train`. The plain model is in the folder `_plain` of `output_dir`, with its layer profile: verdicts on this
        run tell the price beside it, and `hf-descent compare` reads it. Trackers get the second training alone.

        Args:
            resume_from_checkpoint: as of `train`, for the arm that was interrupted. With `True`, or the folder of a
                checkpoint of the second training, a finished plain training is not repeated.
            eval_dataset: the examples to compare on, as [`evaluate_layers`] takes them.
            settings: passed to [`evaluate_layers`], such as `gamma`.

        ValueError where the objective is plain training already, the model is sharded, `optimizers` were given, or as
        of `train` and [`evaluate_layers`].
        """
        found = train_both(self, resume_from_checkpoint, eval_dataset, settings)
        name = name_of_set(self, eval_dataset)
        if name is not None and not found.plain.gamma:  # `evaluate` is without noise
            self._record.plain_losses[name] = float(found.plain.losses[-1])
        return found

    def _inner_training_loop(self, batch_size=None, *args, **kwargs):
        # A new trial, or a new batch size, starts with fresh duals; its arguments were set one by one.
        self.args.check_descent_arguments()
        self._add_callbacks()
        checks.check_best_metric(self)
        checks.report_own_averages(self.args)
        if self._reads_layers:
            seen = checks.check_data(self, self._readout, self._dual_dataset)
        else:
            seen = holdout.check_parts(self, dual_dataset=None)
        self._task = self._objective = self._noise = self._judging = None
        # What was measured before is of another model.
        self._evaluated = LayerTotals()
        self._step, resumed_from = StepSums(), kwargs.get("resume_from_checkpoint")
        self._record = RunRecord(resumed_from, time.time(), self._record.searched, **seen)
        self._references = LastLayerReferences.load(resumed_from or "")
        checkpoints.note_readout(self.model, self._readout)
        preparation.make_ready_for_ddp(self, self._readout)
        return super()._inner_training_loop(batch_size, *args, **kwargs)

    def _finalize_training(self, *args, **kwargs):
        # Resumed at its end, a run reads no batch on which to find the layers and the scale of the noise.
        if self._reads_layers and self._dual is None:
            self.get_batch_samples(iter(self.get_train_dataloader()), 1, self.args.device)
        self._training_noise(self.model)
        self._judging = None  # found again with the f_0 of the training labels
        if self.args.load_best_model_at_end:
            check = partial(checkpoints.check_complete, resumes=False)
            checkpoints.on_first_process(self.args, check, self.state.best_model_checkpoint or "")
        return super()._finalize_training(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self._save_dual_state(output_dir)

    def _save_dual_state(self, output_dir) -> None:
        if self._dual is not None:
            checkpoints.check_agreement(self, self._dual.multipliers.values)
            self._dual.save(output_dir, write=self.args.should_save)
            if self.args.should_save:
                self._references.save(output_dir)
            # For people to read, in trainer_state.json.
            self.state.stateful_callbacks["DescentState"] = self._dual.summary()

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # The trainer state comes next, by one process, and stands for a complete save by all.
        self.accelerator.wait_for_everyone()
        checkpoints.save_checksums(self, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with checkpoints.own_names(self, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        with checkpoints.own_names(self, best):
            super()._load_best_model()
        certificate = self._record.certificates.get(self.state.best_global_step)
        self._record = replace(self._record, certificate=certificate)
        if self._dual is not None and os.path.isfile(os.path.join(best, STATE_NAME)):
            self._dual.load(best)

    def _load_callback_state(self):
        # The readable copy is no callback; Trainer would report it as missing.
        self.state.stateful_callbacks.pop("DescentState", None)
        super()._load_callback_state()

    def save_model(self, output_dir=None, _internal_call=False):
        if (
            _internal_call and output_dir and self.args.should_save
        ):  # the old one would stand for a complete save
            Path(output_dir, TRAINER_STATE_NAME).unlink(missing_ok=True)
        super().save_model(output_dir, _internal_call)
        if self._readout is not None and not _internal_call and self.is_world_process_zero():
            checkpoints.warn_of_readout(self._readout)
        if self.args.should_save:
            RunFolder(output_dir or self.args.output_dir).write_summary(self._run_summary())
        if (
            _internal_call and output_dir and self.args.save_only_model
        ):  # a checkpoint without an optimizer
            self._save_dual_state(output_dir)
            checkpoints.save_checksums(self, output_dir)

    def _run_summary(self) -> dict[str, Any]:
        """What identifies this run; for a model trained elsewhere, what its own training wrote, if it is found."""
        if self._record.started is None and (saved := checkpoints.saved_summary(self)):
            return saved
        summary = checkpoints.run_summary(
            self, self._record, self.command, self._readout, self._dual, self._judging
        )
        if last_layer_losses := self._references.summary():
            summary["last_layer_losses"] = last_layer_losses
        return summary

    def log(self, logs, start_time=None):
        if self._dual is not None and ("loss" in logs or "train_runtime" in logs):
            readout = self._objective.layers.readout
            checks.report_layers_at_chance(readout, self._dual, self.state.global_step)
        if self._dual is not None and "loss" in logs:
            logs.update(self._dual.logs(self.state.global_step))
        elif self._dual is not None and "train_runtime" in logs:
            logs.update(self._dual.report())
        super().log(logs, start_time)

    def hyperparameter_search(
        self, hp_space=None, compute_objective=None, n_trials=20, direction=None, *args, **kwargs
    ):
        if compute_objective is None:
            compute_objective, direction = default_objective(
                self.args.objective, self.eval_dataset, direction
            )
        args = (compute_objective, n_trials, direction or "minimize", *args)
        self._record = replace(self._record, searched=True)
        return super().hyperparameter_search(hp_space, *args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        if self._readout is not None and self.is_world_process_zero():
            check_no_results(RunFolder(self.args.output_dir), self._readout)
        return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        """Write `README.md` and `model_card.json`, from the files of the output folder; arguments as of the class."""
        if not self.is_world_process_zero():
            return
        given = inspect.signature(super().create_model_card).bind(*args, **kwargs).arguments
        run = RunFolder(self.args.output_dir)
        run.write_summary(self._run_summary())
        if self._readout is None:
            run.write(results_of_weights(self, self._record))
        trained = self._record.started is not None
        write_card(run.path, **card_facts(self, given, trained, self._readout))


class DescentTrainer(DescentMixin, Trainer):
    """[`~transformers.Trainer`] whose model lowers the task loss with every layer (arXiv 2601.17257, Algorithm 1).

    Args:
        model, args, ...:
            As for [`~transformers.Trainer`]; plain `TrainingArguments` get the defaults of [`DescentConfig`].
        readout (`Callable`, `"mean"` or `"cls"`, *optional*, keyword only):
            What reads every layer in place of the model's own tail. "mean" and "cls" are a classifier's last linear
            layer on the mean of the tokens and on the first one: the model becomes, in place, a
            `LinearReadoutForSequenceClassification` (or its like for images, videos and sounds), which is saved and
            cut as such (see [`~hf_descent.models.give_linear_readout`]). A function `readout(model, hidden, inputs) ->
            logits`, of hidden states `[batch, seq, hidden]`, is not saved: loaded, the model has its own tail, which
            was not trained, and the card gives no numbers.
        layer_loss_fn (`Callable`, *optional*, keyword only):
            `layer_loss_fn(outputs, labels, num_items_in_batch=None) -> loss`, the loss of every layer's outputs; the
            model's own where not given; a floating-point scalar tensor. The same contract as `compute_loss_func`.
            One call may serve several layers at once, so it should not count its calls or keep what it is given.
            A mean that weighs classes (`F.cross_entropy(logits, labels, weight=weight)`) divides by the weights of the
            labels in its micro-batch, so it depends on `gradient_accumulation_steps`. The sum divided by
            `num_items_in_batch` (`reduction="sum"`) does not.
        dual_dataset (*optional*, keyword only):
            200 or more rows, as `train_dataset` has them after its preparation, that "descent" moves the multipliers
            on in place of the training rows, as `dual_holdout` says. They should be in no other part of the data.

    ValueError, when the trainer is made or on the first batch of training or evaluation, for a model, a loss or a
    setting with which layers cannot be constrained; TypeError where `layer_loss_fn` returns anything but a
    floating-point scalar tensor.

    Example:

    ```python
    trainer = DescentTrainer(model, DescentConfig(output_dir="out"), train_dataset=train, eval_dataset=test)
    trainer.train()
    trainer.multipliers.values  # [rows], one multiplier per constraint
    ```
    """
