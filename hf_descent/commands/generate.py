"""`hf-descent generate MODEL`: answers of a language model to AlpacaEval's instructions, under noise if asked for.

The output is the file that the `alpaca_eval` package reads. It is written batch by batch beside the output file
(`.partial`), so that an interrupted run goes on where it stopped; batch and seed alone fix the noise and the sampling,
so that it ends with the same answers.
"""

import hashlib
import json
import os
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..data.alpaca import PROMPT_FORMATS, check_prompts, format_prompt, is_chat
from ..data.splits import load_file
from ..evaluation.sums import weights_fingerprint
from ..files import atomic_write
from ..loading import best_device, load_model, load_tokenizer, position_limit
from ..noise.embedding_noise import EmbeddingNoise
from .arguments import check_least


ALPACA_EVAL = "hf://datasets/tatsu-lab/alpaca_eval/alpaca_eval.json"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="language model or LoRA adapter, on the Hub or in a local folder")
    parser.add_argument("--output", required=True, help="JSON file for the answers")
    parser.add_argument("--gamma", type=float, default=0.0, help="noise level on every token's embedding (default 0)")
    parser.add_argument("--sigma", type=float, help="deviation of the clean embeddings (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and sampling (default 0)")
    parser.add_argument(
        "--instructions",
        default=ALPACA_EVAL,
        help="csv, json or parquet file with a column `instruction` and perhaps `input` and `dataset` (default: "
        "AlpacaEval's, from the Hub)",
    )
    parser.add_argument("--prompt_format", choices=PROMPT_FORMATS, default="auto", help="as in training (auto)")
    parser.add_argument("--generator", help="name of the model in the file (default: its own, with the noise level)")
    parser.add_argument("--batch_size", type=int, default=8, help="prompts in a batch; it fixes the noise (default 8)")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="longest answer (default 1024)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the sampling; 0: greedy (default 0)")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus of the sampling (default 1)")
    parser.add_argument("--num_beams", type=int, default=1, help="beams of the search (default 1)")
    dtypes = ("auto", "bfloat16", "float16", "float32", "float64")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="precision of the weights (auto: as saved)")
    parser.add_argument("--device", help="where the model runs (default: the first accelerator, else the CPU)")
    parser.add_argument("--max_samples", type=int, help="answer the first ones only")


def run(args: Namespace) -> None:
    """Answers every instruction.

    Raises:
        ValueError: a number is out of its range; the output exists, or was begun with other settings, weights or
            instructions; the instructions lack their column; the model writes no text; a prompt fills its positions.
    """
    check_least(args, dict.fromkeys(("max_samples", "batch_size", "max_new_tokens", "num_beams"), 1))
    check_least(args, dict.fromkeys(("gamma", "seed", "temperature"), 0))
    if not 0 < args.top_p <= 1:
        raise ValueError(f"`top_p` is {args.top_p}; give a share above 0, at most 1.")
    if os.path.exists(args.output):
        raise ValueError(f"`output` {args.output!r} exists already; name another file, or remove it.")
    if args.generator is None:
        args.generator = Path(args.model).name + (f"-gamma{args.gamma:g}" if args.gamma else "")
    tokenizer = load_tokenizer(args.model, padding_side="left")
    rows = load_instructions(args.instructions)[: args.max_samples]
    as_chat = is_chat(args.prompt_format, tokenizer.chat_template is not None)

    model = load_model(args.model, args.dtype)
    # A partial file goes on only under all settings that the answers depend on; a folder may be trained anew.
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "device")}
    settings["weights"] = weights_fingerprint(model)
    settings["rows"] = hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()[:12]
    partial_file = Path(f"{args.output}.partial")
    answers = begin(partial_file, settings)
    if not model.can_generate():
        raise ValueError(f"`model` is {args.model!r}, a {type(model).__name__}; give a causal language model.")
    model = model.to(args.device or best_device())
    noise = EmbeddingNoise(model, args.gamma, args.seed, args.sigma) if args.gamma else None
    with tqdm(total=len(rows), initial=len(answers), desc="Answering") as progress:
        for start in range(len(answers), len(rows), args.batch_size):
            batch = rows[start : start + args.batch_size]
            prompts = [format_prompt(row["instruction"], row.get("input"), as_chat) for row in batch]
            if as_chat:
                prompts = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
            # A chat template has put the special tokens in.
            inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not as_chat)
            # Keyed by where the batch starts, as the noise is, so that a run that goes on draws the same.
            key = np.random.SeedSequence(args.seed, spawn_key=(start,)).generate_state(1, np.uint64)[0]
            torch.manual_seed(int(key))
            if noise is not None:
                noise.reseed(start)
            with noise or nullcontext():
                texts = answer(model, tokenizer, inputs.to(model.device), args)
            new = [
                {
                    "instruction": row["instruction"],
                    "output": text,
                    "generator": args.generator,
                    "dataset": row.get("dataset") or "alpaca_eval",
                }
                for row, text in zip(batch, texts)
            ]
            with partial_file.open("a", encoding="utf-8") as file:
                if not answers:  # only now: settings under which nothing can be answered must not bind others
                    file.write(json.dumps(settings) + "\n")
                file.write(json.dumps(new) + "\n")
            answers += new
            progress.update(len(new))

    with atomic_write(args.output) as file:
        json.dump(answers, file, indent=2, ensure_ascii=False)
    os.remove(partial_file)
    print(f"{len(answers)} answers of {args.generator} written to {args.output}")


def load_instructions(path: str) -> list[dict]:
    """The rows of a csv, json or parquet file, local or on the Hub; ValueError without instructions that are texts."""
    rows = load_file("instructions", path)
    if "instruction" not in rows.column_names:
        raise ValueError(f"{path} has no column `instruction`; it has {rows.column_names}.")
    check_prompts(rows, path)
    return rows.to_list()


def begin(path: Path, settings: dict) -> list[dict]:
    """The answers that an interrupted run with the same settings left; none where there was no such run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    text = text[: text.rfind("\n") + 1]  # the interruption may have cut the last line short
    lines = [json.loads(line) for line in text.splitlines()]
    if len(lines) < 2:
        path.unlink(missing_ok=True)
        return []
    path.write_text(text, encoding="utf-8")
    begun, *batches = lines
    for name, value in settings.items():
        if begun.get(name) != value:
            raise ValueError(
                f"{path} was begun with {name}={begun.get(name)!r}, not {value!r}; go on with that, or remove it."
            )
    return [row for batch in batches for row in batch]


@torch.no_grad()
def answer(model: PreTrainedModel, tokenizer, inputs, args: Namespace) -> list[str]:
    """The answers to a batch of prompts, padded on the left."""
    length = inputs["input_ids"].shape[1]
    positions = position_limit(model) or length + args.max_new_tokens
    if length >= positions:
        raise ValueError(
            f"A prompt has {length} tokens and {type(model).__name__} {positions} positions: there is no room for an "
            "answer. Leave the instruction out."
        )
    drawn = args.temperature > 0
    tokens = model.generate(
        **inputs,
        max_new_tokens=min(args.max_new_tokens, positions - length),
        num_beams=args.num_beams,
        num_return_sequences=1,  # a model's own settings may ask for several, or for more than the tokens
        return_dict_in_generate=False,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=drawn,
        temperature=args.temperature if drawn else None,
        top_p=args.top_p if drawn else None,
        top_k=None,
    )
    texts = tokenizer.batch_decode(tokens[:, length:], skip_special_tokens=True)
    return [text.strip() for text in texts]
