"""Exit heads: the parts that may be trained between a layer of a model and the head that its layers share.

Source of the affine map: Belrose et al. (2023), "Eliciting Latent Predictions from Transformers with the Tuned Lens",
arXiv 2303.08112. There it stands before the final norm; here behind it, where it becomes a part of the head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel, TrainerCallback

from ..readout.head import logged_tail
from ..readout.replay import output_logits, probing
from ..readout.stack import LayerStack, embeddings


EXIT_HEADS = ("norm", "affine", "block")


class AffineMap(nn.Linear):
    """x + A x + b, which is x at the start."""

    def __init__(self, width: int, like: torch.Tensor, bias: bool = True):
        super().__init__(width, width, bias, device=like.device, dtype=like.dtype)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def check_exit_head(exit_head: str | None) -> None:
    """ValueError for an unknown exit head; `None` stands for no exit head."""
    if exit_head is not None and exit_head not in EXIT_HEADS:
        raise ValueError(f"`exit_head` is {exit_head!r}; choose of {', '.join(EXIT_HEADS)}.")


def layers_of_exit(layers: Sequence[int], num_layers: int, exit_head: str | None) -> list[int]:
    """The layers of a model that exits behind `layers`. The exit head "block" is one more layer, a copy of the
    last."""
    if exit_head != "block":
        return list(layers)
    if num_layers in layers:
        raise ValueError(
            f"`layers` is {layers!r} and `exit_head` 'block', a copy of layer {num_layers}: leave that layer out."
        )
    return [*layers, num_layers]


def prepare_exit_head(
    model: PreTrainedModel, stack: LayerStack, inputs: Mapping[str, Any], exit_head: str
) -> list[TrainerCallback]:
    """Let the norm behind the layers of `model` be trained, or an affine map, which is put in front of its head.

    Returns the callbacks that training needs. ValueError if there is no such norm, or no linear head.
    """
    with probing(model):
        _, _, calls = logged_tail(model, stack, inputs)
    tail = [call.module for call in calls]
    if exit_head == "norm":
        for norm in _norms(model, tail):
            norm.requires_grad_(True)
        return []

    linear = reading_linear(model, tail)
    untie(model, linear, inputs)
    # Of the rows of the weight, the map is the transpose of one in front of it: it folds into a plain weight.
    rows_map = AffineMap(linear.in_features, linear.weight, bias=False)
    parametrize.register_parametrization(linear, "weight", rows_map)
    if linear.bias is not None:
        linear.bias.requires_grad_(True)
    return [_FoldMap(linear)]


class _FoldMap(TrainerCallback):
    """Multiplies the head's weight by its map after training, which leaves a plain head."""

    def __init__(self, linear: nn.Linear):
        self._linear = linear

    def on_train_end(self, args, state, control, **kwargs):
        if parametrize.is_parametrized(self._linear, "weight"):
            parametrize.remove_parametrizations(self._linear, "weight")


def _norms(model: nn.Module, tail: Sequence[nn.Module]) -> list[nn.Module]:
    norms = [
        module
        for module in tail
        if "norm" in type(module).__name__.lower() and list(module.parameters())
    ]
    if not norms:
        raise ValueError(
            f"`exit_head` is 'norm', and {type(model).__name__} has none behind its layers: use 'affine' or 'block'."
        )
    return norms


def reading_linear(model: nn.Module, tail: Sequence[nn.Module]) -> nn.Linear:
    """The linear layer in front of which a map stands: the head of a language model, else the first linear one of the
    modules that run behind the layers, `tail`. ValueError if there is none."""
    linears = [module for module in tail if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no linear layer behind its layers, in which a map would be: use "
            "`exit_head='block'`."
        )
    head = embeddings(model, "output")
    return head if head in linears else linears[0]


def untie(model: PreTrainedModel, linear: nn.Linear, inputs: Mapping[str, Any]) -> None:
    """Give `linear` a weight that no other module of `model` shares, and say so in its config; ValueError if the model
    then predicts something else."""
    modules = [module for module in model.modules() if module is not linear]
    weights = {id(weight) for module in modules for weight in module.parameters(recurse=False)}
    if id(linear.weight) not in weights:
        return

    with probing(model):
        truth = output_logits(model(**inputs))
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = False
    is_trained = linear.weight.requires_grad
    linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=is_trained)
    model.tie_weights()  # ties the rest again
    with probing(model):
        logits = output_logits(model(**inputs))
    if embeddings(model, "input").weight is linear.weight or not torch.allclose(
        logits, truth, rtol=1e-4, atol=1e-5, equal_nan=True
    ):
        raise ValueError(
            f"{type(model).__name__} has no head apart from its embeddings, which a map would change: use "
            "`exit_head='block'`."
        )
