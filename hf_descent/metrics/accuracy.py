"""Accuracy, the metric of both text classification tasks (appendix B.3)."""

import datasets
import evaluate
import numpy as np


class Accuracy(evaluate.Metric):
    """Share of predictions equal to their reference, in [0, 1]. Takes two sequences of class indices, shape `[items]`.

    Example:

    ```python
    >>> Accuracy().compute(predictions=[0, 1, 1], references=[0, 1, 0])
    {'accuracy': 0.6666666666666666}
    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of predictions equal to their reference.",
            citation="",
            inputs_description="predictions, references: class indices, shape [items].",
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}
