"""A short form of a batch, on which a model is tried out in little time and memory."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..readout.labels import IGNORE_INDEX, are_token_labels, names_of_labels
from ..readout.stack import map_tensors, tensors


PROBED_TOKENS = 32  # of a row, where a model is tried out
BORDERS = ("cu_seq_lens", "max_length")  # names of inputs that tell where packed documents begin


def shortened(
    batch: Mapping[str, Any], labels: torch.Tensor, label_names: Iterable[str], config: Any
) -> Mapping[str, Any]:
    """Two rows of `batch` and, where its `labels` are of tokens, the first few of these. Some of them have a label.

    Rows or tokens stay as they are where the batch holds tensors that could not be cut with them. `config` is that of
    the model, or `None`.
    """
    ids = batch.get("input_ids")
    mask = batch.get("attention_mask")
    inputs = {name: value for name, value in batch.items() if not name.startswith(BORDERS)}
    values = [value for value in tensors(inputs) if value.dim()]
    of_tokens = _of_tokens(batch, values, labels)
    images = _image_tokens(ids, config)

    rows = slice(None)
    same_images = len(images.sum(1).unique()) == 1
    if same_images and all(len(value) == len(labels) for value in values):
        rows = _two_rows(labels, mask)
    tokens = slice(None)
    others = [value for value in values if id(value) not in of_tokens]
    if are_token_labels(labels) and _can_cut_tokens(labels, others, images, config):
        tokens = _few_tokens(images, mask)

    def shorten(value: torch.Tensor) -> torch.Tensor:
        if not value.dim():
            return value
        if value.dim() > 1 and id(value) in of_tokens:
            return value[rows][:, tokens].contiguous()
        return value[rows].contiguous()

    short = {**batch, **map_tensors(shorten, inputs)}
    for name in {"cu_seq_lens_q", "cu_seq_lens_k"} & batch.keys():
        short[name] = batch[name].clamp(max=short["labels"].shape[1]).unique()
    return _with_labels_that_count(short, labels, label_names)


def _of_tokens(
    batch: Mapping[str, Any], values: Iterable[torch.Tensor], labels: torch.Tensor
) -> set[int]:
    """The ids of the tensors that have a value for each token, as the labels do."""
    embeddings = {id(batch.get(name)) for name in ("inputs_embeds", "decoder_inputs_embeds")}
    ids = set()
    for value in values:
        # 80 bands of a sound may have the shape of 80 tokens.
        is_sound = value.dim() > 2 and value.is_floating_point() and id(value) not in embeddings
        if is_sound or value.shape[:2] != labels.shape:
            continue
        if not set(labels.shape[1:]) & set(value.shape[2:]):
            ids.add(id(value))
    return ids


def _image_tokens(ids: torch.Tensor | None, config: Any) -> torch.Tensor:
    """Where tokens stand for images, videos or sounds, `[batch, seq]`; `[1, 1]` without tokens."""
    if ids is None:
        return torch.zeros(1, 1)
    kinds = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")}
    return sum((ids == kind for kind in kinds - {None}), torch.zeros_like(ids))


def _can_cut_tokens(
    labels: torch.Tensor, others: list[torch.Tensor], images: torch.Tensor, config: Any
) -> bool:
    """Whether a model takes fewer tokens; `others` are the tensors of its batch that are not of tokens."""
    if getattr(config, "attention_type", None) == "block_sparse":
        return False  # BigBird is another model on few tokens
    if any(labels.shape[1] in value.shape[1:] for value in others):
        return False  # a part of these would have to be cut, too
    is_encoder_decoder = getattr(config, "is_encoder_decoder", False)
    return bool(not others or images.any() or is_encoder_decoder)


def _two_rows(labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Those with the most and the least padding and, where there are some, different labels."""
    lengths = labels.new_ones(len(labels))  # [batch]
    if getattr(mask, "ndim", 0) == 2:
        lengths = mask.sum(1)
    first = lengths.argmax()
    order = lengths + lengths.max() * (labels == labels[first]).view(len(labels), -1).all(1)
    order[first] += 1
    return torch.stack([first, order.argmin()]).unique()


def _few_tokens(images: torch.Tensor, mask: torch.Tensor | None) -> slice:
    """The first ones behind all images; the last ones where rows are padded on the left; else all."""
    places = [*images.any(0).nonzero()]  # of images, in order
    end = PROBED_TOKENS
    if places:
        end += int(places[-1]) + 1
    if mask is None or mask[:, :end].any(1).all():
        return slice(end)
    return slice(None) if places else slice(-PROBED_TOKENS, None)


def _with_labels_that_count(
    short: dict[str, Any], labels: torch.Tensor, label_names: Iterable[str]
) -> dict[str, Any]:
    """The short batch, with others of the batch's `labels` where none of its own count: they come later in each row,
    or in other rows."""
    counted = labels[labels != IGNORE_INDEX]
    if not len(counted):
        return short
    for name in names_of_labels(short, label_names):
        own = short[name]
        if are_token_labels(own) and not own[:, 1:].ne(IGNORE_INDEX).any():
            short[name] = counted[torch.arange(own.numel()) % len(counted)].view_as(own)
    return short
