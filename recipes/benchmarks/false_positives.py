"""How often `hf-descent compare` finds a difference between models that differ by their training seed alone.

    python recipes/benchmarks/false_positives.py [--models 1800]

Trains tiny classifiers that are alike but for the seed of their weights and batches, measures a noise curve of each
under common random numbers, and lets the verdict compare groups of them at 95 %, no model in two groups: by Welch's
test, and paired as runs with the same seeds are. The rate of verdicts other than "not significant" should be at most
5 %; the figure is its exact (Clopper-Pearson) 95 % upper bound.
"""

import argparse
import time
from itertools import product

import torch
import torch.nn.functional as F
from scipy.stats import beta
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from hf_descent import noise_curve
from hf_descent.evaluation.comparison import Run, difference


LENGTH, VOCAB, CLASSES, WIDTH = 8, 40, 3, 16


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose third tells the class, three times in four."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    ids[:, 2] = torch.where(torch.rand(count, generator=generator) < 0.75, labels, ids[:, 2] % CLASSES)
    return ids, labels


class Classifier(nn.Module):
    """One attention layer and a perceptron on the mean of the tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def get_input_embeddings(self):
        return self.table

    def forward(self, input_ids, labels):
        hidden = self.table(input_ids) + self.positions  # [batch, seq, width]
        scores = self.query(hidden) @ self.key(hidden).transpose(-1, -2) / WIDTH**0.5  # [batch, seq, seq]
        logits = self.head((hidden + scores.softmax(-1) @ self.value(hidden)).mean(-2))  # [batch, classes]
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def train(seeds: range, ids: torch.Tensor, labels: torch.Tensor, steps: int) -> list[Classifier]:
    """Models that differ by the seed of their weights and batches alone, trained side by side."""
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(Classifier())
    drawn = [torch.randint(len(ids), (steps, 32), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    batches = torch.stack(drawn, dim=1)  # [steps, models, batch]
    parameters, _ = stack_module_state(models)

    def loss(own, ids, labels):
        return functional_call(models[0], own, (ids, labels))["loss"]

    optimizer = torch.optim.Adam(parameters.values(), lr=1e-2)  # elementwise, so that each model has its own
    for batch in batches:
        vmap(loss)(parameters, ids[batch], labels[batch]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for index, model in enumerate(models):
        model.load_state_dict({name: stacked[index].detach() for name, stacked in parameters.items()})
    return models


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=1800)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)

    start = time.perf_counter()
    ids, labels = rows(512, seed=0)
    held_out = [{"input_ids": row, "labels": label} for row, label in zip(*rows(320, seed=1))]
    runs = []
    for first in range(0, options.models, 100):
        seeds = range(first, min(first + 100, options.models))
        for seed, model in zip(seeds, train(seeds, ids, labels, options.steps)):
            curve = noise_curve(model, held_out, [0.0, 0.5, 1.0], batch_size=20, draws=1, sigma=1.0)
            runs.append(Run(f"seed {seed}", curve, summary={"arguments": {"seed": seed}}))
    spread = torch.tensor([run.curve.auc_over_range for run in runs])
    print(
        f"{len(runs)} models in {time.perf_counter() - start:.0f} s; average accuracy {spread.mean():.3f}, standard "
        f"deviation over seeds {spread.std():.3f}"
    )
    for size, paired in product((2, 3, 5), (False, True)):
        found = total = 0
        for first in range(0, len(runs) - 2 * size + 1, 2 * size):
            drawn = runs[first : first + 2 * size]
            for number, run in enumerate(drawn):  # paired, the sides share their seeds in name alone
                run.summary["arguments"]["seed"] = number % size if paired else number
            verdict = difference({"a": drawn[:size], "b": drawn[size:]}, "a", "b")
            assert verdict.paired == paired
            found += verdict.verdict != "not significant"
            total += 1
        bound = beta.ppf(0.95, found + 1, total - found)
        print(
            f"{size} seeds against {size}, {'paired' if paired else 'not paired'}: {found} of {total} "
            f"({found / total:.1%}), at most {bound:.1%} (95 %)"
        )


if __name__ == "__main__":
    main()
