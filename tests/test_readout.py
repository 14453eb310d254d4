"""The readout of layer l against its truth: a model built with l layers only, holding the same weights."""

import copy
import random
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.utils import ModelOutput

from hf_descent.readout import Readout, is_replaying, layer_logits, output_logits


torch.set_num_threads(1)
LAYERS = 3
TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
DECODER = TEXT | {"num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3, "head_dim": 8}
GPT = {"vocab_size": 99, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 40, "pad_token_id": 1}
XLM = {"vocab_size": 99, "emb_dim": 32, "n_layers": LAYERS, "n_heads": 4, "max_position_embeddings": 40}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": LAYERS, "max_position_embeddings": 40}
BART |= {
    f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in (("attention_heads", 4), ("ffn_dim", 48))
}
IMAGE = TEXT | {"image_size": 16, "patch_size": 4}
AUDIO = TEXT | {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 4), "num_feat_extract_layers": 2}
AUDIO |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16}
MAMBA = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 4}

# class -> (config fields, the field that holds the number of layers)
MODELS = {
    # causal LM: final norms, softcap, scaled logits, parallel blocks, state spaces, routers
    "LlamaForCausalLM": (DECODER, "num_hidden_layers"),
    "MistralForCausalLM": (DECODER | {"sliding_window": 4}, "num_hidden_layers"),
    "Qwen2ForCausalLM": (DECODER, "num_hidden_layers"),
    "Qwen3ForCausalLM": (DECODER, "num_hidden_layers"),
    "Gemma2ForCausalLM": (DECODER | {"final_logit_softcapping": 5.0, "sliding_window": 4}, "num_hidden_layers"),
    "GraniteForCausalLM": (DECODER | {"logits_scaling": 3.0, "residual_multiplier": 0.5}, "num_hidden_layers"),
    "CohereForCausalLM": (DECODER | {"logit_scale": 0.25}, "num_hidden_layers"),
    "Olmo2ForCausalLM": (DECODER, "num_hidden_layers"),
    "PhiForCausalLM": (DECODER, "num_hidden_layers"),
    "StableLmForCausalLM": (DECODER, "num_hidden_layers"),
    "GPTNeoXForCausalLM": (TEXT, "num_hidden_layers"),
    "FalconForCausalLM": (TEXT, "num_hidden_layers"),
    "OPTForCausalLM": (TEXT | {"ffn_dim": 48, "word_embed_proj_dim": 16}, "num_hidden_layers"),
    "BloomForCausalLM": ({"vocab_size": 99, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4}, "n_layer"),
    "GPT2LMHeadModel": (GPT, "n_layer"),
    "MambaForCausalLM": (MAMBA, "num_hidden_layers"),
    "MixtralForCausalLM": (DECODER | {"num_local_experts": 4, "output_router_logits": True}, "num_hidden_layers"),
    "Qwen2MoeForCausalLM": (
        DECODER | {"num_experts": 4, "moe_intermediate_size": 16, "output_router_logits": True},
        "num_hidden_layers",
    ),
    "XLMWithLMHeadModel": (XLM, "n_layers"),
    # masked LM
    "BertForMaskedLM": (TEXT, "num_hidden_layers"),
    "AlbertForMaskedLM": (TEXT | {"embedding_size": 16}, "num_hidden_layers"),
    "DistilBertForMaskedLM": (
        {"vocab_size": 99, "dim": 32, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48},
        "n_layers",
    ),
    "ElectraForMaskedLM": (TEXT | {"embedding_size": 16}, "num_hidden_layers"),
    "ModernBertForMaskedLM": (TEXT | {"local_attention": 4}, "num_hidden_layers"),
    "FNetForMaskedLM": (TEXT, "num_hidden_layers"),
    # classification, QA, choice
    "BertForSequenceClassification": (TEXT, "num_hidden_layers"),
    "RobertaForSequenceClassification": (TEXT, "num_hidden_layers"),
    "DebertaV2ForSequenceClassification": (
        TEXT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 0},
        "num_hidden_layers",
    ),
    "XLNetForSequenceClassification": (
        {"vocab_size": 99, "d_model": 32, "n_layer": LAYERS, "n_head": 4, "d_inner": 48, "pad_token_id": 1},
        "n_layer",
    ),
    "FlaubertForSequenceClassification": (XLM, "n_layers"),
    "SqueezeBertForSequenceClassification": (TEXT | {"embedding_size": 32}, "num_hidden_layers"),
    "LlamaForSequenceClassification": (DECODER, "num_hidden_layers"),
    "GPT2ForSequenceClassification": (GPT, "n_layer"),
    "BartForSequenceClassification": (BART, "decoder_layers"),
    "RobertaForTokenClassification": (TEXT, "num_hidden_layers"),
    "T5ForTokenClassification": (T5, "num_layers"),
    "BertForQuestionAnswering": (TEXT | {"num_labels": 2}, "num_hidden_layers"),
    "MPNetForQuestionAnswering": (TEXT | {"num_labels": 2}, "num_hidden_layers"),
    "RobertaForMultipleChoice": (TEXT, "num_hidden_layers"),
    # encoder-decoder: the decoder is the stack
    "T5ForConditionalGeneration": (T5 | {"num_layers": 2, "num_decoder_layers": LAYERS}, "num_decoder_layers"),
    "BartForConditionalGeneration": (BART, "decoder_layers"),
    # images, audio
    "ViTForImageClassification": (IMAGE, "num_hidden_layers"),
    "DeiTForImageClassification": (IMAGE, "num_hidden_layers"),
    "BeitForImageClassification": (IMAGE, "num_hidden_layers"),
    "Dinov2ForImageClassification": (IMAGE, "num_hidden_layers"),
    "Wav2Vec2ForSequenceClassification": (AUDIO, "num_hidden_layers"),
    "HubertForSequenceClassification": (AUDIO, "num_hidden_layers"),
}
REFUSED = {
    "SwinForImageClassification": (
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
        "differ in shape",
    ),
    "ConvNextForImageClassification": (
        {"image_size": 32, "hidden_sizes": [4, 8, 8], "depths": [1, 1, 1], "num_stages": 3},
        "differ in shape",
    ),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        "differ in shape",
    ),
    "PoolFormerForImageClassification": ({"image_size": 32, "depths": [1] * 4, "hidden_sizes": [4, 8, 8, 8]}, "shape"),
    "FunnelForSequenceClassification": (
        {"vocab_size": 99, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 16, "block_sizes": [1, 1, 1]},
        "differ in shape",
    ),
    "CanineForSequenceClassification": (TEXT, "differ in shape"),
}


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
        return {"input_values": torch.randn(2, 400)}
    shape = (2, 3, 9) if "MultipleChoice" in name else (2, 9)
    batch = {"input_ids": torch.randint(5, 99, shape)}  # [batch, (choices,) seq]
    if "attention_mask" in model.forward.__code__.co_varnames and "Mamba" not in name:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][-1, ..., -2:] = 0
        batch["input_ids"][-1, ..., -2:] = 1
    if name == "BartForSequenceClassification":
        batch["input_ids"][:, 6] = model.config.eos_token_id
    if "ConditionalGeneration" in name:
        batch["decoder_input_ids"] = torch.randint(5, 99, (2, 5))
    if with_labels:
        batch["labels"] = batch["input_ids"].clone() if "LM" in name else torch.randint(0, 2, (2,))
    return batch


def truncated(model, field, layer):
    """A new model with `layer` layers and the first layers' weights."""
    config = copy.deepcopy(model.config)
    setattr(config, field, layer)
    if "layer_types" in vars(config):
        config.layer_types = config.layer_types[:layer]
    short = type(model)(config).eval()
    weights = model.state_dict()
    short.load_state_dict({name: weights[name] for name in short.state_dict()})
    return short


@pytest.fixture(scope="module")
def bert():
    return build("BertForSequenceClassification", TEXT)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_each_layer_equals_the_truncated_model(name):
    fields, count = MODELS[name]
    model = build(name, fields)
    batch = batch_for(model)
    logits = layer_logits(model, batch)
    assert len(logits) == LAYERS
    for layer in range(1, LAYERS + 1):
        assert torch.equal(logits[layer - 1], output_logits(truncated(model, count, layer)(**batch)))
    assert torch.equal(logits[-1], output_logits(model(**batch)))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(logits, logits[1:]))


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_layers_of_differing_shape(name):
    fields, message = REFUSED[name]
    model = build(name, fields)
    with pytest.raises(ValueError, match=message):
        layer_logits(model, batch_for(model))


def test_refuses_what_has_no_stack():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)

    with pytest.raises(ValueError, match="Flat has no stack"):
        layer_logits(Flat(), {"x": torch.randn(2, 4)})


def test_refuses_a_tail_that_reads_several_layers():
    class WeightedSum(TwoStage):
        def forward(self, x):
            hidden, total = self.embed(x), 0.0
            for block in self.blocks:
                hidden = block(hidden)
                total = total + hidden
            return {"logits": self.head(total)}

    with pytest.raises(ValueError, match="earlier layers"):
        layer_logits(WeightedSum(), {"x": torch.randn(2, 4)})
    model = build("Wav2Vec2ForSequenceClassification", AUDIO | {"use_weighted_layer_sum": True})
    with pytest.raises(ValueError, match="Pass `readout=`"):
        layer_logits(model, batch_for(model))


def test_refuses_two_stacks_in_alternation():
    class Alternating(TwoStage):
        def forward(self, x):
            hidden = self.embed(x)
            for block in self.blocks:
                hidden = self.dropout(block(hidden)) + hidden
            return {"logits": self.head(hidden)}

    with pytest.raises(ValueError, match="no stack"):
        layer_logits(Alternating(), {"x": torch.randn(2, 4)})


def test_refuses_layerdrop_in_training_only():
    model = build("Wav2Vec2ForSequenceClassification", AUDIO | {"layerdrop": 0.5})
    batch = batch_for(model)
    readout = Readout.probe(model, batch)
    model.train()
    with pytest.raises(ValueError, match="layerdrop"):
        Readout.probe(model, batch)
    with readout.attach(lambda *_: None), pytest.raises(ValueError, match="layerdrop"):
        model(**batch)


def test_refuses_reversible_layers_in_training():
    fields = {"vocab_size": 99, "hidden_size": 32, "attn_layers": ["local"] * LAYERS, "num_attention_heads": 2}
    fields |= {"attention_head_size": 8, "local_attn_chunk_length": 4, "axial_pos_shape": (2, 4), "is_decoder": True}
    fields |= {"axial_pos_embds_dim": (16, 16), "feed_forward_size": 32, "max_position_embeddings": 8}
    model = build("ReformerModelWithLMHead", fields)
    batch = {"input_ids": torch.randint(5, 99, (2, 8))}
    with torch.no_grad():
        assert len(layer_logits(model, batch)) == LAYERS
    with pytest.raises(ValueError, match="Reformer"):
        layer_logits(model.train(), batch)


@pytest.mark.parametrize(
    "name", ["MixtralForCausalLM", "BertForMaskedLM", "LlamaForSequenceClassification", "T5ForConditionalGeneration"]
)
@torch.no_grad()
def test_outputs_carry_the_truncated_models_task_loss(name):
    fields, count = MODELS[name]
    model = build(name, fields)
    batch = batch_for(model, with_labels="T5" not in name)
    if "T5" in name:
        batch["labels"] = batch.pop("decoder_input_ids")
    losses = []
    with Readout.probe(model, batch).attach(lambda layer, outputs, hidden: losses.append(outputs["loss"])):
        outputs = model(**batch)
    for layer, loss in enumerate(losses, start=1):
        short = truncated(model, count, layer)
        short.config.output_router_logits = False
        assert torch.equal(loss, short(**batch).loss)
    if name == "MixtralForCausalLM":
        assert outputs.aux_loss > 0
        assert outputs.loss > losses[-1]


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


def test_gradients_equal_a_naive_computation():
    torch.manual_seed(0)
    model = TwoStage()
    x, weights = torch.randn(5, 4), (0.3, -0.2, 0.5, 1.0)
    loss = sum(w * logits.square().sum() for w, logits in zip(weights, layer_logits(model, {"x": x, "scale": 2.0})))
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    hidden, naive = model.embed(x), 0.0
    for block, weight in zip(model.blocks, weights):
        hidden = block(hidden)
        naive = naive + weight * (model.head(hidden) * 2.0).square().sum()
    for gradient, expected in zip(gradients, torch.autograd.grad(naive, list(model.parameters()))):
        torch.testing.assert_close(gradient, expected)


def test_writes_in_place_leave_the_record_and_its_gradients_intact():
    torch.manual_seed(0)
    model = TwoStage(dropout=0.5, inplace=True).train()
    x = torch.randn(5, 4)
    seen = []
    with Readout.probe(model, {"x": x}).attach(
        lambda layer, outputs, hidden: seen.append((outputs["logits"], hidden))
    ):
        model(x)
    for logits, hidden in seen[:-1]:
        assert (hidden != 0).all()
        torch.autograd.grad(logits.sum(), model.embed.weight, retain_graph=True)


@pytest.mark.parametrize("name", ["XLMForSequenceClassification", "FlaubertForSequenceClassification"])
def test_models_that_write_into_module_outputs_can_be_trained(name):
    model = build(name, XLM | {"dropout": 0.0, "attention_dropout": 0.0, "summary_first_dropout": 0.0})
    batch = batch_for(model)
    sum(logits.square().sum() for logits in layer_logits(model.train(), batch)).backward()
    gradient = model.transformer.layer_norm_emb.weight.grad.clone()
    model.zero_grad()
    sum(output_logits(truncated_in_place(model, n)(**batch)).square().sum() for n in (1, 2, 3)).backward()
    torch.testing.assert_close(gradient, model.transformer.layer_norm_emb.weight.grad)


def truncated_in_place(model, layer):
    model.transformer.n_layers = layer
    return model


def test_train_mode_draws_the_same_dropout_masks_as_the_model(bert):
    model = copy.deepcopy(bert).train()
    batch = batch_for(model)
    readout = Readout.probe(model, batch)
    torch.manual_seed(3)
    own = model(**batch).logits
    after_own = torch.get_rng_state()

    torch.manual_seed(3)
    seen = []
    with readout.attach(lambda layer, outputs, hidden: seen.append((outputs["logits"], hidden))):
        outputs = model(**batch)
    assert torch.equal(torch.get_rng_state(), after_own)
    assert torch.equal(outputs.logits, own)

    # Layer l with the mask that the model draws after its last layer: dropout applied by hand to the pooled output.
    torch.manual_seed(3)
    pooled_sizes = []
    hook = model.dropout.register_forward_hook(lambda m, args, out: pooled_sizes.append(out / args[0]))
    model(**batch)
    hook.remove()
    mask = pooled_sizes[0].nan_to_num()  # [batch, width], 0 or 1 / (1 - p)
    for logits, hidden in seen:
        torch.testing.assert_close(logits, model.classifier(model.bert.pooler(hidden) * mask))


def test_layer_l_replayed_equals_the_models_own_in_train_mode():
    fields, _ = MODELS["MixtralForCausalLM"]
    model = build("MixtralForCausalLM", fields | {"attention_dropout": 0.3}).train()
    batch = batch_for(model, with_labels=True)
    seen = []
    with Readout.probe(model, batch).attach(lambda *args: seen.append(args), layers=[LAYERS]):
        outputs = model(**batch)
    ((layer, replayed, _),) = seen
    assert layer == LAYERS
    assert replayed is not outputs
    assert replayed.aux_loss is None
    assert torch.equal(replayed.logits, outputs.logits)


def test_gradient_checkpointing_gives_equal_gradients(bert):
    batch = batch_for(bert)

    def gradients(model):
        torch.manual_seed(0)
        sum(logits.square().sum() for logits in layer_logits(model, batch)).backward()
        return [parameter.grad for parameter in model.parameters()]

    model, checkpointed = copy.deepcopy(bert).train(), copy.deepcopy(bert).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for expected, gradient in zip(gradients(model), gradients(checkpointed)):
        assert torch.equal(expected, gradient)


def test_refuses_reentrant_checkpoints_around_layers():
    class Checkpointed(TwoStage):
        def forward(self, x):
            hidden = self.embed(x)
            for block in self.blocks:
                hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=True)
            return {"logits": self.head(hidden)}

    with pytest.raises(ValueError, match="use_reentrant"):
        layer_logits(Checkpointed(), {"x": torch.randn(2, 4)})


def state_of(model):
    modules = list(model.modules())
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in modules]
    return [set(vars(m)) for m in modules], hooks, [m.training for m in modules]


def test_leaves_nothing_behind(bert):
    model = copy.deepcopy(bert).train()
    model.bert.embeddings.eval()
    batch = batch_for(model)
    before, config = state_of(model), copy.deepcopy(model.config)
    random_states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    readout = Readout.probe(model, batch)
    assert random.getstate() == random_states[0]
    assert np.array_equal(np.random.get_state()[1], random_states[1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), random_states[2])
    assert state_of(model) == before
    assert model.config.to_dict() == config.to_dict()

    with readout.attach(lambda *_: None):
        model(**batch)
    assert state_of(model) == before
    with pytest.raises(ZeroDivisionError), readout.attach(lambda *_: 1 / 0):
        model(**batch)
    assert state_of(model) == before
    assert not is_replaying()


def test_recovers_from_a_forward_that_raises():
    model, x, seen = TwoStage(), torch.randn(2, 4), []
    before = state_of(model)
    with Readout.probe(model, {"x": x}).attach(lambda layer, *_: seen.append(layer)):
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, fail=True)
        model(x)
    assert seen == [1, 2, 3, 4]
    assert state_of(model) == before


def test_keeps_wrappers_that_others_put_on_forward():
    model, x = TwoStage(), torch.randn(2, 4)
    inner = model.blocks[0].forward
    model.blocks[0].forward = lambda hidden: inner(hidden) + 1.0
    wrapper = model.blocks[0].forward
    logits = layer_logits(model, {"x": x})
    assert model.blocks[0].forward is wrapper
    torch.testing.assert_close(logits[0], model.head(inner(model.embed(x)) + 1.0))


def test_replays_run_neither_layers_nor_their_hooks():
    model, x, ran = TwoStage(), torch.randn(2, 4), Counter()
    readout = Readout.probe(model, {"x": x})
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.update([name]))
    model.calls.clear()
    with readout.attach(lambda *_: None):
        model(x)
    assert model.calls["forward"] == 4  # its own and 3 replays
    assert ran["head"] == ran["dropout"] == 4
    assert ran["embed"] == ran["blocks.0"] == ran["blocks.3"] == ran["blocks.0.0"] == ran[""] == 1


def test_record_holds_nothing_from_inside_layers(bert):
    alive = []
    handle = bert.bert.encoder.layer[0].intermediate.register_forward_hook(
        lambda module, args, output: alive.append(weakref.ref(output))
    )
    batch = batch_for(bert)
    readout = Readout.probe(bert, batch)
    alive.clear()
    held = []
    with torch.no_grad(), readout.attach(lambda *_: held.append([ref() is not None for ref in alive])):
        bert(**batch)
    handle.remove()
    assert held == [[False]] * LAYERS


def test_order_subset_and_gradient_of_layers():
    model, x, seen = TwoStage(), torch.randn(2, 4), []
    readout = Readout.probe(model, {"x": x})

    def on_layer(layer, outputs, hidden):
        seen.append((layer, outputs["logits"].requires_grad, hidden.requires_grad, is_replaying()))

    with readout.attach(on_layer, layers=[4, 2, 1], no_grad_layers=(2,)):
        outputs = model(x)
    assert seen == [(1, True, True, False), (2, False, True, False), (4, True, True, False)]
    assert outputs["logits"].requires_grad
    with pytest.raises(ValueError, match="1..4"), readout.attach(on_layer, layers=[0]):
        pass
    with pytest.raises(ValueError, match="1..4"), readout.attach(on_layer, no_grad_layers=[5]):
        pass


def test_is_replaying_tells_replays_from_the_forward():
    model, x, flags = TwoStage(), torch.randn(2, 4), []
    readout = Readout.probe(model, {"x": x})
    model.head.register_forward_pre_hook(lambda *_: flags.append(is_replaying()))
    with readout.attach(lambda *_: None):
        model(x)
    assert flags == [False, True, True, True]


def test_layer_l_gets_the_models_own_outputs(bert):
    batch, seen = batch_for(bert), []
    with Readout.probe(bert, batch).attach(lambda *args: seen.append(args)):
        outputs = bert(**batch)
    assert seen[-1][1] is outputs
    assert [layer for layer, *_ in seen] == [1, 2, 3]


def test_user_readout_takes_the_place_of_the_head(bert):
    head, batch, seen = nn.Linear(32, 5), batch_for(bert), []

    def cls_readout(model, hidden, inputs):
        assert model is bert
        assert set(inputs) == set(batch)
        return head(hidden[:, 0])  # [batch, 5]

    readout = Readout.probe(bert, batch, readout=cls_readout)
    with readout.attach(lambda layer, outputs, hidden: seen.append((outputs, hidden))):
        bert(**batch)
    with torch.no_grad():
        reported = bert(**batch, output_hidden_states=True).hidden_states
    for (outputs, hidden), state in zip(seen, reported[1:], strict=True):
        assert isinstance(outputs, ModelOutput)
        torch.testing.assert_close(hidden, state)
        torch.testing.assert_close(outputs.logits, head(state[:, 0]))


@pytest.mark.parametrize(
    ("readout", "message"),
    [
        (lambda model, hidden, inputs: None, "NoneType"),
        (lambda model, hidden, inputs: hidden.sum(), r"\[\]"),
        (lambda model, hidden, inputs: hidden.argmax(-1), "int64"),
        (lambda model, hidden, inputs: hidden / 0.0, "finite"),
    ],
)
def test_user_readout_must_return_finite_logits(bert, readout, message):
    with pytest.raises(ValueError, match=message):
        Readout.probe(bert, batch_for(bert), readout=readout)


def test_a_changed_model_is_probed_anew():
    model, x = TwoStage(), {"x": torch.randn(2, 4)}
    assert len(layer_logits(model, x)) == 4
    calls = model.calls["forward"]
    layer_logits(model, x)
    assert model.calls["forward"] == calls + 4  # no second probe
    del model.blocks[2:]
    assert len(layer_logits(model, x)) == 2
    readout = Readout.probe(model, x)
    del model.blocks[1:]
    with readout.attach(lambda *_: None), pytest.raises(ValueError, match="ran 1 layers"):
        model(**x)


def test_lora_model(bert):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(bert), config).eval()
    batch = batch_for(bert)
    with torch.no_grad():
        logits = layer_logits(model, batch)
        own = model(**batch).logits
        merged = copy.deepcopy(model).merge_and_unload()
        expected = [truncated(merged, "num_hidden_layers", layer)(**batch).logits for layer in (1, 2, 3)]
        plain = layer_logits(bert, batch)
    assert torch.equal(logits[-1], own)
    for layer in range(LAYERS):
        torch.testing.assert_close(logits[layer], expected[layer])
        assert (logits[layer] - plain[layer]).abs().max() > 1e-3


def test_output_logits():
    logits, start, end = torch.randn(2, 3), torch.randn(2, 5), torch.randn(2, 5)
    assert output_logits({"loss": torch.tensor(1.0), "logits": logits}) is logits
    assert torch.equal(output_logits({"start_logits": start, "end_logits": end})[..., 1], end)
    assert output_logits((torch.tensor(1.0), torch.arange(3), logits)) is logits
    with pytest.raises(ValueError, match="no logits"):
        output_logits((torch.tensor(1.0),))
