"""Arguments of [`SFTDescentTrainer`]; apart from `configs.py`, since they need TRL."""

import inspect
from dataclasses import dataclass

from trl import SFTConfig

from .configs import DescentArguments


@dataclass
class SFTDescentConfig(DescentArguments, SFTConfig):
    __doc__ = "Arguments of [`SFTDescentTrainer`]: [`~trl.SFTConfig`] and the following.\n\n" + inspect.cleandoc(
        DescentArguments.__doc__ or ""
    )
