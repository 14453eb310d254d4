"""The former name of [`~evaluation.noise_curves`]; it goes with the next version."""

import warnings

from .noise_curves import NoiseCurve, noise_curve


__all__ = ["NoiseCurve", "noise_curve"]

warnings.warn(
    "`hf_descent.evaluation.robustness` is now `hf_descent.evaluation.noise_curves`; import from "
    "`hf_descent.evaluation`.",
    FutureWarning,
    stacklevel=2,
)
