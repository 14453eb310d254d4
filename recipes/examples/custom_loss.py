# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[commands]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "2h"
# ///
"""A loss and a readout of your own: the focal loss of every layer, each read by the largest value over the tokens.

uv run custom_loss.py
python custom_loss.py --model path/to/model --dataset path/to/folder
"""

import argparse
import math

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_descent import DescentConfig, DescentTrainer


def focal_loss(outputs, labels, num_items_in_batch=None):
    log_p = outputs.logits.log_softmax(-1).gather(-1, labels[:, None])  # [batch, 1]
    losses = -((1 - log_p.exp()) ** 2) * log_p
    return losses.mean() if num_items_in_batch is None else losses.sum() / num_items_in_batch


def max_pool(model, hidden, inputs):
    is_padding = inputs["attention_mask"][..., None] == 0  # [batch, seq, 1]
    return model.classifier(hidden.masked_fill(is_padding, -math.inf).amax(1))  # [batch, classes]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="distilbert/distilbert-base-uncased")
    parser.add_argument("--dataset", default="cornell-movie-review-data/rotten_tomatoes")
    parser.add_argument("--output_dir", default="runs/custom-loss")
    parser.add_argument("--max_steps", type=int, default=-1)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_dataset(args.dataset).map(
        lambda row: tokenizer(row["text"], truncation=True), batched=True
    )
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    chance = 0.5**2 * math.log(
        2
    )  # the focal loss of an even guess: f_0 is only measured for the cross-entropy
    config = DescentConfig(
        args.output_dir, max_steps=args.max_steps, logging_steps=50, initial_loss_bound=chance
    )
    own = {
        "layer_loss_fn": focal_loss,
        "readout": max_pool,
    }  # the readout is not saved with the model: keep it
    trainer = DescentTrainer(model, config, None, rows["train"], rows["test"], tokenizer, **own)
    trainer.train()
    print(trainer.evaluate())  # eval_layer_loss_1, ...


if __name__ == "__main__":
    main()
