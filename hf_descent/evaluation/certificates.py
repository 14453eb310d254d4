"""The verdict: for each constraint, whether held-out data show with confidence that it is met.

It assumes independent examples of the distribution that you care about. None of them may have trained this model or
chosen it. The verdict is about the layer losses of one model. It does not claim the constants of the paper's theorems,
which cannot be measured.

In code a constraint is also called a row of the problem. A row of the data is called an example if both occur.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..constraints.arguments import SMALLEST
from ..constraints.problem import AT_CHANCE, DescentProblem, largest_rise
from .intervals import (
    LEAST_ROWS,
    LEAST_SKEWED_ROWS,
    confidence_limits,
    limits_above_chance,
    loss_radii,
    values_of_rows,
)
from .price import PLAIN, Price, Reference, percent, price_of
from .scoring import Result, format_table


MET = "met"
NOT_MET = "not met"
NOT_SHOWN = "not shown"
ALSO_SELECTED = (
    "Training used some of these examples, or has chosen its checkpoint by them: judge by others."
)


@dataclass
class Certificate(Result):
    """The verdict on K constraints: what each asked, what its layer reached, and whether it is met.

    `print` shows it as a table, and `headline` is one line. f_l is the loss of layer l, at index l-1. Chance is the
    loss of guessing; a layer is at chance if its loss is above 98 % of that.

    Attributes:
        losses (float64 `[L]`): f_l.
        rows (`list[str]`): names of the constraints.
        asked (float64 `[K]`): the loss that each constraint asks its layer to be below.
        reached (float64 `[K]`): the loss of that layer.
        tolerances (float64 `[K]`): by how much the layer may miss what is asked.
        radii (float64 `[K]`): the distance from `reached - asked - tolerances` to the upper end of its (paired)
            interval; NaN if there is none.
        verdicts (`list[str]`): "met" if this interval lies below 0, and the intervals of the layer's loss and of f_L
            show that neither is at chance. "not met" if this interval lies above 0, or the layer is shown to be at
            chance; all of them if f_L is shown to have risen by more than is allowed. Else "not shown".
        feasible (`bool`): whether every constraint is met. It is as sure as each of them (an intersection-union test).
        has_learned (`bool`): whether the constrained layers and the last are shown not to be at chance.
        max_violation (`float`): the largest violation, in units of the loss.
        shortfall (`float`): the part of the way from chance down to what is asked that the worst layer may still have
            to go, by the upper end of its interval; 0 if every constraint is within its tolerance.
        descent_share (`float`, *optional*): see [`DescentProblem.descent_share`].
        largest_rise (`float`, *optional*): the largest rise of the loss from a layer to the next, as a share.
        gamma (`float`): noise level of the input.
        confidence (`float`): the confidence of each interval, which has two sides: *met* is wrong in
            (1 - confidence) / 2 of cases.
        multipliers (`list[float]`, *optional*): the multiplier of each constraint in training.
        warmup_share (`float`, *optional*): the descent share after warm-up, on the data that move the multipliers.
        items (`int`, *optional*): the number of labelled examples, tokens or numbers in the data.
        also_selected (`bool`): whether training is known to have used some of these examples, or may have chosen its
            checkpoint or settings by them. The true confidence is then lower.
        data_name (`str`): the prefix of the metrics of the data in a trainer, such as "eval_matched".
        loss_radii (float64 `[L]`, *optional*): half-widths of the intervals of `losses`.
        reasons (`list[str]`, *optional*): why each constraint is not met, in words; empty if it is met.
        examples (`int`, *optional*): the number of independent parts of the data, on which the intervals are based.
            They are examples; of packed texts, documents.
        whole_batches (`int`): how many of these are whole batches, because the losses of single examples are not
            known.
        price ([`~evaluation.price.Price`], *optional*): f_L beside its earlier values, and beside plain training.
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
    reasons: list[str] | None = None
    examples: int | None = None
    whole_batches: int = 0
    price: Price | None = None

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.price, dict):  # from a file
            self.price = Price(**self.price)

    @property
    def outcome(self) -> str:
        """Whether all constraints are met: "met", "not met" or "not shown"."""
        if self.feasible:
            return MET
        if NOT_MET in self.verdicts:
            return NOT_MET
        return NOT_SHOWN

    @property
    def headline(self) -> str:
        """The verdict in one line."""
        price = "unknown" if self.price is None else self.price.text
        line = f"VERDICT: {self.outcome.upper()}, price {price}"
        if self.feasible and self.price is not None and self.price.warning is not None:
            line += f", but {self.price.warning}"
        return line

    def __str__(self) -> str:
        lines = [format_table(self._table()), f"{self._summary()}."]
        if self.price is not None:
            lines.insert(0, f"{self.price}.")
        if self.whole_batches:
            lines.append(
                f"In {self.whole_batches} batches the loss of a single example is not known. Each counts as one "
                "example, so the intervals are wider than they need be."
            )
        if self.also_selected:
            lines.append(ALSO_SELECTED)
        return "\n".join(lines)

    def _table(self) -> list[list[str]]:
        """The rows of the table; columns that say nothing are left out."""
        columns = {
            "constraint": self.rows,
            "asked": [f"{loss:.4g}" for loss in self.asked],
            "reached": [f"{loss:.4g}" for loss in self.reached],
            f"+- ({100 * self.confidence:.6g}%)": [f"{error:.2g}" for error in self.radii],
            "tolerance": [f"{tolerance:.2g}" for tolerance in self.tolerances],
        }
        if self.multipliers:
            columns["multiplier"] = [f"{multiplier:.3g}" for multiplier in self.multipliers]

        columns["verdict"] = self.verdicts
        if self.reasons and any(self.reasons):
            reasons = ["reason", *self.reasons]
            width = max(map(len, reasons))
            title, *cells = [reason.ljust(width) for reason in reasons]  # aligned to the left
            columns[title] = cells

        return [list(columns), *map(list, zip(*columns.values()))]

    def _summary(self) -> str:
        summary = f"{self.verdicts.count(MET)} of {len(self.rows)} constraints are met; "
        summary += f"the last layer's loss is f_L = {self.losses[-1]:.4g}"
        if self.items is not None:
            summary += f" over {self.items} items"
        if self.examples not in (None, self.items):
            summary += f" of {self.examples} examples"
        asks_for_descent = any(name.isdigit() for name in self.rows)  # not of targets alone
        if asks_for_descent and self.descent_share is not None:
            summary += f", descent share {self.descent_share:.2f}"
        if asks_for_descent and self.warmup_share is not None:
            summary += f" (descent share in training, after warm-up, {self.warmup_share:.2f})"
        if self.largest_rise is not None and self.largest_rise <= 0:
            summary += ", each layer is better than the one before"
        elif self.largest_rise is not None:
            summary += f", largest rise from layer to layer {percent(self.largest_rise)}"
        return summary


def certify(
    problem: DescentProblem,
    rows: np.ndarray,
    confidence: float = 0.95,
    gamma: float = 0.0,
    multipliers: Sequence[float] | None = None,
    chance: float | None = None,
    items: int | None = None,
    references: Sequence[Reference | Mapping[str, Any]] = (),
    max_last_layer_rise: float | None = None,
    plain: Any = None,
    has_price: bool = True,
    reads_one_token: bool = False,
    **facts: Any,
) -> Certificate:
    """Judge a problem by held-out data; ValueError if `confidence` is no level.

    Args:
        problem ([`DescentProblem`]): what was asked.
        rows (float64 `[n, L + 1]`): for each row of the data, the sum of its losses at each layer, and its items.
        confidence, gamma, facts: as in the [`Certificate`]; facts are `warmup_share`, `also_selected`, `data_name`,
            `whole_batches`.
        multipliers (`[rows]`, *optional*): the multipliers of the training.
        chance (`float`, *optional*): the least loss of a constant prediction on these very data. If it is not known,
            nothing is met: labels of another distribution, or fewer labels, have another one.
        items (`int`, *optional*): the number of items that the losses are averaged over, if the last column of `rows`
            holds weights.
        references (sequence of [`~evaluation.price.Reference`]): f_L at earlier times of the run.
        max_last_layer_rise (`float`, *optional*): no constraint is met if f_L is shown to be above one of these by
            more than this share.
        plain (`float` or [`LayerProfile`], *optional*): f_L of plain training on the same data. Only a profile can
            show that f_L is above it by more than `max_last_layer_rise`; the headline then says so.
        has_price (`bool`): whether to say the price; plain training has none.
        reads_one_token (`bool`): whether the head reads a single token, as [CLS]. The reason for a layer at chance
            then names `readout="mean"`.
    """
    price = None
    if has_price:
        plain_run = None if plain is None else plain_reference(plain)
        price = price_of(rows, references, max_last_layer_rise, plain_run)

    judged = _Judged.of(_on_cpu(problem, chance), rows, confidence, chance, price)
    judged.reads_one_token = reads_one_token
    problem = judged.problem
    losses = torch.from_numpy(judged.losses)  # [L]
    asked, _ = judged.bounds
    is_met = judged.is_met
    verdicts = judged.verdicts

    descent_share = None
    if chance and judged.upper[-1] < 0:
        descent_share = problem.descent_share(losses)
    if multipliers is not None:
        multipliers = [float(multipliers[row.index]) for row in problem.rows]

    return Certificate(
        losses=judged.losses,
        rows=[row.name for row in problem.rows],
        asked=asked,
        reached=judged.losses[[row.layer - 1 for row in problem.rows]],
        tolerances=judged.bounds[1],
        radii=judged.radii,
        verdicts=verdicts,
        feasible=bool(is_met.all()),
        has_learned=bool(judged.has_learned.all()),
        max_violation=problem.max_violation(losses).item(),
        shortfall=judged.shortfall,
        descent_share=descent_share,
        largest_rise=largest_rise(losses),
        gamma=gamma,
        confidence=confidence,
        multipliers=multipliers,
        items=round(rows[:, -1].sum()) if items is None else items,
        loss_radii=loss_radii(rows, confidence),
        reasons=[judged.reason(place, verdict) for place, verdict in enumerate(verdicts)],
        examples=len(rows),
        price=price,
        **facts,
    )


def plain_reference(plain: "float | Result | Reference | Mapping[str, Any]") -> Reference:
    """f_L of a plain run as a [`Reference`]. It is given as a number, as the profile of that run on the same data, or
    as a [`Reference`], which may come from JSON."""
    if isinstance(plain, Reference):
        return plain
    if isinstance(plain, Mapping):
        return Reference(**plain)
    if isinstance(plain, Result):
        if plain.row_sums is not None:
            return Reference.measured(PLAIN, plain.row_sums[:, -2:], is_same_data=True)
        plain = plain.losses[-1]
    return Reference(PLAIN, float(plain))


def _on_cpu(problem: DescentProblem, chance: float | None) -> DescentProblem:
    """The problem on the CPU, judged by the least of the known losses at chance."""
    arguments = problem.state_dict()
    known = [loss for loss in (arguments["chance_loss"], chance) if loss]
    arguments["chance_loss"] = min(known, default=None)
    return DescentProblem(**arguments)


@dataclass
class _Judged:
    """The numbers that decide the verdict on each of R rows of a problem.

    `values` are the excess of each row, then the excess over chance of each row's layer and of the last layer. `lower`
    and `upper` are the limits of their intervals. Below 0 a row is met, and a layer is not at chance.
    """

    problem: DescentProblem
    losses: np.ndarray  # [L]
    values: np.ndarray  # [2 R + 1]
    lower: np.ndarray  # [2 R + 1]
    upper: np.ndarray  # [2 R + 1]
    examples: int
    chance: float | None
    price: Price | None
    reads_one_token: bool = False

    @classmethod
    def of(
        cls,
        problem: DescentProblem,
        rows: np.ndarray,
        confidence: float,
        chance: float | None,
        price: Price | None,
    ) -> "_Judged":
        """Judge by the sums of rows of the data; the other arguments are as in `certify`."""

        def beyond(losses: np.ndarray) -> np.ndarray:
            return problem.excess(torch.from_numpy(losses))[0].numpy()

        losses = rows[:, :-1].sum(axis=0) / rows[:, -1].sum()
        values = torch.cat(problem.excess(torch.from_numpy(losses))).numpy()

        _, of_rows = values_of_rows(beyond, rows)
        limits = confidence_limits(of_rows, confidence)
        above_chance = limits_above_chance(rows, problem.chance, confidence)
        judged = [row.layer - 1 for row in problem.rows] + [problem.num_layers - 1]
        lower, upper = (
            np.concatenate([limit, above[judged]]) for limit, above in zip(limits, above_chance)
        )
        if problem.num_layers < 2 or not (losses > 0).all():
            lower = np.full_like(values, -np.inf)
            upper = np.full_like(values, np.inf)

        return cls(problem, losses, values, lower, upper, len(rows), chance, price)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """What each row asks, and its tolerance, `[R]` each."""
        index = [row.index for row in self.problem.rows]
        asked, tolerances = self.problem.bounds(torch.from_numpy(self.losses))
        return asked[index].numpy(), tolerances[index].numpy()

    @property
    def has_learned(self) -> np.ndarray:
        """Whether each row's layer and the last one are shown not to be at chance, `[R]`."""
        count = len(self.problem.rows)
        if self.chance == 0:
            return np.zeros(count, dtype=bool)
        return (self.upper[count:-1] < 0) & (self.upper[-1] < 0)

    @property
    def _is_too_dear(self) -> bool:
        return self.price is not None and self.price.exceeded is not None

    @property
    def is_met(self) -> np.ndarray:
        """Whether each row is shown to be met, `[R]`."""
        if self._is_too_dear or not self.chance:
            return np.zeros(len(self.problem.rows), dtype=bool)
        return (self.upper[: len(self.problem.rows)] <= 0) & self.has_learned

    @property
    def verdicts(self) -> list[str]:
        """The verdict on each row, in words."""
        count = len(self.problem.rows)
        is_failed = (self.lower[:count] > 0) | (self.lower[count:-1] > 0) | self._is_too_dear
        return np.where(self.is_met, MET, np.where(is_failed, NOT_MET, NOT_SHOWN)).tolist()

    @property
    def radii(self) -> np.ndarray:
        """The distance from the excess of each row to its upper limit, `[R]`; NaN if there is none."""
        count = len(self.problem.rows)
        asks_nothing = [self.asks_nothing(place) for place in range(count)]
        is_unknown = np.isinf(self.upper[:count]) | np.isnan(self.values[:count]) | asks_nothing
        return np.where(is_unknown, np.nan, self.upper[:count] - self.values[:count])

    @property
    def shortfall(self) -> float:
        """See [`Certificate`]."""
        asked, _ = self.bounds
        miss = self.upper[: len(self.problem.rows)].clip(min=0)
        return float((miss / (self.problem.chance - asked).clip(min=SMALLEST)).max())

    def asks_nothing(self, place: int) -> bool:
        """Whether the row follows f_L, which is not below f_0, so that it asks for nothing."""
        row = self.problem.rows[place]
        return row.power > 0 and not 0 < self.losses[-1] < self.problem.initial_loss_bound

    def reason(self, place: int, verdict: str) -> str:
        """Why a row is not met; empty if it is met."""
        if verdict == MET:
            return ""
        if verdict == NOT_MET:
            return self._why_not_met(place)
        why = self._why_no_verdict()
        if why is None:
            why = self._why_not_shown(place)
        return why

    def _why_not_met(self, place: int) -> str:
        if self.values[len(self.problem.rows) + place] >= 0:
            return f"layer {self.problem.rows[place].layer} is at chance ({self._chance}){self._remedy}"
        if self.lower[place] > 0:
            return f"missed by {self.values[place]:.2g}"
        return self.price.reason

    def _why_no_verdict(self) -> str | None:
        """The fault that keeps all rows from being met; `None` if there is none."""
        if self.problem.num_layers < 2:
            return "the model has one layer"
        if not (self.losses > 0).all():
            return "a loss is not a number above 0"
        if self.examples < LEAST_ROWS:
            return f"{self.examples} examples; {LEAST_ROWS} are the least"
        if self.chance == 0:
            return "there is nothing to predict"
        if self.chance is None:
            return "the loss at chance is not known"
        return None

    def _why_not_shown(self, place: int) -> str:
        row = self.problem.rows[place]
        layer_place = len(self.problem.rows) + place
        if self.asks_nothing(place):
            return f"f_L is not below f_0 ({self.problem.initial_loss_bound:.4g})"
        if self.values[-1] >= 0:
            return f"the last layer is at chance ({self._chance})"
        if np.isinf(self.upper[[place, layer_place, -1]]).any():
            return f"skewed losses; {LEAST_SKEWED_ROWS} examples are the least"
        if self.upper[-1] >= 0:
            return f"the last layer may be at chance ({self._chance})"
        if self.upper[layer_place] >= 0:
            return f"layer {row.layer} may be at chance ({self._chance}){self._remedy}"
        if self.values[place] > 0:
            return "missed, by less than the interval"

        return "interval too wide" + self._examples_needed(place)

    def _examples_needed(self, place: int) -> str:
        """How many examples would show it, if the values stay as they are: intervals shrink with the root of their
        number."""
        radius = self.upper[place] - self.values[place]
        if not self.values[place] < -0.05 * radius:  # at the edge no number would show it
            return ""
        needed = self.examples * (radius / self.values[place]) ** 2
        return f"; some {float(f'{needed:.2g}'):,.0f} examples would do"

    @property
    def _chance(self) -> str:
        return f"{AT_CHANCE * self.problem.chance:.4g} or more"

    @property
    def _remedy(self) -> str:
        """What helps a layer at chance if the last one has learned."""
        has_remedy = self.reads_one_token and self.upper[-1] < 0
        return '; try `readout="mean"`' if has_remedy else ""
