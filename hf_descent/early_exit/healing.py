"""Healing: a model without some of its layers learns to predict what the whole model predicts.

The layers before the gap stay as they are, so that both models share them. Copies of those that follow the gap are
trained: the whole model is not changed. A single copied layer behind layer k is the set {1..k, L}.

Sources: Hinton et al. (2015), "Distilling the Knowledge in a Neural Network", arXiv 1503.02531; Gromov et al. (2024),
"The Unreasonable Ineffectiveness of the Deeper Layers", arXiv 2403.17887, which heals after leaving out layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..readout.replay import Readout, evaluating
from ..readout.stack import LayerStack, intercepted
from .heads import check_exit_head, layers_of_exit, prepare_exit_head
from .layer_sets import LayerSetProfile, layer_set_profile
from .partial import PartialForward
from .predictions import PredictionReader, of_tokens
from .truncation import example_inputs, keep_layers


class HealingTrainer(Trainer):
    """Cut a model to some of its layers, and train those that follow the gap to predict what the whole model predicts.

    The loss is the KL divergence of the shorter model's predictions from the whole model's, a mean over the labelled
    rows or tokens. For models that predict numbers it is the squared difference. Labels only say which tokens count.
    `trainer.model` is the shorter model, of the class of `model`. `evaluate()` gives the same loss on other rows;
    `evaluate_layers()` compares both models by the loss of their task.

    Args:
        model (`PreTrainedModel`): the whole model, which is left as it is. Merge a PEFT model first.
        args (`TrainingArguments`, *optional*): as in `Trainer`.
        layers (sequence of `int`): the layers to keep, increasing numbers in 1..L, such as `[*range(1, 16), 30]`.
        exit_head (`str`, *optional*): train this behind `layers`, and nothing else. "norm": the final norm. "affine":
            a linear map after the norm, which becomes a part of the head's weight. "block": a copy of layer L.
        train_all (`bool`): train all weights of the shorter model, with the `exit_head` if one is given.
        token_fraction (`float`): share of the labelled tokens that a step of a language model reads, in (0, 1].
        inputs (`dict`, *optional*): a batch for `model(**inputs)`, as in [`keep_layers`].
        arguments: `train_dataset`, `data_collator`, `processing_class` and the others of `Trainer`.

    ValueError if the layers cannot be left out, none is left out, nothing would be trained, or `exit_head` is unknown.
    ValueError also if rows have several labels, weights are sharded, or one process has several GPUs.

    Example:

    ```python
    trainer = HealingTrainer(model, args, layers=[*range(1, 16), 30], train_dataset=rows)
    trainer.train()
    trainer.save_model("out/half-depth")
    ```
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        layers: Sequence[int],
        exit_head: str | None = None,
        train_all: bool = False,
        token_fraction: float = 1.0,
        inputs: Mapping[str, Any] | None = None,
        **arguments,
    ):
        if not 0 < token_fraction <= 1:
            raise ValueError(f"`token_fraction` is {token_fraction}; give a share in (0, 1].")
        check_exit_head(exit_head)
        batch = example_inputs(model) if inputs is None else inputs
        whole_stack = Readout.probe(model, batch).stack
        layers = layers_of_exit(layers, whole_stack.num_layers, exit_head)
        short = keep_layers(model, layers, inputs)
        stack = Readout.probe(short, batch).stack
        shared = shared_layers(layers, whole_stack.num_layers)
        if train_all:
            shared = 0
        else:
            short.requires_grad_(False)

        callbacks = []
        if exit_head in ("norm", "affine"):
            callbacks = prepare_exit_head(short, stack, batch, exit_head)
        elif not train_all:
            _train_layers_from(shared, stack, whole_stack.num_layers)

        super().__init__(short, args, **arguments)
        _check_arguments(self)
        for callback in callbacks:
            self.add_callback(callback)

        self.whole_model = model.to(self.args.device)
        self.layers = list(layers)
        self.token_fraction = token_fraction
        # The loss is divided by the items of all micro-batches of a step, so Trainer has to count them.
        self.model_accepts_loss_kwargs = True
        self._whole_stack = whole_stack
        self._stack = stack
        self._shared = shared
        self._reader = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The divergence of a batch, and its outputs. Logits are made only for `compute_metrics`."""
        self._prepare_reading(inputs)
        needs_logits = return_outputs and self.compute_metrics is not None
        by_head = self._reader.reads_heads and not needs_logits

        whole = self.read_whole(inputs, by_head)

        forward = PartialForward(model, self._stack)
        rest = partial(forward, self._shared + 1, self._stack.num_layers, whole.last_shared)
        with forward.attached():
            outputs = self._reader.outputs(self.model, rest, inputs, by_head)

        if by_head:
            losses, items = self._token_losses(whole.outputs, outputs, inputs)
        else:
            losses = self._reader.item_divergences(whole.outputs, outputs, inputs)
            items = losses.numel()

        loss = losses.sum() / max(losses.numel(), 1)
        if num_items_in_batch is not None:
            loss = loss * items / num_items_in_batch
            if self.args.average_tokens_across_devices:  # DDP takes the mean of the gradients
                loss = loss * self.accelerator.num_processes

        if not return_outputs:
            return loss
        if by_head:
            return loss, {"loss": loss}
        return loss, {**outputs, "loss": loss}

    def evaluate_layers(
        self, eval_dataset: Dataset | None = None, max_rise: float = 0.05, **settings
    ) -> LayerSetProfile:
        """The task loss of the shorter model beside that of the whole one, on held-out examples.

        The verdict says, with 95 % confidence, whether the rise is at most `max_rise`, as a share. `settings` are
        those of [`~early_exit.layer_set_profile`], such as `batch_size`. Each process reads all rows.
        """
        settings.setdefault("data_collator", self.data_collator)
        settings.setdefault("label_names", self.label_names)
        settings.setdefault("batch_size", self.args.per_device_eval_batch_size)
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("There is no `eval_dataset`; give data that was not trained on.")
        return layer_set_profile(
            self.whole_model,
            dataset,
            [self.layers],
            max_rise,
            [self.model],
            **settings,
        )

    def read_whole(self, inputs: Mapping[str, Any], by_head: bool) -> "WholeReading":
        """Run the whole model on a batch. The result does not change in training, so a subclass may keep it.

        Args:
            inputs (`dict`): the batch.
            by_head (`bool`): return the input of the head, and make no logits.
        """
        shared = self._whole_stack.layers[: self._shared]
        with evaluating(self.whole_model), self.accelerator.autocast(), last_output(shared) as last:
            outputs = self._reader.outputs(self.whole_model, self.whole_model, inputs, by_head)
        return WholeReading(outputs, last.get("output"))

    def _prepare_reading(self, inputs: Mapping[str, Any]) -> None:
        """Find out on the first batch what the labels predict, and whether logits can be avoided."""
        if self._reader is not None:
            return
        self._reader = PredictionReader.probe(self.model, inputs, self.label_names)
        if self.token_fraction < 1 and not self._reader.reads_heads:
            raise ValueError(
                f"`token_fraction` is {self.token_fraction}; {type(self.model).__name__} is read on all data: use 1."
            )

    def _token_losses(self, whole, short, inputs) -> tuple[torch.Tensor, int]:
        """The divergence of each token that is read, and the number of labelled tokens."""
        rows, labelled = self._reader.token_rows(inputs, self.token_fraction)
        with self.accelerator.autocast():
            losses = self._reader.token_divergences(
                of_tokens(self.whole_model, whole, rows), of_tokens(self.model, short, rows)
            )
        return losses, labelled


class WholeReading(NamedTuple):
    """The outputs of the whole model for a batch."""

    # The model's own outputs; or, as "hidden", the input of its head, [batch, seq, hidden].
    outputs: Mapping[str, Any]
    # The whole output of the last layer before the gap; `None` if there is none.
    last_shared: Any


def shared_layers(layers: Sequence[int], num_layers: int) -> int:
    """How many of the first layers are those of the whole model, up to the gap; ValueError if there is no gap."""
    if list(layers) == list(range(1, num_layers + 1)):
        raise ValueError(f"`layers` is {layers!r}: no layer is left out. Leave out some.")
    shared = 0
    while shared < len(layers) and layers[shared] == shared + 1:
        shared += 1
    return shared


@contextmanager
def last_output(layers: Sequence[nn.Module]) -> Iterator[dict]:
    """Within it, "output" is what the last of the `layers` returned; empty if there are none."""
    returned = {}

    def record(layer, call, *args, **kwargs):
        returned["output"] = call(*args, **kwargs)
        return returned["output"]

    with intercepted(layers[-1:], record):
        yield returned


def _train_layers_from(shared: int, stack: LayerStack, num_layers: int) -> None:
    """Let the layers behind the first `shared` ones be trained; ValueError if there are none."""
    if shared == stack.num_layers:
        raise ValueError(
            f"`layers` is {list(range(1, shared + 1))!r}: no layer follows those that are left out, so none would be "
            f"trained. Add layer {num_layers}, or give `exit_head` or `train_all=True`."
        )
    for layer in stack.layers[shared:]:
        layer.requires_grad_(True)


def _check_arguments(trainer: Trainer) -> None:
    if trainer.args.n_gpu > 1:
        raise ValueError(
            "`HealingTrainer` uses one GPU a process: start it by `accelerate launch` or `torchrun`."
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "`HealingTrainer` needs whole weights in each process: leave out `fsdp` and `deepspeed`."
        )
