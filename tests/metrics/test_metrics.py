"""Each metric against scikit-learn, in batches, and loaded from its folder."""

from pathlib import Path

import evaluate
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, root_mean_squared_error

from hf_descent import metrics
from hf_descent.metrics.rmse.rmse import Rmse
from hf_descent.metrics.token_accuracy.token_accuracy import TokenAccuracy


@pytest.mark.parametrize("shape", [(31,), (7, 5), (4, 3, 6)])
def test_rmse_is_sklearns(shape):
    predictions, references = np.random.default_rng(0).random((2, *shape)).astype(np.float32)
    result = Rmse(keep_in_memory=True).compute(
        predictions=predictions, references=references, scale=255
    )["rmse"]
    assert result == pytest.approx(
        255 * root_mean_squared_error(references.ravel(), predictions.ravel())
    )
    assert type(result) is float  # numpy scalars cannot go into JSON


def test_token_accuracy_is_sklearns_on_the_labelled_tokens_of_rows_of_different_lengths():
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 9, 20)
    references = [
        np.where(generator.random(n) < 0.3, -100, generator.integers(0, 4, n)).tolist()
        for n in lengths
    ]
    predictions = [generator.integers(0, 4, n).tolist() for n in lengths]
    predictions[0] = references[0]  # as Trainer pads both
    metric = TokenAccuracy(keep_in_memory=True)
    result = metric.compute(predictions=predictions, references=references)
    ours, theirs = (np.concatenate(part) for part in (predictions, references))
    assert result["token_accuracy"] == pytest.approx(
        accuracy_score(theirs[theirs >= 0], ours[theirs >= 0])
    )
    assert type(result["token_accuracy"]) is float
    for part in (slice(0, 3), slice(3, 20)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == result


def test_rmse_by_batches_counts_every_value_once():
    metric = Rmse(keep_in_memory=True)
    metric.add_batch(predictions=[[0.0, 0.0], [0.0, 0.0]], references=[[1.0, 1.0], [1.0, 1.0]])
    metric.add_batch(predictions=[[5.0, 5.0]], references=[[5.0, 8.0]])
    assert metric.compute() == {"rmse": pytest.approx(np.sqrt(13 / 6))}


@pytest.mark.parametrize(
    ("metric", "values", "match"),
    [
        (
            Rmse,
            ([[1.0], [1.0, 2.0, 3.0]], [[1.0], [1.0]]),
            r"Item 1 of `predictions` has shape \[3\]",
        ),
        (TokenAccuracy, ([[1, 2]], [[1]]), "argument 2 is shorter"),
        (TokenAccuracy, ([[1, 2]], [[-100, -100]]), "no label but -100"),
    ],
)
def test_bad_values_are_refused(metric, values, match):
    with pytest.raises(ValueError, match=match):
        metric(keep_in_memory=True).compute(**dict(zip(("predictions", "references"), values)))


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [("rmse", ([1.0, 2.0], [1.0, 4.0]), np.sqrt(2)), ("token_accuracy", ([[1, 2]], [[1, 3]]), 0.5)],
)
def test_evaluate_loads_a_metric_from_its_folder_without_a_download(name, values, expected):
    metric = evaluate.load(str(Path(metrics.__file__).parent / name), keep_in_memory=True)
    result = metric.compute(**dict(zip(("predictions", "references"), values)))
    assert result[name] == pytest.approx(expected)
