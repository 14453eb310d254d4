"""The package's own architectures. Importing this module registers them with the Auto classes of transformers."""

from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForImageToImage,
    AutoModelForSequenceClassification,
)

from .dust import DustConfig, DustForVideoDenoising
from .linear_readout import (
    LinearReadoutConfig,
    LinearReadoutForImageClassification,
    LinearReadoutForSequenceClassification,
)
from .linear_readout import give_linear_readout as give_linear_readout
from .ut import UTConfig, UTForSequenceClassification, UTForVideoDenoising
from .vit_denoiser import ViTDenoiserConfig, ViTForDenoising


for config_class in (DustConfig, LinearReadoutConfig, UTConfig, ViTDenoiserConfig):
    AutoConfig.register(config_class.model_type, config_class)
for model_class in (LinearReadoutForSequenceClassification, UTForSequenceClassification):
    AutoModelForSequenceClassification.register(model_class.config_class, model_class)
for model_class in (DustForVideoDenoising, UTForVideoDenoising, ViTForDenoising):
    AutoModelForImageToImage.register(model_class.config_class, model_class)
AutoModelForImageClassification.register(LinearReadoutConfig, LinearReadoutForImageClassification)
