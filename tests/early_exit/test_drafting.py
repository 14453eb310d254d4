import inspect
import itertools
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from naive_head import LiveStorage
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from scipy.stats import chisquare
from tiny import TEST_DEVICE, VOCAB, llama, spread, word_tokenizer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    RobertaConfig,
    RobertaForCausalLM,
    RoCBertConfig,
    RoCBertForCausalLM,
    StaticCache,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation import BaseStreamer, UnbatchedClassifierFreeGuidanceLogitsProcessor

from hf_descent import cli
from hf_descent.early_exit import (
    ExitProfile,
    SpeculationProfile,
    draft_with,
    speculation_profile,
    truncate,
)


def gpt2(num_layers=4):
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=36, n_embd=16, n_layer=num_layers, n_head=2, eos_token_id=None
    )
    return spread(GPT2LMHeadModel(config))


def gpt_neo():
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_layers": 4,
        "num_heads": 2,
        "max_position_embeddings": 36,
    }
    return spread(GPTNeoForCausalLM(GPTNeoConfig(**sizes, attention_types=[[["global"], 4]])))


def falcon():
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    return spread(FalconForCausalLM(FalconConfig(**sizes, eos_token_id=None)))


def agreeing(model, layer=2, factor=0.1):
    """`model` whose layers after `layer` change little, so that drafts are mostly accepted."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            index = next((int(part) for part in name.split(".") if part.isdigit()), -1)
            if index >= layer and name.endswith(
                ("o_proj.weight", "down_proj.weight", "c_proj.weight")
            ):
                parameter.mul_(factor)
    return model


def prompts(rows=4, length=9):
    """Token ids and attention mask, padded on the left."""
    ids = torch.randint(8, VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row] = ids[row, : 2 * row] = 0
    return {"input_ids": ids, "attention_mask": mask}


def run_positions(model, layers):
    """Counts the calls and the positions of each layer, in lists that grow."""
    counts = [[] for _ in layers]
    for layer, count in zip(layers, counts):
        layer.register_forward_pre_hook(
            lambda module, args, count=count: count.append(args[0].shape[1])
        )
    return counts


@pytest.mark.parametrize("factor", [0.2, 1.0])
@pytest.mark.parametrize("make", [lambda: spread(llama(num_layers=4)), gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_text_is_the_greedy_one_token_for_token(make, rows, factor):
    model = agreeing(make(), 2, factor).to(TEST_DEVICE)
    inputs = {name: values.to(TEST_DEVICE) for name, values in prompts(rows).items()}
    ended = model.generate(**inputs, do_sample=False, max_new_tokens=20, pad_token_id=0)
    eos = int(ended[0, -8])  # of which one row at least stops early
    for settings in (
        {"max_length": 36},  # as many as GPT-2 has positions
        {"eos_token_id": eos, "max_new_tokens": 24},
        {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "min_new_tokens": 5,
            "max_new_tokens": 20,
        },
        {
            "prefix_allowed_tokens_fn": lambda row, text: range(row, VOCAB - len(text) % 7),
            "max_new_tokens": 20,
        },
        {"num_beams": 1, "use_cache": False, "max_new_tokens": 9},
    ):
        settings |= {"do_sample": False, "pad_token_id": 0}
        greedy = model.generate(**inputs, **settings)
        for layer, shortlist in ((2, None), (3, range(5, 25))):
            drafted = model.generate(
                **inputs, **settings, custom_generate=draft_with(layer, shortlist)
            )
            assert drafted.tolist() == greedy.tolist()


def encoder(kind, config_class):
    """Used as a decoder. RoBERTa's token 1 is padding; RoCBert's forward makes another cache than `generate`."""
    return spread(kind(config_class(**ENCODER_SIZES, is_decoder=True, eos_token_id=None)))


def trained_tokens():
    """Of an embedding tied to the head, which PEFT wraps, too."""
    lora = LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj"], trainable_token_indices=[5, 6]
    )
    return spread(get_peft_model(llama(num_layers=3, tie_word_embeddings=True), lora))


@pytest.mark.parametrize(
    "make",
    [
        gpt_neo,
        falcon,
        lambda: encoder(RobertaForCausalLM, RobertaConfig),
        lambda: encoder(RoCBertForCausalLM, RoCBertConfig),
        trained_tokens,
    ],
    ids=["gpt_neo", "falcon", "roberta", "rocbert", "trained_tokens"],
)
def test_models_whose_layers_positions_caches_or_heads_are_of_another_kind_can_draft(make):
    model, settings = make(), {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    plain = model.generate(**prompts(3), **settings)
    for shortlist in (None, range(5, 25)):
        drafted = model.generate(**prompts(3), custom_generate=draft_with(2, shortlist), **settings)
        assert torch.equal(drafted, plain)


class StopsAtMultiplesOf(StoppingCriteria):
    def __init__(self, number):
        self.number = number

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % self.number == 0


@pytest.mark.parametrize("eos", [None, 7])
@pytest.mark.parametrize("number", [3, 5, 9])
def test_without_an_end_of_text_stopped_rows_go_on_until_the_last_one_stops(number, eos):
    model = agreeing(spread(llama(num_layers=4)))
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": eos}
    settings["stopping_criteria"] = [StopsAtMultiplesOf(number)]
    drafted = model.generate(**prompts(4), custom_generate=draft_with(2), **settings)
    assert drafted.tolist() == model.generate(**prompts(4), **settings).tolist()


@pytest.mark.parametrize("shortlist", [None, range(VOCAB)])
def test_no_layer_runs_twice_on_a_token_and_accepted_drafts_spare_the_last_layers(shortlist):
    model = agreeing(spread(llama(num_layers=5)), 2, 0.0)
    decode, inputs = draft_with(2, shortlist), prompts(1, 4)
    model.generate(
        **inputs, max_new_tokens=2, custom_generate=decode, pad_token_id=0
    )  # checks the model
    counts = run_positions(model, model.model.layers)
    model.generate(
        **inputs, do_sample=False, max_new_tokens=50, custom_generate=decode, pad_token_id=0
    )
    # All drafts are accepted, so what was read is the text but for its last token.
    assert [sum(count) for count in counts] == [4 + 49] * 5
    assert len(counts[0]) == len(counts[1]) == 1 + 49 and len(counts[2]) == len(counts[4]) <= 1 + 12
    plain = 5 * 50
    assert sum(map(len, counts)) < 0.6 * plain


def test_drafts_get_short_where_they_are_refused_and_long_where_they_are_accepted():
    lengths = {}
    for factor in (0.0, 1.0):
        model = agreeing(spread(llama(num_layers=6)), 3, factor)
        counts = run_positions(model, model.model.layers)
        model.generate(
            torch.tensor([[3, 4, 5]]),
            do_sample=False,
            max_new_tokens=60,
            custom_generate=draft_with(3),
        )
        lengths[factor] = counts[-1][-10:-1]
    assert sum(lengths[1.0]) / len(lengths[1.0]) < 2 < sum(lengths[0.0]) / len(lengths[0.0])


@pytest.mark.slow
@pytest.mark.parametrize("shortlist", [None, [0, 2, 3]])
def test_samples_are_distributed_as_the_model_says(shortlist):
    """Three tokens of a vocabulary of five, against the product of the model's own probabilities."""
    model = agreeing(spread(llama(num_layers=4, vocab_size=5)), 2, 0.5)
    model.generation_config.eos_token_id, draws = None, 4000
    prompt, settings = (
        torch.tensor([[1, 2, 3]]),
        {"do_sample": True, "temperature": 1.7, "top_k": 4},
    )
    torch.manual_seed(0)
    texts = model.generate(
        prompt,
        max_new_tokens=3,
        num_return_sequences=draws,
        custom_generate=draft_with(2, shortlist),
        **settings,
    )
    cells = torch.tensor(list(itertools.product(range(5), repeat=3)))  # [125, 3]
    seen = (texts[:, None, 3:] == cells).all(-1).sum(0).double()  # [125]

    def expected(model):
        with torch.no_grad():
            logits = (
                model(torch.cat([prompt.repeat(len(cells), 1), cells], dim=1))
                .logits[:, 2:-1]
                .double()
                / 1.7
            )
        logits[logits < logits.topk(4).values[..., -1:]] = -torch.inf
        return draws * logits.softmax(-1).gather(-1, cells[..., None])[..., 0].prod(1)

    def fit(counts):
        many = counts >= 5
        table = [torch.cat([each[many], each[~many].sum()[None]]) for each in (seen, counts)]
        kept = table[1] > 0
        return (
            chisquare(table[0][kept], table[1][kept]).pvalue if not table[0][~kept].sum() else 0.0
        )

    assert seen.sum() == draws and fit(expected(model)) > 0.01
    assert (
        fit(expected(truncate(model, 2, {"input_ids": prompt}))) < 1e-6
    )  # the drafts' own distribution is told apart


def test_a_conversation_goes_on_from_its_cache():
    model, cache = agreeing(spread(llama(num_layers=4))), DynamicCache()
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    prompt = torch.tensor([[3, 4, 5, 6]])
    first = model.generate(prompt, past_key_values=cache, custom_generate=draft_with(2), **settings)
    assert (
        cache.get_seq_length() == first.shape[1] - 1
        and len({layer.keys.shape for layer in cache.layers}) == 1
    )
    longer = torch.cat([first, torch.tensor([[9, 8]])], dim=1)
    second = model.generate(
        longer, past_key_values=cache, custom_generate=draft_with(2), **settings
    )
    assert torch.equal(second, model.generate(longer, **settings))
    # Without a cache that is given, from that of the output.
    name = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )  # from 5.24 on
    output = model.generate(
        prompt, custom_generate=draft_with(2), return_dict_in_generate=True, **settings
    )
    assert (
        torch.equal(output.sequences, first) and output[name].get_seq_length() == first.shape[1] - 1
    )
    stock = model.generate(prompt, return_dict_in_generate=True, **settings)[name]
    for ours, theirs in zip(output[name].layers, stock.layers, strict=True):
        torch.testing.assert_close((ours.keys, ours.values), (theirs.keys, theirs.values))
    assert torch.equal(model.generate(longer, past_key_values=output[name], **settings), second)
    # Rows that leave the batch, and rejected drafts of others, would be missing in it or in its way.
    with pytest.raises(ValueError, match=f"`{name}` takes one text; the batch has 4"):
        model.generate(
            **prompts(4), past_key_values=DynamicCache(), custom_generate=draft_with(2), **settings
        )


class Recorder(BaseStreamer):
    def __init__(self):
        self.parts, self.ends = [], 0

    def put(self, value):
        self.parts.append(value.flatten())

    def end(self):
        self.ends += 1


def test_a_text_is_streamed_as_transformers_streams_it():
    model = agreeing(spread(llama(num_layers=4)))
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    stock, ours, prompt = Recorder(), Recorder(), torch.tensor([[3, 4, 5]])
    text = model.generate(prompt, streamer=stock, **settings)
    model.generate(prompt, custom_generate=draft_with(2, streamer=ours), **settings)
    assert torch.equal(torch.cat(ours.parts), text[0]) and torch.equal(
        torch.cat(stock.parts), text[0]
    )
    assert ours.ends == stock.ends == 1 and 2 < len(ours.parts) < len(stock.parts)
    with pytest.raises(ValueError, match="`streamer` takes one text; the batch has 4"):
        model.generate(**prompts(4), custom_generate=draft_with(2, streamer=Recorder()), **settings)


class Elsewhere(Recorder):
    """Calls a function in another thread at the first tokens of a text, and waits for it."""

    def __init__(self, function):
        super().__init__()
        self.function, self.result = function, None

    def run(self):
        try:
            self.result = self.function()
        except ValueError as error:
            self.result = str(error)

    def put(self, value):
        super().put(value)
        if len(self.parts) == 3:
            thread = threading.Thread(target=self.run)
            thread.start()
            thread.join()


@pytest.mark.parametrize("shortlist", [None, range(5, 25)])
def test_while_a_thread_drafts_others_decode_plainly(shortlist):
    model = agreeing(spread(llama(num_layers=4)))
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    prompt, other = torch.tensor([[3, 4, 5]]), torch.tensor([[9, 8, 7]])
    expected = [model.generate(each, **settings) for each in (prompt, other)]

    def drafted(function):
        streamer = Elsewhere(function)
        text = model.generate(
            prompt, custom_generate=draft_with(2, shortlist, streamer), **settings
        )
        assert torch.equal(text, expected[0])
        return streamer.result

    assert torch.equal(drafted(lambda: model.generate(other, **settings)), expected[1])
    second = drafted(lambda: model.generate(other, custom_generate=draft_with(2), **settings))
    assert "LlamaForCausalLM drafts in another thread" in second
    assert torch.equal(model.generate(other, **settings), expected[1])


def test_a_saved_model_brings_its_decoding_along(tmp_path):
    agreeing(spread(llama(num_layers=4))).save_pretrained(tmp_path)
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "from hf_descent.early_exit import draft_with\n\n\n"
        "def generate(model, layer=2, **kwargs):\n"
        "    return model.generate(custom_generate=draft_with(layer), **kwargs)\n"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    counts = run_positions(model, model.model.layers)
    settings = {"do_sample": False, "max_new_tokens": 20, "pad_token_id": 0}
    prompt = torch.tensor([[3, 4, 5]])
    text = model.generate(prompt, custom_generate=str(tmp_path), trust_remote_code=True, **settings)
    assert len(counts[3]) < len(counts[1])
    assert torch.equal(text, model.generate(prompt, **settings))


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
SIZES |= {"vocab_size": VOCAB, "num_hidden_layers": 3}
ENCODER_SIZES = SIZES | {"max_position_embeddings": 40}
T5 = {
    "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 3,
    "num_heads": 2,
}
GEMMA3N = SIZES | {
    "head_dim": 8,
    "layer_types": ["full_attention"] * 3,
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
}
GEMMA3N |= {
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "activation_sparsity_pattern": [0.0] * 3,
}
ROPE = {"factor": 4.0, "rope_theta": 1e4}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4} | ROPE
LONG_ROPE |= {"original_max_position_embeddings": 16}


def gemma3_with_a_long_rope():
    """Has a kind of positions for each kind of layer."""
    ropes = {
        "full_attention": LONG_ROPE,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    types = ["full_attention"] * 3
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, layer_types=types, rope_parameters=ropes)
    )


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (
            lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
            {},
            "cannot be cropped",
        ),
        (
            lambda: Lfm2ForCausalLM(
                Lfm2Config(**SIZES, layer_types=["full_attention", "conv", "full_attention"])
            ),
            {},
            "cannot be cropped",
        ),
        (lambda: llama(), {"cache_implementation": "static"}, "cannot be cropped"),
        (lambda: llama(), {"cache_implementation": "offloaded"}, "an offloaded cache"),
        (lambda: T5ForConditionalGeneration(T5Config(**T5)), {}, "decodes texts of decoders"),
        (
            lambda: BloomForCausalLM(
                BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=3, n_head=2)
            ),
            {},
            "position",
        ),
        (
            lambda: OpenAIGPTLMHeadModel(
                OpenAIGPTConfig(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=2)
            ),
            {},
            "NoneType",
        ),
        (lambda: llama(), {"num_beams": 2}, "num_beams"),
        (
            lambda: llama(),
            {"output_scores": True, "return_dict_in_generate": True},
            "output_scores",
        ),
        (lambda: gpt2(), {"token_type_ids": torch.tensor([[5, 6, 7]])}, "token_type_ids"),
        (
            lambda: llama(),
            {"guidance_scale": 1.5},
            UnbatchedClassifierFreeGuidanceLogitsProcessor.__name__,
        ),
        (lambda: llama(), {"dola_layers": "high"}, "dola_layers"),
        (lambda: llama(), {"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        # Other ways to decode, which `generate` would have chosen itself.
        (lambda: llama(), {"constraints": [object()]}, "constraints"),
        (lambda: llama(), {"force_words_ids": [[9]]}, "force_words_ids"),
        (lambda: llama(), {"use_mtp": True}, "use_mtp"),
        (lambda: llama(), {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        (lambda: llama(), {"assistant_early_exit": 1}, "assistant_early_exit"),
        # What `generate` hands on to no loop but its own.
        # In these a text's length decides on the positions of all its tokens.
        (lambda: llama(rope_parameters=ROPE | {"rope_type": "dynamic"}), {}, "dynamic positions"),
        (lambda: llama(rope_parameters=LONG_ROPE), {}, "longrope positions"),
        (gemma3_with_a_long_rope, {}, "longrope positions"),
        (
            lambda: get_peft_model(
                llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
            ),
            {},
            "virtual",
        ),
        (lambda: llama(num_layers=2), {}, r"`layer` is 2; LlamaForCausalLM drafts with 1\.\.1"),
    ],
)
def test_what_cannot_be_decoded_so_is_refused(make, settings, reason):
    with pytest.raises(ValueError, match=reason):
        make().eval().generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=4,
            pad_token_id=0,
            custom_generate=draft_with(2),
            **settings,
        )


@pytest.mark.parametrize("shortlist", [[], [VOCAB], [-1], [True, False], [[5, 6]], [1.5]])
def test_a_shortlist_of_anything_but_tokens_is_refused(shortlist):
    with pytest.raises(
        ValueError, match=f"`shortlist` is .*; give ids of tokens, whole numbers in 0..{VOCAB - 1}"
    ):
        llama().generate(
            torch.tensor([[5, 6, 7]]), pad_token_id=0, custom_generate=draft_with(1, shortlist)
        )


@pytest.mark.parametrize("kind", ["windows", "static"])
def test_a_refusal_leaves_the_cache_that_was_given_as_it_was(kind):
    config = MistralConfig(**SIZES, sliding_window=8)
    model, prompt = spread(MistralForCausalLM(config)).eval(), torch.arange(3, 9)[None]
    caches = [
        DynamicCache(config=config) if kind == "windows" else StaticCache(config, 40)
        for _ in range(2)
    ]
    settings = {"max_new_tokens": 10, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(prompt, past_key_values=caches[0], **settings)
    with pytest.raises(ValueError, match="cannot be cropped"):
        model.generate(prompt, past_key_values=caches[1], custom_generate=draft_with(1), **settings)
    assert (
        model.generate(prompt, past_key_values=caches[1], **settings).tolist() == expected.tolist()
    )


@pytest.mark.parametrize("shortlist", [None, range(4, 9)])
@pytest.mark.parametrize("layer", [1, 2])
def test_drafts_keep_to_a_list_of_answers_and_ask_for_nothing_past_their_ends(layer, shortlist):
    answers = [[10, 11, 12, 2], [10, 13, 2], [20, 21, 22, 23, 2], [30, 2], [31, 32, 2]]

    def allowed(row, text):
        given = text[4:].tolist()
        found = {
            answer[len(given)]
            for answer in answers
            if len(given) < len(answer) and answer[: len(given)] == given
        }
        return (
            sorted(found)
            if found
            else pytest.fail(f"{given} is asked for, which no answer begins with")
        )

    model, prompt = spread(llama(num_layers=4)), torch.tensor([[5, 6, 7, 8]])
    settings = {
        "max_new_tokens": 10,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "prefix_allowed_tokens_fn": allowed,
    }
    expected = model.generate(prompt, **settings)
    drafted = model.generate(prompt, custom_generate=draft_with(layer, shortlist), **settings)
    assert drafted.tolist() == expected.tolist()


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def by_fsdp(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def by_zero3(model):
    model.model.norm.weight.ds_id = 0  # as DeepSpeed marks what it shards


@pytest.mark.parametrize("shard", [by_fsdp, by_zero3])
def test_sharded_weights_are_refused(shard, process_group):
    """A process whose texts end early would make no more forwards, in which the others gather their shards."""
    model = llama()
    shard(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM is sharded over processes"):
        model.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=4,
            pad_token_id=0,
            custom_generate=draft_with(1),
        )


def test_layers_that_need_more_than_the_hidden_states_are_refused():
    """Such as the input of the first layer, past the layers between: without it the halves are not the whole."""
    model, seen = spread(llama(num_layers=3)), []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, output: output + seen[-1])
    prompt = torch.tensor([[5, 6, 7]])
    model.generate(prompt, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match="`layer` is '2'; LlamaForCausalLM drafts with"):
        model.generate(prompt, max_new_tokens=4, custom_generate=draft_with("2"), pad_token_id=0)
    with pytest.raises(ValueError, match="its last layers need more"):
        model.generate(prompt, max_new_tokens=4, custom_generate=draft_with(1), pad_token_id=0)


def test_self_speculation_gives_the_greedy_text_and_the_acceptance_of_each_exit(monkeypatch):
    model = spread(llama(num_layers=3))
    model.generation_config.eos_token_id = None
    prompts = [torch.tensor([[3, 4, 5]]), torch.tensor([[7, 8, 9, 10]])]
    for fastest, kept in (
        (3, [*range(5, 25)]),
        (1, None),
    ):  # the first draft with a shortlist, and that without
        seconds = 4.0 - 2 * np.eye(5)[fastest]
        monkeypatch.setattr(
            "hf_descent.early_exit.speculation.turns", lambda *_, seconds=seconds: seconds
        )
        profile = speculation_profile(
            model, prompts, max_new_tokens=12, repeats=1, shortlist=range(5, 25)
        )
        assert profile.equal.tolist() == [1.0, 1.0] and profile.shortlist == kept
        assert sorted(profile.speedups) == [1.0, 2.0]
    for layer in (1, 2):
        short, hits = truncate(model, layer, {"input_ids": prompts[0]}), 0
        for prompt in prompts:
            text = model.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=0)
            for end in range(prompt.shape[1], text.shape[1]):
                with torch.no_grad():
                    hits += int(short(text[:, :end]).logits[0, -1].argmax() == text[0, end])
        assert profile.acceptance[layer - 1] == pytest.approx(hits / 24)
    assert model.config.num_hidden_layers == 3


def test_the_four_exits_whose_drafts_should_pay_most_are_timed():
    model = spread(llama(num_layers=8))
    model.generation_config.eos_token_id = None
    with torch.no_grad():  # the layers above the third do nothing
        for layer in model.model.layers[3:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    profile = speculation_profile(model, [torch.tensor([[3, 4, 5]])], max_new_tokens=8, repeats=1)
    assert profile.acceptance[2:].tolist() == [1.0] * 5 and profile.acceptance[:2].max() < 1
    timed = np.isfinite(profile.tokens_per_second)
    assert timed[2:5].all() and timed.sum() == 4


def naive_counts(model, prompts, new_tokens, ranked):
    """(size, layer) -> share of the greedy tokens that the cut model chooses from the first `size` of `ranked`."""
    texts = [
        model.generate(each, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)[0]
        for each in prompts
    ]
    shares = {}
    for layer in range(1, len(model.model.layers)):
        short = truncate(model, layer, {"input_ids": prompts[0]})
        for size in (1, 2, 4, 8, 16, 32, VOCAB):
            hits = []
            for prompt, text in zip(prompts, texts):
                for end in range(prompt.shape[1], len(text)):
                    with torch.no_grad():
                        logits = short(text[None, :end]).logits[0, -1]
                    hits.append(
                        max(ranked[:size], key=lambda token: logits[token].item())
                        == text[end].item()
                    )
            shares[size, layer] = sum(hits) / len(hits)
    return shares


def naive_speed(model, size, layer, drafts, share):
    """Tokens of a round, each draft accepted with probability `share` after accepted ones, over what it costs."""
    weights = [sum(p.numel() for p in each.parameters()) for each in model.model.layers]
    rows, width = model.lm_head.weight.shape
    plain = sum(weights) + rows * width
    cost = drafts * (sum(weights[:layer]) + size * width) + sum(weights[layer:]) + rows * width
    tokens = sum(
        share**right * (1 - share) * (right + 1) for right in range(drafts - 1)
    )  # where the next is wrong
    return (tokens + share ** (drafts - 1) * drafts) * plain / cost


@pytest.mark.parametrize("factor", [0.05, 0.3])
def test_layer_drafts_of_a_round_and_size_of_the_shortlist_are_the_best_by_count(
    factor, monkeypatch
):
    model = agreeing(spread(llama(num_layers=5)), 2, factor)
    model.generation_config.eos_token_id = None
    prompts = [torch.tensor([[3, 4, 5]]), torch.tensor([[7, 8, 9, 10]]), torch.tensor([[30, 6]])]
    texts = model.generate(
        torch.tensor([[11, 12], [20, 21]]), do_sample=False, max_new_tokens=20, pad_token_id=0
    )
    counts = Counter(texts.flatten().tolist())
    ranked = [token for token, _ in counts.most_common()]
    ranked += [token for token in range(VOCAB) if token not in ranked]
    shares = naive_counts(model, prompts, 20, ranked)
    speeds = {
        (naive_speed(model, size, layer, drafts, share), size, layer, drafts)
        for (size, layer), share in shares.items()
        for drafts in range(2, 17)
    }
    _, size, layer, drafts = max(each for each in speeds if each[1] < VOCAB)
    seen = []

    def drafting(*given, **settings):
        seen.append((*given, settings["length"]))
        return draft_with(*given, **settings)

    def fast(calls, *_):  # the one that is best by count
        return np.array([2.0, *(1 + (each != (layer, ranked[:size], drafts)) for each in seen)])

    monkeypatch.setattr("hf_descent.early_exit.speculation.draft_with", drafting)
    monkeypatch.setattr("hf_descent.early_exit.speculation.turns", fast)
    profile = speculation_profile(model, prompts, max_new_tokens=20, repeats=1, shortlist=counts)
    assert (profile.best, profile.shortlist, profile.length) == (layer, ranked[:size], drafts)
    assert profile.acceptance.tolist() == pytest.approx(
        [shares[size, each] for each in range(1, 5)]
    )
    assert f"draft_with({layer}, shortlist, length={drafts}); shortlist: {size} tokens" in str(
        profile
    )
    for tried, short, length in seen:  # each with the drafts that are best for it
        rows = VOCAB if short is None else size
        assert length == max(each for each in speeds if each[1:3] == (rows, tried))[3]
    assert profile.equal[layer - 1] == 1 and 1 < size < VOCAB


def test_where_plain_decoding_is_fastest_the_profile_is_that_of_all_tokens(monkeypatch):
    model, prompts = agreeing(spread(llama(num_layers=3)), 1), [torch.tensor([[3, 4, 5]])]
    whole = speculation_profile(model, prompts, max_new_tokens=12, repeats=1)
    slow = np.array([1.0, 4.0, 4.0, 2.0, 3.0])  # with the shortlist faster than without
    monkeypatch.setattr("hf_descent.early_exit.speculation.turns", lambda *_: slow)
    profile = speculation_profile(
        model, prompts, max_new_tokens=12, repeats=1, shortlist=Counter([5])
    )
    assert profile.best is None and profile.shortlist is None and profile.length == 16
    assert (
        profile.acceptance.tolist() == whole.acceptance.tolist() and max(profile.speedups) == 0.25
    )


def test_a_profile_of_a_long_prompt_holds_no_logits_of_all_its_tokens():
    model = spread(llama(num_layers=3, vocab_size=5000, max_position_embeddings=256))
    with LiveStorage() as live:
        speculation_profile(model, [torch.randint(3, 5000, (1, 200))], max_new_tokens=4, repeats=1)
    assert 4 * 5 * 5000 < live.peak < 4 * 200 * 5000  # bytes: the answer's are made


@pytest.mark.parametrize("shortlist", [[], [VOCAB], [-1], [1.5]])
def test_a_profile_refuses_a_shortlist_of_anything_but_tokens(shortlist):
    with pytest.raises(
        ValueError, match=f"`shortlist` is .*; give ids of tokens, whole numbers in 0..{VOCAB - 1}"
    ):
        speculation_profile(
            llama(), [torch.tensor([[5, 6, 7]])], max_new_tokens=4, shortlist=shortlist
        )


def bart(**config):
    """A decoder whose config tells `generate` of a cache for one layer, as many as its unused encoder has."""
    sizes = {
        "d_model": 16,
        "decoder_ffn_dim": 32,
        "decoder_attention_heads": 2,
        "decoder_layers": 3,
    }
    return spread(
        BartForCausalLM(
            BartConfig(vocab_size=VOCAB, encoder_layers=1, use_cache=False, **sizes, **config)
        )
    )


def undecoded(monkeypatch, model):
    """`model`, which fails the test where it decodes plainly."""
    monkeypatch.setattr(
        type(model), "_sample", lambda *args, **kwargs: pytest.fail("a greedy text is written")
    )
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (bart, "BartForCausalLM cannot be decoded so: it is no such decoder"),
        (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)), "cannot be cropped"),
        # Four hidden states at a time, of which drafts keep one.
        (
            lambda: Gemma3nForCausalLM(Gemma3nTextConfig(**GEMMA3N)),
            r"Gemma3nForCausalLM cannot draft: RuntimeError\(.*\).*Decode plainly",
        ),
    ],
)
def test_a_profile_refuses_a_model_that_cannot_draft_before_it_decodes(make, reason, monkeypatch):
    model = undecoded(monkeypatch, make())
    with pytest.raises(ValueError, match=reason):
        speculation_profile(model, [torch.tensor([[5, 6, 7]])], max_new_tokens=4, repeats=1)
    with pytest.raises(ValueError, match=reason):
        model.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=4,
            pad_token_id=0,
            custom_generate=draft_with(1),
        )


def test_the_exit_command_keeps_the_layers_of_a_decoder_that_cannot_decode(tmp_path, capsys):
    bart().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text('{"text": "w3 w4 w5 w6 w7"}\n{"text": "w8 w9 w1 w2 w3"}')
    flags = [
        "--text_file",
        str(tmp_path / "texts.jsonl"),
        "--max_new_tokens",
        "4",
        "--repeats",
        "1",
    ]
    cli.main(["exit", str(tmp_path / "model"), *flags])
    assert "No speculation profile: `draft_with` decodes" in capsys.readouterr().out
    profile = ExitProfile.from_json(str(tmp_path / "model" / "exit_profile.json"))
    ids = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 3, 4, 5]])
    loss = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids, labels=ids).loss
    assert profile.losses[-1] == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shortlist", [VOCAB]),
        ("shortlist", []),
        ("shortlist", "abc"),
        ("shortlist", [[3], [4, 5]]),
        ("shortlist", Counter({5: 2, VOCAB: 1})),
        ("shortlist", Counter("words")),
        ("repeats", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_profile_refuses_a_bad_argument_before_it_decodes(name, value, monkeypatch):
    model = undecoded(monkeypatch, spread(llama()))
    with pytest.raises(ValueError, match=f"`{name}` ") as refusal:
        speculation_profile(
            model, [torch.tensor([[5, 6, 7]])], **{"max_new_tokens": 4, name: value}
        )
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_ids_of_a_shortlist_are_whole_numbers_of_any_width(kind):
    model, shortlist, inputs = spread(llama()), np.arange(5, 25, dtype=kind), prompts(1, 4)
    profile = speculation_profile(
        model, [inputs["input_ids"]], max_new_tokens=4, repeats=1, shortlist=shortlist
    )
    assert profile.shortlist in (None, [*range(5, 25)])
    settings = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
    drafted = model.generate(**inputs, **settings, custom_generate=draft_with(1, shortlist))
    assert torch.equal(drafted, model.generate(**inputs, **settings))


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 0), (1, 1, 3)])
def test_a_profile_refuses_prompts_that_are_not_one_text_each(shape, monkeypatch):
    model, texts = (
        undecoded(monkeypatch, llama()),
        [torch.tensor([[5, 6, 7]]), torch.full(shape, 5)],
    )
    with pytest.raises(
        ValueError, match=r"`prompts` is of shapes .*; give token ids, \[1, seq\] each"
    ):
        speculation_profile(model, texts, max_new_tokens=4)


@pytest.mark.parametrize("length", [0, -3, 2.5, None, "3"])
def test_drafts_of_a_round_are_a_whole_number(length):
    with pytest.raises(
        ValueError, match=f"`length` is {length!r}; give drafts of a round, at least 1"
    ):
        llama().generate(
            **prompts(1, 4), max_new_tokens=4, custom_generate=draft_with(1, length=length)
        )


@pytest.mark.parametrize("length", [1, 3])
def test_a_round_has_no_more_drafts_than_asked_for(length):
    model = agreeing(spread(llama(num_layers=5)), 2, 0.0)
    decode, inputs = draft_with(2, length=length), prompts(1, 4)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=13, pad_token_id=0)
    model.generate(
        **inputs, max_new_tokens=2, custom_generate=decode, pad_token_id=0
    )  # checks the model
    counts = run_positions(model, model.model.layers)
    drafted = model.generate(
        **inputs, do_sample=False, max_new_tokens=13, pad_token_id=0, custom_generate=decode
    )
    assert (
        torch.equal(drafted, plain) and max(counts[-1][1:]) == length and sum(counts[-1][1:]) == 12
    )


def test_the_best_exit_is_the_fastest_or_none():
    nan = float("nan")
    profile = SpeculationProfile([0.1, 0.9, 0.9], [nan, 30.0, 25.0], 20.0, [nan, 1.0, 1.0])
    assert profile.best == 2 and "draft_with(2)" in str(profile)
    assert "draft_with(2, shortlist)" in str(replace(profile, shortlist=[3, 4]))
    slow = SpeculationProfile([0.1, 0.2], [nan, 10.0], 20.0, [nan, 1.0])
    assert slow.best is None and "plain decoding" in str(slow)


def test_windows_that_count_gaps_in_the_cache_take_one_text():
    model = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=VOCAB, hidden_size=16, num_layers=2, num_heads=2, window_size=4,
                                           attention_types=[[["global", "local"], 1]]))  # fmt: skip
    for texts in (torch.arange(3, 9)[None], torch.arange(3, 15).view(2, 6)):
        if len(texts) > 1:
            with pytest.raises(
                ValueError, match="`attention_layers` takes one text; the batch has 2"
            ):
                model.generate(texts, max_new_tokens=4, custom_generate=draft_with(1))
        else:
            plain = model.generate(texts, max_new_tokens=9, do_sample=False)
            assert torch.equal(
                model.generate(texts, max_new_tokens=9, custom_generate=draft_with(1)), plain
            )
