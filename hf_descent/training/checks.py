"""What a run that reads its layers refuses, before any training time is spent."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..configs import CONSTRAINT_METRICS, LAYER_LOSS, DescentArguments
from ..constraints.problem import AT_CHANCE, check_constrained_layers, check_targets
from ..constraints.state import DescentState
from ..extras import is_dataset
from ..loading import has_position_table, position_limit
from ..logs import get_logger
from ..readout.labels import IGNORE_INDEX, labels_of
from ..readout.replay import Readout, output_logits, probing
from ..readout.stack import inner_model
from .holdout import check_dual_dataset
from .records import evaluation_sets


logger = get_logger(__name__)

PACKING_TOKENS = 64  # of each of the two documents by which packing is tried


def check_supported(trainer: Trainer, loss_method) -> None:
    """ValueError where this run's layers cannot be read; `loss_method` is that of the class behind the mixin."""
    args, accelerator = trainer.args, trainer.accelerator
    check_targeted_layers(trainer)
    if loss_method.__module__ not in ("transformers.trainer", "trl.trainer.sft_trainer"):
        remedy = "Give it as `layer_loss_fn(outputs, labels, num_items_in_batch=None)`."
        raise ValueError(
            f"`{loss_method.__qualname__}` is a loss that cannot be taken at every layer. {remedy}"
        )
    for name, rows in evaluation_sets(trainer).items():
        if has_length(rows) and not len(rows):
            raise ValueError(f"`{name}` has no rows to evaluate on: give some, or leave it out.")
    if getattr(args, "loss_type", "nll") != "nll":
        raise ValueError(
            f"`loss_type` is {args.loss_type!r}, which no layer has; use 'nll', or `objective='erm'`."
        )
    if (
        getattr(args, "eval_packing", False)
        and not trainer.padding_free
        and args.packing_strategy != "wrapped"
    ):
        remedy = "set `padding_free=True`, or `eval_packing=False`"
        raise ValueError(
            f"`eval_packing=True` without `packing` lets documents see those before them: {remedy}."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"`nn.DataParallel` over {args.n_gpu} devices in one process is not supported: the layer losses of its "
            "replicas are lost. Use `accelerate launch` or `torchrun` (one process a device), or set "
            "`CUDA_VISIBLE_DEVICES` to one device."
        )
    if args.world_size > 1 and args.ddp_static_graph:
        raise ValueError(
            "`ddp_static_graph=True` leaves gradients of layers that are read unshared: leave it out."
        )
    dynamo = accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO and args.gradient_checkpointing:
        given = (
            "`torch_compile=True` has no effect on layers that `gradient_checkpointing=True` runs"
        )
        raise ValueError(f"{given}: set one of them to `False`.")
    # What follows the layers runs once per layer: `find_layers` compiles each layer by itself.
    dynamo.backend = DynamoBackend.NO
    if trainer.is_fsdp_enabled and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) < 2:
        raise ValueError(
            "FSDP1 keeps no parameter whole where layers are read; set `fsdp_version: 2`."
        )
    for adapter in getattr(trainer.model, "peft_config", {}).values():
        if getattr(adapter, "orth_reg_weight", 0):
            remedy = "set `orth_reg_weight=0` in its config, or use LoRA"
            raise ValueError(
                f"AdaLoRA's penalty on its matrices would count as a loss of every layer; {remedy}."
            )
        if adapter.is_prompt_learning and adapter.peft_type != "PREFIX_TUNING":
            raise ValueError(
                f"{type(adapter).__name__} puts trained embeddings before the tokens, which the losses of the layers "
                "do not expect: use LoRA or prefix tuning, or train it plainly, with `objective='erm'`."
            )
    sizes = {
        "tensor": trainer.get_tp_size(),
        "context": trainer.get_cp_size(),
        "sequence": trainer.get_sp_size(),
    }
    if split := [name for name, size in sizes.items() if size > 1]:
        raise ValueError(
            f"{split[0].capitalize()} parallelism is not supported: a layer's loss needs whole rows of tokens and "
            "classes in one process. Use data parallelism: DDP, FSDP2 or DeepSpeed ZeRO."
        )


def report_own_averages(args: DescentArguments) -> None:
    """Log once where processes average over their own items in plain training, but not under other objectives."""
    if args.world_size > 1 and not args.average_tokens_across_devices:
        logger.warning_once(
            "`average_tokens_across_devices=False` makes `objective='erm'` divide by the items of each process, as "
            "Trainer does; all other objectives divide by those of all processes. Leave it out to compare them."
        )


def check_targeted_layers(trainer: Trainer) -> None:
    """ValueError where the arguments name layers that the model does not have, as far as its config tells."""
    args = trainer.args
    config = getattr(inner_model(trainer.model), "config", None)
    depth = getattr(config, "num_hidden_layers", None)
    # That of an encoder-decoder is the depth of its encoder.
    if not isinstance(depth, int) or getattr(config, "is_encoder_decoder", False):
        return
    for name in ("exit_targets", "loss_targets"):
        check_targets(name, getattr(args, name), depth)
    check_constrained_layers(args.constrained_layers, depth)


def check_one_loss(layer_loss_fn, compute_loss_func) -> None:
    """ValueError where a trainer is given both, TypeError where the first is no function."""
    if not (layer_loss_fn is None or callable(layer_loss_fn)):
        raise TypeError(
            f"`layer_loss_fn` is {layer_loss_fn!r}; give a function of outputs, labels and items."
        )
    if layer_loss_fn is not None and compute_loss_func is not None:
        raise ValueError(
            "Give `layer_loss_fn` or `compute_loss_func`, not both: either scores every layer."
        )


def without_labels(
    label_names: Iterable[str], model: nn.Module, inputs: Mapping[str, Any]
) -> ValueError:
    """The error for a training batch without labels."""
    wanted = ", ".join(label_names) or "labels"
    return ValueError(
        f"A training batch has no tensor of labels (looked for {wanted}; found {', '.join(inputs)}); every layer's "
        f"loss needs it. Columns of text, and those that {type(inner_model(model)).__name__} does not take, were "
        "dropped: give labels as numbers, to a model with a head (`AutoModelFor...`)."
    )


def without_layers(trainer: Trainer) -> ValueError:
    """The error for a training step whose loss did not pass through the mixin."""
    return ValueError(
        f"`{type(trainer).__name__}.compute_loss` did not come to `DescentMixin.compute_loss`, so no layer was read. "
        "Give your loss as `layer_loss_fn(outputs, labels, num_items_in_batch=None)` instead."
    )


def check_data(trainer: Trainer, readout, dual_dataset) -> None:
    """ValueError where training could learn nothing from the rows or their labels, or parts of the data share rows."""
    if (
        trainer.train_dataset is not None
        and has_length(trainer.train_dataset)
        and not len(trainer.train_dataset)
    ):
        raise ValueError("`train_dataset` has no rows: see to the filters that it went through.")
    collates = getattr(trainer.data_collator, "__module__", "").startswith("transformers.")
    if collates and trainer.compute_loss_func is None and readout is None:
        parts = {"train_dataset": trainer.train_dataset, **evaluation_sets(trainer)}
        _check_classes(trainer.model, parts, trainer.label_names)
    if dual_dataset is not None:
        check_dual_dataset(trainer, dual_dataset)


def _check_classes(
    model: nn.Module, datasets: Mapping[str, Any], label_names: Iterable[str]
) -> None:
    """ValueError where a column or a list with one label per row holds whole numbers that are no classes of `model`, a
    classifier of transformers or of ours: training would end late, or abort a GPU's process."""
    model = inner_model(model)
    kind, problem = type(model), getattr(getattr(model, "config", None), "problem_type", None)
    known = kind.__module__.startswith(("transformers.models.", "hf_descent.models."))
    if not (known and kind.__name__.endswith("Classification") and model.config.num_labels > 1):
        return
    if problem in ("regression", "multi_label_classification"):
        return
    for argument, data in datasets.items():
        is_stored = is_dataset(data) and data.format["type"] != "custom"
        if (
            not (is_stored or isinstance(data, list))
            or not data
            or not isinstance(first := data[0], Mapping)
        ):
            continue
        # A collator takes "label" where there is no other, and makes whole numbers of true and false.
        name = next((name for name in (*label_names, "label") if name in first), None)
        if name is None or np.ndim(first[name]):
            continue
        values = np.asarray(
            data.with_format("numpy")[name][:] if is_stored else [row.get(name) for row in data]
        )
        if values.dtype.kind not in "iu":
            continue
        wrong = values[
            (values >= model.config.num_labels) | ((values < 0) & (values != IGNORE_INDEX))
        ]
        if wrong.size:
            raise ValueError(
                f"`{name}` in `{argument}` has {wrong[0]}, but {kind.__name__} takes whole numbers, 0 to "
                f"{model.config.num_labels - 1}, and {IGNORE_INDEX}: change it, or load the model with more "
                "`num_labels`."
            )


def check_documents(model: nn.Module, inputs: Mapping[str, Any], trainer: Trainer) -> None:
    """ValueError where documents that share a row (their positions start anew) see one another: where the first
    tokens of a row, taken for two documents, change the logits of the second by other tokens in the first."""
    positions = inputs.get("position_ids")  # [rows, seq]
    labels = labels_of(inputs, trainer.label_names)
    if (
        positions is None
        or positions.shape != labels.shape
        or inputs.get("attention_mask") is not None
    ):
        return
    length, args = min(positions.shape[1] // 2, PACKING_TOKENS), trainer.args
    # A later row may hold several documents, though the first one does not.
    sizes = [args.train_batch_size, *([args.eval_batch_size] if trainer.eval_dataset else [])]
    packs = getattr(trainer, "padding_free", False) and (args.packing or max(sizes) > 1)
    if length == 0 or not (packs or (positions.diff(dim=1) != 1).any()):
        return
    batch = {
        name: value[:1, : 2 * length]
        if getattr(value, "shape", ())[:2] == positions.shape
        else value
        for name, value in inputs.items()
        if value is not labels
        and not name.startswith(("cu_seq_lens", "max_length"))  # which positions tell, too
    }
    batch["position_ids"] = torch.arange(length, device=positions.device).repeat(2)[None]
    if "seq_idx" in batch:
        batch["seq_idx"] = (
            torch.arange(2, device=positions.device).repeat_interleave(length)[None].int()
        )
    tokens, logits = batch["input_ids"], []
    with probing(model):
        for first in (tokens[:, :length], tokens[:, length:].flip(1)):
            outputs = model(**batch | {"input_ids": torch.cat([first, tokens[:, length:]], dim=1)})
            second = output_logits(outputs)[:, -length:].float()  # [1, length, vocab]
            logits.append(second - second.mean(-1, keepdim=True))
    error = ((logits[1] - logits[0]).norm() / logits[0].norm()).item()
    mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        trainer.accelerator.mixed_precision, torch.float32
    )
    dtypes = {mixed, *(p.dtype for p in model.parameters() if p.is_floating_point())}
    if error > max(1e-4, *(8 * torch.finfo(dtype).eps for dtype in dtypes)):
        raise ValueError(
            f"{type(model).__name__} lets the documents of a packed row see one another: its logits change by "
            f"{error:.2g} of their size. Set `packing=False` and `padding_free=False`, or where documents are "
            "meant to be joined `packing_strategy='wrapped'`; with flash attention some models keep them apart."
        )


def check_positions(trainer: Trainer, dataset, name: str) -> None:
    """ValueError where a sequence of a tokenised data set is longer than the model's table of positions."""
    positions = position_limit(trainer.model)
    if positions is None or not has_position_table(trainer.model):
        return
    # Positions start afresh with every document where rows hold several.
    documents = trainer.padding_free and "seq_lengths" in dataset.column_names
    rows = dataset["seq_lengths"] if documents else dataset["input_ids"]
    longest = max(max(row) if documents else len(row) for row in rows)
    if longest > positions:
        raise ValueError(
            f"The {name} dataset has a sequence of {longest} tokens, but {type(trainer.model).__name__} has "
            f"{positions} positions; set `max_length` to at most that (it is {trainer.args.max_length})."
        )


def check_some_labels(dataset, name: str, max_length: int | None) -> None:
    """ValueError where no token of a tokenised data set has a label."""
    if not any(set(row["labels"]) - {IGNORE_INDEX} for row in dataset):
        given = f"The {name} dataset has no token with a label after masking and cutting to `max_length`={max_length}"
        raise ValueError(f"{given}: raise `max_length`, or see to the completions.")


def report_layers_at_chance(readout: Readout, dual: DescentState, steps: int) -> None:
    """Log, once, that a head of texts finds nothing in the early layers though the last one has learned: from the end
    of the warm-up, or a tenth of the run, on. `steps` have been trained."""
    config = getattr(inner_model(readout.model), "config", None)
    has_head = (
        readout.readout is None
        and type(inner_model(readout.model)).__name__.endswith("SequenceClassification")
        and getattr(config, "pooling", None) != "mean"
    )
    is_early = steps < max(dual.active_from, dual.max_steps // 10)
    if is_early or dual.problem is None or not has_head:
        return
    at_chance = (dual.mean_losses >= AT_CHANCE * dual.problem.chance).tolist()
    if any(at_chance) and not at_chance[-1] and dual.is_first_report("layers at chance"):
        logger.info(
            f"After {steps} steps {sum(at_chance)} of {len(at_chance)} layers are still at chance. Where the head "
            'reads one token ([CLS]), which early layers hardly use, `readout="mean"` reads the mean of the tokens.'
        )


def is_of_layers(metric: str) -> bool:
    """Whether `metric`, with its prefix or without, is what an evaluation has only where it reads the layers."""
    name = metric.removeprefix("eval_")
    return LAYER_LOSS.match(name) is not None or name in CONSTRAINT_METRICS


def check_best_metric(trainer: Trainer) -> None:
    """ValueError where the best checkpoint is to be chosen by what no evaluation of this run has: of several
    evaluation sets each has metrics of its own."""
    args = trainer.args
    sets = trainer.eval_dataset
    evaluates_by_itself = not type(trainer).evaluate.__module__.startswith("hf_descent.")
    if args.eval_strategy == "no" or not isinstance(sets, dict) or evaluates_by_itself:
        return
    chosen_by = (args.metric_for_best_model or "").removeprefix("eval_")
    if not chosen_by or chosen_by.startswith(tuple(f"{name}_" for name in sets)):
        return
    raise ValueError(
        f"`metric_for_best_model` is {args.metric_for_best_model!r} (`load_best_model_at_end` takes 'loss' by "
        f"default), but each of the evaluation sets {', '.join(sets)} has metrics of its own: name one, such as "
        f"'{next(iter(sets))}_{chosen_by}'."
    )
