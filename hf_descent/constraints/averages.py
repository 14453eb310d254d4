"""Running averages of layer losses."""

from collections.abc import Sequence

import numpy as np
import torch


AVERAGE_DECAY = 0.98  # running averages look back about 50 steps


class LossAverages:
    """Averages of the layer losses `[L]` over about the last 50 steps.

    Args:
        num_layers (`int`): number of layers L.
        steps_per_reading (`int`): optimizer steps from one call of `add` to the next.
    """

    def __init__(self, num_layers: int, steps_per_reading: int):
        self._steps_per_reading = steps_per_reading
        self._rate = 1 - AVERAGE_DECAY**steps_per_reading
        # Decaying sums of the layer losses [layers], of 1 and of f_L^2. Divided by the sum of 1, the others are means
        # from the first step on.
        self._losses = [0.0] * num_layers
        self._weight = 0.0
        self._square = 0.0

    def add(self, layer_losses: Sequence[float]) -> None:
        """Take in losses `[L]`, which stand for all steps since the last call."""
        last = layer_losses[-1]
        self._losses = [
            total + self._rate * (loss - total) for total, loss in zip(self._losses, layer_losses)
        ]
        self._weight += self._rate * (1 - self._weight)
        self._square += self._rate * (last * last - self._square)

    @property
    def weight(self) -> float:
        """0 before the first losses; approaches 1."""
        return self._weight

    @property
    def means(self) -> np.ndarray:
        """The averages `[L]` in float32; NaN before the first losses."""
        if self.weight == 0:
            return np.full(len(self._losses), np.nan, dtype=np.float32)
        return np.array([total / self.weight for total in self._losses], dtype=np.float32)

    @property
    def last_loss(self) -> float | None:
        """The average of f_L; `None` before the first losses."""
        if self.weight == 0:
            return None
        return self._losses[-1] / self.weight

    def is_last_below(self, bound: float) -> bool:
        """Whether the average of f_L is below `bound` by twice its standard error; False for 5 readings or fewer."""
        mean = self.last_loss
        if mean is None:
            return False
        # n decaying weights w have the effective size sum(w)^2 / sum(w^2) = (1 + d) / (1 - d) * W / (2 - W), where
        # d is the decay of a step, W = 1 - d^n is the `weight`, and 1 + d is taken as 2. A reading stands for
        # `steps_per_reading` of these n steps.
        readings = 2 / (1 - AVERAGE_DECAY) * self.weight / (2 - self.weight)
        readings /= self._steps_per_reading
        if readings <= 5:
            return False
        variance = max(self._square / self.weight - mean**2, 0.0)
        # Successive readings are alike, so 5 fewer are counted, as a margin.
        return mean + 2 * (variance / (readings - 5)) ** 0.5 < bound

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name, in float64."""
        values = {
            "averages": self._losses,
            "average_weight": [self._weight],
            "square": [self._square],
        }
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` gave, among other tensors; ValueError if a shape or a value is wrong."""
        for name, own in self.state_dict().items():
            tensor = tensors[name]
            if tensor.shape != own.shape or not tensor.isfinite().all():
                raise ValueError(f"'{name}' is {tensor.tolist()}")

        self._losses = tensors["averages"].tolist()
        self._weight = tensors["average_weight"].item()
        self._square = tensors["square"].item()
