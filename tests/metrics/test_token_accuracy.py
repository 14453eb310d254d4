from pathlib import Path

import evaluate
import numpy as np
import pytest
from sklearn.metrics import accuracy_score

from hf_descent.metrics.token_accuracy import token_accuracy
from hf_descent.metrics.token_accuracy.token_accuracy import TokenAccuracy


def rows(count, seed=0):
    """Predictions and labels of different lengths; about a third of the positions without a label."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 9, count)
    labels = [np.where(generator.random(n) < 0.3, -100, generator.integers(0, 4, n)).tolist() for n in lengths]
    return [generator.integers(0, 4, n).tolist() for n in lengths], labels


def test_it_is_sklearns_on_the_labelled_tokens():
    predictions, references = rows(20)
    predictions[0] = references[0]  # as Trainer pads both
    assert -100 in references[0]
    result = TokenAccuracy(keep_in_memory=True).compute(predictions=predictions, references=references)
    ours, theirs = (np.concatenate(part) for part in (predictions, references))
    assert result["token_accuracy"] == pytest.approx(accuracy_score(theirs[theirs >= 0], ours[theirs >= 0]))
    assert type(result["token_accuracy"]) is float  # numpy scalars cannot go into JSON


def test_batches_count_every_token_once():
    predictions, references = rows(20)
    metric = TokenAccuracy(keep_in_memory=True)
    whole = metric.compute(predictions=predictions, references=references)
    for part in (slice(0, 3), slice(3, 20)):
        metric.add_batch(predictions=predictions[part], references=references[part])
    assert metric.compute() == whole


def test_refusals_name_the_remedy():
    metric = TokenAccuracy(keep_in_memory=True)
    with pytest.raises(ValueError, match="2 predictions and 1 references"):
        metric.compute(predictions=[[1, 2]], references=[[1]])
    with pytest.raises(ValueError, match="no label but -100"):
        metric.compute(predictions=[[1, 2]], references=[[-100, -100]])


def test_evaluate_loads_it_from_its_folder_without_a_download(evaluate_modules):
    metric = evaluate.load(str(Path(token_accuracy.__file__).parent), keep_in_memory=True)
    assert metric.compute(predictions=[[1, 2]], references=[[1, 3]]) == {"token_accuracy": 0.5}
