"""Arguments of [`Seq2SeqDescentTrainer`]."""

import inspect
from dataclasses import dataclass

from transformers import Seq2SeqTrainingArguments

from .configs import DescentArguments


@dataclass
class Seq2SeqDescentConfig(DescentArguments, Seq2SeqTrainingArguments):
    __doc__ = (
        "Arguments of [`Seq2SeqDescentTrainer`]: [`~transformers.Seq2SeqTrainingArguments`] and the following.\n\n"
        + inspect.cleandoc(DescentArguments.__doc__ or "")
    )
