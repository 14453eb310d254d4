"""The fitted lens: maps that start as the identity, learn what the last layer predicts, and leave the model alone."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_healing import CASES, predictions
from tiny.data import batches, classification_data, language_data
from tiny.models import bert
from torch import nn

from hf_descent.early_exit import truncate
from hf_descent.early_exit.predictions import PredictionReader
from hf_descent.early_exit.tuned_lens import TunedLens, _divergence, fit_lens
from hf_descent.evaluation.lens import lens


# What the maps stand in front of.
KINDS = {
    "bert": "bert.pooler.dense",
    "vit": "classifier",
    "llama": "lm_head",
    "gemma2": "lm_head",
}
FIT = {"steps": 40, "learning_rate": 1e-2, "batch_size": 8}


def made(kind):
    make, data = CASES[kind]
    return make().eval(), data(16)


def batch_of(rows):
    return next(batches(rows, size=16))


def moved(fitted):
    torch.manual_seed(1)
    for parameter in fitted.maps.parameters():
        nn.init.normal_(parameter, std=0.1)
    return fitted


def mapped_model(model, layer, fitted, place, batch):
    """The model cut to `layer`, whose head reads what that layer's map makes."""
    short = truncate(model, layer, batch).eval()
    if layer < model.config.num_hidden_layers:
        own = fitted.maps[layer - 1]
        linear = short.get_submodule(place)
        linear.register_forward_pre_hook(
            lambda module, args: (args[0] + args[0] @ own.weight.T + own.bias,)
        )
    return short


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_read_through_its_own_map(kind):
    model, rows = made(kind)
    batch = batch_of(rows)
    fitted = TunedLens(model, batch)
    for number, outputs in enumerate(fitted.layer_outputs(batch), start=1):
        with torch.no_grad():
            expected = truncate(model, number, batch).eval()(**batch)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-5)

    moved(fitted)
    with torch.no_grad():
        found = [outputs.logits for outputs in fitted.layer_outputs(batch)]
        assert len(found) == 4
        for layer, logits in enumerate(found, start=1):
            short = mapped_model(model, layer, fitted, KINDS[kind], batch)
            torch.testing.assert_close(logits, short(**batch).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_those_of_all_logits(kind):
    model, rows = made(kind)
    batch = batch_of(rows)
    model.requires_grad_(False)
    fitted = moved(TunedLens(model, batch))
    loss = _divergence(fitted, PredictionReader.probe(model, batch), batch)
    loss.backward()
    found = [parameter.grad.clone() for parameter in fitted.maps.parameters()]

    fitted.maps.zero_grad()
    target, labels = predictions(model, batch)
    kept = labels != -100
    expected = 0
    for layer in (1, 2, 3):
        logits, _ = predictions(mapped_model(model, layer, fitted, KINDS[kind], batch), batch)
        logs = logits[kept].log_softmax(-1)
        expected = expected + F.kl_div(logs, target[kept].softmax(-1), reduction="batchmean")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    own = [parameter.grad for parameter in fitted.maps.parameters()]
    torch.testing.assert_close(found, own, rtol=1e-3, atol=1e-5)


def naive_losses(model, fitted, place, rows):
    """The cross-entropy of every layer, one row at a time."""
    losses = []
    for layer in range(1, 5):
        short = mapped_model(model, layer, fitted, place, batch_of(rows))
        parts = []
        for batch in batches(rows, size=1):
            with torch.no_grad():
                logits, labels = predictions(short, batch)
            kept = labels != -100
            parts.append(F.cross_entropy(logits[kept], labels[kept], reduction="none"))
        losses.append(torch.cat(parts).mean().item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_fitted_losses_stand_beside_those_of_the_head_alone(kind):
    model, rows = made(kind)
    before = copy.deepcopy(model.state_dict())
    fitted = fit_lens(model, rows, **FIT)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())

    found = lens(model, rows, fitted.layer_outputs, batch_size=4)
    plain = lens(model, rows, batch_size=4)
    np.testing.assert_allclose(found.losses, plain.losses)
    expected = naive_losses(model, fitted, KINDS[kind], rows)
    np.testing.assert_allclose(found.fitted_losses, expected, rtol=1e-4)
    assert found.fitted_losses[-1] == pytest.approx(plain.losses[-1], rel=1e-4)
    assert "fitted loss" in str(found) and "fitted" not in str(plain)

    same = TunedLens(model, batch_of(rows)).layer_outputs
    untrained = lens(model, rows, same, batch_size=4)
    np.testing.assert_allclose(untrained.fitted_losses, plain.losses, rtol=1e-4)
    np.testing.assert_allclose(untrained.fitted_radii, plain.loss_radii, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_fitting_brings_every_layer_nearer_to_the_last(kind):
    model, rows = made(kind)
    batch = batch_of(rows)
    reader = PredictionReader.probe(model, batch)
    with torch.no_grad():
        before = _divergence(TunedLens(model, batch), reader, batch)
        after = _divergence(fit_lens(model, rows, **FIT), reader, batch)
    assert after < 0.7 * before


def test_the_same_seed_gives_the_same_maps():
    model, rows = made("bert")
    one, same, other = (
        fit_lens(model, rows, **{**FIT, "steps": 3}, seed=seed).maps[0].weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_share_of_the_tokens_of_a_large_vocabulary_is_read(monkeypatch):
    monkeypatch.setattr("hf_descent.early_exit.tuned_lens.LARGE_VOCABULARY", 10)
    model, rows = made("llama")
    batch = batch_of(rows)
    reader = PredictionReader.probe(model, batch)
    with torch.no_grad():
        found = {_divergence(TunedLens(model, batch), reader, batch).item() for _ in range(4)}
    assert len(found) == 4


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="`dataset` is empty; give labelled examples of training"):
        fit_lens(bert(num_layers=2), [])
    model = bert(num_layers=2, problem_type="multi_label_classification")
    rows = [{**row, "labels": torch.rand(3).round()} for row in classification_data(8)]
    with pytest.raises(ValueError, match="several labels an example"):
        fit_lens(model, rows, **FIT)
    rows = [{k: v for k, v in row.items() if k != "labels"} for row in language_data(8)]
    with pytest.raises(ValueError, match="no labels"):
        fit_lens(model, rows, **FIT)
