"""A limit on how much worse the constraints may make the last layer: multipliers give way before the model does.

The constrained problem puts no limit on what it costs to meet the constraints. Line, steps and exit constraints refer
to the loss f_L that the model has, so they even get easier when it gets worse. The guard adds the limit

    E f_L <= (1 + delta) f_best,      delta = `max_last_layer_rise`,

with f_best the lowest value that the running mean of f_L has had so far. While f_L is above the limit the multipliers
shrink by the share rho = `Multipliers.SHRINKAGE` in each dual step, whatever the violations g.

**Where training rests.** If the constraints can be met within the limit, the guard does nothing there. Otherwise
f_L swings below its limit, and multipliers grow in some steps and shrink in the others. With plain ascent (step size
eta) and a share theta of the steps in which they shrink, lambda stands still where

    (1 - theta) eta g = theta rho lambda,      that is,

    lambda = [g]_+ / c,      c = (rho / eta) theta / (1 - theta).

This is the point of rest of resilience with the coefficient c (see `multipliers.py`), except that nobody has to choose
c: the guard finds one at which f_L keeps to its limit. In a convex problem the same point solves

    minimise   sum of [g]_+^2      subject to   f_L <= its value at rest,

whose multiplier is c: of all models with that f_L, training finds the one that violates the constraints least. Since
growth backs off after each rise (see "Pace"), f_L at rest lies a part of the way from f_best to its limit.

**Noise.** A single batch says little about f_L, so the guard adds up evidence over steps (a CUSUM test). With s the
standard deviation of a batch's f_L, estimated from the differences between successive steps, so that a trend does not
count as noise:

    evidence <- [evidence + (f_L - limit) / s - 1/4]   kept within 0 and 12,   of which a step adds at most 3.

Multipliers grow by the share `1 - evidence / 12` of what the dual rule wants. At 12 they begin to shrink, until the
evidence is back at 0. f_best is the lowest upper limit, `m + 2 se`, of a mean m over about the last half of the steps
so far. Its window grows with the run, so that chance does not make f_best lower and lower.

**Pace.** f_L follows the multipliers with a delay, so multipliers that grow at full pace again run past the point of
rest again. Each time that they begin to shrink, the pace of growth becomes a fiftieth of what it was. It recovers by
0.3 % in each step without a rise. The point of rest does not depend on the pace, which acts as a smaller eta.

The guard sees a rise of f_L. It does not know what plain training would have reached by now, and it cannot tell why
f_L rises: harder data late in the run counts as a rise, too.
"""

import math

import torch


class LastLayerGuard:
    """Follows f_L over the steps of a run and says when multipliers have to stop growing, and when to shrink.

    Every operation stays on the device: no step reads a value back to the host.

    Args:
        max_rise (`float`): the share delta >= 0 by which f_L may be above its best value so far.
        device (`torch.device` or `str`): where the losses arrive.
    """

    WINDOW = 10  # steps: the present mean gives the newest loss the weight 1/10
    SLOW_SHARE = 4  # the slow mean gives the newest of t losses the weight 4/t
    FIRST_BEST = 20  # losses before which no best value is taken
    OF_BEST = 2.0  # standard errors by which the best value is put higher
    # Evidence: how much makes multipliers shrink, the most of a step, and what noise alone may give in a step.
    ENOUGH, MOST, ALLOWED = 12.0, 3.0, 0.25
    LEAST_NOISE = 1e-3  # of the limit, for losses that hardly vary
    # Factors of the pace of growth, whenever multipliers begin to shrink and in each step after; its least value.
    BACK_OFF, RECOVERY = 0.02, 1.003
    LEAST_PACE = 0.001
    _TENSORS = (
        "count",
        "previous",
        "means",
        "square_weights",
        "variances",
        "best",
        "evidence",
        "shrinks",
        "pace",
    )

    def __init__(self, max_rise: float, device: torch.device | str = "cpu"):
        self.max_rise = max_rise
        zero = torch.zeros((), dtype=torch.float32, device=device)
        self.count, self.previous = zero.clone(), zero.clone()
        # Of the present mean and the slow one, [2]: the mean, the sum of its squared weights, and the variance of a
        # single loss.
        self.means = zero.new_zeros(2)
        self.square_weights = zero.new_zeros(2)
        self.variances = zero.new_zeros(2)
        self.best = torch.full_like(zero, torch.inf)  # the upper limit of the best mean so far
        self.evidence = zero.clone()
        self.shrinks = zero.bool()
        self.pace = torch.ones_like(zero)
        # The highest present mean of the steps that shrink, and the best value of that step.
        self._highest = torch.stack([-self.best, self.best])

    @torch.no_grad()
    def observe(self, loss: torch.Tensor) -> None:
        """Take in the f_L of a step, a scalar; one that is not finite changes nothing."""
        before = {name: getattr(self, name) for name in self._TENSORS}  # none is written into
        usable = (loss - loss).eq(0)  # of what is not finite it is no number
        loss = loss.to(self.means)

        self._add_evidence(loss)
        self._add_to_means(loss)
        candidate = self.means[1] + self.OF_BEST * self.standard_errors[1]
        candidate = torch.where(self.count >= self.FIRST_BEST, candidate, torch.inf)
        self.best = torch.minimum(self.best, candidate)
        begins = (self.evidence >= self.ENOUGH) & ~self.shrinks
        self.shrinks = (self.evidence > 0) & (self.shrinks | begins)
        slower = (self.BACK_OFF * self.pace).clamp(min=self.LEAST_PACE)
        faster = (self.RECOVERY * self.pace).clamp(max=1.0)
        self.pace = torch.where(begins, slower, torch.where(self.shrinks, self.pace, faster))

        for name, old in before.items():
            setattr(self, name, torch.where(usable, getattr(self, name), old))
        is_highest = self.shrinks & usable & (self.means[0] > self._highest[0])
        self._highest = torch.where(
            is_highest, torch.stack([self.means[0], self.best]), self._highest
        )

    def highest_rise(self) -> tuple[float, float] | tuple[None, None]:
        """The highest mean f_L of this process's steps in which multipliers had to shrink, and the best value of that
        time; reads from the device. `None` where there was no such step."""
        highest, best = self._highest.tolist()
        return (highest, best) if math.isfinite(best) else (None, None)

    def _add_evidence(self, loss: torch.Tensor) -> None:
        noise = self.variances.max().sqrt()
        limit = self.limit
        noise = torch.maximum(noise, self.LEAST_NOISE * limit.abs())
        excess = (loss - limit) / noise.clamp(min=torch.finfo(noise.dtype).tiny) - self.ALLOWED
        excess = torch.where(limit.isfinite(), excess, 0.0)
        self.evidence = (self.evidence + excess.clamp(max=self.MOST)).clamp(0, self.ENOUGH)

    def _add_to_means(self, loss: torch.Tensor) -> None:
        self.count = self.count + 1
        present = (1 / self.count).clamp(min=1 / self.WINDOW)  # at first all losses count alike
        slow = torch.minimum(self.SLOW_SHARE / (self.count + self.SLOW_SHARE - 1), present)
        weights = torch.stack([present, slow])  # of the newest loss, [2]

        half_square = 0.5 * (loss - self.previous) ** 2  # without a trend its mean is the variance
        variances = self.variances + weights * (half_square - self.variances)
        variances = torch.where(self.count > 2, variances, half_square.expand(2))
        self.variances = torch.where(self.count > 1, variances, self.variances)
        self.means = self.means + weights * (loss - self.means)
        self.square_weights = (1 - weights) ** 2 * self.square_weights + weights**2
        self.previous = loss

    @property
    def standard_errors(self) -> torch.Tensor:
        """Of the two means, `[2]`. The larger variance stands for both, so that a quiet stretch is no proof."""
        return (self.variances.max() * self.square_weights).sqrt()

    @property
    def limit(self) -> torch.Tensor:
        """The largest f_L allowed at present; infinite before there is a best value. A scalar tensor."""
        return self.best + self.max_rise * self.best.abs()  # a custom loss may be negative

    @property
    def growth(self) -> torch.Tensor:
        """The share of its growth that a multiplier may take, from 0 to 1; a scalar tensor."""
        return torch.where(self.shrinks, 0.0, self.pace * (1 - self.evidence / self.ENOUGH))

    @property
    def rise(self) -> torch.Tensor:
        """By what share the present f_L is above its best value; negative below it, and a scalar tensor."""
        return (self.means[0] - self.best) / self.best.abs()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name."""
        return {name: getattr(self, name).detach().cpu().clone() for name in self._TENSORS}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `state_dict` gave; ValueError when names or shapes are others, or a value is not a number."""
        for name in self._TENSORS:
            current = getattr(self, name)
            if name not in state or state[name].shape != current.shape or state[name].isnan().any():
                raise ValueError(f"The state of the last layer's guard has no usable '{name}'.")
            setattr(self, name, state[name].to(current, copy=True))
