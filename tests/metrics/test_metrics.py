"""Each metric against scikit-learn or a sum by hand, in batches, and loaded from its folder."""

from pathlib import Path

import evaluate
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, root_mean_squared_error
from tiny import bert, classification_data
from transformers import default_data_collator

from hf_descent import EmbeddingNoise, metrics, noise_curve
from hf_descent.metrics.noise_auc.noise_auc import NoiseAuc
from hf_descent.metrics.rmse.rmse import Rmse
from hf_descent.metrics.token_accuracy.token_accuracy import TokenAccuracy


@pytest.mark.parametrize("shape", [(31,), (7, 5), (4, 3, 6)])
def test_rmse_is_sklearns(shape):
    predictions, references = np.random.default_rng(0).random((2, *shape)).astype(np.float32)
    result = Rmse(keep_in_memory=True).compute(predictions=predictions, references=references, scale=255)["rmse"]
    assert result == pytest.approx(255 * root_mean_squared_error(references.ravel(), predictions.ravel()))
    assert type(result) is float  # numpy scalars cannot go into JSON


def test_token_accuracy_is_sklearns_on_the_labelled_tokens_of_rows_of_different_lengths():
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 9, 20)
    references = [np.where(generator.random(n) < 0.3, -100, generator.integers(0, 4, n)).tolist() for n in lengths]
    predictions = [generator.integers(0, 4, n).tolist() for n in lengths]
    predictions[0] = references[0]  # as Trainer pads both
    metric = TokenAccuracy(keep_in_memory=True)
    result = metric.compute(predictions=predictions, references=references)
    ours, theirs = (np.concatenate(part) for part in (predictions, references))
    assert result["token_accuracy"] == pytest.approx(accuracy_score(theirs[theirs >= 0], ours[theirs >= 0]))
    assert type(result["token_accuracy"]) is float
    for part in (slice(0, 3), slice(3, 20)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == result


def test_rmse_by_batches_counts_every_value_once():
    metric = Rmse(keep_in_memory=True)
    metric.add_batch(predictions=[[0.0, 0.0], [0.0, 0.0]], references=[[1.0, 1.0], [1.0, 1.0]])
    metric.add_batch(predictions=[[5.0, 5.0]], references=[[5.0, 8.0]])
    assert metric.compute() == {"rmse": pytest.approx(np.sqrt(13 / 6))}


def test_the_area_is_that_of_a_sum_by_hand_and_of_the_noise_curve():
    metric = NoiseAuc(keep_in_memory=True)
    metric.add_batch(predictions=[1, 1, 0], references=[1, 1, 1], gammas=[0.5, 1.0, 1.0])  # accuracies 1 and 1/2
    metric.add_batch(predictions=[2, 2], references=[0, 1], gammas=[2.5, 2.5])  # 0
    result = metric.compute()
    assert result == {"noise_auc": 0.5 * 0.75 + 1.5 * 0.25, "noise_auc_over_range": 0.375}
    assert type(result["noise_auc"]) is float
    model, data = bert().eval(), classification_data(24)
    curve, batch = noise_curve(model, data, [0.0, 1.0, 3.0], draws=1, batch_size=24), default_data_collator(data)
    for gamma in curve.gammas:
        noise = EmbeddingNoise(model, gamma, seed=0)
        noise.reseed(0, round(gamma * 1e6), 0)
        with noise:
            predictions = model(**batch).logits.argmax(-1)
        metric.add_batch(predictions=predictions, references=batch["labels"], gammas=[gamma] * 24)
    assert metric.compute()["noise_auc"] == pytest.approx(curve.auc)


@pytest.mark.parametrize(
    ("metric", "values", "match"),
    [
        (NoiseAuc, ([1], [1], [0.5]), "at least two"),
        (Rmse, ([[1.0], [1.0, 2.0, 3.0]], [[1.0], [1.0]]), r"Item 1 of `predictions` has shape \[3\]"),
        (TokenAccuracy, ([[1, 2]], [[1]]), "2 predictions and 1 references"),
        (TokenAccuracy, ([[1, 2]], [[-100, -100]]), "no label but -100"),
    ],
)
def test_bad_values_are_refused(metric, values, match):
    with pytest.raises(ValueError, match=match):
        metric(keep_in_memory=True).compute(**dict(zip(("predictions", "references", "gammas"), values)))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("noise_auc", ([1, 0], [1, 1], [0.0, 1.0]), 0.5),
        ("rmse", ([1.0, 2.0], [1.0, 4.0]), np.sqrt(2)),
        ("token_accuracy", ([[1, 2]], [[1, 3]]), 0.5),
    ],
)
def test_evaluate_loads_a_metric_from_its_folder_without_a_download(evaluate_modules, name, values, expected):
    metric = evaluate.load(str(Path(metrics.__file__).parent / name), keep_in_memory=True)
    result = metric.compute(**dict(zip(("predictions", "references", "gammas"), values)))
    assert result[name] == pytest.approx(expected)
