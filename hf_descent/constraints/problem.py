"""The constrained problem: minimise the last layer's loss, subject to rows that say what each layer must do.

    minimise   E f_L
    subject to E f_l <= c E f_ref      for every row: a layer l, a factor c and a reference

| kind | row | says |
|---|---|---|
| descent | f_l <= (1 - alpha_l) f_prev(l) | each layer lowers the loss (the paper's rows) |
| steps | f_l <= (f_L / f_0)^(s / n) f_prev(l) | the same, with the alpha that leads n layers from f_0 down to f_L |
| line | f_l <= (f_L / f_0)^(s l / L) f_0, for l < L | each layer lies below an even descent from f_0 to f_L |
| exit | f_k <= (1 + eps_k) f_L | a model that is cut after layer k loses at most eps_k |
| bound | f_k <= b_k | an absolute promise |

Conventions, stated once for the whole package:

- layers are numbered l = 1..L; tensors over layers have shape `[L]` and hold layer l at index l-1;
- tensors over rows have shape `[rows]`: one row per layer where there are descent, steps or line rows (a layer without
  a constraint has violation 0 and multiplier 0), then the exits, then the bounds. For the paper's rows alone, row l is
  that of layer l;
- the violation of a row is g = f_l - c f_ref: `g <= 0` is satisfied;
- f_0 (`initial_loss_bound`) is a fixed reference value, the loss of a constant prediction. It takes the place of the
  loss before the first constrained layer, which keeps a model from meeting the rows by raising its early losses;
- prev(l) is the constrained layer before l (l-1 when all layers are constrained); s is `descent_strength`;
- the f_L of line and steps rows is a constant, the `level`: in training the running mean of f_L, for a verdict the f_L
  of the same data. Unless 0 < level < f_0 these rows ask for nothing;
- in gradients the reference of a line or an exit row is a constant. The Lagrangian's own gradient would raise f_L
  instead of lowering f_k as soon as the multiplier of an exit is near 1.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, problem (4) and the Lagrangian (5).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch


# Settings beyond these would leave float32 when they are multiplied, divided or squared.
SMALLEST, LARGEST = 1e-12, 1e12
PATHS = ("line", "steps")  # the rows that follow the loss of the last layer
# The tolerance of a row as a share of the decrease that it asks for. Exits and bounds promise a number and have none.
TOLERANCE = 0.1
# A layer is at chance from this share of the loss of a constant prediction on: a smaller gain is no sign of learning.
# Log, profile and verdict all mean this.
AT_CHANCE = 0.98
ARGUMENTS = (  # of a problem, as they are saved; version 0.1 has fewer
    "alpha", "initial_loss_bound", "num_layers", "constrained_layers", "chance_loss", "descent_strength",
    "exit_targets", "loss_targets",
)  # fmt: skip


class Row(NamedTuple):
    """One constraint, f_layer <= factor (level / f_0)^power f_reference."""

    name: str  # in logs and files: "3", "exit_3" or "bound_3"
    kind: str  # "descent", "steps", "line", "exit" or "bound"
    index: int  # its place in tensors over rows
    layer: int  # 1-based
    reference: int  # 0 for f_0, l for the loss of layer l, L + 1 for the number 1
    factor: float = 1.0
    power: float = 0.0


class DescentProblem:
    """Constraints on the layer losses of one network, as pure tensor maps.

    Args:
        alpha (`float`, sequence of `float`, `"line"`, `"steps"` or `None`):
            Layerwise step size alpha_l in (0, 1) of descent rows, one value or one per layer; or the name of the rows
            that follow f_L. `None`: none of these.
        initial_loss_bound (`float`):
            The reference f_0 > 0, in units of the task loss.
        num_layers (`int`):
            Number of layers L.
        constrained_layers (sequence of `int`, *optional*):
            The layers of descent, steps or line rows, 1-based and increasing; consecutive entries constrain each
            other. `None`: all.
        chance_loss (`float`, *optional*):
            The estimated loss of the best constant prediction, where known; f_0 may lie above it.
        descent_strength (`float`):
            The share s of the decrease from f_0 to f_L, in logarithms, that line and steps rows ask for.
        exit_targets (mapping from `int` to `float`, *optional*):
            eps_k >= 0 by layer k < L.
        loss_targets (mapping from `int` to `float`, *optional*):
            b_k > 0 by layer k, in units of the task loss.

    Attributes:
        rows (`list[Row]`): the constraints.
        num_rows (`int`): length of a tensor over rows.
        layers (`list[int]`): the layers that have a constraint, 1-based and increasing.

    ValueError, naming the argument, its value and the remedy, where an argument is out of range; of the methods where
    losses are not one per layer, or multipliers not one per row.
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
        self.alpha = (
            alpha if alpha is None or self.follows else check_alpha(alpha, num_layers, "alpha")
        )
        self.initial_loss_bound = check_initial_loss_bound(initial_loss_bound)
        self.constrained_layers = check_constrained_layers(constrained_layers, num_layers)
        self.chance_loss = None if chance_loss is None else check_initial_loss_bound(chance_loss)
        self.descent_strength = descent_strength
        self.exit_targets = check_targets("exit_targets", exit_targets, num_layers)
        self.loss_targets = check_targets("loss_targets", loss_targets, num_layers)

        self.rows = [*self._layer_rows(), *self._target_rows()]
        if not self.rows:
            raise ValueError(
                f"No layer has a constraint, of {num_layers}: `constrained_layers` is {constrained_layers}, a line "
                "leaves the last one free, and there are no targets; give targets or other layers."
            )
        self.num_rows = (
            (0 if self.alpha is None else num_layers)
            + len(self.exit_targets)
            + len(self.loss_targets)
        )
        self.layers = sorted({row.layer for row in self.rows})
        self._index = torch.tensor(
            [row.index for row in self.rows]
        )  # this and the following: [constraints]
        self._layer = torch.tensor([row.layer for row in self.rows])
        self._reference = torch.tensor([row.reference for row in self.rows])
        self._is_target = torch.tensor([row.kind in ("exit", "bound") for row in self.rows])
        self._is_fixed = torch.tensor([row.kind in ("exit", "bound", "line") for row in self.rows])
        # The share of what a row asks for to which a margin may lower it.
        least = [{"exit": 1 / row.factor, "bound": 0.0}.get(row.kind, 1.0) for row in self.rows]
        self._least_share = torch.tensor(least)
        self._factor = torch.tensor(
            [row.factor for row in self.rows]
        )  # in float32 alone, since MPS has no float64
        self._power = torch.tensor([row.power for row in self.rows])
        # What would otherwise be made anew in each step, by a kernel each.
        self._losses_of = self._layer - 1  # where the losses of the constraints are
        self._always_asks = self._power == 0
        self._first_weights = torch.zeros(num_layers + 2)  # for f_0, the layers, and the number 1
        self._first_weights[num_layers] = 1.0
        self._all_fixed = all(row.kind in ("exit", "bound", "line") for row in self.rows)

    def _layer_rows(self) -> Iterator[Row]:
        if self.alpha is None:
            return
        layers, reference = self.constrained_layers, 0
        for layer in layers:
            name, index, strength = f"{layer}", layer - 1, self.descent_strength
            if self.alpha == "line":
                if layer < self.num_layers:  # the last layer lies on the line
                    yield Row(
                        name, "line", index, layer, 0, power=strength * layer / self.num_layers
                    )
            elif self.alpha == "steps":
                yield Row(name, "steps", index, layer, reference, power=strength / len(layers))
            else:
                yield Row(name, "descent", index, layer, reference, 1.0 - self.alpha[layer - 1])
            reference = layer

    def _target_rows(self) -> Iterator[Row]:
        index = count(0 if self.alpha is None else self.num_layers)
        for layer, share in self.exit_targets.items():
            yield Row(f"exit_{layer}", "exit", next(index), layer, self.num_layers, 1.0 + share)
        for layer, loss in self.loss_targets.items():
            yield Row(f"bound_{layer}", "bound", next(index), layer, self.num_layers + 1, loss)

    @classmethod
    def saved_in(cls, summary: Mapping[str, Any]) -> "DescentProblem | None":
        """The problem in the `descent_config.json` of a run; `None` where it has none."""
        if "alpha" not in summary:
            return None
        return cls(**{name: summary[name] for name in ARGUMENTS if name in summary})

    def to(self, device: torch.device | str) -> "DescentProblem":
        """Move the constants to `device` and return self."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        return self

    def violations(
        self,
        layer_losses: torch.Tensor,
        level: torch.Tensor | None = None,
        margin: float = 0.0,
        detach: bool = False,
    ) -> torch.Tensor:
        """g = f_l - c f_ref of the losses f `[L]`; `[rows]`.

        Args:
            layer_losses (`torch.Tensor` of shape `[L]`): f.
            level (scalar `torch.Tensor`, *optional*): the f_L that line and steps rows lead to; by default that of f.
            margin (`float`): exits and bounds ask for a loss that is lower by this share; exits for none below f_L,
                which no layer needs to reach: their multipliers would grow for ever.
            detach (`bool`): whether the references of descent and steps rows are constants in the gradient as well.
        """
        losses = self._checked("layer_losses", layer_losses, self.num_layers)
        level = losses[-1] if level is None else level
        is_between = self._is_between(level) if self.follows else None
        asked, _ = self._asked(losses, level, is_between, detach)
        if margin > 0:
            asked = self._least_share.clamp(min=1 - margin) * asked
        violations = losses[self._losses_of] - asked  # [constraints]
        if self.follows:
            asks = self._always_asks | is_between
            violations = torch.where(asks, violations, violations.clamp(max=0))
        return self._over_rows(violations)

    def bounds(self, layer_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss c f_ref that each row asks of its layer, and its tolerance: a tenth of the decrease that it asks
        for, 0 for exits and bounds. Each `[rows]`; 0 without a constraint."""
        losses = self._checked("layer_losses", layer_losses, self.num_layers)
        is_between = self._is_between(losses[-1])
        asked, reference = self._asked(losses, losses[-1], is_between, detach=True)
        tolerances = torch.where(self._is_target, 0.0, TOLERANCE * (reference - asked))
        return self._over_rows(asked), self._over_rows(
            torch.where(self._always_asks | is_between, tolerances, 0.0)
        )

    def weights(
        self, multipliers: torch.Tensor, level: torch.Tensor | None = None, detach: bool = False
    ) -> torch.Tensor:
        """Weights w `[L]` of the layer losses in the gradient of the Lagrangian, from the multipliers `[rows]`.

        w_l is the sum of the multipliers of the rows on l, and 1 more for the last layer, less factor times multiplier
        of the descent and steps rows that refer to l (unless `detach`); it can be negative. `level`: see `violations`.
        """
        multipliers = self._checked("multipliers", multipliers, self.num_rows)
        active = multipliers[self._index]
        weights = self._first_weights.to(active.dtype).index_add(0, self._layer, active)
        if not detach and not self._all_fixed:
            factors = self._factors_at(multipliers.dtype, level)
            weights.index_add_(
                0, self._reference, torch.where(self._is_fixed, 0.0, -factors * active)
            )
        return weights[1:-1]

    def lagrangian(
        self,
        layer_losses: torch.Tensor,
        multipliers: torch.Tensor,
        level: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """f_L + the sum of multipliers times violations (paper, equation 5); a scalar."""
        violations = self.violations(layer_losses, level)
        multipliers = self._checked("multipliers", multipliers, self.num_rows)
        return layer_losses[-1] + multipliers.to(violations.dtype) @ violations

    def max_violation(self, layer_losses: torch.Tensor) -> torch.Tensor:
        """The largest violation of a row, in units of the loss; a scalar tensor."""
        return self.violations(layer_losses)[self._index].max()

    def feasible(self, layer_losses: torch.Tensor, tol: float | None = None) -> bool:
        """Whether rows are met, by their tolerances or `tol`, with their layers and f_L not at chance; estimated."""
        beyond, learned = self.excess(layer_losses)
        beyond = beyond if tol is None else self.violations(layer_losses)[self._index] - tol
        return bool((beyond <= 0).all() & (learned < 0).all())

    def excess(self, layer_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Violations less tolerances `[constraints]`, and the losses of the same layers, then f_L, less the loss from
        which on a layer is at chance `[constraints + 1]`. A model meets the rows where the former are at most 0 and
        the latter below 0: without them, a row that asks for hardly anything would be met by layers that have learned
        nothing."""
        losses = self._checked("layer_losses", layer_losses, self.num_layers)
        beyond = (self.violations(losses) - self.bounds(losses)[1])[self._index]
        judged = torch.cat([losses[self._layer - 1], losses[-1:]])  # [constraints + 1]
        return beyond, judged - AT_CHANCE * self.chance

    def descent_share(self, layer_losses: torch.Tensor) -> float | None:
        """The share of the decrease to f_L that every layer keeps up with: min over the constrained l < L of
        log(f_0 / f_l) / ((l / L) log(f_0 / f_L)), with the estimated loss at chance as f_0.

        1 is an even geometric descent, 0 a layer at chance. A worse last layer raises it: never quote it without f_L.
        `None` where it says nothing: chance is not known, f_L is not below it, or a loss is not positive.
        """
        layers = torch.tensor(
            [layer for layer in self.constrained_layers if layer < self.num_layers]
        )
        losses, chance = (
            self._checked("layer_losses", layer_losses, self.num_layers).cpu().double(),
            self.chance_loss,
        )
        if not len(layers) or chance is None or not (losses > 0).all() or not losses[-1] < chance:
            return None
        heights = (chance / losses).log()
        return (self.num_layers / layers * heights[layers - 1] / heights[-1]).min().item()

    @property
    def chance(self) -> float:
        """The loss of a constant prediction as far as it is known: f_0, or `chance_loss` where that is less. Less what
        float32 may round off the loss of such a prediction."""
        chance = self.initial_loss_bound if self.chance_loss is None else self.chance_loss
        return (1 - 1e-6) * min(self.initial_loss_bound, chance)

    def state_dict(self) -> dict:
        """The problem in plain Python values; the keyword arguments of the constructor."""
        return {name: getattr(self, name) for name in ARGUMENTS}

    def _asked(
        self,
        losses: torch.Tensor,
        level: torch.Tensor,
        is_between: torch.Tensor | None,
        detach: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The right-hand side of each constraint and its reference; each `[constraints]`."""
        first, last = losses.new_full((1,), self.initial_loss_bound), losses.new_ones(1)
        references = torch.cat([first, losses, last])  # [1 + layers + 1]
        reference = references[self._reference]
        if losses.requires_grad:
            reference = torch.where(self._is_fixed | detach, reference.detach(), reference)
        return self._factors_at(losses.dtype, level, is_between) * reference, reference

    def _is_between(self, level: torch.Tensor) -> torch.Tensor:
        """Whether constraints that follow f_L ask for anything at this level."""
        return (level > 0) & (level < self.initial_loss_bound)

    def _factors_at(
        self,
        dtype: torch.dtype,
        level: torch.Tensor | None,
        is_between: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The factors `[constraints]` at a level."""
        factors = self._factor
        if dtype != factors.dtype:
            factors = torch.tensor(
                [row.factor for row in self.rows], dtype=dtype, device=factors.device
            )
        if not self.follows or level is None:
            return factors
        if is_between is None:
            is_between = self._is_between(level)
        ratio = torch.where(is_between, level.detach() / self.initial_loss_bound, 1.0)
        # A scalar does not widen the power's type: in float32 a verdict would lose digits.
        return factors * ratio ** self._power.to(dtype)

    def _over_rows(self, values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(self.num_rows).index_copy(0, self._index, values)

    def _checked(self, name: str, values: torch.Tensor, size: int) -> torch.Tensor:
        if values.shape != (size,):
            raise ValueError(f"`{name}` has shape {list(values.shape)}; give [{size}].")
        # In whole numbers a factor would be 0 or 1, in half precision a small alpha lost.
        return values.to(torch.promote_types(values.dtype, torch.float32))


def largest_rise(layer_losses: torch.Tensor) -> float | None:
    """max f_l / f_(l-1) - 1 over the layers l >= 2; `None` where a loss is not positive or there is one layer."""
    if len(layer_losses) < 2 or not (layer_losses > 0).all():
        return None
    return (layer_losses[1:] / layer_losses[:-1]).max().item() - 1


def check_targets(
    name: str, targets: Mapping[int, float] | None, num_layers: int | None = None
) -> dict[int, float]:
    """`targets` as numbers by layer, sorted; ValueError where they are none, or no layers that can have one."""
    exits = name == "exit_targets"
    try:
        found = {int(f"{layer}"): _target_number(value) for layer, value in (targets or {}).items()}
    except (AttributeError, TypeError, ValueError):
        found = {0: 0.0}
    last = None if num_layers is None else num_layers - exits
    least = 0.0 if exits else SMALLEST
    for layer, value in found.items():
        if layer < 1 or (last is not None and layer > last) or not least <= value <= LARGEST:
            layers = "layers, from 1 on," if last is None else f"layers 1 to {last}"
            layers = "layers below the last (this model has one layer)" if last == 0 else layers
            what = (
                "a share of 0 or more that the loss may be higher than f_L"
                if exits
                else "a loss above 0"
            )
            raise ValueError(
                f"`{name}` is {targets!r}; map some of the {layers} to {what}: {{3: 0.05}}."
            )
    return dict(sorted(found.items()))


def _target_number(value: Any) -> float:
    """TypeError for true and false, which would be 1 and 0."""
    number = as_python(value)
    if isinstance(number, bool):
        raise TypeError(f"{number} is no number")
    return float(number)


def check_alpha(
    alpha: float | Sequence[float], num_layers: int | None = None, name="descent_alpha"
) -> list[float]:
    """`alpha` as a list of floats in (0, 1), one per layer where `num_layers` is given; ValueError otherwise."""
    values = as_python(alpha)
    try:
        values = (
            [float(a) for a in values]
            if isinstance(values, list)
            else [float(values)] * (num_layers or 1)
        )
    except (TypeError, ValueError):
        raise ValueError(
            f"`{name}` is {alpha!r}; give a number in (0, 1), or one per layer."
        ) from None
    if num_layers is not None and len(values) != num_layers:
        raise ValueError(
            f"`{name}` has {len(values)} values but the model has {num_layers} layers: give all."
        )
    if not values or not all(0.0 < a < 1.0 for a in values):
        raise ValueError(f"`{name}` is {alpha}; every step size must lie strictly between 0 and 1.")
    return values


def check_initial_loss_bound(bound: float) -> float:
    """`bound` as a float within float32's reach; ValueError otherwise."""
    value = as_python(bound)
    if not (isinstance(value, int | float) and SMALLEST <= value <= LARGEST):
        raise ValueError(
            f"`initial_loss_bound` is {bound}; f_0 must be positive and finite, between {SMALLEST:g} and {LARGEST:g}: "
            "use the loss of the best constant predictor (log of the number of classes for balanced classification) "
            "or 'auto'."
        )
    return float(value)


def check_constrained_layers(
    layers: Sequence[int] | None, num_layers: int | None = None
) -> list[int] | None:
    """`layers` as an increasing list of 1-based layers (all of them for `None`); ValueError otherwise."""
    if layers is None:
        return None if num_layers is None else list(range(1, num_layers + 1))
    values = as_python(layers)
    are_layers = (
        isinstance(values, list) and values and all(isinstance(layer, int) for layer in values)
    )
    if not are_layers or any(after <= before for before, after in pairwise([0, *values])):
        raise ValueError(
            f"`constrained_layers` is {layers!r}; give a list of increasing integers from 1 on."
        )
    if num_layers is not None and values[-1] > num_layers:
        raise ValueError(
            f"`constrained_layers` names layer {values[-1]} but the model has {num_layers} layers."
        )
    return values


def as_python(value: Any) -> Any:
    """`value` in Python's own numbers and lists, where it is an array, a number of one, or a sequence; else itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [as_python(item) for item in value] if isinstance(value, list | tuple | range) else value
