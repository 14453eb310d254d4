"""What a checkpoint holds beside Trainer's files, and which checkpoints are whole.

A process can be killed at any moment of a save; a run resumes from the newest checkpoint that is complete.
"""

import glob
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, has_length
from transformers.utils import logging

from ..configs import BY_RANK, OF_LAYERS
from ..constraints.state import STATE_NAME
from ..files import whole_file
from ..readout.stack import inner_model
from ..runs import RunFolder, training_arguments
from .selection import best_candidate


logger = logging.get_logger(__name__)

WEIGHTS = ("model", "adapter_model", "pytorch_model")
OPTIMIZERS = ("optimizer", "global_step")  # the beginnings of their names, the latter with DeepSpeed
CHECKSUMS_NAME = "descent_checksums.json"
CHECKED = (".safetensors", ".pt", ".pth", ".bin", ".distcp")  # what resuming reads, beside JSON, which people may edit
# What Trainer and DeepSpeed write with `torch.save`; a folder may hold others' files of the same endings.
TORCH_FILES = (
    "adapter_model", "bf16_zero", "mp_rank", "optimizer", "pytorch_model", "rng_state", "scaler", "scheduler",
    "training_args", "zero_pp_rank",
)  # fmt: skip


class CheckpointMixin:
    """The dual side of a run in Trainer's checkpoints: saved with the optimizer, resumed exactly.

    Attributes:
        command (`dict`): what makes this way of training another beside the trainer's arguments, in JSON values; kept
            in `descent_config.json`, by which [`compare`] tells groups of runs apart.
    """

    command: Mapping[str, Any] = MappingProxyType({})

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        # On the first process: another could see a shared disk as it was a moment ago, and go on from elsewhere.
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._on_first_process(newest_complete_checkpoint, self.args.output_dir)
        elif resume_from_checkpoint:
            self._on_first_process(check_complete, resume_from_checkpoint)
        if resume_from_checkpoint and self.args.process_index == 0 and os.path.isdir(resume_from_checkpoint):
            self._report_changes(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            # Trainer removes NEFTune's hook only when training ends well.
            if (handle := getattr(self, "neftune_hook_handle", None)) is not None:
                handle.remove()

    def _on_first_process(self, function: Callable[[str], Any], folder: str) -> Any:
        """What `function` gives for `folder` on the first process, or raises there, on all of them."""
        found = None
        if self.args.process_index == 0:
            try:
                found = function(folder)
            except Exception as error:  # whatever it is, the others wait
                found = error
        found = broadcast_object_list([found])[0]
        if isinstance(found, Exception):
            raise found
        return found

    def _report_changes(self, checkpoint: str) -> None:
        """Warn of what makes a run resumed from `checkpoint` another one: no optimizer, or changed arguments."""
        if not any(name.startswith(OPTIMIZERS) for name in os.listdir(checkpoint)):
            logger.warning(
                f"{checkpoint} holds no optimizer (see `save_only_model`): it and the learning rate's schedule start "
                "afresh."
            )
        saved = RunFolder(checkpoint).summary.get("arguments")
        if saved is None:  # of plain Trainer
            return
        now, default = training_arguments(self.args), "at its default"
        changes = [
            f"`{name}` was {saved.get(name, default)} and is {now.get(name, default)}"
            for name in sorted(saved.keys() | now.keys())
            if saved.get(name, default) != now.get(name, default)
        ]
        if changes:
            logger.warning(f"Resuming from {checkpoint} with changed arguments: {', '.join(changes)}.")

    def _check_choice(self) -> None:
        """ValueError where the best checkpoint is to be chosen by what no evaluation of this run will have."""
        chosen_by = self.args.metric_for_best_model or ""
        stops_early = any(isinstance(callback, EarlyStoppingCallback) for callback in self.callback_handler.callbacks)
        if stops_early and chosen_by in BY_RANK:
            raise ValueError(
                "`metric_for_best_model` is 'best_candidate', a rank among evaluations; EarlyStoppingCallback needs "
                "a metric: choose by 'feasible_score'."
            )
        if self.args.eval_strategy == "no":
            return
        metric = chosen_by.removeprefix("eval_")
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        of_sets = (metric, *(metric.removeprefix(f"{name}_") for name in sets))
        if any(map(OF_LAYERS.fullmatch, of_sets)) and not self._reads_layers:
            raise ValueError(
                f"`metric_for_best_model` is {chosen_by!r}, but `objective='erm'` reads no layers: choose by the loss."
            )
        if OF_LAYERS.fullmatch(metric) and sets:
            metric = "feasible_score" if chosen_by in BY_RANK else metric
            of_one = " or ".join(repr(f"{name}_{metric}") for name in sets)
            raise ValueError(
                f"`metric_for_best_model` is {chosen_by!r}, but with several `eval_dataset` a metric is of one of "
                f"them: choose by {of_one}, or give one `eval_dataset`."
            )

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        self._save_dual_state(output_dir)

    def _save_dual_state(self, output_dir) -> None:
        if self._state is not None:
            self._check_agreement()
            self._state.save(output_dir, write=self.args.should_save)
            # For people to read, in trainer_state.json.
            self.state.stateful_callbacks["DescentState"] = self._state.summary()

    def _determine_best_metric(self, metrics, trial):
        chosen_by = self.args.metric_for_best_model or ""
        if chosen_by.endswith("max_violation") and self._state is not None and self._state.problem is None:
            return False  # the constraints are not known yet
        if chosen_by not in BY_RANK:
            return super()._determine_best_metric(metrics, trial)
        if "eval_feasible" not in metrics:
            raise ValueError(
                f"`metric_for_best_model` is {self.args.metric_for_best_model!r}, but the evaluation has no "
                "`eval_max_violation`: give an `eval_dataset` with labels."
            )
        # A rank among all evaluations so far, this one included, so that the best one can also change backwards.
        seen = {entry["step"]: entry for entry in self.state.log_history if "eval_max_violation" in entry}
        if self.args.save_strategy != SaveStrategy.NO:
            # To one whose checkpoint is there, on the first process: others may not see its disk.
            folder = os.path.join(self._get_output_dir(trial), PREFIX_CHECKPOINT_DIR)
            kept = [step for step in seen if step == self.state.global_step or os.path.isdir(f"{folder}-{step}")]
            seen = {step: seen[step] for step in broadcast_object_list([kept])[0]}
        if not seen:
            return False  # the constraints are not known yet
        losses, violations = zip(*((entry["eval_loss"], entry["eval_max_violation"]) for entry in seen.values()))
        best = best_candidate(losses, violations)
        self.state.best_global_step, self.state.best_metric = list(seen)[best], losses[best]
        is_new = self.state.best_global_step == self.state.global_step
        if not is_new and self.args.save_strategy != SaveStrategy.NO:
            # Trainer names the best checkpoint where it saves one, which it need not do now.
            self.state.best_model_checkpoint = f"{folder}-{self.state.best_global_step}"
        return is_new

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        # The trainer state comes next, by one process, and stands for a complete save by all.
        self.accelerator.wait_for_everyone()
        self._save_checksums(output_dir)

    def _save_checksums(self, output_dir) -> None:
        if self.args.should_save:
            found = {"step": self.state.global_step, "files": checksums(Path(output_dir))}
            with whole_file(os.path.join(output_dir, CHECKSUMS_NAME)) as file:
                json.dump(found, file, indent=2)

    def _check_agreement(self) -> None:
        """RuntimeError where the multipliers, which every process steps by itself, are not those of the first one.

        On every process, or the others would wait for the one that raises.
        """
        own = self._state.multipliers.values  # [layers]
        first = self._reduce(own if self.args.process_index == 0 else torch.zeros_like(own))
        if self._reduce((own != first).any().float()):
            raise RuntimeError(
                f"The multipliers differ between processes: {own.tolist()} on process {self.args.process_index}, "
                f"{first.tolist()} on the first one. Resume from the last complete checkpoint."
            )

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        with self._own_names(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    @contextmanager
    def _own_names(self, folder: str) -> Iterator[None]:
        """Within it, weights are loaded under the model's own names where the files have the Hub's.

        `save_pretrained` writes those (of the layers of a ViT, of a mixture's experts) and `from_pretrained` knows
        them; Trainer would leave such weights as they are (huggingface/transformers#48805).
        """
        model = getattr(self.model, "_orig_mod", self.model)  # of a compiled one
        is_whole = isinstance(model, PreTrainedModel) and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if not is_whole or _saved_names(folder) <= self.model.state_dict().keys():
            yield
            return
        weights = _weights_by_own_names(model, folder)

        def rename(module, state_dict, prefix, *_):
            state_dict.clear()
            state_dict.update({prefix + name: weight for name, weight in weights.items()})

        handle = model.register_load_state_dict_pre_hook(rename)
        try:
            yield
        finally:
            handle.remove()

    def _finalize_training(self, *args, **kwargs):
        if self.args.load_best_model_at_end:  # here, since Trainer loads where it sees the folder, with others' disks
            self._on_first_process(check_complete, self.state.best_model_checkpoint or "")
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self):
        best = self.state.best_model_checkpoint
        with self._own_names(best):
            super()._load_best_model()
        if self._state is not None and os.path.isfile(os.path.join(best, STATE_NAME)):
            self._state.load(best, is_main=self.args.process_index == 0)

    def _load_callback_state(self):
        # The readable copy is no callback; Trainer would report it as missing.
        self.state.stateful_callbacks.pop("DescentState", None)
        super()._load_callback_state()

    def save_model(self, output_dir=None, _internal_call=False):
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            RunFolder(output_dir or self.args.output_dir).write_summary(self._run_summary())
        if _internal_call and output_dir and self.args.save_only_model:  # a checkpoint without an optimizer
            self._save_dual_state(output_dir)
            self._save_checksums(output_dir)

    def _run_summary(self) -> dict:
        """What tells this run from others, plain training included, and what a step of it costs.

        Of a model that this trainer did not train: what its own training wrote, if anything.
        """
        trained = self._training_started is not None
        if not trained and (saved := self._saved_summary()):
            return saved
        summary = {"model": type(inner_model(self.model)).__name__, "parameters": get_model_param_count(self.model)}
        if trained:
            summary |= {"objective": self.args.objective, "noise_gamma": self.args.noise_gamma}
            summary |= {"arguments": training_arguments(self.args), "training_started": self._training_started}
            if self.command:
                summary["command"] = dict(self.command)
            if has_length(self.train_dataset):
                summary["train_rows"] = len(self.train_dataset)
            if self._readout_fn is not None:
                summary["readout"] = getattr(self._readout_fn, "__name__", type(self._readout_fn).__name__)
        # Of the model's config, without which an adapter is saved.
        config = getattr(self.model, "config", None)
        of_classifiers = ("num_labels", "id2label", "pooling", "pad_token_id")
        of_classifiers = of_classifiers if "Classification" in summary["model"] else ()
        for name in ("noise_sigma", *of_classifiers):
            if (value := getattr(config, name, None)) is not None:
                summary[name] = value
        if encoder := getattr(getattr(config, "encoder_config", None), "_name_or_path", ""):
            summary["encoder"] = encoder
        seconds = self._step_seconds
        if seconds is None and trained:  # as of a run resumed at its end
            seconds = RunFolder(self._resumed_from or "").summary.get("step_seconds")
        if seconds is not None:
            summary["step_seconds"] = seconds
        return summary | (self._state.summary() if trained and self._state is not None else {})

    def _loaded_from(self) -> str:
        """The folder or the name on the Hub of the model; empty where unknown."""
        # The name of an adapted model is that of its base.
        config = None if hasattr(self.model, "peft_config") else getattr(self.model, "config", None)
        return getattr(config, "_name_or_path", "")

    def _saved_summary(self) -> dict:
        names = (self._loaded_from(), os.path.abspath(self.args.output_dir))  # no name on the Hub
        return next((summary for name in names if (summary := RunFolder(name).summary)), {})


def newest_complete_checkpoint(output_dir: str) -> str:
    """The last checkpoint of the last training in `output_dir`; ValueError where there is none.

    Trainings are told apart by when they started, as their checkpoints say; a copy need not keep the times of files.
    Those of plain `Trainer` do not say, and stand for themselves: the trainer state is the last file of a save.
    Incomplete folders, left by a killed process, are passed over and named in the log.
    """
    found = []
    for entry in os.scandir(output_dir) if os.path.isdir(output_dir) else ():
        step = entry.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
        if not (entry.is_dir() and step.isdecimal() and step != entry.name):
            continue
        try:
            written = os.path.getmtime(os.path.join(entry.path, TRAINER_STATE_NAME))
            started = RunFolder(entry.path).summary.get("training_started") or written
        except (OSError, ValueError):
            started = math.inf  # incomplete
        found.append((started, int(step), entry.path))
    for *_, folder in sorted(found, reverse=True):
        fault = next(faults(folder), None)
        if fault is None:
            return folder
        logger.warning(f"Passing over the incomplete checkpoint {folder}: {fault}.")
    raise ValueError(f"No valid checkpoint found in output directory ({output_dir})")


def check_complete(checkpoint: str) -> None:
    """ValueError where a checkpoint folder is incomplete or damaged."""
    for fault in faults(checkpoint) if os.path.isdir(checkpoint) else ():
        raise ValueError(f"The checkpoint is not complete: {fault}. Resume from another one, or with `True`.")


def faults(checkpoint: str) -> Iterator[str]:
    """What is missing or damaged in a checkpoint folder, one sentence each, cheap checks first; nothing for a complete
    one."""
    folder = Path(checkpoint)
    names = {path.name for path in folder.iterdir()}
    contents = {}
    for name in sorted({TRAINER_STATE_NAME, *(name for name in names if name.endswith(".json"))}):
        try:
            contents[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield f"{folder / name} is missing or damaged ({error})"
            return
    if any(name.startswith(OPTIMIZERS[0]) for name in names):
        if SCHEDULER_NAME not in names:  # without which Trainer loads no optimizer either
            yield f"{folder / SCHEDULER_NAME} is missing"
        if not any(name.startswith("rng_state") for name in names):
            yield f"{folder / 'rng_state.pth'} is missing"
    elif SCHEDULER_NAME in names and not any(name.startswith(OPTIMIZERS[1]) for name in names):
        yield f"{folder / OPTIMIZER_NAME} is missing"
    if "multipliers" in contents.get(RunFolder.SUMMARY, ()) and SCHEDULER_NAME in names and STATE_NAME not in names:
        yield f"{folder / STATE_NAME} is missing"
    indexes = [content["weight_map"] for name, content in contents.items() if name.endswith(".index.json")]
    for shard in sorted({shard for index in indexes for shard in index.values()} - names):
        yield f"{folder / shard} is missing"
    # Sharded (FSDP, DeepSpeed) weights lie in folders of their own.
    if not any((folder / name).is_dir() or (name.startswith(WEIGHTS) and not name.endswith(".tmp")) for name in names):
        yield f"{folder} holds no model weights"
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        is_shard = path.parent != folder  # of FSDP or DeepSpeed, whose processes write together
        if path.suffix == ".distcp" and not (index := path.with_name(".metadata")).exists():  # which is written last
            yield f"{index} is missing"
        elif path.is_file() and ((is_shard and path.stat().st_size == 0) or _is_damaged(path, in_full=not is_shard)):
            yield f"{path} is damaged"
    if (saved := contents.get(CHECKSUMS_NAME)) is not None:  # which older checkpoints lack
        if contents[TRAINER_STATE_NAME].get("global_step") != saved["step"]:
            yield f"{folder / TRAINER_STATE_NAME} is not of step {saved['step']}, as the other files are"
        found = checksums(folder)
        for name in (name for name, checksum in saved["files"].items() if found.get(name) != checksum):
            fault = f"not as it was saved (if you changed it, delete {CHECKSUMS_NAME})" if name in found else "missing"
            yield f"{folder / name} is {fault}"


def checksums(folder: Path) -> dict[str, list[int]]:
    """Size and checksum of each file of a checkpoint that resuming reads, by its name in the `folder`.

    Where torch has put checksums into a file itself, theirs are taken. FSDP's shards, which no process could read all
    of in a short time, are known by their sizes alone.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in CHECKED:
            of_content = 0 if path.suffix == ".distcp" else _checksum(path)
            found[path.relative_to(folder).as_posix()] = [path.stat().st_size, of_content]
    return found


def _checksum(path: Path) -> int:
    if path.suffix != ".safetensors" and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return zlib.crc32(repr([part.CRC for part in archive.infolist()]).encode())
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            found = zlib.crc32(chunk, found)
    return found


def _saved_names(folder: str) -> set[str]:
    """The names of the model's weights in a checkpoint's safetensors files."""
    names = set()
    for path in _weight_files(folder):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def _weight_files(folder: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), "model*.safetensors"))


def _weights_by_own_names(model: PreTrainedModel, folder: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, converted as `from_pretrained` does, but for this model with what was changed in it
    by hand; ValueError where they are another model's."""
    saved = {}
    for path in _weight_files(folder):
        saved |= {name.removeprefix("_orig_mod."): weight for name, weight in load_file(path).items()}
    slots = [slots for module in model.modules() for slots in (module._parameters, module._buffers)]
    before, conversions = [dict(each) for each in slots], getattr(model, "_weight_conversions", None)
    try:
        config = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model))
        info, _ = convert_and_load_state_dict_in_model(model, saved, config)
        if info.mismatched_keys or info.conversion_errors:
            raise ValueError(
                f"The weights in {folder} are not those of this {type(model).__name__}: "
                f"{info.conversion_errors or sorted(info.mismatched_keys)}."
            )
        return {name: weight for name, weight in model.state_dict().items() if name not in info.missing_keys}
    finally:
        # The conversion leaves new tensors in the model; its optimizer knows those before.
        for each, tensors in zip(slots, before):
            each.update(tensors)
        model._weight_conversions = conversions


def _is_damaged(path: Path, in_full: bool) -> bool:
    """Whether a weights or state file is cut short, or, read `in_full`, no longer has torch's own checksums."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt"):
                return False
        except (SafetensorError, OSError):
            return True
    if not (path.name.startswith(TORCH_FILES) and path.suffix in (".pt", ".pth", ".bin")):
        return False
    with open(path, "rb") as file:
        if file.read(1) == b"\x80":  # a bare pickle, torch's format before 1.6
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            has_checksums = any(part.CRC for part in archive.infolist())  # which can be turned off in torch
            return in_full and has_checksums and archive.testzip() is not None
    except zipfile.BadZipFile:
        return True
