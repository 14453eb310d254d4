"""What the unrolled transformers share: attention as a descent step, the DCT, and the denoising loss.

Tokens are rows. For points z_i let W_ij = exp(-||z_i - z_j||^2 / 2) and D_i = sum_j W_ij, both with j = i included.

Source: Yang, Huang, Wipf (2022), "Transformers from an Optimization Perspective", arXiv 2205.13891, theorem 3.1;
Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, appendix C.2.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import as_validated_field
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import capture_outputs


# Fields of configurations: `field: float = positive(default=1.0)`. The `interval` of older transformers takes a limit
# of 0 for none.


@as_validated_field
def positive(value: float) -> None:
    if not value > 0:
        raise ValueError(f"Value must be greater than 0, got {value}.")


@as_validated_field
def nonnegative(value: float) -> None:
    if not value >= 0:
        raise ValueError(f"Value must be greater or equal to 0, got {value}.")


@as_validated_field
def share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"Value must be greater than 0 and smaller or equal to 1, got {value}.")


@dataclass
class DenoisingOutput(ModelOutput):
    """Output of a denoiser: `logits` is the reconstruction, shaped like `pixel_values`."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


class PatchDenoiser:
    """Denoises the patches that a clip's frames show at one place. Each iterate is a reconstruction; there is no head.

    A model names this class before `PreTrainedModel` and has a method `reconstruct`, which maps noisy patches
    `[batch, frames, hidden_size]` to their reconstruction.
    """

    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # the loss is a mean over the clips of the batch at hand
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    @property
    def dummy_inputs(self) -> dict[str, torch.Tensor]:
        """Two clips of four frames, `[2, 4, hidden_size]`."""
        generator = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.rand(2, 4, self.config.hidden_size, generator=generator)}

    def get_input_embeddings(self) -> None:
        """None: frames are not looked up. accelerate asks every model for it under FSDP2."""

    @capture_outputs
    def forward(
        self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs
    ) -> DenoisingOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `[batch, frames, hidden_size]`): noisy patches, flattened.
            labels (`torch.Tensor` of shape `[batch, frames, hidden_size]`, *optional*): clean patches, for the loss
                `loss_scale * sum_t ||x_t - xhat_t||^2`, averaged over the clips.
        """
        reconstruction = self.reconstruct(pixel_values.to(self.dtype))
        loss = denoising_loss(reconstruction, labels, self.config.loss_scale)
        return DenoisingOutput(loss=loss, logits=reconstruction)


def symmetric_attention(
    projected: torch.Tensor,
    tokens: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    self_weight: float = 0.0,
) -> torch.Tensor:
    """Softmax attention of a projection with itself, a descent step on energies of W:

        x_i <- (sum_j W_ij x_j + self_weight x_i) / (D_i + self_weight)

    - Without the weight it is plain attention with Q = K = V and token weights exp(-||z_j||^2 / 2), and never raises
      -sum_ij W_ij: the majorant of this energy at Z is sum_ij W_ij ||z_i - z_j||^2 / 2 up to a constant, and the step
      is its Jacobi-preconditioned gradient step.
    - `self_weight=a` is the proximal step, which never raises -sum_ij W_ij + a sum_i ||z_i - z_i^old||^2.

    Averaging the tokens X themselves undoes the projection Z = X V for any V, also a singular one.

    Args:
        projected (`torch.Tensor` of shape `[batch, seq, width]`): Z, queries and keys.
        tokens (`torch.Tensor` of shape `[batch, seq, hidden]`): X, what is averaged.
        attention_mask (`torch.Tensor` of shape `[batch, seq]`, *optional*): 0 at tokens that are not attended to.
        self_weight (`float`): weight >= 0 of the token itself.

    Returns:
        `torch.Tensor` of shape `[batch, seq, hidden]`.
    """
    # W depends on differences only. Large norms that cancel would cost bfloat16 its digits.
    projected = projected - projected.mean(1, keepdim=True)
    bias = -projected.square().sum(-1) / 2  # [batch, seq]; W_ij = exp(z_i . z_j + bias_j + bias_i)
    if attention_mask is not None:
        bias = bias.masked_fill(attention_mask == 0, torch.finfo(bias.dtype).min)
    bias = bias[:, None]  # [batch, 1, key]
    if self_weight:
        bias = bias + math.log1p(self_weight) * torch.eye(
            bias.shape[-1], dtype=bias.dtype, device=bias.device
        )
    # [batch, 1 head, seq, ...]
    return F.scaled_dot_product_attention(
        projected[:, None], projected[:, None], tokens[:, None], attn_mask=bias[:, None], scale=1.0
    )[:, 0]


def orthonormal_dct(size: int) -> torch.Tensor:
    """The orthonormal DCT-II matrix `[size, size]`: row k is the cosine of frequency k."""
    frequencies = np.arange(size)[:, None]
    samples = np.arange(size)
    rows = np.sqrt(2 / size) * np.cos(np.pi / size * frequencies * (samples + 0.5))
    rows[0] /= np.sqrt(2)
    return torch.from_numpy(rows).float()  # [frequency, sample]


def denoising_loss(
    reconstruction: torch.Tensor, labels: torch.Tensor | None, loss_scale: float
) -> torch.Tensor | None:
    """`loss_scale * sum_t ||x_t - xhat_t||^2`, averaged over the batch (paper, section 4); `None` without labels.

    The clean `labels` have the shape and units of the `reconstruction`: `[batch, frames, values]`, or an image's.
    """
    if labels is None:
        return None
    if labels.shape != reconstruction.shape:  # which `mse_loss` would broadcast
        raise ValueError(
            f"`labels` has shape {list(labels.shape)}; give the input's, {list(reconstruction.shape)}."
        )
    squares = F.mse_loss(reconstruction.float(), labels.float(), reduction="sum")
    return loss_scale * squares / len(labels)
