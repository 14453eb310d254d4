from transformers import AutoConfig, AutoModelForImageToImage, AutoModelForSequenceClassification

from .configuration_ut import UTConfig
from .modeling_ut import UTForSequenceClassification, UTForVideoDenoising


AutoConfig.register(UTConfig.model_type, UTConfig)
AutoModelForSequenceClassification.register(UTConfig, UTForSequenceClassification)
AutoModelForImageToImage.register(UTConfig, UTForVideoDenoising)

__all__ = ["UTConfig", "UTForSequenceClassification", "UTForVideoDenoising"]
