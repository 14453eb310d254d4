"""Examples that do not train the weights, by which the multipliers move (Cotter et al. 2019).

On examples that the weights have fitted, losses are too low, and constraints look met.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Subset
from transformers import Trainer
from transformers.trainer_utils import has_length

from ..configs import DescentArguments
from ..logs import get_logger
from ..losses.layerwise import LayerLosses
from .chance import drawing_apart
from .evaluation_sets import evaluation_sets, rows_of
from .overlap import share_rows
from .records import reduced


logger = get_logger(__name__)

LEAST_ROWS = 200  # with fewer, means are too noisy to detect a violation of a few percent


def check_dual_dataset(trainer: Trainer, dual_dataset) -> None:
    """ValueError if `dual_dataset` has too few examples or no length, or shares examples with another part of the
    data."""
    if not has_length(dual_dataset):
        raise ValueError(
            f"`dual_dataset` has no known number of examples; give {LEAST_ROWS} or more, in a dataset with a length."
        )
    if len(dual_dataset) < LEAST_ROWS:
        raise ValueError(
            f"`dual_dataset` has {len(dual_dataset)} examples; give {LEAST_ROWS} or more."
        )
    parts = {"train_dataset": trainer.train_dataset, **evaluation_sets(trainer.eval_dataset)}
    for name, rows in parts.items():
        if share_rows(dual_dataset, rows):
            raise ValueError(f"`dual_dataset` has examples of `{name}`: give others.")


def rows_known_to_training(
    trainer: Trainer, dual_dataset, has_trained: bool, in_search: bool
) -> list:
    """The data sets that the weights or the multipliers were fitted to, and those that chose a checkpoint (by
    `eval_strategy`) or settings (`in_search`)."""
    known = []
    if has_trained:
        known += [trainer.train_dataset, dual_dataset]
    if in_search or trainer.args.eval_strategy != "no":
        known += evaluation_sets(trainer.eval_dataset).values()
    return known


def overlaps_training(trainer: Trainer, dataset, known: list) -> bool:
    """Whether `dataset`, as `evaluate` takes it, is known to share rows with one of the data sets `known`."""
    rows = rows_of(trainer.eval_dataset, dataset)
    return any(share_rows(rows, other) for other in known)


def shuffled(rows, args: DescentArguments) -> Subset:
    """`rows` in a random order that depends on the seed of the data alone."""
    seed = args.seed if args.data_seed is None else args.data_seed
    return Subset(rows, np.random.default_rng(seed).permutation(len(rows)).tolist())


class HeldOutRows:
    """`count` examples that are not trained on. They are read in eval mode, without dropout but with the noise of
    training."""

    def __init__(self, trainer: Trainer, rows):
        self._trainer = trainer
        self._rows = rows
        self.count = len(rows)
        # Drops columns that the model does not take, as in training.
        self._collate = trainer.get_test_dataloader(rows).collate_fn
        logger.info(
            f"The multipliers move by the losses of {self.count} examples that are held out of training."
        )

    def layer_losses(self, layers: LayerLosses, turn: int) -> torch.Tensor:
        """Layer losses `[L]` of as many examples as an optimizer step takes, over all processes; NaN if none counts.

        Turns are counted from 0. They go through the examples in a circle, so that a turn reads the same ones in every
        run.
        """
        trainer = self._trainer
        model = trainer.model_wrapped
        batches = self._batches(model, turn)
        # Sums in float32 lose digits, but MPS and others have no float64.
        device = trainer.args.device
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        totals = torch.zeros(layers.num_layers + 1, dtype=dtype, device=device)

        model.eval()
        # The noise is entered once: its draws go on from one batch to the next.
        with (
            torch.no_grad(),
            trainer.compute_loss_context_manager(),
            trainer.noise_of_micro_batch(),
        ):
            for part, batch in batches.items():
                inputs = trainer._prepare_inputs(batch)
                measured = layers.evaluation_losses(model, inputs, keep_logits=False, key=(part,))
                sums = measured.means * measured.items  # [layers]
                totals = totals + torch.cat([sums, measured.items.to(sums)[None]])

        model.train()
        reshard(model)

        sums = reduced(trainer.accelerator, totals)  # [layers + 1]
        return (sums[:-1] / sums[-1]).float()

    def _batches(self, model: nn.Module, turn: int) -> dict[int, Mapping[str, Any]]:
        """This process's batches of a turn, each by its number among the batches of all turns and processes."""
        trainer = self._trainer
        args = trainer.args
        size = trainer._train_batch_size if args.auto_find_batch_size else args.train_batch_size
        if trainer.accelerator.split_batches:
            size //= args.world_size
        parts = args.gradient_accumulation_steps * args.world_size
        own_parts = range(turn * parts + args.process_index, (turn + 1) * parts, args.world_size)

        batches = {}
        with drawing_apart(trainer, model, seed=turn):
            for part in own_parts:
                indices = range(part * size, (part + 1) * size)
                batches[part] = self._collate([self._rows[row % self.count] for row in indices])

        return batches


def reshard(model: nn.Module) -> None:
    """Shard the units of FSDP2 again. An evaluation may leave one unsharded, and `zero_grad` would miss its
    gradient."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
