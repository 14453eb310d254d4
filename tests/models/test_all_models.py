"""What every architecture of the package does alike: save and load, train, low precision, checkpoints of gradients."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForImageToImage,
    AutoModelForSequenceClassification,
    BertConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
)

from hf_descent import layer_logits, layer_losses
from hf_descent.models import (
    DustConfig,
    DustForVideoDenoising,
    LinearReadoutConfig,
    LinearReadoutForSequenceClassification,
    UTConfig,
    UTForSequenceClassification,
    UTForVideoDenoising,
    ViTDenoiserConfig,
    ViTForDenoising,
)


SIZES = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **SIZES}
BUILDS = {
    "ut": lambda **config: UTForVideoDenoising(
        UTConfig(**{"hidden_size": 16, "num_hidden_layers": 3, "attention_step": 0.5, **config})
    ),
    "dust": lambda **config: DustForVideoDenoising(
        DustConfig(**{"hidden_size": 16, "dictionary_size": 24, "num_hidden_layers": 3, **config})
    ),
    "dust-shared": lambda **config: BUILDS["dust"](shared_dictionary=True, **config),
    "vit": lambda **config: ViTForDenoising(
        ViTDenoiserConfig(
            encoder_config=ViTConfig(hidden_size=48, image_size=16, patch_size=4, **SIZES), **config
        )
    ),
    "ut-text": lambda **config: UTForSequenceClassification(
        UTConfig(
            **{
                "hidden_size": 16,
                "num_hidden_layers": 3,
                "vocab_size": 50,
                "num_labels": 3,
                **config,
            }
        )
    ),
    "linear": lambda **config: LinearReadoutForSequenceClassification(
        LinearReadoutConfig(
            encoder_config=BertConfig(hidden_size=16, vocab_size=50, **STILL),
            num_labels=3,
            **config,
        )
    ),
}
TEXT = ("ut-text", "linear")


def build(name, **config):
    torch.manual_seed(0)
    model = BUILDS[name](**config)
    if name == "ut-text":  # Xavier leaves embeddings so small that attention would be uniform
        torch.nn.init.normal_(model.embed_tokens.weight)
    return model.eval()


def batch_of(name, count=8):
    generator = torch.Generator().manual_seed(0)
    if name in TEXT:
        ids = torch.randint(50, (count, 7), generator=generator)
        mask = (torch.arange(7) < torch.tensor([7, 4, 1, 6] * 2)[:count, None]).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(count) % 3}
    shape = (3, 1, 1) if name == "vit" else (1, 16)
    clean = torch.rand(count, *shape, generator=generator).expand(
        count, *((3, 16, 16) if name == "vit" else (5, 16))
    )
    return {
        "pixel_values": clean + 0.1 * torch.randn(clean.shape, generator=generator),
        "labels": clean,
    }


@pytest.mark.parametrize("name", BUILDS)
def test_save_and_load(name, tmp_path):
    model, batch = build(name), batch_of(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.config.noise_sigma = 0.25
    model.save_pretrained(tmp_path)
    auto = AutoModelForSequenceClassification if name in TEXT else AutoModelForImageToImage
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and AutoConfig.from_pretrained(tmp_path).noise_sigma == 0.25
    for field in (
        "attention_step",
        "shared_dictionary",
        "loss_scale",
        "num_labels",
        "pooling",
        "readout",
    ):
        assert getattr(loaded.config, field, None) == getattr(model.config, field, None)
    assert torch.equal(loaded(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("name", BUILDS)
def test_stock_trainer_lowers_the_loss(name, tmp_path):
    batch = batch_of(name)
    dataset = [{key: values[i] for key, values in batch.items()} for i in range(8)]
    args = TrainingArguments(
        tmp_path, max_steps=30, learning_rate=3e-3, report_to="none", use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(build(name), args, train_dataset=dataset, eval_dataset=dataset)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(
        before, rel=1e-4
    )  # of one step, in two parts
    assert trainer.evaluate()["eval_loss"] < 0.9 * before


@pytest.mark.parametrize("name", ["ut", "dust", "dust-shared", "linear"])
def test_gradient_checkpointing_gives_the_same_gradients(name):
    gradients = []
    for checkpointing in (False, True):
        model = build(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert any(
                getattr(module, "gradient_checkpointing", False) for module in model.modules()
            )
        model(**batch_of(name)).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        torch.testing.assert_close(plain, checkpointed)
        assert plain.isfinite().all() and plain.any()


@pytest.mark.parametrize("name", ["ut", "dust", "ut-text"])
def test_bf16_autocast_follows_full_precision(name):
    model, batch = build(name), batch_of(name)
    expected = model(**batch).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch).logits
    assert 0 < (logits - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("name", ["ut", "dust"])
def test_a_denoiser_in_bfloat16_takes_float32_clips(name):
    model, batch = build(name), batch_of(name)
    expected = model(**batch).logits
    outputs = model.bfloat16()(**batch)
    assert outputs.logits.dtype == torch.bfloat16 and outputs.loss.dtype == torch.float32
    assert (outputs.logits - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("name", ["ut", "dust", "dust-shared", "ut-text"])
def test_layers_are_iterates_that_the_readout_reads(name):
    model, batch = build(name), batch_of(name, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    outputs = model(**batch, output_hidden_states=True)
    first = model.embed_tokens(batch["input_ids"]) if name in TEXT else batch["pixel_values"]
    assert len(outputs.hidden_states) == 4 and torch.equal(outputs.hidden_states[0], first)
    assert model(**batch).hidden_states is None

    def readout(states):
        if name not in TEXT:
            return states
        mask = batch["attention_mask"][..., None]
        return model.classifier((states * mask).sum(1) / mask.sum(1))

    for states, logits in zip(outputs.hidden_states[1:], layer_logits(model, batch), strict=True):
        torch.testing.assert_close(readout(states), logits)
        assert name.startswith("dust") or (states >= 0).all()
    torch.testing.assert_close(outputs.logits, readout(outputs.hidden_states[-1]))
    # Layer 2 of the whole model is the last of the model with two layers.
    cut = build(name, num_hidden_layers=2)
    cut.load_state_dict(
        {key: value for key, value in model.state_dict().items() if not key.startswith("layers.2")}
    )
    torch.testing.assert_close(layer_losses(model, batch)[1], cut(**batch).loss)
    if name not in TEXT:
        by_hand = (
            sum((x - y).square().sum() / 2 for x, y in zip(outputs.logits, batch["labels"])) / 4
        )
        torch.testing.assert_close(outputs.loss, by_hand)
        torch.testing.assert_close(
            build(name, loss_scale=3.0)(**batch).loss, 6 * build(name)(**batch).loss
        )


@pytest.mark.parametrize(
    ("config", "values", "match"),
    [
        (UTConfig, {"attention_step": 1.5}, "'attention_step'.*got 1.5"),
        (DustConfig, {"sparsity": -0.1}, "'sparsity'.*greater or equal to 0, got -0.1"),
        (ViTDenoiserConfig, {"loss_scale": 0}, "'loss_scale'.*got 0"),
        (ViTDenoiserConfig, {"readout": "mlp"}, r"'readout'.*\('patches', 'linear'\), got mlp"),
        (LinearReadoutConfig, {"pooling": "max"}, r"'pooling'.*\('cls', 'mean'\), got max"),
    ],
)
def test_bad_configs_are_refused(config, values, match):
    with pytest.raises(Exception, match=f"(?s){match}"):
        config(**values)


def test_bad_inputs_are_refused():
    for name in ("ut", "dust"):
        with pytest.raises(ValueError, match=r"\[2, 1, 16\].*\[2, 3, 16\]"):
            build(name)(torch.rand(2, 3, 16), labels=torch.rand(2, 1, 16))
