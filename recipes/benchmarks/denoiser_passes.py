"""What several passes of a denoiser gain when SURE chooses or mixes them, and what they lose where it does not apply.

    python recipes/benchmarks/denoiser_passes.py [--objective erm] [--max_steps 1200] [--seeds 0 1 2]

Trains the demo's denoiser on pans over two photographs with Gaussian noise and denoises held-out pans
that were spoilt in several ways of equal power. Printed: RMSE on the 0-255 scale over all clips, mean and standard
deviation over seeds.
"""

import argparse
import tempfile

import torch
import torch.nn.functional as F

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.commands.demo import PROBLEM
from hf_descent.data.pans import photo_pans
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.passes import denoise_in_passes, estimate_sigma


GAMMA_TRAIN, SIDE, PASSES = 0.15, 8, 3


def train(clips: torch.Tensor, objective: str, seed: int, max_steps: int, folder: str) -> UTForVideoDenoising:
    sigma = float(clips.std())
    scale = 1 / ((GAMMA_TRAIN * sigma) ** 2 * clips[0].numel())
    torch.manual_seed(seed)
    model = UTForVideoDenoising(
        UTConfig(hidden_size=clips.shape[-1], num_hidden_layers=5, attention_step=0.3, loss_scale=scale)
    )
    config = DescentConfig(
        output_dir=folder,
        objective=objective,
        **PROBLEM,
        noise_gamma=GAMMA_TRAIN,
        noise_sigma=sigma,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        max_grad_norm=0.0,
        per_device_train_batch_size=32,
        max_steps=max_steps,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    rows = [{"pixel_values": clip, "labels": clip} for clip in clips]
    DescentTrainer(model, config, train_dataset=rows).train()
    return model.eval()


def spoil(clips: torch.Tensor, kind: str, power: float, generator: torch.Generator) -> torch.Tensor:
    """`clips` `[clips, frames, pixels]` with a disturbance of the given root mean square."""
    noise = torch.randn(clips.shape, generator=generator)
    images = noise.unflatten(-1, (SIDE, SIDE))
    if kind == "uniform":
        noise = torch.rand(clips.shape, generator=generator) - 0.5
    elif kind == "correlated":
        noise = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1).flatten(-2)
    elif kind == "salt and pepper":
        hit = torch.rand(clips.shape, generator=generator)
        share = (power**2 / (clips - (clips < 0.5).float()).square().mean()).clamp(max=1)
        return torch.where(hit < share, (torch.rand(clips.shape, generator=generator) < 0.5).float(), clips)
    elif kind == "blur":
        frames = F.pad(clips.unflatten(-1, (SIDE, SIDE)), (1, 1, 1, 1), mode="replicate")
        return F.avg_pool2d(frames, 3, 1).flatten(-2)
    return clips + power * noise / noise.square().mean().sqrt()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objective", default="erm", choices=("erm", "deep_supervision", "descent"))
    parser.add_argument("--max_steps", type=int, default=1200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    clips, held_out = photo_pans(4096), photo_pans(256, held_out=True)
    cases = [(kind, gamma) for gamma in (0.15, 0.3, 0.6) for kind in ("gaussian",)]
    cases += [(kind, 0.3) for kind in ("uniform", "correlated", "salt and pepper", "blur")]
    found = {case: [] for case in cases}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            model = train(clips, args.objective, seed, args.max_steps, folder)
        for (kind, gamma), rows in found.items():
            noisy = spoil(held_out, kind, gamma * float(clips.std()), torch.Generator().manual_seed(seed))
            sigma = estimate_sigma(noisy.unflatten(-1, (SIDE, SIDE))).median(1).values  # [clips]
            sigma = sigma.clamp(min=1e-3)

            def denoise(y, model=model):
                return model(pixel_values=y).logits

            chosen = denoise_in_passes(denoise, noisy, PASSES, sigma=sigma, combine=False)
            mixed = denoise_in_passes(denoise, noisy, PASSES, sigma=sigma)
            with torch.no_grad():
                estimates = [noisy]
                for _ in range(PASSES):
                    estimates.append(denoise(estimates[-1]))
            estimates += [chosen.output, mixed.output]
            rows.append([255 * (estimate - held_out).square().mean().sqrt().item() for estimate in estimates])
    names = ["input", *(f"{k} pass{'es' if k > 1 else ''}" for k in range(1, PASSES + 1)), "chosen", "mixed"]
    print(f"{'':24}" + "".join(f"{name:>15}" for name in names))
    for (kind, gamma), rows in found.items():
        spreads = zip(*(part.tolist() for part in torch.std_mean(torch.tensor(rows), dim=0)))
        print(f"{f'{kind}, {gamma:g}':24}" + "".join(f"{f'{mean:.2f} +- {std:.2f}':>15}" for std, mean in spreads))


if __name__ == "__main__":
    main()
