"""Searches of settings: the ranges and the metric of `Trainer.hyperparameter_search` and `hf-descent tune`.

The paper tuned alpha, f_0, both learning rates and the resilience (section 4, appendix B) and gives no ranges. Here
f_0 is measured, and the share of the descent stands for alpha.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from ..configs import JSON_ARGUMENTS, DescentArguments
from ..constraints.objectives import UNCONSTRAINED
from ..constraints.problem import as_python


# Setting -> least and greatest value; all are searched on a logarithmic scale.
RANGES = {
    "learning_rate": (1e-5, 1e-3),
    "descent_strength": (0.25, 1.0),
    "dual_learning_rate": (5e-3, 1e-1),
}


def hp_space(trial, ranges: Mapping[str, Sequence] | None = None) -> dict[str, Any]:
    """A search space for `hyperparameter_search(hp_space=hf_descent.hp_space)` by Optuna.

    Args:
        trial (`optuna.Trial`): suggests the values.
        ranges (mapping, *optional*): setting -> (least, greatest) on a logarithmic scale, of whole numbers where both
            are `int`; or other values, of which one is taken. `RANGES` where not given.
    """
    space = {}
    for name, values in (RANGES if ranges is None else ranges).items():
        values = as_python(values)
        kinds = {type(value) for value in values}
        if len(values) != 2 or not kinds <= {int, float}:
            space[name] = trial.suggest_categorical(name, values)
        else:
            suggest = trial.suggest_int if kinds == {int} else trial.suggest_float
            space[name] = suggest(name, *values, log=True)
    return space


def default_objective(
    objective: str, eval_dataset, direction: str | None
) -> tuple[Callable[..., float], str]:
    """The metric and the direction of a search where none are given: under constraints `eval_feasible_score`, else
    the task loss. ValueError where the `direction` is another, or several evaluation sets have one each."""
    metric, best = (
        ("eval_loss", "minimize")
        if objective in UNCONSTRAINED
        else ("eval_feasible_score", "maximize")
    )
    if direction not in (None, best) or isinstance(eval_dataset, dict):
        raise ValueError(
            f"`direction` is {direction!r} but the default objective is `{metric}` of one `eval_dataset`, to {best}; "
            "pass `compute_objective`, a function of the metrics."
        )
    return itemgetter(metric), best


@contextmanager
def values_as_given(args: DescentArguments) -> Iterator[None]:
    """Inside, a trial's values are taken as they are: Trainer casts them, and these arguments take several types."""
    before = {name: getattr(args, name) for name in JSON_ARGUMENTS}
    vars(args).update(dict.fromkeys(before, _Uncast()))
    try:
        yield
    finally:
        for name, value in before.items():
            if isinstance(getattr(args, name), _Uncast):
                setattr(args, name, value)


class _Uncast:
    """Stands for an argument whose type, called with a new value, is to give that value."""

    def __new__(cls, *values):
        return values[0] if values else super().__new__(cls)
