"""Makes a model of some layers of another: exact, and a checkpoint of the same class.

A class of this package, as after `readout="mean"`, needs `import hf_descent.models` before `from_pretrained`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..readout import random_state
from ..readout.replay import Readout, output_logits, probing
from ..readout.stack import LayerStack, intercepted, map_tensors, tensors


logger = logging.get_logger(__name__)


def truncate(
    model: PreTrainedModel, num_layers: int, inputs: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Make a smaller model from the first `num_layers` layers of `model`, under the same head.

    The copy is an ordinary checkpoint: save it by `save_pretrained`, load it by `from_pretrained`. Its config has the
    new number of layers, and lists with one entry per layer are cut, too. Its logits are checked to be those that
    `model` gives at that layer.

    Args:
        model (`PreTrainedModel`): on any device, in any mode; it is left as it was. Merge a PEFT model first.
        num_layers (`int`): the number of layers to keep, 1..L.
        inputs (`dict`, *optional*): a batch for `model(**inputs)`, for that check. Default: a small random batch.

    Returns the copy. TypeError if `model` is no `PreTrainedModel`, has adapters or is offloaded. ValueError if
    `num_layers` is out of range, the layers do not share one head, or no config gives exactly the first layers.
    """
    plain, reader, inputs = _readable(model, inputs)
    if num_layers not in range(1, reader.num_layers + 1):
        name = type(model).__name__
        raise ValueError(
            f"`num_layers` is {num_layers!r}; {name} has layers 1 to {reader.num_layers}."
        )

    with probing(plain):
        (truth,) = reader.layer_scores(inputs, output_logits, [num_layers])

    return _with_layers(model, reader.stack, list(range(1, num_layers + 1)), inputs, truth)


def keep_layers(
    model: PreTrainedModel, layers: Sequence[int], inputs: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """Make a smaller model from some `layers` of `model`, in their order, under the same head.

    Its logits are checked to be those of `model` when the other layers hand on what they receive. Nothing is trained,
    so its loss is higher. Leaving out layers in the middle costs less than leaving out the first or the last ones.

    Args:
        model, inputs: as in [`truncate`].
        layers (sequence of `int`): the layers to keep, increasing numbers in 1..L.

    Returns the copy. TypeError and ValueError as in [`truncate`].
    """
    plain, reader, inputs = _readable(model, inputs)
    layers = check_layers(layers, reader.stack)
    with probing(plain), skipping(reader.stack, layers):
        truth = output_logits(plain(**inputs))

    return _with_layers(model, reader.stack, layers, inputs, truth)


def check_layers(layers: Sequence[int], stack: LayerStack) -> list[int]:
    """`layers` as a list; ValueError unless they are increasing numbers of layers of a stack of distinct modules."""
    if len(stack.layers) != stack.num_layers:
        raise ValueError(
            f"`{stack.name}` runs one module several times: its layers cannot be left out. Use `truncate`."
        )
    numbers = list(layers)
    known = range(1, stack.num_layers + 1)
    increases = all(after > before for before, after in pairwise(numbers))
    if not numbers or not increases or any(layer not in known for layer in numbers):
        raise ValueError(
            f"`layers` is {layers!r}; give increasing numbers from 1 to {stack.num_layers}, such as [1, 2, 4]."
        )
    return numbers


@contextmanager
def skipping(stack: LayerStack, kept: Sequence[int]) -> Iterator[None]:
    """Within it, the layers of `stack` that are not `kept` (1-based) hand on the hidden state that they receive.

    A layer that is left out runs once, to show the form of its output; if that is a tensor, it does not run again.
    """
    dropped = [layer for number, layer in enumerate(stack.layers, start=1) if number not in kept]
    running = set()
    # For layers that return the hidden state alone: which of the tensors that they receive it is.
    places: dict[nn.Module, int] = {}

    def hand_on(module: nn.Module, call, *args, **kwargs):
        if module in running:  # `__call__` on its way to `forward`
            return call(*args, **kwargs)

        received = tensors((args, kwargs))
        if module in places:
            return received[places[module]]

        running.add(module)
        try:
            output = call(*args, **kwargs)
        finally:
            running.discard(module)

        made = stack.hidden_state(output)
        shapes = [tensor.shape for tensor in received]
        place = shapes.index(made.shape)
        if output is made:
            places[module] = place

        return map_tensors(lambda tensor: received[place] if tensor is made else tensor, output)

    with intercepted(dropped, hand_on):
        yield


def example_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A small batch for `model`: the token ids of its `dummy_inputs`, or images; ValueError if it reads neither."""
    name = model.main_input_name
    vision = getattr(model.config, "encoder_config", model.config)  # a denoiser has it inside
    if name in model.dummy_inputs:
        inputs = model.dummy_inputs
    elif name == "pixel_values" and isinstance(getattr(vision, "image_size", None), int):
        shape = (2, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
        inputs = {name: torch.rand(shape, generator=torch.Generator().manual_seed(0))}
    else:
        raise ValueError(
            f"No batch can be made up for {type(model).__name__}, which reads `{name}`: give `inputs`."
        )
    return {key: value.to(model.device) for key, value in inputs.items() if value is not None}


def _readable(
    model: PreTrainedModel, inputs: Mapping[str, Any] | None
) -> tuple[PreTrainedModel, Readout, Mapping[str, Any]]:
    """The model with the same weights but without the autocast of training, its readout, and a batch for it."""
    name = type(model).__name__
    is_bare = isinstance(model, PreTrainedModel) and not model._hf_peft_config_loaded
    if not is_bare or any(weight.is_meta for weight in model.parameters()):
        raise TypeError(
            f"`model` is a {name}; give a `PreTrainedModel` in memory (of adapters `merge_and_unload()`)."
        )

    readout = getattr(model.config, "custom_readout", None)
    if readout:
        logger.warning(
            f"{name} was trained with the readout `{readout}`, which is not saved with it. The cut model uses the "
            "model's own head, which was not trained, so its predictions are not those that were measured."
        )

    if inputs is None:
        inputs = example_inputs(model)

    plain = copy.copy(model)
    if "_original_forward" in vars(model):  # training in mixed precision leaves it; no copy has it
        del plain.forward

    return plain, Readout.probe(plain, inputs), inputs


def _with_layers(
    model: PreTrainedModel,
    stack: LayerStack,
    kept: list[int],
    inputs: Mapping[str, Any],
    truth: torch.Tensor,
) -> PreTrainedModel:
    """A copy of `model` with the `kept` layers of its `stack`, whose logits on `inputs` are the `truth`; ValueError
    if no config gives one."""
    faults = []
    for field, config in _shorter_configs(model.config, stack.num_layers, kept):
        try:
            type(config).from_dict(config.to_dict())  # must be loadable, too
            short = _rebuild(model, config, stack, kept)
            with probing(short):
                logits = output_logits(short(**inputs))
        except Exception as error:
            faults.append(f"with {field} = {len(kept)} it fails with {error!r}")
            continue
        is_same = logits.shape == truth.shape and torch.allclose(
            logits, truth, rtol=1e-4, atol=1e-5, equal_nan=True
        )
        if is_same:
            return short.train(model.training)
        faults.append(
            f"with {field} = {len(kept)} its logits are not those of layer{_numbers(kept)}"
        )

    reasons = "; ".join(faults)
    if not faults:
        reasons = "no field of it counts them"

    raise ValueError(
        f"{type(model).__name__} cannot be cut to {len(kept)} of its {stack.num_layers} layers by its config: "
        f"{reasons}. `layer_logits` needs no shorter model."
    )


def _numbers(kept: list[int]) -> str:
    """The kept layers in an error: the last one, if they are the first layers; else all."""
    if kept == list(range(1, len(kept) + 1)):
        return f" {kept[-1]}"
    return f"s {', '.join(map(str, kept))}"


def _shorter_configs(
    config: PreTrainedConfig, num_layers: int, kept: list[int]
) -> Iterator[tuple[str, PreTrainedConfig]]:
    """(field, copy of the config for the `kept` layers), for each field that may be the count of all layers."""
    for field, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            for inner, shorter in _shorter_configs(value, num_layers, kept):
                cut = copy.deepcopy(config)
                setattr(cut, field, shorter)
                yield f"{field}.{inner}", cut
        elif type(value) is int and value == num_layers and _is_about_layers(field):
            # At last also lists whose names have nothing to do with layers.
            for of_all in (False, True):
                yield field, _cut_config(config, field, num_layers, kept, of_all)


def _cut_config(
    config: PreTrainedConfig, field: str, num_layers: int, kept: list[int], of_all: bool
) -> PreTrainedConfig:
    """A copy of `config` for the `kept` layers: `field` has their number, and lists with one entry per layer have
    their entries. Lists whose name has nothing to do with layers are cut only with `of_all`."""
    cut = copy.deepcopy(config)
    for name, entries in vars(config).items():
        is_list = isinstance(entries, list | tuple) and len(entries) == num_layers
        if is_list and (of_all or _is_about_layers(name)):
            setattr(cut, name, type(entries)(entries[layer - 1] for layer in kept))

    setattr(cut, field, len(kept))
    stages = vars(config).get("stage_names")  # a backbone's: the stem and the layers
    if stages:
        cut.stage_names = stages[: len(kept) + 1]
        cut.set_output_features_output_indices(out_features=None, out_indices=None)

    return cut


def _is_about_layers(name: str) -> bool:
    """Whether a config field has to do with layers."""
    return any(word in name for word in ("layer", "depth", "block"))


def _rebuild(
    model: PreTrainedModel, config: PreTrainedConfig, stack: LayerStack, kept: list[int]
) -> PreTrainedModel:
    """A model with `config` and copies of the weights of `model`; its j-th layer is the j-th of `kept`."""
    with random_state.preserved(random_state.accelerators(model)):
        short = type(model)(config).to(model.device).eval()

    sources = _sources(model, stack, kept)

    def source(name: str) -> str:
        for own, other in sources.items():
            if name.startswith(own):
                return other + name.removeprefix(own)
        return name

    weights = model.state_dict()
    state = {name: weights[source(name)].clone() for name in short.state_dict()}
    short.load_state_dict(state, assign=True)
    short.tie_weights()
    buffers = dict(model.named_buffers())  # buffers that no state holds may have been cast
    for name, buffer in short.named_buffers():
        known = buffers.get(source(name))
        if known is not None and known.shape == buffer.shape:
            buffer.data = known.clone()

    if model.can_generate():
        short.generation_config = copy.deepcopy(model.generation_config)

    return short


def _sources(model: nn.Module, stack: LayerStack, kept: list[int]) -> dict[str, str]:
    """Prefix of weights in the shorter model -> their prefix in the model, for layers that have moved."""
    names = {id(module): name for name, module in model.named_modules()}
    if len(stack.layers) != stack.num_layers:
        return {}  # one module, which runs fewer times
    prefixes = [f"{names[id(layer)]}." for layer in stack.layers]
    pairs = zip(prefixes, (prefixes[layer - 1] for layer in kept))
    return {own: other for own, other in pairs if own != other}
