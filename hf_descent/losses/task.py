"""The task loss: what `Trainer` would take from a model's outputs, and what it counts as an item of a batch."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss, ForSequenceClassificationLoss
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import find_labels

from ..readout.labels import (
    IGNORE_INDEX,
    are_token_labels,
    labels_of,
    own_loss,
    shifts_labels,
)
from ..readout.replay import Readout, output_logits, output_loss, probing
from ..readout.stack import inner_model
from .short_batch import shortened


@dataclass
class TaskLoss:
    """What the loss is, and what it averages over, in training and in evaluation. [`TaskLoss.probe`] makes it."""

    model: nn.Module  # unwrapped (a `PeftModel`, too)
    label_names: Sequence[str]  # the label arguments, as `Trainer` finds them
    # A custom loss_fn(outputs, labels, num_items_in_batch=None).
    loss_fn: Callable[..., torch.Tensor] | None = None
    smoother: Callable[..., torch.Tensor] | None = None  # Trainer's label smoother
    # Whether the model's loss function scores the logits of a custom readout.
    has_custom_readout: bool = False
    shifts_labels: bool = False  # whether position t predicts label t+1
    accepts_items: bool = False  # whether the model's forward takes `num_items_in_batch`
    # Whether the loss is divided by the `num_items_in_batch` that it is given; `None` before a batch has shown it.
    takes_items: bool | None = None

    @classmethod
    def probe(
        cls,
        model: nn.Module,
        batch: Mapping[str, Any],
        *,
        label_names: Sequence[str] | None = None,
        loss_fn: Callable | None = None,
        readout: Callable | None = None,
        shifts_labels: bool = False,
        accepts_items: bool = False,
    ) -> "TaskLoss":
        """The task loss of `model`, whose shift of the labels is found out on `batch`, a dict for `model(**batch)`;
        where that fails it is `shifts_labels`. `loss_fn` may be Trainer's label smoother."""
        if label_names is None:
            label_names = find_labels(type(inner_model(model)))
        smooths = isinstance(loss_fn, LabelSmoother)
        task = cls(
            model,
            label_names,
            loss_fn=None if smooths else loss_fn,
            smoother=loss_fn if smooths else None,
            has_custom_readout=readout is not None,
            accepts_items=accepts_items,
        )
        shift = task._find_shift(task.short(batch), readout)
        task.shifts_labels = shifts_labels if shift is None else shift
        return task

    def __call__(
        self, outputs: Any, inputs: Mapping[str, Any], items: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The loss of a model's `outputs` on the batch `inputs`, a scalar; divided by `items` where `takes_items`.

        ValueError where the outputs hold no loss, TypeError where `loss_fn` returns no floating-point scalar tensor.
        """
        labels = inputs.get("labels")
        if self.loss_fn is not None:
            loss = self.loss_fn(outputs, labels, num_items_in_batch=items)
            check_scalar_loss(loss)
            return loss

        if self.smoother is not None and labels is not None:
            return self.smoother(
                outputs, labels, shift_labels=self.shifts_labels, num_items_in_batch=items
            )

        if self.has_custom_readout:
            return loss_from_logits(self.model, output_logits(outputs), labels, items)
        loss = output_loss(outputs)
        if loss is None:
            raise self._no_loss(inputs)
        return loss

    def count(self, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """The number of items that the loss of a batch averages over, a scalar tensor; `None` without labels.

        Items are the predicted labels other than -100; of floating labels all numbers; for CTC rows.
        """
        labels = self.predicted_labels(inputs)
        if not isinstance(labels, torch.Tensor):
            return None
        if labels.is_floating_point():
            return torch.full((), labels.numel(), device=labels.device)
        if self.uses_model_loss and self._is_ctc:
            return torch.full((), len(labels), device=labels.device)
        # Models leave out those past the end.
        if "start_positions" in inputs and "input_ids" in inputs:
            return labels.lt(inputs["input_ids"].shape[1]).sum()

        return labels.ne(IGNORE_INDEX).sum()

    def predicted_labels(self, inputs: Mapping[str, Any]) -> Any | None:
        """The first of a batch's labels, of a causal language model without that of the first token."""
        if inputs.get("shift_labels") is not None:
            return inputs["shift_labels"]
        labels = labels_of(inputs, self.label_names)
        if self.shifts_labels and isinstance(labels, torch.Tensor):
            return labels[..., 1:]
        return labels

    def answers(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """What a constant prediction is of: the predicted labels; of an extractive answer both ends, `[batch, 2]`."""
        if inputs.get("start_positions") is None or inputs.get("end_positions") is None:
            return self.predicted_labels(inputs)
        # As the models do: negative positions count as the first token, those past the end are left out.
        ends = [inputs[name].view(-1) for name in ("start_positions", "end_positions")]
        ends = torch.stack(ends, 1).clamp(min=0)  # [batch, 2]
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))  # [batch, seq, ...]
        if tokens is None:
            return ends
        return ends.where(ends < tokens.shape[1], IGNORE_INDEX)

    def predictions(
        self, outputs: Any, inputs: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits `[..., classes]` of a model's `outputs`, and the labels `[...]` that they predict, -100 for none;
        ValueError where the batch has no labels."""
        logits = output_logits(outputs)
        if inputs.get("start_positions") is not None:
            return logits.transpose(1, 2), self.answers(inputs)
        if inputs.get("shift_labels") is not None:
            return logits, inputs["shift_labels"]
        labels = labels_of(inputs, self.label_names)
        if labels is None:
            raise self._no_loss(inputs)
        if are_token_labels(labels) and logits.dim() == 3:
            if self.shifts_labels:
                return logits[:, :-1], labels[:, 1:]
            return logits, labels

        # A single logit is a number to models, though labels are whole: as a class it would always be the first.
        if torch.is_tensor(labels) and logits.shape[-1] == 1:
            labels = labels.float()
        return logits, labels

    def model_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch without the labels where something else than the model scores its outputs."""
        if self.uses_model_loss:
            return dict(inputs)
        withheld = self.label_names if self.has_custom_readout else ["labels"]
        return {name: value for name, value in inputs.items() if name not in withheld}

    def short(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch to try the model out on in little memory: two rows, and of labels of tokens few tokens, labelled."""
        labels = labels_of(inputs, self.label_names)
        if not isinstance(labels, torch.Tensor):
            return inputs
        config = getattr(inner_model(self.model), "config", None)
        return shortened(inputs, labels, self.label_names, config)

    @cached_property
    def _is_ctc(self) -> bool:
        return type(inner_model(self.model)).__name__.endswith("ForCTC")

    @property
    def uses_model_loss(self) -> bool:
        """Whether the loss is the one that the model's forward returns."""
        return self.loss_fn is None and self.smoother is None and not self.has_custom_readout

    def divides_by_items(self, batch: Mapping[str, Any]) -> bool:
        """Whether the loss is divided by the items that it is given, found out on `batch`."""
        if not self.accepts_items and self.loss_fn is None and self.smoother is None:
            return False
        batch = self.short(batch)
        arguments = self.model_inputs(batch)
        losses = []
        for items in (torch.tensor(1.0), torch.tensor(2.0)):
            if self.accepts_items:
                arguments["num_items_in_batch"] = items
            # From the same random state, or the loss of a model that draws would seem to depend on them.
            with probing(self.model):
                losses.append(self(self.model(**arguments), batch, items))
        return bool(losses[0] != losses[1]) and bool(losses[0].isfinite())

    def _find_shift(self, batch, readout) -> bool | None:
        """Whether position t predicts label t+1; `None` where that cannot be found out."""
        names = [name for name in (*self.label_names, "labels") if batch.get(name) is not None]
        if not names or not are_token_labels(batch[names[0]]):
            return False
        name = names[0]

        losses = []  # of labels; a custom loss need not do as its model does
        if self.loss_fn is not None:
            losses.append(partial(self._custom_loss, batch, name, readout))
        if self.loss_fn is None or readout is None:
            losses.append(partial(own_loss, self.model, batch, name))

        for loss_of in losses:
            # There may be no loss, or none where labels are missing.
            with suppress(Exception), probing(self.model):
                return shifts_labels(batch[name], loss_of)
        return None

    def _custom_loss(self, batch, name: str, readout, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch whose labels are replaced, those of the argument `name`."""
        inputs = self.model_inputs(batch)
        if readout is None:
            outputs = self.model(**inputs)
        else:
            outputs = Readout.probe(self.model, inputs, readout).last_outputs(inputs)
        return self(outputs, {**batch, name: labels}, self.count(batch))

    def check_loss_function(self) -> None:
        """ValueError where a custom readout would be scored by the loss of causal language models though no label is
        shifted: transformers takes it for that of any class whose name it does not know."""
        is_guess = (
            getattr(self.model, "loss_function", None) is ForCausalLMLoss and not self.shifts_labels
        )
        if is_guess and self.has_custom_readout and self.loss_fn is None and self.smoother is None:
            raise ValueError(
                f"`readout` is scored by `model.loss_function`, for {type(self.model).__name__} that of causal "
                "language models, which it is none of: set it, or pass `layer_loss_fn` to the trainer."
            )

    def _no_loss(self, inputs) -> ValueError:
        missing = "no labels" if self.predicted_labels(inputs) is None else "no loss"
        return ValueError(
            f"{type(self.model).__name__} has {missing} for a batch with the keys {sorted(inputs)}; add one of "
            f"{self.label_names}, or give `layer_loss_fn(outputs, labels, num_items_in_batch=None)`."
        )


def check_scalar_loss(loss: Any) -> None:
    """TypeError unless what a custom loss returned is a floating-point scalar tensor."""
    returned = repr(loss)
    if isinstance(loss, torch.Tensor):
        if loss.is_floating_point() and not loss.shape:
            return
        returned = f"{loss.dtype} of shape {list(loss.shape)}"
    raise TypeError(
        f"`layer_loss_fn` (or `compute_loss_func`) returned {returned} for the outputs of one layer; return a "
        "floating-point scalar tensor, such as the mean over the batch."
    )


def loss_from_logits(
    model: nn.Module,
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's own loss function on the logits of a readout; ValueError where it takes others, or there is none."""
    arguments = {"labels": labels, "config": model.config, "vocab_size": logits.shape[-1]}
    # That of sequence classification, which images and sounds have, too, calls the logits by another name.
    if getattr(model, "loss_function", None) is ForSequenceClassificationLoss:
        arguments["pooled_logits"] = logits
    else:
        arguments["logits"] = logits

    if num_items_in_batch is not None:
        arguments["num_items_in_batch"] = num_items_in_batch
    try:
        return model.loss_function(**arguments)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"The loss of {type(model).__name__} cannot score the logits of `readout` ({error}); pass "
            "`layer_loss_fn(outputs, labels, num_items_in_batch=None)` to the trainer."
        ) from error
