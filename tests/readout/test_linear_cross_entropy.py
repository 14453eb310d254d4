import itertools
import math

import pytest
import torch
from naive_head import (
    BATCH,
    HIDDEN,
    LAYERS,
    SEQ,
    VOCAB,
    WEIGHTS,
    Watch,
    gradients,
    naive_sums,
    setting,
)
from tiny.devices import TEST_DEVICE
from torch import nn

from hf_descent.readout import tiles
from hf_descent.readout.linear_cross_entropy import HeadLoss, labelled_tokens, tiled_layer_losses


@pytest.fixture(params=[None, 2 * VOCAB], ids=["one tile", "two rows a tile"])
def tile_size(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(tiles, "TILE_ELEMENTS", {TEST_DEVICE: request.param})
        monkeypatch.setattr(tiles, "SLICE_ELEMENTS", {TEST_DEVICE: VOCAB})


OPTIONS = {
    "plain": {}, "bias": {"bias": True}, "layer norm": {"norm": "layer", "bias": True}, "no norm": {"norm": "none"},
    "logit scale": {"logit_scale": 0.0625, "bias": True}, "softcap": {"softcap": 0.8},
    "label smoothing": {"label_smoothing": 0.1},
    "all": {"bias": True, "norm": "layer", "logit_scale": 3.0, "softcap": 1.5, "label_smoothing": 0.2},
    "shifted already": {"shift": False}, "all labelled": {"ignored": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(11.0)])
def test_losses_and_gradients_are_the_naive_ones(option, num_items, tile_size):
    options = dict(OPTIONS[option])
    hidden, norm, head, labels = setting(
        **{k: options.pop(k) for k in ("bias", "norm", "ignored") if k in options}
    )
    token_options = {k: options.pop(k) for k in ("shift",) if k in options}
    head_loss = HeadLoss(**options)

    sums = naive_sums(hidden, norm, head, labels, head_loss, **token_options)
    tokens = labelled_tokens(labels, LAYERS - 1, **token_options)
    items = len(tokens.rows) if num_items is None else num_items
    expected = (WEIGHTS * sums).sum() / items
    (3.5 * expected).backward()  # the factor stands for loss scaling
    naive = gradients(hidden, norm, head)

    out = tiled_layer_losses(
        hidden, tokens, norm, head, WEIGHTS, head_loss=head_loss, num_items=num_items
    )
    (3.5 * out.objective).backward()
    torch.testing.assert_close(out.sums, sums.detach())
    torch.testing.assert_close(out.objective.detach(), expected.detach())
    torch.testing.assert_close(gradients(hidden, norm, head), naive)
    assert not out.sums.requires_grad


@pytest.mark.parametrize("frozen", ["head", "norm", "first layer"])
def test_frozen_parts_get_no_gradient(frozen):
    hidden, norm, head, labels = setting(bias=True)
    if frozen == "first layer":
        hidden[0].requires_grad_(False)
    else:
        {"head": head, "norm": norm}[frozen].requires_grad_(False)
    (WEIGHTS * naive_sums(hidden, norm, head, labels)).sum().backward()
    naive = gradients(hidden, norm, head)
    out = tiled_layer_losses(
        hidden, labelled_tokens(labels, LAYERS - 1), norm, head, WEIGHTS, num_items=1
    )
    out.objective.backward()
    torch.testing.assert_close(gradients(hidden, norm, head), naive)


def test_products_per_layer(tile_size):
    hidden, norm, head, labels = setting()
    tokens = labelled_tokens(labels, LAYERS - 1)
    product = 2 * len(tokens.rows) * HIDDEN * VOCAB

    def flops(weights, **kwargs):
        with Watch() as watch:
            tiled_layer_losses(hidden, tokens, norm, head, weights, **kwargs)
        return watch.flops / product

    assert flops(None) == LAYERS
    assert flops(WEIGHTS) == 3 * LAYERS
    assert flops(WEIGHTS, value_only=(1, 3)) == 3 * LAYERS - 2 * 2
    head.requires_grad_(False)
    assert flops(WEIGHTS) == 2 * LAYERS
    with torch.no_grad():
        assert flops(WEIGHTS) == LAYERS


@pytest.mark.parametrize(("fraction", "count", "size"), [(1.0, 18, 18), (0.5, 9, 2)])
def test_value_only_layers_equal_weight_zero_and_are_read_on_a_quarter_of_a_sample(
    fraction, count, size
):
    hidden, norm, head, labels = setting(bias=True, ignored=0.0)
    tokens = labelled_tokens(labels, LAYERS - 1, fraction=fraction)
    few = tokens if tokens.samples is None else tokens._replace(samples=tokens.samples[:, :size])
    weights = WEIGHTS * torch.tensor([0.0, 1.0, 0.0, 1.0])
    with Watch() as all_layers:
        expected = tiled_layer_losses(hidden, tokens, norm, head, weights)
    expected.objective.backward()
    wanted = gradients(hidden, norm, head)
    # Whatever stands in the weights of these layers is not read.
    garbage = torch.where(weights == 0, torch.nan, weights)
    with Watch() as watch:
        out = tiled_layer_losses(hidden, tokens, norm, head, garbage, value_only=(1, 3))
    out.objective.backward()
    torch.testing.assert_close(
        (out.sums[1::2], out.objective), (expected.sums[1::2], expected.objective)
    )
    torch.testing.assert_close(out.sums[::2], tiled_layer_losses(hidden, few, norm, head).sums[::2])
    found = [
        torch.zeros_like(w) if g is None else g
        for g, w in zip(gradients(hidden, norm, head), wanted)
    ]
    torch.testing.assert_close(found, wanted)
    assert all_layers.flops - watch.flops == 2 * 2 * VOCAB * (
        HIDDEN * (3 * count - size) + count
    )  # for the bias


@pytest.mark.parametrize("sampled", [False, True])
def test_no_read_waits_for_the_device(sampled):
    hidden, norm, head, labels = setting(bias=True)
    tokens = labelled_tokens(labels, LAYERS - 1, fraction=0.5 if sampled else 1.0)
    with Watch() as watch:
        tiled_layer_losses(
            hidden, tokens, norm, head, WEIGHTS, value_only=(1, 3)
        ).objective.backward()
    assert watch.flops and not watch.waits


def test_two_passes_give_the_gradient_of_a_nonlinear_objective():
    hidden, norm, head, labels = setting()
    tokens = labelled_tokens(labels, LAYERS - 1)

    def quadratic(losses):
        return losses[-1] + 0.5 * (losses[1:] - 0.9 * losses[:-1]).clamp(min=0).square().sum()

    quadratic(naive_sums(hidden, norm, head, labels) / len(tokens.rows)).backward()
    naive = gradients(hidden, norm, head)

    values = tiled_layer_losses(hidden, tokens, norm, head)
    assert values.objective is None
    assert all(not isinstance(value, torch.Tensor) or not value.requires_grad for value in values)
    losses = (values.sums / len(tokens.rows)).requires_grad_()
    (weights,) = torch.autograd.grad(quadratic(losses), losses)
    tiled_layer_losses(hidden, tokens, norm, head, weights).objective.backward()
    torch.testing.assert_close(gradients(hidden, norm, head), naive)


def test_batch_without_labels():
    hidden, norm, head, labels = setting(bias=True)
    out = tiled_layer_losses(
        hidden, labelled_tokens(torch.full_like(labels, -100), LAYERS - 1), norm, head, WEIGHTS
    )
    out.objective.backward()
    assert out.objective == 0 and (out.sums == 0).all()
    assert all((gradient == 0).all() for gradient in gradients(hidden, norm, head))


def test_second_backward_is_refused():
    hidden, norm, head, labels = setting()
    out = tiled_layer_losses(hidden, labelled_tokens(labels, LAYERS - 1), norm, head, WEIGHTS)
    out.objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph"):
        out.objective.backward()


@pytest.mark.parametrize("half", [False, True])
def test_entropies_and_hits_of_the_last_layer(tile_size, half):
    hidden, norm, head, labels = setting(norm="none", dtype=torch.float32)
    tokens = labelled_tokens(labels, LAYERS - 1)
    with torch.autocast(TEST_DEVICE, torch.bfloat16, enabled=half):
        logits = head(hidden[-1]).flatten(0, 1)[tokens.rows].float()
        out = tiled_layer_losses(hidden, tokens, norm, head, WEIGHTS.float(), token_statistics=True)
    torch.testing.assert_close(
        out.tokens.entropies, torch.distributions.Categorical(logits=logits).entropy()
    )
    assert torch.equal(out.tokens.hits, logits.argmax(-1) == tokens.targets)
    losses = nn.functional.cross_entropy(logits, tokens.targets, reduction="none")
    torch.testing.assert_close(out.tokens.losses, losses)
    out.objective.backward()
    found = gradients(hidden, norm, head)
    with torch.autocast(TEST_DEVICE, torch.bfloat16, enabled=half):
        tiled_layer_losses(hidden, tokens, norm, head, WEIGHTS.float()).objective.backward()
    torch.testing.assert_close(found, gradients(hidden, norm, head))


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_accumulates_in_float32(autocast, tile_size):
    hidden, norm, head, labels = setting(bias=True, dtype=torch.float32)
    (WEIGHTS.float() * naive_sums(hidden, norm, head, labels)).sum().backward()
    exact = gradients(hidden, norm, head)
    if not autocast:
        norm, head = norm.bfloat16(), head.bfloat16()
        hidden = [state.detach().bfloat16().requires_grad_() for state in hidden]
    with torch.autocast(TEST_DEVICE, torch.bfloat16, enabled=autocast):
        out = tiled_layer_losses(
            hidden, labelled_tokens(labels, LAYERS - 1), norm, head, WEIGHTS.float(), num_items=1
        )
    assert out.sums.dtype == torch.float32
    out.objective.backward()
    for got, wanted in zip(gradients(hidden, norm, head), exact, strict=True):
        assert got.dtype == (torch.float32 if autocast else torch.bfloat16)
        assert (got.float() - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.parametrize("weight", [1.0, 1e5])
@pytest.mark.parametrize("size", [None, 3])
def test_weights_beyond_the_range_of_float16(weight, size, tile_size):
    hidden, norm, head, labels = setting(bias=True, dtype=torch.float32)
    tokens = labelled_tokens(labels, LAYERS - 1)
    if size is not None:
        tokens = tokens._replace(samples=torch.arange(size)[None])
    for outlier in (1.0, 4000.0):  # a channel of the final norm
        with torch.no_grad():
            norm.weight[0] *= outlier
            head.weight[:, 0] /= outlier
        found = []
        for half in (False, True):
            with torch.autocast(TEST_DEVICE, torch.float16, enabled=half):
                out = tiled_layer_losses(hidden, tokens, norm, head, weight * WEIGHTS.float())
            (
                out.objective * 1024 / outlier
            ).backward()  # loss scaling, which shrinks where a gradient is infinite
            found.append([out.objective.detach(), *gradients(hidden, norm, head)])
        for exact, got in zip(*found, strict=True):
            assert (got - exact).norm() <= 0.01 * exact.norm()


# ---- sampled tokens ----


def all_samples(tokens, size):
    return [
        tokens._replace(samples=torch.tensor([s]))
        for s in itertools.combinations(range(len(tokens.rows)), size)
    ]


def losses_per_token(hidden, tokens, norm, head):
    reads = [
        tiled_layer_losses([state], tokens, norm, head, token_statistics=True) for state in hidden
    ]
    return torch.stack([read.tokens.losses for read in reads])  # [layers, tokens]


def test_sampled_losses_and_gradients_are_unbiased_with_the_stated_variance():
    hidden, norm, head, labels = setting()
    labels[1:] = -100
    tokens = labelled_tokens(labels, LAYERS - 1)
    count, size = len(tokens.rows), 2
    assert count >= 4
    full = tiled_layer_losses(hidden, tokens, norm, head, WEIGHTS)
    full.objective.backward()
    expected = gradients(hidden, norm, head)
    per_token = losses_per_token(hidden, tokens, norm, head)

    runs, found = [], []
    for drawn in all_samples(
        tokens, size
    ):  # each is as likely as any other, so their mean is the expectation
        runs.append(tiled_layer_losses(hidden, drawn, norm, head, WEIGHTS))
        runs[-1].objective.backward()
        found.append(gradients(hidden, norm, head))
    torch.testing.assert_close([torch.stack(column).mean(0) for column in zip(*found)], expected)
    torch.testing.assert_close(torch.stack([run.objective for run in runs]).mean(), full.objective)
    sums = torch.stack([run.sums for run in runs])  # [samples, layers]
    torch.testing.assert_close(sums.mean(0), full.sums)

    # The sample means' variance without replacement is (1 - n / N) s^2 / n, also of a violation's two layers.
    def stated(values):
        return count**2 * (1 - size / count) * values.var(-1) / size

    corrected = torch.cat(
        [per_token[:-1] - per_token[-1], torch.zeros(1, count)]
    )  # f_L is read on all tokens
    torch.testing.assert_close(sums.var(0, correction=0), stated(corrected))
    violations = sums[:, 1:] - 0.9 * sums[:, :-1]
    torch.testing.assert_close(
        violations.var(0, correction=0), stated(corrected[1:] - 0.9 * corrected[:-1])
    )


def test_noise_where_layers_err_alike():
    """Estimates have less than the sample's own mean, and the gradient of their sum less than on the same tokens."""
    hidden, norm, head, labels = setting()
    hidden = [hidden[-1] + 0.3 * state for state in hidden[:-1]] + hidden[-1:]
    per_token = losses_per_token(hidden, labelled_tokens(labels), norm, head)
    sums, plain, gradient, shared = [], [], [], []
    for seed in range(200):
        own = labelled_tokens(
            labels, LAYERS - 1, fraction=0.25, generator=torch.Generator().manual_seed(seed)
        )
        for tokens, found in ((own, gradient), (own._replace(samples=own.samples[:1]), shared)):
            losses = tiled_layer_losses(hidden, tokens, norm, head, torch.ones(LAYERS))
            found.append(torch.autograd.grad(losses.objective, head.weight)[0])
        sums.append(losses.sums[:-1])
        plain.append(len(own.rows) * per_token[:-1, own.samples[0]].mean(1))
    sums, plain, gradient, shared = (
        torch.stack(found).var(0) for found in (sums, plain, gradient, shared)
    )
    assert (sums < 0.7 * plain).all() and gradient.sum() < 0.5 * shared.sum()


def test_each_layer_is_read_on_tokens_of_its_own_and_the_last_on_all():
    hidden, norm, head, labels = setting()
    tokens = labelled_tokens(
        labels, LAYERS - 1, fraction=0.25, generator=torch.Generator().manual_seed(0)
    )
    naive_sums(hidden, norm, head, labels).sum().backward()
    full = [state.grad.flatten(0, 1).clone() for state in hidden]  # each [positions, hidden]
    for state in hidden:
        state.grad = None
    tiled_layer_losses(hidden, tokens, norm, head, WEIGHTS, num_items=1).objective.backward()
    for state, own, weight, sample in zip(
        hidden, full, WEIGHTS, [*tokens.samples, torch.arange(len(tokens.rows))]
    ):
        expected, read = torch.zeros_like(own), tokens.rows[sample]
        expected[read] = weight * len(tokens.rows) / len(read) * own[read]
        torch.testing.assert_close(state.grad.flatten(0, 1), expected)


def test_draws_are_seeded_and_even():
    labels = torch.randint(VOCAB, (BATCH, SEQ))
    for fraction, size in ((1.0, None), (0.5, 9), (1e-9, 1)):
        tokens = labelled_tokens(labels, LAYERS - 1, fraction=fraction)
        assert (
            tokens.samples is None if size is None else tokens.samples.shape == (LAYERS - 1, size)
        )

    def draw(seed):
        return labelled_tokens(
            labels, LAYERS - 1, True, 0.25, torch.Generator().manual_seed(seed)
        ).samples

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    draws, count = 2000, BATCH * (SEQ - 1)
    assert len(draw(1).unique()) == min(count, draw(1).numel()) and all(
        len(s.unique()) == len(s) for s in draw(1)
    )
    for layer, size in (
        (0, round(0.25 * count)),
        (2, 1),
    ):  # layers that are only shown are read on the first ones
        hits = torch.bincount(
            torch.cat([draw(seed)[layer, :size] for seed in range(draws)]), minlength=count
        )
        deviation = math.sqrt(draws * size / count * (1 - size / count))
        assert (hits - draws * size / count).abs().max() < 4 * deviation
