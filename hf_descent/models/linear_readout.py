"""Any encoder of transformers under one linear layer: the text classifiers of the paper (section 5).

[`give_linear_readout`] makes such a model of a classifier of transformers. That is what `readout="mean"` and "cls" of
the trainer do, so that the model that is saved, cut or pushed is the one that was trained and measured. No class of
transformers would do: none has a setting for one linear layer on the mean of all tokens but padding.
"""

import inspect
from typing import Literal

import torch
from accelerate.hooks import add_hook_to_module
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils.generic import can_return_tuple

from ..compat import as_config
from ..readout.pooling import POOLINGS, linear_layers, pool


@strict
class LinearReadoutConfig(PreTrainedConfig):
    """Configuration of [`LinearReadoutForSequenceClassification`] and its like for images.

    Args:
        encoder_config (`PreTrainedConfig` or `dict`): Configuration of the encoder, of any type that `AutoModel`
            builds. `None`: BERT's.
        pooling (`str`): What the linear layer reads: "cls" (the first token) or "mean" (the mean of all tokens but
            padding).
        classifier_bias (`bool`): Whether the linear layer has a bias.
    """

    model_type = "linear_readout"
    sub_configs = {"encoder_config": AutoConfig}

    encoder_config: dict | PreTrainedConfig | None = None
    pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = True

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


class LinearReadoutModel(EncoderModel):
    """An encoder with ONE linear layer on its first token or on the mean of its tokens."""

    config_class = LinearReadoutConfig

    def __init__(self, config: LinearReadoutConfig):
        super().__init__(config)
        self.encoder = self.without_unused(AutoModel.from_config(config.encoder_config))
        width = config.encoder_config.hidden_size
        self.classifier = nn.Linear(width, config.num_labels, bias=config.classifier_bias)
        self.post_init()

    @classmethod
    def from_encoder(cls, encoder_name_or_path: str, pooling: str = "cls", **config_kwargs):
        return super().from_encoder(encoder_name_or_path, pooling=pooling, **config_kwargs)

    def classify(
        self,
        labels: torch.Tensor | None,
        num_items_in_batch: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        **inputs,
    ) -> SequenceClassifierOutput:
        """Classifies rows by what the encoder makes of `attention_mask` and the other `inputs` that are given."""
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask

        inputs = {name: value for name, value in inputs.items() if value is not None}
        encoded = self.encoder(**inputs, return_dict=True)
        hidden = encoded.last_hidden_state  # [batch, seq, width]
        outputs = classify(
            self, hidden, attention_mask, self.config.pooling, labels, num_items_in_batch
        )
        outputs.hidden_states = encoded.hidden_states
        outputs.attentions = encoded.attentions
        return outputs


class LinearReadoutForSequenceClassification(LinearReadoutModel):
    """A text encoder with ONE linear layer on [CLS] (the paper's DistilBERT and RoBERTa) or on the mean of the tokens.

    The heads of transformers have a hidden layer as well, which the early exits would share.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
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
            token_type_ids, position_ids, kwargs: other inputs of the encoder.
        """
        return self.classify(
            labels,
            num_items_in_batch,
            attention_mask,
            input_ids=input_ids,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class LinearReadoutForImageClassification(LinearReadoutModel):
    """An image encoder with ONE linear layer on its first token or on the mean of all its tokens."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        num_items_in_batch: torch.Tensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutput:
        """`pixel_values` is `[batch, channels, height, width]`, `attention_mask` of tokens `[batch, tokens]`;
        `kwargs` are other inputs of the encoder, and `labels` as of a text classifier."""
        return self.classify(
            labels, num_items_in_batch, attention_mask, pixel_values=pixel_values, **kwargs
        )


# By the end of the names of the classifiers that they can take the place of.
KINDS = {
    "ForSequenceClassification": LinearReadoutForSequenceClassification,
    "ForImageClassification": LinearReadoutForImageClassification,
}
# How arguments of a classifier begin that no data set has, or that a single linear layer has no use for.
NO_COLUMNS = (
    "self", "output_", "return_dict", "use_", "past_key_values", "cache", "logits_to_keep", "head_mask", "mems",
    "perm_mask", "target_mapping", "input_mask", "num_hashes", "interpolate_pos_encoding", "bool_masked_pos",
)  # fmt: skip
# Fields of a classifier's config that its linear readout keeps.
KEPT_FIELDS = ("id2label", "label2id", "problem_type", "pad_token_id", "noise_sigma")


def give_linear_readout(model: PreTrainedModel, pooling: str) -> None:
    """Makes a classifier of transformers, in place, one with a single linear layer on the output of its encoder.

    `model` keeps its encoder and the last linear layer of its head, and becomes a
    [`LinearReadoutForSequenceClassification`], or its like for images. What is between the two (a pooler, a
    hidden layer) goes. Whoever holds the model, holds the new one: it is saved, cut and pushed as such.

    Args:
        model (`PreTrainedModel`): A classifier of transformers without adapters, or one with a linear readout, of
            which only the pooling changes.
        pooling (`str`): "mean" (the mean of all tokens but padding) or "cls" (the first token).

    ValueError for another `pooling`, or a model that cannot be read so.
    """
    if pooling not in POOLINGS:
        raise ValueError(
            f"`readout` is {pooling!r}; give 'mean', 'cls' or `readout(model, hidden, inputs)`."
        )

    if isinstance(model, LinearReadoutModel):
        model.config.pooling = pooling
        return

    kind = _kind_of(model, pooling)
    encoder = getattr(model, model.base_model_prefix, None)
    head = _last_linear_layer(model, encoder)
    fault = _fault(model, kind, encoder, head)
    if fault:
        raise ValueError(f"`readout` is {pooling!r}, but {type(model).__name__} {fault}.")

    fields = {name: getattr(model.config, name, None) for name in KEPT_FIELDS}
    kept = {name: value for name, value in fields.items() if value is not None}
    config = LinearReadoutConfig(
        encoder_config=encoder.config,
        pooling=pooling,
        classifier_bias=head.bias is not None,
        **kept,
    )
    config.name_or_path = model.config.name_or_path

    with torch.device("meta"):  # its weights are those of `model`
        converted = kind(config)

    converted.encoder = kind.without_unused(encoder)
    converted.classifier = head
    converted.train(model.training)

    # Where it lies, and a loss that the user chose.
    for name in ("hf_device_map", "_loss_function"):
        if name in vars(model):
            setattr(converted, name, vars(model)[name])

    # That of a model on several devices, which moves the inputs of a call.
    hook = getattr(model, "_hf_hook", None)

    # Not a new object: the script would go on to save and cut the old one, whose head is not trained.
    model.__class__ = kind
    vars(model).clear()
    vars(model).update(vars(converted))
    if hook is not None:
        add_hook_to_module(model, hook)


def _kind_of(model: nn.Module, pooling: str) -> type[LinearReadoutModel]:
    """The class that takes the place of that of `model`."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"`readout` is {pooling!r}, but {name} is no classifier of transformers, or has adapters; call "
            "`hf_descent.models.give_linear_readout(model, ...)` before `get_peft_model`, and leave `readout` out."
        )

    for ending, kind in KINDS.items():
        if name.endswith(ending) and type(model).__module__.startswith("transformers.models."):
            return kind

    raise ValueError(
        f"`readout` is {pooling!r}, but {name} is no classifier of transformers for texts or images; "
        "give `readout(model, hidden, inputs)`."
    )


def _last_linear_layer(model: PreTrainedModel, encoder: nn.Module | None) -> nn.Linear | None:
    """The last linear layer outside the encoder with one output per label."""
    parts = [child for child in model.children() if child is not encoder]
    layers = [layer for part in parts for layer in linear_layers(part, model.config.num_labels)]
    return layers[-1] if layers else None


def _fault(model: PreTrainedModel, kind: type, encoder: nn.Module | None, head) -> str | None:
    """Why a classifier cannot be one with a linear readout, as the end of a sentence; `None` if it can."""
    if head is None:
        return "has no linear layer with one output per label"
    if encoder is None or MODEL_MAPPING.get(type(encoder.config), None) is not type(encoder):
        return "has no encoder that `AutoModel` loads"
    if model.config.is_encoder_decoder:
        return "has an encoder and a decoder: use its own head"
    if getattr(model, "hf_quantizer", None) is not None:
        return "is quantized: load it in full precision"
    if type(head) is not nn.Linear or head.in_features != encoder.config.hidden_size:
        return "has a last layer that does not fit the width of its encoder"

    read = inspect.signature(type(model).forward).parameters.keys()
    lost = read - inspect.signature(kind.forward).parameters.keys()
    lost = sorted(name for name in lost if not name.startswith(NO_COLUMNS))
    if lost:
        return f"reads {', '.join(lost)}, too, for which {kind.__name__} has no place"

    return None


def classify(
    model: PreTrainedModel,
    hidden: torch.Tensor,
    mask: torch.Tensor | None,
    pooling: str,
    labels: torch.Tensor | None,
    num_items: torch.Tensor | None,
) -> SequenceClassifierOutput:
    """Classifies rows `[batch, seq, width]` by the linear layer of a `model`; the loss where there are labels."""
    logits = model.classifier(pool(hidden, mask, pooling))  # [batch, labels]
    loss = None
    if labels is not None:
        loss = model.loss_function(
            labels=labels, pooled_logits=logits, config=model.config, num_items_in_batch=num_items
        )

    return SequenceClassifierOutput(loss=loss, logits=logits)
