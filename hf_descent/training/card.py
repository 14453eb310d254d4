"""What a trainer knows of its run that no file in the run's folder says, for the model card."""

from typing import Any

from transformers import Trainer
from transformers.modelcard import TrainingSummary

from ..hub.push import hub_id, listed
from ..readout.stack import inner_model
from ..runs import training_arguments


def card_facts(trainer: Trainer, given: dict[str, Any], trained: bool) -> dict[str, Any]:
    """Facts for [`write_card`]: of the trainer, and those that `create_model_card` was `given`. The settings are the
    model's only where this trainer `trained` it."""
    if "dataset_name" in given:
        given["dataset"] = given.pop("dataset_name")
    tags = dict.fromkeys([*(listed(given.pop("tags", None)) or []), *type(trainer)._tag_names])
    summary = TrainingSummary.from_trainer(trainer, tags=list(tags), **given)
    # Each of a dict of data sets is logged by itself, under its own name.
    history = [
        entry
        for entry in trainer.state.log_history
        if any(name.endswith("_runtime") for name in entry)
    ]
    evaluations = [entry for entry in history if any(name.startswith("eval_") for name in entry)]
    # Training may end by loading the best model, which was evaluated at a step of its own.
    loaded = trainer.args.load_best_model_at_end and history and "train_runtime" in history[-1]
    best = trainer.state.best_global_step if loaded else None
    last = [entry for entry in evaluations if entry["step"] == (best or evaluations[-1]["step"])]
    return {
        "model_name": summary.model_name,
        "repo_id": trainer.hub_model_id,
        "base_model": hub_id(summary.finetuned_from),
        "datasets": listed(summary.dataset),
        "language": summary.language,
        "license": summary.license,
        "tags": summary.tags,
        "pipeline_tag": (listed(summary.tasks) or [None])[0],
        "architecture": type(inner_model(trainer.model)).__name__,
        "objective": trainer.args.objective if trained else None,
        "settings": training_arguments(trainer.args) if trained else None,
        "paper": type(trainer)._paper,
        "evaluation": {name: value for entry in last for name, value in entry.items()} or None,
    }
