"""The readout of layer l against its truth: a model built with l layers only, holding the same weights."""

import copy
from itertools import pairwise

import pytest
import torch
from architectures import AUDIO, LAYERS, MODELS, TEXT, TwoStage, batch_for, build, truncated
from torch import nn
from transformers.utils import ModelOutput

from hf_descent.readout.replay import Readout, layer_logits, output_logits
from hf_descent.readout.tape import noise_is_disabled


@pytest.fixture(scope="module")
def bert():
    return build("BertForSequenceClassification", TEXT)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_each_layer_equals_the_truncated_model(name):
    model = build(name, MODELS[name])
    batch = batch_for(model)
    logits = layer_logits(model, batch)
    assert len(logits) == LAYERS
    for layer in range(1, LAYERS + 1):
        assert torch.equal(
            logits[layer - 1], output_logits(truncated(model, MODELS[name], layer)(**batch))
        )
    assert torch.equal(logits[-1], output_logits(model(**batch)))
    assert all((a - b).abs().max() > 1e-3 for a, b in pairwise(logits))


class Sum(TwoStage):
    """Its tail reads the last layer, and another one in some rows."""

    def __init__(self, other):
        super().__init__()
        self.other = other

    def forward(self, x):
        states = [self.embed(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {
            "logits": self.head(torch.where(x[:, :1] > 0, states[self.other], 0.0) + states[-1])
        }


class SideReadouts(TwoStage):
    """Its tail reads what ran between the layers."""

    def forward(self, x):
        hidden, total = self.embed(x), 0.0
        for block in self.blocks:
            total = total + self.head(hidden)
            hidden = block(hidden)
        return {"logits": self.head(hidden) + total}


@pytest.mark.parametrize("make", [lambda: Sum(1), lambda: Sum(2), lambda: Sum(3), SideReadouts])
def test_refuses_a_tail_that_reads_several_layers(make):
    with pytest.raises(ValueError, match="earlier layers"):
        layer_logits(make(), {"x": torch.tensor([[1.0], [-1.0]]).expand(2, 4)})


class Keeping(nn.Module):
    """Runs layers, and keeps what the last one received."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, hidden):
        for layer in self.layers:
            self.kept = hidden
            hidden = layer(hidden)
        return hidden


class WithEncoder(TwoStage):
    """Its tail reads what its encoder returned, and what that kept."""

    def __init__(self):
        super().__init__()
        self.encoder = Keeping(self.blocks)
        del self.blocks

    def forward(self, x):
        hidden = self.encoder(self.embed(x))
        return {"logits": self.head(hidden + self.encoder.kept)}


def test_refuses_a_tail_that_reads_what_an_encoder_kept():
    with pytest.raises(ValueError, match="earlier layers"):
        layer_logits(WithEncoder(), {"x": torch.randn(2, 4)})


def test_refuses_a_weighted_sum_of_layers():
    model = build("Wav2Vec2ForSequenceClassification", AUDIO | {"use_weighted_layer_sum": True})
    with pytest.raises(ValueError, match="Pass `readout=`"):
        layer_logits(model, batch_for(model))


@pytest.mark.parametrize(
    "name",
    [
        "MixtralForCausalLM",
        "BertForMaskedLM",
        "LlamaForSequenceClassification",
        "T5ForConditionalGeneration",
    ],
)
@torch.no_grad()
def test_outputs_carry_the_truncated_models_task_loss(name):
    model = build(name, MODELS[name])
    batch = batch_for(model, with_labels="T5" not in name)
    if "T5" in name:
        batch["labels"] = batch.pop("decoder_input_ids")
    losses = []
    with Readout.probe(model, batch).attach(
        lambda layer, outputs, hidden: losses.append(outputs["loss"])
    ):
        outputs = model(**batch)
    for layer, loss in enumerate(losses, start=1):
        short = truncated(model, MODELS[name], layer)
        short.config.output_router_logits = False
        assert torch.equal(loss, short(**batch).loss)
    if name == "MixtralForCausalLM":
        assert outputs.aux_loss > 0
        assert outputs.loss > losses[-1]


def test_replays_give_no_output_that_needs_the_layers():
    model = build("MixtralForCausalLM", MODELS["MixtralForCausalLM"])
    names = ("use_cache", "output_router_logits", "output_hidden_states", "output_attentions")
    batch, seen = batch_for(model, with_labels=True) | dict.fromkeys(names, True), []
    with Readout.probe(model, batch).attach(
        lambda layer, outputs, hidden: seen.append(set(outputs))
    ):
        model(**batch)
    assert seen == [{"loss", "logits"}] * LAYERS


def test_gradients_equal_a_naive_computation():
    torch.manual_seed(0)
    model = TwoStage()
    x, weights = torch.randn(5, 4), (0.3, -0.2, 0.5, 1.0)
    loss = sum(
        w * logits.square().sum()
        for w, logits in zip(weights, layer_logits(model, {"x": x, "scale": 2.0}))
    )
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    hidden, naive = model.embed(x), 0.0
    for block, weight in zip(model.blocks, weights):
        hidden = block(hidden)
        naive = naive + weight * (model.head(hidden) * 2.0).square().sum()
    torch.testing.assert_close(gradients, torch.autograd.grad(naive, list(model.parameters())))


def test_layer_l_replayed_equals_the_models_own_in_train_mode():
    fields = MODELS["MixtralForCausalLM"]
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
    torch.testing.assert_close(gradients(checkpointed), gradients(model), rtol=0, atol=0)


def test_order_subset_and_gradient_of_layers():
    model, x, seen = TwoStage(), torch.randn(2, 4), []
    readout = Readout.probe(model, {"x": x})

    def on_layer(layer, outputs, hidden):
        seen.append(
            (layer, outputs["logits"].requires_grad, hidden.requires_grad, noise_is_disabled())
        )
        last.append(outputs)
        model(-x)

    last = []
    with readout.attach(on_layer, layers=[4, 2, 1], no_grad_layers=(2,)):
        outputs = model(x)
    assert seen == [(1, True, True, False), (2, False, True, False), (4, True, True, False)]
    assert last[-1] is outputs and outputs["logits"].requires_grad


def test_a_probe_in_inference_mode():
    model, x = TwoStage(), torch.randn(2, 4)
    with torch.inference_mode():
        assert torch.equal(layer_logits(model, {"x": x})[-1], model(x)["logits"])


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


def test_user_readout_trains_parameters_of_the_model_alone(bert):
    foreign, batch = nn.Linear(32, 5), batch_for(bert)

    def probe(head, trains=True):
        return Readout.probe(
            bert, batch, lambda model, hidden, inputs: head(hidden.mean(1)), trains
        )

    probe(foreign, trains=False)
    with pytest.raises(
        ValueError, match="parameters that BertForSequenceClassification does not have"
    ):
        probe(foreign)
    for head in (
        bert.classifier,
        foreign.requires_grad_(False),
        lambda hidden: hidden @ bert.classifier.weight.T,
    ):
        probe(head)


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
    model = build("LlamaForCausalLM", MODELS["LlamaForCausalLM"])
    for model.config.num_hidden_layers in (3, 2):
        assert len(layer_logits(model, batch_for(model))) == model.config.num_hidden_layers


def test_lora_model(bert):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False
    )
    model = peft.get_peft_model(copy.deepcopy(bert), config).eval()
    batch = batch_for(bert)
    with torch.no_grad():
        logits = layer_logits(model, batch)
        own = model(**batch).logits
        merged = copy.deepcopy(model).merge_and_unload()
        expected = [truncated(merged, TEXT, layer)(**batch).logits for layer in (1, 2, 3)]
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
