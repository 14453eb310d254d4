"""A limit on how much worse the constraints may make the last layer: multipliers give way before the model does.

The constrained problem puts no limit on what it costs to meet the constraints. Line, steps and exit constraints refer
to the loss f_L that the model has, so they even get easier when it gets worse. The guard adds the limit

    E f_L <= (1 + delta) f_best,      delta = `max_last_layer_rise`,

with f_best the lowest value that the running mean of f_L has had so far. While f_L is above the limit the multipliers
shrink by the share rho = `Multipliers.SHRINKAGE` in each dual step, whatever the violations g.

**Where training rests.** If the constraints can be met within the limit, the guard does nothing there. Otherwise
f_L swings below its limit, and multipliers grow in some steps and shrink in the others. With plain ascent (step size
eta), a share theta of the steps in which they shrink, and the mean pace p of growth in the others (see "Pace"), lambda
stands still where

    (1 - theta) p eta g = theta rho lambda,      that is,

    lambda = [g]_+ / c,      c = (rho / (p eta)) theta / (1 - theta).

This is the point of rest of resilience with the coefficient c (see `multipliers.py`), except that nobody has to choose
c: the guard finds one at which f_L keeps to its limit. In a convex problem the same point solves

    minimise   1/2 sum of [g]_+^2      subject to   f_L <= its value at rest,

whose multiplier is c: of all models with that f_L, training finds the one that violates the constraints least. Since
growth backs off after each rise (see "Pace"), f_L at rest lies a part of the way from f_best to its limit.

**Noise.** A single batch says little about f_L, so the guard adds up evidence over steps (a CUSUM test). With s the
standard deviation of a batch's f_L, estimated from the differences between successive steps, so that a trend does not
count as noise:

    evidence <- [evidence + (f_L - limit) / s - 1/4]   kept within 0 and 24,   of which a step adds at most 3.

Multipliers take the share `1 - evidence / 12` of the change that the dual rule wants. From 12 on they stand still, and
at 24 they begin to shrink. A rise of the loss that ends by itself, as after a step of the optimizer that went too far,
holds the multipliers where they are but does not undo them. Once they shrink, evidence above 12 no longer counts, and
they shrink until it is back at 0. f_best is the lowest upper limit, `m + 2 se`, of a mean m over about the last half
of the steps so far. Its window grows with the run, so that chance does not make f_best lower and lower.

**Pace.** f_L follows the multipliers with a delay, so multipliers that grow at full pace again run past the point of
rest again. Each time that they begin to shrink, their pace becomes a fifth of what it was. It recovers by 2 % in each
step that does not shrink them, up to 1: after a single rise it is back there in log 5 / log 1.02 = 82 steps. Where f_L
keeps coming back to its limit, the pace falls until about as many steps of growth lie between two rises. The form of
the point of rest does not depend on the pace, which acts as a smaller eta.

With held-out examples f_L is read every few optimizer steps. Evidence, f_best and the pace then count readings.

The guard sees a rise of f_L. It does not know what plain training would have reached by now, and it cannot tell why
f_L rises: harder data late in the run counts as a rise, too.
"""

import math

import torch


class LastLayerGuard:
    """Follows f_L over the steps of a run and says when multipliers have to stop growing, and when to shrink.

    Args:
        max_rise (`float`): the share delta >= 0 by which f_L may be above its best value so far.
    """

    WINDOW = 10  # steps: the present mean gives the newest loss the weight 1/10
    SLOW_SHARE = 4  # the slow mean gives the newest of t losses the weight 4/t
    FIRST_BEST = 20  # losses before which no best value is taken
    OF_BEST = 2.0  # standard errors by which the best value is put higher
    ENOUGH = 12.0  # evidence at which multipliers stand still
    LASTING = 24.0  # evidence at which they begin to shrink
    MOST = 3.0  # evidence that a step may add
    ALLOWED = 0.25  # standard deviations above the limit that are no evidence
    LEAST_NOISE = 1e-3  # of the limit, for losses that hardly vary
    BACK_OFF = 0.2  # factor of the pace whenever multipliers begin to shrink
    RECOVERY = 1.02  # its factor in each step that does not shrink them
    LEAST_PACE = 0.001
    _NAMES = (
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

    def __init__(self, max_rise: float):
        self.max_rise = max_rise
        self.count = 0  # losses so far
        self.previous = 0.0
        # Of the present mean and the slow one: the mean, the sum of its squared weights, and the variance of a single
        # loss.
        self.means = [0.0, 0.0]
        self.square_weights = [0.0, 0.0]
        self.variances = [0.0, 0.0]
        self.best = math.inf  # the upper limit of the best mean so far
        self.evidence = 0.0
        self.shrinks = False
        self.pace = 1.0
        # The highest present mean of the steps that shrink, and the best value of that step.
        self._highest: tuple[float, float] | None = None

    def observe(self, loss: float) -> None:
        """Take in the f_L of a step; one that is not finite changes nothing."""
        if not math.isfinite(loss):
            return

        self._add_evidence(loss)
        self._add_to_means(loss)
        if self.count >= self.FIRST_BEST:
            self.best = min(self.best, self.means[1] + self.OF_BEST * self.standard_errors[1])
        self._set_pace()

        present = self.means[0]
        if self.shrinks and (self._highest is None or present > self._highest[0]):
            self._highest = (present, self.best)

    def highest_rise(self) -> tuple[float, float] | None:
        """The highest mean f_L of this process's steps in which multipliers had to shrink, and the best value of that
        time. `None` where there was no such step."""
        return self._highest

    def _add_evidence(self, loss: float) -> None:
        if math.isinf(self.best):
            return

        noise = math.sqrt(max(self.variances))
        noise = max(noise, self.LEAST_NOISE * abs(self.limit), torch.finfo(torch.float32).tiny)

        excess = (loss - self.limit) / noise - self.ALLOWED
        most = self.ENOUGH if self.shrinks else self.LASTING
        self.evidence += min(excess, self.MOST)
        self.evidence = min(max(self.evidence, 0.0), most)

    def _add_to_means(self, loss: float) -> None:
        self.count += 1
        half_square = 0.5 * (loss - self.previous) ** 2  # without a trend its mean is the variance
        self.previous = loss

        present = max(1 / self.count, 1 / self.WINDOW)  # at first all losses count alike
        slow = min(self.SLOW_SHARE / (self.count + self.SLOW_SHARE - 1), present)

        for index, weight in enumerate((present, slow)):  # of the newest loss
            self.means[index] += weight * (loss - self.means[index])
            self.square_weights[index] *= (1 - weight) ** 2
            self.square_weights[index] += weight**2

            if self.count == 2:  # the first difference
                self.variances[index] = half_square
            elif self.count > 2:
                self.variances[index] += weight * (half_square - self.variances[index])

    def _set_pace(self) -> None:
        if self.evidence >= self.LASTING and not self.shrinks:
            self.shrinks = True
            self.pace = max(self.BACK_OFF * self.pace, self.LEAST_PACE)
        if self.evidence == 0:
            self.shrinks = False
        if not self.shrinks:
            self.pace = min(self.RECOVERY * self.pace, 1.0)

    @property
    def standard_errors(self) -> list[float]:
        """Of the two means. The larger variance stands for both, so that a quiet stretch is no proof."""
        variance = max(self.variances)
        return [math.sqrt(variance * square) for square in self.square_weights]

    @property
    def limit(self) -> float:
        """The largest f_L allowed at present; infinite before there is a best value."""
        return self.best + self.max_rise * abs(self.best)  # a custom loss may be negative

    @property
    def share(self) -> float:
        """The share of its change that a multiplier may take, from 0 to 1."""
        if self.shrinks:
            return 0.0
        return self.pace * max(1 - self.evidence / self.ENOUGH, 0.0)

    @property
    def rise(self) -> float | None:
        """By what share the present f_L is above its best value, negative below it; `None` before there is one."""
        if math.isinf(self.best) or self.best == 0:
            return None
        return (self.means[0] - self.best) / abs(self.best)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name."""
        return {
            name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in self._NAMES
        }

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `state_dict` gave; ValueError when names or shapes are others, or a value is not a number."""
        expected = self.state_dict()
        for name, tensor in expected.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.isnan().any():
                raise ValueError(f"The state of the last layer's guard has no usable '{name}'.")
        for name in self._NAMES:
            setattr(self, name, state[name].tolist())
        self.count = int(self.count)
        self.shrinks = bool(self.shrinks)
