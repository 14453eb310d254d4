"""Unrolled transformer (UT): each layer is one descent iteration on an energy of the tokens.

Tokens are rows, Y is `[seq, hidden]`. With Z = Y V, W_ij = exp(-||z_i - z_j||^2 / 2) and D_i = sum_j W_ij (j = i
included), layer l maps its input X to

    Y  = X + attention_step * (D^-1 W X - X)    never raises -sum_ij W_ij
    X' = ReLU(Y S + X B),  S symmetric          never raises tr(Y (I - S) Y^T) / 2 - <X B, Y> over Y >= 0, if S >= -I

That the sum of both energies falls over a whole layer is not guaranteed.

Source: Yang, Huang, Wipf (2022), "Transformers from an Optimization Perspective", arXiv 2205.13891; trained with
descent constraints in Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, appendix C.
"""

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.output_capturing import capture_outputs

from .linear_readout import classify
from .unrolling import PatchDenoiser, orthonormal_dct, positive, share, symmetric_attention


@strict
class UTConfig(PreTrainedConfig):
    """Configuration of the unrolled transformer (UT) models; a value outside of its range is refused by the library.

    Args:
        hidden_size (`int`): Width of every iterate. For the denoiser it is the number of values in a patch (256: gray
            16x16 patches).
        num_hidden_layers (`int`): Number of layers: unrolled iterations, each with weights of its own.
        attention_step (`float`): Step size of the attention half-step, in (0, 1]: the iterate moves this share of the
            way to the attention output. 1 is plain softmax attention.
        loss_scale (`float`): Denoiser only: factor of a clip's sum of squared errors in the loss. 1/2 is the paper's
            loss; 1 / (values in a clip * noise variance) makes 1 the loss of the noisy input itself.
        vocab_size (`int`): Classifier only: number of token embeddings. The default is DistilBERT's.
    """

    model_type = "ut"

    hidden_size: int = positive(default=256)
    num_hidden_layers: int = positive(default=5)
    attention_step: float | int = share(default=1.0)
    loss_scale: float | int = positive(default=0.5)
    vocab_size: int = positive(default=30522)

    def __post_init__(self, **kwargs):
        if kwargs.get("norm_energy"):  # an option of earlier versions
            raise ValueError(
                "`norm_energy` is True, which was taken out: load this model with version 0.1."
            )
        super().__post_init__(**kwargs)


class UTLayer(GradientCheckpointingLayer):
    """One iteration; the module docstring has the equations."""

    def __init__(self, config: UTConfig):
        super().__init__()
        shape = (config.hidden_size, config.hidden_size)
        self.attention_step = config.attention_step
        self.projection = nn.Parameter(torch.empty(shape))  # V, [hidden, hidden]
        self.mixing = nn.Parameter(torch.empty(shape))  # A, of which S = (A + A^T) / 2
        self.skip = nn.Parameter(torch.empty(shape))  # B, [hidden, hidden]

    @property
    def symmetric_mixing(self) -> torch.Tensor:
        """S, `[hidden, hidden]`."""
        return (self.mixing + self.mixing.T) / 2  # [hidden, hidden]

    def attend(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The first half-step, from X to Y; both `[batch, seq, hidden]`."""
        projected = hidden_states @ self.projection  # [batch, seq, hidden]
        attended = symmetric_attention(projected, hidden_states, attention_mask)
        # Under autocast the first iterate, the input, stays in float32, and torch.lerp takes one dtype.
        return torch.lerp(hidden_states, attended.to(hidden_states.dtype), self.attention_step)

    def combine(self, attended: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """The second half-step, from Y and X to the next iterate; all `[batch, seq, hidden]`."""
        return F.relu(attended @ self.symmetric_mixing + hidden_states @ self.skip)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The next iterate from X, both `[batch, seq, hidden]`; mask `[batch, seq]`, 0 at tokens not attended to."""
        return self.combine(self.attend(hidden_states, attention_mask), hidden_states)


class UTPreTrainedModel(PreTrainedModel):
    """A stack of layers and a readout, with Xavier initialisation."""

    config: UTConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["UTLayer"]
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": UTLayer}

    @torch.no_grad()
    def _init_weights(self, module):
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                init.zeros_(parameter)
            else:
                init.xavier_uniform_(parameter)


class UTForVideoDenoising(PatchDenoiser, UTPreTrainedModel):
    """Unrolled transformer as a [`PatchDenoiser`]. Pixels must be nonnegative (such as [0, 1]), as the iterates are.

    V starts as the DCT, S and B as I/2. An untrained layer moves a frame `attention_step / 2` of the way to the
    average of the frames similar to it.
    """

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

    def reconstruct(self, pixel_values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            pixel_values = layer(pixel_values)  # [batch, frames, hidden]
        return pixel_values


class UTForSequenceClassification(UTPreTrainedModel):
    """Token embeddings, L layers, the mean of the tokens and one linear readout (the paper's UT for text)."""

    def __init__(self, config: UTConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(UTLayer(config) for _ in range(config.num_hidden_layers))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def from_embeddings(
        cls, model_name_or_path: str, **config_kwargs
    ) -> "UTForSequenceClassification":
        """A UT on the token embeddings of a pretrained model, as the paper's on DistilBERT's; in eval mode.

        The tokenizer of that model goes with the UT. `config_kwargs` are further fields of the configuration
        (`num_hidden_layers`, `num_labels`, ...).
        """
        pretrained = AutoModel.from_pretrained(model_name_or_path)
        table = pretrained.get_input_embeddings().weight  # [vocabulary, hidden]
        sizes = dict(zip(("vocab_size", "hidden_size"), table.shape))
        padding = getattr(pretrained.config, "pad_token_id", None)
        model = cls(UTConfig(**sizes, **{"pad_token_id": padding, **config_kwargs}))
        with torch.no_grad():
            model.embed_tokens.weight.copy_(table)
        return model.eval()

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
        """
        hidden_states = inputs_embeds
        if inputs_embeds is None:
            hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask)  # [batch, seq, hidden]
        return classify(self, hidden_states, attention_mask, "mean", labels, num_items_in_batch)
