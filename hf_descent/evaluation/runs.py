"""What the folder of one trained model holds of its results."""

import json
import os
from dataclasses import dataclass, field
from typing import Any

from ..descent_state import SUMMARY_NAME, find_json
from .profile import LayerProfile
from .robustness import NoiseCurve


TRAINED = ("model", "parameters", "train_rows")  # of a run's summary, beside its arguments


@dataclass
class Run:
    """One trained model's results.

    Attributes:
        folder (`str`): where they were read.
        curve ([`NoiseCurve`]): its `noise_curve.json`.
        profile ([`LayerProfile`], *optional*): its `layer_profile.json`.
        noisy_profiles (`list[LayerProfile]`): its `layer_profile_gamma_*.json`, by increasing level.
        summary (`dict`): its `descent_config.json`; empty where there is none.
        history (`list[dict]`): the log of its `trainer_state.json`.
    """

    folder: str
    curve: NoiseCurve
    profile: LayerProfile | None = None
    noisy_profiles: list[LayerProfile] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def load(cls, folder: str, curve: str = "noise_curve") -> "Run":
        """Reads a run's folder; ValueError where it holds no curve of that name."""
        path = os.path.join(folder, f"{curve}.json")
        if not os.path.isfile(path):
            raise ValueError(f"{folder} holds no {curve}.json; run `hf-descent evaluate {folder} --config RECIPE`.")
        profiles = {name: os.path.join(folder, name) for name in os.listdir(folder)}
        clean = profiles.get("layer_profile.json")
        noisy = [path for name, path in profiles.items() if name.startswith("layer_profile_gamma_")]
        state = os.path.join(folder, "trainer_state.json")
        history = []
        if os.path.isfile(state):
            with open(state, encoding="utf-8") as file:
                history = json.load(file)["log_history"]
        return cls(
            folder,
            NoiseCurve.from_json(path),
            None if clean is None else LayerProfile.from_json(clean),
            sorted((LayerProfile.from_json(path) for path in noisy), key=lambda profile: profile.gamma),
            find_json(folder, SUMMARY_NAME),
            history,
        )

    @property
    def seed(self) -> int | None:
        return self.summary.get("arguments", {}).get("seed")

    @property
    def feasible(self) -> bool | None:
        """Whether the constraints hold on the held-out rows at the level of training, where they were imposed; `None`
        without a problem, or without a profile at that level."""
        profiles = [profile for profile in [self.profile, *self.noisy_profiles] if profile is not None]
        found = [profile.feasible for profile in profiles if profile.gamma == (self.curve.gamma_train or 0.0)]
        return found[0] if found else None

    @property
    def settings(self) -> dict[str, Any]:
        """What it was trained with, but for the seed, the levels at which it was tested after training, and the folder
        of frozen multipliers, which every seed has of its own."""
        arguments = self.summary.get("arguments", {})
        settings = {name: value for name, value in arguments.items() if name not in ("seed", "eval_gammas")}
        if isinstance(settings.get("fixed_multipliers"), str):
            del settings["fixed_multipliers"]
        return settings | {name: self.summary[name] for name in TRAINED if name in self.summary}

    @property
    def arm(self) -> str:
        """A name for the way of training: objective and noise."""
        arguments = self.summary.get("arguments", {})
        if not arguments:
            return os.path.basename(os.path.normpath(self.folder))
        name = "neftune" if arguments.get("neftune_noise_alpha") else arguments["objective"]
        gamma = arguments.get("noise_gamma") or 0
        return name if gamma in (0, [0, 0]) else f"{name}+noise {gamma}"
