from transformers import AutoConfig, AutoModelForImageToImage

from .configuration_vit_denoiser import ViTDenoiserConfig
from .modeling_vit_denoiser import ViTForDenoising


AutoConfig.register(ViTDenoiserConfig.model_type, ViTDenoiserConfig)
AutoModelForImageToImage.register(ViTDenoiserConfig, ViTForDenoising)

__all__ = ["ViTDenoiserConfig", "ViTForDenoising"]
