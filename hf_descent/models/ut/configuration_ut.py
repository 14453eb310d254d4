from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class UTConfig(PreTrainedConfig):
    """Configuration of the unrolled transformer (UT) models.

    Args:
        hidden_size (`int`, *optional*, defaults to 256):
            Width of every iterate. For the denoiser it is the number of values in a patch (256: gray 16x16 patches).
        num_hidden_layers (`int`, *optional*, defaults to 5):
            Number of layers: unrolled iterations, each with weights of its own.
        attention_step (`float`, *optional*, defaults to 1.0):
            Step size of the attention half-step, in (0, 1]: the iterate moves this share of the way to the attention
            output. 1 is plain softmax attention.
        norm_energy (`bool`, *optional*, defaults to `False`):
            Whether the energy of the attention half-step has the norm term ||Z||_F^2 / 2, which multiplies the
            attention output by 2 D_i / (2 D_i + 1); plain attention can raise that energy.
        loss_scale (`float`, *optional*, defaults to 0.5):
            Denoiser only: factor of a clip's sum of squared errors in the loss. 1/2 is the paper's loss;
            1 / (values in a clip * noise variance) makes 1 the loss of the noisy input itself.
        vocab_size (`int`, *optional*, defaults to 30522):
            Classifier only: number of token embeddings. The default is DistilBERT's.

    Raises:
        ValueError: a size or `loss_scale` that is not positive, an `attention_step` outside of (0, 1].
    """

    model_type = "ut"

    hidden_size: int = 256
    num_hidden_layers: int = 5
    attention_step: float | int = 1.0
    norm_energy: bool = False
    loss_scale: float | int = 0.5
    vocab_size: int = 30522

    def __post_init__(self, **kwargs):
        if not 0 < self.attention_step <= 1:
            raise ValueError(f"`attention_step` is {self.attention_step}; it must be in (0, 1] (1: plain attention).")
        for name in ("hidden_size", "num_hidden_layers", "loss_scale", "vocab_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be positive.")
        super().__post_init__(**kwargs)
