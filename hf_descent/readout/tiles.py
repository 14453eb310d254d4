"""The arithmetic of `linear_cross_entropy.py`: hidden states to losses and gradients, one tile of logits at a time.

Gradients beside the loss are the idea of Liger-Kernel (Hsu et al., arXiv 2410.10989). Its kernel (0.8) gives losses in
the dtype of the logits, where bfloat16's three digits blur violations, and waits for the device at every tile.
"""

import dataclasses
import math

import torch


# Logits alive at once. Fewer rows per tile reread the head, and its gradient, once more per tile.
TILE_ELEMENTS = {"cpu": 2**25}
DEFAULT_TILE_ELEMENTS = 2**27
# Elementwise work inside a tile goes by slices that stay in a core's cache: 1 MB of float32.
SLICE_ELEMENTS = {"cpu": 2**18}
DEFAULT_SLICE_ELEMENTS = 2**26
# Layers read at this share of their positions are handled whole, by a few kernels for all of them: their rows alone
# would take almost as much memory.
MOST_POSITIONS = 0.75


@dataclasses.dataclass(frozen=True)
class HeadLoss:
    """How head outputs become losses: `cross_entropy(softcap * tanh(logit_scale * head(x) / softcap))`."""

    logit_scale: float = 1.0  # Cohere's; the inverse of Granite's `logits_scaling`
    softcap: float | None = None  # Gemma's `final_logit_softcapping`
    label_smoothing: float = 0.0  # the epsilon of transformers' `LabelSmoother`


PLAIN_CROSS_ENTROPY = HeadLoss()


class Workspace:
    """Memory for one tile of logits, kept between calls: on a CPU, touching fresh pages costs more than a softmax.

    Keeps the head's weight in the dtype of mixed precision, too, until `free_weight` is called."""

    def __init__(self):
        self._memory = self._weight = None

    def weight(self, head: torch.nn.Linear, dtype: torch.dtype) -> torch.Tensor:
        """The head's weight `[vocab, hidden]` in `dtype`; the head is the same until `free_weight`."""
        if self._weight is None:
            self._weight = head.weight.detach().to(dtype)
        return self._weight

    def free_weight(self):
        """Forget the weight, which the optimizer will change."""
        self._weight = None

    def tile(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """An uninitialised `[rows, columns]` tensor, valid until the next call."""
        if not self._holds(rows * columns, dtype, device):
            self._memory = None  # gone before its successor is allocated
            self._memory = torch.empty(rows * columns, dtype=dtype, device=device)
        return self._memory[: rows * columns].view(rows, columns)

    def _holds(self, size: int, dtype: torch.dtype, device: torch.device) -> bool:
        memory = self._memory
        if memory is None or memory.dtype != dtype or memory.device != device:
            return False
        return memory.numel() >= size


@dataclasses.dataclass
class LayerGroup:
    """Layers that are read together, each on as many tokens: what to read, and what comes of it."""

    layers: list[int]  # from 0 on
    hidden: list[torch.Tensor]  # each [batch, seq, hidden]
    rows: list[torch.Tensor]  # each [tokens], positions in the flattened [batch * seq]
    targets: torch.Tensor  # [layers * tokens]
    # [layers, tokens], places among all labelled tokens; `None`: all of them.
    part: torch.Tensor | None = None
    # [layers], the weight of each token up to a factor that all share; `None`: values only.
    coefficients: torch.Tensor | None = None
    losses: torch.Tensor | None = None  # [layers, tokens]
    # [layers, tokens, hidden]; of one that `is_whole` [layers, positions, hidden]
    gradient: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Of one layer."""
        return len(self.rows[0])

    @property
    def num_positions(self) -> int:
        """Of one layer, those that are not read included."""
        return math.prod(self.hidden[0].shape[:-1])

    @property
    def is_whole(self) -> bool:
        """Whether all layers are read at the same rows, which are nearly all that a hidden state has."""
        return self.part is None and self.num_tokens >= MOST_POSITIONS * self.num_positions


class TiledReader:
    """Reads hidden states tile by tile, and accumulates the gradients of the parameters that all layers share."""

    def __init__(self, norm, head, head_loss: HeadLoss, workspace: Workspace, trains: bool):
        self.norm = norm
        self.head_loss = head_loss
        self.workspace = workspace
        self.trains = trains
        self.device = head.weight.device
        device_type = self.device.type
        self.autocast_off = torch.autocast(device_type, enabled=False)
        dtype = head.weight.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)

        self.weight = workspace.weight(head, dtype)  # [vocab, hidden]
        self.bias = None  # [vocab]
        if head.bias is not None:
            self.bias = head.bias.detach().to(dtype)

        self.accumulator_dtype = torch.promote_types(dtype, torch.float32)

        tile_elements = TILE_ELEMENTS.get(device_type, DEFAULT_TILE_ELEMENTS)
        self.rows_per_tile = max(1, tile_elements // len(self.weight))
        slice_elements = SLICE_ELEMENTS.get(device_type, DEFAULT_SLICE_ELEMENTS)
        self.rows_per_slice = max(1, slice_elements // len(self.weight))

        self.norm_parameters = [
            parameter for parameter in norm.parameters() if parameter.requires_grad
        ]
        self.parameters = [head.weight, head.bias, *self.norm_parameters]
        self.gradients = [None] * len(self.parameters)
        if trains:
            self.gradients = [_empty_gradient(parameter) for parameter in self.parameters]

    def layers_per_group(self, num_tokens: int) -> int:
        """How many layers with that many tokens share a tile: products with few rows run far below the machine's
        rate."""
        return max(1, self.rows_per_tile // max(1, num_tokens))

    def fill_in(self, group: LayerGroup, entropies=None, hits=None) -> None:
        """Fill in the losses of a group and, where it has coefficients, the gradients; of a single layer the
        `entropies` and `hits` `[tokens]`, where given."""
        trains = self.trains and group.coefficients is not None
        with torch.no_grad():
            inputs = self._states(group)  # [group tokens, hidden]
        with torch.set_grad_enabled(trains):
            # A norm with a device of its own is moved to by accelerate's hook.
            normed = self.norm(inputs.requires_grad_(trains)).to(self.device)

        with self.autocast_off:
            x = normed.detach().to(self.weight.dtype)  # [group tokens, hidden]
            coefficients = None
            x_grad = None
            if trains:
                tokens = (len(group.layers), group.num_tokens)
                coefficients = group.coefficients[:, None].expand(tokens).reshape(-1, 1)
                x_grad = torch.empty_like(x, dtype=self.accumulator_dtype)
            losses = x.new_empty(len(x), dtype=self.accumulator_dtype)  # [group tokens]
            num_tiles = max(1, math.ceil(len(x) / self.rows_per_tile))
            columns = [x, group.targets, losses, coefficients, x_grad, entropies, hits]
            tiles = [_parts(column, num_tiles) for column in columns]
            for tile in zip(*tiles):
                self._tile(*tile)

        group.losses = losses.view(len(group.layers), group.num_tokens)
        if trains:
            gradient, *of_norm = torch.autograd.grad(
                normed, [inputs, *self.norm_parameters], x_grad.to(normed.dtype)
            )
            # As wide as the states: a projection before the head may make them narrower.
            gradient = gradient.view(*group.losses.shape, inputs.shape[1])
            group.gradient = _at_all_positions(gradient, group) if group.is_whole else gradient
            for total, own in zip(self.gradients[2:], of_norm):
                total.add_(own)

    def _states(self, group: LayerGroup) -> torch.Tensor:
        """The hidden states of a group at its rows, one layer after the other; `[group tokens, hidden]`."""
        if group.is_whole and len(group.layers) > 1:
            states = torch.stack([hidden.to(self.device) for hidden in group.hidden])
            return states.flatten(1, -2).index_select(1, group.rows[0]).flatten(0, 1)

        states = [
            hidden.flatten(0, -2).index_select(0, rows.to(hidden.device)).to(self.device)
            for hidden, rows in zip(group.hidden, group.rows)
        ]
        return states[0] if len(states) == 1 else torch.cat(states)

    def _tile(self, x, targets, losses, coefficients, x_grad, entropies, hits):
        logits = self.workspace.tile(len(x), len(self.weight), x.dtype, x.device)  # [rows, vocab]
        scale = self.head_loss.logit_scale
        if self.bias is None:
            logits.addmm_(x, self.weight.t(), beta=0, alpha=scale)
        else:
            torch.addmm(self.bias, x, self.weight.t(), beta=scale, alpha=scale, out=logits)
        for start in range(0, len(logits), self.rows_per_slice):
            rows = slice(start, start + self.rows_per_slice)
            columns = (logits, targets, losses, entropies, hits)
            self._cross_entropy_(*(None if column is None else column[rows] for column in columns))
        if x_grad is not None:
            self._products(logits, x, scale * coefficients, x_grad)

    def _cross_entropy_(self, logits, targets, losses, entropies, hits):
        """Turn `logits` into the gradient of the losses with respect to them, before `logit_scale`, in place."""
        softcap = self.head_loss.softcap
        smoothing = self.head_loss.label_smoothing
        targets = targets[:, None]  # [rows, 1]
        scores = logits.to(self.accumulator_dtype)  # [rows, vocab]
        if softcap is not None:
            tanh = torch.tanh(scores / softcap)
            scores = torch.mul(tanh, softcap, out=scores)
        if entropies is not None:
            hits.copy_(scores.argmax(1, keepdim=True).eq(targets).squeeze(1))

        log_probabilities = torch.log_softmax(scores, 1, out=scores)
        mean = log_probabilities.mean(1, keepdim=True) if smoothing else 0.0  # [rows, 1]
        label_scores = log_probabilities.gather(1, targets)  # [rows, 1]
        losses.copy_(((smoothing - 1) * label_scores - smoothing * mean).squeeze(1))
        if entropies is not None:
            probabilities = log_probabilities.exp()
            entropies.copy_(-torch.linalg.vecdot(probabilities, log_probabilities))
        else:
            probabilities = log_probabilities.exp_()

        gradient = probabilities.scatter_add_(
            1, targets, torch.full_like(label_scores, smoothing - 1)
        )
        if smoothing:
            gradient.sub_(smoothing / gradient.shape[1])
        if softcap is not None:
            gradient.mul_(tanh.square_().neg_().add_(1))
        if gradient is not logits:
            logits.copy_(gradient)

    def _products(self, logits_grad, x, coefficients, x_grad):
        """Both backward products of a tile; the weights of tokens go on their short sides `[rows, hidden]`."""
        head_grad, bias_grad = self.gradients[:2]
        scaled = (x * coefficients).to(x.dtype)
        if bias_grad is not None:
            bias_grad.add_((logits_grad.t() @ coefficients.to(x.dtype)).squeeze(1))
        x_grad.copy_(logits_grad @ self.weight)
        if head_grad is not None:
            _add_product_(head_grad, logits_grad.t(), scaled)
        x_grad.mul_(coefficients)


def _empty_gradient(parameter: torch.Tensor | None) -> torch.Tensor | None:
    if parameter is None or not parameter.requires_grad:
        return None
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def _at_all_positions(gradient: torch.Tensor, group: LayerGroup) -> torch.Tensor:
    """The gradients of the whole hidden states of a group `[layers, positions, hidden]`, from those at its rows."""
    if group.num_tokens == group.num_positions:  # the rows are in order
        return gradient
    whole = gradient.new_zeros(len(gradient), group.num_positions, gradient.shape[2])
    whole[:, group.rows[0]] = gradient
    return whole


def _parts(column: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    if column is None:
        return [None] * count
    return list(column.tensor_split(count))


def _add_product_(total, left, right) -> torch.Tensor:
    """`total += left @ right`, summed in the dtype of `total`."""
    if total.dtype == right.dtype:
        return total.addmm_(left, right)
    try:
        return torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    except torch.OutOfMemoryError:  # a RuntimeError, which the other way would make worse
        raise
    except (RuntimeError, TypeError):  # on a CPU, by ROCm, and by torch before 2.10
        return total.addmm_(left.to(total.dtype), right.to(total.dtype))
