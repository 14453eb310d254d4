"""How good a model is under noise (`robustness`) and at every layer (`profile`), on held-out data.

Reading order: `sums`, `scoring`, `robustness`, `perturbations`, `profile`, `certificates`, `comparison`, `plots`.
"""

from .certificates import Certificate, certify
from .profile import LayerProfile, layer_profile, layer_profiles
from .robustness import NoiseCurve, noise_curve


__all__ = [
    "Certificate",
    "LayerProfile",
    "NoiseCurve",
    "certify",
    "layer_profile",
    "layer_profiles",
    "noise_curve",
]
