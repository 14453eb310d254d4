"""What each exit layer of a model is worth, measured: metric and latency; of a language model, drafts and speed."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.utils import find_batch_size
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import GenerationConfig, PreTrainedModel

from ..constraints.problem import AT_CHANCE
from ..evaluation import layer_profile
from ..evaluation.scoring import Evaluation, Result, format_table, greater_is_better
from ..logs import progress_bar
from ..readout.replay import Readout, evaluating
from .drafting import MAX_DRAFT, check_drafts, costs, draft_with, token_ids
from .partial import PartialForward


TIMED_BATCHES = 4
TIMED_LAYERS = 4


@dataclass
class ExitProfile(Result):
    """Metric, loss and latency of a model that stops after each of its L layers; layer l at index l-1.

    Attributes:
        metric (`str`), greater_is_better (`bool`): name of the metric, and whether more of it is better.
        values, losses (float64 `[L]`): the metric and the task loss on held-out data.
        seconds (float64 `[L]`): wall-clock seconds per sample.
        batch_size (`int`), device (`str`): samples per batch, and where it was measured.
        chance (`float`, *optional*): the least loss of a constant prediction of these labels, where it is known.
    """

    metric: str
    values: np.ndarray
    losses: np.ndarray
    seconds: np.ndarray
    batch_size: int
    device: str = "cpu"
    greater_is_better: bool = True
    chance: float | None = None

    @property
    def speedups(self) -> np.ndarray:
        """Latency of the whole model over that of each exit, `[L]`."""
        return self.seconds[-1] / self.seconds

    def cheapest(self, share: float = 0.99) -> int:
        """The first layer with at least `share` of the last's metric (at most 1 / `share`, where less is better) whose
        loss is not that of chance, give or take 2 %."""
        last = self.values[-1]
        enough = (
            self.values >= share * last if self.greater_is_better else share * self.values <= last
        )
        enough &= self.losses < (AT_CHANCE * self.chance if self.chance else np.inf)
        return int(np.argmax([*enough[:-1], True])) + 1

    def __str__(self) -> str:
        rows = [["layer", self.metric, "loss", "ms/sample", "speed-up"]]
        columns = (self.values, self.losses, self.seconds, self.speedups)
        for layer, (value, loss, seconds, speedup) in enumerate(zip(*columns), start=1):
            rows.append(
                [
                    f"{layer}",
                    f"{value:.5g}",
                    f"{loss:.5g}",
                    f"{1e3 * seconds:.4g}",
                    f"{speedup:.2f}x",
                ]
            )
        table, layer = format_table(rows), self.cheapest()
        passed = (
            ", passing over layers at chance"
            if replace(self, chance=None).cheapest() < layer
            else ""
        )
        return (
            f"{table}\n99 % of the last layer's {self.metric} from layer {layer} of {len(self.values)} on{passed}, "
            f"{self.speedups[layer - 1]:.2f} times as fast (batches of {self.batch_size} on {self.device})"
        )


def exit_profile(
    model: nn.Module, dataset: Dataset | DataLoader, *, repeats: int = 3, **settings
) -> ExitProfile:
    """Metric of every exit on all of `dataset`, and its latency on the first batches, the exits timed in turns.

    Args:
        model (`nn.Module`): a model with a shared readout, on its device.
        dataset (`Dataset` or `DataLoader`): labelled held-out data.
        repeats (`int`): timings of each exit.
        settings: `metric`, `batch_size`, `processing_class` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError as of [`layer_profile`], or for `repeats` below 1.
    """
    profile = layer_profile(model, dataset, **settings)
    evaluation = Evaluation(model, dataset, **settings | {"progress": False})
    batches = [dict(batch) for _, batch in islice(evaluation.batches(), TIMED_BATCHES)]
    forward = PartialForward(model, Readout.probe(model, batches[0]).stack)
    with evaluating(model) as device, forward.attached():
        exits = range(1, len(profile.losses) + 1)
        calls = [
            lambda layer=layer: [forward(1, layer, **batch) for batch in batches] for layer in exits
        ]
        seconds = turns(calls, repeats, device, settings.get("progress", False))  # [layers]
    seconds /= sum(find_batch_size(batch) for batch in batches)
    facts = (
        find_batch_size(batches[0]),
        str(device),
        greater_is_better(settings.get("metric", "accuracy")),
    )
    return ExitProfile(
        profile.metric, profile.values, profile.losses, seconds, *facts, profile.chance
    )


@dataclass
class SpeculationProfile(Result):
    """Greedy generation with every exit layer of an L-layer language model; layer l at index l-1.

    Attributes:
        acceptance (float64 `[L - 1]`): share of the model's own greedy tokens that drafts of the exit are.
        tokens_per_second (float64 `[L - 1]`): of self-speculative decoding; NaN where it was not timed.
        greedy_tokens_per_second (`float`): of the whole model.
        equal (float64 `[L - 1]`): share of the prompts whose drafted text is the greedy one; below 1 by rounding.
        shortlist (`list[int]`, *optional*): the tokens that drafts chose from, where that was faster.
        length (`int`): drafts in a round of the fastest exit, at most.
    """

    acceptance: np.ndarray
    tokens_per_second: np.ndarray
    greedy_tokens_per_second: float
    equal: np.ndarray
    shortlist: list[int] | None = None
    length: int = MAX_DRAFT

    @property
    def speedups(self) -> np.ndarray:
        """Tokens per second over those of plain decoding, `[L - 1]`."""
        return self.tokens_per_second / self.greedy_tokens_per_second

    @property
    def best(self) -> int | None:
        """The fastest exit layer, for [`draft_with`]; `None` (plain decoding) where none is faster."""
        return (
            int(np.nanargmax(self.speedups)) + 1
            if np.nanmax(self.speedups, initial=0.0) > 1
            else None
        )

    def __str__(self) -> str:
        rows = [["exit", "acceptance", "tokens/s", "speed-up", "equal"]]
        columns = (self.acceptance, self.tokens_per_second, self.speedups, self.equal)
        for layer, (accepted, speed, speedup, equal) in enumerate(zip(*columns), start=1):
            rows.append(
                [f"{layer}", f"{accepted:.1%}", f"{speed:.4g}", f"{speedup:.2f}x", f"{equal:.0%}"]
            )
        rows.append(["none", "", f"{self.greedy_tokens_per_second:.4g}", "", ""])
        short, capped = len(self.shortlist or ()), self.length < MAX_DRAFT
        chosen = f"{self.best}" + ", shortlist" * bool(short) + f", length={self.length}" * capped
        best = f"custom_generate=draft_with({chosen})" if self.best else "plain decoding"
        return f"{format_table(rows)}\nbest: {best}" + f"; shortlist: {short:,} tokens" * bool(
            short
        )


def speculation_profile(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    *,
    max_new_tokens: int = 64,
    repeats: int = 3,
    shortlist: Sequence[int] | Counter | None = None,
    progress: bool = False,
) -> SpeculationProfile:
    """Acceptance of every exit layer, and tokens per second of the most promising ones, over the same prompts.

    By count, n drafts give 1 + a + ... + a^(n - 1) tokens at acceptance a. The 4 layers with most per weight read, at
    their best n, are timed in turns with greedy decoding. The model's generation config does not count.

    Args:
        model (`PreTrainedModel`): a causal language model, on its device.
        prompts (sequence of `torch.Tensor`): token ids, `[1, seq]` each, continued one at a time.
        max_new_tokens (`int`): tokens generated for each.
        repeats (`int`): timings of each layer.
        shortlist: as of [`draft_with`], or a `Counter` of tokens in other texts, of which the first 1, 2, 4, ... are
            taken that are best by count; drafts are timed without and with it, and the way with the fastest is kept.
        progress (`bool`): show progress bars.

    ValueError as of [`draft_with`]; for no decoder, other or no prompts, or `repeats` below 1.
    """
    if (
        not isinstance(model, PreTrainedModel)
        or not model.can_generate()
        or model.config.is_encoder_decoder
    ):
        raise ValueError(
            f"`model` is a {type(model).__name__}; give a decoder (PEFT: `merge_and_unload()`)."
        )
    sizes = [tuple(prompt.shape) for prompt in prompts]
    if not sizes or not all(len(shape) == 2 and shape[0] == 1 <= shape[1] for shape in sizes):
        raise ValueError(
            f"`prompts` is {f'of shapes {sizes}' if sizes else 'empty'}; give token ids, [1, seq] each."
        )
    if repeats < 1:
        raise ValueError(f"`repeats` is {repeats}; give the number of timings, at least 1.")
    shortlists = _shortlists(shortlist, model.get_output_embeddings())
    own = model.generation_config  # which may sample, search, punish repetition
    plain = GenerationConfig(pad_token_id=own.pad_token_id or 0, eos_token_id=own.eos_token_id)
    with evaluating(model) as device, mock.patch.object(model, "generation_config", plain):
        prompts = [prompt.to(device) for prompt in prompts]
        reader = Readout.probe(model, {"input_ids": prompts[0][:, -8:]})
        if reader.num_layers > 1:
            check_drafts(model, prompts[0])

        def generate(**kwargs):
            kwargs["max_new_tokens"] = max_new_tokens
            return [
                model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
                for prompt in prompts
            ]

        greedy = generate()
        acceptance, lengths, gains = _by_count(
            model, reader, prompts, greedy, shortlists
        )  # [lists, layers - 1] each
        # Timed are all tokens and the shortlist that gives most at its best exit, at the exits where these give most.
        kept = [0, *(1 + np.argsort(gains[1:].max(1, initial=0))[-1:])]
        exits = np.argsort(-gains[kept].max(0), kind="stable")[:TIMED_LAYERS]
        ways = [(row, index) for row in kept for index in exits]
        decoders = [
            draft_with(index + 1, shortlists[row], length=lengths[row, index])
            for row, index in ways
        ]
        calls = [generate, *(partial(generate, custom_generate=decoder) for decoder in decoders)]
        texts = [greedy, *(call() for call in calls[1:])]
        seconds = turns(calls, repeats, device, progress)  # [1 + ways]
    tokens = [sum(map(torch.numel, each)) - sum(map(torch.numel, prompts)) for each in texts]
    greedy_speed, *drafted_speeds = tokens / seconds
    speeds, equal = np.full((2, *gains.shape), np.nan)
    for way, speed, drafted in zip(ways, drafted_speeds, texts[1:]):
        speeds[way], equal[way] = speed, np.mean(list(map(torch.equal, drafted, greedy)))
    best = np.nanmax(
        speeds, axis=1, initial=greedy_speed
    ).argmax()  # the first list where none is faster
    profile = SpeculationProfile(
        acceptance[best], speeds[best], float(greedy_speed), equal[best], shortlists[best]
    )
    return (
        replace(profile, length=int(lengths[best, profile.best - 1])) if profile.best else profile
    )


def _shortlists(shortlist, head) -> list[list[int] | None]:
    """The lists that drafts may choose from: first `None`, all tokens."""
    if shortlist is None:
        return [None]
    if not isinstance(shortlist, Counter):
        return [None, token_ids(shortlist, head).tolist()]
    # Tokens of no text come last, by their ids: rare ones often have high ones.
    others = (token for token in range(len(head.weight)) if token not in shortlist)
    ranked = token_ids([*dict(shortlist.most_common()), *others], head).tolist()
    return [None, *(ranked[: 2**power] for power in range((len(ranked) - 1).bit_length()))]


def _by_count(model, reader, prompts, texts, shortlists):
    """Of drafts from each list of tokens at each exit, `[lists, layers - 1]`: acceptance, the number in a round that
    is best, and what it gives: tokens for the weights that are read, plain decoding being 1."""
    head = model.get_output_embeddings()
    lists = [
        range(len(head.weight)) if each is None else sorted(each) for each in shortlists
    ]  # sorted: ties go by id
    choices, hits = [torch.tensor(each, device=model.device) for each in lists], []
    for prompt, text in zip(prompts, texts):
        answer = text[0, prompt.shape[1] :]
        kept = {"logits_to_keep": len(answer) + 1} if model._supports_logits_to_keep() else {}

        def score(outputs, answer=answer):
            logits = outputs.logits[0, -len(answer) - 1 : -1].to(model.device)  # [tokens, vocab]
            return torch.stack([each[logits[:, each].argmax(-1)] == answer for each in choices])

        hits.append(
            torch.stack(reader.read({"input_ids": text, **kept}, score))
        )  # [layers, lists, tokens]
    acceptance = torch.cat(hits, dim=-1)[:-1].double().mean(-1).T.cpu().numpy()
    sizes, layers, n = np.ix_(
        list(map(len, lists)), range(1, reader.num_layers), range(1, MAX_DRAFT + 1)
    )
    draft, verify = costs(reader.stack, head, layers, sizes)
    gains = (acceptance[..., None] ** (n - 1)).cumsum(-1) / (
        n * draft + verify
    )  # [lists, layers - 1, drafts]
    return (
        acceptance,
        gains[..., 1:].argmax(-1) + 2,
        gains[..., 1:].max(-1),
    )  # one draft alone spares nothing


def turns(
    calls: list[Callable[[], Any]], repeats: int, device: torch.device, progress: bool
) -> np.ndarray:
    """Median wall-clock seconds of each of `calls`, timed one after the other in each round, `[calls]`; ValueError
    where `repeats` is below 1. One more round comes first, to warm up."""
    if repeats < 1:
        raise ValueError(f"`repeats` is {repeats}; give the number of timings, at least 1.")
    seconds = np.empty((len(calls), repeats + 1))
    order = [*np.ndindex(repeats + 1, len(calls))]
    for repeat, index in progress_bar(order, progress, desc="Timing"):
        start = time.perf_counter()
        calls[index]()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds[index, repeat] = time.perf_counter() - start
    return np.median(seconds[:, 1:], axis=1)
