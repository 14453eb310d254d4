"""The sizes of the experiments: models, data, noise levels, and what is set beside the recipes. Nothing here runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


TEXT = ("imdb", "mnli", "rt_polarity")
VIDEO = ("avenue", "shanghaitech", "ucsd", "clips")
# Arm -> its recipe file and objective. All but "erm" train under the noise of their panel. The first is the baseline:
# the paper's unconstrained models are trained under the same noise as its constrained ones.
ARMS = {
    "erm+noise": ("noise", "erm"),
    "erm": ("erm", "erm"),
    "deep_supervision": ("noise", "deep_supervision"),
    "hinge": ("descent", "hinge"),
    "descent": ("descent", "descent"),
}


@dataclass(frozen=True)
class Model:
    """One of the paper's models.

    Attributes:
        command (`str`): the command that trains it.
        recipes (mapping): data set -> folder of its recipe.
        learning_rates (`tuple[float, float]`): least and greatest that are tried.
        depth (`str`, *optional*): the flag of its depth, where it can be chosen.
        settings (mapping): what is set beside the recipe at either scale.
    """

    command: str
    recipes: Mapping[str, str]
    learning_rates: tuple[float, float]
    depth: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


DISTILBERT = {"imdb": "imdb-distilbert", "rt_polarity": "imdb-distilbert", "mnli": "mnli-distilbert"}
MODELS = {
    "distilbert": Model("classify", DISTILBERT, (1e-5, 3e-4)),
    "roberta": Model("classify", {"imdb": "imdb-roberta", "mnli": "mnli-roberta"}, (3e-6, 3e-5)),
    # Layers from scratch on DistilBERT's token embeddings (appendix B.3), so at other learning rates than its own, at
    # which embeddings that were trained would outgrow the noise.
    "ut-text": Model(
        "classify", DISTILBERT, (1e-4, 3e-3), "unrolled_layers", {"pooling": "head", "freeze_embeddings": True}
    ),
    "ut": Model("denoise", dict.fromkeys(VIDEO, "video-ut"), (3e-5, 1e-3), "num_layers"),
    "dust": Model("denoise", dict.fromkeys(VIDEO, "video-dust"), (1e-4, 3e-3), "num_layers"),
    "vit": Model("denoise", dict.fromkeys(VIDEO, "video-vit"), (5e-6, 1e-4)),
    "llama": Model("sft", {"alpaca": "alpaca-llama3.1-8b"}, (3e-5, 3e-4)),
    "stories260k": Model("sft", {"alpaca": "alpaca-stories260k"}, (3e-4, 3e-3)),
}


@dataclass(frozen=True)
class Scale:
    """One size of all experiments; mappings are by command unless said otherwise.

    Attributes:
        text, video (`tuple[str, ...]`): data sets. Figures of a single one take the first.
        text_models (`tuple[str, ...]`): what table 4 has.
        stand_ins (mapping): model of the paper -> model of `MODELS` that stands in for it.
        depths (mapping): model -> depths in the tables.
        gammas (mapping): training levels; figures of a single one take the last.
        eval_gammas (mapping): test levels.
        draws (`int`): draws of the noise at each test level.
        settings (mapping): what is set beside the recipes.
        search (mapping): for each arm what is searched beside the learning rate, with its range.
        one_search (`tuple[str, ...]`): commands that are tuned at the last training level and one depth for all.
        needs_paths (`bool`): whether models and data come from the command line alone.
        answers (`int`, *optional*): instructions that are answered; all where not given.
    """

    text: tuple[str, ...]
    video: tuple[str, ...]
    text_models: tuple[str, ...]
    depths: Mapping[str, tuple[int, ...]]
    gammas: Mapping[str, tuple[float, ...]]
    eval_gammas: Mapping[str, tuple[float, ...]]
    draws: int
    settings: Mapping[str, Mapping[str, Any]]
    search: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]
    one_search: tuple[str, ...]
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    needs_paths: bool = False
    answers: int | None = None


def _search(penalty: tuple[float, float], **problem: tuple[float, float]) -> dict[str, dict[str, tuple[float, float]]]:
    """The arms' search spaces; the hinge has the problem but no dual variables, so no dual rate and no resilience."""
    static = {name: values for name, values in problem.items() if name not in ("dual_learning_rate", "resilience")}
    return {
        "erm+noise": {},
        "erm": {},
        "deep_supervision": {"penalty_coefficient": (0.03, 1.0)},
        "hinge": {"penalty_coefficient": penalty, **static},
        "descent": problem,
    }


DUAL = {"dual_learning_rate": (1e-3, 1e-1), "resilience": (1e-4, 1e-1)}
# Losses of the denoisers are in units of the noisy input's own, so that they are of the order of 1 at either scale.
VIDEO_SEARCH = _search((0.1, 10.0), descent_alpha=(0.02, 0.3), initial_loss_bound=(0.5, 2.0), **DUAL)
VIDEO_GAMMAS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0)
# The training levels of the paper's tables 3 and 4.
TRAINED = {"classify": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "denoise": (0.0, 0.09, 0.11, 0.13, 0.15)}
# Setting -> its values in the ablations (figures 5, 14 and 15).
ABLATIONS = {"descent_alpha": (0.01, 0.02, 0.05, 0.1, 0.2), "dual_learning_rate": (0.002, 0.02, 0.2)}
RESUMABLE = {"save_strategy": "steps", "save_steps": 0.25, "save_total_limit": 1}

SCALES = {
    "gpu": Scale(
        text=("imdb", "mnli"),
        video=("ucsd", "avenue", "shanghaitech"),
        text_models=("ut-text", "distilbert", "roberta"),
        depths={"ut-text": (3, 5, 7, 9), "ut": (3, 5, 7), "dust": (3, 5, 7)},
        gammas=TRAINED | {"sft": (1.5,)},
        eval_gammas={
            "classify": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0),  # AUCs up to 1.87 need 2 at least
            "denoise": VIDEO_GAMMAS,
            "sft": (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
        },
        draws=3,
        settings={"classify": {}, "denoise": {}, "sft": {}},
        search={
            # What the paper tuned (appendix B.1); the ranges are ours.
            "classify": _search((0.1, 10.0), descent_alpha=(0.01, 0.3), initial_loss_bound=(0.5, 4.0), **DUAL),
            "denoise": VIDEO_SEARCH,
            "sft": _search((0.1, 10.0), descent_alpha=(0.003, 0.1), initial_loss_bound=(2.0, 12.0), **DUAL),
        },
        one_search=("denoise", "sft"),
    ),
    "cpu": Scale(
        text=("imdb", "mnli", "rt_polarity"),
        video=("clips",),
        text_models=("ut-text", "distilbert"),
        stand_ins={"roberta": "distilbert", "llama": "stories260k"},
        depths={"ut-text": (3,), "ut": (3, 5, 7), "dust": (3, 5, 7, 10)},
        gammas=TRAINED | {"sft": (0.5,)},
        eval_gammas={
            "classify": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0),
            "denoise": VIDEO_GAMMAS,
            "sft": (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0),
        },
        draws=1,
        settings={
            "classify": RESUMABLE
            | {
                "descent_alpha": "auto",
                "eval_strategy": "no",
                "initial_loss_bound": "auto",
                "max_eval_samples": 2000,
                "max_seq_length": 64,
                "max_steps": 400,
                "negative_weights": "clip",
                "pooling": "mean_linear",
            },
            "denoise": RESUMABLE | {"max_eval_samples": 1000, "max_steps": 1500, "split_by": "time"},
            "sft": RESUMABLE,
        },
        search={
            # The schedule is fitted ("auto"), so that five trials are not spread over five dimensions.
            "classify": _search((0.1, 10.0), descent_strength=(0.25, 1.0), **DUAL),
            "denoise": VIDEO_SEARCH,
            "sft": _search((0.1, 10.0), descent_strength=(0.25, 1.0), **DUAL),
        },
        one_search=("classify", "denoise", "sft"),
        needs_paths=True,
        answers=8,
    ),
}
