import pytest
import torch
from scipy.fft import dct
from transformers import (
    AutoConfig,
    AutoModelForImageToImage,
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertModel,
    Trainer,
    TrainingArguments,
)

from hf_descent import layer_losses
from hf_descent.models import UTConfig, UTForSequenceClassification, UTForVideoDenoising
from hf_descent.models.ut import UTLayer


def tiny_denoiser(**config):
    torch.manual_seed(0)
    return UTForVideoDenoising(UTConfig(hidden_size=16, num_hidden_layers=3, attention_step=0.5, **config))


def tiny_classifier(**config):
    torch.manual_seed(0)
    model = UTForSequenceClassification(
        UTConfig(hidden_size=16, num_hidden_layers=3, vocab_size=50, num_labels=3, **config)
    )
    # Xavier leaves embeddings so small that attention would be uniform.
    torch.nn.init.normal_(model.embed_tokens.weight)
    return model.eval()


def text_batch():
    input_ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([7, 4, 1, 6])
    return {"input_ids": input_ids, "attention_mask": (torch.arange(7) < lengths[:, None]).long()}


def clips(n=8, frames=5, size=16):
    generator = torch.Generator().manual_seed(0)
    clean = torch.rand(n, 1, size, generator=generator).expand(n, frames, size)
    noisy = clean + 0.1 * torch.randn(n, frames, size, generator=generator)
    return [{"pixel_values": x, "labels": y} for x, y in zip(noisy, clean)]


def collate(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def test_layer_is_the_stated_formula():
    torch.manual_seed(0)
    layer = UTLayer(UTConfig(hidden_size=4, attention_step=0.3)).double().requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(5, 4).double()
    projected = tokens @ layer.projection
    weights = (-torch.cdist(projected, projected).square() / 2).exp()
    moved = tokens + 0.3 * (weights @ tokens / weights.sum(1, keepdim=True) - tokens)
    a = layer.mixing
    expected = (moved @ (a + a.T) / 2 + tokens @ layer.skip).clamp(min=0)
    torch.testing.assert_close(layer(tokens[None])[0], expected)
    assert not torch.equal(a, a.T)
    assert torch.equal(layer.symmetric_mixing, layer.symmetric_mixing.T)


@pytest.mark.parametrize("build", [tiny_denoiser, tiny_classifier])
def test_eager_attention_is_the_explicit_formula(build, check_eager_attention):
    check_eager_attention(build, text_batch() if build is tiny_classifier else collate(clips()))


def test_untrained_denoiser_moves_towards_the_clean_clip():
    batch = collate(clips())
    model = tiny_denoiser()
    spectrum = batch["labels"] @ model.layers[0].projection  # [batch, frames, frequency]
    torch.testing.assert_close(spectrum, torch.from_numpy(dct(batch["labels"].numpy(), norm="ortho")))
    reconstruction = model(batch["pixel_values"]).logits
    noise, error = (x - batch["labels"] for x in (batch["pixel_values"], reconstruction))
    assert 0.1 < error.square().mean() / noise.square().mean() < 0.7
    # Frames that are all alike are a fixed point: near the identity, not merely contracting.
    torch.testing.assert_close(model(batch["labels"]).logits, batch["labels"])


def test_denoising_loss_is_the_scaled_sum_of_squares_per_clip():
    batch = collate(clips())
    outputs = tiny_denoiser()(**batch)
    by_hand = [(x - y).square().sum() / 2 for x, y in zip(outputs.logits, batch["labels"])]
    torch.testing.assert_close(outputs.loss, sum(by_hand) / 8)
    torch.testing.assert_close(tiny_denoiser(loss_scale=3.0)(**batch).loss, 6 * outputs.loss)


@pytest.mark.parametrize("build", [tiny_denoiser, tiny_classifier])
def test_hidden_states_are_the_iterates_that_the_readout_reads(build):
    model = build()
    if build is tiny_classifier:
        batch = text_batch()
        mask = batch["attention_mask"][..., None]
        first = model.embed_tokens(batch["input_ids"])

        def readout(states):
            return model.classifier((states * mask).sum(1) / mask.sum(1))
    else:
        batch = collate(clips())
        first = batch["pixel_values"]

        def readout(states):
            return states

    outputs = model(**batch, output_hidden_states=True)
    assert len(outputs.hidden_states) == 4
    assert torch.equal(outputs.hidden_states[0], first)
    torch.testing.assert_close(outputs.logits, readout(outputs.hidden_states[-1]))
    assert all((states >= 0).all() for states in outputs.hidden_states[1:])
    assert model(**batch).hidden_states is None
    # Layer l of the whole model is the last of the model cut after l.
    cut = build()
    cut.layers = cut.layers[:2]
    torch.testing.assert_close(cut(**batch).logits, readout(outputs.hidden_states[2]))
    batch.setdefault("labels", torch.tensor([0, 2, 1, 1]))
    torch.testing.assert_close(layer_losses(model, batch)[1], cut(**batch).loss)


def test_padding_changes_nothing():
    model, batch = tiny_classifier(), text_batch()
    labels = torch.tensor([0, 2, 1, 1])
    outputs = model(**batch, labels=labels)
    for row, length in enumerate(batch["attention_mask"].sum(1)):
        alone = model(batch["input_ids"][row : row + 1, :length]).logits
        torch.testing.assert_close(outputs.logits[row : row + 1], alone)
    torch.testing.assert_close(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels))
    torch.testing.assert_close(
        model(**batch, labels=labels, num_items_in_batch=torch.tensor(8)).loss, outputs.loss * 4 / 8
    )
    embedded = model(inputs_embeds=model.embed_tokens(batch["input_ids"]), attention_mask=batch["attention_mask"])
    assert torch.equal(embedded.logits, outputs.logits)


def test_token_embeddings_of_a_pretrained_model(tmp_path):
    sizes = {"dim": 12, "hidden_dim": 24, "n_heads": 2, "n_layers": 1, "max_position_embeddings": 8}
    pretrained = DistilBertModel(DistilBertConfig(vocab_size=50, pad_token_id=3, **sizes))
    pretrained.save_pretrained(tmp_path)
    model = UTForSequenceClassification.from_embeddings(tmp_path, num_hidden_layers=2, num_labels=4)
    assert torch.equal(model.embed_tokens.weight, pretrained.embeddings.word_embeddings.weight)
    assert (model.config.vocab_size, model.config.hidden_size, model.config.pad_token_id) == (50, 12, 3)
    assert model(**text_batch()).logits.shape == (4, 4)
    assert not model.training


@pytest.mark.parametrize(
    ("build", "auto"),
    [(tiny_denoiser, AutoModelForImageToImage), (tiny_classifier, AutoModelForSequenceClassification)],
)
def test_save_and_load(build, auto, tmp_path):
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.config.noise_sigma = 0.25
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert AutoConfig.from_pretrained(tmp_path).noise_sigma == 0.25
    assert loaded.config.attention_step == model.config.attention_step
    batch = text_batch() if build is tiny_classifier else collate(clips())
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = tiny_denoiser().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert all(layer.gradient_checkpointing for layer in model.layers)
        model(**collate(clips())).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [tiny_denoiser, tiny_classifier])
def test_bf16_autocast_follows_full_precision(build, attention):
    model, batch = build(attn_implementation=attention), text_batch() if build is tiny_classifier else collate(clips())
    expected = model(**batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch).logits
    assert 0 < (logits - expected).abs().max() < 0.03 * expected.abs().max()


def test_a_denoiser_in_bfloat16_takes_float32_clips(check_bfloat16):
    check_bfloat16(tiny_denoiser(), collate(clips()))


@pytest.mark.parametrize("build", [tiny_denoiser, tiny_classifier])
def test_stock_trainer_lowers_the_loss(build, tmp_path):
    model = build()
    if build is tiny_denoiser:
        dataset = clips()
    else:
        batch = text_batch()
        dataset = [
            {"input_ids": ids, "attention_mask": mask, "labels": row % 3}
            for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"]))
        ]
    args = TrainingArguments(
        tmp_path, max_steps=30, learning_rate=3e-3, report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=dataset, eval_dataset=dataset)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(before, rel=1e-4)  # of one step, in two parts
    assert trainer.evaluate()["eval_loss"] < 0.9 * before


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"attention_step": 0.0}, "attention_step"),
        ({"attention_step": 1.5}, "attention_step"),
        ({"loss_scale": 0.0}, "loss_scale"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_bad_config_is_refused(config, name):
    with pytest.raises(ValueError, match=name):
        UTConfig(**config)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"\[8, 5, 15\].*hidden_size"):
        tiny_denoiser()(torch.rand(8, 5, 15))
    with pytest.raises(ValueError, match="inputs_embeds"):
        tiny_classifier()()


def test_the_config_chooses_the_energy_of_the_attention():
    torch.manual_seed(0)
    plain, scaled = (UTLayer(UTConfig(hidden_size=4, norm_energy=norm)).double() for norm in (False, True))
    torch.nn.init.normal_(plain.projection)
    scaled.projection = plain.projection
    tokens = torch.randn(1, 5, 4).double()
    total = (-torch.cdist(tokens @ plain.projection, tokens @ plain.projection).square() / 2).exp().sum(-1)[..., None]
    torch.testing.assert_close(scaled.attend(tokens), 2 * total / (2 * total + 1) * plain.attend(tokens))


def recombined(attended, inputs, symmetric, skip):
    """The ReLU half-step of a layer whose symmetric part is `symmetric`, before and after: the energies E2."""
    layer = UTLayer(UTConfig(hidden_size=len(symmetric))).double().requires_grad_(False)
    # Any A with this symmetric part makes the same layer.
    layer.mixing.copy_(symmetric + torch.triu(skip, 1) - torch.triu(skip, 1).T)
    layer.skip.copy_(skip)
    moved = layer.combine(attended, inputs)

    def energy(y):  # E2 = tr(Y (I - S) Y^T) / 2 - <X B, Y>
        return float(torch.trace(y @ (torch.eye(len(symmetric)) - symmetric) @ y.T) / 2 - (inputs @ skip * y).sum())

    return energy(attended), energy(moved)


def test_relu_half_step_never_raises_its_energy_where_s_is_at_least_minus_one():
    generator = torch.Generator().manual_seed(0)
    drops = []
    for draw in range(300):
        seq, width = 1 + draw % 6, 1 + draw % 5
        rows = torch.rand(3, seq, width, generator=generator, dtype=torch.float64)
        attended, inputs = rows[0] * 10 ** (draw % 3 - 1), rows[1] - 0.3
        basis = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))[0]
        eigenvalues = -1 + 4 * torch.rand(width, generator=generator, dtype=torch.float64)
        eigenvalues[0] = -1
        skip = torch.randn(width, width, generator=generator, dtype=torch.float64)
        before, after = recombined(attended, inputs, basis @ torch.diag(eigenvalues) @ basis.T, skip)
        assert after <= before + 1e-9
        drops.append(before - after)
    assert max(drops) > 1.0


def test_relu_half_step_can_raise_its_energy_where_s_is_below_minus_one():
    one = torch.ones(1, 1, dtype=torch.float64)
    # y = 1.6 goes to ReLU(5 - 2 * 1.6) = 1.8, farther from the minimum 5/3, on its other side.
    before, after = recombined(1.6 * one, 5 * one, -2 * one, one)
    assert (before, after) == (pytest.approx(-4.16), pytest.approx(-4.14))
