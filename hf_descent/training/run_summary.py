"""The contents of `descent_config.json`, which identify a run."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..evaluation.scoring import name_of
from ..evaluation.side_by_side import seconds_of_logs
from ..readout.stack import inner_model, unwrapped
from ..runs import RunFolder, training_arguments
from .evaluation_sets import evaluation_sets
from .origin import fingerprint_of_weights
from .preparation import loaded_from
from .records import RunRecord
from .run import DescentRun


def saved_summary(model: nn.Module, output_dir: str) -> dict[str, Any]:
    """The summary that the training of a model wrote, for a model that is only evaluated; empty if it is not found."""
    output_dir = os.path.abspath(output_dir)  # a relative path could be taken for a name on the Hub
    for folder in (loaded_from(model), output_dir):
        summary = RunFolder(folder).summary
        if summary:
            return summary
    return {}


def run_summary(
    trainer: Trainer, run: DescentRun, command: Mapping[str, Any], readout: Callable | None
) -> dict[str, Any]:
    """The contents of `descent_config.json` for a run: the model, how it was trained (`command` is a part of that),
    what a step costs, and the dual side, or the problem by which plain training is judged.

    For a run that never started, only the facts about the model.
    """
    architecture = type(inner_model(trainer.model)).__name__
    summary = {"model": architecture}

    dual = _dual_summary(run)
    if run.has_started:
        summary.update(_training_summary(trainer, run.record, dual, readout))
        if command:
            summary["command"] = dict(command)
        summary["weights"] = fingerprint_of_weights(unwrapped(trainer.model))

    summary.update(_model_summary(trainer.model, architecture))
    if run.has_started:
        summary.update(dual)
    last_layer_losses = run.references.summary()
    if last_layer_losses:
        summary["last_layer_losses"] = last_layer_losses
    return summary


def _dual_summary(run: DescentRun) -> dict[str, Any]:
    if run.dual is not None:
        return run.dual.summary()
    if run.plain_judge is not None and run.plain_judge.problem is not None:
        return run.plain_judge.problem.state_dict()
    return {}


def _training_summary(
    trainer: Trainer, record: RunRecord, dual: Mapping[str, Any], readout: Callable | None
) -> dict[str, Any]:
    """How a model was trained, and on how many rows; `dual` is the summary of the dual side."""
    args = trainer.args
    summary = {
        "objective": args.objective,
        "noise_gamma": args.noise_gamma,
        "arguments": training_arguments(args),
        "training_started": record.started,
        "origin": record.origin,
    }
    seconds = seconds_of_logs(trainer.state.log_history)
    if record.resumed_from is not None:
        summary["train_seconds"] = None  # the logs have only the time of the last part
    elif seconds is not None:
        summary["train_seconds"] = seconds

    if has_length(trainer.train_dataset):
        summary["train_rows"] = len(trainer.train_dataset)
    if "dual_rows" in dual:
        summary["dual_source"] = "dual_dataset"
    sets = evaluation_sets(trainer.eval_dataset).values()
    if (record.searched or args.eval_strategy != "no") and all(map(has_length, sets)):
        summary["select_rows"] = sum(map(len, sets))

    if readout is not None:
        summary["readout"] = name_of(readout)
    if trainer.compute_loss_func is not None:
        summary["layer_loss_fn"] = name_of(trainer.compute_loss_func)
    return summary


def _model_summary(model: nn.Module, architecture: str) -> dict[str, Any]:
    """What the use of a model needs from its config; an adapter is saved without a config."""
    config = getattr(model, "config", None)
    names = ["noise_sigma"]
    if "Classification" in architecture:
        names += ["num_labels", "id2label", "pooling", "classifier_bias", "pad_token_id"]
    values = {name: getattr(config, name, None) for name in names}
    encoder = getattr(config, "encoder_config", None)
    values["encoder"] = getattr(encoder, "_name_or_path", None)
    return {name: value for name, value in values.items() if value not in (None, "")}
