"""Layer losses of a large-vocabulary head without its logits: norm, linear head and cross-entropy in one tiled pass.

Only labelled positions are projected. The weights w_l in the objective sum_l w_l f_l are known before the forward pass
(Algorithm 1 of the paper fixes the multipliers during the primal step), so the gradients of hidden states, norm and
head are computed beside the loss, while a tile of logits is at hand. Nonlinear objectives take two passes: values
(`weights=None`), then, with weights found from them, gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from .labels import IGNORE_INDEX
from .stack import map_tensors
from .tiles import PLAIN_CROSS_ENTROPY, HeadLoss, LayerGroup, TiledReader, Workspace


# A token's weight multiplies its normed state in the dtype of the head: float16 ends at 65504, and some states there
# are of thousands. A smaller one would cost the gradients of half-precision states more of their digits.
LARGEST_COEFFICIENT = 8.0
# Layers without weight are only shown, and a quarter of a sample will do: of a deep model with two exits they would
# cost more than all else that is read.
SHOWN_PART = 4


class LabelledTokens(NamedTuple):
    """The positions with a label, and the random samples of them on which the layers below the last are read."""

    rows: torch.Tensor  # [tokens], positions in the flattened [batch * seq]
    targets: torch.Tensor  # [tokens], their classes
    # [layers - 1, sampled], or [1, sampled] for all, in `rows`; `None`: all of them.
    samples: torch.Tensor | None = None

    def to(self, device: torch.device) -> "LabelledTokens":
        """The same on a device."""
        samples = None if self.samples is None else self.samples.to(device)
        return LabelledTokens(self.rows.to(device), self.targets.to(device), samples)


def labelled_tokens(
    labels: torch.Tensor,
    num_samples: int = 1,
    shift: bool = True,
    fraction: float = 1.0,
    generator: torch.Generator | None = None,
) -> LabelledTokens:
    """Find the labelled positions of `labels` `[batch, seq]`, and draw a share of them, without replacement.

    Args:
        num_samples: 1 for all layers, or one for each below the last; no position is in two before all are in one.
        shift: whether position t predicts label t+1 (causal models); `False` for labels shifted already.
        fraction: share of the labelled positions in a sample, in (0, 1]; at least one position.
        generator: of the CPU, for the draw.
    """
    if shift:
        labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # [batch, seq]
    labels = labels.flatten()  # [batch * seq]
    rows = labels.ne(IGNORE_INDEX).nonzero().squeeze(1)  # [tokens]
    count = len(rows)
    size = min(count, max(1, round(fraction * count)))
    samples = None
    if size < count:
        drawn = torch.randperm(count, generator=generator)
        needed = num_samples * size
        samples = drawn.repeat(-(-needed // count))[:needed].view(num_samples, size).to(rows.device)

    return LabelledTokens(rows, labels[rows], samples)


class TokenStatistics(NamedTuple):
    """A layer's predictions of the labelled tokens, each `[tokens]`."""

    losses: torch.Tensor
    entropies: torch.Tensor
    hits: torch.Tensor  # whether the likeliest class is right


class HeadLosses(NamedTuple):
    """Losses of all layers, summed over the labelled tokens of one micro-batch."""

    objective: torch.Tensor | None  # sum_l w_l f_l, a scalar with its graph; None without weights
    # [layers]; of a sample, an unbiased estimate of that over all labelled tokens.
    sums: torch.Tensor
    tokens: TokenStatistics | None = None  # of the last layer, where asked for
    # Where documents are given: their part of the sums `[documents, layers]`, and their tokens `[documents, 1]`.
    rows: torch.Tensor | None = None
    row_items: torch.Tensor | None = None


def tiled_layer_losses(
    hidden_states: Sequence[torch.Tensor],
    tokens: LabelledTokens,
    norm: nn.Module,
    head: nn.Linear,
    weights: torch.Tensor | None = None,
    *,
    head_loss: HeadLoss = PLAIN_CROSS_ENTROPY,
    num_items: torch.Tensor | int | None = None,
    value_only: Sequence[int] = (),
    token_statistics: bool = False,
    documents: tuple[torch.Tensor, int] | None = None,
    workspace: Workspace | None = None,
) -> HeadLosses:
    """Cross-entropy of every layer's hidden state read by `head(norm(h_l))`, with the gradient of their weighted sum.

    The gradients are ready when the call returns: one backward pass through `objective` scales them by its incoming
    gradient, which carries loss scaling.

    Args:
        hidden_states (sequence of L tensors `[batch, seq, hidden]`): h_1..h_L, whole outputs of the layers.
        tokens ([`LabelledTokens`]): the positions to score.
        norm (`nn.Module`): what stands between the last layer and the head, acting on each position alone, on
            `[tokens, hidden]`.
        head (`nn.Linear`): the output head, `weight` of shape `[vocab, hidden]`. A frozen one costs no gradient.
        weights (`torch.Tensor` of shape `[L]`, *optional*): w_l. `None`: values only.
        num_items (`torch.Tensor` or `int`, *optional*): what the objective is divided by; by default the labelled
            tokens of this micro-batch.
        value_only (sequence of `int`): layers (1-based) below the last whose weight is zero by construction: they cost
            one product instead of three, on a quarter of a sample. To look at the weights would wait for the device.
        token_statistics (`bool`): whether to return the [`TokenStatistics`] of the last layer.
        documents (*optional*): the document of each position `[batch * seq]`, and their number, to have the sums of
            each document, too.
        workspace ([`Workspace`], *optional*): keeps the tile's memory from one call to the next.
    """
    # Where a model is spread over devices, layers are read where the head is, and losses are where the labels are.
    here = tokens.rows.device
    there = head.weight.device
    tokens = tokens.to(there)
    num_tokens = len(tokens.rows)
    trains = weights is not None and torch.is_grad_enabled()
    if workspace is None:
        workspace = Workspace()
    reader = TiledReader(norm, head, head_loss, workspace, trains)
    groups = _layer_groups(hidden_states, tokens, value_only, reader)
    *inner, last = groups
    if weights is not None:
        unit = _set_coefficients(
            groups, weights.detach().to(there), num_tokens, value_only, head_loss
        )

    with torch.no_grad():
        for group in inner:
            reader.fill_in(group)
        entropies = hits = None
        if token_statistics:
            entropies = reader.weight.new_empty(num_tokens, dtype=reader.accumulator_dtype)
            hits = torch.empty_like(entropies, dtype=torch.bool)
        reader.fill_in(last, entropies, hits)
        sums = _sums(groups, tokens.samples is not None)  # [layers]

    objective = None
    if weights is not None:
        with torch.no_grad():
            weighted = [group for group in groups if group.coefficients is not None]
            value = sum((group.coefficients * group.losses.sum(1)).sum() for group in weighted)
        of_hidden = _hidden_gradients(weighted, hidden_states)
        objective = _KnownGradients.apply(
            value, of_hidden, reader.gradients, *hidden_states, *reader.parameters
        )
        # Scaled out here: inside the reader, gradients keep the size of one token's, which half precision can hold.
        items = max(num_tokens, 1) if num_items is None else num_items
        objective = objective.to(here) * (unit.to(here, value.dtype) / items)

    statistics = None
    if token_statistics:
        statistics = TokenStatistics(last.losses[0], entropies, hits)
    of_rows = (None, None)
    if documents is not None:
        numbers, count = documents
        of_rows = _document_sums(groups, numbers.to(there), tokens.rows, count)
    values = (sums, statistics, *of_rows)
    if here != there:
        values = map_tensors(lambda tensor: tensor.to(here), values)
    return HeadLosses(objective, *values)


def _layer_groups(hidden_states, tokens, value_only, reader) -> list[LayerGroup]:
    """The layers in groups that are read together, those without gradient first, the last layer by itself."""
    rows, targets, samples = tokens
    last = len(hidden_states) - 1
    shown = [index for index in range(last) if index + 1 in value_only]
    others = [index for index in range(last) if index + 1 not in value_only]
    groups = []
    for layers, is_shown in ((shown, True), (others, False)):
        size = len(rows)
        if samples is not None:
            size = samples.shape[1]
            if is_shown:
                size = max(1, size // SHOWN_PART)
        together = reader.layers_per_group(size)
        for start in range(0, len(layers), together):
            members = layers[start : start + together]
            hidden = [hidden_states[index] for index in members]
            part = None
            own_rows = [rows] * len(members)
            own_targets = targets if len(members) == 1 else targets.repeat(len(members))
            if samples is not None:
                part = _samples_of(members, samples)[:, :size]  # [group layers, size]
                own_rows = rows[part].unbind()
                own_targets = targets[part].flatten()
            groups.append(LayerGroup(members, hidden, own_rows, own_targets, part))

    groups.append(LayerGroup([last], [hidden_states[last]], [rows], targets))
    return groups


def _samples_of(layers: list[int], samples: torch.Tensor) -> torch.Tensor:
    """The samples of these layers, without a copy where that can be."""
    if len(samples) == 1:
        return samples.expand(len(layers), -1)
    first = layers[0]
    if layers[-1] - first == len(layers) - 1:  # they follow one another
        return samples[first : first + len(layers)]
    return torch.stack([samples[index] for index in layers])


def _set_coefficients(groups, weights, num_tokens, value_only, head_loss) -> torch.Tensor:
    """Gives the groups that are trained their coefficients; returns the unit in which they are, a scalar tensor."""
    *inner, last = groups
    trained = [group for group in inner if group.layers[0] + 1 not in value_only]
    by_layer = weights.unbind()
    # Each token of a sample stands for several.
    spread = [
        torch.stack([by_layer[index] for index in group.layers])
        * (num_tokens / max(group.num_tokens, 1))
        for group in trained
    ]
    spread = torch.cat([*spread, weights[-1:]])
    unit = (head_loss.logit_scale / LARGEST_COEFFICIENT * spread.abs().max()).clamp(min=1.0)
    parts = (spread / unit).split([len(group.layers) for group in (*trained, last)])
    for group, coefficients in zip((*trained, last), parts):
        group.coefficients = coefficients

    return unit


def _sums(groups, is_sampled) -> torch.Tensor:
    """The sums of the losses over all labelled tokens `[layers]`, of layers read on a sample as they are estimated."""
    *inner, last = groups
    last_losses = last.losses[0]  # [tokens]
    of_last = last_losses.sum()
    sums = {}
    for group in inner:
        of_group = group.losses.sum(1)  # [group layers]
        if is_sampled:
            # What a sample is off on the last layer, which is read on all tokens, it is off on one near it, too: a
            # control variate, which leaves the sums unbiased. The objective goes without: its gradient would weigh the
            # last layer's sampling errors by all multipliers.
            factor = len(last_losses) / max(group.num_tokens, 1)
            off = of_group - last_losses[group.part].sum(1)
            of_group = of_last + factor * off
        sums.update(zip(group.layers, of_group.unbind()))

    return torch.stack([*(sums[index] for index in sorted(sums)), of_last])


def _hidden_gradients(
    groups: list[LayerGroup], hidden_states: Sequence[torch.Tensor]
) -> "list[_WholeGradient | _RowGradient | None]":
    """What gives each hidden state its gradient, where the groups have one."""
    gradients = [None] * len(hidden_states)
    for group in groups:
        if group.gradient is None:
            continue
        shared = _GroupGradient(group.gradient)
        is_whole = group.is_whole
        for place, layer in enumerate(group.layers):
            hidden = hidden_states[layer]
            if is_whole:
                gradients[layer] = _WholeGradient(shared, place, hidden)
            else:
                gradients[layer] = _RowGradient(shared, place, hidden, group.rows[place])

    return gradients


@torch.no_grad()
def _document_sums(
    groups: list[LayerGroup], numbers: torch.Tensor, rows: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of `count` documents in the sums `[count, layers]`, and their tokens `[count, 1]`; `numbers`
    `[batch * seq]` are those of the documents, `rows` the labelled positions."""
    *inner, last = groups
    last_losses = last.losses[0]  # [tokens]
    documents = numbers[rows]  # [tokens]

    def added_up(values, documents):
        return values.new_zeros(len(values), count).scatter_add(1, documents, values)

    (of_last,) = added_up(last.losses, documents[None])
    columns = {}
    for group in inner:
        if group.part is None:
            of_group = added_up(group.losses, documents.expand(group.losses.shape))
        else:
            # As of the sums: what is read on a sample is told from the last layer, which is read on all tokens.
            factor = len(last_losses) / max(group.num_tokens, 1)
            off = factor * (group.losses - last_losses[group.part])
            of_group = of_last + added_up(off, documents[group.part])
        columns.update(zip(group.layers, of_group.unbind()))

    (items,) = added_up(torch.ones_like(last.losses), documents[None])
    sums = torch.stack([*(columns[index] for index in sorted(columns)), of_last], dim=1)
    return sums, items[:, None]


class _GroupGradient:
    """The gradients of a group of hidden states, one for each, `[tokens, hidden]`."""

    def __init__(self, values: torch.Tensor):
        self.zero = values.new_zeros(())
        self._values = values  # [layers, tokens, hidden]
        self._scaled: Sequence[torch.Tensor] | None = None

    def scaled(self, factor: torch.Tensor) -> Sequence[torch.Tensor]:
        """All of them, multiplied by the incoming gradient, which is one."""
        if self._scaled is None:
            self._scaled = _scaled(self._values, factor).unbind()
            self._values = None
        return self._scaled


class _WholeGradient:
    """The gradient of one hidden state at all of its positions."""

    def __init__(self, group: _GroupGradient, place: int, hidden: torch.Tensor):
        self.group = group
        self.place = place
        self.device = hidden.device

    def expected(self, factor: torch.Tensor, hidden_shape: torch.Size) -> torch.Tensor:
        """The gradient `[batch, seq, hidden]`."""
        return self.group.scaled(factor)[self.place].view(hidden_shape).to(self.device)


class _RowGradient:
    """The gradient of one hidden state, held at some rows until autograd comes to that state, so that no two layers
    have one of full size at once."""

    def __init__(self, group: _GroupGradient, place: int, hidden: torch.Tensor, rows: torch.Tensor):
        self.group = group
        self.place = place
        self.device = hidden.device
        self.rows = rows.to(self.device)
        self.gradient: torch.Tensor | None = None  # [tokens, hidden], once it is expected
        if hidden.requires_grad:
            hidden.register_hook(self.add)

    def expected(self, factor: torch.Tensor, hidden_shape: torch.Size) -> torch.Tensor:
        """Zeros `[batch, seq, hidden]` without memory, to which `add` will add."""
        self.gradient = self.group.scaled(factor)[self.place]
        return self.group.zero.to(self.device).expand(hidden_shape)

    def add(self, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient `[batch, seq, hidden]` that came from elsewhere, with this one."""
        if self.gradient is None:  # the backward pass of something else
            return None
        gradient = self.gradient.to(self.device)
        self.group = None
        self.gradient = None
        return grad.flatten(0, -2).index_add(0, self.rows, gradient).view(grad.shape)


class _KnownGradients(torch.autograd.Function):
    """Gives `value` the gradients that were computed beside it: those `of_hidden` states, then of parameters."""

    @staticmethod
    def forward(ctx, value, of_hidden, gradients, *tensors):
        ctx.of_hidden = of_hidden
        ctx.gradients = gradients
        ctx.shapes = [tensor.shape for tensor in tensors[: len(of_hidden)]]
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_value):
        if ctx.gradients is None:
            raise RuntimeError(
                "Layer losses take one backward pass: call the model again, without `retain_graph`."
            )

        gradients = ctx.gradients
        of_hidden = ctx.of_hidden
        ctx.gradients = ctx.of_hidden = None
        hidden = [None] * len(of_hidden)
        for index, gradient in enumerate(of_hidden):
            if gradient is not None:
                hidden[index] = gradient.expected(grad_value, ctx.shapes[index])

        for index, gradient in enumerate(gradients):
            if gradient is not None:
                gradients[index] = _scaled(gradient, grad_value)

        return None, None, None, *hidden, *gradients


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`gradient` times `factor`, in place where its type is wide enough."""
    # A GPU would cast the factor (1 / tokens, loss scaling) to half precision before it multiplies.
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    return wide.mul_(factor.to(wide.device)).to(gradient.dtype)
