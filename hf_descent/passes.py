"""Several passes of a denoiser over its own output, chosen or combined without the clean signal (SURE).

For y = x + sigma n, n ~ N(0, I), and any weakly differentiable estimator h,

    SURE(h) = ||h(y) - y||^2 / N - sigma^2 + 2 sigma^2 / N div h(y)

is an unbiased estimate of ||h(y) - x||^2 / N (Stein 1981), with div h(y) = E b . (h(y + eps b) - h(y)) / eps by
Monte Carlo (Ramani, Blu, Unser 2008). The best linear combination of estimates solves a small linear system (SURE-LET;
Blu, Luisier 2007).

The ASSUMPTION is Gaussian noise, independent and of one deviation over a sample. For correlated noise, and salt and
pepper on few pixels, the estimated deviation is far too small, and the noise is kept. Blur stays as it is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Passes:
    """K = passes + 1 estimates, the input first."""

    output: torch.Tensor  # [batch, ...], the chosen or combined estimate
    mse: torch.Tensor  # [K, batch], estimated mean squared error (SURE) of each
    weights: torch.Tensor  # [K, batch], share of each in the output; one-hot where one was chosen
    sigma: torch.Tensor  # [batch], deviation of the noise, in the units of the input


@torch.no_grad()
def denoise_in_passes(
    denoise: Callable[[torch.Tensor], torch.Tensor],
    noisy: torch.Tensor,
    passes: int = 3,
    *,
    sigma: float | torch.Tensor | None = None,
    combine: bool = True,
    seed: int = 0,
) -> Passes:
    """Apply a denoiser to its own output and take the best mix of all passes, judged by SURE on each sample.

    Costs `2 * passes` runs of the denoiser. SURE needs some hundred values a sample to choose by.

    Args:
        denoise (`Callable`): a batch to its estimate, same shape: `lambda y: model(pixel_values=y).logits`.
        noisy (`torch.Tensor` `[batch, ...]`): the input. It and the denoiser must be float32 or float64: the
            divergence is a difference that lower precision rounds away.
        passes (`int`): how often the denoiser is applied, k >= 1.
        sigma (`float` or `[batch]`, *optional*): deviation of the noise. `None`: that of [`estimate_sigma`].
        combine (`bool`): mix all passes and the input by the weights of least SURE; else choose one.
        seed (`int`): of the Monte Carlo estimate of the divergence.

    ValueError for an argument out of its range, or an output of another shape or type than the input.
    """
    if passes < 1:
        raise ValueError(f"`passes` is {passes}; give at least 1.")
    if noisy.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"`noisy` is of {noisy.dtype}; give it in float32.")

    batch = len(noisy)
    # Of a flat image it is 0. The least that can be divided by keeps the image as it is.
    if sigma is None:
        sigma = (
            estimate_sigma(noisy)
            .reshape(batch, -1)
            .median(1)
            .values.clamp(min=torch.finfo(torch.float32).tiny)
        )

    sigma = torch.as_tensor(sigma).to(noisy.device, torch.float64).expand(batch)  # [batch]
    if not (sigma > 0).all():
        raise ValueError(
            f"`sigma` is {sigma.tolist()}; the deviation of the noise must be positive."
        )

    generator = torch.Generator().manual_seed(seed)
    estimates = _run(denoise, noisy, passes)  # [K, batch, values]
    size, target = estimates.shape[-1], estimates[0]
    step = (
        0.01 * sigma
    )  # far above the rounding of float32, far below the scale on which a denoiser bends
    signs = torch.randint(2, noisy.shape, generator=generator).to(noisy) * 2 - 1
    shifted = _run(
        denoise, noisy + signs * step.to(noisy).view(-1, *[1] * (noisy.dim() - 1)), passes
    )
    divergence = ((shifted - estimates) * signs.flatten(1).double()).sum(-1) / step  # [K, batch]
    residual = (estimates - target).square().mean(-1)  # [K, batch]
    mse = residual - sigma**2 + 2 * sigma**2 * divergence / size
    if combine:
        matrix = torch.einsum("kbn,lbn->bkl", estimates, estimates)
        right = (
            torch.einsum("kbn,bn->bk", estimates, target) - (sigma**2 * divergence).T
        )  # [batch, K]
        # Estimates that hardly differ leave their mix undetermined: the smallest weights then.
        weights = (torch.linalg.pinv(matrix, rtol=1e-6, hermitian=True) @ right[..., None])[
            ..., 0
        ].T  # [K, batch]
    else:
        weights = torch.nn.functional.one_hot(mse.argmin(0), passes + 1).T.double()

    output = torch.einsum("kb,kbn->bn", weights, estimates)
    return Passes(output.view(noisy.shape).to(noisy), mse, weights, sigma)


def estimate_sigma(images: torch.Tensor) -> torch.Tensor:
    """Deviation of Gaussian noise in each image, `[..., height, width]` of at least 2 x 2 -> `[...]`.

    The median of the finest diagonal Haar coefficients, in which smooth content cancels, divided by that of |N(0, 1)|
    (Donoho, Johnstone 1994). Fine texture counts as noise; clipped values make it too small.
    """
    height, width = images.shape[-2] // 2 * 2, images.shape[-1] // 2 * 2
    blocks = images[..., :height, :width].double().unflatten(-2, (-1, 2)).unflatten(-1, (-1, 2))
    top, bottom = blocks.diff(dim=-1)[..., 0].unbind(-2)  # [..., height / 2, width / 2] each
    median = ((bottom - top) / 2).abs().flatten(-2).median(-1).values  # [...]
    return median / (math.sqrt(2) * torch.special.erfinv(torch.tensor(0.5)).item())


def _run(denoise, noisy, passes) -> torch.Tensor:
    """The input and the output of each pass, float64 `[K, batch, values]`."""
    found = [noisy]
    for _ in range(passes):
        found.append(denoise(found[-1]))
        given, wanted = (f"{x.dtype} {list(x.shape)}" for x in (found[-1], noisy))
        if given != wanted:
            raise ValueError(
                f"`denoise` gave {given} for an input of {wanted}; both must be equal."
            )
    return torch.stack([estimate.flatten(1).double() for estimate in found])
