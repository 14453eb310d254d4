"""Certified layers: by hand from block sums, and by how often a certificate is wrong."""

import numpy as np
import pytest
from scipy import stats
from tiny import bert, classification_data

from hf_descent import DescentProblem
from hf_descent.evaluation import Certificate, certify, layer_profile, layer_profiles


def blocks_of(losses):
    """Sums over blocks of ten items each with these losses `[blocks, layers]`."""
    return np.stack([10 * losses, np.full(losses.shape, 10.0)], axis=-1)


def judged(problem, losses, **settings):
    return certify(problem, blocks_of(losses), **{"chance": 1.0} | settings)


PROBLEM = DescentProblem([0.1, 0.2], 1.0, 2)


def test_radii_pair_the_layers_over_the_data():
    generator = np.random.default_rng(0)
    shared = generator.normal(size=(12, 1))
    losses = np.array([0.7, 0.5]) + 0.05 * shared + 0.001 * generator.normal(size=(12, 2))
    verdict = judged(PROBLEM, losses, confidence=0.9)
    # The violation less a tenth of the decrease that is asked for, of each block.
    excess = np.stack(
        [losses[:, 0] - 0.9 - 0.01, losses[:, 1] - (0.8 + 0.02) * losses[:, 0]], axis=1
    )
    errors = excess.std(axis=0, ddof=1) / np.sqrt(12)
    np.testing.assert_allclose(
        verdict.reached - verdict.asked - verdict.tolerances, excess.mean(0), rtol=1e-5
    )
    np.testing.assert_allclose(verdict.radii, stats.t.ppf(0.95, 11) * errors, rtol=1e-5)
    assert verdict.radii[1] < 0.5 * verdict.radii[0]  # what both layers share cancels
    assert (
        verdict.verdicts == ["met", "met"]
        and verdict.feasible
        and "2 of 2 rows are met" in str(verdict)
    )


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (DescentProblem([0.3, 0.3], 1.0, 2), ["met", "not met"]),
        (DescentProblem([0.4, 0.3], 1.0, 2), ["met", "not met"]),  # within the tolerance, 0.04
        (DescentProblem([0.445, 0.01], 1.0, 2), ["not shown", "not shown"]),  # at the edge of it
        (DescentProblem([0.5, 0.01], 1.0, 2), ["not met", "not shown"]),
        # At chance a layer has met nothing, near it nothing is shown.
        (DescentProblem([0.3, 0.3], 1.0, 2, chance_loss=0.5), ["not met", "not met"]),
        (DescentProblem(0.3, 1.0, 2, [1], chance_loss=0.6), ["not shown"]),
        (DescentProblem(None, 1.0, 2, exit_targets={1: 0.1}, loss_targets={1: 0.55, 2: 0.6}),
         ["met", "not met", "not shown"]),
        (DescentProblem("line", 1.0, 2, descent_strength=1.0), ["not shown"]),
        (DescentProblem("line", 1.0, 2, descent_strength=0.5), ["met"]),
    ],
)  # fmt: skip
def test_rows_are_met_not_met_or_not_shown(problem, expected):
    generator = np.random.default_rng(1)
    losses = np.array([0.6, 0.6]) + 0.02 * generator.normal(size=(12, 2))
    if problem.alpha == "line" and problem.descent_strength == 1.0:
        losses = losses * [
            0.6**-0.5 * (1 + 0.1 * (0.6**-0.5 - 1)),
            1.0,
        ]  # f_1 at 0.6^(1/2) and its tolerance
    verdict = judged(problem, losses)
    assert verdict.verdicts == expected
    assert np.isnan(judged(problem, losses * 3).radii).tolist() == [problem.alpha == "line"] * len(
        expected
    )
    assert ("not all shown to be better than a constant prediction" in str(verdict)) == bool(
        problem.chance_loss
    )


@pytest.mark.parametrize(
    ("problem", "edge"),
    [
        (PROBLEM, [0.91, 0.82 * 0.91]),
        (DescentProblem(None, 1.0, 2, exit_targets={1: 0.25}), [0.625, 0.5]),
        (
            DescentProblem("line", 1.0, 2, descent_strength=1.0),
            [0.5**0.5 + 0.1 * (1 - 0.5**0.5), 0.5],
        ),
    ],
)
def test_false_certificates_are_as_rare_as_stated(problem, edge):
    """Layers exactly on the edge of what is tolerated: a certificate of any of them is false."""
    generator, wrong = np.random.default_rng(2), np.zeros(len(problem.rows))
    for _ in range(400):
        losses = edge + 0.05 * generator.normal(size=(16, 2))
        wrong += [each == "met" for each in judged(problem, losses, confidence=0.9).verdicts]
    # Two-sided intervals, of which only one side can certify: half of 10 %.
    assert all(
        stats.binomtest(int(count), 400, 0.05, alternative="greater").pvalue > 1e-3
        for count in wrong
    )
    assert (wrong > 4).all()


def test_unconstrained_layers_are_left_out_and_too_little_data_shows_nothing():
    problem, losses = DescentProblem(0.1, 1.0, 3, [2]), np.random.default_rng(3).random((8, 3))
    verdict = judged(problem, losses)
    assert verdict.rows == ["2"] and verdict.radii.shape == (1,)
    for blocks, expected in ((8, "met"), (7, "not shown"), (1, "not shown")):
        verdict = judged(problem, losses[:blocks] * 0.1)
        assert verdict.verdicts == [expected] and ("it takes 8 batches" in str(verdict)) == (
            blocks < 8
        )
    assert "it takes 8 batches" not in str(
        judged(DescentProblem("line", 1.0, 3), losses + 1)
    )  # f_L is above f_0
    assert judged(DescentProblem(0.1, 1.0, 1), losses[:, :1] * 0.1).verdicts == ["not shown"]
    assert judged(problem, losses * [1, 0.1, -0.1]).verdicts == ["not shown"]  # a loss below 0
    with pytest.raises(ValueError, match="without `problem`"):
        layer_profile(bert(num_layers=2), classification_data(8)).certificate()


def test_measured_profiles_and_the_disk(tmp_path):
    model, data = bert(num_layers=2), classification_data(40)
    problem = DescentProblem(0.1, 1.0, 2)
    profiles = layer_profiles(model, data, [0.0, 2.0], problem=problem, batch_size=8, seed=3)
    for gamma, profile in zip([0.0, 2.0], profiles):
        alone = layer_profile(model, data, gamma=gamma, problem=problem, batch_size=8, seed=3)
        np.testing.assert_array_equal(profile.losses, alone.losses)
        batch_means = alone.blocks[..., 2] / alone.blocks[..., 3]
        expected = stats.t.ppf(0.975, 4) * batch_means.std(axis=0, ddof=1) / np.sqrt(5)
        np.testing.assert_allclose(alone.radius("losses"), expected, rtol=1e-4)
    certificate, path = profiles[0].certificate(), str(tmp_path / "certificate.json")
    certificate.to_json(path)
    assert str(Certificate.from_json(path)) == str(certificate)
