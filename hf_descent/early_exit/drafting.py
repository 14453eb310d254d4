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
OTHER = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "dola_layers",
    "penalty_alpha",
)
OTHER += (
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
    # Drafts accepted and tried, by confidence, which stands in for the share at first; kept from call to call.
    counts = (np.arange(BINS) + 0.5) / BINS, np.ones(BINS)

    def decode(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        _check_options(model, generation_config, logits_processor, model_kwargs)
        single = [
            name for name, value in model_kwargs.items() if hasattr(value, "_is_user_defined")
        ]  # a cache
        single += ["streamer"] * (streamer is not None)
        single += ["attention_layers"] * (
            "local" in getattr(model.config, "attention_layers", ())
        )  # of GPT-Neo
        if single and len(input_ids) > 1:
            raise ValueError(f"`{single[0]}` takes one text; the batch has {len(input_ids)}.")
        example = torch.arange(4, device=input_ids.device)[None] % len(
            model.get_output_embeddings().weight
        )
        reader = Readout.probe(model, {"input_ids": example})
        if not isinstance(layer, int | np.integer) or layer not in range(1, reader.num_layers):
            raise ValueError(
                f"`layer` is {layer!r}; {type(model).__name__} drafts with 1..{reader.num_layers - 1}."
            )
        if not isinstance(length, int | np.integer) or length < 1:
            raise ValueError(f"`length` is {length!r}; give drafts of a round, at least 1.")
        halves = _Halves(model, reader.stack, layer, shortlist, length)
        if getattr(cache := model_kwargs.get(halves.cache_name), "layers", None):
            _check_cache(
                model, cache, reader.num_layers
            )  # before the prompt is written into the caller's own
        outputs = model._prefill(input_ids, generation_config, model_kwargs | {"use_cache": True})
        _check_cache(model, cache := outputs.get(halves.cache_name), reader.num_layers)
        if checked.get(model) is not reader.stack:
            _check_halves(model, halves, example)
            checked[model] = reader.stack
        options = logits_processor, stopping_criteria, generation_config, model_kwargs
        if streamer is not None:
            streamer.put(input_ids.cpu())
        decoding = _Decoding(halves, counts, streamer, input_ids, *options)
        with halves.attached(cache), model._optimize_model_for_decode():
            sequences = decoding.run(outputs.logits[:, -1])
        if streamer is not None:
            streamer.end()
        kept = (
            {halves.cache_name: cache} if len(input_ids) == 1 else {}
        )  # rows that stop leave the cache of several
        output = GenerateDecoderOnlyOutput(sequences, **kept)
        return output if generation_config.return_dict_in_generate else sequences

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
    most, text = (
        len(head.weight) - 1,
        f"`shortlist` is {reprlib.repr(shortlist)}; give ids of tokens, whole numbers",
    )
    with errors_explained(f"{text}:"):
        ids = torch.as_tensor(shortlist)
    is_whole = ids.dtype in (torch.int32, torch.int64)
    if not (is_whole and ids.ndim == 1 and len(ids) and 0 <= ids.min() <= ids.max() <= most):
        raise ValueError(f"{text} in 0..{most}.")
    return ids.to(head.weight.device, torch.int64)


def costs(stack, head, layer, size):
    """The weights read in a draft from `size` tokens and in a verification, as shares of those of plain decoding."""
    layers = sum(p.numel() for each in stack.layers for p in each.parameters()) / len(stack.layers)
    whole = stack.num_layers * layers + head.weight.numel()
    return (layer * layers + size * head.weight.shape[1]) / whole, 1 - layer * layers / whole


class _Halves:
    """A model's first layers, which draft one token a row, and the others, which go on from where these stopped."""

    def __init__(self, model, stack, layer, shortlist, length):
        self.forward, self.layer, self.num_layers = (
            PartialForward(model, stack),
            layer,
            stack.num_layers,
        )
        self.head, self.length, self.states = model.get_output_embeddings(), length, []
        names = inspect.signature(model.forward).parameters
        self.cache_name = (
            "cache" if "cache" in names else "past_key_values"
        )  # as it was before transformers 5.24
        self.short = None if shortlist is None else token_ids(shortlist, self.head)
        kept = slice(None) if shortlist is None else self.short
        self.weight = self.head.weight[kept]  # [short, hidden]
        self.bias = None if getattr(self.head, "bias", None) is None else self.head.bias[kept]
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
        return logits.new_full((len(logits), len(self.head.weight)), -torch.inf).index_copy_(
            1, self.short, logits
        )

    def verify(self, tokens: torch.Tensor, **inputs) -> torch.Tensor:
        """Logits `[rows, n, vocab]` of the last layer after each of the n `tokens` `[rows, n]` that drafts ran on."""
        # Hidden states [rows, n, hidden]. Attentions, which some layers return beside them, are not read.
        state = pytree.tree_map(
            lambda *p: torch.cat(p, 1) if getattr(p[0], "ndim", 0) == 3 else p[0], *self.states
        )
        own, self.states = self.cache.layers, []
        # Masks are made for the first layer's cache, which has these tokens already.
        with assigned([(self.cache, "layers")], [own[self.layer]] * self.layer + own[self.layer :]):
            return self._run(self.layer + 1, self.num_layers, tokens, given=state, **inputs)

    def _run(self, first, last, tokens, **inputs):
        inputs[self.cache_name] = self.cache
        return self.forward(first, last, input_ids=tokens, use_cache=True, **inputs).logits

    def _run_head(self, module, call, hidden):
        drafts = (
            self.short is not None
            and self.forward.thread == get_ident()
            and self.forward.first == 1
        )
        return F.linear(hidden, self.weight, self.bias) if drafts else call(hidden)


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
        self.halves, self.process, self.stops, self.config = (
            halves,
            logits_processor,
            stopping_criteria,
            config,
        )
        self.streamer = streamer
        self.texts = list(input_ids)  # of all rows, [length] each
        self.ends = [config.max_length] * len(
            input_ids
        )  # the length at which each stops, at the latest
        eos = config._eos_token_tensor
        self.eos = input_ids[:0] if eos is None else eos
        self.has_eos = any(
            hasattr(each, "eos_token_id") for each in stopping_criteria
        )  # else all end together
        self.rows = list(range(len(input_ids)))  # that go on
        self.positions = model_kwargs["position_ids"][:, -1]  # [rows], of the last token of each
        mask = model_kwargs.get("attention_mask")  # [rows, cached], or None: nothing is masked
        self.mask = torch.ones_like(input_ids) if mask is None and len(input_ids) > 1 else mask
        self.tokens, self.cost = 1.0, 1.0  # of a row, written so far; at first as of plain decoding
        self.accepted, self.tried = counts

    def run(self, logits: torch.Tensor) -> torch.Tensor:
        """The texts `[batch, seq]`, from the logits `[batch, vocab]` after the prompts."""
        chosen = self.score(logits, [], self.noise(logits)).argmax(-1)
        self.write(chosen[:, None], np.ones(len(logits), int), 0)
        while self.rows:
            self.round()
        texts, padding = (
            [text[: max(self.ends)] for text in self.texts],
            float(self.config._pad_token_tensor or 0),
        )
        return pad_sequence(texts, batch_first=True, padding_value=padding)

    def round(self):
        tokens, noises, bins = [torch.stack([self.texts[row][-1] for row in self.rows])], [], []
        chance = np.ones(len(self.rows))  # of all drafts so far, by the model's own confidence
        room = self.config.max_length - max(len(self.texts[row]) for row in self.rows)
        worth = True
        while worth and len(noises) < min(room, self.halves.length):
            logits = self.halves.draft(tokens[-1], **self.inputs(len(noises)))  # [rows, vocab]
            noises.append(self.noise(logits))
            scores = self.score(logits, tokens[1:], noises[-1])
            tokens.append(scores.argmax(-1))
            confidence = logits.float().softmax(-1).gather(1, tokens[-1][:, None])[:, 0]
            chance = chance * confidence.cpu().numpy()
            bins.append((chance * BINS).astype(int).clip(max=BINS - 1))
            worth = (self.accepted / self.tried)[
                bins[-1]
            ].mean() > self.halves.draft_cost * self.tokens / self.cost
            # Plain decoding asks no processor what follows an end, or a token that is not allowed.
            worth &= bool(
                scores.amax(-1).isfinite().all() and not torch.isin(tokens[-1], self.eos).any()
            )
        read, drafts = torch.stack(tokens[:-1], dim=1), torch.stack(tokens[1:], dim=1)  # [rows, n]
        logits = self.halves.verify(read, **self.inputs(0, len(noises)))  # [rows, n, vocab]
        scores = [
            self.score(logits[:, n], tokens[1 : n + 1], noise) for n, noise in enumerate(noises)
        ]
        chosen = torch.stack(scores, dim=1).argmax(-1)  # [rows, n]
        right = (chosen == drafts).long().cumprod(1).sum(1).cpu().numpy()  # [rows]
        np.add.at(self.tried, bins, 1)
        np.add.at(self.accepted, bins, np.arange(len(bins))[:, None] < right)
        counts = (right + 1).clip(max=len(bins))  # [rows]
        self.tokens += counts.mean()
        self.cost += len(bins) * self.halves.draft_cost + self.halves.verify_cost
        self.write(chosen, counts, len(bins))

    def write(self, chosen, counts, cached):
        """Append the first `counts` of the `chosen` tokens `[rows, n]`, up to where a text stops. Of the last `cached`
        entries of the cache, keep those of accepted tokens."""
        going = []
        for place, row in enumerate(self.rows):
            for index in range(counts[place]):
                self.texts[row] = torch.cat([self.texts[row], chosen[place, index, None]])
                if self.stops(self.texts[row][None], None):
                    self.ends[row] = min(self.ends[row], len(self.texts[row]))
                if len(self.texts[row]) >= (self.ends[row] if self.has_eos else max(self.ends)):
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
            self.positions, self.mask = self.positions[places], self.mask[places]
        self.rows = [self.rows[place] for place in going]

    def inputs(self, start, length=1) -> dict[str, torch.Tensor | None]:
        """Positions and mask of the next `length` tokens, `start` after the last one written."""
        steps = torch.arange(start, start + length, device=self.positions.device)
        mask = self.mask if self.mask is None else F.pad(self.mask, (0, start + length), value=1)
        return {"position_ids": self.positions[:, None] + steps, "attention_mask": mask}

    def noise(self, logits):
        """Gumbel noise, whose largest sum with the scores is a sample; drafts and text share it, to agree often."""
        return (
            -torch.empty_like(logits).float().exponential_().log() if self.config.do_sample else 0.0
        )

    def score(self, logits, drafts, noise) -> torch.Tensor:
        """Scores `[rows, vocab]`, the largest of which is the next token's, from `logits` `[rows, vocab]` after the
        texts and `drafts`, `[rows]` each."""
        scores, size = logits.float(), len(self.texts)
        if (
            self.process
        ):  # row by row: texts differ in length, and processors may tell rows by their number
            texts = (
                torch.cat([self.texts[row], *(d[n, None] for d in drafts)])
                for n, row in enumerate(self.rows)
            )
            processed = (
                self.process(text.repeat(size, 1), each.repeat(size, 1))
                for text, each in zip(texts, scores)
            )
            scores = torch.stack([batch[row] for row, batch in zip(self.rows, processed)])
        return scores + noise


def _check_options(model, config, processors, model_kwargs):
    """ValueError for what is asked of `generate` beside greedy decoding or sampling of texts, and for shards."""
    if any(
        "_call_impl" in module.__dict__ for module in model.modules()
    ):  # as `intercepted` leaves them
        raise ValueError(
            f"{type(model).__name__} drafts in another thread: wait for it, or decode plainly."
        )
    if any(
        isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters()
    ):
        raise ValueError(
            f"{type(model).__name__} is sharded over processes (FSDP, ZeRO-3, tensor parallelism), which `draft_with` "
            "would run different numbers of times: decode without it, or load the saved model whole in each process."
        )
    asked = [name for name in OTHER if getattr(config, name)] + ["num_beams"] * (
        config.num_beams > 1
    )
    asked += [
        name for name, value in model_kwargs.items() if name not in INPUTS and value is not None
    ]
    asked += [name for each in processors if (name := type(each).__name__) in STATEFUL]
    asked += ["an offloaded cache"] * any(
        getattr(value, "offloading", False) for value in model_kwargs.values()
    )
    asked += ["an adapter's virtual tokens"] * (
        model.prepare_inputs_for_generation.__self__ is not model
    )
    ropes = [getattr(module, "rope_type", None) for module in model.modules()]
    ropes = {
        kind for rope in ropes for kind in (rope.values() if isinstance(rope, dict) else [rope])
    }  # as in Gemma 3
    asked += [f"{rope} positions" for rope in sorted(ropes & {"dynamic", "longrope"})]
    if (
        asked
        or model.config.is_encoder_decoder
        or getattr(model_kwargs.get("position_ids"), "ndim", 0) != 2
    ):
        raise ValueError(
            f"`draft_with` decodes texts of decoders with `position_ids` [batch, seq], greedily or by sampling; "
            f"{type(model).__name__} cannot be decoded so: {', '.join(asked) or 'it is no such decoder'}."
        )


def _check_cache(model, cache, num_layers):
    if [type(each) for each in getattr(cache, "layers", [])] != [DynamicLayer] * num_layers:
        raise ValueError(
            f"{type(model).__name__} has a {type(cache).__name__} that cannot be cropped in each of its {num_layers} "
            "layers (windows, recurrence, `cache_implementation`): leave that or drafts out."
        )


def _check_halves(model, halves, ids):
    """ValueError where the halves of the model, put together, are not the whole."""
    places, cache = torch.arange(4, device=ids.device)[None], DynamicCache()
    with (
        errors_explained(f"{type(model).__name__} cannot draft:", " Decode plainly."),
        probing(model),
    ):
        whole = model(input_ids=ids, position_ids=places).logits[:, 2:]  # [1, 2, vocab]
        model(
            input_ids=ids[:, :2],
            position_ids=places[:, :2],
            use_cache=True,
            **{halves.cache_name: cache},
        )
        with halves.attached(cache):
            for place in (2, 3):
                halves.draft(ids[:, place], position_ids=places[:, [place]])
            logits = halves.verify(ids[:, 2:], position_ids=places[:, 2:])
    if (
        not (logits - whole).abs().max()
        <= max(1e-4, 8 * torch.finfo(whole.dtype).eps) * whole.abs().max()
    ):
        raise ValueError(
            f"{type(model).__name__} cannot draft: its last layers need more than its first ones return."
        )
