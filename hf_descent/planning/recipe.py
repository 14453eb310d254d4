"""The step of a recipe's training, as configured and with other settings."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PretrainedConfig, TrainingArguments

from ..losses.layerwise import DEFAULT_TOKEN_FRACTION
from .model import PlannedModel, StepCost


Shape = Callable[[PretrainedConfig], PretrainedConfig]


@dataclass(frozen=True)
class Setting:
    """One change of a recipe: an argument and its value, and what to call it."""

    name: str
    value: Any
    title: str


class PlannedRecipe:
    """The training of a recipe, whose settings can be changed one at a time.

    Args:
        build: `build(model_args, shape)` makes the model that the recipe trains, of the config `shape(config)`.
        model_args: the recipe's arguments of the model, `use_peft` among them.
        args (`TrainingArguments`): those of the training.
        length (`int`): tokens of a row.
        is_language_model (`bool`): whether every token has a label, or every row.

    ValueError as of [`PlannedModel`].
    """

    def __init__(
        self,
        build: Callable[[Any, Shape], torch.nn.Module],
        model_args: Any,
        args: TrainingArguments,
        length: int,
        is_language_model: bool,
    ):
        self.build = build
        self.model_args = model_args
        self.args = args
        self.length = length
        self.is_language_model = is_language_model
        self.model = self._planned(model_args)

    def settings(self, processes: int) -> list[Setting]:
        """The recipe as configured, plain training, the changes worth knowing, and FSDP2."""
        args = self.args
        rows = args.per_device_train_batch_size
        size = f"{rows} x {self.length} tokens"
        if args.gradient_accumulation_steps > 1:
            size = f"{args.gradient_accumulation_steps} micro-batches of {size}"

        changes = {"activation_checkpointing": not args.activation_checkpointing}
        fraction = getattr(self.model.layers, "token_fraction", None)
        if fraction is not None:
            if args.readout_token_fraction is not None:
                fraction = args.readout_token_fraction
            reads_all = fraction == 1
            changes["readout_token_fraction"] = DEFAULT_TOKEN_FRACTION if reads_all else 1.0

        changes["per_device_train_batch_size"] = 2 * rows
        changes["use_peft"] = not self.model_args.use_peft

        return [
            Setting("objective", args.objective, f"as configured ({size})"),
            Setting("objective", "erm", "plain training (`objective: erm`)"),
            *(Setting(name, value, f"`{name}: {value}`") for name, value in changes.items()),
            Setting("processes", processes, f"`--launch fsdp2`, {processes} processes"),
        ]

    def cost(self, setting: Setting) -> StepCost | None:
        """What a step costs with one setting changed; `None` where this model cannot have it."""
        if setting.name == "objective":
            return self._changed(setting)

        with suppress(ValueError):
            if setting.name == "processes":
                with self.model.sharded(setting.value) as first:
                    return first.step(self._batch(self._rows), self.args)
            if setting.name == "use_peft":
                planned = self._planned(replace(self.model_args, use_peft=setting.value))
                return planned.step(self._batch(self._rows), self.args)
            return self._changed(setting)
        return None

    def _changed(self, setting: Setting) -> StepCost:
        args = replace(self.args, **{setting.name: setting.value})
        return self.model.step(self._batch(args.per_device_train_batch_size), args)

    @property
    def _rows(self) -> int:
        return self.args.per_device_train_batch_size

    def _planned(self, model_args: Any) -> PlannedModel:
        def build(shape: Shape) -> torch.nn.Module:
            return self.build(model_args, shape)

        return PlannedModel(build, self._batch(self._rows), token_statistics=self.is_language_model)

    def _batch(self, rows: int) -> dict[str, Any]:
        """Any tokens do, but some classifiers count those that end a text."""
        ids = torch.arange(self.length).repeat(rows, 1) % 7  # [rows, length]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_language_model:
            return {**inputs, "labels": ids, "use_cache": False}
        return {**inputs, "labels": torch.arange(rows) % 2}
