"""Facts for the model card that the trainer knows, and that no file in the run's folder has."""

from collections.abc import Callable
from typing import Any

from transformers import Trainer
from transformers.modelcard import TrainingSummary
from transformers.utils import logging

from ..evaluation.scoring import name_of
from ..files import read_json
from ..hub.facts import hub_id, listed
from ..readout.stack import inner_model
from ..runs import RunFolder, training_arguments


logger = logging.get_logger(__name__)

OF_TRAINING = ("train_", "epoch", "total_flos")  # prefixes of the training metrics of Trainer


def card_facts(
    trainer: Trainer, given: dict[str, Any], trained: bool, readout: Callable | None
) -> dict[str, Any]:
    """Facts for [`write_card`]: about the trainer, and those that `create_model_card` was `given`.

    The settings are listed only if this trainer `trained` the model. A `readout` is the function that measured it in
    place of its own head.
    """
    if "dataset_name" in given:
        given["dataset"] = given.pop("dataset_name")

    tags = listed(given.pop("tags", None))
    if tags is None:
        tags = []
    tags = dict.fromkeys([*tags, *type(trainer)._tag_names])

    summary = TrainingSummary.from_trainer(trainer, tags=list(tags), **given)
    tasks = listed(summary.tasks)

    return {
        "model_name": summary.model_name,
        "repo_id": trainer.hub_model_id,
        "base_model": hub_id(summary.finetuned_from),
        "datasets": listed(summary.dataset),
        "language": summary.language,
        "license": summary.license,
        "tags": summary.tags,
        "pipeline_tag": tasks[0] if tasks else None,
        "architecture": type(inner_model(trainer.model)).__name__,
        "objective": trainer.args.objective if trained else None,
        "settings": training_arguments(trainer.args) if trained else None,
        "paper": type(trainer)._paper,
        "evaluation": _evaluation(trainer),
        "readout": "" if readout is None else name_of(readout),
    }


def check_no_results(run: RunFolder, readout: Callable) -> None:
    """ValueError if a folder to push holds measurements by a `readout`, which is not saved with the model."""
    found = [path for pattern in run.EVALUATIONS for path in run.path.glob(pattern)]
    for path in run.path.glob("*_results.json"):
        if any(not name.startswith(OF_TRAINING) for name in read_json(path)):
            found.append(path)
    if found:
        names = ", ".join(sorted(path.name for path in found))
        raise ValueError(
            f"{run.path} holds what the readout `{name_of(readout)}` measured ({names}), which the pushed model, "
            "under its own head, does not have: move these files elsewhere, or make the readout a part of the model."
        )


def _evaluation(trainer: Trainer) -> dict[str, Any] | None:
    """The numbers of the last evaluation, if it measured the weights that the model has now; else `None`."""
    # If there is a dict of data sets, each set is logged by itself, under its own name.
    history = [entry for entry in trainer.state.log_history if _has(entry, suffix="_runtime")]
    evaluations = [entry for entry in history if _has(entry, prefix="eval_")]
    if not evaluations:
        return None
    step = trainer.state.global_step
    # Training may end by loading the best model, which was evaluated at a step of its own.
    has_trained = "train_runtime" in history[-1]
    if trainer.args.load_best_model_at_end and has_trained and trainer.state.best_global_step:
        step = trainer.state.best_global_step

    numbers = {}
    for entry in evaluations:
        if entry["step"] == step:
            numbers.update(entry)

    if numbers:
        return numbers
    logger.warning(
        f"The last evaluation was after step {evaluations[-1]['step']}, and the model is that after step {step}: "
        "the card leaves its numbers out. Call `evaluate()` before `create_model_card()` or `push_to_hub()`."
    )
    return None


def _has(entry: dict[str, Any], prefix: str = "", suffix: str = "") -> bool:
    """Whether an entry of the log has a number with such a name."""
    return any(name.startswith(prefix) and name.endswith(suffix) for name in entry)
