import pytest
import torch
from scipy.fft import dct
from test_all_models import batch_of, build
from transformers import DistilBertConfig, DistilBertModel

from hf_descent.models import UTConfig, UTForSequenceClassification
from hf_descent.models.ut import UTLayer


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


def test_untrained_denoiser_moves_towards_the_clean_clip():
    batch, model = batch_of("ut"), build("ut")
    spectrum = batch["labels"] @ model.layers[0].projection  # [batch, frames, frequency]
    torch.testing.assert_close(
        spectrum, torch.from_numpy(dct(batch["labels"].numpy(), norm="ortho"))
    )
    reconstruction = model(batch["pixel_values"]).logits
    noise, error = (x - batch["labels"] for x in (batch["pixel_values"], reconstruction))
    assert 0.1 < error.square().mean() / noise.square().mean() < 0.7
    # Frames that are all alike are a fixed point: near the identity, not merely contracting.
    torch.testing.assert_close(model(batch["labels"]).logits, batch["labels"])


def test_padding_changes_nothing():
    model, batch = build("ut-text"), batch_of("ut-text", 4)
    labels = batch.pop("labels")
    outputs = model(**batch, labels=labels)
    for row, length in enumerate(batch["attention_mask"].sum(1)):
        alone = model(batch["input_ids"][row : row + 1, :length]).logits
        torch.testing.assert_close(outputs.logits[row : row + 1], alone)
    torch.testing.assert_close(
        outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, labels)
    )
    torch.testing.assert_close(
        model(**batch, labels=labels, num_items_in_batch=torch.tensor(8)).loss, outputs.loss * 4 / 8
    )
    embedded = model(
        inputs_embeds=model.embed_tokens(batch["input_ids"]), attention_mask=batch["attention_mask"]
    )
    assert torch.equal(embedded.logits, outputs.logits)


def test_token_embeddings_of_a_pretrained_model(tmp_path):
    sizes = {"dim": 12, "hidden_dim": 24, "n_heads": 2, "n_layers": 1, "max_position_embeddings": 8}
    pretrained = DistilBertModel(DistilBertConfig(vocab_size=50, pad_token_id=3, **sizes))
    pretrained.save_pretrained(tmp_path)
    model = UTForSequenceClassification.from_embeddings(tmp_path, num_hidden_layers=2, num_labels=4)
    assert torch.equal(model.embed_tokens.weight, pretrained.embeddings.word_embeddings.weight)
    assert (model.config.vocab_size, model.config.hidden_size, model.config.pad_token_id) == (
        50,
        12,
        3,
    )
    assert model(**batch_of("ut-text")).logits.shape == (8, 4)
    assert not model.training
    old = UTConfig(norm_energy=False).to_dict()  # as 0.1 saved it
    assert UTConfig.from_dict(old).hidden_size == 256
    with pytest.raises(ValueError, match="`norm_energy` is True"):
        UTConfig.from_dict(old | {"norm_energy": True})


def recombined(attended, inputs, symmetric, skip):
    """The ReLU half-step of a layer whose symmetric part is `symmetric`, before and after: the energies E2."""
    layer = UTLayer(UTConfig(hidden_size=len(symmetric))).double().requires_grad_(False)
    # Any A with this symmetric part makes the same layer.
    layer.mixing.copy_(symmetric + torch.triu(skip, 1) - torch.triu(skip, 1).T)
    layer.skip.copy_(skip)
    moved = layer.combine(attended, inputs)

    def energy(y):  # E2 = tr(Y (I - S) Y^T) / 2 - <X B, Y>
        return float(
            torch.trace(y @ (torch.eye(len(symmetric)) - symmetric) @ y.T) / 2
            - (inputs @ skip * y).sum()
        )

    return energy(attended), energy(moved)


def test_relu_half_step_never_raises_its_energy_where_s_is_at_least_minus_one():
    generator = torch.Generator().manual_seed(0)
    drops = []
    for draw in range(300):
        seq, width = 1 + draw % 6, 1 + draw % 5
        rows = torch.rand(3, seq, width, generator=generator, dtype=torch.float64)
        attended, inputs = rows[0] * 10 ** (draw % 3 - 1), rows[1] - 0.3
        basis = torch.linalg.qr(
            torch.randn(width, width, generator=generator, dtype=torch.float64)
        )[0]
        eigenvalues = -1 + 4 * torch.rand(width, generator=generator, dtype=torch.float64)
        eigenvalues[0] = -1
        skip = torch.randn(width, width, generator=generator, dtype=torch.float64)
        before, after = recombined(
            attended, inputs, basis @ torch.diag(eigenvalues) @ basis.T, skip
        )
        assert after <= before + 1e-9
        drops.append(before - after)
    assert max(drops) > 1.0


def test_relu_half_step_can_raise_its_energy_where_s_is_below_minus_one():
    one = torch.ones(1, 1, dtype=torch.float64)
    # y = 1.6 goes to ReLU(5 - 2 * 1.6) = 1.8, farther from the minimum 5/3, on its other side.
    before, after = recombined(1.6 * one, 5 * one, -2 * one, one)
    assert (before, after) == (pytest.approx(-4.16), pytest.approx(-4.14))
