"""How far one language model's predictions are from another's, without the logits of all tokens of either."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..compat import chunked_divergence
from ..readout.tiles import DEFAULT_TILE_ELEMENTS, TILE_ELEMENTS, HeadLoss


class HeadInput(NamedTuple):
    """What the head of a language model reads."""

    hidden: torch.Tensor  # [tokens, hidden], behind the final norm
    head: nn.Linear


def token_divergences(whole: HeadInput, short: HeadInput, form: HeadLoss) -> torch.Tensor:
    """KL(whole || short) of each token, float32 `[tokens]`, with a gradient for `short`.

    TRL's kernel computes it where TRL has one; else chunks of logits are made, and once more for the gradient.
    """
    kernel = chunked_divergence()
    if kernel is None:
        return _by_chunks(whole, short, form)
    forward_kl = 0.0
    temperature = 1.0
    divergences, _ = kernel.apply(
        short.hidden,
        short.head.weight,
        short.head.bias,
        whole.hidden,
        whole.head.weight,
        whole.head.bias,
        forward_kl,
        temperature,
        form.logit_scale,
        form.softcap,
        form.logit_scale,
        form.softcap,
    )
    return divergences


def _by_chunks(whole: HeadInput, short: HeadInput, form: HeadLoss) -> torch.Tensor:
    most_logits = TILE_ELEMENTS.get(short.hidden.device.type, DEFAULT_TILE_ELEMENTS)
    size = max(1, most_logits // short.head.out_features)

    def of_chunk(whole_hidden: torch.Tensor, short_hidden: torch.Tensor) -> torch.Tensor:
        return divergences(
            logits_of(HeadInput(whole_hidden, whole.head), form),
            logits_of(HeadInput(short_hidden, short.head), form),
        )

    chunks = zip(whole.hidden.split(size), short.hidden.split(size))
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


def logits_of(read: HeadInput, form: HeadLoss) -> torch.Tensor:
    """The logits float32 `[tokens, vocab]`."""
    logits = form.logit_scale * read.head(read.hidden).float()
    if form.softcap is None:
        return logits
    return form.softcap * torch.tanh(logits / form.softcap)


def divergences(whole: torch.Tensor, short: torch.Tensor) -> torch.Tensor:
    """KL(whole || short) of the distributions with these logits, `[..., classes]` -> float32 `[...]`."""
    whole_log = whole.float().log_softmax(-1)
    short_log = short.float().log_softmax(-1)
    return (whole_log.exp() * (whole_log - short_log)).sum(-1)
