"""A spread of tiny architectures, with inputs, and the truth of a layer's readout: the model with that many layers."""

import copy
from collections import Counter

import torch
import transformers
from torch import nn


LAYERS = 3
TEXT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "pad_token_id": 1,
}  # fmt: skip
DECODER = TEXT | {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3, "head_dim": 8}
GPT = {
    "vocab_size": 99,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 40,
    "pad_token_id": 1,
}
XLM = {
    "vocab_size": 99,
    "emb_dim": 32,
    "n_layers": LAYERS,
    "n_heads": 4,
    "max_position_embeddings": 40,
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
T5_DECODER = T5 | {"num_decoder_layers": LAYERS}
BART = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": LAYERS,
    "max_position_embeddings": 40,
}
BART |= {
    f"{part}_{size}": n
    for part in ("encoder", "decoder")
    for size, n in (("attention_heads", 4), ("ffn_dim", 48))
}
IMAGE = TEXT | {"image_size": 16, "patch_size": 4}
AUDIO = TEXT | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
}
AUDIO |= {
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
}
MAMBA = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4}
DEBERTA = TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 0}
XLNET = {
    "vocab_size": 99,
    "d_model": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "d_inner": 48,
    "pad_token_id": 1,
}
# The field that holds the depth is the first of these that is given.
DEPTHS = (
    "num_decoder_layers",
    "decoder_layers",
    "decoder_num_hidden_layers",
    "num_hidden_layers",
    "num_layers",
)
DEPTHS += ("n_layers", "n_layer")

# class -> config fields
MODELS = {
    # causal LM: final norms, softcap, scaled logits, parallel blocks, state spaces, routers
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER | {"sliding_window": 4},
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER,
    "Gemma2ForCausalLM": DECODER | {"final_logit_softcapping": 5.0, "sliding_window": 4},
    "GraniteForCausalLM": DECODER | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "CohereForCausalLM": DECODER | {"logit_scale": 0.25},
    "Olmo2ForCausalLM": DECODER,
    "PhiForCausalLM": DECODER,
    "StableLmForCausalLM": DECODER,
    "GPTNeoXForCausalLM": TEXT,
    "FalconForCausalLM": TEXT,
    "OPTForCausalLM": TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "BloomForCausalLM": {"vocab_size": 99, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
    "GPT2LMHeadModel": GPT,
    "MambaForCausalLM": MAMBA,
    "MixtralForCausalLM": DECODER | {"num_local_experts": 4, "output_router_logits": True},
    "Qwen2MoeForCausalLM": DECODER
    | {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True},
    "XLMWithLMHeadModel": XLM,
    # masked LM
    "BertForMaskedLM": TEXT,
    "AlbertForMaskedLM": TEXT | {"embedding_size": 16},
    "DistilBertForMaskedLM": {
        "vocab_size": 99,
        "dim": 32,
        "n_layers": LAYERS,
        "n_heads": 4,
        "hidden_dim": 48,
    },
    "ElectraForMaskedLM": TEXT | {"embedding_size": 16},
    "ModernBertForMaskedLM": TEXT | {"local_attention": 4},
    "FNetForMaskedLM": TEXT,
    # classification, QA, choice
    "BertForSequenceClassification": TEXT,
    "RobertaForSequenceClassification": TEXT,
    "DebertaV2ForSequenceClassification": DEBERTA,
    "XLNetForSequenceClassification": XLNET,
    "FlaubertForSequenceClassification": XLM,
    "SqueezeBertForSequenceClassification": TEXT | {"embedding_size": 32},
    "LlamaForSequenceClassification": DECODER,
    "GPT2ForSequenceClassification": GPT,
    "BartForSequenceClassification": BART,
    "RobertaForTokenClassification": TEXT,
    "T5ForTokenClassification": T5,
    "BertForQuestionAnswering": TEXT | {"num_labels": 2},
    "MPNetForQuestionAnswering": TEXT | {"num_labels": 2},
    "RobertaForMultipleChoice": TEXT,
    # encoder-decoder: the decoder is the stack
    "T5ForConditionalGeneration": T5_DECODER | {"num_layers": 2},
    "BartForConditionalGeneration": BART,
    # images, audio
    "ViTForImageClassification": IMAGE,
    "DeiTForImageClassification": IMAGE,
    "BeitForImageClassification": IMAGE,
    "Dinov2ForImageClassification": IMAGE,
    "Wav2Vec2ForSequenceClassification": AUDIO,
    "HubertForSequenceClassification": AUDIO,
}

# One of each kind: of positions (table, rotary, ALiBi, relative, none), of stack (shared layers, experts, state space,
# encoder-decoder), of head and of input.
FAMILIES = [
    "LlamaForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "GPT2LMHeadModel", "MambaForCausalLM",
    "MixtralForCausalLM", "XLMWithLMHeadModel", "AlbertForMaskedLM", "FNetForMaskedLM",
    "RobertaForSequenceClassification", "DebertaV2ForSequenceClassification", "XLNetForSequenceClassification",
    "LlamaForSequenceClassification", "BartForSequenceClassification", "T5ForTokenClassification",
    "BertForQuestionAnswering", "RobertaForMultipleChoice", "T5ForConditionalGeneration",
    "BartForConditionalGeneration", "ViTForImageClassification", "BeitForImageClassification",
    "Wav2Vec2ForSequenceClassification",
]  # fmt: skip

# Encoder-decoders with an encoder of three layers; the decoder is the stack.
NO_DEPTH = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"}
ENC_DEC = BART | {"encoder_layers": 3, "num_experts": 2, "num_global_tokens": 2}
ENC_DEC |= {
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "expert_capacity": 8,
    "attention_window": 4,
}
ENC_DEC |= {"attention_type": "original_full", "block_size": 4}
ENC_DEC |= {f"max_{part}_position_embeddings": 40 for part in ("encoder", "decoder")}
SPEECH = ENC_DEC | {
    "num_mel_bins": 8,
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "conv_kernel_sizes": (3, 3),
}
SPEECH |= {"max_source_positions": 40, "max_target_positions": 40, "pad_token_id": 1}
SWITCH = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
PROPHET = NO_DEPTH | {
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
PROPHET |= {
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "decoder_start_token_id": 2,
}
MOONSHINE = NO_DEPTH | {
    f"{part}_{size}": n
    for part in ("encoder", "decoder")
    for size, n in (
        ("num_hidden_layers", 3),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 4),
    )
}
SEAMLESS = ENC_DEC | {"hidden_size": 32, "t2u_vocab_size": 99, "char_vocab_size": 99}
SEAMLESS |= {f"t2u_{part}_layers": 1 for part in ("encoder", "decoder")} | {
    "speech_encoder_layers": 1
}
T5_LIKE = ("T5", "MT5", "UMT5", "LongT5", "SwitchTransformers")
BART_LIKE = (
    "Bart", "MBart", "Pegasus", "PegasusX", "BigBirdPegasus", "Blenderbot", "BlenderbotSmall", "M2M100", "Mvp",
)  # fmt: skip
BART_LIKE += ("PLBart", "LED", "NllbMoe")
ENCODER_DECODERS = {
    **{f"{name}ForConditionalGeneration": T5_DECODER | SWITCH for name in T5_LIKE},
    **{f"{name}ForConditionalGeneration": ENC_DEC for name in BART_LIKE},
    **{f"{name}ForConditionalGeneration": SPEECH for name in ("Whisper", "Speech2Text")},
    "MarianMTModel": ENC_DEC | {"pad_token_id": 1},
    "FSMTForConditionalGeneration": ENC_DEC | {"src_vocab_size": 99, "tgt_vocab_size": 99},
    "ProphetNetForConditionalGeneration": PROPHET,
    "MoonshineForConditionalGeneration": MOONSHINE,
    "SeamlessM4TForTextToText": SEAMLESS,
    "SeamlessM4Tv2ForTextToText": SEAMLESS,
    "MBartForSequenceClassification": ENC_DEC,
    "T5ForSequenceClassification": T5_DECODER,
    "T5ForQuestionAnswering": T5_DECODER,
}
SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [2, 2],
    "window_size": 2,
}
CONVNEXT = {"image_size": 32, "hidden_sizes": [4, 8, 8], "depths": [1, 1, 1], "num_stages": 3}
FUNNEL = {
    "vocab_size": 99,
    "d_model": 16,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 16,
    "block_sizes": [1, 1, 1],
}
REFUSED = {  # whose layers differ in shape
    "SwinForImageClassification": SWIN,
    "ConvNextForImageClassification": CONVNEXT,
    "ResNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
    },
    "PoolFormerForImageClassification": {
        "image_size": 32,
        "depths": [1] * 4,
        "hidden_sizes": [4, 8, 8, 8],
    },
    "FunnelForSequenceClassification": FUNNEL,
    "CanineForSequenceClassification": TEXT,
}


def depth_of(fields):
    return next(name for name in DEPTHS if name in fields)


def build(name, fields):
    """The model in eval mode with weights of order one: at the usual 0.02, layers hardly differ."""
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_for(model, with_labels=False):
    torch.manual_seed(1)
    name = type(model).__name__
    if model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", 32)
        return {"pixel_values": torch.randn(2, 3, size, size)}
    if model.main_input_name == "input_values":
        batch = {"input_values": torch.randn(2, 1200 if name.startswith("Moonshine") else 400)}
    elif model.main_input_name == "input_features" and "Text" not in name.split("For")[1]:
        batch = {
            "input_features": torch.randn(2, *((8, 80) if name.startswith("Whisper") else (24, 8)))
        }
    else:
        shape = (2, 3, 9) if "MultipleChoice" in name else (2, 9)
        batch = {"input_ids": torch.randint(5, 99, shape)}  # [batch, (choices,) seq]
    if (
        "attention_mask" in model.forward.__code__.co_varnames
        and "Mamba" not in name
        and "input_ids" in batch
    ):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][-1, ..., -2:] = 0
        batch["input_ids"][-1, ..., -2:] = 1
    if getattr(model.config, "is_encoder_decoder", False):
        if "SequenceClassification" in name:
            batch["input_ids"][:, 6] = model.config.eos_token_id
        elif "QuestionAnswering" not in name and "TokenClassification" not in name:
            batch["decoder_input_ids"] = torch.randint(5, 99, (2, 5))
    if with_labels:
        batch["labels"] = batch["input_ids"].clone() if "LM" in name else torch.randint(0, 2, (2,))
    return batch


def truncated(model, fields, layer):
    """A new model with `layer` layers and the first layers' weights; `fields` are those of the whole model."""
    config = copy.deepcopy(model.config)
    setattr(config, depth_of(fields), layer)
    if "layer_types" in vars(config):
        config.layer_types = config.layer_types[:layer]
    short = type(model)(config).eval()
    weights = model.state_dict()
    short.load_state_dict({name: weights[name] for name in short.state_dict()})
    return short


class ByPlace(nn.Module):
    """A model of one's own: no config, and (loss, logits) without names."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.model(input_ids, attention_mask=attention_mask, labels=labels).to_tuple()

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()


class TwoStage(nn.Module):
    """Plain module: embeddings, a stack, dropout and a head. Its naive readouts are written out below."""

    def __init__(self, dropout=0.0, inplace=False):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.dropout = nn.Dropout(dropout, inplace=inplace)
        self.head = nn.Linear(8, 3)
        self.calls = Counter()

    def forward(self, x, scale=1.0, fail=False):
        self.calls["forward"] += 1
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        if fail:
            raise RuntimeError("on purpose")
        return {"logits": self.head(self.dropout(hidden)) * scale}
