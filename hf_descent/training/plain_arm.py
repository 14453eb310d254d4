"""Plain training in a trainer that constrains its layers: from the same start, with the same draws and settings."""

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback

from ..compat import token_counts
from ..constraints.objectives import PlainTraining
from ..evaluation.profiles import LayerProfile
from ..evaluation.side_by_side import (
    SideBySide,
    is_plain_run_of,
    of_same_data,
    plain_folder,
    seconds_in,
    seconds_of_logs,
    unlike,
)
from ..logs import get_logger
from ..readout import random_state
from ..readout.stack import unwrapped
from ..readout.tape import assigned
from ..runs import RunFolder, training_arguments
from .callbacks import DescentCallback
from .checkpoints import newest_complete_checkpoint, on_first_process
from .evaluation import chosen_dataset
from .origin import origin_of


logger = get_logger(__name__)


def check_can_train_twice(trainer: Trainer) -> None:
    """ValueError where a trainer cannot train its model plainly first, before any training time is spent."""
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
    """Within it the trainer trains plainly, in a folder of its own; after it all is as before: arguments, weights,
    random states, callbacks and counts, so that the next training is the one that it would have been.

    ValueError as of [`check_can_train_twice`].
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
    """Copies, on the CPU, of what training changes in a model: trained parameters, and buffers."""
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
    """Copies, with states of their own. Trackers, which would mix two trainings in one run, are left out."""
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


def train_both(
    trainer: Trainer,
    resume: str | bool | None,
    eval_dataset: Any,
    settings: Mapping[str, Any],
    readout: Callable | None,
) -> SideBySide:
    """See [`DescentMixin.train_with_plain`]."""
    check_can_train_twice(trainer)
    chosen_dataset(trainer.eval_dataset, eval_dataset)  # raises now what it would after training

    plain = None
    if not is_finished(trainer, resume, readout):
        with plain_arm(trainer):
            logger.info(f"Plain training comes first, in {trainer.args.output_dir}.")
            trainer.train(plain_checkpoint(trainer, resume, readout))
            trainer.save_model()
            trainer.save_state()
            plain = trainer.evaluate_layers(eval_dataset, **settings)
            if trainer.is_world_process_zero():
                RunFolder(trainer.args.output_dir).write({f"layer_profile{plain.ending}": plain})
            trainer.accelerator.wait_for_everyone()

    checkpoint = where_to_go_on(trainer, resume)
    trainer.train(checkpoint)
    seconds = None  # a resumed training logs the time of its last part alone
    if not checkpoint:
        seconds = seconds_of_logs(trainer.state.log_history)
    profile = trainer.evaluate_layers(eval_dataset, **settings)
    folder = plain_folder(trainer.args.output_dir)
    if plain is None:  # finished before
        measured = RunFolder(folder).results(LayerProfile, "layer_profile*")
        plain = of_same_data(measured, profile)
    if plain is None:
        raise ValueError(
            "The finished plain run was measured on other examples: remove its folder "
            f"{folder!r}, and resume."
        )

    return SideBySide(plain, profile, trainer.args.objective, (seconds_in(folder), seconds))


def where_to_go_on(trainer: Trainer, resume: str | bool | None) -> str | bool | None:
    """What `train` takes to resume one arm of two, in the present output folder: `None` where that arm has no complete
    checkpoint, since the other may have been the one that was killed."""
    if resume is not True:
        return resume
    return on_first_process(trainer.args, _newest_checkpoint, trainer.args.output_dir)


def _newest_checkpoint(folder: str) -> str | None:
    with suppress(ValueError):
        return newest_complete_checkpoint(folder)
    return None


def plain_checkpoint(
    trainer: Trainer, resume: str | bool | None, readout: Callable | None = None
) -> str | None:
    """What `train` takes to resume the plain arm, which the trainer is set to: its newest complete checkpoint, where
    it started as the arm does that comes next."""
    checkpoint = where_to_go_on(trainer, bool(resume))
    if not checkpoint:
        return None

    before = origin_of(trainer, readout, checkpoint)
    present = origin_of(trainer, readout)

    def difference(_: str) -> str | None:
        return unlike(before, present)

    why = on_first_process(trainer.args, difference, checkpoint)
    if why is None:
        return checkpoint
    logger.warning(f"Plain training starts anew, and not from {checkpoint}: {why}.")
    return None


def is_finished(
    trainer: Trainer, resume: str | bool | None, readout: Callable | None = None
) -> bool:
    """Whether the folder of the trainer's plain training holds the results of one that need not be repeated: with the
    same settings, from the same weights and on the same rows as the training that is resumed.

    ValueError where that has a checkpoint, and plain training that starts now would not start as it did.
    """
    if not resume:
        return False

    checkpoint = where_to_go_on(trainer, resume)
    origin = origin_of(trainer, readout, checkpoint)
    present = origin_of(trainer, readout)
    summary = {"arguments": training_arguments(trainer.args), "origin": origin}

    def has_results(folder: str) -> bool:
        run = RunFolder(folder)
        has_profile = run.path.is_dir() and bool(run.fresh("layer_profile*.json"))
        if has_profile and is_plain_run_of(summary, run):
            return True
        why = unlike(origin, present)
        if why is not None:
            raise ValueError(
                f"Plain training cannot be compared with {checkpoint}: {why}. Start both anew, without "
                "`resume_from_checkpoint`, or go on without plain training."
            )
        return False

    return on_first_process(trainer.args, has_results, plain_folder(trainer.args.output_dir))
