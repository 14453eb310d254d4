"""Everything that depends on the version of a library, found out by what the library has, never by its number.

A function or class here does on an old release what a newer one does by itself. `setup.cfg` names the oldest releases.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer


# ---- gradient accumulation: transformers before 5.19 ----


def scaled_for_accumulation(
    trainer: Trainer, loss: torch.Tensor, is_scaled: bool, num_items_in_batch: Any
) -> torch.Tensor:
    """The loss of a micro-batch, so that the micro-batches of a step add up to what they should.

    `is_scaled` says that they add up already; else each is a mean, which Trainer has to divide by their number.
    Trainer asks its attribute `loss_is_scaled_for_ga` for that. Older ones have a rule of their own instead.
    """
    if hasattr(Trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = is_scaled
        return loss

    takes_items = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    trainer_divides = not takes_items and trainer.compute_loss_func is None
    if is_scaled and trainer_divides:
        return loss * trainer.current_gradient_accumulation_steps
    if not is_scaled and not trainer_divides:
        return loss / trainer.current_gradient_accumulation_steps
    return loss


@contextlib.contextmanager
def own_scaling(trainer: Trainer) -> Iterator[None]:
    """A micro-batch, after which the trainer says of its loss what it said before: a subclass may have its own."""
    own = getattr(trainer, "loss_is_scaled_for_ga", None)
    try:
        yield
    finally:
        trainer.loss_is_scaled_for_ga = own


# ---- activation checkpointing: "gradient checkpointing" before transformers 5.23 ----

_HAS_NEW_NAMES = "activation_checkpointing" in {
    argument.name for argument in dataclasses.fields(TrainingArguments)
}

if _HAS_NEW_NAMES:

    class CheckpointingArguments:
        """Nothing: `TrainingArguments` has `activation_checkpointing` itself."""

else:

    @dataclass
    class CheckpointingArguments:
        """`activation_checkpointing` and its keyword arguments, as newer `TrainingArguments` have them."""

        activation_checkpointing: bool | None = field(
            default=None, metadata={"help": "The newer name of `gradient_checkpointing`."}
        )
        activation_checkpointing_kwargs: dict[str, Any] | str | None = field(
            default=None, metadata={"help": "The newer name of `gradient_checkpointing_kwargs`."}
        )

        def __post_init__(self):
            names = ("activation_checkpointing", "activation_checkpointing_kwargs")
            for name in names:
                if getattr(self, name) is not None:
                    setattr(self, name.replace("activation", "gradient"), getattr(self, name))
            super().__post_init__()
            for name in names:
                setattr(self, name, getattr(self, name.replace("activation", "gradient")))


def enable_checkpointing(model: PreTrainedModel, options: Mapping[str, Any] | None) -> None:
    """Checkpoint the activations of a model as Trainer does with these `activation_checkpointing_kwargs`."""
    options = dict(options or {})
    others = {}
    if "every_n_layers" in options:
        others["every_n_layers"] = options.pop("every_n_layers")

    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is None:
        enable = model.gradient_checkpointing_enable
    enable(options or None, **others)


def disable_checkpointing(model: PreTrainedModel) -> None:
    """Keep all activations of a model."""
    if hasattr(model, "activation_checkpointing_disable"):
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"


def checkpoint_function(module: nn.Module, handler: Callable) -> Callable | None:
    """The `CHECKPOINT_FUNCTION` of a layer that calls `handler(module, call, *args, **kwargs)` with the checkpointed
    call; `None` where `module` checkpoints nothing, or does so within its `__call__`, as of 5.23.

    Before, `GradientCheckpointingLayer.__call__` checkpoints the call of the module with all of its hooks. What they
    see is without a graph if the checkpoint is reentrant.
    """
    checkpoints_hooks = "__call__" in vars(GradientCheckpointingLayer)
    is_layer = isinstance(module, GradientCheckpointingLayer)
    checkpoint = vars(module).get(CHECKPOINT_FUNCTION)
    if not (checkpoints_hooks and is_layer and checkpoint):
        return None

    def handled(function, *args):
        def call(*args, **kwargs):
            return checkpoint(partial(function.func, **kwargs), *args)

        return handler(module, call, *args, **function.keywords)

    return handled


# ---- configurations within configurations: without `SubConfigSpec` before transformers 5.20 ----


def as_config(
    config: PreTrainedConfig | Mapping[str, Any] | None, model_type: str
) -> PreTrainedConfig:
    """A configuration from its values, which may name their `model_type`; the default one from `None`."""
    if isinstance(config, PreTrainedConfig):
        return config
    values = dict(config or {})
    return AutoConfig.for_model(values.pop("model_type", model_type), **values)


# ---- language models: TRL before 1.14 ----


def router_coefficient(trainer: Trainer) -> float:
    """By what an `SFTTrainer` weighs the loss of a router; older ones have it in their arguments alone."""
    return getattr(trainer, "router_aux_loss_coef", trainer.args.router_aux_loss_coef)


class UnchunkedLoss:
    """Arguments of an `SFTTrainer` whose token loss "nll" has no variant "chunked_nll", the default of older ones.

    The two are the same number. Newer releases read "chunked_nll" as "nll"; older ones replace the model's head, which
    then gives no logits to read.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type == "chunked_nll":
            self.loss_type = "nll"
