"""Local differential privacy of noisy token embeddings: (epsilon, delta) from the noise level, and back.

The setting: a client looks its tokens up in a PUBLIC embedding table, clips every embedding to a norm C, adds Gaussian
noise of deviation gamma * sigma to each coordinate, and only then sends the embeddings to whoever runs the layers. Two
inputs that differ in one token then differ by at most 2 C in that token's embedding; two sequences of n tokens by at
most 2 C sqrt(n) over all. Releasing them is a Gaussian mechanism of that sensitivity, and its (epsilon, delta) are
those of the analytic Gaussian mechanism, exact for one release.

What is protected: which token stands at a position (`tokens=1`), or the whole text of at most `tokens` tokens.

What is NOT protected: the number of tokens, masks, positions and token types; images and other inputs; labels and
answers that are sent back in the clear; what else a model reads from its ids (ESM its mask tokens, Longformer its
separators, BLT and DeepSeek-V4 hashes); the training data; the tokens of a nearby text where epsilon is large: tens or
hundreds per token promise next to nothing.

A text that is sent k times with fresh noise counts as k times its tokens: once for each forward call, each choice of
a multiple-choice model, and each copy that `num_beams` or `num_return_sequences` makes of a decoder's prompt. Refused
are `generate(use_cache=False)`, which sends the prompt anew with every token, and decoders that read the text again.

Which sums of a floating-point number and its noise can occur depends on the number (Mironov 2012): in float32, one
release can name its token. Here all is in float64, rounded to a grid of 2^-16 deviations and then to the model's
dtype; rounding keeps private what is private, even where it gives the clean value back. What remains, unless the
deviation is far below the norm: probabilities are a Gaussian's to about 2^-34 of themselves, its tails end at 9.

Source: Balle, Wang (2018), arXiv 1805.06530, the analytic Gaussian mechanism, as in Google's `dp-accounting` (`pip
install hf_descent[privacy]`).
"""

import math
import os
import secrets
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


GRID = 2.0**-16  # in deviations: coarse beside float64, so that the clean value does not decide what can be reached


class PrivateEmbeddings(EmbeddingNoise):
    """[`EmbeddingNoise`] on token embeddings that are first clipped to a norm, which bounds what one of them reveals.

    Every position is perturbed: a mask may hide real tokens.

    Args:
        model, sigma: see [`EmbeddingNoise`].
        gamma (`float` or `(float, float)`): noise level; a range is as private as its lower end.
        clip_norm (`float`): the largest Euclidean norm C of an embedding; longer ones are scaled down.
        seed (`int`, *optional*): for measurements alone: whoever knows it, or guesses it (torch's generators are no
            secret ones), takes the noise off. `None`: noise from the operating system's source, never repeated.

    Raises:
        ValueError: as [`EmbeddingNoise`]; `clip_norm` is not positive, or the model has no token embeddings; in the
            forward call, a text that the last call released. TypeError: on a device without float64 (MPS).
    """

    def __init__(
        self,
        model: nn.Module,
        gamma: float | Sequence[float],
        clip_norm: float,
        seed: int | None = None,
        sigma: float | None = None,
    ):
        super().__init__(model, gamma, secrets.randbits(63) if seed is None else seed, sigma)
        _check_positive(clip_norm=clip_norm)
        if not self._lookups:
            raise ValueError(
                f"{type(inner_model(model)).__name__} has no token embeddings; only those can be private."
            )
        self.clip_norm = clip_norm
        self._is_secret = seed is None
        self._continues = False  # whether the running call has a text's beginning in its cache
        self._last: torch.Tensor | None = None  # the clean embeddings of the last lookup

    @property
    def name(self) -> str:
        """What curves call the noise: its kind and the norm."""
        return f"gaussian, clipped to {self.clip_norm}"

    @torch.compiler.disable
    def _enter(self, module, args, kwargs):
        if not self._calls:
            cache = kwargs.get("past_key_values")
            self._continues = cache is not None and bool(cache.get_seq_length())
        return super()._enter(module, args, kwargs)

    @torch.compiler.disable  # or the random bytes could become constants
    def _perturb(self, clean, mask):
        last, self._last = self._last, clean.detach()
        if last is not None and self._calls and not self._continues and self._repeats(last.to(clean), clean):
            raise ValueError(
                "The last text is looked up again, one token longer or in the decoder, and would be released twice. "
                "Generate with `use_cache=True` (XLM has no cache); give the decoder ids of its own."
            )
        return super()._perturb(clean, None)

    def _repeats(self, last, clean):
        length, grown = last.shape[1], clean.shape[1] - last.shape[1]
        if self._reached:  # in this very call: shifted, a decoder's
            return grown == 0 and length > 1 and torch.equal(clean[:, 1:], last[:, :-1])
        # XLM puts a mask token last.
        return grown == 1 and length > 2 and torch.equal(clean[:, : length - 1], last[:, :-1])

    def _noisy(self, clean):
        noise = self._gaussian(clean)
        deviation = self._level(noise) * self.sigma
        exact = clean.double().nan_to_num()  # [batch, seq, hidden]
        norms = exact.norm(dim=-1, keepdim=True).clamp(min=self.clip_norm)  # [batch, seq, 1]
        # The margin is above the rounding of norm and product (1e-16 for each dimension): a bound, not nearly one.
        noisy = exact * (self.clip_norm * (1 - 1e-9) / norms) + noise * deviation
        grid = deviation * GRID
        noisy.detach().div_(grid).round_().mul_(grid)  # in place, detached: the gradient passes it by
        return noisy.to(clean.dtype)

    def _gaussian(self, clean):
        """Standard normal, float64, in the shape of `clean`."""
        if not self._is_secret:
            return torch.randn(clean.shape, generator=self._generator, device=clean.device, dtype=torch.float64)
        words = np.frombuffer(os.urandom(8 * clean.numel()), np.int64).astype(np.float64)
        words = torch.from_numpy(words).view(clean.shape)
        lower = torch.special.ndtri((words.abs() + 0.5) / 2.0**64)  # of both halves, the one without cancellation
        return lower.copysign(words).to(clean.device)


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
