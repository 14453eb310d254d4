"""The training objectives: maps from layer losses f `[L]` to the scalar that the primal optimizer minimises.

- `descent`: the Lagrangian of the constrained problem, at the current multipliers (paper, Algorithm 1);
- `erm`: f_L, plain training;
- `deep_supervision`: f_L + c sum_{l<L} f_l over the constrained layers, fixed weights;
- `fixed`: the Lagrangian at frozen multipliers, for telling the dynamics of the multipliers from their final weights;
- `hinge`: f_L + c sum_l [g_l]_+, a penalty on the violations g;
- `quadratic`: f_L + c/2 sum_l [g_l]_+^2.

The first four are linear in f, with weights known before the forward pass. The penalties are not: evaluated per
micro-batch, their average over an accumulated batch differs from their value on the whole batch, so 1x8 and 8x1 agree
only approximately. `c` is `penalty_coefficient`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .problem import DescentProblem


OBJECTIVES = ("descent", "erm", "deep_supervision", "fixed", "hinge", "quadratic")
UNCONSTRAINED = ("erm", "deep_supervision")  # which ask nothing of a layer in terms of the one below
MEASURING = ("descent", "hinge", "quadratic")  # whose warm-up finds what is "auto"; the others have no use for it


@dataclass
class StepObjective:
    """What a training step minimises, as a function of the layer losses.

    Attributes:
        value (`Callable`): (a micro-batch's part of the layer losses `[L]`, its share of the items) -> scalar. The
            parts of all micro-batches add up to the layer losses of the step.
        weighted (`list[int]`): layers (1-based) that the objective of this step depends on.
        trained (`list[int]`): layers that it depends on at some step of the run.
        is_linear (`bool`): whether the weights of the layer losses are known before the forward pass.
    """

    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weighted: Sequence[int]
    trained: Sequence[int]
    is_linear: bool = True


def linear_weights(
    objective: str,
    problem: DescentProblem,
    multipliers: torch.Tensor,
    coefficient: float,
    negative_weights: str,
    trained: torch.Tensor,
) -> torch.Tensor | None:
    """Weights w `[L]` of an objective that is sum_l w_l f_l (constants dropped); `None` for the penalties.

    `trained` are the indices of the layers that the objective depends on: of "erm" the last alone.
    `negative_weights="clip"` replaces negative weights of the Lagrangian by 0 in the primal step, so that no layer's
    loss is pushed up; the dual step is not affected.
    """
    if objective in ("hinge", "quadratic"):
        return None
    if objective in ("descent", "fixed"):
        weights = problem.weights(multipliers)
        return weights.clamp(min=0) if negative_weights == "clip" else weights
    weights = torch.zeros_like(multipliers).index_fill_(0, trained, coefficient)
    weights[-1:].fill_(1.0)  # an assignment would copy from the host
    return weights


def penalty(objective: str, problem: DescentProblem, layer_losses: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Value of the `hinge` or `quadratic` objective at the losses `[L]`; a scalar with the graph of the losses."""
    excess = problem.violations(layer_losses).clamp(min=0)  # [layers]
    excess = excess.sum() if objective == "hinge" else 0.5 * excess.square().sum()
    return layer_losses[-1] + coefficient * excess
