import pytest
import torch
import transformers
from architectures import BART, T5_DECODER
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.trainer_pt_utils import LabelSmoother

from hf_descent import layer_logits, layer_losses
from hf_descent.losses.task import TaskLoss
from hf_descent.readout.head import HeadReadout


LAYERS, VOCAB = 3, 53
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0}
ENCODER_DECODER = {"vocab_size": VOCAB, "dropout": 0.0, "dropout_rate": 0.0}
MODELS = {
    "LlamaForCausalLM": {},
    "Gemma2ForCausalLM": {"final_logit_softcapping": 0.3, "query_pre_attn_scalar": 4},
    "RecurrentGemmaForCausalLM": {
        "lru_width": 16,
        "logits_soft_cap": 0.25,
        "num_key_value_heads": 1,
    },
    "CohereForCausalLM": {"logit_scale": 0.125},
    "GraniteForCausalLM": {"logits_scaling": 7.0, "tie_word_embeddings": True},
    "GPT2LMHeadModel": NO_DROPOUT,
    "PhiForCausalLM": {"num_key_value_heads": 4},
    "OPTForCausalLM": {"ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0},
    "ModernBertDecoderForCausalLM": {},
    "MixtralForCausalLM": {
        "num_local_experts": 4,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "BartForConditionalGeneration": BART | ENCODER_DECODER,
    "MBartForConditionalGeneration": BART | ENCODER_DECODER,
    "MT5ForConditionalGeneration": T5_DECODER | ENCODER_DECODER | {"tie_word_embeddings": False},
    "T5ForConditionalGeneration": T5_DECODER | ENCODER_DECODER,  # with a scale before its head
    "BertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
WEIGHTS = torch.tensor([0.7, -0.4, 1.3])


def build(name="LlamaForCausalLM", **overrides):
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**{**SIZES, **MODELS.get(name, {}), **overrides})
    model = model_class(config)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # norms and biases that do something
    return model.train()


def batch():
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
    labels = input_ids.clone()
    labels[0, :4] = -100
    return {"input_ids": input_ids, "labels": labels}


def probe(model, inputs, **settings):
    return HeadReadout.probe(model, inputs, TaskLoss.probe(model, inputs).shifts_labels, **settings)


def train_step(readout, model, inputs, **kwargs):
    """The outputs, the layer losses read by `readout`, and the gradients of their weighted sum."""
    found = []

    def on_forward(read, outputs, hidden_states):
        found.append(read(readout.tokens(inputs), WEIGHTS, **kwargs))
        return found[-1].objective

    with readout.attach(on_forward):
        outputs = model(**inputs)
    outputs["loss"].backward()
    return outputs, found[0].sums / len(readout.tokens(inputs).rows), gradients(model)


def gradients(model):
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_replay(name):
    model, inputs = build(name), batch()
    losses = layer_losses(model, inputs)
    (WEIGHTS * losses).sum().backward()
    expected = gradients(model)

    readout = probe(model, inputs)
    assert readout.shifts_labels == (name.endswith("CausalLM") or name == "GPT2LMHeadModel")
    assert readout.num_layers == LAYERS
    outputs, means, found = train_step(readout, model, inputs)
    torch.testing.assert_close(means, losses.detach())
    torch.testing.assert_close(outputs["loss"].detach(), (WEIGHTS * losses).sum().detach())
    assert outputs["logits"].numel() == 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "RecurrentGemmaForCausalLM"])
def test_a_softcap_is_found_where_rounding_hides_it(name):
    model = build(name, final_logit_softcapping=30.0, logits_soft_cap=30.0).bfloat16()
    model.get_output_embeddings().weight.data.mul_(0.1)
    assert model(**batch())["logits"].abs().max() < 1
    assert probe(model, batch()).head_loss.softcap == 30.0


def test_label_smoothing_is_the_trainers():
    model, inputs = build(), batch()
    readout = probe(model, inputs, label_smoothing=0.1)
    logits = layer_logits(model, inputs)
    smoother = LabelSmoother(epsilon=0.1)
    losses = torch.stack(
        [smoother({"logits": x}, inputs["labels"], shift_labels=True) for x in logits]
    )
    (WEIGHTS * losses).sum().backward()
    expected = gradients(model)
    torch.testing.assert_close(train_step(readout, model, inputs)[2], expected)


@pytest.mark.parametrize("probed_shifted", [False, True])
def test_labels_shifted_already(probed_shifted):
    model, inputs = build(), batch()
    shifted_inputs = {
        **inputs,
        "shift_labels": nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=-100),
    }
    readout = probe(model, shifted_inputs if probed_shifted else inputs)
    assert readout.shifts_labels
    _, means, found = train_step(readout, model, inputs)
    _, shifted_means, shifted_found = train_step(readout, model, shifted_inputs)
    assert torch.equal(means, shifted_means)
    torch.testing.assert_close(found, shifted_found)
    samples = [
        readout.tokens(x, 0.5, torch.Generator().manual_seed(0)).samples
        for x in (inputs, shifted_inputs)
    ]
    assert torch.equal(*samples)


@pytest.mark.parametrize("keep_logits", [True, False])
def test_logits_on_request(keep_logits):
    model, inputs = build(), batch()
    readout = probe(model, inputs)
    with torch.no_grad():
        expected = model(**inputs)
        with readout.attach(lambda read, *_: read(readout.tokens(inputs)).sums[-1], keep_logits):
            outputs = model(**inputs)
    if keep_logits:
        assert torch.equal(outputs["logits"], expected["logits"])
    else:
        assert outputs["logits"].shape == (2, 0, VOCAB)
    torch.testing.assert_close(outputs["loss"] / len(readout.tokens(inputs).rows), expected["loss"])


class PatchedByLiger(transformers.LlamaForCausalLM):
    def forward(self, labels=None, skip_logits=None, **kwargs):
        if skip_logits and labels is None:
            raise ValueError("skip_logits is True, but labels and shift_labels are None")
        return super().forward(labels=labels, **kwargs)


def test_a_trainer_that_asks_liger_for_no_logits():
    model, inputs = PatchedByLiger(transformers.LlamaConfig(**SIZES)), batch()
    readout = probe(model, inputs)
    with torch.no_grad(), readout.attach(lambda read, *_: read(readout.tokens(inputs)).sums[-1]):
        outputs = model(
            **inputs, skip_logits=True
        )  # as Trainer's evaluation calls it with `use_liger_kernel`
        expected = model(**inputs)
    assert torch.equal(outputs["loss"], expected["loss"])


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["head frozen", "head trained"])
def test_lora(saved):
    inputs = batch()
    model = get_peft_model(
        build(), LoraConfig(target_modules=["q_proj", "down_proj"], modules_to_save=saved)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    (WEIGHTS * layer_losses(model, inputs)).sum().backward()
    expected = gradients(model)
    assert any("lm_head" in name for name in expected) == (saved is not None)
    readout = probe(model, inputs)
    torch.testing.assert_close(train_step(readout, model, inputs)[2], expected)


def test_reads_are_no_calls_of_the_norm():
    """FSDP would gather the shards of norm and head for each, and let go of them after it."""
    model, inputs, calls = build(), batch(), []
    readout = probe(model, inputs)
    model.model.norm.register_forward_pre_hook(lambda *args: calls.append(args))
    train_step(readout, model, inputs)
    assert len(calls) == 1


def test_the_model_is_left_as_it_was():
    model, inputs = build(), batch()
    outputs = model(**inputs)
    before = [(dict(vars(module)), len(module._forward_hooks)) for module in model.modules()]
    readout = probe(model, inputs)
    with readout.attach(lambda *_: None):
        model(**inputs)
    with pytest.raises(ZeroDivisionError), readout.attach(lambda *_: 1 / 0):
        model(**inputs)
    assert [
        (dict(vars(module)), len(module._forward_hooks)) for module in model.modules()
    ] == before
    assert torch.equal(model(**inputs)["logits"], outputs["logits"])


class Biased(transformers.LlamaForCausalLM):
    def forward(self, **kwargs):
        outputs = super().forward(**kwargs)
        outputs.logits = outputs.logits + torch.arange(VOCAB)
        return outputs


class Plain(nn.Module):
    """Not from transformers: no config, no class of outputs."""

    def __init__(self, returns=dict, norm=nn.LayerNorm, scaled=False):
        super().__init__()
        torch.manual_seed(0)
        self.returns, self.scale = returns, nn.Parameter(torch.ones(())) if scaled else 1.0
        self.embed, self.norm = nn.Embedding(VOCAB, 8), norm(8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS)
        )
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids, labels=None, attention_mask=None):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)) * self.scale
        loss = (
            None
            if labels is None
            else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )
        return {"loss": loss, "logits": logits} if self.returns is dict else (logits, loss)


class OverTokens(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)


def test_running_statistics_are_left_as_they_were():
    model = Plain()
    model.layers[0].append(OverTokens(8))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    probe(model, batch())
    assert len(before) == 3 and all(
        torch.equal(before[name], buffer) for name, buffer in model.named_buffers()
    )


def test_a_model_without_a_config():
    model, inputs = Plain(), batch()
    losses = layer_losses(model, inputs)
    _, means, _ = train_step(probe(model, inputs), model, inputs)
    torch.testing.assert_close(means, losses.detach())


def on_head(adapter, **settings):
    return get_peft_model(build(), adapter(target_modules=["lm_head"], **settings))


class Dropping(nn.Module):
    """Drops without a module for it."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return nn.functional.dropout(self.norm(x), 0.5, self.training)


def dropout_before_head():
    model = build()
    model.model.norm = Dropping(model.model.norm)
    return model


def other_loss():
    model = build()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.square().mean()
    return model


def hooked(name, hook):
    model = build()
    model.get_submodule(name).register_forward_hook(lambda module, args, output: hook(output))
    return model


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: build("RobertaForMaskedLM", max_position_embeddings=40), "chain of modules"),
        (lambda: build("LlamaForSequenceClassification"), "labels of tokens"),
        (
            lambda: build("BlenderbotForConditionalGeneration", **BART | ENCODER_DECODER),
            "without its labels",
        ),
        (lambda: build("CTRLLMHeadModel", **NO_DROPOUT), "in place"),
        (lambda: on_head(LoraConfig), "acts beside"),
        (lambda: on_head(IA3Config, feedforward_modules=[]), "acts beside"),
        (dropout_before_head, "single positions"),
        (other_loss, "replay"),
        (lambda: hooked("model.norm", lambda x: 2 * x), "replay"),
        (lambda: hooked("lm_head", lambda x: x + torch.arange(VOCAB)), "replay"),
        (lambda: Plain(tuple), "no loss by name"),
        (lambda: Plain(scaled=True), "a parameter acts on the outputs of its head"),
        (lambda: Plain(norm=OverTokens), "across positions"),
        # Its loss leaves out labels that the attention mask hides; this batch hides none.
        (lambda: build("BioGptForTokenClassification", num_labels=VOCAB), "replay"),
        (lambda: Biased(transformers.LlamaConfig(**SIZES)), "scaled or capped"),
    ],
)
def test_other_tails_are_refused(make, match):
    inputs = {**batch(), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    model = make()
    if "Sequence" in type(model).__name__:
        inputs["labels"] = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=match):
        probe(model, inputs)


def test_a_batch_needs_labels():
    with pytest.raises(ValueError, match="labels"):
        probe(build(), {"input_ids": batch()["input_ids"]})


def test_mixed_precision_over_a_half_precision_model():
    model, inputs = build().half(), batch()
    forward = model.forward
    model.forward = lambda *args, **kwargs: torch.autocast("cpu", torch.bfloat16)(forward)(
        *args, **kwargs
    )
    losses = layer_losses(model, inputs)
    _, means, found = train_step(probe(model, inputs), model, inputs)
    torch.testing.assert_close(means, losses.detach(), rtol=0.02, atol=0.0)
    assert {gradient.dtype for gradient in found.values()} == {torch.float16}


def test_a_small_part_of_the_loss_beside_the_cross_entropy_shows_in_mixed_precision():
    model, inputs = build(), batch()
    forward, cross_entropy = model.forward, model.loss_function
    model.forward = lambda *args, **kwargs: torch.autocast("cpu", torch.bfloat16)(forward)(
        *args, **kwargs
    )
    probe(model, inputs)
    model.loss_function = lambda logits, **given: (
        cross_entropy(logits=logits, **given) + 1e-3 * logits.float().logsumexp(-1).square().mean()
    )
    with pytest.raises(ValueError, match="not the cross-entropy"):
        probe(model, inputs)


def test_mixed_precision_casts_the_weight_of_the_head_once_in_a_forward():
    model, inputs, casts = build(), batch(), []
    readout = probe(model, inputs)

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            casts.extend(
                1
                for arg in args[:1]
                if "_to_copy" in str(func) and arg.shape == model.lm_head.weight.shape
            )
            return func(*args, **(kwargs or {}))

    def twice(read, *_):
        read(readout.tokens(inputs))
        return read(readout.tokens(inputs), WEIGHTS).objective

    for _ in range(2):
        casts.clear()
        with readout.attach(twice), torch.autocast("cpu", torch.bfloat16), Casts():
            model(**inputs)
        assert len(casts) == 1


@pytest.mark.parametrize(
    ("name", "overrides", "dropout"),
    [
        pytest.param(
            "MT5ForConditionalGeneration", {}, "decoder.dropout", marks=pytest.mark.slow
        ),  # behind a norm
        (
            "BertForTokenClassification",
            MODELS["BertForMaskedLM"] | {"num_labels": VOCAB},
            "dropout",
        ),  # with no norm
    ],
)
def test_a_dropout_module_before_the_head_drops_as_in_the_replay(name, overrides, dropout):
    model, inputs = build(name, **overrides), batch()
    dropout = model.get_submodule(dropout)
    dropout.p = 0.5
    readout = probe(model, inputs)
    assert dropout.training

    tokens, draws = readout.tokens(inputs), []
    with (
        torch.no_grad(),
        readout.attach(lambda read, *_: draws.append(read(tokens).sums / len(tokens.rows))),
    ):
        for _ in range(400):
            model(**inputs)
    tiled = torch.stack(draws)  # [draws, layers]
    with torch.no_grad():
        replayed = torch.stack([layer_losses(model, inputs) for _ in range(400)])  # [draws, layers]
    error = (tiled.var(0) / 400 + replayed.var(0) / 400).sqrt()
    assert (tiled.std(0) > 0).all()
    assert ((tiled.mean(0) - replayed.mean(0)).abs() < 4 * error).all()
    torch.testing.assert_close(tiled.std(0), replayed.std(0), rtol=0.2, atol=0.0)


def test_a_scale_before_the_head_is_found_in_the_config():
    model = build("T5ForConditionalGeneration")
    readout = probe(model, batch())
    assert model.config.scale_decoder_outputs
    assert [module.factor for module in readout._norm if hasattr(module, "factor")] == [
        model.config.d_model**-0.5
    ]


def test_dropout_before_the_head_leaves_the_random_state_of_the_models_own_forward():
    model, inputs = build("T5ForConditionalGeneration", dropout_rate=0.1), batch()
    readout = probe(model, inputs)
    torch.manual_seed(0)
    model(**inputs)
    expected = torch.rand(3)
    torch.manual_seed(0)
    train_step(readout, model, inputs)
    assert torch.equal(torch.rand(3), expected)
