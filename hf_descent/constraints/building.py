"""Builds the dual side of a run from its arguments: the problem, the multipliers, and the end of the warm-up."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..files import find_json
from .arguments import LARGEST
from .multipliers import Multipliers
from .problem import DescentProblem


if TYPE_CHECKING:
    from ..configs import DescentArguments


logger = logging.getLogger(__name__)


def end_of_warmup(args: "DescentArguments", start_step: int, max_steps: int) -> int:
    """The first step in which constraints act. The warm-up is counted from `start_step`; an objective without
    constraints has none."""
    if not args.objective_class.is_constrained:
        return start_step
    warmup = args.dual_settings.dual_warmup_steps
    steps = math.ceil(warmup * max_steps) if warmup < 1 else int(warmup)
    end = start_step + steps
    if end >= max_steps > 0:
        logger.warning(
            f"The warm-up ends at step {end} and the run at step {max_steps}: the constraints will never act. Lower "
            "`dual_warmup_steps` or train longer."
        )
    return end


def problem_of(
    args: "DescentArguments", num_layers: int, chance: float | None, trains: bool
) -> DescentProblem | None:
    """The constraints that the arguments state; `None` if they state none, or if they only judge and f_0 is not known.

    `chance` is the estimated loss of the best constant prediction, if known. ValueError if a run that `trains` under
    constraints lacks f_0.
    """
    objective = args.objective_class
    if objective.takes_multipliers and isinstance(args.fixed_multipliers, str):
        return DescentProblem.saved_in(_constrained_run(args.fixed_multipliers))

    bound = chance if args.initial_loss_bound == "auto" else args.initial_loss_bound
    needs_problem = trains and objective.is_constrained
    if bound is None:
        if needs_problem:
            raise ValueError(
                "The loss of a constant prediction is not known: set `initial_loss_bound` to a number."
            )
        return None

    if not needs_problem and not _has_constraint(args, num_layers):
        return None

    return DescentProblem(
        args.layer_rows,
        bound,
        num_layers,
        chance_loss=chance,
        constrained_layers=args.constrained_layers,
        descent_strength=args.descent_strength,
        exit_targets=args.exit_targets,
        loss_targets=args.loss_targets,
    )


def _has_constraint(args: "DescentArguments", num_layers: int) -> bool:
    """Whether any layer has a constraint; a line asks nothing of the last one."""
    if args.layer_rows != "line" or args.exit_targets or args.loss_targets:
        return True
    first = 1
    if args.constrained_layers is not None:
        first = args.constrained_layers[0]
    return first < num_layers


def changes_problem(args: "DescentArguments") -> bool:
    """Whether an argument about the problem has another value than its default."""
    names = (
        "exit_targets",
        "loss_targets",
        "constrained_layers",
        "descent_strength",
        "initial_loss_bound",
    )
    if args.descent_alpha not in (None, "auto"):
        return True
    return any(getattr(args, name) != getattr(type(args), name) for name in names)


def multipliers_of(args: "DescentArguments", num_rows: int) -> Multipliers:
    """Multipliers at 0, with the dual rule of the arguments."""
    return Multipliers(
        num_rows,
        args.dual_settings.dual_learning_rate,
        optim=args.dual_settings.dual_optim,
        resilience=args.resilience,
        resilience_form=args.resilience_form,
        slack_learning_rate=args.slack_learning_rate,
        maximum=args.multiplier_max,
    )


def fixed_multipliers(args: "DescentArguments", num_rows: int) -> Sequence[float]:
    """The multipliers of the objective "fixed", one per row; ValueError if their number or a value is wrong."""
    multipliers = args.fixed_multipliers
    if isinstance(multipliers, str):
        multipliers = _constrained_run(multipliers)["multipliers"]
    if len(multipliers) != num_rows:
        raise ValueError(
            f"`fixed_multipliers` has {len(multipliers)} values; give one per constraint, {num_rows}."
        )
    for value in multipliers:
        if not isinstance(value, int | float) or not 0 <= value <= LARGEST:
            raise ValueError(
                f"`fixed_multipliers` is {multipliers}; multipliers are finite and not negative."
            )
    return multipliers


def _constrained_run(folder: str) -> Mapping[str, Any]:
    """The summary of the run in a folder; ValueError if the run had no multipliers."""
    summary = find_json(folder, "descent_config.json")
    if "alpha" not in summary or summary.get("multipliers") is None:
        raise ValueError(
            f"`fixed_multipliers` is {folder!r}, which holds no run with multipliers: give the folder of a "
            "constrained run, or a list."
        )
    return summary
