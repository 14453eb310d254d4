"""The text models of finished runs, whole or as an adapter beside its base, for the commands that measure them."""

import json
import os

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from .descent_state import SUMMARY_NAME, read_summary
from .models import LinearReadoutForSequenceClassification  # and registers the package's other architectures


ADAPTER = "adapter_config.json"
# PEFT's name of a task -> how its architectures' names end.
TASKS = {"CAUSAL_LM": "ForCausalLM", "SEQ_CLS": "ForSequenceClassification"}


def architecture_of(name: str) -> str:
    """The class of a saved model; of an adapter in a local folder, that of its base where known, else of its task."""
    if not _is_adapter(name):
        return (getattr(AutoConfig.from_pretrained(name), "architectures", None) or ["unknown"])[0]
    with open(os.path.join(name, ADAPTER), encoding="utf-8") as file:
        task = json.load(file)["task_type"]
    return _summary(name).get("model") or TASKS.get(task, str(task))


def load_model(name: str, **kwargs) -> PreTrainedModel:
    """A text classifier or a causal language model in eval mode, with the `noise_sigma` of its training.

    Args:
        name (`str`): a folder, or a name on the Hub. An adapter is put on its base, by PEFT; it is not merged.
        kwargs: of `from_pretrained` (`dtype`).

    Raises:
        ValueError: it is neither.
    """
    architecture, summary = architecture_of(name), _summary(name)
    if architecture.endswith("ForSequenceClassification"):
        auto_class = AutoModelForSequenceClassification
    elif architecture.endswith(("ForCausalLM", "LMHeadModel")):
        auto_class = AutoModelForCausalLM
    else:
        raise ValueError(
            f"`model` is {name!r}, a {architecture}; the command takes text classifiers and causal language models. "
            "The functions of `hf_descent` take the others."
        )
    if not _is_adapter(name):
        return auto_class.from_pretrained(name, **kwargs)
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel

    # Known to the config of the model that the adapter is for, which is not in its folder.
    labels = {"num_labels": summary["num_labels"]} if "num_labels" in summary else {}
    if architecture == LinearReadoutForSequenceClassification.__name__:
        base = LinearReadoutForSequenceClassification.from_encoder(summary["encoder"], summary["pooling"], **labels)
        model = PeftModel.from_pretrained(base, name)
    elif auto_class is AutoModelForCausalLM:
        model = AutoPeftModelForCausalLM.from_pretrained(name, **kwargs)
    else:
        model = AutoPeftModelForSequenceClassification.from_pretrained(name, **labels, **kwargs)
    model.config.noise_sigma = summary.get("noise_sigma", getattr(model.config, "noise_sigma", None))
    return model.eval()


def _is_adapter(name: str) -> bool:
    return os.path.isfile(os.path.join(name, ADAPTER))


def _summary(name: str) -> dict:
    return read_summary(name) if os.path.isfile(os.path.join(name, SUMMARY_NAME)) else {}
