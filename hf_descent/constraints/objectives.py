"""The training objectives: maps from layer losses f `[L]` to the scalar that the primal optimizer minimises.

- `descent`: the Lagrangian of the constrained problem, at the current multipliers (paper, Algorithm 1);
- `erm`: f_L, plain training;
- `deep_supervision`: f_L + c sum_{l<L} f_l over the constrained layers, fixed weights;
- `layerskip`: the early exit loss of LayerSkip (arXiv 2404.16710, equations 4 to 6): weights that grow with depth, of
  the exits that a curriculum enables. c is the paper's e_scale, and there is no layer dropout;
- `fixed`: the Lagrangian at frozen multipliers, to see how much is due to the final multipliers, and how
  much to the way there;
- `hinge`: f_L + c sum_l [g_l]_+, a penalty on the violations g;
- `quadratic`: f_L + c/2 sum_l [g_l]_+^2.

All but the last two are linear in f, with weights that do not depend on f. The penalties are not: evaluated per
micro-batch, their average over an accumulated batch differs from their value on the whole batch, so one
micro-batch of 8 examples and 8 of one example agree only approximately. `c` is `penalty_coefficient`.

Each is a small class, found by its name with [`objective_class`].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from .transfer import on_device


if TYPE_CHECKING:
    from .state import DualState


@dataclass
class StepObjective:
    """What a training step minimises, as a function of the layer losses."""

    # (a micro-batch's part of the layer losses `[L]` in float32, its share of the items) -> scalar. The parts of all
    # micro-batches add up to the layer losses of the step.
    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weighted: Sequence[int]  # layers (1-based) that may have a weight in this step
    trained: Sequence[int]  # layers that it depends on at some step of the run
    # (device) -> the weights of the layer losses `[L]` there; `None` if they depend on the losses.
    weights: Callable[[torch.device], torch.Tensor] | None = None


def weighted_sum(
    layer_weights: Callable[[], Sequence[float]], weighted: Sequence[int], trained: Sequence[int]
) -> StepObjective:
    """The sum of the layer losses times their weights `[L]`.

    `layer_weights` gives the weights. It is called after the model's layers, since only then the multipliers are sure
    to have arrived from a GPU.
    """

    def weights(device: torch.device) -> torch.Tensor:
        return on_device(layer_weights(), device)

    def value(layer_losses: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        factors = weights(layer_losses.device)
        if len(weighted) < len(factors):
            # Some layers cannot have a weight now. Their losses may be infinite, and 0 * inf would be NaN. If every
            # layer can have one, this is left out, for it costs two kernels: an infinite loss then gives NaN.
            layer_losses = torch.where(factors != 0, layer_losses, 0.0)
        # Not by `@`: under autocast, as in a custom loop, it would run in half precision.
        return torch.dot(factors, layer_losses)

    return StepObjective(value, weighted, trained, weights)


class Objective:
    """What a run minimises. `dual` is the [`DualState`] of the run."""

    name: ClassVar[str]
    is_plain: ClassVar[bool] = False  # whether it is f_L alone
    is_constrained: ClassVar[bool] = True  # whether it needs a `DescentProblem`
    has_multipliers: ClassVar[bool] = False  # whether multipliers weigh the layer losses
    moves_multipliers: ClassVar[bool] = False
    takes_multipliers: ClassVar[bool] = False  # whether it takes them from `fixed_multipliers`
    is_linear: ClassVar[bool] = True
    takes_coefficient: ClassVar[bool] = False  # whether it depends on `penalty_coefficient`

    def trained_layers(self, dual: "DualState") -> set[int]:
        """The layers (1-based) whose losses it depends on at some step. The last need not be among them."""
        return set() if dual.problem is None else set(dual.problem.layers)

    def weighted_layers(self, dual: "DualState", trained: list[int], step: int) -> list[int]:
        """Those of the trained layers that may have a weight at `step`."""
        return trained

    def weights(self, dual: "DualState", step: int) -> list[float]:
        """The weights of the layer losses, `[L]`, of an objective that is linear in them."""
        raise NotImplementedError

    def penalty(self, violations: torch.Tensor, coefficient: float) -> torch.Tensor:
        """What an objective that is not linear adds to f_L for the violations `[rows]`; a scalar with their graph."""
        raise NotImplementedError


class PlainTraining(Objective):
    name = "erm"
    is_plain = True
    is_constrained = False

    def trained_layers(self, dual):
        return set()


class Lagrangian(Objective):
    """f_L and the violations, weighed by multipliers."""

    has_multipliers = True

    def weights(self, dual, step):
        handling = dual.args.negative_weights
        multipliers = dual.settled().multipliers.numbers
        weights = dual.problem.weights(multipliers, dual.level(), detach=handling == "detach")
        if handling == "clip":
            weights = [max(weight, 0.0) for weight in weights]
        return weights


class FixedMultipliers(Lagrangian):
    name = "fixed"
    takes_multipliers = True


class Descent(Lagrangian):
    name = "descent"
    moves_multipliers = True


class DeepSupervision(Objective):
    name = "deep_supervision"
    is_constrained = False
    takes_coefficient = True

    def trained_layers(self, dual):
        return set(dual.args.constrained_layers or range(1, dual.num_layers + 1))

    def weights(self, dual, step):
        weights = [0.0] * dual.num_layers
        for layer in self.trained_layers(dual):
            weights[layer - 1] = dual.args.penalty_coefficient
        weights[-1] = 1.0
        return weights


class LayerSkip(Objective):
    name = "layerskip"
    is_constrained = False
    takes_coefficient = True

    def trained_layers(self, dual):
        return set(range(2, dual.num_layers + 1))  # the weight of the first layer is 0

    def weighted_layers(self, dual, trained, step):
        return [
            layer
            for layer in trained
            if layerskip_enabled(layer, dual.num_layers, step, dual.max_steps)
        ]

    def weights(self, dual, step):
        scale = dual.args.penalty_coefficient
        return layerskip_weights(dual.num_layers, step, dual.max_steps, scale).tolist()


class Hinge(Objective):
    name = "hinge"
    is_linear = False
    takes_coefficient = True

    def penalty(self, violations, coefficient):
        return coefficient * violations.clamp(min=0).sum()


class Quadratic(Hinge):
    name = "quadratic"

    def penalty(self, violations, coefficient):
        return coefficient * 0.5 * violations.clamp(min=0).square().sum()


_CLASSES = {
    objective.name: objective
    for objective in (
        Descent,
        PlainTraining,
        DeepSupervision,
        LayerSkip,
        FixedMultipliers,
        Hinge,
        Quadratic,
    )
}
OBJECTIVES = tuple(_CLASSES)


def objective_class(name: str) -> type[Objective]:
    """The class of an objective, by the name that arguments and files give it."""
    return _CLASSES[name]


def layerskip_enabled(layer: Any, num_layers: int, step: int, max_steps: int) -> Any:
    """Whether LayerSkip's gradual curriculum C(t, l) enables the exit after a layer at step t = 0, 1, ... of
    T = `max_steps`: from layer L down, one layer more every T / 2L steps. The last layer is always trained, as in the
    authors' code.

    `layer` is one of 1..L or an array of them; the paper counts from 0, and so does the curriculum.
    """
    index = layer - 1
    last = layer == num_layers
    return last | (index >= num_layers - 1 - 2 * num_layers * step // max(max_steps, 1))


def layerskip_weights(num_layers: int, step: int, max_steps: int, scale: float) -> np.ndarray:
    """LayerSkip's weights `[L]` of the layer losses at a step, which add up to 1; see [`layerskip_enabled`].

    Of those enabled, they are in proportion to e(l): `scale` (0 + 1 + ... + l) for l = 0..L-2 as the paper counts, so
    that the first layer has none; and L - 1 + `scale` (0 + 1 + ... + (L - 2)) for the last.
    """
    layers = np.arange(1, num_layers + 1)  # [layers]
    exits = scale * (layers - 1) * layers / 2
    exits[-1] = max(num_layers - 1, 1) + scale * (num_layers - 2) * (num_layers - 1) / 2
    exits *= layerskip_enabled(layers, num_layers, step, max_steps)
    return exits / exits.sum()
