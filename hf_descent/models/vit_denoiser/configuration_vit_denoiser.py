from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


READOUTS = ("patches", "linear")


@strict
class ViTDenoiserConfig(PreTrainedConfig):
    """Configuration of [`ViTForDenoising`].

    Args:
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the encoder, of any type that `AutoModel` builds and whose tokens are image patches.
            `None`: ViT's.
        readout (`str`, *optional*, defaults to `"patches"`):
            How a layer's token becomes a patch: its values are the pixels ("patches", the paper's; hidden_size must
            be channels x patch_size^2), or one linear layer gives them ("linear"), which all layers share.
        loss_scale (`float`, *optional*, defaults to 0.5):
            Factor of an image's sum of squared errors in the loss. 1/2 is the paper's loss.

    Raises:
        ValueError: another `readout`, or a `loss_scale` that is not positive.
    """

    model_type = "vit_denoiser"
    sub_configs_defaults = {"encoder_config": SubConfigSpec(config_class=AutoConfig, model_type="vit")}

    encoder_config: dict | PreTrainedConfig | None = None
    readout: str = "patches"
    loss_scale: float | int = 0.5

    def __post_init__(self, **kwargs):
        if self.readout not in READOUTS:
            raise ValueError(f"`readout` is {self.readout!r}; choose one of {', '.join(READOUTS)}.")
        if not self.loss_scale > 0:
            raise ValueError(f"`loss_scale` is {self.loss_scale}; it must be positive.")
        super().__post_init__(**kwargs)
