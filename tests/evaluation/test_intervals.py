"""Limits of a mean: against Hall's transformation, solved by bisection, on the sample with its unseen row."""

import numpy as np
import pytest
from scipy import optimize, stats

from hf_descent.evaluation.intervals import confidence_limits, values_of_rows


def limit_by_hand(values, confidence):
    count = len(values)
    unseen = values.mean() + 1.5 * min(1, (100 / count) ** 0.2) * (values.max() - values.mean())
    values = np.append(values, unseen)
    size, deviation = len(values), values.std(ddof=1)
    skewness = ((values - values.mean()) ** 3).mean() / deviation**3 / size**0.5

    def transformed(t):
        return t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6

    target = stats.t.ppf(1 - confidence, size - 1)
    quantile = optimize.brentq(lambda t: transformed(t) - target, -1000, 1000)
    return values.mean() - quantile * deviation / size**0.5


@pytest.mark.parametrize("count", [100, 872])
@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_limits_are_those_of_the_transformation(count, confidence):
    generator = np.random.default_rng(count)
    for values in (generator.normal(size=count), generator.exponential(size=count)):
        lower, upper = confidence_limits(values, confidence)
        one_sided = (1 + confidence) / 2
        assert upper == pytest.approx(limit_by_hand(values, one_sided), rel=1e-9)
        assert lower == pytest.approx(-limit_by_hand(-values, one_sided), rel=1e-9)
        assert lower < values.mean() < upper


def test_columns_are_judged_each_for_itself_and_in_no_order():
    generator = np.random.default_rng(0)
    values = generator.exponential(size=(200, 3, 2))
    limits = confidence_limits(values)
    shuffled = confidence_limits(generator.permutation(values))
    for limit, other in zip(limits, shuffled):
        assert limit.shape == (3, 2)
        np.testing.assert_allclose(limit, other, rtol=1e-12)
    assert confidence_limits(values[:, 1, 1])[1] == pytest.approx(limits[1][1, 1])


def test_too_few_draws_and_skewed_ones_have_no_limit_on_the_side_of_the_tail():
    values = np.random.default_rng(0).exponential(size=99)
    lower, upper = confidence_limits(values)
    assert np.isfinite(lower) and upper == np.inf
    lower, upper = confidence_limits(-values)
    assert np.isfinite(upper) and lower == -np.inf
    assert np.isinf(confidence_limits(np.arange(29.0))).all()
    assert np.isfinite(confidence_limits(np.arange(30.0))).all()


def test_equal_draws_have_an_interval_of_no_width():
    assert confidence_limits(np.full(30, 0.7)) == pytest.approx((0.7, 0.7))


def test_values_of_rows_are_linear_near_the_mean_losses():
    generator = np.random.default_rng(0)
    losses, items = generator.uniform(0.5, 1, (50, 2)), generator.integers(1, 9, 50)
    rows = np.column_stack([losses * items[:, None], items])
    means = rows[:, :2].sum(0) / items.sum()

    def geometric(losses):
        return np.array([losses[0] - losses[1] ** 0.5, losses[0]])

    values, of_rows = values_of_rows(geometric, rows)
    np.testing.assert_allclose(values, geometric(means))
    np.testing.assert_allclose(of_rows.mean(0), values)
    off = (rows[:, :2] - means * items[:, None]) / items.mean()
    expected = values[0] + off[:, 0] - off[:, 1] / (2 * means[1] ** 0.5)
    np.testing.assert_allclose(of_rows[:, 0], expected, rtol=1e-6)
