"""Measures a model on held-out data: at each noise level (`noise_curves`) and at each layer (`profiles`), with a
verdict on its constraints (`certificates`).

Reading order: `row_sums`, `fingerprints`, `intervals`, `scoring`, `noise_curves`, `price`,
`certificates`, `profiles`, `side_by_side`, `comparison`, `plots`.
"""

from .certificates import Certificate, certify
from .noise_curves import NoiseCurve, noise_curve
from .profiles import LayerProfile, layer_profile, layer_profiles


__all__ = [
    "Certificate",
    "LayerProfile",
    "NoiseCurve",
    "certify",
    "layer_profile",
    "layer_profiles",
    "noise_curve",
]
