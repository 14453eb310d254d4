"""The special functions that training and evaluation need, so that neither needs SciPy. Tests compare them with it."""

import math

import numpy as np
import torch


NODES, WEIGHTS = np.polynomial.legendre.leggauss(100)  # of Gaussian quadrature on [-1, 1]


def digamma(x: np.ndarray | float) -> np.ndarray:
    return torch.special.digamma(torch.as_tensor(x, dtype=torch.float64)).numpy()


def entr(x: np.ndarray) -> np.ndarray:
    """-x log(x), and 0 at 0."""
    return torch.special.entr(torch.as_tensor(x, dtype=torch.float64)).numpy()


def scaled_exponential_integral(x: float) -> float:
    """exp(x) E1(x) for x > 0, where E1(x) is the integral of exp(-t) / t from x to infinity.

    Source: Abramowitz and Stegun (1964), 5.1.11 (the series) and 5.1.22 (the continued fraction).
    """
    if x <= 1:
        series, term = 0.0, 1.0
        for k in range(1, 30):
            term *= -x / k
            series += term / k
        return math.exp(x) * (-np.euler_gamma - math.log(x) - series)

    fraction = 0.0
    for k in range(100, 0, -1):
        fraction = k**2 / (x + 2 * k + 1 - fraction)
    return 1 / (x + 1 - fraction)


def student_t_quantile(probability: float, freedom: int) -> float:
    """What a variable with Student's t distribution stays below with a `probability` of at least 1/2.

    With t = sqrt(freedom) tan(angle), the density of the angle is a power of its cosine.
    """

    def mass(angle: float) -> float:
        """Of the angles from 0 to this one, not normalised."""
        angles = angle * (NODES + 1) / 2
        return angle / 2 * (WEIGHTS @ np.cos(angles) ** (freedom - 1))

    low, high = 0.0, min(math.pi / 2, 12 / math.sqrt(freedom))  # nothing is beyond 12 deviations
    wanted = (2 * probability - 1) * mass(high)
    for _ in range(60):
        middle = (low + high) / 2
        if mass(middle) < wanted:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)
