"""The numbers that the layer losses of a run move, on the host: running averages, the guard on f_L, multipliers."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from . import building
from .averages import LossAverages
from .guard import LastLayerGuard


if TYPE_CHECKING:
    from ..configs import DescentArguments


WATCHED_RISE = 0.02  # share by which f_L may rise before the log says so, if nothing limits it


class DualAscent:
    """The multipliers of a run, and the averages and the guard that decide how they move.

    Args:
        args (`DescentArguments`): the checked arguments.
        num_layers (`int`): number of layers L.
        num_rows (`int`): number of multipliers.
        steps_per_reading (`int`): optimizer steps from one call of `observe` to the next.

    Attributes:
        multipliers ([`Multipliers`]): one for each row of the problem.
        guard ([`LastLayerGuard`], *optional*): limits the multipliers if f_L rises; `None` if they do not move, or
            have no limit.
        watch ([`LastLayerGuard`], *optional*): the guard, or else one that only sees for the log whether f_L rises.
        averages ([`LossAverages`]): averages of the layer losses that were observed.
        warmup_losses (`np.ndarray`): the averages `[L]` at the end of the warm-up; zeros if nothing was learned.
    """

    def __init__(
        self, args: "DescentArguments", num_layers: int, num_rows: int, steps_per_reading: int
    ):
        self.multipliers = building.multipliers_of(args, num_rows)
        self._moves_multipliers = args.objective_class.moves_multipliers
        self.guard: LastLayerGuard | None = None
        self.watch: LastLayerGuard | None = None
        if args.objective_class.is_constrained:
            limit = args.max_last_layer_rise
            self.watch = LastLayerGuard(WATCHED_RISE if limit is None else limit)
            if self._moves_multipliers and limit is not None:
                self.guard = self.watch
        self.averages = LossAverages(num_layers, steps_per_reading)
        self.warmup_losses = np.zeros(num_layers, dtype=np.float32)
        self._steps_per_reading = steps_per_reading

    def observe(self, layer_losses: Sequence[float], is_active: bool) -> None:
        """Take in losses `[L]` of a step with the present multipliers, and whether the objective had constraints in
        that step. The multipliers do not move."""
        self.averages.add(layer_losses)
        if self.watch is not None:
            acts = is_active
            if self._moves_multipliers:  # then the constraints act by multipliers above 0 alone
                acts = any(self.multipliers.numbers)
            self.watch.observe(layer_losses[-1], acts)

    def keep_warmup_losses(self) -> None:
        """Keep the present averages as those of the warm-up."""
        self.warmup_losses = self.averages.means

    def ascend(self, violations: Sequence[float]) -> None:
        """Move the multipliers by violations `[rows]`, once for each optimizer step that the violations stand for."""
        share = 1.0
        shrinks = False
        if self.guard is not None:
            share = self.guard.share
            shrinks = self.guard.shrinks

        for _ in range(self._steps_per_reading):
            self.multipliers.step(violations, share, shrinks)

    def take_over(self, values: Sequence[float], warmup_losses: Sequence[float] | None) -> None:
        """Take over the multipliers `[rows]` of another run, and the averages of its warm-up if known."""
        state = self.multipliers.state_dict()
        state["values"] = torch.tensor(values)
        self.multipliers.load_state_dict(state)
        if warmup_losses is not None:
            self.warmup_losses = np.array(warmup_losses, dtype=np.float32)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors by name."""
        tensors = self.averages.state_dict()
        tensors["warmup_losses"] = torch.from_numpy(self.warmup_losses.copy())
        for name, tensor in self.multipliers.state_dict().items():
            tensors[f"multipliers.{name}"] = tensor
        if self.guard is not None:
            for name, tensor in self.guard.state_dict().items():
                tensors[f"guard.{name}"] = tensor
        return tensors

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_dict` gave, among other tensors; ValueError or KeyError if one is wrong."""
        self.multipliers.load_state_dict(_part_of(tensors, "multipliers."))

        guard_state = _part_of(tensors, "guard.")
        if self.guard is not None and guard_state:  # the run may have begun without a guard
            self.guard.load_state_dict(guard_state)

        self.averages.load_state_dict(tensors)
        self.warmup_losses = tensors["warmup_losses"].float().numpy()


def _part_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
