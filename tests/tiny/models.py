"""Tiny random models, which learn the rows of `tiny.data`."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)


VOCAB = 40
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


def bert(num_layers=3, num_labels=3, dropout=0.0, seed=0, **settings):
    """A classifier of sequences."""
    torch.manual_seed(seed)
    config = BertConfig(
        **SIZES,
        vocab_size=VOCAB,
        num_hidden_layers=num_layers,
        max_position_embeddings=32,
        num_labels=num_labels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        classifier_dropout=dropout,
        **settings,
    )
    return BertForSequenceClassification(config)


def llama(num_layers=3, seed=0, vocab_size=VOCAB, **settings):
    """A language model. Its layers can be read in tiles."""
    torch.manual_seed(seed)
    defaults = {
        **SIZES,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(
        num_hidden_layers=num_layers,
        vocab_size=vocab_size,
        **{**defaults, **settings},
    )
    return LlamaForCausalLM(config)


def gpt2(num_layers=3, **settings):
    """A language model that shifts its labels, which its name does not tell."""
    torch.manual_seed(0)
    defaults = {
        "vocab_size": VOCAB,
        "n_positions": 32,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    config = GPT2Config(
        n_embd=16,
        n_layer=num_layers,
        n_head=2,
        **{**defaults, **settings},
    )
    return GPT2LMHeadModel(config)


def spread(model):
    """Weights of order one, so that layers differ and samples are of different difficulty."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=4.0 * parameter[0].numel() ** -0.5)
    return model.eval()
