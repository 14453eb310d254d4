"""How good a model is under noise (`robustness`) and at every layer (`profile`), on held-out data."""

from .profile import LayerProfile, layer_profile
from .robustness import NoiseCurve, noise_curve


__all__ = ["LayerProfile", "NoiseCurve", "layer_profile", "noise_curve"]
