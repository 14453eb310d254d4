"""Layerwise descent training for HuggingFace transformers: every layer lowers the task loss, read by one shared head.

CONTRIBUTING.md has an order to read the modules in.
"""

import importlib
from typing import TYPE_CHECKING

from .extras import extra_needed


__version__ = "0.2.0"

_EXPORTS = {
    "DescentConfig": "configs",
    "DescentObjective": "training.objective",
    "DescentProblem": "constraints.problem",
    "DescentTrainer": "trainer",
    "EmbeddingNoise": "noise.embedding_noise",
    "Multipliers": "constraints.multipliers",
    "SFTDescentConfig": "sft_config",
    "SFTDescentTrainer": "sft_trainer",
    "Seq2SeqDescentConfig": "configs",
    "Seq2SeqDescentTrainer": "seq2seq_trainer",
    "hp_space": "training.search",
    "layer_logits": "readout.replay",
    "layer_losses": "losses.layerwise",
    "layer_profile": "evaluation",
    "noise_curve": "evaluation",
}
__all__ = list(_EXPORTS)

if TYPE_CHECKING:
    from .configs import DescentConfig as DescentConfig
    from .configs import Seq2SeqDescentConfig as Seq2SeqDescentConfig
    from .constraints.multipliers import Multipliers as Multipliers
    from .constraints.problem import DescentProblem as DescentProblem
    from .evaluation import layer_profile as layer_profile
    from .evaluation import noise_curve as noise_curve
    from .losses.layerwise import layer_losses as layer_losses
    from .noise.embedding_noise import EmbeddingNoise as EmbeddingNoise
    from .readout.replay import layer_logits as layer_logits
    from .seq2seq_trainer import Seq2SeqDescentTrainer as Seq2SeqDescentTrainer
    from .sft_config import SFTDescentConfig as SFTDescentConfig
    from .sft_trainer import SFTDescentTrainer as SFTDescentTrainer
    from .trainer import DescentTrainer as DescentTrainer
    from .training.objective import DescentObjective as DescentObjective
    from .training.search import hp_space as hp_space


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra_needed(f"`{name}`"):
        module = importlib.import_module(f".{_EXPORTS[name]}", __name__)
    return getattr(module, name)


def __dir__():
    return [*globals(), *_EXPORTS]
