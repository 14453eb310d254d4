"""The Lagrange multipliers, one per constraint; a multiplier rises while its constraint is violated.

One dual step (paper, Algorithm 1 and Appendix A.5), on the violations g of the same optimizer step's forward pass:

    lambda <- [lambda + eta d]_+ ,   d = g - c lambda   (weight decay form)   or   d = g - u   (slack form)
    u      <- [u - eta_u (u / c - lambda)]_+            (slack form only)

`c` is the resilience coefficient (0: hard constraints). Both forms settle at lambda = [g]_+ / c. With `optim="adam"`
the directions `d` and `u / c - lambda` are passed through Adam, as in the paper: the term c lambda belongs to the
gradient (coupled), and a multiplier then moves by about eta a step whatever the size of the violation.

With `optim="pi"` the directions go through a PI controller (nuPI; Sohrabi et al. 2024, arXiv 2406.04558), and are
bounded first, d' = d / 0.05 within [-1, 1], with K = 200:

    lambda <- [lambda + eta (d' + K (m - m_before))]_+ ,   m <- 0.9 m + 0.1 d'

The second term damps: a multiplier stops growing as soon as its violation falls. The violations of the first steps can
be a hundred times those of the last ones. The bound keeps them from driving the multipliers up. In Adam they would
also slow the multipliers down later, through the second moment.

The guard on the last layer (`guard.py`) limits what a rule may do. A multiplier takes only the given share of each
change, up or down. If only growth were cut, a violation that swings around zero would take the multipliers down step
by step. With the flag `shrinks` a multiplier becomes smaller by at least the share `SHRINKAGE`. The moments of the
rule go on meanwhile, so that it knows the present violations when it may act again.

Multipliers live on the host, as plain Python numbers. A step of them is two dozen operations on a few numbers, and a
GPU or NumPy would take longer to begin an operation than Python takes to compute it.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .dual_rules import RULES, Moments, direction
from .transfer import as_tensor


OPTIMS = tuple(RULES)
RESILIENCE_FORMS = ("weight_decay", "slack")


class Multipliers:
    """Multipliers lambda `[rows]` (and slacks u `[rows]`) with their optimizer state, in float32 on the CPU.

    Args:
        num_layers (`int`): number of multipliers. Give the `num_rows` of a [`DescentProblem`]: it is the number of
            layers only if the problem has no targets.
        learning_rate (`float`): dual step size eta > 0.
        optim (`str`): "adam", "pi" or "sgd" (plain projected ascent).
        resilience (`float`): coefficient c >= 0; 0 keeps the constraints hard.
        resilience_form (`str`): "weight_decay" or "slack".
        slack_learning_rate (`float`): step size eta_u > 0 of the slacks; "sgd" takes c in place of
            an eta_u >= 2c, with which the slacks would diverge.
        maximum (`float`, *optional*): cap on every multiplier.

    Attributes:
        values, slacks (`torch.Tensor`): lambda and u. What you write into them counts; a step makes new ones.
        numbers (`array`): lambda in Python numbers, in the memory of `values`.

    ValueError for an `optim` or a `resilience_form` of another name.
    """

    SHRINKAGE = 0.2  # the share by which a step shrinks multipliers that have to

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
        diverges = optim == "sgd" and slack_learning_rate >= 2 * resilience
        self.slack_learning_rate = resilience if diverges else slack_learning_rate
        self.maximum = maximum
        self.numbers = array("f", [0.0] * num_layers)
        self._slacks = array("f", [0.0] * num_layers)
        self.moments = Moments(num_layers)
        self.slack_moments = Moments(num_layers)

    def step(
        self,
        violations: torch.Tensor | Iterable[float],
        share: float = 1.0,
        shrinks: bool = False,
    ) -> None:
        """Take one dual step on the violations `[rows]`; a step with a non-finite violation changes nothing.

        The multipliers take a `share` of each change, from 0 to 1. With `shrinks` all of them shrink, whatever the
        violations.
        """
        gradient: Sequence[float] = self._checked("violations", violations)
        if not all(map(math.isfinite, gradient)):
            return

        before = self.numbers
        if self.resilience > 0:
            gradient = [slope - allowed for slope, allowed in zip(gradient, self._relaxation())]
        ascent = direction(self.optim, gradient, self.moments)
        values = [
            max(value + self.learning_rate * move, 0.0) for value, move in zip(before, ascent)
        ]
        if self.maximum is not None:
            values = [min(value, self.maximum) for value in values]

        if share < 1:
            values = [old + share * (value - old) for value, old in zip(values, before)]
        if shrinks:
            values = [min(value, (1 - self.SHRINKAGE) * old) for value, old in zip(values, before)]

        if self.uses_slacks:
            # Simultaneous update: the slacks see the multipliers from before this step.
            gradient = [slack / self.resilience - old for slack, old in zip(self._slacks, before)]
            descent = direction(self.optim, gradient, self.slack_moments)
            rate = self.slack_learning_rate
            slacks = [max(slack - rate * move, 0.0) for slack, move in zip(self._slacks, descent)]
            self._slacks = array("f", slacks)
        self.numbers = array("f", values)

    @property
    def values(self) -> torch.Tensor:
        """The multipliers `[rows]` in float32. A write into the tensor changes them. A step leaves the tensor as it is
        and makes a new one; an assignment copies."""
        return as_tensor(self.numbers)

    @values.setter
    def values(self, values: torch.Tensor) -> None:
        self.numbers = self._checked("values", values)

    @property
    def slacks(self) -> torch.Tensor:
        """The slacks `[rows]` in float32, as `values` are."""
        return as_tensor(self._slacks)

    @slacks.setter
    def slacks(self, slacks: torch.Tensor) -> None:
        self._slacks = self._checked("slacks", slacks)

    @property
    def steps(self) -> int:
        """The number of steps so far."""
        return self.moments.steps

    @property
    def relaxation(self) -> torch.Tensor:
        """The violations that resilience allows at present, `[rows]`; a copy."""
        return as_tensor(self._relaxation()).clone()

    def _relaxation(self) -> array:
        if self.uses_slacks:
            return self._slacks
        return array("f", [self.resilience * value for value in self.numbers])

    def _checked(self, name: str, values: torch.Tensor | Iterable[float]) -> array:
        """A copy of values `[rows]`; ValueError if there are more or fewer."""
        numbers = _as_array(values)
        rows = len(self.numbers)
        if len(numbers) != rows:
            raise ValueError(
                f"`{name}` has {len(numbers)} numbers; give one for each of {rows} rows."
            )
        return numbers

    def restart_slacks(self) -> None:
        """Set the slacks to zero (paper, Appendix B.2), and their optimizer state, which would move them away
        again."""
        self._slacks = array("f", [0.0] * len(self._slacks))
        self.slack_moments = Moments(len(self._slacks))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name: multipliers, slacks and optimizer state, each float32 (`[rows]`, the step count `[1]`)."""
        tensors = {"values": self.values.clone(), "slacks": self.slacks.clone()}
        for prefix, moments in self._moments_by_prefix():
            tensors[prefix + "steps"] = torch.tensor([moments.steps], dtype=torch.float32)
            tensors[prefix + "mean"] = as_tensor(moments.mean).clone()
            tensors[prefix + "square"] = as_tensor(moments.square).clone()
        return tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `state_dict` gave; ValueError if names, shapes or values are wrong."""
        for name, current in self.state_dict().items():
            _check_loaded(name, state.get(name), current.shape)

        self.numbers = _as_array(state["values"])
        self._slacks = _as_array(state["slacks"])
        for prefix, moments in self._moments_by_prefix():
            moments.steps = int(state[prefix + "steps"].item())
            moments.mean = _as_array(state[prefix + "mean"])
            moments.square = _as_array(state[prefix + "square"])

    def _moments_by_prefix(self) -> list[tuple[str, Moments]]:
        """The moments of multipliers and slacks, each after the prefix of its names in a saved state."""
        return [("", self.moments), ("slack_", self.slack_moments)]


def _check_loaded(name: str, loaded: torch.Tensor | None, shape: torch.Size) -> None:
    """ValueError if a tensor of a dual state is absent, or has another shape or impossible values."""
    if loaded is None or loaded.shape != shape:
        found = "nothing" if loaded is None else tuple(loaded.shape)
        raise ValueError(
            f"The dual state holds {found} for '{name}' where {tuple(shape)} is needed."
        )

    may_be_negative = name.endswith("mean")
    if not loaded.isfinite().all() or (not may_be_negative and (loaded < 0).any()):
        raise ValueError(f"The dual state '{name}' holds negative or non-finite values.")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """ValueError if the `value` of the argument `name` is none of its choices."""
    if value not in choices:
        raise ValueError(f"`{name}` is {value!r}; choose one of {', '.join(choices)}.")


def _as_array(values: torch.Tensor | Iterable[float]) -> array:
    """A copy of a tensor or of numbers, in float32 on the host."""
    if isinstance(values, torch.Tensor):
        values = values.tolist()
    return array("f", values)
