"""A vision transformer as denoiser: its head is dropped, and every layer's output is read as a reconstruction.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, appendix B.2.
"""

import inspect

import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.utils.generic import can_return_tuple

from ..unrolling import DenoisingOutput, denoising_loss
from .configuration_vit_denoiser import ViTDenoiserConfig


# What the library's vision transformers call them.
POOLERS = ("pooler", "head")
FINAL_NORMS = ("layernorm", "norm", "post_layernorm", "rms_norm")


class ViTForDenoising(PreTrainedModel):
    """Denoises images, each by itself, with a ViT, DeiT, DINOv2 or another encoder whose tokens are image patches.

    A token of any layer holds the pixels of its patch, channel by channel (`config.readout`); class, register and
    distillation tokens are left out. The encoder's final layer norm is dropped with its head: it would take from
    every patch its mean and its contrast.

    Raises:
        ValueError: an encoder that takes more than images, whose tokens are no square patches or end in detection
            tokens, or whose width is not that of a patch where `config.readout` is "patches".
    """

    config_class = ViTDenoiserConfig
    base_model_prefix = "encoder"
    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # its loss is a mean over the images of the batch at hand
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True

    def __init__(self, config: ViTDenoiserConfig):
        super().__init__(config)
        self._set_encoder(AutoModel.from_config(config.encoder_config))
        kind = config.encoder_config.model_type
        names = ("num_channels", "patch_size", "hidden_size")
        sizes = {name: getattr(config.encoder_config, name, None) for name in names}
        if not all(isinstance(size, int) for size in sizes.values()):
            raise ValueError(
                f"The encoder's config ({kind}) gives {sizes}: use a vision transformer whose tokens are square "
                "patches, such as ViT, DeiT or DINOv2."
            )
        parameters = inspect.signature(self.encoder.forward).parameters.values()
        needed = [it.name for it in parameters if it.default is it.empty and it.kind == it.POSITIONAL_OR_KEYWORD]
        if needed not in ([], ["pixel_values"]) or hasattr(config.encoder_config, "num_frames"):
            raise ValueError(
                f"A {kind} encoder takes videos, or more than images ({', '.join(needed)}): use one that takes images "
                "alone, such as ViT, DeiT or DINOv2."
            )
        if getattr(config.encoder_config, "num_detection_tokens", 0):  # which stand where patches are looked for
            raise ValueError(f"A {kind} encoder ends in detection tokens: use one without, such as ViT.")
        self.num_channels, self.patch_size, width = sizes.values()
        num_values = self.num_channels * self.patch_size**2
        if config.readout == "patches" and width != num_values:
            raise ValueError(
                f"The encoder's `hidden_size` is {width}, and a patch has {self.num_channels} x {self.patch_size}^2 = "
                f"{num_values} values: tokens cannot be read as patches. Use `readout='linear'`, or an encoder where "
                "the two agree (ViT-B/16)."
            )
        self.readout = nn.Linear(width, num_values) if config.readout == "linear" else nn.Identity()
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder_name_or_path: str, **config_kwargs):
        """A pretrained encoder as denoiser; in eval mode, as `from_pretrained` leaves its models.

        Args:
            encoder_name_or_path (`str`): what `AutoModel.from_pretrained` takes.
            config_kwargs: further fields of the configuration (`readout`, `loss_scale`).
        """
        encoder = AutoModel.from_pretrained(encoder_name_or_path)
        model = cls(ViTDenoiserConfig(encoder_config=encoder.config, **config_kwargs))
        model._set_encoder(encoder)
        return model.to(encoder.dtype).eval()

    def _set_encoder(self, encoder: nn.Module):
        # A pooler that nothing reads has no gradient, which DistributedDataParallel refuses.
        for name in (*POOLERS, *FINAL_NORMS):
            if getattr(encoder, name, None) is not None:
                setattr(encoder, name, nn.Identity())
        self.encoder = encoder

    @can_return_tuple
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs) -> DenoisingOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `[batch, channels, height, width]`): noisy images.
            labels (`torch.Tensor` of the same shape, *optional*): clean images.

        Returns:
            [`DenoisingOutput`]: the loss is `loss_scale * ||x - xhat||^2`, averaged over the images.

        Raises:
            ValueError: the images are no multiple of the patches in size, the encoder's tokens are no patches, or
                the labels have another shape.
        """
        size, channels = self.patch_size, self.num_channels
        if (
            pixel_values.dim() != 4
            or pixel_values.shape[1] != channels
            or any(n % size for n in pixel_values.shape[2:])
        ):
            raise ValueError(
                f"`pixel_values` has shape {list(pixel_values.shape)}; give [batch, {channels}, height, width] with "
                f"height and width multiples of the patch size, {size}."
            )
        rows, columns = (n // size for n in pixel_values.shape[2:])
        outputs = self.encoder(pixel_values=pixel_values, return_dict=True, **kwargs)
        tokens = outputs.last_hidden_state  # [batch, extra + patches, hidden]
        if tokens.dim() != 3 or len(tokens) != len(pixel_values) or tokens.shape[1] < rows * columns:
            raise ValueError(
                f"The encoder gives hidden states of shape {list(tokens.shape)} for {len(pixel_values)} images of "
                f"{rows} x {columns} patches: use a vision transformer with one token per patch, such as ViT, DeiT or "
                "DINOv2."
            )
        patches = self.readout(tokens[:, -rows * columns :])  # [batch, patches, channels * size * size]
        patches = patches.unflatten(2, (channels, size, size)).unflatten(1, (rows, columns))
        images = patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)  # [batch, channels, height, width]
        loss = denoising_loss(images, labels, self.config.loss_scale)
        return DenoisingOutput(loss=loss, logits=images, hidden_states=outputs.hidden_states)
