"""Sequence-to-sequence training with layerwise descent constraints: `Seq2SeqTrainer`, every decoder layer read."""

from transformers import Seq2SeqTrainer

from .configs import Seq2SeqDescentConfig
from .trainer import DescentMixin


class Seq2SeqDescentTrainer(DescentMixin, Seq2SeqTrainer):
    """[`~transformers.Seq2SeqTrainer`] whose decoder lowers the token loss with every layer (arXiv 2601.17257).

    With `predict_with_generate=True`, `evaluate` and `predict` score what the whole model generates. They measure the
    losses of all layers, too, under teacher forcing.

    It takes the arguments of [`~transformers.Seq2SeqTrainer`], and `readout`, `layer_loss_fn` and `dual_dataset` as
    [`DescentTrainer`] does, and raises the same errors. Other training arguments get the defaults of
    [`Seq2SeqDescentConfig`].
    `recipes/examples/seq2seq.py` is a complete script.
    """

    config_class = Seq2SeqDescentConfig
