"""Unrolled transformer (UT): each layer is one descent iteration on an energy of the tokens.

Tokens are rows, Y is `[seq, hidden]`. With Z = Y V, W_ij = exp(-||z_i - z_j||^2 / 2) and D_i = sum_j W_ij (j = i
included), layer l maps its input X to

    Y  = X + attention_step * (D^-1 W X - X)        never raises -sum_ij W_ij
    X' = ReLU(Y S + X B),  S symmetric              never raises tr(Y (I - S) Y^T) / 2 - <X B, Y>, if S >= -I

Source: Yang, Huang, Wipf (2022), "Transformers from an Optimization Perspective", arXiv 2205.13891; trained with
descent constraints in Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, appendix C.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import ModelOutput
from transformers.utils.output_capturing import capture_outputs

from .configuration_ut import UTConfig


@dataclass
class DenoisingOutput(ModelOutput):
    """Output of a denoiser: `logits` is the reconstruction, shaped like `pixel_values`."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


def symmetric_attention(
    projected: torch.Tensor, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Softmax attention of one projection with itself and key weights exp(-||z_j||^2 / 2): D^-1 W X.

    In the projected space this is attention with Q = K = V: `symmetric_attention(z, y) V` is
    `symmetric_attention(z, z)` for z = y V. Averaging the tokens themselves undoes V for any V, also a singular one.

    Args:
        projected (`torch.Tensor` of shape `[batch, seq, width]`): Z, queries and keys.
        tokens (`torch.Tensor` of shape `[batch, seq, hidden]`): X, what is averaged.
        attention_mask (`torch.Tensor` of shape `[batch, seq]`, *optional*): 0 where a token is not to be attended to.

    Returns:
        `torch.Tensor` of shape `[batch, seq, hidden]`.
    """
    bias = -projected.square().sum(-1) / 2  # [batch, seq]; exp(z_i . z_j - ||z_j||^2 / 2) is W_ij times a factor of i
    if attention_mask is not None:
        bias = bias.masked_fill(attention_mask == 0, torch.finfo(bias.dtype).min)
    projected, tokens = projected[:, None], tokens[:, None]  # [batch, 1 head, seq, ...]
    bias = bias[:, None, None]  # [batch, 1, 1, seq]
    return F.scaled_dot_product_attention(projected, projected, tokens, attn_mask=bias, scale=1.0)[:, 0]


def explicit_symmetric_attention(
    projected: torch.Tensor, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """[`symmetric_attention`] from the distances themselves, with memory `[batch, seq, seq, width]`: the reference."""
    distances = (projected[:, :, None] - projected[:, None]).square().sum(-1)  # [batch, seq, seq]
    if attention_mask is not None:
        distances = distances.masked_fill(attention_mask[:, None] == 0, torch.finfo(distances.dtype).max)
    return (-distances / 2).softmax(-1) @ tokens


def orthonormal_dct(size: int) -> torch.Tensor:
    """The orthonormal DCT-II matrix `[size, size]`: row k is the cosine of frequency k."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * index[:, None] * (index + 0.5)) * math.sqrt(2 / size)  # [frequency, sample]
    matrix[0] /= math.sqrt(2)
    return matrix.float()


class UTLayer(GradientCheckpointingLayer):
    """One iteration; see the module's docstring for the equations.

    Attributes:
        projection (`nn.Parameter` of shape `[hidden, hidden]`): V.
        mixing (`nn.Parameter` of shape `[hidden, hidden]`): A, of which S = (A + A^T) / 2.
        skip (`nn.Parameter` of shape `[hidden, hidden]`): B.
    """

    def __init__(self, config: UTConfig):
        super().__init__()
        shape = (config.hidden_size, config.hidden_size)
        self.attention_step = config.attention_step
        self.attention = (
            explicit_symmetric_attention if config._attn_implementation == "eager" else symmetric_attention
        )
        self.projection = nn.Parameter(torch.empty(shape))
        self.mixing = nn.Parameter(torch.empty(shape))
        self.skip = nn.Parameter(torch.empty(shape))

    @property
    def symmetric_mixing(self) -> torch.Tensor:
        return (self.mixing + self.mixing.T) / 2  # [hidden, hidden]

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        attended = self.attention(hidden_states @ self.projection, hidden_states, attention_mask)
        moved = hidden_states + self.attention_step * (attended - hidden_states)  # [batch, seq, hidden]
        return F.relu(moved @ self.symmetric_mixing + hidden_states @ self.skip)  # [batch, seq, hidden]


class UTPreTrainedModel(PreTrainedModel):
    """What the UT models share. A model is its stack of layers and a readout; Xavier initialisation."""

    config: UTConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["UTLayer"]
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": UTLayer}

    @torch.no_grad()
    def _init_weights(self, module):
        for name, parameter in module.named_parameters(recurse=False):
            init.zeros_(parameter) if name == "bias" else init.xavier_uniform_(parameter)


class UTForVideoDenoising(UTPreTrainedModel):
    """Denoises the patches that a clip's frames show at one place. Each iterate is a reconstruction; there is no head.

    Pixels must be scaled to be nonnegative (such as [0, 1]), as the iterates are. V starts as the DCT, S and B as I/2:
    an untrained layer moves a frame by `attention_step / 2` of the way to the average of the frames similar to it.
    """

    main_input_name = "pixel_values"
    accepts_loss_kwargs = False  # its loss is a mean over the clips of the batch at hand

    def __init__(self, config: UTConfig):
        super().__init__(config)
        self.layers = nn.ModuleList(UTLayer(config) for _ in range(config.num_hidden_layers))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, UTLayer):
            init.copy_(module.projection, orthonormal_dct(self.config.hidden_size).T)
            for parameter in (module.mixing, module.skip):
                init.copy_(parameter, torch.eye(self.config.hidden_size) / 2)

    @capture_outputs
    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **kwargs) -> DenoisingOutput:
        """
        Args:
            pixel_values (`torch.Tensor` of shape `[batch, frames, hidden_size]`): noisy patches, flattened.
            labels (`torch.Tensor` of shape `[batch, frames, hidden_size]`, *optional*): clean patches.

        Returns:
            [`DenoisingOutput`]: the loss is `loss_scale * sum_t ||x_t - xhat_t||^2`, averaged over the clips.

        Raises:
            ValueError: the patches have not `hidden_size` values.
        """
        size = self.config.hidden_size
        if pixel_values.dim() != 3 or pixel_values.shape[-1] != size:
            raise ValueError(
                f"`pixel_values` has shape {list(pixel_values.shape)}; give [batch, frames, {size}], or set "
                "`hidden_size` to the number of values in a patch (channels x height x width)."
            )
        hidden_states = pixel_values
        for layer in self.layers:
            hidden_states = layer(hidden_states)  # [batch, frames, hidden]
        loss = None
        if labels is not None:
            squared_error = F.mse_loss(hidden_states.float(), labels.float(), reduction="sum")
            loss = self.config.loss_scale * squared_error / len(labels)
        return DenoisingOutput(loss=loss, logits=hidden_states)


class UTForSequenceClassification(UTPreTrainedModel):
    """Token embeddings, L layers, the mean of the tokens and one linear readout (the paper's UT for text)."""

    def __init__(self, config: UTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(UTLayer(config) for _ in range(config.num_hidden_layers))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, embeddings: nn.Embedding):
        self.embed_tokens = embeddings

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[batch, seq]`): tokens; or `inputs_embeds` `[batch, seq, hidden]`.
            attention_mask (`torch.Tensor` of shape `[batch, seq]`, *optional*): 0 marks padding, which is neither
                attended to nor pooled.
            labels (`torch.Tensor` of shape `[batch]`, or `[batch, labels]`, *optional*): see `config.problem_type`.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds` are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either `input_ids` or `inputs_embeds`.")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)  # [batch, seq, hidden]
        weights = hidden_states.new_ones(hidden_states.shape[:2])  # [batch, seq]
        if attention_mask is not None:
            weights = attention_mask.to(weights.dtype)
        pooled = (weights[..., None] * hidden_states).sum(1) / weights.sum(1, keepdim=True)  # [batch, hidden]
        logits = self.classifier(pooled)  # [batch, labels]
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, num_items_in_batch=num_items_in_batch
            )
        return SequenceClassifierOutput(loss=loss, logits=logits)
