"""Models that stop early: truncated ones, exits of single samples, and drafts by the first layers."""

from .confidence import ConfidenceExit, ConfidenceReport
from .drafting import draft_with
from .exits import ExitProfile, exit_profile
from .healing import HealingTrainer
from .layer_sets import LayerSetProfile, find_layer_sets, layer_set_profile
from .speculation import SpeculationProfile, speculation_profile
from .truncation import keep_layers, truncate


__all__ = [
    "ConfidenceExit",
    "ConfidenceReport",
    "ExitProfile",
    "HealingTrainer",
    "LayerSetProfile",
    "SpeculationProfile",
    "draft_with",
    "exit_profile",
    "find_layer_sets",
    "keep_layers",
    "layer_set_profile",
    "speculation_profile",
    "truncate",
]
