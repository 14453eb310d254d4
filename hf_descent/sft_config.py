"""Arguments of [`SFTDescentTrainer`]; apart from `configs.py`, since they need TRL."""

import inspect
from dataclasses import dataclass

from .configs import DescentArguments


try:
    from trl import SFTConfig
except ModuleNotFoundError as error:
    raise ImportError("Supervised fine-tuning needs TRL: `pip install hf_descent[sft]`.") from error


@dataclass
class SFTDescentConfig(DescentArguments, SFTConfig):
    __doc__ = "Arguments of [`SFTDescentTrainer`]: [`~trl.SFTConfig`] and the following.\n\n" + inspect.cleandoc(
        DescentArguments.__doc__ or ""
    )
