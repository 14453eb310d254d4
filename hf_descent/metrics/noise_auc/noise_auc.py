"""Area under a metric against the noise level, the summary of both text classification tasks (appendix B.4).

This folder is also what `evaluate.load` takes, without any download.
"""

import datasets
import evaluate
import numpy as np


class NoiseAuc(evaluate.Metric):
    """Area (trapezoid rule) under accuracies against the noise levels at which they were reached.

    Takes the predicted classes and the true ones, `[items]`, with the noise level of each prediction, `[items]`; all
    items at one level make one accuracy. `noise_auc` grows with the range of the levels (the paper's are over an
    unstated one); `noise_auc_over_range` is an average accuracy.

    Example:

    ```python
    >>> NoiseAuc().compute(predictions=[1, 0, 1, 1], references=[1, 0, 1, 0], gammas=[0.0, 0.0, 2.0, 2.0])
    {'noise_auc': 1.5, 'noise_auc_over_range': 0.75}
    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        features = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="Area under accuracy against the noise level.",
            citation="",
            inputs_description="predictions, references: class indices; gammas: noise levels; shape [items] each.",
            features=datasets.Features({**features, "gammas": datasets.Value("float64")}),
        )

    def _compute(self, predictions, references, gammas) -> dict[str, float]:
        right, gammas = np.equal(predictions, references), np.asarray(gammas)
        levels = np.unique(gammas)
        if len(levels) < 2:
            raise ValueError(f"`gammas` holds the levels {levels.tolist()}; an area needs at least two.")
        area = np.trapezoid([right[gammas == level].mean() for level in levels], levels)
        return {"noise_auc": float(area), "noise_auc_over_range": float(area / (levels[-1] - levels[0]))}
