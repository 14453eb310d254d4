"""Models that stop early: cut after a layer, without some layers, or by the sample; and the tuned lens."""

from .confidence import ConfidenceExit, ConfidenceReport
from .exits import ExitProfile, exit_profile
from .healing import HealingTrainer
from .layer_sets import LayerSetProfile, find_layer_sets, layer_set_profile
from .truncation import keep_layers, truncate
from .tuned_lens import fit_lens


__all__ = [
    "ConfidenceExit",
    "ConfidenceReport",
    "ExitProfile",
    "HealingTrainer",
    "LayerSetProfile",
    "exit_profile",
    "find_layer_sets",
    "fit_lens",
    "keep_layers",
    "layer_set_profile",
    "truncate",
]

REMOVED = ("SpeculationProfile", "draft_with", "speculation_profile")


def __getattr__(name: str):
    if name in REMOVED:
        # `from ... import` passes an ImportError on, and would hide the text of an AttributeError.
        raise ImportError(
            f"`{name}` was removed after version 0.2: drafting with the first layers was never faster. To let a "
            "shorter model draft, call `model.generate(..., assistant_model=truncate(model, num_layers))`, or give "
            "`generate` the argument `assistant_early_exit`."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
