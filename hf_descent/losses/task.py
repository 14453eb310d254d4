"""From a model's outputs to its layer losses: how many items a batch holds, and what each layer loses on them."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..noise.lookups import num_prompts
from ..readout.replay import Readout, output_loss


IGNORE_INDEX = -100


def count_items(
    inputs: Mapping[str, Any], label_names: Sequence[str], shifts_labels: bool, of_rows: bool = False
) -> torch.Tensor | None:
    """Number of items that a batch's mean loss averages over, a scalar tensor; `None` where no tensor of labels is.

    Items are the labels that are not ignored (-100), as Trainer counts them; every number where labels are floating;
    all rows where the loss averages over rows (`of_rows`).
    """
    labels = predicted_labels(inputs, label_names, shifts_labels)
    if not isinstance(labels, torch.Tensor):
        return None
    if labels.is_floating_point():
        return torch.full((), labels.numel(), device=labels.device)
    if of_rows:
        return torch.full((), len(labels), device=labels.device)
    return labels.ne(IGNORE_INDEX).sum()


def predicted_labels(inputs: Mapping[str, Any], label_names: Sequence[str], shifts_labels: bool) -> Any | None:
    """The first of a batch's labels, without those that nothing predicts: a causal language model's
    (`shifts_labels`) of the first token."""
    shifted = inputs.get("shift_labels")
    labels = labels_of(inputs, label_names) if shifted is None else shifted
    return labels[..., 1:] if shifts_labels and shifted is None and isinstance(labels, torch.Tensor) else labels


def averages_over_rows(model: nn.Module) -> bool:
    """Whether a model's own loss weighs rows alike, however many labels they have, as connectionist temporal
    classification does. (Its sum over a batch is no average, but Trainer, too, averages the sums over batches.)"""
    return type(model).__name__.endswith("ForCTC")


def labels_of(inputs: Mapping[str, Any], label_names: Sequence[str]) -> Any | None:
    """The first of a batch's labels; a loss function of one's own may take `labels` that the model does not."""
    names = (*label_names, "labels", "shift_labels")
    return next((inputs[name] for name in names if inputs.get(name) is not None), None)


def of_tokens(labels: Any) -> bool:
    """Whether labels are classes `[batch, seq]`."""
    return isinstance(labels, torch.Tensor) and labels.dim() == 2 and not labels.is_floating_point()


def aligned(
    model: nn.Module, logits: torch.Tensor, labels: torch.Tensor, shifts_labels: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits `[batch, n, classes]` that predict labels of tokens, and these labels `[batch, n]`; `model` may be a
    `PeftModel`."""
    shifted = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    prompt = num_prompts(model, "inputs_embeds" if shifted else "decoder_inputs_embeds")
    if prompt and logits.shape[1] == prompt + labels.shape[1]:
        # The last position of a trained prompt predicts the first token, but in a decoder that has the tokens shifted.
        return (logits[:, prompt - 1 : -1] if shifted else logits[:, prompt:]), labels
    return (logits[:, :-1], labels[:, 1:]) if shifts_labels else (logits, labels)


def shifts_labels(
    model: nn.Module, inputs: Mapping[str, Any], name: str = "labels", loss_of: Callable | None = None
) -> bool:
    """Whether a model's own loss on the labels `name` `[batch, seq]`, or `loss_of(labels)`, predicts token t at t-1:
    of labels that stand alone the first token's is then of no use to it, the second's, where there is one, is.

    Class names do not tell: GPT2LMHeadModel shifts its labels, the causal language models of XLNet and BART do not.
    Nor need the losses, since those of an untrained model hardly differ.
    """
    labels, loss_of = inputs[name], loss_of or partial(_own_loss, model, inputs, name)
    return not _has_loss(loss_of, labels, 0) and (labels.shape[1] == 1 or _has_loss(loss_of, labels, 1))


def ignores_masked_labels(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model's own loss leaves out labels of positions that the attention mask hides."""
    mask = inputs.get("attention_mask")
    if getattr(mask, "shape", None) != inputs["labels"].shape:
        return False
    seen = torch.ones_like(mask)  # [batch, seq]
    hidden = seen.clone()
    hidden[:, -1] = 0

    def counts_last(mask):
        loss_of = partial(_own_loss, model, {**inputs, "attention_mask": mask}, "labels")
        return _has_loss(loss_of, inputs["labels"], -1)

    return not counts_last(hidden) and counts_last(seen)


def _own_loss(model, inputs, name, labels) -> torch.Tensor:
    """The model's own loss on `labels` in the place of a batch's."""
    # MBart, for one, makes no decoder input of a row without labels.
    kept = with_decoder_inputs(model, inputs)
    kept = {key: value for key, value in kept.items() if key != "shift_labels"}  # which the loss would prefer
    return output_loss(model(**with_named_outputs(model, {**kept, name: labels})))


@torch.no_grad()
def _has_loss(loss_of, labels, position) -> bool:
    """Whether labels `[batch, seq]` at one position alone make a loss that no label makes."""
    none = torch.full_like(labels, IGNORE_INDEX)
    # Two, since a trained model may be so sure of one that nothing is lost on it; of this batch, whose classes exist.
    for label in labels[labels != IGNORE_INDEX].unique()[:2].tolist() or [0]:
        alone = none.clone()
        alone[:, position] = label
        loss = float(loss_of(alone))
        if math.isfinite(loss) and loss != 0 and not math.isclose(loss, loss_of(none), rel_tol=1e-6):
            return True
    return False


def needs_decoder_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Whether a model makes the input of its decoder from the labels."""
    given = any(inputs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) and not given


def with_decoder_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`inputs` with what an encoder-decoder makes of its labels for its decoder, where it has a method for that."""
    make = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if make is None or inputs.get("labels") is None or not needs_decoder_inputs(model, inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(inputs["labels"])}


def with_named_outputs(model: nn.Module, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """`inputs` with which a model returns names for its outputs, though its config may ask for tuples."""
    returns_tuples = getattr(getattr(model, "config", None), "return_dict", True) is False
    return {**inputs, "return_dict": True} if returns_tuples else inputs


def loss_from_logits(
    model: nn.Module, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None
) -> torch.Tensor:
    """The model's own loss function on the logits of a readout; ValueError where the model has none."""
    loss_function = getattr(model, "loss_function", None)
    if loss_function is None:
        raise ValueError(
            f"`readout` gives logits, but {type(model).__name__} has no `loss_function` to score them with; pass "
            "`layer_loss_fn(outputs, labels, num_items_in_batch=None)` to the trainer."
        )
    pooled = getattr(model, "loss_type", None) == "ForSequenceClassification"
    arguments = {"labels": labels, "config": model.config, "vocab_size": logits.shape[-1]}
    arguments["pooled_logits" if pooled else "logits"] = logits
    if num_items_in_batch is not None:
        arguments["num_items_in_batch"] = num_items_in_batch
    try:
        inspect.signature(loss_function).bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"`readout` gives logits, but the loss of {type(model).__name__} takes other arguments ({error}); pass "
            "`layer_loss_fn(outputs, labels, num_items_in_batch=None)` to the trainer."
        ) from error
    return loss_function(**arguments)


def loss_of_ones_own(
    loss_fn: Callable[..., torch.Tensor], model: nn.Module, outputs: Any, labels: Any, items: torch.Tensor | None
) -> torch.Tensor:
    """`loss_fn` on one layer's outputs; ValueError where it asks for what these do not hold."""
    try:
        return loss_fn(outputs, labels, num_items_in_batch=items)
    except (AttributeError, KeyError, TypeError) as error:
        held = ", ".join(outputs) if isinstance(outputs, Mapping) else "a tuple"
        raise ValueError(
            f"The loss function fails on what {type(model).__name__} returns at one layer ({held}) with {error!r}. It "
            "has no hidden states, attentions or cache there: score the logits alone, and leave `return_dict=True` in "
            "the model's config."
        ) from error


def layer_losses(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss when it stops after each layer, on one batch with labels; float32 `[L]`.

    Runs in the model's present mode (train or eval) and under the ambient grad mode; each loss carries its graph.

    Raises:
        ValueError: when the batch has no labels (the model gives no loss), or the model has no shared readout.
    """
    losses, inputs = [], with_named_outputs(model, inputs)

    def keep(layer, outputs, hidden):
        loss = output_loss(outputs)
        if loss is None or loss.dim():  # a tuple without a loss begins with the logits
            raise ValueError("`inputs` give no loss; add `labels`.")
        losses.append(loss)

    with Readout.probe(model, inputs).attach(keep):
        model(**inputs)
    return torch.stack(losses).float()  # [layers]
