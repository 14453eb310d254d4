"""Finds what a verdict compares the last layer with, also in a process that has not trained the model."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import has_length

from ..evaluation import LayerProfile
from ..evaluation.profiles import fingerprint_of
from ..evaluation.side_by_side import of_same_data, plain_profiles
from ..readout.stack import unwrapped
from ..runs import RunFolder, training_arguments
from .chance import drawing_apart
from .checkpoints import on_first_process
from .evaluation import EarlierLosses, model_and_settings
from .evaluation_sets import rows_of
from .origin import Origin, fingerprint_of_rows, fingerprint_of_weights, scoring_of
from .preparation import loaded_from
from .references import references_of
from .run import DescentRun


def earlier_losses(
    trainer: Trainer,
    run: DescentRun,
    rows: Any,
    prepare: Callable,
    readout: Callable | None,
) -> EarlierLosses:
    """What a verdict on the data set `rows` compares f_L with.

    Training reads f_L on its evaluation sets, at its start and at the end of the warm-up. If `rows` are one of these
    sets, the verdict compares row by row, else only means. If this trainer has not trained the model, the means come
    from the run that the model was loaded from, if that run read and scored the model as this trainer does.

    Other sets are recognised by their content, for which `prepare(rows)` may have to tokenise them.
    """
    references = run.references
    if references.has_read(rows):
        args = trainer.args
        readings = references.of_process(rows, args.process_index, args.world_size)
        return EarlierLosses(references.unpaired(rows), readings)

    if references.times():
        data = fingerprint_of_rows(trainer, prepare(rows))
        return EarlierLosses(references.unpaired(data=data))

    if run.has_started:
        return EarlierLosses()
    summary = RunFolder(loaded_from(trainer.model)).summary
    if "last_layer_losses" not in summary:
        return EarlierLosses()
    data = fingerprint_of_rows(trainer, prepare(rows))
    return EarlierLosses(references_of(summary, data, scoring_of(trainer, readout)))


def plain_profiles_of(
    trainer: Trainer, origin: Mapping[str, str | None] | None, readout: Callable | None = None
) -> list[LayerProfile]:
    """The layer profiles of the plain run that the trainer's model is compared with; every process calls it.

    If this trainer has trained the model, from `origin`, it is the plain run in `output_dir`. Else see
    [`_profiles_beside_loaded`]. A plain run counts only if it is known to be trained as the run was, and read and
    scored as this trainer does.
    """
    args = trainer.args
    if args.objective_class.is_plain:
        return []
    if origin is None:
        find = partial(_profiles_beside_loaded, trainer, readout)
    else:
        trained = {"arguments": training_arguments(args), "origin": origin}
        find = partial(plain_profiles, summary=trained)
    return on_first_process(args, find, args.output_dir)


def _profiles_beside_loaded(
    trainer: Trainer, readout: Callable | None, output_dir: str
) -> list[LayerProfile]:
    """The profiles of the plain run beside the run that made a model, if this trainer did not train it.

    The first of these folders that has some: the one that the model was loaded from; the one above, since that may
    have been a checkpoint; `output_dir`, if the run there has the weights of this model.
    """
    scoring = scoring_of(trainer, readout)

    loaded = loaded_from(trainer.model)
    if os.path.isdir(loaded):
        summary = _with_scoring(RunFolder(loaded).summary, scoring)
        for folder in (loaded, os.path.dirname(os.path.abspath(loaded))):
            profiles = plain_profiles(folder, summary)
            if profiles:
                return profiles

    summary = RunFolder(output_dir).summary
    weights = fingerprint_of_weights(unwrapped(trainer.model))
    if weights is None or summary.get("weights") != weights:
        return []
    return plain_profiles(output_dir, _with_scoring(summary, scoring))


def _with_scoring(summary: Mapping[str, Any], scoring: Origin) -> Mapping[str, Any]:
    """The summary of a run as if it had read and scored its model by `scoring`."""
    if not summary.get("origin"):
        return summary
    return {**summary, "origin": {**summary["origin"], **scoring}}


def plain_profile_on(
    trainer: Trainer,
    dataset: Any,
    batches_of: Callable,
    origin: Mapping[str, str | None] | None,
    readout: Callable | None,
) -> LayerProfile | None:
    """The profile of the plain run (see [`plain_profiles_of`]), without noise, on the data that `evaluate(dataset)`
    takes. `None` if it was not measured on these very rows.

    To find out, the rows of `batches_of(dataset)` are read once, without the model.
    """
    rows = rows_of(trainer.eval_dataset, dataset)
    is_one_set = rows is not None and not isinstance(rows, dict)
    if not is_one_set or not has_length(rows):
        return None

    profiles = plain_profiles_of(trainer, origin, readout)
    if not profiles:
        return None
    return _profile_of_same_rows(trainer, profiles, batches_of(dataset), readout)


def plain_profile_beside(
    trainer: Trainer,
    profile: LayerProfile,
    rows: Any,
    origin: Mapping[str, str | None] | None,
    readout: Callable | None,
) -> LayerProfile | None:
    """The profile of the plain run (see [`plain_profiles_of`]) on the data and at the noise level of `profile`, which
    is of `rows`. `None` if it was not measured there."""
    profiles = plain_profiles_of(trainer, origin, readout)
    plain = of_same_data(profiles, profile)
    if plain is not None:
        return plain

    if profile.gamma or not has_length(rows):
        return None
    # Perhaps it was measured on the same rows in batches of another size.
    return _profile_of_same_rows(trainer, profiles, rows, readout)


def _profile_of_same_rows(
    trainer: Trainer, profiles: list[LayerProfile], rows: Any, readout: Callable | None
) -> LayerProfile | None:
    """The profile without noise that was measured on these very rows, whatever its batch size."""
    without_noise = [profile for profile in profiles if not profile.gamma]
    if not without_noise:
        return None

    model, settings = model_and_settings(trainer, readout)
    for profile in without_noise:
        if profile.batch_size is not None:  # former versions did not save it
            settings["batch_size"] = profile.batch_size
        with drawing_apart(trainer, model):
            data = fingerprint_of(model, rows, **settings)
        if profile.data == data:
            return profile

    return None
