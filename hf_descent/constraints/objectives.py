"""The training objectives: maps from layer losses f `[L]` to the scalar that the primal optimizer minimises.

- `descent`: the Lagrangian of the constrained problem, at the current multipliers (paper, Algorithm 1);
- `erm`: f_L, plain training;
- `deep_supervision`: f_L + c sum_{l<L} f_l over the constrained layers, fixed weights;
- `layerskip`: the early exit loss of LayerSkip (arXiv 2404.16710, equations 4 to 6): weights that grow with depth, of
  the exits that a curriculum enables. c is the paper's e_scale, and there is no layer dropout;
- `fixed`: the Lagrangian at frozen multipliers, for telling the dynamics of the multipliers from their final weights;
- `hinge`: f_L + c sum_l [g_l]_+, a penalty on the violations g;
- `quadratic`: f_L + c/2 sum_l [g_l]_+^2.

All but the last two are linear in f, with weights known before the forward pass. The penalties are not: evaluated per
micro-batch, their average over an accumulated batch differs from their value on the whole batch, so 1x8 and 8x1 agree
only approximately. `c` is `penalty_coefficient`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


OBJECTIVES = ("descent", "erm", "deep_supervision", "layerskip", "fixed", "hinge", "quadratic")
UNCONSTRAINED = (
    "erm",
    "deep_supervision",
    "layerskip",
)  # which ask nothing of a layer in terms of the one below
WITH_MULTIPLIERS = ("descent", "fixed")


@dataclass
class StepObjective:
    """What a training step minimises, as a function of the layer losses."""

    # (a micro-batch's part of the layer losses `[L]`, its share of the items) -> scalar. The parts of all
    # micro-batches add up to the layer losses of the step.
    value: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    weighted: Sequence[int]  # layers (1-based) that the objective of this step depends on
    trained: Sequence[int]  # layers that it depends on at some step of the run
    is_linear: bool = (
        True  # whether the weights of the layer losses are known before the forward pass
    )


def penalty(objective: str, violations: torch.Tensor, coefficient: float) -> torch.Tensor:
    """What the `hinge` or `quadratic` objective adds to f_L for the violations `[rows]`; a scalar with their graph."""
    excess = violations.clamp(min=0)
    return coefficient * (excess.sum() if objective == "hinge" else 0.5 * excess.square().sum())


def layerskip_enabled(
    layer: Any, num_layers: int, step: int, max_steps: int, rotation: int | None
) -> Any:
    """Whether LayerSkip's curriculum C(t, l) enables the exit after a layer at step t = 0, 1, ... of T = `max_steps`.

    Rotational, where `rotation` is R: every R-th exit, rotated by a layer with each step. Gradual, where it is `None`:
    from layer L down, one layer more every T / 2L steps. The last layer is always trained, as in the authors' code.
    `layer` is one of 1..L or a tensor of them; the paper counts from 0, and so does the curriculum.
    """
    index, last = layer - 1, layer == num_layers
    if rotation is not None:
        return last | ((index - step) % num_layers % rotation == 0)
    return last | (index >= num_layers - 1 - 2 * num_layers * step // max(max_steps, 1))


def layerskip_weights(
    num_layers: int,
    step: int,
    max_steps: int,
    rotation: int | None,
    scale: float,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """LayerSkip's weights `[L]` of the layer losses at a step, which add up to 1; see [`layerskip_enabled`].

    Of those enabled, they are in proportion to e(l): `scale` (0 + 1 + ... + l) for l = 0..L-2 as the paper counts, so
    that the first layer has none; and L - 1 + `scale` (0 + 1 + ... + (L - 2)) for the last.
    """
    layers = torch.arange(1, num_layers + 1, device=device)  # [layers]
    exits = scale * (layers - 1) * layers / 2
    last = max(num_layers - 1, 1) + scale * (num_layers - 2) * (num_layers - 1) / 2
    exits = torch.where(layers == num_layers, last, exits)
    exits = exits * layerskip_enabled(layers, num_layers, step, max_steps, rotation)
    return exits / exits.sum()
