"""Readouts of a classifier by name: its own last linear layer on the mean of the tokens, or on the first one."""

from collections.abc import Callable

import torch
from torch import nn

from .stack import inner_model


POOLINGS = ("mean", "cls")
# What to say where layers stay at chance under a head that `reads_one_token`.
ONE_TOKEN = (
    "The head reads one token, such as [CLS], which early layers hardly use: "
    '`readout="mean"` reads the mean of the tokens.'
)


def pool(hidden: torch.Tensor, attention_mask: torch.Tensor | None, pooling: str) -> torch.Tensor:
    """Hidden states `[batch, seq, width]` to `[batch, width]`: the first token, or the mean of all but padding."""
    if pooling == "cls":
        return hidden[:, 0]
    mask = torch.ones_like(hidden[..., 0]) if attention_mask is None else attention_mask.to(hidden)
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def reads_one_token(model: nn.Module, readout: Callable | None = None) -> bool:
    """Whether `model` is a classifier of texts whose head reads one token ([CLS], or the last one), with no `readout`
    in the place of that head."""
    if readout is not None:
        return False
    model = inner_model(model)
    config = getattr(model, "config", None)
    reads_mean = "mean" in (
        getattr(config, "pooling", None),
        getattr(config, "classifier_pooling", None),
    )
    return type(model).__name__.endswith("SequenceClassification") and not reads_mean


def pooled_readout(model: nn.Module, pooling: str) -> Callable:
    """The `readout(model, hidden, inputs)` that the word `pooling` stands for; ValueError where `model` has none."""
    if pooling not in POOLINGS:
        raise ValueError(
            f"`readout` is {pooling!r}; give 'mean', 'cls' or `readout(model, hidden, inputs)`."
        )

    config = getattr(inner_model(model), "config", None)
    heads = linear_layers(model, getattr(config, "num_labels", None))
    if not heads:
        raise ValueError(
            f"`readout` is {pooling!r}, but {type(model).__name__} has no linear layer with one output per label."
        )

    return lambda model, hidden, inputs: heads[-1](
        pool(hidden, inputs.get("attention_mask"), pooling)
    )


def linear_layers(module: nn.Module, outputs: int | None) -> list[nn.Module]:
    """Those of a module with that many outputs; an adapted one as a whole, without the matrices of its adapter."""
    if getattr(module, "out_features", 0) == outputs:
        return [module]
    return [layer for child in module.children() for layer in linear_layers(child, outputs)]
