"""What a run finds out once, before its first step, on a batch that all processes share or on its training data.

[`DescentRun`] keeps what these functions find.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin, broadcast_object_list, send_to_device
from torch import nn
from transformers import Trainer

from ..evaluation.scoring import name_of
from ..logs import get_logger
from ..losses.layerwise import LayerLosses, find_layer_losses
from ..losses.task import TaskLoss
from ..noise.embedding_noise import estimate_sigma
from ..readout.labels import IGNORE_INDEX, names_of_labels
from ..readout.replay import probing
from ..readout.stack import inner_model, unwrapped
from ..runs import RunFolder
from .chance import collated, drawing_apart, is_readable_once
from .document_checks import check_documents
from .records import reduced


logger = get_logger(__name__)

SIGMA_ROWS = 2048  # rows from which the deviation of the clean signal is estimated


def prepared(trainer: Trainer, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """A batch as the model gets it. Random states stay as they were."""
    with probing(unwrapped(trainer.model_wrapped)):
        return trainer._prepare_inputs(batch)


def shared_batch(inputs: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any]:
    """The first process's batch, on every process. If none of its labels count, it gets some that do.

    What is found out on it has to be the same everywhere, and so has the number of forwards that this takes.
    """
    args = trainer.args
    if args.world_size > 1:
        # By way of the CPU, or every process would hold it on the first one's device.
        (inputs,) = broadcast_object_list([send_to_device(inputs, "cpu")])
        inputs = send_to_device(inputs, args.device)

    names = names_of_labels(inputs, trainer.label_names)
    if any(_has_counting_label(inputs[name]) for name in names):
        return inputs
    logger.warning_once(
        f"All labels of the first batch are {IGNORE_INDEX}, so nothing is learned from it. Check how labels are "
        "masked, and the length at which examples are cut."
    )
    labelled = dict(inputs)
    for name in names:
        labelled[name] = torch.zeros_like(inputs[name])
    return labelled


def _has_counting_label(labels: torch.Tensor) -> bool:
    """Whether labels are real numbers, or hold a class that is not ignored. The first token's label is left out, since
    causal models shift it away."""
    if labels.dim() > 1:
        labels = labels[..., 1:]
    return labels.is_floating_point() or bool(labels.ne(IGNORE_INDEX).any())


def leave_compilation_to_layers(trainer: Trainer) -> None:
    """Keep Accelerate from compiling the model: its head runs once per layer, so `find_layers` compiles each layer by
    itself."""
    trainer.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO


def make_ready_for_ddp(trainer: Trainer, readout: Callable | None) -> None:
    """Undo and set what DDP needs before it wraps the model of a trainer. Does nothing without DDP."""
    args = trainer.args
    if args.world_size == 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    # An evaluation before training leaves this mark on the bare model, which DDP would then not wrap: every process
    # would train a model of its own.
    vars(trainer.model).pop("_is_accelerate_prepared", None)

    if readout is None or args.ddp_find_unused_parameters is not None:
        return

    checkpointing = args.activation_checkpointing_kwargs
    if checkpointing and checkpointing.get("use_reentrant"):
        return  # reentrant checkpointing cannot search for unused parameters
    # With a readout the parameters of a pooler are unused, and under checkpointing Trainer does not let DDP look for
    # them.
    trainer.accelerator.ddp_handler.find_unused_parameters = True


def note_readout(model: nn.Module, readout: Callable | None) -> None:
    """Note in the config of a model which function reads it in training. Nothing saves the function: a model that was
    loaded or cut has its own head."""
    config = getattr(inner_model(model), "config", None)
    if readout is not None and config is not None:
        config.custom_readout = name_of(readout)
    elif hasattr(config, "custom_readout"):
        del config.custom_readout


def loss_of_its_own(trainer: Trainer) -> Callable | None:
    """The loss that a trainer computes from the outputs of its model; `None` if the model computes it."""
    if trainer.compute_loss_func is not None:
        return trainer.compute_loss_func
    return trainer.label_smoother


def find_task(
    trainer: Trainer, model: nn.Module, inputs: Mapping[str, Any], readout: Callable | None = None
) -> TaskLoss:
    """The task loss of a trainer's unwrapped model, found out on a batch that all processes share."""
    return TaskLoss.probe(
        model,
        inputs,
        label_names=trainer.label_names,
        loss_fn=loss_of_its_own(trainer),
        readout=readout,
        shifts_labels=trainer._loss_shifts_labels,
        accepts_items=trainer.model_accepts_loss_kwargs,
    )


def takes_items(task: TaskLoss, inputs: Mapping[str, Any]) -> bool:
    """Whether the loss of plain training divides by the items that it is given. It is tried on a batch that all
    processes share."""
    try:
        divides = task.divides_by_items(inputs)
    except Exception:
        # The model cannot score these labels. The first step fails then, unless a subclass has its own `compute_loss`.
        return False
    if not divides:
        logger.info(
            "The loss ignores `num_items_in_batch`: micro-batches are weighted by their items."
        )
    return divides


def find_layers(
    trainer: Trainer,
    model: nn.Module,
    inputs: Mapping[str, Any],
    task: TaskLoss,
    readout: Callable | None,
    is_minimised: bool = True,
) -> LayerLosses:
    """The layer losses of a trainer's model, found and checked on a batch; ValueError if they cannot be read. With
    `torch_compile` the layers are compiled here.

    Training minimises them, or they are only measured beside the loss of plain training (`is_minimised=False`).
    """
    check_documents(model, inputs, trainer)

    trains = False
    token_statistics = False
    if is_minimised:
        trains = trainer.is_in_train
        token_statistics = trainer.logs_tokens

    args = trainer.args
    layers = find_layer_losses(
        model,
        inputs,
        task,
        readout=readout,
        trains=trains,
        token_statistics=token_statistics,
        token_fraction=args.readout_token_fraction,
        same_tokens=args.compares_neighbours,
        seed=args.seed,
    )

    compiler = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    if compiler.backend != DynamoBackend.NO:
        for layer in layers.readout.stack.layers:
            if layer._compiled_call_impl is None:
                layer.compile(**compiler.to_kwargs())
    return layers


def loaded_from(model: nn.Module) -> str:
    """The folder of a model, or its name on the Hub; empty if unknown."""
    if hasattr(model, "peft_config"):  # the name of an adapted model is that of its base
        return ""
    return getattr(getattr(model, "config", None), "_name_or_path", "")


def find_sigma(trainer: Trainer, model: nn.Module, checkpoint: str | None) -> float:
    """The standard deviation of the clean signal, which is then kept in the model's config.

    It is given, saved with the `checkpoint` or the model, or estimated from 2,048 rows spread over the training data.
    ValueError if none of these applies: the data cannot be read a second time, or its signal is constant.
    """
    config = getattr(model, "config", None)
    sigma = trainer.args.noise_sigma
    if sigma is None and checkpoint is not None:
        # Adapters and sharded weights are saved without the model's config.
        sigma = RunFolder(checkpoint).summary.get("noise_sigma")
    if sigma is None:
        sigma = getattr(config, "noise_sigma", None)

    if sigma is None:
        sigma = _estimated_sigma(trainer, model)
        logger.info(f"Noise level 1 is {sigma:.4g}, the standard deviation of the clean signal.")

    if config is not None:
        config.noise_sigma = sigma
    return sigma


def _estimated_sigma(trainer: Trainer, model: nn.Module) -> float:
    data = trainer.train_dataset
    if data is None or is_readable_once(data):
        raise ValueError(
            "The deviation of the clean signal cannot be measured: there is no `train_dataset` that can be read "
            "a second time. Set `noise_sigma`: `descent_config.json` beside a trained model or adapter has it, "
            "and `estimate_sigma` measures it on batches of yours."
        )

    with drawing_apart(trainer, model):  # so that a resumed run finds the same value
        batches = map(trainer._prepare_inputs, collated(trainer, data, SIGMA_ROWS))
        return estimate_sigma(model, batches, partial(reduced, trainer.accelerator))
