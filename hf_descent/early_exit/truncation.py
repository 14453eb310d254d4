"""A model's first layers as a model of its own: an ordinary checkpoint, exact, that plain `from_pretrained` loads."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..readout import random_state
from ..readout.replay import Readout, output_logits, probing


def truncate(
    model: PreTrainedModel, num_layers: int, inputs: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """A standalone copy of `model` that stops after layer `num_layers`, under the same head.

    Its config says so (lists with one entry per layer are cut, too): it is saved and loaded like any other checkpoint.
    Its logits are checked to be those of the model's own readout at that layer.

    Args:
        model (`PreTrainedModel`): on any device, in any mode; it is left as it was. Merge a PEFT model first.
        num_layers (`int`): layers to keep, 1..L.
        inputs (`dict`, *optional*): a batch for `model(**inputs)`; made up of images or tokens, none of them an eos.

    TypeError where `model` is no `PreTrainedModel`, has adapters or is offloaded; ValueError where `num_layers` is out
    of range, there is no shared readout, or no config gives exactly the first layers.
    """
    name = type(model).__name__
    is_bare = isinstance(model, PreTrainedModel) and not model._hf_peft_config_loaded
    if not is_bare or any(weight.is_meta for weight in model.parameters()):
        raise TypeError(
            f"`model` is a {name}; give a `PreTrainedModel` in memory (of adapters `merge_and_unload()`)."
        )
    inputs = example_inputs(model) if inputs is None else inputs
    plain = copy.copy(model)  # of the same weights
    if "_original_forward" in vars(
        model
    ):  # the autocast that training in mixed precision leaves, which no cut has
        del plain.forward
    reader = Readout.probe(plain, inputs)
    if num_layers not in range(1, reader.num_layers + 1):
        raise ValueError(f"`num_layers` is {num_layers!r}; {name} has 1..{reader.num_layers}.")
    with probing(plain):
        (truth,) = reader.read(inputs, output_logits, [num_layers])
    faults = []
    for field, config in _shorter_configs(model.config, reader.num_layers, num_layers):
        try:
            type(config).from_dict(config.to_dict())  # must be loadable, too
            short = _rebuild(model, config)
            with probing(short):
                logits = output_logits(short(**inputs))
            if logits.shape == truth.shape and torch.allclose(
                logits, truth, rtol=1e-4, atol=1e-5, equal_nan=True
            ):
                return short.train(model.training)
            faults.append(
                f"with {field} = {num_layers} its logits are not those of layer {num_layers}"
            )
        except Exception as error:
            faults.append(f"with {field} = {num_layers} it fails with {error!r}")
    raise ValueError(
        f"{name} cannot be cut to {num_layers} of its {reader.num_layers} layers by its config: "
        f"{'; '.join(faults) or 'no field of it counts them'}. `layer_logits` needs no shorter model."
    )


def example_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A small batch for `model`: the token ids of its `dummy_inputs`, or images; ValueError where it reads neither."""
    name = model.main_input_name
    vision = getattr(model.config, "encoder_config", model.config)  # which a denoiser has inside
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


def _shorter_configs(config, num_layers, kept) -> Iterator[tuple[str, PreTrainedConfig]]:
    """(field, copy of the config with that count of layers cut), for each field that may be their count."""
    for field, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            for inner, shorter in _shorter_configs(value, num_layers, kept):
                cut = copy.deepcopy(config)
                setattr(cut, field, shorter)
                yield f"{field}.{inner}", cut
        elif type(value) is int and value == num_layers and _is_about_layers(field):
            for of_all in (False, True):  # lists of an entry per layer, whatever they are called
                cut = copy.deepcopy(config)
                for name, entries in vars(config).items():
                    is_list = isinstance(entries, list | tuple) and len(entries) == num_layers
                    if is_list and (of_all or _is_about_layers(name)):
                        setattr(cut, name, entries[:kept])
                setattr(cut, field, kept)
                if stages := vars(config).get(
                    "stage_names"
                ):  # a backbone's: the stem and the layers
                    cut.stage_names = stages[: kept + 1]
                    cut.set_output_features_output_indices(out_features=None, out_indices=None)
                yield field, cut


def _is_about_layers(name: str) -> bool:
    """Whether a config field has to do with layers."""
    return any(word in name for word in ("layer", "depth", "block"))


def _rebuild(model, config) -> PreTrainedModel:
    with random_state.preserved(random_state.accelerators(model)):
        short = type(model)(config).to(model.device).eval()
    given = model.state_dict()
    short.load_state_dict({name: given[name].clone() for name in short.state_dict()}, assign=True)
    short.tie_weights()
    buffers = dict(model.named_buffers())  # those that no state holds may have been cast
    for name, buffer in short.named_buffers():
        if name in buffers and buffers[name].shape == buffer.shape:
            buffer.data = buffers[name].clone()
    if model.can_generate():
        short.generation_config = copy.deepcopy(model.generation_config)
    return short
