"""`hf-descent demo`: plain training, descent constraints and deep supervision on one small denoiser, in minutes.

Real image content (`data/pans.py`), a 5-layer unrolled transformer, three objectives in one trainer, several seeds.
Everything reported is measured on regions of the photographs that training never saw.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import PrinterCallback

from ..configs import DescentConfig
from ..constraints.problem import DescentProblem
from ..data.pans import photo_pans
from ..evaluation import layer_profile, noise_curve
from ..models import UTConfig, UTForVideoDenoising
from ..trainer import DescentTrainer


ARMS = {"erm": "plain training", "descent": "constrained", "deep_supervision": "deep supervision"}
GAMMA_TRAIN = 0.15
GAMMAS = (0.0, 0.05, 0.1, GAMMA_TRAIN, 0.25, 0.4, 0.6, 0.8, 1.0)
NUM_LAYERS, EXIT_LAYER = 5, 3
ALPHA, INITIAL_LOSS_BOUND = 0.05, 1.0  # f_0: the noisy input's own loss
PROBLEM = {
    "descent_alpha": ALPHA,
    "initial_loss_bound": INITIAL_LOSS_BOUND,
    "dual_learning_rate": 0.01,
    "resilience": 0.05,
}


def demo(
    output_dir: str,
    seeds: Sequence[int] = (0, 1, 2),
    max_steps: int = 1200,
    negative_weights: str | None = None,
    auto: float | None = None,
) -> dict:
    """Train every arm with every seed, evaluate on held-out clips, print the tables, write `demo.json` and `demo.png`.

    Args:
        output_dir (`str`): folder for both files.
        seeds (sequence of `int`): one run of each arm per seed.
        max_steps (`int`): optimizer steps of a run; a quarter of them is warm-up.
        negative_weights (`str`, *optional*): "keep" or "clip", as in [`DescentConfig`], for the constrained arm; with
            `auto` the package's default where not given, else "keep".
        auto (`float`, *optional*): the `descent_strength` at which the constrained arm takes the package's default
            problem and dual settings ("auto"), in place of the demo's own; the largest violation is that of either
            problem.

    Returns:
        What `demo.json` holds: `settings`, `gammas`, and for each arm a list of one dict per seed: `layer_losses`
        (mean squared error / noise power at the training noise level, layers 1..L), `max_violation` (in units of
        f_0), `rmse` (0-255 scale, one per gamma), and for the constrained arm `multipliers` (a list of L for each of
        `steps`).

    Raises:
        ValueError: no steps; no seeds, a negative one, or one twice.
    """
    if max_steps < 1 or not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(
            f"`seeds` is {list(seeds)} and `max_steps` {max_steps}; give seeds that differ, none of them negative, "
            "and at least one step."
        )
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    train, test = photo_pans(4096), photo_pans(512, held_out=True)  # [clips, frames, pixels]
    sigma = float(train.std())
    negative_weights = negative_weights or ("keep" if auto is None else DescentConfig.negative_weights)
    settings = {"max_steps": max_steps, "negative_weights": negative_weights, "auto": auto}
    results = {
        "settings": {"seeds": list(seeds), "gamma_train": GAMMA_TRAIN, "sigma": sigma, **settings},
        "gammas": list(GAMMAS),
        "arms": {arm: [] for arm in ARMS},
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices as small as these take longer on several
    try:
        for seed in seeds:
            for arm in ARMS:
                start = time.perf_counter()
                results["arms"][arm].append(_run(arm, seed, train, test, sigma, output_dir, **settings))
                print(f"seed {seed}, {ARMS[arm]}: {time.perf_counter() - start:.0f} s", flush=True)
    finally:
        torch.set_num_threads(threads)
    (output_dir / "demo.json").write_text(json.dumps(results, indent=1))
    plot(results).savefig(output_dir / "demo.png", dpi=150)
    print(format_tables(results))
    print(f"\nWritten: {output_dir / 'demo.json'}, {output_dir / 'demo.png'}")
    return results


def format_tables(results: dict) -> str:
    """The text that the demo prints, from what it returns."""
    losses, violations, rmse = (_collect(results, name) for name in ("layer_losses", "max_violation", "rmse"))
    mean_rmse = {arm: curves.mean(1) for arm, curves in rmse.items()}  # [seeds]
    changes = {
        arm: (_change(mean_rmse, arm), *(_change(_column(rmse, n), arm) for n in (GAMMAS.index(GAMMA_TRAIN), 0)))
        for arm in ARMS
        if arm != "erm"
    }
    header = " " * 28 + "".join(f"{name:>20}" for name in ARMS.values())
    return "\n".join(
        [
            f"Held-out data, mean +- standard deviation over {len(violations['erm'])} seeds.",
            "",
            f"Loss of each layer at noise level {GAMMA_TRAIN} (1: the noisy input's own)",
            header,
            *(_row(f"  layer {n + 1}", _column(losses, n)) for n in range(NUM_LAYERS)),
            _row("  largest violation", violations),
            _row(f"Loss, exiting at layer {EXIT_LAYER}", _column(losses, EXIT_LAYER - 1)),
            "",
            f"RMSE on the 0-255 scale (training noise level: {GAMMA_TRAIN})",
            header,
            *(_row(f"  noise level {gamma:g}", _column(rmse, n)) for n, gamma in enumerate(GAMMAS)),
            _row("  mean", mean_rmse),
            "",
            *(
                f"{ARMS[arm].capitalize()} against plain training: mean RMSE {mean:+.1%}, at the training level "
                f"{train:+.1%}, without noise {clean:+.1%}."
                for arm, (mean, train, clean) in changes.items()
            ),
        ]
    )


def plot(results: dict) -> Figure:
    """Layer losses, RMSE against noise (bands: the range over seeds) and the multipliers of the first seed."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    losses_axes, rmse_axes, multiplier_axes = figure.subplots(1, 3)
    styles = {"erm": ("black", "-", "o"), "descent": ("black", "--", "s"), "deep_supervision": ("gray", ":", "^")}
    for axes, name, x in ((losses_axes, "layer_losses", range(1, NUM_LAYERS + 1)), (rmse_axes, "rmse", GAMMAS)):
        for arm, values in _collect(results, name).items():
            color, line, marker = styles[arm]
            axes.plot(x, values.mean(0), color=color, linestyle=line, marker=marker, label=ARMS[arm])
            axes.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.2, linewidth=0)
    losses_axes.axhline(INITIAL_LOSS_BOUND, color="lightgray", zorder=0)
    losses_axes.set(
        title=f"Held-out loss of each layer, noise level {GAMMA_TRAIN}",
        xlabel="layer",
        ylabel="squared error / noise power",
        yscale="log",
        xticks=range(1, NUM_LAYERS + 1),
    )
    rmse_axes.axvline(GAMMA_TRAIN, color="lightgray", zorder=0)
    rmse_axes.set(title="Held-out error against noise", xlabel="noise level", ylabel="RMSE (0-255)")

    run = results["arms"]["descent"][0]
    for layer, values in enumerate(zip(*run["multipliers"]), start=1):
        shade = str(0.7 * (layer - 1) / (NUM_LAYERS - 1))
        multiplier_axes.plot(
            run["steps"],
            values,
            color=shade,
            linestyle=("-", "--", "-.", ":", (0, (1, 3)))[layer - 1],
            label=f"layer {layer}",
        )
    multiplier_axes.set(title="Multipliers of the constrained model", xlabel="optimizer step", ylabel="multiplier")
    for axes in (losses_axes, rmse_axes, multiplier_axes):
        axes.legend(frameon=False)
    return figure


def _collect(results: dict, name: str) -> dict[str, np.ndarray]:
    """One result of all runs, per arm `[seeds, ...]`."""
    return {arm: np.array([run[name] for run in runs]) for arm, runs in results["arms"].items()}


def _column(values: dict[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    return {arm: array[:, index] for arm, array in values.items()}


def _change(values: dict[str, np.ndarray], arm: str) -> float:
    """Relative change of the seeds' mean against ERM."""
    return values[arm].mean() / values["erm"].mean() - 1


def _row(label: str, values: dict[str, np.ndarray]) -> str:
    """A line of the table: mean and standard deviation over seeds, per arm."""
    spread = {arm: f" +- {array.std(ddof=1):.2f}" if len(array) > 1 else "" for arm, array in values.items()}
    return f"{label:28}" + "".join(f"{f'{array.mean():.2f}{spread[arm]}':>20}" for arm, array in values.items())


def _run(arm, seed, train, test, sigma, output_dir, max_steps, negative_weights, auto) -> dict:
    """Train one model and evaluate it on the clips `test`."""
    noise_power = (GAMMA_TRAIN * sigma) ** 2
    model = UTForVideoDenoising(
        UTConfig(
            hidden_size=train.shape[-1],
            num_hidden_layers=NUM_LAYERS,
            attention_step=0.3,
            loss_scale=1 / (noise_power * train[0].numel()),
        )
    )
    by_auto = auto is not None and arm == "descent"
    config = DescentConfig(
        output_dir=str(output_dir),
        objective=arm,
        **({"descent_strength": auto} if by_auto else PROBLEM),
        dual_warmup_steps=0.25,
        negative_weights=negative_weights,
        noise_gamma=GAMMA_TRAIN,
        noise_sigma=sigma,
        learning_rate=1e-3,
        # The decay settles the layer losses; under a constant rate their last values are a matter of chance.
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": max_steps * 2 // 3, "decay_type": "linear"},
        max_grad_norm=0.0,  # clipping would keep ERM near its start, where the layers still descend by themselves
        per_device_train_batch_size=32,
        max_steps=max_steps,
        logging_steps=max(1, max_steps // 60),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="warning",
        use_cpu=True,
        seed=seed,
    )
    trainer = DescentTrainer(model, config, train_dataset=_dataset(train))
    trainer.remove_callback(PrinterCallback)
    trainer.train()

    problem = trainer.problem if by_auto else DescentProblem(ALPHA, INITIAL_LOSS_BOUND, NUM_LAYERS)
    profile = layer_profile(model, _dataset(test), gamma=GAMMA_TRAIN, problem=problem, metric="rmse", scale=255)
    curve = noise_curve(model, _dataset(test), GAMMAS, metric="rmse", scale=255)
    logs = [log for log in trainer.state.log_history if "multiplier_1" in log]
    return {
        "layer_losses": profile.losses.tolist(),
        "max_violation": profile.max_violation / problem.initial_loss_bound,
        "rmse": curve.mean.tolist(),
        "steps": [log["step"] for log in logs],
        "multipliers": [[log[f"multiplier_{layer}"] for layer in range(1, NUM_LAYERS + 1)] for log in logs],
    }


def _dataset(clips: torch.Tensor) -> list[dict]:
    # The trainer's noise perturbs `pixel_values` and leaves the labels clean.
    return [{"pixel_values": clip, "labels": clip} for clip in clips]


def add_arguments(parser: argparse.ArgumentParser):
    parser.add_argument("--output_dir", default="demo", help="folder for demo.json and demo.png")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one run of each model per seed")
    parser.add_argument("--max_steps", type=int, default=1200, help="optimizer steps of each run")
    parser.add_argument(
        "--negative_weights",
        choices=("keep", "clip"),
        help="in the constrained model's objective: keep, and clip with --auto, where not given",
    )
    parser.add_argument(
        "--auto",
        type=float,
        nargs="?",
        const=DescentConfig.descent_strength,
        metavar="STRENGTH",
        help="the package's default problem and dual settings in the constrained model, at this `descent_strength`",
    )


def run(args: argparse.Namespace):
    """Runs [`demo`] as the command line says."""
    demo(args.output_dir, args.seeds, args.max_steps, args.negative_weights, args.auto)
