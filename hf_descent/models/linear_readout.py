"""Any encoder of transformers under one linear layer: the text classifiers of the paper (section 5)."""

from typing import Literal

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from ..compat import as_config
from ..readout.pooling import pool


@strict
class LinearReadoutConfig(PreTrainedConfig):
    """Configuration of [`LinearReadoutForSequenceClassification`].

    Args:
        encoder_config (`PreTrainedConfig` or `dict`): Configuration of the encoder, of any type that `AutoModel`
            builds. `None`: BERT's.
        pooling (`str`): What the linear layer reads: "cls" (the first token) or "mean" (the mean of all tokens but
            padding).
    """

    model_type = "linear_readout"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: dict | PreTrainedConfig | None = None
    pooling: Literal["cls", "mean"] = "cls"

    def __post_init__(self, **kwargs):
        self.encoder_config = as_config(self.encoder_config, "bert")
        super().__post_init__(**kwargs)

    def get_text_config(self, decoder=None, encoder=None) -> PreTrainedConfig:
        return self.encoder_config.get_text_config(decoder=decoder, encoder=encoder)


class EncoderModel(PreTrainedModel):
    """An encoder without the modules `unused`: DistributedDataParallel refuses weights without a gradient."""

    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    unused: tuple[str, ...] = ("pooler",)

    @classmethod
    def from_encoder(cls, encoder_name_or_path: str, **config_kwargs):
        """A pretrained encoder, as `AutoModel.from_pretrained` takes it, under a new readout, in eval mode.

        `config_kwargs` are other fields of the configuration (`pooling`, `readout`, `num_labels`, ...).
        """
        encoder = AutoModel.from_pretrained(encoder_name_or_path)
        model = cls(cls.config_class(encoder_config=encoder.config, **config_kwargs))
        model.encoder = cls.without_unused(encoder)
        return model.to(encoder.dtype).eval()

    @classmethod
    def without_unused(cls, encoder: PreTrainedModel) -> PreTrainedModel:
        for name in cls.unused:
            if getattr(encoder, name, None) is not None:
                setattr(encoder, name, nn.Identity())
        return encoder


class LinearReadoutForSequenceClassification(EncoderModel):
    """An encoder with ONE linear layer on [CLS] (the paper's DistilBERT and RoBERTa) or on the mean of the tokens.

    The heads of transformers have a hidden layer as well, which the early exits would share.
    """

    config_class = LinearReadoutConfig

    def __init__(self, config: LinearReadoutConfig):
        super().__init__(config)
        self.encoder = self.without_unused(AutoModel.from_config(config.encoder_config))
        self.classifier = nn.Linear(config.encoder_config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder_name_or_path: str, pooling: str = "cls", **config_kwargs):
        return super().from_encoder(encoder_name_or_path, pooling=pooling, **config_kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """
        Args:
            input_ids (`torch.LongTensor` of shape `[batch, seq]`): tokens; or `inputs_embeds` `[batch, seq, hidden]`.
            attention_mask (`torch.Tensor` of shape `[batch, seq]`, *optional*): 0 marks padding.
            labels (`torch.Tensor` of shape `[batch]`, or `[batch, labels]`, *optional*): see `config.problem_type`.
            token_type_ids, kwargs: other inputs of the encoder.
        """
        if token_type_ids is not None:  # not every encoder takes them
            kwargs["token_type_ids"] = token_type_ids
        outputs = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state  # [batch, seq, width]
        found = classify(
            self, hidden, attention_mask, self.config.pooling, labels, num_items_in_batch
        )
        found.hidden_states, found.attentions = outputs.hidden_states, outputs.attentions
        return found


def classify(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    pooling: str,
    labels: torch.Tensor | None,
    num_items: torch.Tensor | None,
) -> SequenceClassifierOutput:
    """Classifies rows `[batch, seq, width]` by the linear layer of a `model`; the loss where there are labels."""
    logits, loss = model.classifier(pool(hidden, mask, pooling)), None  # [batch, labels]
    if labels is not None:
        loss = model.loss_function(
            labels=labels, pooled_logits=logits, config=model.config, num_items_in_batch=num_items
        )
    return SequenceClassifierOutput(loss=loss, logits=logits)
