"""Instructions and outputs in the form of Alpaca (Taori et al. 2023), as prompts and completions for fine-tuning."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from ..readout.labels import IGNORE_INDEX
from .reading import load_file
from .splits import (
    SplitArguments,
    check_texts,
    column_values,
    drop_rows,
    hold_out,
    load_splits,
    select_columns,
)


PromptFormat = Literal["auto", "alpaca"]
COLUMNS = ("instruction", "input", "output")


@dataclass
class AlpacaArguments(SplitArguments):
    """Where the instructions come from, and how they become prompts."""

    dataset_name: str = HfArg(
        default="tatsu-lab/alpaca", help="Data set on the Hub, unless `train_file` is given."
    )
    prompt_format: PromptFormat = HfArg(
        default="auto",
        help="`alpaca`: its two templates; `auto`: one message of the user under the tokenizer's chat template, where "
        "it has one.",
    )


def load_alpaca(
    args: AlpacaArguments, tokenizer: PreTrainedTokenizerBase, gets_template: bool = False
) -> DatasetDict:
    """Load rows of `instruction`, `output` and perhaps `input` as "train", "validation" and perhaps "test".

    They have the columns `prompt` and `completion` as TRL takes them: strings, or lists of messages under a chat
    template. `gets_template`: TRL's trainer will give the tokenizer one (`chat_template_path`). Rows without an
    output, or with a blank one, are dropped, and their number is shown. ValueError if a column is missing, or a text
    is not a string.
    """
    splits = {name: _instructions(rows, name) for name, rows in load_splits(args, COLUMNS).items()}
    has_template = gets_template or tokenizer.chat_template is not None
    as_chat = args.prompt_format == "auto" and has_template
    splits = hold_out(splits, args)

    # Each with its own columns: some splits may have an `input`, and others not.
    for split, rows in splits.items():
        splits[split] = rows.map(
            partial(_pair, as_chat=as_chat),
            remove_columns=rows.column_names,
            desc="Formatting instructions",
        )
    return splits


def read_instructions(path: str, prompt_format: str, tokenizer, optional=("input",)) -> list[dict]:
    """The rows of a file, each with `prompt` and `completion` as of [`load_alpaca`], or `None` without an `output`.

    An output of blanks alone is none."""
    rows = load_file("instructions", path, COLUMNS)
    check_texts(rows, path, "instruction", optional=optional)

    as_chat = prompt_format == "auto" and tokenizer.chat_template is not None
    return [row | _pair(row, as_chat) for row in rows]


def _pair(row, as_chat):
    prompt = format_prompt(row["instruction"], row.get("input"), as_chat)
    completion = row.get("output")
    if _no_output(completion):
        completion = None
    elif as_chat:
        completion = [{"role": "assistant", "content": completion}]
    return {"prompt": prompt, "completion": completion}


def format_prompt(
    instruction: str, input: str | None = None, as_chat: bool = False
) -> str | list[dict[str, str]]:
    """The prompt of one instruction: Alpaca's template with or without input, or one message of the user."""

    if as_chat and input:
        return [{"role": "user", "content": f"{instruction}\n\n{input}"}]
    if as_chat:
        return [{"role": "user", "content": instruction}]

    # As in the column `text` of Alpaca's own data set.
    context = ""
    section = ""
    if input:
        context = ", paired with an input that provides further context"
        section = f"### Input:\n{input}\n\n"

    return (
        f"Below is an instruction that describes a task{context}. Write a response that appropriately completes the "
        f"request.\n\n### Instruction:\n{instruction}\n\n{section}### Response:\n"
    )


def _instructions(rows: Dataset, split: str) -> Dataset:
    columns = {"instruction": "instruction", "output": "output"}
    if "input" in rows.column_names:
        columns["input"] = "input"
    remedy = "Name its columns `instruction`, `output`; chats take a script."
    rows = select_columns(rows, columns, split, remedy)

    reasons = map(_no_output, column_values(rows, "output"))
    missing = {index: reason for index, reason in enumerate(reasons) if reason}
    source = f"The {split} split"
    check_texts(rows, source, "instruction", "output", optional=["input"], ignored=missing)
    return drop_rows(rows, missing, split, "output")


def _no_output(output: str | None) -> str | None:
    """Why an output is none; None where it is one."""
    if output is None:
        return "no value"
    if isinstance(output, str) and not output.strip():
        return "empty"
    return None


def prompt_ids(prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt, up to where the answer begins, so without the end of text that some tokenizers add."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        if ids[-1:] == [tokenizer.eos_token_id]:
            ids.pop()
        return ids
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def completion_labels(
    row: dict, tokenizer: PreTrainedTokenizerBase, limit: int | None = None
) -> dict[str, list[int]]:
    """Token ids of a prompt with its completion, and labels for the completion alone (end of text included), as TRL's
    `SFTTrainer` makes them, or for all of a prompt without one; cut to `limit` tokens."""
    prompt = row["prompt"]
    completion = row["completion"]
    is_text = isinstance(prompt, str)
    if completion is None and is_text:
        ids = tokenizer(prompt)["input_ids"]
    elif completion is None:
        ids = prompt_ids(prompt, tokenizer)
    elif is_text:
        answer = completion
        if tokenizer.eos_token is not None:
            answer = completion.removesuffix(tokenizer.eos_token) + tokenizer.eos_token
        ids = tokenizer(prompt + answer)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template([*prompt, *completion], return_dict=False)

    start = 0
    if completion is not None:
        start = _common_start(prompt_ids(prompt, tokenizer), ids)

    labels = [IGNORE_INDEX] * start + ids[start:]
    ids = ids[:limit]
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "labels": labels[:limit],
    }


def _common_start(one: list[int], other: list[int]) -> int:
    """How many tokens two lists have in common at their start. The last token of a prompt may change if an answer
    follows."""
    count = 0
    for mine, yours in zip(one, other):
        if mine != yours:
            break
        count += 1
    return count
