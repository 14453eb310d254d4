"""Finding the stack of layers, and refusing what has none to share a readout."""

import copy

import pytest
import torch
import transformers
from architectures import (
    ENCODER_DECODERS,
    LAYERS,
    MODELS,
    REFUSED,
    TEXT,
    TwoStage,
    batch_for,
    build,
    truncated,
)
from torch import nn

from hf_descent.early_exit import truncate
from hf_descent.readout.replay import layer_logits, output_logits
from hf_descent.readout.stack import errors_explained, find_layer_stack


@pytest.mark.parametrize("call", [layer_logits, lambda model, batch: truncate(model, 1, batch)])
@pytest.mark.parametrize("name", REFUSED)
def test_refuses_layers_of_differing_shape(name, call):
    model = build(name, REFUSED[name])
    with pytest.raises(ValueError, match="differ in shape"):
        call(model, batch_for(model))


class Flat(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Alternating(TwoStage):
    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = self.dropout(block(hidden)) + hidden
        return {"logits": self.head(hidden)}


@pytest.mark.parametrize("make", [lambda: Flat(4, 4), Alternating])
def test_refuses_what_has_no_stack(make):
    with pytest.raises(ValueError, match="has no stack"):
        layer_logits(make(), {"x": torch.randn(2, 4)})


def test_keeps_wrappers_that_others_put_on_forward():
    model, x = TwoStage(), torch.randn(2, 4)
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda hidden: inner(hidden) + 1.0
    wrapper = model.blocks[0].forward
    logits = layer_logits(model, {"x": x})
    assert model.blocks[0].forward is wrapper
    torch.testing.assert_close(logits[0], model.head(inner(model.embed(x)) + 1.0))


def test_refuses_images_that_are_added_to_the_output_of_layers():
    text = {"hidden_size": 16, "vocab_size": 30, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8,
            "num_hidden_layers": 3, "num_key_value_heads": 2}  # fmt: skip
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
    }
    vision = {"depth": 2, "hidden_size": 16, "out_hidden_size": 16, "num_heads": 2, "patch_size": 4,
              "intermediate_size": 16, "spatial_merge_size": 1, "deepstack_visual_indexes": [0]}  # fmt: skip
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=3)
    model, ids = (
        transformers.Qwen3VLForConditionalGeneration(config).eval(),
        torch.tensor([[5, 3, 3, 3, 3, 6]]),
    )
    images = {"pixel_values": torch.randn(4, 96), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with pytest.raises(ValueError, match="adds features of images to the output of layers"):
        layer_logits(model, {"input_ids": ids, "mm_token_type_ids": (ids == 3).long(), **images})
    assert len(layer_logits(model, {"input_ids": ids + 5})) == 3


def test_refuses_layers_that_take_turns_with_another_stack():
    fields = TEXT | {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "num_layers_per_stack": 2,
        "H_cycles": 2,
        "L_cycles": 2,
    }
    del fields["num_hidden_layers"]
    model = build("HrmTextForCausalLM", fields)
    with pytest.raises(ValueError, match="do not run one after the other"):
        layer_logits(model, batch_for(model))


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        (
            "AlbertForMaskedLM",
            "albert.encoder.albert_layer_groups",
        ),  # one shared layer, called three times
        (
            "XLNetForSequenceClassification",
            "transformer.layer",
        ),  # hidden states reported in another layout
        (
            "XLMWithLMHeadModel",
            "transformer.layer_norm2",
        ),  # layers written out in the model's own forward
        ("T5ForConditionalGeneration", "decoder.block"),
        ("BartForSequenceClassification", "model.decoder.layers"),  # beside a larger encoder
        (
            "SqueezeBertForSequenceClassification",
            "transformer.encoder.layers",
        ),  # calls `layer.forward`
    ],
)
@torch.no_grad()
def test_finds_the_calls_of_the_stack(name, stack):
    model = build(name, MODELS[name] | ({"encoder_layers": 6} if "Bart" in name else {}))
    found = find_layer_stack(model, batch_for(model))
    assert (found.name, found.num_layers) == (stack, LAYERS)
    assert len(found.layers) == len({id(layer) for layer in found.layers})


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@torch.no_grad()
def test_a_decoder_is_the_stack_however_few_layers_it_has(name):
    fields = ENCODER_DECODERS[name]
    one, two = (truncated(build(name, fields), fields, layers) for layers in (1, 2))
    batch = batch_for(two)
    expected = [output_logits(model(**batch)) for model in (one, two)]
    for model, truth in ((one, expected[:1]), (two, expected)):
        logits = layer_logits(model, batch)
        assert len(logits) == len(truth) and all(map(torch.equal, logits, truth))


@pytest.mark.parametrize("depth", [1, 3])
@torch.no_grad()
def test_a_decoder_is_the_stack_of_a_plain_encoder_decoder(depth):
    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Transformer(
                8, 2, num_encoder_layers=3, num_decoder_layers=depth, dim_feedforward=8
            )
            self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, source, target):
            hidden = self.body(source, target)
            for linear in self.head:
                hidden = linear(hidden)
            return hidden

    model, batch = (
        Translator().eval(),
        {"source": torch.randn(4, 2, 8), "target": torch.randn(5, 2, 8)},
    )
    assert find_layer_stack(model, batch).name == "body.decoder.layers"


@torch.no_grad()
def test_layers_may_lie_in_a_sequential_or_in_groups():
    class Grouped(TwoStage):
        def __init__(self):
            super().__init__()
            first, second = self.blocks[:2], self.blocks[2:]
            self.blocks = nn.ModuleList([nn.ModuleList(first), nn.ModuleList(second)])

        def forward(self, x):
            hidden = self.embed(x)
            for group in self.blocks:
                for block in group:
                    hidden = block(hidden)
            return {"logits": self.head(hidden)}

    class InSequence(TwoStage):
        def forward(self, x):
            return {"logits": self.head(self.sequence(self.embed(x)))}

    in_sequence = InSequence()
    in_sequence.sequence = nn.Sequential(*in_sequence.blocks)
    del in_sequence.blocks
    for model, name in ((Grouped(), "blocks"), (in_sequence, "sequence")):
        x = torch.randn(2, 4)
        found = find_layer_stack(model, {"x": x})
        assert (found.name, found.num_layers) == (name, 4)
        assert torch.equal(
            layer_logits(model, {"x": x})[1],
            model.head(found.layers[1](found.layers[0](model.embed(x)))),
        )


def hidden_states(model):
    outputs = model(**batch_for(model), output_hidden_states=True)
    return outputs.get("decoder_hidden_states", outputs.get("hidden_states"))


def hook_counts(model):
    return [len(module._forward_hooks) for module in model.modules()]


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "BertForSequenceClassification",
        "BartForConditionalGeneration",
        "ViTForImageClassification",
    ],
)
@torch.no_grad()
def test_hidden_states_can_be_asked_for_after_the_search(name):
    """The search takes the hooks of transformers away, which every later step would pay for."""
    model = build(name, MODELS[name])
    twin = copy.deepcopy(model)
    find_layer_stack(model, batch_for(model))
    assert hook_counts(model) == hook_counts(twin)

    # A user's own forward adds them anew, and another search leaves them.
    for _ in range(2):
        found, expected = hidden_states(model), hidden_states(twin)
        assert len(found) == len(expected) == LAYERS + 1
        assert all(map(torch.equal, found, expected))
        assert hook_counts(model) == hook_counts(twin)
        find_layer_stack(model, batch_for(model))


def test_errors_are_explained_whatever_they_hold():
    with pytest.raises(ValueError, match="^Bert: .*5"), errors_explained("Bert:"):
        raise RuntimeError(5)
