"""The shared readout of language models with a large vocabulary: final norm and linear head, read in tiles of logits.

Where the tail of a model is a final norm, which acts on each position alone, and a linear head, layer losses need no
replay: [`HeadReadout`] records the hidden states of a forward whose head is given no position, and reads them with
[`tiled_layer_losses`]. It checks on a real batch that the losses are those of the replay, which remains for every
other tail.
"""

from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase

from . import random_state
from .labels import are_token_labels, documents_of, with_decoder_inputs
from .linear_cross_entropy import HeadLosses, LabelledTokens, labelled_tokens, tiled_layer_losses
from .replay import Readout, output_logits, probing
from .stack import (
    Call,
    errors_explained,
    inner_model,
    intercepted,
    logged,
    present_autocast,
    share_storage,
)
from .tape import Tape, taped
from .tiles import HeadLoss, Workspace


# Read by the model's own loss, or by a forward that TRL or Liger patched: none has a part in one without logits.
_WITHHELD = ("labels", "shift_labels", "num_items_in_batch", "fused_lm_head", "skip_logits")


class HeadReadout:
    """Reads the layers of one language model in tiles. [`HeadReadout.probe`] builds it."""

    def __init__(
        self, replay: Readout, norm: nn.Module, head: nn.Linear, head_loss: HeadLoss, shifts: bool
    ):
        self.replay = replay
        self.num_layers = replay.num_layers
        self.vocab_size = head.out_features
        self.head_loss = head_loss
        self.shifts_labels = shifts
        self._model = replay.model
        self._stack = replay.stack
        self._norm = norm
        self._head = head
        # Of "aux_loss". A model keeps what it has read from its config, which may have been changed since.
        configured = getattr(_text_config(self._model), "router_aux_loss_coef", 0.0)
        self.router_loss_weight = getattr(
            inner_model(self._model), "router_aux_loss_coef", configured
        )
        self._workspace = Workspace()
        self._autocast = None

    @classmethod
    def probe(
        cls, model: nn.Module, inputs: Mapping[str, Any], shifts: bool, label_smoothing: float = 0.0
    ) -> "HeadReadout":
        """Find norm and head of `model` on a real batch with labels, and check the layer losses against those of the
        replay; `shifts`: whether position t predicts label t+1. ValueError where the tail is not norm and linear head,
        or the losses differ from the replay's."""
        if not are_token_labels(inputs.get("labels")):
            raise ValueError("It is for labels of tokens, [batch, seq].")
        replay = Readout.probe(model, inputs)
        if replay.stack.clones:
            raise ValueError(f"{type(model).__name__} modifies hidden states in place.")
        with probing(model):
            # In train mode, so that dropout by a function in the tail shows as a difference; by a module it is a part.
            model.train()
            for module in model.modules():
                module.training &= not isinstance(module, nn.Dropout | _NormBase)
            norm, head, head_loss, dtype = _find_tail(model, replay.stack, inputs)

        self = cls(replay, norm, head, head_loss, shifts)
        with probing(model):
            self._check(inputs, dtype)

        self._workspace = Workspace()  # without what the check took
        self.head_loss = replace(self.head_loss, label_smoothing=label_smoothing)
        return self

    def tokens(
        self, inputs, fraction=1.0, generator: torch.Generator | None = None, same=False
    ) -> LabelledTokens:
        """The labelled tokens of a batch, with the samples on which its layers are read; `same`: one for all."""
        samples = 1 if same else self.num_layers - 1
        shifted = inputs.get("shift_labels")
        if shifted is not None:
            return labelled_tokens(shifted, samples, False, fraction, generator)
        return labelled_tokens(inputs["labels"], samples, self.shifts_labels, fraction, generator)

    def documents(self, inputs) -> tuple[torch.Tensor, int]:
        """The document of each token `[batch * seq]`, and their number, see [`documents_of`]."""
        name = "labels" if inputs.get("shift_labels") is None else "shift_labels"
        documents, count = documents_of(inputs, inputs[name])
        return documents.flatten(), count

    @contextmanager
    def attach(self, on_forward: Callable[..., torch.Tensor | None], keep_logits: bool = False):
        """Read the layers in every `model(...)` call while attached, inside that very call.

        Args:
            on_forward: `on_forward(read, outputs, hidden_states)`, where `read(tokens, weights=None, layer=None, ...)`
                is [`tiled_layer_losses`] of the hidden states, L tensors `[batch, seq, hidden]`, or of that of one
                layer. A scalar that it returns becomes `outputs["loss"]`.
            keep_logits: whether the model still makes its own logits (for metrics). By default its head sees no
                position, `outputs["logits"]` is `[batch, 0, vocab]`, and labels are withheld from the model.
        """
        tape = Tape(self._model, self._stack, layers_only=True)

        def withhold(module, args, kwargs):
            self._autocast = None
            return args, _without_labels(self._model, kwargs)

        def run_head(module, call, *args, **kwargs):
            # Mixed precision ends with the model's forward, before the layers are read.
            device_type = args[0].device.type
            if self._autocast is None:
                self._autocast = present_autocast(device_type)
            if keep_logits:
                return call(*args, **kwargs)
            # Mixed precision would cast the weight for no position.
            with torch.autocast(device_type, enabled=False):
                return call(args[0][..., :0, :].to(module.weight.dtype))

        def read_out(args, kwargs, outputs):
            if self._autocast is None:
                raise ValueError(
                    f"{type(self._model).__name__} did not run the head found by the probe."
                )
            states = [self._stack.hidden_state(output) for output in tape.layer_outputs]
            try:
                loss = on_forward(partial(self._read, states), outputs, states)
            finally:
                self._workspace.free_weight()
            if loss is not None:
                outputs["loss"] = loss

        withheld = self._model.register_forward_pre_hook(withhold, prepend=True, with_kwargs=True)
        with withheld, taped(tape, read_out), intercepted([self._head], run_head):
            yield self

    def _read(
        self, hidden_states, tokens: LabelledTokens, weights=None, layer=None, **kwargs
    ) -> HeadLosses:
        if layer is not None:
            hidden_states = [hidden_states[layer - 1]]
        # The backward pass of the norm, inside the forward, is no business of what offloads activations.
        keeps = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with self._autocast, keeps, self._draws_kept():
            fixed = {"head_loss": self.head_loss, "workspace": self._workspace}
            return tiled_layer_losses(
                hidden_states, tokens, self._norm, self._head, weights, **fixed, **kwargs
            )

    def _draws_kept(self):
        """What dropout in the tail draws inside leaves the generators as the model's own forward left them."""
        dropouts = [module for module in self._norm if isinstance(module, nn.Dropout)]
        if not any(module.training and module.p > 0 for module in dropouts):
            return nullcontext()
        return random_state.preserved(random_state.accelerators(self._model), torch_only=True)

    def _check(self, inputs, dtype):
        """Compare the first, a middle and the last layer with their replay, and the own loss with its logits."""
        inputs = _with_hidden_label(inputs)
        model = self._model
        name = type(model).__name__
        layers = sorted({1, (self.num_layers + 1) // 2, self.num_layers})
        with errors_explained(f"{name} returns no loss by name:"):
            replayed = torch.stack(
                self.replay.layer_scores(inputs, lambda outputs: outputs["loss"].float(), layers)
            )

        own = model(**inputs)
        tokens = self.tokens(inputs)
        loss = own["loss"]
        # By its own logits, which the reads round in another way: a small part of the loss could hide in that.
        scores = output_logits(own).flatten(0, -2)[tokens.rows].float()  # [tokens, vocab]
        expected = nn.functional.cross_entropy(scores, tokens.targets)
        if own.get("aux_loss") is not None:
            expected = expected + self.router_loss_weight * own["aux_loss"]
        del own, scores

        tiled = []

        def score(read, outputs, hidden_states):
            sums = read(tokens).sums[[layer - 1 for layer in layers]]
            tiled.append(sums / max(len(tokens.rows), 1))

        explained = errors_explained(f"{name} fails when its head is given no position:")
        with explained, self.attach(score):
            model(**inputs)
        _require_close(
            tiled[0],
            replayed,
            dtype,
            f"{name}: losses read by norm and head differ from the replay's",
        )
        _require_close(
            loss.float(),
            expected,
            loss.dtype,
            f"{name}: its loss is not the cross-entropy of tokens",
        )


class _Norm(nn.Sequential):
    """What stands between the last layer and the head, past the hooks of its modules: the reads take its backward pass
    inside the model's forward, which FSDP would take for the end of its own, and shard norm and head between reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module.forward(x)
        return x


class _Scale(nn.Module):
    """The constant by which T5 multiplies what its head gets, where that is tied to the embeddings."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _scale_before_head(model, tail, received) -> tuple[float, torch.Tensor] | tuple[None, None]:
    """T5's constant, and what is multiplied by it to make the head's input; `None` where the head gets what a module
    made, or another function is between."""
    made = [call.made[0] for call in tail if call.made and call.made[0].shape == received.shape]
    if not made or any(share_storage(received, tensor) for tensor in made):
        return None, None
    width = getattr(_text_config(model), "d_model", None)
    if width is None:
        return None, None
    factor = width**-0.5
    error = (received.double() - factor * made[-1].double()).abs().max().item()
    if not error <= 4 * torch.finfo(received.dtype).eps * received.abs().max().item():
        return None, None
    return factor, made[-1]


def _text_config(model):
    """The config of the language model; a model that is not from transformers may have none."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config


def _without_labels(model, inputs) -> dict[str, Any]:
    """The inputs for a forward that makes no loss; with what an encoder-decoder would have made from its labels."""
    return {
        name: value
        for name, value in with_decoder_inputs(model, inputs).items()
        if name not in _WITHHELD
    }


def _find_tail(model, stack, inputs) -> tuple[nn.Module, nn.Linear, HeadLoss, torch.dtype]:
    """Norm, head, logit transform and precision of the scores of `model`; ValueError if its tail is anything else."""
    name = type(model).__name__
    logits, last_layer, tail = logged_tail(model, stack, inputs)
    last = stack.hidden_state(last_layer.made)  # [batch, seq, hidden]
    head_call = _find_head(name, tail, (*last.shape[:-1], logits.shape[-1]), logits)
    head = head_call.module
    chain = _chain_to_head(model, tail, last, head_call.received[0])
    norm = _Norm(*chain)
    _check_nothing_beside(name, tail, norm, head)
    # This comes before the call below, out of turn, which has ZeRO-3 forget an order of calls that it recorded.
    _keep_gathered(model, norm, head)

    scores = head_call.made[0]
    rows = last.flatten(0, -2)  # [batch * seq, hidden]
    with last_layer.autocast:
        # Outside a forward, where hooks gather shards.
        own_scores = head(nn.Sequential(*chain)(rows)).view_as(scores)

    _require_close(
        own_scores, scores, scores.dtype, f"{name}: norm and head differ on single positions"
    )
    return norm, head, _logit_transform(model, inputs, head, scores.dtype), scores.dtype


def logged_tail(model, stack, inputs) -> tuple[torch.Tensor, Call, list[Call]]:
    """The logits of a forward without labels, the call of its last layer, and those that began after it."""
    layer_ids = {id(layer) for layer in stack.layers}
    inside = {id(module) for layer in stack.layers for module in layer.modules()} - layer_ids
    outside = [
        module for module in model.modules() if module is not model and id(module) not in inside
    ]
    # Dropout that is off hands its input on, and could not be told from it.
    dropouts = intercepted(
        [module for module in outside if isinstance(module, nn.Dropout)],
        lambda module, call, *args, **kwargs: call(*args, **kwargs).clone(),
    )
    explained = errors_explained(f"{type(model).__name__} fails without its labels:")
    with explained, dropouts, logged(outside) as calls:
        logits = output_logits(model(**_without_labels(model, inputs)))

    end = max(index for index, call in enumerate(calls) if id(call.module) in layer_ids)
    return logits, calls[end], [call for call in calls[end + 1 :] if call.began > end]


def _find_head(name: str, tail: list[Call], shape: tuple[int, ...], logits: torch.Tensor) -> Call:
    """The call of the linear layer that made the logits, of this `shape`."""
    for call in reversed(tail):
        # By what it computes: FSDP2 gives it a class of its own.
        is_linear = type(call.module).forward is nn.Linear.forward
        if is_linear and call.made[0].shape == logits.shape == shape:
            return call
    raise ValueError(f"{name}: no `nn.Linear` makes logits {list(shape)}.")


def _chain_to_head(
    model, tail: list[Call], last: torch.Tensor, received: torch.Tensor
) -> list[nn.Module]:
    """The modules that lead from the last layer's hidden state to what the head received, in order."""
    chain = []
    reached = received
    scale, scaled = _scale_before_head(model, tail, received)
    if scale is not None:
        chain = [_Scale(scale)]
        reached = scaled
    for call in reversed(tail):
        if share_storage(reached, last):
            break
        if call.received and call.made and share_storage(call.made[0], reached):
            chain.insert(0, call.module)
            reached = call.received[0]

    if not share_storage(reached, last):
        raise ValueError(
            f"{type(model).__name__}: no chain of modules leads from the last layer to the head; a function is "
            "between."
        )

    return chain


def _check_nothing_beside(name: str, tail: list[Call], norm: nn.Module, head: nn.Module) -> None:
    """ValueError where a module of the tail with parameters is neither norm nor head, or acts across positions."""
    known = {id(parameter) for part in (norm, head) for parameter in part.parameters()}
    for call in tail:
        module = call.module
        used = {id(parameter) for parameter in module.parameters(recurse=False)}
        # An adapter may keep its parameters in a container, which is never called.
        used |= {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
        if isinstance(module, _NormBase) or not used <= known:
            raise ValueError(
                f"{name}: `{type(module).__name__}` acts beside norm and head, or across positions."
            )


def _keep_gathered(model, norm: nn.Module, head: nn.Module) -> None:
    """Have ZeRO-3, which gathers parameters for the call of their module alone, keep these for the model."""
    for parameter in (*norm.parameters(), *head.parameters()):
        if hasattr(parameter, "ds_id"):
            import deepspeed

            deepspeed.zero.register_external_parameter(model, parameter)


def _logit_transform(model, inputs, head, dtype) -> HeadLoss:
    """The scale or softcap that turns head outputs into logits: a number of the config, or an inverse, by trial."""
    name = type(model).__name__
    # Scores far apart in the place of the head's: of a cap, nothing but rounding may show on those of a fresh model.
    scores = torch.linspace(
        -100, 100, head.out_features, dtype=dtype, device=head.weight.device
    )  # [vocab]
    with (
        errors_explained(f"{name} fails when its head is given one position:"),
        intercepted([head], lambda module, call, x: scores.expand(*x.shape[:-2], 1, -1)),
        torch.enable_grad(),
    ):
        logits = output_logits(model(**_without_labels(model, inputs))).to(
            scores.device, torch.float32
        )

    if logits.requires_grad:
        raise ValueError(f"{name}: a parameter acts on the outputs of its head.")
    scores = scores.float()
    config = getattr(_text_config(model), "__dict__", {})
    numbers = {
        float(number) for number in config.values() if type(number) in (int, float) and number
    }
    scales = (1.0, *numbers, *(1 / number for number in numbers))
    candidates = [HeadLoss(scale) for scale in scales]
    candidates += [HeadLoss(softcap=number) for number in numbers]

    def transformed(by):
        if by.softcap is None:
            return by.logit_scale * scores
        return by.softcap * torch.tanh(scores / by.softcap)

    def error(candidate):
        return (transformed(candidate) - logits).abs().max().item()

    best = min(candidates, key=error)
    _require_close(
        transformed(best),
        logits,
        dtype,
        f"{name}: its logits are not scaled or capped head outputs",
    )
    return best


def _with_hidden_label(inputs) -> dict[str, Any]:
    """The batch with a label at a last position that the attention mask hides: losses that leave it out show here."""
    labels = inputs["labels"]  # [batch, seq]
    mask = inputs.get("attention_mask")
    if getattr(mask, "shape", None) != labels.shape:
        return dict(inputs)
    labels = labels.clone()
    labels[:, -1] = labels.max()
    mask = mask.clone()
    mask[:, -1] = 0
    return {**inputs, "labels": labels, "attention_mask": mask}


def _require_close(value, expected, dtype, message):
    """ValueError unless they are equal up to the rounding of numbers computed in `dtype`."""
    error = (value - expected).abs().max().item()
    size = expected.abs().max().item()
    if not error <= max(1e-4, 4 * torch.finfo(dtype).eps) * size:
        raise ValueError(f"{message} (largest error {error:.3g}, at values up to {size:.3g}).")
