"""The losses f_1..f_L of all layers on a batch: with gradient for a training step, without for an evaluation.

[`ReplayedLosses`] works for every architecture with a layer stack: it replays what follows the stack once per layer.
[`TiledLosses`] is for a final norm and a linear head: it reads all layers in tiles, and makes no logits. Training and
evaluation use the same object; [`find_layer_losses`] chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from transformers.utils import logging

from ..constraints.objectives import StepObjective
from ..readout.head import HeadReadout
from ..readout.labels import IGNORE_INDEX
from ..readout.linear_cross_entropy import TokenStatistics
from ..readout.replay import Readout, has_router_loss, output_loss, probing
from .chance import ChanceLoss
from .chance_probe import find_chance_loss
from .rows import RowLosses
from .task import TaskLoss


logger = logging.get_logger(__name__)

# From this vocabulary on, reading every layer on all tokens costs several times the model itself.
LARGE_VOCABULARY = 8192
# By measurement (`recipes/benchmarks/`): a step costs little more than plain training, the multipliers average noise.
DEFAULT_TOKEN_FRACTION = 0.1


@dataclass
class MicroBatchLosses:
    """The layer losses of one micro-batch in training."""

    objective: torch.Tensor  # the scalar to minimise, with its graph
    parts: torch.Tensor  # [layers], the micro-batch's part of the step's layer losses
    outputs: Any  # the model's
    tokens: TokenStatistics | None = None  # where asked for


@dataclass
class BatchLosses:
    """The layer losses of one batch, without gradient."""

    means: torch.Tensor  # [layers], f_l, the mean over the items of the batch; 0 without items
    items: torch.Tensor  # the number of items, a scalar
    outputs: Any  # the model's
    scores: list  # what the caller's `score` returned for each layer
    # [rows, layers + 1], of each row the sums of its losses and its items; rows without items have zeros.
    rows: torch.Tensor
    # Whether the rows are those of the batch, not the batch as a whole; a scalar.
    is_split: torch.Tensor
    tokens: TokenStatistics | None = None  # where asked for


class ReplayedLosses:
    """The layer losses of any architecture: what follows the layer stack is run once per layer."""

    def __init__(
        self,
        readout: Readout,
        task: TaskLoss,
        chance_loss: ChanceLoss | None,
        token_statistics: bool = False,
    ):
        self.num_layers = readout.num_layers
        self.task = task
        self.readout = readout
        self.chance_loss = chance_loss
        self._rows = RowLosses(task, chance_loss)
        self._token_statistics = token_statistics

    def find_batching(self, inputs: Mapping[str, Any]) -> None:
        """Find out on a batch whether all layers can be read by one run of what follows the stack."""
        score = partial(self._measured, inputs=inputs, items=self.task.count(inputs))
        self.readout.check_batching(self.task.model_inputs(inputs), score)

    def find_joining(self, inputs: Mapping[str, Any]) -> None:
        """Find out on a batch whether a training step may read the last layer with the others."""
        loss = partial(self.task, inputs=inputs, items=self.task.count(inputs))
        self.readout.check_joining(self.task.model_inputs(inputs), loss)

    def _measured(self, outputs, inputs, items):
        """A layer's outputs, their loss and that of each row, where it follows from the outputs."""
        split = None
        if self._rows.has_form:
            split = self._rows.split(outputs, inputs)
        return outputs, self.task(outputs, inputs, items), split

    def training_losses(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        objective: StepObjective,
        share: torch.Tensor,
        items: torch.Tensor,
        key: Sequence[int] = (),
        keep_logits: bool = False,
    ) -> MicroBatchLosses:
        """The losses of a micro-batch in training.

        Args:
            model: as it is called in training, wrapped or not.
            share: the micro-batch's share of the items of the optimizer step, a scalar; see `part_of_step`.
            items: the items of the optimizer step, over micro-batches and processes; if these were not counted, of the
                micro-batch.
            key: what the random numbers of this micro-batch depend on, where tokens are sampled.
            keep_logits: whether the outputs must hold the model's own logits.
        """
        # A loss that takes items is a sum divided by `items`, and so scaled already. Any other is a mean of the
        # micro-batch, which its share scales in the same way.
        divisor = None
        if self.task.takes_items:
            divisor = items.clamp(min=1)  # a sum over none is 0
        read_losses = []

        def loss_of(outputs):
            return self.task(outputs, inputs, divisor)

        def read(losses, hidden_states):
            _require_gradients(hidden_states, objective, self.readout)
            read_losses.append(losses)

        arguments = self.task.model_inputs(inputs)
        if divisor is not None and self.task.accepts_items:
            arguments["num_items_in_batch"] = divisor
        unweighted = _unweighted(objective, self.num_layers)
        with self.readout.attach_loss(loss_of, read, unweighted):
            outputs = model(**arguments)

        (losses,) = read_losses
        parts = losses.float()  # [layers]
        if divisor is None:
            parts = part_of_step(parts, share)
        value = objective.value(parts, share)
        if self.task.uses_model_loss and has_router_loss(outputs):
            # No f_l holds the router's loss (the readout replayed layer L without it); the objective takes it as the
            # model itself weighs it.
            value = value + (outputs["loss"] - losses[-1]) * share

        return MicroBatchLosses(value, parts.detach(), outputs, self._tokens(outputs, inputs))

    def evaluation_losses(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        score: Callable | None = None,
        keep_logits=True,
        key=None,
        last_only=False,
    ) -> BatchLosses:
        """The losses of a batch in evaluation; `score(outputs, inputs)` is called for each layer, with its outputs or,
        where none are made, its [`TokenStatistics`]. With a `key` (integers) layers are read on a sample of tokens,
        as in training, drawn by that key, the same for all layers, so that their differences are less noisy.
        `last_only`: as if there were no other layer than the last, which costs no more than the model itself."""
        count = self.task.count(inputs)
        # As Trainer gives a custom loss those of the batch.
        items = None
        if self.task.loss_fn is not None:
            items = count
        losses = []
        splits = []
        scores = []

        def read(layer, measured, hidden):
            outputs, loss, split = measured
            if split is None:
                split = self._rows.split(outputs, inputs)
            losses.append(loss)
            splits.append(split)
            if score is not None:
                scores.append(score(outputs, inputs))

        layers = None
        if last_only:
            layers = [self.num_layers]
        score_all = partial(self._measured, inputs=inputs, items=items)
        with self.readout.attach(read, layers, score=score_all):
            outputs = model(**self.task.model_inputs(inputs))

        means = torch.where(count > 0, torch.stack(losses).float(), 0.0)  # [layers]
        rows, is_split = self._rows.joined(splits, means, count)
        tokens = self._tokens(outputs, inputs)
        return BatchLosses(means, count, outputs, scores, rows, is_split, tokens)

    def _tokens(self, outputs, inputs) -> TokenStatistics | None:
        if not self._token_statistics:
            return None
        with torch.no_grad():
            return self._statistics(outputs, inputs)

    def _statistics(self, outputs, inputs) -> TokenStatistics:
        logits, labels = self.task.predictions(outputs, inputs)
        labelled = labels != IGNORE_INDEX  # [batch, n]
        logits = logits[labelled].float()  # [tokens, vocab]
        targets = labels[labelled]  # [tokens]
        # A check would wait for the device.
        predicted = Categorical(logits=logits, validate_args=False)
        return TokenStatistics(
            -predicted.log_prob(targets), predicted.entropy(), logits.argmax(-1) == targets
        )


class TiledLosses:
    """As [`ReplayedLosses`], of a final norm and a linear head, read in tiles without making logits."""

    def __init__(
        self,
        head: HeadReadout,
        task: TaskLoss,
        chance_loss: ChanceLoss | None,
        token_fraction,
        token_statistics=False,
        seed=0,
        same=False,
    ):
        self.num_layers = head.num_layers
        self.task = task
        self.readout = head.replay
        self.chance_loss = chance_loss
        self.token_fraction = token_fraction
        self._token_statistics = token_statistics
        self._head = head
        self._seed = seed
        self._same = same

    def training_losses(self, model, inputs, objective, share, items, key=(), keep_logits=False):
        tokens = self._head.tokens(inputs, self.token_fraction, self._generator(key), self._same)
        # What the sums of this micro-batch are divided by, to give its mean times its share.
        divisor = max(len(tokens.rows), 1) / torch.where(share > 0, share, 1.0)
        unweighted = _unweighted(objective, self.num_layers)
        read_losses = []

        def read_layers(read, outputs, hidden_states):
            _require_gradients(hidden_states, objective, self.readout)
            if objective.weights is None:
                with torch.no_grad():
                    parts = read(tokens).sums / divisor  # [layers]
                parts.requires_grad_()
                (weights,) = torch.autograd.grad(objective.value(parts, share), parts)
            else:
                weights = objective.weights(share.device)
            losses = read(
                tokens,
                weights,  # [layers]
                num_items=divisor,
                value_only=unweighted,
                token_statistics=self._token_statistics,
            )
            read_losses.append(losses)
            # Trainer's label smoothing leaves the router's loss out.
            router = self._head.router_loss_weight
            if self.task.uses_model_loss and router and outputs.get("aux_loss") is not None:
                return losses.objective + router * outputs["aux_loss"] * share
            return losses.objective

        with self._head.attach(read_layers, keep_logits):
            outputs = model(**inputs)
        (losses,) = read_losses
        return MicroBatchLosses(outputs["loss"], losses.sums / divisor, outputs, losses.tokens)

    def evaluation_losses(
        self, model, inputs, score=None, keep_logits=True, key=None, last_only=False
    ) -> BatchLosses:
        if key is None:
            tokens = self._head.tokens(inputs)
        else:
            tokens = self._head.tokens(inputs, self.token_fraction, self._generator(key), same=True)

        documents = self._head.documents(inputs)
        readings = []  # one of all layers, or one of each layer
        scores = []

        def read_layers(read, outputs, hidden_states):
            if score is None:
                layer = self.num_layers if last_only else None  # of `None` all
                statistics = self._token_statistics
                readings.append(
                    read(tokens, layer=layer, documents=documents, token_statistics=statistics)
                )
            else:
                for layer in range(1, self.num_layers + 1):
                    readings.append(
                        read(tokens, layer=layer, documents=documents, token_statistics=True)
                    )
                    scores.append(score(readings[-1].tokens, inputs))
            return readings[-1].sums[-1] / max(len(tokens.rows), 1)

        with self._head.attach(read_layers, keep_logits):
            outputs = model(**inputs)

        sums = torch.cat([losses.sums for losses in readings])  # [layers]
        count = torch.full((), len(tokens.rows), device=sums.device)
        rows = torch.cat([*(losses.rows for losses in readings), readings[-1].row_items], dim=1)
        return BatchLosses(
            means=sums / count.clamp(min=1),
            items=count,
            outputs=outputs,
            scores=scores,
            rows=rows,
            is_split=torch.ones((), dtype=torch.bool, device=sums.device),
            tokens=readings[-1].tokens,
        )

    def _generator(self, key) -> torch.Generator:
        """Depends on where training stands, so that a resumed run draws the tokens of the run that it continues."""
        # One number more than the key of the noise, for a stream of its own.
        sequence = np.random.SeedSequence(self._seed, spawn_key=(*key, 1))
        (seed,) = sequence.generate_state(1, np.uint64)
        return torch.Generator().manual_seed(int(seed))


LayerLosses = ReplayedLosses | TiledLosses


def part_of_step(means: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Mean losses of a micro-batch times its share of the step. They are 0 without items, where a mean is NaN.

    `share` is a number; or a bool, where it can only be 1 or 0.
    """
    if share.dtype == torch.bool:  # two kernels fewer
        return means.where(share, 0.0)
    return means.where(share > 0, 0.0) * share


def _unweighted(objective: StepObjective, num_layers: int) -> list[int]:
    """The layers whose losses have no weight in the objective, which need no gradient."""
    return [layer for layer in range(1, num_layers + 1) if layer not in objective.weighted]


def _require_gradients(hidden_states, objective, readout) -> None:
    """ValueError where the hidden state of a layer below the last has no gradient, but its loss a weight."""
    for layer in objective.trained:
        if layer < readout.num_layers and not hidden_states[layer - 1].requires_grad:
            raise _without_gradient(layer, readout)


def _without_gradient(layer, readout) -> ValueError:
    below = readout.stack.layers[:layer]
    parameters = [parameter for module in below for parameter in module.parameters()]
    is_frozen = not any(parameter.requires_grad for parameter in parameters)
    is_checkpointed = any(
        getattr(module, "gradient_checkpointing", False) for module in readout.model.modules()
    )
    if is_frozen:
        remedy = (
            f"Unfreeze layers of `{readout.stack.name}` up to it, or set `constrained_layers` to those above the "
            "frozen ones (where all are frozen, `objective='erm'`)"
        )
    elif is_checkpointed:
        remedy = "Use gradient checkpointing with `use_reentrant=False`"
    else:
        remedy = (
            f"{type(readout.model).__name__} computes its layers without a graph of gradients, as reversible layers "
            "do: use `objective='erm'`, or another architecture"
        )

    return ValueError(
        f"The hidden state of layer {layer} has no gradient, so its loss cannot be constrained. {remedy}."
    )


def find_layer_losses(
    model: nn.Module,
    inputs: Mapping[str, Any],
    task: TaskLoss,
    *,
    readout: Callable | None = None,
    token_fraction: float | None = None,
    token_statistics: bool = False,
    trains: bool = False,
    needs_logits: bool = False,
    seed: int = 0,
    same_tokens: bool = False,
) -> LayerLosses:
    """The layer losses of `model`, in tiles where its tail allows, checked on the batch `inputs`.

    Args:
        model, task: the unwrapped model, and its task loss, probed.
        readout: a custom readout(model, hidden, inputs) -> logits.
        token_fraction, seed: share of the labelled tokens on which layers below the last are read in training (by
            default 1/10 from a vocabulary of 8192 on, else all), and the seed of their draw.
        same_tokens: whether all share these tokens, on which neighbours err alike: for constraints that compare them.
        token_statistics: whether to give the [`TokenStatistics`] of the last layer.
        trains: whether to train on the losses.
        needs_logits: whether each layer's logits are needed, for a custom metric.

    ValueError where no shared readout exists (see [`Readout.probe`]), or the replay cannot heed `token_fraction`.
    """
    inputs = task.short(inputs)
    replay = Readout.probe(model, task.model_inputs(inputs), readout, trains)
    task.check_loss_function()
    chance_loss = _chance_loss(model, inputs, task)

    try:
        is_custom = readout is not None or task.loss_fn is not None or needs_logits
        head = _find_head(model, inputs, task, is_custom)
    except ValueError as reason:
        if token_fraction not in (None, 1.0):
            raise ValueError(
                f"`readout_token_fraction` is {token_fraction}; leave it unset: {reason}"
            ) from reason
        logger.debug(f"The layers are not read in tiles: {reason}")
        head = None

    if head is None:
        if trains:
            task.takes_items = task.divides_by_items(inputs)
        losses = ReplayedLosses(replay, task, chance_loss, token_statistics)
        losses.find_batching(inputs)
        if trains:
            losses.find_joining(inputs)
        _report_replay(readout, trains)
        return losses

    if token_fraction is None:
        token_fraction = _default_fraction(head.vocab_size)
    share = f"those below the last on {100 * token_fraction:.4g} % of the labelled tokens (`readout_token_fraction`)"
    logger.info_once(f"Layers are read in tiles of a head with {head.vocab_size} classes, {share}.")
    return TiledLosses(head, task, chance_loss, token_fraction, token_statistics, seed, same_tokens)


def _find_head(
    model: nn.Module, inputs: Mapping[str, Any], task: TaskLoss, is_custom: bool
) -> HeadReadout:
    """The final norm and the head of a model, which read its layers in tiles; ValueError where they cannot."""
    if is_custom:
        raise ValueError("The readout, the loss or the metric is a custom one.")
    label_smoothing = getattr(task.smoother, "epsilon", 0.0)
    return HeadReadout.probe(model, inputs, task.shifts_labels, label_smoothing)


def _report_replay(readout: Callable | None, trains: bool) -> None:
    if readout is None:
        logger.info_once("Layers are read by the model's head.")
        return
    logger.info_once("Layers are read by `readout`.")
    if trains:
        logger.warning_once(
            "`readout` is not saved: loaded, or cut by `truncate`, the model has its own head, and its card gives "
            "no numbers."
        )


def _default_fraction(vocab_size: int) -> float:
    if vocab_size >= LARGE_VOCABULARY:
        return DEFAULT_TOKEN_FRACTION
    return 1.0


def _chance_loss(model, inputs, task: TaskLoss) -> ChanceLoss | None:
    """What measures the loss of a constant prediction; `None` where no least one is known."""
    with suppress(ValueError), probing(model):
        return find_chance_loss(task, inputs, model(**task.model_inputs(inputs)))
    return None


def layer_losses(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss when it stops after each layer, on one batch with labels; float32 `[L]`.

    Gradients and dropout follow the ambient grad mode and the model's mode (train or eval). ValueError where the batch
    has no labels, or the model no shared readout.
    """

    def loss_of(outputs):
        loss = output_loss(outputs)
        if loss is None or loss.dim():  # a tuple without a loss begins with the logits
            raise ValueError("`inputs` give no loss; add `labels`.")
        return loss

    return torch.stack(
        Readout.probe(model, inputs).layer_scores(inputs, loss_of)
    ).float()  # [layers]
