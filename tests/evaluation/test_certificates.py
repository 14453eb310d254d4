"""Certified layers: by hand from block sums, and by how often a certificate is wrong."""

import numpy as np
import pytest
from scipy import stats
from tiny import bert, classification_data

from hf_descent import DescentProblem
from hf_descent.evaluation import Certificate, LayerProfile, certify, layer_profile, layer_profiles


def profile_of(losses, problem=None, gamma=0.0, tolerance=0.0):
    """A profile from the losses of blocks of ten items each, `[blocks, layers]`."""
    blocks = np.zeros((*losses.shape, 4))
    blocks[..., 1] = blocks[..., 3] = 10.0
    blocks[..., 2] = 10 * losses
    mean = losses.mean(0)
    found = None if problem is None else DescentProblem(**problem).violations(torch_of(mean)).numpy()
    return LayerProfile(
        "accuracy",
        mean,
        mean * 0,
        losses,
        gamma,
        violations=found,
        problem=problem,
        tolerance=tolerance,
        blocks=blocks,
    )


def torch_of(values):
    import torch

    return torch.tensor(values, dtype=torch.float64)


PROBLEM = DescentProblem([0.1, 0.2], 1.0, 2).state_dict()


def test_radii_pair_the_layers_over_the_data():
    generator = np.random.default_rng(0)
    shared = generator.normal(size=(12, 1))
    losses = np.array([0.7, 0.5]) + 0.05 * shared + 0.001 * generator.normal(size=(12, 2))
    certificate = certify(profile_of(losses, PROBLEM), confidence=0.9)
    violations = np.stack([losses[:, 0] - 0.9, losses[:, 1] - 0.8 * losses[:, 0]], axis=1)  # of each block
    errors = violations.std(axis=0, ddof=1) / np.sqrt(12)
    np.testing.assert_allclose(certificate.violations, violations.mean(0), rtol=1e-5)
    np.testing.assert_allclose(certificate.radii, stats.t.ppf(1 - 0.1 / 4, 11) * errors, rtol=1e-5)
    assert certificate.radii[1] < 0.5 * certificate.radii[0]  # what both layers share cancels
    assert certificate.certified == [True, True]
    assert certificate.certified_share == 1.0


def test_layers_are_certified_open_or_refuted():
    generator = np.random.default_rng(1)
    losses = np.array([0.6, 0.6]) + 0.02 * generator.normal(size=(12, 2))  # violations: about 0, and 0.18
    problem = DescentProblem([0.4, 0.3], 1.0, 2).state_dict()
    certificate = certify(profile_of(losses, problem))
    assert certificate.certified == [False, False]
    assert (certificate.certified_share, certificate.refuted_share) == (0.0, 0.5)
    assert certify(profile_of(losses, problem, tolerance=0.3)).certified_share == 1.0
    # At chance, within the tolerance or by a measured loss below f_0, a layer is refuted; near its edge it is open.
    assert certify(profile_of(losses, problem, tolerance=0.5)).refuted_share == 1.0
    for chance, refuted in ((0.8, 1.0), (0.9, 0.0), (1.0, 0.0)):
        found = certify(profile_of(losses, problem | {"chance_loss": chance}, tolerance=0.3))
        assert (found.certified_share, found.refuted_share) == (float(chance == 1), refuted), chance
    assert "not certified" in str(certificate)
    assert "independent samples" in str(certificate)


def test_false_certificates_are_as_rare_as_stated():
    """Layers exactly on their bounds: a certificate of any of them is false."""
    generator = np.random.default_rng(2)
    wrong = 0
    for _ in range(400):
        losses = np.array([0.9, 0.72]) + 0.05 * generator.normal(size=(16, 2))
        wrong += certify(profile_of(losses, PROBLEM), confidence=0.9).certified_share > 0
    # Two-sided intervals, of which only one side can certify: half of 10 %.
    assert stats.binomtest(wrong, 400, 0.05, alternative="greater").pvalue > 1e-3
    assert wrong > 4


def test_unconstrained_layers_are_left_out_and_profiles_need_a_problem():
    problem = DescentProblem(0.1, 1.0, 3, [2]).state_dict()
    certificate = certify(profile_of(np.random.default_rng(3).random((8, 3)), problem))
    assert certificate.layers == [2]
    assert certificate.radii.shape == (1,)
    with pytest.raises(ValueError, match="without `problem`"):
        certify(profile_of(np.ones((8, 3))))
    problem = DescentProblem(0.1, 1e3, 2)
    single = layer_profile(bert(num_layers=2), classification_data(8), problem=problem, tolerance=1.0)
    assert single.feasible
    assert certify(single).certified == [False, False]  # one batch: no radius, no certificate


def test_measured_profiles_and_the_disk(tmp_path):
    model, data = bert(num_layers=2), classification_data(40)
    problem = DescentProblem(0.1, 1.0, 2)
    profiles = layer_profiles(model, data, [0.0, 2.0], problem=problem, batch_size=8, seed=3)
    for gamma, profile in zip([0.0, 2.0], profiles):
        alone = layer_profile(model, data, gamma=gamma, problem=problem, batch_size=8, seed=3)
        np.testing.assert_array_equal(profile.losses, alone.losses)
        np.testing.assert_array_equal(profile.sample_losses, alone.sample_losses)
        batch_means = np.stack([alone.sample_losses[i : i + 8].mean(0) for i in range(0, 40, 8)])
        expected = stats.t.ppf(0.975, 4) * batch_means.std(axis=0, ddof=1) / np.sqrt(5)
        np.testing.assert_allclose(alone.radius("losses"), expected, rtol=1e-4)
    certificate, path = certify(profiles[0]), str(tmp_path / "certificate.json")
    certificate.to_json(path)
    assert str(Certificate.from_json(path)) == str(certificate)
