"""An accelerator for machines without one. Tensors on the device "pretend" are the CPU's in disguise, with its
arithmetic and its random numbers, but an operation that mixes them with tensors on the CPU fails, as on a GPU, and so
does one in float64, as on MPS. What is not as there: generators of the CPU are taken, the global random state is the
CPU's, and weights that move are tied no more. To import this is to register the device, for the whole process."""

import torch
from accelerate import PartialState
from torch import library
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)


COPIES = ("copy_", "_to_copy")
STRICT = (
    "cat",
    "stack",
    "embedding",
    "index_select",
    "gather",
)  # which take no single number from the CPU either


class Pretend(torch.Tensor):
    """A tensor on the device; `own` has its values."""

    @staticmethod
    def __new__(cls, own):
        layout = {
            "strides": own.stride(),
            "storage_offset": own.storage_offset(),
            "dtype": own.dtype,
        }
        tensor = cls._make_wrapper_subclass(cls, own.size(), **layout, device=DEVICE)
        tensor.own = own
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, *args, **(kwargs or {}))

    # What torch has in C++ and knows no subclass of.

    def __getitem__(self, index):
        return super().__getitem__(
            torch.tensor(index, device=DEVICE) if isinstance(index, list) else index
        )

    def __format__(self, spec):
        return format(self.item(), spec)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        self.own.copy_(value.own)

    def untyped_storage(self):
        return self.own.untyped_storage()

    def tolist(self):
        return self.own.tolist()


def run(function, *args, **kwargs):
    """The operation `function`, of which an argument is on the device or which makes a tensor there."""
    name, device = function.__name__.split(".")[0], kwargs.get("device")
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    there = {id(value.own): value for value in tensors if isinstance(value, Pretend)}
    into = isinstance(args[0], Pretend) if args else False
    may_mix = name in COPIES or (name == "index" and into)  # by indices on the CPU
    left = [
        value
        for value in tensors
        if not isinstance(value, Pretend) and (value.ndim or name in STRICT)
    ]
    if there and left and not may_mix:
        raise RuntimeError(f"{name} on {DEVICE} of what is on the CPU")
    stays = into if name == "copy_" else device is None or device.type == DEVICE.type
    args, kwargs = tree_map(_on_cpu, (args, kwargs))
    with torch.no_grad():
        result = function(*args, **kwargs)

    def disguised(value):
        if not isinstance(value, torch.Tensor):
            return value
        if value.dtype == torch.float64:
            raise TypeError(f"{name} gives float64, which {DEVICE} does not have")
        tensor = (
            there[id(value)] if id(value) in there else Pretend(value)
        )  # what was written into stays itself
        assert tensor.shape == value.shape, f"{name} gives tensors another shape"
        return tensor

    return tree_map(disguised, result) if stays else result


def _on_cpu(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.own if isinstance(value, Pretend) else value


class Backend(_DummyBackendModule):
    """torch.pretend: as much of it as is asked for."""

    def get_amp_supported_dtype(self):
        return []

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)


class Generator(torch.Generator):
    """The CPU's, for tensors of the device, too."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls)
        generator.pretended = torch.device(device)
        return generator

    @property
    def device(self):
        return self.pretended


def on_cpu_first(factory):
    return lambda *args, device=None, **settings: factory(*args, **settings).to(device or "cpu")


class OnAccelerator:
    """Before a class of training arguments: they train on the device."""

    @property
    def device(self):
        assert super().device.type == "cpu"
        PartialState().device = DEVICE
        self._n_gpu = 1
        return DEVICE


_setup_privateuseone_for_python_backend("pretend", backend_module=Backend())
DEVICE = torch.device("pretend", 0)
operations = library.Library("_", "IMPL")  # registered while this object lives
operations.fallback(run, "PrivateUse1")
torch.Generator = Generator
torch.tensor, torch.arange = on_cpu_first(torch.tensor), on_cpu_first(torch.arange)
torch.Tensor.pin_memory = lambda self, device=None: self
torch.accelerator.synchronize = lambda device=None: None
