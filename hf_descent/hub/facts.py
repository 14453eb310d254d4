"""Gathers the facts of a run from its folder, and writes the model card and its figures.

[`collect`] returns plain values, which are kept as `model_card.json`; [`~hub.render.render`] makes the card from them.
The trainer writes both when it pushes a model or saves a checkpoint. `hf-descent card RUN` adds later measurements.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, logging

from ..configs import upper_level
from ..early_exit import ConfidenceReport, ExitProfile, LayerSetProfile
from ..evaluation import Certificate, LayerProfile, NoiseCurve
from ..evaluation.comparison import Run
from ..evaluation.noise_curves import SUMMARIES
from ..evaluation.scoring import Result
from ..extras import is_installed
from ..files import atomic_write, find_json, plain
from ..loading import ADAPTER, no_model_in
from ..runs import RunFolder
from .render import PAPER, TAGS, render


logger = logging.get_logger(__name__)

# Prefixes of the class names in `hf_descent.models`.
OWN_MODELS = ("LinearReadoutFor", "UTFor", "DustFor", "ViTForDenoising")
RESULTS: dict[str, type[Result]] = {  # by the names of their files
    "noise_curve": NoiseCurve,
    "layer_profile": LayerProfile,
    "verdict": Certificate,
    "exit_profile": ExitProfile,
    "confidence_exit": ConfidenceReport,
    "layer_sets": LayerSetProfile,
}
# Results that a custom readout has measured, if there is one.
MEASURED_BY_READOUT = (
    "evaluation", "split", "noise_curve", "layer_profile", "verdict",
)  # fmt: skip
# Facts that people give, kept when the model is trained again. The rest of a card belongs to one training.
GIVEN = (
    "model_name", "repo_id", "base_model", "datasets", "test_data", "language", "license", "tags", "pipeline_tag",
    "limits",
)  # fmt: skip
# Version 0.2 measured drafts by the first layers, and wrote code for `generate` that made them.
OLD_RESULT = "speculation_profile"
OLD_FILES = ("custom_generate/generate.py", "custom_generate/requirements.txt")


def collect(folder: str | Path, **facts: Any) -> dict[str, Any]:
    """Gather what is known of a run, in plain JSON values, from its `model_card.json`, its result files, and `facts`.

    A result whose file is gone is left out, even if the card had it.

    Args:
        folder (`str` or `Path`): the folder of the run.
        facts: of a trainer, or `GIVEN` by people; they replace what was known, except those that are `None`.
            `datasets` are those trained on, `limits` sentences. `readout` is the name of the function that measured
            in place of the model's own head, or "".

    ValueError if the folder holds no model, or a file of it cannot be read.
    """
    folder = Path(folder).absolute()  # a name on the Hub is no folder
    run = RunFolder(folder)
    config = find_json(str(folder), CONFIG_NAME)
    adapter = find_json(str(folder), ADAPTER)
    has_model = bool(config or adapter)
    # TRL's trainers ask before they save a model.
    if not has_model and not facts.get("architecture"):
        raise no_model_in(str(folder))

    measured_by = facts.pop("readout", None)

    card = _model_facts(run, folder, config, adapter, facts)
    card.update(_evaluation(run))
    card.update(_results(run, card["architecture"]))
    if "noise_curve" in card and card.get("evaluation"):
        card["evaluation"] = _with_newer(card["evaluation"], card["noise_curve"])

    # The saved model does not have what was measured by a function that is not saved. `exit` cuts, and measures, the
    # model's own head.
    card["readout"] = run.summary.get("readout") if measured_by is None else measured_by
    if card["readout"]:
        logger.warning(
            f"The readout `{card['readout']}` is not saved with the model: the card gives no number that it measured."
        )
        for name in MEASURED_BY_READOUT:
            card.pop(name, None)

    return plain(card)


def _model_facts(
    run: RunFolder,
    folder: Path,
    config: Mapping[str, Any],
    adapter: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The facts about the model and its training, without measurements."""
    summary = run.summary
    card = {
        "model_name": folder.resolve().name,
        "architecture": summary.get("model", "AutoModel"),
        "objective": summary.get("objective", "erm"),
        "settings": summary.get("arguments"),
        "versions": summary.get("versions"),
        "tags": TAGS,
        "paper": PAPER,
    }
    if config.get("architectures"):
        card["architecture"] = config["architectures"][0]

    known = _known(run, folder)
    for source in (known, facts):
        card.update((name, value) for name, value in source.items() if value is not None)

    if summary.get("versions"):
        card["versions"] = summary["versions"]

    card["tags"] = list(dict.fromkeys([*known.get("tags", []), *card["tags"]]))
    card["library_name"] = "transformers"
    if adapter:
        card["library_name"] = "peft"

    card["needs_package"] = card["architecture"].startswith(OWN_MODELS)
    card["has_tokenizer"] = (folder / "tokenizer_config.json").is_file()
    base = adapter.get("base_model_name_or_path")
    if not base:
        base = summary.get("encoder")
    if hub_id(base) and not facts.get("base_model"):
        card["base_model"] = base

    # `base_model` names the encoder; this may be a folder of the machine.
    card["descent"] = {name: value for name, value in summary.items() if name != "encoder"}
    return card


def _known(run: RunFolder, folder: Path) -> dict[str, Any]:
    """The facts without results in the card of this training, and what people gave for the card of any training."""
    left_out = (*RESULTS, OLD_RESULT, "baseline", "benchmark", "evaluated")
    known = {name: value for name, value in run.read(run.CARD).items() if name not in left_out}
    of_people = find_json(str(folder), run.CARD)
    known.update({name: value for name, value in of_people.items() if name in GIVEN})
    return known


def _evaluation(run: RunFolder) -> dict[str, Any]:
    """The metrics of the last evaluation that has a file, and may be of the rows of the layer profile. They are not
    from `all_results.json`, to which every training in the folder adds."""
    found = {}
    for prefix, split in (("eval", "validation"), ("validation", "validation"), ("test", "test")):
        results = run.read(f"{prefix}_results.json")
        if not results:
            continue
        if not _is_of_profile(results, prefix, run.read("layer_profile.json")):
            # What the card said of them before does not hold any more.
            found.setdefault("evaluation", None)
            found.setdefault("split", None)
            continue

        found["split"] = split
        found["evaluation"] = {
            name: value for name, value in results.items() if name.startswith(f"{prefix}_")
        }

    return found


def _is_of_profile(results: Mapping[str, Any], prefix: str, profile: Mapping[str, Any]) -> bool:
    """Whether metrics may be of the same rows as the layer profile, if there is one; `hf-descent evaluate` may have
    taken other rows since."""
    losses = profile.get("losses")
    if not losses:
        return True
    loss = results.get(f"{prefix}_layer_loss_{len(losses)}")
    return not loss or math.isclose(loss, losses[-1], rel_tol=3e-3)


def _results(run: RunFolder, architecture: str) -> dict[str, Any]:
    """What a card shows of each result. For a denoiser it is at the noise of its training: without noise its input is
    the answer, so that it meets nothing."""
    level = None
    if architecture.endswith("Denoising"):
        level = upper_level(run.summary.get("noise_gamma"))

    shown = {}
    for name, kind in RESULTS.items():
        for result in run.results(kind, f"{name}*" if level else name):
            if level is None or getattr(result, "gamma", level) == level:
                shown[name] = _shown(result)
                # Version 0.1 wrote no verdict; today's is of the same data.
                if name == "layer_profile" and result.problem:
                    shown["verdict"] = _shown(result.certificate())

    return shown


def _with_newer(evaluation: Mapping[str, Any], curve: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an `evaluation`, with those of noise from a `curve`: `evaluate` may have taken other levels
    since."""
    newer = dict.fromkeys(f"{curve['metric']}_{name}" for name in SUMMARIES)
    newer.update(curve["values"])
    return {name: newer.get(name.split("_", 1)[-1], value) for name, value in evaluation.items()}


def _save_figures(run: Run, groups: dict[str, list[Run]], folder: Path) -> list[str]:
    """Draw the measurements of a run; returns the names of the files."""
    from ..evaluation.plots import plot_curves, plot_layers, save_figure

    files = []
    if run.profiles:
        files += save_figure(plot_layers(groups), folder, "layers")
    if run.curve is not None and max(run.curve.gammas) > 0:
        files += save_figure(plot_curves(groups), folder, "noise")
    return [file for file in files if file.endswith(".png")]


def write_card(folder: str | Path, **facts: Any) -> dict[str, Any]:
    """Write `model_card.json`, and `README.md` with its figures.

    Takes the arguments of [`collect`], and returns its values.
    """
    card = collect(folder, **facts)
    folder = Path(folder)
    run = Run.load(str(folder), needs_curve=False)
    card["figures"] = []
    if is_installed("matplotlib") and not card["readout"]:
        card["figures"] = _save_figures(run, {card["model_name"]: [run]}, folder)

    # Both texts are made before any is written, so that a card that fails leaves the old one.
    contents = {RunFolder.CARD: json.dumps(card, indent=2) + "\n", "README.md": str(render(card))}
    for name in OLD_FILES:
        (folder / name).unlink(missing_ok=True)

    for name, content in contents.items():
        with atomic_write(folder / name) as file:
            file.write(content)

    return card


def _shown(result: Result) -> dict[str, Any]:
    """What a card shows of a result: its table, and the values that its text and the Hub's metadata need."""
    shown = {"text": str(result)}
    match result:
        case NoiseCurve():
            values = result.to_dict()
            shown["metric"] = result.metric
            shown["values"] = {
                name: value for name, value in values.items() if not name.endswith("_radius")
            }
        case LayerProfile():
            shown["gamma"] = result.gamma
        case Certificate():
            shown["gamma"] = result.gamma
            shown["data_name"] = result.data_name
            shown["items"] = result.items
            shown["last_loss"] = float(result.losses[-1])
            shown["headline"] = result.headline
            rows = zip(result.rows, result.reached, result.verdicts)
            shown["rows"] = [
                {"name": name, "reached": float(reached), "verdict": verdict}
                for name, reached, verdict in rows
            ]
        case ExitProfile():
            shown["exit_layer"] = result.shown()
    return shown


def hub_id(name: str | None) -> str | None:
    """`name` if it may be an id on the Hub; `None` for a folder of this machine or of another."""
    if not name or os.path.isdir(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    return name


def listed(value: str | list[str] | None) -> list[str] | None:
    """The names in `value` as a list; `None` if there are none, as in `TrainingSummary` for a data set in memory."""
    if isinstance(value, str):
        return [value]
    if not value or not any(value):
        return None
    return [name for name in value if name]
