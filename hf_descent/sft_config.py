"""Arguments of [`SFTDescentTrainer`]. They need TRL, so they are in a module of their own."""

from dataclasses import dataclass
from typing import ClassVar

from trl import SFTConfig

from .compat import CheckpointingArguments, UnchunkedLoss
from .configs import DescentArguments, DualSettings


@dataclass
class SFTDescentConfig(DescentArguments, CheckpointingArguments, UnchunkedLoss, SFTConfig):
    """Arguments of [`SFTDescentTrainer`]: [`~trl.SFTConfig`] and the following."""

    # Early layers of a language model begin far above the loss of guessing. Small multipliers are enough to move them,
    # and large ones throw the last layer off (docs/starting_guide.md).
    dual_defaults: ClassVar[DualSettings] = DualSettings(dual_learning_rate=0.0002)
