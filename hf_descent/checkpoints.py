"""Which checkpoints are whole: a process can be killed at any moment of a save."""

import json
import os
import zipfile
from collections.abc import Iterator

from safetensors import SafetensorError, safe_open
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging


logger = logging.get_logger(__name__)


def newest_complete_checkpoint(output_dir: str) -> str:
    """The checkpoint of `output_dir` that was completed last; ValueError where there is none.

    The trainer state is the last file of a save, so its time is the time of completion. Incomplete folders, left by a
    killed process, are passed over and named in the log.
    """
    complete = []
    for entry in os.scandir(output_dir) if os.path.isdir(output_dir) else ():
        step = entry.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if not (entry.is_dir() and step.isdecimal() and step != entry.name):
            continue
        if fault := next(faults(entry.path), None):
            logger.warning(f"Passing over the incomplete checkpoint {entry.path}: {fault}.")
        else:
            written = os.stat(os.path.join(entry.path, TRAINER_STATE_NAME)).st_mtime_ns
            complete.append((written, int(step), entry.path))
    if not complete:
        raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")
    return max(complete)[-1]


def faults(checkpoint: str) -> Iterator[str]:
    """What is missing or damaged in a checkpoint folder, one sentence each; nothing for a complete one."""
    state = os.path.join(checkpoint, TRAINER_STATE_NAME)
    try:
        with open(state, encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError) as error:
        yield f"{state} is missing or damaged ({error})"
    names = set(os.listdir(checkpoint))
    if SCHEDULER_NAME in names and not any(name.startswith(OPTIMIZER_NAME.split(".")[0]) for name in names):
        yield f"{os.path.join(checkpoint, OPTIMIZER_NAME)} is missing"
    yield from _missing_weights(checkpoint, names)
    for name in sorted(names):
        path = os.path.join(checkpoint, name)
        if os.path.isfile(path) and _is_damaged(path):
            yield f"{path} is damaged"


def _missing_weights(checkpoint: str, names: set[str]) -> Iterator[str]:
    for name in names:
        if name.endswith(".index.json"):
            try:
                with open(os.path.join(checkpoint, name), encoding="utf-8") as file:
                    shards = set(json.load(file)["weight_map"].values())
            except (OSError, ValueError, KeyError) as error:
                yield f"{os.path.join(checkpoint, name)} is damaged ({error})"
                continue
            for shard in sorted(shards - names):
                yield f"{os.path.join(checkpoint, shard)} is missing"
    # Sharded (FSDP, DeepSpeed) weights lie in folders of their own.
    weights = ("model", "adapter_model", "pytorch_model")
    folders = any(os.path.isdir(os.path.join(checkpoint, name)) for name in names)
    if not folders and not any(name.startswith(weights) and not name.endswith(".tmp") for name in names):
        yield f"{checkpoint} holds no model weights"


def _is_damaged(path: str) -> bool:
    """Whether a weights or state file is cut short; both formats show it without being read in full."""
    if path.endswith(".safetensors"):
        try:
            with safe_open(path, framework="pt"):
                return False
        except (SafetensorError, OSError):
            return True
    return path.endswith((".pt", ".pth", ".bin")) and not zipfile.is_zipfile(path)
