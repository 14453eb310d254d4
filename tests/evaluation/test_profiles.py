import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from tiny.data import classification_data
from tiny.models import bert
from tiny.oracles import truncated
from tiny.training import config, trained

from hf_descent import DescentProblem
from hf_descent.evaluation import LayerProfile, layer_profile, noise_curve


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_layer_losses_and_metrics_are_those_of_truncated_models(gamma):
    data, settings = classification_data(30), {"seed": 5, "batch_size": 8, "sigma": 0.7}
    profile = layer_profile(bert(num_layers=3), data, gamma=gamma, **settings)
    curves = [
        noise_curve(truncated(bert(), depth), data, [gamma], draws=1, **settings)
        for depth in (1, 2, 3)
    ]
    np.testing.assert_allclose(profile.losses, [curve.losses[0, 0] for curve in curves], rtol=1e-6)
    np.testing.assert_allclose(profile.values, [curve.values[0, 0] for curve in curves])
    assert profile.gamma == gamma


def test_several_labels_have_their_binary_cross_entropy():
    data = [{**row, "labels": torch.eye(3)[row["labels"]]} for row in classification_data(12)]
    for model, metric in (
        (bert(problem_type="multi_label_classification"), "rmse"),
        (bert(), "accuracy"),
    ):
        profile = layer_profile(model, data, metric=metric, batch_size=5)
        losses = [
            model.eval()(**{name: value[None] for name, value in row.items()}).loss.item()
            for row in data
        ]
        assert profile.losses[-1] == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_rmse_of_layers_and_its_interval_have_the_scale_of_the_metric():
    data = [{**row, "labels": float(row["labels"])} for row in classification_data(30)]
    plain, scaled = (
        layer_profile(bert(num_labels=1), data, metric="rmse", scale=scale, batch_size=8)
        for scale in (1.0, 255.0)
    )
    np.testing.assert_allclose(scaled.values, 255 * np.sqrt(plain.losses), rtol=1e-5)
    np.testing.assert_allclose(scaled.value_radii, 255 * plain.value_radii)


def test_the_interval_of_the_accuracy_depends_neither_on_the_order_nor_on_batches():
    """In this order each batch has one row of each class, and a constant prediction is right for one of them."""
    data = [{**row, "labels": index % 3} for index, row in enumerate(classification_data(90))]
    model = bert()
    model.classifier.weight.data.zero_()
    shuffled = [data[index] for index in np.random.default_rng(0).permutation(90)]
    expected = stats.binomtest(30, 90).proportion_ci(method="wilson")
    for rows, batch_size in ((data, 3), (data, 90), (shuffled, 3)):
        profile = layer_profile(model, rows, batch_size=batch_size)
        assert profile.values.tolist() == [1 / 3] * 3
        np.testing.assert_allclose(profile.value_radii, expected.high - 1 / 3)


def test_problem_gives_violations_and_feasibility():
    model, data = bert(num_layers=3), classification_data(30)
    losses = layer_profile(model, data).losses
    problem = DescentProblem([0.1, 0.2, 0.3], 2.0, 3)
    profile = layer_profile(model, data, problem=problem)
    previous = [2.0, *losses[:2]]
    violations = [f - (1 - a) * p for f, a, p in zip(losses, (0.1, 0.2, 0.3), previous)]
    flat, verdict = profile.to_dict(), profile.certificate()
    np.testing.assert_allclose(verdict.reached - verdict.asked, violations, rtol=1e-6)
    assert flat["max_violation"] == pytest.approx(max(violations)) and flat["feasible"] == 0.0
    assert flat["largest_rise"] == pytest.approx(max(losses[1:] / losses[:-1]) - 1)
    assert layer_profile(model, data).feasible is None
    again = layer_profile(model, data, problem=profile.problem)
    assert (again.to_dict(), again.problem) == (flat, problem.state_dict())
    second = layer_profile(model, data, problem=DescentProblem([0.1, 0.2, 0.3], 2.0, 3, [2]))
    assert second.to_dict()["max_violation"] == pytest.approx(losses[1] - 0.8 * 2.0)


def test_a_problem_of_another_number_of_layers_is_refused_at_the_first_batch():
    class Rows(list):
        def __getitem__(self, index):
            assert index < 4
            return super().__getitem__(index)

    with pytest.raises(ValueError, match="`problem` is of 4 layers, but .* has 3"):
        layer_profile(
            bert(num_layers=3),
            Rows(classification_data(8)),
            problem=DescentProblem(0.1, 1.0, 4),
            batch_size=4,
        )


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_loss_that_is_not_a_number_is_not_feasible(layer):
    losses = torch.tensor([0.5, 0.4, 0.3])
    losses[layer] = torch.nan
    row_sums = np.ones((30, 4))
    row_sums[:, :3] = losses
    problem = DescentProblem(0.1, 1.0, 3).state_dict()
    profile = LayerProfile("accuracy", losses, losses, 0.0, problem, row_sums=row_sums)
    assert math.isnan(profile.to_dict()["max_violation"]) and profile.feasible is False


def test_flat_profile_holds_plain_floats():
    flat = layer_profile(
        bert(num_layers=2), classification_data(8), problem=DescentProblem(0.1, 1.0, 2)
    ).to_dict()
    assert {type(value) for value in flat.values()} == {float}
    assert json.loads(json.dumps(flat)) == flat
    assert {"layer_loss_1", "layer_accuracy_2", "max_violation", "feasible"} <= set(flat)


def test_the_descent_share_needs_no_constraints_and_is_that_of_the_best_constant_prediction_of_these_labels(
    tmp_path,
):
    data = classification_data(64, pad=False)
    trainer = trained(bert(), config(tmp_path, objective="erm", max_steps=60), train_dataset=data)
    profile = trainer.evaluate_layers(data)
    counts = np.bincount([row["labels"] for row in data])
    chance = -(counts / 64 * np.log(counts / 64)).sum()
    heights = np.log(chance / profile.losses)
    expected = min(3 / layer * heights[layer - 1] / heights[2] for layer in (1, 2))
    assert profile.to_dict()["descent_share"] == pytest.approx(expected, rel=1e-4)
    assert f"descent share {expected:.2f}" in str(profile)
    untrained = layer_profile(bert(), data, batch_size=8)
    assert untrained.descent_share is None and "feasible" not in untrained.to_dict()
