from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec


POOLING = ("cls", "mean")


@strict
class LinearReadoutConfig(PreTrainedConfig):
    """Configuration of [`LinearReadoutForSequenceClassification`].

    Args:
        encoder_config (`PreTrainedConfig` or `dict`, *optional*):
            Configuration of the encoder, of any type that `AutoModel` builds. `None`: BERT's.
        pooling (`str`, *optional*, defaults to `"cls"`):
            What the linear layer reads: "cls" (the first token) or "mean" (the mean of all tokens but padding).

    Raises:
        ValueError: another `pooling`.
    """

    model_type = "linear_readout"
    sub_configs_defaults = {"encoder_config": SubConfigSpec(config_class=AutoConfig, model_type="bert")}

    encoder_config: dict | PreTrainedConfig | None = None
    pooling: str = "cls"

    def __post_init__(self, **kwargs):
        if self.pooling not in POOLING:
            raise ValueError(f"`pooling` is {self.pooling!r}; choose one of {', '.join(POOLING)}.")
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder=None, encoder=None) -> PreTrainedConfig:
        return self.encoder_config.get_text_config(decoder=decoder, encoder=encoder)
