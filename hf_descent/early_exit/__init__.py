"""Models that stop early: truncated ones, exits of single samples, and drafts by the first layers."""

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
