"""What a run finds out once, before its first step, on a batch that all processes share or on its training data."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, broadcast_object_list, send_to_device
from torch import nn
from transformers import Trainer

from ..constraints.objectives import UNCONSTRAINED
from ..constraints.state import STATE_NAME, DescentState, read_state
from ..logs import get_logger
from ..losses.constant import find_predictor
from ..losses.layerwise import LayerLosses, find_layer_losses
from ..losses.task import TaskLoss
from ..noise.embedding_noise import estimate_sigma
from ..readout.labels import IGNORE_INDEX, names_of_labels
from ..readout.replay import output_loss, probing
from ..readout.stack import unwrapped
from ..runs import RunFolder
from .checks import check_documents
from .holdout import HeldOutRows, shuffled, split
from .initial_loss import collated, drawing_apart, is_readable_once, measure_chance
from .records import reduced


logger = get_logger(__name__)

SIGMA_ROWS = 2048  # rows from which the deviation of the clean signal is estimated


def prepared(trainer: Trainer, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch as the model gets it; training goes on as if nothing had been drawn for it."""
    with probing(unwrapped(trainer.model_wrapped)):
        return trainer._prepare_inputs(batch)


def shared_batch(inputs: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any]:
    """The first process's batch, on every process, with labels if it has none.

    What is found out on it has to be the same everywhere, and so has the number of forwards that this takes.
    """
    args = trainer.args
    if args.world_size > 1:
        # By way of the CPU, or every process would hold it on the first one's device.
        inputs = send_to_device(
            broadcast_object_list([send_to_device(inputs, "cpu")])[0], args.device
        )
    names = names_of_labels(inputs, trainer.label_names)
    counted = [inputs[name] if inputs[name].dim() < 2 else inputs[name][..., 1:] for name in names]
    if any(labels.is_floating_point() or labels.ne(IGNORE_INDEX).any() for labels in counted):
        return inputs
    logger.warning_once(
        f"The first batch has no label that counts (all are {IGNORE_INDEX}), and such batches teach nothing: see to "
        "the masking, and to the length at which rows are cut."
    )
    return {**inputs, **{name: torch.zeros_like(inputs[name]) for name in names}}


def make_ready_for_ddp(trainer: Trainer, readout: Callable | str | None) -> None:
    """What has to be so before the model of a trainer is wrapped; nothing where DDP does not wrap it."""
    args = trainer.args
    if args.world_size == 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    # An evaluation before training leaves this mark on the bare model, which DDP would then not wrap: every process
    # would train a model of its own.
    vars(trainer.model).pop("_is_accelerate_prepared", None)
    reenters = (args.activation_checkpointing_kwargs or {}).get(
        "use_reentrant"
    )  # with which DDP could not look
    if readout is not None and args.ddp_find_unused_parameters is None and not reenters:
        # Trainer does not have DDP look for unused parameters under checkpointing; those of a pooler may be.
        trainer.accelerator.ddp_handler.find_unused_parameters = True


def find_task(
    trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], readout: Callable | None = None
) -> TaskLoss:
    """The task loss of a trainer's unwrapped model, found out on a batch that all processes share."""
    given = {"loss_fn": trainer.compute_loss_func or trainer.label_smoother, "readout": readout}
    given |= {
        "shifts_labels": trainer._loss_shifts_labels,
        "accepts_items": trainer.model_accepts_loss_kwargs,
    }
    return TaskLoss.probe(model, inputs, label_names=trainer.label_names, **given)


def takes_items(trainer: Trainer, task: TaskLoss, inputs: Mapping[str, Any]) -> bool:
    """Whether the loss of plain training is divided by the items that it is given; found out on the first batch."""
    if task.takes_items is None:
        task.takes_items = task.divides_by_items(shared_batch(inputs, trainer))
        if not task.takes_items:
            logger.info(
                "The loss ignores `num_items_in_batch`: micro-batches are weighted by their items."
            )
    return task.takes_items


def find_layers(
    trainer: Trainer,
    model: nn.Module,
    inputs: Mapping[str, Any],
    task: TaskLoss,
    readout: Callable | str | None,
) -> LayerLosses:
    """The layer losses of a trainer's model, found and checked on a batch; ValueError where they cannot be read."""
    check_documents(model, inputs, trainer)
    args = trainer.args
    sample = {
        "token_fraction": args.readout_token_fraction,
        "same_tokens": args.compares_neighbours,
    }
    settings = {
        "readout": readout,
        "trains": trainer.is_in_train,
        "token_statistics": trainer.logs_tokens,
    }
    layers = find_layer_losses(model, inputs, task, **settings, **sample, seed=args.seed)
    compiler = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    if compiler.backend != DynamoBackend.NO:
        for layer in layers.readout.stack.layers:
            if layer._compiled_call_impl is None:
                layer.compile(**compiler.to_kwargs())
    return layers


def make_dual(
    trainer: Trainer,
    layers: LayerLosses,
    inputs: Mapping[str, Any],
    dual_dataset,
    checkpoint: str | None,
) -> DescentState:
    """The dual side of a run: new, that of the `checkpoint` it goes on from, or the problem that the model was trained
    on, where it is only evaluated. The multipliers move on `dual_dataset`, held-out rows, or those of training."""
    args, state, task = trainer.args, trainer.state, layers.task
    inputs = task.short(inputs)
    with probing(task.model):
        outputs = task.model(**task.model_inputs(inputs))
    loss = output_loss(outputs)
    if isinstance(loss, torch.Tensor) and loss.dtype in (torch.bfloat16, torch.float16):
        logger.warning(
            f"The model's loss is computed in {loss.dtype}, whose {3 if loss.dtype == torch.bfloat16 else 4} digits "
            "blur violations; load the model in float32 and set `bf16=True` (mixed precision)."
        )
    saved = checkpoint is not None and os.path.isfile(os.path.join(checkpoint, STATE_NAME))
    known = read_state(checkpoint)[1]["problem"] if saved else None
    known = known or RunFolder("" if trainer.is_in_train else loaded_from(trainer.model)).summary
    chance = known.get("chance_loss")
    if (
        chance is None and saved and args.initial_loss_bound == "auto"
    ):  # of version 0.1, which measured f_0 in warm-up
        chance = known.get("initial_loss_bound")
    loader = trainer.callback_handler.eval_dataloader  # of a step of evaluation by itself `None`
    constant = layers.predictor
    try:
        if constant is None:  # says why
            find_predictor(task, inputs, outputs)
        elif chance is None:
            data = (
                trainer.train_dataset
                if trainer.is_in_train or loader is None
                else getattr(loader, "dataset", None)
            )
            chance = measure_chance(trainer, task, constant, data)
    except ValueError:
        is_constrained = trainer.is_in_train and args.objective not in UNCONSTRAINED
        if is_constrained and chance is None and args.initial_loss_bound == "auto":
            raise
    rows = None
    if trainer.is_in_train and args.objective == "descent":
        trained, rows = split(trainer.train_dataset, args)
        if rows is not None and len(trainer.callback_handler.train_dataloader.dataset) > len(
            trained
        ):
            raise ValueError(
                "`dual_holdout` needs Trainer's own `get_train_dataloader`: give `dual_dataset` instead."
            )
        rows = rows if dual_dataset is None else shuffled(dual_dataset, args)
    held_out = None if rows is None else HeldOutRows(trainer, rows)
    start = 0 if saved else state.global_step
    dual = DescentState(
        args, layers.num_layers, state.max_steps, start, chance, args.device, held_out, constant
    )
    if saved:
        dual.load(checkpoint)
    elif checkpoint is not None:
        logger.warning(
            f"{checkpoint} holds no dual state: the multipliers start afresh, with a warm-up."
        )
    elif not trainer.is_in_train:
        dual.take_saved_problem(known)
    return dual


def loaded_from(model: nn.Module) -> str:
    """The folder or the name on the Hub of a model; empty where unknown."""
    # The name of an adapted model is that of its base.
    config = None if hasattr(model, "peft_config") else getattr(model, "config", None)
    return getattr(config, "_name_or_path", "")


def find_sigma(trainer: Trainer, model: nn.Module, checkpoint: str | None) -> float:
    """The standard deviation of the clean signal: given, saved with the `checkpoint` or the model, or estimated from
    2,048 rows spread over the training data; kept in the model's config. ValueError where none applies: no data can be
    read a second time, or its signal is constant."""
    config = getattr(model, "config", None)
    # Adapters and sharded weights are saved without the model's config.
    saved = RunFolder(checkpoint or "").summary.get("noise_sigma")
    sigma = trainer.args.noise_sigma or saved or getattr(config, "noise_sigma", None)
    if sigma is None:
        data = trainer.train_dataset
        if data is None or is_readable_once(data):
            raise ValueError(
                "The deviation of the clean signal cannot be measured: there is no `train_dataset` that can be read "
                "a second time. Set `noise_sigma`: `descent_config.json` beside a trained model or adapter has it, "
                "and `estimate_sigma` measures it on batches of yours."
            )
        with drawing_apart(trainer, model):  # also for a resumed run to find the same value
            batches = map(trainer._prepare_inputs, collated(trainer, data, SIGMA_ROWS))
            sigma = estimate_sigma(model, batches, partial(reduced, trainer))
        logger.info(f"Deviation of the clean signal: sigma = {sigma:.4g}.")
    if config is not None:
        config.noise_sigma = sigma
    return sigma
