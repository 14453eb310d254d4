import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import ByPlace
from noisy import Gain
from tiny.data import classification_data, language_data
from tiny.models import VOCAB, bert, llama, spread
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertForQuestionAnswering,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
    default_data_collator,
)

from hf_descent.evaluation import layer_profile, noise_curve
from hf_descent.evaluation.scoring import _hits


def causal_xlnet():
    torch.manual_seed(0)
    return XLNetLMHeadModel(
        XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=16)
    )


def token_classifier(**config):
    """With weights that hit some labels."""
    return BertForTokenClassification(bert(num_layers=2, num_labels=VOCAB, seed=5, **config).config)


def answers():
    return [
        {
            "input_ids": row["input_ids"],
            "start_positions": index - 1,
            "end_positions": 12,
        }  # both ends lie outside
        for index, row in enumerate(language_data(10))
    ]


@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("head", ["the model's", "read out", "of a model without a loss"])
def test_the_scale_of_a_loss_of_ones_own_does_not_tell_which_tokens_are_predicted(scale, head):
    model, data = spread(llama()), language_data(8)

    def scaled(outputs, labels, num_items_in_batch):
        losses = F.cross_entropy(
            outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
        )
        return scale * losses / num_items_in_batch

    def readout(_, hidden, inputs):
        return model.lm_head(model.model.norm(hidden))

    batch = default_data_collator(data)
    with torch.no_grad():
        hits = model(**batch).logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]
    expected = hits.sum() / (batch["labels"][:, 1:] != -100).sum()
    own = layer_profile(model, data)
    found = layer_profile(
        model.model if head == "of a model without a loss" else model, data, layer_loss_fn=scaled,
        label_names=["labels"], readout=None if head == "the model's" else readout,
    )  # fmt: skip
    assert found.values[-1] == pytest.approx(expected.item())
    np.testing.assert_array_equal(found.values, own.values)
    np.testing.assert_allclose(found.losses, scale * own.losses, rtol=1e-5)


def test_clean_level_equals_a_naive_loop_and_stock_evaluation(tmp_path):
    model, data = bert(dropout=0.3), classification_data(60)
    correct = loss = 0.0
    model.eval()
    for row in data:
        outputs = model(**{name: torch.as_tensor(value)[None] for name, value in row.items()})
        correct += float(outputs.logits.argmax() == row["labels"])
        loss += outputs.loss.item()
    model.train()
    result = noise_curve(model, data, [0.0], batch_size=20)  # three equal batches
    assert model.training
    assert result.values[0, 0] == correct / 60
    assert result.losses[0, 0] == pytest.approx(loss / 60, rel=1e-6)
    arguments = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=20, report_to="none", use_cpu=True
    )
    assert result.losses[0, 0] == pytest.approx(
        Trainer(model, arguments).evaluate(data)["eval_loss"], rel=1e-6
    )
    ragged = noise_curve(model, data, [0.0], batch_size=23)
    assert ragged.values[0, 0] == correct / 60
    assert ragged.losses[0, 0] == pytest.approx(loss / 60, rel=1e-6)


@pytest.mark.parametrize("first", [12, 1])
def test_causal_models_are_scored_on_shifted_tokens(first):
    """Also where the first batch has a single token, which nothing predicts."""
    model, data = llama().eval(), language_data(20)
    data[0] = {name: tokens[-first:] for name, tokens in data[0].items()}
    loader = [default_data_collator(rows) for rows in (data[:1], data[1:7], data[7:])]
    result = noise_curve(model, DataLoader(loader, batch_size=None), [0.0])
    correct = count = loss = 0.0
    for row in data:
        logits = model(row["input_ids"][None]).logits[0, :-1].detach()
        target = row["labels"][1:]
        keep = target != -100
        correct += float((logits.argmax(-1) == target)[keep].sum())
        loss += float(F.cross_entropy(logits[keep], target[keep], reduction="sum"))
        count += int(keep.sum())
    assert result.values[0, 0] == pytest.approx(correct / count)
    assert result.losses[0, 0] == pytest.approx(loss / count, rel=1e-6)


@pytest.mark.parametrize("build", [causal_xlnet, token_classifier])
def test_unshifted_token_labels_are_scored_in_place(build):
    model, data = build().eval(), language_data(20)
    result = noise_curve(model, data, [0.0], batch_size=6)
    correct = count = 0
    for row in data:
        logits = model(row["input_ids"][None]).logits[0].detach()
        correct += int((logits.argmax(-1) == row["labels"]).sum())
        count += int((row["labels"] != -100).sum())
    assert result.values[0, 0] == pytest.approx(correct / count)


def test_question_answering_scores_both_positions():
    model, data = (
        BertForQuestionAnswering(bert(num_layers=2, num_labels=2, seed=3).config).eval(),
        answers(),
    )
    result = layer_profile(model, data, batch_size=5)
    hits = []
    for row in data:
        start = max(row["start_positions"], 0)
        hits.append(float(model(row["input_ids"][None]).start_logits.argmax() == start))
    assert result.values[-1] == np.mean(hits)


@pytest.mark.parametrize(
    ("build", "data"), [(bert, classification_data(8)), (token_classifier, language_data(8))]
)
def test_a_model_that_returns_tuples_is_scored_as_one_that_names_its_outputs(build, data):
    """By its config, or as a custom model."""
    models = [build(), build(return_dict=False), ByPlace(build())]
    for evaluate in (layer_profile, partial(noise_curve, gammas=[0.0, 1.0])):
        expected, *results = (evaluate(model, data) for model in models)
        for found in results:
            np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
            np.testing.assert_array_equal(found.values, expected.values)
    assert models[1].config.return_dict is False


def test_rmse_and_own_metrics():
    class Identity(Gain):
        def forward(self, pixel_values, labels=None):
            return {
                "loss": F.mse_loss(pixel_values * self.gain, labels),
                "logits": pixel_values * self.gain,
            }

    images = torch.rand(20, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    data = [{"pixel_values": image, "labels": image} for image in images]
    result = noise_curve(Identity(), data, [0.0, 0.5], metric="rmse", scale=255.0, sigma=0.2)
    assert result.values[0, 0] == 0.0
    np.testing.assert_allclose(result.values[1], 255.0 * 0.5 * 0.2, rtol=0.05)
    np.testing.assert_allclose(result.values[1], 255.0 * np.sqrt(result.losses[1]), rtol=1e-5)

    def absolute_error(logits, labels):
        return (logits - labels).abs().sum(), labels.numel()

    result = noise_curve(Identity(), data, [0.5], metric=absolute_error, sigma=0.2)
    assert result.metric == "absolute_error"
    np.testing.assert_allclose(result.values, 0.5 * 0.2 * math.sqrt(2 / math.pi), rtol=0.05)


@pytest.mark.parametrize("evaluate", [layer_profile, partial(noise_curve, gammas=0)])
def test_whole_labels_of_a_single_logit_are_numbers(evaluate):
    model, data = spread(bert(num_labels=1)), classification_data(count=20, num_labels=5)
    result = evaluate(model, data, metric="rmse", batch_size=8)
    expected = evaluate(
        model,
        [{**row, "labels": float(row["labels"])} for row in data],
        metric="rmse",
        batch_size=8,
    )
    np.testing.assert_array_equal(result.values, expected.values)
    np.testing.assert_allclose(result.values.flat[-1] ** 2, result.losses.flat[-1], rtol=1e-5)
    with pytest.raises(ValueError, match="the labels are numbers, not classes; use 'rmse'"):
        evaluate(model, data)


def test_metrics_are_named_after_their_function_or_class():
    @dataclass
    class Hits:
        label: int

        def __call__(self, logits, labels):
            return ((logits.argmax(-1) == labels) & (labels == self.label)).sum(), labels.numel()

    def misses(logits, labels, factor):
        return factor * (logits.argmax(-1) != labels).sum(), labels.numel()

    misses.greater_is_better = False
    metrics = "accuracy", Hits(1), partial(misses, factor=2)
    accuracy, hits, wrong = (
        noise_curve(bert(), classification_data(8), [0.0], metric=metric) for metric in metrics
    )
    assert (hits.metric, hits.greater_is_better) == ("Hits", True)
    Hits.__name__ = "rmse"  # of which results would take the root
    with pytest.raises(ValueError, match="of another name"):
        noise_curve(bert(), classification_data(8), [0.0], metric=Hits(1))
    assert (wrong.metric, wrong.greater_is_better) == ("misses", False)
    np.testing.assert_allclose(wrong.values, 2 * (1 - accuracy.values))


@pytest.mark.parametrize("evaluate", [partial(noise_curve, gammas=[0.0]), layer_profile])
def test_bad_data_and_settings_are_refused(evaluate):
    data = classification_data(8)
    unlabelled = [{name: value for name, value in row.items() if name != "labels"} for row in data]
    for rows, settings, match in (
        (
            dict.fromkeys(("validation", "test"), data),
            {},
            "`dataset` holds 'validation', 'test'; give one",
        ),
        (data, {"batch_size": 0}, "`batch_size` is 0"),
        (data, {"metric": "f1"}, "`metric` is 'f1'"),
        ([], {}, "empty"),
        (unlabelled, {}, "no labels"),
    ):
        with pytest.raises(ValueError, match=match):
            evaluate(bert(), rows, **settings)
    with pytest.raises(ValueError, match="'accuracy'"):
        evaluate(bert(num_labels=1), [{**row, "labels": 0.5} for row in data])


def test_columns_that_the_model_does_not_take_are_dropped():
    data = [{"text": "words", "label": row.pop("labels"), **row} for row in classification_data(8)]
    assert noise_curve(bert(), data, [0.0]).values.shape == (1, 3)


def test_own_loss_and_own_readout():
    model, data = bert(num_layers=2), classification_data(12)
    head = nn.Linear(16, 3)

    def readout(model, hidden, inputs):
        assert "labels" not in inputs
        return head(hidden[:, 0])

    def focal(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels) ** 2

    options = {"readout": readout, "layer_loss_fn": focal, "batch_size": 12}
    profile, curve = (
        layer_profile(model, data, **options),
        noise_curve(model, data, [0.0], **options),
    )
    batch = default_data_collator(data)
    labels = batch.pop("labels")
    model.eval()
    hidden = model(**batch, output_hidden_states=True).hidden_states[1:]
    logits = [head(state[:, 0]).detach() for state in hidden]
    np.testing.assert_allclose(
        profile.losses, [F.cross_entropy(x, labels).item() ** 2 for x in logits], rtol=1e-5
    )
    np.testing.assert_allclose(
        profile.values, [(x.argmax(-1) == labels).double().mean() for x in logits]
    )
    np.testing.assert_allclose(curve.losses[0], profile.losses[-1])


def test_mixed_modes_are_restored_after_an_error():
    model = bert().train()
    model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="rmse"):
        noise_curve(model, classification_data(8), [0.0, 1.0], metric="rmse")
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


def test_a_prediction_that_is_not_a_number_is_no_class():
    logits, labels = torch.zeros(3, 2), torch.tensor([0, 0, -100])
    logits[2] = torch.nan  # of padding
    assert [float(value.sum()) for value in _hits(logits, labels)] == [2.0, 2.0]
    logits[1, 1] = torch.nan
    hits, _ = _hits(logits, labels)
    assert hits.isnan().tolist() == [False, True, False]
