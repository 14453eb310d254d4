"""Tiny supervised fine-tuning: data of every kind that TRL takes, and trainers on it."""

import copy
from dataclasses import dataclass

import torch
from datasets import Dataset
from peft import LoraConfig, PrefixTuningConfig
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM
from trl import SFTConfig

from hf_descent import SFTDescentConfig, SFTDescentTrainer
from hf_descent.compat import CheckpointingArguments
from tiny.models import SIZES
from tiny.models import llama as small_llama
from tiny.tokenizers import tokenizer


LAYERS = 3
TOKENIZER = tokenizer()
TIMES = ("runtime", "per_second")


SHAPE = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 128}


def llama(**config):
    return small_llama(LAYERS, **SHAPE, **config)


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(TOKENIZER), n_positions=128, n_embd=16, n_layer=LAYERS, n_head=2)
    )


def mixtral():
    torch.manual_seed(0)
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(**SHAPE, **SIZES, **experts, num_hidden_layers=LAYERS))


def texts(count, start=0):
    return [f"{'ab' * (index % 4)}c{index**2}" for index in range(start, start + count)]


def pairs(count=32, start=0):
    """Prompts and completions of different lengths."""
    return Dataset.from_list(
        [{"prompt": f"Say {text}:", "completion": f" {text}!"} for text in texts(count, start)]
    )


def plain(count=32, start=0):
    return Dataset.from_list([{"text": text} for text in texts(count, start)])


def chats(count=32, start=0):
    found = [
        [{"role": "user", "content": f"Say {t}"}, {"role": "assistant", "content": t}]
        for t in texts(count, start)
    ]
    return Dataset.from_list([{"messages": messages} for messages in found])


@dataclass
class StockConfig(CheckpointingArguments, SFTConfig):
    """TRL's arguments, under the same names with any release of transformers."""


def make(
    cls, folder, data=pairs, model=llama, peft_config=None, keywords=None, eval_data=None, **given
):
    given = {
        "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 1, "max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2,
        "activation_checkpointing": False, "loss_type": "nll", **given,
    }  # fmt: skip
    config = SFTDescentConfig if cls is SFTDescentTrainer else StockConfig
    return cls(
        model(), config(str(folder), **given), train_dataset=data(),
        eval_dataset=data(9, 40) if eval_data is None else eval_data, processing_class=copy.deepcopy(TOKENIZER),
        peft_config=copy.deepcopy(peft_config), **(keywords or {}),
    )  # fmt: skip


def history(trainer):
    """What was logged, without times."""
    logs = trainer.state.log_history
    return [
        {name: log[name] for name in log if not any(time in name for time in TIMES)} for log in logs
    ]


LORA = LoraConfig(
    r=2,
    lora_alpha=4,
    target_modules="all-linear",
    modules_to_save=["lm_head"],
    task_type="CAUSAL_LM",
)
SETTINGS = {
    "pairs": {},
    "text": {"data": plain},
    "chat": {"data": chats},
    "assistant only": {"data": chats, "assistant_only_loss": True},
    "whole sequence": {"completion_only_loss": False},
    "packed": {
        "packing": True,
        "max_length": 48,
        "use_cache": True,
    },  # a cache hides the borders of documents
    "packed across": {"packing": True, "packing_strategy": "wrapped", "max_length": 48},
    "padding free": {"padding_free": True, "max_length": None},
    "lora": {"peft_config": LORA},
    "lora dropout": {"peft_config": LoraConfig(r=2, lora_dropout=0.3, task_type="CAUSAL_LM")},
    "checkpointing": {"activation_checkpointing": True},
    "lora checkpointing": {"peft_config": LORA, "activation_checkpointing": True},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "tied": {"model": lambda: llama(tie_word_embeddings=True)},
    "experts": {"model": mixtral},
    "bf16": {"bf16": True},
    "prefix tuning": {
        "peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    },
}
