"""Searches of settings: the ranges and the metric of `Trainer.hyperparameter_search`.

The paper tuned alpha, f_0, both learning rates and the resilience (section 4, appendix B) and gives no ranges. Here
f_0 is measured, and `descent_strength` takes the place of alpha.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from ..constraints.arguments import as_python
from ..constraints.objectives import objective_class


# Setting -> least and greatest value; all are searched on a logarithmic scale.
RANGES = {
    "learning_rate": (1e-5, 1e-3),
    "descent_strength": (0.25, 1.0),
    "dual_learning_rate": (2e-4, 1e-1),
}
# For trainings whose own dual rate is below `LOW_RATE`, as by default in `SFTDescentConfig`.
LOW_DUAL_RATES = (2e-5, 2e-2)
LOW_RATE = 1e-3


def hp_space(trial, ranges: Mapping[str, Sequence] | None = None) -> dict[str, Any]:
    """A search space for `hyperparameter_search(hp_space=hf_descent.hp_space)` by Optuna.

    Args:
        trial (`optuna.Trial`): suggests the values.
        ranges (mapping, *optional*): setting -> (least, greatest), searched on a logarithmic scale, in whole numbers
            if both are `int`; or a list of other values to choose from. Default: ranges for `learning_rate`,
            `descent_strength` and `dual_learning_rate`. The last is lower if the trainer's own `dual_learning_rate` is
            low, as in [`SFTDescentConfig`].
    """
    if ranges is None:
        ranges = RANGES
    space = {}

    for name, values in ranges.items():
        values = as_python(values)

        kinds = {type(value) for value in values}
        if len(values) != 2 or not kinds <= {int, float}:
            space[name] = trial.suggest_categorical(name, values)
        elif kinds == {int}:
            space[name] = trial.suggest_int(name, *values, log=True)
        else:
            space[name] = trial.suggest_float(name, *values, log=True)
    return space


def ranges_for(args) -> dict[str, Sequence]:
    """`RANGES`, with a range of the dual rate that suits the arguments of a training."""
    ranges = dict(RANGES)
    if args.dual_settings.dual_learning_rate < LOW_RATE:
        ranges["dual_learning_rate"] = LOW_DUAL_RATES
    return ranges


def space_for(args, space: Callable | None) -> Callable | None:
    """The `space` of a search. If it is [`hp_space`] itself, it gets the ranges that suit `args`."""
    if space is not hp_space:
        return space
    return partial(hp_space, ranges=ranges_for(args))


def default_metric(
    objective: str, eval_dataset, direction: str | None
) -> tuple[Callable[..., float], str]:
    """The default metric and direction of a search: `eval_feasible_score` under constraints, else the task loss.

    ValueError if there are several evaluation sets, or if another `direction` was given.
    """
    if objective_class(objective).is_constrained:
        metric = "eval_feasible_score"
        best = "maximize"
    else:
        metric = "eval_loss"
        best = "minimize"

    remedy = "pass `compute_objective`, a function of the metrics."
    if isinstance(eval_dataset, dict):
        names = ", ".join(map(str, eval_dataset))
        raise ValueError(
            f"`eval_dataset` has several sets ({names}), each with its own metrics: {remedy}"
        )
    if direction not in (None, best):
        raise ValueError(
            f"`direction` is {direction!r}, but the default objective, `{metric}`, is to {best}; {remedy}"
        )
    return itemgetter(metric), best
