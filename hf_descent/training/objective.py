"""The objective of descent training and its dual step, as the trainers and custom loops take them."""

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
from ..constraints.multipliers import Multipliers
from ..constraints.problem import DescentProblem
from ..constraints.state import DescentState
from ..losses.layerwise import LayerLosses, StepLosses, find_layer_losses
from ..losses.task import TaskLoss
from ..models import give_linear_readout
from ..readout.replay import probing
from ..readout.stack import unwrapped
from .checkpoints import note_readout
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
            raise ValueError(
                f"`noise_gamma` is {args.noise_gamma}; leave it 0, and call inside `EmbeddingNoise`."
            )
        if args.dual_holdout is not None:
            raise ValueError(
                f"`dual_holdout` is {args.dual_holdout}; leave it out: only a trainer can hold rows out."
            )
        if args.slack_restart and args.resilience_form == "slack" and args.resilience > 0:
            remedy = "set it to False, and call `multipliers.restart_slacks()` after every epoch."
            raise ValueError(
                f"`slack_restart` is True, but a loop does not tell when an epoch ends: {remedy}"
            )
        model, chances, has_others = (
            unwrapped(model),
            [None],
            dist.is_available() and dist.is_initialized(),
        )
        self._place = (
            (dist.get_rank(), dist.get_world_size()) if has_others else (0, 1)
        )  # rank, processes
        if isinstance(readout, str):
            give_linear_readout(model, readout)
            readout = None
        note_readout(model, readout)
        device = next(model.parameters()).device
        with probing(model):  # training goes on as if nothing had been drawn
            batches = iter(batches)
            inputs = send_to_device(next(batches, None), device)
            if not isinstance(inputs, Mapping):
                raise ValueError(
                    f"`batches` begins with {inputs!r}; give dicts for `model(**batch)`, with labels."
                )
            task = TaskLoss.probe(model, inputs, loss_fn=layer_loss_fn, readout=readout)
            settings = {
                "token_fraction": args.readout_token_fraction,
                "same_tokens": args.compares_neighbours,
            }
            settings |= {"readout": readout, "trains": True, "seed": seed}
            self.layers = find_layer_losses(model, inputs, task, **settings)
            predictor = self.layers.predictor
            with contextlib.suppress(ValueError):  # where it is needed, `DescentState` asks for it
                chances = [
                    predictor and chance_of_batches(task, predictor, chain([inputs], batches))
                ]
        if self._place[1] > 1:
            dist.broadcast_object_list(chances)
        self.dual = DescentState(args, self.layers.num_layers, max_steps, 0, *chances, device)
        self.begin(0)

    @classmethod
    def of(
        cls, layers: LayerLosses, dual: DescentState, place: tuple[int, int] = (0, 1)
    ) -> "DescentObjective":
        """That of layers and a dual side which a trainer has found in its own way; `place` is the rank of this process
        and the number of those that train together."""
        objective = cls.__new__(cls)
        objective.layers, objective.dual, objective._place = layers, dual, place
        objective.begin(0)
        return objective

    @property
    def problem(self) -> DescentProblem | None:
        return self.dual.problem

    @property
    def multipliers(self) -> Multipliers:
        return self.dual.multipliers

    def begin(self, step: int, sums: StepSums | None = None) -> None:
        """Begin optimizer step `step`, whose layer losses are added to `sums`."""
        self.global_step, self.sums = step, StepSums() if sums is None else sums

    def read(
        self, model: nn.Module, batch: Mapping[str, Any], keep_logits: bool = False
    ) -> StepLosses:
        """The layer losses of a micro-batch, and the objective; they are added to those of the step."""
        share = self.sums.share(self.layers.task.count(batch))
        items = share.new_ones(()) if self.sums.items is None else self.sums.items
        key = (self._place[0], self.global_step, self.sums.micro_batches)
        objective = self.dual.objective_at(self.global_step)
        losses = self.layers.step(model, batch, objective, share, items, key, keep_logits)
        self.sums.add(losses, share)
        return losses

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Any], items: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The objective of a micro-batch, a scalar with its graph: the layer losses with the weights of this step.

        With `items`, from `count`, the objectives of an optimizer step add up to that of all its rows: do not divide
        them (Accelerate divides by its accumulation steps). Without, each is a mean: divide by these steps. Either
        way gradients are to be averaged over processes, as DDP does.
        """
        if not self.layers.readout.fits(unwrapped(model)):
            raise ValueError(
                "The objective was made for another model, or another head of it: make a new one."
            )
        count = self.layers.task.count(batch)
        self.sums = replace(self.sums, items=count if items is None else items)
        objective = self.read(model, batch).objective
        return objective if items is None else objective * self._place[1]

    def count(self, batches: Iterable[Mapping[str, Any]]) -> torch.Tensor:
        """The items of an optimizer step over all processes, from its micro-batches in this one; a scalar tensor."""
        return self._summed(
            sum(self.layers.task.count(batch).to(self.dual.device) for batch in batches)
        )

    def step(self, skipped: bool = False) -> None:
        """One step of the multipliers, on the layer losses since the last one; after the optimizer's step, unless that
        was `skipped`: a gradient scaler's `get_scale()` fell. Of fused optimizers accelerate's flag does not tell."""
        read = self.sums.read
        if read is None:  # by this process
            read = torch.zeros(self.layers.num_layers + 1, device=self.dual.device)
        # Every process adds up, also where it read nothing or the step is skipped, so that none waits for another.
        totals = self._summed(read)  # [layers + 1]
        shares = totals[-1]
        if not skipped:
            layer_losses = totals[:-1] / torch.where(shares > 0, shares, 1.0)
            self.dual.dual_step(layer_losses, self.global_step, shares, self.layers)
        self.begin(self.global_step + 1)

    def logs(self) -> dict[str, float]:
        """Layer losses, violations, multipliers and weights of the steps since the last call, by name."""
        return self.dual.logs(self.global_step)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint between two steps."""
        return {"global_step": self.global_step, "dual": self.dual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; ValueError where the settings are others."""
        self.dual.load_state_dict(*state["dual"])
        self.begin(state["global_step"])

    def _summed(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._place[1] > 1:
            dist.all_reduce(tensor)
        return tensor
