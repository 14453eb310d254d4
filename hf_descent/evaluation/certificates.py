"""The verdict: row by row, whether what was asked of the layers is met on held-out data, with confidence.

It assumes that the samples are independent, of the distribution that the statement is about, and enough for the t
interval of a mean, and that none of them was used to train this model or to choose it. It is about the layer losses of
one model; the constants of the paper's theorems cannot be measured and are not claimed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..constraints.problem import SMALLEST, DescentProblem, largest_rise
from .scoring import Result, format_table
from .sums import radius


# With fewer blocks the interval is too narrow where losses are heavy-tailed.
MIN_BLOCKS = 8
MET, NOT_MET, NOT_SHOWN = "met", "not met", "not shown"
ALSO_SELECTED = "Training was fitted to some of these rows, or has chosen its checkpoint by them: judge by others."


@dataclass
class Certificate(Result):
    """The verdict: what each row of a problem asked and reached; layer l at index l-1, rows in the problem's order.

    Attributes:
        losses (float64 `[L]`): f_l.
        rows (`list[str]`): names of the rows; those of layers without a constraint are left out.
        asked (float64 `[rows]`): the loss that each row asks its layer to be below.
        reached (float64 `[rows]`): the loss of that layer.
        tolerances (float64 `[rows]`): by how much it may be missed.
        radii (float64 `[rows]`): half-widths of the (paired) intervals of `reached - asked - tolerances`.
        verdicts (`list[str]`): "met" where this interval lies below 0, and the intervals of the layer's loss and of
            f_L lie below chance. "not met" where this interval lies above 0, or that of the layer's loss above chance.
            Else "not shown", as always on under 8 blocks of data, of one layer, or with a loss that is not positive.
        feasible (`bool`): whether every row is met; as sure as that of each row is (an intersection-union test).
        has_learned (`bool`): whether the constrained layers and the last are shown to be below chance, where known.
        max_violation (`float`): the largest violation, in units of the loss.
        shortfall (`float`): the share of the way from chance to what its row asks that the worst layer may still miss,
            by the upper end of its interval; 0 where every row is within its tolerance.
        descent_share, largest_rise (`float`, *optional*): see [`DescentProblem`].
        gamma (`float`): noise level of the input.
        confidence (`float`): of each interval, which has two sides: half of the rest is on the one that meets a row.
        multipliers (`list[float]`, *optional*): of each row, in the training.
        warmup_share (`float`, *optional*): the descent share after warm-up, on the rows that move the multipliers.
        items (`int`, *optional*): labelled rows, tokens or numbers of the data.
        also_selected (`bool`): whether training was fitted to over 1 % of this data, or may have chosen its checkpoint
            or settings by it: the confidence is then less than it says.
        data_name (`str`): the prefix of the metrics of the data in a trainer, such as "eval_matched".
        loss_radii (float64 `[L]`, *optional*): half-widths of the intervals of `losses`.
    """

    losses: np.ndarray
    rows: list[str]
    asked: np.ndarray
    reached: np.ndarray
    tolerances: np.ndarray
    radii: np.ndarray
    verdicts: list[str]
    feasible: bool
    has_learned: bool
    max_violation: float
    shortfall: float
    descent_share: float | None
    largest_rise: float | None
    gamma: float = 0.0
    confidence: float = 0.95
    multipliers: list[float] | None = None
    warmup_share: float | None = None
    items: int | None = None
    also_selected: bool = False
    data_name: str = ""
    loss_radii: np.ndarray | None = None

    def __str__(self) -> str:
        columns = {
            "row": self.rows,
            "asked": [f"{loss:.4g}" for loss in self.asked],
            "reached": [f"{loss:.4g}" for loss in self.reached],
            f"+- ({100 * self.confidence:.6g}%)": [f"{error:.2g}" for error in self.radii],
            "tolerance": [f"{tolerance:.2g}" for tolerance in self.tolerances],
            "multiplier": [f"{multiplier:.3g}" for multiplier in self.multipliers or []],
            "verdict": self.verdicts,
        }
        columns = {title: cells for title, cells in columns.items() if cells}
        table = [list(columns), *map(list, zip(*columns.values()))]
        summary = f"{self.verdicts.count(MET)} of {len(self.rows)} rows are met; f_L = {self.losses[-1]:.4g}"
        summary += "" if self.items is None else f" over {self.items} items"
        if self.descent_share is not None:
            summary += f", descent share {self.descent_share:.2f}"
        if self.warmup_share is not None:
            summary += f" (in training, after warm-up, {self.warmup_share:.2f})"
        if self.largest_rise is not None:
            summary += f", largest rise from layer to layer {self.largest_rise:.1%}"
        if np.isnan(self.radii).all() and NOT_MET not in self.verdicts:
            summary += f". No row has an interval: it takes {MIN_BLOCKS} batches of data, and losses above 0"
        if not self.has_learned:
            summary += ". The layers are not all shown to be better than a constant prediction"
        return f"{format_table(table)}\n{summary}." + (
            f"\n{ALSO_SELECTED}" if self.also_selected else ""
        )


def certify(
    problem: DescentProblem,
    blocks: np.ndarray,
    confidence: float = 0.95,
    gamma: float = 0.0,
    multipliers: Sequence[float] | None = None,
    chance: float | None = None,
    **facts: Any,
) -> Certificate:
    """The verdict on a problem from sums over held-out data; ValueError where `confidence` is no level.

    Args:
        problem ([`DescentProblem`]): what was asked.
        blocks (float64 `[B, L, 2]`): of each block of the data and each layer the sum of the losses and of the items.
        confidence, gamma, facts: as in the [`Certificate`]; facts are `warmup_share`, `also_selected`, `data_name`.
        multipliers (`[rows]`, *optional*): those of the training.
        chance (`float`, *optional*): the least loss of a constant prediction on these very data. Nothing is met where
            it is not known: labels of another distribution, or fewer of them, have another one.
    """
    arguments = problem.state_dict()
    known = [value for value in (arguments["chance_loss"], chance) if value]
    # A new one, since the given one may be on a device.
    problem = DescentProblem(**arguments | {"chance_loss": min(known, default=None)})

    def excess(sums):
        return torch.cat(problem.excess(torch.from_numpy(_means(sums)))).numpy()

    total, count = blocks.sum(axis=0), len(problem.rows)
    losses, values = torch.from_numpy(_means(total)), excess(total)
    errors = np.broadcast_to(radius(excess, blocks, confidence), values.shape)
    if len(blocks) < MIN_BLOCKS or problem.num_layers < 2 or not (losses > 0).all():
        errors = np.full(values.shape, np.nan)
    upper, lower = values + errors, values - errors
    learned = (upper[count:-1] < 0) & (upper[-1] < 0) & (chance != 0)
    met = (upper[:count] <= 0) & learned & bool(chance)
    failed = (lower[:count] > 0) | (lower[count:-1] > 0)
    index = [row.index for row in problem.rows]
    asked, tolerances = (values[index].numpy() for values in problem.bounds(losses))
    return Certificate(
        losses=losses.numpy(),
        rows=[row.name for row in problem.rows],
        asked=asked,
        reached=losses[[row.layer - 1 for row in problem.rows]].numpy(),
        tolerances=tolerances,
        radii=np.where((values == 0) & (errors == 0), np.nan, errors)[
            :count
        ],  # the last layer is no better than f_0
        verdicts=np.where(met, MET, np.where(failed, NOT_MET, NOT_SHOWN)).tolist(),
        feasible=bool(met.all()),
        has_learned=bool(learned.all()),
        max_violation=problem.max_violation(losses).item(),
        shortfall=float(
            (upper[:count].clip(min=0) / (problem.chance - asked).clip(min=SMALLEST)).max()
        ),
        descent_share=problem.descent_share(losses) if chance and upper[-1] < 0 else None,
        largest_rise=largest_rise(losses),
        gamma=gamma,
        confidence=confidence,
        multipliers=None if multipliers is None else [float(multipliers[row]) for row in index],
        items=round(total[-1, 1]),
        loss_radii=np.broadcast_to(radius(_means, blocks, confidence), losses.shape),
        **facts,
    )


def _means(sums: np.ndarray) -> np.ndarray:
    return sums[:, 0] / sums[:, 1]
