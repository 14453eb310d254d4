"""What `hf-descent denoise` sets beside a model: the noisy input, classical denoisers, and pictures."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ..metrics.rmse.rmse import Rmse


GIF_FRAME_MS = 100


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

    def wavelet(clip, deviation):
        return restoration.denoise_wavelet(clip, sigma=deviation, wavelet="db2")

    def nl_means(clip, deviation):
        options = {"patch_size": 5, "patch_distance": 6, "fast_mode": True, "h": 0.8 * deviation, "sigma": deviation}
        return np.stack([restoration.denoise_nl_means(frame, **options) for frame in clip])

    denoisers = {"noisy": lambda clip, deviation: clip, "wavelet": wavelet, "nl_means": nl_means}
    curves = {name: [] for name in denoisers}
    for gamma in gammas:
        noise = np.random.default_rng([0, round(gamma * 1e6)]).standard_normal(clips.shape)
        noisy = clips + gamma * sigma * noise
        for name, denoise in denoisers.items():
            results = [denoise(clip, gamma * sigma) if gamma else clip for clip in noisy]
            metric = Rmse(keep_in_memory=True)
            for result, clean in zip(results, clips):
                metric.add_batch(predictions=result, references=clean)
            curves[name].append(metric.compute(scale=255)["rmse"])
    return curves


def import_restoration():
    """scikit-image's module of classical denoisers; ImportError saying how to install it."""
    try:
        import pywt  # noqa: F401  (which scikit-image imports when the wavelets are called)
        from skimage import restoration
    except ImportError as error:
        raise ImportError(
            "The classical denoisers need scikit-image and PyWavelets: `pip install hf_descent[video]`."
        ) from error
    return restoration


def table(columns: Mapping[str, Sequence[float]], gammas: Sequence[float]) -> str:
    """RMSE against the noise level, one column per denoiser, and the mean over the levels in the last line."""
    lines = [f"{'gamma':>8}" + "".join(f"{name:>12}" for name in columns)]
    for gamma, *values in zip(gammas, *columns.values()):
        lines.append(f"{gamma:8.3g}" + "".join(f"{value:12.3f}" for value in values))
    return "\n".join([*lines, f"{'mean':>8}" + "".join(f"{np.mean(values):12.3f}" for values in columns.values())])


def plot_strip(clean: np.ndarray, others: Mapping[str, np.ndarray], title: str) -> Figure:
    """The clean frame `[height, width]` and the others in a row, with maps of their absolute errors below.

    All maps share one scale, which ends at the largest error but for the last 1% of the noisy frame's.
    """
    errors = {name: np.abs(frame - clean) for name, frame in others.items()}
    largest = max(np.quantile(next(iter(errors.values())), 0.99), 1e-3)
    figure = Figure(figsize=(2.2 * (1 + len(others)), 5), layout="constrained")
    axes = figure.subplots(2, 1 + len(others))
    axes[0, 0].imshow(clean, cmap="gray", vmin=0, vmax=1)
    axes[0, 0].set_title("clean")
    for column, (name, frame) in enumerate(others.items(), start=1):
        axes[0, column].imshow(frame, cmap="gray", vmin=0, vmax=1)
        axes[0, column].set_title(f"{name}\nRMSE {255 * np.sqrt(np.square(errors[name]).mean()):.1f}")
        image = axes[1, column].imshow(errors[name], cmap="gray_r", vmin=0, vmax=largest)
    figure.colorbar(image, ax=axes[1, -1], label="absolute error")
    for ax in axes.flat:
        ax.set_axis_off()
    figure.suptitle(title)
    return figure


def save_gif(path: str, columns: Sequence[np.ndarray]) -> None:
    """Clips `[frames, height, width]` in [0, 1] side by side, as a GIF that repeats."""
    pixels = (np.concatenate(columns, axis=2).clip(0, 1) * 255).round().astype(np.uint8)  # [frames, height, all]
    first, *rest = [Image.fromarray(frame) for frame in pixels]
    first.save(path, save_all=True, append_images=rest, duration=GIF_FRAME_MS, loop=0)


def restore(
    reconstruct: Mapping[str, Callable[[np.ndarray], np.ndarray]], clean: np.ndarray, deviation: float, seed: int
) -> dict[str, np.ndarray]:
    """The noisy clip, then what each function makes of it; `[frames, height, width]` each."""
    noisy = clean + deviation * np.random.default_rng(seed).standard_normal(clean.shape)
    return {"noisy": noisy} | {name: function(noisy) for name, function in reconstruct.items()}
