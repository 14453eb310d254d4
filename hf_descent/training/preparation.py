"""What training finds out before its first step: the readout, the scale of the loss, the problem, the noise.

Everything here runs at most once per run, on a real batch, and leaves random states and modes as they were.
"""

import contextlib
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate.logging import get_logger
from accelerate.utils import DynamoBackend, broadcast_object_list, send_to_device
from datasets import Dataset
from torch.utils.data import IterableDataset, Subset
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import has_length
from transformers.utils import ModelOutput

from ..constraints.auto import SYNTHETIC_LABELS, ConstantPredictor
from ..constraints.objectives import MEASURING
from ..constraints.state import STATE_NAME, DescentState
from ..losses.labels import check_datasets, check_labels
from ..losses.task import IGNORE_INDEX, aligned, labels_of, of_tokens, shifts_labels
from ..noise.embedding_noise import EmbeddingNoise, deviation_from_moments, signal_moments
from ..readout.replay import Readout, has_router_loss, output_logits, output_loss, probing
from ..runs import RunFolder


logger = get_logger(__name__)

SIGMA_ROWS = 2048  # rows from which the deviation of the clean signal is estimated
PROBED_TOKENS = 64  # of each of the documents that are tried packed and apart
MAX_POSITIONS = 2**16  # answers are counted up to there: the first batch does not tell how long others are


def _unmeasurable(what: str) -> ValueError:
    return ValueError(
        f"`initial_loss_bound='auto'` cannot be measured for {what}; set it to the loss of a constant prediction."
    )


def is_readable_once(dataset) -> bool:
    """Whether what is read of a data set is gone, as from a generator."""
    return not has_length(dataset) and iter(dataset) is iter(dataset)


@dataclass
class _Smoother(LabelSmoother):
    """Shifts labels as the model does; Trainer goes by the name of its class here, too."""

    shifts: bool = False

    def __call__(self, model_output, labels, shift_labels=False, num_items_in_batch=None):
        return super().__call__(model_output, labels, self.shifts, num_items_in_batch)


class PreparationMixin:
    """The part of [`DescentMixin`] that looks at model, loss and data once."""

    _packs_documents = False  # whether a batch may hold several documents in one row, though the first one did not

    def _refuse_unsupported(self) -> None:
        args = self.args
        scorer = super().compute_loss  # of the class that the mixins stand before
        if scorer.__module__ not in ("transformers.trainer", "trl.trainer.sft_trainer"):
            raise ValueError(
                f"`{scorer.__qualname__}` is a loss that cannot be taken at every layer. Give it as "
                "`layer_loss_fn(outputs, labels, num_items_in_batch=None)`."
            )
        held_out = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for name, rows in held_out.items():
            if has_length(rows) and not len(rows):
                raise ValueError(f"`eval_dataset`{name and f' {name!r}'} has no rows: give some, or leave it out.")
        if self.compute_loss_func is not None:
            try:
                inspect.signature(self.compute_loss_func).bind(None, None, num_items_in_batch=None)
            except TypeError as error:
                raise ValueError(
                    f"`layer_loss_fn` (or `compute_loss_func`) takes other arguments ({error}) than it is given: "
                    "`layer_loss_fn(outputs, labels, num_items_in_batch=None)`."
                ) from error
        if getattr(args, "predict_with_generate", False) and not isinstance(self, transformers.Seq2SeqTrainer):
            raise ValueError(
                f"`predict_with_generate=True` has no effect in {type(self).__name__}; use Seq2SeqDescentTrainer."
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"`nn.DataParallel` over {args.n_gpu} devices in one process is not supported: the layer losses of "
                "its replicas are lost. Use `accelerate launch` or `torchrun` (one process a device), or set "
                "`CUDA_VISIBLE_DEVICES` to one device."
            )
        if args.fp16 and args.device.type == "cpu":
            raise ValueError("`fp16=True` has no effect on CPU; use `bf16=True` or full precision.")
        if args.torch_compile or self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                "`torch_compile=True` is not supported with layer losses, which run the model's tail once per layer; "
                "set `torch_compile=False` (and no `dynamo_backend` in the accelerate config), or compile the layers "
                "yourself."
            )
        if self.is_fsdp_enabled and getattr(self.accelerator.state.fsdp_plugin, "fsdp_version", 1) < 2:
            raise ValueError(
                "FSDP1 keeps no parameter whole where the layers are read; set `fsdp_version: 2` in the accelerate "
                "config (or in `fsdp_config`)."
            )
        if any(getattr(adapter, "orth_reg_weight", 0) for adapter in getattr(self.model, "peft_config", {}).values()):
            raise ValueError(
                "AdaLoRA adds a penalty on its matrices to the loss, which would count as a loss of every layer; set "
                "`orth_reg_weight=0` in its config, or use LoRA."
            )
        sizes = {"tensor": self.get_tp_size(), "context": self.get_cp_size(), "sequence": self.get_sp_size()}
        if split := [name for name, size in sizes.items() if size > 1]:
            raise ValueError(
                f"{split[0].capitalize()} parallelism is not supported: a layer's loss needs whole rows of tokens and "
                "classes in one process. Use data parallelism: DDP, FSDP2 or DeepSpeed ZeRO."
            )

    def _check_data(self) -> None:
        """Refuse model and labels that training could learn nothing from, before its first batch."""
        if not self._reads_layers:
            return
        if any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in self.model.modules()):
            raise ValueError(
                f"{type(self.model).__name__} is quantized by torch.ao: its linear layers have no parameters. "
                "Train first and quantize then, or load the model in 4 or 8 bits (bitsandbytes) and train adapters."
            )
        if self.train_dataset is not None and has_length(self.train_dataset) and not len(self.train_dataset):
            raise ValueError("`train_dataset` has no rows: see to the filters that it went through.")
        collates = getattr(self.data_collator, "__module__", "").startswith("transformers.")
        if collates and self.compute_loss_func is None and self._readout_fn is None:
            evaluated = self.eval_dataset
            evaluated = evaluated if isinstance(evaluated, dict) else {"eval_dataset": evaluated}
            check_datasets(self.model, {"train_dataset": self.train_dataset, **evaluated}, self.label_names)

    @property
    def _shards_parameters(self) -> bool:
        """Whether a forward gathers parameters, so that all processes have to run equally many."""
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return self.is_fsdp_enabled or (self.is_deepspeed_enabled and plugin.zero_stage == 3)

    def _probe_batch(self, inputs):
        """The first process's batch, on every process, with labels if it has none.

        What is found out on it has to be the same everywhere, and so has the number of forwards that this takes.
        """
        if self.args.world_size > 1:
            # By way of the CPU, or every process would hold it on the first one's device.
            inputs = send_to_device(broadcast_object_list([send_to_device(inputs, "cpu")])[0], self.args.device)
        names = [name for name in {*self.label_names, "labels", "shift_labels"} if inputs.get(name) is not None]
        counted = [inputs[name] if inputs[name].dim() < 2 else inputs[name][..., 1:] for name in names]
        if any(labels.is_floating_point() or labels.ne(IGNORE_INDEX).any() for labels in counted):
            return inputs
        logger.warning_once(
            f"The first batch has no label that counts (all are {IGNORE_INDEX}), and such batches teach nothing: see "
            "to the masking, and to the length at which rows are cut."
        )
        return {**inputs, **{name: torch.zeros_like(inputs[name]) for name in names}}

    def _prepare(self, model, inputs) -> None:
        """Find the readout on the first batch, and build or load the dual side; the former anew where the model has
        become another."""
        model = self.accelerator.unwrap_model(model)
        if self._readout is not None and not self._readout.is_of(model):
            self._readout = None
        if self._readout is not None and self._state is not None:
            return
        inputs = self._probe_batch(inputs)
        if self.compute_loss_func is None and self._readout_fn is None:
            for name in self.label_names:
                if isinstance(inputs.get(name), torch.Tensor):
                    check_labels(model, name, inputs[name])
        given = inputs
        if self.compute_loss_func is not None:
            try:
                with probing(model):
                    model(**inputs)
            except Exception:  # the model's own loss need not take these labels
                given = {name: value for name, value in inputs.items() if name != "labels"}
        if self._readout is None:
            self._check_documents(model, inputs)
            self._readout = Readout.probe(model, given, readout=self._readout_fn)
            if self._readout_fn is not None and self.is_in_train:
                self._readout.check_parameters(given)
            self._find_fused_readout(model, inputs)
        num_layers, device = self._readout.num_layers, self.args.device
        with probing(model):
            outputs = model(**given)
        if self._readout_fn is not None and not isinstance(outputs, dict):
            raise ValueError(
                f"{type(model).__name__} returns a tuple, in which the logits of `readout` have no place: leave "
                "`return_dict=True`, or return names."
            )
        labels, loss = labels_of(inputs, self.label_names), output_loss(outputs)
        has_loss = isinstance(loss, torch.Tensor) and loss.dim() < 2 and loss.numel() == 1
        if self._fused is None and labels is not None:
            self._find_label_shift(model, inputs)
            if has_loss and loss.dtype in (torch.bfloat16, torch.float16):
                logger.warning(
                    f"The model's loss is computed in {loss.dtype}, whose {3 if loss.dtype == torch.bfloat16 else 4} "
                    "digits blur violations; load the model in float32 and set `bf16=True` (mixed precision)."
                )
        if self._state is not None:
            if self._state.num_layers != num_layers:
                raise ValueError(
                    f"The model has {num_layers} layers now, and the constraints are those of "
                    f"{self._state.num_layers}: make a new trainer for it."
                )
            return
        predictor = self._constant_predictor(model, inputs, outputs)
        saved = self._resumed_from is not None and os.path.isfile(os.path.join(self._resumed_from, STATE_NAME))
        start_step = 0 if saved else self.state.global_step
        state = DescentState(self.args, num_layers, self.state.max_steps, start_step, predictor, self._reduce, device)
        if saved:
            state.load(self._resumed_from, is_main=self.args.process_index == 0)
        elif self._resumed_from is not None:
            logger.warning(f"{self._resumed_from} holds no dual state: the multipliers start afresh, with a warm-up.")
            state.labels_until += self.state.epoch
        elif not self.is_in_train:
            state.take_saved_problem(self._loaded_from())
        self._layer_sums = torch.zeros(num_layers, device=device)
        self._eval_sums = torch.zeros(num_layers + 1, device=device)
        self._state = state

    def _check_documents(self, model, inputs) -> None:
        """ValueError where several documents share a row (their positions start anew) and the model lets one see
        another. Tried on the beginnings of two; where only later batches have several, on the halves of one."""
        positions = inputs.get("position_ids")  # [rows, seq]
        labels = labels_of(inputs, self.label_names)
        if positions is None or positions.shape != labels.shape or inputs.get("attention_mask") is not None:
            return
        starts = positions.diff(dim=1) != 1  # [rows, seq - 1]
        row = int(starts.any(1).int().argmax())
        ends = [*(starts[row].nonzero()[:, 0] + 1).tolist(), positions.shape[1]]
        documents = sorted(zip([0, *ends], ends), key=lambda document: document[0] - document[1])  # by length
        documents = [(start, end - start) for start, end in documents if end - start > 1]  # others predict nothing
        if len(documents) == 1 and self._packs_documents:
            start, length = documents[0]
            documents = [(start, length // 2), (start + length // 2, length // 2)]
        if len(documents) < 2:
            return
        (first, _), (second, length) = documents[:2]
        length = min(length, PROBED_TOKENS)

        def logits(rows):
            """Of short rows `[[start of a document, ...], ...]`, less their means; `[documents, tokens, vocab]`."""
            size, own = len(rows[0]), torch.arange(length, device=positions.device)
            tokens = torch.tensor(rows, device=own.device)[..., None] + own  # [rows, documents, tokens]
            order = torch.arange(size, device=own.device, dtype=torch.int32)
            told = {
                "position_ids": positions[row, first + own].repeat(len(rows), size),
                "seq_idx": order.repeat_interleave(length).repeat(len(rows), 1),
                **{f"cu_seq_lens_{side}": torch.cat([order, order[-1:] + 1]) * length for side in "qk"},
                **{f"max_length_{side}": length for side in "qk"},
            }
            batch = {
                name: value[row, tokens.flatten(1)] if getattr(value, "shape", ())[:2] == positions.shape else value
                for name, value in inputs.items()
                if value is not labels and (size > 1 or name not in ("cu_seq_lens_q", "cu_seq_lens_k"))
            }
            found = output_logits(model(**batch | {name: value for name, value in told.items() if name in batch}))
            # Without those of a trained prompt.
            found = found[:, -size * length :].float().unflatten(1, (size, length)).flatten(0, 1)
            return found - found.mean(-1, keepdim=True)

        with probing(model):
            packed, apart = logits([[first, second]]), logits([[first], [second]])
            rounding = (logits([[first]])[0] - apart[0]).norm() / apart[0].norm()
        error = ((packed - apart).norm() / apart.norm()).item()
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision, torch.float32)
        dtypes = {mixed, *(p.dtype for p in model.parameters() if p.is_floating_point())}
        if error > max(1e-4, 8 * max(torch.finfo(dtype).eps for dtype in dtypes), 10 * rounding.item()):
            raise ValueError(
                f"{type(model).__name__} lets the documents of a packed row see one another: its logits change by "
                f"{error:.2g} of their size. Set `packing=False` and `padding_free=False`, or where documents are "
                "meant to be joined `packing_strategy='wrapped'`; with flash attention some models keep them apart."
            )

    def _find_label_shift(self, model, inputs) -> bool:
        """Find out whether the loss predicts a token's label at the token before, so that no first label is an item;
        whether that could be found.

        Trainer goes by the name of the class, which does not tell: GPT2LMHeadModel shifts its labels, XLNetLMHeadModel
        does not, and a loss of one's own need not do as its model does.
        """
        labels, loss_of = inputs.get("labels"), None
        try:
            with probing(model):
                outputs = model(**inputs)
                if self.compute_loss_func is not None:
                    loss_of = partial(self._task_loss, model, outputs, items=torch.tensor(1))
                tokens = of_tokens(labels) and output_logits(outputs).shape[:2] == labels.shape
                self._loss_shifts_labels = tokens and shifts_labels(model, inputs, loss_of=loss_of)
            return True
        except Exception:  # there is no loss, or none where labels are missing
            return False

    def _prepare_plain(self, inputs) -> None:
        """What plain training has to know of its first batch, where anything depends on the number of items."""
        self._is_prepared_plain = True
        own = self.compute_loss_func is not None or self.label_smoother is not None
        counts = self.model_accepts_loss_kwargs or own or not self._stock_scaling_is_right
        if not (counts and of_tokens(inputs.get("labels"))):
            return
        model = self.accelerator.unwrap_model(self.model_wrapped)
        found = self._find_label_shift(model, self._probe_batch(self._prepare_inputs(inputs)))
        if found and self.label_smoother is not None:
            self.label_smoother = _Smoother(self.args.label_smoothing_factor, shifts=self._loss_shifts_labels)

    def _constant_predictor(self, model, inputs, outputs) -> ConstantPredictor | None:
        """What measures the loss of the best constant prediction; `None` where that is neither needed nor possible.

        ValueError where f_0 = "auto" depends on a loss that cannot be measured.
        """
        given = self.args.initial_loss_bound != "auto"
        if self.args.objective not in MEASURING or not self.is_in_train:
            return None
        if given and self.compute_loss_func is not None:
            return None  # would be searched for numerically, for a line of the log
        try:
            return self._known_predictor(model, inputs, outputs)
        except ValueError:
            if not given:
                raise
            return None

    def _known_predictor(self, model, inputs, outputs) -> ConstantPredictor:
        logits, labels = output_logits(outputs), labels_of(inputs, self.label_names)
        config = getattr(model, "config", None)
        multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
        positions = "start_positions" in inputs  # the classes of extractive question answering
        given = [name for name in self.label_names if inputs.get(name) is not None]
        if len(given) > 1 and not positions:
            raise _unmeasurable(f"a loss of several labels ({', '.join(given)})")
        if labels.is_floating_point() and labels.numel() != logits.numel():
            raise _unmeasurable(f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}")
        if logits.shape[-1] == 1 and not (labels.is_floating_point() or positions):
            raise _unmeasurable("whole labels of a single logit, which models take for numbers (give them as floats)")
        numbers = labels.is_floating_point() and not multi_label
        own = self.compute_loss_func is not None
        predictor = ConstantPredictor(
            MAX_POSITIONS if positions else logits.shape[-1],
            0.0 if own or positions else self.args.label_smoothing_factor,  # of which Trainer's smoother knows nothing
            multi_label,
            self._loss_scale(model, inputs, labels, logits) if numbers else 1.0,
            self._loss_of_constants(logits, labels, multi_label) if own and not numbers else None,
            positions,
        )
        if self._fused is None and not (own or numbers or positions or has_router_loss(outputs)):
            self._check_loss(model, outputs, logits, labels, multi_label)
        return predictor

    def _check_loss(self, model, outputs, logits, labels, multi_label) -> None:
        """ValueError where the model's loss on a batch is not the (binary) cross-entropy that is taken for it."""
        loss = self._task_loss(model, outputs, labels)
        logits = logits.float()
        if multi_label:
            expected = F.binary_cross_entropy_with_logits(logits, labels.float())
        else:
            if logits.dim() == 3 and labels.dim() == 2:
                logits, labels = aligned(model, logits, labels, self._loss_shifts_labels)
            if logits.shape[:-1] != labels.shape:
                raise _unmeasurable(f"labels of shape {tuple(labels.shape)} for logits of shape {tuple(logits.shape)}")
            expected = F.cross_entropy(
                logits.flatten(0, -2), labels.flatten(), label_smoothing=self.args.label_smoothing_factor
            )
        if abs(loss - expected) > 0.02 * expected:
            raise _unmeasurable(f"a loss that is {loss:.4g} where the cross-entropy is {expected:.4g}")

    def _loss_of_constants(self, logits, labels, multi_label) -> Callable | None:
        """The loss function of one's own, on logits that are the same for every label; `None` where it is the
        cross-entropy after all, whose least value is known in closed form."""
        loss_fn = partial(self._score_constant, logits.dim())
        classes = logits.shape[-1]
        if multi_label:
            some = torch.stack([labels.new_zeros(classes), labels.new_ones(classes)])  # [2, classes]
        else:  # all classes, which may have weights; of a vocabulary some
            rows = classes if classes <= SYNTHETIC_LABELS else 64
            some = torch.linspace(0, classes - 1, rows, device=labels.device).to(labels.dtype)  # [rows]
            if logits.dim() == 3:  # the function may shift the labels by one token
                some = torch.cat([some.new_tensor([IGNORE_INDEX]), some])
        scores = torch.arange(classes, device=logits.device).sin().repeat(len(some), 1)
        try:
            loss = float(loss_fn(scores, some))
        except TypeError:  # no loss at all, whatever f_0 is
            raise
        except Exception as error:
            raise _unmeasurable(f"a loss function that fails on constant logits ({error})") from error
        entropy = (F.binary_cross_entropy_with_logits if multi_label else F.cross_entropy)(scores, some).item()
        if math.isclose(loss, entropy, rel_tol=1e-4):
            return None
        if classes > SYNTHETIC_LABELS and not multi_label:
            raise _unmeasurable(f"a loss function of one's own over {classes} classes")
        return loss_fn

    def _score_constant(self, dim: int, logits, labels) -> torch.Tensor:
        """The loss function of one's own on rows of logits, in a batch of as many dimensions as the model's logits."""
        items = (labels != IGNORE_INDEX).sum()
        for _ in range(dim - logits.dim()):
            logits, labels = logits[None], labels[None]
        return self._task_loss(self.model, ModelOutput(logits=logits), labels, items)

    @torch.no_grad()
    def _loss_scale(self, model, inputs, labels, logits) -> float:
        """The loss of numbers in units of the mean squared error, measured on one batch."""
        residual = labels - labels.mean(0, keepdim=True)
        if not residual.any():  # a batch of one
            residual = torch.ones_like(labels)
        scales = []
        for factor in (1.0, 2.0):
            # The loss of a residual r, whatever the prediction, is the loss of the labels `prediction + r`.
            shifted = logits.reshape(labels.shape).to(labels) + factor * residual
            if self.compute_loss_func is not None:
                loss = self._score_constant(logits.dim(), logits, shifted)
            else:
                name = next(name for name in (*self.label_names, "labels") if inputs.get(name) is labels)
                with probing(model):
                    loss = output_loss(model(**{**inputs, name: shifted}))
            scales.append((loss / (factor * residual).square().mean()).item())
        if not (math.isfinite(scales[0]) and scales[0] > 0 and math.isclose(*scales, rel_tol=0.02)):
            raise _unmeasurable("a loss of numbers that is not proportional to the squared error")
        return scales[0]

    def _training_noise(self, model):
        gamma, is_noisy = self.args.noise_gamma, self.args.gamma_train > 0
        if self._noise is None and (is_noisy or self.args.eval_gammas):
            # Also where the tests alone are noisy: sigma is that of the signal before training.
            model = self.accelerator.unwrap_model(model)
            self._noise = EmbeddingNoise(model, gamma, seed=self.args.seed, sigma=self.noise_sigma(model))
        if not is_noisy:
            return contextlib.nullcontext()
        # Keyed by where training stands, the noise of a resumed run needs no saved generator.
        self._noise.reseed(self.args.process_index, self.state.global_step, self._micro_step)
        self._micro_step += 1
        return self._noise

    def noise_sigma(self, model=None) -> float:
        """The deviation of the clean signal: given, saved with the model, or estimated from the training data once.

        ValueError where it is none of these, or cannot be estimated.
        """
        model = self.accelerator.unwrap_model(self.model) if model is None else model
        config = getattr(model, "config", None)
        sigma = self.args.noise_sigma or self._saved_sigma() or getattr(config, "noise_sigma", None)
        if sigma is None:
            data = self.train_dataset
            if data is None or is_readable_once(data):
                raise ValueError(
                    "The deviation of the clean signal cannot be measured: there is no `train_dataset` that can be "
                    "read a second time. Set `noise_sigma`: `descent_config.json` beside a trained model or adapter "
                    "has it, and `estimate_sigma` measures it on batches of yours."
                )
            max_batches, together = None, self.args.eval_batch_size * self.args.world_size
            if isinstance(data, IterableDataset) or not has_length(data):
                max_batches = math.ceil(SIGMA_ROWS / together)
            elif len(data) > (rows := math.ceil(SIGMA_ROWS / together) * together):
                # Over all of it, since data may be sorted, and in whole batches, or rows would be dropped or repeated.
                chosen = np.linspace(0, len(data) - 1, rows).astype(int).tolist()
                data = data.select(chosen) if isinstance(data, Dataset) else Subset(data, chosen)
            # In dataset order and with a seed of its own, so that a resumed run finds the same value.
            with probing(model):
                transformers.set_seed(self.args.seed)
                batches = (self._prepare_inputs(batch) for batch in self.get_test_dataloader(data))
                moments = self._reduce(signal_moments(model, batches, max_batches))
            sigma = deviation_from_moments(moments)
            logger.info(f"Deviation of the clean signal: sigma = {sigma:.4g}.")
        if config is not None:
            config.noise_sigma = sigma
        return sigma

    def _saved_sigma(self) -> float | None:
        """That of the run resumed from. Adapters and sharded weights are saved without the model's config."""
        return RunFolder(self._resumed_from or "").summary.get("noise_sigma")

    def _loss_takes_items(self, model, inputs) -> bool:
        """Whether the loss honours `num_items_in_batch`, found out once on a real batch."""
        if self._takes_items is None:
            self._takes_items = False
            if self.model_accepts_loss_kwargs or self.compute_loss_func is not None or self.label_smoother is not None:
                model, inputs = self.accelerator.unwrap_model(model), self._probe_batch(inputs)
                labels = inputs.get("labels")
                kept = {name: value for name, value in inputs.items() if name != "labels" or self._model_scores}
                values = []
                for items in (torch.tensor(1.0), torch.tensor(2.0)):
                    kwargs = {"num_items_in_batch": items} if self.model_accepts_loss_kwargs else {}
                    # From the same random state, or the loss of a model that draws would seem to depend on them.
                    with probing(model):
                        values.append(self._task_loss(model, model(**kept, **kwargs), labels, items))
                self._takes_items = bool(values[0] != values[1]) and bool(values[0].isfinite())
            if not self._takes_items and not self._stock_scaling_is_right:
                logger.info(
                    "The loss ignores `num_items_in_batch`: micro-batches are weighted by their share of the items."
                )
        return self._takes_items
