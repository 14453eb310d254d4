"""Which labels a model's logits predict: the shift of language models, trained prompts, decoder inputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .replay import output_loss


IGNORE_INDEX = -100


def names_of_labels(inputs: Mapping[str, Any], label_names: Sequence[str]) -> list[str]:
    """The names of a batch's labels; a custom loss may take `labels` that the model does not."""
    return [
        name
        for name in dict.fromkeys([*label_names, "labels", "shift_labels"])
        if inputs.get(name) is not None
    ]


def labels_of(inputs: Mapping[str, Any], label_names: Sequence[str]) -> Any | None:
    """The first of a batch's labels."""
    for name in (*label_names, "labels", "shift_labels"):
        if inputs.get(name) is not None:
            return inputs[name]
    return None


def are_token_labels(labels: Any) -> bool:
    """Whether labels are classes `[batch, seq]`."""
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def shifts_labels(labels: torch.Tensor, loss_of: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether the loss of labels like `labels` `[batch, seq]` predicts token t at t-1: a label of the first token
    alone then makes no loss, one of the second token does. Class names do not tell."""
    return not _has_loss(loss_of, labels, 0) and (
        labels.shape[1] == 1 or _has_loss(loss_of, labels, 1)
    )


def own_loss(
    model: nn.Module, inputs: Mapping[str, Any], name: str, labels: torch.Tensor
) -> torch.Tensor:
    """The model's own loss on `labels` in the place of a batch's labels `name`."""
    # MBart, for one, makes no decoder input of a row without labels.
    kept = with_decoder_inputs(model, inputs)
    kept = {
        key: value for key, value in kept.items() if key != "shift_labels"
    }  # which the loss would prefer
    return output_loss(model(**kept | {name: labels}))


@torch.no_grad()
def _has_loss(loss_of, labels, position) -> bool:
    """Whether labels `[batch, seq]` at only one position make a loss, other than that without labels."""
    none = torch.full_like(labels, IGNORE_INDEX)
    # Two, since a trained model may be so sure of one that its loss is 0; of this batch, so that the classes exist.
    for label in labels[labels != IGNORE_INDEX].unique()[:2].tolist() or [0]:
        single = none.clone()
        single[:, position] = label
        loss = float(loss_of(single))
        if (
            math.isfinite(loss)
            and loss != 0
            and not math.isclose(loss, loss_of(none), rel_tol=1e-6)
        ):
            return True

    return False


def with_decoder_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`inputs` with the decoder's, which an encoder-decoder makes of its labels, where it has a method for that."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    names = ("decoder_input_ids", "decoder_inputs_embeds")
    has_inputs = any(inputs.get(name) is not None for name in names)
    if make is None or has_inputs or inputs.get("labels") is None:
        return inputs
    if not model.config.is_encoder_decoder:
        return inputs
    return {**inputs, "decoder_input_ids": make(inputs["labels"])}


def documents_of(inputs: Mapping[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The number of the document that each token is of, like `labels` `[batch, seq]`, and the number of documents: a
    row is one, unless its `position_ids` begin anew. `labels` may leave out the first token, which they shift to."""
    rows, length = labels.shape
    positions = inputs.get("position_ids")
    if positions is None or positions.dim() != 2 or len(positions) != rows:
        return torch.arange(rows, device=labels.device)[:, None].expand(rows, length), rows
    begins = positions.eq(0)
    begins[:, 0] = True
    documents = begins.flatten().cumsum(0).view_as(begins) - 1
    return documents[:, :length], int(documents[-1, -1]) + 1
