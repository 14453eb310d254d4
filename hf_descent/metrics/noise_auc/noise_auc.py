"""Area under accuracy against the noise level, for both text classification tasks (arXiv 2601.17257, appendix B.4).

`evaluate.load` takes this folder, without a download.
"""

import datasets
import evaluate
import numpy as np


class NoiseAuc(evaluate.Metric):
    """Area under accuracy against the noise level, by the trapezoid rule.

    Takes the predicted classes, the true classes and the noise level of each prediction, `[items]` each. The items of
    one level make one accuracy. `noise_auc` grows with the range of the levels, which the paper does not state;
    `noise_auc_over_range` is an average accuracy. Fewer than two levels raise ValueError.

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
            inputs_description=self.__doc__,
            features=datasets.Features({**features, "gammas": datasets.Value("float64")}),
        )

    def _compute(self, predictions, references, gammas) -> dict[str, float]:
        right, gammas = np.equal(predictions, references), np.asarray(gammas)
        levels = np.unique(gammas)
        if len(levels) < 2:
            raise ValueError(f"`gammas` holds the levels {levels.tolist()}; an area needs at least two.")
        area = np.trapezoid([right[gammas == level].mean() for level in levels], levels)
        return {"noise_auc": float(area), "noise_auc_over_range": float(area / (levels[-1] - levels[0]))}
