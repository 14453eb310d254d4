"""The constrained problem: every constrained layer lowers the expected task loss by a factor.

    minimise   E f_L
    subject to E f_l <= (1 - alpha_l) E f_prev(l)        for every constrained layer l

Conventions, stated once for the whole package:

- layers are numbered l = 1..L; tensors over layers have shape `[L]` and hold layer l at index l-1;
- `f_0` (`initial_loss_bound`) is a fixed reference value, not a measured loss. It takes the place of the loss before
  the first constrained layer, which keeps a model from meeting the constraints by raising its early losses;
- `prev(l)` is the constrained layer before l (l-1 when all layers are constrained);
- the violation of layer l is `g_l = f_l - (1 - alpha_l) f_prev(l)`: `g_l <= 0` is satisfied. Unconstrained layers have
  violation 0 and multiplier 0.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, problem (4) and the Lagrangian (5).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


# Settings beyond these would leave float32 when they are multiplied, divided or squared.
SMALLEST, LARGEST = 1e-12, 1e12
MIN_ROWS = 8  # fewer held-out rows show nothing of a model


class DescentProblem:
    """Layerwise descent constraints on the losses of one network, as pure tensor maps.

    Args:
        alpha (`float` or sequence of `float`):
            Layerwise step size alpha_l in (0, 1): one value, or one per layer.
        initial_loss_bound (`float`):
            The reference f_0 > 0, in units of the task loss.
        num_layers (`int`):
            Number of layers L.
        constrained_layers (sequence of `int`, *optional*):
            The constrained layers, 1-based and increasing; consecutive entries constrain each other. `None`: all.
        chance_loss (`float`, *optional*):
            The measured loss of the best constant prediction, where it is known; f_0 may lie above it.

    Raises:
        ValueError: naming the argument, its value and the remedy, when an argument is out of range; by the methods,
            when losses or multipliers are not one per layer.
    """

    def __init__(
        self,
        alpha: float | Sequence[float],
        initial_loss_bound: float,
        num_layers: int,
        constrained_layers: Sequence[int] | None = None,
        chance_loss: float | None = None,
    ):
        if num_layers < 1:
            raise ValueError(f"`num_layers` is {num_layers}; the problem needs at least one layer.")
        self.num_layers = num_layers
        self.alpha = check_alpha(alpha, num_layers, "alpha")
        self.initial_loss_bound = check_initial_loss_bound(initial_loss_bound)
        self.constrained_layers = check_constrained_layers(constrained_layers, num_layers)
        self.chance_loss = chance_loss

        layers = torch.tensor(self.constrained_layers)  # [constrained], 1-based
        self._layers = layers - 1
        self._previous = torch.cat([layers.new_zeros(1), layers[:-1]])  # [constrained], 0 stands for f_0
        self._contraction = 1.0 - torch.tensor(self.alpha, dtype=torch.float32)[self._layers]  # [constrained]

    @classmethod
    def saved_in(cls, summary: Mapping[str, Any]) -> "DescentProblem | None":
        """The problem in the `descent_config.json` of a run; `None` where it has none."""
        names = ("alpha", "initial_loss_bound", "num_layers", "constrained_layers", "chance_loss")
        return cls(**{name: summary.get(name) for name in names}) if "alpha" in summary else None

    def to(self, device: torch.device | str) -> "DescentProblem":
        """Move the constants to `device` and return self."""
        self._layers, self._previous = self._layers.to(device), self._previous.to(device)
        self._contraction = self._contraction.to(device)
        return self

    def violations(self, layer_losses: torch.Tensor) -> torch.Tensor:
        """g_l = f_l - (1 - alpha_l) f_prev(l) of the losses f `[L]`; `[L]`, 0 at unconstrained layers."""
        layer_losses = self._over_layers("layer_losses", layer_losses)
        bounded = torch.cat([layer_losses.new_full((1,), self.initial_loss_bound), layer_losses])  # [1 + layers]
        contraction = self._contraction_in(layer_losses.dtype)
        violations = bounded[self._layers + 1] - contraction * bounded[self._previous]  # [constrained]
        return torch.zeros_like(layer_losses).index_copy(0, self._layers, violations)  # [layers]

    def weights(self, multipliers: torch.Tensor) -> torch.Tensor:
        """Weights w of the Lagrangian as a weighted sum of layer losses, from the multipliers `[L]`; `[L]`.

        w_l = [l = L] + lambda_l - (1 - alpha_next(l)) lambda_next(l). A weight can be negative.
        """
        multipliers = self._over_layers("multipliers", multipliers)
        active = multipliers[self._layers]  # [constrained]
        weights = multipliers.new_zeros(1 + self.num_layers)  # [1 + layers], index 0 collects the constant f_0
        weights[-1:].fill_(1.0)  # an assignment would copy from the host
        weights.index_add_(0, self._layers + 1, active)
        weights.index_add_(0, self._previous, -self._contraction_in(active.dtype) * active)
        return weights[1:]

    def lagrangian(self, layer_losses: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
        """f_L + sum_l lambda_l g_l (paper, equation 5); a scalar."""
        violations = self.violations(layer_losses)
        return layer_losses[-1] + self._over_layers("multipliers", multipliers).to(violations.dtype) @ violations

    def max_violation(self, layer_losses: torch.Tensor) -> torch.Tensor:
        """The largest violation over the constrained layers, in units of the loss; a scalar tensor."""
        return self.violations(layer_losses)[self._layers].max()

    def feasible(self, layer_losses: torch.Tensor, tol: float = 0.0) -> bool:
        """Whether every violation is at most `tol` (in units of the loss), and no constrained layer is at chance.

        Never with a violation or a last loss that is not finite.
        """
        met = (self.max_violation(layer_losses) <= tol) & torch.isfinite(layer_losses[-1])
        return bool(met) and not self.at_chance(layer_losses, tol)

    def at_chance(self, layer_losses: torch.Tensor, tol: float = 0.0) -> list[int]:
        """The constrained layers whose loss is above `chance`, or within `tol` below it.

        They may satisfy a constraint that asks for less than `tol`, but have learned nothing.
        """
        losses = self._over_layers("layer_losses", layer_losses)[self._layers]  # [constrained]
        return (self._layers[losses >= self.chance - tol] + 1).tolist()

    def shortfall(self, layer_losses: torch.Tensor, tol: float = 0.0) -> float:
        """How far the losses are from feasible: the largest violation, or more than `tol` by how far the worst of the
        layers at chance is from leaving it."""
        worst = layer_losses[self._layers].max() - (self.chance - 2 * tol)
        return torch.maximum(self.max_violation(layer_losses), worst).item()

    @property
    def chance(self) -> float:
        """The loss of a constant prediction as far as it is known: f_0, or `chance_loss` where that is less."""
        return min(self.initial_loss_bound, self.initial_loss_bound if self.chance_loss is None else self.chance_loss)

    def state_dict(self) -> dict:
        """The problem in plain Python values; the keyword arguments of the constructor."""
        return {
            "alpha": self.alpha,
            "initial_loss_bound": self.initial_loss_bound,
            "num_layers": self.num_layers,
            "constrained_layers": self.constrained_layers,
            "chance_loss": self.chance_loss,
        }

    def _over_layers(self, name: str, values: torch.Tensor) -> torch.Tensor:
        if values.shape != (self.num_layers,):
            raise ValueError(f"`{name}` has shape {list(values.shape)}; give [{self.num_layers}].")
        # In whole numbers 1 - alpha would be 0, in half precision a small alpha lost.
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def _contraction_in(self, dtype: torch.dtype) -> torch.Tensor:
        """1 - alpha `[constrained]`; kept in float32, that of training, alone, since MPS has no float64."""
        if dtype == self._contraction.dtype:
            return self._contraction
        return 1.0 - torch.tensor(self.alpha, dtype=dtype, device=self._layers.device)[self._layers]


def check_alpha(
    alpha: float | Sequence[float], num_layers: int | None = None, name: str = "descent_alpha"
) -> list[float]:
    """`alpha` as a list of floats in (0, 1), one per layer where `num_layers` is given; ValueError otherwise."""
    values = as_python(alpha)
    try:
        values = [float(a) for a in values] if isinstance(values, list) else [float(values)] * (num_layers or 1)
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` is {alpha!r}; give a number in (0, 1), or one per layer.") from None
    if num_layers is not None and len(values) != num_layers:
        raise ValueError(
            f"`{name}` has {len(values)} values but the model has {num_layers} layers; give one number or one per "
            "layer."
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


def check_constrained_layers(layers: Sequence[int] | None, num_layers: int | None = None) -> list[int] | None:
    """`layers` as an increasing list of 1-based layers (all of them for `None`); ValueError otherwise."""
    if layers is None:
        return None if num_layers is None else list(range(1, num_layers + 1))
    values = as_python(layers)
    if (
        not isinstance(values, list)
        or not values
        or any(not isinstance(layer, int) for layer in values)
        or any(b <= a for a, b in zip([0, *values], values, strict=False))
    ):
        raise ValueError(
            f"`constrained_layers` is {layers!r}; give a list of at least one layer: integers, 1-based and increasing."
        )
    if num_layers is not None and values[-1] > num_layers:
        raise ValueError(
            f"`constrained_layers` names layer {values[-1]} but the model has {num_layers} layers; layers are 1-based."
        )
    return values


def as_python(value: Any) -> Any:
    """`value` in Python's own numbers and lists, where it is an array, a number of one, or a sequence; else itself."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [as_python(item) for item in value] if isinstance(value, list | tuple | range) else value
