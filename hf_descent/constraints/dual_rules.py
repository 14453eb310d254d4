"""The rules by which multipliers and slacks move: from a gradient to the direction of a step.

A rule is a function of a gradient `[rows]` and of its `Moments`, which it brings up to date. It returns the direction
`[rows]`. `multipliers.py` has the formulas.
"""

import math
from array import array
from collections.abc import Callable, Sequence


BETAS = (0.9, 0.999)  # decay of the running means of gradients and of their squares
EPSILON = 1e-8  # keeps Adam from dividing by 0
BOUND = 0.05  # "pi" counts larger violations as this large
DAMPING = 200.0  # K of "pi"


class Moments:
    """What a rule remembers about the gradients so far; arrays are in float32.

    Attributes:
        steps (`int`): their number, the present one included.
        mean (`array`): their running mean, `[rows]`.
        square (`array`): the running mean of their squares, `[rows]`; only "adam" uses it.
    """

    def __init__(self, size: int):
        self.steps = 0
        self.mean = array("f", [0.0] * size)
        self.square = array("f", [0.0] * size)


def sgd(gradient: Sequence[float], moments: Moments) -> Sequence[float]:
    """Plain ascent: the gradient itself."""
    return gradient


def pi(gradient: Sequence[float], moments: Moments) -> Sequence[float]:
    """A PI controller on the bounded gradient. A change of its running mean counts `DAMPING` times as much as its
    value."""
    bounded = array("f", [min(max(slope / BOUND, -1.0), 1.0) for slope in gradient])
    before = moments.mean if moments.steps > 1 else bounded
    moments.mean = _running(before, bounded, BETAS[0])
    return [
        value + DAMPING * (mean - old) for value, mean, old in zip(bounded, moments.mean, before)
    ]


def adam(gradient: Sequence[float], moments: Moments) -> Sequence[float]:
    """Adam (Kingma, Ba 2015), without weight decay."""
    beta1, beta2 = BETAS
    squares = [slope * slope for slope in gradient]
    moments.mean = _running(moments.mean, gradient, beta1)
    moments.square = _running(moments.square, squares, beta2)

    # The running means began at 0, so their weights add up to less than 1: to these totals.
    total1 = 1 - beta1**moments.steps
    total2 = 1 - beta2**moments.steps
    return [
        mean / total1 / (math.sqrt(square / total2) + EPSILON)
        for mean, square in zip(moments.mean, moments.square)
    ]


def _running(means: Sequence[float], values: Sequence[float], decay: float) -> array:
    """Running means, with one more value each."""
    return array("f", [mean + (1 - decay) * (value - mean) for mean, value in zip(means, values)])


RULES: dict[str, Callable[[Sequence[float], Moments], Sequence[float]]] = {
    "adam": adam,
    "pi": pi,
    "sgd": sgd,
}


def direction(rule: str, gradient: Sequence[float], moments: Moments) -> Sequence[float]:
    """The direction `[rows]` of the next step, by the rule of that name."""
    moments.steps += 1
    return RULES[rule](gradient, moments)
