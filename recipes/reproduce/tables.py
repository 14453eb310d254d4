"""The paper's tables and figures: which groups of runs stand side by side in each. Nothing here runs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .scales import ABLATIONS, MODELS, Model, Scale


@dataclass(frozen=True)
class Way:
    """A way of training, to be repeated over seeds.

    Attributes:
        model, data, arm (`str`): names of `scales`.
        gamma (`float`): training level; 0 for the arm "erm".
        layers (`int`, *optional*): depth, where it can be chosen.
        overrides (tuple of pairs): settings that an ablation fixes.
    """

    model: str
    data: str
    arm: str
    gamma: float
    layers: int | None = None
    overrides: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> Model:
        return MODELS[self.model]

    @property
    def name(self) -> str:
        """Its folder below that of all runs."""
        depth = "" if self.layers is None else f"-{self.layers}"
        changes = "".join(f"-{name}-{value}" for name, value in self.overrides)
        return f"{self.data}-{self.model}{depth}/{self.arm}-gamma{self.gamma:g}{changes}"


@dataclass(frozen=True)
class Panel:
    """Groups of runs that are compared with the first of them; of a group's several ways the one that is best on
    validation rows stands for it."""

    name: str
    groups: dict[str, tuple[Way, ...]]

    def has(self, word: str) -> bool:
        """Whether its name has this in it as one or more whole parts: gamma0 is no part of ...-gamma0.15."""
        return f"-{word}-" in f"-{self.name}-"


@dataclass(frozen=True)
class Table:
    """A table or figure.

    Attributes:
        title (`str`): what the paper shows in it.
        panels (function): (scale, arms) -> its panels.
        shows (`str`): "runs" (trained, evaluated and compared), "settings" (the search alone) or "answers" (also
            completions).
    """

    title: str
    panels: Callable[[Scale, Sequence[str]], Iterable[Panel]]
    shows: str = "runs"


def way(scale: Scale, model: str, data: str, arm: str, gamma: float | None = None, layers: int | None = None) -> Way:
    """A way of training at a scale: at its last training level and the model's second depth where not given."""
    model = scale.stand_ins.get(model, model)
    levels, depths = scale.gammas[MODELS[model].command], scale.depths.get(model)
    gamma = levels[-1] if gamma is None else gamma
    layers = depths[min(1, len(depths) - 1)] if depths and layers is None else layers
    arm = "erm" if arm == "erm+noise" and gamma == 0 else arm
    return Way(model, data, arm, 0.0 if arm == "erm" else gamma, layers)


def searched(scale: Scale, found: Way) -> Way:
    """The way whose search gives the settings of `found`: itself, or one for all levels and depths (appendix B.2)."""
    if found.spec.command not in scale.one_search:
        return replace(found, overrides=())
    return way(scale, found.model, found.data, found.arm)


def side_by_side(scale, arms, model, data, gamma=None, layers=None) -> Panel:
    """All arms in one setting; without noise the baseline is plain ERM, which "erm+noise" then is as well."""
    found = [way(scale, model, data, arm, gamma, layers) for arm in arms]
    groups = {each.arm if gamma == 0 else arm: (each,) for arm, each in zip(arms, found)}
    found = found[0]
    depth = "" if found.layers is None else f"-{found.layers}"
    level = scale.gammas[found.spec.command][-1] if gamma is None else gamma
    return Panel(f"{data}-{found.model}{depth}-gamma{level:g}", groups)


def best_depths(scale, arms, model, data) -> Panel:
    depths = scale.depths.get(model, (None,))
    groups = {arm: tuple(way(scale, model, data, arm, layers=layers) for layers in depths) for arm in arms}
    return Panel(f"{data}-{model}-best-depth", groups)


def by_depth(scale, arms, model, data) -> Iterator[Panel]:
    """One panel for each arm, its groups the depths."""
    for arm in arms:
        groups = {f"{layers} layers": (way(scale, model, data, arm, layers=layers),) for layers in scale.depths[model]}
        yield Panel(f"{data}-{model}-{arm}-by-depth", groups)


def by_level(scale, arms, model, data) -> Iterator[Panel]:
    """One panel for each arm that trains under noise, its groups the training levels."""
    for arm in [arm for arm in arms if arm != "erm"]:
        found = [way(scale, model, data, arm, gamma) for gamma in scale.gammas["classify"]]
        groups = {f"trained at {each.gamma:g}": (each,) for each in found}
        yield Panel(f"{data}-{found[0].model}-{arm}-by-level", groups)


def ablation(scale, setting) -> Iterator[Panel]:
    """Descent with one setting fixed at several values, beside the baseline."""
    base = way(scale, "roberta", "imdb", "descent")
    groups = {"erm+noise": (replace(base, arm="erm+noise"),)}
    groups |= {f"{setting} {value:g}": (replace(base, overrides=((setting, value),)),) for value in ABLATIONS[setting]}
    yield Panel(f"imdb-{base.model}-{setting}", groups)


def relaxation(scale, arms) -> Iterator[Panel]:
    base = way(scale, "roberta", "imdb", "descent")
    groups = {"erm+noise": (replace(base, arm="erm+noise"),), "descent": (base,)}
    groups["descent, not relaxed"] = (replace(base, overrides=(("resilience", 0.0),)),)
    yield Panel(f"imdb-{base.model}-relaxation", groups)


def infeasible(scale, arms) -> Iterator[Panel]:
    """The deepest DUST beside one whose constraints it cannot meet."""
    base = way(scale, "dust", scale.video[-1], "descent", layers=scale.depths["dust"][-1])
    groups = {"erm+noise": (replace(base, arm="erm+noise"),), "descent": (base,)}
    groups["descent, infeasible"] = (replace(base, overrides=(("descent_alpha", 0.6), ("resilience", 0.001))),)
    yield Panel(f"{base.data}-dust-{base.layers}-infeasible", groups)


def all_video(scale, arms) -> Iterator[Panel]:
    for model in ("dust", "ut", "vit"):
        for layers in scale.depths.get(model, (None,)):
            for gamma in scale.gammas["denoise"]:
                for data in scale.video:
                    yield side_by_side(scale, arms, model, data, gamma, layers)


def all_text(scale, arms) -> Iterator[Panel]:
    for model in scale.text_models:
        for layers in scale.depths.get(model, (None,)):
            for gamma in scale.gammas["classify"]:
                for data in [data for data in scale.text if data in MODELS[model].recipes]:
                    yield side_by_side(scale, arms, model, data, gamma, layers)


def last_level_text(scale, arms) -> Iterator[Panel]:
    for model in scale.text_models:
        for data in [data for data in scale.text if data in MODELS[model].recipes]:
            yield side_by_side(scale, arms, model, data)


def _three(scale, arms, data) -> Iterator[Panel]:
    for model in ("ut", "vit", "dust"):
        yield side_by_side(scale, arms, model, data)


TABLES = {
    "table1": Table("Settings found by the search, video", lambda s, a: _three(s, a, s.video[0]), "settings"),
    "table2": Table("Settings found by the search, text", last_level_text, "settings"),
    "table3": Table("Mean RMSE over the test levels, video", all_video),
    "table4": Table("Area under accuracy against the test level, text", all_text),
    "table5": Table(
        "Settings found by the search, Llama", lambda s, a: [side_by_side(s, a, "llama", "alpaca")], "settings"
    ),
    "figure1": Table(
        "Layer losses and accuracy under noise, RoBERTa on IMDb",
        lambda s, a: [side_by_side(s, a, "roberta", "imdb")],
    ),
    "figure2": Table(
        "RMSE against the test level, the best depth of each model",
        lambda s, a: [best_depths(s, a, model, data) for model in ("dust", "ut", "vit") for data in s.video],
    ),
    "figure3": Table(
        "RMSE against the test level by depth",
        lambda s, a: [panel for model in ("ut", "dust") for panel in by_depth(s, a, model, s.video[0])],
    ),
    "figure4": Table("Accuracy against the test level", last_level_text),
    "figure5": Table("Ablation of alpha, RoBERTa on IMDb", lambda s, a: ablation(s, "descent_alpha")),
    "figure6": Table(
        "Layer losses and token accuracy under noise, Llama", lambda s, a: [side_by_side(s, a, "llama", "alpaca")]
    ),
    "figure7": Table(
        "Layer losses of DUST by depth",
        lambda s, a: [side_by_side(s, a, "dust", s.video[0], layers=layers) for layers in s.depths["dust"]],
    ),
    "figure8": Table(
        "Three trade-offs between in- and out-of-distribution RMSE", lambda s, a: _three(s, a, s.video[-1])
    ),
    "figure9": Table(
        "Effect of the training level, DistilBERT on IMDb", lambda s, a: by_level(s, a, "distilbert", "imdb")
    ),
    "figure10": Table(
        "Effect of the training level, UT and DistilBERT on MNLI",
        lambda s, a: [panel for model in ("ut-text", "distilbert") for panel in by_level(s, a, model, "mnli")],
    ),
    "figure11": Table("An infeasible model", infeasible),
    "figure12": Table("Ratios of consecutive layer losses of samples, with and without relaxation", relaxation),
    "figure13": Table("Layer losses in all settings", lambda s, a: [*all_text(s, a), *all_video(s, a)]),
    "figure14": Table("Accuracy at three test levels against alpha", lambda s, a: ablation(s, "descent_alpha")),
    "figure15": Table(
        "Accuracy at three test levels against the dual rate",
        lambda s, a: ablation(s, "dual_learning_rate"),
    ),
    "figure16": Table(
        "Completions under noise, Llama", lambda s, a: [side_by_side(s, a, "llama", "alpaca")], "answers"
    ),
}
TABLES["sft"] = replace(TABLES["figure16"], title="Fine-tuning on instructions: token accuracy and completions")
