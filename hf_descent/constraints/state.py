"""The dual side of one training run: warm-up, problem, multipliers, running averages, and what they say of the run."""

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.logging import get_logger
from safetensors import safe_open
from safetensors.torch import save

from ..files import atomic_write
from . import objectives
from .auto import geometric_alpha
from .multipliers import Multipliers
from .problem import LARGEST, MIN_ROWS, DescentProblem, check_alpha, check_constrained_layers


if TYPE_CHECKING:
    from ..configs import DescentArguments


logger = get_logger(__name__)

STATE_NAME = "descent_state.safetensors"
AVERAGE_DECAY = 0.98  # running averages look back about 50 steps
UNKNOWN_SCORE = -1e9  # below that of any checkpoint with a known problem, also when steps are added to it
# The settings that a checkpoint must share with the run that resumes from it.
SCHEDULE = (
    "objective", "descent_alpha", "initial_loss_bound", "descent_strength", "constrained_layers", "dual_warmup_steps",
    "fixed_multipliers",
)  # fmt: skip


class DescentState:
    """Everything that descent training carries from step to step beside the model and its optimizer.

    Steps are optimizer steps, counted from 0 as `TrainerState.global_step` stands during the step.

    Args:
        args (`DescentArguments`): the checked arguments.
        num_layers (`int`): number of layers L.
        max_steps (`int`): optimizer steps of the whole run, of which a fractional warm-up is a part.
        start_step (`int`): the step at which the duals start; warm-up is counted from here.
        device (`torch.device`): where the losses arrive.
        fixed_run (`dict`, *optional*): `descent_config.json` of the run that `fixed_multipliers` names.
    """

    def __init__(
        self,
        args: "DescentArguments",
        num_layers: int,
        max_steps: int,
        start_step: int,
        device: torch.device | str = "cpu",
        fixed_run: Mapping[str, Any] | None = None,
    ):
        self.args, self.num_layers, self.max_steps, self.device = args, num_layers, max_steps, device
        warmup = args.dual_warmup_steps
        self.active_from = start_step + (math.ceil(warmup * max_steps) if warmup < 1 else int(warmup))
        check_constrained_layers(args.constrained_layers, num_layers)
        if args.descent_alpha != "auto":
            check_alpha(args.descent_alpha, num_layers)
        if self.active_from >= max_steps > 0 and args.objective not in objectives.UNCONSTRAINED:
            logger.warning(
                f"The warm-up ends at step {self.active_from} and the run at step {max_steps}: the constraints will "
                "never act. Lower `dual_warmup_steps` or train longer."
            )
        self.chance: float | None = None  # the measured loss of the best constant prediction
        self.multipliers = Multipliers(
            num_layers,
            args.dual_learning_rate,
            optim=args.dual_optim,
            resilience=args.resilience,
            resilience_form=args.resilience_form,
            slack_learning_rate=args.slack_learning_rate,
            maximum=args.multiplier_max,
            device=device,
        )
        self.problem: DescentProblem | None = None
        self._index: torch.Tensor | None = None
        if args.objective == "fixed":
            self._set_fixed_multipliers(fixed_run)
        elif not args.is_auto:
            self._set_problem(args.descent_alpha, args.initial_loss_bound)
        # Running averages of the layer losses, and the weight that makes up for their start at zero.
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)
        self.averages, self.average_weight = zeros(num_layers), zeros(1)
        self._logged = zeros(num_layers + 1)  # sums since the last log, and their count
        self._nonfinite = zeros(num_layers)  # steps with a non-finite loss, per layer
        self._reported: set[str] = set()
        self._released: torch.Tensor | None = None  # what slacks relaxed before they started afresh

    # ---- primal side ----

    def inactive(self, step: int) -> bool:
        """Whether the objective of this step is f_L alone: in warm-up, and always for "erm"."""
        objective = self.args.objective
        if objective in objectives.UNCONSTRAINED:
            return objective == "erm"
        return self.problem is None or step < self.active_from

    @property
    def awaits_problem(self) -> bool:
        """Whether warm-up is to find the problem."""
        return self.problem is None and self.max_steps > 0 and self.args.objective in objectives.MEASURING

    @property
    def trained_layers(self) -> list[int]:
        """The layers (1-based) whose losses the objective depends on at some step."""
        if self.args.objective == "erm":
            return [self.num_layers]
        layers = self.args.constrained_layers or range(1, self.num_layers + 1)
        constrained = self.problem.constrained_layers if self.problem else layers
        return sorted({*constrained, self.num_layers})

    def weighted_layers(self, step: int) -> list[int]:
        """The layers (1-based) whose losses the objective of this step depends on; the last layer always does."""
        return [self.num_layers] if self.inactive(step) else self.trained_layers

    def objective_at(self, step: int) -> objectives.StepObjective:
        """What this step minimises."""
        is_linear = self.inactive(step) or self.args.objective not in ("hinge", "quadratic")
        value = partial(self._objective, step=step)
        return objectives.StepObjective(value, self.weighted_layers(step), self.trained_layers, is_linear)

    def _objective(self, layer_losses: torch.Tensor, share: torch.Tensor, step: int) -> torch.Tensor:
        if self.inactive(step):
            return layer_losses[-1]
        if self.args.objective in ("hinge", "quadratic"):
            # Divided by its share, a part is the micro-batch's own mean.
            own = layer_losses / torch.where(share > 0, share, 1.0)
            return share * objectives.penalty(self.args.objective, self.problem, own, self.args.penalty_coefficient)
        # Layers without weight are left out, so that a non-finite loss of theirs does not become 0 * inf.
        return self.weights()[self._trained] @ layer_losses[self._trained]

    def weights(self) -> torch.Tensor:
        """Weights w `[L]` of the layer losses in a linear objective, outside warm-up."""
        return objectives.linear_weights(
            self.args.objective,
            self.problem,
            self.multipliers.values,
            self.args.penalty_coefficient,
            self.args.negative_weights,
            self._trained,
        )

    @property
    def _trained(self) -> torch.Tensor:
        """Indices of the trained layers; kept, since new ones would be copied from the host at every step."""
        if self._index is None:
            self._index = torch.tensor(self.trained_layers, device=self.device) - 1
        return self._index

    # ---- dual side ----

    def dual_step(self, layer_losses: torch.Tensor, step: int, items: torch.Tensor | None = None) -> None:
        """One step of averages and multipliers on the layer losses `[L]` of an optimizer step; no host reads.

        Losses that are not finite, and those of a step without `items` (0), change neither.
        """
        finite = torch.isfinite(layer_losses)  # [layers]
        self._nonfinite += ~finite
        usable = finite.all() if items is None else finite.all() & (items > 0)
        counted = torch.where(usable, layer_losses, 0.0)
        weight = (1 - AVERAGE_DECAY) * usable
        self.averages = (1 - weight) * self.averages + weight * counted
        self.average_weight = (1 - weight) * self.average_weight + weight
        self._logged += torch.cat([counted, usable[None]])

        if self.args.objective == "descent" and not self.inactive(step):
            violations = self.problem.violations(layer_losses)
            if self.args.normalize_violations:
                violations = violations / self.problem.initial_loss_bound
            self.multipliers.step(torch.where(usable, violations, torch.nan))
            self._released = None
        if step + 1 >= self.active_from and self.awaits_problem:
            self._end_warmup()

    def restart_slacks(self) -> None:
        """See [`Multipliers`]; the verdict, which may come before the next step, still tells of them."""
        self._released = self.multipliers.relaxation.clone()
        self.multipliers.restart_slacks()

    @property
    def mean_losses(self) -> torch.Tensor:
        """Running averages of the layer losses of training `[L]`, over about the last 50 steps."""
        return self.averages / self.average_weight

    def take_chance(self, chance: float) -> None:
        """The measured loss of the best constant prediction: f_0 where that is "auto", else what it is judged by."""
        self.chance, bound = chance, self.args.initial_loss_bound
        if bound == "auto" and self.awaits_problem and self.args.descent_alpha != "auto":
            self._set_problem(self.args.descent_alpha, chance)
        if self.problem is not None and self.problem.chance_loss is None:
            self.problem.chance_loss = chance
        if bound != "auto" and bound > 1.001 * chance:
            logger.info(
                f"`initial_loss_bound`={bound:.4g} lies above the best constant prediction's loss, {chance:.4g}."
            )

    def _end_warmup(self) -> None:
        """Fix the schedule that was to be measured."""
        bound = self.chance if self.args.initial_loss_bound == "auto" else self.args.initial_loss_bound
        last, layers = self.mean_losses[-1].item(), self.args.constrained_layers or range(self.num_layers)
        self._set_problem(geometric_alpha(bound, last, len(layers), self.args.descent_strength), bound)
        logger.info(
            f"Descent schedule: f_0 = {bound:.4g}, alpha = {self.problem.alpha[-1]:.4g}, measured in the warm-up up "
            f"to step {self.active_from}, at f_L = {last:.4g}."
        )

    def _set_problem(self, alpha, initial_loss_bound) -> None:
        layers = self.args.constrained_layers
        self._take_problem(DescentProblem(alpha, initial_loss_bound, self.num_layers, layers, self.chance))

    def _take_problem(self, problem: DescentProblem) -> None:
        self.problem, self._index = problem.to(self.device), None

    def take_saved_problem(self, summary: Mapping[str, Any]) -> None:
        """For a model that is only evaluated: the problem of the run whose `descent_config.json` is given, and of a
        given problem with the same f_0 the loss at chance."""
        saved = DescentProblem.saved_in(summary)
        if saved is None or saved.num_layers != self.num_layers:  # it may have been cut since
            return
        self.chance = saved.chance_loss
        if self.problem is None:
            self._take_problem(saved)
        elif self.problem.initial_loss_bound == saved.initial_loss_bound:
            self.problem.chance_loss = saved.chance_loss

    def _set_fixed_multipliers(self, run: Mapping[str, Any] | None) -> None:
        values = self.args.fixed_multipliers
        if isinstance(values, str):
            problem = DescentProblem.saved_in(run or {})
            if problem is None:
                raise ValueError(
                    f"There is no run in {values} with multipliers: it is unconstrained, or was saved in its warm-up."
                )
            values = run["multipliers"]
            self._take_problem(problem)
        elif self.args.is_auto:
            raise ValueError(
                "`fixed_multipliers` as a list needs `descent_alpha` and `initial_loss_bound` as numbers, not 'auto'."
            )
        else:
            self._set_problem(self.args.descent_alpha, self.args.initial_loss_bound)
        if len(values) != self.num_layers:
            raise ValueError(
                f"`fixed_multipliers` has {len(values)} values but the model has {self.num_layers} layers."
            )
        if not all(isinstance(value, int | float) and 0 <= value <= LARGEST for value in values):
            raise ValueError(f"`fixed_multipliers` is {values}; multipliers are finite and not negative.")
        if free := [n for n, value in enumerate(values, 1) if value and n not in self.problem.constrained_layers]:
            raise ValueError(f"`fixed_multipliers` is {values}, but layers {free} have no constraint; set 0 there.")
        self.multipliers.values = torch.tensor(values, dtype=torch.float32, device=self.device)

    # ---- logs and verdicts ----

    @property
    def tolerance(self) -> float:
        """The largest violation that counts as feasible, in units of the loss; of a known problem."""
        return self.args.feasibility_tolerance * self.problem.initial_loss_bound

    def logs(self, step: int) -> dict[str, float]:
        """Scalars of the steps since the last call, per layer; empty where there was no usable step."""
        *sums, count = self._logged.tolist()
        self._logged.zero_()
        self._report_faults()
        if count == 0:
            return {}
        losses = (torch.tensor(sums) / count).to(self.device)  # [layers]
        per_layer, logs = {"layer_loss": losses}, {}
        if self.problem is not None:
            violations = self.problem.violations(losses)
            per_layer |= {"violation": violations, "multiplier": self.multipliers.values}
            if not self.inactive(step) and self.args.objective not in ("hinge", "quadratic"):
                per_layer["weight"] = self.weights()
            logs["max_violation"] = self.problem.max_violation(losses).item()
            logs["lagrangian"] = self.problem.lagrangian(losses, self.multipliers.values).item()
        for name, values in per_layer.items():
            logs |= {f"{name}_{layer}": value for layer, value in enumerate(values.tolist(), start=1)}
        return logs

    def evaluation(
        self, layer_losses: torch.Tensor, prefix: str, step: int = 0, rows: int = MIN_ROWS
    ) -> dict[str, float]:
        """Metrics of held-out layer losses `[L]`: the losses, and feasibility once the problem is known.

        No model is called feasible on fewer than `MIN_ROWS` rows, or before the loss at chance was measured.

        `feasible_score` is one number to choose a checkpoint by (greater is better): every infeasible state has a
        negative score, minus its `shortfall` ([`DescentProblem`]) in units of f_0; a feasible one a positive score
        that falls with f_L. A loss that is not finite has the score of an unknown problem. In warm-up, before the
        problem is known, the score rises with every `step`, so that patience with it does not run out.
        """
        metrics = {f"{prefix}_layer_loss_{layer}": f for layer, f in enumerate(layer_losses.tolist(), start=1)}
        if self.problem is not None:
            losses, last = layer_losses.to(self.device, torch.float32), layer_losses[-1].item()
            feasible = self.problem.feasible(losses, self.tolerance)
            metrics[f"{prefix}_max_violation"] = self.problem.max_violation(losses).item()
            metrics[f"{prefix}_feasible"] = float(feasible and rows >= MIN_ROWS)
            shortfall = self.problem.shortfall(losses, self.tolerance) / self.problem.initial_loss_bound
            score = (1 / (1 + last) if last >= 0 else 1 - last) if feasible else -shortfall
            metrics[f"{prefix}_feasible_score"] = score if math.isfinite(score + last) else UNKNOWN_SCORE
        if self.awaits_problem:
            metrics |= {f"{prefix}_feasible": 0.0, f"{prefix}_feasible_score": UNKNOWN_SCORE + step}
        return metrics

    @property
    def train_feasibility(self) -> dict[str, float]:
        """Feasibility of the running averages of training; empty before the problem is known."""
        if self.problem is None or not self.average_weight.item():
            return {}
        metrics = self.evaluation(self.mean_losses, "train")
        return {name: metrics[name] for name in ("train_max_violation", "train_feasible")}

    def verdict(self) -> dict[str, float]:
        """[`train_feasibility`], said in the log."""
        self._report_faults()
        metrics = self.train_feasibility
        if not metrics:
            return {}
        problem = self.problem
        violations = problem.violations(self.mean_losses).tolist()  # [layers]
        hardest = max(problem.constrained_layers, key=lambda layer: violations[layer - 1])
        text = (
            f"layer {hardest} has the largest violation, {metrics['train_max_violation']:.4g} "
            f"(f_0 = {problem.initial_loss_bound:.4g}, multiplier {self.multipliers.values[hardest - 1]:.3g})"
        )
        if at_chance := problem.at_chance(self.mean_losses, self.tolerance):
            text += f"; layers {at_chance} are no better than a constant prediction, within the tolerance"
        if metrics["train_feasible"]:
            logger.info(f"The descent constraints are met at the end of training: {text}.")
        elif self.args.objective == "descent":
            # In units of the loss.
            relaxed = (self.multipliers.relaxation if self._released is None else self._released).max().item()
            relaxed *= problem.initial_loss_bound if self.args.normalize_violations else 1.0
            if relaxed:
                text += f"; resilience has relaxed them by up to {relaxed:.4g}"
            logger.warning(
                f"The descent constraints are NOT met at the end of training: {text}. Infeasible models can be far "
                "worse than plain ones: train longer, lower `descent_strength` (or `descent_alpha`), raise "
                "`dual_learning_rate`, or choose a feasible checkpoint by `metric_for_best_model='feasible_score'`."
            )
        return metrics

    def _report_faults(self) -> None:
        """Log, once each, a layer whose loss was not finite and a multiplier at its cap."""
        faults = [layer for layer, count in enumerate(self._nonfinite.tolist(), start=1) if count]
        if faults and "nonfinite" not in self._reported:
            self._reported.add("nonfinite")
            logger.error(f"The loss of layer {faults[0]} was not finite; such steps do not move the multipliers.")
        cap = self.args.multiplier_max
        capped = [layer for layer, v in enumerate(self.multipliers.values.tolist(), start=1) if cap and v >= cap]
        if capped and "cap" not in self._reported:
            self._reported.add("cap")
            logger.warning(
                f"The multiplier of layer {capped[0]} is at `multiplier_max`={cap}: its constraint may not be met. "
                "Raise the cap, or lower `descent_strength` (or `descent_alpha`)."
            )

    @property
    def has_faults(self) -> bool:
        """Whether a layer loss has not been finite so far (reads from the device)."""
        return bool(self._nonfinite.any())

    # ---- checkpoints ----

    def summary(self) -> dict:
        """The problem and the multipliers in plain Python values, for people and for `fixed_multipliers`."""
        summary = {"objective": self.args.objective, "multipliers": self.multipliers.values.tolist()}
        summary |= {"chance_loss": self.chance} if self.problem is None else self.problem.state_dict()
        if self.average_weight.item():
            summary["train_layer_losses"] = self.mean_losses.tolist()
        return summary | self.train_feasibility

    def save(self, folder: str, write: bool = True) -> None:
        """Write the state into a checkpoint folder by an atomic write. All processes call, one writes."""
        tensors = {f"multipliers.{name}": tensor for name, tensor in self.multipliers.state_dict().items()}
        tensors |= {"averages": self.averages.cpu(), "average_weight": self.average_weight.cpu()}
        meta = {
            "active_from": self.active_from,
            "chance": self.chance,
            "problem": None if self.problem is None else self.problem.state_dict(),
            "schedule": self._schedule(),
        }
        if write:
            with atomic_write(os.path.join(folder, STATE_NAME), "wb") as file:
                file.write(save(tensors, metadata={"state": json.dumps(meta)}))

    def load(self, folder: str) -> None:
        """Take over the state of a checkpoint; ValueError where layer count or schedule do not match."""
        path = os.path.join(folder, STATE_NAME)
        tensors, meta = read_state(folder)
        for name, value in self._schedule().items():
            if meta["schedule"].get(name) != value:
                raise ValueError(
                    f"{path} was saved with {name}={meta['schedule'].get(name)!r} but this run has {value!r}; resume "
                    "with the saved setting, or start a new run from the checkpoint's weights with `from_pretrained`."
                )
        prefix = "multipliers."
        duals = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        try:
            self.multipliers.load_state_dict(duals)
            _check_values(tensors, meta)
            self.averages = tensors["averages"].to(self.averages)
            self.average_weight = tensors["average_weight"].to(self.average_weight)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{path} does not hold a complete dual state ({error}); resume from another one."
            ) from error
        self.active_from, self.chance = meta["active_from"], meta["chance"]
        if meta["problem"] is not None:
            self._take_problem(DescentProblem(**meta["problem"]))

    def _schedule(self) -> dict:
        return {"num_layers": self.num_layers} | {name: getattr(self.args, name) for name in SCHEDULE}


def read_state(folder: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Tensors and settings of the state file in a checkpoint folder; ValueError naming the file when unreadable."""
    path = os.path.join(folder, STATE_NAME)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            meta = json.loads(file.metadata()["state"])
            meta = {"chance": (meta["problem"] or {}).get("chance_loss")} | meta  # older files do not name it
            return tensors, {name: meta[name] for name in ("active_from", "chance", "problem", "schedule")}
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}); resume from another checkpoint.") from error


def _check_values(tensors: dict[str, torch.Tensor], meta: dict) -> None:
    """ValueError where what a state file holds beside the multipliers cannot come from training."""
    averages, weight, chance = tensors["averages"], tensors["average_weight"], meta["chance"]
    holds = {
        "averages": averages.shape == tensors["multipliers.values"].shape and averages.isfinite().all(),
        "average_weight": weight.shape == (1,) and 0 <= weight < math.inf,
        "active_from": isinstance(meta["active_from"], int) and meta["active_from"] >= 0,
        "chance": chance is None or (isinstance(chance, int | float) and 0 < chance < math.inf),
    }
    for name in (name for name, is_sound in holds.items() if not is_sound):
        raise ValueError(f"'{name}' is {tensors[name].tolist() if name in tensors else meta[name]}")
