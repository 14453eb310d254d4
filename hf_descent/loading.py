"""Loading the models of finished runs, whole or as adapters, and their tokenizers."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import CONFIG_NAME

from .files import find_json
from .models.linear_readout import KINDS, LinearReadoutModel
from .runs import RunFolder


ADAPTER = "adapter_config.json"
CAUSAL_LMS = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
# PEFT's name of a task -> the end of its class names.
TASKS = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}
OTHER_TOWERS = ("vision", "visual", "image", "audio")  # their positions are not those of tokens


def no_model_in(folder: str) -> ValueError:
    """The error for a folder without a model, such as that of a script that did not save one."""
    steps = [path.name for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    others = f", or name a checkpoint in it: {', '.join(sorted(steps))}" if steps else ""
    return ValueError(
        f"{folder} holds no model: end the training with `trainer.save_model()`{others}."
    )


def _architecture_in_config(name: str) -> str:
    is_folder = os.path.isdir(name)
    if is_folder and not os.path.isfile(os.path.join(name, CONFIG_NAME)):
        raise no_model_in(name)
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        if is_folder:
            raise
        raise ValueError(
            f"There is no folder {name!r}, and the Hub gave no such model: {error}"
        ) from error

    if not config.architectures:
        return "model whose config names no architecture"

    return config.architectures[0]


def architecture_of(name: str) -> str:
    """The class name of a saved model; for an adapter that of its base, or the end of it. ValueError if there is
    none."""
    adapter = find_json(name, ADAPTER)
    if not adapter:
        return _architecture_in_config(name)
    recorded = RunFolder(name).summary.get("model")
    if recorded:
        return recorded
    task = adapter.get("task_type")
    return TASKS.get(task, f"model with an adapter of task {task}")


@contextmanager
def weights_of(name: str, num_labels: int | None = None) -> Iterator[None]:
    """ValueError if the weights of `name` are damaged, or do not fit its config or the `num_labels` of the data."""
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
        if num_labels is not None:
            saved = AutoConfig.from_pretrained(name).num_labels
            if saved != num_labels:
                fault = f"have {saved} labels, the data {num_labels}; `--pooling cls_linear` puts a new readout on it"
        raise ValueError(f"The weights of {name!r} {fault}.") from error


def load_model(name: str, images: bool = False) -> PreTrainedModel:
    """Load a text classifier or a causal language model, in eval mode and its saved dtype, with the `noise_sigma` of
    its training. `name` is a folder, or a name on the Hub. PEFT puts an adapter on its base, without merging it.

    ValueError if the model is of another kind, or was trained with a custom readout. With `images`, an image
    classifier is accepted, too.
    """
    architecture = architecture_of(name)
    summary = RunFolder(name).summary
    if "readout" in summary:
        raise ValueError(
            f"{name} has the custom readout `{summary['readout']}`, which no file holds: use a script."
        )
    auto_class = _auto_class(architecture)
    if auto_class is None or (auto_class is AutoModelForImageClassification and not images):
        kinds = "a text classifier or a causal language model"
        if images:
            kinds = "a classifier of texts or images, or a causal language model"
        raise ValueError(f"`model` is {name!r}, a {architecture}; give {kinds}.")

    if not find_json(name, ADAPTER):
        with weights_of(name):
            return auto_class.from_pretrained(name, dtype="auto")
    return _load_adapter(name, architecture, auto_class, summary)


def is_text_model(name: str) -> bool:
    """Whether a saved model is a text classifier or a causal language model, with the head and the tokenizer that it
    needs to be used without a script."""
    if "readout" in RunFolder(name).summary or not find_json(name, TOKENIZER_CONFIG_FILE):
        return False
    return _auto_class(architecture_of(name)) in (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )


def _auto_class(architecture: str) -> type | None:
    """The auto class of a model that a command may take; `None` for others."""
    if architecture.endswith("ForSequenceClassification"):
        return AutoModelForSequenceClassification
    if architecture.endswith("ForImageClassification"):
        return AutoModelForImageClassification
    is_causal_lm = architecture in CAUSAL_LMS or architecture.endswith("ForCausalLM")
    return AutoModelForCausalLM if is_causal_lm else None


def _load_adapter(
    name: str, architecture: str, auto_class: type, summary: Mapping[str, Any]
) -> PreTrainedModel:
    """An adapter on its base, in eval mode, with the parts of the model's config that its training wrote."""
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel

    # An adapter's folder does not have the config of its base.
    known = {}
    if "num_labels" in summary:
        known["num_labels"] = summary["num_labels"]
    with weights_of(name):
        if architecture.startswith("LinearReadoutFor"):
            model = PeftModel.from_pretrained(_linear_readout(name, summary, known), name)
        elif auto_class is AutoModelForSequenceClassification:
            model = AutoPeftModelForSequenceClassification.from_pretrained(
                name, dtype="auto", **known
            )
        elif auto_class is AutoModelForImageClassification:
            base = find_json(name, ADAPTER)["base_model_name_or_path"]
            model = PeftModel.from_pretrained(
                auto_class.from_pretrained(base, dtype="auto", **known), name
            )
        else:
            model = AutoPeftModelForCausalLM.from_pretrained(name, dtype="auto")

    if auto_class is not AutoModelForCausalLM:
        # The base may have other names, or the same ones in another order.
        names = summary.get("id2label")
        if names is None:
            names = {number: f"LABEL_{number}" for number in range(model.config.num_labels)}
        model.config.id2label = {int(number): label for number, label in names.items()}

    for field in ("noise_sigma", "pad_token_id"):
        setattr(model.config, field, summary.get(field, getattr(model.config, field, None)))
    return model.eval()


def _linear_readout(
    name: str, summary: Mapping[str, Any], known: Mapping[str, Any]
) -> LinearReadoutModel:
    """The base of an adapter in `name`: an encoder under a new linear layer, which the adapter must bring."""
    saved = find_json(name, ADAPTER).get("modules_to_save")
    if not saved or "classifier" not in saved:
        raise ValueError(
            f"The adapter in {name!r} does not hold the linear layer of its model: train it with "
            "`modules_to_save=['classifier']`."
        )
    kind = next(kind for kind in KINDS.values() if kind.__name__ == summary["model"])
    bias = summary.get("classifier_bias", True)
    return kind.from_encoder(summary["encoder"], summary["pooling"], classifier_bias=bias, **known)


def best_device() -> torch.device:
    """The accelerator of this machine, or else its CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def load_image_processor(name: str):
    """The image processor that is saved with a model; `None` if there is none."""
    try:
        return AutoImageProcessor.from_pretrained(name)
    except (OSError, ValueError):
        return None


def load_tokenizer(name: str, **kwargs) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. Without a padding token it pads with the end of text. ValueError if none is saved with
    the model; transformers might make one without saying so."""
    remedy = f"No tokenizer in {name!r}: save it there (`tokenizer.save_pretrained({name!r})`)."
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0].strip()
        if not reason.endswith(":"):  # else the line only announces a list
            remedy += f" transformers says: {reason}"
        raise ValueError(remedy) from error

    special_tokens = {*tokenizer.all_special_tokens, "▁"}  # SentencePiece's space
    if not tokenizer.get_vocab().keys() - special_tokens:
        raise ValueError(remedy)

    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def position_limit(model: nn.Module) -> int | None:
    """The number of tokens that the model has positions for; `None` if its config states no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is None or limit < 0:  # XLNet's -1
        return None
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            limit -= padding + 1  # RoBERTa's positions start after that of the padding
            break
    prompt = getattr(model, "active_peft_config", None)
    prompt_length = getattr(prompt, "num_virtual_tokens", None)  # put before the others
    return limit if prompt_length is None else limit - prompt_length


def has_position_table(model: nn.Module) -> bool:
    """Whether the model looks positions up in a table, which ends at the limit; rotary positions do not end."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():  # GPT-J's, CTRL's
            names.append(name)
    for name in names:
        if any(tower in name for tower in OTHER_TOWERS):
            continue
        # Two parts: LoRA's end in "base_layer".
        if any("pos" in part or part == "wpe" for part in name.split(".")[-2:]):
            return True
    return False
