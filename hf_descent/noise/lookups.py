"""Where a text model looks its tokens up."""

from collections.abc import Iterator

import torch
from torch import nn


TABLE_CHUNK = 1024  # rows of an embedding table looked up at once


def find_lookups(model: nn.Module) -> list[nn.Module]:
    """The modules that look tokens up: `get_input_embeddings()` first, then those that share its table (T5 calls those
    alone); ValueError where there is none, or a second table."""
    try:
        lookup = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        lookup = None
    if lookup is None:
        raise ValueError(
            f"{type(model).__name__} has no input embeddings to perturb: define `get_input_embeddings()`, or set "
            "`main_input_name` to the floating-point input to perturb."
        )
    config = getattr(model, "config", None)
    second = getattr(getattr(config, "text_config", config), "hidden_size_per_layer_input", None)
    if second or getattr(config, "model_type", None) == "xlnet":
        raise ValueError(
            f"{type(model).__name__} looks its tokens up a second time for its layers, past the noise (or, as XLNet, "
            "with the batch last). Use another model, or no noise."
        )
    weight = getattr(lookup, "weight", None)
    twins = (m for m in model.modules() if isinstance(m, nn.Embedding) and m.weight is weight and m is not lookup)
    # PEFT's LoRA adds to what the table gives: its wrapper is the lookup.
    wrappers = {module.base_layer: module for module in model.modules() if hasattr(module, "base_layer")}
    return list(dict.fromkeys(wrappers.get(module, module) for module in (lookup, *twins)))


@torch.no_grad()
def look_up(lookup: nn.Module, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """The embeddings `[chunk, hidden]` of `ids`, some at a time: whole tables are large."""
    yield from map(lookup, ids.split(TABLE_CHUNK))
