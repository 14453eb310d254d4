"""Renders a model card: metadata for the Hub, and tables and text for people."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from ..configs import DescentArguments, DualSettings
from ..constraints.objectives import objective_class
from ..evaluation.noise_curves import SUMMARIES
from ..evaluation.scoring import markdown_table


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
    "runtime", "per_second", "epoch", "layer_", "violation", "feasible", "@", "ratio_", "descent_share",
    "largest_rise", "num_", "preparation_time", "_radius", "eval_samples", "test_samples", "_steps",
)  # fmt: skip
# Values by which a setting of Trainer is off.
NEUTRAL = {
    "eval_gammas": [0],
    "gradient_accumulation_steps": 1,
    "label_smoothing_factor": 0,
    "max_steps": -1,
    "weight_decay": 0,
    "warmup_steps": 0,
    "world_size": 1,
    "train_sampling_strategy": "random",
}
# Parts of a card that are an empty dict if they are missing.
MAY_BE_MISSING = (
    "descent", "evaluation", "settings", "versions", "noise_curve", "exit_profile", "verdict",
)  # fmt: skip
# Facts that the Hub's metadata take as they are.
METADATA = ("model_name", "base_model", "datasets", "language", "license", "tags", "library_name")
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
    empty = {name: {} for name in MAY_BE_MISSING}
    card = empty | _known(card)
    auto_class, task = _task(card)
    metadata = {name: card.get(name) for name in METADATA}
    metadata["pipeline_tag"] = task
    if "metric" in card["noise_curve"]:
        metadata["metrics"] = [card["noise_curve"]["metric"]]

    results = _eval_results(card, task)
    if results:
        metadata["eval_results"] = results

    metrics = _defined_metrics(card)
    title = "metric"
    if "split" in card:
        title += f", {card['split']} data"

    settings = {f"`{name}`": value for name, value in shown_settings(card["settings"]).items()}
    return ModelCard.from_template(
        ModelCardData(**metadata),
        template_path=str(TEMPLATE),
        card=card,
        usage=_usage(card, auto_class),
        metric_table=_table({title: metrics, "value": metrics.values()}),
        setting_table=_table({"setting": settings, "value": settings.values()}),
        is_constrained=objective_class(card["objective"]).is_constrained,
        is_noisy=any(float(name.split("@")[1]) for name in _noise_levels(card)),
        asks_for_exits=bool(card["settings"].get("exit_targets")),
        answers=answers(card),
    )


def _known(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts without those that are missing or empty."""
    return {name: value for name, value in facts.items() if value not in (None, "", [], {})}


def answers(card: Mapping[str, Any]) -> list[str]:
    """A sentence for each exit in the verdict, and one for all other constraints."""
    card = _known(card)
    verdict = card.get("verdict", {})
    targets = _known(card.get("settings", {})).get("exit_targets", {})
    allowed = {f"exit_{layer}": 100 * share for layer, share in targets.items()}
    sentences = []
    others = []
    for row in verdict.get("rows", []):
        if row["name"] not in allowed:
            others.append(row["verdict"])
            continue
        layer = row["name"].removeprefix("exit_")
        rise = 100 * (row["reached"] / verdict["last_loss"] - 1)
        side = "above" if rise > 0 else "below"
        sentences.append(
            f"{ANSWERS[row['verdict']].format(layer=layer)} Its loss is {abs(rise):.1f} % {side} the last layer's; "
            f"{allowed[row['name']]:g} % above was allowed."
        )

    if others:
        sentences.append(
            f"{others.count('met')} of {len(others)} layers do what was asked of them."
        )

    return sentences


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, without those that are off or at the defaults of this package. Settings of the dual step are left
    out if there is none."""
    known = _known(settings)
    neutral = {argument.name: argument.default for argument in fields(DescentArguments)}
    neutral.update(NEUTRAL)
    neutral.pop("objective")
    if known.get("max_steps", -1) > 0:
        known.pop("num_train_epochs", None)
    if not objective_class(known.get("objective", "erm")).moves_multipliers:
        for argument in fields(DualSettings):
            known.pop(argument.name, None)
    return {name: value for name, value in known.items() if neutral.get(name) != value}


def metrics_of(evaluation: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics among the numbers of an evaluation, without their prefix (`eval_`, `test_`)."""
    metrics = {}
    if not evaluation:
        return metrics
    for name, value in evaluation.items():
        _, _, metric = name.partition("_")
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if metric and is_number and not any(word in name for word in NO_METRICS):
            metrics[metric] = float(value)
    return metrics


def _task(card) -> tuple[str | None, str | None]:
    """The auto class that loads the model, and its task on the Hub."""
    architecture = card["architecture"]
    auto_class = None
    task = None
    for ending, known in TASKS.items():
        if architecture.endswith(ending):
            auto_class, task = known
    # Names of speech and vision models end as that of T5.
    if architecture.endswith("ForConditionalGeneration") and architecture not in SEQ_TO_SEQ:
        auto_class = None
        task = None
    return auto_class, card.get("pipeline_tag", task)


def _noise_levels(card) -> dict[str, float]:
    """The values of the noise curve at its levels, by "metric@level"."""
    values = card["noise_curve"].get("values", {})
    return {name: value for name, value in values.items() if "@" in name}


def _defined_metrics(card) -> dict[str, float]:
    """The metrics of the evaluation, without the summaries of a noise curve, whose names do not say what they are."""
    summaries = {f"{card['noise_curve'].get('metric')}_{name}" for name in SUMMARIES}
    metrics = metrics_of(card["evaluation"])
    return {name: value for name, value in metrics.items() if name not in summaries}


def _eval_results(card, task) -> list[EvalResult]:
    """One entry for each metric, and for each level of noise above 0; only finite numbers, of four digits."""
    names = [card["test_data"]] if "test_data" in card else card.get("datasets", [])
    numbers = _defined_metrics(card)
    for name, value in _noise_levels(card).items():
        if float(name.split("@")[1]):
            numbers[name] = value

    return [
        EvalResult(
            task_type="other" if task is None else task,
            dataset_type=[*names, "unknown"][0],
            dataset_name=[*names, "held-out data"][0],
            dataset_split=card.get("split"),
            metric_type=name.split("@")[0],
            metric_name=name.replace("@", " with input noise of level "),
            metric_value=float(f"{value:.4g}"),
        )
        for name, value in numbers.items()
        if value is not None and math.isfinite(value)
    ]


def _usage(card, auto_class) -> str:
    """The code that loads the model."""
    name = card.get("repo_id", card["model_name"])
    is_own = bool(card.get("needs_package"))
    is_adapter = card["library_name"] == "peft"
    # An adapter is saved without the config of its base.
    labels = ""
    if is_adapter and "num_labels" in card["descent"]:
        labels = f", num_labels={card['descent']['num_labels']}"

    if is_adapter and is_own:
        imports = {"hf_descent.models": [card["architecture"]], "peft": ["PeftModel"]}
        lines = _lines_of_own_adapter(card, name, labels)
    else:
        module, class_name = _class_to_load(card, auto_class)
        imports = {module: [class_name]}
        lines = [f'model = {class_name}.from_pretrained("{name}"{labels})']

    if card.get("has_tokenizer"):
        imports.setdefault("transformers", []).append("AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')

    head = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
    if is_own and "hf_descent.models" not in imports:
        head.insert(0, "import hf_descent.models  # registers the architecture")

    return "\n".join([*head, "", *lines])


def _lines_of_own_adapter(card, name: str, labels: str) -> list[str]:
    """The code that loads an adapter of an architecture of this package."""
    base = card.get("base_model", "ENCODER")
    encoder = f'"{base}", "{card["descent"].get("pooling")}"{labels}'
    return [
        f"base = {card['architecture']}.from_encoder({encoder})",
        f'model = PeftModel.from_pretrained(base, "{name}")',
    ]


def _class_to_load(card, auto_class: str | None) -> tuple[str, str]:
    """Module and name of the class that loads the model."""
    if card["library_name"] == "peft":
        of_peft = {f"AutoModelFor{task}": f"AutoPeftModelFor{task}" for task in PEFT_TASKS}
        return "peft", of_peft.get(auto_class, "AutoPeftModel")
    if auto_class is not None:
        return "transformers", auto_class
    if card.get("needs_package"):
        return "hf_descent.models", card["architecture"]
    return "transformers", card["architecture"]


def _table(columns: Mapping[str, Iterable[Any]]) -> str:
    """A markdown table of columns by their headers; empty without rows."""
    rows = list(zip(*columns.values()))
    if not rows:
        return ""
    return markdown_table([list(map(_cell, line)) for line in (columns, *rows)])


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
