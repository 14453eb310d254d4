"""Arguments of [`Seq2SeqDescentTrainer`]."""

from dataclasses import dataclass

from transformers import Seq2SeqTrainingArguments

from .configs import DescentArguments


@dataclass
class Seq2SeqDescentConfig(DescentArguments, Seq2SeqTrainingArguments):
    """Arguments of [`Seq2SeqDescentTrainer`]: [`~transformers.Seq2SeqTrainingArguments`] and the following."""
