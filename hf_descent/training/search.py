"""What `Trainer.hyperparameter_search` needs for arguments of several types."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from transformers.trainer_utils import default_compute_objective

from ..configs import JSON_ARGUMENTS, DescentArguments


def loss_objective(metrics: Mapping[str, float]) -> float:
    """The task loss f_L of a trial that reads layers; Trainer's own default, which would add all layers' losses up,
    of a plain one."""
    if not any("_layer_loss_" in name for name in metrics):
        return default_compute_objective(dict(metrics))
    if "eval_loss" not in metrics:
        raise ValueError(
            f"There is no `eval_loss` among the metrics ({', '.join(metrics)}): with several `eval_dataset`, pass "
            "`compute_objective`, a function of them."
        )
    return metrics["eval_loss"]


def check_default_objective(direction: str, eval_dataset) -> None:
    """ValueError where the loss of one data set, to be minimised, is no objective of a search."""
    if direction != "minimize":
        raise ValueError(
            f"`direction` is {direction!r} but the default objective is `eval_loss`; pass `compute_objective`."
        )
    if isinstance(eval_dataset, dict):
        raise ValueError(
            "With several `eval_dataset` the default objective, the loss of one, is none; pass `compute_objective`, a "
            "function of their metrics."
        )


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
