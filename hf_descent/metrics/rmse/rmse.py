"""Root mean squared error, the metric of video denoising (arXiv 2601.17257, appendix B.2).

This folder is also what `evaluate.load` takes, without any download.
"""

import datasets
import evaluate
import numpy as np


class Rmse(evaluate.Metric):
    """Root of the mean squared difference over all values of all items, times `scale` (255: pixels in [0, 1]).

    Takes numbers `[items]`, rows `[items, values]` or images `[items, height, width]`. An item of
    another shape than its reference raises ValueError.

    Example:

    ```python
    >>> Rmse().compute(predictions=[[0.5, 0.25]], references=[[0.5, 0.75]], scale=255)
    {'rmse': 90.15611...}
    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float32")
        shapes = (number, datasets.List(number), datasets.List(datasets.List(number)))
        return evaluate.MetricInfo(
            description="Root mean squared error, times `scale`.",
            citation="",
            inputs_description=(
                "predictions, references: numbers, shape [items], [items, values] or [items, height, width]. "
                "scale: factor of the result (float, 1 by default)."
            ),
            features=[datasets.Features({"predictions": shape, "references": shape}) for shape in shapes],
        )

    def _compute(self, predictions, references, scale: float = 1.0) -> dict[str, float]:
        squares = []
        for item, pair in enumerate(zip(predictions, references)):
            ours, theirs = (np.asarray(values, np.float64) for values in pair)
            if ours.shape != theirs.shape:
                raise ValueError(
                    f"Item {item} of `predictions` has shape {list(ours.shape)} and of `references` "
                    f"{list(theirs.shape)}; give both in one shape."
                )
            squares.append(np.square(ours - theirs))
        total, count = sum(item.sum() for item in squares), sum(item.size for item in squares)
        return {"rmse": float(scale * np.sqrt(total / count))}
