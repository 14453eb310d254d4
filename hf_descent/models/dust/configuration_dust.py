from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class DustConfig(PreTrainedConfig):
    """Configuration of [`DustForVideoDenoising`].

    Sparsity, coupling and curvature are fixed, not learned: learning them satisfies descent constraints trivially.

    Args:
        hidden_size (`int`, *optional*, defaults to 256):
            Number p of values in a patch (256: gray 16x16 patches).
        dictionary_size (`int`, *optional*, defaults to 512):
            Number K >= p of values in a code: columns of the dictionary.
        num_hidden_layers (`int`, *optional*, defaults to 5):
            Number of layers: unrolled iterations.
        shared_dictionary (`bool`, *optional*, defaults to `False`):
            Whether all layers share one dictionary, as the paper's unconstrained models do; its constrained ones have
            one per layer.
        sparsity (`float`, *optional*, defaults to 0.01):
            Weight >= 0 of the codes' absolute values in the energy, for pixels in [0, 1].
        coupling (`float`, *optional*, defaults to 1.0):
            Weight >= 0 of the attention energy of the frames' reconstructions. 0: no attention.
        curvature (`float`, *optional*, defaults to 1.0):
            c > 0, the inverse step size; at least the largest eigenvalue of D^T D, which is 1 at initialisation.
        loss_scale (`float`, *optional*, defaults to 0.5):
            Factor of a clip's sum of squared errors in the loss. 1/2 is the paper's loss.

    Raises:
        ValueError: a value outside of the range given here, or `dictionary_size` below `hidden_size`.
    """

    model_type = "dust"

    hidden_size: int = 256
    dictionary_size: int = 512
    num_hidden_layers: int = 5
    shared_dictionary: bool = False
    sparsity: float | int = 0.01
    coupling: float | int = 1.0
    curvature: float | int = 1.0
    loss_scale: float | int = 0.5

    def __post_init__(self, **kwargs):
        for name in ("hidden_size", "num_hidden_layers", "curvature", "loss_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be positive.")
        for name in ("sparsity", "coupling"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must not be negative.")
        if self.dictionary_size < self.hidden_size:
            raise ValueError(
                f"`dictionary_size` is {self.dictionary_size}; give at least `hidden_size` = {self.hidden_size} "
                "columns, or the codes cannot represent every patch."
            )
        super().__post_init__(**kwargs)
