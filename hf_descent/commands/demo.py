"""`hf-descent demo`: plain training, descent constraints and deep supervision of one small denoiser, in minutes.

Real image content (`data/pans.py`), a 5-layer unrolled transformer, three objectives in one trainer, several seeds.
Everything reported is measured on regions of the photographs that training never saw.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback

from ..configs import DescentConfig
from ..data.pans import photo_pans
from ..early_exit.layer_sets import spans
from ..evaluation.certificates import MET, NOT_MET, NOT_SHOWN
from ..evaluation.comparison import Comparison, compare
from ..evaluation.plots import save_comparison
from ..evaluation.price import percent
from ..evaluation.profiles import LayerProfile
from ..evaluation.scoring import format_table
from ..models import UTConfig, UTForVideoDenoising
from ..runs import RunFolder
from ..trainer import DescentTrainer
from .closing import next_step


PLAIN = "erm"
# Plain training comes first: the others are compared with it.
ARMS = {PLAIN: "plain training", "descent": "constrained", "deep_supervision": "deep supervision"}
GAMMA_TRAIN = 0.15
GAMMAS = (0.0, 0.05, 0.1, GAMMA_TRAIN, 0.25, 0.4, 0.6, 0.8, 1.0)
NUM_LAYERS = 5
# What every arm states: plain training and deep supervision are judged by it, too.
DEFAULTS = {"descent_alpha": "line"}
PAPER = {
    "descent_alpha": 0.05,
    "initial_loss_bound": 1.0,  # f_0: the noisy input's own loss
    "dual_learning_rate": 0.01,
    "resilience": 0.05,
    "negative_weights": "keep",
    "max_last_layer_rise": None,  # the paper has no limit on the price
}


def demo(
    output_dir: str, seeds: Sequence[int] = (0, 1, 2), max_steps: int = 1200, paper: bool = False
) -> Comparison:
    """Train every arm with every seed, evaluate on held-out clips, compare the arms in a table and in figures.

    Runs lie in `<output_dir>/<arm>-<seed>`; a quarter of the steps is warm-up. The constraints are the package's
    default, or with `paper` the paper's. Metrics are RMSE on the 0-255 scale, layer losses mean squared error divided
    by the noise power at the training noise level.
    """
    train = photo_pans(4096)  # [clips, frames, pixels]
    test = photo_pans(512, held_out=True)
    folders = {name: [] for name in ARMS.values()}
    problem = PAPER if paper else DEFAULTS
    for seed in dict.fromkeys(seeds):
        plain = None
        for arm, name in ARMS.items():
            start = time.perf_counter()
            folder = f"{output_dir}/{arm}-{seed}"
            profile = _run(folder, arm, seed, train, test, max_steps, problem, plain)
            if arm == PLAIN:
                plain = profile
            folders[name].append(folder)
            print(f"seed {seed}, {name}: {time.perf_counter() - start:.0f} s", flush=True)

    comparison = compare(folders)
    files = save_comparison(comparison, output_dir)
    print(f"\n{layer_table(comparison)}")
    print(
        f"\nHeld-out {comparison}\nAll arms have one learning rate; `docs/results.md` has each at its own best."
    )
    print(f"\nWritten to {output_dir}: {', '.join(files)}")
    print(closing(comparison))
    print(
        next_step(f"card {output_dir}/descent-{seeds[0]}", "writes the card of a constrained model")
    )
    recipe = "classify --config recipes/imdb-minilm/descent.yaml"
    print(next_step(recipe, "trains a text classifier, from the Hub, that may stop early"))
    return comparison


def closing(comparison: Comparison) -> str:
    """What the constrained runs have met, in a sentence, where deep supervision does better, and the verdict."""
    verdicts = [run.certificate for run in comparison.groups[ARMS["descent"]]]
    outcomes = [verdict.outcome for verdict in verdicts]
    outcome = next((word for word in (NOT_MET, NOT_SHOWN) if word in outcomes), MET)

    plain, constrained, supervised = layer_losses(comparison).values()
    lines = [
        f"Every layer of the constrained model reduces the loss as asked in {outcomes.count(MET)} of {len(outcomes)} "
        "runs. The price is the change of the last layer's loss against plain training.",
        f"VERDICT: {outcome.upper()}, price {percent(constrained[-1] / plain[-1] - 1)}",
    ]
    lower = np.flatnonzero(supervised < constrained) + 1
    if len(lower):
        lines.insert(
            1,
            f"With deep supervision the loss is lower in this demo (layers {spans(lower.tolist())}), at a price of "
            f"{percent(supervised[-1] / plain[-1] - 1)}.",
        )
    return "\n".join(lines)


def layer_losses(comparison: Comparison) -> dict[str, np.ndarray]:
    """The loss of every layer `[layers]`, mean over seeds, by the name of the arm."""
    return {
        name: np.mean([run.profiles[GAMMA_TRAIN].losses for run in runs], axis=0)
        for name, runs in comparison.groups.items()
    }


def layer_table(comparison: Comparison) -> str:
    """The loss of every layer of each arm, and what the numbers mean."""
    rows = [
        [name, *(f"{loss:.2f}" for loss in losses)]
        for name, losses in layer_losses(comparison).items()
    ]
    return (
        f"Loss of each layer at noise level {GAMMA_TRAIN}, mean over seeds (1: the noisy input's own)\n"
        f"{format_table(rows)}\nEach number is the loss if the model stopped after that layer. Below 1 the layer "
        "removes noise, above 1 it makes the clip worse."
    )


def denoiser(clips: torch.Tensor, max_steps: int) -> tuple[UTForVideoDenoising, dict]:
    """A model for clips `[clips, frames, pixels]`, with losses in units of the noise, and settings to train it by."""
    sigma = float(clips.std())
    noise_power = (GAMMA_TRAIN * sigma) ** 2

    sizes = {"hidden_size": clips.shape[-1], "num_hidden_layers": NUM_LAYERS}
    loss_scale = 1 / (noise_power * clips[0].numel())
    model = UTForVideoDenoising(UTConfig(**sizes, attention_step=0.3, loss_scale=loss_scale))
    settings = {
        "noise_gamma": GAMMA_TRAIN,
        "noise_sigma": sigma,
        # The decay settles the layer losses; under a constant rate their last values are a matter of chance.
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": max_steps * 2 // 3, "decay_type": "linear"},
        "max_grad_norm": 0.0,  # clipping would keep ERM near its start, where the layers still descend by themselves
    }

    return model, settings


def _run(
    folder: str,
    arm: str,
    seed: int,
    train: torch.Tensor,
    test: torch.Tensor,
    max_steps: int,
    problem: Mapping[str, Any],
    plain: LayerProfile | None,
) -> LayerProfile:
    """Train one model, evaluate it on the clips `test`, and write both into its run folder; the profile of its layers.
    `plain` is that of plain training, which the run's verdict tells the price by."""
    model, settings = denoiser(train, max_steps)
    config = DescentConfig(
        output_dir=folder,
        objective=arm,
        learning_rate=1e-3,
        per_device_train_batch_size=32,
        max_steps=max_steps,
        logging_steps=max(1, max_steps // 60),
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="warning",
        use_cpu=True,
        **settings,
        **problem,
    )

    trainer = DescentTrainer(model, config, train_dataset=rows_of(train))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    trainer.save_state()

    shared = {"metric": "rmse", "scale": 255, "batch_size": 32}
    profile = trainer.evaluate_layers(rows_of(test), gamma=GAMMA_TRAIN, **shared)
    if plain is not None:
        profile.keep_plain(plain)
    curve = trainer.evaluate_robustness(rows_of(test), GAMMAS, **shared)
    RunFolder(folder).write({f"layer_profile{profile.ending}": profile, "noise_curve": curve})
    return profile


def rows_of(clips: torch.Tensor) -> list[dict]:
    """Clips as rows: the trainer's noise perturbs `pixel_values` and leaves the labels clean."""
    return [{"pixel_values": clip, "labels": clip} for clip in clips]


def run(args: argparse.Namespace):
    """Runs [`demo`] as the command line says."""
    if args.max_steps < 1:
        raise ValueError(f"`max_steps` is {args.max_steps}; give at least 1.")
    torch.set_num_threads(1)  # matrices as small as these take longer on several
    demo(args.output_dir, args.seeds, args.max_steps, args.paper)
