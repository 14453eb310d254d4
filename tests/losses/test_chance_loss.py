import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import entr

from hf_descent.losses.chance import ChanceLoss


def best_constant_loss(loss, shape):
    """The least loss over constant logits, found numerically."""
    logits = torch.zeros(shape, requires_grad=True, dtype=torch.float64)
    optimizer = torch.optim.LBFGS([logits], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        value = loss(logits)
        value.backward()
        return value

    optimizer.step(closure)
    return loss(logits).item()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_classification_is_the_best_constant_prediction(smoothing):
    labels = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([1800, 900, 300]))
    chance_loss = ChanceLoss(3, label_smoothing=smoothing)
    for chunk in labels.split(500):
        chance_loss.update(chunk)
    expected = best_constant_loss(
        lambda logits: F.cross_entropy(logits.expand(3000, 3), labels, label_smoothing=smoothing), 3
    )
    assert chance_loss.estimate() == pytest.approx(expected, rel=1e-3)


def zipf(classes, power=1.0):
    return 1 / np.arange(1, classes + 1) ** power


def few(probabilities, classes):
    """Of `classes` known to the model only the first ones occur."""
    return np.concatenate([probabilities, np.zeros(classes - len(probabilities))])


@pytest.mark.parametrize(
    ("probabilities", "size"),
    [
        (np.ones(2), 80),
        (np.ones(2), 2_000),
        (few(np.ones(2), 20), 80),
        (few(np.ones(2), 1000), 2_000),
        (np.ones(77), 300),
        (np.ones(1000), 2_000),
        (zipf(10), 2_000),
        (zipf(150), 2_000),
        (zipf(1000), 2_000),
        (zipf(1000, 1.5), 2_000),
        (np.random.default_rng(0).exponential(size=1000), 2_000),
        (few(np.ones(300), 1000), 2_000),
        (zipf(30_000), 50_000),
        (zipf(128_000), 50_000),
        (few(zipf(30_000), 128_000), 50_000),
        (few(np.ones(30_000), 128_000), 50_000),
        (np.ones(128_000), 50_000),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_tell_the_loss_within_one_percent_in_the_mean_of_their_draws(
    probabilities, size, smoothing
):
    probabilities = probabilities / probabilities.sum()
    smoothed = (1 - smoothing) * probabilities + smoothing / len(probabilities)
    truth, found = entr(smoothed).sum(), []
    for seed in range(20 if size <= 2000 else 4):
        counts = np.random.default_rng(seed).multinomial(size, probabilities)
        chance_loss = ChanceLoss(len(probabilities), label_smoothing=smoothing)
        chance_loss.update(torch.from_numpy(np.repeat(np.arange(len(counts)), counts)))
        found.append(chance_loss.estimate())
    assert max(found) <= math.log(len(probabilities)) + 1e-9
    # All probabilities known, another draw of 2,000 labels alone would move their mean loss by up to 2 %.
    surprise = -np.log(smoothed, where=smoothed > 0, out=np.zeros_like(smoothed))
    deviation = np.sqrt(abs(probabilities @ surprise**2 - (probabilities @ surprise) ** 2) / size)
    rest = (0.01 if size >= 2_000 else 0.02) * truth + 3 / size  # deviations of the next order, too
    assert np.mean(found) == pytest.approx(truth, abs=rest + 3 * deviation / np.sqrt(len(found)))
    assert found == pytest.approx([truth] * len(found), abs=rest + 3 * deviation)


def test_ignored_labels_do_not_count():
    chance_losses = ChanceLoss(2), ChanceLoss(2)
    assert (
        chance_losses[0].update(torch.tensor([[0, 1, -100], [-100, -100, 1]]).repeat(20, 1)) == 60
    )
    assert chance_losses[1].update(torch.tensor([0, 1, 1]).repeat(20)) == 60
    assert (
        chance_losses[0].estimate()
        == chance_losses[1].estimate()
        == pytest.approx(0.6365, rel=0.02)
    )


@pytest.mark.parametrize("labels", [[], [-100, -100], [1, 1, 1]])
def test_labels_that_are_missing_or_all_alike_are_an_error(labels):
    chance_loss = ChanceLoss(3)
    chance_loss.update(torch.tensor(labels, dtype=torch.long))
    with pytest.raises(ValueError, match="initial_loss_bound"):
        chance_loss.estimate()


def test_regression_is_the_variance_and_multi_label_the_binary_entropy():
    labels = torch.randn(200, 2) * torch.tensor([1.0, 3.0]) + 5
    chance_loss = ChanceLoss(2, "numbers")
    chance_loss.update(labels)
    expected = best_constant_loss(
        lambda constant: F.mse_loss(constant.expand(200, 2), labels.double()), 2
    )
    assert chance_loss.estimate() == pytest.approx(expected, rel=1e-5)

    labels = (torch.rand(200, 3) < torch.tensor([0.2, 0.5, 0.9])).float()
    chance_loss = ChanceLoss(3, "multi_label")
    chance_loss.update(labels)
    expected = best_constant_loss(
        lambda logits: F.binary_cross_entropy_with_logits(logits.expand(200, 3), labels.double()), 3
    )
    assert chance_loss.estimate() == pytest.approx(expected, rel=1e-5)


def test_both_ends_of_an_answer_count():
    chance_loss = ChanceLoss(64, "positions")
    chance_loss.update(torch.stack([torch.arange(8).repeat(100), torch.full((800,), 3)], dim=-1))
    chance_loss.update(torch.full((100, 2), 64))  # beyond the text
    assert chance_loss.estimate() == pytest.approx(math.log(8) / 2, rel=1e-5)
    chance_loss = ChanceLoss(64, "positions")
    for length, count in (
        (2, 400),
        (32, 25),
    ):  # of short texts and long ones, whose places are all alike to a model
        chance_loss.update(
            torch.arange(length).repeat(count)[:, None].expand(-1, 2), torch.zeros(1, length)
        )
    assert chance_loss.estimate() == pytest.approx((math.log(2) + math.log(32)) / 2, rel=1e-5)


def test_a_denoiser_s_input_is_the_trivial_prediction_where_it_is_the_better_one():
    clean = torch.randn(3000, 4) + torch.tensor([0.0, 1.0, 2.0, 3.0])
    noisy = clean + 0.3 * torch.randn(3000, 4)
    for given, expected in (
        (noisy, 2 * F.mse_loss(noisy, clean)),
        (clean + 5, 2 * clean.var(0).mean()),
        (clean, 2.0),
    ):
        chance_loss = ChanceLoss(4, "numbers", scale=2.0)
        for rows, signal in zip(clean.split(1000), given.split(1000)):
            chance_loss.update(rows, signal)
        assert chance_loss.estimate() == pytest.approx(float(expected), rel=0.05)


def test_numbers_in_rows_of_several_lengths_have_no_known_chance():
    parts = [ChanceLoss(1, "numbers") for _ in range(3)]
    for part, length in zip(parts, (4, 4, 5)):
        part.update(torch.randn(3, length))
    assert parts[0].plus(parts[1]).lower_bound() > 0 == parts[0].plus(parts[2]).lower_bound()
    assert parts[1].plus(parts[0].plus(parts[2])).lower_bound() == 0
    with pytest.raises(ValueError, match="several lengths"):
        parts[0].update(torch.randn(3, 5))
