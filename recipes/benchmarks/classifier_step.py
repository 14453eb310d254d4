"""Time of a training step of each objective, layers read by replay, against the stock Trainer's, on one classifier.

    python recipes/benchmarks/classifier_step.py [--arms descent] [--layers 12 --hidden 384 --batch 16 --length 128]

All arms take turns in one process, a few steps each, so that a noisy machine slows all of them; the figure is the
ratio of the median step times. Random weights: the cost does not depend on them.
"""

import argparse
import statistics
import tempfile
import time

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_descent import DescentConfig, DescentTrainer


NOISE = {"noise_gamma": 1.0, "noise_sigma": 0.02}
ARMS = {
    "erm": {"objective": "erm"},
    "descent": {"objective": "descent"},
    "descent, compiled": {"objective": "descent", "torch_compile": True},
    "erm+noise": {"objective": "erm", **NOISE},
    "neftune": {"objective": "erm", "neftune_noise_alpha": 5.0},
    "deep_supervision+noise": {"objective": "deep_supervision", **NOISE},
    "hinge+noise": {"objective": "hinge", **NOISE},
    "quadratic+noise": {"objective": "quadratic", **NOISE},
    "fixed+noise": {"objective": "fixed", **NOISE},
    "descent+noise": {"objective": "descent", **NOISE},
}


class Clock(TrainerCallback):
    """Seconds from the start of a step to its end, the optimizer's and the dual step included."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"layers": 12, "hidden": 384, "batch": 16, "length": 128, "steps": 4, "rounds": 5, "threads": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    data = [
        {
            "input_ids": torch.randint(5, 1000, (options.length,)),
            "attention_mask": torch.ones(options.length, dtype=torch.long),
            "labels": index % 2,
        }
        for index in range(options.batch * options.steps)
    ]
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "use_cpu": True,
        "log_level": "error",
    }  # fmt: skip
    problem = {
        "descent_alpha": 0.05, "initial_loss_bound": 0.7, "dual_warmup_steps": 0, "negative_weights": "keep",
        "fixed_multipliers": [1.0] * options.layers,
    }  # fmt: skip
    arms = {"stock Trainer": (Trainer, TrainingArguments(**settings))}
    for name in options.arms:
        arms[name] = DescentTrainer, DescentConfig(**settings, **problem, **ARMS[name])
    model_config = BertConfig(
        vocab_size=1000, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
    )  # fmt: skip
    trainers, clocks = {}, {name: Clock() for name in arms}
    for name, (trainer_class, args) in arms.items():
        model = BertForSequenceClassification(model_config)
        trainers[name] = trainer_class(model, args, train_dataset=data, callbacks=[clocks[name]])
        trainers[name].train()
        clocks[name].seconds.clear()
    for _ in range(options.rounds):
        for name, trainer in trainers.items():
            trainer.train()
            del clocks[name].seconds[-options.steps]  # the first step of a run, which also looks for the readout
    stock = statistics.median(clocks["stock Trainer"].seconds)
    for name, clock in clocks.items():
        low, middle, high = statistics.quantiles(clock.seconds, n=4)
        print(f"{name:24} {middle:.3f} s a step (quartiles {low:.3f} to {high:.3f}), ratio {middle / stock:.3f}")


if __name__ == "__main__":
    main()
