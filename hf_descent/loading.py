"""Loading the models of finished runs, whole or as adapters, and their tokenizers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .files import find_json
from .models import (
    LinearReadoutForSequenceClassification,
)  # and registers the package's other architectures
from .runs import RunFolder


ADAPTER = "adapter_config.json"
CAUSAL_LMS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
# PEFT's name of a task -> the end of its class names.
TASKS = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}


def architecture_of(name: str) -> str:
    """The class name of a saved model, for an adapter of its base or the end of it; ValueError where there is none."""
    if not (adapter := find_json(name, ADAPTER)):
        try:
            return (
                AutoConfig.from_pretrained(name).architectures
                or ["model whose config names no architecture"]
            )[0]
        except OSError as error:
            if os.path.isdir(name):
                raise
            raise ValueError(
                f"There is no folder {name!r}, and the Hub gave no such model: {error}"
            ) from error
    task = adapter.get("task_type")
    return RunFolder(name).summary.get("model") or TASKS.get(
        task, f"model with an adapter of task {task}"
    )


@contextmanager
def weights_of(name: str, num_labels: int | None = None) -> Iterator[None]:
    """ValueError where the weights of `name` are damaged, or do not fit its config or the `num_labels` of the data."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"The weights of {name!r} are damaged ({error}); copy or download them again."
        ) from error
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        fault = "do not fit its config or its base; take those of its training"
        if num_labels and num_labels != (saved := AutoConfig.from_pretrained(name).num_labels):
            fault = f"have {saved} labels, the data {num_labels}; `--pooling cls_linear` puts a new readout on it"
        raise ValueError(f"The weights of {name!r} {fault}.") from error


def load_model(name: str) -> PreTrainedModel:
    """A text classifier or a causal language model in eval mode and its saved dtype, with the `noise_sigma` of its
    training; `name` is a folder, or a name on the Hub. PEFT puts an adapter on its base, without merging it.

    ValueError where the model is of another kind, or was trained with a custom readout.
    """
    architecture, summary = architecture_of(name), RunFolder(name).summary
    if "readout" in summary:
        raise ValueError(
            f"{name} has the custom readout `{summary['readout']}`, which no file holds: use a script."
        )
    is_classifier = architecture.endswith("ForSequenceClassification")
    if (
        not is_classifier
        and architecture not in CAUSAL_LMS
        and not architecture.endswith("ForCausalLM")
    ):
        raise ValueError(
            f"`model` is {name!r}, a {architecture}; give a text classifier or a causal language model."
        )
    if not find_json(name, ADAPTER):
        auto_class = AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM
        with weights_of(name):
            return auto_class.from_pretrained(name, dtype="auto")
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel

    # An adapter's folder does not have the config of its base.
    known = {"num_labels": summary["num_labels"]} if "num_labels" in summary else {}
    with weights_of(name):
        if architecture == LinearReadoutForSequenceClassification.__name__:
            base = LinearReadoutForSequenceClassification.from_encoder(
                summary["encoder"], summary["pooling"], **known
            )
            model = PeftModel.from_pretrained(base, name)
        elif is_classifier:
            model = AutoPeftModelForSequenceClassification.from_pretrained(
                name, dtype="auto", **known
            )
        else:
            model = AutoPeftModelForCausalLM.from_pretrained(name, dtype="auto")
    if is_classifier:
        # The base may have other names, or the same ones in another order.
        names = summary.get(
            "id2label",
            {str(number): f"LABEL_{number}" for number in range(model.config.num_labels)},
        )
        model.config.id2label = {int(number): label for number, label in names.items()}
    for field in ("noise_sigma", "pad_token_id"):
        setattr(model.config, field, summary.get(field, getattr(model.config, field, None)))
    return model.eval()


def best_device() -> torch.device:
    """The accelerator of this machine, or else its CPU."""
    return (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else torch.device("cpu")
    )


def load_tokenizer(name: str, **kwargs) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, which pads with the end of text where it has no padding token; ValueError where none
    is saved with the model (transformers would make one without any word)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} gives no tokenizer: {error}") from error
    if not tokenizer.get_vocab().keys() - {
        *tokenizer.all_special_tokens,
        "▁",
    }:  # SentencePiece's space
        raise ValueError(
            f"{name!r} has no tokenizer; save the one of its training there (`save_pretrained`)."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def position_limit(model: nn.Module) -> int | None:
    """The number of tokens that the model has positions for; `None` where its config states no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or limit < 0:  # XLNet's -1
        return None
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            limit -= module.padding_idx + 1  # RoBERTa's positions start after that of the padding
            break
    prompt = getattr(
        model, "active_peft_config", None
    )  # prompt tuning puts tokens before the others
    return limit - (getattr(prompt, "num_virtual_tokens", None) or 0)


def has_position_table(model: nn.Module) -> bool:
    """Whether the model looks positions up in a table, which ends at the limit; rotary positions do not end."""
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    tables += [
        name for name, buffer in model.named_buffers() if buffer.is_floating_point()
    ]  # GPT-J's, CTRL's
    # The tables of other towers are not of tokens.
    tables = [
        name
        for name in tables
        if not any(tower in name for tower in ("vision", "visual", "image", "audio"))
    ]
    ends = [
        part for name in tables for part in name.split(".")[-2:]
    ]  # two parts: LoRA's end in "base_layer"
    return any("pos" in part or part == "wpe" for part in ends)
