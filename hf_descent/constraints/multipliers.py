"""The dual side: one Lagrange multiplier per constraint, raised where that is violated.

One dual step (paper, Algorithm 1 and Appendix A.5), on the violations g of the same optimizer step's forward pass:

    lambda <- [lambda + eta d]_+ ,   d = g - c lambda   (weight decay form)   or   d = g - u   (slack form)
    u      <- [u - eta_u (u / c - lambda)]_+            (slack form only)

`c` is the resilience coefficient (0: hard constraints). Both forms settle at lambda = [g]_+ / c. With `optim="adam"`
the directions `d` and `u / c - lambda` are passed through Adam, as in the paper: the term c lambda belongs to the
gradient (coupled), and a multiplier then moves by about eta a step whatever the size of the violation.

With `optim="pi"` they go through a PI controller (nuPI; Sohrabi et al. 2024, arXiv 2406.04558), here on bounded
directions, d' = d / `BOUND` within [-1, 1]:

    lambda <- [lambda + eta (d' + K (m - m_before))]_+ ,   m <- 0.9 m + 0.1 d'

The second term damps: a multiplier stops to grow as soon as its violation falls. Bounded, the violations of the first
steps, which can be a hundred times those that count in the end, neither hurl the multipliers up nor, as the second
moment of Adam, slow them down later.

The guard on the last layer (`guard.py`) limits what a rule may do. A multiplier takes only the given share of each
change, up or down: if growth alone were cut, a violation that swings around zero would take the multipliers down step
by step. With the flag `shrinks` a multiplier becomes smaller by the share `SHRINKAGE` at least. The moments of the
rule go on meanwhile, so that it knows the present violations when it may act again.

Multipliers live on the host. A step of them is two dozen operations on a few numbers, which a GPU would take longer to
launch than to compute.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


OPTIMS = ("adam", "pi", "sgd")
RESILIENCE_FORMS = ("weight_decay", "slack")


class Multipliers:
    """Multipliers lambda `[L]` (and slacks u `[L]`) with their optimizer state, in float32 on the CPU.

    Args:
        num_layers (`int`): number L of multipliers: of layers, or the `num_rows` of a [`DescentProblem`] with targets.
        learning_rate (`float`): dual step size eta > 0.
        optim (`str`): "adam", "pi" or "sgd" (plain projected ascent).
        resilience (`float`): coefficient c >= 0; 0 keeps the constraints hard.
        resilience_form (`str`): "weight_decay" or "slack".
        slack_learning_rate (`float`): step size eta_u > 0 of the slacks; c in its place where "sgd" would not settle.
        maximum (`float`, *optional*): cap on every multiplier.

    ValueError for an `optim` or a `resilience_form` of another name.
    """

    BETAS = (0.9, 0.999)
    EPSILON = 1e-8
    SHRINKAGE = 0.2  # the share by which a step shrinks multipliers that have to
    # Of "pi": violations count as at most BOUND, and DAMPING is K.
    BOUND, DAMPING = 0.05, 200.0
    _TENSORS = (
        "values",
        "slacks",
        "mean",
        "square",
        "slack_mean",
        "slack_square",
        "steps",
        "slack_steps",
    )

    values: torch.Tensor
    slacks: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    slack_mean: torch.Tensor
    slack_square: torch.Tensor
    steps: torch.Tensor
    slack_steps: torch.Tensor

    def __init__(
        self,
        num_layers: int,
        learning_rate: float,
        optim: str = "adam",
        resilience: float = 0.0,
        resilience_form: str = "weight_decay",
        slack_learning_rate: float = 0.02,
        maximum: float | None = None,
    ):
        check_choice("optim", optim, OPTIMS)
        check_choice("resilience_form", resilience_form, RESILIENCE_FORMS)
        self.learning_rate = learning_rate
        self.optim = optim
        self.resilience = resilience
        self.uses_slacks = resilience_form == "slack" and resilience > 0
        # With sgd the slack diverges if eta_u >= 2 c.
        jumps = optim == "sgd" and slack_learning_rate >= 2 * resilience
        self.slack_learning_rate = resilience if jumps else slack_learning_rate
        self.maximum = maximum
        for name in self._TENSORS:
            size = 1 if name.endswith("steps") else num_layers
            setattr(self, name, torch.zeros(size, dtype=torch.float32))

    def step(
        self,
        violations: torch.Tensor | np.ndarray,
        share: float = 1.0,
        shrinks: bool = False,
    ) -> None:
        """One dual step on the violations `[L]`; a step with a non-finite violation changes nothing.

        Of each change the multipliers take the share `share`, from 0 to 1; with `shrinks` all shrink, whatever the
        violations.
        """
        violations = _as_array(violations)
        if not np.isfinite(violations).all():
            return

        before = self.values.numpy()
        gradient = violations
        if self.resilience > 0:
            gradient = violations - self.relaxation.numpy()  # [layers]
        ascent = self._direction("", gradient)
        values = (before + self.learning_rate * ascent).clip(min=0, max=self.maximum)

        if share < 1:
            values = before + share * (values - before)
        if shrinks:
            values = np.minimum(values, (1 - self.SHRINKAGE) * before)

        if self.uses_slacks:
            # Simultaneous update: the slacks see the multipliers from before this step.
            slacks = self.slacks.numpy()
            descent = self._direction("slack_", slacks / self.resilience - before)
            self.slacks = _as_tensor((slacks - self.slack_learning_rate * descent).clip(min=0))
        self.values = _as_tensor(values)

    @property
    def relaxation(self) -> torch.Tensor:
        """The violations that resilience relaxes at present, `[L]`."""
        return self.slacks if self.uses_slacks else self.resilience * self.values

    def restart_slacks(self) -> None:
        """Clamp the slacks to zero (paper, Appendix B.2), with their optimizer state, which would undo the clamp."""
        for slack_state in (self.slacks, self.slack_mean, self.slack_square, self.slack_steps):
            slack_state.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name: multipliers, slacks and optimizer state, each float32 (`[L]`, the step count `[1]`)."""
        return {name: getattr(self, name).clone() for name in self._TENSORS}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `state_dict` gave; ValueError when names, shapes or values do not make a dual state."""
        for name in self._TENSORS:
            current = getattr(self, name)
            if name not in state or state[name].shape != current.shape:
                shape = tuple(state[name].shape) if name in state else "nothing"
                raise ValueError(
                    f"The dual state holds {shape} for '{name}' where {tuple(current.shape)} is needed."
                )
            if not state[name].isfinite().all() or (
                not name.endswith("mean") and (state[name] < 0).any()
            ):
                raise ValueError(f"The dual state '{name}' holds negative or non-finite values.")
            setattr(self, name, state[name].to(current, copy=True))

    def _direction(self, prefix: str, gradient: np.ndarray) -> np.ndarray:
        """The direction `[L]` of plain ascent, the controller or Adam; their state, whose names begin with `prefix`,
        takes the gradient in."""
        steps = getattr(self, f"{prefix}steps").numpy() + np.float32(1)
        mean = getattr(self, f"{prefix}mean").numpy()
        square = getattr(self, f"{prefix}square").numpy()
        beta1, beta2 = self.BETAS

        if self.optim == "sgd":
            direction = gradient
        elif self.optim == "pi":
            bounded = (gradient / self.BOUND).clip(-1, 1)
            before = mean if steps > 1 else bounded
            mean = before + (1 - beta1) * (bounded - before)
            direction = bounded + self.DAMPING * (mean - before)
        else:
            mean = mean + (1 - beta1) * (gradient - mean)
            square = square + (1 - beta2) * (gradient**2 - square)
            denominator = np.sqrt(square / (1 - beta2**steps)) + self.EPSILON
            direction = mean / (1 - beta1**steps) / denominator

        setattr(self, f"{prefix}steps", _as_tensor(steps))
        setattr(self, f"{prefix}mean", _as_tensor(mean))
        setattr(self, f"{prefix}square", _as_tensor(square))
        return direction


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """ValueError where the argument `name` is none of its choices."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; choose one of {', '.join(choices)}.")


def _as_array(values: Any) -> np.ndarray:
    """Values of any kind and place in float32 on the host."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().float().numpy()
    return np.asarray(values, dtype=np.float32)


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """A new tensor with the values of an array, in float32."""
    tensor = torch.empty(array.shape, dtype=torch.float32)
    tensor.numpy()[...] = array
    return tensor
