"""Certified layers: by hand from the losses of rows, and by how often a certificate is wrong."""

import numpy as np
import pytest
import torch
from scipy import stats
from tiny.data import classification_data
from tiny.models import bert
from transformers import default_data_collator

from hf_descent import DescentProblem
from hf_descent.evaluation import Certificate, certify, layer_profile, layer_profiles
from hf_descent.evaluation.intervals import confidence_limits


def rows_of(losses):
    """Sums over ten items each of rows with these losses `[rows, layers]`."""
    return np.concatenate([10 * losses, np.full((len(losses), 1), 10.0)], axis=1)


def judged(problem, losses, **settings):
    return certify(problem, rows_of(losses), **{"chance": 1.0} | settings)


PROBLEM = DescentProblem([0.1, 0.2], 1.0, 2)


def test_radii_pair_the_layers_over_the_data():
    generator = np.random.default_rng(0)
    shared = generator.normal(size=(40, 1))
    losses = np.array([0.7, 0.5]) + 0.05 * shared + 0.001 * generator.normal(size=(40, 2))
    verdict = judged(PROBLEM, losses, confidence=0.9)
    # The violation less a tenth of the decrease that is asked for, of each row.
    excess = np.stack(
        [losses[:, 0] - 0.9 - 0.01, losses[:, 1] - (0.8 + 0.02) * losses[:, 0]], axis=1
    )
    reached = verdict.reached - verdict.asked - verdict.tolerances
    np.testing.assert_allclose(reached, excess.mean(0), rtol=1e-5)
    _, upper = confidence_limits(excess, 0.9)
    np.testing.assert_allclose(verdict.radii, upper - excess.mean(0), rtol=1e-5)
    errors = excess.std(axis=0, ddof=1) / np.sqrt(40)
    assert (verdict.radii > stats.t.ppf(0.95, 39) * errors).all()
    assert (verdict.radii < 1.5 * stats.t.ppf(0.95, 39) * errors).all()
    assert verdict.radii[1] < 0.5 * verdict.radii[0]  # what both layers share cancels
    assert verdict.verdicts == ["met", "met"] and verdict.feasible
    assert verdict.reasons == ["", ""] and "reason" not in str(verdict)
    assert "2 of 2 constraints are met" in str(verdict) and "400 items of 40 examples" in str(
        verdict
    )


def test_means_are_over_items_and_rows_of_several_items_count_as_one():
    """As by the definition of a ratio: rows of many tokens weigh more, but are one example each."""
    generator = np.random.default_rng(0)
    items = generator.integers(1, 50, 200).astype(float)
    losses = np.array([0.7, 0.5]) + 0.1 * generator.normal(size=(200, 2))
    rows = np.column_stack([losses * items[:, None], items])
    problem = DescentProblem(None, 1.0, 2, exit_targets={1: 0.1})
    verdict = certify(problem, rows, chance=1.0)
    means = rows[:, :2].sum(0) / items.sum()
    np.testing.assert_allclose(verdict.losses, means)
    off = (rows[:, 0] - means[0] * items) - 1.1 * (rows[:, 1] - means[1] * items)
    _, upper = confidence_limits(off / items.mean())
    assert verdict.radii == pytest.approx(upper, rel=1e-6)
    # The jackknife, which leaves one row out at a time, says the same of the standard error.
    left_out = (rows.sum(0) - rows)[:, :2] / (items.sum() - items)[:, None]
    left_out = left_out[:, 0] - 1.1 * left_out[:, 1]
    error = np.sqrt(199 / 200 * ((left_out - left_out.mean()) ** 2).sum())
    assert 1.9 * error < verdict.radii[0] < 2.6 * error


def test_the_verdict_does_not_depend_on_the_order_of_rows():
    """As it did where batches were the parts: in this order each batch of four has the same mean of both classes."""
    generator = np.random.default_rng(0)
    losses = np.where(np.arange(400) % 2, 1.386, 0.0001)[:, None] * [1.01, 1.0]
    losses += 1e-4 * generator.random(losses.shape)
    problem = DescentProblem(None, np.log(2), 2, loss_targets={2: 0.7}, chance_loss=np.log(2))
    verdict = judged(problem, losses, chance=np.log(2))
    assert verdict.verdicts == ["not shown"] and verdict.radii[0] > 0.05
    assert verdict.descent_share is None
    other = judged(problem, generator.permutation(losses), chance=np.log(2))
    np.testing.assert_allclose(other.radii, verdict.radii, rtol=1e-9)
    assert str(other) == str(verdict)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (DescentProblem([0.3, 0.3], 1.0, 2), ["met", "not met"]),
        (DescentProblem([0.4, 0.3], 1.0, 2), ["met", "not met"]),  # within the tolerance, 0.04
        (DescentProblem([0.445, 0.01], 1.0, 2), ["not shown", "not shown"]),  # at the edge of it
        (DescentProblem([0.5, 0.01], 1.0, 2), ["not met", "not shown"]),
        # At chance a layer has met nothing, near it nothing is shown.
        (DescentProblem([0.3, 0.3], 1.0, 2, chance_loss=0.5), ["not met", "not met"]),
        (DescentProblem(0.3, 1.0, 2, [1], chance_loss=0.6 / 0.98), ["not shown"]),
        (DescentProblem(0.3, 1.0, 2, [1], chance_loss=0.61 / 0.98), ["met"]),
        (DescentProblem(None, 1.0, 2, exit_targets={1: 0.1}, loss_targets={1: 0.55, 2: 0.6}),
         ["met", "not met", "not shown"]),
        (DescentProblem("line", 1.0, 2, descent_strength=1.0), ["not shown"]),
        (DescentProblem("line", 1.0, 2, descent_strength=0.5), ["met"]),
    ],
)  # fmt: skip
def test_rows_are_met_not_met_or_not_shown(problem, expected):
    generator = np.random.default_rng(1)
    losses = np.array([0.6, 0.6]) + 0.02 * generator.normal(size=(40, 2))
    if problem.alpha == "line" and problem.descent_strength == 1.0:
        # f_1 at 0.6^(1/2) and its tolerance.
        losses = losses * [0.6**-0.5 * (1 + 0.1 * (0.6**-0.5 - 1)), 1.0]
    verdict = judged(problem, losses)
    assert verdict.verdicts == expected
    assert [bool(reason) for reason in verdict.reasons] == [each != "met" for each in expected]
    above = judged(problem, losses * 3)
    assert np.isnan(above.radii).tolist() == [problem.alpha == "line"] * len(expected)
    if problem.alpha == "line":
        assert above.reasons[0].startswith("layer 1 is at chance")
        good = judged(problem, losses * [1, 3])
        assert good.reasons == ["f_L is not below f_0 (1)"] and good.verdicts == ["not shown"]


@pytest.mark.parametrize(
    ("mean", "settings", "reason"),
    [
        ([0.7, 0.5], {}, "missed by 0.2"),
        ([1.0, 0.5], {"bound": 2.0}, "layer 1 is at chance (0.98 or more)"),
        ([0.98, 0.5], {"bound": 2.0}, "layer 1 may be at chance (0.98 or more)"),
        ([0.4, 0.99], {}, "the last layer is at chance (0.98 or more)"),
        ([0.4, 0.979], {}, "the last layer may be at chance (0.98 or more)"),
        ([0.499, 0.4], {}, "interval too wide; some "),
        ([0.501, 0.4], {}, "missed, by less than the interval"),
        ([0.4, 0.3], {"chance": None}, "the loss at chance is not known"),
        ([0.4, 0.3], {"chance": 0.0}, "there is nothing to predict"),
        ([0.4, 0.3], {"rows": 29}, "29 examples; 30 are the least"),
        ([0.4, -0.3], {}, "a loss is not a number above 0"),
        ([0.4, np.nan], {}, "a loss is not a number above 0"),
    ],
)
def test_every_row_that_is_not_met_says_why(mean, settings, reason):
    settings = {"bound": 0.5, "chance": 1.0, "rows": 40} | settings
    noise = 0.02 * np.random.default_rng(3).normal(size=(settings["rows"], 2))
    losses = np.array(mean) + noise - noise.mean(0)
    problem = DescentProblem(None, 1.0, 2, loss_targets={1: settings["bound"]})
    verdict = judged(problem, losses, chance=settings["chance"])
    assert verdict.verdicts != ["met"] and verdict.reasons[0].startswith(reason)
    assert reason in str(verdict).splitlines()[2]
    assert not verdict.feasible


def test_a_layer_at_chance_that_misses_its_target_is_said_to_be_at_chance():
    noise = 0.02 * np.random.default_rng(3).normal(size=(400, 2))
    losses = np.array([1.0, 0.4]) + noise - noise.mean(0)
    problem = DescentProblem(None, 1.0, 2, loss_targets={1: 0.5})
    assert judged(problem, losses).reasons == ["layer 1 is at chance (0.98 or more)"]

    with_cls = judged(problem, losses, reads_one_token=True)
    assert with_cls.verdicts == ["not met"]
    assert with_cls.reasons == ['layer 1 is at chance (0.98 or more); try `readout="mean"`']
    untrained = judged(problem, losses + np.array([0, 0.6]), reads_one_token=True)
    assert "readout" not in untrained.reasons[0]


@pytest.mark.parametrize(
    ("last", "expected"),
    [(0.4, "each layer is better than the one before"), (0.6, "layer to layer +20.0 %")],
)
def test_a_profile_that_falls_has_no_rise(last, expected):
    noise = 0.02 * np.random.default_rng(3).normal(size=(400, 2))
    losses = np.array([0.5, last]) + noise - noise.mean(0)
    summary = str(judged(DescentProblem(None, 1.0, 2, loss_targets={1: 0.7}), losses))
    assert expected in summary and "descent share" not in summary


def test_the_reason_says_how_many_examples_would_do():
    generator = np.random.default_rng(0)
    problem = DescentProblem(None, 1.0, 2, loss_targets={1: 0.5})

    def verdict(count):
        noise = 0.2 * generator.normal(size=(count, 2))
        return judged(problem, np.array([0.49, 0.4]) + noise - noise.mean(0))

    assert verdict(400).verdicts == ["not shown"]
    needed = int(verdict(400).reasons[0].split("some ")[1].split(" ")[0].replace(",", ""))
    assert 1000 < needed < 4000
    assert verdict(needed + 500).verdicts == ["met"]


def test_skewed_losses_take_more_examples():
    generator = np.random.default_rng(0)
    losses = np.exp(generator.normal(size=(100, 2)) - 3)
    problem = DescentProblem(None, 1.0, 2, loss_targets={1: 0.5})
    few = judged(problem, losses[:99])
    assert few.verdicts == ["not shown"]
    assert few.reasons == ["skewed losses; 100 examples are the least"]
    assert judged(problem, losses).verdicts == ["met"]


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
        losses = edge + 0.05 * generator.normal(size=(100, 2))
        wrong += [each == "met" for each in judged(problem, losses, confidence=0.8).verdicts]
    # Two-sided intervals, of which only one side can certify: half of 20 %.
    assert all(
        stats.binomtest(int(count), 400, 0.1, alternative="greater").pvalue > 1e-3
        for count in wrong
    )
    assert (wrong > 4).all()


def test_unconstrained_layers_are_left_out_and_too_little_data_shows_nothing():
    problem, losses = DescentProblem(0.1, 1.0, 3, [2]), np.random.default_rng(3).random((30, 3))
    verdict = judged(problem, losses)
    assert verdict.rows == ["2"] and verdict.radii.shape == (1,)
    for rows, expected in ((30, "met"), (29, "not shown"), (1, "not shown")):
        assert judged(problem, losses[:rows] * 0.1).verdicts == [expected]
    one_layer = judged(DescentProblem(0.1, 1.0, 1), losses[:, :1] * 0.1)
    assert one_layer.verdicts == ["not shown"]
    assert one_layer.reasons == ["the model has one layer"]
    with pytest.raises(ValueError, match="without `problem`"):
        layer_profile(bert(num_layers=2), classification_data(8)).certificate()


def test_whole_batches_are_told():
    losses = 0.1 * np.random.default_rng(3).random((30, 2))
    assert "In 30 batches the loss of a single example" in str(
        judged(PROBLEM, losses, whole_batches=30)
    )
    assert "batches" not in str(judged(PROBLEM, losses))


def test_measured_profiles_and_the_disk(tmp_path):
    model, data = bert(num_layers=2), classification_data(40)
    problem = DescentProblem(0.1, 1.0, 2)
    profiles = layer_profiles(model, data, [0.0, 2.0], problem=problem, batch_size=8, seed=3)
    for gamma, profile in zip([0.0, 2.0], profiles):
        alone = layer_profile(model, data, gamma=gamma, problem=problem, batch_size=8, seed=3)
        np.testing.assert_array_equal(profile.losses, alone.losses)
        if gamma:
            continue
        losses = []
        for row in data:
            with torch.no_grad():
                losses.append(model.eval()(**default_data_collator([row])).loss)
        lower, upper = confidence_limits(np.array(losses))
        assert alone.loss_radii[-1] == pytest.approx((upper - lower) / 2, rel=1e-4)
        assert profile.certificate().loss_radii[-1] == pytest.approx((upper - lower) / 2, rel=1e-4)
    certificate, path = profiles[0].certificate(), str(tmp_path / "certificate.json")
    assert certificate.items == certificate.examples == 40
    certificate.to_json(path)
    assert str(Certificate.from_json(path)) == str(certificate)
