"""Self-speculative decoding: the first layers of a language model draft, the others verify and reuse the drafts' work.

In each round the first k layers run on one token after the other and, under the model's own norm and head, draft the
next one. Layers k+1..L then run once on all of these tokens, from the hidden states that layer k gave in drafting, and
choose what the text goes on with. No layer runs twice on a token: keys and values of the first k layers stay cached.
"""

import inspect
import reprlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from threading import get_ident
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ..readout.replay import Readout, probing
from ..readout.stack import errors_explained, intercepted
from ..readout.tape import assigned
from .partial import PartialForward


MAX_DRAFT = 16  # tokens of a round
BINS = 10  # of confidence, for each of which the accepted drafts are counted
INPUTS = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
}
# Options of `generate` that ask for other outputs than texts, or choose tokens in another way.
OTHER = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "dola_layers",
    "penalty_alpha",
    "constraints",
    "force_words_ids",
    "use_mtp",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
)
STATEFUL = ("UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")


def draft_with(
    layer: int,
    shortlist: Sequence[int] | None = None,
    streamer: BaseStreamer | None = None,
    length: int = MAX_DRAFT,
) -> Callable:
    """Decoding that drafts with the first `layer` layers, for `generate`; batches are padded on the left.

    The text is that of the model's own greedy decoding, token for token, or distributed as that of its sampling. Where
    the scores of two tokens are equal up to rounding, more often in half precision, the other one may be chosen.

    A round ends when the next draft is expected to cost more, in weights that it reads, than it saves, by the share of
    drafts of the same confidence that were accepted before. Stopping criteria and logits processors get one text at a
    time, the latter with drafts, too. One thread at a time can draft with a model.

    Args:
        layer (`int`): layers that draft, 1..L-1.
        shortlist (sequence of `int`, *optional*): the only tokens that drafts choose from, such as the 8,000 most
            frequent ones, to read less of a large head. The text may have all tokens.
        streamer (`BaseStreamer`, *optional*): gets the prompt and the tokens of each round, at batch 1. Give it here:
            `generate` hands its own to no other loop, nor `assistant_model`, nor `tokenizer`: in place of
            `stop_strings` give `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`.
        length (`int`): drafts of a round, at most.

    ValueError in `generate` for a bad `layer` or `length`; a model whose layers cannot run apart, or that is sharded
    over processes; a cache that cannot be cropped (sliding windows, recurrent states), is offloaded, or is for several
    texts; beams; positions that change with length; prompt tuning; inputs but tokens, outputs but texts.

    Example: `model.generate(**inputs, custom_generate=draft_with(15))`.
    """
    checked = WeakKeyDictionary()  # model -> stack
    counts = _DraftCounts()  # kept from call to call

    def decode(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        _check_options(model, generation_config, logits_processor, model_kwargs)
        _check_rows(model, input_ids, model_kwargs, streamer)
        vocabulary = len(model.get_output_embeddings().weight)
        example = torch.arange(4, device=input_ids.device)[None] % vocabulary
        reader = Readout.probe(model, {"input_ids": example})
        _check_numbers(model, reader, layer, length)
        halves = _Halves(model, reader.stack, layer, shortlist, length)

        # Before the prompt is written into the caller's own cache.
        own_cache = model_kwargs.get(halves.cache_name)
        if getattr(own_cache, "layers", None):
            _check_cache(model, own_cache, reader.num_layers)
        model_kwargs["use_cache"] = True
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        cache = outputs.get(halves.cache_name)
        _check_cache(model, cache, reader.num_layers)
        if checked.get(model) is not reader.stack:
            _check_halves(model, halves, example)
            checked[model] = reader.stack

        if streamer is not None:
            streamer.put(input_ids.cpu())
        options = logits_processor, stopping_criteria, generation_config, model_kwargs
        decoding = _Decoding(halves, counts, streamer, input_ids, *options)
        with halves.attached(cache), model._optimize_model_for_decode():
            sequences = decoding.run(outputs.logits[:, -1])
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return sequences
        if len(input_ids) > 1:  # rows that stopped have left the cache
            return GenerateDecoderOnlyOutput(sequences)
        return GenerateDecoderOnlyOutput(sequences, **{halves.cache_name: cache})

    return decode


def check_drafts(model, prompt):
    """ValueError where `model`, of two layers at least, cannot draft, before it decodes."""
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=1,
        custom_generate=draft_with(1),
    )


def token_ids(shortlist, head) -> torch.Tensor:
    """`shortlist` on the device of `head`, `[short]`; ValueError where it holds anything but tokens, or none."""
    most = len(head.weight) - 1
    fault = f"`shortlist` is {reprlib.repr(shortlist)}; give ids of tokens, whole numbers"
    with errors_explained(f"{fault}:"):
        ids = torch.as_tensor(shortlist)
    is_list = ids.dtype in (torch.int32, torch.int64) and ids.ndim == 1 and len(ids) > 0
    if not is_list or not 0 <= ids.min() <= ids.max() <= most:
        raise ValueError(f"{fault} in 0..{most}.")
    return ids.to(head.weight.device, torch.int64)


def costs(stack, head, layer, size):
    """The weights read in a draft from `size` tokens and in a verification, as shares of those of plain decoding."""
    weights = sum(weight.numel() for layer in stack.layers for weight in layer.parameters())
    of_layer = weights / len(stack.layers)
    whole = stack.num_layers * of_layer + head.weight.numel()
    drafting = layer * of_layer
    return (drafting + size * head.weight.shape[1]) / whole, 1 - drafting / whole


class _DraftCounts:
    """How many drafts were tried and accepted, by the confidence in them, which stands in for the share at first."""

    def __init__(self):
        self._accepted = (np.arange(BINS) + 0.5) / BINS
        self._tried = np.ones(BINS)

    def add(self, bins: Sequence[np.ndarray], right: np.ndarray) -> None:
        """Count the drafts of a round, whose confidence is in `bins`, `[rows]` each; `right` `[rows]` are accepted."""
        np.add.at(self._tried, bins, 1)
        np.add.at(self._accepted, bins, np.arange(len(bins))[:, None] < right)

    def expected(self, bins: np.ndarray) -> float:
        """The share of drafts accepted with the confidence in `bins` `[rows]`."""
        return (self._accepted / self._tried)[bins].mean()


class _Halves:
    """A model's first layers, which draft one token a row, and the others, which go on from where these stopped."""

    def __init__(self, model, stack, layer, shortlist, length):
        self.forward = PartialForward(model, stack)
        self.layer = layer
        self.num_layers = stack.num_layers
        self.length = length
        self.states = []  # what layer k returned for each of the drafts of a round
        # Before transformers 5.24 it had the other name.
        arguments = inspect.signature(model.forward).parameters
        self.cache_name = "past_key_values"
        if "cache" in arguments:
            self.cache_name = "cache"

        self.head = model.get_output_embeddings()
        self.weight = self.head.weight
        self.bias = getattr(self.head, "bias", None)
        self.short = None
        if shortlist is not None:
            self.short = token_ids(shortlist, self.head)
            self.weight = self.weight[self.short]  # [short, hidden]
            if self.bias is not None:
                self.bias = self.bias[self.short]
        self.draft_cost, self.verify_cost = costs(stack, self.head, layer, len(self.weight))

    @contextmanager
    def attached(self, cache):
        self.cache = cache
        with self.forward.attached(), intercepted([self.head], self._run_head):
            yield

    def draft(self, tokens: torch.Tensor, **inputs) -> torch.Tensor:
        """Logits `[rows, vocab]` of layer k for the token after `tokens` `[rows]`; -inf off the shortlist."""
        logits = self._run(1, self.layer, tokens[:, None], **inputs)[:, -1]
        self.states.append(self.forward.output)
        if self.short is None:
            return logits
        whole = logits.new_full((len(logits), len(self.head.weight)), -torch.inf)
        return whole.index_copy_(1, self.short, logits)

    def verify(self, tokens: torch.Tensor, **inputs) -> torch.Tensor:
        """Logits `[rows, n, vocab]` of the last layer after each of the n `tokens` `[rows, n]` that drafts ran on."""
        state = pytree.tree_map(_joined, *self.states)
        self.states = []
        # Masks are made for the first layer's cache, which has these tokens already.
        own = self.cache.layers
        in_step = [own[self.layer]] * self.layer + own[self.layer :]
        with assigned([(self.cache, "layers")], in_step):
            return self._run(self.layer + 1, self.num_layers, tokens, given=state, **inputs)

    def _run(self, first, last, tokens, **inputs):
        inputs[self.cache_name] = self.cache
        return self.forward(first, last, input_ids=tokens, use_cache=True, **inputs).logits

    def _run_head(self, module, call, hidden):
        is_own_call = self.forward.thread == get_ident()
        if self.short is not None and is_own_call and self.forward.first == 1:
            return F.linear(hidden, self.weight, self.bias)
        return call(hidden)


def _joined(*parts):
    """Hidden states of single tokens as those of all, `[rows, n, hidden]`. Attentions, which some layers return beside
    them, are not read: the first stand for all."""
    if getattr(parts[0], "ndim", 0) == 3:
        return torch.cat(parts, dim=1)
    return parts[0]


class _Decoding:
    """The texts of one call of `generate`. A row that stops leaves the batch; rejected drafts are masked."""

    def __init__(
        self,
        halves,
        counts,
        streamer,
        input_ids,
        logits_processor,
        stopping_criteria,
        config,
        model_kwargs,
    ):
        self.halves = halves
        self.process = logits_processor
        self.stops = stopping_criteria
        self.config = config
        self.streamer = streamer
        self.counts = counts
        self.tokens = self.cost = 1.0  # of a row, so far; at first as of plain decoding

        self.texts = list(input_ids)  # of all rows, [length] each
        self.rows = list(range(len(input_ids)))  # that go on
        self.ends = [config.max_length] * len(input_ids)  # where each stops at the latest
        self.eos = config._eos_token_tensor
        if self.eos is None:
            self.eos = input_ids[:0]
        # Without an end of text all rows end together.
        self.has_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)

        self.positions = model_kwargs["position_ids"][:, -1]  # [rows], of the last token of each
        self.mask = model_kwargs.get("attention_mask")  # [rows, cached], or None: nothing is masked
        if self.mask is None and len(input_ids) > 1:
            self.mask = torch.ones_like(input_ids)

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        """The texts `[batch, seq]`, from the logits `[batch, vocab]` after the prompts."""
        chosen = self.score(logits, [], self.noise(logits)).argmax(-1)
        self.write(chosen[:, None], np.ones(len(logits), int), 0)
        while self.rows:
            self.round()
        texts = [text[: max(self.ends)] for text in self.texts]
        token = self.config._pad_token_tensor
        padding = float(token) if token is not None else 0.0
        return pad_sequence(texts, batch_first=True, padding_value=padding)

    def round(self):
        """Draft some tokens, verify them, and write those that are accepted and one more."""
        tokens, noises, bins = self.drafts()
        read = torch.stack(tokens[:-1], dim=1)  # [rows, n]
        drafts = torch.stack(tokens[1:], dim=1)  # [rows, n]
        logits = self.halves.verify(read, **self.inputs(0, len(noises)))  # [rows, n, vocab]
        scores = [
            self.score(logits[:, n], tokens[1 : n + 1], noise) for n, noise in enumerate(noises)
        ]
        chosen = torch.stack(scores, dim=1).argmax(-1)  # [rows, n]

        right = (chosen == drafts).long().cumprod(1).sum(1).cpu().numpy()  # [rows]
        self.counts.add(bins, right)
        counts = (right + 1).clip(max=len(bins))  # [rows]
        self.tokens += counts.mean()
        self.cost += len(bins) * self.halves.draft_cost + self.halves.verify_cost
        self.write(chosen, counts, len(bins))

    def drafts(self) -> tuple[list[torch.Tensor], list, list[np.ndarray]]:
        """The last token of each text and the drafts after it, `[rows]` each; of each draft the noise, and the bin of
        each row's confidence, `[rows]`."""
        tokens = [torch.stack([self.texts[row][-1] for row in self.rows])]
        noises = []
        bins = []
        chance = np.ones(len(self.rows))  # of all drafts so far, by the model's own confidence
        room = self.config.max_length - max(len(self.texts[row]) for row in self.rows)
        most = min(room, self.halves.length)
        is_worth_it = True
        while is_worth_it and len(noises) < most:
            logits = self.halves.draft(tokens[-1], **self.inputs(len(noises)))  # [rows, vocab]
            noises.append(self.noise(logits))
            scores = self.score(logits, tokens[1:], noises[-1])
            tokens.append(scores.argmax(-1))

            confidence = logits.float().softmax(-1).gather(1, tokens[-1][:, None])[:, 0]
            chance = chance * confidence.cpu().numpy()
            bins.append((chance * BINS).astype(int).clip(max=BINS - 1))

            expected = self.counts.expected(bins[-1])
            price = self.halves.draft_cost * self.tokens / self.cost

            # Plain decoding asks no processor what follows an end, or a token that is not allowed.
            has_ended = torch.isin(tokens[-1], self.eos).any()
            is_allowed = scores.amax(-1).isfinite().all()
            is_worth_it = bool(expected > price and is_allowed and not has_ended)
        return tokens, noises, bins

    def write(self, chosen, counts, cached):
        """Append the first `counts` of the `chosen` tokens `[rows, n]`, up to where a text stops. Of the last `cached`
        entries of the cache, keep those of accepted tokens."""
        going = []
        for place, row in enumerate(self.rows):
            for index in range(counts[place]):
                self.texts[row] = torch.cat([self.texts[row], chosen[place, index, None]])
                if self.stops(self.texts[row][None], None):
                    self.ends[row] = min(self.ends[row], len(self.texts[row]))
                end = self.ends[row] if self.has_eos else max(self.ends)
                if len(self.texts[row]) >= end:
                    counts[place] = index + 1
                    break
            else:
                going.append(place)

        if self.streamer is not None:
            self.streamer.put(chosen[0, : counts[0]].cpu())

        counts = torch.as_tensor(counts, device=self.positions.device)
        kept = min(cached, int(counts.max()))
        self.halves.cache.crop(kept - cached)
        self.positions = self.positions + counts
        if self.mask is not None:
            right = torch.arange(kept, device=counts.device) < counts[:, None]  # [rows, kept]
            self.mask = torch.cat([self.mask, right.to(self.mask)], dim=1)

        if going and len(going) < len(self.rows):
            places = torch.tensor(going, device=counts.device)
            self.halves.cache.batch_select_indices(places)
            self.positions = self.positions[places]
            self.mask = self.mask[places]
        self.rows = [self.rows[place] for place in going]

    def inputs(self, start, length=1) -> dict[str, torch.Tensor | None]:
        """Positions and mask of the next `length` tokens, `start` after the last one written."""
        steps = torch.arange(start, start + length, device=self.positions.device)
        mask = self.mask
        if mask is not None:
            mask = F.pad(mask, (0, start + length), value=1)
        return {"position_ids": self.positions[:, None] + steps, "attention_mask": mask}

    def noise(self, logits):
        """Gumbel noise, whose largest sum with the scores is a sample; drafts and text share it, to agree often."""
        if not self.config.do_sample:
            return 0.0
        return -torch.empty_like(logits).float().exponential_().log()

    def score(self, logits, drafts, noise) -> torch.Tensor:
        """Scores `[rows, vocab]`, the largest of which is the next token's, from `logits` `[rows, vocab]` after the
        texts and `drafts`, `[rows]` each."""
        scores = logits.float()
        if self.process:
            scores = torch.stack(
                [self._processed(place, of_row, drafts) for place, of_row in enumerate(scores)]
            )
        return scores + noise

    def _processed(self, place, scores, drafts) -> torch.Tensor:
        """The `scores` `[vocab]` of one row by the processors; rows go one by one, since their texts differ in length,
        and each as all of the batch, since processors may tell rows by their number."""
        row = self.rows[place]
        size = len(self.texts)
        text = torch.cat([self.texts[row], *(draft[place, None] for draft in drafts)])
        return self.process(text.repeat(size, 1), scores.repeat(size, 1))[row]


def _check_numbers(model, reader, layer, length):
    """ValueError for a bad `layer` or `length`."""
    if not isinstance(layer, int | np.integer) or layer not in range(1, reader.num_layers):
        raise ValueError(
            f"`layer` is {layer!r}; {type(model).__name__} drafts with 1..{reader.num_layers - 1}."
        )
    if not isinstance(length, int | np.integer) or length < 1:
        raise ValueError(f"`length` is {length!r}; give drafts of a round, at least 1.")


def _check_rows(model, input_ids, model_kwargs, streamer):
    """ValueError for several texts where something is for one alone."""
    single = [
        name for name, value in model_kwargs.items() if hasattr(value, "_is_user_defined")
    ]  # a cache
    if streamer is not None:
        single.append("streamer")
    if "local" in getattr(model.config, "attention_layers", ()):  # of GPT-Neo
        single.append("attention_layers")
    if single and len(input_ids) > 1:
        raise ValueError(f"`{single[0]}` takes one text; the batch has {len(input_ids)}.")


def _check_options(model, config, processors, model_kwargs):
    """ValueError for what is asked of `generate` beside greedy decoding or sampling of texts, and for shards."""
    name = type(model).__name__
    # As `intercepted` leaves them.
    if any("_call_impl" in module.__dict__ for module in model.modules()):
        raise ValueError(f"{name} drafts in another thread: wait for it, or decode plainly.")
    if any(
        isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters()
    ):
        raise ValueError(
            f"{name} is sharded over processes (FSDP, ZeRO-3, tensor parallelism), which `draft_with` would run "
            "different numbers of times: decode without it, or load the saved model whole in each process."
        )

    asked = _other_decoding(model, config, processors, model_kwargs)
    has_positions = getattr(model_kwargs.get("position_ids"), "ndim", 0) == 2
    if asked or model.config.is_encoder_decoder or not has_positions:
        raise ValueError(
            f"`draft_with` decodes texts of decoders with `position_ids` [batch, seq], greedily or by sampling; "
            f"{name} cannot be decoded so: {', '.join(asked) or 'it is no such decoder'}."
        )


def _other_decoding(model, config, processors, model_kwargs) -> list[str]:
    """What is asked of `generate` that drafts cannot give, by name."""
    asked = [name for name in OTHER if getattr(config, name)]
    if config.num_beams > 1:
        asked.append("num_beams")
    asked += [
        name for name, value in model_kwargs.items() if name not in INPUTS and value is not None
    ]
    names = [type(processor).__name__ for processor in processors]
    asked += [name for name in names if name in STATEFUL]
    if any(getattr(value, "offloading", False) for value in model_kwargs.values()):
        asked.append("an offloaded cache")
    if model.prepare_inputs_for_generation.__self__ is not model:
        asked.append("an adapter's virtual tokens")

    kinds = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # several in Gemma 3
            kinds.update(kind.values())
        else:
            kinds.add(kind)
    asked += [f"{kind} positions" for kind in sorted(kinds & {"dynamic", "longrope"})]
    return asked


def _check_cache(model, cache, num_layers):
    kinds = [type(layer) for layer in getattr(cache, "layers", [])]
    if kinds != [DynamicLayer] * num_layers:
        raise ValueError(
            f"{type(model).__name__} has a {type(cache).__name__} that cannot be cropped in each of its {num_layers} "
            "layers (windows, recurrence, `cache_implementation`): leave that or drafts out."
        )


def _check_halves(model, halves, ids):
    """ValueError where the halves of the model, put together, are not the whole."""
    name = type(model).__name__
    places = torch.arange(4, device=ids.device)[None]
    cache = DynamicCache()
    with errors_explained(f"{name} cannot draft:", " Decode plainly."), probing(model):
        whole = model(input_ids=ids, position_ids=places).logits[:, 2:]  # [1, 2, vocab]
        prompt = {"input_ids": ids[:, :2], "position_ids": places[:, :2]}
        model(**prompt, use_cache=True, **{halves.cache_name: cache})
        with halves.attached(cache):
            for place in (2, 3):
                halves.draft(ids[:, place], position_ids=places[:, [place]])
            logits = halves.verify(ids[:, 2:], position_ids=places[:, 2:])
    error = (logits - whole).abs().max()
    size = whole.abs().max()
    if not error <= max(1e-4, 8 * torch.finfo(whole.dtype).eps) * size:
        raise ValueError(
            f"{name} cannot draft: its last layers need more than its first ones return."
        )
