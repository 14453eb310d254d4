import pytest
import torch
from sklearn.linear_model import Lasso
from test_all_models import batch_of, build

from hf_descent.models import DustConfig
from hf_descent.models.dust import DustLayer
from hf_descent.models.unrolling import symmetric_attention


def dct_dictionary(num_values, size):
    """That of an untrained layer."""
    return build("dust", hidden_size=num_values, dictionary_size=size).layers[0].dictionary.detach()


@pytest.mark.parametrize("size", [16, 24, 64])
def test_dictionary_is_a_tight_frame(size):
    dictionary = dct_dictionary(16, size).double()
    assert dictionary.shape == (16, size)
    torch.testing.assert_close(dictionary @ dictionary.T, torch.eye(16).double(), atol=1e-6, rtol=0)
    # The smallest c that the energy allows is 1.
    assert torch.linalg.eigvalsh(dictionary.T @ dictionary)[-1] == pytest.approx(1, abs=1e-6)
    # The first atom is constant, and each next one oscillates faster.
    torch.testing.assert_close(
        dictionary[:, 0], torch.full((16,), size**-0.5).double(), atol=1e-6, rtol=0
    )
    above = dictionary > -1e-6  # whichever side rounding puts a zero on
    crossings = (above[1:] != above[:-1]).sum(0)
    assert (crossings[1:] >= crossings[:-1]).all()
    if size == 16:
        torch.testing.assert_close(
            dictionary.T @ dictionary, torch.eye(16).double(), atol=1e-6, rtol=0
        )


def soft_threshold(values, threshold):
    return values.sign() * (values.abs() - threshold).clamp(min=0)


def test_layer_is_the_stated_formula():
    torch.manual_seed(0)
    layer = DustLayer(
        DustConfig(hidden_size=4, dictionary_size=6, sparsity=0.2, coupling=0.4, curvature=1.7)
    ).double()
    torch.nn.init.normal_(layer.dictionary)
    d = layer.dictionary.detach()
    reconstruction, code, x = (torch.randn(5, n).double() for n in (4, 6, 4))
    weights = (-torch.cdist(reconstruction, reconstruction).square() / 2).exp()
    a = 1.7 / (2 * 0.4)
    h = (weights @ code + a * code) / (weights.sum(1, keepdim=True) + a)
    h = soft_threshold(h @ (torch.eye(6).double() - d.T @ d / 1.7) + x @ d / 1.7, 0.2 / 1.7)
    new_reconstruction, new_code = layer(reconstruction[None], code[None], x[None])
    torch.testing.assert_close(new_code[0], h)
    torch.testing.assert_close(new_reconstruction[0], h @ d.T)
    assert (new_code == 0).any()


def lasso_objective(x, code, dictionary, sparsity):
    return float((x - code @ dictionary.T).square().sum() / 2 + sparsity * code.abs().sum())


def test_one_frame_without_attention_is_ista_and_reaches_the_lasso():
    torch.manual_seed(0)
    size, sparsity, depths = 32, 0.05, (1, 10, 100, 3000)
    dictionary = dct_dictionary(16, size).double()
    for x in torch.rand(4, 16).double():
        lasso = Lasso(alpha=sparsity / 16, fit_intercept=False, tol=1e-10, max_iter=100_000)
        code = torch.from_numpy(lasso.fit(dictionary.numpy(), x.numpy()).coef_)
        best = lasso_objective(x, code, dictionary, sparsity)
        objectives = []
        for depth in depths:
            model = build(
                "dust-shared",
                dictionary_size=size,
                num_hidden_layers=depth,
                sparsity=sparsity,
                coupling=0,
            ).double()
            codes = []
            model.layers[-1].register_forward_hook(
                lambda module, args, output, codes=codes: codes.append(output[1])
            )
            with torch.no_grad():
                model(x[None, None])
            objectives.append(lasso_objective(x, codes[-1][0, 0], dictionary, sparsity))
        assert objectives == sorted(objectives, reverse=True)
        assert objectives[0] > best * 1.01
        assert objectives[-1] == pytest.approx(best, rel=1e-4)


def energy(x, code, dictionary, sparsity, coupling):
    y = code @ dictionary.T
    weights = (-torch.cdist(y, y).square() / 2).exp()
    return lasso_objective(x, code, dictionary, sparsity) - coupling * float(weights.sum())


def test_both_half_steps_never_raise_their_energy():
    generator = torch.Generator().manual_seed(0)
    for draw in range(100):
        sparsity, coupling = 0.02 * (1 + draw % 4), 0.1 * (1 + draw % 3)
        layer = DustLayer(
            DustConfig(
                hidden_size=8,
                dictionary_size=12,
                sparsity=sparsity,
                coupling=coupling,
                curvature=1.0,
            )
        ).double()
        dictionary = dct_dictionary(8, 12).double()
        layer.dictionary.data = dictionary
        x = torch.rand(4, 8, generator=generator, dtype=torch.float64)
        code = torch.randn(4, 12, generator=generator, dtype=torch.float64) * 10 ** (-draw % 3)
        y = code @ dictionary.T
        with torch.no_grad():
            attended = symmetric_attention(y[None], code[None], self_weight=1 / (2 * coupling))[0]
            _, result = layer(y[None], code[None], x[None])
        alone = [energy(torch.zeros_like(x), c, dictionary, 0, coupling) for c in (code, attended)]
        quadratic = [float((c @ dictionary.T).square().sum() / 2) for c in (code, attended)]
        assert alone[1] - quadratic[1] <= alone[0] - quadratic[0] + 1e-9
        objectives = [lasso_objective(x, c, dictionary, sparsity) for c in (attended, result[0])]
        assert objectives[1] <= objectives[0] + 1e-9


def test_a_dictionary_may_be_shared():
    assert [len(list(build(name).parameters())) for name in ("dust", "dust-shared")] == [3, 1]


def test_untrained_model_moves_towards_the_clean_clip():
    # With c = 1 and a tight frame every LISTA step starts from the noisy patches again.
    batch, model = batch_of("dust"), build("dust", curvature=4, coupling=10)
    noise, error = (
        x - batch["labels"] for x in (batch["pixel_values"], model(batch["pixel_values"]).logits)
    )
    assert error.square().mean() < 0.5 * noise.square().mean()
