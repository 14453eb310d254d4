"""Deep unfolded sequential transformer (DUST): sparse codes of the frames, coupled by attention.

For patches x_t (rows of p values), codes h_t (rows of K >= p values) and a dictionary D `[p, K]` the energy is

    sum_t [ ||x_t - h_t D^T||^2 / 2 + sparsity ||h_t||_1 ] + coupling E(H D^T),   E(Y) = -sum_ij W_ij

with the symmetric attention energy E of `unrolling.py`. A layer makes a proximal attention step on E, then a LISTA
step on the rest (`c` is `curvature`, W and D_i are those of the incoming reconstructions):

    h_i <- (sum_j W_ij h_j + a h_i) / (D_i + a),   a = c / (2 coupling)
    h   <- soft_threshold( h (I - D^T D / c) + x D / c,  sparsity / c )

Averaging the codes averages their reconstructions. Large couplings give plain softmax attention, 0 leaves it out.

Source: De Weerdt, Eldar, Deligiannis (2023), "Designing transformer networks for sparse recovery of sequential data
using deep unfolding", without its measurement matrix; Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257,
appendix C.3 and C.4, whose lambda_1 and lambda_2 are `sparsity` and `coupling`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import capture_outputs

from ..unrolling import (
    DenoisingOutput,
    PatchDenoiser,
    attention_function,
    check_patches,
    denoising_loss,
    orthonormal_dct,
)
from .configuration_dust import DustConfig


def dct_dictionary(num_values: int, size: int) -> torch.Tensor:
    """The overcomplete DCT dictionary D `[num_values, size]`: a tight frame, D D^T = I; orthonormal when complete.

    Its rows are the first of the orthonormal (inverse) DCT matrix of `size` samples; column k is the cosine of
    frequency k, cut after `num_values` samples.
    """
    return orthonormal_dct(size).T[:num_values]


class DustLayer(GradientCheckpointingLayer):
    """One iteration; see the module's docstring for the equations.

    Attributes:
        dictionary (`nn.Parameter` of shape `[hidden, dictionary_size]`): D.
    """

    def __init__(self, config: DustConfig):
        super().__init__()
        self.config = config
        self.sparsity, self.coupling, self.curvature = config.sparsity, config.coupling, config.curvature
        self.dictionary = nn.Parameter(torch.empty(config.hidden_size, config.dictionary_size))

    def forward(
        self, reconstruction: torch.Tensor, code: torch.Tensor, pixel_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            reconstruction (`torch.Tensor` of shape `[batch, frames, hidden]`): what the layer before reconstructed.
            code (`torch.Tensor` of shape `[batch, frames, dictionary_size]`): its codes.
            pixel_values (`torch.Tensor` of shape `[batch, frames, hidden]`): the noisy patches.

        Returns:
            The new reconstruction and the new code.
        """
        if self.coupling:
            attention = attention_function(self.config._attn_implementation)
            code = attention(reconstruction, code, self_weight=self.curvature / (2 * self.coupling))
        residual = pixel_values - code @ self.dictionary.T  # [batch, frames, hidden]
        code = code + residual @ self.dictionary / self.curvature
        code = F.softshrink(code, self.sparsity / self.curvature)  # [batch, frames, dictionary_size]
        return code @ self.dictionary.T, code


class DustForVideoDenoising(PatchDenoiser, PreTrainedModel):
    """Denoises the patches that a clip's frames show at one place. Each iterate is a reconstruction; there is no head.

    The codes start at h = x D, which reconstructs the noisy patches, and every D at the overcomplete DCT.
    `hidden_states` are the reconstructions h_t D^T.
    """

    config: DustConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["DustLayer"]
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": DustLayer}

    def __init__(self, config: DustConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(
            DustLayer(config) for _ in range(1 if config.shared_dictionary else config.num_hidden_layers)
        )
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, DustLayer):
            init.copy_(module.dictionary, dct_dictionary(*module.dictionary.shape))

    @capture_outputs
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs) -> DenoisingOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `[batch, frames, hidden_size]`): noisy patches, flattened.
            labels (`torch.Tensor` of shape `[batch, frames, hidden_size]`, *optional*): clean patches.

        Returns:
            [`DenoisingOutput`]: the loss is `loss_scale * sum_t ||x_t - xhat_t||^2`, averaged over the clips.

        Raises:
            ValueError: the patches have not `hidden_size` values, or the labels another shape.
        """
        check_patches(pixel_values, self.config.hidden_size)
        pixel_values = pixel_values.to(self.dtype)
        reconstruction, code = pixel_values, pixel_values @ self.layers[0].dictionary
        for index in range(self.config.num_hidden_layers):
            layer = self.layers[0 if self.config.shared_dictionary else index]
            reconstruction, code = layer(reconstruction, code, pixel_values)
        loss = denoising_loss(reconstruction, labels, self.config.loss_scale)
        return DenoisingOutput(loss=loss, logits=reconstruction)
