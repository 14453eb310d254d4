"""Certified layers: which constraints hold with confidence, on finite data.

A certificate is an ESTIMATE from held-out samples. Assumed: the samples are independent, of the distribution that
the statement is about, enough for the t interval of a mean, and none of them was trained on. The radii stand for the
near-feasibility term of the paper's Theorem 1; its constants cannot be measured and are not claimed.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, Theorem 1.
"""

from dataclasses import dataclass

import numpy as np

from ..constraints.problem import DescentProblem
from .profile import LayerProfile
from .scoring import Result, format_table


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
