import pytest
import torch

from hf_descent.passes import denoise_in_passes, estimate_sigma


def noisy(sigma, shape=(3, 64, 64), seed=0):
    """A smooth image and it with noise; one deviation per sample."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(
        torch.linspace(0, 3, shape[1]), torch.linspace(0, 3, shape[2]), indexing="ij"
    )
    clean = torch.stack(
        [torch.sin(rows + k) * torch.cos(columns * (k + 1)) for k in range(shape[0])]
    )
    return clean, clean + torch.as_tensor(sigma).view(-1, 1, 1) * torch.randn(
        shape, generator=generator
    )


def soft(y, threshold):
    return y.sign() * (y.abs() - threshold).clamp(min=0)


def test_the_best_mix_of_a_linear_denoisers_passes_is_james_steins_shrinkage():
    _, y = noisy(0.3)
    share = torch.tensor(0.7, requires_grad=True)
    result = denoise_in_passes(lambda y: share * y, y, passes=2, sigma=0.3)
    assert not result.output.requires_grad
    shrinkage = 1 - y[0].numel() * 0.3**2 / y.flatten(1).square().sum(1)  # [batch]
    torch.testing.assert_close(result.output, shrinkage.view(-1, 1, 1) * y, rtol=1e-5, atol=1e-6)
    for passes in range(3):
        factor = 0.7**passes  # SURE in closed form: the divergence is factor * N
        expected = (1 - factor) ** 2 * y.flatten(1).square().mean(1) - 0.09 + 2 * 0.09 * factor
        torch.testing.assert_close(result.mse[passes], expected.double(), rtol=1e-4, atol=1e-6)


def test_the_estimated_error_is_the_true_one():
    clean, y = noisy(0.5, (4, 200, 200))
    result = denoise_in_passes(lambda y: soft(y, 0.3), y, passes=3, sigma=0.5)
    estimates = [y, soft(y, 0.3), soft(y, 0.6), soft(y, 0.9)]
    true = torch.stack([(estimate - clean).square().mean((1, 2)) for estimate in estimates])
    assert (result.mse - true).abs().max() < 0.01
    assert true.max() - true.min() > 0.08


def test_one_estimate_is_chosen_or_all_are_mixed_at_no_greater_estimated_error():
    clean, y = noisy([0.05, 0.4, 1.0])
    blur = torch.nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    chosen = denoise_in_passes(blur, y, passes=6, combine=False)
    assert (chosen.weights.sum(0) == 1).all() and chosen.weights.unique().tolist() == [0, 1]
    picks = chosen.weights.argmax(0).tolist()
    assert picks[0] < picks[2]  # the noisier, the more passes
    passes = [y]
    for _ in range(6):
        passes.append(blur(passes[-1]))
    errors = torch.stack(
        [(estimate - clean).square().mean((1, 2)) for estimate in passes]
    )  # [K, batch]
    own = (chosen.output - clean).square().mean((1, 2))
    assert (own <= 1.1 * errors.min(0).values).all()
    for sample, pick in enumerate(picks):
        torch.testing.assert_close(chosen.output[sample], passes[pick][sample])
    mixed = denoise_in_passes(blur, y, passes=6)
    assert ((mixed.output - clean).square().mean((1, 2)) <= 1.1 * own).all()


def test_the_noise_level_is_estimated_for_each_image():
    for sigma in (0.05, 0.3):
        _, y = noisy([sigma, 2 * sigma, 3 * sigma], (3, 128, 129))
        torch.testing.assert_close(
            estimate_sigma(y),
            torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * sigma,
            rtol=0.06,
            atol=0.0,
        )
    assert estimate_sigma(torch.ones(2, 3, 8, 8)).shape == (2, 3)
    _, y = noisy([0.1, 0.2, 0.4])
    torch.testing.assert_close(
        denoise_in_passes(torch.nn.Identity(), y, 1).sigma, estimate_sigma(y)
    )
    of_channels = denoise_in_passes(torch.nn.Identity(), y[None], 1).sigma
    torch.testing.assert_close(of_channels, estimate_sigma(y).median()[None])


def test_the_draws_are_those_of_the_seed():
    _, y = noisy(0.3)
    first, again, other = (
        denoise_in_passes(lambda y: soft(y, 0.3), y, seed=seed).mse for seed in (0, 0, 1)
    )
    assert first.equal(again) and not first.equal(other)


@pytest.mark.parametrize("combine", [True, False])
def test_an_image_without_a_deviation_stays_as_it_is_beside_one_with_noise(combine):
    _, y = noisy(0.3, (2, 32, 32))
    flat = torch.full_like(y[:1], 0.25)
    result = denoise_in_passes(lambda y: soft(y, 0.3), torch.cat([flat, y]), combine=combine)
    torch.testing.assert_close(result.output[:1], flat, rtol=1e-5, atol=0.0)
    assert (result.output[1:] - y).abs().mean() > 0.05


def test_bad_arguments_to_passes_are_named():
    y = torch.randn(2, 4, 4)
    with pytest.raises(ValueError, match="`passes` is 0"):
        denoise_in_passes(torch.nn.Identity(), y, 0)
    for dtype in (torch.bfloat16, torch.uint8):
        with pytest.raises(ValueError, match=f"`noisy` is of {dtype}; give it in float32"):
            denoise_in_passes(torch.nn.Identity(), y.to(dtype))
    with pytest.raises(ValueError, match="`sigma` is"):
        denoise_in_passes(torch.nn.Identity(), y, sigma=0.0)
    with pytest.raises(
        ValueError, match=r"gave torch.float32 \[2, 4\] for an input of torch.float32 \[2, 4, 4\]"
    ):
        denoise_in_passes(lambda y: y[:, 0], y, sigma=1.0)
    with pytest.raises(ValueError, match=r"gave torch.bfloat16 .* for an input of torch.float32"):
        denoise_in_passes(lambda y: y.bfloat16(), y, sigma=1.0)
