import math

import pytest
import torch
import torch.nn.functional as F

from hf_descent.constraints.auto import ConstantPredictor, geometric_alpha


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
    labels = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 300, replacement=True)
    predictor = ConstantPredictor(3, smoothing)
    for chunk in labels.split(50):
        predictor.update(chunk)
    expected = best_constant_loss(
        lambda logits: F.cross_entropy(logits.expand(300, 3), labels, label_smoothing=smoothing), 3
    )
    bias = (3 - 1) / (2 * 300)  # of frequencies
    assert predictor.loss() == pytest.approx(min(expected + bias, math.log(3)), rel=1e-5)


def test_ignored_labels_do_not_count():
    predictor = ConstantPredictor(2)
    predictor.update(torch.tensor([[0, 1, -100], [-100, -100, 1]]).repeat(20, 1))
    bias = (2 - 1) / (2 * 60)
    assert predictor.loss() == pytest.approx(-(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3 + bias)


@pytest.mark.parametrize(("classes", "size"), [(3, 16), (77, 160), (77, 300)])
def test_few_labels_do_not_make_f_0_too_low(classes, size):
    found = []
    for seed in range(200):
        predictor = ConstantPredictor(classes)
        predictor.update(torch.randint(classes, (size,), generator=torch.Generator().manual_seed(seed)))
        found.append(predictor.loss())
    assert max(found) <= math.log(classes) + 1e-12
    assert sum(found) / 200 == pytest.approx(math.log(classes), rel=0.03)  # frequencies alone: 5 % less


def test_labels_that_tell_nothing_of_their_classes_give_the_uniform_predictor():
    predictor = ConstantPredictor(1000)
    predictor.update(torch.arange(50))
    assert predictor.loss() == pytest.approx(math.log(1000))


def test_classes_that_do_not_occur_hardly_raise_f_0():
    predictor = ConstantPredictor(20)
    predictor.update(torch.tensor([0, 1] * 160))
    assert predictor.loss() == pytest.approx(math.log(2), rel=0.06)


def test_few_labels_may_be_alike_by_chance_and_many_are_not():
    predictor = ConstantPredictor(2)
    predictor.update(torch.tensor([0, 0]))
    assert 0.5 < predictor.loss() <= math.log(2)
    predictor.update(torch.zeros(18, dtype=torch.long))
    with pytest.raises(ValueError, match="all were alike"):
        predictor.loss()


@pytest.mark.parametrize("size", [2_000, 20_000])
def test_few_labels_of_a_large_vocabulary(size):
    """Of 30,000 tokens by Zipf's law: the uniform prediction is 3 nats off, the frequencies of 2,000 labels 1.3."""
    zipf = 1 / torch.arange(1, 30_001).double()
    zipf /= zipf.sum()
    entropy = -(zipf * zipf.log()).sum().item()
    generator = torch.Generator().manual_seed(0)
    predictor = ConstantPredictor(30_000)
    predictor.update(torch.multinomial(zipf, size, replacement=True, generator=generator))
    assert predictor.loss() == pytest.approx(entropy, abs=0.25)


def test_regression_is_the_variance_and_multi_label_the_binary_entropy():
    labels = torch.randn(200, 2) * torch.tensor([1.0, 3.0]) + 5
    predictor = ConstantPredictor(2)
    predictor.update(labels)
    expected = best_constant_loss(lambda constant: F.mse_loss(constant.expand(200, 2), labels.double()), 2)
    assert predictor.loss() == pytest.approx(expected, rel=1e-5)

    labels = (torch.rand(200, 3) < torch.tensor([0.2, 0.5, 0.9])).float()
    predictor = ConstantPredictor(3, multi_label=True)
    predictor.update(labels)
    expected = best_constant_loss(
        lambda logits: F.binary_cross_entropy_with_logits(logits.expand(200, 3), labels.double()), 3
    )
    assert predictor.loss() == pytest.approx(expected, rel=1e-5)


def test_both_ends_of_an_answer_count():
    predictor = ConstantPredictor(64, positions=True)
    predictor.update(torch.stack([torch.arange(8).repeat(100), torch.full((800,), 3)], dim=-1))
    predictor.update(torch.full((100, 2), 64))  # beyond the text
    assert predictor.loss() == pytest.approx(math.log(8) / 2, rel=1e-5)


def test_no_labels_is_an_error():
    with pytest.raises(ValueError, match="initial_loss_bound"):
        ConstantPredictor(3).loss()


def test_geometric_schedule_reaches_the_warm_up_loss_at_strength_one():
    alpha = geometric_alpha(2.0, 0.5, 4, strength=1.0)
    assert 2.0 * (1 - alpha) ** 4 == pytest.approx(0.5)
    half = geometric_alpha(2.0, 0.5, 4, strength=0.5)
    assert 2.0 * (1 - half) ** 4 == pytest.approx(math.sqrt(2.0 * 0.5))


@pytest.mark.parametrize("final", [2.0, 3.0, 1e9])
def test_a_model_no_better_than_a_constant_still_gets_a_schedule(final):
    assert 0 < geometric_alpha(2.0, final, 4, strength=1.0) < 0.05


@pytest.mark.parametrize("final", [float("nan"), float("inf"), 0.0, -1.0])
def test_no_schedule_from_a_meaningless_loss(final):
    with pytest.raises(ValueError, match="descent_alpha"):
        geometric_alpha(2.0, final, 4, strength=1.0)
