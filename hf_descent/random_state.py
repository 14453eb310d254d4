"""The states of the random generators that a forward may draw from: python's, numpy's, torch's and the devices'."""

import random
from contextlib import contextmanager

import numpy as np
import torch


def accelerators(model) -> list[torch.device]:
    """The devices other than the CPU that hold parameters of `model`."""
    return sorted({p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}, key=str)


def torch_states(devices) -> list[torch.Tensor]:
    """The states of torch's generators: the CPU's, then those of `devices`."""
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


def set_torch_states(states, devices):
    """Put back what [`torch_states`] gave for the same devices."""
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:]):
        torch.get_device_module(device).set_rng_state(state, device)


@contextmanager
def preserved(devices):
    """Whatever is drawn inside, the generators continue afterwards as if nothing had been."""
    states = random.getstate(), np.random.get_state(), torch_states(devices)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        set_torch_states(states[2], devices)
