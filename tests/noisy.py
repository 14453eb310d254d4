"""Inputs, models and a spy for the tests of noise."""

import torch
from tiny.models import VOCAB
from torch import nn
from transformers import (
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_descent.noise.embedding_noise import EmbeddingNoise


def batch(side="right", length=7, real=(7, 4, 2)):
    ids = torch.randint(3, VOCAB, (len(real), length), generator=torch.Generator().manual_seed(0))
    mask = torch.stack([torch.arange(length) < count for count in real]).long()
    mask = mask.flip(1) if side == "left" else mask
    return {"input_ids": ids * mask, "attention_mask": mask}


def t5(**config):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
    }
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, **config)).eval()


def vit(**config):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes | config)).eval()


def gemma3n():
    """A model with a second table of tokens, for its layers."""
    sizes = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "laurel_rank": 4,
    }
    layers = {
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
    }  # fmt: skip
    return Gemma3nForCausalLM(
        Gemma3nTextConfig(
            vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB - 2, hidden_size_per_layer_input=8,
            intermediate_size=32, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 2, **sizes, **layers,
        )
    )  # fmt: skip


class Gain(nn.Module):
    """A denoiser of one number."""

    main_input_name = "pixel_values"

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, pixel_values, attention_mask=None):
        return self.gain * pixel_values


class Spy:
    """Records what lookups give and by how much that differs from the table's rows."""

    def __init__(self, *modules):
        self.modules, self.noisy, self.added = modules, [], []

    def __enter__(self):
        self.handles = [module.register_forward_hook(self.see) for module in self.modules]
        return self

    def __exit__(self, *exc_info):
        for handle in self.handles:
            handle.remove()

    def see(self, module, args, output):
        self.noisy.append(output.detach())
        self.added.append(
            output.detach() - nn.functional.embedding(args[0], module.weight).detach()
        )


def added_noise(model, inputs, *modules, **noise):
    """The noise of each lookup of one forward call: list of `[batch, seq, hidden]`."""
    with (
        EmbeddingNoise(model, **noise),
        Spy(*modules or [model.get_input_embeddings()]) as spy,
        torch.no_grad(),
    ):
        model(**inputs)
    return spy.added


def assert_noise_on(tokens, noise):
    """Every coordinate of the `tokens` `[batch, seq]` is perturbed, and no other; `noise` is `[batch, seq, ...]`."""
    changed = (noise != 0).flatten(2)
    assert changed[tokens.bool()].all() and not changed[~tokens.bool()].any()
