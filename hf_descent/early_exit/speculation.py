"""Self-speculative decoding: a language model that drafts with its own first layers, and at which exit layer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from ..evaluation.scoring import Result, format_table
from ..readout.replay import evaluating, layer_logits, probing
from .profile import turns
from .truncation import check_merged


DRAFT = 5  # tokens per draft in the estimate by which layers are chosen for timing
# What is kept of a model's generation config: where texts end, and how long drafts are.
GREEDY = ("eos_token_id", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


@dataclass
class SpeculationProfile(Result):
    """Greedy generation with every exit layer of an L-layer language model; layer l at index l-1.

    Attributes:
        acceptance (float64 `[L - 1]`): share of the model's own greedy tokens that the exit predicts from the same
            prefix: the rate at which its drafted tokens are accepted.
        tokens_per_second (float64 `[L - 1]`): of self-speculative decoding; NaN where it was not timed.
        greedy_tokens_per_second (`float`): of the whole model.
        equal (float64 `[L - 1]`): share of the prompts whose self-speculative output is exactly the greedy one; below
            1 only by rounding.
    """

    acceptance: np.ndarray
    tokens_per_second: np.ndarray
    greedy_tokens_per_second: float
    equal: np.ndarray

    @property
    def best(self) -> int | None:
        """The fastest exit layer, to pass as `assistant_early_exit`; `None` (plain decoding) where none is faster."""
        if not np.nanmax(self.tokens_per_second, initial=0.0) > self.greedy_tokens_per_second:
            return None
        return int(np.nanargmax(self.tokens_per_second)) + 1

    def __str__(self) -> str:
        speedups = self.tokens_per_second / self.greedy_tokens_per_second
        rows = [["exit", "acceptance", "tokens/s", "speed-up", "equal"]]
        for layer, (accepted, speed, speedup, equal) in enumerate(
            zip(self.acceptance, self.tokens_per_second, speedups, self.equal), start=1
        ):
            rows.append([f"{layer}", f"{accepted:.1%}", f"{speed:.4g}", f"{speedup:.2f}x", f"{equal:.0%}"])
        rows.append(["none", "", f"{self.greedy_tokens_per_second:.4g}", "", ""])
        best = f"best: assistant_early_exit={self.best}" + ("" if self.best else " (plain decoding is fastest)")
        return f"{format_table(rows)}\n{best}"


def speculation_profile(
    model: nn.Module,
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int = 64,
    max_timed: int = 4,
    repeats: int = 3,
) -> SpeculationProfile:
    """Acceptance of every exit layer, and tokens per second of the most promising ones, over the same prompts.

    The `max_timed` layers with the highest expected speed (Leviathan et al. 2023, theorem 3.8, a layer costs its share
    of the depth) are timed, in turns with plain greedy decoding. The model's generation config does not count.

    Args:
        model (`nn.Module`): a causal language model of transformers, on its device.
        prompts (sequence of `torch.Tensor`): token ids, `[1, seq]` each: assisted generation takes one at a time.
        max_new_tokens (`int`): tokens generated for each.
        max_timed (`int`), repeats (`int`): exit layers that are timed, and timings of each.

    TypeError for a `PeftModel`; ValueError as [`check_self_speculation`], for no prompts, or a number below 1.
    """
    if not prompts or min(max_new_tokens, max_timed, repeats) < 1:
        raise ValueError(f"{len(prompts)} `prompts`; give some, and `max_new_tokens`, `max_timed`, `repeats` >= 1.")
    check_merged(model)  # a wrapper puts its generation config into the model for good
    check_self_speculation(model, prompts[0])
    with evaluating(model) as device, _greedily(model):
        prompts = [prompt.to(device) for prompt in prompts]
        greedy = _generate(model, prompts, max_new_tokens)
        acceptance = _acceptance(model, prompts, greedy)  # [layers - 1]
        num_layers = len(acceptance) + 1
        cost = np.arange(1, num_layers) / num_layers
        tokens = (acceptance[:, None] ** np.arange(DRAFT + 1)).sum(1)  # per draft, also where all are accepted
        expected = tokens / (1 + DRAFT * cost)
        ratios, equal = (np.full(num_layers - 1, np.nan) for _ in range(2))
        whole = []
        for index in np.argsort(-expected, kind="stable")[:max_timed]:
            calls = [
                partial(_generate, model, prompts, max_new_tokens, assistant_early_exit=int(index) + 1),
                partial(_generate, model, prompts, max_new_tokens),
            ]
            outputs = calls[0]()
            equal[index] = np.mean([torch.equal(mine, own) for mine, own in zip(outputs, greedy)])
            seconds = np.median(turns(calls, repeats, device), axis=1)  # [2]
            counts = [_new_tokens(prompts, generated) for generated in (outputs, greedy)]
            drafted, plain = np.array(counts) / seconds
            ratios[index] = drafted / plain  # in the same turns; the level is the median of all turns
            whole.append(plain)
        level = float(np.median(whole))
    return SpeculationProfile(acceptance, ratios * level, level, equal)


def check_self_speculation(model: nn.Module, prompt: torch.Tensor) -> None:
    """Check that transformers' `assistant_early_exit` drafts with this model's own layer readouts.

    While drafting it lowers `config.num_hidden_layers` of the base model. Llama and its kin then stop there; others
    fail or ignore it. `prompt` are token ids `[1, seq]`. ValueError where the model does not stop at a layer, or does
    so without its final norm; or has a single layer.
    """
    name = type(model).__name__
    config = getattr(getattr(model, getattr(model, "base_model_prefix", ""), None), "config", None)
    if not hasattr(config, "num_hidden_layers") or not getattr(model, "can_generate", lambda: False)():
        raise ValueError(f"{name} cannot draft with its own layers: it is no language model that generates.")
    inputs = {"input_ids": prompt.to(next(model.parameters()).device)}
    with probing(model):
        truth = layer_logits(model, inputs)
        if len(truth) == 1:
            raise ValueError(f"{name} has a single layer, and so none to draft with.")
        whole = config.num_hidden_layers
        try:
            for layer in range(1, len(truth)):
                config.num_hidden_layers = layer
                if not torch.allclose(model(**inputs).logits, truth[layer - 1], rtol=1e-3, atol=1e-3):
                    raise ValueError("its logits are not those of that layer")
        except Exception as error:
            raise ValueError(
                f"{name} cannot draft with its first {layer} layers (`assistant_early_exit`): {error!r}. Use "
                "`truncate` for a separate draft model (`assistant_model`)."
            ) from error
        finally:
            config.num_hidden_layers = whole


def _acceptance(model, prompts, greedy) -> np.ndarray:
    hits, count = 0, 0
    for prompt, output in zip(prompts, greedy):
        start = prompt.shape[1] - 1
        layers = torch.stack([logits[0, start:-1].argmax(-1) for logits in layer_logits(model, {"input_ids": output})])
        hits = hits + (layers[:-1] == output[0, start + 1 :]).sum(1)  # [layers - 1]
        count += output.shape[1] - prompt.shape[1]
    return (hits / count).double().cpu().numpy()


@contextmanager
def _greedily(model) -> Iterator[None]:
    """Without sampling, beams and penalties, and with the cache that drafts need."""
    own = model.generation_config
    kept = {name: getattr(own, name) for name in GREEDY}
    model.generation_config = GenerationConfig(pad_token_id=own.pad_token_id or 0, **kept)
    try:
        yield
    finally:
        model.generation_config = own


def _generate(model, prompts, max_new_tokens, **kwargs) -> list[torch.Tensor]:
    kwargs["max_new_tokens"] = max_new_tokens
    return [model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs) for prompt in prompts]


def _new_tokens(prompts, outputs) -> int:
    return sum(output.shape[1] - prompt.shape[1] for prompt, output in zip(prompts, outputs))
