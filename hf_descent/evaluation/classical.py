"""Denoisers without a model, to set beside one: the noisy input itself, wavelets and non-local means."""

from collections.abc import Sequence

import numpy as np


def classical_rmse(clips: np.ndarray, gammas: Sequence[float], sigma: float) -> dict[str, list[float]]:
    """RMSE of the noisy input and of two denoisers without a model, which are told the noise's deviation.

    Both are scikit-image's. `wavelet`: soft thresholds (BayesShrink, db2) on the wavelets of a clip as a volume of
    frames; `nl_means`: non-local means of each frame, with the settings of the library's example.

    Args:
        clips (`np.ndarray` of shape `[clips, frames, height, width]`): clean pixels in [0, 1].
        gammas (sequence of `float`): noise levels in units of `sigma`.
        sigma (`float`): deviation of the clean signal.

    Returns:
        One list `[gammas]` for each of "noisy", "wavelet" and "nl_means", on the 0-255 scale.

    Raises:
        ImportError: scikit-image is not installed.
    """
    restoration = import_restoration()

    def noisy(clip, deviation):
        return clip

    def wavelet(clip, deviation):
        return restoration.denoise_wavelet(clip, sigma=deviation, wavelet="db2")

    def nl_means(clip, deviation):
        options = {"patch_size": 5, "patch_distance": 6, "fast_mode": True, "h": 0.8 * deviation, "sigma": deviation}
        return np.stack([restoration.denoise_nl_means(frame, **options) for frame in clip])

    curves = {"noisy": [], "wavelet": [], "nl_means": []}
    for gamma in gammas:
        noise = np.random.default_rng([0, round(gamma * 1e6)]).standard_normal(clips.shape)
        for denoise in (noisy, wavelet, nl_means):
            found = [denoise(clip, gamma * sigma) if gamma else clip for clip in clips + gamma * sigma * noise]
            curves[denoise.__name__].append(255 * float(np.sqrt(np.square(np.stack(found) - clips).mean())))
    return curves


def import_restoration():
    """scikit-image's module of classical denoisers; ImportError saying how to install it."""
    try:
        import pywt  # noqa: F401  (scikit-image imports it when wavelets are called)
        from skimage import restoration
    except ImportError as error:
        remedy = "`pip install hf_descent[video]`"
        raise ImportError(f"The classical denoisers need scikit-image and PyWavelets: {remedy}.") from error
    return restoration
