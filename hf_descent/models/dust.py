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
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from .unrolling import PatchDenoiser, nonnegative, orthonormal_dct, positive, symmetric_attention


@strict
class DustConfig(PreTrainedConfig):
    """Configuration of [`DustForVideoDenoising`]; a value outside of its range is refused by the library.

    Sparsity, coupling and curvature are fixed, not learned: learning them satisfies descent constraints trivially.

    Args:
        hidden_size (`int`): Number p of values in a patch (256: gray 16x16 patches).
        dictionary_size (`int`): Number K >= p of values in a code: columns of the dictionary.
        num_hidden_layers (`int`): Number of layers: unrolled iterations.
        shared_dictionary (`bool`): Whether all layers share one dictionary, as the paper's unconstrained models do;
            its constrained ones have one per layer.
        sparsity (`float`): Weight >= 0 of the codes' absolute values in the energy, for pixels in [0, 1].
        coupling (`float`): Weight >= 0 of the attention energy of the frames' reconstructions. 0: no attention.
        curvature (`float`): c > 0, the inverse step size; at least the largest eigenvalue of D^T D, which is 1 at
            initialisation.
        loss_scale (`float`): Factor of a clip's sum of squared errors in the loss. 1/2 is the paper's loss.
    """

    model_type = "dust"

    hidden_size: int = positive(default=256)
    dictionary_size: int = positive(default=512)
    num_hidden_layers: int = positive(default=5)
    shared_dictionary: bool = False
    sparsity: float | int = nonnegative(default=0.01)
    coupling: float | int = nonnegative(default=1.0)
    curvature: float | int = positive(default=1.0)
    loss_scale: float | int = positive(default=0.5)


class DustLayer(GradientCheckpointingLayer):
    """One iteration; the module docstring has the equations."""

    def __init__(self, config: DustConfig):
        super().__init__()
        self.sparsity = config.sparsity
        self.coupling = config.coupling
        self.curvature = config.curvature
        self.dictionary = nn.Parameter(torch.empty(config.hidden_size, config.dictionary_size))  # D

    def forward(
        self, reconstruction: torch.Tensor, code: torch.Tensor, pixel_values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next reconstruction `[batch, frames, hidden]` and code `[batch, frames, dictionary_size]`, from those of
        the layer before and the noisy patches `[batch, frames, hidden]`."""
        if self.coupling:
            code = symmetric_attention(
                reconstruction, code, self_weight=self.curvature / (2 * self.coupling)
            )
        residual = pixel_values - code @ self.dictionary.T  # [batch, frames, hidden]
        code = code + residual @ self.dictionary / self.curvature
        code = F.softshrink(
            code, self.sparsity / self.curvature
        )  # [batch, frames, dictionary_size]
        return code @ self.dictionary.T, code


class DustForVideoDenoising(PatchDenoiser, PreTrainedModel):
    """Deep unfolded transformer as a [`PatchDenoiser`]; `hidden_states` are the reconstructions h_t D^T.

    The codes start at h = x D, which reconstructs the noisy patches. Every D starts at the overcomplete DCT.
    """

    config: DustConfig
    _no_split_modules = ["DustLayer"]
    _can_record_outputs = {"hidden_states": DustLayer}

    def __init__(self, config: DustConfig):
        super().__init__(config)
        distinct = 1 if config.shared_dictionary else config.num_hidden_layers
        self.layers = nn.ModuleList(DustLayer(config) for _ in range(distinct))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, DustLayer):
            # The first rows of the inverse DCT of `size` samples: a tight frame, D D^T = I; orthonormal when complete.
            num_values, size = module.dictionary.shape
            init.copy_(module.dictionary, orthonormal_dct(size).T[:num_values])

    def reconstruct(self, pixel_values: torch.Tensor) -> torch.Tensor:
        reconstruction = pixel_values
        code = pixel_values @ self.layers[0].dictionary
        for index in range(self.config.num_hidden_layers):
            layer = self.layers[index % len(self.layers)]
            reconstruction, code = layer(reconstruction, code, pixel_values)
        return reconstruction
