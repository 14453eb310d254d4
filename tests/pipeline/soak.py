"""A long run with evaluations and rotating checkpoints: what it holds must not grow.

    python tests/pipeline/soak.py --steps 5000

Prints memory, open files, threads, hooks and tensors at the end of each tenth of the run.
"""

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import torch
from tiny import bert, classification_data, config
from transformers import TrainerCallback

from hf_descent import DescentTrainer


COLUMNS = ("step", "megabytes", "files", "threads", "hooks", "tensors", "checkpoints")


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    # A forward put on an instance would be one that was not taken back.
    return sum(
        sum(len(getattr(module, kind)) for kind in kinds) + ("forward" in vars(module)) for module in model.modules()
    )


class Census(TrainerCallback):
    def __init__(self, every):
        self.every, self.rows = every, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step % self.every:
            return
        gc.collect()
        process = psutil.Process()
        self.rows.append(
            (
                state.global_step,
                process.memory_info().rss / 2**20,
                process.num_fds(),
                process.num_threads(),
                hooks(model),
                sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
                sum(name.startswith("checkpoint-") for name in os.listdir(args.output_dir)),
            )
        )


def run(steps, folder):
    """The rows of the census, one for each tenth of the run, and the hooks left on the model."""
    torch.set_num_threads(1)
    data = classification_data(128)
    args = config(
        folder, max_steps=steps, noise_gamma=0.4, resilience=0.1, resilience_form="slack", eval_strategy="steps",
        eval_steps=25, save_strategy="steps", save_steps=25, save_total_limit=2, logging_steps=25,
        load_best_model_at_end=True, metric_for_best_model="feasible_score", gradient_accumulation_steps=2,
        log_level="error", per_device_train_batch_size=4, eval_on_start=True,
    )  # fmt: skip
    census = Census(steps // 10)
    model = bert(dropout=0.1)
    trainer = DescentTrainer(model, args, train_dataset=data, eval_dataset=data[:20], callbacks=[census])
    trainer.train()
    assert torch.isfinite(trainer.multipliers.values).all()
    # A forward that is asked for hidden states leaves hooks of transformers' own behind, which record nothing later.
    stock = bert()
    stock(**{name: value[None] for name, value in data[0].items() if name != "labels"}, output_hidden_states=True)
    return census.rows, hooks(model) - hooks(stock)


def check(rows, left):
    """AssertionError for what grew in the second half of the run (memory: by more than the allocator's play)."""
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    for column, name in enumerate(COLUMNS[1:], start=1):
        before, after = (max(row[column] for row in half) for half in halves)
        assert after <= before + (8 if name == "megabytes" else 0), f"{name} grew from {before} to {after}"
    assert left == 0, f"{left} hooks are left on the model"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows, left = run(options.steps, folder)
    print(" ".join(f"{name:>11}" for name in COLUMNS))
    for row in rows:
        print(" ".join(f"{value:11.1f}" if isinstance(value, float) else f"{value:11}" for value in row))
    check(rows, left)
    print(f"{options.steps} steps: nothing grew, {left} hooks left")
