"""The jackknife over blocks: against closed forms, and by how often its intervals hold."""

import numpy as np
import pytest
from scipy import stats

from hf_descent.evaluation.sums import pseudo_values, radius


def mean(sums):
    return sums[..., 0] / sums[..., 1]


def test_of_a_mean_it_is_the_usual_standard_error():
    values = np.random.default_rng(0).normal(size=20)
    blocks = np.stack([3 * values, np.full(20, 3.0)], axis=1)  # [blocks, (sum, count)]
    np.testing.assert_allclose(pseudo_values(mean, blocks), values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert 2 * radius(mean, blocks, 0.9) == pytest.approx(high - low)


def test_of_a_ratio_it_is_the_delta_method():
    """Unequal counts, as of tokens: the linearised variance of a ratio of means."""
    generator = np.random.default_rng(1)
    counts = generator.integers(50, 150, 400)
    sums = generator.normal(2.0, 0.1, 400) * counts
    ratio = sums.sum() / counts.sum()
    linear = (sums - ratio * counts) / counts.mean()
    found = radius(mean, np.stack([sums, counts], axis=1))
    assert found == pytest.approx(
        stats.t.ppf(0.975, 399) * linear.std(ddof=1) / np.sqrt(400), rel=0.01
    )


def test_intervals_hold_as_often_as_they_say():
    """Accuracy over 32 blocks of 20 draws with probability 0.8, and the rmse of a chi-square mean."""
    generator = np.random.default_rng(2)
    hits = generator.binomial(20, 0.8, size=(2000, 32))
    squares = generator.chisquare(20, size=(1000, 32))
    for rows, figure, truth in ((hits, mean, 0.8), (squares, lambda sums: np.sqrt(mean(sums)), 1)):
        inside = 0
        for row in rows:
            blocks = np.stack([row, np.full(32, 20)], axis=1)
            inside += abs(figure(blocks.sum(0)) - truth) <= radius(figure, blocks)
        assert stats.binomtest(int(inside), len(rows), 0.95).pvalue > 1e-3


def test_too_little_data_gives_no_interval():
    assert np.isnan(radius(mean, np.ones((1, 2))))
    assert np.isnan(radius(mean, None))
    with pytest.raises(ValueError, match="`confidence` is 95"):
        radius(mean, np.ones((3, 2)), 95)
