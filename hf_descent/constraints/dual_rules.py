"""The rules by which multipliers and slacks move: from a gradient to the direction of a step.

A rule is a function of a gradient `[rows]` and of its `Moments`, which it brings up to date. It returns the direction
`[rows]`. `multipliers.py` has the formulas.
"""

from collections.abc import Callable

import numpy as np


BETAS = (0.9, 0.999)  # decay of the running means of gradients and of their squares
EPSILON = 1e-8  # keeps Adam from dividing by 0
BOUND = 0.05  # "pi" counts larger violations as this large
DAMPING = 200.0  # K of "pi"


class Moments:
    """What a rule remembers about the gradients so far; arrays are in float32.

    Attributes:
        steps (`int`): their number, the present one included.
        mean (`np.ndarray`): their running mean, `[rows]`.
        square (`np.ndarray`): the running mean of their squares, `[rows]`; only "adam" uses it.
    """

    def __init__(self, size: int):
        self.steps = 0
        self.mean = np.zeros(size, dtype=np.float32)
        self.square = np.zeros(size, dtype=np.float32)


def sgd(gradient: np.ndarray, moments: Moments) -> np.ndarray:
    """Plain ascent: the gradient itself."""
    return gradient


def pi(gradient: np.ndarray, moments: Moments) -> np.ndarray:
    """A PI controller on the bounded gradient. A change of its running mean counts `DAMPING` times as much as its
    value."""
    bounded = (gradient / BOUND).clip(-1, 1)
    before = moments.mean if moments.steps > 1 else bounded
    moments.mean = before + (1 - BETAS[0]) * (bounded - before)
    return bounded + DAMPING * (moments.mean - before)


def adam(gradient: np.ndarray, moments: Moments) -> np.ndarray:
    """Adam (Kingma, Ba 2015), without weight decay."""
    beta1, beta2 = BETAS
    moments.mean = moments.mean + (1 - beta1) * (gradient - moments.mean)
    moments.square = moments.square + (1 - beta2) * (gradient**2 - moments.square)

    denominator = np.sqrt(moments.square / (1 - beta2**moments.steps)) + EPSILON
    return moments.mean / (1 - beta1**moments.steps) / denominator


RULES: dict[str, Callable[[np.ndarray, Moments], np.ndarray]] = {
    "adam": adam,
    "pi": pi,
    "sgd": sgd,
}


def direction(rule: str, gradient: np.ndarray, moments: Moments) -> np.ndarray:
    """The direction `[rows]` of the next step, by the rule of that name."""
    moments.steps += 1
    return RULES[rule](gradient, moments)
