"""Arguments of [`SFTDescentTrainer`]; apart from `configs.py`, since they need TRL."""

from dataclasses import dataclass

from trl import SFTConfig

from .compat import CheckpointingArguments, UnchunkedLoss
from .configs import DescentArguments


@dataclass
class SFTDescentConfig(DescentArguments, CheckpointingArguments, UnchunkedLoss, SFTConfig):
    """Arguments of [`SFTDescentTrainer`]: [`~trl.SFTConfig`] and the following."""
