"""What `Trainer.hyperparameter_search` needs for arguments of several types."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from transformers.trainer_utils import default_compute_objective

from ..configs import JSON_ARGUMENTS, DescentArguments
from ..constraints.objectives import UNCONSTRAINED


def default_objective(objective: str, eval_dataset, direction: str | None) -> tuple[Callable[..., float], str]:
    """What a search goes by where nothing is given, and its direction: under constraints `eval_feasible_score`, else
    the task loss. ValueError where the `direction` is another, or several evaluation sets have one each."""
    metric, best = "eval_feasible_score", "maximize"
    if objective in UNCONSTRAINED:
        metric, best = "eval_loss", "minimize"
    if objective == "erm":  # Trainer's own, which may be a sum of metrics
        best = direction or best
    elif direction not in (None, best):
        raise ValueError(
            f"`direction` is {direction!r} but the default objective is `{metric}`, to {best}; pass "
            "`compute_objective`, or no direction."
        )
    elif isinstance(eval_dataset, dict):
        raise ValueError("With several `eval_dataset` pass `compute_objective`, a function of their metrics.")
    return partial(_metric_of, metric), best


def _metric_of(name: str, metrics: Mapping[str, float]) -> float:
    """A metric of a trial; of plain training Trainer's default, which elsewhere would add up the losses of layers."""
    if name == "eval_loss" and not any("_layer_loss_" in metric for metric in metrics):
        return default_compute_objective(dict(metrics))
    if name not in metrics:
        raise ValueError(
            f"There is no `{name}` among the metrics ({', '.join(metrics)}): with several `eval_dataset`, or with "
            "unconstrained trials, pass `compute_objective`, a function of them."
        )
    return metrics[name]


@contextmanager
def values_as_given(args: DescentArguments) -> Iterator[None]:
    """Within it, a trial's values are taken as they are: Trainer casts a value to the type of the one before, and
    these arguments take several types."""
    before = {name: getattr(args, name) for name in JSON_ARGUMENTS}
    for name in JSON_ARGUMENTS:
        setattr(args, name, _Uncast())
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
