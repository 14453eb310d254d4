"""Counts the memory and the operations of what runs on fake tensors."""

import weakref
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ..readout.stack import LayerStack, tensors


PARTS = ("weights", "gradients", "optimizer", "hidden states", "readout")
_aten = torch.ops.aten


def _attention(formula, count, *args, **kwargs):
    """`formula` of the first `count` shapes; torch before 2.13 has none where heads share keys and values."""
    heads = max(tensor.shape[1] for tensor in args[:count])
    return formula(*((tensor.shape[0], heads, *tensor.shape[2:]) for tensor in args[:count]))


def _grouped_product(left, right, *_, **__):
    """Of experts: each row of `left` by the matrix of one of them."""
    return 2 * left.numel() * right.shape[-1]


# torch counts neither products that are added in place or of experts, nor attention on a CPU.
OPERATIONS = {
    **flop_registry,
    _aten.addmm_: flop_registry[_aten.addmm],
    _aten._grouped_mm: _grouped_product,
    _aten._scaled_dot_product_flash_attention_for_cpu: partial(_attention, sdpa_flop_count, 3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: partial(
        _attention, sdpa_backward_flop_count, 4
    ),
}


@dataclass
class _Storage:
    """A storage that is alive: the part that it counts for, its bytes, and what tells when it is freed."""

    part: str
    size: int
    freed: weakref.ref


class Meter(TorchDispatchMode):
    """Counts memory and operations of what runs inside, for the part that `part` names: the bytes of each part that
    are `alive` now, those of the moment when they were most in all, its `peak`, and the `operations` of each."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.part = "weights"
        self.alive = Counter()
        self.peak = Counter()
        self.operations = Counter()
        self._storages: dict[int, _Storage] = {}
        self._gathered = {}  # id of a storage -> a tensor that lives on when FSDP2 frees its memory
        for tensor in (*model.parameters(), *model.buffers()):
            self.hold(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if kwargs is None:
            kwargs = {}
        out = _result(func, args, kwargs)

        count = OPERATIONS.get(func._overloadpacket)
        if count is not None:
            self.operations[self.part] += count(*args, **kwargs, out_val=out)
        copies_weights = func is _aten._to_copy.default and self._is_weight(args[0])
        for tensor in tensors(out):
            is_copy = copies_weights and tensor.itemsize == 2  # as of autocast
            self.hold(tensor, "weights" if is_copy else None)
        if func.namespace == "fsdp":
            self._hold_shards(func, args, kwargs)

        if self.alive.total() > self.peak.total():
            for tensor in self._gathered.values():
                self.hold(tensor)  # of which some may be freed
            self.peak = max(self.alive.copy(), self.peak, key=Counter.total)
        return out

    def start(self, part: str) -> Counter:
        """Count for `part` from now on, with a peak of its own; gives the peak so far."""
        before = self.peak
        self.peak = Counter()
        self.part = part
        return before

    def follow(self, stack: LayerStack, trained: list[nn.Parameter]) -> list:
        """Set `part` in the next passes: what follows the last layer is the readout's. Returns the hooks' handles."""
        self.part = "hidden states"
        calls = []

        def enter_backward_of_layers(grad):
            self.part = "hidden states"

        def leave_layer(layer, args, output):
            calls.append(layer)
            if len(calls) == stack.num_layers:  # later ones are repeated for the backward pass
                self.part = "readout"
                stack.hidden_state(output).register_hook(enter_backward_of_layers)

        def hold_gradient(weight):
            self.hold(weight.grad, "gradients")

        hooks = [layer.register_forward_hook(leave_layer) for layer in stack.layers]
        hooks += [weight.register_post_accumulate_grad_hook(hold_gradient) for weight in trained]
        return hooks

    def hold(self, tensor: torch.Tensor, part: str | None = None) -> None:
        """Count the memory that a tensor has now; where `part` is given for that part, also if another had it."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = id(storage)
        if key not in self._storages:
            freed = weakref.ref(storage, partial(self._free, key))
            self._storages[key] = _Storage(self.part, 0, freed)
        known = self._storages[key]
        self.alive[known.part] -= known.size
        if part is not None:
            known.part = part
        known.size = storage.nbytes()
        self.alive[known.part] += known.size

    def _free(self, key: int, _) -> None:
        known = self._storages.pop(key)
        self.alive[known.part] -= known.size

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        known = self._storages.get(id(tensor.untyped_storage()))
        return known is not None and known.part == "weights"

    def _hold_shards(self, func, args, kwargs) -> None:
        """Count what an operation of FSDP2 has written into tensors that it was given."""
        is_gradient = func is torch.ops.fsdp.chunk_cat.default
        for tensor in tensors((args, kwargs)):
            self.hold(tensor, "gradients" if is_gradient else "weights")
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            for tensor in kwargs["out"]:
                self._gathered[id(tensor.untyped_storage())] = tensor


def _result(func, args, kwargs) -> Any:
    """What an operation gives on fake tensors."""
    if func is _aten._grouped_mm.default:  # whose fake results torch has in bf16 alone
        left, right = (tensor.bfloat16() for tensor in args[:2])
        return func(left, right, *args[2:], **kwargs).to(args[0].dtype)
    return func(*args, **kwargs)
