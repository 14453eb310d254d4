"""The package's own architectures; importing it registers them with transformers' Auto classes."""

from .dust import DustConfig, DustForVideoDenoising
from .linear_readout import LinearReadoutConfig, LinearReadoutForSequenceClassification
from .ut import UTConfig, UTForSequenceClassification, UTForVideoDenoising
from .vit_denoiser import ViTDenoiserConfig, ViTForDenoising


__all__ = [
    "DustConfig",
    "DustForVideoDenoising",
    "LinearReadoutConfig",
    "LinearReadoutForSequenceClassification",
    "UTConfig",
    "UTForSequenceClassification",
    "UTForVideoDenoising",
    "ViTDenoiserConfig",
    "ViTForDenoising",
]
