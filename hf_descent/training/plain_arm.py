"""Plain training by a trainer that constrains its layers, from the same start, with the same draws and settings."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback

from ..compat import token_counts
from ..constraints.objectives import PlainTraining
from ..evaluation.side_by_side import (
    SideBySide,
    plain_folder,
    seconds_in,
    seconds_of_logs,
)
from ..logs import get_logger
from ..readout import random_state
from ..readout.stack import unwrapped
from ..readout.tape import assigned
from ..runs import RunFolder
from .callbacks import DescentCallback
from .evaluation import chosen_dataset


logger = get_logger(__name__)


def check_can_train_twice(trainer: Trainer) -> None:
    """ValueError if a trainer cannot train its model twice; raised before any training time is spent."""
    if trainer.args.objective_class.is_plain:
        raise ValueError(
            "`objective` is 'erm', which is plain training itself: give the objective to compare with it."
        )

    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "The weights of a sharded model cannot be put back to train it a second time: train with "
            "`objective='erm'` in a run of its own, and compare the runs by `hf-descent compare`."
        )

    has_optimizer = trainer.optimizer is not None or trainer.lr_scheduler is not None
    if has_optimizer and not isinstance(trainer.optimizer, AcceleratedOptimizer):
        raise ValueError(
            "`optimizers` are of one training: give `optimizer_cls_and_kwargs`, or the names in the config, so that "
            "plain training gets its own."
        )


def plain_arguments(trainer: Trainer) -> Any:
    """The trainer's arguments for plain training, in a folder below the run's."""
    args = copy.copy(trainer.args)
    args.objective = PlainTraining.name
    args.output_dir = plain_folder(trainer.args.output_dir)
    args.push_to_hub = False
    args.resume_from_checkpoint = None
    return args


@contextmanager
def plain_arm(trainer: Trainer) -> Iterator[None]:
    """Within it the trainer trains plainly, in a folder of its own.

    Afterwards arguments, weights, random states, callbacks and counts are as before, so that the next training is the
    same as without it. ValueError if [`check_can_train_twice`] raises it.
    """
    check_can_train_twice(trainer)
    model = trainer.model
    start = None
    if trainer.model_init is None:
        start = _trained_tensors(model)
    counts = copy.deepcopy(token_counts(trainer))

    collator = trainer.data_collator
    generators = []
    if hasattr(collator, "generator"):
        generators = [(collator, "generator")]
    own_generator = copy.deepcopy(getattr(collator, "generator", None))
    handler = trainer.callback_handler

    args = plain_arguments(trainer)
    if args.should_save:
        os.makedirs(args.output_dir, exist_ok=True)

    with (
        random_state.preserved(random_state.accelerators(model)),
        assigned(generators, own_generator),
        assigned([(trainer, "args")], args),
        assigned([(handler, "callbacks")], _callbacks_of_its_own(handler.callbacks)),
    ):
        try:
            yield
        finally:
            vars(trainer).update(counts)
            _forget_training(trainer)
            if start is not None:
                _put_back(model, start)


def _trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies on the CPU of the tensors that training changes in a model: trained parameters and buffers."""
    return {
        name: tensor.detach().to("cpu", copy=True)
        for name, tensor in _changing(unwrapped(model)).items()
    }


def _put_back(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _changing(unwrapped(model)).items():
            tensor.copy_(tensors[name])
            tensor.grad = None


def _changing(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    return trained | dict(model.named_buffers())


def _callbacks_of_its_own(callbacks: list[TrainerCallback]) -> list[TrainerCallback]:
    """Copies of `callbacks`, with states of their own. Trackers are left out: they would mix two trainings in one
    run."""
    return [
        copy.copy(callback)
        for callback in callbacks
        if not type(callback).__module__.startswith("transformers.integrations")
        and not isinstance(callback, DescentCallback)
    ]


def _forget_training(trainer: Trainer) -> None:
    """Let the next training make its own optimizer, and wrap the model anew."""
    trainer.optimizer = None
    trainer.lr_scheduler = None
    trainer.model_wrapped = trainer.accelerator.unwrap_model(
        trainer.model_wrapped, keep_fp32_wrapper=False
    )
    trainer.accelerator.free_memory()


def train_both(trainer: Trainer, eval_dataset: Any, settings: Mapping[str, Any]) -> SideBySide:
    """See [`DescentMixin.train_with_plain`]."""
    check_can_train_twice(trainer)
    chosen_dataset(trainer.eval_dataset, eval_dataset)  # raises its errors now, not after training

    with plain_arm(trainer):
        logger.info(f"Plain training comes first, in {trainer.args.output_dir}.")
        trainer.train()
        trainer.save_model()
        trainer.save_state()
        plain = trainer.evaluate_layers(eval_dataset, **settings)
        if trainer.is_world_process_zero():
            RunFolder(trainer.args.output_dir).write({f"layer_profile{plain.ending}": plain})
        trainer.accelerator.wait_for_everyone()

    trainer.train()
    seconds = seconds_of_logs(trainer.state.log_history)
    profile = trainer.evaluate_layers(eval_dataset, **settings)
    plain_seconds = seconds_in(plain_folder(trainer.args.output_dir))
    return SideBySide(plain, profile, trainer.args.objective, (plain_seconds, seconds))
