"""Renders a model card: metadata for the Hub, and tables and words for people."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData
from huggingface_hub.constants import ENDPOINT
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from ..constraints.objectives import UNCONSTRAINED
from ..evaluation.noise_curves import SUMMARIES


TAGS = ["hf_descent", "descent"]
PAPER = {
    "title": "A Constrained Optimization Perspective of Unrolled Transformers",
    "id": "2601.17257",
    "citation": (
        "@inproceedings{porras2026constrained,\n"
        "  title={A Constrained Optimization Perspective of Unrolled Transformers},\n"
        "  author={Porras-Valenzuela, Javier and Hadou, Samar and Ribeiro, Alejandro},\n"
        "  booktitle={International Conference on Machine Learning},\n  note={arXiv:2601.17257},\n  year={2026}\n}"
    ),
}
TEMPLATE = Path(__file__).with_name("model_card_template.md")
# The end of a class name -> (auto class, task on the Hub).
TASKS = {
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForMultipleChoice": ("AutoModelForMultipleChoice", "multiple-choice"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", "text-generation"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "ForAudioClassification": ("AutoModelForAudioClassification", "audio-classification"),
    "Denoising": (None, "image-to-image"),
}
SEQ_TO_SEQ = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
# Numbers of an evaluation that are no metrics of the whole model, or have a table of their own.
NO_METRICS = (
    "runtime",
    "per_second",
    "epoch",
    "layer_",
    "violation",
    "feasible",
    "@",
    "ratio_",
    "descent_share",
)
NO_METRICS += (
    "largest_rise",
    "num_",
    "preparation_time",
    "_radius",
    "eval_samples",
    "test_samples",
    "_steps",
)
# Settings of the dual step, which acts in "descent" alone.
DUAL_SETTINGS = (
    "dual_learning_rate", "dual_optim", "normalize_violations", "max_last_layer_rise", "dual_warmup_steps",
    "dual_holdout", "resilience", "multiplier_max", "negative_weights", "normalize_weights",
)  # fmt: skip
# Values by which a setting is off.
NEUTRAL = {
    "resilience": 0,
    "noise_gamma": 0,
    "eval_gammas": [0],
    "normalize_weights": False,
    "gradient_accumulation_steps": 1,
    "label_smoothing_factor": 0,
    "max_steps": -1,
    "weight_decay": 0,
    "warmup_steps": 0,
    "world_size": 1,
    "dual_warmup_steps": 0,
    "train_sampling_strategy": "random",
}
ANSWERS = {
    "met": "**Yes, after layer {layer}.**",
    "not met": "**No, not after layer {layer}.**",
    "not shown": "**Not shown for layer {layer}.**",
}
# Tasks with a class in PEFT; `AutoPeftModel` reads the class of any other model from the adapter.
PEFT_TASKS = (
    "CausalLM",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
    "QuestionAnswering",
)


def render(card: Mapping[str, Any]) -> ModelCard:
    """The model card of what [`~hub.facts.collect`] gathered: at least `model_name`, `architecture`, `objective`,
    `library_name` and `paper`. Results that are missing are left out."""
    may_be_missing = (
        "descent",
        "evaluation",
        "settings",
        "versions",
        "noise_curve",
        "exit_profile",
        "speculation_profile",
    )
    card = {**card, **{name: card.get(name) or {} for name in may_be_missing}}
    auto_class, task = _task(card)
    names = ("model_name", "base_model", "datasets", "language", "license", "tags", "library_name")
    metric = card["noise_curve"].get("metric")
    data = ModelCardData(
        eval_results=_eval_results(card, task) or None,
        pipeline_tag=task,
        metrics=[metric] if metric else None,
        **{name: card.get(name) for name in names},
    )
    metrics = _defined_metrics(card)
    title = "metric" + (f", {card['split']} data" if card.get("split") else "")
    settings = {f"`{name}`": value for name, value in settings_that_acted(card["settings"]).items()}
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        card=card,
        usage=_usage(card, auto_class),
        metric_table=_table({title: metrics, "value": metrics.values()}),
        setting_table=_table({"setting": settings, "value": settings.values()}),
        is_constrained=card["objective"] not in UNCONSTRAINED,
        is_noisy=any(float(name.split("@")[1]) for name in _noise_levels(card)),
        asks_for_exits=bool(card["settings"].get("exit_targets")),
        answers=answers(card),
    )


def answers(card: Mapping[str, Any]) -> list[str]:
    """A sentence for each exit of the verdict, and one for all other rows."""
    verdict = card.get("verdict") or {}
    rows = verdict.get("rows") or []
    targets = (card.get("settings") or {}).get("exit_targets") or {}
    allowed = {int(layer): 100 * share for layer, share in targets.items()}
    sentences = []
    others = []
    for row in rows:
        layer = int(row["name"].rpartition("_")[2])
        if not row["name"].startswith("exit_") or layer not in allowed:
            others.append(row["verdict"])
            continue
        rise = 100 * (row["reached"] / verdict["last_loss"] - 1)
        sentences.append(
            f"{ANSWERS[row['verdict']].format(layer=layer)} Its loss is {abs(rise):.1f} % "
            f"{'above' if rise > 0 else 'below'} the last layer's; {allowed[layer]:g} % above was allowed."
        )
    if others:
        sentences.append(
            f"{others.count('met')} of {len(others)} layers do what was asked of them."
        )
    return sentences


def settings_that_acted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without those that a run with the others does not read, or that are off."""
    known = {name: value for name, value in settings.items() if value is not None}
    objective = known.get("objective", "erm")
    has_targets = bool(known.get("exit_targets") or known.get("loss_targets"))
    rows = known.get("descent_alpha", "targets" if has_targets else "line")
    compares_layers = rows != "targets"

    silent = {name for name, neutral in NEUTRAL.items() if known.get(name) == neutral}
    if objective in UNCONSTRAINED:
        silent |= {"descent_strength", "constrained_layers", "initial_loss_bound", "target_margin"}
        silent |= {"readout_token_fraction"} if objective == "erm" else set()
    if objective != "descent":
        silent |= {*DUAL_SETTINGS}
    if objective not in ("deep_supervision", "layerskip", "hinge", "quadratic"):
        silent.add("penalty_coefficient")
    if not compares_layers:
        silent.add("descent_strength")
    if not has_targets:
        silent.add("target_margin")
    if rows in ("line", "auto", "targets"):
        silent.add("negative_weights")
    if not known.get("resilience"):
        silent |= {"resilience_form", "slack_learning_rate", "slack_restart"}
    elif known.get("resilience_form") != "slack":
        silent |= {"slack_learning_rate", "slack_restart"}
    if known.get("max_steps", -1) > 0:
        silent.add("num_train_epochs")
    return {name: value for name, value in known.items() if name not in silent}


def metrics_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among the numbers of an evaluation, without their prefix (`eval_`, `test_`)."""
    return {
        name.split("_", 1)[1]: float(value)
        for name, value in evaluation.items()
        if "_" in name
        and isinstance(value, int | float)
        and math.isfinite(value)
        and not any(word in name for word in NO_METRICS)
    }


def benchmark_entry(card: Mapping[str, Any]) -> EvalResultEntry | None:
    """The result for the leaderboard of the card's `benchmark` (dataset, task, metric) on the Hub; `None` where the
    card names none, or its metric was not measured. What tasks there are, and by which metric, the Hub alone knows."""
    dataset, task, metric = card.get("benchmark") or (None, None, None)
    if (value := metrics_of(card.get("evaluation") or {}).get(metric)) is None:
        return None
    entry = EvalResultEntry(dataset, task, value, date=card.get("evaluated"))
    entry.notes = ", ".join(filter(None, [metric, card.get("split")]))
    if card.get("repo_id"):
        entry.source_url, entry.source_name = f"{ENDPOINT}/{card['repo_id']}", "Model card"
    return entry


def _task(card) -> tuple[str | None, str | None]:
    """The auto class that loads the model, and its task on the Hub."""
    for ending, (auto_class, task) in TASKS.items():
        # Names of speech and vision models end as that of T5.
        other = ending == "ForConditionalGeneration" and card["architecture"] not in SEQ_TO_SEQ
        if card["architecture"].endswith(ending) and not other:
            return auto_class, card.get("pipeline_tag") or task
    return None, card.get("pipeline_tag")


def _noise_levels(card) -> dict[str, float]:
    """The values of the noise curve at its levels, by "metric@level"."""
    values = card["noise_curve"].get("values", {})
    return {name: value for name, value in values.items() if "@" in name}


def _defined_metrics(card) -> dict[str, float]:
    """The metrics of the evaluation whose names say what they are: no summaries of a noise curve."""
    summaries = {f"{card['noise_curve'].get('metric')}_{name}" for name in SUMMARIES}
    metrics = metrics_of(card["evaluation"])
    return {name: value for name, value in metrics.items() if name not in summaries}


def _eval_results(card, task) -> list[EvalResult]:
    """One entry for each metric, and for each level of noise above 0; only finite numbers, of four digits."""
    data = card.get("test_data") or next(iter(card.get("datasets") or []), None)
    levels = {
        name: value for name, value in _noise_levels(card).items() if float(name.split("@")[1])
    }
    return [
        EvalResult(
            task_type=task or "other",
            dataset_type=data or "unknown",
            dataset_name=data or "held-out data",
            dataset_split=card.get("split"),
            metric_type=name.split("@")[0],
            metric_name=name.replace("@", " with input noise of level "),
            metric_value=float(f"{value:.4g}"),
        )
        for name, value in (_defined_metrics(card) | levels).items()
        if value is not None and math.isfinite(value)
    ]


def _usage(card, auto_class) -> str:
    """The code that loads the model."""
    name, architecture, descent = (
        card.get("repo_id") or card["model_name"],
        card["architecture"],
        card["descent"],
    )
    own, adapted = card.get("needs_package"), card["library_name"] == "peft"
    # An adapter is saved without the config of its base.
    labels = f", num_labels={descent['num_labels']}" if adapted and "num_labels" in descent else ""
    if adapted and own:
        imports = {"hf_descent.models": [architecture], "peft": ["PeftModel"]}
        encoder = f'"{card.get("base_model") or "ENCODER"}", "{descent.get("pooling")}"{labels}'
        lines = [f"base = {architecture}.from_encoder({encoder})"]
        lines += [f'model = PeftModel.from_pretrained(base, "{name}")']
    else:
        module, class_name = "transformers", auto_class
        if adapted:
            kind = (auto_class or "").removeprefix("AutoModelFor")
            module, class_name = (
                "peft",
                f"AutoPeftModelFor{kind}" if kind in PEFT_TASKS else "AutoPeftModel",
            )
        elif auto_class is None:
            module, class_name = "hf_descent.models" if own else module, architecture
        imports = {module: [class_name]}
        lines = [f'model = {class_name}.from_pretrained("{name}"{labels})']
    if card.get("has_tokenizer"):
        imports.setdefault("transformers", []).append("AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    head = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
    if own and "hf_descent.models" not in imports:
        head.insert(0, "import hf_descent.models  # registers the architecture")
    return "\n".join([*head, "", *lines])


def _table(columns: Mapping[str, Iterable[Any]]) -> str:
    """A markdown table of columns by their headers; empty without rows."""
    rows = list(zip(*columns.values()))
    lines = [columns, ["---"] * len(columns), *rows] if rows else []
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_cell(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")
