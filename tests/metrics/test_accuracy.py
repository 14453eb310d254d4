import numpy as np
from sklearn.metrics import accuracy_score

from hf_descent.metrics.accuracy import Accuracy


def test_accuracy_is_sklearns():
    generator = np.random.default_rng(0)
    predictions, references = generator.integers(0, 3, (2, 101))
    result = Accuracy(keep_in_memory=True).compute(predictions=predictions, references=references)
    assert result == {"accuracy": accuracy_score(references, predictions)}
    assert type(result["accuracy"]) is float  # numpy scalars cannot go into JSON


def test_accuracy_by_batches():
    metric = Accuracy(keep_in_memory=True)
    metric.add_batch(predictions=[0, 1], references=[0, 0])
    metric.add_batch(predictions=[2], references=[2])
    assert metric.compute() == {"accuracy": 2 / 3}
