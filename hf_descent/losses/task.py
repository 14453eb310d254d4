"""The task loss: what `Trainer` would take from a model's outputs, and what it counts as an item of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    names_of_labels,
    own_loss,
    shifts_labels,
)
from ..readout.replay import Readout, output_logits, output_loss, probing
from ..readout.stack import inner_model, map_tensors, tensors


PROBED_TOKENS = 32  # of a row, where a model is tried out


@dataclass
class TaskLoss:
    """What the loss is, and what it averages over, in training and in evaluation. [`TaskLoss.probe`] makes it."""

    model: nn.Module  # unwrapped (a `PeftModel`, too)
    label_names: Sequence[str]  # the label arguments, as `Trainer` finds them
    loss_fn: Callable[..., torch.Tensor] | None = (
        None  # a custom loss_fn(outputs, labels, num_items_in_batch=None)
    )
    smoother: Callable[..., torch.Tensor] | None = None  # Trainer's label smoother
    has_custom_readout: bool = (
        False  # whether the model's loss function scores the logits of a custom readout
    )
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
        names = find_labels(type(inner_model(model))) if label_names is None else label_names
        loss_fn, smoother = (
            (None, loss_fn) if isinstance(loss_fn, LabelSmoother) else (loss_fn, None)
        )
        task = cls(
            model, names, loss_fn, smoother, readout is not None, accepts_items=accepts_items
        )
        found = task._find_shift(task.short(batch), readout)
        task.shifts_labels = shifts_labels if found is None else found
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
            if not (
                isinstance(loss, torch.Tensor) and loss.shape == () and loss.is_floating_point()
            ):
                kind = (
                    f"{loss.dtype} of shape {list(loss.shape)}"
                    if isinstance(loss, torch.Tensor)
                    else repr(loss)
                )
                raise TypeError(
                    f"`layer_loss_fn` (or `compute_loss_func`) returned {kind} for the outputs of one layer; return a "
                    "floating-point scalar tensor, such as the mean over the batch."
                )
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
        if self.uses_model_loss and type(inner_model(self.model)).__name__.endswith("ForCTC"):
            return torch.full((), len(labels), device=labels.device)
        if (
            "start_positions" in inputs and "input_ids" in inputs
        ):  # models leave out those past the end
            return labels.lt(inputs["input_ids"].shape[1]).sum()
        return labels.ne(IGNORE_INDEX).sum()

    def predicted_labels(self, inputs: Mapping[str, Any]) -> Any | None:
        """The first of a batch's labels, of a causal language model without that of the first token."""
        if inputs.get("shift_labels") is not None:
            return inputs["shift_labels"]
        labels = labels_of(inputs, self.label_names)
        return (
            labels[..., 1:] if self.shifts_labels and isinstance(labels, torch.Tensor) else labels
        )

    def answers(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """What a constant prediction is of: the predicted labels; of an extractive answer both ends, `[batch, 2]`."""
        if inputs.get("start_positions") is None or inputs.get("end_positions") is None:
            return self.predicted_labels(inputs)
        # As the models do: negative positions count as the first token, those past the end are left out.
        ends = torch.stack(
            [inputs[name].view(-1) for name in ("start_positions", "end_positions")], 1
        ).clamp(min=0)
        texts = inputs.get(
            "input_ids", inputs.get("inputs_embeds")
        )  # [batch, seq] or [batch, seq, hidden]
        return ends if texts is None else ends.where(ends < texts.shape[1], IGNORE_INDEX)

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
            return (logits[:, :-1], labels[:, 1:]) if self.shifts_labels else (logits, labels)
        # A single logit is a number to models, though labels are whole: as a class it would always be the first.
        return logits, labels.float() if torch.is_tensor(labels) and logits.shape[
            -1
        ] == 1 else labels

    def model_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch without the labels where something else than the model scores its outputs."""
        withheld = (
            ()
            if self.uses_model_loss
            else tuple(self.label_names)
            if self.has_custom_readout
            else ("labels",)
        )
        return {name: value for name, value in inputs.items() if name not in withheld}

    def short(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """A batch to try the model out on in little memory: two rows, and of labels of tokens few tokens, labelled."""
        labels, mask, ids = (
            labels_of(inputs, self.label_names),
            inputs.get("attention_mask"),
            inputs.get("input_ids"),
        )
        if not isinstance(labels, torch.Tensor):
            return inputs
        of_rows = {
            name: value
            for name, value in inputs.items()
            if not name.startswith(("cu_seq_lens", "max_length"))
        }
        values = [value for value in tensors(of_rows) if value.dim()]
        config = getattr(inner_model(self.model), "config", None)
        kinds = {
            getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")
        } - {None}
        of_images = (
            torch.zeros(1, 1)
            if ids is None
            else sum((ids == kind for kind in kinds), torch.zeros_like(ids))
        )
        embeddings = {id(inputs.get(name)) for name in ("inputs_embeds", "decoder_inputs_embeds")}

        def is_of_tokens(value):  # 80 bands of a sound may have the shape of 80 tokens
            is_kind = value.dim() <= 2 or not value.is_floating_point() or id(value) in embeddings
            return (
                is_kind
                and value.shape[:2] == labels.shape
                and not {*labels.shape[1:]} & {*value.shape[2:]}
            )

        rows, part, others = (
            slice(None),
            slice(None),
            [value for value in values if not is_of_tokens(value)],
        )
        if (
            all(len(value) == len(labels) for value in values)
            and len(of_images.sum(1).unique()) == 1
        ):
            rows = _two_rows(labels, mask)
        if (
            are_token_labels(labels)
            and (not others or of_images.any() or getattr(config, "is_encoder_decoder", False))
            and not any(
                labels.shape[1] in value.shape[1:] for value in others
            )  # a part of these would be cut, too
            and getattr(config, "attention_type", None)
            != "block_sparse"  # BigBird is another model on few tokens
        ):
            part = _few_tokens(of_images, mask)

        def shorten(value):
            is_cut = value.dim() > 1 and is_of_tokens(value)
            return (
                (value[rows][:, part] if is_cut else value[rows]).contiguous()
                if value.dim()
                else value
            )

        found = {**inputs, **map_tensors(shorten, of_rows)}
        for name in {"cu_seq_lens_q", "cu_seq_lens_k"} & inputs.keys():
            found[name] = inputs[name].clamp(max=found["labels"].shape[1]).unique()
        counted = labels[labels != IGNORE_INDEX]
        for name in names_of_labels(found, self.label_names):
            uncounted = (
                are_token_labels(found[name]) and not found[name][:, 1:].ne(IGNORE_INDEX).any()
            )
            if len(counted) and uncounted:  # they come later in each row, or in others
                found[name] = counted[torch.arange(found[name].numel()) % len(counted)].view_as(
                    found[name]
                )
        return found

    @property
    def uses_model_loss(self) -> bool:
        """Whether the loss is the one that the model's forward returns."""
        return self.loss_fn is None and self.smoother is None and not self.has_custom_readout

    def divides_by_items(self, batch: Mapping[str, Any]) -> bool:
        """Whether the loss is divided by the items that it is given, found out on `batch`."""
        if not self.accepts_items and self.loss_fn is None and self.smoother is None:
            return False
        values, batch = [], self.short(batch)
        for items in (torch.tensor(1.0), torch.tensor(2.0)):
            given = self.model_inputs(batch) | (
                {"num_items_in_batch": items} if self.accepts_items else {}
            )
            # From the same random state, or the loss of a model that draws would seem to depend on them.
            with probing(self.model):
                values.append(self(self.model(**given), batch, items))
        return bool(values[0] != values[1]) and bool(values[0].isfinite())

    def _find_shift(self, batch, readout) -> bool | None:
        """Whether position t predicts label t+1; `None` where that cannot be found out."""
        name = next(
            (name for name in (*self.label_names, "labels") if batch.get(name) is not None), None
        )
        if not are_token_labels(batch.get(name)):
            return False

        def custom_loss(labels):
            model, given = self.model, self.model_inputs(batch)
            outputs = (
                model(**given)
                if readout is None
                else Readout.probe(model, given, readout).read_last(given)
            )
            return self(outputs, {**batch, name: labels}, self.count(batch))

        # A custom loss need not do as its model does.
        losses = [] if self.loss_fn is None else [custom_loss]
        if self.loss_fn is None or readout is None:
            losses.append(partial(own_loss, self.model, batch, name))
        for loss_of in losses:
            try:
                with probing(self.model):
                    return shifts_labels(batch[name], loss_of)
            except Exception:  # there is no loss, or none where labels are missing
                continue
        return None

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


def _two_rows(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Those with the most and the least padding and, where there are some, different labels."""
    lengths = (
        mask.sum(1) if getattr(mask, "ndim", 0) == 2 else labels.new_ones(len(labels))
    )  # [batch]
    first = lengths.argmax()
    order = lengths + lengths.max() * (labels == labels[first]).view(len(labels), -1).all(1)
    order[first] += 1
    return torch.stack([first, order.argmin()]).unique()


def _few_tokens(of_images: torch.Tensor, mask: torch.Tensor | None) -> slice:
    """The first ones behind all images; the last ones where rows are padded on the left; else all."""
    images = [*of_images.any(0).nonzero()]  # their places, in order
    end = PROBED_TOKENS + (int(images[-1]) + 1 if images else 0)
    if mask is None or mask[:, :end].any(1).all():
        return slice(end)
    return slice(None) if images else slice(-PROBED_TOKENS, None)


def loss_from_logits(
    model: nn.Module,
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | None = None,
) -> torch.Tensor:
    """The model's own loss function on the logits of a readout; ValueError where it takes others, or there is none."""
    pooled = (
        getattr(model, "loss_function", None) is ForSequenceClassificationLoss
    )  # of images and sounds, too
    name = "pooled_logits" if pooled else "logits"
    arguments = {
        name: logits,
        "labels": labels,
        "config": model.config,
        "vocab_size": logits.shape[-1],
    }
    if num_items_in_batch is not None:
        arguments["num_items_in_batch"] = num_items_in_batch
    try:
        return model.loss_function(**arguments)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"The loss of {type(model).__name__} cannot score the logits of `readout` ({error}); pass "
            "`layer_loss_fn(outputs, labels, num_items_in_batch=None)` to the trainer."
        ) from error
