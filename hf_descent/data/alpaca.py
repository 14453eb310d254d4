"""Instructions and outputs in the form of Alpaca (Taori et al. 2023), as prompts and completions for fine-tuning."""

from dataclasses import dataclass
from typing import Literal

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from ..readout.labels import IGNORE_INDEX
from .splits import SplitArguments, check_texts, drop_missing, hold_out, load_splits, select_columns


# Alpaca's own two templates, as its data set's column `text` has them.
TEMPLATE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
TEMPLATE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
PromptFormat = Literal["auto", "alpaca", "chat"]


@dataclass
class AlpacaArguments(SplitArguments):
    """Where the instructions come from, and how they become prompts."""

    dataset_name: str = HfArg(default="tatsu-lab/alpaca", help="Data set on the Hub, unless `train_file` is given.")
    prompt_format: PromptFormat = HfArg(
        default="auto",
        help="`alpaca`: its two templates; `chat`: the tokenizer's template, with one message of the user; `auto`: "
        "chat where the tokenizer has a template.",
    )


def load_alpaca(args: AlpacaArguments, tokenizer: PreTrainedTokenizerBase, gets_template: bool = False) -> DatasetDict:
    """Loads rows of `instruction`, `output` and, where there are any, `input`.

    Rows without an output are dropped, and their number is logged. `gets_template`: TRL's trainer will give the
    tokenizer a chat template (`chat_template_path`).

    Returns:
        `DatasetDict`: "train", "validation" and, where it is given, "test", with the columns `prompt` and `completion`
        as TRL takes them: strings, or lists of messages under a chat template.

    Raises:
        ValueError: a column is missing, a text is not a string, or `prompt_format` is "chat" without a template.
    """
    splits = {name: _instructions(rows, name) for name, rows in load_splits(args).items()}
    as_chat = is_chat(args.prompt_format, gets_template or tokenizer.chat_template is not None)

    def to_pair(row):
        completion = row["output"]
        return {
            "prompt": format_prompt(row["instruction"], row.get("input"), as_chat),
            "completion": [{"role": "assistant", "content": completion}] if as_chat else completion,
        }

    return hold_out(splits, args).map(
        to_pair, remove_columns=splits["train"].column_names, desc="Formatting instructions"
    )


def format_prompt(instruction: str, input: str | None = None, as_chat: bool = False) -> str | list[dict[str, str]]:
    """The prompt of one instruction: Alpaca's template with or without input, or one message of the user."""
    if as_chat:
        return [{"role": "user", "content": f"{instruction}\n\n{input}" if input else instruction}]
    template = TEMPLATE_WITH_INPUT if input else TEMPLATE
    return template.format(instruction=instruction, input=input)


def is_chat(prompt_format: str, has_template: bool) -> bool:
    """Whether prompts go through the tokenizer's chat template; ValueError where it should have one."""
    if prompt_format == "chat" and not has_template:
        raise ValueError(
            "`prompt_format` is 'chat', but the tokenizer has no chat template; train with `chat_template_path`, "
            "or use 'alpaca'."
        )
    return prompt_format != "alpaca" and has_template


def _instructions(rows: Dataset, split: str) -> Dataset:
    optional = ["input"] if "input" in rows.column_names else []
    columns = {name: name for name in ("instruction", *optional, "output")}
    rows = select_columns(rows, columns, split, "Rename its columns to `instruction`, `input` (optional), `output`.")
    rows = drop_missing(rows, "output", (None, ""), split, "an output")
    check_texts(rows, "output", f"The {split} split")
    check_prompts(rows, f"The {split} split")
    return rows


def check_prompts(rows: Dataset, source: str) -> None:
    """ValueError where the `instruction` of a row is no string, or its `input`, where it has one."""
    check_texts(rows, "instruction", source)
    if "input" in rows.column_names:
        check_texts(rows, "input", source, str | None)


def completion_labels(row: dict, tokenizer: PreTrainedTokenizerBase, limit: int | None = None) -> dict[str, list[int]]:
    """Token ids of a prompt with its completion, and labels for the completion alone (end of text included), as TRL's
    `SFTTrainer` makes them; cut to `limit` tokens."""
    if isinstance(row["prompt"], str):
        prompt, end = tokenizer(row["prompt"])["input_ids"], tokenizer.eos_token or ""
        ids = tokenizer(row["prompt"] + row["completion"].removesuffix(end) + end)["input_ids"]
    else:
        messages = row["prompt"]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template([*messages, *row["completion"]], return_dict=False)
    # A token may join the end of the prompt and what follows.
    start = next((i for i, (a, b) in enumerate(zip(prompt, ids)) if a != b), min(len(prompt), len(ids)))
    labels = [IGNORE_INDEX] * start + ids[start:]
    return {"input_ids": ids[:limit], "attention_mask": [1] * len(ids[:limit]), "labels": labels[: len(ids[:limit])]}
