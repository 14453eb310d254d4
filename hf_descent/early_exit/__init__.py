"""What descent gives for free: models that stop early.

`truncation` (a shorter model, exact), `profile` (metric and latency of every exit), `confidence` (each sample of a
classifier stops where it is sure), `speculation` (a language model that drafts with its own first layers).
"""

from .confidence import ConfidenceExit, ConfidenceReport
from .profile import ExitProfile, exit_profile
from .speculation import SpeculationProfile, check_self_speculation, speculation_profile
from .truncation import truncate


__all__ = [
    "ConfidenceExit",
    "ConfidenceReport",
    "ExitProfile",
    "SpeculationProfile",
    "check_self_speculation",
    "exit_profile",
    "speculation_profile",
    "truncate",
]
