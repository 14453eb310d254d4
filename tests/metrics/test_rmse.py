from pathlib import Path

import evaluate
import numpy as np
import pytest
from sklearn.metrics import root_mean_squared_error

from hf_descent.metrics.rmse import rmse
from hf_descent.metrics.rmse.rmse import Rmse


@pytest.mark.parametrize("shape", [(31,), (7, 5), (4, 3, 6)])
def test_rmse_is_sklearns(shape):
    generator = np.random.default_rng(0)
    predictions, references = generator.random((2, *shape)).astype(np.float32)
    result = Rmse(keep_in_memory=True).compute(predictions=predictions, references=references, scale=255)
    assert result["rmse"] == pytest.approx(255 * root_mean_squared_error(references.ravel(), predictions.ravel()))
    assert type(result["rmse"]) is float  # numpy scalars cannot go into JSON


def test_rmse_by_batches_counts_every_value_once():
    metric = Rmse(keep_in_memory=True)
    metric.add_batch(predictions=[[0.0, 0.0], [0.0, 0.0]], references=[[1.0, 1.0], [1.0, 1.0]])
    metric.add_batch(predictions=[[5.0, 5.0]], references=[[5.0, 8.0]])
    assert metric.compute() == {"rmse": pytest.approx(np.sqrt(13 / 6))}


def test_items_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"Item 1 of `predictions` has shape \[3\] and of `references` \[1\]"):
        Rmse(keep_in_memory=True).compute(predictions=[[1.0], [1.0, 2.0, 3.0]], references=[[1.0], [1.0]])


def test_evaluate_loads_it_from_its_folder_without_a_download(evaluate_modules):
    metric = evaluate.load(str(Path(rmse.__file__).parent), keep_in_memory=True)
    assert metric.compute(predictions=[1.0, 2.0], references=[1.0, 4.0]) == {"rmse": pytest.approx(np.sqrt(2))}
