"""From what is known of a run to its model card: metadata for the Hub, tables and words for people."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from ..constraints.objectives import UNCONSTRAINED
from ..constraints.problem import DescentProblem
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
INTRODUCTIONS = {
    "descent": "In training {layers} constrained to lower the task loss, read by {head}.",
    "erm": "No layer was constrained: this is plain training, the baseline of the constrained models.",
}
INTRODUCTIONS |= dict.fromkeys(
    ("hinge", "quadratic"),
    "The layers' violations of the descent constraints were penalised, as a baseline of the constrained models.",
)
# The head of a class name -> (auto class, task on the Hub).
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
}
SEQ_TO_SEQ = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
DENOISERS = ("ForVideoDenoising", "ForDenoising")
# Of the numbers of an evaluation, these are no metrics, or stand in a table of their own.
NO_METRICS = ("runtime", "per_second", "samples", "epoch", "layer_", "violation", "feasible", "@", "ratio_")
NO_METRICS += ("descending_share", "steps", "num_", "preparation_time")
# Tasks for which PEFT has a class of its own; `AutoPeftModel` reads the class of any other model from the adapter.
PEFT_TASKS = ("CausalLM", "Seq2SeqLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
EXIT_CLASSES = ("AutoModelForSequenceClassification", "AutoModelForCausalLM")  # of the models that `exit` takes
MISSING = "not recorded"


def render(card: Mapping[str, Any]) -> ModelCard:
    """The model card of what [`~hub.collect`] gathered; tables without data are left out, and the card says so.

    Args:
        card (`dict`): plain JSON values. Needed: `model_name`, `architecture`, `objective`, `library_name`, `paper`.
    """
    noise, layers, exits = (card.get(name) or {} for name in ("noise_curve", "layer_profile", "exit_profile"))
    auto_class, task = _task(card)
    data = ModelCardData(
        eval_results=_eval_results(card, task) or None,
        pipeline_tag=task,
        **{name: card.get(name) for name in ("model_name", "base_model", "datasets", "language", "license", "tags")},
        library_name=card["library_name"],
        metrics=[noise["metric"]] if noise else None,
    )
    baseline = card.get("baseline") or {}
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        base_model=card.get("base_model"),
        architecture=card["architecture"],
        model_name=card["model_name"],
        datasets=", ".join(card.get("datasets") or []),
        paper_url=f"https://huggingface.co/papers/{card['paper']['id']}",
        citation=card["paper"]["citation"],
        objective=card["objective"],
        introduction=_introduction(card),
        usage=_usage(card, auto_class),
        head=_head(card),
        readout=(card.get("descent") or {}).get("readout"),
        needs_package=card.get("needs_package"),
        metrics=_metric_table(card, baseline),
        noise=_noise_table(noise, baseline),
        noise_note=_noise_note(noise, (card.get("settings") or {}).get("noise_gamma")),
        layers=_layer_table(card, layers, baseline),
        layer_noise=layers.get("gamma"),
        descending=_descending(layers),
        verdict=_verdict(card, layers),
        exits=_exit_table(exits),
        exit_note=f"in batches of {exits['batch_size']} on {exits['device']}" if exits else "",
        confidence=(card.get("confidence_exit") or {}).get("text"),
        speculation=_speculation_table(card.get("speculation_profile") or {}),
        exit_usage=_exit_usage(card, exits, layers, task),
        exit_tool="hf-descent exit" if auto_class in EXIT_CLASSES else "hf_descent.early_exit.exit_profile",
        settings=_setting_table(card, baseline),
        figures=card.get("figures") or [],
        limits=card.get("limits") or [],
        versions=", ".join(f"{name} {version}" for name, version in (card.get("versions") or {}).items()) or MISSING,
    )


def metrics_of(evaluation: Mapping[str, Any]) -> dict[str, float]:
    """The results among the numbers of an evaluation, without their prefix (`eval_`, `test_`)."""
    # A metric that was measured at levels, as in `eval_accuracy@0.5`, has summaries over them.
    curves = {name.split("@")[0] for name in evaluation if "@" in name}
    summaries = {f"{name}_{summary}" for name in curves for summary in (*SUMMARIES, "auc_over_range_radius")}
    return {
        name.split("_", 1)[1]: float(value)
        for name, value in evaluation.items()
        if "_" in name
        and isinstance(value, int | float)
        and math.isfinite(value)
        and name not in summaries
        and not any(word in name for word in NO_METRICS)
    }


def _introduction(card) -> str:
    layers = (card.get("settings") or {}).get("constrained_layers")
    return INTRODUCTIONS.get(
        card["objective"], "This objective weighs the losses of all layers, as a baseline of the constrained models."
    ).format(layers=f"layers {_cell(layers)} were" if layers else "every layer was", head=_head(card))


def _head(card) -> str:
    readout = (card.get("descent") or {}).get("readout")
    return f"a readout of the run's own (`{readout}`)" if readout else "the model's own head"


def _task(card) -> tuple[str | None, str | None]:
    for ending, (auto_class, task) in TASKS.items():
        # Speech and vision models end in the same words as T5.
        other = "Seq2Seq" in auto_class and card["architecture"] not in SEQ_TO_SEQ
        if card["architecture"].endswith(ending) and not other:
            return auto_class, card.get("pipeline_tag") or task
    return None, card.get("pipeline_tag") or ("image-to-image" if card["architecture"].endswith(DENOISERS) else None)


def _eval_results(card, task) -> list[EvalResult]:
    """One entry for each metric, each noise level and each area under the noise curve; only finite numbers."""
    data = card.get("test_data") or next(iter(card.get("datasets") or []), None)
    where = {
        "task_type": task or "other",
        "dataset_type": data or "unknown",
        "dataset_name": data or "held-out data",
        "dataset_split": card.get("split"),
    }
    evaluation, noise = card.get("evaluation") or {}, card.get("noise_curve") or {}
    found = [(name, name, value) for name, value in metrics_of(evaluation).items()]
    for gamma, value in zip(noise.get("gammas") or [], noise.get("mean") or []):
        found.append((noise["metric"], f"{noise['metric']} at noise gamma {gamma:g}", value))
    if noise:
        low, high = noise["gammas"][0], noise["gammas"][-1]
        span = f"over noise gamma {low:g} to {high:g}"
        found.append((f"{noise['metric']}_auc", f"area under {noise['metric']} {span}", noise.get("auc")))
        found.append((f"{noise['metric']}_mean", f"mean {noise['metric']} {span}", noise.get("auc_over_range")))
    return [
        EvalResult(metric_type=kind, metric_name=name, metric_value=float(value), **where)
        for kind, name, value in found
        if value is not None and math.isfinite(value)
    ]


def _usage(card, auto_class) -> str:
    name, architecture, descent = card.get("repo_id") or card["model_name"], card["architecture"], card.get("descent")
    descent, own, adapted = descent or {}, card.get("needs_package"), card["library_name"] == "peft"
    # An adapter is saved without the config of the model that it adapts.
    labels = f", num_labels={descent['num_labels']}" if adapted and "num_labels" in descent else ""
    imports: dict[str, list[str]] = {}  # names of each module
    lines = []
    if adapted and own:
        imports |= {"hf_descent.models": [architecture], "peft": ["PeftModel"]}
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
        imports[module] = [class_name]
        lines = [f'model = {class_name}.from_pretrained("{name}"{labels})']
    if card.get("has_tokenizer"):
        imports.setdefault("transformers", []).append("AutoTokenizer")
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    head = [f"from {module} import {', '.join(names)}" for module, names in imports.items()]
    if own and "hf_descent.models" not in imports:
        head.insert(0, "import hf_descent.models  # registers the architecture")
    return "\n".join([*head, "", *lines])


def _exit_usage(card, exits, layers, task) -> str:
    losses = layers.get("losses") or _numbered(card.get("evaluation") or {}, "layer_loss_")
    count = len(exits.get("values") or losses)
    layer = exits.get("cheapest") or count
    if layer == count:  # the last one is no exit
        layer = max(1, count // 2)
    classifier = str(task).endswith("-classification") and task != "token-classification"
    model = "model"
    if card["library_name"] == "peft":
        model = "model.merge_and_unload()"
    lines = [f"from hf_descent.early_exit import {'ConfidenceExit, ' if classifier else ''}truncate", ""]
    lines.append(f"short = truncate({model}, {layer})  # a model of its own that stops after layer {layer}")
    if classifier:
        given = "validation_data, max_loss=0.01" + ", processing_class=tokenizer" * card.get("has_tokenizer", False)
        lines.append(f"fast = ConfidenceExit({model}).calibrate({given})  # exit per sample")
    return "\n".join(lines)


def _metric_table(card, baseline) -> str:
    own, other = metrics_of(card.get("evaluation") or {}), metrics_of(baseline.get("evaluation") or {})
    header = ["metric" + (f", {card['split']} data" if card.get("split") else ""), "value"]
    return _table(header, [[name, value] for name, value in own.items()], baseline, [[other.get(n)] for n in own])


def _noise_table(noise, baseline) -> str:
    if not noise:
        return ""
    other = baseline.get("noise_curve") or {}
    beside = dict(zip(other.get("gammas") or [], other.get("mean") or []))
    rows, others = [], []
    spreads = noise.get("std") or []
    for gamma, mean, spread in zip_longest(noise["gammas"], noise["mean"], spreads):
        rows.append([f"{gamma:g}", _cell(mean) + (f" ± {spread:.2g}" if spread else "")])
        others.append([beside.get(gamma)])
    same_grid = other.get("gammas") == noise["gammas"]
    for name, words in (("auc", "area under the curve"), ("auc_over_range", "mean over the range")):
        if noise.get(name) is not None:
            rows.append([words, noise[name]])
            others.append([other.get(name) if same_grid else None])
    return _table(["gamma", noise["metric"]], rows, baseline if other else {}, others)


def _noise_note(noise, setting) -> str:
    if not noise:
        return ""
    trained = noise.get("gamma_train")
    words = f"Trained at gamma = {trained:g}. " if trained else "Trained without noise. " if trained == 0 else ""
    if trained and isinstance(setting, list):
        words = f"Trained at gamma between {setting[0]:g} and {setting[1]:g}. "
    return (
        words + f"Mean over {noise['draws']} draws of the noise, ± their standard deviation."
        if noise["draws"] > 1
        else words + "One draw of the noise."
    )


def _layer_table(card, layers, baseline) -> str:
    losses = layers.get("losses") or _numbered(card.get("evaluation") or {}, "layer_loss_")
    if not losses:
        return ""
    descent, numbers = card.get("descent") or {}, range(1, len(losses) + 1)
    columns = {"layer": numbers, "f_l": losses}
    if layers.get("values"):
        columns[layers["metric"]] = layers["values"]
    constrained = [] if card["objective"] in UNCONSTRAINED else descent.get("constrained_layers") or numbers
    for name, values in (("violation", layers.get("violations")), ("multiplier", descent.get("multipliers"))):
        if constrained and len(values or []) == len(losses):
            columns[name] = [value if layer in constrained else None for layer, value in zip(numbers, values)]
    other = (baseline.get("layer_profile") or {}).get("losses") or []
    rows = [list(row) for row in zip(*columns.values())]
    if len(other) != len(losses):
        return _table(list(columns), rows)
    return _table(list(columns), rows, {"model_name": f"f_l of {baseline['model_name']}"}, [[loss] for loss in other])


def _numbered(evaluation, word) -> list[float]:
    """The values of `eval_<word>1`, `eval_<word>2`, ... (or `test_...`) in order."""
    found = {}
    for name, value in evaluation.items():
        prefix, _, number = name.partition(word)
        if prefix in ("eval_", "test_") and number.isdecimal():
            found[int(number)] = value
    return [found[number] for number in sorted(found)]


def _descending(layers) -> str:
    if layers.get("descending_share") is None:
        return ""
    median = f"; the median ratio of a sample's loss to that before is {_cell(layers.get('ratio_median'))}"
    return f"{layers['descending_share']:.1%} of the (sample, layer) steps lower the loss{median}."


def _verdict(card, layers) -> str:
    if card["objective"] in UNCONSTRAINED:
        return "Feasibility was not asked for: no layer was constrained."
    evaluation, descent = card.get("evaluation") or {}, card.get("descent") or {}
    losses = layers.get("losses") or _numbered(evaluation, "layer_loss_")
    violation, feasible, source = layers.get("max_violation"), layers.get("feasible"), "held-out data"
    if violation is not None:
        source += f" at noise gamma {layers['gamma']:g}" if layers.get("gamma") else " without noise"
    for prefix in ("test", "eval"):
        if violation is None:
            violation, feasible = (evaluation.get(f"{prefix}_{name}") for name in ("max_violation", "feasible"))
    if violation is None:
        violation, feasible = (descent.get(f"train_{name}") for name in ("max_violation", "feasible"))
        source = "the training batches before it was saved (running averages)"
        losses = descent.get("train_layer_losses")
    if violation is None:
        return "Whether the constraints are met was not measured."
    problem, share = DescentProblem.saved_in(descent), (card.get("settings") or {}).get("feasibility_tolerance", 0.0)
    found, at_chance = f"the largest violation is {_cell(violation)}", []
    if problem is not None:
        found += f" (f_0 = {_cell(problem.initial_loss_bound)})"
        if len(losses or []) == problem.num_layers and None not in losses:
            tolerance = layers.get("tolerance") or share * problem.initial_loss_bound
            at_chance = problem.at_chance(torch.tensor(losses), tolerance)
    if feasible and not at_chance:
        return f"**Feasible** on {source}: {found}, within the tolerance."
    if at_chance:
        which = f"layer {at_chance[0]} is" if len(at_chance) == 1 else f"layers {_cell(at_chance)} are"
        found += f"; {which} no better than a constant prediction, within the tolerance"
    return (
        f"**Not feasible** on {source}: {found}. Models that miss their constraints can be far worse than plain ones."
    )


def _exit_table(exits) -> str:
    rows = zip(exits.get("values") or [], exits.get("speedups") or [])
    return _table(
        ["layer", exits.get("metric", ""), "speed-up"],
        [[layer, value, f"{speedup:.2f}x"] for layer, (value, speedup) in enumerate(rows, start=1)],
    )


def _speculation_table(speculation) -> str:
    rows = zip(speculation.get("acceptance") or [], speculation.get("speedups") or [])
    return _table(
        ["exit layer", "accepted", "speed-up of generation"],
        [
            [layer, f"{accepted:.1%}", "not timed" if speedup is None else f"{speedup:.2f}x"]
            for layer, (accepted, speedup) in enumerate(rows, start=1)
        ],
    )


def _setting_table(card, baseline) -> str:
    own = {"objective": card["objective"]} | (card.get("settings") or {}) if card.get("settings") else {}
    descent = card.get("descent") or {}
    for name, key in (("descent_alpha", "alpha"), ("initial_loss_bound", "initial_loss_bound")):
        if own.get(name) == "auto" and key in descent:
            own[name] = ["auto:", *([descent[key]] if not isinstance(descent[key], list) else descent[key])]
    other = {"objective": baseline.get("objective")} | (baseline.get("settings") or {})
    # Those of the baseline alone are at their defaults in this run, where not all are recorded.
    names = [name for name in own | other if (own.get(name), other.get(name)) != (None, None)] if own else []
    return _table(
        ["setting", "value"],
        [[f"`{name}`", own.get(name)] for name in names],
        baseline if baseline.get("settings") else {},
        [[other.get(name)] for name in names],
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]], baseline=None, others=()) -> str:
    """A markdown table; with a baseline, a last column of the values in `others`. Empty without rows."""
    rows = [list(row) for row in rows]
    if not rows:
        return ""
    if baseline:
        header = [*header, baseline["model_name"]]
        rows = [[*row, *other] for row, other in zip(rows, others)]
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)


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
        return " ".join(_cell(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")
