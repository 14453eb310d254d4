"""Everything that depends on the version of a library, found out by what the library has, never by its number.

A function or class here does on an old release what a newer one does by itself. `setup.cfg` names the oldest releases.
Here, too, stand all private names of other libraries that this one uses, with the reason why there is no public one.
`tests/test_compat.py` fails when a new release has lost one, when another is used, and when one is not used any more.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing


# ---- private names ----

# Methods of Trainer that `DescentMixin` overrides.
OVERRIDDEN = {
    "_inner_training_loop": "a new trial or batch size starts with fresh multipliers",
    "_load_best_model": "the multipliers of that checkpoint come back with it",
    "_load_from_checkpoint": "weights whose names on disk differ are loaded under their own names",
    "_prepare_dataset": "TRL's: rows without a label are refused when they are prepared",
    "_prepare_inputs": "TRL's: a cache would hide the borders of packed documents",
    "_save_rng_state": "comes before the trainer state, which stands for a complete save of the dual state, too",
}
# By module, names that are read or called.
PRIVATE_NAMES = {
    "transformers.trainer": {
        "_get_collator_with_removed_columns": "with the columns that TRL keeps",
        "_loss_shifts_labels": "Trainer goes by the name of the class, which is not reliable",
        "_train_batch_size": "what `auto_find_batch_size` has found",
    },
    "transformers.training_args": {"_n_gpu": "set by hand where `nn.DataParallel` is to be off"},
    "transformers.modeling_utils": {
        "_hf_hook": "what accelerate has put around a model",
        "_hf_peft_config_loaded": "whether a model without a wrapper of PEFT has adapters",
        "_loss_function": "the loss that a user has set",
    },
    "transformers.core_model_loading": {
        "_weight_conversions": "under which names a model's weights are saved",
    },
    "transformers.modeling_layers": {
        "_gradient_checkpointing_func": "what a layer calls to checkpoint itself, before 5.23",
    },
    "transformers.configuration_utils": {"_name_or_path": "where a model was loaded from"},
    "transformers.utils.output_capturing": {
        "_output_capturing_hooks_installed": "what marks a model whose hooks are to be taken away",
    },
    "transformers.utils.generic": {
        "_global_mapping": "all mask functions are read at once, in every recorded forward",
        "_local_mapping": "the registry of mask functions has no public way to be restored",
    },
    "trl.trainer.sft_trainer": {
        "_formatting_func": "evaluation data are prepared as TRL does it",
        "_metrics": "where TRL collects what it logs",
        "_skip_prepare_dataset": "whether the user has prepared the data",
        "_tag_names": "the tags of a model card, as TRL's trainers name them",
        "_total_train_tokens": "TRL would count from nothing after a resume",
    },
    "trl.trainer.base_trainer": {"_paper": "the paper of a model card"},
    "accelerate.accelerator": {
        "_is_accelerate_prepared": "an evaluation marks a bare model so, and DDP would not wrap it",
        "_models": "whether a model was prepared already",
    },
    "datasets.arrow_dataset": {
        "_fingerprint": "whether two data sets were made from the same by the same steps",
        "_indices": "which rows of its table a data set has, and in which order",
    },
    "peft.tuners.tuners_utils": {"_disable_adapters": "whether the adapters of a layer are on"},
    "torch.nn.modules.module": {
        "_buffers": "a module's own, to be put back after a conversion",
        "_call_impl": "the entrance of a module outside of its hooks",
        "_compiled_call_impl": "the same, of a compiled one",
        "_forward_hooks": "only who adds a hook has a handle to remove it",
        "_parameters": "as `_buffers`",
    },
    "torch.nn.modules.batchnorm": {"_NormBase": "all norms with running statistics"},
    "torch._dynamo.eval_frame": {"_orig_mod": "the module inside a compiled one"},
    "torch._tensor": {"_version": "whether a replay has written into a recorded tensor"},
    "torch.utils._pytree": {"_pytree": "tensors within any outputs"},
}


# ---- gradient accumulation: transformers before 5.19 ----


def scaled_for_accumulation(
    trainer: Trainer, loss: torch.Tensor, is_scaled: bool, num_items_in_batch: Any
) -> torch.Tensor:
    """The loss of a micro-batch, so that the micro-batches of a step add up to what they should.

    `is_scaled` says that they add up already; else each is a mean, which Trainer has to divide by their number.
    Trainer asks its attribute `loss_is_scaled_for_ga` for that: it is set here, and the loss stays as it is. Older
    ones have a rule of their own instead, so the loss is multiplied by what they get wrong.
    """
    if hasattr(Trainer, "loss_is_scaled_for_ga"):
        trainer.loss_is_scaled_for_ga = is_scaled
        return loss

    is_given_items = num_items_in_batch is not None
    trainer_divides = trainer.compute_loss_func is None
    if trainer.model_accepts_loss_kwargs and is_given_items:
        trainer_divides = False
    if is_scaled and trainer_divides:
        return loss * trainer.current_gradient_accumulation_steps
    if not is_scaled and not trainer_divides:
        return loss / trainer.current_gradient_accumulation_steps
    return loss


@contextlib.contextmanager
def own_scaling(trainer: Trainer) -> Iterator[None]:
    """Within it, `scaled_for_accumulation` may set `loss_is_scaled_for_ga`. Afterwards the trainer has its own value,
    which a subclass may have set."""
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
    class CheckpointingArguments:  # type: ignore[no-redef]
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


CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"


def checkpoint_function(module: nn.Module, handler: Callable) -> Callable | None:
    """The `CHECKPOINT_FUNCTION` of a layer that calls `handler(module, call, *args, **kwargs)` with the checkpointed
    call; `None` if `module` checkpoints nothing, or does so within its `__call__`, as of 5.23.

    Before, `GradientCheckpointingLayer.__call__` checkpoints the call of the module with all of its hooks. What they
    see is without a graph if the checkpoint is reentrant.
    """
    checkpoint = vars(module).get(CHECKPOINT_FUNCTION)
    if checkpoint is None or not isinstance(module, GradientCheckpointingLayer):
        return None
    checkpoints_hooks = "__call__" in vars(GradientCheckpointingLayer)
    if not checkpoints_hooks:
        return None

    def handled(function, *args):
        def call(*args, **kwargs):
            return checkpoint(partial(function.func, **kwargs), *args)

        return handler(module, call, *args, **function.keywords)

    return handled


# ---- captured outputs ----

CAPTURE_MARK = "_output_capturing_hooks_installed"


@contextlib.contextmanager
def capturing_hooks_removed(model: nn.Module) -> Iterator[None]:
    """Remove the hooks of the first forward inside that is asked for hidden states or attentions.

    transformers leaves them on the modules and marks the model. They do nothing in a later forward, but each call of
    them takes time. Without the mark the next such forward adds them anew; were it another, they would stay.
    """
    modules = list(model.modules())
    marked = {id(module) for module in modules if CAPTURE_MARK in vars(module)}
    hooks = {id(module): set(module._forward_hooks) for module in modules}
    try:
        yield
    finally:
        newly_marked = [
            module
            for module in modules
            if CAPTURE_MARK in vars(module) and id(module) not in marked
        ]
        for module in newly_marked:
            delattr(module, CAPTURE_MARK)
        if newly_marked:
            _remove_capturing_hooks(modules, hooks)


def _remove_capturing_hooks(modules: list[nn.Module], kept: Mapping[int, set[int]]) -> None:
    """Remove the hooks of transformers but those `kept`, keys by the id of their module."""
    for module in modules:
        for key, hook in list(module._forward_hooks.items()):
            is_capturing = getattr(hook, "__module__", None) == output_capturing.__name__
            if is_capturing and key not in kept[id(module)]:
                del module._forward_hooks[key]


# ---- configurations within configurations: without `SubConfigSpec` before transformers 5.20 ----


def as_config(
    config: PreTrainedConfig | Mapping[str, Any] | None, model_type: str
) -> PreTrainedConfig:
    """A configuration from its values, which may name their `model_type`; the default one from `None`."""
    if isinstance(config, PreTrainedConfig):
        return config
    values = {} if config is None else dict(config)
    return AutoConfig.for_model(values.pop("model_type", model_type), **values)


# ---- language models: TRL before 1.14 ----


def router_coefficient(trainer: Trainer) -> float | None:
    """By what an `SFTTrainer` weighs the loss of a router; an older one leaves that to the model (`None`)."""
    return getattr(trainer, "router_aux_loss_coef", None)


class UnchunkedLoss:
    """Arguments of an `SFTTrainer` whose token loss "nll" has no variant "chunked_nll", the default of older ones.

    The two are the same number. Newer releases read "chunked_nll" as "nll"; older ones replace the model's head, which
    then gives no logits to read.
    """

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type == "chunked_nll":
            self.loss_type = "nll"


def chunked_divergence() -> type[torch.autograd.Function] | None:
    """TRL's divergence of two models' tokens in tiles of logits; `None` without TRL, or before its 1.16."""
    try:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
    except ImportError:
        return None
    return ChunkedDivergenceFunction


# ---- what a trainer counts from the first training to the last ----


def token_counts(trainer: Trainer) -> dict[str, Any]:
    """The counts of TRL's trainer, by the names of its attributes; empty for other trainers."""
    names = ("_metrics", "_total_train_tokens")
    return {name: vars(trainer)[name] for name in names if name in vars(trainer)}
