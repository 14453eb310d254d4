# /// script
# requires-python = ">=3.10"
# dependencies = ["hf_descent[sft]"]
#
# [tool.hf-jobs]
# flavor = "a10g-large"
# timeout = "4h"
# ///
"""Supervised fine-tuning of a language model by LoRA, with noise on the token embeddings.

uv run sft_lora.py
python sft_lora.py --model path/to/model --dataset path/to/folder
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig

from hf_descent import SFTDescentConfig, SFTDescentTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument(
        "--dataset", default="trl-lib/Capybara"
    )  # `messages`, or any other format that TRL takes
    parser.add_argument("--output_dir", default="runs/sft-lora")
    parser.add_argument("--max_steps", type=int, default=-1)
    args = parser.parse_args()

    rows = load_dataset(args.dataset)
    config = SFTDescentConfig(
        args.output_dir,
        max_steps=args.max_steps,
        max_length=512,
        learning_rate=2e-4,
        logging_steps=10,
        bf16=torch.cuda.is_available(),
        noise_gamma=0.5,
        eval_gammas=[0, 0.5, 1],
        descent_strength=0.25,  # early layers of a language model have never predicted anything: ask for less
    )
    trainer = SFTDescentTrainer(
        args.model,
        config,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"),
    )
    trainer.train()
    print(trainer.evaluate_layers().certificate())
    print(trainer.evaluate_robustness())
    trainer.save_model()  # the adapter; descent_config.json beside it has the problem and the multipliers


if __name__ == "__main__":
    main()
