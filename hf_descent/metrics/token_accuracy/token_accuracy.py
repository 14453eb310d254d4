"""Mean token accuracy, the metric of instruction fine-tuning (arXiv 2601.17257, section 5).

This folder is also what `evaluate.load` takes, without any download.
"""

import datasets
import evaluate
import numpy as np


IGNORE_INDEX = -100  # a position without a label


class TokenAccuracy(evaluate.Metric):
    """Share of the labelled tokens that are predicted, in [0, 1].

    Takes rows of token ids `[rows, tokens]` of any lengths: the label of each position (-100: none), and the
    prediction FOR that position. The logits of a causal language model are those of the next position: leave out the
    last of `logits.argmax(-1)` and the first of the labels.

    Example:

    ```python
    >>> TokenAccuracy().compute(predictions=[[5, 6, 7], [5, 8]], references=[[-100, 6, 9], [5, 8]])
    {'token_accuracy': 0.75}
    ```

    Raises:
        ValueError: rows of different lengths, or no labelled token.
    """

    def _info(self) -> evaluate.MetricInfo:
        row = datasets.List(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description="Share of the labelled tokens that are predicted.",
            citation="",
            inputs_description="predictions, references: token ids, shape [rows, tokens]; -100: no label.",
            features=datasets.Features({"predictions": row, "references": row}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        hits = count = 0
        for ours, theirs in zip(predictions, references):
            if len(ours) != len(theirs):
                raise ValueError(
                    f"A row has {len(ours)} predictions and {len(theirs)} references; give one prediction a label."
                )
            labelled = np.not_equal(theirs, IGNORE_INDEX)
            hits += np.sum(np.equal(ours, theirs) & labelled)
            count += np.sum(labelled)
        if not count:
            raise ValueError("`references` hold no label but -100; nothing can be scored.")
        return {"token_accuracy": float(hits / count)}
