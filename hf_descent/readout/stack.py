"""Where a model's stack of layers is: found on a real forward, not by names.

The stack is the container whose members' outputs are the model's hidden states, else (a single layer with a norm
behind it) the chain of calls, each output the next one's input, that begins with the first hidden state, else the one
with the largest layers. Layers are CALLS in order, not modules: ALBERT's one shared layer counts as often as it runs.
"""

import inspect
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from ..compat import CHECKPOINT_FUNCTION, checkpoint_function


@dataclass
class LayerStack:
    """A model's stack. Refers to the model's children alone, so that a weak reference to the model can die."""

    name: str  # qualified name of the container
    layers: list[nn.Module]  # its distinct members
    num_layers: int  # CALLS of them in one forward
    hidden_index: int  # position of the hidden state among the tensors of a layer's output
    ancestors: list[
        nn.Module
    ]  # that contain the stack, without the model itself; they run for real in a replay
    neighbours: list[
        nn.Module
    ]  # the ancestors' children, the layers included; their calls are recorded and answered
    norms: list[nn.Module]  # of the neighbours, those that may have running statistics
    adds_images: bool = (
        False  # whether features of images are added to the output of layers ("deepstack")
    )
    clones: bool = False  # whether the model writes into its inputs or outputs of its modules: replays need copies

    def hidden_state(self, layer_output) -> torch.Tensor:
        """The hidden state in a layer's whole output, usually `[batch, seq, width]`."""
        return tensors(layer_output)[self.hidden_index]


def find_layer_stack(model, inputs) -> LayerStack:
    """Run `model(**inputs)` and find its stack; ValueError for none, or layers that differ in width or length."""
    model_name = type(model).__name__
    members = {
        path: list(called_children(module))
        for path, module in model.named_modules()
        if _may_be_stack(module)
    }
    with logged(
        {id(child): child for children in members.values() for child in children}.values()
    ) as calls:
        hidden_states = _hidden_states(model, inputs)

    # The first may be embeddings of another width, the last may have been merged by the tail.
    if len({state.shape for state in hidden_states[1:-1]}) > 1:
        raise _differing_shapes(
            model_name, "hidden states", (state.shape for state in hidden_states)
        )
    calls_of = {
        path: [call for call in calls if any(call.module is child for child in children)]
        for path, children in members.items()
    }
    found = _by_hidden_states(calls_of, hidden_states) or _by_chain(
        calls_of, members, hidden_states
    )
    if found is None:
        raise ValueError(
            f"{model_name} has no stack of layers: run those of an nn.ModuleList one after the other."
        )
    name, hidden_index = found
    states = [call.made[hidden_index] for call in calls_of[name]]
    first_input = max(
        calls_of[name][0].received, key=lambda tensor: tensor.shape == states[0].shape
    )
    if len({state.shape for state in (first_input, *states)}) > 1:
        raise _differing_shapes(
            model_name, f"states through `{name}`", (t.shape for t in (first_input, *states))
        )
    if not _follow_one_another(states, hidden_states) and not _is_chain(
        calls_of[name], hidden_index
    ):
        raise ValueError(
            f"{model_name}: the layers of `{name}` do not run one after the other; use one stack."
        )

    path = list(accumulate(name.split("."), getattr, initial=model))
    children = {id(child): child for ancestor in path for child in called_children(ancestor)}
    neighbours = [
        child for child in children.values() if not any(child is ancestor for ancestor in path)
    ]
    return LayerStack(
        name=name,
        layers=list({id(layer): layer for layer in members[name]}.values()),
        num_layers=len(states),
        hidden_index=hidden_index,
        ancestors=path[1:],
        neighbours=neighbours,
        norms=[
            module
            for child in neighbours
            for module in child.modules()
            if isinstance(module, _NormBase)
        ],
        adds_images=any(
            "deepstack" in name
            for each in path
            for name in inspect.signature(each.forward).parameters
        ),
    )


def unwrapped(model: nn.Module, **options: bool) -> nn.Module:
    """The model inside the wrappers of DDP, FSDP and DeepSpeed, as `extract_model_from_parallel` gives it."""
    # That looks through the installed packages first, which takes milliseconds at each step.
    is_wrapped = hasattr(model, "module") or hasattr(model, "_orig_mod")
    return extract_model_from_parallel(model, **options) if is_wrapped else model


def inner_model(model: nn.Module) -> nn.Module:
    """The transformers model inside DDP, compile and PEFT wrappers, which `generate` calls past its PEFT wrapper."""
    model = unwrapped(model, keep_torch_compile=False)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
    originals = []
    try:
        for module in modules:
            entrance = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"
            for attribute in (entrance, "forward"):
                originals.append((module.__dict__, attribute, module.__dict__.get(attribute)))
                module.__dict__[attribute] = partial(handler, module, getattr(module, attribute))

            checkpoint = checkpoint_function(module, handler)
            if checkpoint is not None:
                attribute = CHECKPOINT_FUNCTION
                originals.append((module.__dict__, attribute, module.__dict__[attribute]))
                module.__dict__[attribute] = checkpoint
        yield
    finally:
        for instance, attribute, original in originals:
            if original is None:
                instance.pop(attribute, None)
            else:
                instance[attribute] = original


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
    calls, running = [], set()

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
        autocast = present_autocast(made[0].device.type) if made else None
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
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def map_tensors(function, tree):
    """`tree` with `function` applied to its tensors."""
    if isinstance(tree, torch.Tensor):  # what most layers return, without pytree's search
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
    if (
        hasattr(model, "config")
        or "output_hidden_states" in inspect.signature(model.forward).parameters
    ):
        # A forward without that argument raises TypeError.
        with suppress(TypeError):
            outputs = model(**{**inputs, "output_hidden_states": True})
    if outputs is None:
        outputs = model(**inputs)
    if not isinstance(outputs, dict):
        return []
    states = outputs.get("decoder_hidden_states") or outputs.get("hidden_states") or ()
    return [state for state in states if isinstance(state, torch.Tensor)]


def _by_hidden_states(calls_of, hidden_states):
    """(name, index of the hidden state in the output) of the container that made most of the hidden states."""
    for same in (share_storage, _equal):
        # max() keeps the first of equals, and outer containers come first
        matches = {
            name: {
                k: j
                for k, state in enumerate(hidden_states)
                for call in calls
                for j, tensor in enumerate(call.made)
                if same(tensor, state)
            }
            for name, calls in calls_of.items()
        }
        name = max(matches, key=lambda path: len(matches[path]), default=None)
        if name is not None and matches[name]:
            return name, Counter(matches[name].values()).most_common(1)[0][0]
    return None


def _by_chain(calls_of, members, hidden_states):
    """(name, 0) of the chain that begins with the first hidden state (an encoder-decoder's, in its decoder), else of
    that with the largest layers: a decoder before its encoder, no small head."""

    def rank(name):
        size = sum(p.numel() for child in members[name] for p in child.parameters()) / len(
            members[name]
        )
        received = calls_of[name][0].received
        return any(
            _equal(tensor, state) for tensor in received for state in hidden_states[:1]
        ), size

    chains = [name for name, calls in calls_of.items() if calls and _is_chain(calls, 0)]
    return (max(chains, key=rank), 0) if chains else None


def _is_chain(calls, index):
    """Whether each call receives the hidden state that the call before returned, and keeps its shape."""
    return all(
        len(call.made) > index
        and any(tensor.shape == call.made[index].shape for tensor in call.received)
        for call in calls
    ) and all(
        any(share_storage(before.made[index], tensor) for tensor in call.received)
        for before, call in pairwise(calls)
    )


def _follow_one_another(states, hidden_states):
    """Whether `states` are the model's hidden states in order, with or without embeddings and up to a final norm."""
    return any(
        len(hidden_states) == len(states) + first
        and all(
            _equal(state, reported) for state, reported in zip(states[:-1], hidden_states[first:])
        )
        for first in (0, 1)
    )


def share_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors view the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _equal(a, b):
    return a.shape == b.shape and torch.equal(
        a, b.to(a.device)
    )  # the layers of one model may be on several


def _differing_shapes(model_name, what, shapes):
    shapes = ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
    return ValueError(
        f"{model_name}: {what} differ in shape ({shapes}); use an architecture whose layers keep width and length."
    )
