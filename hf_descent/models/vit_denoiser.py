"""A vision transformer as a denoiser: it has no head, and the output of every layer is a reconstruction.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, appendix B.2.
"""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.utils.generic import can_return_tuple

from ..compat import as_config
from .linear_readout import EncoderModel
from .unrolling import DenoisingOutput, denoising_loss, positive


@strict
class ViTDenoiserConfig(PreTrainedConfig):
    """Configuration of [`ViTForDenoising`].

    Args:
        encoder_config (`PreTrainedConfig` or `dict`): Configuration of the encoder, of any type that `AutoModel`
            builds and whose tokens are image patches. `None`: ViT's.
        readout (`str`): How a layer's token becomes a patch: its values are the pixels ("patches", the paper's;
            hidden_size must be channels x patch_size^2), or one linear layer gives them ("linear"), which all layers
            share.
        loss_scale (`float`): Factor of an image's sum of squared errors in the loss. 1/2 is the paper's loss.
    """

    model_type = "vit_denoiser"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: dict | PreTrainedConfig | None = None
    readout: Literal["patches", "linear"] = "patches"
    loss_scale: float | int = positive(default=0.5)

    def __post_init__(self, **kwargs):
        self.encoder_config = as_config(self.encoder_config, "vit")
        super().__post_init__(**kwargs)


class ViTForDenoising(EncoderModel):
    """Denoises single images with a ViT, DeiT, DINOv2 or another encoder whose tokens are image patches.

    A token of any layer holds the pixels of its patch, channel by channel (`config.readout`). Class, register and
    distillation tokens are left out. The encoder loses its final layer norm, which would remove the mean and the
    contrast of every patch.

    ValueError if the encoder's width is not that of a patch and `config.readout` is "patches", or its last tokens
    are no patches (YOLOS).
    """

    config_class = ViTDenoiserConfig
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # its loss is a mean over the images of the batch at hand
    unused = (
        "pooler",
        "head",
        "layernorm",
        "norm",
        "post_layernorm",
        "rms_norm",
    )  # poolers and final norms

    def __init__(self, config: ViTDenoiserConfig):
        super().__init__(config)
        self.encoder = self.without_unused(AutoModel.from_config(config.encoder_config))
        encoder = config.encoder_config
        if getattr(encoder, "num_detection_tokens", 0):  # YOLOS
            remedy = "use ViT, DeiT, DINOv2, DINOv3, CLIP or SigLIP"
            raise ValueError(
                f"The patches of a {type(encoder).__name__} are not its last tokens: {remedy}."
            )

        self.num_channels = encoder.num_channels
        self.patch_size = encoder.patch_size
        width = encoder.hidden_size
        num_values = self.num_channels * self.patch_size**2
        if config.readout == "patches" and width != num_values:
            raise ValueError(
                f"The encoder's `hidden_size` is {width}, and a patch has {self.num_channels} x {self.patch_size}^2 = "
                f"{num_values} values. Use `readout='linear'`, or an encoder where the two agree (ViT-B/16)."
            )

        self.readout = nn.Linear(width, num_values) if config.readout == "linear" else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs
    ) -> DenoisingOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `[batch, channels, height, width]`): noisy images.
            labels (`torch.Tensor` of the same shape, *optional*): clean images, for the loss
                `loss_scale * ||x - xhat||^2`, averaged over the images.
        """
        size = self.patch_size
        rows = pixel_values.shape[2] // size
        columns = pixel_values.shape[3] // size
        outputs = self.encoder(pixel_values=pixel_values, return_dict=True, **kwargs)
        tokens = outputs.last_hidden_state  # [batch, extra + patches, hidden]
        patches = self.readout(tokens[:, -rows * columns :])  # [batch, patches, values]
        patches = patches.unflatten(2, (self.num_channels, size, size))
        patches = patches.unflatten(
            1, (rows, columns)
        )  # [batch, rows, columns, channels, size, size]
        images = (
            patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        )  # [batch, channels, height, width]

        loss = denoising_loss(images, labels, self.config.loss_scale)
        return DenoisingOutput(loss=loss, logits=images, hidden_states=outputs.hidden_states)
