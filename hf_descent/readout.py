"""The shared readout psi of every layer, by replay: exact for every architecture with a stack of equal-width layers.

The readout of layer l is what the model itself would return if its stack ended after layer l; final norm, pooler,
head, softcap and loss are the model's own code. One forward is recorded. For each layer the model's own forward then
runs again: every call that had finished before the last layer is answered from the record, the last layer answers with
layer l's whole output, and only what follows is computed.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.batchnorm import _NormBase
from transformers.utils import ModelOutput, logging

from . import random_state
from .layer_stack import find_layer_stack, intercepted, map_tensors, tensors


logger = logging.get_logger(__name__)

# Off in a replay: answered layers fill no cache and route no tokens, so what is derived from either does not exist.
_EXTRA_OUTPUTS = ("use_cache", "output_router_logits", "output_hidden_states", "output_attentions")

_stacks = WeakKeyDictionary()  # model -> (fingerprint, LayerStack)
_replaying = False


def is_replaying() -> bool:
    """True while a replay runs: what perturbs a forward (input noise) must not fire a second time then."""
    return _replaying


def output_logits(outputs) -> torch.Tensor:
    """The prediction tensor of a model's `outputs`.

    `logits` where present; `start_logits` and `end_logits` stacked on the last dimension; else the first floating
    tensor that is not a scalar.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(outputs, dict):
        if isinstance(outputs.get("logits"), torch.Tensor):
            return outputs["logits"]
        if outputs.get("start_logits") is not None and outputs.get("end_logits") is not None:
            return torch.stack((outputs["start_logits"], outputs["end_logits"]), dim=-1)  # [batch, seq, 2]
    for tensor in tensors(outputs):
        if tensor.is_floating_point() and tensor.dim() > 0:
            return tensor
    raise ValueError(f"`outputs` ({type(outputs).__name__}) hold no logits: no floating tensor with a dimension.")


def layer_logits(model, inputs) -> list[torch.Tensor]:
    """The logits of `model` at each of its L layers, through its own readout.

    Gradients and dropout follow the ambient grad mode and the model's train/eval mode.

    Args:
        model: unwrapped `nn.Module` with a stack of equal-width layers.
        inputs: the dict given to `model(**inputs)`.

    Returns:
        L tensors shaped like the model's own logits, layer 1..L; the last equals the model's own.

    Raises:
        ValueError: where no shared readout exists (see [`Readout.probe`]).
    """
    logits = []
    with Readout.probe(model, inputs).attach(lambda layer, outputs, hidden: logits.append(output_logits(outputs))):
        model(**inputs)
    return logits


class Readout:
    """The readout that the L layers of one model share. [`Readout.probe`] builds it, [`Readout.attach`] uses it.

    Attributes:
        num_layers (`int`): L, the CALLS of the stack in one forward (a layer shared by 12 calls counts 12 times).
    """

    def __init__(self, model, stack, readout=None):
        self.model, self.readout, self.num_layers, self._stack = model, readout, stack.num_layers, stack

    @classmethod
    def probe(cls, model, inputs, readout=None) -> "Readout":
        """Find the layer stack of `model` on a real batch and check that the readout at layer L is the model's own.

        Runs in eval mode without gradients; train/eval mode, random states and config are left as they were. The stack
        is remembered per model until its module tree or its config changes.

        Args:
            model: the unwrapped `nn.Module` (a `PeftModel`, too).
            inputs: the dict given to `model(**inputs)`, with or without labels.
            readout: `readout(model, hidden, inputs) -> logits`, for every layer in place of the model's own.

        Raises:
            ValueError: if there is no stack of equal-width layers; if the replay at layer L differs from the model's
                own outputs, or needs more than the last layer's; if the model is in train mode and drops layers; if
                `readout` does not return finite logits.
        """
        known, stack = _stacks.get(model, (None, None))
        if known != _fingerprint(model):
            with probing(model):
                stack = find_layer_stack(model, inputs)
                _check_replay(model, stack, inputs)
            _stacks[model] = (_fingerprint(model), stack)
            logger.info(f"{type(model).__name__}: {stack.num_layers} layers in `{stack.name}`.")
        _check_layerdrop(model, stack)
        self = cls(model, stack, readout)
        if readout is not None:
            with probing(model), self.attach(_check_finite):
                model(**inputs)
        return self

    @contextmanager
    def attach(self, on_layer, layers=None, no_grad_layers=()):
        """Read out the layers in every `model(...)` call while attached, inside that very call.

        Args:
            on_layer: `on_layer(layer, outputs, hidden)`, called for each layer in increasing order with the outputs
                that the model would give if it stopped after `layer`, and that layer's hidden state with its graph.
                For layer L these are the model's own outputs, unless they carry an auxiliary router loss: then layer L
                is replayed too, so that its loss is the task loss alone.
            layers: which of 1..L; all by default.
            no_grad_layers: layers that are replayed without gradient.

        Raises:
            ValueError: for layers out of range; during a call, if the stack does not run L times with gradient.
        """
        layers = range(1, self.num_layers + 1) if layers is None else sorted(set(layers))
        for layer in (*layers, *no_grad_layers):
            if not 1 <= layer <= self.num_layers:
                raise ValueError(f"Layer {layer} is out of range: this model has 1..{self.num_layers}.")
        tape = _Tape(self.model, self._stack, layers_only=self.readout is not None)

        def read_out(args, kwargs, outputs):
            for layer in layers:
                hidden = self._stack.hidden_state(tape.layer_outputs[layer - 1])  # [batch, seq, width]
                if self.readout is None and layer == self.num_layers and not has_router_loss(outputs):
                    on_layer(layer, outputs, hidden)
                    continue
                with torch.no_grad() if layer in no_grad_layers else nullcontext():
                    if self.readout is None:
                        layer_outputs = tape.replay(args, kwargs, layer)
                    else:
                        layer_outputs = self._user_outputs(hidden, kwargs)
                on_layer(layer, layer_outputs, hidden)

        with _taped(tape, read_out):
            yield self

    def _user_outputs(self, hidden, inputs):
        logits = self.readout(self.model, hidden, inputs)
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or logits.dim() == 0:
            got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, torch.Tensor) else type(logits).__name__
            raise ValueError(f"`readout` returned {got}: return a floating tensor of logits, [batch, ...].")
        return ModelOutput(logits=logits)


class _Tape:
    """The calls of one forward around its stack, and the answers they become in the replays.

    `phase` is None (wrappers off), "record", "replay", or "idle" (wrappers on, passing through).
    """

    def __init__(self, model, stack, layers_only=False):
        self.model, self.stack, self.phase = model, stack, None
        self.devices = random_state.accelerators(model)
        self.modules = stack.layers if layers_only else stack.neighbours
        self.layer_ids = {id(layer) for layer in stack.layers}
        # What a replay gets of an answer; apart for calls within the stack, of which a readout must not know.
        self.give = self.give_within_stack = _clone if stack.clones else _same

    def record(self):
        self._wrappers = ExitStack()
        self._wrappers.enter_context(intercepted(self.modules, self._call))
        self.answers = {id(module): [] for module in self.modules}
        self.layer_outputs = []
        self.has_grad = torch.is_grad_enabled()
        self.off_in_replay = _off_in_replay(self.model, self.stack)
        self._begin("record")

    def end_record(self):
        self.phase = "idle"
        if self.layer_calls != self.stack.num_layers:
            raise ValueError(
                f"{type(self.model).__name__} ran {self.layer_calls} layers of `{self.stack.name}`, the probe found "
                f"{self.stack.num_layers}: layers must not be dropped at random (set layerdrop to 0), added or cut."
            )

    def replay(self, args, kwargs, layer):
        """The outputs of the model with `layer` in the place of the last one."""
        global _replaying
        self.answer = self.layer_outputs[layer - 1]
        self.pending = {module: iter(outputs) for module, outputs in self.answers.items()}
        kwargs = {key: key not in _EXTRA_OUTPUTS and value for key, value in kwargs.items()}
        self._begin("replay")
        with random_state.preserved(self.devices), _switched_off(self.off_in_replay):
            _replaying = True
            try:
                return self.model.forward(*args, **kwargs)  # not __call__: the root's hooks have had their turn
            finally:
                _replaying = False
                self.phase = "idle"

    def stop(self):
        if self.phase is not None:
            self._wrappers.close()
            self.phase = self.answers = self.layer_outputs = self.answer = self.pending = self.random_states = None

    def _begin(self, phase):
        self.phase, self.layer_calls, self.nested, self.in_tail = phase, 0, False, False

    def _call(self, module, call, *args, **kwargs):
        if self.phase == "idle" or self.nested:
            return call(*args, **kwargs)
        is_layer = id(module) in self.layer_ids
        self.layer_calls += is_layer
        is_last = is_layer and self.layer_calls == self.stack.num_layers
        if self.phase == "replay" and not self.in_tail:
            if is_last:
                self.in_tail = True
                random_state.set_torch_states(self.random_states, self.devices)
                return self.give(self.answer)
            for output in self.pending[id(module)]:
                return self.give_within_stack(output) if self.layer_calls > 0 else self.give(output)
        if is_layer and self.has_grad and not torch.is_grad_enabled():
            raise ValueError(
                f"The layers of `{self.stack.name}` run without gradient in a function of their own (Reformer's "
                "reversible layers, or reentrant gradient checkpointing), where no loss can be taken. Set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}, or use another architecture."
            )
        # Calls inside an answered module do not exist in a replay; recording them would only keep them alive.
        self.nested = True
        try:
            output = call(*args, **kwargs)
        finally:
            self.nested = False
        if self.phase == "record" and not self.in_tail:
            self.answers[id(module)].append(output)
            if is_layer:
                self.layer_outputs.append(output)
            if is_last:
                self.in_tail = True
                self.random_states = random_state.torch_states(self.devices)
        return output


@contextmanager
def _taped(tape, on_record):
    """Record each call of the tape's model; inside that call, `on_record(args, kwargs, outputs)` may replay it."""

    def start(module, args, kwargs):
        if tape.phase != "idle":  # else `on_record` calls the model
            tape.stop()  # the last call may have raised before `finish`
            _check_layerdrop(tape.model, tape.stack)
            tape.record()

    def finish(module, args, kwargs, outputs):
        if tape.phase == "record":
            try:
                tape.end_record()
                on_record(args, kwargs, outputs)
            finally:
                tape.stop()

    # First of the root's hooks: record and replays lie inside of what others do around a call (gathering shards).
    handles = (
        tape.model.register_forward_pre_hook(start, prepend=True, with_kwargs=True),
        tape.model.register_forward_hook(finish, prepend=True, with_kwargs=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        tape.stop()


def _check_replay(model, stack, inputs):
    """Replay every layer once, and see to it that layer L gives the model's own logits, from the last layer alone."""
    name = f"{type(model).__name__}, read out at layer {{}} of `{stack.name}`,"
    tape, given = _Tape(model, stack), []

    def give(output):
        # Clones, so that a write in place shows in their version and cannot spoil the record.
        output = _clone(output)
        given.extend((tensor, tensor._version) for tensor in tensors(output))
        return output

    def compare(logits, own_logits, what):
        if not torch.allclose(logits, own_logits, rtol=1e-4, atol=1e-5, equal_nan=True):
            error = (logits - own_logits).abs().max().item()
            raise ValueError(f"{name.format(stack.num_layers)} {what} (largest error {error:.3g}). Pass `readout=`.")

    def check(args, kwargs, own):
        own_logits = output_logits(own)
        for layer in range(1, stack.num_layers + 1):
            try:
                logits = output_logits(tape.replay(args, kwargs, layer))
            except Exception as error:
                raise ValueError(f"{name.format(layer)} fails with {error!r}. Pass `readout=`.") from error
            if logits.shape != own_logits.shape:
                shapes = f"{list(logits.shape)}, not {list(own_logits.shape)}"
                raise ValueError(f"{name.format(layer)} has logits of shape {shapes}. Pass `readout=`.")
        compare(logits, own_logits, "differs from its own outputs")
        # The true early exit has one layer's output; what a tail takes from others would be the full model's.
        tape.give_within_stack = _poisoned
        logits = output_logits(tape.replay(args, kwargs, stack.num_layers))
        compare(logits, own_logits, "depends on earlier layers too (a weighted sum of layers?)")

    tape.give = tape.give_within_stack = give
    with _taped(tape, check):
        model(**inputs)
    stack.clones = any(tensor._version != version for tensor, version in given) or any(
        getattr(module, "inplace", False) for module in stack.neighbours
    )


def _check_finite(layer, outputs, hidden):
    if not outputs["logits"].isfinite().all():
        raise ValueError(f"`readout` returned logits that are not finite at layer {layer}: see to its weights.")


def _check_layerdrop(model, stack):
    modules = (model, *stack.ancestors) if model.training else ()
    sources = [*modules, *(module.config for module in modules if hasattr(module, "config"))]
    rates = [rate for rate in (getattr(source, "layerdrop", 0.0) for source in sources) if isinstance(rate, float)]
    if any(rates):
        raise ValueError(
            f"{type(model).__name__} drops whole layers in training (layerdrop={max(rates)}): none has a loss of "
            "its own. Set layerdrop (encoder_layerdrop, decoder_layerdrop) to 0 in the config, then build the model."
        )


def has_router_loss(outputs):
    return isinstance(outputs, dict) and any(
        key.endswith(("aux_loss", "router_loss", "z_loss")) and value is not None for key, value in outputs.items()
    )


def _fingerprint(model):
    """Differs once modules were added, cut or replaced, or a number or flag in a config changed."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "__dict__")}
    counts = [value for config in configs.values() for value in vars(config).values() if isinstance(value, int)]
    return tuple(map(id, model.modules())), tuple(counts)


@contextmanager
def probing(model):
    """Eval mode without gradients; modes and random states are put back."""
    modes = [(module, module.training) for module in model.modules()]
    with random_state.preserved(random_state.accelerators(model)), torch.inference_mode(False), torch.no_grad():
        try:
            for module, _ in modes:
                module.training = False
            yield
        finally:
            for module, training in modes:
                module.training = training


def _off_in_replay(model, stack):
    """(object, name of its flag) pairs: outputs that need the layers, and statistics that a replay must not update."""
    configs = {id(m.config): m.config for m in (model, *stack.ancestors) if hasattr(m, "config")}.values()
    norms = [m for child in stack.neighbours for m in child.modules() if isinstance(m, _NormBase)]
    flags = [(config, name) for config in configs for name in _EXTRA_OUTPUTS]
    return flags + [(norm, "track_running_stats") for norm in norms if norm.training]


@contextmanager
def _switched_off(flags):
    changed = [(owner, name) for owner, name in flags if getattr(owner, name, False) is True]
    try:
        for owner, name in changed:
            setattr(owner, name, False)
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)


def _same(output):
    return output


def _clone(output):
    return map_tensors(torch.clone, output)


def _poisoned(output):
    return map_tensors(lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t, output)
