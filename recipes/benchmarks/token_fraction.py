"""What a sample of the tokens costs in noise: violations estimated on part of the tokens against all of them.

    python recipes/benchmarks/token_fraction.py MODEL TEXTS.parquet [--text_column text --batch 4 --length 256]

MODEL is a causal language model of the Hub or a folder, TEXTS a parquet, csv or json file; with `--steps` it is first
trained that long, by the defaults. For each fraction, on tokens of each layer's own and on the same of all layers, the
table gives, about its value on all tokens of the batch: the standard deviation of the estimate of f_l for l < L
("lines", as their rows have it), and that of f_l - (1 - alpha) f_(l-1) ("steps"); the latter in all, batches differing
too, against all tokens; the variance of the gradient of f_1 + ... + f_L, from batch to batch = 1; and the products
with the head that the step needs, on all tokens = 1.
"""

import argparse

import torch
import transformers
from harness import fit
from lm_step import token_ids

from hf_descent.readout.head import HeadReadout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text_file", help="parquet, json, jsonl, csv or txt")
    parser.add_argument("--text_column", default="text")
    for name, default in (
        ("batch", 4),
        ("length", 256),
        ("batches", 20),
        ("draws", 10),
        ("steps", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[0.5, 0.25, 0.125, 0.1, 0.0625, 0.03125]
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    ids = torch.tensor(token_ids(options, (options.batches + options.steps) * options.batch))
    measured, others = ids.split([options.batches * options.batch, options.steps * options.batch])
    if options.steps:
        settings = {
            "per_device_train_batch_size": options.batch,
            "max_steps": options.steps,
            "learning_rate": 1e-3,
        }
        fit(model, [{"input_ids": row, "labels": row} for row in others], settings)
    model.eval()

    full, sampled = (
        [],
        {(fraction, of): [] for fraction in options.fractions for of in ("own", "same")},
    )
    generator, readout = torch.Generator().manual_seed(0), None

    def estimates(read, tokens):
        """[layers - 1] of f_l, [layers - 1] of the violations, and the gradient of the sum of all f_l."""
        losses = read(tokens, torch.ones(readout.num_layers))
        gradients = torch.autograd.grad(
            losses.objective, list(model.parameters()), retain_graph=True
        )
        mean = losses.sums / len(tokens.rows)  # [layers]
        steps = mean[1:] - (1 - options.alpha) * mean[:-1]
        return mean[:-1], steps, torch.cat([gradient.flatten() for gradient in gradients])

    def on_forward(read, outputs, hidden_states):
        full.append(estimates(read, readout.tokens(inputs)))
        for asked, draws in sampled.items():
            for _ in range(options.draws):
                drawn = estimates(
                    read, readout.tokens(inputs, asked[0], generator, asked[1] == "same")
                )
                draws.append([(found - true).square() for found, true in zip(drawn, full[-1])])

    for batch in measured.split(options.batch):
        inputs = {"input_ids": batch, "labels": batch}
        readout = readout or HeadReadout.probe(model, inputs, shifts=True)
        with readout.attach(on_forward):
            model(**inputs)

    _, between, gradient = (torch.stack(values).var(0) for values in zip(*full))
    print(f"{len(full)} batches of {options.batch} x {options.length} tokens, {readout.num_layers} layers, "
          f"{readout.vocab_size} classes; steps from batch to batch {between.mean().sqrt():.4f}")  # fmt: skip
    print("fraction  tokens   lines   steps  against all tokens  gradient  products")
    for (fraction, of), draws in sampled.items():
        lines, steps, within = (torch.stack(values).mean(0) for values in zip(*draws))
        total = ((steps + between) / between).mean().sqrt()
        products = (1 + (readout.num_layers - 1) * fraction) / readout.num_layers
        print(f"{fraction:8.4f} {of:>7} {lines.mean().sqrt():7.4f} {steps.mean().sqrt():7.4f} {total:19.2f} "
              f"{within.sum() / gradient.sum():9.2f} {products:9.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
