"""The constrained problem: minimise the last layer's loss, subject to constraints that say what each layer must do.

    minimise   E f_L
    subject to E f_l <= c E f_ref      for every constraint: a layer l, a factor c and a reference

| kind | constraint | says |
|---|---|---|
| descent | f_l <= (1 - alpha_l) f_prev(l) | each layer lowers the loss (the paper's constraints) |
| steps | f_l <= (f_L / f_0)^(s / n) f_prev(l) | each of n constrained layers goes the share s / n of the way to f_L |
| line | f_l <= (f_L / f_0)^(s l / L) f_0, for l < L | layer l has gone l / L of the share s of the way to f_L |
| exit | f_k <= (1 + eps_k) f_L | a model that is cut after layer k loses at most eps_k |
| bound | f_k <= b_k | the loss of layer k is at most b_k |

The way to f_L leads from f_0 down, on a log scale; its share s is `descent_strength`.

Conventions, stated once for the whole package:

- layers are numbered l = 1..L; tensors over layers have shape `[L]` and hold layer l at index l-1;
- multipliers and violations have shape `[rows]`. If there are descent, steps or line constraints, the first L rows
  belong to the layers (a layer without a constraint has violation 0 and multiplier 0); then come the exits, then the
  bounds;
- what only constraints have has shape `[constraints]`, in the same order. It is shorter by the rows of layers without
  a constraint;
- the violation of a constraint is g = f_l - c f_ref: `g <= 0` is satisfied;
- f_0 (`initial_loss_bound`) is a fixed reference value, the loss of a constant prediction. It takes the place of the
  loss before the first constrained layer. Without it a model could meet the constraints by raising its early losses;
- prev(l) is the constrained layer before l (l-1 when all layers are constrained);
- the f_L of line and steps constraints is a constant, the `level`: in training the running mean of f_L, for a verdict
  the f_L of the same data. Unless 0 < level < f_0 these constraints ask for nothing;
- in gradients the reference of a line or an exit constraint is a constant. The Lagrangian's own gradient would raise
  f_L instead of lowering f_k as soon as the multiplier of an exit is near 1.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, problem (4) and the Lagrangian (5).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from .arguments import (
    check_alpha,
    check_constrained_layers,
    check_initial_loss_bound,
    check_targets,
)


# The layer losses that move the multipliers are lists of numbers: for so few, Python is faster than a library. All
# others are tensors.
Values = TypeVar("Values", torch.Tensor, Sequence[float])

PATHS = ("line", "steps")  # the constraints that follow the loss of the last layer
# The tolerance of a constraint, as a share of the decrease that it asks for. Exits and bounds promise a number, so
# they have none.
TOLERANCE = 0.1
# A layer is at chance from this share of the loss of a constant prediction on: a smaller gain is no sign of learning.
# Log, profile and verdict all use it.
AT_CHANCE = 0.98
ARGUMENTS = (  # the arguments of a problem, as they are saved; version 0.1 has fewer
    "alpha", "initial_loss_bound", "num_layers", "constrained_layers", "chance_loss", "descent_strength",
    "exit_targets", "loss_targets",
)  # fmt: skip


class Constraint(NamedTuple):
    """One constraint, f_layer <= factor (level / f_0)^power f_reference."""

    name: str  # in logs and files: "3", "exit_3" or "bound_3"
    kind: str  # "descent", "steps", "line", "exit" or "bound"
    index: int  # its row in multipliers and violations
    layer: int  # 1-based
    reference: int  # 0 for f_0, l for the loss of layer l, L + 1 for the number 1
    factor: float = 1.0
    power: float = 0.0

    @property
    def is_target(self) -> bool:
        """Whether it promises a number, instead of a share of a decrease."""
        return self.kind in ("exit", "bound")

    @property
    def has_fixed_reference(self) -> bool:
        """Whether its reference is a constant in the gradient."""
        return self.is_target or self.kind == "line"

    @property
    def follows(self) -> bool:
        """Whether it depends on f_L, as line and steps do."""
        return self.power != 0

    def factor_at(self, ratio: float) -> float:
        """The factor by which it multiplies its reference, at a ratio level / f_0."""
        return self.factor * ratio**self.power

    @property
    def least_share(self) -> float:
        """A margin multiplies the loss that is asked for by 1 - margin, but by no less than this. For an exit it is
        1 / (1 + eps), with which the exit asks for f_L itself. 1 means that no margin applies."""
        if self.kind == "exit":
            return 1 / self.factor
        if self.kind == "bound":
            return 0.0
        return 1.0


@dataclass
class _Constants:
    """The constraints, as arrays or as tensors of one type and device; each `[constraints]` unless noted."""

    layer: Any  # the place of f_l in the layer losses
    reference: Any  # the place of f_ref in (f_0, f_1, ..., f_L, 1)
    factor: Any
    power: Any
    least_share: Any
    is_target: Any
    is_fixed: Any
    follows: Any  # whether it depends on f_L, as line and steps do
    # [rows], for each row the place of its constraint among the constraints. A row without one has the place after
    # the last, where `_over_rows` appends `nothing`.
    place_of_row: Any
    ends: Any  # [2], f_0 and 1
    nothing: Any  # [1], 0

    def like(self, values: torch.Tensor) -> "_Constants":
        """The same as tensors of the type and the device of `values`."""
        constants = {}
        for field in fields(self):
            tensor = torch.from_numpy(getattr(self, field.name))
            if tensor.is_floating_point():  # before it moves: some devices have no float64
                tensor = tensor.to(values.dtype)
            constants[field.name] = tensor.to(values.device)
        return _Constants(**constants)


class DescentProblem:
    """Constraints on the layer losses of one network, as pure maps of tensors, or of lists of numbers.

    Args:
        alpha (`float`, sequence of `float`, `"line"`, `"steps"` or `None`):
            Layerwise step size alpha_l in (0, 1) of descent constraints, one value or one per layer; or the name of
            the constraints that follow f_L. `None`: none of these.
        initial_loss_bound (`float`):
            The reference f_0 > 0, in units of the task loss.
        num_layers (`int`):
            Number of layers L.
        constrained_layers (sequence of `int`, *optional*):
            The layers of descent, steps or line constraints, 1-based and increasing; consecutive entries constrain
            each other. `None`: all.
        chance_loss (`float`, *optional*):
            The estimated loss of the best constant prediction, if known; f_0 may lie above it.
        descent_strength (`float`):
            The share s of the way from f_0 down to f_L, on a log scale, that line and steps constraints ask for.
        exit_targets (mapping from `int` to `float`, *optional*):
            eps_k >= 0 by layer k < L.
        loss_targets (mapping from `int` to `float`, *optional*):
            b_k > 0 by layer k, in units of the task loss.

    Attributes:
        constraints (`list[Constraint]`): each with its `index` in multipliers and violations.
        num_rows (`int`): length of multipliers and violations. It counts the layers without a constraint, too, so it
            may be larger than the number of constraints.
        layers (`list[int]`): the layers that have a constraint, 1-based and increasing.

    ValueError names the argument, its value and the remedy if an argument is out of range. The methods raise it if
    there is not one loss per layer, or one multiplier per row.
    """

    def __init__(
        self,
        alpha: float | Sequence[float] | str | None,
        initial_loss_bound: float,
        num_layers: int,
        constrained_layers: Sequence[int] | None = None,
        chance_loss: float | None = None,
        descent_strength: float = 0.5,
        exit_targets: Mapping[int, float] | None = None,
        loss_targets: Mapping[int, float] | None = None,
    ):
        self.num_layers = num_layers
        self.follows = isinstance(alpha, str) and alpha in PATHS
        self.alpha = alpha
        if alpha is not None and not self.follows:
            self.alpha = check_alpha(alpha, num_layers, "alpha")

        self.initial_loss_bound = check_initial_loss_bound(initial_loss_bound)
        self.constrained_layers = check_constrained_layers(constrained_layers, num_layers)
        self.chance_loss = chance_loss
        if chance_loss is not None:
            self.chance_loss = check_initial_loss_bound(chance_loss)

        self.descent_strength = descent_strength
        self.exit_targets = check_targets("exit_targets", exit_targets, num_layers)
        self.loss_targets = check_targets("loss_targets", loss_targets, num_layers)

        self.constraints = [*self._layer_constraints(), *self._target_constraints()]
        if not self.constraints:
            raise ValueError(
                f"No layer has a constraint: `constrained_layers` is {constrained_layers}, nothing is asked of the "
                f"last of the {num_layers} layers, and there are no targets. Give targets, or name other layers."
            )

        self.num_rows = self._num_layer_rows + len(self.exit_targets) + len(self.loss_targets)
        self.layers = sorted({constraint.layer for constraint in self.constraints})
        # [constraints], the row of each.
        self._rows_of_constraints = [constraint.index for constraint in self.constraints]
        self._arrays = self._constants()
        self._has_targets = any(constraint.is_target for constraint in self.constraints)
        # Whether every row has a constraint; they are in the order of their rows.
        self._has_all_rows = self._rows_of_constraints == list(range(self.num_rows))
        self._tensors: dict[tuple, _Constants] = {}  # by type and device

    @property
    def rows(self) -> list[Constraint]:
        """The `constraints`, by the name that verdicts have for them."""
        return self.constraints

    @property
    def _num_layer_rows(self) -> int:
        """The number of rows before those of the targets: one per layer, or none."""
        return 0 if self.alpha is None else self.num_layers

    def _layer_constraints(self) -> Iterator[Constraint]:
        if self.alpha is None:
            return
        reference = 0
        for layer in self.constrained_layers:
            if self.alpha == "line":
                power = self.descent_strength * layer / self.num_layers
                if layer < self.num_layers:  # the last layer lies on the line
                    yield Constraint(f"{layer}", "line", layer - 1, layer, 0, power=power)
            elif self.alpha == "steps":
                power = self.descent_strength / len(self.constrained_layers)
                yield Constraint(f"{layer}", "steps", layer - 1, layer, reference, power=power)
            else:
                factor = 1.0 - self.alpha[layer - 1]
                yield Constraint(f"{layer}", "descent", layer - 1, layer, reference, factor)
            reference = layer

    def _target_constraints(self) -> Iterator[Constraint]:
        index = count(self._num_layer_rows)
        for layer, share in self.exit_targets.items():
            yield Constraint(
                f"exit_{layer}", "exit", next(index), layer, self.num_layers, 1.0 + share
            )
        for layer, loss in self.loss_targets.items():
            yield Constraint(
                f"bound_{layer}", "bound", next(index), layer, self.num_layers + 1, loss
            )

    def _constants(self) -> _Constants:
        constraints = self.constraints
        place_of_row = np.full(self.num_rows, len(constraints))
        place_of_row[self._rows_of_constraints] = np.arange(len(constraints))

        return _Constants(
            layer=np.array([constraint.layer - 1 for constraint in constraints]),
            reference=np.array([constraint.reference for constraint in constraints]),
            factor=np.array([constraint.factor for constraint in constraints]),
            power=np.array([constraint.power for constraint in constraints]),
            least_share=np.array([constraint.least_share for constraint in constraints]),
            is_target=np.array([constraint.is_target for constraint in constraints]),
            is_fixed=np.array([constraint.has_fixed_reference for constraint in constraints]),
            follows=np.array([constraint.follows for constraint in constraints]),
            place_of_row=place_of_row,
            ends=np.array([self.initial_loss_bound, 1.0]),
            nothing=np.zeros(1),
        )

    @classmethod
    def saved_in(cls, summary: Mapping[str, Any]) -> "DescentProblem | None":
        """The problem in the `descent_config.json` of a run; `None` if there is none."""
        if "alpha" not in summary:
            return None
        return cls(**{name: summary[name] for name in ARGUMENTS if name in summary})

    def violations(
        self,
        layer_losses: Values,
        level: float | torch.Tensor | None = None,
        margin: float = 0.0,
        detach: bool = False,
    ) -> Values:
        """g = f_l - c f_ref of the losses f `[L]`; `[rows]`, a tensor or a list as f is.

        Args:
            layer_losses (tensor of shape `[L]` or sequence of `float`): f.
            level (`float`, *optional*): the f_L that line and steps constraints lead to. Default: the last of
                `layer_losses`.
            margin (`float`): lowers what targets ask by this share. An exit never asks for less than f_L: the
                multiplier of a target that cannot be reached grows without end.
            detach (`bool`): take the references of descent and steps constraints for constants in the gradient, too.
        """
        losses = self._checked("layer_losses", layer_losses, self.num_layers)
        if level is None:
            level = losses[-1]
        level = _number(level)
        if not isinstance(losses, torch.Tensor):
            return self._violations_of_numbers(losses, level, margin)

        constants = self._like(losses)
        asked, _ = self._asked(losses, level, detach)
        if margin > 0 and self._has_targets:
            asked = constants.least_share.clip(min=1 - margin) * asked

        violations = losses[constants.layer] - asked  # [constraints]
        # Constraints that ask for nothing now are never violated.
        if self.follows and not self._is_between(level):
            at_most_0 = violations.clip(max=0)
            violations = torch.where(constants.follows, at_most_0, violations)
        return self._over_rows(violations)

    def _violations_of_numbers(
        self, losses: Sequence[float], level: float, margin: float
    ) -> list[float]:
        references = [self.initial_loss_bound, *losses, 1.0]
        ratio = self._ratio(level)
        is_between = self._is_between(level)
        violations = [0.0] * self.num_rows
        for constraint in self.constraints:
            asked = constraint.factor_at(ratio) * references[constraint.reference]
            asked *= max(constraint.least_share, 1 - margin)
            violation = losses[constraint.layer - 1] - asked
            if constraint.follows and not is_between:
                violation = min(violation, 0.0)
            violations[constraint.index] = violation
        return violations

    def bounds(self, layer_losses: Values) -> tuple[Values, Values]:
        """The loss c f_ref that each constraint asks of its layer, and its tolerance. Each `[rows]`; 0 without a
        constraint.

        The tolerance is a tenth of the decrease that a constraint asks for, and 0 for exits and bounds.
        """
        losses = self._checked("layer_losses", layer_losses, self.num_layers)
        if not isinstance(losses, torch.Tensor):
            asked, tolerances = self.bounds(torch.tensor(losses, dtype=torch.float64))
            return asked.tolist(), tolerances.tolist()

        constants = self._like(losses)
        level = _number(losses[-1])
        asked, reference = self._asked(losses, level, detach=True)

        has_no_tolerance = constants.is_target
        if not self._is_between(level):
            has_no_tolerance = has_no_tolerance | constants.follows
        decrease = reference - asked
        tolerances = torch.where(has_no_tolerance, 0.0, TOLERANCE * decrease)
        return self._over_rows(asked), self._over_rows(tolerances)

    def weights(
        self, multipliers: Values, level: float | torch.Tensor | None = None, detach: bool = False
    ) -> Values:
        """Weights w `[L]` of the layer losses in the gradient of the Lagrangian, from the multipliers `[rows]`. Both
        are tensors or lists.

        w_l adds up the multipliers of the constraints on l, and 1 for the last layer. Each descent or steps constraint
        that refers to l subtracts its factor times its multiplier (unless `detach`), so w_l can be negative. `level`
        is f_L, by which the factors of steps constraints are scaled; ValueError if they need it and it is not given.
        """
        multipliers = self._checked("multipliers", multipliers, self.num_rows)
        if level is not None:
            level = _number(level)
        elif not detach and any(
            constraint.follows and not constraint.has_fixed_reference
            for constraint in self.constraints
        ):
            raise ValueError(
                "`level` is None, and the weights of steps constraints depend on it: give f_L."
            )

        ratio = self._ratio(level)
        is_tensor = isinstance(multipliers, torch.Tensor)
        nothing = multipliers.new_zeros(()) if is_tensor else 0.0
        weights = [nothing] * (self.num_layers - 1) + [nothing + 1.0]
        # Not by `+=`, which would write into the tensor `nothing`.
        for constraint in self.constraints:
            own = constraint.layer - 1
            multiplier = multipliers[constraint.index]
            weights[own] = weights[own] + multiplier
            if constraint.reference > 0 and not (detach or constraint.has_fixed_reference):
                other = constraint.reference - 1
                weights[other] = weights[other] - constraint.factor_at(ratio) * multiplier
        return torch.stack(weights) if is_tensor else weights

    def lagrangian(
        self,
        layer_losses: torch.Tensor,
        multipliers: torch.Tensor,
        level: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """f_L + the sum of multipliers times violations (paper, equation 5); a scalar."""
        violations = self.violations(layer_losses, level)
        multipliers = self._checked("multipliers", multipliers, self.num_rows)
        return layer_losses[-1] + multipliers.to(violations.dtype) @ violations

    def max_violation(self, layer_losses: torch.Tensor) -> torch.Tensor:
        """The largest violation of a constraint, in units of the loss; a scalar tensor."""
        return self.violations(layer_losses)[self._rows_of_constraints].max()

    def feasible(self, layer_losses: torch.Tensor, tol: float | None = None) -> bool:
        """Whether the constraints are met, within their tolerances or `tol`, and their layers and the last one are not
        at chance. It is a point estimate, without a confidence interval."""
        beyond, learned = self.excess(layer_losses)
        if tol is not None:
            beyond = self.violations(layer_losses)[self._rows_of_constraints] - tol
        return bool((beyond <= 0).all() & (learned < 0).all())

    def excess(self, layer_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How far the losses are beyond what the constraints allow, and beyond chance.

        The first, `[constraints]`, has violations less tolerances. The second, `[constraints + 1]`, has the losses of
        the same layers, then f_L, less the loss from which on a layer is at chance. A model meets the constraints if
        the first are at most 0 and the second below 0. Without the second, layers that have learned nothing would meet
        a constraint that asks for hardly anything.
        """
        losses = self._checked("layer_losses", layer_losses, self.num_layers)
        _, tolerances = self.bounds(losses)
        beyond = (self.violations(losses) - tolerances)[self._rows_of_constraints]
        judged = torch.cat([losses[self._like(losses).layer], losses[-1:]])  # [constraints + 1]
        return beyond, judged - AT_CHANCE * self.chance

    def descent_share(self, layer_losses: torch.Tensor) -> float | None:
        """How much of an even descent to f_L every layer has done: 1 if the loss falls evenly on a log scale, 0 if a
        layer is at chance.

        It is the least of log(f_0 / f_l) / ((l / L) log(f_0 / f_L)) over the constrained l < L, with the estimated
        loss at chance as f_0. A worse last layer raises it: never quote it without f_L. `None` if chance is not
        measured, f_L is not below it, or a loss is not positive.
        """
        losses = self._checked("layer_losses", layer_losses, self.num_layers).cpu().double()
        below_last = [layer for layer in self.constrained_layers if layer < self.num_layers]
        if not below_last or self.chance_loss is None:
            return None
        if not (losses > 0).all() or not losses[-1] < self.chance:
            return None

        layers = torch.tensor(below_last)
        heights = (self.chance / losses).log()
        return (self.num_layers / layers * heights[layers - 1] / heights[-1]).min().item()

    @property
    def chance(self) -> float:
        """The loss of guessing by which layers are judged: `chance_loss`, or f_0 if that is not known."""
        return self.initial_loss_bound if self.chance_loss is None else self.chance_loss

    def state_dict(self) -> dict:
        """The problem in plain Python values; the keyword arguments of the constructor."""
        return {name: getattr(self, name) for name in ARGUMENTS}

    def _asked(
        self, losses: torch.Tensor, level: float, detach: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The right-hand side of each constraint and its reference; each `[constraints]`."""
        constants = self._like(losses)
        ends = constants.ends

        references = torch.cat([ends[:1], losses, ends[1:]])  # [1 + layers + 1]
        reference = references[constants.reference]
        if losses.requires_grad:
            is_fixed = constants.is_fixed | detach
            reference = torch.where(is_fixed, reference.detach(), reference)

        factors = constants.factor * self._ratio(level) ** constants.power
        return factors * reference, reference

    def _is_between(self, level: float) -> bool:
        """Whether constraints that follow f_L ask for anything at this level."""
        return 0 < level < self.initial_loss_bound

    def _ratio(self, level: float | None) -> float:
        """level / f_0; 1 if constraints that follow f_L ask for nothing."""
        if level is None or not self._is_between(level):
            return 1.0
        return level / self.initial_loss_bound

    def _over_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Values `[constraints]`, each in the row of its constraint; 0 in the other rows. `[rows]`."""
        if self._has_all_rows:
            return values
        constants = self._like(values)
        return torch.cat([values, constants.nothing])[constants.place_of_row]

    def _like(self, values: torch.Tensor) -> _Constants:
        """The constants of the type and on the device of `values`."""
        place = (values.dtype, values.device)
        if place not in self._tensors:
            with torch.inference_mode(False):  # else no gradient could pass them later
                self._tensors[place] = self._arrays.like(values)
        return self._tensors[place]

    def _checked(self, name: str, values: Values, size: int) -> Values:
        is_tensor = isinstance(values, torch.Tensor)
        shape = list(values.shape) if is_tensor else [len(values)]
        if shape != [size]:
            raise ValueError(f"`{name}` has shape {shape}; give [{size}].")
        if is_tensor:
            # In whole numbers a factor would be 0 or 1, in half precision a small alpha lost.
            return values.to(torch.promote_types(values.dtype, torch.float32))
        return [float(value) for value in values]


def _number(value: Any) -> float:
    """A number, or a scalar tensor or array, as a number."""
    return value.item() if hasattr(value, "item") else value


def largest_rise(layer_losses: torch.Tensor) -> float | None:
    """The largest f_l / f_(l-1) - 1 over the layers l >= 2; `None` if a loss is not positive or there is one layer."""
    if len(layer_losses) < 2 or not (layer_losses > 0).all():
        return None
    return (layer_losses[1:] / layer_losses[:-1]).max().item() - 1
