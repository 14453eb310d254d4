"""Mean token accuracy, the metric of instruction fine-tuning (arXiv 2601.17257, section 5).

`evaluate.load` takes this folder, without a download.
"""

import datasets
import evaluate


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
        rows = zip(predictions, references, strict=True)
        hits = [
            ours == label for row in rows for ours, label in zip(*row, strict=True) if label != -100
        ]
        if not hits:
            raise ValueError("`references` holds no label but -100; give at least one.")
        return {"token_accuracy": sum(hits) / len(hits)}
