"""Root mean squared error, the metric of video denoising (arXiv 2601.17257, appendix B.2).

`evaluate.load` takes this folder, without a download.
"""

import datasets
import evaluate
import numpy as np


class Rmse(evaluate.Metric):
    """Root of the mean squared difference over all values of all items, times `scale` (255 for pixels in [0, 1]).

    Takes numbers `[items]`, rows `[items, values]` or images `[items, height, width]`; ValueError for an item whose
    shape is not that of its reference.

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
            inputs_description=self.__doc__,
            features=[
                datasets.Features({"predictions": shape, "references": shape}) for shape in shapes
            ],
        )

    def _compute(self, predictions, references, scale: float = 1.0) -> dict[str, float]:
        total = count = 0
        for item, pair in enumerate(zip(predictions, references)):
            ours, theirs = (np.asarray(values, np.float64) for values in pair)
            if ours.shape != theirs.shape:
                shapes = f"has shape {list(ours.shape)} and of `references` {list(theirs.shape)}"
                raise ValueError(f"Item {item} of `predictions` {shapes}; give both in one shape.")
            total, count = total + np.square(ours - theirs).sum(), count + ours.size
        return {"rmse": float(scale * np.sqrt(total / count))}
