"""A limit on how much worse the constraints may make the last layer. At the limit the multipliers give way.

The constrained problem puts no limit on what it costs to meet the constraints. Line, steps and exit constraints refer
to the loss f_L that the model has, so they even get easier when it gets worse. The guard adds the limit

    E f_L <= (1 + delta) f_best,      delta = `max_last_layer_rise`,

with f_best the lowest upper confidence bound of a running mean of f_L so far (see "Noise"). Once the evidence that f_L
is above the limit has become large, the multipliers shrink by the share rho = `Multipliers.SHRINKAGE` in each dual
step, whatever the violations g, until no evidence is left.

**Where training rests.** If the constraints can be met within the limit, the guard does nothing there. Otherwise
f_L swings below its limit, and multipliers grow in some steps and shrink in the others. Let a multiplier lambda shrink
in a share theta of the steps. In the others it grows, and p is the mean share of its change that the guard lets
through then ("Noise" and "Pace" say what sets it). With plain ascent of step size eta, it stands still where

    (1 - theta) p eta g = theta rho lambda,      that is,

    lambda = [g]_+ / c,      c = (rho / (p eta)) theta / (1 - theta).

This is the point of rest of resilience with the coefficient c (see `multipliers.py`), except that nobody has to choose
c: the guard finds one at which f_L keeps to its limit. In a convex problem the model at rest violates the constraints
least, in the sum of squares, of all models with this f_L. At rest the gradient of f_L + sum of lambda g is zero.
Multiplied by c, with c lambda = [g]_+, this is the condition for a solution of

    minimise   1/2 sum of [g]_+^2      subject to   f_L <= its value at rest,

in which c is the multiplier of the limit on f_L. Since growth backs off after each rise (see "Pace"), f_L at rest lies
a part of the way from f_best to its limit.

**Noise.** A single batch says little about f_L, so the guard adds up evidence over steps (a CUSUM test). With s the
standard deviation of a batch's f_L,

    evidence <- evidence + min((f_L - limit) / s - 1/4, 3),   kept within 0 and 24.

s is the root of half the mean squared difference between successive steps, so that a trend does not count as noise.
The mean is taken over about the last 10 steps, and over about the last half of the steps; the larger one counts. s is
at least 0.001 of the limit.

Multipliers take the share `1 - evidence / 12` of the change that the dual rule wants. From 12 on they stand still, and
at 24 they begin to shrink. If a rise of the loss ends by itself, as after a step of the optimizer that went too far,
it has only held the multipliers where they are. Once they shrink, evidence is at most 12, and they shrink until it is
back at 0.

f_best is the lowest upper confidence bound, `m + 2 se`, of a mean m over about the last half of the steps so far. In m
the newest of t losses has the weight min(4 / (t + 3), max(1/t, 1/10)). Its window grows with the
run, so that chance does not make f_best lower and lower.

**Rises of plain training.** In a step in which all multipliers are 0, the objective is f_L alone. The last step
without evidence is the CUSUM test's estimate of where a rise began. If no multiplier acted in that step, the
constraints did not begin the rise. In this case the guard starts afresh when the evidence reaches 24: it drops its
means, f_best and the evidence, so the multipliers may move freely. Without this, a leap of the optimizer in the
warm-up would keep them at 0.

**Pace.** f_L follows the multipliers with a delay. If they grew at full pace again, they would run past the point of
rest again. So each time that they begin to shrink, their pace becomes a fifth of what it was, but not less than 0.001.
It recovers by 2 % in each step that does not shrink them, up to 1: after a single rise it is back there in
log 5 / log 1.02 = 82 steps. If f_L keeps coming back to its limit, the pace falls until about 82 steps of growth lie
between two rises. The form of the point of rest does not depend on the pace, which acts as a smaller eta.

With held-out examples f_L is read every few optimizer steps. Evidence, f_best and the pace then count readings.

The guard sees a rise of f_L. It does not know what plain training would have reached by now, and it cannot tell why
f_L rises: harder data late in the run counts as a rise, too.
"""

import math

import torch


TINY = torch.finfo(torch.float32).tiny  # the least noise, so that nothing is divided by 0


class RunningMean:
    """A weighted mean of losses, and how noisy it is.

    Attributes:
        mean (`float`): the mean.
        square_weight (`float`): the sum of the squared weights.
        variance (`float`): the variance of a single loss, from the differences between successive ones.
    """

    def __init__(self):
        self.mean = 0.0
        self.square_weight = 0.0
        self.variance = 0.0

    def add(self, loss: float, weight: float) -> None:
        """Take in a loss with its weight in the mean."""
        self.mean += weight * (loss - self.mean)
        self.square_weight *= (1 - weight) ** 2
        self.square_weight += weight**2

    def add_difference(self, difference: float, weight: float) -> None:
        """Take in the difference of a loss to the one before, with its weight in the variance."""
        half_square = 0.5 * difference**2  # without a trend its mean is the variance
        self.variance += weight * (half_square - self.variance)


class LastLayerGuard:
    """Follows f_L over the steps of a run, and says when multipliers have to stop growing, and when they have to
    shrink.

    Args:
        max_rise (`float`): the share delta >= 0 by which f_L may be above its best value so far.
    """

    WINDOW = 10  # steps: the present mean gives the newest loss the weight 1/10
    SLOW_SHARE = 4  # the slow mean gives the newest of t losses the weight 4 / (t + 3)
    FIRST_BEST = 20  # losses before which no best value is taken
    OF_BEST = 2.0  # standard errors that are added to the best value
    ENOUGH = 12.0  # evidence at which multipliers stand still
    LASTING = 24.0  # evidence at which they begin to shrink
    MOST = 3.0  # evidence that a step may add
    ALLOWED = 0.25  # standard deviations above the limit that are no evidence
    LEAST_NOISE = 1e-3  # of the limit, for losses that hardly vary
    BACK_OFF = 0.2  # factor of the pace whenever multipliers begin to shrink
    RECOVERY = 1.02  # its factor in each step that does not shrink them
    LEAST_PACE = 0.001
    _NAMES = ("count", "previous", "best", "evidence", "acted_before", "shrinks", "pace")
    # On disk each holds two numbers, of the present mean and of the slow mean.
    _OF_MEANS = {"mean": "means", "square_weight": "square_weights", "variance": "variances"}

    def __init__(self, max_rise: float):
        self.max_rise = max_rise
        self.pace = 1.0
        self.shrinks = False
        self._forget()
        # The highest present mean in steps that shrink, and the best value in that step.
        self._highest: tuple[float, float] | None = None

    def _forget(self) -> None:
        """Know nothing of f_L, as before the first loss."""
        self.count = 0  # losses so far
        self.previous = 0.0
        self.present = RunningMean()  # over about the last 10 losses
        self.slow = RunningMean()  # over about the last half of them
        self.best = math.inf  # the upper limit of the best slow mean so far
        self.evidence = 0.0
        self.acted_before = False  # whether a multiplier acted when the evidence was last 0

    def observe(self, loss: float, acts: bool) -> None:
        """Take in the f_L of a step, and whether any multiplier acts in that step. An f_L that is not finite changes
        nothing."""
        if not math.isfinite(loss):
            return

        self._add_evidence(loss)
        if self.evidence == 0:
            self.acted_before = acts

        self._add_to_means(loss)
        if self.count >= self.FIRST_BEST:
            error = math.sqrt(self.variance * self.slow.square_weight)
            self.best = min(self.best, self.slow.mean + self.OF_BEST * error)
        self._react()

        present = self.present.mean
        if self.shrinks and (self._highest is None or present > self._highest[0]):
            self._highest = (present, self.best)

    def highest_rise(self) -> tuple[float, float] | None:
        """The highest mean f_L in the steps in which multipliers had to shrink, and the best value at that time.
        `None` if there was no such step. It counts since this program started; it is not saved."""
        return self._highest

    def _add_evidence(self, loss: float) -> None:
        if math.isinf(self.best):
            return

        noise = math.sqrt(self.variance)
        noise = max(noise, self.LEAST_NOISE * abs(self.limit), TINY)

        excess = (loss - self.limit) / noise - self.ALLOWED
        most = self.ENOUGH if self.shrinks else self.LASTING
        self.evidence += min(excess, self.MOST)
        self.evidence = min(max(self.evidence, 0.0), most)

    def _add_to_means(self, loss: float) -> None:
        self.count += 1
        present_weight = max(1 / self.count, 1 / self.WINDOW)  # at first all losses count alike
        slow_weight = min(self.SLOW_SHARE / (self.count + self.SLOW_SHARE - 1), present_weight)

        for mean, weight in ((self.present, present_weight), (self.slow, slow_weight)):
            mean.add(loss, weight)
            if self.count == 2:  # the first difference
                mean.add_difference(loss - self.previous, 1.0)
            elif self.count > 2:
                mean.add_difference(loss - self.previous, weight)
        self.previous = loss

    def _react(self) -> None:
        """Begin or end to shrink the multipliers, and set the pace, by the present evidence."""
        if self.evidence >= self.LASTING and not self.shrinks:
            if not self.acted_before:  # plain training made the rise
                self._forget()
                return
            self.shrinks = True
            self.pace = max(self.BACK_OFF * self.pace, self.LEAST_PACE)
        if self.evidence == 0:
            self.shrinks = False
        if not self.shrinks:
            self.pace = min(self.RECOVERY * self.pace, 1.0)

    @property
    def variance(self) -> float:
        """The variance of a single loss: the larger of two estimates, since a quiet stretch proves nothing."""
        return max(self.present.variance, self.slow.variance)

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
        """How far the present f_L is above its best value, as a share; negative if below, `None` if there is no best
        yet."""
        if math.isinf(self.best) or self.best == 0:
            return None
        return (self.present.mean - self.best) / abs(self.best)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name."""
        values = {name: getattr(self, name) for name in self._NAMES}
        for name, key in self._OF_MEANS.items():
            values[key] = [getattr(self.present, name), getattr(self.slow, name)]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load what `state_dict` gave; ValueError if a name or a shape is wrong, or a value is not a number."""
        # Earlier versions did not save `acted_before`: every rise counted as made by the multipliers.
        state = {"acted_before": torch.tensor(1.0), **state}
        expected = self.state_dict()
        for name, tensor in expected.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.isnan().any():
                raise ValueError(f"The state of the last layer's guard has no usable '{name}'.")

        for name in self._NAMES:
            setattr(self, name, state[name].item())
        self.count = int(self.count)
        self.acted_before = bool(self.acted_before)
        self.shrinks = bool(self.shrinks)
        for name, key in self._OF_MEANS.items():
            present, slow = state[key].tolist()
            setattr(self.present, name, present)
            setattr(self.slow, name, slow)
