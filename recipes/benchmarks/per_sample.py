"""Do single samples descend, and do multipliers of their own make them?

    python recipes/benchmarks/per_sample.py [--arms ARM ...] [--seeds 0 1 2]

The denoiser of `controlled.py photos`. A clip descends where each layer's loss on it is below that of the layer
before, that of layer 1 below 1, the noisy clips' own. The other arms ask for f_l <= 0.7 f_(l-1) of every clip, the
layer before held fixed: with multipliers between 0 and C ("C 1"), whose best value gives a penalty of C [violation]_+
on each clip, or with such multipliers stored from visit to visit ("C 1, stored"), each step 0.5 times the violation.
Each arm has its own best learning rate, as in `controlled.py`.
"""

import argparse
import tempfile

import torch
from controlled import arms, photos, search
from harness import Runs
from transformers import PrinterCallback, set_seed

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.commands import demo
from hf_descent.noise.embedding_noise import EmbeddingNoise
from hf_descent.readout.replay import layer_logits


BATCH = ("plain", "deep supervision", "descent", "alpha 0.3, detach")
SAMPLE = {"C 0.3": (0.3, False), "C 1": (1.0, False), "C 3": (3.0, False), "C 1, stored": (1.0, True)}
ALPHA, DUAL_RATE = 0.3, 0.5


def sample_losses(model, clips, labels):
    """Losses `[L, batch]` of the layers on each clip, in units of the noise."""
    logits = torch.stack(layer_logits(model, {"pixel_values": clips}))
    return (logits - labels).square().sum((-2, -1)) * model.config.loss_scale


class PerSample(DescentTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if (most := self.most) is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        rows = inputs["row"]
        with self._training_noise(model):
            losses = sample_losses(model, inputs["pixel_values"], inputs["labels"])
        before = torch.cat([torch.ones_like(losses[:1]), losses[:-1].detach()])
        violations = losses - (1 - ALPHA) * before
        if self.stored is None:
            return (losses[-1] + most * violations.relu().sum(0)).mean()
        objective = (losses[-1] + (self.stored[:, rows] * violations).sum(0)).mean()
        self.stored[:, rows] = (self.stored[:, rows] + DUAL_RATE * violations.detach()).clamp(0, most)
        return objective


def train(options, arm: str, rate: float, seed: int) -> dict:
    clips, select, tests = photos(options)
    steps = 4 if options.smoke else 1200
    set_seed(seed)
    model, config = demo.denoiser(clips, steps)
    most, stored = SAMPLE.get(arm, (None, False))
    settings = arms("photos")[arm] if arm in BATCH else {"objective": "erm", "remove_unused_columns": False}
    rows = [row | ({"row": index} if arm in SAMPLE else {}) for index, row in enumerate(demo.rows_of(clips))]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "log_level": "error"}
        args = DescentConfig(
            folder, use_cpu=True, logging_steps=100, learning_rate=rate, max_steps=steps, seed=seed,
            per_device_train_batch_size=32, **quiet, **config, **settings,
        )  # fmt: skip
        trainer = PerSample(model, args, train_dataset=rows)
        trainer.most, trainer.stored = most, torch.zeros(demo.NUM_LAYERS, len(clips)) if stored else None
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()

    def measure(clips):
        noise = EmbeddingNoise(model, demo.GAMMA_TRAIN, 0, config["noise_sigma"])
        noise.reseed(0)
        with torch.no_grad(), noise:
            return sample_losses(model, clips, clips)

    found = {"select": measure(select).mean(1).tolist()}
    losses = measure(tests["test"])  # [L, clips]
    path = torch.cat([torch.ones_like(losses[:1]), losses])
    lower = path[1:] < path[:-1]
    met = path[1:] <= (1 - ALPHA) * path[:-1]
    return found | {
        "losses": losses.mean(1).tolist(),
        "descends": lower.all(0).double().mean().item(),
        "layers lower": lower.double().mean(1).tolist(),
        "met by": met.double().mean(1).tolist(),
        "all met by": met.all(0).double().mean().item(),
        "worst tenth, last layer": losses[-1].quantile(0.9).item(),
        "worst tenth, layer 3 over 5": (losses[2] / losses[4]).quantile(0.9).item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=[*BATCH, *SAMPLE], choices=[*BATCH, *SAMPLE])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", default="per_sample.jsonl")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    finished = Runs(options.output)

    def run(arm, rate, seed):
        key = {"arm": arm, "rate": rate, "seed": seed, "smoke": options.smoke}
        found = finished.get(key, lambda: train(options, arm, rate, seed))
        print(arm, rate, seed, found, flush=True)
        return found

    for arm in options.arms:
        search(arm, 1e-3, options.seeds, run)


if __name__ == "__main__":
    main()
