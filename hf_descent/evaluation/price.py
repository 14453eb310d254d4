"""The price of constraints: the loss of the last layer beside its earlier values, and beside plain training."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .intervals import LEAST_ROWS, confidence_limits, values_of_rows


START = "before training"
WARMUP = "after the warm-up"
PLAIN = "plain training"


@dataclass
class Reference:
    """The loss of the last layer at an earlier time of a run, or of plain training.

    Attributes:
        name (`str`): the time, in words; or `PLAIN`.
        loss (`float`): f_L at that time.
        upper (`float`, *optional*): the upper end of its 95 % interval; `None` if there were too few examples.
        rows (float64 `[n, 2]`, *optional*): for each row of the data that is judged, the loss at that time, summed
            over its items, and the number of items; zeros for rows that were not measured. `None` if they are not
            known.
        is_same_data (`bool`): whether the loss is known to be of the data that is judged. Else it is shown, but
            decides nothing: harder examples would look like a rise.
    """

    name: str
    loss: float
    upper: float | None = None
    rows: np.ndarray | None = None
    is_same_data: bool = False

    def __post_init__(self):
        if self.rows is not None:
            self.rows = np.asarray(self.rows, dtype=np.float64)
            self.is_same_data = True

    @classmethod
    def measured(
        cls, name: str, rows: np.ndarray, is_same_data: bool, is_paired: bool = True
    ) -> "Reference":
        """The reference of losses `rows` `[n, 2]`. `is_same_data`: they are of the data that is judged. `is_paired`:
        they can be paired with the rows that are judged."""
        measured = rows[rows[:, 1] > 0]
        _, upper = _mean_limits(measured)
        return cls(
            name,
            loss=_mean(measured),
            upper=float(upper) if np.isfinite(upper) else None,
            rows=rows if is_same_data and is_paired else None,
            is_same_data=is_same_data,
        )

    def is_exceeded(self, last_layer: np.ndarray, share: float) -> bool:
        """Whether f_L is now above this by more than `share`, with 95 % confidence.

        `last_layer` `[n, 2]` has the sum of f_L over each row, and the items. If the rows cannot be paired, the two
        intervals must not meet. A loss of other data is never exceeded.
        """
        if not self.is_same_data:
            return False
        is_paired = self.rows is not None and len(self.rows) == len(last_layer)
        if is_paired:
            was_measured = self.rows[:, 1] > 0
            now = last_layer[was_measured]
            excess = now[:, 0] - (1 + share) * self.rows[was_measured, 0]
            lower, _ = _mean_limits(np.column_stack([excess, now[:, 1]]))
            return bool(lower > 0)

        if self.upper is None:
            return False
        lower, _ = _mean_limits(last_layer)
        return bool(lower > (1 + share) * self.upper)


def on_same_rows(
    times: Iterable[str], readings: Iterable[np.ndarray], count: int
) -> list[Reference]:
    """References from earlier readings `[rows, 2]` of the rows that are judged, one for each of `times`.

    Readings of none of the rows are left out. If the rows were added up to `count` groups, they cannot be paired.
    """
    return [
        Reference.measured(time, rows, is_same_data=True, is_paired=len(rows) == count)
        for time, rows in zip(times, readings)
        if (rows[:, 1] > 0).any()
    ]


def with_paired(unpaired: Iterable[Reference], paired: Iterable[Reference]) -> list[Reference]:
    """The references `unpaired`, one for each time, each replaced by the one in `paired` with its name, if any."""
    by_name = {reference.name: reference for reference in paired}
    return [by_name.get(reference.name, reference) for reference in unpaired]


@dataclass
class Price:
    """f_L, and the losses that it is compared with, as far as they are known.

    Attributes:
        loss (`float`): f_L.
        plain (`float`, *optional*): f_L of plain training.
        references (`dict`): f_L at earlier times, by their names.
        of_other_data (`list[str]`): the names of the references that were measured on other data.
        allowed (`float`, *optional*): the share by which f_L may be above a reference (`max_last_layer_rise`).
        exceeded (`str`, *optional*): the name of a reference that f_L exceeds by more, with 95 % confidence.
        exceeds_plain (`bool`): whether f_L exceeds that of plain training by more, with 95 % confidence.
        limits (`list[float]`, *optional*): the 95 % interval of `share`, paired by example; `None` if plain training
            was not measured on the same examples, or on too few.
    """

    loss: float
    plain: float | None
    references: dict[str, float]
    allowed: float | None = None
    exceeded: str | None = None
    exceeds_plain: bool = False
    limits: list[float] | None = None
    of_other_data: list[str] = field(default_factory=list)

    @property
    def share(self) -> float | None:
        """The price: how far f_L is above that of plain training, as a share. `None` if that is not known, or 0."""
        if not self.plain:
            return None
        return self.loss / self.plain - 1

    @property
    def text(self) -> str:
        """The price in a few words, with its interval if that is known."""
        if self.share is None:
            return "unknown"
        text = percent(self.share)
        if self.limits is not None:
            low, high = self.limits
            text += f" ({percent(low)} to {percent(high)})"
        return text

    @property
    def reason(self) -> str:
        """Why no constraint is met if the price is too high."""
        before = self.references[self.exceeded]
        if before <= 0:
            return f"f_L was {before:.4g} {self.exceeded}"
        rise = self.loss / before - 1
        return (
            f"f_L is {100 * rise:.1f} % above its value {self.exceeded}; "
            f"{100 * self.allowed:.3g} % is allowed"
        )

    @property
    def warning(self) -> str | None:
        """The warning that plain training makes a better model, if this is shown; else `None`."""
        if not self.exceeds_plain or self.share is None:
            return None
        return (
            f"the last layer is {100 * self.share:.1f} % worse than {PLAIN} "
            f"({100 * self.allowed:.3g} % is allowed)"
        )

    def __str__(self) -> str:
        text = f"Last layer: {self.loss:.4g}"
        if self.plain is None:
            text += f"; price unknown, since {PLAIN} was not measured on these data"
        else:
            text += f", {PLAIN} {_beside(self.loss, self.plain, self.limits)}"
        for name, loss in self.references.items():
            if name in self.of_other_data:
                text += f"; {name} {loss:.4g} (on the evaluation set of training)"
            else:
                text += f"; {name} {_beside(self.loss, loss)}"
        return text


def price_of(
    rows: np.ndarray,
    references: Sequence[Reference | Mapping[str, Any]],
    allowed: float | None = None,
    plain: Reference | None = None,
) -> Price:
    """The price of a model by its held-out examples.

    Args:
        rows (float64 `[n, L + 1]`): as `certify` takes them.
        references: f_L at earlier times; they may come from JSON.
        allowed (`float`, *optional*): the share by which f_L may be above a reference.
        plain ([`Reference`], *optional*): f_L of plain training.
    """
    last_layer = rows[:, -2:]
    known = [
        reference if isinstance(reference, Reference) else Reference(**reference)
        for reference in references
    ]
    exceeded = None
    if allowed is not None:
        over = (reference.name for reference in known if reference.is_exceeded(last_layer, allowed))
        exceeded = next(over, None)
    losses = {reference.name: reference.loss for reference in known}
    price = Price(_mean(last_layer), None, losses, allowed, exceeded)
    price.of_other_data = [reference.name for reference in known if not reference.is_same_data]
    if plain is not None:
        price.plain = plain.loss
        price.exceeds_plain = allowed is not None and plain.is_exceeded(last_layer, allowed)
        price.limits = _limits_of_share(last_layer, plain)
    return price


def _limits_of_share(last_layer: np.ndarray, plain: Reference) -> list[float] | None:
    """The 95 % interval of the price, if plain training was measured on the same rows. `last_layer` `[n, 2]` has the
    sum of f_L over each row, and the items."""
    if plain.rows is None or len(plain.rows) != len(last_layer) or len(last_layer) < LEAST_ROWS:
        return None
    before = plain.rows[:, 0]
    if not before.sum() > 0:
        return None

    ratio = last_layer[:, 0].sum() / before.sum()
    off = (last_layer[:, 0] - ratio * before) / before.mean()  # [n], of mean 0
    limits = [float(ratio - 1 + limit) for limit in confidence_limits(off)]
    return limits if np.isfinite(limits).all() else None


def percent(share: float) -> str:
    """A change as people read it, such as "-1.5 %"; "+0.0 %" if it rounds to zero."""
    rounded = round(100 * share, 1) + 0.0  # -0.0 + 0.0 is 0.0
    return f"{rounded:+.1f} %"


def _beside(loss: float, other: float, limits: Sequence[float] | None = None) -> str:
    """Another loss, and how far `loss` is above it, with the interval if it is known."""
    if other <= 0:  # a denoiser that copies its clean input has a loss of 0
        return f"{other:.4g}"
    change = percent(loss / other - 1)
    if limits is not None:
        low, high = limits
        change += f", 95 % interval {percent(low)} to {percent(high)}"
    return f"{other:.4g} ({change})"


def _mean(rows: np.ndarray) -> float:
    """The mean over items; `rows` `[n, 2]` are sums and items."""
    return float(rows[:, 0].sum() / rows[:, 1].sum())


def _mean_limits(rows: np.ndarray) -> tuple[float, float]:
    """The 95 % limits of the mean over items; `rows` `[n, 2]` are sums and items. Infinite with too few examples."""
    if len(rows) < LEAST_ROWS:
        return -np.inf, np.inf
    _, of_rows = values_of_rows(lambda means: means, rows)
    lower, upper = confidence_limits(of_rows[:, 0])
    return lower, upper
