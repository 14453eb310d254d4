"""What the folder of one trained model holds of its results."""

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .configs import upper_level
from .constraints.objectives import UNCONSTRAINED
from .constraints.state import SUMMARY_NAME, is_stale
from .evaluation.profile import LayerProfile
from .evaluation.robustness import NoiseCurve
from .files import find_json


# Of a run's summary, beside its arguments.
TRAINED = ("model", "parameters", "train_rows", "pooling", "encoder", "readout")


@dataclass
class Run:
    """One trained model's results.

    Attributes:
        folder (`str`): where they were read.
        curve ([`NoiseCurve`]): its `noise_curve.json`.
        profiles (`dict[float, LayerProfile]`): noise level -> that `layer_profile*.json`.
        summary (`dict`): its `descent_config.json`; empty where there is none.
        history (`list[dict]`): the log of its `trainer_state.json`.
    """

    folder: str
    curve: NoiseCurve
    profiles: dict[float, LayerProfile] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: str, curve: str = "noise_curve") -> "Run":
        """Reads a run's folder; ValueError where it holds no curve of that name, or one of a former training."""
        path, summary = os.path.join(folder, f"{curve}.json"), find_json(folder, SUMMARY_NAME)
        if not os.path.isfile(path) or is_stale(path, summary):
            found = f"a {curve}.json older than its model" if os.path.isfile(path) else f"no {curve}.json"
            raise ValueError(f"{folder} holds {found}; run `hf-descent evaluate {folder} --config RECIPE`.")
        files = glob.glob(os.path.join(glob.escape(folder), "layer_profile*.json"))
        profiles = [LayerProfile.from_json(file) for file in files if not is_stale(file, summary)]
        return cls(
            folder,
            NoiseCurve.from_json(path),
            {profile.gamma: profile for profile in profiles},
            summary,
            find_json(folder, "trainer_state.json").get("log_history", []),
        )

    @property
    def seed(self) -> int | None:
        """The seed of the training, where its summary has it."""
        return self.summary.get("arguments", {}).get("seed")

    @property
    def feasible(self) -> bool | None:
        """Whether the constraints hold on the held-out rows at the level of training, where they were imposed; `None`
        where there were none, or without a profile at that level."""
        if self.summary.get("objective") in UNCONSTRAINED:
            return None
        profile = self.profiles.get(self.gamma_train or 0.0)
        return None if profile is None else profile.feasible

    @property
    def gamma_train(self) -> float | None:
        """The (largest) level of the training noise, also where the curve is of another perturbation."""
        return upper_level(self.summary.get("noise_gamma", self.curve.gamma_train))

    @property
    def settings(self) -> dict[str, Any]:
        """What it was trained with, but for the seed, the levels at which it was tested after training, the folder of
        frozen multipliers, which every seed has of its own, and where the encoder's folder lay."""
        arguments = self.summary.get("arguments", {})
        settings = {name: value for name, value in arguments.items() if name not in ("seed", "eval_gammas")}
        if settings.get("data_seed") == arguments.get("seed"):  # as where it is not given
            settings.pop("data_seed", None)
        if isinstance(settings.get("fixed_multipliers"), str):
            del settings["fixed_multipliers"]
        settings |= {name: self.summary[name] for name in TRAINED if name in self.summary}
        if os.path.isabs(settings.get("encoder", "")):  # seeds of one training may start from anywhere
            settings["encoder"] = os.path.basename(os.path.normpath(settings["encoder"]))
        return settings | self.summary.get("command", {})

    @property
    def arm(self) -> str:
        """A name for the way of training: objective and noise."""
        arguments = self.summary.get("arguments", {})
        if not arguments:
            return os.path.basename(os.path.normpath(self.folder))
        name = "neftune" if arguments.get("neftune_noise_alpha") else arguments["objective"]
        gamma = arguments.get("noise_gamma")
        return f"{name}+noise {gamma}" if upper_level(gamma) else name


def shared_levels(groups: Mapping[str, Sequence[Run]]) -> list[float]:
    """The noise levels, in increasing order, at which all runs of all groups have a profile of their layers."""
    return sorted(set.intersection(*(set(run.profiles) for runs in groups.values() for run in runs)))


def descent_level(groups: Mapping[str, Sequence[Run]]) -> float | None:
    """The shared level at which the runs' descent is compared: the greatest at which one was trained, or the least."""
    levels = shared_levels(groups)
    trained = {run.gamma_train for runs in groups.values() for run in runs}
    return max((gamma for gamma in levels if gamma in trained), default=min(levels, default=None))
