"""Gathers what a run's folder says, and writes the model card and its figures.

[`collect`] returns plain values, kept as `model_card.json`, of which [`~hub.card.render`] makes the card. The trainer
writes both when it pushes a model or saves a checkpoint; `hf-descent card RUN` adds what was measured since.
"""

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from matplotlib.figure import Figure
from transformers.utils import CONFIG_NAME, logging

from ..early_exit import ConfidenceReport, ExitProfile, SpeculationProfile
from ..evaluation import Certificate, LayerProfile, NoiseCurve
from ..evaluation.comparison import COMMON
from ..evaluation.plots import draw_asked, save_figure
from ..evaluation.scoring import Result
from ..files import atomic_write, plain, read_json
from ..runs import RunFolder
from .card import PAPER, TAGS, render


logger = logging.get_logger(__name__)

# How the class names in `hf_descent.models` begin.
OWN_MODELS = ("LinearReadoutFor", "UTFor", "DustFor", "ViTForDenoising")
RESULTS: dict[str, type[Result]] = {  # by the names of their files
    "noise_curve": NoiseCurve,
    "layer_profile": LayerProfile,
    "verdict": Certificate,
    "exit_profile": ExitProfile,
    "confidence_exit": ConfidenceReport,
    "speculation_profile": SpeculationProfile,
}
# What a result of this run and the baseline's must have in common to stand side by side.
IN_COMMON = {"evaluation": ("split",), "noise_curve": ("metric", *COMMON), "layer_profile": ("gamma", "data")}
# What people say of a model. The rest of a card belongs to one training.
GIVEN = (
    "model_name", "repo_id", "base_model", "datasets", "test_data", "language", "license", "tags", "pipeline_tag",
    "limits",
)  # fmt: skip


def collect(folder: str | Path, baseline: str | Path | None = None, **facts: Any) -> dict[str, Any]:
    """What is known of a run, in plain JSON values: its `model_card.json`, `facts` and its result files.

    A result whose file is gone is left out, even if the card had it.

    Args:
        folder (`str` or `Path`): output folder of a run.
        baseline (`str` or `Path`, *optional*): folder of a run to show beside this one.
        facts: replace what was known: `model_name`, `base_model`, `datasets` (trained on), `test_data` (a name),
            `license`, `language`, `tags`, `split`, `limits` (a list of sentences), ...; `None` replaces nothing.

    Raises:
        ValueError: the folder holds no model, or a file of it cannot be read.
    """
    folder, run = Path(folder), RunFolder(folder)
    config, adapter = _read(folder / CONFIG_NAME), _read(folder / "adapter_config.json")
    if not (config or adapter or facts.get("architecture")):  # TRL's trainers ask before they save a model
        raise ValueError(f"{folder} holds neither `{CONFIG_NAME}` nor `adapter_config.json`: give a run's folder.")
    descent = run.summary
    known = {name: value for name, value in run.read(run.CARD).items() if name not in RESULTS}
    known |= {name: value for name, value in _read(folder / run.CARD).items() if name in GIVEN}
    architecture = (config.get("architectures") or [descent.get("model", "AutoModel")])[0]
    card = {"model_name": folder.resolve().name, "architecture": architecture, "tags": TAGS, "paper": PAPER}
    card |= known | {name: value for name, value in facts.items() if value is not None}
    card["tags"] = list(dict.fromkeys([*known.get("tags", []), *card["tags"]]))
    card["library_name"] = "peft" if adapter else "transformers"
    card["needs_package"] = card["architecture"].startswith(OWN_MODELS)
    card["has_tokenizer"] = (folder / "tokenizer_config.json").is_file()
    if base := hub_id(adapter.get("base_model_name_or_path") or descent.get("encoder")):
        card["base_model"] = facts.get("base_model") or base
    # `base_model` names the encoder; this may be a folder of the machine.
    card["descent"] = {name: value for name, value in descent.items() if name != "encoder"}
    card["versions"] = descent.get("versions") or card.get("versions")
    card["settings"] = card.get("settings") or descent.get("arguments")
    card["objective"] = card.get("objective") or descent.get("objective") or "erm"
    # Not from `all_results.json`, to which every training in the folder adds.
    for prefix, split in (("eval", "validation"), ("validation", "validation"), ("test", "test")):
        if results := run.read(f"{prefix}_results.json"):
            card["split"] = split
            card["evaluation"] = {name: value for name, value in results.items() if name.startswith(f"{prefix}_")}
    for name, kind in RESULTS.items():
        for result in run.results(kind, name):
            card[name] = _shown(result)
            if name == "layer_profile" and result.problem:  # version 0.1 wrote no verdict; today's is of the same data
                card["verdict"] = vars(result.certificate())
    if baseline is not None:
        known = collect(baseline)
        names = ("model_name", "objective", "settings", "evaluation", "split", "noise_curve", "layer_profile")
        card["baseline"] = {name: known.get(name) for name in names}
    if card.get("baseline"):
        card["baseline"] = _comparable(card["baseline"], card)
    return plain(card)


def write_card(folder: str | Path, baseline: str | Path | None = None, **facts: Any) -> None:
    """Draw the figures and write `model_card.json` and `README.md` of a run; arguments as for [`collect`]."""
    folder, run = Path(folder), RunFolder(folder)
    card = collect(folder, baseline, **facts)
    card["figures"] = []
    for file, name, values, xlabel, ylabel in (
        ("layers.png", "layer_profile", "losses", "layer", "task loss"),
        ("noise.png", "noise_curve", "mean", "noise level gamma", "metric"),
    ):
        if card.get(name):
            figure = _figure(card, name, values, xlabel, card[name].get(ylabel, ylabel))
            save_figure(figure, folder, file.removesuffix(".png"))
            card["figures"].append(file)
    if card.get("exit_profile") and run.fresh(run.EXITS_FIGURE):
        card["figures"].append(run.EXITS_FIGURE)
    text = str(render(card))  # before anything is written, so that a card that fails leaves the old one
    for name, content in ((run.CARD, json.dumps(card, indent=2) + "\n"), ("README.md", text)):
        with atomic_write(folder / name) as file:
            file.write(content)


def _shown(result: Result) -> dict[str, Any]:
    """What a card shows of a result. Samples and blocks stay in the file."""
    values, names = vars(result), ()
    match result:
        case NoiseCurve():
            names = ("mean", "std", "auc", "auc_over_range")
            values = values | result.settings | {"draws": result.values.shape[1], "radius": result.radius("mean")}
        case LayerProfile():
            values = values | {"ratio_median": result.to_dict().get("ratio_median"), "radius": result.radius("losses")}
            names = ("descending_share",)
        case ExitProfile():
            values, names = values | {"cheapest": result.cheapest()}, ("speedups",)
        case ConfidenceReport():
            values = {"text": str(result)}
        case SpeculationProfile():
            names = ("speedups",)
    values = values | {name: getattr(result, name) for name in names}
    return {name: value for name, value in values.items() if name not in ("blocks", "sample_losses", "settings")}


def _comparable(baseline: dict[str, Any], card: dict[str, Any]) -> dict[str, Any]:
    """The baseline without the results that were measured on other data, or in another way, than this run's."""
    kept = dict(baseline)
    for name, aspects in IN_COMMON.items():
        own, other = (side if name == "evaluation" else side.get(name) or {} for side in (card, baseline))
        for aspect in aspects if card.get(name) and baseline.get(name) else ():
            ours, theirs = own.get(aspect), other.get(aspect)
            unknown = aspect in ("data", "split") and None in (ours, theirs)  # in older files
            if ours != theirs and not unknown:
                model = baseline["model_name"]
                logger.warning(f"The card leaves out the `{name}` of {model}: its {aspect} is {theirs}, not {ours}.")
                kept[name] = None
    return kept


def _figure(card: dict[str, Any], name: str, values: str, xlabel: str, ylabel: str) -> Figure:
    """A result of this run beside the baseline's, over noise levels or layers."""
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for side, style in ((card, "o-"), (card.get("baseline") or {}, "s--")):
        if result := side.get(name):
            layers = range(1, len(result[values]) + 1)
            errors = [error or 0.0 for error in result.get("radius") or [0.0] * len(layers)]  # none in older cards
            axes.errorbar(
                result.get("gammas") or layers, result[values], errors, fmt=style, capsize=2, label=side["model_name"]
            )
    problem, verdict = card[name].get("problem"), card.get("verdict")
    if problem and verdict and verdict["gamma"] == card[name]["gamma"]:
        draw_asked(axes, problem, verdict["asked"])
    if card[name].get("gamma_train"):
        axes.axvline(card[name]["gamma_train"], color="0.8", zorder=0)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    return figure


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def hub_id(name: str | None) -> str | None:
    """`name` if it may be an id on the Hub; `None` for a folder of this machine or of another."""
    if not name or os.path.isdir(name):
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def listed(value: str | list[str] | None) -> list[str] | None:
    """The names in `value` as a list; `None` without any."""
    # `TrainingSummary` gives None for a data set in memory.
    return [value] if isinstance(value, str) else [item for item in value or [] if item] or None
