# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[commands]"]
#
# [tool.hf-jobs]
# flavor = "t4-small"
# timeout = "2h"
# secrets = ["HF_TOKEN"]
# ///
"""Train, measure and push: the weights, a model card with the results, and the files that they came from.

hf auth login
uv run push_to_hub.py --repo your-name/your-model
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from hf_descent import DescentConfig, DescentTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--repo", required=True)
    parser.add_argument("--model", default="distilbert/distilbert-base-uncased")
    parser.add_argument("--dataset", default="cornell-movie-review-data/rotten_tomatoes")
    parser.add_argument("--output_dir", default="runs/push-to-hub")
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
        logging_steps=50,
        eval_gammas=[0, 0.5, 1],
        hub_model_id=args.repo,
    )
    trainer = DescentTrainer(
        model,
        config,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.evaluate()
    trainer.evaluate_layers()  # the card shows the verdict, row by row,
    trainer.evaluate_robustness()  # and the accuracy at each noise level
    trainer.push_to_hub(dataset=args.dataset)
    print(pipeline("text-classification", model=args.repo)("A quiet film that stays with you."))


if __name__ == "__main__":
    main()
