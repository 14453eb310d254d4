"""Local differential privacy of noisy token embeddings: (epsilon, delta) from the noise level, and back.

A client looks its tokens up in a PUBLIC embedding table, clips every embedding to a norm C, adds Gaussian noise of
deviation gamma * sigma to each coordinate, and only then sends the embeddings to whoever runs the layers. One other
token changes what is sent by at most 2 C, n other tokens by 2 C sqrt(n). This is a Gaussian mechanism of that
sensitivity; its (epsilon, delta) is exact for one release.

Protected: which token stands at a position (`tokens=1`), or the whole text of at most `tokens` tokens.
NOT protected: the number of tokens, masks, positions and token types; other inputs; labels and answers sent in the
clear; what else a model reads from its ids (mask tokens, separators, hashes); the training data.

A text sent k times with fresh noise counts as k times its tokens: once for each forward call, each choice of a
multiple-choice model, and each copy that `num_beams` or `num_return_sequences` makes of a decoder's prompt. Refused
are `generate(use_cache=False)`, which sends the prompt anew with every token, and decoders that read the text again.

Which sums of a float and its noise can occur depends on the float (Mironov 2012): in float32, one release can name its
token. So all is in float64, rounded to a grid of 2^-16 deviations and then to the model's dtype. Probabilities are a
Gaussian's to about 2^-34, unless the deviation is far below the norm, with tails that end at 9.

What it costs, `noise_curve(model, data, gammas, noise=PrivateEmbeddings(model, 1.0, clip_norm, seed=0))` measures.

Source: Balle, Wang (2018), arXiv 1805.06530, as in Google's `dp-accounting` (`pip install '.[privacy]'`).
"""

import math
import os
import secrets

import numpy as np
import torch
from torch import nn

from .noise.embedding_noise import EmbeddingNoise, look_up
from .readout.stack import inner_model


GRID = (
    2.0**-16
)  # in deviations: coarse beside float64, so that the clean value does not decide what can be reached


class PrivateEmbeddings(EmbeddingNoise):
    """[`EmbeddingNoise`] on token embeddings that are first clipped to a norm, which bounds what one of them reveals.

    Every position is perturbed: a mask may hide real tokens.

    Args:
        model, sigma: see [`EmbeddingNoise`].
        gamma (`float` or `(float, float)`): noise level; a range is as private as its lower end.
        clip_norm (`float`): the largest Euclidean norm C of an embedding; longer ones are scaled down.
        seed (`int`, *optional*): for measurements only: whoever knows or guesses it can remove the noise. `None`:
            noise from the operating system's source, never repeated.

    ValueError as of [`EmbeddingNoise`], for a `clip_norm` that is not positive, or a model without token embeddings;
    in the forward call for a text that the last call released. TypeError on a device without float64 (MPS).
    """

    def __init__(
        self,
        model: nn.Module,
        gamma,
        clip_norm: float,
        seed: int | None = None,
        sigma: float | None = None,
    ):
        super().__init__(model, gamma, secrets.randbits(63) if seed is None else seed, sigma)
        _check_below(math.inf, clip_norm=clip_norm)
        model = inner_model(model)
        if getattr(model, "main_input_name", "input_ids") != "input_ids":
            raise ValueError(
                f"{type(model).__name__} has no token embeddings; only those can be private."
            )
        self.clip_norm, self._is_secret = clip_norm, seed is None
        # The clean embeddings of the last lookup, if a text's beginning.
        self._last: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The kind of noise and the norm, as results record it."""
        return f"gaussian, clipped to {self.clip_norm}"

    @torch.compiler.disable  # or the random bytes could become constants
    def _perturb(self, clean, mask, call):
        if not call.perturbed:  # whether the beginning of the text is in a cache
            self._continues = call.cache is not None and bool(call.cache.get_seq_length())
        last, self._last = self._last, None if self._continues else clean.detach()
        if (
            last is not None
            and not self._continues
            and _is_repeated(last.to(clean), clean, call.perturbed)
        ):
            raise ValueError(
                "The last text would be released twice, one token longer or by the decoder. Generate with "
                "`use_cache=True` (XLM has no cache); give the decoder its own ids."
            )
        return super()._perturb(clean, None, call)

    def _standard_noise(self, clean, generator):
        if not self._is_secret:
            return torch.randn(
                clean.shape, generator=generator, device=clean.device, dtype=torch.float64
            )
        words = np.frombuffer(os.urandom(8 * clean.numel()), np.int64).astype(np.float64)
        words = torch.from_numpy(words).view(clean.shape)
        lower = torch.special.ndtri(
            (words.abs() + 0.5) / 2.0**64
        )  # of both halves, the one without cancellation
        return lower.copysign(words).to(clean.device)

    def _add(self, clean, noise, deviation):
        exact = clean.double().nan_to_num()  # [batch, seq, hidden]
        norms = exact.norm(dim=-1, keepdim=True).clamp(min=self.clip_norm)  # [batch, seq, 1]
        # The margin is above the rounding of norm and product (1e-16 for each dimension): a bound, not nearly one.
        noisy = exact * (self.clip_norm * (1 - 1e-9) / norms) + noise * deviation
        grid = deviation * GRID
        noisy.detach().div_(grid).round_().mul_(
            grid
        )  # in place, detached: the gradient passes it by
        return noisy.to(clean.dtype)


def _is_repeated(last: torch.Tensor, clean: torch.Tensor, in_same_call: bool) -> bool:
    length, grown = last.shape[1], clean.shape[1] - last.shape[1]
    if in_same_call:  # shifted, a decoder's
        return grown == 0 and length > 1 and torch.equal(clean[:, 1:], last[:, :-1])
    kept = max(length - 1, min(length, 2))  # XLM ends in a mask token
    return grown == 1 and torch.equal(clean[:, :kept], last[:, :kept])


def epsilon_of_gamma(
    gamma: float, delta: float, clip_norm: float, sigma: float, tokens: int = 1
) -> float:
    """Epsilon of embeddings clipped to `clip_norm` with noise of deviation `gamma * sigma`.

    Args:
        gamma (`float`): noise level > 0, in units of `sigma`.
        delta (`float`): probability in (0, 1) that the bound fails; take it well below one over the number of texts.
        clip_norm (`float`): the norm C of the longest embedding.
        sigma (`float`): standard deviation of the clean signal, as in [`EmbeddingNoise`].
        tokens (`int`): tokens that are protected together: 1 for single tokens, the largest length for whole texts.

    ValueError for an argument out of range, ImportError if `dp-accounting` is not installed.
    """
    from dp_accounting import get_epsilon_gaussian

    _check_below(math.inf, gamma=gamma, clip_norm=clip_norm, sigma=sigma, tokens=tokens)
    _check_below(1, delta=delta)
    return float(get_epsilon_gaussian(gamma * sigma / (2 * clip_norm * math.sqrt(tokens)), delta))


def gamma_of_epsilon(
    epsilon: float, delta: float, clip_norm: float, sigma: float, tokens: int = 1
) -> float:
    """The least noise level at which clipped embeddings are (epsilon, delta) private; see [`epsilon_of_gamma`]."""
    from dp_accounting import get_sigma_gaussian

    _check_below(math.inf, epsilon=epsilon, clip_norm=clip_norm, sigma=sigma, tokens=tokens)
    _check_below(1, delta=delta)
    return float(get_sigma_gaussian(epsilon, delta)) * (2 * clip_norm * math.sqrt(tokens)) / sigma


def median_norm(model: nn.Module) -> float:
    """Median norm of the embeddings of the whole vocabulary: a `clip_norm` that depends on nobody's text."""
    lookup = inner_model(model).get_input_embeddings()  # which may scale what its table holds
    return torch.cat([rows.float().norm(dim=1) for rows in look_up(lookup)]).quantile(0.5).item()


def _check_below(bound: float, **values: float):
    for name, value in values.items():
        if not 0 < value < bound:
            raise ValueError(f"`{name}` is {value}; it must be above 0 and below {bound}.")
