from transformers import AutoConfig, AutoModelForImageToImage

from .configuration_dust import DustConfig
from .modeling_dust import DustForVideoDenoising


AutoConfig.register(DustConfig.model_type, DustConfig)
AutoModelForImageToImage.register(DustConfig, DustForVideoDenoising)

__all__ = ["DustConfig", "DustForVideoDenoising"]
