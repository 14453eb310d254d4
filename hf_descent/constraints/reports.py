"""What a run logs about its dual side: the scalars of a step, warnings, and a report at the end."""

import logging
import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from .ascent import DualAscent
from .problem import AT_CHANCE, DescentProblem
from .window import LossWindow, is_below


if TYPE_CHECKING:
    from .state import DualState


logger = logging.getLogger(__name__)
# The first process speaks for all. Accelerate's logger does that, too, but fails in a loop without an `Accelerator`.
logger.addFilter(
    lambda record: not (dist.is_available() and dist.is_initialized() and dist.get_rank())
)

CLOSING_SHARE = 0.1  # the closing report is about this share of the steps, the last ones


class DualReports:
    """Keeps the layer losses that reports are about, and writes the reports. It does not change the dual side.

    Each report is given the [`DualAscent`] after all steps so far, so all numbers of a report are of one moment.

    Args:
        dual (`DualState`): what is reported on.
        steps_per_reading (`int`): optimizer steps from one measurement of the losses that move the multipliers to
            the next.
    """

    def __init__(self, dual: "DualState", steps_per_reading: int):
        num_layers = dual.num_layers
        self._dual = dual
        # Sums of the losses since the last log, and the number of steps.
        self._logged = [0.0] * num_layers
        self._logged_steps = 0
        self._faulty: set[int] = set()  # layers that had a non-finite loss
        self._reported: set[str] = set()
        closing = math.ceil(CLOSING_SHARE * dual.max_steps / steps_per_reading)
        self.closing = LossWindow(closing, num_layers)

    # ---- what they are about ----

    def add_step(self, layer_losses: Sequence[float]) -> None:
        """Take in the training losses `[L]` of a step that had items."""
        faulty = _not_finite(layer_losses)
        if faulty:
            self._faulty.update(faulty)
            return
        self._logged = [total + loss for total, loss in zip(self._logged, layer_losses)]
        self._logged_steps += 1

    def add_reading(self, layer_losses: Sequence[float]) -> None:
        """Take in the losses `[L]` of a step after the warm-up, or of held-out examples read in that step."""
        self.closing.add(layer_losses)
        if self._dual.held_out is not None:
            self._faulty.update(_not_finite(layer_losses))

    def is_first(self, subject: str) -> bool:
        """Whether nothing has been logged about `subject` yet; from then on it counts as logged."""
        is_first = subject not in self._reported
        self._reported.add(subject)
        return is_first

    # ---- scalars ----

    def logs(self, ascent: DualAscent, step: int) -> dict[str, float]:
        """Scalars per layer and constraint, by name; empty if no step since the last call was usable.

        Layer losses are means over the steps since the last call. Multipliers are the present ones, and weights those
        of `step`, the step to come. Violations are those of the layer losses, or with held-out examples those of the
        running means of their losses.
        """
        sums = np.array(self._logged, dtype=np.float32)  # [layers]
        count = self._logged_steps
        self._logged = [0.0] * len(sums)
        self._logged_steps = 0

        self._warn_of_faults()
        self._warn_of_rise(ascent)
        if count == 0:
            return {}

        losses = (sums / count).tolist()
        logs = _numbered("layer_loss", losses)
        if self._dual.problem is not None:
            logs.update(self._constraint_logs(ascent, losses, step))
        return logs

    def _constraint_logs(
        self, ascent: DualAscent, losses: Sequence[float], step: int
    ) -> dict[str, float]:
        dual = self._dual
        problem = dual.problem
        multipliers = ascent.multipliers.numbers
        logs = {}
        if dual.held_out is not None and np.isfinite(ascent.averages.means).all():
            losses = ascent.averages.means.tolist()
            logs.update(_numbered("dual_layer_loss", losses))

        violations = problem.violations(losses, dual.level())
        for constraint in problem.constraints:
            row = constraint.index
            logs[f"violation_{constraint.name}"] = violations[row]
            logs[f"multiplier_{constraint.name}"] = multipliers[row]

        is_active = not dual.inactive(step)
        if is_active and dual.objective.is_linear:
            logs.update(_numbered("weight", dual.layer_weights(step)))

        logs["max_violation"] = _largest(violations, problem)
        if is_active and dual.objective.is_constrained:
            logs["max_acting_violation"] = _largest(dual.acting_violations(losses), problem)
        if ascent.guard is not None and ascent.guard.rise is not None:
            logs["last_layer_rise"] = ascent.guard.rise
        penalties = map(operator.mul, multipliers, violations)
        logs["lagrangian"] = losses[-1] + sum(penalties)
        return logs

    # ---- the closing report ----

    def report(self, ascent: DualAscent, advice_at_chance: str = "") -> dict[str, float]:
        """Log what the constraints asked and what training reached in the last tenth of the run, without the steps of
        the warm-up. Returns the largest violation as a metric.

        For an objective that does not move multipliers it reports only a success: every constraint is met, and f_L is
        clearly below chance.

        `advice_at_chance` is for constrained layers that stayed at chance though the last one has learned. These means
        are no certificate: the model, or the multipliers, were fitted to this data.
        """
        self._warn_of_faults()
        self._warn_of_rise(ascent)

        dual = self._dual
        problem = dual.problem
        rows = self.closing.rows  # [steps, layers]
        if problem is None or not len(rows):
            return {}

        losses = torch.from_numpy(rows.mean(0))  # [layers]
        at_chance = AT_CHANCE * problem.chance
        has_learned = is_below(rows[:, -1], at_chance)
        data = "training batches" if dual.held_out is None else "batches of held-out examples"
        steps = f"On the last {len(rows)} {data}"
        table = self._table(ascent, losses, has_learned)

        if problem.feasible(losses) and has_learned:
            logger.info(f"{steps} every constraint is within its tolerance.\n{table}")
        elif dual.objective.moves_multipliers and has_learned:
            advice = f"Ask for less ({self._ways_to_ask_less()}), or train longer."
            if any(losses[layer - 1] >= at_chance for layer in problem.layers):
                advice = f"Constrained layers are at chance. {advice_at_chance or advice}"
            if not ascent.multipliers.values.any():
                advice = "All multipliers are 0, so no constraint acts yet: train longer."
            logger.warning(
                f"{steps} NOT every constraint is within its tolerance.\n{table}\n{advice}"
            )
        elif dual.objective.moves_multipliers:
            advice = "Train longer, or raise `learning_rate`."
            if losses[-1] < at_chance:
                advice = "These steps are too few to tell."
            logger.warning(f"{steps} f_L is not clearly below chance.\n{table}\n{advice}")
        return {"train_max_violation": problem.max_violation(losses).item()}

    def _table(self, ascent: DualAscent, losses: torch.Tensor, has_learned: bool) -> str:
        """A table of what each constraint asked of these losses `[L]` and what they reached, and the descent share."""
        problem = self._dual.problem
        multipliers = ascent.multipliers.values.tolist()
        asked, tolerances = problem.bounds(losses)

        titles = ("constraint", "asked", "reached", "tolerance", "multiplier")
        lines = [_line(titles)]
        for constraint in problem.constraints:
            row = constraint.index
            numbers = (
                asked[row].item(),
                losses[constraint.layer - 1].item(),
                tolerances[row].item(),
                multipliers[row],
            )
            lines.append(_line([constraint.name, *(f"{number:.4g}" for number in numbers)]))

        if self._dual.args.layer_rows is None:  # targets alone ask for no descent
            return "\n".join(lines)

        share = problem.descent_share(losses) if has_learned else None
        if share is not None:
            lines.append(f"descent share now: {share:.2f}")

        share = problem.descent_share(torch.from_numpy(ascent.warmup_losses))
        if share is not None:
            lines.append(f"descent share at the end of warm-up (no constraints yet): {share:.2f}")
        return "\n".join(lines)

    def _ways_to_ask_less(self) -> str:
        """The settings by which this problem asks for less."""
        args = self._dual.args
        ways = []
        if self._dual.problem.follows:
            ways.append(f"a `descent_strength` below {args.descent_strength:g}")
        elif args.layer_rows is not None:
            ways.append("a smaller `descent_alpha`")

        if args.layer_rows is not None:
            ways += ["fewer `constrained_layers`", "`exit_targets` for the layers that you need"]
        if args.exit_targets or args.loss_targets:
            ways.append("higher targets")
        return ", ".join(ways)

    # ---- warnings ----

    def _warn_of_rise(self, ascent: DualAscent) -> None:
        """Log once that the loss of the last layer has risen by more than its limit."""
        watch = ascent.watch
        if watch is None or watch.highest_rise() is None or not self.is_first("rise"):
            return
        highest, best = watch.highest_rise()
        limits = "Nothing limits this (`max_last_layer_rise=None`)."
        if not self._dual.objective.moves_multipliers:
            limits = "Nothing limits this (`max_last_layer_rise` is for the objective 'descent')."
        elif ascent.guard is not None:
            limits = (
                f"The multipliers shrink while it is more than {watch.max_rise:.1%} above its best value "
                "(`max_last_layer_rise`), so that the constraints give way."
            )
        logger.warning(
            f"The last layer's loss rose under the constraints, from {best:.4g} to {highest:.4g} "
            f"({(highest - best) / abs(best):+.1%}). {limits} If it stays there, ask for less: "
            f"{self._ways_to_ask_less()}."
        )

    def _warn_of_faults(self) -> None:
        """Log once a layer whose loss was not finite, in training or on the examples that move the multipliers."""
        if self._faulty and self.is_first("nonfinite"):
            layer = min(self._faulty)
            logger.error(
                f"The loss of layer {layer} was not finite; such losses do not move the multipliers."
            )


def _not_finite(layer_losses: Sequence[float]) -> list[int]:
    """The layers (1-based) whose losses are infinite or NaN."""
    return [layer for layer, loss in enumerate(layer_losses, start=1) if not math.isfinite(loss)]


def _line(cells: Sequence[str]) -> str:
    """A line of a table of columns of one width."""
    first, *others = cells
    return f"{first:12}" + "".join(f"{cell:>12}" for cell in others)


def _numbered(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{layer}": value for layer, value in enumerate(values, start=1)}


def _largest(violations: Sequence[float], problem: DescentProblem) -> float:
    return max(violations[constraint.index] for constraint in problem.constraints)
