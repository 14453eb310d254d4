"""All replays at once: one run of a model's tail for many layers, by `torch.func.vmap` over their stacked outputs.

A run of the tail is a few dozen small kernels, and a small model on a GPU takes the time that their launches take.
Stacking the outputs of layers takes memory, so it is done up to a number of bytes. Beyond it launches count for
little, and layers are replayed one by one.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .stack import tensors


# What the stacked outputs of layers may take, and in an evaluation what is made of them.
STACKED_BYTES = {"cpu": 2**24}
DEFAULT_STACKED_BYTES = 2**28


class SameDropout(TorchFunctionMode):
    """Draws the dropout of a batched run as that of a single one is drawn.

    `vmap` makes masks by another kernel than the fused one of a GPU, which would draw others from the same state.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not nn.functional.dropout:
            return func(*args, **(kwargs or {}))
        return self._dropout(*args, **(kwargs or {}))

    def _dropout(self, input, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return input
        ones = torch.ones(input.shape, dtype=input.dtype, device=input.device)
        return input * nn.functional.dropout(ones, p)


_linear = nn.functional.linear
_cross_entropy = nn.functional.cross_entropy


def quick_linear(input, weight, bias=None):
    """The linear layer of a batch of layers, without two kernels of torch's own, which multiplies the bias by 1."""
    # Under autocast the sum would have the type of the bias, float32, where torch's own may be in half precision.
    if bias is None or torch.is_autocast_enabled(input.device.type):
        return _linear(input, weight, bias)
    return _linear(input, weight) + bias


def quick_cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """The cross-entropy of a batch of layers, which torch puts together slowly, in Python."""
    others = (weight, size_average, reduce)
    is_mean = (
        reduction == "mean" and label_smoothing == 0 and all(value is None for value in others)
    )
    has_classes = target.dtype == torch.int64 and target.dim() == 1
    if not (is_mean and has_classes and input.dtype == torch.float32):
        return _cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    target = target.unsqueeze(1)  # [n, 1]
    is_ignored = target.eq(ignore_index)
    places = target.masked_fill(is_ignored, 0)
    scores = input.log_softmax(1).gather(1, places).masked_fill(is_ignored, 0.0)  # [n, 1]
    # The sign on the number, which has no gradient, saves a kernel in the backward pass.
    minus_counted = is_ignored.sum() - is_ignored.numel()
    return scores.sum() / minus_counted


_QUICK = {"linear": (_linear, quick_linear), "cross_entropy": (_cross_entropy, quick_cross_entropy)}


@contextmanager
def quick_functions():
    """Inside, those functions of torch that are slow for a batch of layers are replaced by the ones above.

    A function that is not torch's own stays: another library may have put it there, or another thread, by this same
    context.
    """
    functional = nn.functional
    replaced = [name for name, (own, _) in _QUICK.items() if getattr(functional, name) is own]
    for name in replaced:
        setattr(functional, name, _QUICK[name][1])
    try:
        yield
    finally:
        for name in replaced:
            setattr(functional, name, _QUICK[name][0])


def run_together(
    function: Callable[[Any], Any], layer_outputs: Sequence[Any]
) -> list[Any] | torch.Tensor:
    """`function` of each of the `layer_outputs`, tensors or nested containers of them, by a single run.

    Returns what `function` returns, once per layer; its tensors are parts of those of all layers. Where it returns a
    tensor, such as a loss, that is one tensor `[layers, ...]`. Raises whatever `function` raises under `vmap`: it can
    neither read values nor branch on them.
    """
    columns, structure = _columns(layer_outputs)
    # What all layers hand on, such as the position bias of T5, stays one tensor.
    stacks = [_is_stacked(column) for column in columns]
    inputs = [torch.stack(column) for column, stacked in zip(columns, stacks) if stacked]
    made = None  # where `function` returns no tensor: what it returns, and its structure

    def run(*stacked):
        nonlocal made
        stacked = iter(stacked)
        leaves = [
            next(stacked) if is_stacked else column[0]
            for column, is_stacked in zip(columns, stacks)
        ]
        if structure is None:
            (answer,) = leaves
        else:
            answer = pytree.tree_unflatten(leaves, structure)

        result = function(answer)
        if isinstance(result, torch.Tensor):
            return result
        made = pytree.tree_flatten(result)
        return [value for value in made[0] if isinstance(value, torch.Tensor)]

    on_cpu = inputs[0].device.type == "cpu"
    with quick_functions(), nullcontext() if on_cpu else SameDropout():
        all_results = torch.func.vmap(run, randomness="same")(*inputs)

    if made is None:
        return all_results
    return _results_of_layers(all_results, *made)


def _results_of_layers(
    all_results: list[torch.Tensor], values: list[Any], structure: pytree.TreeSpec
) -> list[Any]:
    """The results of each layer: in the places of the tensors among the `values`, parts of those of all layers."""
    are_tensors = [isinstance(value, torch.Tensor) for value in values]
    results = []
    for own in zip(*(tensor.unbind() for tensor in all_results)):
        own = iter(own)
        leaves = [
            next(own) if is_tensor else value for value, is_tensor in zip(values, are_tensors)
        ]
        results.append(pytree.tree_unflatten(leaves, structure))

    return results


def groups(
    layer_outputs: Sequence[Any], layers: Sequence[int], bytes_made: int, keeps: bool
) -> list[list[int]]:
    """The `layers` (1-based) in groups that are run together, in order.

    Args:
        layer_outputs: of all layers.
        bytes_made: what is made of one layer's output and lives as long as its group.
        keeps: whether all of it lives until a backward pass, that of other groups, too.
    """
    if not layers or not _alike([layer_outputs[layer - 1] for layer in layers]):
        return [[layer] for layer in layers]
    own = tensors(layer_outputs[layers[0] - 1])
    bytes_stacked = sum(tensor.numel() * tensor.element_size() for tensor in own)
    limit = STACKED_BYTES.get(own[0].device.type, DEFAULT_STACKED_BYTES)
    size = limit // max(1, bytes_stacked + bytes_made)
    if size < (len(layers) if keeps else 2):
        return [[layer] for layer in layers]
    return [list(layers[start : start + size]) for start in range(0, len(layers), size)]


def bytes_of(tree: Any) -> int:
    """The size of the floating-point tensors in nested containers."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in tensors(tree)
        if tensor.is_floating_point()
    )


def _columns(layer_outputs: Sequence[Any]) -> tuple[list[Sequence[Any]], pytree.TreeSpec | None]:
    """What the outputs hold, one column over the layers for each leaf, and their structure; `None` of tensors."""
    if isinstance(layer_outputs[0], torch.Tensor):  # what most layers return
        return [layer_outputs], None
    leaves = [pytree.tree_leaves(output) for output in layer_outputs]
    return list(zip(*leaves)), pytree.tree_structure(layer_outputs[0])


def _is_stacked(column: Sequence[Any]) -> bool:
    is_tensor = isinstance(column[0], torch.Tensor)
    return is_tensor and any(value is not column[0] for value in column)


def _alike(layer_outputs) -> bool:
    """Whether outputs can be stacked: the same containers with tensors of one shape, type and device."""
    if all(isinstance(output, torch.Tensor) for output in layer_outputs):
        return len({(output.shape, output.dtype, output.device) for output in layer_outputs}) == 1
    kinds = []
    for output in layer_outputs:
        leaves, structure = pytree.tree_flatten(output)
        kinds.append((structure, [_kind(leaf) for leaf in leaves]))
    return all(kind == kinds[0] for kind in kinds)


def _kind(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf)
