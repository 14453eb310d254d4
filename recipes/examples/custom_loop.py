# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[commands]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "2h"
# ///
"""Descent training in a loop of your own, with Accelerate and without `Trainer`.

accelerate launch custom_loop.py --model path/to/model --dataset path/to/folder
"""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from hf_descent import DescentObjective, layer_profile
from hf_descent.configs import DescentArguments


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="distilbert/distilbert-base-uncased")
    parser.add_argument("--dataset", default="cornell-movie-review-data/rotten_tomatoes")
    parser.add_argument("--output_dir", default="runs/custom-loop")
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = load_dataset(args.dataset)
    rows = data.map(
        lambda row: tokenizer(row["text"], truncation=True), batched=True, remove_columns=["text"]
    )
    batches = DataLoader(
        rows["train"], batch_size=16, shuffle=True, collate_fn=DataCollatorWithPadding(tokenizer)
    )
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, batches)

    objective = DescentObjective(
        model, batches, DescentArguments(), max_steps=args.epochs * len(loader)
    )
    for _ in range(args.epochs):
        for batch in loader:
            accelerator.backward(objective(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            objective.step(
                accelerator.optimizer_step_was_skipped
            )  # after the weights; never true of a fused AdamW
            if objective.global_step % 50 == 0:
                accelerator.print(objective.global_step, objective.logs())

    model = accelerator.unwrap_model(model)
    if accelerator.is_main_process:
        print(
            layer_profile(
                model, rows["test"], problem=objective.problem, processing_class=tokenizer
            ).certificate()
        )
        model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
