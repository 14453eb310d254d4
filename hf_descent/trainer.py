"""`Trainer` with layerwise descent constraints: its hooks, each of which delegates.

What happens in one optimizer step: `compute_loss` reads the layer losses of a micro-batch (`losses/layerwise.py`) and
returns the objective: their weighted sum, or f_L and a penalty (`constraints/objectives.py`). After the optimizer's
step the layer losses of all micro-batches and processes are added up (`training/objective.py`), and the multipliers
take one step (`constraints/state.py`). `training/run.py` keeps what is found out before the first step, and what is
counted and measured. Whether a run reads its layers in training, in evaluations or never is its `RunKind`
(`training/run_kind.py`). `StepTotals` (`training/records.py`) has the factors that scale the losses of micro-batches.
Everything else is Trainer's.
"""

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.utils import logging

from .compat import own_scaling, scaled_for_accumulation
from .configs import DescentConfig
from .constraints.multipliers import Multipliers
from .constraints.problem import DescentProblem
from .evaluation import Certificate, LayerProfile, NoiseCurve, layer_profile, noise_curve
from .evaluation.price import with_paired
from .evaluation.side_by_side import SideBySide, is_plain_folder
from .hub.facts import write_card
from .hub.render import PAPER, TAGS
from .losses.chance import chance_of
from .losses.layerwise import part_of_step
from .models import give_linear_readout
from .readout.pooling import reads_one_token
from .readout.replay import probing
from .readout.stack import unwrapped
from .readout.tape import assigned
from .runs import RunFolder
from .training import checkpoints, checks, data_checks, evaluation, holdout, preparation
from .training.callbacks import DescentCallback, add_callbacks, show_messages
from .training.card import card_facts, check_no_results
from .training.compared_runs import earlier_losses, plain_profile_beside, plain_profile_on
from .training.evaluation_sets import name_of_set, rows_of, set_of_metric
from .training.origin import origin_of
from .training.plain_arm import train_both
from .training.records import Evaluation, RunRecord, StepTotals, items_of_step
from .training.run import DescentRun
from .training.run_kind import RunKind
from .training.run_summary import run_summary, saved_summary
from .training.search import default_metric, space_for


logger = logging.get_logger(__name__)


class DescentMixin:
    """Descent constraints for any class derived from [`~transformers.Trainer`]; put it first among the bases.

    With `objective="erm"`, no `readout` function and no noise, training is Trainer's own, with one exception. A loss
    that ignores `num_items_in_batch` is averaged over the items of the whole step, also under gradient accumulation
    and with several processes. `eval_loss` is a mean over batches, as in Trainer. Where training reads the layers (any
    other objective, or a `readout` function), it is a mean over items. If you state constraints, evaluations also
    measure the layers.

    Attributes:
        command (`dict`): what defines this training beside the trainer's arguments, in JSON values; kept in
            `descent_config.json`.
    """

    _name = "Descent"
    _tag_names = TAGS
    _paper = PAPER
    config_class = DescentConfig
    # Whether a subclass logs statistics of the last layer's tokens, by `_log_tokens`.
    logs_tokens = False
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
        if args is None:
            args = self.config_class(output_dir="tmp_trainer")
        args = self.config_class.from_training_arguments(args)

        checks.check_one_loss(layer_loss_fn, keywords.get("compute_loss_func"))
        if layer_loss_fn is not None:
            keywords["compute_loss_func"] = layer_loss_fn

        self._readout = readout
        self._pooling = None
        if isinstance(readout, str):
            # "mean" and "cls" change the model itself, so that the saved model reads as the trained one.
            self._pooling = readout
            self._readout = None
        if model is not None:
            self._set_pooling(model)

        self._dual_dataset = dual_dataset
        self._run = DescentRun()  # one that never started; each training makes a new one

        show_messages(args)
        super().__init__(model, args, *positional, **keywords)
        self._set_up_layers()

    def _set_pooling(self, model: nn.Module) -> None:
        if self._pooling is not None:
            give_linear_readout(model, self._pooling)

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        self._set_pooling(model)
        return model

    def _set_up_layers(self) -> None:
        """Refuse what a run that reads layers cannot do. If training reads them, add its callbacks, once."""
        checks.check_targeted_layers(self)
        kind = self._kind
        if kind is RunKind.JUDGED:
            with checks.for_verdicts():
                checks.check_judged(self, super().compute_loss)
        if not kind.trains_layers:
            return

        checks.check_supported(self, super().compute_loss)
        preparation.leave_compilation_to_layers(self)

        callback = DescentCallback(
            before_training=self._inspect_if_at_end,
            after_step=self._after_optimizer_step,
            after_epoch=self._after_epoch,
            others=self.callback_handler.callbacks,
        )
        add_callbacks(self, callback)

    @property
    def multipliers(self) -> Multipliers | None:
        """The Lagrange multipliers; `multipliers.values` has one for each constraint, as [`DescentProblem`] orders
        them. Read this anew in each step: what you keep may be a step old. `None` until a batch of a training or an
        evaluation has shown the layers, and in plain training."""
        dual = self._run.dual
        return None if dual is None else dual.multipliers

    @property
    def problem(self) -> DescentProblem | None:
        """The [`DescentProblem`] being solved; after plain training, the one by which evaluations judge the model.
        `None` until a batch has shown the layers; in plain training until an evaluation."""
        judge = self._run.judge
        return None if judge is None else judge.problem

    @property
    def _kind(self) -> RunKind:
        """When this run reads the layers."""
        return RunKind.of(self, self._readout)

    @property
    def _may_scale_losses(self) -> bool:
        """Whether this class may have to scale losses by the items of the whole step, so that it counts them. The
        table of [`StepTotals`] says who scales which loss.

        Trainer's own division is wrong for losses that ignore `num_items_in_batch`.
        """
        is_one_batch = self.args.gradient_accumulation_steps == 1 and self.args.world_size == 1
        return self._kind.trains_layers or not is_one_batch

    # ---- one optimizer step ----

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        trains_layers = self._kind.trains_layers
        if trains_layers:
            epoch_iterator = map(self._checked, epoch_iterator)
        epoch_iterator = self._inspect_first(epoch_iterator)
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)

        # Where data have no length, Trainer asks for one step more after the last batch. That step has no batches.
        if batches and trains_layers:
            self._run.read_last_layer_if_due(self)

        if self.state.global_step >= self.state.max_steps:
            # The run was resumed at its end. Within an epoch, Trainer itself would take one step more.
            self.control.should_training_stop = True
            batches = []
            num_items = None

        items = None
        if self._may_scale_losses:
            items = items_of_step(self.accelerator, self._run.task, batches)
        self._run.begin_step(StepTotals(self.state.global_step, items, self.args.world_size))
        return batches, num_items

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if not self._kind.trains_layers:
            return self._plain_loss(model, inputs, return_outputs, num_items_in_batch)
        if not (model.training and torch.is_grad_enabled()):
            return self._evaluation_loss(model, inputs, return_outputs, num_items_in_batch)

        objective = self._run.known_objective()
        with self.noise_of_micro_batch():
            losses = objective.layer_losses(model, inputs, self._run.step, return_outputs)
        self._log_tokens(inputs, losses.outputs, losses.tokens)

        loss = self._for_trainer(losses.objective, num_items_in_batch)
        return (loss, losses.outputs) if return_outputs else loss

    def _for_trainer(self, part, num_items_in_batch):
        """A micro-batch's part of the loss (see [`StepTotals`]), as Trainer takes it from `compute_loss`."""
        step = self._run.step
        loss = step.over_processes(part)
        is_scaled = step.items is not None
        return scaled_for_accumulation(self, loss, is_scaled, num_items_in_batch)

    def _evaluation_loss(self, model, inputs, return_outputs, num_items_in_batch):
        """f_L of a batch. Adds the losses of all its layers to those of the evaluation."""
        if not evaluation.is_labelled(inputs, self.label_names):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        layers = self._run.known_objective().layers
        losses = layers.evaluation_losses(
            model, inputs, keep_logits=return_outputs, key=self._sample_key
        )
        self._run.add_batch(losses, inputs)
        self._log_tokens(inputs, losses.outputs, losses.tokens)
        loss = torch.where(losses.items > 0, losses.means[-1], torch.nan)
        return (loss, losses.outputs) if return_outputs else loss

    @property
    def _sample_key(self) -> tuple[int, int] | None:
        """The key by which an evaluation in training draws the tokens that it reads; `None` if it reads all of
        them."""
        if not self._run.evaluation.in_training_loop:
            return None
        return (self.args.process_index, self._run.totals.batches)

    def _plain_loss(self, model, inputs, return_outputs, num_items_in_batch):
        """Trainer's own loss. In training, this class scales it where Trainer would not do so rightly."""
        is_scaled_here = self._scales_plain_loss(inputs, num_items_in_batch)
        items = num_items_in_batch
        if is_scaled_here:
            # If Trainer saw the items, it would multiply this mean by the number of processes, in evaluations, too.
            items = None
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, items)

        with self.noise_of_micro_batch():
            if not is_scaled_here:
                return super().compute_loss(model, inputs, return_outputs, items)
            # Before the loss, which may take the labels out of the batch.
            share = self._run.step.share(self._run.task.count(inputs))
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)

        part = part_of_step(loss, share)
        loss = self._for_trainer(part, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    def _scales_plain_loss(self, inputs, num_items_in_batch) -> bool:
        """Whether this class has to scale a loss of plain training. Such a loss is a mean over the micro-batch:
        Trainer gives it no items, or it ignores them."""
        task = self._run.task
        if task is None or not self._may_scale_losses:
            return False
        if not evaluation.is_labelled(inputs, self.label_names):
            return False
        return num_items_in_batch is None or not task.takes_items

    def training_step(self, *args, **kwargs):
        trains_layers = self._kind.trains_layers
        step = self._run.step
        read_before = step.micro_batches
        with own_scaling(self):  # `compute_loss` may set `loss_is_scaled_for_ga`
            loss = super().training_step(*args, **kwargs)

        if not trains_layers:
            step.count_micro_batch()
            return loss
        if step.micro_batches == read_before:  # this class's `compute_loss` read no layers
            raise checks.without_layers(self)
        # What Trainer logs as `loss` is the task loss f_L: the objective itself moves with the multipliers. If the
        # items were not counted, the step has one micro-batch (`_checked` refuses those without labels), so its mean
        # is that of the step.
        return step.over_processes(step.last_layer_part)

    def noise_of_micro_batch(self) -> contextlib.AbstractContextManager:
        """A context that adds the noise of the present training micro-batch."""
        if self.args.gamma_train == 0:
            return contextlib.nullcontext()
        # Keyed by where training stands, the noise of a resumed run needs no saved generator.
        place = (self.args.process_index, self.state.global_step, self._run.step.micro_batches)
        self._run.noise.reseed(*place)
        return self._run.noise

    def _after_optimizer_step(self, skipped: bool) -> None:
        if self.accelerator.optimizer_step_was_skipped:
            skipped = True
        self._run.end_step(skipped)

    def _after_epoch(self) -> None:
        if self._run.objective is not None and self.args.slack_restart:
            self.multipliers.restart_slacks()

    def _log_tokens(self, inputs, outputs, tokens) -> None:
        """For a subclass that logs statistics of the last layer's tokens."""

    def _checked(self, batch):
        """The batch itself, as the data loader gives it; ValueError if it has no labels."""
        if not evaluation.is_labelled(batch, self.label_names):
            raise checks.without_labels(self.label_names, self.model, batch)
        return batch

    # ---- what is found out once: before the first step, and at the start of an evaluation ----

    def _inspect_first(self, batches: Iterator) -> Iterator:
        """Find out on the first batch what this run has to know; returns the same batches."""
        if self._needs_inspection(self.model_wrapped):
            first = next(batches, None)
            if first is None:
                return batches
            self._inspect(self.model_wrapped, preparation.prepared(self, first))
            batches = chain([first], batches)

        self._run.find_noise(self.model_wrapped, self)
        return batches

    def _needs_inspection(self, model: nn.Module) -> bool:
        if self._kind.evaluates_layers:
            return not self._run.has_layers_of(model)
        if self._run.task is not None:
            return False

        if self._may_scale_losses:
            return True
        # Trainer counts the labels where the model takes `num_items_in_batch`, or where a loss function was given. Its
        # count depends on whether labels are shifted, which `_inspect` tells it.
        if self.model_accepts_loss_kwargs:
            return True
        return preparation.loss_of_its_own(self) is not None

    def _inspect(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        """Find out on a batch what this run has to know about the model, its loss and its layers."""
        kind = self._kind
        is_labelled = evaluation.is_labelled(inputs, self.label_names)
        if kind.evaluates_layers and not is_labelled:
            raise checks.without_labels(self.label_names, self.model, inputs)

        if kind.trains_layers:
            self._run.find_layers(self, model, inputs, self._readout, self._dual_dataset)
        elif is_labelled:
            self._run.find_task(self, model, inputs, finds_items=self._may_scale_losses)
            if kind is RunKind.JUDGED:
                self._run.find_plain_layers(self, model, inputs)

        if self._run.task is not None:
            # Trainer decides by the name of the class, which is unreliable: GPT2LMHeadModel shifts, XLNet's does not.
            self._loss_shifts_labels = self._run.task.shifts_labels

    def _inspect_if_at_end(self) -> None:
        """Find the layers on one batch if a run is resumed at its last step: at the end of an epoch it reads none."""
        if self.state.global_step >= self.state.max_steps:
            self._inspect_first(iter(self.get_train_dataloader()))

    def noise_sigma(self, model=None) -> float:
        """The standard deviation of the clean signal: given, saved with the model or estimated once; ValueError if
        none of them applies."""
        if model is None:
            model = unwrapped(self.model)
        return preparation.find_sigma(self, model, self._run.record.resumed_from)

    # ---- evaluation ----

    def evaluate(self, eval_dataset=None, *args, **kwargs):
        """Evaluate as Trainer does. In every run but plain training without constraints, the metrics also have the
        loss of each layer (`eval_layer_loss_3`). If there are constraints, they have the numbers of the verdict. After
        training the verdict is logged, too.

        If training reads the layers, `eval_loss` is the last layer's loss, averaged over items. For the verdict
        itself call [`evaluate_layers`].
        """
        # Trainer evaluates several sets by a call of this method for each, inside the call for all of them.
        is_one_of_several = self._run.evaluation.has_several_sets
        plain = self._plain_profile_on(eval_dataset)
        with self._run.evaluating(self._evaluation_of(eval_dataset, is_one_of_several, plain)):
            return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset, *args, **kwargs):
        with self._run.evaluating(self._evaluation_of(test_dataset)):
            return super().predict(test_dataset, *args, **kwargs)

    def _evaluation_of(
        self, dataset, is_one_of_several: bool = False, plain: LayerProfile | None = None
    ) -> Evaluation:
        """The facts about an evaluation of `dataset`; `is_one_of_several` if other sets are evaluated beside it."""
        rows = rows_of(self.eval_dataset, dataset)
        name = name_of_set(self.eval_dataset, dataset)
        chosen = set_of_metric(self.eval_dataset, self.args.metric_for_best_model)

        # The run keeps one verdict: of several sets, that of the set which chooses the best model.
        keeps_verdict = True
        if is_one_of_several and chosen is not None:
            # A set of a dict that `evaluate` was given has no name here, and keeps its verdict, too.
            keeps_verdict = name in (None, chosen)

        return Evaluation(
            rows=rows,
            overlaps_training=self._overlaps_training(dataset),
            in_training_loop=self.is_in_train,
            plain=plain,
            has_several_sets=isinstance(rows, dict),
            keeps_verdict=keeps_verdict,
        )

    def _overlaps_training(self, dataset) -> bool:
        """Whether an evaluation is known to be on rows that trained the model, or chose its checkpoint or settings."""
        run = self._run
        known = holdout.rows_known_to_training(
            self, self._dual_dataset, run.has_started, run.record.searched
        )
        return holdout.overlaps_training(self, dataset, known)

    def _plain_profile_on(self, dataset) -> LayerProfile | None:
        """The profile of a plain run beside this one, on the data of an evaluation. For the trainer's own sets
        it is looked for once."""
        rows = rows_of(self.eval_dataset, dataset)
        known = self._run.record.plain_profiles
        if id(rows) in known:
            _, plain = known[id(rows)]
            return plain

        plain = plain_profile_on(
            self, dataset, self._evaluated_batches, self._run.record.origin, self._readout
        )
        if name_of_set(self.eval_dataset, dataset) is not None:  # it will be evaluated again
            known[id(rows)] = (rows, plain)
        return plain

    def get_eval_dataloader(self, eval_dataset=None):
        if not self._kind.evaluates_layers:
            return super().get_eval_dataloader(eval_dataset)
        # In the order of the data, not by length: the price compares the rows of two evaluations in pairs.
        with assigned([(self.args, "train_sampling_strategy")], "sequential"):
            return super().get_eval_dataloader(eval_dataset)

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        self._run.begin_evaluation()
        output = super().evaluation_loop(
            dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
        )
        if not self._kind.evaluates_layers:
            return output

        if not output.num_samples:
            raise ValueError(
                "The evaluation data has no examples: give some, or set `eval_strategy` to 'no'."
            )
        self._judge(output.metrics, metric_key_prefix)
        return output

    def _judge(self, metrics: dict[str, Any], prefix: str) -> None:
        """Add the metrics of the layers to those of an evaluation, and keep its verdict."""
        run = self._run
        trains_plainly = self._kind is RunKind.JUDGED
        if trains_plainly and run.layers is not None:
            run.find_plain_judge(self, run.layers.num_layers, chance_of(run.totals.labels))
        if run.judge is None:
            return

        earlier = self._earlier_losses(run.evaluation.rows)
        rows = evaluation.gathered(self.accelerator, run.totals, earlier)
        additions, certificate = evaluation.layer_metrics(
            run.judge,
            rows,
            run.totals.labels,
            prefix,
            overlaps_training=run.evaluation.overlaps_training,
            plain=run.evaluation.plain,
            reads_one_token=self._reads_one_token,
        )

        if trains_plainly:
            additions.pop(f"{prefix}_loss", None)  # Trainer's own stays
        metrics.update(additions)

        if certificate is not None:
            run.keep_certificate(certificate, self.state.global_step)
            self._log_verdict(certificate, prefix)

    def _earlier_losses(self, rows) -> evaluation.EarlierLosses:
        """What a verdict on a data set compares f_L with."""
        return earlier_losses(self, self._run, rows, self._prepared, self._readout)

    def _log_verdict(self, certificate: Certificate, prefix: str) -> None:
        if self.is_in_train or not self.is_world_process_zero():
            return
        data = "evaluation" if prefix == "eval" else prefix
        trained_plainly = ""
        if self.args.objective_class.is_plain:
            trained_plainly = " after plain training"
        text = f"Verdict on the {data} data{trained_plainly}:\n{certificate}"
        # It has the price of the constraints, which plain training does not pay. Commands end with it themselves.
        if not (trained_plainly or self.command):
            text += f"\n{certificate.headline}"
        logger.info(text)

    @property
    def _reads_one_token(self) -> bool:
        return reads_one_token(unwrapped(self.model), self._readout)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        kind = self._kind
        is_labelled = evaluation.is_labelled(inputs, self.label_names)
        # `_needs_inspection` has a third reason, Trainer's count of labels. An evaluation counts none.
        takes_inspection = kind.evaluates_layers or self._may_scale_losses
        if is_labelled and takes_inspection and self._needs_inspection(model):
            self._inspect(model, preparation.prepared(self, inputs))

        if kind.trains_layers:
            ignore_keys = evaluation.ignored_outputs(self.model, ignore_keys)
        predict = partial(
            super().prediction_step, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs
        )

        if kind.trains_layers:
            if is_labelled:
                return self._measured_prediction(predict, model, inputs, prediction_loss_only)
            return self._unlabelled_prediction(predict, model, inputs)
        prediction = predict()
        if kind is RunKind.JUDGED and is_labelled:
            self._read_beside(model, inputs)
        return prediction

    def _unlabelled_prediction(self, predict, model, inputs):
        """The prediction of a batch without labels, by the readout of training."""
        if self._readout is None:
            return predict()
        inputs = self._prepare_inputs(inputs)
        with evaluation.read_by(self._readout, self._run.readout, model, inputs):
            return predict()

    def _read_beside(self, model, inputs) -> None:
        """Read the layers of plain training on a batch. Comes after Trainer, and changes neither its numbers nor its
        draws."""
        counted = evaluation.counted_rows(self, inputs)
        inputs = counted.of(self._prepare_inputs(inputs))
        with probing(unwrapped(model)), self.compute_loss_context_manager():
            losses = self._run.layers.evaluation_losses(
                model, inputs, keep_logits=False, key=self._sample_key
            )
            if not counted.are_none:
                self._run.add_batch(losses, inputs)

    def _measured_prediction(self, predict, model, inputs, prediction_loss_only):
        """The prediction of a batch, whose layer losses are added to those of the evaluation.

        `compute_loss` adds them, and `predict` calls it. There are two exceptions. If the batch repeats rows, what was
        added is taken back. Where Seq2SeqTrainer calls the model itself to generate, `compute_loss` is not called. In
        both cases the batch is read once more.
        """
        counted = evaluation.counted_rows(self, inputs)
        batches_before = self._run.totals.batches
        with self._run.kept_if(counted.are_all):
            if prediction_loss_only:
                loss = self._evaluate_batch(model, self._prepare_inputs(inputs))
                prediction = (loss, None, None)
            else:
                prediction = predict()
        was_added = self._run.totals.batches > batches_before
        if was_added:
            return prediction

        # It was taken back, or `predict` did not add it. Read once more, also if no row counts, since other processes
        # wait for the model.
        with self._run.kept_if(not counted.are_none):
            self._evaluate_batch(model, counted.of(self._prepare_inputs(inputs)))
        return prediction

    def _evaluate_batch(self, model, inputs) -> torch.Tensor:
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach()

    def evaluate_robustness(self, eval_dataset=None, gammas=None, **kwargs) -> NoiseCurve:
        """Measure metric and loss of the model on noisy inputs, for each noise level. They are logged under `eval_`,
        too.

        Args:
            eval_dataset: a dataset as `evaluate` takes it. Default: the trainer's own.
            gammas: noise levels, one or several. Default: `args.eval_gammas`.
            kwargs: passed to [`noise_curve`]. The default `seed` there does not depend on the seed of training, so all
                runs are measured with the same noise.

        ValueError if there are no levels, no data or no scale of the noise (see [`noise_sigma`]), and where
        [`noise_curve`] raises it.
        """
        if gammas is None:
            gammas = self.args.eval_gammas
        if gammas is None:
            raise ValueError("No noise levels: give `gammas`, or set `eval_gammas` in the config.")
        model, settings = evaluation.model_and_settings(self, self._readout)
        settings["sigma"] = self.noise_sigma(model)
        settings["gamma_train"] = self.args.gamma_train
        settings.update(kwargs)
        curve = noise_curve(model, self._evaluated_batches(eval_dataset), gammas, **settings)
        self.log({f"eval_{name}": value for name, value in curve.to_dict().items()})
        self._run.record.keep_curve(curve, self.state.global_step)
        return curve

    def evaluate_layers(self, eval_dataset=None, **kwargs) -> LayerProfile:
        """Measure loss and metric of the model at every layer.

        `print(profile)` shows them. If the run has constraints, `profile.certificate()` is the verdict on them.

        Args:
            eval_dataset: a dataset as `evaluate` takes it. Default: the trainer's own.
            kwargs: passed to [`layer_profile`], such as `metric` or `gamma`.

        Returns the [`LayerProfile`]. ValueError if there is no data, and where [`layer_profile`] raises it.
        """
        model, settings = evaluation.model_and_settings(self, self._readout)
        settings["problem"] = self.problem
        rows = self._evaluated_rows(eval_dataset)

        earlier = evaluation.EarlierLosses()
        if kwargs.get("gamma"):
            settings["sigma"] = self.noise_sigma(model)
        else:  # the earlier losses are without noise
            earlier = self._earlier_losses(rows)
        # With several processes, a process has other batches of a profile than it had when f_L was read before, so
        # their rows cannot be paired.
        if self.args.world_size == 1:
            settings["readings"] = earlier.readings
        settings.update(kwargs)

        batches = self._in_batches(rows)
        profile = layer_profile(model, batches, **settings)
        profile.references = with_paired(earlier.references, profile.references)

        if "problem" not in kwargs:
            self._state_problem(profile)
        if profile.problem is not None:
            self._add_facts(profile, batches)
        self._run.record.keep_profile(profile, self.state.global_step)
        return profile

    def _state_problem(self, profile: LayerProfile) -> None:
        """Give a profile the problem by which plain training is judged, unless the run has found it already."""
        if self._run.judge is not None:
            return
        self._run.find_plain_judge(self, len(profile.losses), profile.chance)
        if self.problem is not None:
            profile.problem = self.problem.state_dict()

    def _add_facts(self, profile: LayerProfile, rows) -> None:
        """Add what a verdict reports to a profile of `rows`: facts about training, and f_L of plain training."""
        run = self._run
        overlaps_training = self._overlaps_training(rows)
        profile.facts = evaluation.facts_of(run.judge, profile.problem, overlaps_training)
        profile.facts["reads_one_token"] = self._reads_one_token
        plain = plain_profile_beside(self, profile, rows, run.record.origin, self._readout)
        if plain is not None:
            profile.keep_plain(plain)

    def _evaluated_batches(self, dataset):
        """What [`noise_curve`] and [`layer_profile`] take for the data that `evaluate(dataset)` reads."""
        return self._in_batches(self._evaluated_rows(dataset))

    def _evaluated_rows(self, dataset):
        """The examples that `evaluate(dataset)` reads."""
        return self._prepared(evaluation.chosen_dataset(self.eval_dataset, dataset))

    def _in_batches(self, rows):
        """Prepared examples as the batches that `evaluate` takes, or as they are if any batches will do."""
        return rows

    def _prepared(self, rows):
        """A data set as evaluations read it; a subclass may have to tokenise it. The trainer's own sets are
        prepared."""
        return rows

    # ---- a run and its checkpoints ----

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        checkpoint = checkpoints.resolve(resume_from_checkpoint, self.args)
        try:
            output = super().train(checkpoint, *args, **kwargs)
        finally:
            self.is_in_train = False  # also of a training that was interrupted
        self._run.end_training(self)
        return output

    def train_with_plain(self, eval_dataset=None, **settings) -> SideBySide:
        """Train the model twice from the same start, first plainly, then as the arguments say, and compare the two.

        Both trainings have the same seed, order of the data, learning rate and steps. Afterwards the trainer holds the
        second model, as after `train`. The plain model is in the folder `_plain` of `output_dir`. Verdicts on this run
        then tell the price: how much higher the last layer's loss is than in the plain model. Trackers (W&B,
        TensorBoard) see only the second training. If that is interrupted, `train(resume_from_checkpoint=True)` goes on
        with it, and its verdicts tell the price, too.

        Args:
            eval_dataset: the examples to compare on, as [`evaluate_layers`] takes them.
            settings: passed to [`evaluate_layers`], such as `gamma`.

        Returns a [`SideBySide`], the layer profiles of both models; `print` shows them as a table. ValueError if the
        objective is plain training already, the model is sharded or `optimizers` were given, and where `train` or
        [`evaluate_layers`] raises it.
        """
        arms = train_both(self, eval_dataset, settings)
        rows = rows_of(self.eval_dataset, eval_dataset)
        if not arms.plain.gamma:  # `evaluate` is without noise
            self._run.record.plain_profiles[id(rows)] = (rows, arms.plain)
        return arms

    def _inner_training_loop(self, batch_size=None, *args, **kwargs):
        # A trial of a search, or a retry with a smaller batch, starts anew. A search sets the arguments of a trial one
        # by one, so they are checked here.
        self.args.check_descent_arguments()
        self._set_up_layers()
        checks.check_best_metric(self)
        checks.report_own_averages(self.args)

        if self._kind.trains_layers:
            data_checks.check_data(self, self._readout, self._dual_dataset)

        checkpoint = kwargs.get("resume_from_checkpoint")
        searched = "searched" in self.command
        if self._run.record.searched:
            searched = True
        # A fingerprint of the rows costs reading some. Plain training with nothing to compare with does without.
        reads_rows = self._kind.trains_layers or is_plain_folder(self.args.output_dir)
        origin = origin_of(self, self._readout, checkpoint, reads_rows)
        self._run = DescentRun(RunRecord(checkpoint, time.time(), searched, origin), self)

        preparation.note_readout(self.model, self._readout)
        preparation.make_ready_for_ddp(self, self._readout)
        return super()._inner_training_loop(batch_size, *args, **kwargs)

    def save_model(self, output_dir=None, _internal_call=False):
        folder = output_dir
        if folder is None:
            folder = self.args.output_dir
        is_checkpoint = _internal_call and folder != self.args.output_dir
        if is_checkpoint and self.args.should_save:
            checkpoints.mark_incomplete(folder)

        super().save_model(output_dir, _internal_call)
        if self._readout is not None and not _internal_call and self.is_world_process_zero():
            checkpoints.warn_of_readout(self._readout)

        if self.args.should_save:
            RunFolder(folder).write_summary(self._run_summary())
            if not is_checkpoint and self._readout is None:
                self._run.record.write(RunFolder(folder), self.state.global_step)
        if is_checkpoint and self.args.save_only_model:
            self._save_run(folder)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        self._save_run(output_dir)

    def _save_run(self, output_dir) -> None:
        """Save this run into a checkpoint. All its other files are written by now, except for the trainer state."""
        dual = self._run.dual
        if dual is not None:
            checkpoints.check_agreement(self.accelerator, dual.multipliers.values)
            self.state.stateful_callbacks[checkpoints.READABLE_STATE] = dual.summary()
        self._run.save(output_dir, self.state.global_step, write=self.args.should_save)
        # The trainer state comes next, by one process, and stands for a complete save by all.
        self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with checkpoints.own_names(self, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        with checkpoints.own_names(self, best):
            super()._load_best_model()
        self._run.go_back_to(best, self.state.global_step)

    def _run_summary(self) -> dict[str, Any]:
        """What identifies this run. For a model trained elsewhere, what its own training wrote, if that is found."""
        if not self._run.has_started:
            saved = saved_summary(self.model, self.args.output_dir)
            if saved:
                return saved
        return run_summary(self, self._run, self.command, self._readout)

    def log(self, logs, start_time=None):
        logs.update(self._run.additions_to(logs, self.state.global_step))
        super().log(logs, start_time)

    def hyperparameter_search(
        self, hp_space=None, compute_objective=None, n_trials=20, direction=None, *args, **kwargs
    ):
        if compute_objective is None:
            compute_objective, direction = default_metric(
                self.args.objective, self.eval_dataset, direction
            )
        if direction is None:
            direction = "minimize"
        self._run.begin_search()
        hp_space = space_for(self.args, hp_space)
        return super().hyperparameter_search(
            hp_space, compute_objective, n_trials, direction, *args, **kwargs
        )

    def push_to_hub(self, *args, **kwargs):
        if self._readout is not None and self.is_world_process_zero():
            check_no_results(RunFolder(self.args.output_dir), self._readout)
        return super().push_to_hub(*args, **kwargs)

    def create_model_card(self, *args, **kwargs) -> None:
        """Write `README.md` and `model_card.json` from the files of the output folder. Takes the arguments of
        Trainer's method."""
        if not self.is_world_process_zero():
            return
        signature = inspect.signature(super().create_model_card)
        run = RunFolder(self.args.output_dir)
        run.write_summary(self._run_summary())
        if self._readout is None:
            self._run.record.write(run, self.state.global_step)
        arguments = signature.bind(*args, **kwargs).arguments
        write_card(run.path, **card_facts(self, arguments, self._run.has_started, self._readout))


class DescentTrainer(DescentMixin, Trainer):
    """[`~transformers.Trainer`] whose model lowers the task loss with every layer (arXiv 2601.17257, Algorithm 1).

    The config says what each layer must reach: the constraints. Training raises the weight of the layers that fall
    short. `evaluate` and [`evaluate_layers`] report the loss of every layer, and a verdict on each constraint.

    Args:
        model, args, ...:
            As in [`~transformers.Trainer`]. `args` is a [`DescentConfig`]; plain `TrainingArguments` get its defaults.
        readout (`Callable`, `"mean"` or `"cls"`, *optional*, keyword only):
            What makes the predictions of every layer, in place of the model's own head. With "mean" it is a linear
            layer on the mean of the tokens, with "cls" one on the first token. The model becomes, in place, a
            `LinearReadoutForSequenceClassification` (or its like for images, videos and sounds), and is saved and cut
            as such (see [`~hf_descent.models.give_linear_readout`]). A function `readout(model, hidden, inputs) ->
            logits`, of hidden states `[batch, seq, hidden]`, is not saved: the loaded model uses its own head, which
            was not trained, and its card gives no numbers.
        layer_loss_fn (`Callable`, *optional*, keyword only):
            A function `layer_loss_fn(outputs, labels, num_items_in_batch=None) -> loss` that scores the outputs of
            every layer. It returns a floating-point scalar tensor, as Trainer's `compute_loss_func` does. Default: the
            model's own loss. One call may serve several layers at once, so the function should not count its calls or
            keep what it is given. A mean that weighs classes (`F.cross_entropy(logits, labels, weight=weight)`)
            divides by the weights of the labels in its micro-batch, so it depends on `gradient_accumulation_steps`.
            The sum divided by `num_items_in_batch` (`reduction="sum"`) does not.
        dual_dataset (*optional*, keyword only):
            200 or more examples, prepared as `train_dataset` is. The default objective, "descent", then moves the
            multipliers by the losses of these examples, since constraints are easily met on examples that the weights
            have fitted. Every 8 steps it reads as many of them as a training step takes, without dropout. No other
            part of the data should have these examples: `dataset.train_test_split(0.05)` makes such parts.

    ValueError, when the trainer is made or on the first batch of training or evaluation, for a model, a loss or a
    setting with which layers cannot be constrained; TypeError if `layer_loss_fn` returns anything but a
    floating-point scalar tensor.

    Example:

    ```python
    trainer = DescentTrainer(model, DescentConfig(output_dir="out"), train_dataset=train, eval_dataset=test)
    trainer.train()
    trainer.multipliers.values  # one multiplier per constraint
    ```
    """
