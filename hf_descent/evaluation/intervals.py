"""Confidence limits of means over rows. They are made for losses: most are small, and a few are large.

A t interval takes the mean as symmetric around its expectation. Losses are not: a sample of confident predictions
often misses the few rows with a large loss, and then both its mean and its deviation are too small. So a limit here

- counts one unseen row more, which lies further out on that side than the worst row that was seen;
- corrects the t quantile for the skewness of the rows (Hall's transformation, the monotone form of Johnson's).

`recipes/benchmarks/verdict_coverage.py` measures how often verdicts by these limits, and by others, are wrong.

Sources: Johnson (1978), Journal of the American Statistical Association 73: 536-544; Hall (1992), Journal of the Royal
Statistical Society B 54: 221-228.
"""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from ..constraints.problem import AT_CHANCE
from ..special import student_t_quantile


LEAST_ROWS = 30  # with fewer there are no limits
LEAST_SKEWED_ROWS = 100  # nor with fewer than these on the side of a long tail
LARGEST_SKEWNESS = 1.0  # from here on the tail is long
# The deviation of the unseen row from the mean of 100 rows, in units of the worst row's, and the power of the number
# of rows by which it falls. Both were chosen by the measurement above.
UNSEEN, UNSEEN_DECAY = 1.5, 0.2


def check_confidence(confidence: float) -> None:
    """ValueError unless `confidence` is a level."""
    if not 0 < confidence < 1:
        raise ValueError(
            f"`confidence` is {confidence}; give a level between 0 and 1, such as 0.95."
        )


def values_of_rows(
    statistic: Callable[[np.ndarray], np.ndarray], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A statistic of mean losses, and the part of each row in it.

    Args:
        statistic: maps the losses float64 `[L]` to values `[m]`.
        rows (float64 `[n, L + 1]`): for each row the sums of its losses, and its items.

    Returns the values `[m]` for all rows together, and `[n, m]`, the part of each row: the values are the mean of the
    parts. The statistic is taken as linear near these losses.
    """
    losses = rows[:, :-1].sum(axis=0) / rows[:, -1].sum()  # [L]
    values = statistic(losses)
    slopes = np.zeros((len(losses), len(values)))
    for layer, loss in enumerate(losses):
        step = np.zeros_like(losses)
        step[layer] = 1e-5 * abs(loss)
        if step[layer] > 0:
            difference = statistic(losses + step) - statistic(losses - step)
            slopes[layer] = difference / (2 * step[layer])
    off = (rows[:, :-1] - losses * rows[:, -1:]) / rows[:, -1].mean()  # [n, L]
    return values, values + off @ slopes


def confidence_limits(rows: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """The lower and the upper limit of the expectation of `rows`, independent draws; each `[...]`.

    Args:
        rows (float64 `[n, ...]`): the draws; each column is judged by itself.
        confidence (`float`): the confidence of both limits together; each errs in half of the rest.

    Infinite if there are too few examples.
    """
    check_confidence(confidence)
    one_sided = (1 + confidence) / 2
    return -_upper_limit(-rows, one_sided), _upper_limit(rows, one_sided)


def limits_above_chance(
    rows: np.ndarray, chance: float, confidence: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """The limits of how far the loss of each layer lies above 98 % of the loss of guessing, `[L]` each.

    A layer is shown not to be at chance if its upper limit is below 0, and shown to be at chance if its lower limit is
    above 0.

    Args:
        rows (float64 `[n, L + 1]`): of each row the sums of its losses, and its items.
        chance (`float`): the loss of guessing.
    """
    _, of_rows = values_of_rows(lambda losses: losses, rows)
    lower, upper = confidence_limits(of_rows, confidence)
    limit = AT_CHANCE * chance
    return lower - limit, upper - limit


def half_widths(rows: np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Half-widths `[...]` of the intervals between the [`confidence_limits`] of `rows` `[n, ...]`; NaN if there are
    too few examples."""
    lower, upper = confidence_limits(rows, confidence)
    width = upper - lower
    return np.where(np.isinf(width), np.nan, width / 2)


def loss_radii(rows: np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Half-widths `[L]` of the intervals of mean losses, from the sums of rows `[n, L + 1]`, see [`half_widths`]."""
    _, of_rows = values_of_rows(lambda losses: losses, rows)
    return half_widths(of_rows, confidence)


def proportion_radii(shares: np.ndarray, count: int, confidence: float = 0.95) -> np.ndarray:
    """Half-widths of the intervals of `shares`, each of `count` independent rows: the longer side of Wilson's.

    Source: Wilson (1927), Journal of the American Statistical Association 22: 209-212.
    """
    check_confidence(confidence)
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)
    weight = quantile**2 / count
    center = (shares + weight / 2) / (1 + weight)
    half_width = np.sqrt(weight * (shares * (1 - shares) + weight / 4)) / (1 + weight)
    return half_width + np.abs(center - shares)


def _upper_limit(rows: np.ndarray, confidence: float) -> np.ndarray:
    count = len(rows)
    if count < LEAST_ROWS:
        return np.full(rows.shape[1:], np.inf)
    mean = rows.mean(axis=0)
    deviations = rows - mean  # [n, ...]
    squares = (deviations**2).sum(axis=0)
    cubes = (deviations**3).sum(axis=0)
    share = UNSEEN * min(1.0, (LEAST_SKEWED_ROWS / count) ** UNSEEN_DECAY)
    unseen = share * deviations.max(axis=0)

    # The moments of the deviations with the unseen one.
    size = count + 1
    shift = unseen / size
    variance = (squares + unseen**2) / size - shift**2
    third = (cubes + unseen**3) / size - 3 * shift * (squares + unseen**2) / size + 2 * shift**3
    deviation = np.sqrt(variance * size / (size - 1))
    skewness = _divided(third, deviation**3)
    upper = (
        mean + shift - _corrected_quantile(skewness, size, confidence) * deviation / np.sqrt(size)
    )

    if count < LEAST_SKEWED_ROWS:
        skewness = _divided(cubes / count, (squares / count) ** 1.5)
        return np.where(skewness > LARGEST_SKEWNESS, np.inf, upper)
    return upper


def _corrected_quantile(skewness: np.ndarray, size: int, confidence: float) -> np.ndarray:
    """The lower quantile of the t statistic of rows of this skewness, by the inverse of Hall's transformation."""
    quantile = -student_t_quantile(confidence, size - 1)
    scaled = skewness / np.sqrt(size)
    root = np.cbrt(1 + scaled * (quantile - scaled / 6)) - 1
    is_symmetric = np.abs(scaled) < 1e-8
    return np.where(is_symmetric, quantile, _divided(3 * root, scaled))


def _divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """The quotient; 0 if the denominator is 0."""
    is_zero = denominator == 0
    return np.where(is_zero, 0.0, numerator / np.where(is_zero, 1.0, denominator))
