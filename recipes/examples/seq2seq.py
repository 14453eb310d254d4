# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[commands]"]
#
# [tool.hf-jobs]
# flavor = "a10g-small"
# timeout = "4h"
# ///
"""Summarise with an encoder-decoder whose every decoder layer lowers the token loss.

uv run seq2seq.py
python seq2seq.py --model path/to/model --dataset path/to/folder
"""

import argparse

from datasets import load_dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq

from hf_descent import Seq2SeqDescentConfig, Seq2SeqDescentTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="google-t5/t5-small")
    parser.add_argument("--dataset", default="knkarthick/dialogsum")
    parser.add_argument("--source_column", default="dialogue")
    parser.add_argument("--target_column", default="summary")
    parser.add_argument("--output_dir", default="runs/seq2seq")
    parser.add_argument("--max_steps", type=int, default=-1)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def tokenize(row):
        inputs, targets = row[args.source_column], row[args.target_column]
        return tokenizer(inputs, text_target=targets, max_length=512, truncation=True)

    rows = load_dataset(args.dataset).map(tokenize, batched=True)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model)
    config = Seq2SeqDescentConfig(
        args.output_dir,
        max_steps=args.max_steps,
        learning_rate=3e-4,
        logging_steps=50,
        predict_with_generate=True,
    )
    trainer = Seq2SeqDescentTrainer(
        model,
        config,
        DataCollatorForSeq2Seq(tokenizer, model),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
    )
    trainer.train()
    print(trainer.evaluate_layers().certificate())  # of the decoder's layers
    generated = trainer.predict(rows["test"].select(range(4)), max_length=64)
    print(*tokenizer.batch_decode(generated.predictions, skip_special_tokens=True), sep="\n")
    trainer.save_model()


if __name__ == "__main__":
    main()
