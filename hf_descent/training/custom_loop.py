"""The objective of descent training for a training loop without Trainer."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import nn

from ..configs import DescentArguments
from ..constraints.state import DescentState
from ..losses.constant import find_predictor
from ..losses.layerwise import find_layer_losses
from ..losses.task import TaskLoss
from ..readout.replay import probing
from ..readout.stack import unwrapped
from .initial_loss import chance_of_batches
from .records import StepSums


class DescentObjective:
    """What [`DescentTrainer`] minimises, and its dual step, for a custom loop (PyTorch, Accelerate, Lightning).

    Args:
        model (`nn.Module`): as the loop calls it, on its device; wrapped or not.
        batches (iterable of dicts with labels): such as the training `DataLoader`, before Accelerate prepares it, in
            random order: the layers are found on the first batch, and f_0 "auto" on the first 2,000 labels (100,000
            of tokens). For a denoiser whose noise is not in the batches set `initial_loss_bound`.
        args (`DescentArguments` or [`DescentConfig`]): but for the noise, which is [`EmbeddingNoise`] around a call.
        max_steps (`int`): optimizer steps of the run, of which the warm-up is a part.
        readout, layer_loss_fn (*optional*): as of [`DescentTrainer`].
        seed (`int`): of the draw of tokens, see `readout_token_fraction`.

    Attributes:
        problem, multipliers: the [`DescentProblem`] and its [`Multipliers`], `multipliers.values` `[rows]`.
        global_step (`int`): optimizer steps so far.

    Example:

    ```python
    args = DescentArguments(descent_strength=0.5)
    objective = DescentObjective(model, loader, args, max_steps=epochs * len(loader))
    for _ in range(epochs):
        for batch in loader:
            objective(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            objective.step()
    print(layer_profile(model, held_out, problem=objective.problem).certificate())  # of rows that were not trained on
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Mapping[str, Any]],
        args: DescentArguments,
        *,
        max_steps: int,
        readout: Callable | str | None = None,
        layer_loss_fn: Callable[..., torch.Tensor] | None = None,
        seed: int = 42,
    ):
        if args.gamma_train > 0:
            raise ValueError(f"`noise_gamma` is {args.noise_gamma}; leave it 0, and call inside `EmbeddingNoise`.")
        if args.dual_holdout is not None:
            raise ValueError(f"`dual_holdout` is {args.dual_holdout}; leave it out: only a trainer can hold rows out.")
        if args.slack_restart and args.resilience_form == "slack" and args.resilience > 0:
            remedy = "set it to False, and call `multipliers.restart_slacks()` after every epoch."
            raise ValueError(f"`slack_restart` is True, but a loop does not tell when an epoch ends: {remedy}")
        model, chances = unwrapped(model), [None]
        self._device = next(model.parameters()).device
        with probing(model):  # training goes on as if nothing had been drawn
            batches = iter(batches)
            inputs = send_to_device(next(batches, None), self._device)
            if not isinstance(inputs, Mapping):
                raise ValueError(f"`batches` begins with {inputs!r}; give dicts for `model(**batch)`, with labels.")
            task = TaskLoss.probe(model, inputs, loss_fn=layer_loss_fn, readout=readout)
            short = task.short(inputs)
            outputs = model(**task.model_inputs(short))
            with contextlib.suppress(ValueError):  # where it is needed, `DescentState` asks for it
                predictor = find_predictor(task, short, outputs)
                chances = [chance_of_batches(task, predictor, lambda _: chain([inputs], batches))]
        if _processes()[1] > 1:
            dist.broadcast_object_list(chances)
        fraction = {"token_fraction": args.readout_token_fraction, "same_tokens": args.compares_neighbours}
        self._layers = find_layer_losses(model, inputs, task, readout=readout, trains=True, seed=seed, **fraction)
        self._dual = DescentState(args, self._layers.num_layers, max_steps, 0, *chances, self._device)
        self.problem, self.multipliers = self._dual.problem, self._dual.multipliers
        self.global_step, self._sums, self._parts = 0, StepSums(), 0

    def __call__(self, model: nn.Module, batch: Mapping[str, Any], items: torch.Tensor | None = None) -> torch.Tensor:
        """The objective of a micro-batch, a scalar with its graph: the layer losses with the weights of this step.

        With `items`, from `count`, the objectives of an optimizer step add up to that of all its rows: do not divide
        them (Accelerate divides by its accumulation steps). Without, each is a mean: divide by these steps. Either
        way gradients are to be averaged over processes, as DDP does.
        """
        if not self._layers.readout.fits(unwrapped(model)):
            raise ValueError("The objective was made for another model, or another head of it: make a new one.")
        rank, processes = _processes()
        count = self._layers.task.count(batch)
        self._sums = replace(self._sums, items=count if items is None else items)
        # A micro-batch without labels has no mean.
        self._parts = self._parts + (count > 0) if items is None else (items > 0) / processes
        objective = self._sums.read(self._layers, self._dual, model, batch, self.global_step, rank).objective
        return objective if items is None else objective * processes

    def count(self, batches: Iterable[Mapping[str, Any]]) -> torch.Tensor:
        """The items of an optimizer step over all processes, from its micro-batches in this one; a scalar tensor."""
        return _summed(sum(self._layers.task.count(batch).to(self._device) for batch in batches))

    def step(self) -> None:
        """One step of the multipliers, on the layer losses since the last one; after the optimizer's step."""
        parts = _summed(self._parts.float())
        layer_losses = _summed(self._sums.layer_losses) / parts.clamp(min=1)
        self._dual.dual_step(layer_losses, self.global_step, parts)
        self.global_step, self._sums, self._parts = self.global_step + 1, StepSums(), 0

    def logs(self) -> dict[str, float]:
        """Layer losses, violations, multipliers and weights of the steps since the last call, by name."""
        return self._dual.logs(self.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint between two steps."""
        return {"global_step": self.global_step, "dual": self._dual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; ValueError where the settings are others."""
        self._dual.load_state_dict(*state["dual"])
        self.global_step, self._sums, self._parts = state["global_step"], StepSums(), 0
        self.problem = self._dual.problem


def _processes() -> tuple[int, int]:
    """The rank of this process, and their number."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    if _processes()[1] > 1:
        dist.all_reduce(tensor)
    return tensor
