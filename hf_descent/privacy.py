"""Local differential privacy of noisy token embeddings: (epsilon, delta) from the noise level, and back.

The setting: a client looks its tokens up in a PUBLIC embedding table, clips every embedding to a norm C, adds Gaussian
noise of deviation gamma * sigma to each coordinate, and only then sends the embeddings to whoever runs the layers. Two
inputs that differ in one token then differ by at most 2 C in that token's embedding; two sequences of n tokens by at
most 2 C sqrt(n) over all. Releasing them is a Gaussian mechanism of that sensitivity, and its (epsilon, delta) are
those of the analytic Gaussian mechanism, exact for one release.

What is protected: which token stands at a position (`tokens=1`), or the whole text of at most `tokens` tokens.

What is NOT protected: the number of tokens, the padding mask and the positions; labels and answers that are sent back
in the clear; a text sent twice with fresh noise (epsilons add up; count its tokens twice); anything where the receiver
knows the generator's seed, or averages noise that it can predict (draw the seed from a source that is secret, and use
it once); the training data, which training with this noise does not make private; the tokens of a nearby text where
epsilon is large: tens or hundreds per token promise next to nothing. Noise in floating-point numbers is not exactly
Gaussian (Mironov 2012).

Source: Balle, Wang (2018), arXiv 1805.06530, the analytic Gaussian mechanism, as in Google's `dp-accounting` (`pip
install hf_descent[privacy]`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .evaluation.robustness import noise_curve
from .evaluation.scoring import Result
from .evaluation.sums import weights_fingerprint
from .noise.embedding_noise import EmbeddingNoise
from .noise.lookups import look_up
from .readout.stack import inner_model


class PrivateEmbeddings(EmbeddingNoise):
    """[`EmbeddingNoise`] on token embeddings that are first clipped to a norm, which bounds what one of them reveals.

    Args:
        model, gamma, seed, sigma: see [`EmbeddingNoise`].
        clip_norm (`float`): the largest Euclidean norm C of an embedding; longer ones are scaled down.

    Raises:
        ValueError: as [`EmbeddingNoise`]; `clip_norm` is not positive, or the model has no token embeddings.
    """

    def __init__(
        self,
        model: nn.Module,
        gamma: float | Sequence[float],
        clip_norm: float,
        seed: int | None = None,
        sigma: float | None = None,
    ):
        super().__init__(model, gamma, seed, sigma)
        _check_positive(clip_norm=clip_norm)
        if not self._lookups:
            raise ValueError(
                f"{type(inner_model(model)).__name__} has no token embeddings; only those can be private."
            )
        self.clip_norm = clip_norm

    @property
    def name(self) -> str:
        """What curves call the noise: its kind and the norm."""
        return f"gaussian, clipped to {self.clip_norm}"

    def _perturb(self, clean, mask):
        norms = clean.float().norm(dim=-1, keepdim=True)  # [batch, seq, 1]
        clipped = clean * (self.clip_norm / norms.clamp(min=self.clip_norm)).to(clean.dtype)
        return super()._perturb(clipped, mask)


def epsilon_of_gamma(gamma: float, delta: float, clip_norm: float, sigma: float, tokens: int = 1) -> float:
    """Epsilon of embeddings clipped to `clip_norm` with noise of deviation `gamma * sigma`.

    Args:
        gamma (`float`): noise level > 0, in units of `sigma`.
        delta (`float`): probability in (0, 1) with which the bound may fail; well below one over the number of texts.
        clip_norm (`float`): the norm C of the longest embedding.
        sigma (`float`): standard deviation of the clean signal, as in [`EmbeddingNoise`].
        tokens (`int`): tokens that are protected together; 1 for each by itself, the (largest) length for a text.

    Raises:
        ValueError: an argument out of range. ImportError: `dp-accounting` is not installed.
    """
    _check_positive(gamma=gamma, clip_norm=clip_norm, sigma=sigma, tokens=tokens)
    return float(_mechanism().get_epsilon_gaussian(gamma * sigma / _sensitivity(clip_norm, tokens), _checked(delta)))


def gamma_of_epsilon(epsilon: float, delta: float, clip_norm: float, sigma: float, tokens: int = 1) -> float:
    """The least noise level at which clipped embeddings are (epsilon, delta) private; see [`epsilon_of_gamma`]."""
    _check_positive(epsilon=epsilon, clip_norm=clip_norm, sigma=sigma, tokens=tokens)
    return float(_mechanism().get_sigma_gaussian(epsilon, _checked(delta))) * _sensitivity(clip_norm, tokens) / sigma


def median_norm(model: nn.Module) -> float:
    """Median norm of the embeddings of the whole vocabulary, a `clip_norm` that depends on no one's text."""
    lookup = inner_model(model).get_input_embeddings()  # which may scale what its table holds
    ids = torch.arange(len(lookup.weight), device=lookup.weight.device)  # [vocabulary]
    return torch.cat([rows.float().norm(dim=1) for rows in look_up(lookup, ids)]).quantile(0.5).item()


@dataclass
class PrivacyCurve(Result):
    """A model's metric against the privacy of its input.

    Attributes:
        metric (`str`): name of the metric.
        epsilons (float64 `[E]`): decreasing, for `tokens` tokens together.
        gammas (float64 `[E]`): the noise levels that give them.
        epsilons_per_token (float64 `[E]`): what each token by itself is given by the same noise.
        values (float64 `[E]`): the metric, mean over the noise draws.
        radii (float64 `[E]`): half-widths of its 95 % intervals.
        clean (`float`): the metric without noise and clipping.
        delta, clip_norm, tokens: see [`epsilon_of_gamma`].
        weights (`str`, *optional*): fingerprint of the model's weights.
    """

    metric: str
    epsilons: np.ndarray
    gammas: np.ndarray
    epsilons_per_token: np.ndarray
    values: np.ndarray
    radii: np.ndarray
    clean: float
    delta: float
    clip_norm: float
    tokens: int
    weights: str | None = None

    def __str__(self) -> str:
        rows = [f"{'epsilon':>10} {'per token':>10} {'gamma':>8} {self.metric:>12} {'+- (95 %)':>10}"]
        rows.append(f"{'inf':>10} {'inf':>10} {0:8.4g} {self.clean:12.5g}")
        for line in zip(self.epsilons, self.epsilons_per_token, self.gammas, self.values, self.radii):
            rows.append("{:10.4g} {:10.4g} {:8.4g} {:12.5g} {:10.2g}".format(*line))
        unit = "each token" if self.tokens == 1 else f"{self.tokens} tokens together"
        return "\n".join(
            [*rows, f"epsilon at delta {self.delta:g} for {unit}, embeddings clipped to {self.clip_norm:.4g}"]
        )


def privacy_curve(
    model: nn.Module,
    dataset,
    epsilons: Sequence[float],
    delta: float = 1e-5,
    clip_norm: float | None = None,
    tokens: int = 1,
    seed: int = 0,
    sigma: float | None = None,
    **settings,
) -> PrivacyCurve:
    """The metric of `model` where its input embeddings are clipped and noisy enough for each epsilon.

    Args:
        model, dataset: see [`noise_curve`].
        epsilons (sequence of `float`): privacy of `tokens` tokens together.
        delta, tokens: see [`epsilon_of_gamma`].
        clip_norm (`float`, *optional*): [`median_norm`] where not given.
        seed, sigma: see [`EmbeddingNoise`]. A measurement's seed is known; a release must not use it.
        settings: further arguments of [`noise_curve`].

    Raises:
        ValueError: as [`noise_curve`] and [`epsilon_of_gamma`].
    """
    epsilons = sorted(set(epsilons), reverse=True)
    noise = PrivateEmbeddings(model, 1.0, 1.0 if clip_norm is None else clip_norm, seed, sigma)
    if clip_norm is None:  # only now is it known that there are embeddings
        noise.clip_norm = clip_norm = median_norm(model)
    levels = [gamma_of_epsilon(epsilon, delta, clip_norm, noise.sigma, tokens) for epsilon in epsilons]
    curve = noise_curve(model, dataset, [0.0, *levels], noise=noise, **settings)
    return PrivacyCurve(
        curve.metric,
        epsilons,
        levels,
        [epsilon_of_gamma(gamma, delta, clip_norm, noise.sigma) for gamma in levels],
        curve.mean[1:],
        np.broadcast_to(curve.radius("mean"), curve.mean.shape)[1:],
        float(curve.mean[0]),
        delta,
        clip_norm,
        tokens,
        weights_fingerprint(model),
    )


def _sensitivity(clip_norm: float, tokens: int) -> float:
    return 2 * clip_norm * math.sqrt(tokens)


def _mechanism():
    try:
        import dp_accounting
    except ImportError:
        raise ImportError("Privacy needs Google's dp-accounting: `pip install hf_descent[privacy]`.") from None
    return dp_accounting


def _checked(delta: float) -> float:
    if not 0 < delta < 1:
        raise ValueError(f"`delta` is {delta}; give a probability between 0 and 1, such as 1e-5.")
    return delta


def _check_positive(**values: float):
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"`{name}` is {value}; it must be positive and finite.")
