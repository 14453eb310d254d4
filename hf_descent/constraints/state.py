"""The dual side of a training run: its problem, its warm-up, and when the losses of a step move the multipliers."""

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import building
from .ascent import DualAscent
from .multipliers import Multipliers
from .objectives import StepObjective, weighted_sum
from .problem import AT_CHANCE, DescentProblem
from .reports import DualReports
from .saved_state import STATE_NAME, read_state, write_state
from .transfer import HostCopy


if TYPE_CHECKING:
    from ..configs import DescentArguments
    from ..training.holdout import HeldOutRows


# Optimizer steps between two measurements on held-out examples. One costs about a third of a step, so that every 8
# steps it adds some 4 %.
DUAL_EVERY = 8
# The settings that a checkpoint must share with the run that resumes from it. `dual_holdout` is always `None` now. It
# is there to refuse checkpoints of version 0.1 that used it.
SHARED_SETTINGS = (
    "objective", "initial_loss_bound", "descent_strength", "constrained_layers", "exit_targets", "loss_targets",
    "fixed_multipliers", "dual_holdout",
)  # fmt: skip


class _Step(NamedTuple):
    """An optimizer step whose losses may be on their way to the host."""

    number: int
    sums: HostCopy  # [layers + 1], the sums of its layer losses, and the number to divide them by
    held_out: HostCopy | None  # [layers], the losses of held-out examples, if they were read


class DualState:
    """Everything that descent training carries from step to step beside the model and its optimizer.

    Its numbers are on the host, since a GPU would take longer to launch the few operations on them than to compute
    them. The layer losses of a step arrive on the device. `take_step` only sends them to the host; `settled` waits for
    them and moves the multipliers (see `transfer.py`). So whoever needs the multipliers calls `settled`. In training
    that is the next step, for its weights.

    Steps are optimizer steps, counted from 0 as `TrainerState.global_step` stands during the step.

    Args:
        args (`DescentArguments`): the checked arguments.
        num_layers (`int`): number of layers L.
        max_steps (`int`): optimizer steps of the whole run, of which a fractional warm-up is a part.
        start_step (`int`): the step from which the warm-up is counted.
        chance (`float`, *optional*): the estimated loss of the best constant prediction, if it is known.
        device (`torch.device`): where the losses arrive.
        held_out ([`HeldOutRows`], *optional*): the examples by whose losses the multipliers move. Default: those of
            training.
    """

    def __init__(
        self,
        args: "DescentArguments",
        num_layers: int,
        max_steps: int,
        start_step: int,
        chance: float | None = None,
        device: torch.device | str = "cpu",
        held_out: "HeldOutRows | None" = None,
    ):
        self.args = args
        self.num_layers = num_layers
        self.max_steps = max_steps
        self.device = torch.device(device)
        self.held_out = held_out
        self.objective = args.objective_class()
        self._margin = args.dual_settings.target_margin
        self.active_from = building.end_of_warmup(args, start_step, max_steps)
        self.chance = chance
        self._steps_per_reading = DUAL_EVERY if held_out else 1

        self.problem = building.problem_of(args, num_layers, chance, trains=max_steps > 0)
        num_rows = num_layers if self.problem is None else self.problem.num_rows
        self._ascent = self._new_ascent(num_rows)
        if self.problem is not None and self.objective.takes_multipliers:
            multipliers = building.fixed_multipliers(args, num_rows)
            self._ascent.take_over(multipliers, warmup_losses=None)

        self._reports = DualReports(self, self._steps_per_reading)
        # The last step, while its losses may be on their way to the host.
        self._pending: _Step | None = None

    # ---- primal side ----

    def inactive(self, step: int) -> bool:
        """Whether this step minimises only f_L: in the warm-up, and always in plain training."""
        if self.objective.is_constrained:
            return step < self.active_from
        return self.objective.is_plain

    @property
    def trained_layers(self) -> list[int]:
        """The layers (1-based) whose losses the objective depends on at some step."""
        return sorted({*self.objective.trained_layers(self), self.num_layers})

    def objective_at(self, step: int) -> StepObjective:
        """The objective of this step, as a function of the layer losses."""
        trained = self.trained_layers
        if self.inactive(step):
            weighted = [self.num_layers]
        elif self.objective.is_linear:
            weighted = self.objective.weighted_layers(self, trained, step)
        else:
            return StepObjective(value=self._penalised, weighted=trained, trained=trained)
        # The weights are asked for later, when the multipliers are there.
        return weighted_sum(partial(self.layer_weights, step), weighted, trained)

    def _penalised(self, parts: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        # A part, divided by the share, is the mean over the micro-batch.
        losses = parts / torch.where(share > 0, share, 1.0)
        detach = self.args.negative_weights == "detach"
        violations = self.acting_violations(losses, detach)

        penalty = self.objective.penalty(violations, self.args.penalty_coefficient)
        return share * (losses[-1] + penalty)

    def layer_weights(self, step: int) -> list[float]:
        """The weights w `[L]` of the layer losses at a step where the objective is linear in them."""
        if self.inactive(step):
            return [0.0] * (self.num_layers - 1) + [1.0]

        weights = self.objective.weights(self, step)
        if self.args.normalize_weights:
            total = sum(map(abs, weights))
            weights = [weight / total for weight in weights]
        return weights

    # ---- dual side ----

    def take_step(self, sums: torch.Tensor, step: int, layers: Any = None) -> None:
        """Take in the layer losses of a finished optimizer step. The dual step follows when `settled` is called next.

        The dual step is on these losses, or every `DUAL_EVERY` steps on those of held-out examples, which `layers`
        reads. `sums` `[L + 1]` has the sums of the layer losses, and then the number to divide them by. If this number
        is 0 or a loss is not finite, these losses move nothing. Held-out examples are read all the same, and their
        losses move the multipliers.
        """
        self.settled()
        held_out = None
        if self.held_out is not None and step % DUAL_EVERY == 0:
            held_out = HostCopy(self.held_out.layer_losses(layers, step // DUAL_EVERY))

        self._pending = _Step(step, HostCopy(sums), held_out)

    def settled(self) -> DualAscent:
        """The multipliers, the guard and the averages after all steps so far. If the dual step of the last one is
        still due, waits for its losses and takes it."""
        if self._pending is not None:
            step = self._pending
            # First, since the dual step asks for the `level`, which calls `settled` again.
            self._pending = None
            self._settle(step)
        return self._ascent

    @property
    def multipliers(self) -> Multipliers:
        """The multipliers after all steps so far."""
        return self.settled().multipliers

    def _settle(self, step: _Step) -> None:
        """Take the dual step of an optimizer step whose losses are on the host, or wait for them."""
        *sums, divisor = step.sums.numbers()
        if divisor > 0:
            layer_losses = [value / divisor for value in sums]
            self._reports.add_step(layer_losses)
        else:
            layer_losses = [math.nan] * self.num_layers

        if self.held_out is None:
            self._take_reading(layer_losses, step.number)
        elif step.held_out is not None:
            self._take_reading(step.held_out.numbers(), step.number)

        if step.number + 1 == self.active_from and self._has_learned():
            self._ascent.keep_warmup_losses()

    def _take_reading(self, layer_losses: list[float], step: int) -> None:
        """Take in losses `[L]`: on held-out examples if there are any, else those of the step. After the warm-up
        they move the multipliers, if the objective has moving ones and all losses are finite."""
        is_active = not self.inactive(step)
        if is_active:
            self._reports.add_reading(layer_losses)
        if not all(map(math.isfinite, layer_losses)):
            return

        self._ascent.observe(layer_losses, is_active)
        if is_active and self.objective.moves_multipliers:
            violations = self.acting_violations(layer_losses)
            if self.args.normalize_violations:
                bound = self.problem.initial_loss_bound
                violations = [violation / bound for violation in violations]
            self._ascent.ascend(violations)

    def _has_learned(self) -> bool:
        """Whether the running f_L is clearly below chance."""
        if self.problem is None:
            return False
        return self._ascent.averages.is_last_below(AT_CHANCE * self.problem.chance)

    def level(self) -> float:
        """The f_L to which line and steps constraints lead at present. Before any step it is f_0, so that they ask for
        nothing."""
        last_loss = self.settled().averages.last_loss
        return self.problem.initial_loss_bound if last_loss is None else last_loss

    def acting_violations(self, layer_losses, detach: bool = False):
        """The violations `[rows]` that training acts on, of losses `[L]` in a list or a tensor."""
        return self.problem.violations(layer_losses, self.level(), self._margin, detach)

    def _take_problem(self, problem: DescentProblem) -> None:
        """Take over a problem. Multipliers of another number than it needs start anew."""
        if problem.chance_loss is None:  # it may have become known since the problem was saved
            arguments = problem.state_dict()
            arguments["chance_loss"] = self.chance
            problem = DescentProblem(**arguments)
        self.problem = problem
        if problem.num_rows != len(self._ascent.multipliers.values):
            self._ascent = self._new_ascent(problem.num_rows)

    def _new_ascent(self, num_rows: int) -> DualAscent:
        """Multipliers at 0, a guard and averages that have seen nothing."""
        return DualAscent(self.args, self.num_layers, num_rows, self._steps_per_reading)

    def take_saved_problem(self, summary: Mapping[str, Any]) -> None:
        """Take over the problem of the run whose `descent_config.json` is given, if the arguments state none, and its
        multipliers, if the constraints are the same. It is for a model that is only evaluated."""
        saved = DescentProblem.saved_in(summary)
        if saved is None or saved.num_layers != self.num_layers:  # it may have been cut since
            return

        states_its_own = self.problem is not None and building.changes_problem(self.args)
        if states_its_own and self.problem.constraints != saved.constraints:
            return  # the multipliers are those of other constraints
        if not states_its_own:
            self._take_problem(saved)
        if "multipliers" in summary:
            self._ascent.take_over(summary["multipliers"], summary.get("warmup_layer_losses"))

    # ---- reports ----

    def logs(self, step: int) -> dict[str, float]:
        """Scalars per layer and constraint; see [`DualReports.logs`]."""
        return self._reports.logs(self.settled(), step)

    def report(self, advice_at_chance: str = "") -> dict[str, float]:
        """Log what the constraints asked and what training reached at the end of a run; see [`DualReports.report`]."""
        return self._reports.report(self.settled(), advice_at_chance)

    def is_first_report(self, subject: str) -> bool:
        """Whether nothing has been logged about `subject` yet; from then on it counts as logged."""
        return self._reports.is_first(subject)

    def summary(self) -> dict:
        """The problem and the multipliers in plain Python values, for people and for `fixed_multipliers`."""
        ascent = self.settled()
        multipliers = ascent.multipliers.values.tolist()
        summary = {"objective": self.args.objective, "multipliers": multipliers}

        if self.problem is not None:
            summary.update(self.problem.state_dict())
            summary["multipliers_by_row"] = {
                constraint.name: multipliers[constraint.index]
                for constraint in self.problem.constraints
            }

        if self.held_out is not None:
            summary["dual_rows"] = self.held_out.count
        if ascent.averages.weight > 0:
            data = "train" if self.held_out is None else "dual"
            summary[f"{data}_layer_losses"] = ascent.averages.means.tolist()
        if ascent.warmup_losses.any():
            summary["warmup_layer_losses"] = ascent.warmup_losses.tolist()
        return summary

    # ---- checkpoints ----

    def save(self, folder: str, write: bool = True) -> None:
        """Save the state into a checkpoint folder; only the process that is to `write` writes the file."""
        tensors, settings = self.state_dict()
        if write:
            write_state(folder, tensors, settings)

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint; ValueError if the number of layers or a shared setting differs."""
        self.load_state_dict(*read_state(folder), path=os.path.join(folder, STATE_NAME))

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict]:
        """Tensors by name, and the rest in plain values."""
        tensors = self.settled().state_dict()
        tensors["closing_losses"] = torch.from_numpy(self._reports.closing.kept)
        return tensors, {
            "active_from": self.active_from,
            "problem": None if self.problem is None else self.problem.state_dict(),
            "schedule": self._shared_settings(),
        }

    def load_state_dict(
        self, tensors: dict[str, torch.Tensor], settings: dict, path: str = "The state"
    ) -> None:
        """Take over what `state_dict` gave; ValueError if the number of layers or a shared setting differs."""
        self.settled()
        self._check_shared_settings(settings["schedule"], path)
        # Before the tensors, since it says how many multipliers there are.
        if settings["problem"] is not None:
            self._take_problem(DescentProblem(**settings["problem"]))

        try:
            self._ascent.load_state_dict(tensors)
            self._reports.closing.restore(tensors["closing_losses"].numpy())
            self.active_from = int(settings["active_from"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no complete dual state ({error}); resume from another."
            ) from error

    def _check_shared_settings(self, saved: Mapping[str, Any], path: str) -> None:
        for name, value in self._shared_settings().items():
            # Version 0.1 did not save the rule.
            saved_value = saved.get(name, value if name == "dual_optim" else None)
            if saved_value != value:
                raise ValueError(
                    f"{path} was saved with {name}={saved_value!r} but this run has {value!r}; resume with the saved "
                    "setting, or start a new run from the checkpoint's weights with `from_pretrained`."
                )

    def _shared_settings(self) -> dict:
        """The settings that a checkpoint must share, as plain JSON values. "line" is written as "auto", its name in
        version 0.1."""
        args = self.args
        settings = {name: getattr(args, name) for name in SHARED_SETTINGS}

        settings["num_layers"] = self.num_layers
        settings["descent_alpha"] = "auto" if args.layer_rows == "line" else args.layer_rows
        settings["dual_warmup_steps"] = args.dual_settings.dual_warmup_steps
        settings["dual_optim"] = args.dual_settings.dual_optim
        return json.loads(json.dumps(settings))
