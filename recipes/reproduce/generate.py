"""Answers of a language model to AlpacaEval's instructions, under noise if asked for.

    python -m recipes.reproduce.generate MODEL --output FILE [--gamma LEVEL]

The output is the file that the `alpaca_eval` package reads. Answers are greedy; batch and seed fix the noise.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import (
    BatchEncoding,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.hf_argparser import HfArg

from hf_descent.commands.arguments import parse_model
from hf_descent.commands.closing import next_step
from hf_descent.data.alpaca import PromptFormat, prompt_ids, read_instructions
from hf_descent.data.splits import check_arguments
from hf_descent.files import write_json
from hf_descent.loading import best_device, load_model, load_tokenizer, position_limit
from hf_descent.noise.embedding_noise import EmbeddingNoise


ALPACA_EVAL = "hf://datasets/tatsu-lab/alpaca_eval/alpaca_eval.json"


@dataclass
class GenerateArguments:
    """Which instructions to answer, and how."""

    output: str = HfArg(help="JSON file for the answers.")
    gamma: float = HfArg(default=0.0, help="Noise level on the embedding of every token.")
    seed: int = HfArg(default=0, help="Seed of the noise.")
    instructions: str = HfArg(
        default=ALPACA_EVAL,
        help="File with the column `instruction` and, optionally, `input` and `dataset`.",
    )
    prompt_format: PromptFormat = HfArg(
        default="auto", help="Form of the prompts; choose that of the training."
    )
    batch_size: int = HfArg(default=8, help="Prompts in a batch. Another size draws other noise.")
    max_new_tokens: int = HfArg(default=1024, help="Most tokens of an answer.")
    max_samples: int | None = HfArg(default=None, help="Answer only the first N instructions.")

    def __post_init__(self):
        limits = {"max_samples": 1, "batch_size": 1, "max_new_tokens": 1, "gamma": 0, "seed": 0}
        check_arguments(self, limits)


def main(argv: Sequence[str]) -> None:
    """Answers as the words after the module's name say."""
    run(*parse(argv))


def parse(argv: Sequence[str]) -> tuple:
    """The model, and how it answers."""
    program = "python -m recipes.reproduce.generate"
    return parse_model(
        [GenerateArguments], argv, program, "answer instructions, under noise if asked for"
    )


def run(name: str, args: GenerateArguments) -> None:
    """Answers every instruction."""
    if os.path.exists(args.output):
        raise ValueError(
            f"`output` {args.output!r} exists already; name another file, or remove it."
        )

    tokenizer = load_tokenizer(name, padding_side="left")
    rows = read_instructions(args.instructions, args.prompt_format, tokenizer)[: args.max_samples]
    model = load_model(name).to(best_device())
    if not model.can_generate():
        raise ValueError(
            f"`model` is {name!r}, a {type(model).__name__}; give a causal language model."
        )

    prompts = [{"input_ids": prompt_ids(row["prompt"], tokenizer)} for row in rows]
    _check_lengths(prompts, model, name)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)

    texts = _answers(model, tokenizer, prompts, args)
    generator = Path(name).name
    if args.gamma:
        generator += f"-gamma{args.gamma:g}"
    answers = []
    for row, text in zip(rows, texts):
        source = row.get("dataset")
        answers.append(
            {
                "instruction": row["instruction"],
                "output": text,
                "generator": generator,
                "dataset": source if source else "alpaca_eval",
            }
        )

    write_json(args.output, answers, ensure_ascii=False)
    print(f"{len(answers)} answers of {generator} are in {args.output}")
    print(next_step(f"show {name}", "shows which layer knew each word"))


def _check_lengths(prompts: Sequence[Mapping[str, Any]], model: PreTrainedModel, name: str) -> None:
    """ValueError where a prompt leaves the model no position to answer in."""
    limit = position_limit(model)
    for number, prompt in enumerate(prompts):
        length = len(prompt["input_ids"])
        if limit is not None and length >= limit:
            raise ValueError(
                f"Prompt {number} has {length} tokens, {name} {limit} positions: cut it."
            )


def _answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Mapping[str, Any]],
    args: GenerateArguments,
) -> list[str]:
    """The answers to all prompts, batch by batch."""
    noise = None
    if args.gamma:
        noise = EmbeddingNoise(model, args.gamma, args.seed)

    collate = DataCollatorWithPadding(tokenizer)
    texts = []
    with nullcontext() if noise is None else noise:
        for start in tqdm(range(0, len(prompts), args.batch_size), desc="Answering"):
            inputs = collate(prompts[start : start + args.batch_size])
            if noise is not None:
                noise.reseed(start)
            texts += answer(model, tokenizer, inputs.to(model.device), args)

    return texts


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    inputs: BatchEncoding,
    args: GenerateArguments,
) -> list[str]:
    """The greedy answers to a batch of prompts, padded on the left."""
    length = inputs["input_ids"].shape[1]
    room = args.max_new_tokens
    positions = position_limit(model)
    if positions is not None:
        room = min(room, positions - length)

    tokens = model.generate(
        **inputs,
        max_new_tokens=room,
        num_beams=1,
        do_sample=False,
        num_return_sequences=1,  # a model's own settings may ask for several, or for more than the tokens
        return_dict_in_generate=False,
        pad_token_id=tokenizer.pad_token_id,
    )

    return [
        text.strip()
        for text in tokenizer.batch_decode(tokens[:, length:], skip_special_tokens=True)
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
