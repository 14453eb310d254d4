"""What `experiments.yaml` says: which ways of training stand side by side in a table. Nothing here runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml


EXPERIMENTS = yaml.safe_load(
    Path(__file__).with_name("experiments.yaml").read_text(encoding="utf-8")
)
ARMS, MODELS, TABLES, SCALES = (
    EXPERIMENTS[name] for name in ("arms", "models", "tables", "scales")
)


@dataclass(frozen=True)
class Way:
    """A way of training, to be repeated over seeds.

    Attributes:
        model, data, arm (`str`): names of `experiments.yaml`.
        gamma (`float`): training level; 0 for the arm "erm".
        layers (`int`, *optional*): depth, where it can be chosen.
        changes (tuple of pairs): settings of its own, as of an ablation.
    """

    model: str
    data: str
    arm: str
    gamma: float
    layers: int | None = None
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def command(self) -> str:
        return MODELS[self.model]["command"]

    @property
    def setting(self) -> str:
        """The model with its depth, on its data."""
        return f"{self.data}-{self.model}" + ("" if self.layers is None else f"-{self.layers}")

    @property
    def name(self) -> str:
        """Its folder below that of all runs."""
        return f"{self.setting}/{self.arm}-gamma{self.gamma:g}" + "".join(
            f"-{k}-{v}" for k, v in self.changes
        )


@dataclass(frozen=True)
class Panel:
    """Ways of training that are compared with the first of them, each under the name of its row."""

    name: str
    ways: dict[str, Way]

    def has(self, word: str) -> bool:
        """Whether its name has this in it as one or more whole parts: gamma0 is no part of ...-gamma0.15."""
        return f"-{word}-" in f"-{self.name}-"


def panels(table: str, scale: dict[str, Any], arms: Sequence[str] = tuple(ARMS)) -> Iterator[Panel]:
    """The panels of a table at a scale: one for each setting and training level."""
    spec = TABLES[table]
    for model in dict.fromkeys(scale["stand_ins"].get(name, name) for name in spec["models"]):
        of_command, depths = scale[MODELS[model]["command"]], scale["depths"].get(model, [None])
        levels, data = (
            of_command["gammas"],
            [name for name in of_command["data"] if name in MODELS[model]["recipes"]],
        )
        ways = [(arm, {}) for arm in arms]
        if "ways" in spec:
            ways, depths, levels = spec["ways"], depths[-1:], levels[-1:]
            data = [name for name in data if name in spec["data"]]
        for layers, gamma, name in product(depths, levels, data):
            rows = {}
            for arm, changes in ways:
                arm = "erm" if gamma == 0 and arm == "erm+noise" else arm  # which it then is
                row = ", ".join(
                    [arm, *(f"{setting} {value:g}" for setting, value in changes.items())]
                )
                rows[row] = Way(
                    model, name, arm, 0.0 if arm == "erm" else gamma, layers, tuple(changes.items())
                )
            ending = f"-{table}" if "ways" in spec else ""
            yield Panel(f"{next(iter(rows.values())).setting}-gamma{gamma:g}{ending}", rows)


def searched(way: Way, scale: dict[str, Any]) -> Way:
    """The way whose search gives the settings of `way`: itself, or one for all levels and depths (appendix B.2)."""
    of_command, depths = scale[way.command], scale["depths"].get(way.model, [None])
    if of_command["one_search"]:
        gamma = 0.0 if way.arm == "erm" else of_command["gammas"][-1]
        way = replace(way, gamma=gamma, layers=depths[min(1, len(depths) - 1)])
    return replace(way, changes=())
