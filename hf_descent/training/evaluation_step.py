"""Evaluation in `DescentTrainer`: the losses of every layer over the items of a data set, and robustness to noise."""

from functools import partial
from itertools import islice

import torch
from accelerate.utils import find_batch_size, slice_tensors
from transformers import DataCollatorWithFlattening
from transformers.utils import logging

from ..configs import levels_of
from ..constraints.problem import MIN_ROWS, as_python
from ..evaluation import LayerProfile, NoiseCurve, layer_profile, noise_curve
from ..evaluation.scoring import Scorer, numbered_batches, prepare_collator
from ..evaluation.sums import fingerprint_of_functions
from ..readout.stack import inner_model
from .preparation import is_readable_once


logger = logging.get_logger(__name__)

HIDDEN_OUTPUTS = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


class EvaluationMixin:
    """The part of [`DescentMixin`] that evaluates."""

    _noise_curve: NoiseCurve | None = None  # of the last `evaluate_robustness`, for the model card
    _layer_profile: LayerProfile | None = None  # of the last `evaluate_layers`, for the model card
    _eval_sums: torch.Tensor | None = None  # [layers + 1], loss sums and their item count
    _scored = False  # whether the layers of the batch at hand were read

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        if self._eval_sums is not None:
            self._eval_sums = torch.zeros_like(self._eval_sums)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._reads_layers and not output.num_samples:
            raise ValueError("The evaluation data has no rows: give some, or set `eval_strategy` to 'no'.")
        if self._eval_sums is not None:
            *sums, count = self._reduce(self._eval_sums).tolist()
            if count:
                losses = torch.tensor(sums) / count  # [layers]
                # Trainer averages batches; f_L is an average over items.
                output.metrics[f"{metric_key_prefix}_loss"] = losses[-1].item()
                rows, step = output.num_samples, self.state.global_step
                if rows < MIN_ROWS:
                    logger.warning_once(
                        f"{rows} rows of evaluation data are too few for a verdict on the constraints: give at least "
                        f"{MIN_ROWS}."
                    )
                output.metrics.update(self._state.evaluation(losses, metric_key_prefix, step, rows))
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **gen_kwargs):
        if not self._reads_layers:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        self._keeps_logits = not prediction_loss_only
        # Hidden states asked for in the model's config would pile up as predictions.
        if ignore_keys is None:
            ignore_keys = getattr(
                getattr(self.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"]
            )
        ignore_keys = [*ignore_keys, *HIDDEN_OUTPUTS]
        step = partial(super().prediction_step, model, inputs, prediction_loss_only, ignore_keys, **gen_kwargs)
        if self._readout_fn is None or self._count_items(inputs) is not None:
            before = None if self._eval_sums is None else self._eval_sums.clone()
            self._scored = False
            prediction = step()
            own_rows = self._rows_counted_once(inputs)
            # Seq2SeqTrainer calls the model by itself where it generates.
            if self._count_items(inputs) is not None and not (self._scored and own_rows is None):
                inputs = self._prepare_inputs(inputs)
                self._prepare(model, inputs)
                before = torch.zeros_like(self._eval_sums) if before is None else before
                self._eval_sums.copy_(before)
                # On every process, also for no rows: a forward may gather parameters.
                kept = inputs if own_rows is None else slice_tensors(inputs, slice(max(own_rows, 1)))
                with torch.no_grad(), self.compute_loss_context_manager():
                    self._descent_loss(model, kept)
                if own_rows == 0:
                    self._eval_sums.copy_(before)
            return prediction
        self._prepare(model, self._prepare_inputs(inputs))
        with self._readout.attach(lambda layer, outputs, hidden: None, layers=[self._readout.num_layers]):
            return step()

    def _rows_counted_once(self, inputs) -> int | None:
        """How many rows of a last evaluation batch are not repeats that fill it up; `None` for any other batch."""
        rows, loader = find_batch_size(inputs), self.accelerator.gradient_state
        if self.args.world_size == 1 or not loader.end_of_dataloader:
            return None
        if loader.remainder < 0 and not self.args.dataloader_drop_last:
            logger.warning_once(
                "The evaluation data has no length and is split without `dispatch_batches`: rows that are repeated to "
                "fill its last batch may count twice."
            )
        if loader.remainder <= 0:
            return None
        if isinstance(self.data_collator, DataCollatorWithFlattening):
            logger.warning_once(
                "Rows are strung together: those that are repeated to fill the last batch of the evaluation data may "
                "count twice."
            )
            return None
        return min(max(loader.remainder - self.args.process_index * rows, 0), rows)

    def evaluate_robustness(self, eval_dataset=None, gammas=None, **kwargs):
        """Metric and loss of the model on noisy inputs, for each noise level.

        Args:
            eval_dataset: a dataset as `evaluate` takes it; the trainer's own where not given.
            gammas: noise levels, one or several; `args.eval_gammas` where not given.
            kwargs: passed to [`noise_curve`]. Its `seed` is not that of training: runs that differ by that share the
                noise.

        Returns:
            [`NoiseCurve`], also logged under `eval_`.

        Raises:
            ValueError: no levels, no data, or no scale for them (see [`noise_sigma`]); and as [`noise_curve`].
        """
        dataset = self._held_out(eval_dataset)
        gammas = self.args.eval_gammas if gammas is None else gammas
        gammas = [] if gammas is None else levels_of("gammas", gammas)
        if not gammas:
            raise ValueError("No noise levels: give `gammas`, or set `eval_gammas` in the config.")
        model = self._evaluated_model()
        settings, is_noise = self._evaluation_settings(model, dataset), kwargs.get("perturbation") is None
        if is_noise:  # the levels of a perturbation are others than those of training, and of the card
            settings |= {"sigma": self.noise_sigma(model), "gamma_train": self.args.gamma_train}
        curve = noise_curve(model, dataset, gammas, **{**settings, **kwargs})
        self.log({f"eval_{name}": value for name, value in curve.to_dict().items()})
        if is_noise:
            self._noise_curve = curve
        return curve

    def evaluate_layers(self, eval_dataset=None, **kwargs) -> LayerProfile:
        """Loss and metric of the model at every layer, and whether the constraints are met there.

        Args:
            eval_dataset: a dataset as `evaluate` takes it; the trainer's own where not given.
            kwargs: passed to [`layer_profile`].

        Returns:
            [`LayerProfile`], with violations where the problem is known.

        Raises:
            ValueError: no data, or as [`layer_profile`].
        """
        model = self._evaluated_model()
        dataset = self._held_out(eval_dataset)
        settings = self._evaluation_settings(model, dataset)
        if kwargs.get("gamma"):
            settings["sigma"] = self.noise_sigma(model)
        if self.problem is not None:
            tolerance = self.args.feasibility_tolerance * self.problem.initial_loss_bound
            settings |= {"problem": self.problem, "tolerance": tolerance}
        self._layer_profile = layer_profile(model, dataset, **{**settings, **kwargs})
        return self._layer_profile

    def _evaluated_model(self):
        """The model as `evaluate` runs it: before its first turn, mixed precision is not yet in its forward."""
        mixed = self.accelerator.mixed_precision != "no" and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if mixed and not self.accelerator._models:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        return self.accelerator.unwrap_model(self.model)

    def _evaluation_settings(self, model, dataset) -> dict:
        own_loss = None
        if self.compute_loss_func is not None or self.label_smoother is not None:
            own_loss = _TaskLoss(self, model, self._predicts_next_labels(model, dataset))
        config = getattr(inner_model(model), "config", None)
        # As transformers' own losses tell regression.
        problem = getattr(config, "problem_type", None)
        classifies = "ForSequenceClassification" in type(model).__name__
        is_regression = problem == "regression" or (problem is None and classifies and config.num_labels == 1)
        return {
            "metric": "rmse" if is_regression else "accuracy",
            "data_collator": self.data_collator,
            "batch_size": self.args.eval_batch_size,
            "label_names": self.label_names,
            "layer_loss_fn": own_loss,
            "readout": self._readout_fn,
            "remove_unused_columns": self.args.remove_unused_columns,
            # Processes that gather parameters together cannot share the batches unevenly: each goes through all.
            "accelerator": None if self._shards_parameters else self.accelerator,
            "progress": self.is_world_process_zero() and not self.args.disable_tqdm,
        }

    def _predicts_next_labels(self, model, dataset) -> bool:
        """Whether labels are those of the next tokens, which a label smoother has to be told; plain training does not
        ask the model."""
        if self.label_smoother is None or self._readout is not None or is_readable_once(dataset):
            return self._loss_shifts_labels
        collate = prepare_collator(model, self.data_collator, None, self.label_names, self.args.remove_unused_columns)
        scorer = Scorer(model, label_names=self.label_names)
        for _, batch in islice(numbered_batches(dataset, collate, self.args.eval_batch_size), 1):
            scorer.model_inputs(self._prepare_inputs(batch), None)
        return bool(scorer.shifts_labels)

    def _held_out(self, dataset):
        known, numbers = self.eval_dataset, as_python(dataset)
        if isinstance(numbers[0] if isinstance(numbers, list) and numbers else numbers, int | float):
            raise ValueError(f"`eval_dataset` is {numbers}; give a data set. Noise levels go by their name, `gammas`.")
        if isinstance(known, dict) and (dataset is None or isinstance(dataset, str)):
            if dataset not in known:
                raise ValueError(f"`eval_dataset` is {dataset!r}; give one of {', '.join(map(repr, known))}.")
            return known[dataset]
        dataset = known if dataset is None else dataset
        if dataset is None or isinstance(dataset, dict | str):
            raise ValueError(f"`eval_dataset` is {dataset!r}; give one dataset.")
        return dataset


class _TaskLoss:
    """`_task_loss` of a trainer for the evaluation functions; known, in a kept noise curve, by what decides it."""

    def __init__(self, trainer, model, shifts_labels):
        self.trainer, self.model, self.shifts_labels = trainer, model, shifts_labels

    def __call__(self, outputs, labels, num_items_in_batch=None) -> torch.Tensor:
        items = None if self.trainer.compute_loss_func is None else num_items_in_batch  # as in `evaluate`
        return self.trainer._task_loss(self.model, outputs, labels, items, self.shifts_labels)

    def __reduce__(self):
        own = fingerprint_of_functions(self.trainer.compute_loss_func)
        if own is None:
            raise TypeError("a loss function that cannot be compared")
        return _TaskLoss, (own, self.trainer.label_smoother, self.shifts_labels)
