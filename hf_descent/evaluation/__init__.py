"""How good a model is under noise (`robustness`) and at every layer (`profile`), on held-out data.

Reading order: `uncertainty`, `sums`, `scoring`, `robustness`, `perturbations`, `profile`, `certificates`,
`comparison`, `plots`.
"""

from .certificates import Certificate, ShiftGrowth, certify, shift_growth
from .profile import LayerProfile, layer_profile, layer_profiles
from .robustness import NoiseCurve, noise_curve


__all__ = [
    "Certificate",
    "LayerProfile",
    "NoiseCurve",
    "ShiftGrowth",
    "certify",
    "layer_profile",
    "layer_profiles",
    "noise_curve",
    "shift_growth",
]
