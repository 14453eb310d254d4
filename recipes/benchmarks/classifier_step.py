"""Time of a constrained step with the replay readout against the ERM step of the stock Trainer, on one classifier.

    python recipes/benchmarks/classifier_step.py [--layers 12 --hidden 384 --batch 16 --length 128 --rounds 5]

Both trainers take turns in one process, a few steps each, so that a noisy machine slows both; the figure is the ratio
of the median step times. Random weights: the cost does not depend on them.
"""

import argparse
import statistics
import tempfile
import time

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_descent import DescentConfig, DescentTrainer


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
    for name, default in (
        ("layers", 12),
        ("hidden", 384),
        ("batch", 16),
        ("length", 128),
        ("steps", 4),
        ("rounds", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(2)

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
    }  # fmt: skip
    model_config = BertConfig(
        vocab_size=1000, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
    )  # fmt: skip
    constrained = {
        "descent_alpha": 0.05,
        "initial_loss_bound": 0.7,
        "dual_warmup_steps": 0,
        "negative_weights": "keep",
    }
    trainers, clocks = {}, {}
    for name, trainer_class, args in (
        ("stock ERM", Trainer, TrainingArguments(**settings)),
        ("constrained", DescentTrainer, DescentConfig(**settings, **constrained)),
    ):
        clocks[name] = Clock()
        model = BertForSequenceClassification(model_config)
        trainers[name] = trainer_class(model, args, train_dataset=data, callbacks=[clocks[name]])
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
        print(f"{name:12} {seconds:.3f} s a step (quartiles {low:.3f} to {high:.3f})")
    print(f"ratio        {medians['constrained'] / medians['stock ERM']:.3f}")


if __name__ == "__main__":
    main()
