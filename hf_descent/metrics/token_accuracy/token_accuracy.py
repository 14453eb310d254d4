"""Mean token accuracy, the metric of instruction fine-tuning (arXiv 2601.17257, section 5).

`evaluate.load` takes this folder, without a download.
"""

import datasets
import evaluate
import numpy as np


class TokenAccuracy(evaluate.Metric):
    """Share of the labelled tokens that are predicted, in [0, 1].

    Takes rows of token ids `[rows, tokens]` of any lengths: the label of each position (-100: none) and the prediction
    FOR that position. A causal language model predicts the next position: drop the last of `logits.argmax(-1)` and the
    first of the labels. Rows of different lengths, or no label at all, raise ValueError.

    Example:

    ```python
    >>> TokenAccuracy().compute(predictions=[[5, 6, 7], [5, 8]], references=[[-100, 6, 9], [5, 8]])
    {'token_accuracy': 0.75}
    ```
    """

    def _info(self) -> evaluate.MetricInfo:
        row = datasets.List(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="Share of the labelled tokens that are predicted.",
            citation="",
            inputs_description=self.__doc__,
            features=datasets.Features({"predictions": row, "references": row}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        hits = count = 0
        for ours, theirs in zip(predictions, references):
            if len(ours) != len(theirs):
                raise ValueError(
                    f"A row has {len(ours)} predictions and {len(theirs)} references; give one prediction per label."
                )
            labelled = np.not_equal(theirs, -100)
            hits += np.sum(np.equal(ours, theirs) & labelled)
            count += np.sum(labelled)
        if not count:
            raise ValueError("`references` holds no label but -100; give at least one.")
        return {"token_accuracy": float(hits / count)}
