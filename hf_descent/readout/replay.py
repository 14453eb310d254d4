"""The shared readout psi of every layer, by replay: exact for every architecture with a stack of equal-width layers.

The readout of layer l is what the model itself would return if its stack ended after layer l; final norm, pooler,
head, softcap and loss are the model's own code. One forward is recorded. For each layer the model's forward then runs
again: calls that had finished before the last layer are answered from the record, the last layer answers with layer
l's whole output, and only what follows is computed.
"""

from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from weakref import WeakKeyDictionary

import torch
from accelerate.utils.memory import should_reduce_batch_size
from torch.distributed.tensor import DTensor
from transformers.utils import ModelOutput, logging

from . import random_state
from .batched import bytes_of, groups, run_together
from .pooling import pooled_readout
from .stack import embeddings, errors_explained, find_layer_stack, map_tensors, tensors
from .tape import Tape, assigned, noise_disabled, taped


logger = logging.get_logger(__name__)

_stacks: WeakKeyDictionary = WeakKeyDictionary()  # model -> (fingerprint, LayerStack)


def output_logits(outputs) -> torch.Tensor:
    """The prediction of a model's `outputs`: `logits`; `start_logits` and `end_logits` stacked on the last dimension;
    else the first floating tensor that is not a scalar. ValueError if there is none."""
    if isinstance(outputs, dict):
        if isinstance(outputs.get("logits"), torch.Tensor):
            return outputs["logits"]
        ends = (outputs.get("start_logits"), outputs.get("end_logits"))
        if ends[0] is not None and ends[1] is not None:
            return torch.stack(ends, dim=-1)  # [batch, seq, 2]

    for tensor in tensors(outputs):
        if tensor.is_floating_point() and tensor.dim() > 0:
            return tensor

    raise ValueError(
        f"`outputs` ({type(outputs).__name__}) hold no logits; let the model return `logits`."
    )


def output_loss(outputs):
    """What a model's `outputs` have as the loss: by name, else in the first place."""
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    return outputs[0]


def layer_logits(model, inputs) -> list[torch.Tensor]:
    """The logits that `model(**inputs)` would have if it stopped after layer 1..L: L tensors of the shape of its own,
    which the last equals. `model` is not wrapped.

    Gradients and dropout follow the ambient grad mode and the model's train/eval mode. ValueError where no shared
    readout exists (see [`Readout.probe`]).
    """
    return Readout.probe(model, inputs).layer_scores(inputs, output_logits)


class Readout:
    """The readout that the L layers of one model share. [`Readout.probe`] builds it, [`Readout.attach`] uses it."""

    def __init__(self, model, stack, readout):
        self.model = model
        self.readout = readout
        self.stack = stack
        self.num_layers = stack.num_layers
        self._adapters = [
            module for module in model.modules() if "_disable_adapters" in vars(module)
        ]
        self._head = embeddings(model, "output")
        self._active = self._active_adapters()
        self.is_batched = False  # see `check_batching`
        self.joins_last = False  # see `check_joining`

    def fits(self, model) -> bool:
        """Whether this is still a readout of `model`: no more once its head is another, or its active adapters are."""
        same = model is self.model and embeddings(model, "output") is self._head
        return same and self._active_adapters() == self._active

    def _active_adapters(self):
        return [
            not module.disable_adapters and list(module.active_adapters)
            for module in self._adapters
        ]

    @classmethod
    def probe(cls, model, inputs, readout=None, trains=False) -> "Readout":
        """Find the layer stack of `model` on a real batch and check that the readout at layer L is the model's own.

        Runs in eval mode without gradients, and leaves mode, random states and config as they were. The stack is
        remembered until the model's module tree or config changes.

        Args:
            model: the unwrapped `nn.Module` (a `PeftModel`, too).
            inputs: the dict given to `model(**inputs)`, with or without labels.
            readout: `readout(model, hidden, inputs) -> logits`, "mean" or "cls", in place of the model's own.
            trains: whether `readout` is for training, and must have no parameters beside the model's.

        ValueError where there is no stack of equal-width layers, the replay at layer L differs from the model's own
        outputs, or needs more than the last layer's, or `readout` does not return finite logits.
        """
        known, stack = _stacks.get(model, (None, None))
        if known != _fingerprint(model):
            with probing(model):
                stack = find_layer_stack(model, inputs)
                _check_replay(model, stack, inputs)
            _stacks[model] = (_fingerprint(model), stack)
            logger.info(f"{type(model).__name__}: {stack.num_layers} layers in `{stack.name}`.")
        stack.shown.clear()  # hooks may have come since, or activation checkpointing

        if isinstance(readout, str):
            readout = pooled_readout(model, readout)
        self = cls(model, stack, readout)

        def check(layer, outputs, hidden):
            if not outputs["logits"].isfinite().all():
                raise ValueError(
                    f"`readout` returned logits that are not finite at layer {layer}: check its weights."
                )
            if trains and layer == self.num_layers:
                self._check_parameters(hidden.detach(), inputs)

        if readout is not None:
            with probing(model), self.attach(check):
                model(**inputs)
        return self

    def attach(self, on_layer, layers=None, no_grad_layers=(), score=None):
        """A context that reads out the layers in every `model(...)` call inside it, as a part of that call.

        Without gradient, or with a `score`, layers are read by one run of the model's tail, if `check_batching` found
        that it gives the same (see `batched.py`).

        Args:
            on_layer: `on_layer(layer, outputs, hidden)`, called for each layer in increasing order with the outputs
                that the model would give if it stopped after `layer`, and that layer's hidden state with its graph.
                For layer L these are the model's own outputs; with an auxiliary router loss layer L is replayed too,
                so that its loss is the task loss alone, and where `check_joining` found it to be the same, a `score`
                with gradient is of a replay. Logits of layer L by a `readout` replace the model's own.
            layers: which of 1..L; all by default.
            no_grad_layers: layers that are replayed without gradient.
            score: `score(outputs)`, a tensor that `on_layer` gets in the place of the outputs.

        In a call, ValueError where the stack does not run L times with gradient.
        """
        if layers is None:
            layers = range(1, self.num_layers + 1)
        layers = sorted(layers)
        tape = Tape(self.model, self.stack, layers_only=self.readout is not None)

        def read_out(args, kwargs, outputs):
            self._autocast = tape.autocast
            call = _Call(self, tape, args, kwargs, outputs, score)
            for layer, result in call.results(layers, no_grad_layers):
                on_layer(layer, result, self.stack.hidden_state(tape.layer_outputs[layer - 1]))

        return taped(tape, read_out)

    def attach_loss(self, loss, on_losses, no_grad_layers=()):
        """As `attach`, of all layers at once.

        Args:
            loss: `loss(outputs)` of a layer's outputs, a scalar tensor.
            on_losses: `on_losses(losses, hidden_states)`, called with the losses `[layers]` and the L hidden states.
            no_grad_layers: layers that are replayed without gradient.
        """
        tape = Tape(self.model, self.stack, layers_only=self.readout is not None)

        def read_out(args, kwargs, outputs):
            self._autocast = tape.autocast
            losses = _Call(self, tape, args, kwargs, outputs, loss).losses(no_grad_layers)
            hidden_states = [self.stack.hidden_state(output) for output in tape.layer_outputs]
            on_losses(losses, hidden_states)

        return taped(tape, read_out)

    def check_batching(self, inputs, score=None) -> None:
        """Find out on a batch whether layers that are read together give what they do one by one, in eval and in train
        mode; `score` is as of `attach`. Where not, they are read one by one from now on."""
        self.is_batched = False
        if self.num_layers < 3 or _is_sharded(self.model):
            return
        tape = Tape(self.model, self.stack, layers_only=self.readout is not None)
        # This forward is replayed in another mode, too, in which a model may call other functions.
        self.stack.shown.clear()

        def check(args, kwargs, outputs):
            self._autocast = tape.autocast
            layers = [1, self.num_layers - 1]
            if len(groups(tape.layer_outputs, layers, bytes_of(outputs), keeps=False)) > 1:
                raise ValueError("they would take too much memory")
            call = _Call(self, tape, args, kwargs, outputs, score)
            for trains in (False, True):
                # After the forward, in which modules with running statistics would change them.
                self.model.train(trains)
                tape.prepare_replays()
                for layer, result in zip(layers, call.together(layers)):
                    _require_equal(result, call.alone(layer))

        try:
            with probing(self.model), taped(tape, check):
                self.model(**inputs)
        except Exception as error:
            self.stop_batching(error)
        else:
            self.is_batched = True

    def check_joining(self, inputs, loss) -> None:
        """Find out on a batch whether a training step may read the last layer with the others: whether a replay of it,
        in train mode, gives the loss of the model's own call, and together with others the same gradients.
        `loss(outputs)` is a scalar.

        It does not where the loss depends on numbers that the model draws before its layers, where a replay leaves out
        a term of the loss, or where hooks change the gradients of what follows the layers.
        """
        self.joins_last = False
        if not self.is_batched or self.readout is not None:
            return
        tape = Tape(self.model, self.stack)
        parameters = [weight for weight in self.model.parameters() if weight.requires_grad]

        def check(args, kwargs, outputs):
            call = _Call(self, tape, args, kwargs, outputs, loss)
            own = call.alone(self.num_layers)
            answers = [map_tensors(_as_leaf, answer) for answer in tape.layer_outputs[-2:]]
            given = [leaf for leaf in tensors(answers[-1]) if leaf.requires_grad]
            sources = [*given, *parameters]
            with torch.enable_grad():
                replayed = call._from_answer(answers[-1])
                joined = run_together(call._from_answer, answers)[-1]
            _require_equal(replayed, own)
            _require_equal(joined, own)
            _require_equal_gradients(_gradients(joined, sources), _gradients(replayed, sources))

        # A forward in train mode changes running statistics.
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            with probing(self.model), taped(tape, check):
                self.model.train()
                self.model(**inputs)
        except Exception as error:
            _raise_if_out_of_memory(error)
            logger.info(f"The last layer is read alone: with the others, {_in_short(error)}.")
        else:
            self.joins_last = True
        finally:
            for buffer, own in buffers:
                buffer.data.copy_(own)
            # Hooks that a training adds may change what its forwards show.
            self.stack.shown.clear()

    def stop_batching(self, error: Exception) -> None:
        """Read the layers one by one from now on, because of an error; out of memory is raised again."""
        _raise_if_out_of_memory(error)
        self.is_batched = False
        logger.info(f"Layers are read one by one: read together, {_in_short(error)}.")

    def layer_scores(self, inputs, score, layers=None) -> list:
        """`score(outputs)` of each layer (all by default), in order, from one forward; no layer's outputs are kept."""
        scores = []
        with self.attach(lambda layer, outputs, hidden: scores.append(score(outputs)), layers):
            self.model(**inputs)
        return scores

    def last_outputs(self, inputs):
        """The outputs of the last layer."""
        return self.layer_scores(inputs, lambda outputs: outputs, [self.num_layers])[0]

    def _check_parameters(self, hidden, inputs):
        """ValueError where `readout` trains parameters that are not the model's."""
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        if any(isinstance(parameter, DTensor) for parameter in own):
            return  # FSDP computes with others, which it gathers from these
        frozen = assigned([(parameter, "requires_grad") for parameter in own], False)
        with frozen, torch.enable_grad():
            trains_others = self._user_outputs(hidden, inputs)["logits"].requires_grad
        if trains_others:
            raise ValueError(
                f"`readout` has parameters that {type(self.model).__name__} does not have: they would be neither "
                "trained nor saved. Make them a part of the model, or freeze them."
            )

    def _user_outputs(self, hidden, inputs, device=None):
        with self._autocast:  # as if the model called it
            logits = self.readout(self.model, hidden, inputs)
            mixed = torch.is_autocast_enabled(hidden.device.type)
        _check_logits(logits)
        dtype = torch.float32 if mixed else None
        return ModelOutput(logits=logits.to(device=device, dtype=dtype))


def _check_logits(logits) -> None:
    """ValueError where what a `readout` returned is no tensor of logits."""
    if isinstance(logits, torch.Tensor) and logits.is_floating_point() and logits.dim() > 0:
        return
    kind = type(logits).__name__
    if isinstance(logits, torch.Tensor):
        kind = f"{logits.dtype} {list(logits.shape)}"
    raise ValueError(
        f"`readout` returned {kind}: return a floating tensor of logits, [batch, ...]."
    )


class _Call:
    """One recorded call of a readout's model, and what its layers give."""

    def __init__(self, readout, tape, args, kwargs, outputs, score=None):
        self._readout = readout
        self._tape = tape
        self._args = args
        self._kwargs = kwargs
        self._outputs = outputs
        self._score = score

    def results(self, layers, no_grad_layers=()):
        """(layer, its outputs or their score) of the `layers`, in order."""
        waiting = list(layers)
        results = {}
        for group, has_grad in self._groups(layers, no_grad_layers):
            with nullcontext() if has_grad else torch.no_grad():
                results.update(zip(group, self._read(group)))
            while waiting and waiting[0] in results:
                layer = waiting.pop(0)
                yield layer, results.pop(layer)

    def losses(self, no_grad_layers=()):
        """The scores of all layers, which are scalars, in one tensor `[layers]`."""
        layers = list(range(1, self._readout.num_layers + 1))
        order = []
        parts = []
        for group, has_grad in self._groups(layers, no_grad_layers):
            with nullcontext() if has_grad else torch.no_grad():
                read = self._read(group)
            if isinstance(read, torch.Tensor):
                parts.append(read)
            else:
                parts += [loss.unsqueeze(0) for loss in read]
            order += group

        # [layers], in the order in which they were read
        losses = parts[0] if len(parts) == 1 else torch.cat(parts)
        if order == layers:
            return losses
        by_layer = dict(zip(order, losses))
        return torch.stack([by_layer[layer] for layer in layers])

    def together(self, layers):
        """What these layers give, by a single run."""
        answers = [self._tape.layer_outputs[layer - 1] for layer in layers]
        return run_together(self._from_answer, answers)

    def alone(self, layer):
        """What one layer gives, by a run of its own."""
        is_last = layer == self._readout.num_layers
        if is_last and self._readout.readout is None and not has_router_loss(self._outputs):
            return self._scored(self._outputs)
        return self._from_answer(self._tape.layer_outputs[layer - 1], is_last)

    def _groups(self, layers, no_grad_layers):
        """(layers that are read together, whether with gradient) pairs."""
        pairs = []
        for has_grad in (True, False):
            chosen = [layer for layer in layers if (layer not in no_grad_layers) == has_grad]
            keeps = has_grad and torch.is_grad_enabled()
            pairs += [(part, has_grad) for part in self._parts(chosen, keeps)]
        return pairs

    def _parts(self, layers, keeps):
        """The layers in groups that are read together; `keeps`: whether for a backward pass."""
        last = self._readout.num_layers
        below = [layer for layer in layers if layer < last]
        # Outputs with gradient are read one by one: parts of a batch cannot be written into.
        is_batched = self._score is not None or not torch.is_grad_enabled()
        if not (is_batched and self._readout.is_batched and len(below) > 1):
            return [[layer] for layer in layers]

        bytes_made = bytes_of(self._outputs)
        has_last = len(layers) > len(below)
        if has_last and keeps and self._readout.joins_last:
            # Then the model's own readout of the last layer needs no backward pass.
            parts = groups(self._tape.layer_outputs, layers, bytes_made, keeps)
            if len(parts) == 1:
                return parts
        parts = groups(self._tape.layer_outputs, below, bytes_made, keeps)
        if has_last:
            parts.append([last])
        return parts

    def _read(self, group):
        if len(group) == 1:
            return [self.alone(group[0])]
        try:
            return self.together(group)
        except Exception as error:
            # Other values than the probe's may have taken another way through the model.
            self._readout.stop_batching(error)
            return [self.alone(layer) for layer in group]

    def _from_answer(self, answer, is_last=False):
        readout = self._readout
        if readout.readout is None:
            return self._scored(self._tape.replay_answer(self._args, self._kwargs, answer))
        hidden = readout.stack.hidden_state(answer)  # [batch, seq, width]
        device = output_logits(self._outputs).device
        own = readout._user_outputs(hidden, self._kwargs, device)
        if is_last:
            # Within the forward: after it DDP waits for the parameters behind what it returned.
            self._outputs["logits"] = own["logits"]
        return self._scored(own)

    def _scored(self, outputs):
        if self._score is None:
            return outputs
        return self._score(outputs)


def _is_sharded(model):
    """Whether modules gather their parameters when they are called, by hooks that know no batches of layers."""
    parameters = model.parameters()
    if any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in parameters):
        return True
    return any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules())


def _raise_if_out_of_memory(error: Exception) -> None:
    if isinstance(error, RuntimeError) and should_reduce_batch_size(RuntimeError(str(error))):
        raise error


def _in_short(error: Exception) -> str:
    return str(error).split("\n")[0][:200] or type(error).__name__


def _as_leaf(tensor):
    """A tensor that begins a graph of its own."""
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _gradients(value, sources):
    return torch.autograd.grad(value, sources, allow_unused=True)


def _require_equal_gradients(found, expected):
    """ValueError unless gradients, of which some may be `None`, are equal up to rounding."""
    if [gradient is None for gradient in found] != [gradient is None for gradient in expected]:
        raise ValueError("other parameters get a gradient")
    pairs = [(one, other) for one, other in zip(found, expected) if other is not None]
    # Of all of them, since a gradient may be nothing but rounding: that of the bias of keys is 0.
    largest = max((float(other.abs().max()) for _, other in pairs if other.numel()), default=0.0)
    for one, other in pairs:
        tolerance = max(1e-3, 4 * torch.finfo(other.dtype).eps) * largest
        if not torch.allclose(one, other, rtol=0.0, atol=tolerance, equal_nan=True):
            raise ValueError("a gradient is another")


def _require_equal(together, alone):
    """ValueError unless a layer that was read with others gives what it gives alone, up to rounding."""
    for value, expected in zip(tensors(together), tensors(alone), strict=True):
        value = value.detach()
        expected = expected.detach()
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise ValueError(f"a result has shape {list(value.shape)}, not {list(expected.shape)}")
        if value.numel() == 0:
            continue
        # Row by row: the logits of a large vocabulary fill the memory that training itself will need.
        rows = zip(torch.atleast_1d(value).split(1), torch.atleast_1d(expected).split(1))
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        largest = float(expected.abs().nan_to_num(0.0, posinf=0.0).max())
        tolerance = max(1e-4, 4 * eps) * largest
        for row, own in rows:
            if not torch.allclose(row, own, rtol=0.0, atol=tolerance, equal_nan=True):
                raise ValueError("a result is another")


def _check_replay(model, stack, inputs):
    """Replay every layer once, and check that layer L gives the model's own logits, from the last layer alone."""
    name = type(model).__name__
    stack.clones |= any(getattr(module, "inplace", False) for module in stack.neighbours)
    # In train mode alone, which is not tried here: speech models mask their features in place.
    configs = [getattr(module, "config", None) for module in model.modules()]
    stack.clones |= any(getattr(config, "apply_spec_augment", False) for config in configs)
    tape = Tape(model, stack)

    def compare(logits, own_logits, what):
        # Row by row: the logits of a large vocabulary fill the memory that training itself will need.
        for row, own in zip(logits.split(1), own_logits.split(1)):
            if torch.allclose(row, own, rtol=1e-4, atol=1e-5, equal_nan=True):
                continue
            error = (logits - own_logits).abs().max().item()
            raise ValueError(
                f"{name}, replayed, {what} (largest error {error:.3g}). Pass `readout=`."
            )

    def check(args, kwargs, own):
        with errors_explained(f"{name}:"):
            own_logits = output_logits(own)
        record = [(tensor, tensor._version) for tensor in tensors(list(tape.answers.values()))]
        for layer in range(1, stack.num_layers + 1):
            logits = None  # gone before the next ones are made
            with errors_explained(
                f"{name}, read out at layer {layer} of `{stack.name}`:", " Pass `readout=`."
            ):
                logits = output_logits(tape.replay(args, kwargs, layer))
                if logits.shape != own_logits.shape:
                    raise ValueError(
                        f"logits of shape {list(logits.shape)}, not {list(own_logits.shape)}"
                    )

        if any(tensor._version != version for tensor, version in record):
            stack.clones = True
            return _check_replay(model, stack, inputs)
        compare(logits, own_logits, "differs from its own outputs")
        # The true early exit has one layer's output; what a tail takes from others would be the full model's.
        logits = None
        tape.give_within_stack = partial(map_tensors, _poisoned)
        logits = output_logits(tape.replay(args, kwargs, stack.num_layers))
        compare(logits, own_logits, "depends on earlier layers too (a weighted sum of layers?)")

    with taped(tape, check):
        model(**inputs)


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return torch.full_like(tensor, torch.nan)


def has_router_loss(outputs) -> bool:
    """Whether a mixture of experts gives an auxiliary loss of its router beside the task loss."""
    return isinstance(outputs, dict) and any(
        key.endswith(("aux_loss", "router_loss", "z_loss")) and value is not None
        for key, value in outputs.items()
    )


def _fingerprint(model):
    """Differs once modules were added, cut or replaced, or a number or flag in a config changed."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "__dict__"):
            configs[id(config)] = config
    values = [value for config in configs.values() for value in vars(config).values()]
    counts = [value for value in values if isinstance(value, int)]
    return tuple(map(id, model.modules())), tuple(counts)


@contextmanager
def evaluating(model):
    """Eval mode without gradients, each module's own mode restored; gives the device that inputs belong on."""
    # In eval mode bitsandbytes packs 4-bit weights on some CPUs, for good and for a product without gradients.
    modes = [(module, "training") for module in model.modules()]
    packing = [mode for mode in modes if "support_avx512bf16_for_cpu" in vars(mode[0])]
    with assigned(modes, False), assigned(packing, True), torch.no_grad():
        yield next((parameter.device for parameter in model.parameters()), None)


@contextmanager
def probing(model):
    """As [`evaluating`], without input noise, and with the random states put back."""
    states = random_state.preserved(random_state.accelerators(model))
    with states, noise_disabled(), torch.inference_mode(False), evaluating(model):
        yield
