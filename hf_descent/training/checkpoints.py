"""What a checkpoint holds beside Trainer's files, and which checkpoints are whole.

A process can be killed at any moment of a save; a run resumes from the newest checkpoint that is complete.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from ..configs import DescentArguments
from ..evaluation.scoring import name_of
from ..readout.pooling import POOLINGS
from ..runs import RunFolder, training_arguments
from .records import reduced


logger = logging.get_logger(__name__)

WEIGHTS = ("model", "adapter_model", "pytorch_model")
# Prefixes of the files of an optimizer; "global_step" is DeepSpeed's.
OPTIMIZERS = ("optimizer", "global_step")
# The name of the readable copy of the multipliers in trainer_state.json, among the states of callbacks.
READABLE_STATE = "DescentState"


def resolve(resume_from_checkpoint: str | bool | None, args: DescentArguments) -> str | bool | None:
    """The checkpoint that a run goes on from; `True` stands for the newest complete one.

    Logs what differs between this run and the run of the checkpoint. ValueError if there is no checkpoint, or the one
    named is not complete.
    """
    if not resume_from_checkpoint:
        return resume_from_checkpoint

    # On the first process: another could see a shared disk as it was a moment ago, and go on from elsewhere.
    checkpoint = resume_from_checkpoint
    if checkpoint is True:
        checkpoint = on_first_process(args, newest_complete_checkpoint, args.output_dir)
    else:
        on_first_process(args, check_complete, checkpoint)

    if os.path.isdir(checkpoint):
        _check_readout(checkpoint)
        if args.process_index == 0:
            _report_changes(checkpoint, args)
    return checkpoint


def on_first_process(args: TrainingArguments, function: Callable[[str], Any], folder: str) -> Any:
    """Call `function(folder)` on the first process, and return its result, or raise its error, on all."""
    result = None
    if args.process_index == 0:
        try:
            result = function(folder)
        except Exception as error:  # whatever it is, the others wait
            result = error

    (result,) = broadcast_object_list([result])
    if isinstance(result, Exception):
        raise result
    return result


def _check_readout(checkpoint: str) -> None:
    """ValueError if a checkpoint is of a version in which `readout="mean"` left the model as it was."""
    readout = RunFolder(checkpoint).summary.get("readout")
    if readout in POOLINGS:
        raise ValueError(
            f"{checkpoint} is of a run with `readout={readout!r}` before that became a part of the model: load its "
            "model by `from_pretrained`, and start a training with it."
        )


def _report_changes(checkpoint: str, args: DescentArguments) -> None:
    """Warn if a run resumed from `checkpoint` cannot be the same: without an optimizer, or with changed arguments."""
    if not any(name.startswith(OPTIMIZERS) for name in os.listdir(checkpoint)):
        logger.warning(
            f"{checkpoint} has no optimizer state (`save_only_model`): the optimizer and the learning rate schedule "
            "start anew."
        )
    saved = RunFolder(checkpoint).summary.get("arguments")
    if saved is None:  # of plain Trainer
        return

    present = json.loads(json.dumps(training_arguments(args)))
    changes = []
    for name in sorted(saved.keys() | present.keys()):
        before = saved.get(name, "at its default")
        now = present.get(name, "at its default")
        if before != now:
            changes.append(f"`{name}` was {before} and is {now}")

    if changes:
        logger.warning(f"Resuming from {checkpoint} with changed arguments: {', '.join(changes)}.")


def warn_of_readout(readout: Callable) -> None:
    """Warn, when a model is saved, that the function which reads it is not saved with it."""
    logger.warning(
        f"The readout `{name_of(readout)}` is not saved with the model. A loaded model uses its own head, which was "
        "not trained, so its predictions are not those that were measured."
    )


def mark_incomplete(folder: str) -> None:
    """Remove the trainer state of an earlier save, by which this save would look complete too early."""
    Path(folder, TRAINER_STATE_NAME).unlink(missing_ok=True)


def check_agreement(accelerator: Accelerator, multipliers: torch.Tensor) -> None:
    """RuntimeError if the multipliers, which every process steps by itself, differ from those of the first process.

    All processes raise it, so that none waits for another.
    """
    process = accelerator.process_index
    multipliers = multipliers.to(accelerator.device)
    own_part = torch.zeros_like(multipliers)
    if process == 0:
        own_part = multipliers
    first = reduced(accelerator, own_part)  # [rows]

    if reduced(accelerator, (multipliers != first).any().float()):
        raise RuntimeError(
            f"The multipliers differ between processes: {multipliers.tolist()} on process {process}, "
            f"{first.tolist()} on the first one. Resume from the last complete checkpoint."
        )


@contextmanager
def own_names(trainer: Trainer, folder: str) -> Iterator[None]:
    """Within it, weights are loaded under the model's own names, even if the files in `folder` have the Hub's names.

    `save_pretrained` writes the Hub's names (for the layers of a ViT, or the experts of a mixture), and
    `from_pretrained` knows them. Trainer would not load such weights (huggingface/transformers#48805).
    """
    model = getattr(trainer.model, "_orig_mod", trainer.model)  # it may be compiled
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    files = []
    if isinstance(model, PreTrainedModel) and not is_sharded:
        files = list(Path(folder).glob("model*.safetensors"))
    names = set().union(*(safe_open(file, framework="pt").keys() for file in files))
    if not files or names <= model.state_dict().keys():
        yield
        return

    weights = _weights_by_own_names(model, files)

    def replace_loaded(module, state_dict, prefix, *_):
        """Replace what Trainer has read from a file, just before the model takes it."""
        state_dict.clear()
        state_dict.update({prefix + name: weight for name, weight in weights.items()})

    with model.register_load_state_dict_pre_hook(replace_loaded):
        yield


def newest_complete_checkpoint(output_dir: str) -> str:
    """The last checkpoint of the last training in `output_dir`; ValueError if there is none.

    A checkpoint says when its training started, and that tells trainings apart: copied files need not keep their
    times. Checkpoints of plain `Trainer` do not say it, so the time of their files counts. Incomplete folders, left by
    a killed process, are passed over and named in the log.
    """
    checkpoints = []
    for folder in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if not (step.isdecimal() and folder.is_dir()):
            continue
        try:
            started = (folder / TRAINER_STATE_NAME).stat().st_mtime
            started = RunFolder(folder).summary.get("training_started", started)
        except (OSError, ValueError):
            started = math.inf  # incomplete
        checkpoints.append((started, int(step), str(folder)))

    # The newest comes first: older ones, which may be large, need not be read.
    for *_, folder in sorted(checkpoints, reverse=True):
        fault = fault_of(folder)
        if fault is None:
            return folder
        logger.warning(f"Passing over the incomplete checkpoint {folder}: {fault}.")
    raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")


def check_complete(checkpoint: str) -> None:
    """ValueError if a checkpoint folder is incomplete."""
    if not os.path.isdir(checkpoint):
        return
    fault = fault_of(checkpoint)
    if fault is not None:
        raise ValueError(
            f"The checkpoint is not complete: {fault}. Resume from another one, or with `True`."
        )


def fault_of(checkpoint: str) -> str | None:
    """What is missing in a checkpoint folder or cannot be read, in a sentence. `None` if the folder is complete: it
    has weights, and the trainer state, which is the last file of a save."""
    folder = Path(checkpoint)
    for name in sorted({TRAINER_STATE_NAME, *(path.name for path in folder.glob("*.json"))}):
        try:
            json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{folder / name} is missing or damaged ({error})"

    # The weights of FSDP and DeepSpeed lie in folders of their own.
    if not any(path.is_dir() or path.name.startswith(WEIGHTS) for path in folder.iterdir()):
        return f"{folder} holds no model weights"
    return None


def _weights_by_own_names(model: PreTrainedModel, files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """The weights in a checkpoint's `files` under the names of this model, which may have been changed by hand since
    it was loaded. They are converted as `from_pretrained` does. ValueError if they are those of another model."""
    saved = {}
    for file in files:
        for name, weight in load_file(file).items():
            saved[name.removeprefix("_orig_mod.")] = weight

    with _own_tensors_put_back(model):
        # The conversion loads the weights into this model. They are read from it below.
        config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
        info, _ = convert_and_load_state_dict_in_model(model, saved, config)
        weights = model.state_dict()

    misfits = info.conversion_errors
    if not misfits:
        misfits = sorted(info.mismatched_keys)
    if misfits:
        raise ValueError(
            f"The weights in {files[0].parent} are not those of this {type(model).__name__}: {misfits}."
        )
    return {name: weight for name, weight in weights.items() if name not in info.missing_keys}


@contextmanager
def _own_tensors_put_back(model: PreTrainedModel) -> Iterator[None]:
    """Within it, a conversion may replace the tensors of a model. Afterwards the model has its own again, which are
    those that the optimizer knows."""
    modules = list(model.modules())
    parameters = [dict(module._parameters) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    conversions = getattr(model, "_weight_conversions", None)
    try:
        yield
    finally:
        for module, own_parameters, own_buffers in zip(modules, parameters, buffers):
            module._parameters.update(own_parameters)
            module._buffers.update(own_buffers)
        model._weight_conversions = conversions
