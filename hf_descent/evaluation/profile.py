"""The former name of [`~evaluation.profiles`]; it goes with the next version."""

import warnings

from .profiles import LayerProfile, layer_profile, layer_profiles


__all__ = ["LayerProfile", "layer_profile", "layer_profiles"]

warnings.warn(
    "`hf_descent.evaluation.profile` is now `hf_descent.evaluation.profiles`; import from "
    "`hf_descent.evaluation`.",
    FutureWarning,
    stacklevel=2,
)
