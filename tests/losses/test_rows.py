"""The losses of rows: those of the model on each row by itself, at every layer, for every kind of task."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny.data import classification_data, language_data
from tiny.models import bert, llama, spread
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForTokenClassification,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)
from transformers.trainer_pt_utils import LabelSmoother

from hf_descent import layer_losses
from hf_descent.losses.layerwise import find_layer_losses
from hf_descent.losses.task import TaskLoss
from hf_descent.models import UTConfig, UTForVideoDenoising
from hf_descent.readout.replay import evaluating


SMALL = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.randint(4, 36, (6, 10), generator=torch.Generator().manual_seed(0))
TAGS = torch.randint(3, (6, 10), generator=torch.Generator().manual_seed(1))
TAGS[2, 3:] = -100
ENDS = {
    "start_positions": torch.tensor([1, 2, 3, 4, 5, 6]),
    "end_positions": torch.tensor([2, 3, 9, 4, 7, 8]),
}


def denoiser():
    torch.manual_seed(0)
    return UTForVideoDenoising(UTConfig(hidden_size=16, num_hidden_layers=2, attention_step=0.5))


def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def own(model_class, **settings):
    torch.manual_seed(0)
    return spread(model_class(BertConfig(**SMALL, **settings)))


CASES = {
    "classes": (lambda: spread(bert()), default_data_collator(classification_data(6))),
    "several labels": (
        lambda: spread(bert(problem_type="multi_label_classification")),
        {"input_ids": IDS, "labels": TAGS[:, :3].clamp(0, 1).float()},
    ),
    "numbers": (
        lambda: spread(bert(num_labels=1)),
        {"input_ids": IDS, "labels": torch.linspace(0, 1, 6)},
    ),
    "tags": (lambda: own(BertForTokenClassification, num_labels=3), {"input_ids": IDS, "labels": TAGS}),
    "answers": (lambda: own(BertForQuestionAnswering), {"input_ids": IDS, **ENDS}),
    "choices": (
        lambda: own(BertForMultipleChoice),
        {"input_ids": IDS.view(3, 2, 10), "labels": torch.tensor([0, 1, 1])},
    ),
    "texts": (lambda: spread(llama()), default_data_collator(language_data(6, ragged=False))),
    "answers to texts": (t5, {"input_ids": IDS, "labels": TAGS + 4 * (TAGS >= 0)}),
    "images": (
        denoiser,
        {"pixel_values": (frames := torch.rand(6, 4, 16)), "labels": frames / 2},
    ),
}  # fmt: skip


def measured(model, batch, **settings):
    task = TaskLoss.probe(model, batch, loss_fn=settings.pop("loss_fn", None))
    with evaluating(model):
        layers = find_layer_losses(model, batch, task, **settings)
        return layers, layers.evaluation_losses(model, batch, keep_logits=False)


@pytest.mark.parametrize("case", CASES)
def test_losses_of_rows_are_those_of_the_model_on_each_alone(case):
    make, batch = CASES[case]
    model = make().eval()
    _, found = measured(model, batch)
    rows = len(next(iter(batch.values())))
    assert bool(found.is_split) and len(found.rows) == rows
    for row, sums in enumerate(found.rows):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        with evaluating(model):
            expected = layer_losses(model, alone)
        torch.testing.assert_close(sums[:-1] / sums[-1], expected.float(), rtol=2e-4, atol=1e-5)
    total = found.rows.sum(0)
    torch.testing.assert_close(total[:-1] / total[-1], found.means, rtol=1e-5, atol=1e-6)
    assert total[-1] == found.items


def scaled(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"]
    return (logits.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]).square().mean()


def contrastive(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"] @ outputs["logits"].t(), torch.arange(len(labels)))


def across_rows(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].t(), torch.arange(3))  # fails on less than three rows


@pytest.mark.parametrize("across", [contrastive, across_rows])
def test_a_custom_loss_is_called_on_each_row_and_one_across_rows_makes_the_batch_a_row(across):
    model, (_, batch) = spread(bert()).eval(), CASES["classes"]
    layers, found = measured(model, batch, loss_fn=scaled)
    assert layers.chance_loss is None and bool(found.is_split) and len(found.rows) == 6
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits, batch["labels"], reduction="none").square()
    torch.testing.assert_close(found.rows[:, -2], expected, rtol=1e-4, atol=1e-6)

    layers, found = measured(model, batch, loss_fn=across)
    assert not found.is_split
    rows = found.rows[found.rows[:, -1] > 0]
    torch.testing.assert_close(rows, torch.cat([6 * found.means, torch.tensor([6.0])])[None])
    with evaluating(model):  # and is not tried again
        again = layers.evaluation_losses(model, batch)
    assert len(again.rows) == 1 and not again.is_split


def test_smoothed_labels_are_split():
    model, (_, batch) = spread(bert()).eval(), CASES["classes"]
    _, found = measured(model, batch, loss_fn=LabelSmoother(0.1))
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = F.cross_entropy(logits, batch["labels"], reduction="none", label_smoothing=0.1)
    torch.testing.assert_close(found.rows[:, -2], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("needs_logits", [False, True])  # in tiles, and replayed
def test_packed_texts_are_as_many_rows_as_documents(needs_logits):
    model = spread(llama()).eval()
    ids = torch.randint(4, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]])
    labels = ids.clone()
    labels[:, [0, 4]] = -100  # which no token of its document predicts
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    _, found = measured(model, batch, needs_logits=needs_logits)
    assert found.rows[:, -1].tolist() == [3, 7]
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions).logits[0, :-1]
    losses = F.cross_entropy(logits, labels[0, 1:], reduction="none")
    expected = torch.stack([losses[:4].sum(), losses[4:].sum()])
    torch.testing.assert_close(found.rows[:, -2], expected, rtol=1e-4, atol=1e-5)


def test_a_sample_of_the_tokens_is_unbiased_row_by_row():
    """Its mean over many draws is the sum over all tokens of a row; rows of one draw add up to its losses."""
    model = spread(llama(num_layers=3)).eval()
    batch = default_data_collator(language_data(4, ragged=False))
    task = TaskLoss.probe(model, batch)
    with evaluating(model):
        layers = find_layer_losses(model, batch, task, token_fraction=0.5)
        whole = layers.evaluation_losses(model, batch).rows
        draws = [layers.evaluation_losses(model, batch, key=(draw,)) for draw in range(300)]
    for draw in draws[:5]:
        total = draw.rows.sum(0)
        torch.testing.assert_close(total[:-1] / total[-1], draw.means, rtol=1e-4, atol=1e-5)
    rows = torch.stack([draw.rows for draw in draws])
    error = rows.std(0) / np.sqrt(300)
    assert ((rows.mean(0) - whole).abs() <= 4 * error + 1e-4).all()
    torch.testing.assert_close(rows.mean(0)[:, -2:], whole[:, -2:], rtol=1e-4, atol=1e-4)
