"""Where a model's stack of layers is: found on a real forward, not by names.

The stack is the container whose members' outputs are the model's hidden states, else (a single layer with a norm
behind it) the chain of calls, each output the next one's input, that begins with the first hidden state, else the one
with the largest layers. Layers are CALLS in order, not modules: ALBERT's one shared layer counts as often as it runs.
"""

import inspect
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from transformers.utils import ModelOutput

from ..compat import CHECKPOINT_FUNCTION, capturing_hooks_removed, checkpoint_function


class Shown(NamedTuple):
    """What the first recorded forward of a kind (see `LayerStack.shown`) tells about the later ones."""

    # Whether it left the generators of Python and NumPy alone. `False` where only layers were recorded, which replays
    # nothing.
    draws_by_torch_only: bool
    # Whether it called the `forward` of a module directly, past its hooks, as SqueezeBERT does. Only then do tapes go
    # on to record such calls.
    calls_forward: bool


@dataclass
class LayerStack:
    """A model's stack. Refers to the model's children alone, so that a weak reference to the model can die."""

    name: str  # qualified name of the container
    layers: list[nn.Module]  # its distinct members
    num_layers: int  # CALLS of them in one forward
    hidden_index: int  # position of the hidden state among the tensors of a layer's output
    # Modules that contain the stack, without the model itself. They run for real in a replay.
    ancestors: list[nn.Module]
    # The ancestors' children, the layers included. Their calls are recorded and answered.
    neighbours: list[nn.Module]
    norms: list[nn.Module]  # in the neighbours, those that may have running statistics
    dropping: list[Any]  # see `_dropping`
    adds_images: bool = False  # whether features of images are added to the output of layers
    clones: bool = False  # whether the model writes into its inputs or outputs of its modules
    # (Train mode or not, only layers recorded or not) -> what the first such forward has shown. To look again in every
    # forward would take longer than many kernels.
    shown: dict[tuple[bool, bool], Shown] = field(default_factory=dict)

    def hidden_state(self, layer_output) -> torch.Tensor:
        """The hidden state in a layer's whole output, usually `[batch, seq, width]`."""
        if isinstance(layer_output, torch.Tensor):
            return layer_output
        return tensors(layer_output)[self.hidden_index]


def find_layer_stack(model, inputs) -> LayerStack:
    """Run `model(**inputs)` and find its stack; ValueError for none, or layers that differ in width or length."""
    model_name = type(model).__name__
    members = {
        path: list(called_children(module))
        for path, module in model.named_modules()
        if _may_be_stack(module)
    }
    modules = {id(child): child for children in members.values() for child in children}
    with logged(modules.values()) as calls:
        hidden_states = _hidden_states(model, inputs)

    # The first may be embeddings of another width, the last may have been merged by the tail.
    if len({state.shape for state in hidden_states[1:-1]}) > 1:
        raise _differing_shapes(model_name, "hidden states", hidden_states)

    calls_of = {path: _calls_of(children, calls) for path, children in members.items()}
    place = _by_hidden_states(calls_of, hidden_states)
    if place is None:
        place = _by_chain(calls_of, members, hidden_states)
    if place is None:
        raise ValueError(
            f"{model_name} has no stack of layers: run those of an nn.ModuleList one after the other."
        )

    name, hidden_index = place
    num_layers = _check_stack(model_name, name, calls_of[name], hidden_index, hidden_states)
    return _stack_at(model, name, members[name], num_layers, hidden_index)


def _calls_of(children: list[nn.Module], calls: "list[Call]") -> "list[Call]":
    own = {id(child) for child in children}
    return [call for call in calls if id(call.module) in own]


def _check_stack(
    model_name: str,
    name: str,
    calls: "list[Call]",
    hidden_index: int,
    hidden_states: list[torch.Tensor],
) -> int:
    """The number of layers, which are the `calls` of the members of the container `name`; ValueError where they differ
    in width or length, or do not run one after the other."""
    states = [call.made[hidden_index] for call in calls]
    first_input = max(calls[0].received, key=lambda tensor: tensor.shape == states[0].shape)
    through = [first_input, *states]
    if len({state.shape for state in through}) > 1:
        raise _differing_shapes(model_name, f"states through `{name}`", through)
    if not _follow_one_another(states, hidden_states) and not _is_chain(calls, hidden_index):
        raise ValueError(
            f"{model_name}: the layers of `{name}` do not run one after the other; use one stack."
        )

    return len(states)


def _stack_at(
    model: nn.Module, name: str, members: list[nn.Module], num_layers: int, hidden_index: int
) -> LayerStack:
    """The stack in the container `name` of the model, with the modules around it."""
    path = list(accumulate(name.split("."), getattr, initial=model))
    on_path = {id(ancestor) for ancestor in path}
    children = {id(child): child for ancestor in path for child in called_children(ancestor)}
    neighbours = [child for child in children.values() if id(child) not in on_path]
    inside = [module for child in neighbours for module in child.modules()]
    arguments = [name for module in path for name in inspect.signature(module.forward).parameters]
    return LayerStack(
        name=name,
        layers=list({id(layer): layer for layer in members}.values()),
        num_layers=num_layers,
        hidden_index=hidden_index,
        ancestors=path[1:],
        neighbours=neighbours,
        norms=[module for module in inside if isinstance(module, _NormBase)],
        dropping=_dropping(path),
        adds_images=any("deepstack" in name for name in arguments),
    )


def _dropping(path: list[nn.Module]) -> list[Any]:
    """What may have a rate at which whole layers are dropped: modules below the model, and configs."""
    configs = [module.config for module in path if hasattr(module, "config")]
    return [owner for owner in (*path[1:], *configs) if hasattr(owner, "layerdrop")]


def unwrapped(model: nn.Module, **options: bool) -> nn.Module:
    """The model inside the wrappers of DDP, FSDP and DeepSpeed, as `extract_model_from_parallel` gives it."""
    # That looks through the installed packages first, which takes milliseconds at each step.
    is_wrapped = hasattr(model, "module") or hasattr(model, "_orig_mod")
    if not is_wrapped:
        return model
    return extract_model_from_parallel(model, **options)


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model inside DDP, compile and PEFT wrappers, which `generate` calls past its PEFT wrapper."""
    model = unwrapped(model, keep_torch_compile=False)
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model


def embeddings(model: nn.Module, which: str) -> nn.Module | None:
    """The "input" or "output" embeddings that a model tells of; `None` where it has none."""
    try:
        return getattr(model, f"get_{which}_embeddings")()
    except (AttributeError, NotImplementedError):
        return None


@contextmanager
def intercepted(modules, handler):
    """Route the calls of `modules` through `handler(module, call, *args, **kwargs)`.

    Both entrances are wrapped on the INSTANCE: what `__call__` runs, outside of the module's hooks, so that an
    answered module neither fires them nor gathers its shards; and `forward`, which SqueezeBERT calls directly.
    """
    originals = intercept(modules, handler, handler)
    try:
        yield
    finally:
        restore(originals)


def intercept(modules, handler, forward_handler):
    """As `intercepted`, until `restore` puts back what is returned. `forward_handler` handles the calls of `forward`;
    with `None`, `forward` is not wrapped."""
    originals = []
    for module in modules:
        entrance = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"
        handlers = [(entrance, handler)]
        if forward_handler is not None:
            handlers.append(("forward", forward_handler))
        for attribute, handle in handlers:
            originals.append((module.__dict__, attribute, module.__dict__.get(attribute)))
            module.__dict__[attribute] = partial(handle, module, getattr(module, attribute))

        original = module.__dict__.get(CHECKPOINT_FUNCTION)
        if original is None:
            continue
        checkpoint = checkpoint_function(module, handler)
        if checkpoint is not None:
            originals.append((module.__dict__, CHECKPOINT_FUNCTION, original))
            module.__dict__[CHECKPOINT_FUNCTION] = checkpoint

    return originals


def restore(originals):
    """Put back what was in dicts, given as (dict, key, value); a value of `None` was not there."""
    for place, key, original in originals:
        if original is None:
            place.pop(key, None)
        else:
            place[key] = original


class Call(NamedTuple):
    """A module's call: its tensors in and out, how many calls had ended when it began, the precision it ended in."""

    module: nn.Module
    began: int
    received: list[torch.Tensor]
    made: list[torch.Tensor]
    autocast: torch.autocast | None


@contextmanager
def logged(modules):
    """The [`Call`]s of `modules` inside, a list in order of their completion."""
    calls = []
    running = set()

    def log(module, call, *args, **kwargs):
        if id(module) in running:  # `__call__` on its way to `forward`
            return call(*args, **kwargs)
        running.add(id(module))
        began = len(calls)
        try:
            output = call(*args, **kwargs)
        finally:
            running.discard(id(module))

        made = tensors(output)
        autocast = None
        if made:
            autocast = present_autocast(made[0].device.type)
        calls.append(Call(module, began, tensors((args, kwargs)), made, autocast))
        return output

    with intercepted(modules, log):
        yield calls


def present_autocast(device_type: str) -> torch.autocast:
    """Mixed precision as it is now, to be entered again once the model's forward has left it."""
    return torch.autocast(
        device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    )


@contextmanager
def errors_explained(beginning, end=""):
    """ValueError for an error inside; out of memory stays as it is, for `auto_find_batch_size`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RuntimeError) and should_reduce_batch_size(RuntimeError(str(error))):
            raise
        raise ValueError(f"{beginning} {error!r}.{end}") from error


def tensors(tree) -> list[torch.Tensor]:
    """The tensors of a nested tuple, list, dict or ModelOutput, in order."""
    if isinstance(tree, torch.Tensor):  # what most layers return, without pytree's search
        return [tree]
    if isinstance(tree, ModelOutput) and all(
        isinstance(part, torch.Tensor) for part in tree.values()
    ):
        return list(tree.values())
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function, tree):
    """`tree` with `function` applied to its tensors."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    return pytree.tree_map(
        lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def _may_be_stack(module):
    if isinstance(module, nn.Sequential):
        return len(module) > 1 and len({type(child) for child in module}) == 1
    return isinstance(module, nn.ModuleList)


def called_children(module):
    """Children of `module`; of those without a forward of their own, the children in turn."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from called_children(child)
        else:
            yield child


def _hidden_states(model, inputs):
    outputs = None
    arguments = inspect.signature(model.forward).parameters
    if hasattr(model, "config") or "output_hidden_states" in arguments:
        # A forward without that argument raises TypeError.
        with suppress(TypeError), capturing_hooks_removed(model):
            outputs = model(**{**inputs, "output_hidden_states": True})

    if outputs is None:
        outputs = model(**inputs)
    if not isinstance(outputs, dict):
        return []
    for name in ("decoder_hidden_states", "hidden_states"):
        states = outputs.get(name)
        if states:
            return [state for state in states if isinstance(state, torch.Tensor)]

    return []


def _by_hidden_states(calls_of, hidden_states):
    """(name, index of the hidden state in the output) of the container that made most of the hidden states."""
    for same in (share_storage, _equal):
        matches = {name: _matches(calls, hidden_states, same) for name, calls in calls_of.items()}
        # max() keeps the first of equals, and outer containers come first
        name = max(matches, key=lambda path: len(matches[path]), default=None)
        if name is not None and matches[name]:
            return name, Counter(matches[name].values()).most_common(1)[0][0]
    return None


def _matches(calls, hidden_states, same) -> dict[int, int]:
    """The number of each hidden state that one of the calls made -> its index in the output of that call."""
    indices = {}
    for number, state in enumerate(hidden_states):
        for call in calls:
            for index, tensor in enumerate(call.made):
                if same(tensor, state):
                    indices[number] = index
    return indices


def _by_chain(calls_of, members, hidden_states):
    """(name, 0) of the chain that begins with the first hidden state (an encoder-decoder's, in its decoder), else of
    that with the largest layers: a decoder before its encoder, no small head."""

    def rank(name):
        received = calls_of[name][0].received
        begins = any(_equal(tensor, state) for tensor in received for state in hidden_states[:1])
        sizes = [weight.numel() for child in members[name] for weight in child.parameters()]
        return begins, sum(sizes) / len(members[name])

    chains = [name for name, calls in calls_of.items() if calls and _is_chain(calls, 0)]
    if not chains:
        return None
    return max(chains, key=rank), 0


def _is_chain(calls, index):
    """Whether each call receives the hidden state that the call before returned, and keeps its shape."""
    for call in calls:
        if len(call.made) <= index:
            return False
        if all(tensor.shape != call.made[index].shape for tensor in call.received):
            return False
    for before, call in pairwise(calls):
        if not any(share_storage(before.made[index], tensor) for tensor in call.received):
            return False
    return True


def _follow_one_another(states, hidden_states):
    """Whether `states` are the model's hidden states in order, with or without embeddings and up to a final norm."""
    first = len(hidden_states) - len(states)
    if first not in (0, 1):
        return False
    reported = hidden_states[first:]
    return all(_equal(state, other) for state, other in zip(states[:-1], reported))


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors view the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _equal(a, b):
    # The layers of one model may be on several devices.
    return a.shape == b.shape and torch.equal(a, b.to(a.device))


def _differing_shapes(model_name: str, what: str, states: list[torch.Tensor]) -> ValueError:
    shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(s.shape for s in states))
    return ValueError(
        f"{model_name}: {what} differ in shape ({shapes}); use an architecture whose layers keep width and length."
    )
