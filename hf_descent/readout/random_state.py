"""The states of the random generators that a forward may draw from: python's, numpy's, torch's and the devices'."""

import random
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree


# model -> (its first parameter, the device of that, what `accelerators` found)
_devices: WeakKeyDictionary = WeakKeyDictionary()


def accelerators(model) -> list[torch.device]:
    """The devices but the CPU on which `model` computes: where its parameters are, or where FSDP2 brings them.

    Kept from step to step, since the search through all modules takes longer than a kernel; found anew once another
    parameter is the first, or the model has moved.
    """
    first = next(model.parameters(), None)
    if first is None:
        return []
    known, device, devices = _devices.get(model, (None, None, None))
    if known is not first or device != first.device:
        devices = _accelerators_of(list(model.parameters()))
        _devices[model] = (first, first.device, devices)
    return devices


def _accelerators_of(parameters: list[torch.nn.Parameter]) -> list[torch.device]:
    devices = {parameter.device for parameter in parameters}
    meshes = {each.device_mesh.device_type for each in parameters if isinstance(each, DTensor)}
    for kind in meshes - {"cpu"}:
        devices.add(torch.device(kind, torch.get_device_module(kind).current_device()))
    return sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)


def torch_states(devices) -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's, then those of `devices`."""
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in devices),
    ]


def set_torch_states(states, devices):
    """Put back what [`torch_states`] gave for the same devices."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:]):
        torch.get_device_module(device).set_rng_state(state, device)


def python_states() -> tuple:
    """The states of python's and numpy's generators, comparable. It takes 0.1 ms and more to read or to set them."""
    of_numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    return random.getstate(), pytree.tree_map_only(np.ndarray, np.ndarray.tolist, of_numpy)


@contextmanager
def preserved(devices, torch_only=False):
    """What is drawn inside leaves the generators as they were; `torch_only` where nothing else is drawn from."""
    states = torch_states(devices)
    others = None
    if not torch_only:
        others = python_states()
    try:
        yield
    finally:
        set_torch_states(states, devices)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])  # noqa: NPY002
