"""Drafts by each exit layer of a language model, measured: how many are accepted, and the speed of decoding."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ..evaluation.scoring import Result, format_table
from ..readout.replay import Readout, evaluating
from .drafting import MAX_DRAFT, check_drafts, costs, draft_with, token_ids
from .timing import turns


TIMED_LAYERS = 4


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
        if not np.nanmax(self.speedups, initial=0.0) > 1:
            return None
        return int(np.nanargmax(self.speedups)) + 1

    def __str__(self) -> str:
        rows = [["exit", "acceptance", "tokens/s", "speed-up", "equal"]]
        columns = (self.acceptance, self.tokens_per_second, self.speedups, self.equal)
        for layer, (accepted, speed, speedup, equal) in enumerate(zip(*columns), start=1):
            rows.append(
                [f"{layer}", f"{accepted:.1%}", f"{speed:.4g}", f"{speedup:.2f}x", f"{equal:.0%}"]
            )
        rows.append(["none", "", f"{self.greedy_tokens_per_second:.4g}", "", ""])

        best = f"custom_generate={self._decoding()}" if self.best else "plain decoding"
        shortlist = f"; shortlist: {len(self.shortlist):,} tokens" if self.shortlist else ""
        return f"{format_table(rows)}\nbest: {best}{shortlist}"

    def _decoding(self) -> str:
        """The call that makes the best decoding."""
        arguments = [f"{self.best}"]
        if self.shortlist:
            arguments.append("shortlist")
        if self.length < MAX_DRAFT:
            arguments.append(f"length={self.length}")
        return f"draft_with({', '.join(arguments)})"


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
    _check_arguments(model, prompts, repeats)
    shortlists = _shortlists(shortlist, model.get_output_embeddings())
    own = model.generation_config  # which may sample, search, punish repetition
    plain = GenerationConfig(pad_token_id=own.pad_token_id or 0, eos_token_id=own.eos_token_id)
    with evaluating(model) as device, mock.patch.object(model, "generation_config", plain):
        prompts = [prompt.to(device) for prompt in prompts]
        reader = Readout.probe(model, {"input_ids": prompts[0][:, -8:]})
        if reader.num_layers > 1:
            check_drafts(model, prompts[0])

        def generate(**kwargs) -> list[torch.Tensor]:
            kwargs["max_new_tokens"] = max_new_tokens
            return [
                model.generate(prompt, attention_mask=torch.ones_like(prompt), **kwargs)
                for prompt in prompts
            ]

        greedy = generate()
        drafts = _by_count(model, reader, prompts, greedy, shortlists)
        ways = _promising_ways(drafts.gains)
        decoders = [
            draft_with(index + 1, shortlists[row], length=drafts.lengths[row, index])
            for row, index in ways
        ]
        calls = [generate, *(partial(generate, custom_generate=decoder) for decoder in decoders)]
        texts = [greedy, *(call() for call in calls[1:])]
        seconds = turns(calls, repeats, device, progress)  # [1 + ways]

    prompt_tokens = sum(prompt.numel() for prompt in prompts)
    tokens = [sum(text.numel() for text in way) - prompt_tokens for way in texts]
    greedy_speed, *drafted_speeds = tokens / seconds
    speeds = np.full(drafts.gains.shape, np.nan)  # [lists, layers - 1]
    equal = np.full(drafts.gains.shape, np.nan)
    for way, speed, drafted in zip(ways, drafted_speeds, texts[1:]):
        speeds[way] = speed
        equal[way] = np.mean(list(map(torch.equal, drafted, greedy)))

    # The list with the fastest way; the first list, of all tokens, where none is faster than plain decoding.
    best = np.nanmax(speeds, axis=1, initial=greedy_speed).argmax()
    profile = SpeculationProfile(
        acceptance=drafts.acceptance[best],
        tokens_per_second=speeds[best],
        greedy_tokens_per_second=float(greedy_speed),
        equal=equal[best],
        shortlist=shortlists[best],
    )
    if profile.best is None:
        return profile
    return replace(profile, length=int(drafts.lengths[best, profile.best - 1]))


def _check_arguments(model: nn.Module, prompts: Sequence[torch.Tensor], repeats: int) -> None:
    is_model = isinstance(model, PreTrainedModel)
    if not is_model or not model.can_generate() or model.config.is_encoder_decoder:
        raise ValueError(
            f"`model` is a {type(model).__name__}; give a decoder (PEFT: `merge_and_unload()`)."
        )
    shapes = [tuple(prompt.shape) for prompt in prompts]
    are_texts = all(len(shape) == 2 and shape[0] == 1 <= shape[1] for shape in shapes)
    if not shapes or not are_texts:
        found = f"of shapes {shapes}" if shapes else "empty"
        raise ValueError(f"`prompts` is {found}; give token ids, [1, seq] each.")
    if repeats < 1:
        raise ValueError(f"`repeats` is {repeats}; give the number of timings, at least 1.")


def _shortlists(
    shortlist: Sequence[int] | Counter | None, head: nn.Linear
) -> list[list[int] | None]:
    """The lists that drafts may choose from: first `None`, all tokens."""
    if shortlist is None:
        return [None]
    if not isinstance(shortlist, Counter):
        return [None, token_ids(shortlist, head).tolist()]
    frequent = [token for token, _ in shortlist.most_common()]
    # Tokens of no text come last, by their ids: rare ones often have high ones.
    others = [token for token in range(len(head.weight)) if token not in shortlist]
    ranked = token_ids([*frequent, *others], head).tolist()
    powers = range((len(ranked) - 1).bit_length())
    return [None, *(ranked[: 2**power] for power in powers)]


@dataclass
class _Drafts:
    """What drafts from each list of tokens at each exit are worth by count, `[lists, layers - 1]` each."""

    acceptance: np.ndarray  # share of the tokens of the text that the drafts are
    lengths: np.ndarray  # the number of drafts in a round that is best
    gains: np.ndarray  # tokens that it gives for the weights that are read, plain decoding being 1


def _by_count(
    model: PreTrainedModel,
    reader: Readout,
    prompts: Sequence[torch.Tensor],
    texts: Sequence[torch.Tensor],
    shortlists: Sequence[list[int] | None],
) -> _Drafts:
    """What drafts from each of the `shortlists` are worth at each exit, by the tokens of `texts` after the prompts."""
    head = model.get_output_embeddings()
    # Sorted, so that ties go by id.
    lists = [
        range(len(head.weight)) if shortlist is None else sorted(shortlist)
        for shortlist in shortlists
    ]
    choices = [torch.tensor(tokens, device=model.device) for tokens in lists]
    hits = [
        _hits(model, reader, text, text[0, prompt.shape[1] :], choices)
        for prompt, text in zip(prompts, texts)
    ]
    shares = torch.cat(hits, dim=-1)[:-1].double().mean(-1)  # [layers - 1, lists]
    acceptance = shares.T.cpu().numpy()

    # [lists, 1, 1], [1, layers - 1, 1] and [1, 1, drafts]
    sizes, layers, n = np.ix_(
        [len(tokens) for tokens in lists],
        range(1, reader.num_layers),
        range(1, MAX_DRAFT + 1),
    )
    draft, verify = costs(reader.stack, head, layers, sizes)
    tokens = (acceptance[..., None] ** (n - 1)).cumsum(-1)  # [lists, layers - 1, drafts]
    gains = tokens / (n * draft + verify)
    of_several = gains[..., 1:]  # one draft alone spares nothing
    return _Drafts(acceptance, of_several.argmax(-1) + 2, of_several.max(-1))


def _hits(
    model: PreTrainedModel,
    reader: Readout,
    text: torch.Tensor,
    answer: torch.Tensor,
    choices: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Whether each layer, choosing among each of the `choices`, gives each token of the `answer` that ends a `text`;
    bool `[layers, lists, tokens]`."""
    inputs = {"input_ids": text}
    if model._supports_logits_to_keep():
        inputs["logits_to_keep"] = len(answer) + 1

    def score(outputs) -> torch.Tensor:
        logits = outputs.logits[0, -len(answer) - 1 : -1].to(model.device)  # [tokens, vocab]
        chosen = [tokens[logits[:, tokens].argmax(-1)] for tokens in choices]
        return torch.stack([tokens == answer for tokens in chosen])  # [lists, tokens]

    return torch.stack(reader.layer_scores(inputs, score))


def _promising_ways(gains: np.ndarray) -> list[tuple[int, int]]:
    """The (list, exit) pairs to time: of all tokens, and of the shortlist that gives most at its best exit, the exits
    where these two give most. `gains` is `[lists, layers - 1]`, the first list that of all tokens."""
    lists = [0]
    if len(gains) > 1:
        of_shortlists = gains[1:].max(1, initial=0)
        lists.append(1 + np.argsort(of_shortlists)[-1])
    exits = np.argsort(-gains[lists].max(0), kind="stable")[:TIMED_LAYERS]
    return [(row, index) for row in lists for index in exits]
