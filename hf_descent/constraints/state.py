"""The dual side of one training run: warm-up, problem, multipliers, running averages, and what they say of the run."""

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save

from ..files import atomic_write, find_json
from . import objectives
from .guard import LastLayerGuard
from .multipliers import Multipliers
from .problem import AT_CHANCE, LARGEST, DescentProblem
from .window import LossWindow, is_below


if TYPE_CHECKING:
    from ..configs import DescentArguments
    from ..training.holdout import HeldOutRows


logger = logging.getLogger(__name__)
# The first process speaks for all. Accelerate's logger does that, too, but fails in a loop without an `Accelerator`.
logger.addFilter(
    lambda record: not (dist.is_available() and dist.is_initialized() and dist.get_rank())
)

STATE_NAME = "descent_state.safetensors"
AVERAGE_DECAY = 0.98  # running averages look back about 50 steps
DUAL_EVERY = (
    8  # steps from one reading of held-out rows to the next, which costs a third of one: some 4 %
)
# The settings that a checkpoint must share with the run that resumes from it.
SCHEDULE = (
    "objective", "initial_loss_bound", "descent_strength", "constrained_layers", "exit_targets", "loss_targets",
    "dual_warmup_steps", "fixed_multipliers", "dual_holdout", "layerskip_rotation", "dual_optim",
)  # fmt: skip
# How often rows are checked, in the constrained part of a run, for whether they come closer to being met; and the
# least number of steps between two checks.
PROGRESS_CHECKS = 10
LEAST_CHECKED = 50
CLOSING_SHARE = 0.1  # of a run's steps: its last ones, which the closing report is about


class DescentState:
    """Everything that descent training carries from step to step beside the model and its optimizer.

    Steps are optimizer steps, counted from 0 as `TrainerState.global_step` stands during the step.

    Args:
        args (`DescentArguments`): the checked arguments.
        num_layers (`int`): number of layers L.
        max_steps (`int`): optimizer steps of the whole run, of which a fractional warm-up is a part.
        start_step (`int`): the step at which the duals start; warm-up is counted from here.
        chance (`float`, *optional*): the estimated loss of the best constant prediction, where it is known.
        device (`torch.device`): where the losses arrive.
        held_out ([`HeldOutRows`], *optional*): the rows on which the multipliers move, if not on those of training.
        constant ([`ChanceLoss`], *optional*): measures the loss at chance of other data.
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
        constant: Any = None,
    ):
        self.args, self.num_layers, self.max_steps = args, num_layers, max_steps
        self.device, self.held_out, self.constant = device, held_out, constant
        warmup = args.dual_warmup_steps
        self.active_from = start_step + (
            math.ceil(warmup * max_steps) if warmup < 1 else int(warmup)
        )
        if self.active_from >= max_steps > 0 and args.objective not in objectives.UNCONSTRAINED:
            logger.warning(
                f"The warm-up ends at step {self.active_from} and the run at step {max_steps}: the constraints will "
                "never act. Lower `dual_warmup_steps` or train longer."
            )
        self.chance = chance
        self.problem: DescentProblem | None = None
        bound = chance if args.initial_loss_bound == "auto" else args.initial_loss_bound
        first, *_ = args.constrained_layers or [1]  # the line does not constrain the last layer
        has_rows = (
            args.layer_rows != "line"
            or args.exit_targets
            or args.loss_targets
            or first < num_layers
        )
        multipliers = args.fixed_multipliers
        if args.objective == "fixed" and isinstance(multipliers, str):
            run = find_json(multipliers, "descent_config.json")
            problem, multipliers = DescentProblem.saved_in(run), run.get("multipliers")
            if problem is None or multipliers is None:
                given = f"`fixed_multipliers` is {args.fixed_multipliers!r}, which holds no run with multipliers"
                raise ValueError(f"{given}: give the folder of a constrained run, or a list.")
            self._take_problem(problem)
        elif bound is not None and (
            has_rows or (args.objective not in objectives.UNCONSTRAINED and max_steps)
        ):
            names = ("constrained_layers", "descent_strength", "exit_targets", "loss_targets")
            given = {name: getattr(args, name) for name in names}
            self._take_problem(
                DescentProblem(args.layer_rows, bound, num_layers, chance_loss=chance, **given)
            )
        elif args.objective not in objectives.UNCONSTRAINED and max_steps > 0:
            raise ValueError(
                "The loss of a constant prediction is not known: set `initial_loss_bound` to a number."
            )
        self.multipliers = Multipliers(
            num_layers if self.problem is None else self.problem.num_rows,
            args.dual_learning_rate,
            optim=args.dual_optim,
            resilience=args.resilience,
            resilience_form=args.resilience_form,
            slack_learning_rate=args.slack_learning_rate,
            maximum=args.multiplier_max,
            device=device,
        )
        if self.problem is not None and args.objective == "fixed":
            rows = self.problem.num_rows
            if len(multipliers) != rows:
                raise ValueError(
                    f"`fixed_multipliers` has {len(multipliers)} values; give one per row, {rows}."
                )
            if not all(
                isinstance(value, int | float) and 0 <= value <= LARGEST for value in multipliers
            ):
                raise ValueError(
                    f"`fixed_multipliers` is {multipliers}; multipliers are finite and not negative."
                )
            self._set_multipliers(multipliers)
        self.guard: LastLayerGuard | None = None  # for the multipliers that move
        if args.objective == "descent" and args.max_last_layer_rise is not None:
            self.guard = LastLayerGuard(args.max_last_layer_rise, device)
        # Running averages of the layer losses, the weight that makes up for their start at zero, and that of f_L^2.
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self._running = zeros(num_layers + 2)  # the averages, the weight, the square
        self._level: torch.Tensor | None = None  # of these averages, where it is known already
        self._one = torch.ones(1, dtype=torch.float32, device=device)
        self.warmup_losses = zeros(
            num_layers
        )  # the averages at the end of warm-up; zeros where nothing was learned
        self._logged = zeros(num_layers + 1)  # sums since the last log, and their count
        self._nonfinite = zeros(num_layers)  # steps with a non-finite loss, per layer
        self._reported: set[str] = set()
        closing = math.ceil(CLOSING_SHARE * max_steps / (DUAL_EVERY if held_out else 1))
        self._closing = LossWindow(closing, num_layers, device)
        self._since_check = zeros(
            num_layers + 1
        )  # sums of losses since the last check, and their count
        self._last_check: tuple[torch.Tensor, torch.Tensor] | None = None  # violations, multipliers

    # ---- primal side ----

    def inactive(self, step: int) -> bool:
        """Whether the objective of this step is f_L alone: in warm-up, and always for "erm"."""
        objective = self.args.objective
        return objective == "erm" or (
            objective not in objectives.UNCONSTRAINED and step < self.active_from
        )

    @property
    def trained_layers(self) -> list[int]:
        """The layers (1-based) whose losses the objective depends on at some step."""
        every, constrained = range(1, self.num_layers + 1), self.problem and self.problem.layers
        layers = {
            "erm": (),
            "deep_supervision": self.args.constrained_layers or every,
            "layerskip": every[1:],
        }
        return sorted({*layers.get(self.args.objective, constrained), self.num_layers})

    def objective_at(self, step: int) -> objectives.StepObjective:
        """What this step minimises."""
        is_linear = self.inactive(step) or self.args.objective not in ("hinge", "quadratic")
        value = partial(self._objective, step=step)
        weighted = [self.num_layers] if self.inactive(step) else self.trained_layers
        if self.args.objective == "layerskip":
            weighted = [
                each
                for each in weighted
                if objectives.layerskip_enabled(each, *self._curriculum(step))
            ]
        return objectives.StepObjective(value, weighted, self.trained_layers, is_linear)

    def _objective(
        self, layer_losses: torch.Tensor, share: torch.Tensor, step: int
    ) -> torch.Tensor:
        if self.inactive(step):
            return layer_losses[-1]
        if self.args.objective in ("hinge", "quadratic"):
            # Divided by its share, a part is the micro-batch's own mean.
            own = layer_losses / torch.where(share > 0, share, 1.0)
            violations = self._violations(own, detach=self.args.negative_weights == "detach")
            penalty = objectives.penalty(
                self.args.objective, violations, self.args.penalty_coefficient
            )
            return share * (own[-1] + penalty)
        # Layers without weight are left out, so that a non-finite loss of theirs does not become 0 * inf. Mixed
        # precision around a custom loop's call would round a product by `@`.
        weights = self.weights(step)
        if len(self._trained) < self.num_layers:
            weights = weights[self._trained]
            layer_losses = layer_losses[self._trained]
        return (weights * layer_losses).sum()

    def _curriculum(self, step: int) -> tuple[int, int, int, int | None]:
        """The arguments of LayerSkip's curriculum at `step`."""
        return self.num_layers, step, self.max_steps, self.args.layerskip_rotation

    def weights(self, step: int) -> torch.Tensor:
        """Weights w `[L]` of the layer losses in a linear objective, outside warm-up."""
        args = self.args
        if args.objective in ("descent", "fixed"):
            detach = args.negative_weights == "detach"
            weights = self.problem.weights(self.multipliers.values, self.level, detach)
            weights = weights.clamp(min=0) if args.negative_weights == "clip" else weights
        elif args.objective == "layerskip":
            weights = objectives.layerskip_weights(
                *self._curriculum(step), args.penalty_coefficient, self.device
            )
        else:
            weights = torch.zeros_like(self.averages).index_fill_(
                0, self._trained, args.penalty_coefficient
            )
            weights[-1:].fill_(1.0)  # an assignment would copy from the host
        return weights / weights.abs().sum() if args.normalize_weights else weights

    @cached_property
    def _trained(self) -> torch.Tensor:
        """Indices of the trained layers; kept, since new ones would be copied from the host at every step."""
        return torch.tensor(self.trained_layers, device=self.device) - 1

    # ---- dual side ----

    def dual_step(
        self, layer_losses: torch.Tensor, step: int, items: torch.Tensor | None = None, layers=None
    ) -> None:
        """What follows an optimizer step: its layer losses `[L]` are logged, and the dual step is taken on them or,
        every `DUAL_EVERY` steps, on those of held-out rows, which `layers` reads. Losses that are not finite, or are
        of no `items` (0), do not count."""
        finite = are_finite(layer_losses)  # [layers]
        self._nonfinite += ~finite
        usable = finite.all() if items is None else finite.all() & (items > 0)
        self._logged += torch.where(usable, torch.cat([layer_losses, self._one]), 0.0)
        if self.held_out is None:
            self._ascend(torch.where(usable, layer_losses, torch.nan), step)
        elif step % DUAL_EVERY == 0:
            self._ascend(self.held_out.layer_losses(layers, step // DUAL_EVERY), step, DUAL_EVERY)
        if step + 1 == self.active_from:
            self.warmup_losses = torch.where(self.has_learned, self.mean_losses, 0.0)
        self._report_progress(step + 1)

    def _ascend(self, layer_losses: torch.Tensor, step: int, repeats: int = 1) -> None:
        """A step of averages and multipliers on losses `[L]`, or `repeats` of them; none where one is not finite."""
        usable = are_finite(layer_losses).all()
        row = torch.cat([layer_losses, self._one, layer_losses[-1:] ** 2])  # [layers + 2]
        row = row.to(self._running)
        running = self._running.lerp(row, 1 - AVERAGE_DECAY**repeats)
        self._running = torch.where(usable, running, self._running)
        self._level = None
        if not self.inactive(step):
            self._closing.add(layer_losses)
            self._since_check += torch.where(usable, row[:-1], 0.0)
        growth = shrinks = None
        if self.guard is not None:
            self.guard.observe(layer_losses[-1])
            growth = self.guard.growth
            shrinks = self.guard.shrinks
        if self.args.objective == "descent" and not self.inactive(step):
            violations = self._violations(layer_losses)
            if self.args.normalize_violations:
                violations = violations / self.problem.initial_loss_bound
            for _ in range(repeats):
                self.multipliers.step(
                    torch.where(usable, violations, torch.nan), growth=growth, shrinks=shrinks
                )

    @property
    def averages(self) -> torch.Tensor:
        """The running averages of the layer losses `[L]`, which start at zero."""
        return self._running[: self.num_layers]

    @property
    def average_weight(self) -> torch.Tensor:
        """What makes up for the averages' start at zero, `[1]`."""
        return self._running[self.num_layers : self.num_layers + 1]

    @property
    def square(self) -> torch.Tensor:
        """The running average of f_L^2, `[1]`."""
        return self._running[-1:]

    @property
    def mean_losses(self) -> torch.Tensor:
        """Running averages of the layer losses `[L]` that move the multipliers, over about the last 50 steps."""
        return self.averages / self.average_weight

    @property
    def has_learned(self) -> torch.Tensor:
        """Whether the running f_L is clearly below chance, by twice its error; of 5 batches none is known."""
        weight, mean = self.average_weight, self.mean_losses[-1]
        batches = (
            2 / (1 - AVERAGE_DECAY) * weight / (2 - weight) / (DUAL_EVERY if self.held_out else 1)
        )
        variance = (self.square / weight - mean**2).clamp(min=0) / (batches - 5).clamp(min=0)
        return mean + 2 * variance.sqrt() < (
            AT_CHANCE * self.problem.chance if self.problem else -math.inf
        )

    @property
    def level(self) -> torch.Tensor:
        """The f_L to which line and steps rows lead at present; f_0, from which they ask nothing, before any step."""
        if self._level is None:
            mean = self.averages[-1] / self.average_weight[0]
            self._level = torch.where(are_finite(mean), mean, self.problem.initial_loss_bound)
        return self._level

    def _violations(self, layer_losses: torch.Tensor, detach: bool = False) -> torch.Tensor:
        """Those that training acts on, `[rows]`."""
        return self.problem.violations(layer_losses, self.level, self.args.target_margin, detach)

    def _take_problem(self, problem: DescentProblem) -> None:
        if problem.chance_loss is None:  # version 0.1 did not keep it
            problem = DescentProblem(**problem.state_dict() | {"chance_loss": self.chance})
        self.problem = problem.to(self.device)
        self._level = None
        vars(self).pop("_trained", None)

    def take_saved_problem(self, summary: Mapping[str, Any]) -> None:
        """For a model that is only evaluated: the problem of the run whose `descent_config.json` is given, where the
        arguments state none, and the multipliers, where the rows are the same."""
        saved = DescentProblem.saved_in(summary)
        if saved is None or saved.num_layers != self.num_layers:  # it may have been cut since
            return
        args = self.args
        names = (
            "exit_targets",
            "loss_targets",
            "constrained_layers",
            "descent_strength",
            "initial_loss_bound",
        )
        given = args.descent_alpha not in (None, "auto")
        given = given or any(getattr(args, name) != getattr(type(args), name) for name in names)
        if self.problem is None or not given:
            self._take_problem(saved)
        if self.problem.rows == saved.rows and "multipliers" in summary:
            self._set_multipliers(summary["multipliers"])
            self.warmup_losses = torch.tensor(
                summary.get("warmup_layer_losses", self.warmup_losses.tolist())
            )

    def _set_multipliers(self, values: Sequence[float]) -> None:
        self.multipliers.load_state_dict(
            self.multipliers.state_dict() | {"values": torch.tensor(values)}
        )

    # ---- logs ----

    def logs(self, step: int) -> dict[str, float]:
        """Scalars of the steps since the last call, per layer and row; empty where there was no usable step."""
        *sums, count = self._logged.tolist()
        self._logged.zero_()
        self._report_faults()
        self._report_rise()
        if count == 0:
            return {}
        losses = (torch.tensor(sums) / count).to(self.device)  # [layers]
        logs = _numbered("layer_loss", losses)
        if self.problem is None:
            return logs
        if self.held_out is not None and self.mean_losses.isfinite().all():
            losses = self.mean_losses
        violations = self.problem.violations(losses, self.level)
        for row in self.problem.rows:
            logs[f"violation_{row.name}"] = violations[row.index].item()
            logs[f"multiplier_{row.name}"] = self.multipliers.values[row.index].item()
        if not self.inactive(step) and self.args.objective not in ("hinge", "quadratic"):
            logs |= _numbered("weight", self.weights(step))
        logs["max_violation"] = max(violations[row.index].item() for row in self.problem.rows)
        if not self.inactive(step) and self.args.objective not in objectives.UNCONSTRAINED:
            acting = self._violations(losses)
            logs["max_acting_violation"] = max(
                acting[row.index].item() for row in self.problem.rows
            )
        if self.guard is not None and self.guard.rise.isfinite():
            logs["last_layer_rise"] = self.guard.rise.item()
        logs["lagrangian"] = self.problem.lagrangian(
            losses, self.multipliers.values, self.level
        ).item()
        return logs

    def report(self) -> dict[str, float]:
        """Log what the rows asked and what training reached in the last tenth of the run, as far as constraints were
        active there; returns the largest violation as a metric.

        These means are no certificate: the model, or the multipliers, were fitted to this data.
        """
        self._report_faults()
        self._report_rise()
        rows = self._closing.rows.cpu()  # [steps, layers]
        if self.problem is None or not len(rows):
            return {}
        losses = rows.mean(0)  # [layers]
        problem = DescentProblem(**self.problem.state_dict())
        limit = AT_CHANCE * problem.chance
        learned = is_below(rows[:, -1], limit)
        data = "training batches" if self.held_out is None else "readings of held-out rows"
        text = self._table(problem, losses, learned)
        if problem.feasible(losses) and learned:
            logger.info(
                f"On the last {len(rows)} {data} every row is within its tolerance:\n{text}"
            )
        elif self.args.objective == "descent" and learned:
            logger.warning(
                f"On the last {len(rows)} {data} NOT every row is within its tolerance:\n{text}\n"
                f"Ask for less ({self._less()}), or train longer."
            )
        elif self.args.objective == "descent":
            advice = "Train longer, or raise `learning_rate`."
            if losses[-1] < limit:
                advice = "These steps are too few to tell."
            logger.warning(
                f"On the last {len(rows)} {data} f_L is not clearly below chance:\n{text}\n{advice}"
            )
        return {"train_max_violation": problem.max_violation(losses).item()}

    def _table(self, problem: DescentProblem, losses: torch.Tensor, learned: bool) -> str:
        """What each row asked of these losses `[L]` and what it reached, and the descent share."""
        asked, tolerances = problem.bounds(losses)
        multipliers = self.multipliers.values.tolist()
        lines = ["row: asked, reached, tolerance, multiplier"]
        for row in problem.rows:
            numbers = (
                asked[row.index].item(),
                losses[row.layer - 1].item(),
                tolerances[row.index].item(),
                multipliers[row.index],
            )
            lines.append(f"{row.name}: {', '.join(f'{number:.4g}' for number in numbers)}")
        shares = {
            "now": problem.descent_share(losses) if learned else None,
            "after warm-up, of plain training": problem.descent_share(self.warmup_losses.cpu()),
        }
        for when, share in shares.items():
            if share is not None:
                lines.append(f"descent share {when}: {share:.2f}")
        return "\n".join(lines)

    def _less(self) -> str:
        """The settings by which this problem asks for less."""
        names = []
        if self.problem.follows:
            names += [f"a `descent_strength` below {self.args.descent_strength:g}"]
        elif self.args.layer_rows is not None:
            names += ["a smaller `descent_alpha`"]
        if self.args.layer_rows is not None:
            names += ["fewer `constrained_layers`", "`exit_targets` for the layers that you need"]
        if self.args.exit_targets or self.args.loss_targets:
            names += ["higher targets"]
        return ", ".join(names)

    def is_first_report(self, subject: str) -> bool:
        """Whether nothing has been logged of `subject` yet; from then on it counts as logged."""
        is_first = subject not in self._reported
        self._reported.add(subject)
        return is_first

    def _report_rise(self) -> None:
        """Log, once, that the loss of the last layer has risen by more than its limit."""
        if self.guard is None:
            return
        highest, best = self.guard.highest_rise()
        if highest is None or not self.is_first_report("rise"):
            return
        logger.warning(
            f"The constraints make the last layer worse: its loss rose from {best:.4g} to {highest:.4g} "
            f"({(highest - best) / abs(best):+.1%}). The multipliers shrink while it is more than "
            f"{self.args.max_last_layer_rise:.1%} above its best value (`max_last_layer_rise`), so that the "
            f"constraints give way. Ask for less: {self._less()}."
        )

    def _report_progress(self, step: int) -> None:
        """Log, once each, a row whose multiplier keeps rising while its violation does not fall: from one window of
        steps to the next, of which each has 50 or more."""
        if self.args.objective != "descent":
            return
        least = LEAST_CHECKED if self.held_out is None else 4 * LEAST_CHECKED
        steps = max(least, (self.max_steps - self.active_from) // PROGRESS_CHECKS)
        active = step - self.active_from
        if active <= 0 or active % steps:
            return
        *sums, count = self._since_check.tolist()
        self._since_check.zero_()
        if count == 0:
            return
        losses = torch.tensor(sums, device=self.device) / count
        asked, tolerances = self.problem.bounds(losses)
        violations = self.problem.violations(losses) - tolerances
        multipliers = self.multipliers.values.clone()
        last_check = self._last_check
        self._last_check = violations, multipliers
        if last_check is None:
            return
        before, duals = last_check
        rises = multipliers >= (1.05 * duals).clamp(0, self.args.multiplier_max)  # or is at its cap
        stuck = (violations > 0) & (violations > 0.95 * before) & (multipliers > 0) & rises
        for row in self.problem.rows:
            if stuck[row.index] and self.is_first_report(f"row {row.name}"):
                logger.warning(
                    f"The multiplier of row {row.name} keeps rising, or is at its maximum, but its violation did not "
                    f"fall in the last {steps} steps: the row asks for a loss of {asked[row.index].item():.4g}, and "
                    f"layer {row.layer} is at {losses[row.layer - 1].item():.4g}. If this goes on, ask for less "
                    f"({self._less()})."
                )

    def _report_faults(self) -> None:
        """Log once a layer whose loss was not finite."""
        faults = [layer for layer, count in enumerate(self._nonfinite.tolist(), start=1) if count]
        if faults and self.is_first_report("nonfinite"):
            logger.error(
                f"The loss of layer {faults[0]} was not finite; such steps do not move the multipliers."
            )

    # ---- checkpoints ----

    def summary(self) -> dict:
        """The problem and the multipliers in plain Python values, for people and for `fixed_multipliers`."""
        summary = {
            "objective": self.args.objective,
            "multipliers": self.multipliers.values.tolist(),
        }
        if self.problem is not None:
            summary |= self.problem.state_dict()
            values = summary["multipliers"]
            summary["multipliers_by_row"] = {
                row.name: values[row.index] for row in self.problem.rows
            }
        if self.held_out is not None:
            summary["dual_rows"] = self.held_out.count
        if self.average_weight.item():
            summary[f"{'train' if self.held_out is None else 'dual'}_layer_losses"] = (
                self.mean_losses.tolist()
            )
        if self.warmup_losses.any():
            summary["warmup_layer_losses"] = self.warmup_losses.tolist()
        return summary

    def save(self, folder: str, write: bool = True) -> None:
        """Write the state into a checkpoint folder by an atomic write, where `write`."""
        tensors, meta = self.state_dict()
        if write:
            with atomic_write(os.path.join(folder, STATE_NAME), "wb") as file:
                file.write(save(tensors, metadata={"state": json.dumps(meta)}))

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint; ValueError where layer count or schedule do not match."""
        self.load_state_dict(*read_state(folder), path=os.path.join(folder, STATE_NAME))

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict]:
        """Tensors by name, and the rest in plain values."""
        tensors = {
            f"multipliers.{name}": tensor for name, tensor in self.multipliers.state_dict().items()
        }
        tensors |= {
            key: getattr(self, key).cpu()
            for key in ("averages", "average_weight", "square", "warmup_losses")
        }
        tensors["closing_losses"] = self._closing.state_dict()
        if self.guard is not None:
            tensors |= {f"guard.{name}": value for name, value in self.guard.state_dict().items()}
        return tensors, {
            "active_from": self.active_from,
            "problem": None if self.problem is None else self.problem.state_dict(),
            "schedule": self._schedule(),
        }

    def load_state_dict(
        self, tensors: dict[str, torch.Tensor], meta: dict, path: str = "The state"
    ) -> None:
        """Take over what `state_dict` gave; ValueError where layer count or schedule do not match."""
        for name, value in self._schedule().items():
            if (
                meta["schedule"].get(name, value if name == "dual_optim" else None) != value
            ):  # older ones lack it
                raise ValueError(
                    f"{path} was saved with {name}={meta['schedule'].get(name)!r} but this run has {value!r}; resume "
                    "with the saved setting, or start a new run from the checkpoint's weights with `from_pretrained`."
                )
        guard_state = _part_of(tensors, "guard.")
        try:
            self.multipliers.load_state_dict(_part_of(tensors, "multipliers."))
            if self.guard is not None and guard_state:  # older checkpoints have none
                self.guard.load_state_dict(guard_state)
            if "closing_losses" in tensors:
                self._closing.load_state_dict(tensors["closing_losses"])
            for name in ("averages", "average_weight"):
                if (
                    tensors[name].shape != getattr(self, name).shape
                    or not tensors[name].isfinite().all()
                ):
                    raise ValueError(f"'{name}' is {tensors[name].tolist()}")
            # Older checkpoints do not keep the square, nor version 0.1 the losses of warm-up.
            found = {
                name: tensors.get(name, getattr(self, name)).to(self._running)
                for name in ("averages", "average_weight", "square", "warmup_losses")
            }
            self.warmup_losses = found["warmup_losses"]
            self._running = torch.cat([found["averages"], found["average_weight"], found["square"]])
            self._level = None
            self.active_from = int(meta["active_from"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no complete dual state ({error}); resume from another."
            ) from error
        if meta["problem"] is not None:
            self._take_problem(DescentProblem(**meta["problem"]))

    def _schedule(self) -> dict:
        """As JSON gives it back. The line is "auto", as version 0.1 called a step size of its own."""
        rows = "auto" if self.args.layer_rows == "line" else self.args.layer_rows
        settings = {name: getattr(self.args, name) for name in SCHEDULE} | {"descent_alpha": rows}
        return json.loads(json.dumps({"num_layers": self.num_layers, **settings}))


def _part_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def are_finite(values: torch.Tensor) -> torch.Tensor:
    """As `torch.isfinite`, by half the kernels: inf - inf and nan - nan are no numbers."""
    return (values - values).eq(0)


def _numbered(name: str, values: torch.Tensor) -> dict[str, float]:
    return {f"{name}_{layer}": value for layer, value in enumerate(values.tolist(), start=1)}


def read_state(folder: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and settings of the state file in a checkpoint folder; ValueError naming the file when unreadable."""
    path = os.path.join(folder, STATE_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            meta = json.loads(file.metadata()["state"])
            if meta["problem"] is not None:
                DescentProblem(**meta["problem"])
            return tensors, {name: meta[name] for name in ("active_from", "problem", "schedule")}
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({error}); resume from another checkpoint."
        ) from error
