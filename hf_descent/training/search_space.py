"""Search spaces for `Trainer.hyperparameter_search` and `hf-descent tune`.

The paper tuned alpha, f_0, both learning rates and the resilience (section 4, appendix B) and gives no ranges. Here
f_0 is measured, and the share of the descent stands for alpha.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..configs import DescentConfig
from ..constraints.problem import as_python


# Setting -> least and greatest value; all are searched on a logarithmic scale.
RANGES = {
    "learning_rate": (1e-5, 1e-3),
    "descent_strength": (0.25, 1.0),
    "dual_learning_rate": (5e-3, 1e-1),
}


def hp_space(trial, ranges: Mapping[str, Sequence[float]] | None = None) -> dict[str, float]:
    """A search space for `hyperparameter_search(hp_space=hf_descent.hp_space)` by Optuna.

    Args:
        trial (`optuna.Trial`): suggests the values.
        ranges (mapping, *optional*): setting -> (least, greatest) on a logarithmic scale, whole numbers for settings
            that are, or more than two values, of which one is taken. `RANGES` where not given.

    Raises:
        ValueError: a range of fewer than two values, of two in descending order, or with one that is no positive
            number.
    """
    space, whole = {}, whole_settings(DescentConfig)
    for name, values in (RANGES if ranges is None else ranges).items():
        values = check_range(name, values)
        if len(values) > 2:
            space[name] = trial.suggest_categorical(name, values)
        elif all(isinstance(value, int) for value in values) and whole.get(name, True):
            space[name] = trial.suggest_int(name, *values, log=True)
        else:
            space[name] = trial.suggest_float(name, *values, log=True)
    return space


def check_range(name: str, values: Sequence[float]) -> list[float]:
    """The values of a range in Python's own numbers; ValueError where it cannot be searched."""
    found = as_python(values)
    positive = isinstance(found, list) and all(
        isinstance(value, int | float) and 0 < value < math.inf for value in found
    )
    if not positive or len(set(found)) < 2 or (len(found) == 2 and found[0] > found[1]):
        raise ValueError(
            f"The range of `{name}` is {values}; give two positive numbers, the least first, or more to choose from."
        )
    return found


def whole_settings(args: Any) -> dict[str, bool]:
    """Which settings of a dataclass are whole numbers."""
    return {setting.name: setting.type in (int, int | None) for setting in fields(args)}
