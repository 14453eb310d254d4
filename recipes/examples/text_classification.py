# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[commands]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "2h"
# ///
"""Fine-tune a text classifier whose every layer lowers the loss.

    python text_classification.py --model path/to/model --dataset path/to/folder

What changed from a script with `Trainer`:

    -from transformers import Trainer, TrainingArguments
    +from hf_descent import DescentConfig, DescentTrainer
    -    config = TrainingArguments(args.output_dir, ...)
    +    config = DescentConfig(args.output_dir, ..., noise_gamma=0.5, eval_gammas=[0, 0.5, 1])
    -    trainer = Trainer(model, config, ...)
    +    trainer = DescentTrainer(model, config, ...)
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_descent import DescentConfig, DescentTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="distilbert/distilbert-base-uncased")
    parser.add_argument("--dataset", default="cornell-movie-review-data/rotten_tomatoes")
    parser.add_argument("--output_dir", default="runs/text-classification")
    parser.add_argument("--max_steps", type=int, default=-1)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = load_dataset(args.dataset).map(
        lambda row: tokenizer(row["text"], truncation=True), batched=True
    )
    model = AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)
    config = DescentConfig(
        args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=16,
        noise_gamma=0.5,  # noise on the token embeddings in training, in units of their standard deviation
        eval_gammas=[0, 0.5, 1],
    )
    trainer = DescentTrainer(
        model,
        config,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.evaluate()  # eval_layer_loss_1, ..., eval_feasible
    print(trainer.evaluate_layers().certificate())  # what each layer was asked, what it reached
    print(trainer.evaluate_robustness())  # accuracy and loss at each noise level
    trainer.save_model()


if __name__ == "__main__":
    main()
