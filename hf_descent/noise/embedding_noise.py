"""Gaussian noise on a model's input signal: `e~ = e + gamma * sigma * n` with `n ~ N(0, I)`.

The signal is the token embeddings of text, else the model's main input (images, audio, video). `sigma` is ONE scalar,
the standard deviation of the clean signal, fixed before training and kept with the model as `config.noise_sigma`.

Source: Porras-Valenzuela, Hadou, Ribeiro (2026), arXiv 2601.17257, the local perturbations of its experiments.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..configs import levels_of
from ..readout.stack import embeddings, inner_model, logged
from ..readout.tape import noise_is_disabled


MOMENTS_CHUNK = 2**22  # values that are held in float64 at once
TABLE_CHUNK = 1024  # rows of an embedding table looked up at once


@dataclass
class _Call:
    """One running forward call of a (sub)model."""

    input_ids: torch.Tensor | None
    mask: torch.Tensor | None
    cache: Any  # of keys and values; private embeddings ask for its length
    has_signal: bool
    looked_up: bool = False
    # Of the outermost call alone:
    perturbed: bool = False
    levels: torch.Tensor | None = None  # [batch]


class EmbeddingNoise:
    """Adds Gaussian noise to a model's token embeddings, or to its floating-point main input, within a `with` block.

    In text models (`main_input_name == "input_ids"`) the output of `get_input_embeddings()` is perturbed wherever
    tokens are looked up, in the decoder and in each step of `generate`, too; so are `inputs_embeds`. Padding, as a 2-D
    attention mask `[batch, past + seq]` gives it, stays clean. Without such a mask every position counts as a token.

    The noise is drawn in float32 from its own generator on the tensor's device: one (seed, key, shape) always gives
    the same noise on one kind of device. Nothing is drawn at `gamma=0`, outside the model's own forward, or while the
    shared readout replays a forward pass.

    Args:
        model (`PreTrainedModel`): bare, or wrapped (DDP, FSDP, compile, PEFT).
        gamma (`float` or `(float, float)`): noise level in units of `sigma`, or a range from which each sample of each
            forward call draws its own; may be set while attached.
        seed (`int`, *optional*): of the generator, >= 0. `None`: one is drawn from torch's global generator.
        sigma (`float`, *optional*): standard deviation of the clean signal. `None`: `model.config.noise_sigma`, else,
            for text models, that of the embedding table without padding. [`estimate_sigma`] measures it on data.

    ValueError for a bad gamma, seed or sigma; a model without input embeddings or sigma, or whose layers look tokens
    up in a second table (Gemma 3n, 4); in the forward call for an input that the noise cannot reach.

    Example: `with EmbeddingNoise(model, gamma=1.5, seed=0): model.generate(**inputs)`.
    """

    def __init__(
        self,
        model: nn.Module,
        gamma: float | Sequence[float],
        seed: int | None = None,
        sigma: float | None = None,
    ):
        self._model = inner_model(model)
        self._main_input = getattr(self._model, "main_input_name", "input_ids")
        self._lookups = find_lookups(self._model) if self._main_input == "input_ids" else []
        self.gamma = gamma
        self.sigma = _resolve_sigma(self._model, self._main_input, sigma)
        self.seed = int(torch.randint(2**63 - 1, ())) if seed is None else int(seed)
        self.reseed()
        self._handles: list = []
        self._calls: list[_Call] = []  # innermost last

    @property
    def name(self) -> str:
        """The kind of noise, as results record it; a custom class adds what else it depends on."""
        return "gaussian" if type(self) is EmbeddingNoise else f"gaussian ({type(self).__name__})"

    @property
    def gamma(self) -> float | tuple[float, float]:
        """The noise level, or the range of levels."""
        return self._gamma

    @gamma.setter
    def gamma(self, gamma: float | Sequence[float]):
        levels = levels_of("gamma", gamma)
        is_range = len(levels) in (1, 2)
        if not is_range or not 0.0 <= levels[0] <= levels[-1] < math.inf:
            raise ValueError(
                f"`gamma` is {gamma}; give a finite level >= 0, or a range (low, high) of such levels."
            )
        self._gamma = tuple(levels) if levels[0] < levels[-1] else levels[0]

    def reseed(self, *key: int):
        """Restart the generator from (seed, *key), integers >= 0: with the key (rank, step, micro-step), training
        resumes at any step without a saved generator. Neighbouring keys give unrelated streams."""
        sequence = np.random.SeedSequence(self.seed, spawn_key=key)
        self._stream = int(sequence.generate_state(1, np.uint64)[0])
        self._generator = None  # made on the device of the first tensor

    def at(self, gamma: float, *key: int) -> "EmbeddingNoise":
        """A copy at the noise level `gamma`, not attached, and reseeded with `key`."""
        noise = copy(self)
        noise.gamma = gamma
        noise._handles = []
        noise._calls = []
        noise.reseed(*key)
        return noise

    @property
    def is_attached(self) -> bool:
        """Whether its hooks are on the model."""
        return bool(self._handles)

    def __enter__(self) -> "EmbeddingNoise":
        if self.is_attached:
            return self
        # On every (sub)model: an encoder and a decoder get their own masks, and `generate` calls an encoder directly.
        models = {module for module in self._model.modules() if isinstance(module, PreTrainedModel)}
        for module in {self._model, *models}:
            enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
            leave = module.register_forward_hook(self._exit, always_call=True)
            self._handles += [enter, leave]
        for lookup in self._lookups:
            self._handles.append(lookup.register_forward_hook(self._perturb_lookup))
        return self

    def __exit__(self, *exc_info):
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def _is_active(self) -> bool:
        return self._gamma != 0.0 and not noise_is_disabled()

    @torch.compiler.disable  # what it looks up in the model cannot be traced
    def _enter(self, module, args, kwargs):
        # The class's forward: wrappers put on instances (autocast, replay) can hide the names.
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        arguments = {**dict(zip(names, args)), **kwargs}
        is_outermost = not self._calls
        self._calls.append(self._call_of(module, arguments))
        if not is_outermost or not self._is_active():
            return None

        noisy = self._noisy_inputs(arguments)
        named = tuple(noisy.pop(name, value) for name, value in zip(names, args))
        return (*named, *args[len(names) :]), {**kwargs, **noisy}

    def _call_of(self, module: nn.Module, arguments: dict[str, Any]) -> _Call:
        """The forward call of `module` with its `arguments`, inside those that are running."""
        ids = arguments.get("input_ids")
        mask = arguments.get("attention_mask")
        if mask is None and ids is not None and self._calls and ids is self._calls[-1].input_ids:
            mask = self._calls[-1].mask  # FNet and RWKV do not pass it on
        cache = arguments.get("cache", arguments.get("past_key_values"))  # its name before 5.24
        return _Call(
            input_ids=ids,
            mask=mask,
            cache=cache,
            has_signal=module is self._model and arguments.get(self._main_input) is not None,
            looked_up=arguments.get("inputs_embeds") is not None,
        )

    def _noisy_inputs(self, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The floating-point inputs of the outermost call that carry the signal, with noise, by name."""
        if self._main_input == "input_ids":
            masks = {
                "inputs_embeds": "attention_mask",
                "decoder_inputs_embeds": "decoder_attention_mask",
            }
        else:
            masks = {self._main_input: "attention_mask"}

        noisy = {}
        for name, mask_name in masks.items():
            signal = arguments.get(name)
            if signal is None:
                continue
            if not signal.is_floating_point():
                raise ValueError(
                    f"`{name}` has dtype {signal.dtype}; noise needs floats: use noise level 0."
                )
            mask = arguments.get(mask_name)
            belongs = torch.is_tensor(mask) and mask.shape == signal.shape[:2]
            if self._main_input != "input_ids" and not belongs:
                mask = None  # it belongs to another input, such as CLIP's text
            noisy[name] = self._perturb(signal, mask, self._calls[0])

        return noisy

    @torch.compiler.disable
    def _exit(self, module, args, output):
        if not self._calls:
            return  # another pre-hook failed before `_enter`
        call = self._calls.pop()
        is_outermost = not self._calls
        missed = call.has_signal and not call.perturbed and output is not None
        if is_outermost and missed and self._is_active():
            raise ValueError(
                f"The noise did not reach the input of {type(module).__name__}: attach it before compiling, override "
                "`get_input_embeddings()` to return the module that looks tokens up, or use noise level 0."
            )

    def _perturb_lookup(self, module, args, output):
        # Only the first lookup of a call counts, and none where embeddings are given: GPT-2 looks `token_type_ids` up
        # in the same table, and a PEFT wrapper of the table calls the table.
        if not self._calls or not self._is_active() or not torch.is_tensor(output):
            return None
        call = self._calls[-1]
        if call.looked_up:
            return None
        call.looked_up = True
        return self._perturb(output, call.mask, self._calls[0])

    def _perturb(self, clean: torch.Tensor, mask: torch.Tensor | None, call: _Call) -> torch.Tensor:
        """`clean` `[batch, seq, ...]` plus noise where `mask` `[batch, past + seq]` is set, in the outer `call`."""
        call.perturbed = True
        if self._generator is None or self._generator.device != clean.device:
            self._generator = torch.Generator(clean.device).manual_seed(self._stream)

        noise = self._standard_noise(clean, self._generator)  # [batch, seq, ...]
        level = self._gamma
        if isinstance(level, tuple):
            level = self._levels_of_rows(call, noise)  # [batch, 1, ...]

        noisy = self._add(clean, noise, level * self.sigma)
        if not _is_mask_of(mask, clean):
            return noisy

        is_token = mask[:, -clean.shape[1] :].to(clean.device, torch.bool)  # [batch, seq]
        is_token = is_token.view(*is_token.shape, *[1] * (clean.ndim - 2))  # [batch, seq, 1, ...]
        return torch.where(is_token, noisy, clean)

    def _levels_of_rows(self, call: _Call, noise: torch.Tensor) -> torch.Tensor:
        """A level for each row of `noise`, `[batch, 1, ...]`: one for the encoder and the decoder of a call."""
        if call.levels is None or len(call.levels) != len(noise):
            low, high = self._gamma
            uniform = torch.rand(len(noise), generator=self._generator, device=noise.device)
            call.levels = low + (high - low) * uniform  # [batch]
        return call.levels.to(noise.device).view(-1, *[1] * (noise.ndim - 1))

    def _standard_noise(self, clean: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Standard normal noise in the shape of `clean`."""
        return torch.randn(
            clean.shape, generator=generator, device=clean.device, dtype=torch.float32
        )

    def _add(
        self, clean: torch.Tensor, noise: torch.Tensor, deviation: float | torch.Tensor
    ) -> torch.Tensor:
        """`clean` plus noise of `deviation`, a float or `[batch, 1, ...]`; same dtype as `clean`."""
        return clean + noise.mul_(deviation).to(clean.dtype)


def _is_mask_of(mask: Any, signal: torch.Tensor) -> bool:
    """Whether `mask` is an attention mask `[batch, past + seq]` of the `signal` `[batch, seq, ...]`."""
    if not torch.is_tensor(mask) or mask.ndim != 2:
        return False
    return len(mask) == len(signal) and mask.shape[1] >= signal.shape[1]


def estimate_sigma(
    model: nn.Module,
    batches: Iterable[dict],
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> float:
    """Standard deviation of what [`EmbeddingNoise`] perturbs in `batches`, dicts of model inputs, for
    `config.noise_sigma`; `reduce` sums over processes. ValueError if a batch lacks that, or it has none."""
    inner = inner_model(model)
    main_input = getattr(inner, "main_input_name", "input_ids")
    moments = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        signal = batch.get(main_input, batch.get("inputs_embeds"))
        if signal is None:
            raise ValueError(
                f"A batch has the keys {sorted(batch)}; sigma is measured on `{main_input}`: add it."
            )
        if not signal.is_floating_point():
            with torch.no_grad():
                signal = _embeddings(model, find_lookups(inner), batch, signal)
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape == signal.shape[: mask.ndim]:
            signal = signal[mask.to(signal.device, torch.bool)]  # [tokens, hidden]
        moments += moments_of(signal)

    if reduce is not None:
        moments = reduce(moments)

    return deviation_from_moments(moments)


def deviation_from_moments(moments: torch.Tensor) -> float:
    """Standard deviation from (count, sum, sum of squares) `[3]`; ValueError if it is not positive and finite."""
    count, total, squares = moments.tolist()
    variance = squares / count - (total / count) ** 2 if count else 0.0
    if not 0.0 < variance < math.inf:
        raise ValueError(
            f"The clean signal has variance {variance} over {count:.0f} values: give `sigma`."
        )
    return math.sqrt(variance)


def moments_of(values: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares of a tensor, float64 `[3]` on the CPU; summed on its device, a part at a time."""
    device = values.device if values.device.type == "cuda" else "cpu"  # some have no float64
    moments = torch.tensor([values.numel(), 0.0, 0.0], dtype=torch.float64)
    for part in values.detach().flatten().split(MOMENTS_CHUNK):
        part = part.to(device, torch.float64)
        moments[1:] += torch.stack([part.sum(), part.square().sum()]).cpu()
    return moments


def _embeddings(
    model: nn.Module, lookups: list[nn.Module], batch: dict, ids: torch.Tensor
) -> torch.Tensor:
    """The embeddings of the tokens `ids` of a batch of `model`, `[batch, seq, hidden]`."""
    weight = next(lookups[0].parameters())
    is_sharded = isinstance(weight, DTensor) or hasattr(weight, "ds_id")
    if not is_sharded:
        return lookups[0](ids.to(weight.device))
    # Only a forward of the whole model gathers parameters that FSDP or ZeRO-3 shards.
    with logged(lookups) as calls:
        model(**batch)
    return calls[0].made[0]


def _resolve_sigma(model: nn.Module, main_input: str, sigma: float | None) -> float:
    if sigma is None:
        sigma = getattr(getattr(model, "config", None), "noise_sigma", None)
    if sigma is not None:
        if not 0.0 < sigma < math.inf:
            raise ValueError(
                f"`sigma` or `config.noise_sigma` is {sigma}; give the signal's deviation, above 0."
            )
        return float(sigma)

    if main_input != "input_ids":
        raise ValueError(
            f"{type(model).__name__} has no `config.noise_sigma`, the standard deviation of its `{main_input}`: pass "
            "`sigma`, or set `model.config.noise_sigma = estimate_sigma(model, batches)`."
        )

    lookup = find_lookups(model)[0]
    table = look_up(lookup, left_out=getattr(lookup, "padding_idx", None))
    return deviation_from_moments(sum(map(moments_of, table)))


def find_lookups(model: nn.Module) -> list[nn.Module]:
    """The modules that look tokens up: `get_input_embeddings()` first, then those that share its table (T5 calls those
    alone); ValueError if there is none, or a second table."""
    lookup = embeddings(model, "input")
    if lookup is None:
        raise ValueError(
            f"{type(model).__name__} has no input embeddings to perturb: define `get_input_embeddings()`, or set "
            "`main_input_name` to the floating-point input to perturb."
        )

    weight = getattr(lookup, "weight", None)
    if _has_second_table(model, weight):
        raise ValueError(
            f"{type(model).__name__} looks its tokens up a second time for its layers or its decoder, past the noise "
            "(or, as XLNet, with the batch last). Use another model, or no noise."
        )

    lookups = [lookup]
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight is weight and module is not lookup:
            lookups.append(module)

    # PEFT's LoRA adds to what the table gives: its wrapper is the lookup.
    wrappers = {
        module.base_layer: module for module in model.modules() if hasattr(module, "base_layer")
    }
    return list(dict.fromkeys(wrappers.get(module, module) for module in lookups))


def _has_second_table(model: nn.Module, weight: torch.Tensor | None) -> bool:
    """Whether tokens are looked up elsewhere than in the table `weight`, or with the batch last."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) == "xlnet":
        return True
    text_config = getattr(config, "text_config", config)
    if getattr(text_config, "hidden_size_per_layer_input", None):
        return True
    if not getattr(config, "is_encoder_decoder", False):
        return False
    decoder_lookup = model.get_decoder().get_input_embeddings()
    return getattr(decoder_lookup, "weight", weight) is not weight


@torch.no_grad()
def look_up(lookup: nn.Module, left_out: int | None = None) -> Iterator[torch.Tensor]:
    """The embeddings `[chunk, hidden]` of all ids but `left_out`, some at a time: whole tables are large."""
    ids = torch.arange(len(lookup.weight), device=lookup.weight.device)  # [vocabulary]
    if left_out is not None:
        ids = ids[ids != left_out]
    yield from map(lookup, ids.split(TABLE_CHUNK))
