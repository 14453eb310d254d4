# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[commands]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "2h"
# ///
"""Train a classifier that may stop early, and cut it only where held-out rows show what that costs.

uv run early_exit.py
python early_exit.py --model path/to/model --dataset path/to/folder --layer 2
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.early_exit import ConfidenceExit, truncate


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="distilbert/distilbert-base-uncased")
    parser.add_argument("--dataset", default="cornell-movie-review-data/rotten_tomatoes")
    parser.add_argument("--output_dir", default="runs/early-exit")
    parser.add_argument(
        "--layer", type=int, default=4, help="the layer after which the model is to be cut"
    )
    parser.add_argument(
        "--excess", type=float, default=0.05, help="how much higher its loss may be (0.05: 5 %%)"
    )
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--max_steps", type=int, default=-1)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_dataset(args.dataset).map(
        lambda row: tokenizer(row["text"], truncation=True), batched=True
    )
    validation = rows["validation"]
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    config = DescentConfig(
        args.output_dir,
        max_steps=args.max_steps,
        learning_rate=args.learning_rate,
        logging_steps=50,
        exit_targets={args.layer: args.excess},
    )
    trainer = DescentTrainer(model, config, train_dataset=rows["train"], processing_class=tokenizer)
    trainer.train()

    # One exit for all rows. The test rows were used for nothing else, so that the verdict counts.
    certificate = trainer.evaluate_layers(rows["test"]).certificate()
    print(certificate)
    if certificate.feasible:
        truncate(trainer.model, args.layer).save_pretrained(f"{args.output_dir}/cut")
    # Or each row leaves as soon as its layer is sure, at a loss of at most one point of accuracy (95 % confidence).
    fast = ConfidenceExit(trainer.model).calibrate(
        validation, max_loss=0.01, processing_class=tokenizer
    )
    print(fast.evaluate(rows["test"], processing_class=tokenizer))


if __name__ == "__main__":
    main()
