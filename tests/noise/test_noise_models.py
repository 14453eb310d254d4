"""Where the noise is added in models of every kind, and in generation."""

from functools import partial

import pytest
import torch
from noisy import Gain, Spy, added_noise, assert_noise_on, batch, gemma3n, t5, vit
from scipy.stats import kstest
from tiny.models import VOCAB, bert, llama
from transformers import GPT2Config, GPT2Model, MarianConfig, MarianMTModel, XLNetConfig, XLNetModel

from hf_descent.noise.embedding_noise import EmbeddingNoise


# ---- where it is added ----


def test_inputs_embeds_and_positional_arguments():
    model, inputs = bert().eval(), batch()
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    mask = inputs["attention_mask"]
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0) as noise:
        by_name = model(**inputs).logits
        noise.reseed()
        by_position = model(inputs["input_ids"], mask).logits
        noise.reseed()
        from_embeds = model(inputs_embeds=embeds, attention_mask=mask).logits
    assert torch.equal(by_name, by_position)
    assert torch.equal(by_name, from_embeds)


def test_images_are_perturbed_at_the_main_input():
    model, pixels = vit(), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    seen = []
    handle = model.vit.embeddings.register_forward_pre_hook(
        lambda module, args: seen.append(args[0])
    )
    with torch.no_grad(), EmbeddingNoise(model, 0.5, seed=0, sigma=2.0) as noise:
        model(pixel_values=pixels)
        noise.reseed()
        model(pixels)
    handle.remove()
    assert torch.equal(seen[0], seen[1])
    sample = (seen[0] - pixels).flatten().double().numpy()
    assert kstest(sample, "norm", args=(0.0, 1.0)).pvalue > 0.01


def test_masks_of_other_inputs_do_not_count_for_images():
    model, frames = Gain(), torch.zeros(2, 4, 8, 8)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    with EmbeddingNoise(model, 1.0, seed=0, sigma=1.0):
        by_frame = model(frames, attention_mask=mask)
        unrelated = model(frames, attention_mask=torch.zeros(2, 6))
    assert_noise_on(mask, by_frame)
    assert (unrelated != 0).all()


def test_token_types_looked_up_in_the_same_table_are_not_perturbed():
    torch.manual_seed(0)
    model = GPT2Model(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    ).eval()
    inputs = batch(real=(7, 7, 7))
    tokens, types = added_noise(
        model, {**inputs, "token_type_ids": inputs["input_ids"] * 0}, gamma=1.0, seed=0
    )
    assert (tokens != 0).all()
    inputs = {"inputs_embeds": torch.zeros(3, 7, 16), "token_type_ids": inputs["input_ids"] * 0}
    (alone,) = added_noise(model, inputs, gamma=1.0, seed=0)  # the embeddings have theirs already
    assert (types == 0).all() and (alone == 0).all()


def test_tokens_that_are_looked_up_twice_or_with_the_batch_last_are_refused():
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "d_model": 16,
    }
    shares = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    apart = MarianMTModel(
        MarianConfig(vocab_size=VOCAB, decoder_vocab_size=VOCAB, **sizes, **shares)
    )
    xlnet = XLNetModel(XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=1, n_head=2, d_inner=16))
    for model in (apart, gemma3n(), xlnet):
        with pytest.raises(ValueError, match="looks its tokens up a second time"):
            EmbeddingNoise(model, 1.0)


def test_encoder_and_decoder_are_perturbed_under_their_own_masks():
    model, inputs, decoder = t5(), batch(), batch("left", length=5, real=(5, 3, 1))
    arguments = {**inputs, **{f"decoder_{name}": value for name, value in decoder.items()}}
    encoder_noise, decoder_noise = added_noise(
        model, arguments, model.encoder.embed_tokens, model.decoder.embed_tokens, gamma=1.0, seed=0
    )
    assert_noise_on(inputs["attention_mask"], encoder_noise)
    assert_noise_on(decoder["attention_mask"], decoder_noise)


def test_embeddings_of_the_decoder_are_perturbed_under_its_mask():
    model, mask = t5(), batch("left", length=5, real=(5, 3, 1))["attention_mask"]
    seen = []
    model.decoder.register_forward_pre_hook(
        lambda module, args, given: seen.append(given), with_kwargs=True
    )
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0):
        model(**batch(), decoder_inputs_embeds=torch.zeros(3, 5, 16), decoder_attention_mask=mask)
    assert_noise_on(mask, seen[0]["inputs_embeds"])


def test_encoder_and_decoder_share_the_level_of_a_sample():
    model, ids = t5(), torch.randint(3, VOCAB, (8, 50), generator=torch.Generator().manual_seed(0))
    modules = model.encoder.embed_tokens, model.decoder.embed_tokens
    arguments = {"input_ids": ids, "decoder_input_ids": ids}
    encoder, decoder = (
        noise.std(dim=(1, 2))
        for noise in added_noise(model, arguments, *modules, gamma=(0, 2), seed=0, sigma=1.0)
    )
    torch.testing.assert_close(encoder, decoder, rtol=0.1, atol=0.0)
    assert encoder.max() > 1.5 * encoder.min()


def test_noise_goes_with_peft_models():
    peft = pytest.importorskip("peft")
    inputs = batch()
    model = llama().eval()
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0):
        expected = model(**inputs).logits
    for options in (
        {},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ):
        config = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})
        adapted = peft.get_peft_model(llama(), config).eval()  # a fresh adapter changes nothing
        with torch.no_grad(), EmbeddingNoise(adapted, 1.0, seed=0):
            torch.testing.assert_close(adapted(**inputs).logits, expected)
        generation = {**batch("left"), "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0}
        with EmbeddingNoise(adapted, 5.0, seed=0):
            noisy = adapted.generate(**generation)
        assert not torch.equal(noisy, adapted.generate(**generation))


def test_inputs_of_peft_models_are_perturbed_by_position():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(vit(), peft.LoraConfig(target_modules=["q_proj", "query"])).eval()
    pixels = torch.zeros(2, 3, 8, 8)
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0, sigma=1.0) as noise:
        noisy = model(pixels).logits
        noise.reseed()
        assert torch.equal(model(pixel_values=pixels).logits, noisy)
    assert not torch.equal(model(pixels).logits, noisy)


def test_prefixes_are_no_embeddings():
    peft = pytest.importorskip("peft")
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model, inputs = peft.get_peft_model(llama(), prefix).eval(), batch("left")
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0) as noise:
        logits = model(**inputs).logits
        noise.reseed()
        assert torch.equal(
            model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits, logits
        )


# ---- generation ----


def test_cached_generation_equals_one_pass_over_its_perturbed_embeddings():
    model, inputs = llama().eval(), batch("left")
    with EmbeddingNoise(model, 2.0, seed=0), Spy(model.get_input_embeddings()) as spy:
        tokens = model.generate(
            **inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
        )
    assert [noise.shape[1] for noise in spy.added] == [7, 1, 1, 1, 1, 1]
    assert (spy.added[0][inputs["attention_mask"] == 0] == 0).all()
    assert all((noise != 0).all() for noise in spy.added[1:])
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 5, dtype=torch.long)], dim=1)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(
            inputs_embeds=torch.cat(spy.noisy, dim=1),
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
        ).logits
    assert torch.equal(tokens[:, 7:], logits[:, 6:].argmax(-1))


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampling", "beam"]
)
@pytest.mark.parametrize("build", [partial(llama, initializer_range=0.5), t5], ids=["llama", "t5"])
def test_generation_is_reproducible_under_a_seed(build, options):
    model, outputs = build().eval(), []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        with EmbeddingNoise(model, 5.0, seed=seed):
            outputs.append(
                model.generate(
                    **batch("left"), max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options
                )
            )
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_generation_perturbs_an_encoder_that_is_called_directly():
    model, inputs = t5(), batch()
    with (
        EmbeddingNoise(model, 1.0, seed=0),
        Spy(model.encoder.embed_tokens, model.decoder.embed_tokens) as spy,
    ):
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
    assert_noise_on(inputs["attention_mask"], spy.added[0])
    assert len(spy.added) == 5
    assert all((noise != 0).all() for noise in spy.added[1:])
