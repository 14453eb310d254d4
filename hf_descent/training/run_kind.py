"""When a run reads the losses of all layers. It is decided here, and every hook of the trainers asks for it."""

from collections.abc import Callable
from enum import Enum, auto

from transformers import Trainer

from ..configs import CONSTRAINT_METRICS, LAYER_LOSS
from .evaluation_sets import set_of_metric


class RunKind(Enum):
    """The kinds of runs.

    PLAIN: plain training. Nothing reads the layers.
    JUDGED: plain training. Evaluations read the layers beside Trainer's own numbers, because constraints were stated,
        or the best model is chosen by its layers.
    LAYERED: training and evaluations read the layers, because of the objective or a `readout` function.
    """

    PLAIN = auto()
    JUDGED = auto()
    LAYERED = auto()

    @classmethod
    def of(cls, trainer: Trainer, readout: Callable | None) -> "RunKind":
        """The kind of a trainer's run, by its present arguments: a search, or `train_with_plain`, changes them."""
        args = trainer.args
        if readout is not None or not args.objective_class.is_plain:
            return cls.LAYERED
        if args.states_constraints or _chooses_by_layers(trainer):
            return cls.JUDGED
        return cls.PLAIN

    @property
    def trains_layers(self) -> bool:
        """Whether training reads the layers; then evaluations do, too."""
        return self is RunKind.LAYERED

    @property
    def evaluates_layers(self) -> bool:
        """Whether evaluations read the layers."""
        return self is not RunKind.PLAIN


def _chooses_by_layers(trainer: Trainer) -> bool:
    """Whether the best model is chosen by a metric that only evaluations of the layers have."""
    metric = trainer.args.metric_for_best_model
    if metric is None:
        return False
    name = metric.removeprefix("eval_")
    set_name = set_of_metric(trainer.eval_dataset, metric)
    if set_name is not None:
        name = name.removeprefix(f"{set_name}_")
    return LAYER_LOSS.match(name) is not None or name in CONSTRAINT_METRICS
