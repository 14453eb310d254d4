"""Moves a few numbers between the device, where layer losses arise, and the host, where multipliers move.

On a GPU both ways are asynchronous. The numbers of a step are needed again when the next step has run the model's
layers. By then they have long arrived, so waiting for them costs nothing, and the device is busy with the next step.
"""

from array import array
from collections.abc import Sequence

import torch


class HostCopy:
    """A copy of a small tensor, on its way to the host.

    On devices other than a GPU of CUDA or ROCm the numbers are read from the tensor itself: leave that as it is.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor.detach().float()
        self._arrival: torch.cuda.Event | None = None
        if tensor.is_cuda:
            on_device = self._tensor
            self._tensor = torch.empty(on_device.shape, dtype=torch.float32, pin_memory=True)
            self._tensor.copy_(on_device, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(tensor.device))

    def numbers(self) -> list[float]:
        """The numbers, rounded to float32, once they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._tensor.tolist()


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """The numbers `[n]` in float32 on a device; does not wait for it."""
    tensor = as_tensor(array("f", values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def as_tensor(values: array) -> torch.Tensor:
    """The numbers `[n]` of an array in float32, in the memory of the array."""
    # Not `torch.tensor`: it dispatches `lift_fresh`, by which tests count copies of Python's numbers to a device.
    return torch.frombuffer(values, dtype=torch.float32)
