"""Reads what models of one task predict for a batch, and how far these predictions are from one another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..losses.task import TaskLoss
from ..readout.head import HeadReadout
from ..readout.labels import IGNORE_INDEX, are_token_labels, labels_of, with_decoder_inputs
from ..readout.stack import embeddings, intercepted
from .divergence import HeadInput, divergences, token_divergences


logger = logging.get_logger(__name__)


class PredictionReader:
    """Reads the predictions of a model and of models that are made from it. [`PredictionReader.probe`] makes it.

    Language models are read by their heads where that is possible: in chunks, without the logits of all tokens.
    """

    def __init__(self, task: TaskLoss, tokens: HeadReadout | None):
        self.task = task
        self.reads_heads = tokens is not None
        self._tokens = tokens

    @classmethod
    def probe(
        cls,
        model: nn.Module,
        inputs: Mapping[str, Any],
        label_names: Sequence[str] | None = None,
    ) -> "PredictionReader":
        """Find out on a batch what the labels predict, and whether the logits of all tokens can be avoided; ValueError
        if the batch has no labels."""
        task = TaskLoss.probe(model, inputs, label_names=label_names)
        labels = labels_of(inputs, task.label_names)
        if labels is None:
            raise ValueError(
                f"A batch has the keys {sorted(inputs)} and no labels, which say what is read: add `labels`."
            )

        tokens = None
        if are_token_labels(labels):
            try:
                tokens = HeadReadout.probe(model, task.short(inputs), task.shifts_labels)
            except ValueError as error:
                logger.info(f"The logits of all tokens are made: {error}")
        return cls(task, tokens)

    def outputs(
        self, model: nn.Module, call: Callable, inputs: Mapping[str, Any], by_head: bool
    ) -> Mapping[str, Any]:
        """The outputs of `call(**inputs)`, in which `model` runs.

        With `by_head` they are only the input of its head, "hidden" `[batch, seq, hidden]`, and no logits are made.
        """
        if not by_head:
            return call(**inputs)
        labels = {*self.task.label_names, "labels", "shift_labels"}
        unlabelled = with_decoder_inputs(model, inputs)
        unlabelled = {name: value for name, value in unlabelled.items() if name not in labels}
        with head_input(model) as given:
            call(**unlabelled)
        return given

    def item_divergences(
        self, whole: Mapping[str, Any], short: Mapping[str, Any], inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """KL(whole || short) of each labelled row or token by the outputs of two models, `[items]`. For predicted
        numbers, the squared difference of each. ValueError if a row has several labels."""
        target, labels = self.task.predictions(whole, inputs)
        logits, _ = self.task.predictions(short, inputs)
        model = self.task.model
        problem = getattr(model.config, "problem_type", None)
        if problem == "multi_label_classification":
            raise ValueError(
                f"{type(model).__name__} gives several labels an example, which has no one distribution: it cannot "
                "be healed. Cut it by `keep_layers`, and fine-tune it."
            )
        if labels.is_floating_point():
            return (logits - target).float().square().flatten()
        return divergences(target, logits)[labels != IGNORE_INDEX]

    def token_rows(self, inputs: Mapping[str, Any], fraction: float) -> tuple[torch.Tensor, int]:
        """Which of a batch's `batch * seq` tokens to read, as a share of the labelled ones, and the number of labelled
        tokens."""
        tokens = self._tokens.tokens(inputs, fraction, same=True)
        rows = tokens.rows
        if tokens.samples is not None:
            rows = rows[tokens.samples[0]]
        return rows, len(tokens.rows)

    def token_divergences(self, whole: HeadInput, short: HeadInput) -> torch.Tensor:
        """KL(whole || short) of each token, `[tokens]`."""
        return token_divergences(whole, short, self._tokens.head_loss)


@contextmanager
def head_input(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Within it, the head of a language model makes no logits; "hidden" is its input, `[batch, seq, hidden]`."""
    given = {}

    def record(head, call, hidden):
        given["hidden"] = hidden
        return hidden.new_empty((*hidden.shape[:-2], 0, head.out_features))

    with intercepted([embeddings(model, "output")], record):
        yield given


def of_tokens(
    model: nn.Module, head_inputs: Mapping[str, torch.Tensor], rows: torch.Tensor
) -> HeadInput:
    """The input of the head of `model` for the tokens `rows`."""
    hidden = head_inputs["hidden"].flatten(0, -2).index_select(0, rows)  # [tokens, hidden]
    return HeadInput(hidden, embeddings(model, "output"))
