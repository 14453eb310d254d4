"""Renders a model card: metadata for the Hub, and tables and words for people."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from ..constraints.objectives import UNCONSTRAINED
from ..constraints.problem import DescentProblem
from ..evaluation.certificates import ALSO_SELECTED, MET
from ..evaluation.robustness import SUMMARIES


TAGS = ["hf_descent", "descent"]
PAPER = {
    "title": "A Constrained Optimization Perspective of Unrolled Transformers",
    "id": "2601.17257",
    "citation": (
        "@article{porras2026constrained,\n"
        "  title={A Constrained Optimization Perspective of Unrolled Transformers},\n"
        "  author={Porras-Valenzuela, Javier and Hadou, Samar and Ribeiro, Alejandro},\n"
        "  journal={arXiv preprint arXiv:2601.17257},\n  year={2026}\n}"
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
    "ForVideoDenoising": (None, "image-to-image"),
    "ForDenoising": (None, "image-to-image"),
}
SEQ_TO_SEQ = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
# Numbers of an evaluation that are not metrics, or have a table of their own.
NO_METRICS = ("runtime", "per_second", "samples", "epoch", "layer_", "violation", "feasible", "@", "ratio_")
NO_METRICS += ("share", "rise", "steps", "num_", "preparation_time")
# Tasks with a class in PEFT; `AutoPeftModel` reads the class of any other model from the adapter.
PEFT_TASKS = ("CausalLM", "Seq2SeqLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
EXIT_CLASSES = ("AutoModelForSequenceClassification", "AutoModelForCausalLM")  # of the models that `exit` takes
# Parts of a card that may be missing.
PARTS = ("baseline", "descent", "evaluation", "settings", "versions", "noise_curve", "layer_profile", "exit_profile")
PARTS += ("confidence_exit", "speculation_profile", "verdict")


def render(card: Mapping[str, Any]) -> ModelCard:
    """The model card of what [`~hub.push.collect`] gathered. Tables without data are left out, and the card says so.

    Args:
        card (`dict`): plain JSON values. Needed: `model_name`, `architecture`, `objective`, `library_name`, `paper`.
    """
    card = {**card, **{name: dict(card.get(name) or {}) for name in PARTS}}
    noise, layers, beside = (card[each] for each in ("noise_curve", "layer_profile", "baseline"))
    auto_class, task = _task(card)
    names = ("model_name", "base_model", "datasets", "language", "license", "tags", "library_name")
    data = ModelCardData(
        eval_results=_eval_results(card, task) or None,
        pipeline_tag=task,
        metrics=[noise["metric"]] if noise else None,
        **{name: card.get(name) for name in names},
    )
    layers.setdefault("losses", _layer_losses(card["evaluation"]))
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        card=card,
        cell=_cell,
        usage=_usage(card, auto_class),
        metric_table=_metric_table(card, beside),
        noise_table=_noise_table(noise, beside),
        layer_table=_layer_table(layers, beside) if layers["losses"] else "",
        verdict=_verdict(card),
        exit_layer=_exit_layer(card["exit_profile"]),
        exit_tool="hf-descent exit" if auto_class in EXIT_CLASSES else "hf_descent.early_exit.exit_profile",
        is_classifier=str(task).endswith("-classification") and task != "token-classification",
        setting_table=_setting_table(card, beside),
    )


def metrics_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among the numbers of an evaluation, without their prefix (`eval_`, `test_`)."""
    # A metric that was measured at noise levels, as in `eval_accuracy@0.5`, has summaries over them.
    curves = {name.split("@")[0] for name in evaluation if "@" in name}
    more = ("auc_over_range_radius", "retention")  # the second one in version 0.1
    summaries = {f"{name}_{summary}" for name in curves for summary in (*SUMMARIES, *more)}
    return {
        name.split("_", 1)[1]: float(value)
        for name, value in evaluation.items()
        if "_" in name
        and isinstance(value, int | float)
        and math.isfinite(value)
        and name not in summaries
        and not any(word in name for word in NO_METRICS)
    }


def _task(card) -> tuple[str | None, str | None]:
    """The auto class that loads the model, and its task on the Hub."""
    for ending, (auto_class, task) in TASKS.items():
        # Names of speech and vision models end as that of T5.
        other = ending == "ForConditionalGeneration" and card["architecture"] not in SEQ_TO_SEQ
        if card["architecture"].endswith(ending) and not other:
            return auto_class, card.get("pipeline_tag") or task
    return None, card.get("pipeline_tag")


def _layer_losses(evaluation) -> list[float]:
    """The values of `eval_layer_loss_1`, `eval_layer_loss_2`, ... in order; those of one data set only."""
    found = {}
    for name, value in evaluation.items():
        prefix, _, number = name.partition("layer_loss_")
        if number.isdecimal() and prefix.count("_") == 1:
            found[int(number)] = value
    return [found[number] for number in sorted(found)]


def _eval_results(card, task) -> list[EvalResult]:
    """One entry for each metric, each noise level and each area under the noise curve; only finite numbers."""
    noise, found = card["noise_curve"], [(name, name, value) for name, value in metrics_of(card["evaluation"]).items()]
    if noise:
        metric, gammas = noise["metric"], noise["gammas"]
        span = f"over noise gamma {gammas[0]:g} to {gammas[-1]:g}"
        found += [(metric, f"{metric} at noise gamma {gamma:g}", value) for gamma, value in zip(gammas, noise["mean"])]
        found.append((f"{metric}_auc", f"area under {metric} {span}", noise.get("auc")))
        found.append((f"{metric}_mean", f"mean {metric} {span}", noise.get("auc_over_range")))
    data = card.get("test_data") or next(iter(card.get("datasets") or []), None)
    return [
        EvalResult(
            task_type=task or "other",
            dataset_type=data or "unknown",
            dataset_name=data or "held-out data",
            dataset_split=card.get("split"),
            metric_type=kind,
            metric_name=name,
            metric_value=float(value),
        )
        for kind, name, value in found
        if value is not None and math.isfinite(value)
    ]


def _usage(card, auto_class) -> str:
    """The code that loads the model."""
    name, architecture, descent = card.get("repo_id") or card["model_name"], card["architecture"], card["descent"]
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
            module, class_name = "peft", f"AutoPeftModelFor{kind}" if kind in PEFT_TASKS else "AutoPeftModel"
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


def _metric_table(card, beside) -> str:
    own, other = metrics_of(card["evaluation"]), metrics_of(beside.get("evaluation") or {})
    columns = {"metric" + (f", {card['split']} data" if card.get("split") else ""): own, "value": own.values()}
    if other:
        columns[beside["model_name"]] = [other.get(name) for name in own]
    return _table(columns)


def _noise_table(noise, beside) -> str:
    if not noise:
        return ""
    gammas, other = noise["gammas"], beside.get("noise_curve") or {}
    spreads = noise.get("std") or [None] * len(gammas)
    theirs = dict(zip(other.get("gammas") or [], other.get("mean") or []))
    rows = {
        f"{gamma:g}": (f"{_cell(mean)} ± {std:.2g}" if std else mean, theirs.get(gamma))
        for gamma, mean, std in zip(gammas, noise["mean"], spreads)
    }
    for area, words in (("auc", "area under the curve"), ("auc_over_range", "mean over the range")):
        if noise.get(area) is not None:
            rows[words] = noise[area], other.get(area) if other.get("gammas") == gammas else None
    values, others = zip(*rows.values())
    return _table({"gamma": rows, noise["metric"]: values} | ({beside["model_name"]: others} if other else {}))


def _layer_table(layers, beside) -> str:
    losses = layers["losses"]
    columns = {"layer": range(1, len(losses) + 1), "f_l": losses}
    if layers.get("values"):
        columns[layers["metric"]] = layers["values"]
    other = (beside.get("layer_profile") or {}).get("losses") or []
    if len(other) == len(losses):
        columns[f"f_l of {beside.get('model_name')}"] = other
    return _table(columns)


def _verdict(card) -> str:
    """What was asked of the layers and whether it is met, row by row."""
    found, evaluation = card["verdict"], card["evaluation"]
    if found:
        count, total = found["verdicts"].count(MET), len(found["rows"])
        name = found.get("data_name") or "eval"
        where = "on held-out data" + (f" (`{name}`)" if name != "eval" else "")
        where += f", at noise gamma {found['gamma']:g}" if found["gamma"] else ""
        said = f"**{count} of {total}** constraints on the layers {'are' if count != 1 else 'is'} met {where}"
        words = [f"{said}, each with {found['confidence']:.0%} confidence; f_L = {_cell(found['losses'][-1])}."]
        if card["objective"] in UNCONSTRAINED:
            words.append("This model was not trained to meet them.")
        if found.get("also_selected"):
            words.append(ALSO_SELECTED)
        if found.get("descent_share") is not None:
            words.append(f"Every layer keeps up with {found['descent_share']:.0%} of an even descent to that loss.")
        problem, losses = DescentProblem.saved_in(card["descent"]), card["descent"].get("warmup_layer_losses")
        share = problem.descent_share(torch.tensor(losses)) if problem and losses else None
        if share is not None:
            words.append(f"At the end of warm-up, of plain training, it was {share:.0%}, on training data.")
        columns = {name: found[name] for name in ("rows", "asked", "reached", "tolerances", "multipliers", "verdicts")}
        errors = ["" if error is None else f" ± {error:.2g}" for error in found["radii"]]
        columns["reached"] = [f"{_cell(loss)}{error}" for loss, error in zip(found["reached"], errors)]
        return " ".join(words) + "\n\n" + _table({name: cells for name, cells in columns.items() if cells})
    old = next((value for name, value in evaluation.items() if name.endswith("_feasible")), None)
    if card["objective"] in UNCONSTRAINED:
        return "No layer was constrained."
    if old is not None and "descent_strength" not in card["descent"]:
        old = "feasible" if old else "not feasible"
        return f"Version 0.1 called this model {old}, by a rule that even an untrained model could meet."
    return "Whether the constraints are met was not measured on held-out data."


def _exit_layer(measured) -> int | None:
    """The layer at which the card cuts the model, the cheapest exit; `None` where it is the last layer or unknown."""
    cheapest = measured.get("cheapest")
    return cheapest if cheapest is not None and cheapest < len(measured["values"]) else None


def _setting_table(card, beside) -> str:
    if not card["settings"]:
        return ""
    own = {"objective": card["objective"]} | card["settings"]
    for name, key in (("descent_alpha", "alpha"), ("initial_loss_bound", "initial_loss_bound")):
        found = card["descent"].get(key)
        if own.get(name) == "auto" and found is not None:
            own[name] = ["auto:", *(found if isinstance(found, list) else [found])]
    settings = beside.get("settings") or {}
    other = {"objective": beside.get("objective")} | settings
    # Settings that only the baseline has are at their defaults here: not all of those are recorded.
    names = [name for name in own | other if (own.get(name), other.get(name)) != (None, None)]
    columns = {"setting": [f"`{name}`" for name in names], "value": [own.get(name) for name in names]}
    return _table(columns | ({beside["model_name"]: [other.get(name) for name in names]} if settings else {}))


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
