"""The readout of layer l against its truth: a model built with l layers only, holding the same weights."""

import copy
import random
import weakref
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from architectures import AUDIO, LAYERS, MODELS, TEXT, XLM, TwoStage, batch_for, build, truncated
from torch import nn
from transformers.utils import ModelOutput

from hf_descent.readout import Readout, is_replaying, layer_logits, output_logits


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
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise(logits))


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


def test_refuses_a_tail_that_reads_what_ran_between_layers():
    class SideReadouts(TwoStage):
        def forward(self, x):
            hidden, total = self.embed(x), 0.0
            for block in self.blocks:
                total = total + self.head(hidden)
                hidden = block(hidden)
            return {"logits": self.head(hidden) + total}

    with pytest.raises(ValueError, match="earlier layers"):
        layer_logits(SideReadouts(), {"x": torch.randn(2, 4)})


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


def test_draws_between_replays_go_on():
    model, x, draws = TwoStage(dropout=0.5).train(), torch.randn(2, 4), []
    readout = Readout.probe(model, {"x": x})
    torch.manual_seed(3)
    model(x)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    with readout.attach(lambda *_: draws.append(torch.rand(1).item())):
        model(x)
    assert draws == expected


def test_running_statistics_of_the_tail_are_updated_once():
    model = TwoStage().train()
    model.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    expected, x = copy.deepcopy(model), torch.randn(6, 4)
    layer_logits(model, {"x": x})
    expected(x)
    assert torch.equal(model.head[0].running_mean, expected.head[0].running_mean)
    assert model.head[0].num_batches_tracked == 1
    model(x)
    assert model.head[0].num_batches_tracked == 2


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
