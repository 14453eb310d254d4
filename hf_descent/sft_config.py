"""Arguments of [`SFTDescentTrainer`]; apart from `configs.py`, since they need TRL."""

from dataclasses import dataclass
from typing import ClassVar

from trl import SFTConfig

from .compat import CheckpointingArguments, UnchunkedLoss
from .configs import DescentArguments, DualSettings


@dataclass
class SFTDescentConfig(DescentArguments, CheckpointingArguments, UnchunkedLoss, SFTConfig):
    """Arguments of [`SFTDescentTrainer`]: [`~trl.SFTConfig`] and the following."""

    # Early layers of a language model begin far above the loss of guessing, so that small multipliers move them, and
    # large ones throw the last layer off (docs/starting_guide.md).
    dual_defaults: ClassVar[DualSettings] = DualSettings(dual_learning_rate=0.0002)
