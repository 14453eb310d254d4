"""Models that stop early: truncated ones, exits of single samples, and drafts by the first layers."""

from .confidence import ConfidenceExit, ConfidenceReport
from .drafting import draft_with
from .profile import ExitProfile, SpeculationProfile, exit_profile, speculation_profile
from .truncation import truncate


__all__ = [
    "ConfidenceExit",
    "ConfidenceReport",
    "ExitProfile",
    "SpeculationProfile",
    "draft_with",
    "exit_profile",
    "speculation_profile",
    "truncate",
]
