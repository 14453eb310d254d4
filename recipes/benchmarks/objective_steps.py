"""What a training step of each objective costs, as a ratio to plain training, on one classifier.

    python recipes/benchmarks/objective_steps.py [--layers 12 --hidden 384 --batch 16 --length 128 --rounds 5]

All objectives take turns in one process, a few steps each, so that a noisy machine slows all of them.
"""

import argparse
import statistics
import tempfile

import torch
from classifier_step import Clock
from transformers import BertConfig, BertForSequenceClassification

from hf_descent import DescentConfig, DescentTrainer


ARMS = {
    "erm": {"objective": "erm"},
    "erm, noise": {"objective": "erm", "noise_gamma": 1.0},
    "neftune": {"objective": "erm", "neftune_noise_alpha": 5.0},
    "deep_supervision, noise": {"objective": "deep_supervision", "noise_gamma": 1.0},
    "hinge, noise": {"objective": "hinge", "noise_gamma": 1.0},
    "quadratic, noise": {"objective": "quadratic", "noise_gamma": 1.0},
    "fixed, noise": {"objective": "fixed", "noise_gamma": 1.0, "fixed_multipliers": "ones"},
    "descent, noise": {"objective": "descent", "noise_gamma": 1.0},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"layers": 12, "hidden": 384, "batch": 16, "length": 128, "steps": 4, "rounds": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    data = [
        {"input_ids": torch.randint(5, 1000, (options.length,)), "labels": index % 2}
        for index in range(options.batch * options.steps)
    ]
    model_config = BertConfig(
        vocab_size=1000, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
    )  # fmt: skip
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "descent_alpha": 0.05, "initial_loss_bound": 0.7, "dual_warmup_steps": 0, "noise_sigma": 0.02,
    }  # fmt: skip
    trainers, clocks = {}, {}
    for name, arm in ARMS.items():
        if "fixed_multipliers" in arm:
            arm = arm | {"fixed_multipliers": [1.0] * options.layers}
        clocks[name] = Clock()
        model = BertForSequenceClassification(model_config)
        trainers[name] = DescentTrainer(
            model, DescentConfig(**settings, **arm), train_dataset=data, callbacks=[clocks[name]]
        )
    for trainer in trainers.values():
        trainer.train()
    for clock in clocks.values():
        clock.seconds.clear()
    for _ in range(options.rounds):
        for name, trainer in trainers.items():
            trainer.train()
            del clocks[name].seconds[-options.steps]  # the first step of a run, which also looks for the readout
    medians = {name: statistics.median(clock.seconds) for name, clock in clocks.items()}
    for name, seconds in medians.items():
        low, _, high = statistics.quantiles(clocks[name].seconds, n=4)
        print(f"{name:24} x{seconds / medians['erm']:.2f}  {seconds:.3f} s (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
