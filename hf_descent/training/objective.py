"""The objective of descent training and its dual step, as the trainers and custom loops take them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import nn

from ..configs import DescentArguments
from ..constraints.multipliers import Multipliers
from ..constraints.problem import DescentProblem
from ..constraints.state import DualState
from ..losses.layerwise import LayerLosses, MicroBatchLosses, find_layer_losses
from ..losses.task import TaskLoss
from ..models import give_linear_readout
from ..readout.replay import probing
from ..readout.stack import unwrapped
from .chance import chance_of_batches
from .checks import without_labels
from .preparation import note_readout
from .records import StepTotals


class LayerObjective:
    """Computes the objective of a micro-batch, and takes the dual step.

    It needs the `layers` and the `dual` side, so a trainer makes it on the first batch. It keeps nothing of a step,
    for the caller has the [`StepTotals`]. `rank` is the rank of this process among the `processes` that train
    together.
    """

    def __init__(self, layers: LayerLosses, dual: DualState, rank: int = 0, processes: int = 1):
        self.layers = layers
        self.dual = dual
        self._rank = rank
        self._processes = processes

    def layer_losses(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        step: StepTotals,
        keep_logits: bool = False,
    ) -> MicroBatchLosses:
        """The layer losses and the objective of a micro-batch. Adds the losses to the totals of `step`."""
        count = self.count(batch)
        share = step.share(count)
        items = step.divisor(count)  # for a loss that divides by the items itself

        losses = self.layers.training_losses(
            model,
            batch,
            self.dual.objective_at(step.number),
            share,
            items,
            key=(self._rank, step.number, step.micro_batches),
            keep_logits=keep_logits,
        )

        step.add(losses, share)
        return losses

    def dual_step(self, step: StepTotals, skipped: bool = False) -> None:
        """Move the multipliers by the layer losses of a finished step. If it was `skipped`, the losses do not
        count."""
        sums = step.sums
        if sums is None:  # this process has read nothing
            sums = torch.zeros(self.layers.num_layers + 1, device=self.dual.device)

        # Every process adds up, also where it read nothing or the step is skipped, so that none waits for another.
        totals = self.summed(sums)  # [layers + 1]

        if skipped:
            # A divisor of 0 says that the step has no losses. The step still counts for the warm-up. If it is the
            # turn of held-out examples, they are read, and their losses move the multipliers.
            totals = torch.zeros_like(totals)

        self.dual.take_step(totals, step.number, self.layers)

    def count(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The number of items of a micro-batch, a scalar tensor; ValueError if it has no labels."""
        task = self.layers.task
        count = task.count(batch)
        if count is None:
            raise without_labels(task.label_names, task.model, batch)
        return count

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over processes, in place."""
        if self._processes > 1:
            dist.all_reduce(tensor)
        return tensor


class DescentObjective:
    """What [`DescentTrainer`] minimises, and its dual step, for a custom loop (PyTorch, Accelerate, Lightning).

    Args:
        model (`nn.Module`): as the loop calls it, on its device; wrapped or not.
        batches (iterable of dicts with labels): for example the training `DataLoader`, before Accelerate prepares it,
            in random order. The layers are found on the first batch, and the f_0 of "auto" on the first 2,000 labels
            (100,000 if each token has one). For a denoiser whose noise is not in the batches set `initial_loss_bound`.
        args (`DescentArguments` or [`DescentConfig`]): all apply but two. For noise leave `noise_gamma` 0, and call
            inside [`EmbeddingNoise`]. With `resilience_form="slack"` set `slack_restart=False`, and call
            `objective.multipliers.restart_slacks()` after every epoch.
        max_steps (`int`): optimizer steps of the run, of which the warm-up is a part.
        readout, layer_loss_fn (*optional*): as in [`DescentTrainer`].
        seed (`int`): seed of the draw of tokens, see `readout_token_fraction`.

    Attributes:
        problem, multipliers: the [`DescentProblem`] and its [`Multipliers`]; `multipliers.values` has one value for
            each constraint. Read `objective.multipliers` anew in each step: those that you keep may be a step old.
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
    print(layer_profile(model, held_out, problem=objective.problem).certificate())  # on held-out data
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
        _check_arguments(args)
        model = unwrapped(model)
        if isinstance(readout, str):
            give_linear_readout(model, readout)
            readout = None
        note_readout(model, readout)

        device = next(model.parameters()).device
        with probing(model):  # training goes on as if nothing had been drawn
            batches = iter(batches)
            first = send_to_device(next(batches, None), device)
            if not isinstance(first, Mapping):
                raise ValueError(
                    f"`batches` begins with {first!r}; give dicts for `model(**batch)`, with labels."
                )

            task = TaskLoss.probe(model, first, loss_fn=layer_loss_fn, readout=readout)
            layers = find_layer_losses(
                model,
                first,
                task,
                readout=readout,
                trains=True,
                token_fraction=args.readout_token_fraction,
                same_tokens=args.compares_neighbours,
                seed=seed,
            )
            chance = _measured_chance(layers, chain([first], batches))

        rank, processes = _place()
        if processes > 1:
            chances = [chance]
            dist.broadcast_object_list(chances)
            (chance,) = chances

        dual = DualState(args, layers.num_layers, max_steps, 0, chance, device)
        self._objective = LayerObjective(layers, dual, rank, processes)
        self._step = StepTotals(processes=processes)

    @property
    def problem(self) -> DescentProblem | None:
        return self._objective.dual.problem

    @property
    def multipliers(self) -> Multipliers:
        return self._objective.dual.multipliers

    @property
    def global_step(self) -> int:
        return self._step.number

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Any], items: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The objective of a micro-batch, a scalar with its graph: the layer losses with the weights of this step.

        With `items`, which `count` gives, the objectives of the micro-batches add up to the objective of the step: do
        not divide them. Without `items` each is a mean: divide it by the accumulation steps. `accelerator.backward`
        divides by the accumulation steps of the `Accelerator`: with `items` leave these at 1, and accumulate in your
        own loop. Either way average the gradients over processes, as DDP does.
        """
        if not self._objective.layers.readout.fits(unwrapped(model)):
            raise ValueError(
                "The objective was made for another model, or another head of it: make a new one."
            )

        self._step = replace(self._step, items=items)
        losses = self._objective.layer_losses(model, batch, self._step)
        return self._step.over_processes(losses.objective)

    def count(self, batches: Iterable[Mapping[str, Any]]) -> torch.Tensor:
        """The items of an optimizer step over all processes, from its micro-batches in this one; a scalar tensor."""
        objective = self._objective
        counts = [objective.count(batch).to(objective.dual.device) for batch in batches]
        none = torch.zeros((), dtype=torch.int64, device=objective.dual.device)
        return objective.summed(sum(counts, start=none))

    def step(self, skipped: bool = False) -> None:
        """Move the multipliers by the layer losses since the last call. Call it after the optimizer's step.

        Say that the optimizer's step was `skipped` if the gradient scaler's `get_scale()` fell: then the losses do not
        count. Accelerate's own flag misses the steps that a fused optimizer skips.
        """
        self._objective.dual_step(self._step, skipped)
        self._begin(self._step.number + 1)

    def logs(self) -> dict[str, float]:
        """The mean layer losses of the steps since the last call, their violations, and the multipliers and weights as
        they are now, by name. Empty if no step since then was usable."""
        return self._objective.dual.logs(self._step.number)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint between two steps."""
        return {"global_step": self._step.number, "dual": self._objective.dual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; ValueError if it is of other settings."""
        self._objective.dual.load_state_dict(*state["dual"])
        self._begin(state["global_step"])

    def _begin(self, number: int) -> None:
        """Begin an optimizer step; `number` were taken before."""
        self._step = StepTotals(number, processes=self._step.processes)


def _place() -> tuple[int, int]:
    """The rank of this process, and the number of processes that train together."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _check_arguments(args: DescentArguments) -> None:
    """ValueError for settings that only a trainer can heed."""
    if args.gamma_train > 0:
        raise ValueError(
            f"`noise_gamma` is {args.noise_gamma}; leave it 0, and call inside `EmbeddingNoise`."
        )

    if args.slack_restart and args.resilience_form == "slack" and args.resilience > 0:
        remedy = (
            "set it to False, and call `objective.multipliers.restart_slacks()` after every epoch."
        )
        raise ValueError(
            f"`slack_restart` is True, but a loop does not tell when an epoch ends: {remedy}"
        )


def _measured_chance(layers: LayerLosses, batches: Iterator[Mapping[str, Any]]) -> float | None:
    """The loss of the best constant prediction of the labels of `batches`; `None` if it is not known."""
    if layers.chance_loss is None:
        return None
    with contextlib.suppress(ValueError):  # the dual side raises if it needs this loss
        return chance_of_batches(layers.task, layers.chance_loss, batches)
    return None
