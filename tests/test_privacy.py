"""Privacy of noisy embeddings: against the closed form of the mechanism, an attack, and what the hooks really do."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from noisy import t5, vit
from scipy.stats import kstest, norm
from tiny.data import classification_data
from tiny.models import bert, llama
from transformers import DynamicCache, MBartConfig, MBartForSequenceClassification

from hf_descent import noise_curve
from hf_descent.evaluation.comparison import Run, check_comparable
from hf_descent.privacy import PrivateEmbeddings, epsilon_of_gamma, gamma_of_epsilon, median_norm


def mbart():
    return MBartForSequenceClassification(
        MBartConfig(
            vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, scale_embedding=True,
        )
    ).eval()  # fmt: skip


def released(noise, ids, **inputs):
    """What the layers of BERT are sent for `ids` `[batch, seq]`: `[batch, seq, hidden]`."""
    model, sent = noise._model, []
    with noise, torch.no_grad():
        handle = noise._lookups[0].register_forward_hook(
            lambda module, args, output: sent.append(output)
        )
        model(input_ids=ids, **inputs)
        handle.remove()
    return sent[0]


def delta_of(epsilon, deviation, sensitivity):
    """Balle and Wang (2018), theorem 8."""
    a, b = sensitivity / (2 * deviation), epsilon * deviation / sensitivity
    return norm.cdf(a - b) - math.exp(epsilon) * norm.cdf(-a - b)


@pytest.mark.parametrize(
    ("gamma", "clip_norm", "sigma", "tokens"), [(1.0, 0.5, 0.7, 1), (3.0, 1.5, 2.0, 16)]
)
def test_epsilon_is_that_of_the_analytic_mechanism(gamma, clip_norm, sigma, tokens):
    epsilon = epsilon_of_gamma(gamma, 1e-5, clip_norm, sigma, tokens)
    assert delta_of(epsilon, gamma * sigma, 2 * clip_norm * math.sqrt(tokens)) == pytest.approx(
        1e-5, rel=1e-6
    )
    assert gamma_of_epsilon(epsilon, 1e-5, clip_norm, sigma, tokens) == pytest.approx(
        gamma, rel=1e-6
    )


def test_embeddings_are_clipped_then_perturbed():
    model = bert()
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table *= torch.linspace(0.1, 3.0, len(table))[:, None] / table.norm(dim=1, keepdim=True)
        table[38, 3], table[39, 3] = math.nan, math.inf
    sent = released(
        PrivateEmbeddings(model, 1e-6, clip_norm=1.0, seed=0, sigma=1.0),
        torch.arange(1, 40)[:, None],
    )
    expected = table[1:38] / table[1:38].norm(dim=-1, keepdim=True).clamp(min=1.0)
    torch.testing.assert_close(sent[:37, 0], expected, atol=1e-4, rtol=0)
    assert (sent.norm(dim=-1) <= 1.0001).all()


def test_no_attack_on_released_embeddings_beats_the_bound():
    """The best test of two tokens against each other, the likelihood ratio, errs as often as delta allows."""
    clip_norm, sigma, gamma, epsilon = 1.0, 0.5, 5.0, 0.8
    model = bert()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        direction = torch.nn.functional.normalize(torch.ones(table.shape[1]), dim=0)
        table[5], table[6] = 7 * direction, -7 * direction  # as far apart as clipping allows
    noise = PrivateEmbeddings(model, gamma, clip_norm, seed=1, sigma=sigma)
    first, second = (
        (released(noise, torch.full((20000, 1), token)) @ direction).flatten() for token in (5, 6)
    )
    # P(A | first) - e^epsilon P(A | second) is at most delta for every event A; the worst is a threshold.
    thresholds = torch.linspace(-8, 8, 200)
    gain = [
        (first > t).double().mean() - math.exp(epsilon) * (second > t).double().mean()
        for t in thresholds
    ]
    delta = delta_of(epsilon, gamma * sigma, 2 * clip_norm)
    assert max(gain) == pytest.approx(delta, abs=0.02)
    assert delta > 0.03  # the bound is met, and not by far


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_which_floats_are_reached_names_no_token(dtype):
    """A sum that cancels is a multiple of half the last place of its larger part: what is not, names the other token.

    The event E "near zero, and no such multiple" must obey P(E | one) <= e^epsilon P(E | other) + delta.
    """
    epsilon, delta, clip_norm, model = 1.0, 1e-5, 4.0, bert(num_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[5:7] = torch.tensor([1.0, 2.0**-12])[
            :, None
        ]  # 16 coordinates: norm 4
    noise = PrivateEmbeddings(
        model.to(dtype), gamma_of_epsilon(epsilon, delta, clip_norm, 1.0), clip_norm, sigma=1.0
    )
    place = torch.finfo(dtype).eps / 2
    shares = []
    for token in (5, 6):
        sent = released(noise, torch.full((4000, 8), token)).double()
        off_lattice = (sent.abs() < 0.5) & (sent % place != 0)
        shares.append(off_lattice.any(-1).double().mean().item())
    assert shares[1] < math.exp(epsilon) * shares[0] + delta
    assert min(shares) > 0.01  # the event happens: the attack is no idle one


def test_no_embedding_is_longer_than_the_norm_to_the_last_bit():
    model = bert(num_layers=1).double()
    with torch.no_grad():
        model.get_input_embeddings().weight *= torch.logspace(0, 4, 40)[:, None]
    for clip_norm in (0.3, 1.0, 7.7):
        noise = PrivateEmbeddings(model, 1e-9, clip_norm, seed=0, sigma=1e-9)  # too little to tell
        for row in released(noise, torch.arange(40)[None, 8:])[0].tolist():
            assert sum(Fraction(value) ** 2 for value in row) <= Fraction(clip_norm) ** 2


def test_the_gradient_is_that_of_clipping():
    model = bert(num_layers=1)
    table, ids = model.get_input_embeddings().weight, torch.tensor([[5, 6], [7, 5]])
    sent = []
    with PrivateEmbeddings(model, 1.0, clip_norm=0.05, sigma=1.0) as noise:
        noise._lookups[0].register_forward_hook(lambda module, args, output: sent.append(output))
        model(ids)
    weights = torch.randn(2, 2, 16)
    (gradient,) = torch.autograd.grad((sent[0] * weights).sum(), table)
    rows = torch.nn.functional.embedding(ids, table)
    clipped = rows * (0.05 / rows.norm(dim=-1, keepdim=True).clamp(min=0.05))
    (expected,) = torch.autograd.grad((clipped * weights).sum(), table)
    torch.testing.assert_close(gradient, expected)


def test_hidden_positions_are_private_too():
    model = bert(num_layers=1)
    noise = PrivateEmbeddings(model, 5.0, clip_norm=1.0, seed=0, sigma=1.0)
    sent = released(
        noise, torch.full((400, 4), 5), attention_mask=torch.tensor([[1, 1, 0, 0]]).expand(400, 4)
    )
    assert (sent.std(dim=(0, 2)) > 4).all()


def test_a_release_has_secret_noise_and_a_measurement_its_seeds():
    model, ids = bert(num_layers=1), torch.full((200, 10), 5)
    sent = []
    for seed in (None, None, 3, 3):
        torch.manual_seed(0)  # as every process does that begins with `set_seed`
        before = torch.get_rng_state()
        noise = PrivateEmbeddings(model, 1.0, clip_norm=1e-9, seed=seed, sigma=0.5)
        sent.append(released(noise, ids))
        assert torch.equal(torch.get_rng_state(), before)
        noise.reseed()
        assert torch.equal(released(noise, ids), sent[-1]) == (seed is not None)
    assert torch.equal(sent[2], sent[3])
    assert (sent[0] == sent[1]).double().mean() < 1e-3  # on a grid, some meet by chance
    for each in sent:
        sample = each.double().flatten().numpy() / 0.5
        assert kstest(sample, "norm").pvalue > 1e-6
        assert sample.std() == pytest.approx(1, abs=0.025)
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.03


def test_no_text_is_released_twice():
    model, inputs = (
        llama(num_layers=1).eval(),
        {"max_new_tokens": 4, "min_new_tokens": 4, "pad_token_id": 0},
    )
    with PrivateEmbeddings(model, 1.0, clip_norm=1.0) as noise:
        for prompt in (torch.tensor([[1, 7, 9][:length]]) for length in (1, 2, 3)):
            inputs["attention_mask"] = torch.ones_like(prompt)
            for _ in range(2):
                assert model.generate(prompt, **inputs).shape == (1, prompt.shape[1] + 4)
                with pytest.raises(ValueError, match="released twice"):
                    model.generate(
                        prompt,
                        use_cache=False,
                        **inputs | {"max_new_tokens": 2, "min_new_tokens": 2},
                    )
    text, cache = torch.tensor([[5, 6, 7, 8]]), DynamicCache()
    with noise, torch.no_grad():
        model(text)
        model(text[:, :3])
        for length in (3, 4, 2):  # as guesses of a draft, that follow what is in the cache
            model(torch.full((1, length), 5), past_key_values=cache)
    classifier, translator = mbart(), t5()
    with (
        PrivateEmbeddings(classifier, 1.0, clip_norm=1.0),
        pytest.raises(ValueError, match="released twice"),
    ):
        classifier(text)
    with PrivateEmbeddings(translator, 1.0, clip_norm=1.0):
        translator(input_ids=text, labels=text.flip(1))
        translator.generate(text, max_new_tokens=3)


@pytest.mark.parametrize("target", ["embed_tokens", "shared"])
def test_what_an_adapter_adds_to_embeddings_is_clipped_and_perturbed(target):
    peft = pytest.importorskip("peft")
    model = t5() if target == "shared" else llama(num_layers=1)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[8, 9, 10]])}
    model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=[target, "embed_tokens"])
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    sent = []
    with PrivateEmbeddings(model, 1e-6, clip_norm=1.0, sigma=1.0, seed=0), torch.no_grad():
        for module in model.modules():
            if type(module).__name__ in ("LlamaDecoderLayer", "T5Block"):
                module.register_forward_pre_hook(
                    lambda module, args: sent.append(args[0].norm(dim=-1).max())
                )
        model(**inputs)
    assert sent[0] < 1.001


def test_noise_is_told_apart_by_what_it_clips_to():
    model, data = bert(), classification_data(16)
    noises = [PrivateEmbeddings(model, 1.0, clip_norm, seed=0) for clip_norm in (0.05, 0.05, 0.01)]
    one, same, other = (
        Run("run", noise_curve(model, data, [1.0], noise=noise, batch_size=8)) for noise in noises
    )
    check_comparable([one, same])
    for run in (other, Run("plain", noise_curve(model, data, [1.0], batch_size=8))):
        with pytest.raises(ValueError, match="not evaluated on the same"):
            check_comparable([one, run])


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: PrivateEmbeddings(bert(), 1.0, 0), "`clip_norm` is 0"),
        (lambda: PrivateEmbeddings(vit(), 1.0, 1.0, sigma=1.0), "no token embeddings"),
        (lambda: epsilon_of_gamma(1.0, 1, 1.0, 1.0), "`delta` is 1"),
        (lambda: epsilon_of_gamma(0, 1e-5, 1.0, 1.0), "`gamma` is 0"),
        (lambda: gamma_of_epsilon(-1, 1e-5, 1.0, 1.0), "`epsilon` is -1"),
    ],
)
def test_bad_arguments_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_the_norm_is_that_of_what_the_model_looks_up():
    model = mbart()
    norms = model.get_input_embeddings().weight.detach().norm(dim=1) * 4  # scaled by the root of 16
    assert median_norm(model) == pytest.approx(norms.median().item(), rel=0.05)
