"""How often `hf-descent compare` finds a difference between models that differ by their training seed alone.

    python recipes/benchmarks/false_positives.py [--models 1800]

Trains tiny classifiers that are alike but for the seed of their weights and batches, measures a noise curve of each
under common random numbers, and lets the verdict compare groups of them at 95 %, no model in two groups. The rate of
verdicts other than "no difference" should be at most 5 %; the figure is its exact (Clopper-Pearson) 95 % upper bound.
"""

import argparse
import time

import torch
from scipy.stats import beta
from transformers import BertConfig, BertForSequenceClassification

from hf_descent import noise_curve
from hf_descent.evaluation.comparison import Run, difference


LENGTH, VOCAB, CLASSES = 8, 40, 3


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose third tells the class, three times in four."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (count, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    ids[:, 2] = torch.where(torch.rand(count, generator=generator) < 0.75, labels, ids[:, 2] % CLASSES)
    return ids, labels


def train(seed: int, ids: torch.Tensor, labels: torch.Tensor, steps: int) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        batch = torch.randint(len(ids), (32,))
        model(input_ids=ids[batch], labels=labels[batch]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=1800)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)

    start = time.perf_counter()
    ids, labels = rows(512, seed=0)
    held_out = [{"input_ids": row, "labels": label} for row, label in zip(*rows(320, seed=1))]
    runs = []
    for seed in range(options.models):
        model = train(seed, ids, labels, options.steps)
        curve = noise_curve(model, held_out, [0.0, 1.0, 2.0], batch_size=20, draws=2, sigma=0.02)
        runs.append(Run(f"seed {seed}", curve, summary={"arguments": {"seed": seed}}))
    spread = torch.tensor([run.curve.auc_over_range for run in runs])
    print(
        f"{len(runs)} models in {time.perf_counter() - start:.0f} s; average accuracy {spread.mean():.3f}, standard "
        f"deviation over seeds {spread.std():.3f}"
    )
    for size in (2, 3, 5):
        found = total = 0
        for first in range(0, len(runs) - 2 * size + 1, 2 * size):
            groups = {"a": runs[first : first + size], "b": runs[first + size : first + 2 * size]}
            found += difference(groups, "a", "b").verdict != "no difference"
            total += 1
        bound = beta.ppf(0.95, found + 1, total - found)
        print(f"{size} seeds against {size}: {found} of {total} ({found / total:.1%}), at most {bound:.1%} (95 %)")


if __name__ == "__main__":
    main()
