"""When a run reads the losses of all layers: decided here, and asked for by every hook of the trainers."""

from collections.abc import Callable
from enum import Enum, auto

from transformers import Trainer

from ..configs import CONSTRAINT_METRICS, LAYER_LOSS
from .evaluation_sets import set_of_metric


class RunKind(Enum):
    """The kinds of runs.

    PLAIN: plain training. Losses and evaluations are Trainer's own.
    JUDGED: plain training whose evaluations read the layers as well, beside Trainer's own numbers: constraints were
        stated, or the best model is chosen by its layers.
    LAYERED: the objective, or a readout of the user's, reads the layers in training and in evaluations.
    """

    PLAIN = auto()
    JUDGED = auto()
    LAYERED = auto()

    @classmethod
    def of(cls, trainer: Trainer, readout: Callable | None) -> "RunKind":
        """The kind of a trainer's run, by its present arguments: a search, or plain training first, changes them."""
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
    """Whether the best model is chosen by what an evaluation has only where it reads the layers."""
    metric = trainer.args.metric_for_best_model
    if metric is None:
        return False
    name = metric.removeprefix("eval_")
    set_name = set_of_metric(trainer.eval_dataset, metric)
    if set_name is not None:
        name = name.removeprefix(f"{set_name}_")
    return LAYER_LOSS.match(name) is not None or name in CONSTRAINT_METRICS
