"""One forward on record, and its replays, as `replay.py` explains them."""

import sys
from contextlib import closing, contextmanager
from functools import partial

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from . import random_state
from .stack import Shown, intercept, map_tensors, present_autocast, restore


# Off in a replay: answered layers fill no cache and route no tokens, so what is derived from either does not exist.
_EXTRA_OUTPUTS = ("use_cache", "output_router_logits", "output_hidden_states", "output_attentions")

_takes_noise = True
_NOISE = (sys.modules[__name__], "_takes_noise")


def noise_is_disabled() -> bool:
    """Whether a replay or a probe runs, which takes no input noise."""
    return not _takes_noise


def noise_disabled():
    """No input noise inside: its draws belong to the forward that counts."""
    return assigned([_NOISE], False)


@contextmanager
def assigned(attributes, value):
    """The attributes, pairs of an object and a name, have `value` inside, and after it what each had before."""
    before = [(owner, name, getattr(owner, name)) for owner, name in attributes]
    try:
        for owner, name, _ in before:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)


class Tape:
    """The calls of one forward around its stack, and the answers they become in the replays.

    `phase` is None (wrappers off), "record", "replay", or "idle" (wrappers on, passing through).
    """

    def __init__(self, model, stack, layers_only=False):
        self.model = model
        self.stack = stack
        self.phase = None
        self.devices = random_state.accelerators(model)
        self.modules = stack.layers if layers_only else stack.neighbours
        # A mask depends on whether there is padding; were each replay to ask, it would wait for the device.
        self.mask_makers = {}
        if not layers_only:
            masks = ALL_MASK_ATTENTION_FUNCTIONS
            self.mask_makers = {**masks._global_mapping, **masks._local_mapping}
        self.replays = not layers_only
        self.autocast = None  # that of the last layer, which a readout that is no replay needs
        self.layer_ids = {id(layer) for layer in stack.layers}
        # What a replay gets of an answer; apart for calls within the stack, of which a readout must not know.
        self.give = self.give_within_stack = clone if stack.clones else _rewrapped

    def record(self):
        self.shown = self.stack.shown.get(self._kind)
        forward_handler = None
        if self.shown is None or self.shown.calls_forward:
            forward_handler = self._call_forward
        self._originals = intercept(self.modules, self._call, forward_handler)
        masks = ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
        for name, make in self.mask_makers.items():
            self._originals.append((masks, name, masks.get(name)))
            masks[name] = partial(self._call, make, make)

        self.answers = {id(called): [] for called in (*self.modules, *self.mask_makers.values())}
        self.layer_outputs = []
        self.random_states = None
        self.off_in_replay = off_in_replay(self.model, self.stack)
        self.calls_forward = False
        self.python_states = None
        if self.shown is None and self.replays:
            self.python_states = random_state.python_states()
        self._begin("record")

    @property
    def _kind(self):
        return self.model.training, not self.replays

    def end_record(self):
        self.phase = "idle"
        if self.layer_calls != self.stack.num_layers:
            # It may have called the `forward` of layers since.
            self.stack.shown.pop(self._kind, None)
            raise ValueError(
                f"{type(self.model).__name__} ran {self.layer_calls} layers of `{self.stack.name}`, the probe found "
                f"{self.stack.num_layers}: do not add, cut or drop layers."
            )

        if self.shown is None:
            draws_by_torch_only = (
                self.replays and random_state.python_states() == self.python_states
            )
            self.shown = Shown(draws_by_torch_only, self.calls_forward)
            self.stack.shown[self._kind] = self.shown
        # A replay runs a part of the same code.
        self.torch_only = self.shown.draws_by_torch_only

    def prepare_replays(self):
        """Make ready for replays in another mode than that of the recorded forward."""
        self.off_in_replay = off_in_replay(self.model, self.stack)
        self.torch_only = False

    def replay(self, args, kwargs, layer):
        """The outputs of the model with `layer` in the place of the last one."""
        return self.replay_answer(args, kwargs, self.layer_outputs[layer - 1])

    def replay_answer(self, args, kwargs, answer):
        """The outputs of the model whose last layer returns `answer`."""
        self.answer = answer
        self.pending = {module: iter(outputs) for module, outputs in self.answers.items()}
        kwargs = {key: key not in _EXTRA_OUTPUTS and value for key, value in kwargs.items()}
        if self.stack.clones:  # what the model would write into, the recorded graph may need
            args, kwargs = clone((args, kwargs))
        off = [_NOISE, *_that_are_on(self.off_in_replay)]
        with random_state.preserved(self.devices, self.torch_only), assigned(off, False):
            self._begin("replay")
            try:
                # Not `__call__`: the root's hooks have had their turn.
                return self.model.forward(*args, **kwargs)
            finally:
                self.phase = "idle"

    def close(self):
        if self.phase is not None:
            restore(self._originals)
            self.phase = None
            self.answers = self.layer_outputs = self.answer = self.pending = None
            self.random_states = None

    def _begin(self, phase):
        self.phase = phase
        self.layer_calls = 0
        self.nested = False
        self.in_tail = False

    def _call_forward(self, module, call, *args, **kwargs):
        if self.phase == "record" and not self.nested:
            self.calls_forward = True
        return self._call(module, call, *args, **kwargs)

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
                if self.layer_calls > 0:
                    return self.give_within_stack(output)
                return self.give(output)

        # Calls inside an answered module do not exist in a replay; recording them would only keep them alive.
        self.nested = True
        try:
            output = call(*args, **kwargs)
        finally:
            self.nested = False

        if self.phase == "record" and not self.in_tail:
            kept = _rewrapped(output)
            self.answers[id(module)].append(kept)
            if is_layer:
                self.layer_outputs.append(kept)
            if is_last:
                self.in_tail = True
                if not self.replays:
                    device_type = self.stack.hidden_state(output).device.type
                    self.autocast = present_autocast(device_type)
                self.random_states = random_state.torch_states(self.devices)

        return output


@contextmanager
def taped(tape, on_record):
    """Record each call of the tape's model; inside that call, `on_record(args, kwargs, outputs)` may replay it."""

    def start(module, args, kwargs):
        if tape.phase != "idle":  # else `on_record` calls the model
            tape.close()  # the last call may have raised before `finish`
            if tape.model.training:
                _check_layerdrop(tape.model, tape.stack)
            if tape.stack.adds_images and any(
                "pixel" in name and kwargs[name] is not None for name in kwargs
            ):
                raise ValueError(
                    f"{type(module).__name__} adds features of images to the output of layers, which none has "
                    "that the model stops after: give it text alone, or use plain `Trainer`."
                )
            tape.record()

    def finish(module, args, kwargs, outputs):
        if tape.phase == "record":
            with closing(tape):
                tape.end_record()
                on_record(args, kwargs, outputs)

    # First of the root's hooks: record and replays lie inside of what others do around a call (gathering shards).
    with (
        closing(tape),
        tape.model.register_forward_pre_hook(start, prepend=True, with_kwargs=True),
        tape.model.register_forward_hook(finish, prepend=True, with_kwargs=True),
    ):
        yield


def _check_layerdrop(model, stack):
    rates = [getattr(owner, "layerdrop", 0.0) for owner in stack.dropping]
    rates.append(vars(model).get("layerdrop"))
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        raise ValueError(
            f"{type(model).__name__} drops whole layers in training. Set layerdrop (encoder_layerdrop, "
            "decoder_layerdrop) to 0 in the config, then build the model."
        )


def off_in_replay(model, stack):
    """(object, name of its flag) pairs: outputs that need the layers, and statistics that a replay must not update."""
    flags = config_flags((model, *stack.ancestors), _EXTRA_OUTPUTS)
    return flags + [(norm, "track_running_stats") for norm in stack.norms if norm.training]


def config_flags(modules, names):
    """(config, name of its flag) pairs of the configs that the modules have."""
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return [(config, name) for config in configs.values() for name in names]


def switched_off(flags):
    """The flags that are on, of pairs as from [`off_in_replay`] or [`config_flags`], are off inside."""
    return assigned(_that_are_on(flags), False)


def _that_are_on(flags):
    return [(owner, name) for owner, name in flags if getattr(owner, name, False) is True]


def _rewrapped(output):
    """A module's output with its own tensors in new containers: Qwen2-VL puts others into that of its vision tower."""
    if output is None or isinstance(output, torch.Tensor):
        return output
    return map_tensors(lambda tensor: tensor, output)


clone = partial(map_tensors, torch.clone)
