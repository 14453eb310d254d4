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


OBJECTIVES = ("descent", "erm", "deep_supervision", "fixed", "hinge", "quadratic")
UNCONSTRAINED = ("erm", "deep_supervision")  # which ask nothing of a layer in terms of the one below


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


def penalty(objective: str, violations: torch.Tensor, coefficient: float) -> torch.Tensor:
    """What the `hinge` or `quadratic` objective adds to f_L for the violations `[rows]`; a scalar with their graph."""
    excess = violations.clamp(min=0)
    return coefficient * (excess.sum() if objective == "hinge" else 0.5 * excess.square().sum())
