"""Layer losses as anyone would write them, for the tests of the tiled readout."""

import torch
from tiny.devices import TEST_DEVICE
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from hf_descent.readout import tiles


LAYERS, BATCH, SEQ, HIDDEN, VOCAB = 4, 3, 7, 8, 29
WEIGHTS = torch.tensor([0.7, -0.4, 0.0, 1.9], dtype=torch.float64, device=TEST_DEVICE)


def setting(bias=False, norm="rms", dtype=torch.float64, ignored=0.3):
    torch.manual_seed(0)
    with torch.device(TEST_DEVICE):
        hidden = [
            torch.randn(BATCH, SEQ, HIDDEN, dtype=dtype).requires_grad_() for _ in range(LAYERS)
        ]
        norm = {
            "rms": lambda: nn.RMSNorm(HIDDEN, eps=1e-6),
            "layer": lambda: nn.LayerNorm(HIDDEN),
            "none": nn.Identity,
        }[norm]().to(dtype)
        for parameter in norm.parameters():
            nn.init.normal_(parameter, mean=1.0)
        head = nn.Linear(HIDDEN, VOCAB, bias=bias, dtype=dtype)
        labels = torch.randint(VOCAB, (BATCH, SEQ))
        labels[torch.rand(BATCH, SEQ) < ignored] = -100
    return hidden, norm, head, labels


def naive_sums(hidden, norm, head, labels, head_loss=tiles.PLAIN_CROSS_ENTROPY, shift=True):
    """Layer losses as anyone would write them: all logits, transformers' own smoother."""
    sums = []
    for state in hidden:
        logits = head_loss.logit_scale * head(norm(state))
        if head_loss.softcap is not None:
            logits = head_loss.softcap * torch.tanh(logits / head_loss.softcap)
        smoother = LabelSmoother(epsilon=head_loss.label_smoothing)
        sums.append(smoother({"logits": logits}, labels, shift_labels=shift, num_items_in_batch=1))
    return torch.stack(sums)


def gradients(hidden, *modules):
    tensors = [*hidden, *(parameter for module in modules for parameter in module.parameters())]
    found = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return found


class Watch(TorchDispatchMode):
    """Counts the operations of matrix products, the elements of the largest tensor, and what waits for a device."""

    def __init__(self):
        super().__init__()
        self.flops = self.largest = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        # A number of Python's that becomes a tensor, or the reverse: a copy from or to the device.
        self.waits += name in ("lift_fresh", "_local_scalar_dense", "nonzero")
        if name in ("mm", "addmm"):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(
                    self.largest, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return out


class LiveStorage(TorchDispatchMode):
    """The most bytes that tensors made inside held at once, each memory counted once."""

    def __init__(self):
        super().__init__()
        self.peak, self._sizes = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if _is_tensor(t)
        }
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        for tensor in filter(_is_tensor, torch.utils._pytree.tree_leaves(out)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._sizes[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self._sizes.values()))
        return out


def _is_tensor(leaf):
    return isinstance(leaf, torch.Tensor)
