"""The tuned lens: every layer read through an affine map of its own in front of the model's head.

The maps learn to predict what the last layer predicts, and the model stays as it is. A layer that is bad by the head
alone may know nothing, or know it in a form that the head cannot read. The maps tell the two apart.

Source: Belrose et al. (2023), "Eliciting Latent Predictions from Transformers with the Tuned Lens", arXiv 2303.08112.
Their maps stand before the final norm; these behind it, as the exit head "affine", so that they fold into the head.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, get_linear_schedule_with_warmup

from ..evaluation.scoring import Evaluation
from ..losses.layerwise import DEFAULT_TOKEN_FRACTION, LARGE_VOCABULARY
from ..readout.head import logged_tail
from ..readout.replay import Readout, evaluating, probing
from ..readout.tape import assigned, off_in_replay, switched_off
from .divergence import HeadInput
from .heads import AffineMap, reading_linear
from .partial import PartialForward
from .predictions import PredictionReader, of_tokens


# AdamW's steps are about as large as its rate, and a map adds up as many of them as its input is wide: wide models
# take a lower rate.
HIGHEST_RATE = 0.01
NARROW = 64


class TunedLens:
    """A map for each layer below the last, in front of the linear layer that reads hidden states behind the layers.

    `maps[l - 1]` is the map of layer l, x + A x + b, at first the identity. ValueError if no linear layer follows the
    layers.
    """

    def __init__(self, model: PreTrainedModel, inputs: Mapping[str, Any]):
        self.stack = Readout.probe(model, inputs).stack
        with probing(model):
            _, _, calls = logged_tail(model, self.stack, inputs)
        self.model = model
        self.linear = reading_linear(model, [call.module for call in calls])
        width = self.linear.in_features
        layers = range(1, self.stack.num_layers)
        self.maps = nn.ModuleList(AffineMap(width, self.linear.weight) for _ in layers)

    def layer_outputs(
        self, inputs: Mapping[str, Any], read: Callable[[Callable], Any] | None = None
    ) -> Iterator[Any]:
        """For each layer 1..L, the outputs of `model(**inputs)` if it stopped there, through the map of the layer.

        `read(call)`, if given, makes the outputs from a call of the model, which takes the inputs.
        """
        forward = PartialForward(self.model, self.stack)
        off = off_in_replay(self.model, self.stack)
        state = None  # the output of the layer before
        with switched_off(off), forward.attached():
            for layer in range(1, self.stack.num_layers + 1):
                call = partial(forward, layer, layer, state)
                with self._mapped(layer):
                    outputs = call(**inputs) if read is None else read(call)
                state = forward.output
                yield outputs

    @contextmanager
    def _mapped(self, layer: int) -> Iterator[None]:
        """Within it, the input of the linear layer goes through the map of `layer`; the last layer has none."""
        if layer > len(self.maps):
            yield
            return
        layer_map = self.maps[layer - 1]
        with self.linear.register_forward_pre_hook(lambda module, args: (layer_map(args[0]),)):
            yield


def fit_lens(
    model: PreTrainedModel,
    dataset: Dataset | list,
    steps: int = 400,
    learning_rate: float | None = None,
    seed: int = 0,
    **settings,
) -> TunedLens:
    """Train the maps by the KL divergence from the last layer's predictions, on labelled examples of training.

    Args:
        model (`PreTrainedModel`): a classifier or a language model, on its device; it is left as it is.
        dataset (`Dataset` or list): labelled examples. Labels only say what is read.
        steps, learning_rate: settings of AdamW. The rate rises for a twentieth of the steps, then falls to 0. Its
            default is 0.01 up to a width of 64, and less for wider models.
        seed: seed of the order of the rows.
        settings: `batch_size`, `processing_class`, `data_collator` and the other arguments of
            [`~evaluation.scoring.Evaluation`].

    ValueError if no linear layer follows the layers, a row has several labels, or the data set has no rows.
    """
    evaluation = Evaluation(model, dataset, **settings)
    evaluation.dataset = Subset(dataset, _order(dataset, steps * evaluation.batch_size, seed))
    frozen = assigned([(parameter, "requires_grad") for parameter in model.parameters()], False)
    fitted = None
    with evaluating(model), frozen, torch.enable_grad():
        for _, inputs in evaluation.batches("Fitting the lens"):
            if fitted is None:
                fitted = TunedLens(model, inputs)
                if learning_rate is None:
                    learning_rate = HIGHEST_RATE * min(1, NARROW / fitted.linear.in_features)
                reader = PredictionReader.probe(model, inputs, evaluation.label_names)
                optimizer = torch.optim.AdamW(
                    fitted.maps.parameters(), learning_rate, weight_decay=0.0
                )
                schedule = get_linear_schedule_with_warmup(optimizer, steps // 20, steps)
            optimizer.zero_grad()
            _divergence(fitted, reader, inputs).backward()
            optimizer.step()
            schedule.step()
    return fitted


def _order(dataset: Dataset | list, count: int, seed: int) -> list[int]:
    """The numbers of the next `count` rows, in a new order in each pass over the data; ValueError if it has none."""
    if not len(dataset):
        raise ValueError("`dataset` is empty; give labelled examples of training.")
    generator = torch.Generator().manual_seed(seed)
    order = []
    while len(order) < count:
        order += torch.randperm(len(dataset), generator=generator).tolist()
    return order[:count]


def _divergence(
    fitted: TunedLens, reader: PredictionReader, inputs: Mapping[str, Any]
) -> torch.Tensor:
    """The mean divergence of each layer from the last one on a batch, summed over layers."""
    if reader.reads_heads:
        losses = _token_divergences(fitted, reader, inputs)
    else:
        *lower, last = fitted.layer_outputs(inputs)
        losses = [reader.item_divergences(last, outputs, inputs) for outputs in lower]
    return torch.stack([loss.sum() / max(loss.numel(), 1) for loss in losses]).sum()


def _token_divergences(
    fitted: TunedLens, reader: PredictionReader, inputs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The divergence of each token that is read, for each layer below the last, `[tokens]` each. Makes no logits."""
    model = fitted.model
    fraction = 1.0
    if fitted.linear.out_features >= LARGE_VOCABULARY:
        fraction = DEFAULT_TOKEN_FRACTION
    rows, _ = reader.token_rows(inputs, fraction)

    def read(call: Callable) -> HeadInput:
        return of_tokens(model, reader.outputs(model, call, inputs, by_head=True), rows)

    *lower, last = fitted.layer_outputs(inputs, read)
    mapped = [
        HeadInput(layer_map(given.hidden), given.head)
        for layer_map, given in zip(fitted.maps, lower)
    ]
    return [reader.token_divergences(last, short) for short in mapped]
