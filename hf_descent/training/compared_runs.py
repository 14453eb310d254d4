"""Finds what a verdict compares the last layer with, also in a process that has not trained the model."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import has_length

from ..evaluation import LayerProfile
from ..evaluation.price import Reference
from ..evaluation.profiles import fingerprint_of
from ..evaluation.side_by_side import of_same_data, plain_profiles
from ..readout.stack import unwrapped
from ..runs import RunFolder, training_arguments
from .chance import drawing_apart
from .checkpoints import on_first_process
from .evaluation import settings as evaluation_settings
from .evaluation_sets import rows_of
from .origin import fingerprint_of_rows, fingerprint_of_weights, reading_of
from .preparation import loaded_from
from .references import LastLayerReferences, references_of


def earlier_last_layer(
    trainer: Trainer,
    references: LastLayerReferences,
    rows: Any,
    is_trained: bool,
    readout: Callable | None,
) -> list[Reference]:
    """f_L at earlier times, for a verdict on `rows` that cannot be paired with those that were read then: of this
    training, or of the run that the model was loaded from, where this trainer has not trained it (`is_trained`), and
    reads and scores it as that run did."""
    if references.has_read(rows):
        return references.unpaired(rows)
    if references.times():
        return references.unpaired(data=fingerprint_of_rows(trainer, rows))
    if is_trained:
        return []

    summary = RunFolder(loaded_from(trainer.model)).summary
    if "last_layer_losses" not in summary:
        return []
    data = fingerprint_of_rows(trainer, rows)
    return references_of(summary, data, reading_of(trainer, readout))


def plain_profiles_of(
    trainer: Trainer, origin: Mapping[str, str | None] | None, readout: Callable | None = None
) -> list[LayerProfile]:
    """The layer profiles of the plain run beside the run that the trainer's model is from; all processes call it.

    Where this trainer has trained the model, from `origin`, that is the run in `output_dir`. Else it is the run in the
    folder that the model was loaded from, or one folder above a checkpoint; or the one in `output_dir`, where that has
    the weights of this model. Plain runs that are not known to be trained as the run was, and read and scored as the
    trainer does now, do not count.
    """
    args = trainer.args
    if args.objective_class.is_plain:
        return []
    trained = {"arguments": training_arguments(args), "origin": origin}
    loaded = loaded_from(trainer.model)

    def read_here(summary: Mapping[str, Any]) -> Mapping[str, Any]:
        """The summary of a run as if that had read and scored its model as this trainer does."""
        if not summary.get("origin"):
            return summary
        return {**summary, "origin": {**summary["origin"], **reading_of(trainer, readout)}}

    def profiles(output_dir: str) -> list[LayerProfile]:
        if origin is not None:
            return plain_profiles(output_dir, trained)
        if os.path.isdir(loaded):
            summary = read_here(RunFolder(loaded).summary)
            for folder in (loaded, os.path.dirname(os.path.abspath(loaded))):
                found = plain_profiles(folder, summary)
                if found:
                    return found

        summary = RunFolder(output_dir).summary
        weights = fingerprint_of_weights(unwrapped(trainer.model))
        if weights is None or summary.get("weights") != weights:
            return []
        return plain_profiles(output_dir, read_here(summary))

    return on_first_process(args, profiles, args.output_dir)


def plain_profile_on(
    trainer: Trainer,
    dataset: Any,
    held_out: Callable,
    origin: Mapping[str, str | None] | None,
    readout: Callable | None,
) -> LayerProfile | None:
    """The profile of that plain run on the data that `evaluate(dataset)` takes, without noise; `None` where it was not
    measured on these very rows. The rows are read once, without the model: those of `held_out(dataset)`."""
    rows = rows_of(trainer.eval_dataset, dataset)
    is_one_set = rows is not None and not isinstance(rows, dict)
    if not is_one_set or not has_length(rows):
        return None

    profiles = plain_profiles_of(trainer, origin, readout)
    if not profiles:
        return None
    return _profile_of_same_rows(trainer, profiles, held_out(dataset), readout)


def plain_profile_beside(
    trainer: Trainer,
    profile: LayerProfile,
    rows: Any,
    origin: Mapping[str, str | None] | None,
    readout: Callable | None,
) -> LayerProfile | None:
    """The profile of that plain run on the data and at the noise level of a profile of `rows`; `None` where it was not
    measured there."""
    profiles = plain_profiles_of(trainer, origin, readout)
    plain = of_same_data(profiles, profile)
    if plain is not None:
        return plain

    if profile.gamma or not has_length(rows):
        return None
    return _profile_of_same_rows(trainer, profiles, rows, readout)  # in batches of another size


def _profile_of_same_rows(
    trainer: Trainer, profiles: list[LayerProfile], rows: Any, readout: Callable | None
) -> LayerProfile | None:
    """The profile without noise that is of these very rows, in batches of its own size."""
    without_noise = [profile for profile in profiles if not profile.gamma]
    if not without_noise:
        return None

    model, settings = evaluation_settings(trainer, readout)
    for profile in without_noise:
        if profile.batch_size is not None:  # else of a former version, and perhaps the same as now
            settings["batch_size"] = profile.batch_size
        with drawing_apart(trainer, model):
            data = fingerprint_of(model, rows, **settings)
        if profile.data == data:
            return profile

    return None
