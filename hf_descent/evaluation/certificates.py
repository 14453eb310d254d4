"""What the theory's quantities are worth on finite data: certified layers, and growth under a shift of the input.

Everything here is an ESTIMATE from held-out samples, under these assumptions: samples are independent, of the
distribution that the statement is about, and many enough for the t interval of a mean; none of them was trained on.
The radii play the part of the near-feasibility term of the paper's Theorem 1; its constants (Lipschitz and
parametrisation constants, sample complexities) cannot be measured and are not claimed.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, Theorem 1, Corollary 3 and Theorem 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..constraints.problem import DescentProblem
from .profile import LayerProfile
from .scoring import Result, mean_loss
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
        rows = [f"{'layer':>6} {'violation':>12} {'+-':>10}  feasible"]
        for layer, violation, error, certified in zip(self.layers, self.violations, self.radii, self.certified):
            rows.append(f"{layer:6d} {violation:12.5g} {error:10.2g}  {'certified' if certified else 'not certified'}")
        return "\n".join(
            [
                *rows,
                f"Estimate at noise level {self.gamma:g}: {self.certified_share:.0%} of the constrained layers are "
                f"certified feasible, {self.refuted_share:.0%} infeasible, the rest is open; {self.confidence:.0%} "
                "for all of it together.",
                "Assumed: independent samples of the distribution in question, none of them trained on.",
            ]
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
    radii = np.broadcast_to(profile.radius("violations", confidence, len(layers)), profile.losses.shape)[index]
    found = profile.violations[index]
    # A layer is infeasible in one of two ways: both intervals of one level are no less sure together.
    losses, problem = profile.losses[index], DescentProblem(**profile.problem)
    errors = np.broadcast_to(profile.radius("losses", confidence, len(layers)), profile.losses.shape)[index]
    margin = problem.chance - profile.tolerance
    certified = (found + radii <= profile.tolerance) & (losses + errors < margin)  # never with a radius of nan
    refuted = (found - radii > profile.tolerance) | (losses - errors >= margin)
    return Certificate(
        profile.gamma,
        confidence,
        layers,
        found,
        radii,
        certified.tolist(),
        float(certified.mean()),
        float(refuted.mean()),
    )


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
        rows = [f"{'gamma':>8} {'growth of f_L':>14} {'+- (95 %)':>10}"]
        if self.violation_growth is not None:
            rows[0] += f" {'largest growth of a violation':>30} {'+- (95 %)':>10}"
        for level, gamma in enumerate(self.gammas):
            row = f"{gamma:8.4g} {self.loss_growth[level, -1]:14.5g} {self.loss_radii[level, -1]:10.2g}"
            if self.violation_growth is not None:
                worst = int(self.violation_growth[level].argmax())
                growth = f"{self.violation_growth[level, worst]:.5g} (layer {worst + 1})"
                row += f" {growth:>30} {self.violation_radii[level, worst]:10.2g}"
            rows.append(row)
        rows.append(f"Estimate: f_L grows by up to {self.loss_slopes[-1]:.4g} per unit of gamma (Theorem 4)")
        if self.violation_slopes is not None:
            rows[-1] += f", a violation by up to {self.violation_slopes.max():.4g} (Corollary 3)"
        rows[-1] += "; lower bounds of the constants there, per unit of gamma."
        return "\n".join(
            [*rows, "Assumed: independent samples, none of them trained on; losses Lipschitz in the shift."]
        )


def shift_growth(profiles: Sequence[LayerProfile]) -> ShiftGrowth:
    """The growth from the clean profile to the noisy ones, all of one [`~evaluation.profile.layer_profiles`] call.

    Raises:
        ValueError: not one clean and at least one noisy profile of the same model and data.
    """
    clean, noisy = ([p for p in profiles if bool(p.gamma) is kind] for kind in (False, True))
    if len(clean) != 1 or not noisy or len({p.blocks.shape for p in profiles}) != 1:
        raise ValueError(
            f"`profiles` are at the levels {[p.gamma for p in profiles]}; give those of one `layer_profiles` call, "
            "level 0 among them."
        )
    gammas = np.array([profile.gamma for profile in noisy])
    blocks = np.stack([clean[0].blocks, *(profile.blocks for profile in noisy)], axis=1)  # [blocks, 1 + G, L, 4]
    growth = {"loss": _growth(mean_loss, blocks)}
    if clean[0].problem is not None:
        statistic = clean[0]._statistic("violations")
        growth["violation"] = _growth(lambda sums: np.stack([statistic(level) for level in sums]), blocks)
    per_gamma = {name: values / gammas[:, None] for name, (values, _) in growth.items()}  # [G, L]
    slopes = {"loss": np.abs(per_gamma["loss"]).max(axis=0)}
    if "violation" in growth:
        slopes["violation"] = per_gamma["violation"].max(axis=0).clip(min=0)
    fields = {f"{name}_growth": values for name, (values, _) in growth.items()}
    fields |= {f"{name}_radii": errors for name, (_, errors) in growth.items()}
    return ShiftGrowth(gammas, **fields, **{f"{name}_slopes": values for name, values in slopes.items()})


def _growth(statistic, blocks) -> tuple[np.ndarray, np.ndarray]:
    """Change of `statistic` `[1 + G, L]` from the first level to the others, with its radius; `[G, L]` each."""

    def change(sums):
        values = statistic(sums)
        return values[1:] - values[:1]

    values = change(blocks.sum(axis=0))
    return values, np.broadcast_to(radius(change, blocks), values.shape)
