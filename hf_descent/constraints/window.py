"""The layer losses of the last steps, one by one, so that a report can say exactly which steps its means are over."""

import torch


class LossWindow:
    """The layer losses `[L]` of the last `size` steps that were added.

    Args:
        size (`int`): the greatest number of steps kept.
        num_layers (`int`): number of layers L.
        device (`torch.device` or `str`): where the losses arrive; adding some reads nothing back to the host.
    """

    def __init__(self, size: int, num_layers: int, device: torch.device | str = "cpu"):
        self.size = max(size, 1)
        self.count = 0  # steps added so far
        self._rows = torch.full((self.size, num_layers), torch.nan, device=device)

    def add(self, layer_losses: torch.Tensor) -> None:
        """Add the losses `[L]` of a step; where one is not finite, the step takes its place but counts for nothing."""
        self._rows[self.count % self.size] = layer_losses.to(self._rows)
        self.count += 1

    @property
    def rows(self) -> torch.Tensor:
        """The losses of the steps kept, in their order, without those that count for nothing; `[steps, L]`."""
        rows = self._in_order()
        return rows[rows.isfinite().all(dim=1)]

    def _in_order(self) -> torch.Tensor:
        steps = range(max(0, self.count - self.size), self.count)
        return self._rows[[step % self.size for step in steps]]

    def state_dict(self) -> torch.Tensor:
        """The losses of the steps kept, in their order; `[steps, L]`."""
        return self._in_order().cpu()

    def load_state_dict(self, rows: torch.Tensor) -> None:
        """Take over the last `size` steps of what `state_dict` gave; ValueError for another number of layers."""
        if rows.ndim != 2 or rows.shape[1] != self._rows.shape[1]:
            raise ValueError(f"the losses of the last steps have shape {list(rows.shape)}")
        self.count = 0
        self._rows.fill_(torch.nan)
        for row in rows[-self.size :]:
            self.add(row)


def is_below(losses: torch.Tensor, bound: float) -> bool:
    """Whether the mean of `losses` `[steps]` is below `bound` by twice its standard error; never so of 5 or fewer."""
    if len(losses) <= 5:
        return False
    error = losses.std() / len(losses) ** 0.5
    return bool(losses.mean() + 2 * error < bound)
