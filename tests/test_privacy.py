"""Privacy of noisy embeddings: against the closed form of the mechanism, an attack, and what the hooks really do."""

import math

import numpy as np
import pytest
import torch
from noisy import vit
from scipy.stats import norm
from tiny import bert, classification_data
from transformers import MBartConfig, MBartForSequenceClassification

from hf_descent import noise_curve
from hf_descent.evaluation.comparison import Run, check_comparable
from hf_descent.evaluation.perturbations import salt_and_pepper
from hf_descent.privacy import (
    PrivacyCurve,
    PrivateEmbeddings,
    epsilon_of_gamma,
    gamma_of_epsilon,
    median_norm,
    privacy_curve,
)


def delta_of(epsilon, deviation, sensitivity):
    """Balle and Wang (2018), theorem 8."""
    a, b = sensitivity / (2 * deviation), epsilon * deviation / sensitivity
    return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)


@pytest.mark.parametrize(("gamma", "clip_norm", "sigma", "tokens"), [(1.0, 0.5, 0.7, 1), (3.0, 1.5, 2.0, 16)])
def test_epsilon_is_that_of_the_analytic_mechanism(gamma, clip_norm, sigma, tokens):
    epsilon = epsilon_of_gamma(gamma, 1e-5, clip_norm, sigma, tokens)
    assert delta_of(epsilon, gamma * sigma, 2 * clip_norm * math.sqrt(tokens)) == pytest.approx(1e-5, rel=1e-6)
    assert gamma_of_epsilon(epsilon, 1e-5, clip_norm, sigma, tokens) == pytest.approx(gamma, rel=1e-6)


def test_more_noise_and_shorter_texts_are_more_private():
    levels = [epsilon_of_gamma(gamma, 1e-5, 1.0, 1.0) for gamma in (0.5, 1.0, 2.0, 4.0)]
    assert levels == sorted(levels, reverse=True)
    assert epsilon_of_gamma(4.0, 1e-5, 1.0, 1.0, tokens=4) == pytest.approx(epsilon_of_gamma(2.0, 1e-5, 1.0, 1.0))


def test_embeddings_are_clipped_then_perturbed():
    model, seen = bert(), []
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table *= torch.linspace(0.1, 3.0, len(table))[:, None] / table.norm(dim=1, keepdim=True)
    ids, mask = torch.arange(1, 41).clamp(max=39).view(4, 10), torch.ones(4, 10, dtype=torch.long)
    mask[0, 5:] = 0
    model.bert.embeddings.word_embeddings.register_forward_hook(lambda module, args, output: seen.append(output))
    with PrivateEmbeddings(model, 1e-6, clip_norm=1.0, seed=0, sigma=1.0) as noise, torch.no_grad():
        noise._lookups[0].register_forward_hook(lambda module, args, output: seen.append(output))
        model(input_ids=ids, attention_mask=mask)
    clean, noisy = seen
    expected = clean / clean.norm(dim=-1, keepdim=True).clamp(min=1.0)
    torch.testing.assert_close(noisy, expected, atol=1e-4, rtol=0)
    assert clean.norm(dim=-1).max() > 2


def test_no_attack_on_released_embeddings_beats_the_bound():
    """The best test of two tokens against each other, the likelihood ratio, errs as often as delta allows."""
    clip_norm, sigma, gamma, epsilon = 1.0, 0.5, 5.0, 0.8
    model = bert()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        direction = torch.nn.functional.normalize(torch.ones(table.shape[1]), dim=0)
        table[5], table[6] = 7 * direction, -7 * direction  # as far apart as clipping allows
    released = []
    with PrivateEmbeddings(model, gamma, clip_norm, seed=1, sigma=sigma) as noise, torch.no_grad():
        noise._lookups[0].register_forward_hook(lambda module, args, output: released.append(output @ direction))
        for token in (5, 6):
            model(input_ids=torch.full((20000, 1), token))
    first, second = (projection.flatten() for projection in released)
    # P(A | first) - e^epsilon P(A | second) is at most delta for every event A; the worst is a threshold.
    thresholds = torch.linspace(-8, 8, 200)
    gain = [(first > t).double().mean() - math.exp(epsilon) * (second > t).double().mean() for t in thresholds]
    delta = delta_of(epsilon, gamma * sigma, 2 * clip_norm)
    assert max(gain) == pytest.approx(delta, abs=0.02)
    assert delta > 0.03  # the bound is met, and not by far


def test_accuracy_against_epsilon(tmp_path):
    model, data = bert(), classification_data(40)
    curve = privacy_curve(model, data, [1.0, 8.0, 100.0], tokens=10, seed=3, sigma=0.1, batch_size=8, draws=2)
    assert curve.epsilons.tolist() == [100.0, 8.0, 1.0]
    assert (np.diff(curve.gammas) > 0).all()
    assert (curve.epsilons_per_token < curve.epsilons).all()
    assert curve.clean == pytest.approx(noise_curve(model, data, [0.0]).mean[0])
    assert curve.clip_norm == pytest.approx(
        np.median(model.bert.embeddings.word_embeddings.weight.detach().norm(dim=1))
    )
    noise = PrivateEmbeddings(model, 1.0, curve.clip_norm, seed=3, sigma=0.1)
    by_hand = noise_curve(model, data, curve.gammas, noise=noise, batch_size=8, draws=2)
    np.testing.assert_array_equal(by_hand.mean, curve.values)
    np.testing.assert_array_equal(by_hand.radius("mean"), curve.radii)
    path = str(tmp_path / "privacy.json")
    curve.to_json(path)
    assert str(PrivacyCurve.from_json(path)) == str(curve)
    assert "10 tokens together" in str(curve)


def test_a_kept_curve_is_not_read_for_another_noise(tmp_path):
    model, data, path = bert(), classification_data(16), str(tmp_path / "curve.json")
    kinds = (PrivateEmbeddings(model, 1.0, 0.05, seed=0), PrivateEmbeddings(model, 1.0, 0.01, seed=0), None)
    for noise in (*kinds, *kinds):
        kept, anew = (noise_curve(model, data, [1.0], noise=noise, path=path) for path in (path, None))
        np.testing.assert_array_equal(kept.losses, anew.losses)
    with pytest.raises(ValueError, match="`perturbation` and `noise` are given"):
        noise_curve(model, data, [1.0], noise=kinds[0], perturbation=salt_and_pepper)


def test_noise_is_told_apart_by_what_it_clips_to():
    model, data = bert(), classification_data(16)
    noises = [PrivateEmbeddings(model, 1.0, clip_norm, seed=0) for clip_norm in (0.05, 0.05, 0.01)]
    one, same, other = (Run("run", noise_curve(model, data, [1.0], noise=noise, batch_size=8)) for noise in noises)
    check_comparable([one, same])
    for run in (other, Run("plain", noise_curve(model, data, [1.0], batch_size=8))):
        with pytest.raises(ValueError, match="not evaluated on the same"):
            check_comparable([one, run])


def test_bad_arguments_are_named():
    model = bert()
    with pytest.raises(ValueError, match="`clip_norm` is 0"):
        PrivateEmbeddings(model, 1.0, 0)
    with pytest.raises(ValueError, match="no token embeddings"):
        PrivateEmbeddings(vit(), 1.0, 1.0, sigma=1.0)
    with pytest.raises(ValueError, match="`delta` is 1"):
        epsilon_of_gamma(1.0, 1, 1.0, 1.0)
    with pytest.raises(ValueError, match="`gamma` is 0"):
        epsilon_of_gamma(0, 1e-5, 1.0, 1.0)
    with pytest.raises(ValueError, match="`epsilon` is -1"):
        gamma_of_epsilon(-1, 1e-5, 1.0, 1.0)
    assert median_norm(model) > 0


def test_the_norm_is_that_of_what_the_model_looks_up():
    model = MBartForSequenceClassification(
        MBartConfig(
            vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, scale_embedding=True,
        )
    )  # fmt: skip
    norms = model.get_input_embeddings().weight.detach().norm(dim=1) * 4  # scaled by the root of 16
    assert median_norm(model) == pytest.approx(norms.median().item(), rel=0.05)
