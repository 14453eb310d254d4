"""The theory's quantities on finite data: certified layers, and growth under a shift of the input.

Everything here is an ESTIMATE from held-out samples. Assumed: the samples are independent, of the distribution that
the statement is about, enough for the t interval of a mean, and none of them was trained on. The radii stand for the
near-feasibility term of the paper's Theorem 1; its constants cannot be measured and are not claimed.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, Theorem 1, Corollary 3 and Theorem 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..constraints.problem import DescentProblem
from .profile import LayerProfile
from .scoring import Result, format_table
from .uncertainty import radius


@dataclass
class Certificate(Result):
    """Which layers are feasible with confidence, from one layer profile (an estimate; see the module).

    Attributes:
        gamma (`float`): noise level of the input.
        confidence (`float`): level at which all statements hold TOGETHER.
        layers (`list[int]`): the constrained layers, 1-based.
        violations (float64 `[constrained]`): g_l, in units of the loss.
        radii (float64 `[constrained]`): half-widths of simultaneous intervals of g_l (Bonferroni over the layers).
        certified (`list[bool]`): whether g_l plus its radius is at most the tolerance, and f_l plus its own less than
            the loss at chance by more than that ([`DescentProblem`]).
        certified_share (`float`): share of the constrained layers that are certified.
        refuted_share (`float`): share of those where either is beyond it less the radius; the rest is open.
    """

    gamma: float
    confidence: float
    layers: list[int]
    violations: np.ndarray
    radii: np.ndarray
    certified: list[bool]
    certified_share: float
    refuted_share: float

    def __str__(self) -> str:
        rows = [["layer", "violation", "+-", "feasible"]]
        for layer, violation, error, certified in zip(self.layers, self.violations, self.radii, self.certified):
            verdict = "certified" if certified else "not certified"
            rows.append([f"{layer}", f"{violation:.5g}", f"{error:.2g}", verdict])
        return (
            f"{format_table(rows)}\nEstimate at noise level {self.gamma:g}: {self.certified_share:.0%} of the "
            f"constrained layers are certified feasible, {self.refuted_share:.0%} infeasible, the rest is open; "
            f"{self.confidence:.0%} for all of it together.\n"
            "Assumed: independent samples of the distribution in question, none of them trained on."
        )


def certify(profile: LayerProfile, confidence: float = 0.95) -> Certificate:
    """The certificate of a profile that was measured against a problem.

    Raises:
        ValueError: the profile has no problem, or `confidence` is no level.
    """
    if profile.problem is None:
        raise ValueError("The profile was measured without `problem`, so it has no constraints to certify.")
    layers = profile.constrained_layers
    index = np.array(layers) - 1
    violations, losses = profile.violations[index], profile.losses[index]
    # A layer is infeasible in one of two ways: both intervals of one level are no less sure together.
    radii, errors = (profile.radius(name, confidence, len(layers))[index] for name in ("violations", "losses"))
    margin = DescentProblem(**profile.problem).chance - profile.tolerance
    certified = (violations + radii <= profile.tolerance) & (losses + errors < margin)  # never with a radius of nan
    refuted = (violations - radii > profile.tolerance) | (losses - errors >= margin)
    shares = float(certified.mean()), float(refuted.mean())
    return Certificate(profile.gamma, confidence, layers, violations, radii, certified.tolist(), *shares)


@dataclass
class ShiftGrowth(Result):
    """How losses and violations grow as the input's noise takes it away from the clean distribution (an estimate).

    Both statements assume that a loss changes at most by a constant times the distance of the two distributions
    (Assumption 7): Corollary 3 bounds the violations under the shift by those of the clean distribution plus such a
    term, Theorem 4 the distance of f_L from the best that is possible there. The distance of clean and noisy inputs is
    at most proportional to gamma (add the noise to the very same inputs: Wasserstein distance <= gamma * sigma *
    sqrt(dimensions)), so the constants are estimated per unit of gamma; the largest slope seen is a LOWER bound.

    Attributes:
        gammas (float64 `[G]`): noise levels > 0.
        loss_growth (float64 `[G, L]`): f_l(gamma) - f_l(0).
        loss_radii (float64 `[G, L]`): half-widths of its 95 % intervals, paired over the data.
        loss_slopes (float64 `[L]`): the largest |f_l(gamma) - f_l(0)| / gamma.
        violation_growth (float64 `[G, L]`, *optional*): g_l(gamma) - g_l(0), with a problem.
        violation_radii (float64 `[G, L]`, *optional*): likewise.
        violation_slopes (float64 `[L]`, *optional*): the largest (g_l(gamma) - g_l(0)) / gamma, at least 0.
    """

    gammas: np.ndarray
    loss_growth: np.ndarray
    loss_radii: np.ndarray
    loss_slopes: np.ndarray
    violation_growth: np.ndarray | None = None
    violation_radii: np.ndarray | None = None
    violation_slopes: np.ndarray | None = None

    def __str__(self) -> str:
        rows = [["gamma", "growth of f_L", "+- (95 %)"]]
        if self.violation_growth is not None:
            rows[0] += ["largest growth of a violation", "+- (95 %)"]
        for level, gamma in enumerate(self.gammas):
            growth, error = self.loss_growth[level, -1], self.loss_radii[level, -1]
            rows.append([f"{gamma:.4g}", f"{growth:.5g}", f"{error:.2g}"])
            if self.violation_growth is not None:
                worst = self.violation_growth[level].argmax()
                growth, error = self.violation_growth[level, worst], self.violation_radii[level, worst]
                rows[-1] += [f"{growth:.5g} (layer {worst + 1})", f"{error:.2g}"]
        found = f"f_L grows by up to {self.loss_slopes[-1]:.4g} per unit of gamma (Theorem 4)"
        if self.violation_slopes is not None:
            found += f", a violation by up to {self.violation_slopes.max():.4g} (Corollary 3)"
        return (
            f"{format_table(rows)}\nEstimate: {found}; lower bounds of the constants there, per unit of gamma.\n"
            "Assumed: independent samples, none of them trained on; losses Lipschitz in the shift."
        )


def shift_growth(profiles: Sequence[LayerProfile]) -> ShiftGrowth:
    """The growth from the clean profile to the noisy ones, all of one [`~evaluation.profile.layer_profiles`] call.

    Raises:
        ValueError: not one clean and at least one noisy profile of the same model and data.
    """
    profiles = sorted(profiles, key=lambda profile: profile.gamma)
    gammas = np.array([profile.gamma for profile in profiles])
    if (gammas == 0).sum() != 1 or len(gammas) < 2 or len({profile.blocks.shape for profile in profiles}) != 1:
        raise ValueError(
            f"`profiles` are at the levels {gammas.tolist()}; give those of one `layer_profiles` call, level 0 among "
            "them."
        )
    blocks = np.stack([profile.blocks for profile in profiles], axis=1)  # [blocks, 1 + G, L, 4]
    losses, radii, slopes = _growth(profiles[0].statistic("losses"), blocks, gammas)
    growth = ShiftGrowth(gammas[1:], losses, radii, np.abs(slopes).max(axis=0))
    if profiles[0].problem is None:
        return growth
    violations, radii, slopes = _growth(profiles[0].statistic("violations"), blocks, gammas)
    return replace(
        growth,
        violation_growth=violations,
        violation_radii=radii,
        violation_slopes=slopes.max(axis=0).clip(min=0),
    )


def _growth(statistic, blocks, gammas) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Change of `statistic` from the first level to the others, its radius, and the change per unit of gamma; each
    `[G, L]`."""

    def change(sums):
        values = np.stack([statistic(level) for level in sums])  # [1 + G, L]
        return values[1:] - values[0]

    values = change(blocks.sum(axis=0))
    return values, np.broadcast_to(radius(change, blocks), values.shape), values / gammas[1:, None]
