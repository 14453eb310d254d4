"""The special functions of the package against SciPy's."""

import numpy as np
import pytest
from scipy import special as scipy_special
from scipy import stats

from hf_descent import special


@pytest.mark.parametrize("freedom", [1, 2, 3, 11, 31, 399, 10_000, 1_000_000])
@pytest.mark.parametrize("probability", [0.5, 0.6, 0.95, 0.975, 0.9995])
def test_student_t_quantile(probability, freedom):
    found = special.student_t_quantile(probability, freedom)
    assert found == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("x", [1e-8, 1e-3, 0.5, 1.0, 1.0001, 2.0, 10.0, 700.0, 1e6])
def test_scaled_exponential_integral(x):
    truth = scipy_special.hyperu(1, 1, x)
    assert special.scaled_exponential_integral(x) == pytest.approx(truth, rel=1e-8)


def test_digamma_and_entropy_terms():
    counts = np.array([1.0, 2.0, 40.0, 1e6])
    np.testing.assert_allclose(special.digamma(counts), scipy_special.digamma(counts), rtol=1e-13)
    shares = np.array([0.0, 1e-9, 0.3, 1.0])
    np.testing.assert_allclose(special.entr(shares), scipy_special.entr(shares), rtol=1e-13)
