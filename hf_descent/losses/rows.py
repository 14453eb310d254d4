"""The loss of a batch, split into those of its rows.

They come from the logits where the form of the loss is known, else from a custom loss that is called on each row.

Each batch is checked: where the losses of its rows do not add up to its own, the batch counts as one row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..readout.labels import IGNORE_INDEX, documents_of
from ..readout.replay import output_logits
from ..readout.stack import map_tensors
from .chance import ChanceLoss
from .task import TaskLoss


# By how much the rows of a batch may miss its loss, which half precision rounds.
TOLERANCE = 0.01


class RowLosses:
    """Splits the losses of one task.

    Args:
        task ([`TaskLoss`]): the loss.
        form ([`ChanceLoss`], *optional*): of which kind it is, where that is known.
    """

    def __init__(self, task: TaskLoss, form: ChanceLoss | None):
        self._task = task
        self._form = form
        self._calls_each_row = form is None and not task.uses_model_loss

    @property
    def has_form(self) -> bool:
        """Whether the losses of rows come from the logits, by known operations."""
        return self._form is not None

    def split(self, outputs: Any, inputs: Mapping[str, Any]) -> torch.Tensor | None:
        """The loss of each row times its items, and its items, float32 `[rows, 2]`; `None` where that is not known."""
        if self._form is not None:
            return self._by_form(outputs, inputs)
        if self._calls_each_row:
            return self._by_calls(outputs, inputs)
        return None

    def joined(
        self, splits: Sequence[torch.Tensor | None], means: torch.Tensor, items: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of a batch at all layers `[rows, layers + 1]`, and whether it could be split, a scalar tensor.

        `splits` are those of the layers, `means` `[layers]` the losses of the batch, `items` its number of items.
        """
        if any(split is None for split in splits):
            return _whole(means, items), means.new_zeros((), dtype=torch.bool)
        columns = [split[:, :1] for split in splits]
        rows = torch.cat([*columns, splits[-1][:, 1:]], dim=1)  # [rows, layers + 1]
        totals = rows.sum(0)  # [layers + 1], the last one the items
        expected = F.pad(means, (0, 1), value=1.0) * totals[-1]  # [layers + 1]
        # As `torch.isclose` with a relative tolerance, by a third of the kernels.
        excess = (totals - expected).abs().sub(expected.abs(), alpha=TOLERANCE)
        is_split = excess.max() <= 1e-6
        if self._calls_each_row:  # on later batches it is not tried again
            self._calls_each_row = bool(is_split)
        # Rounding apart, they add up: what is left of it would be in no row.
        scaled = rows * (expected / totals).nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)
        whole = F.pad(expected[None], (0, 0, 0, len(rows) - 1))  # other rows have no items
        return torch.where(is_split, scaled, whole), is_split

    def _by_form(self, outputs, inputs) -> torch.Tensor | None:
        form = self._form
        if form.kind == "numbers":
            return self._squares(outputs, inputs)
        logits, labels = self._task.predictions(outputs, inputs)
        logits = logits.float()
        if form.kind == "multi_label":
            losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
            return _added_up(losses, torch.ones_like(losses))

        if logits.shape[:-1] != labels.shape:
            return None
        losses = F.cross_entropy(
            logits.flatten(0, -2),
            labels.flatten(),
            reduction="none",
            label_smoothing=form.label_smoothing,
        ).view_as(labels)
        counted = labels.ne(IGNORE_INDEX).float()
        if form.weights is not None:
            weights = form.weights.of(labels)
            losses = weights * losses
            if form.weights.divides:
                counted = weights

        if form.kind == "positions":  # the mean over both ends of an answer, which is one item
            return _added_up(losses / 2, counted[:, :1])
        if labels.dim() == 2 and inputs.get("position_ids") is not None:
            documents, count = documents_of(inputs, labels)
            both = torch.stack([losses.flatten(), counted.flatten()], dim=1)  # [batch * seq, 2]
            return both.new_zeros(count, 2).index_add(0, documents.flatten(), both)

        return _added_up(losses, counted)

    def _squares(self, outputs, inputs) -> torch.Tensor:
        labels = self._task.predicted_labels(inputs).float()
        logits = output_logits(outputs).float().reshape(labels.shape)
        return _added_up(self._form.scale * (logits - labels).square(), torch.ones_like(labels))

    def _by_calls(self, outputs, inputs) -> torch.Tensor | None:
        try:
            return self._called_on_each(outputs, inputs)
        except Exception:  # a loss across rows may fail on one
            self._calls_each_row = False
            return None

    def _called_on_each(self, outputs, inputs) -> torch.Tensor:
        rows = len(self._task.predicted_labels(inputs))
        sums = []
        for row in range(rows):

            def of_row(tensor, row=row):
                has_rows = tensor.dim() > 0 and len(tensor) == rows
                return tensor[row : row + 1] if has_rows else tensor

            own_inputs = map_tensors(of_row, dict(inputs))
            items = self._task.count(own_inputs)
            divisor = items if self._task.loss_fn is not None else None
            loss = self._task(map_tensors(of_row, outputs), own_inputs, divisor)
            loss = torch.where(items > 0, loss.float(), 0.0)
            sums.append(torch.stack([loss * items, items.float()]))

        return torch.stack(sums)


def _added_up(losses: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """The sums over each row of losses and items `[rows, ...]`; `[rows, 2]`."""
    return torch.stack([values.reshape(len(values), -1).sum(1) for values in (losses, items)], 1)


def _whole(means: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """A batch as one row, `[1, layers + 1]`."""
    items = items.to(means)
    return torch.cat([means * items, items[None]])[None]
