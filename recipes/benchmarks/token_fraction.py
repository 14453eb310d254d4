"""What a sample of the tokens costs in noise: violations estimated on part of the tokens against all of them.

    python recipes/benchmarks/token_fraction.py MODEL TEXTS.parquet [--text_column text --batch 4 --length 256]

MODEL is a causal language model of the Hub or a folder, TEXTS a parquet, csv or json file. For each fraction the table
gives the standard deviation of the estimate of g_l = f_l - (1 - alpha) f_(l-1) about its value on all tokens of the
batch; that of the estimate in all, batches differing too, absolute and against all tokens; and the products with the
head that the step needs, as a share of those on all tokens.
"""

import argparse

import torch
import transformers
from lm_step import token_ids

from hf_descent.readout.head import HeadReadout


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text_file", help="parquet, json, jsonl, csv or txt")
    parser.add_argument("--text_column", default="text")
    for name, default in (("batch", 4), ("length", 256), ("batches", 20), ("draws", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--alpha", type=float, default=0.05)
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.5, 0.25, 0.125, 0.0625, 0.03125])
    options = parser.parse_args()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model).eval()

    full, sampled = [], {fraction: [] for fraction in options.fractions}
    generator, readout = torch.Generator().manual_seed(0), None

    def violations(losses):
        mean = losses.sums / len(readout.tokens(inputs).rows)  # [layers]
        return mean[1:] - (1 - options.alpha) * mean[:-1]

    def on_forward(read, outputs, hidden_states):
        full.append(violations(read(readout.tokens(inputs))))
        for fraction, draws in sampled.items():
            drawn = [violations(read(readout.tokens(inputs, fraction, generator))) for _ in range(options.draws)]
            draws.append(torch.stack(drawn) - full[-1])  # [draws, layers - 1]

    for ids in torch.tensor(token_ids(options, options.batches * options.batch)).split(options.batch):
        inputs = {"input_ids": ids, "labels": ids}
        readout = readout or HeadReadout.probe(model, inputs, shifts=True)
        with readout.attach(on_forward):
            model(**inputs)

    between = torch.stack(full).var(0)  # [layers - 1]
    print(f"{len(full)} batches of {options.batch} x {options.length} tokens, {readout.num_layers} layers, "
          f"{readout.vocab_size} classes; batch to batch {between.mean().sqrt():.4f}")  # fmt: skip
    print("fraction  of the sample  in all  against all tokens  products")
    for fraction, draws in sampled.items():
        within = torch.stack(draws).square().mean((0, 1))  # [layers - 1]
        total = ((within + between) / between).mean().sqrt()
        products = (1 + (readout.num_layers - 1) * fraction) / readout.num_layers
        print(f"{fraction:8.4f} {within.mean().sqrt():14.4f} {(within + between).mean().sqrt():7.4f} {total:19.2f} "
              f"{products:9.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
