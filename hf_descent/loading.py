"""The tokenizers of text models, and the models of finished runs, whole or as an adapter beside its base."""

import torch
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
from .models import LinearReadoutForSequenceClassification  # and registers the package's other architectures
from .runs import RunFolder


ADAPTER = "adapter_config.json"
# PEFT's name of a task -> how its architectures' names end.
TASKS = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}


def architecture_of(name: str) -> str:
    """The class of a saved model; of an adapter, that of the model it adapts where known, else of its task."""
    return _architecture(name, find_json(name, ADAPTER), RunFolder(name).summary)


def load_model(name: str, dtype: str = "auto") -> PreTrainedModel:
    """A text classifier or a causal language model in eval mode, with the `noise_sigma` of its training.

    Args:
        name (`str`): a folder, or a name on the Hub. An adapter is put on its base, by PEFT; it is not merged.
        dtype (`str`): of the weights; "auto": as saved.

    Raises:
        ValueError: it is neither, or was trained with a readout of its own.
    """
    adapter, summary = find_json(name, ADAPTER), RunFolder(name).summary
    if "readout" in summary:
        raise ValueError(
            f"{name} was trained with a readout of its own (`{summary['readout']}`), which no file holds: its "
            "head says nothing of it. Measure it in a script, where the functions of `hf_descent` take the `readout`."
        )
    architecture = _architecture(name, adapter, summary)
    if architecture.endswith("ForSequenceClassification"):
        auto_class = AutoModelForSequenceClassification
    elif architecture.endswith("ForCausalLM") or architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        auto_class = AutoModelForCausalLM
    else:
        raise ValueError(
            f"`model` is {name!r}, a {architecture}; the command takes text classifiers and causal language models. "
            "The functions of `hf_descent` take the others."
        )
    if not adapter:
        return auto_class.from_pretrained(name, dtype=dtype)
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel

    # Known to the config of the model that the adapter is for, which is not in its folder.
    labels = {"num_labels": summary["num_labels"]} if "num_labels" in summary else {}
    if architecture == LinearReadoutForSequenceClassification.__name__:
        if "encoder" not in summary:
            raise ValueError(f"{name}: its {RunFolder.SUMMARY} names no encoder; put it on its base with `PeftModel`.")
        base = LinearReadoutForSequenceClassification.from_encoder(summary["encoder"], summary["pooling"], **labels)
        model = PeftModel.from_pretrained(base, name)
    elif auto_class is AutoModelForCausalLM:
        model = AutoPeftModelForCausalLM.from_pretrained(name, dtype=dtype)
    else:
        model = AutoPeftModelForSequenceClassification.from_pretrained(name, dtype=dtype, **labels)
    if auto_class is AutoModelForSequenceClassification:
        # The base may have names of its own, perhaps of the same classes in another order.
        names = summary.get("id2label", {str(number): f"LABEL_{number}" for number in range(model.config.num_labels)})
        model.config.id2label = {int(number): label for number, label in names.items()}
    for field in ("noise_sigma", "pad_token_id"):
        setattr(model.config, field, summary.get(field, getattr(model.config, field, None)))
    return model.eval()


def best_device() -> torch.device:
    """The accelerator of this machine, or else its processor."""
    # `current_accelerator` tells what torch was built for.
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def load_tokenizer(name: str, **kwargs) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, which pads with the end of text where it has no padding token of its own.

    Raises:
        ValueError: there is none beside the model, for which transformers makes up one that knows no word.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, "▁"}:  # SentencePiece's space
        raise ValueError(
            f"{name!r} has no tokenizer beside the model; save the one that it was trained with there: "
            "`tokenizer.save_pretrained`."
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def position_limit(model: nn.Module) -> int | None:
    """How many tokens the model has positions for; `None` where its config states no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or limit < 0:  # XLNet's -1
        return None
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            limit -= module.padding_idx + 1  # RoBERTa's positions begin behind the padding's
            break
    prompt = getattr(model, "active_peft_config", None)  # tokens that PEFT puts before the others
    return limit - (getattr(prompt, "num_virtual_tokens", None) or 0)


def has_position_table(model: nn.Module) -> bool:
    """Whether the model looks its tokens' positions up, and has none beyond the limit; rotations go on."""
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    tables += [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]  # GPT-J's, CTRL's
    for parts in (name.split(".") for name in tables):
        if any(tower in part for part in parts for tower in ("vision", "visual", "image", "audio")):
            continue  # their positions are no tokens'
        if any("pos" in part or part == "wpe" for part in parts[-2:]):  # two, since LoRA's end in "base_layer"
            return True
    return False


def _architecture(name: str, adapter: dict, summary: dict) -> str:
    if not adapter:
        return (getattr(AutoConfig.from_pretrained(name), "architectures", None) or ["unknown"])[0]
    task = adapter.get("task_type")
    return summary.get("model") or TASKS.get(task, f"model with an adapter of task {task}")
