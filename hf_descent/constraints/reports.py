"""What the dual side of a run says of itself: logs, metrics of an evaluation, and the verdict at the end."""

import math

import torch
from accelerate.logging import get_logger

from .problem import MIN_ROWS


logger = get_logger(__name__)

UNKNOWN_SCORE = -1e9  # below that of any checkpoint with a known problem, also when steps are added to it


class ReportMixin:
    """The part of [`DescentState`] that reports."""

    def logs(self, step: int) -> dict[str, float]:
        """Scalars of the steps since the last call, per layer; empty where there was no usable step."""
        *sums, count = self._logged.tolist()
        self._logged.zero_()
        self._report_faults()
        if count == 0:
            return {}
        losses = torch.tensor(sums) / count  # [layers]
        per_layer = {"layer_loss": losses}
        logs = {}
        if self.problem is not None:
            problem = self.problem
            violations = problem.violations(losses.to(self.device))
            per_layer |= {"violation": violations, "multiplier": self.multipliers.values}
            if not self.inactive(step) and self.args.objective not in ("hinge", "quadratic"):
                per_layer["weight"] = self.weights()
            logs["max_violation"] = problem.max_violation(losses.to(self.device)).item()
            logs["lagrangian"] = problem.lagrangian(losses.to(self.device), self.multipliers.values).item()
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
        that falls with f_L. One with a loss that is not finite has the score of an unknown problem, since no
        checkpoint would be better than not-a-number. In warm-up, before the problem is known, the score rises with
        every `step`, so that patience with it does not run out.
        """
        metrics = {f"{prefix}_layer_loss_{layer}": f for layer, f in enumerate(layer_losses.tolist(), start=1)}
        if self.problem is not None:
            losses = layer_losses.to(self.device, torch.float32)
            bound = self.problem.initial_loss_bound
            tolerance, last = self.args.feasibility_tolerance * bound, layer_losses[-1].item()
            feasible = self.problem.feasible(losses, tolerance)
            metrics[f"{prefix}_max_violation"] = self.problem.max_violation(losses).item()
            metrics[f"{prefix}_feasible"] = float(feasible and rows >= MIN_ROWS)
            shortfall = self.problem.shortfall(losses, tolerance)
            score = (1 / (1 + last) if last >= 0 else 1 - last) if feasible else -shortfall / bound
            metrics[f"{prefix}_feasible_score"] = score if math.isfinite(score + last) else UNKNOWN_SCORE
        if self.needs_labels or (self.problem is None and self.awaits_problem):
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
        violations = self.problem.violations(self.mean_losses).tolist()  # [layers]
        at_chance = self.problem.at_chance(
            self.mean_losses, self.args.feasibility_tolerance * self.problem.initial_loss_bound
        )
        hardest = max(self.problem.constrained_layers, key=lambda layer: violations[layer - 1])
        text = (
            f"layer {hardest} has the largest violation, {metrics['train_max_violation']:.4g} "
            f"(f_0 = {self.problem.initial_loss_bound:.4g}, multiplier {self.multipliers.values[hardest - 1]:.3g})"
        )
        if at_chance:
            text += f"; layers {at_chance} are no better than a constant prediction, within the tolerance"
        if metrics["train_feasible"]:
            logger.info(f"The descent constraints are met at the end of training: {text}.")
        elif self.args.objective == "descent":
            # In units of the loss.
            relaxed = (self.multipliers.relaxation if self._released is None else self._released).max().item()
            relaxed *= self.problem.initial_loss_bound if self.args.normalize_violations else 1.0
            if relaxed:
                text += f"; resilience has relaxed them by up to {relaxed:.4g}"
            logger.warning(
                f"The descent constraints are NOT met at the end of training: {text}. Infeasible models can be far "
                "worse than plain ones: train longer, lower `descent_strength` (or `descent_alpha`), raise "
                "`dual_learning_rate`, or choose a feasible checkpoint by `metric_for_best_model='feasible_score'`."
            )
        return metrics

    def _report_faults(self) -> None:
        faults = [layer for layer, count in enumerate(self._nonfinite.tolist(), start=1) if count]
        if faults and "nonfinite" not in self._said:
            self._said.add("nonfinite")
            logger.error(f"The loss of layer {faults[0]} was not finite; such steps do not move the multipliers.")
        cap = self.args.multiplier_max
        capped = [layer for layer, v in enumerate(self.multipliers.values.tolist(), start=1) if cap and v >= cap]
        if capped and "cap" not in self._said:
            self._said.add("cap")
            logger.warning(
                f"The multiplier of layer {capped[0]} is at `multiplier_max`={cap}: its constraint may not be met. "
                "Raise the cap, or lower `descent_strength` (or `descent_alpha`)."
            )

    @property
    def has_faults(self) -> bool:
        """Whether a layer loss has not been finite so far (reads from the device)."""
        return bool(self._nonfinite.any())
