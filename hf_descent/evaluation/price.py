"""What constraints cost: the loss of the last layer beside what it was before, and beside plain training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .intervals import LEAST_ROWS, confidence_limits, values_of_rows


START, WARMUP = "before training", "after the warm-up"


@dataclass
class Reference:
    """The loss of the last layer at an earlier time of a run.

    Attributes:
        name (`str`): the time, in words.
        loss (`float`): f_L then.
        upper (`float`, *optional*): the upper end of its 95 % interval; `None` where there were too few rows.
        rows (float64 `[n, 2]`, *optional*): of each row of the data that is judged the loss then, summed over its
            items, and these; zeros where it was not measured. `None` where it was measured on other data.
    """

    name: str
    loss: float
    upper: float | None = None
    rows: np.ndarray | None = None

    def __post_init__(self):
        if self.rows is not None:
            self.rows = np.asarray(self.rows, dtype=np.float64)

    @classmethod
    def measured(cls, name: str, rows: np.ndarray, is_same_data: bool) -> "Reference":
        """That of `rows` `[n, 2]`, of the data that is judged or of other data."""
        known = rows[rows[:, 1] > 0]
        _, upper = _mean_limits(known)
        upper = float(upper) if np.isfinite(upper) else None
        loss = float(known[:, 0].sum() / known[:, 1].sum())
        return cls(name, loss, upper, rows if is_same_data else None)

    def is_exceeded(self, last_layer: np.ndarray, share: float) -> bool:
        """Whether f_L is above this by more than `share` with 95 % confidence; `last_layer` `[n, 2]` are its sums over
        each row and the items. By pairs, where the rows are the same; else where the intervals do not meet."""
        if self.rows is not None and len(self.rows) == len(last_layer):
            known = self.rows[:, 1] > 0
            off = last_layer[known, 0] - (1 + share) * self.rows[known, 0]
            lower, _ = _mean_limits(np.column_stack([off, last_layer[known, 1]]))
            return bool(lower > 0)
        lower, _ = _mean_limits(last_layer)
        return self.upper is not None and bool(lower > (1 + share) * self.upper)


@dataclass
class Price:
    """f_L beside its references, as far as they are known.

    Attributes:
        loss (`float`): f_L.
        plain (`float`, *optional*): that of plain training.
        references (`dict`): of earlier times by their names.
        allowed (`float`, *optional*): by what share it may be above these (`max_last_layer_rise`).
        exceeded (`str`, *optional*): the name of one that it is shown to be above by more.
    """

    loss: float
    plain: float | None
    references: dict[str, float]
    allowed: float | None = None
    exceeded: str | None = None

    @property
    def share(self) -> float | None:
        """By what share f_L is above that of plain training; `None` without a plain run, or one of no loss."""
        return None if not self.plain else self.loss / self.plain - 1

    @property
    def reason(self) -> str:
        """Why no row is met where the price is too high."""
        rise = _percent(self.loss / self.references[self.exceeded] - 1)
        return f"f_L is {rise} above that {self.exceeded}; {_percent(self.allowed)} is allowed"

    def __str__(self) -> str:
        text = f"Last layer: {self.loss:.4g}"
        if self.plain is None:
            text += "; no plain run to compare with"
        else:
            text += f", plain training {self.plain:.4g}"
            text += "" if self.share is None else f" ({_percent(self.share)})"
        for name, loss in self.references.items():
            text += f"; {name} {loss:.4g}"
            if loss > 0:  # a denoiser that copies its clean input has a loss of 0
                text += f" ({_percent(self.loss / loss - 1)})"
        return text


def price_of(
    rows: np.ndarray,
    references: list[Reference | Mapping[str, Any]],
    allowed: float | None = None,
    plain: Any = None,
) -> Price:
    """The price of a model by its held-out rows.

    Args:
        rows (float64 `[n, L + 1]`): as `certify` takes them.
        references: f_L at earlier times; also as JSON has them.
        allowed (`float`, *optional*): by what share f_L may be above these.
        plain (`float` or [`LayerProfile`], *optional*): f_L of plain training.
    """
    last_layer = rows[:, -2:]
    found = [each if isinstance(each, Reference) else Reference(**each) for each in references]
    exceeded = None
    if allowed is not None:
        over = [each.name for each in found if each.is_exceeded(last_layer, allowed)]
        exceeded = over[0] if over else None
    if plain is not None:
        plain = float(plain.losses[-1]) if hasattr(plain, "losses") else float(plain)
    loss = float(last_layer[:, 0].sum() / last_layer[:, 1].sum())
    return Price(loss, plain, {each.name: each.loss for each in found}, allowed, exceeded)


def _mean_limits(rows: np.ndarray) -> tuple[float, float]:
    """The 95 % limits of a mean over items; `rows` `[n, 2]` are sums and items. Infinite with too few rows."""
    if len(rows) < LEAST_ROWS:
        return -np.inf, np.inf
    _, of_rows = values_of_rows(lambda means: means, rows)
    lower, upper = confidence_limits(of_rows[:, 0])
    return lower, upper


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"
