"""Plain and constrained training of one model, measured on the same examples: what the constraints gain and cost."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..configs import DescentArguments
from ..constraints.objectives import objective_class
from ..constraints.problem import DescentProblem
from ..runs import RunFolder
from .certificates import MET, Certificate, plain_reference
from .price import Price, percent, price_of
from .profiles import LayerProfile
from .scoring import format_table


logger = logging.get_logger(__name__)

# The folder of plain training inside a run. Neither Trainer nor `hf-descent card` uploads names that begin with "_".
PLAIN_FOLDER = "_plain"
# Arguments of this package that plain training depends on, too.
OF_THE_INPUT = {"noise_gamma", "noise_sigma"}
# Prefix of the texts that stand for training examples which cannot be compared.
UNREAD = "unread-"
# Name in `descent_config.json` of something that a training starts from -> what to say if another training differs in
# it.
ORIGIN = {
    "weights": "other weights before training",
    "trained": "other parameters to train",
    "rows": "other training examples",
    "readout": "another readout",
    "loss": "another loss",
}


@dataclass
class SideBySide:
    """The layer profiles of a plainly trained model and of another one, on the same data. `print` shows both.

    Attributes:
        plain ([`LayerProfile`]): the profile after plain training.
        trained ([`LayerProfile`]): the profile after training with another objective, from the same start.
        objective (`str`): the other objective.
        seconds (`tuple`): how long plain training and the other took; `None` if that is not known.
        difference (`str`, *optional*): what else is known to have differed in plain training, such as other training
            examples.
    """

    plain: LayerProfile
    trained: LayerProfile
    objective: str = "descent"
    seconds: tuple[float | None, float | None] = (None, None)
    difference: str | None = None

    def __post_init__(self):
        self.trained.check_same_data(self.plain)

    @property
    def price(self) -> float:
        """How far the last layer's loss is above that of plain training, as a share; below 0 if it is lower."""
        return float(self.trained.losses[-1] / self.plain.losses[-1] - 1)

    @property
    def certificate(self) -> Certificate | None:
        """The verdict on the constrained model, with its price; `None` without constraints."""
        if self.trained.problem is None:
            return None
        return self.trained.certificate(plain=self.plain)

    @property
    def plain_certificate(self) -> Certificate | None:
        """The verdict on the plain model, by the constraints of the other model."""
        if self.trained.problem is None:
            return None
        also_selected = self.plain.facts.get("also_selected", False)
        facts = {"also_selected": also_selected, "has_price": False}
        return replace(self.plain, problem=self.trained.problem, facts=facts).certificate()

    @property
    def headline(self) -> str:
        """The verdict in one line; without constraints, the price."""
        verdict = self.certificate
        return f"price {self._price.text}" if verdict is None else verdict.headline

    @property
    def _price(self) -> Price:
        return price_of(self.trained.row_sums, [], plain=plain_reference(self.plain))

    @property
    def tables(self) -> str:
        """The layers of both side by side, and the verdict."""
        lines = [format_table(self._table()), *self._times()]
        if self.difference is not None:
            lines.append(
                f"Plain training had {self.difference}: the price is not that of the constraints alone."
            )
        verdict = self.certificate
        if verdict is None:
            return "\n".join([*lines, f"{self._price}."])
        return "\n".join([*lines, str(verdict), self._plainly(), *self._exits()])

    def __str__(self) -> str:
        return f"{self.tables}\n{self.headline}"

    def _plainly(self) -> str:
        """The sentence that says how many of the constraints plain training meets."""
        verdicts = self.plain_certificate.verdicts
        met = verdicts.count(MET)
        if len(verdicts) == 1:
            return f"Plain training {'meets' if met else 'does not meet'} this constraint."
        return f"Plain training meets {met} of these {len(verdicts)} constraints."

    def _exits(self) -> list[str]:
        """What each layer with a target costs against the whole plain model. The target itself refers to the model's
        own last layer, which has a price."""
        plain = self.plain.losses[-1]
        if not plain > 0:
            return []
        depth = len(self.trained.losses)
        problem = DescentProblem(**self.trained.problem)
        layers = {row.layer for row in problem.rows if row.is_target}
        return [
            f"Cut after layer {layer}, the loss is {percent(self.trained.losses[layer - 1] / plain - 1)} against "
            f"all {depth} layers of plain training."
            for layer in sorted(layers - {depth})
        ]

    def _times(self) -> list[str]:
        """The line about the time of both trainings; empty if one is not known."""
        plain, trained = self.seconds
        if plain is None or trained is None:
            return []
        return [
            f"Training took {trained:.4g} s, plain training {plain:.4g} s ({trained / plain:.2f} times)."
        ]

    def _table(self) -> list[list[str]]:
        metric = self.trained.metric
        objective = self.objective
        table = [["layer", "loss: plain", objective, "change", f"{metric}: plain", objective]]
        columns = zip(
            self.plain.losses, self.trained.losses, self.plain.values, self.trained.values
        )
        for layer, (plain, loss, plain_value, value) in enumerate(columns, start=1):
            change = percent(loss / plain - 1) if plain > 0 else "-"
            numbers = [f"{plain:.4g}", f"{loss:.4g}", change, f"{plain_value:.4g}", f"{value:.4g}"]
            table.append([f"{layer}", *numbers])
        return table


def plain_folder(output_dir: str) -> str:
    """The folder of plain training beside the run in `output_dir`."""
    return os.path.join(output_dir, PLAIN_FOLDER)


def is_plain_folder(output_dir: str) -> bool:
    """Whether a folder is one of plain training beside another run."""
    return os.path.basename(os.path.normpath(output_dir)) == PLAIN_FOLDER


def plain_profiles(folder: str, summary: Mapping[str, Any]) -> list[LayerProfile]:
    """The profiles of the plain run beside the run in `folder`. Empty if there is no such run, or it is not known to
    be trained as the run of `summary` was."""
    plain = RunFolder(plain_folder(folder))
    if not plain.path.is_dir() or not is_plain_run_of(summary, plain):
        return []
    return plain.results(LayerProfile, "layer_profile*")


def is_unread(text: str | None) -> bool:
    """Whether a text of [`ORIGIN`] stands for training examples that cannot be compared."""
    return text is not None and text.startswith(UNREAD)


def is_plain_run_of(summary: Mapping[str, Any], plain: RunFolder) -> bool:
    """Whether a folder is one of plain training with the settings of the run of `summary`, from the same weights and
    on the same rows. If only the settings are the same, the log says what differs."""
    other = plain.summary
    if not differ_in_objective_alone(summary, other):
        return False
    why = unlike(summary.get("origin"), other.get("origin"))
    if why is not None:
        logger.warning_once(f"{plain.path} is not compared with: {why}.")
    return why is None


def unlike(origin: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> str | None:
    """Why two trainings cannot be compared; `None` if they can. `origin` and `other` are what they started from, as in
    `descent_config.json`."""
    if not origin or not other:
        return (
            "what one of the two trainings started from was not recorded, as in earlier versions; "
            "`train_with_plain()` makes both anew"
        )
    another = known_difference(origin, other)
    if another is not None:
        return f"it had {another}"
    for name, another in ORIGIN.items():
        if origin.get(name) is None or origin[name] != other.get(name):
            return f"whether it had {another} is not known"
    return None


def known_difference(
    origin: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> str | None:
    """A known difference of the training of `other` to that of `origin`, in words; `None` if there is none."""
    for name, another in ORIGIN.items():
        texts = {(origin or {}).get(name), (other or {}).get(name)}
        is_known = not any(text is None or is_unread(text) for text in texts)
        if is_known and len(texts) > 1:
            return another
    return None


def plain_profile(
    folder: str, summary: Mapping[str, Any], profile: LayerProfile
) -> LayerProfile | None:
    """The one of [`plain_profiles`] with the data and the noise level of `profile`; `None` if there is none."""
    return of_same_data(plain_profiles(folder, summary), profile)


def of_same_data(others: Iterable[LayerProfile], profile: LayerProfile) -> LayerProfile | None:
    """The one of `others` with the data and the noise level of `profile`; `None` if there is none."""
    for other in others:
        if (other.data, other.gamma) == (profile.data, profile.gamma):
            return other
    return None


def side_by_side(folder: str) -> list[SideBySide]:
    """The profiles in the folder of a run, each beside the profile of its plain run that was measured alike."""
    run = RunFolder(folder)
    pairs = []
    for profile in run.results(LayerProfile, "layer_profile*"):
        plain = plain_profile(folder, run.summary, profile)
        if plain is not None:
            seconds = (seconds_in(plain_folder(folder)), seconds_in(folder))
            pairs.append(SideBySide(plain, profile, run.summary["objective"], seconds))
    return pairs


def seconds_in(folder: str) -> float | None:
    """How long the training of a folder took; `None` if neither its `descent_config.json` nor its
    `trainer_state.json` tells."""
    run = RunFolder(folder)
    if "train_seconds" in run.summary:
        return run.summary["train_seconds"]  # `None` if the training was resumed
    return seconds_of_logs(run.read(TRAINER_STATE_NAME).get("log_history", []))


def seconds_of_logs(logs: Iterable[Mapping[str, Any]]) -> float | None:
    """How long a training took by its logs; `None` if they do not tell."""
    times = [log["train_runtime"] for log in logs if "train_runtime" in log]
    return times[-1] if times else None


def differ_in_objective_alone(summary: Mapping[str, Any], plain: Mapping[str, Any]) -> bool:
    """Whether `plain` is the summary of plain training with the settings of the run of `summary`."""
    own = _as_in_json(summary.get("arguments"))
    other = _as_in_json(plain.get("arguments"))
    if not own or not other or "objective" not in other:
        return False
    if not objective_class(other["objective"]).is_plain:
        return False
    of_constraints = {argument.name for argument in fields(DescentArguments)} - OF_THE_INPUT
    names = (own.keys() | other.keys()) - of_constraints
    return all(own.get(name) == other.get(name) for name in names)


def _as_in_json(arguments: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Arguments as a file has them, with strings as keys and lists for tuples."""
    return json.loads(json.dumps(arguments))
