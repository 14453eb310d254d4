"""The package's own architectures; importing it registers them with transformers' Auto classes."""

from .linear_readout import LinearReadoutConfig, LinearReadoutForSequenceClassification
from .ut import UTConfig, UTForSequenceClassification, UTForVideoDenoising


__all__ = [
    "LinearReadoutConfig",
    "LinearReadoutForSequenceClassification",
    "UTConfig",
    "UTForSequenceClassification",
    "UTForVideoDenoising",
]
