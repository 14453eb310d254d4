"""Model cards and what lies beside the weights on the Hub.

`collect` gathers what a run's folder says into plain values, kept as `model_card.json`; `model_card.render` turns them
into the card. The trainer does both when it pushes or saves a checkpoint's card, `hf-descent card RUN` does both again
once more was measured.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from matplotlib.figure import Figure
from transformers.utils import CONFIG_NAME, logging

from ..early_exit import ConfidenceReport, ExitProfile, SpeculationProfile
from ..evaluation import LayerProfile, NoiseCurve
from ..evaluation.comparison import COMMON
from ..evaluation.scoring import Result
from ..files import plain, read_json, whole_file
from ..runs import RunFolder
from .card import PAPER, TAGS, render


logger = logging.get_logger(__name__)

# Beginnings of the classes in `hf_descent.models`.
OWN_MODELS = ("LinearReadoutFor", "UTFor", "DustFor", "ViTForDenoising")
RESULTS: dict[str, type[Result]] = {
    "noise_curve": NoiseCurve,
    "layer_profile": LayerProfile,
    "exit_profile": ExitProfile,
    "confidence_exit": ConfidenceReport,
    "speculation_profile": SpeculationProfile,
}
# What people say of a model; the rest of a card is of one training.
SAID = (
    "model_name", "repo_id", "base_model", "datasets", "test_data", "language", "license", "tags", "pipeline_tag",
    "limits",
)  # fmt: skip


def collect(folder: str | Path, baseline: str | Path | None = None, **facts: Any) -> dict[str, Any]:
    """What is known of a run, in plain JSON values: what its `model_card.json` says, `facts`, and its result files.

    Results are those of the files that are there: what a card has said of one that is gone is not said again.

    Args:
        folder (`str` or `Path`): output folder of a run.
        baseline (`str` or `Path`, *optional*): folder of a run to show beside this one.
        facts: what replaces what was known: `model_name`, `base_model`, `datasets` (trained on), `test_data`
            (its name, where it is not the first of these), `license`, `language`, `tags`, `split`, `limits` (a list of
            sentences), ...; `None` replaces nothing.

    Raises:
        ValueError: the folder holds no model, or a file of it cannot be read.
    """
    folder, run = Path(folder), RunFolder(folder)
    config, adapter = _read(folder / CONFIG_NAME), _read(folder / "adapter_config.json")
    if not (config or adapter or facts.get("architecture")):  # TRL's trainers ask before they save a model
        raise ValueError(
            f"{folder} holds neither `{CONFIG_NAME}` nor `adapter_config.json`: give the folder of a run."
        )
    descent = run.summary
    card = {
        "model_name": folder.resolve().name,
        "architecture": (config.get("architectures") or [descent.get("model", "AutoModel")])[0],
        "tags": TAGS,
        "paper": PAPER,
    }
    said = {name: value for name, value in _read(folder / run.CARD).items() if name in SAID}
    known = {name: value for name, value in run.read(run.CARD).items() if name not in RESULTS} | said
    card |= known | {name: value for name, value in facts.items() if value is not None}
    card["tags"] = list(dict.fromkeys([*known.get("tags", []), *card["tags"]]))
    card["library_name"] = "peft" if adapter else "transformers"
    card["needs_package"] = card["architecture"].startswith(OWN_MODELS)
    card["has_tokenizer"] = (folder / "tokenizer_config.json").is_file()
    base = adapter.get("base_model_name_or_path") or descent.get("encoder")
    if base := hub_id(base):
        card["base_model"] = facts.get("base_model") or base
    # `base_model` names the encoder; this may be a folder of the machine.
    card["descent"] = {name: value for name, value in descent.items() if name != "encoder"}
    card["versions"] = descent.get("versions") or card.get("versions")
    card["settings"] = card.get("settings") or descent.get("arguments")
    card["objective"] = card.get("objective") or descent.get("objective") or "erm"
    for split, prefix, named in (
        ("validation", "eval_", "eval_"),
        ("validation", "validation_", "eval_"),
        ("test", "test_", "test_"),
    ):
        # Not from `all_results.json`, to which every training in the folder adds.
        if results := run.read(f"{prefix}results.json"):
            card["split"] = split
            card["evaluation"] = {
                named + name.removeprefix(prefix): value for name, value in results.items() if name.startswith(prefix)
            }
    for name, kind in RESULTS.items():
        for result in run.results(kind, name):
            card[name] = _summary(name, result)
    if baseline is not None:
        known = collect(baseline)
        names = ("model_name", "objective", "settings", "evaluation", "split", "noise_curve", "layer_profile")
        card["baseline"] = {name: known.get(name) for name in names}
    elif card.get("baseline"):  # an older card does not say its split, which was that of the run
        card["baseline"] = {"split": known.get("split")} | card["baseline"]
    beside = card.get("baseline") or {}
    for name, values in _measured(card).items():
        for what, other in _measured(beside)[name].items():
            own = values[what]
            unknown = what == "data" and None in (own, other)  # in older files
            if beside.get(name) and card.get(name) and other != own and not unknown:
                logger.warning(
                    f"The card leaves out the `{name}` of {beside['model_name']}: its {what} is {other}, this run's "
                    f"{own}."
                )
                beside[name] = None
    return plain(card)


def write_card(folder: str | Path, baseline: str | Path | None = None, **facts: Any) -> None:
    """Draw the figures and write `model_card.json` and `README.md` of a run; arguments as for [`collect`]."""
    folder, run = Path(folder), RunFolder(folder)
    card = collect(folder, baseline, **facts)
    figures = _figures(card)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
    card["figures"] = list(figures)
    if card.get("exit_profile") and run.fresh(run.EXITS_FIGURE):
        card["figures"].append(run.EXITS_FIGURE)
    text = str(render(card))  # before anything is written, so that a card that fails leaves the old one
    for name, content in ((run.CARD, json.dumps(card, indent=2) + "\n"), ("README.md", text)):
        with whole_file(folder / name) as file:
            file.write(content)


def _summary(name: str, result: Any) -> dict[str, Any]:
    """What a card shows of a result; samples and blocks stay in its own file."""
    if name == "noise_curve":
        fields = ("metric", "gammas", "mean", "std", "auc", "auc_over_range", "auc_id", "auc_ood", "gamma_train")
        measured = {name: result.settings.get(name) for name in COMMON}
        return {field: getattr(result, field) for field in fields} | {"draws": result.values.shape[1], **measured}
    if name == "layer_profile":
        fields = ("metric", "losses", "values", "gamma", "violations", "max_violation", "feasible", "tolerance")
        fields += ("data", "descending_share")
        median = np.median(result.ratios) if result.ratios.size else None
        return {field: getattr(result, field) for field in fields} | {"ratio_median": median}
    if name == "exit_profile":
        fields = ("metric", "values", "speedups", "batch_size", "device")
        return {field: getattr(result, field) for field in fields} | {"cheapest": result.cheapest()}
    if name == "confidence_exit":
        return {"text": str(result), "accuracy": result.accuracy, "speedup": result.speedup}
    speedups = result.tokens_per_second / result.greedy_tokens_per_second
    return {"acceptance": result.acceptance, "speedups": speedups, "best": result.best}


def _measured(card) -> dict[str, dict[str, Any]]:
    """Of each result that a baseline may have beside it, what it was measured on and how."""
    noise, layers = (card.get(name) or {} for name in ("noise_curve", "layer_profile"))
    return {
        "evaluation": {"split": card.get("split")},
        "noise_curve": {name: noise.get(name) for name in ("metric", *COMMON)},
        "layer_profile": {name: layers.get(name) for name in ("gamma", "data")},
    }


def _figures(card) -> dict[str, Figure]:
    baseline, figures = card.get("baseline") or {}, {}
    for file, name, x, y, axis in (
        ("layers.png", "layer_profile", None, "losses", "layer"),
        ("noise.png", "noise_curve", "gammas", "mean", "noise level gamma"),
    ):
        own, other = card.get(name), baseline.get(name)
        if not own:
            continue
        figure = Figure(figsize=(5, 3.4), layout="constrained")
        axes = figure.subplots()
        for result, label, style in ((own, card["model_name"], "o-"), (other, baseline.get("model_name"), "s--")):
            if result:
                axes.plot(result[x] if x else range(1, len(result[y]) + 1), result[y], style, label=label)
        axes.set(xlabel=axis, ylabel="task loss" if y == "losses" else own["metric"])
        axes.legend()
        figures[file] = figure
    return figures


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def hub_id(name: str | None) -> str | None:
    """`name` where it may be one on the Hub, not a folder of this machine or of another."""
    if not name or os.path.isdir(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def listed(value: str | list[str] | None) -> list[str] | None:
    # A data set in memory has no name, for which the summary holds None.
    return [value] if isinstance(value, str) else [item for item in value or [] if item] or None
