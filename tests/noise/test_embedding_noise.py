from contextlib import ExitStack

import numpy as np
import pytest
import torch
from noisy import Spy, added_noise, assert_noise_on, batch, vit
from scipy.stats import kstest
from tiny.models import VOCAB, bert, llama
from torch import nn
from transformers import BartConfig, BartModel, FNetConfig, FNetForMaskedLM

from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.noise.embedding_noise import EmbeddingNoise, estimate_sigma
from hf_descent.readout.replay import layer_logits


# ---- the noise itself ----


def test_noise_is_gaussian_with_deviation_gamma_times_sigma():
    ids = torch.randint(3, VOCAB, (64, 30), generator=torch.Generator().manual_seed(0))
    (noise,) = added_noise(bert().eval(), {"input_ids": ids}, gamma=1.5, seed=0, sigma=0.2)
    sample = noise.double().flatten().numpy()
    assert kstest(sample / 0.3, "norm").pvalue > 0.01
    assert kstest(sample / 0.3 / 1.05, "norm").pvalue < 1e-3  # an error of 5 % would be seen
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.02


def fnet():
    """Without attention: its layers are given no mask."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "max_position_embeddings": 16,
    }
    return FNetForMaskedLM(FNetConfig(vocab_size=VOCAB, **sizes))


@pytest.mark.parametrize("build", [bert, llama, fnet])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_untouched_bit_for_bit(side, build):
    inputs = batch(side)
    (noise,) = added_noise(build().eval(), inputs, gamma=2.0, seed=0)
    assert_noise_on(inputs["attention_mask"], noise)


@pytest.mark.parametrize("mask", [None, torch.zeros(3, 1, 7, 7)], ids=["none", "4-D"])
def test_every_position_is_perturbed_without_a_two_dimensional_mask(mask):
    (noise,) = added_noise(llama().eval(), {**batch(), "attention_mask": mask}, gamma=1.0, seed=0)
    assert (noise != 0).all()


def test_level_zero_touches_nothing():
    model, inputs = bert().eval(), batch()
    with torch.no_grad():
        clean = model(**inputs).logits
        state = torch.get_rng_state()
        with EmbeddingNoise(model, 0.0, seed=0):
            assert torch.equal(model(**inputs).logits, clean)
        with EmbeddingNoise(model, 1.0, seed=0):
            assert not torch.equal(model(**inputs).logits, clean)
        assert torch.equal(model(**inputs).logits, clean)
    assert torch.equal(torch.get_rng_state(), state)


def test_levels_of_a_range_are_uniform_for_each_sample_of_each_call():
    model, ids = (
        bert().eval(),
        torch.randint(3, VOCAB, (400, 30), generator=torch.Generator().manual_seed(0)),
    )
    with (
        EmbeddingNoise(model, (0.5, 2.0), 0, 0.1),
        Spy(model.get_input_embeddings()) as spy,
        torch.no_grad(),
    ):
        model(ids)
        model(ids)
    # [samples] each, within about 3 % of each sample's level
    first, second = (noise.double().flatten(1).std(dim=1).numpy() / 0.1 for noise in spy.added)
    assert kstest(first, "uniform", args=(0.5, 1.5)).pvalue > 0.01
    assert kstest(first[:200], first[200:]).pvalue > 0.01
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def test_level_can_be_changed_while_attached():
    model, inputs = bert().eval(), batch()
    noise = EmbeddingNoise(model, 1.0, seed=0)
    with noise, Spy(model.get_input_embeddings()) as spy, torch.no_grad():
        for gamma in (1.0, 0.0, 3.0):
            noise.gamma = gamma
            noise.reseed()
            model(**inputs)
    assert (spy.added[1] == 0).all()
    torch.testing.assert_close(spy.added[2], 3.0 * spy.added[0], rtol=1e-4, atol=1e-6)


def test_half_precision_adds_noise_drawn_in_float32():
    model, inputs = bert().eval(), batch(real=(7, 7, 7))
    (noise,) = added_noise(model, inputs, gamma=1.0, seed=0, sigma=0.02)
    model.to(torch.bfloat16)
    with EmbeddingNoise(model, 1.0, seed=0, sigma=0.02), Spy(model.get_input_embeddings()) as spy:
        model(**inputs)
    clean = nn.functional.embedding(inputs["input_ids"], model.get_input_embeddings().weight)
    assert spy.noisy[0].dtype == torch.bfloat16
    torch.testing.assert_close(spy.noisy[0], clean + noise.to(torch.bfloat16), rtol=2e-2, atol=1e-3)


# ---- seeding ----


def test_seed_and_key_fix_the_noise():
    model, inputs = bert().eval(), batch()
    noise = EmbeddingNoise(model, 1.0, seed=7)
    with noise, Spy(model.get_input_embeddings()) as spy, torch.no_grad():
        for key in [(), (0, 1), (1, 0), (0, 1), ()]:
            noise.reseed(*key)
            model(**inputs)
        model(**inputs)
    a, b, c, d, e, f = spy.added
    assert torch.equal(a, e)
    assert torch.equal(b, d)
    different = [a, b, c, f]  # the last one goes on where `e` stopped
    assert not any(torch.equal(x, y) for i, x in enumerate(different) for y in different[:i])
    seeds = []
    for global_seed in (0, 0, 1):  # no seed draws one from the global generator
        torch.manual_seed(global_seed)
        seeds.append(EmbeddingNoise(model, 1.0).seed)
    assert seeds[0] == seeds[1] != seeds[2] != EmbeddingNoise(model, 1.0).seed


# ---- hooks ----


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "before", [False, True], ids=["hook after the noise's", "hook before the noise's"]
)
@pytest.mark.parametrize("failing", ["", "bert", "bert.embeddings", "bert.encoder"])
@pytest.mark.parametrize(
    "inputs", [batch(), {"inputs_embeds": torch.zeros(2, 5, 16)}], ids=["ids", "embeddings"]
)
def test_a_failing_forward_does_not_spoil_the_next(inputs, failing, before):
    model = bert().eval()
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0):
        expected = model(**inputs).logits
    noise = EmbeddingNoise(model, 1.0, seed=0)
    attached = ExitStack()
    if not before:
        attached.enter_context(noise)
    handle = model.get_submodule(failing).register_forward_pre_hook(lambda module, args: 1 / 0)
    with torch.no_grad(), noise, attached:
        with pytest.raises(ZeroDivisionError):
            model(**inputs)
        handle.remove()
        noise.reseed()
        assert torch.equal(model(**inputs).logits, expected)


def test_attaching_twice_adds_noise_once():
    model, inputs = bert().eval(), batch()
    expected = added_noise(model, inputs, gamma=1.0, seed=0)[0]
    noise = EmbeddingNoise(model, 1.0, seed=0)
    with noise, noise, Spy(model.get_input_embeddings()) as spy:
        assert len(model._forward_hooks) == 1
        model(**inputs)
    assert torch.equal(spy.added[0], expected)
    with pytest.raises(RuntimeError, match="boom"), noise:
        raise RuntimeError("boom")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_lookups_outside_the_models_forward_are_clean():
    model = bert().eval()
    with EmbeddingNoise(model, 1.0, seed=0), Spy(model.get_input_embeddings()) as spy:
        model.get_input_embeddings()(batch()["input_ids"])
    assert (spy.added[0] == 0).all()


@pytest.mark.parametrize(
    ("build", "stack"), [(bert, "bert.encoder.layer"), (llama, "model.layers")]
)
def test_replays_of_the_readout_see_the_noise_once(build, stack):
    model, inputs = build(num_layers=3).eval(), batch()
    with torch.no_grad():
        with EmbeddingNoise(model, 1.0, seed=0):
            logits = layer_logits(model, inputs)
        truncated = []
        for depth in (1, 2, 3):
            cut = build(num_layers=3).eval()
            del cut.get_submodule(stack)[depth:]
            cut.config.num_hidden_layers = depth
            with EmbeddingNoise(cut, 1.0, seed=0):
                truncated.append(cut(**inputs).logits)
    torch.testing.assert_close(logits, truncated)


def test_replays_draw_no_noise_of_their_own():
    peft = pytest.importorskip("peft")
    # The replays call the model inside the wrapper anew, as any forward does.
    model = peft.get_peft_model(vit(), peft.LoraConfig(target_modules=["q_proj", "query"])).eval()
    inputs = {"pixel_values": torch.zeros(2, 3, 8, 8)}
    with torch.no_grad(), EmbeddingNoise(model, 1.0, seed=0, sigma=1.0) as noise:
        layer_logits(model, inputs)  # finds the layers first
        second = model(**inputs).logits
        noise.reseed()
        model(**inputs)
        assert torch.equal(model(**inputs).logits, second)


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = llama().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with EmbeddingNoise(model, 1.0, seed=0):
            model(**batch(), labels=batch()["input_ids"]).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])


def test_models_without_a_lookup_may_be_compiled_too():
    model, clips = (
        UTForVideoDenoising(UTConfig(hidden_size=16, num_hidden_layers=2)).eval(),
        torch.rand(2, 4, 16),
    )
    found = []
    for each in (model, torch.compile(model, backend="aot_eager")):
        with torch.no_grad(), EmbeddingNoise(each, 0.5, seed=0, sigma=0.2):
            found.append(each(clips).logits)
    torch.testing.assert_close(*found)


@pytest.mark.slow
def test_compiled_models_get_the_same_noise():
    model, inputs = bert().eval(), batch()
    compiled = torch.compile(model)
    with torch.no_grad():
        clean = model(**inputs).logits
        for _ in range(2):
            with EmbeddingNoise(compiled, 1.0, seed=0):
                noisy = compiled(**inputs).logits
            with EmbeddingNoise(model, 1.0, seed=0):
                torch.testing.assert_close(noisy, model(**inputs).logits)
            torch.testing.assert_close(compiled(**inputs).logits, clean)


# ---- sigma ----


def test_default_sigma_is_the_deviation_of_the_table_without_padding():
    model = bert(pad_token_id=0)
    table = model.get_input_embeddings().weight.detach().double().numpy()
    assert EmbeddingNoise(model, 1.0).sigma == pytest.approx(table[1:].std(), rel=1e-6)
    assert table.std() != pytest.approx(table[1:].std(), rel=1e-3)
    model.config.noise_sigma = 0.25
    assert EmbeddingNoise(model, 1.0).sigma == 0.25
    assert EmbeddingNoise(model, 1.0, sigma=0.5).sigma == 0.5


def test_default_sigma_includes_the_scale_of_the_lookup():
    torch.manual_seed(0)
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    model = BartModel(BartConfig(vocab_size=VOCAB, d_model=16, scale_embedding=True, **sizes))
    table = model.shared.weight.detach().double().numpy()
    rows = np.arange(VOCAB) != model.shared.padding_idx
    assert EmbeddingNoise(model, 1.0).sigma == pytest.approx(4.0 * table[rows].std(), rel=1e-6)


def test_sigma_is_estimated_on_real_tokens():
    model, batches = bert(), [batch(), batch("left", length=9, real=(1, 9, 5, 2))]
    table = model.get_input_embeddings().weight.detach().double().numpy()
    values = [table[b["input_ids"][b["attention_mask"] == 1].numpy()].ravel() for b in batches]
    assert estimate_sigma(model, iter(batches)) == pytest.approx(
        np.concatenate(values).std(), rel=1e-9
    )
    of_two_processes = estimate_sigma(model, batches, lambda moments: moments + moments)
    assert of_two_processes == pytest.approx(np.concatenate(values).std(), rel=1e-9)
    embeds = [{"inputs_embeds": model.get_input_embeddings()(b["input_ids"]), **b} for b in batches]
    for b in embeds:
        del b["input_ids"]
    assert estimate_sigma(model, embeds) == pytest.approx(np.concatenate(values).std(), rel=1e-9)


def test_sigma_of_images_is_that_of_their_pixels():
    pixels = 3.0 + 2.0 * torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    # CLIP's mask is that of its text.
    batches = [{"pixel_values": part, "attention_mask": torch.ones(4, 7)} for part in pixels]
    assert estimate_sigma(vit(), batches) == pytest.approx(pixels.double().numpy().std(), rel=1e-9)


# ---- bad input ----


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_levels_are_numbers_or_ranges_of_any_kind(make):
    assert EmbeddingNoise(bert(), make([0.5, 2.0])).gamma == (0.5, 2.0)
    assert EmbeddingNoise(bert(), make([1.0, 1.0])[0]).gamma == 1.0


@pytest.mark.parametrize(
    "gamma",
    [None, "half", -0.1, float("nan"), float("inf"), (1.0, 0.5), (-1.0, 1.0), (0.1, 0.2, 0.3)],
)
def test_bad_levels_are_refused(gamma):
    with pytest.raises(ValueError, match="`gamma` is"):
        EmbeddingNoise(bert(), gamma)


@pytest.mark.parametrize("sigma", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_sigma_is_refused(sigma):
    for model, given in ((bert(), {"sigma": sigma}), (bert(noise_sigma=sigma), {})):
        with pytest.raises(ValueError, match="`config.noise_sigma` is"):
            EmbeddingNoise(model, 1.0, **given)


def test_other_bad_input_is_refused():
    with pytest.raises(ValueError, match="estimate_sigma"):
        EmbeddingNoise(vit(), 1.0)
    with pytest.raises(ValueError, match="non-negative"):
        EmbeddingNoise(bert(), 1.0, seed=-1)
    with pytest.raises(ValueError, match="no input embeddings"):
        EmbeddingNoise(nn.Linear(2, 2), 1.0)
    with pytest.raises(ValueError, match="`input_ids`"):
        estimate_sigma(bert(), [{"labels": torch.zeros(1)}])
    with pytest.raises(ValueError, match="0 values"):
        estimate_sigma(bert(), [])
    model = vit()
    with (
        EmbeddingNoise(model, 1.0, sigma=1.0),
        pytest.raises(ValueError, match=r"dtype torch\.uint8"),
    ):
        model(pixel_values=torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


def test_noise_that_cannot_reach_the_input_is_refused():
    model, unused = bert(), nn.Embedding(VOCAB, 16)
    model.get_input_embeddings = lambda: unused
    with EmbeddingNoise(model, 1.0, seed=0):
        model(inputs_embeds=torch.zeros(3, 7, 16))
        with pytest.raises(ValueError, match="did not reach"):
            model(**batch())
