"""Sequence-to-sequence training with layerwise descent constraints: `Seq2SeqTrainer`, every decoder layer read."""

from transformers import Seq2SeqTrainer

from .configs import Seq2SeqDescentConfig
from .trainer import DescentMixin


class Seq2SeqDescentTrainer(DescentMixin, Seq2SeqTrainer):
    """[`~transformers.Seq2SeqTrainer`] whose decoder lowers the token loss with every layer (arXiv 2601.17257).

    With `predict_with_generate=True`, `evaluate` and `predict` give what the whole model generates, and beside it the
    losses of all layers under teacher forcing, as without it.

    The arguments are those of [`~transformers.Seq2SeqTrainer`], and `readout` and `layer_loss_fn` of
    [`DescentTrainer`]; errors are as there. Other training arguments get the defaults of [`Seq2SeqDescentConfig`].
    `recipes/examples/seq2seq.py` is a complete script.
    """

    config_class = Seq2SeqDescentConfig
