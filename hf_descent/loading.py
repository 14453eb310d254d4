"""The text models of finished runs, whole or as an adapter beside its base, for the commands that measure them."""

import json
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import cached_file

from .descent_state import SUMMARY_NAME
from .models import LinearReadoutForSequenceClassification  # and registers the package's other architectures


ADAPTER = "adapter_config.json"
# PEFT's name of a task -> how its architectures' names end.
TASKS = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}


def architecture_of(name: str) -> str:
    """The class of a saved model; of an adapter, that of the model it adapts where known, else of its task."""
    return _architecture(name, _read(name, ADAPTER), _read(name, SUMMARY_NAME) or {})


def load_model(name: str) -> PreTrainedModel:
    """A text classifier or a causal language model in eval mode, with the `noise_sigma` of its training.

    Args:
        name (`str`): a folder, or a name on the Hub. An adapter is put on its base, by PEFT; it is not merged.

    Raises:
        ValueError: it is neither.
    """
    adapter, summary = _read(name, ADAPTER), _read(name, SUMMARY_NAME) or {}
    architecture = _architecture(name, adapter, summary)
    if architecture.endswith("ForSequenceClassification"):
        auto_class = AutoModelForSequenceClassification
    elif architecture.endswith(("ForCausalLM", "LMHeadModel")):
        auto_class = AutoModelForCausalLM
    else:
        raise ValueError(
            f"`model` is {name!r}, a {architecture}; the command takes text classifiers and causal language models. "
            "The functions of `hf_descent` take the others."
        )
    if adapter is None:
        return auto_class.from_pretrained(name)
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel

    # Known to the config of the model that the adapter is for, which is not in its folder.
    labels = {"num_labels": summary["num_labels"]} if "num_labels" in summary else {}
    if architecture == LinearReadoutForSequenceClassification.__name__:
        if "encoder" not in summary:
            raise ValueError(f"{name}: its {SUMMARY_NAME} names no encoder; put it on its base with `PeftModel`.")
        base = LinearReadoutForSequenceClassification.from_encoder(summary["encoder"], summary["pooling"], **labels)
        model = PeftModel.from_pretrained(base, name)
    elif auto_class is AutoModelForCausalLM:
        model = AutoPeftModelForCausalLM.from_pretrained(name)
    else:
        model = AutoPeftModelForSequenceClassification.from_pretrained(name, **labels)
    for field in ("noise_sigma", "pad_token_id"):
        setattr(model.config, field, summary.get(field, getattr(model.config, field, None)))
    return model.eval()


def _architecture(name: str, adapter: dict | None, summary: dict) -> str:
    if adapter is None:
        return (getattr(AutoConfig.from_pretrained(name), "architectures", None) or ["unknown"])[0]
    task = adapter.get("task_type")
    return summary.get("model") or TASKS.get(task, f"model with an adapter of task {task}")


def _read(name: str, file: str) -> dict | None:
    """A json file of a folder or of a repository on the Hub; `None` where there is none."""
    quietly = {
        f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    path = cached_file(name, file, **quietly)
    try:
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}).") from error
