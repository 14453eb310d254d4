"""Checks of a run that reads its layers, made before any training time is spent."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerate.utils import DynamoBackend
from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..configs import DescentArguments
from ..constraints.arguments import check_constrained_layers, check_targets
from ..constraints.problem import AT_CHANCE
from ..constraints.state import DualState
from ..logs import get_logger
from ..readout.pooling import ONE_TOKEN, reads_one_token
from ..readout.replay import Readout
from ..readout.stack import inner_model
from .evaluation_sets import evaluation_sets, set_of_metric


logger = get_logger(__name__)


@contextmanager
def for_verdicts() -> Iterator[None]:
    """Within it, errors about the layers of plain training say how to do without reading them."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            f"{error} Evaluations of plain training read the layers if you state constraints (`descent_alpha`, "
            "`exit_targets`, `loss_targets`) or choose the best model by them (`metric_for_best_model`): leave these "
            "out if you do not need the layers."
        ) from error


def check_judged(trainer: Trainer, loss_method) -> None:
    """ValueError if evaluations of plain training cannot read the layers; see [`check_supported`]."""
    check_supported(trainer, loss_method)
    own_method = type(trainer).compute_loss
    if not own_method.__module__.startswith("hf_descent."):
        _check_loss_method(own_method)
    if trainer.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ValueError("The model is compiled: set `torch_compile=False`.")


def check_supported(trainer: Trainer, loss_method) -> None:
    """ValueError if this run's layers cannot be read. `loss_method` is `compute_loss` of the class behind the
    mixin."""
    _check_loss_method(loss_method)
    _check_evaluation_sets(trainer)
    _check_fine_tuning(trainer)
    _check_processes(trainer)
    _check_compilation(trainer)
    _check_adapters(trainer)


def _check_loss_method(loss_method) -> None:
    if loss_method.__module__ in ("transformers.trainer", "trl.trainer.sft_trainer"):
        return
    raise ValueError(
        f"`{loss_method.__qualname__}` is a loss that cannot be taken at every layer. Give it as "
        "`layer_loss_fn(outputs, labels, num_items_in_batch=None)`."
    )


def _check_evaluation_sets(trainer: Trainer) -> None:
    for name, rows in evaluation_sets(trainer.eval_dataset).items():
        if has_length(rows) and not len(rows):
            raise ValueError(
                f"`{name}` has no examples to evaluate on: give some, or leave it out."
            )


def _check_fine_tuning(trainer: Trainer) -> None:
    """Check settings that only TRL's trainer has."""
    args = trainer.args
    if getattr(args, "loss_type", "nll") != "nll":
        raise ValueError(
            f"`loss_type` is {args.loss_type!r}, which cannot be computed at every layer; use 'nll', or "
            "`objective='erm'`."
        )

    if not getattr(args, "eval_packing", False):
        return
    if not trainer.padding_free and args.packing_strategy != "wrapped":
        raise ValueError(
            "`eval_packing=True` without `packing` lets documents see those before them: set `padding_free=True`, or "
            "`eval_packing=False`."
        )


def _check_processes(trainer: Trainer) -> None:
    """Check how training is spread over devices."""
    args = trainer.args
    if args.n_gpu > 1:
        raise ValueError(
            f"`nn.DataParallel` over {args.n_gpu} devices in one process is not supported: the layer losses of its "
            "replicas are lost. Use `accelerate launch` or `torchrun` (one process a device), or set "
            "`CUDA_VISIBLE_DEVICES` to one device."
        )

    if args.world_size > 1 and args.ddp_static_graph:
        raise ValueError(
            "`ddp_static_graph=True` is not supported: processes would not share all gradients. Leave it out."
        )

    if trainer.is_fsdp_enabled:
        plugin = trainer.accelerator.state.fsdp_plugin
        if getattr(plugin, "fsdp_version", 1) < 2:
            raise ValueError(
                "FSDP1 is not supported, because it cannot run the head on every layer; set `fsdp_version: 2`."
            )

    sizes = {
        "Tensor": trainer.get_tp_size(),
        "Context": trainer.get_cp_size(),
        "Sequence": trainer.get_sp_size(),
    }
    for name, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{name} parallelism is not supported: a layer's loss needs all tokens and classes of an example in "
                "one process. Use data parallelism: DDP, FSDP2 or DeepSpeed ZeRO."
            )


def _check_compilation(trainer: Trainer) -> None:
    dynamo = trainer.accelerator.state.dynamo_plugin
    if dynamo.backend != DynamoBackend.NO and trainer.args.gradient_checkpointing:
        raise ValueError(
            "`torch_compile=True` has no effect on layers that `gradient_checkpointing=True` runs: set one of them to "
            "`False`."
        )


def _check_adapters(trainer: Trainer) -> None:
    for adapter in getattr(trainer.model, "peft_config", {}).values():
        if getattr(adapter, "orth_reg_weight", 0):
            raise ValueError(
                "AdaLoRA's penalty on its matrices would count as a loss of every layer; set `orth_reg_weight=0` in "
                "its config, or use LoRA."
            )
        if adapter.is_prompt_learning and adapter.peft_type != "PREFIX_TUNING":
            raise ValueError(
                f"{type(adapter).__name__} puts trained embeddings before the tokens, which the losses of the layers "
                "do not expect: use LoRA or prefix tuning, or train it plainly, with `objective='erm'`."
            )


def report_own_averages(args: DescentArguments) -> None:
    """Log once if processes average over their own items in plain training, but not under other objectives."""
    if args.world_size > 1 and not args.average_tokens_across_devices:
        logger.warning_once(
            "`average_tokens_across_devices=False` makes `objective='erm'` divide by the items of each process, as "
            "Trainer does; all other objectives divide by those of all processes. Leave it out to compare them."
        )


def check_targeted_layers(trainer: Trainer) -> None:
    """ValueError if the arguments name layers that the model does not have, as far as its config tells."""
    args = trainer.args
    config = getattr(inner_model(trainer.model), "config", None)
    depth = getattr(config, "num_hidden_layers", None)
    # For an encoder-decoder, the config tells the depth of the encoder.
    if not isinstance(depth, int) or getattr(config, "is_encoder_decoder", False):
        return
    for name in ("exit_targets", "loss_targets"):
        check_targets(name, getattr(args, name), depth)
    check_constrained_layers(args.constrained_layers, depth)


def check_one_loss(layer_loss_fn, compute_loss_func) -> None:
    """ValueError if a trainer is given both, TypeError if `layer_loss_fn` is no function."""
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
    wanted = "labels"
    if label_names:
        wanted = ", ".join(label_names)
    return ValueError(
        f"A training batch has no tensor of labels (looked for {wanted}; found {', '.join(inputs)}); every layer's "
        f"loss needs it. Columns of text, and those that {type(inner_model(model)).__name__} does not take, were "
        "dropped: give labels as numbers, to a model with a head (`AutoModelFor...`). Labels that `_prepare_inputs` "
        "or `compute_loss` adds come too late to be counted: add them in the collator."
    )


def without_layers(trainer: Trainer) -> ValueError:
    """The error for a training step whose loss did not pass through the mixin."""
    return ValueError(
        f"`{type(trainer).__name__}.compute_loss` did not come to `DescentMixin.compute_loss`, so no layer was read. "
        "Give your loss as `layer_loss_fn(outputs, labels, num_items_in_batch=None)` instead."
    )


def report_layers_at_chance(readout: Readout, dual: DualState, steps: int) -> None:
    """Log once that early layers are at chance though the last one has learned, if the head reads one token of a text.

    `steps` have been trained. It is looked at from the end of the warm-up on, and not before a tenth of the run.
    """
    if dual.problem is None or steps < max(dual.active_from, dual.max_steps // 10):
        return
    if not reads_one_token(readout.model, readout.readout):
        return

    mean_losses = dual.settled().averages.means
    at_chance = (mean_losses >= AT_CHANCE * dual.problem.chance).tolist()

    if any(at_chance) and not at_chance[-1] and dual.is_first_report("layers at chance"):
        logger.info(
            f"After {steps} steps {sum(at_chance)} of {len(at_chance)} layers are still at chance. {ONE_TOKEN}"
        )


def check_best_metric(trainer: Trainer) -> None:
    """ValueError if there are several evaluation sets, and the metric that chooses the best checkpoint belongs to none
    of them."""
    args = trainer.args
    sets = trainer.eval_dataset
    evaluates_by_itself = not type(trainer).evaluate.__module__.startswith("hf_descent.")
    if args.eval_strategy == "no" or not isinstance(sets, dict) or evaluates_by_itself:
        return

    if not args.metric_for_best_model:
        return
    if set_of_metric(sets, args.metric_for_best_model) is not None:
        return

    chosen_by = args.metric_for_best_model.removeprefix("eval_")
    raise ValueError(
        f"`metric_for_best_model` is {args.metric_for_best_model!r} (`load_best_model_at_end` takes 'loss' by "
        f"default), but each of the evaluation sets {', '.join(sets)} has metrics of its own: name one, such as "
        f"'{next(iter(sets))}_{chosen_by}'."
    )
