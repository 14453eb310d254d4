"""Intervals of metrics, made of rows: against closed forms, by how often they hold, whatever the order and batches."""

import numpy as np
import pytest
import torch
from scipy import stats
from tiny.data import classification_data, language_data
from tiny.models import bert, llama, spread
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_descent.evaluation import layer_profile, noise_curve, row_sums
from hf_descent.evaluation.intervals import half_widths
from hf_descent.evaluation.row_sums import MetricRows
from hf_descent.evaluation.scoring import metric_of_rows


def shuffled(data):
    return [data[index] for index in np.random.default_rng(0).permutation(len(data))]


def numbers(count):
    """Rows with numbers as labels, the large ones last."""
    rows = classification_data(count)
    return [{**row, "labels": float(index) ** 2 / 100} for index, row in enumerate(rows)]


def documents(count):
    """Texts of several lengths, the long ones last."""
    rows = []
    for index, row in enumerate(language_data(count)):
        length = 4 + index // 16
        rows.append({name: tokens[:length] for name, tokens in row.items()})
    return rows


def half_right(model, rows):
    """The same texts, with labels of which the model predicts about half."""
    generator = np.random.default_rng(3)
    labelled = []
    for row in rows:
        with torch.no_grad():
            predicted = model(input_ids=row["input_ids"][None]).logits[0].argmax(-1)
        labels = row["labels"].clone()
        is_right = torch.from_numpy(generator.random(len(labels) - 1) < 0.5)
        labels[1:] = torch.where(is_right, predicted[:-1], labels[1:])
        labelled.append({**row, "labels": labels})
    return labelled


def padded(rows):
    length = max(len(row["input_ids"]) for row in rows)
    filled = []
    for row in rows:
        missing = length - len(row["input_ids"])
        filled.append({
            "input_ids": torch.cat([row["input_ids"], torch.zeros(missing, dtype=torch.long)]),
            "attention_mask": torch.arange(length) < len(row["input_ids"]),
            "labels": torch.cat([row["labels"], torch.full((missing,), -100)]),
        })  # fmt: skip
    return default_data_collator(filled)


def packed(rows):
    """All rows in one, told apart by their positions."""
    positions = [torch.arange(len(row["input_ids"])) for row in rows]
    labels = [row["labels"].clone() for row in rows]
    for of_row in labels:
        of_row[0] = -100  # which would be predicted from the document before
    named = {"input_ids": [row["input_ids"] for row in rows], "labels": labels}
    named["position_ids"] = positions
    return {name: torch.cat(values)[None] for name, values in named.items()}


@pytest.mark.parametrize("kind", ["rmse", "tokens"])
def test_intervals_depend_neither_on_the_order_nor_on_the_size_of_batches(kind):
    if kind == "rmse":
        model, data, settings = spread(bert(num_labels=1)), numbers(120), {"metric": "rmse"}
    else:
        model, settings = spread(llama()).eval(), {"data_collator": padded}
        data = half_right(model, documents(120))
    found = []
    for rows, batch_size in ((data, 4), (data, 120), (shuffled(data), 4), (shuffled(data), 7)):
        profile = layer_profile(model, rows, batch_size=batch_size, **settings)
        curve = noise_curve(model, rows, [0.0], batch_size=batch_size, **settings)
        found.append([profile.value_radii[-1], curve.radius("mean")[0]])
    assert np.isfinite(found).all() and (np.array(found) > 0).all()
    np.testing.assert_allclose(found, found[:1] * 4, rtol=1e-4)


def test_the_interval_of_packed_texts_is_made_of_documents():
    model, data = spread(llama()).eval(), documents(160)
    sums = []
    batches = [packed(data[start : start + 8]) for start in range(0, 160, 8)]
    for batch in batches:
        # As the model reads them, half of the labels are right.
        with torch.no_grad():
            predicted = model(**batch).logits[0].argmax(-1)
        is_right = torch.from_numpy(np.random.default_rng(3).random(len(predicted) - 1) < 0.5)
        labels = batch["labels"][0]
        counts = labels[1:] != -100
        labels[1:] = torch.where(is_right & counts, predicted[:-1], labels[1:])
        hits = (predicted[:-1] == labels[1:]) & counts
        documents_of_labels = batch["position_ids"][0].eq(0).cumsum(0)[1:]
        for document in range(1, 9):
            own = documents_of_labels == document
            sums.append([int(hits[own].sum()), int(counts[own].sum())])

    rows = np.array([row for row in sums if row[1]], dtype=float)
    expected = half_widths(metric_of_rows("accuracy", 1.0, rows))
    profile = layer_profile(model, DataLoader(batches, batch_size=None))
    assert expected > 0 and profile.values[-1] == pytest.approx(rows[:, 0].sum() / rows[:, 1].sum())
    assert profile.value_radii[-1] == pytest.approx(expected, rel=1e-6)


def test_of_unequal_counts_and_of_a_root_it_is_the_delta_method():
    generator = np.random.default_rng(1)
    counts = generator.integers(50, 150, 400)
    sums = generator.normal(2.0, 0.1, 400) * counts
    ratio = sums.sum() / counts.sum()
    linear = (sums - ratio * counts) / counts.mean()
    rows = np.stack([sums, counts], axis=1)
    parts = metric_of_rows("accuracy", 1.0, rows)
    np.testing.assert_allclose(parts, ratio + linear)
    root = metric_of_rows("rmse", 255.0, rows)
    np.testing.assert_allclose(root, 255 * (np.sqrt(ratio) + linear / (2 * np.sqrt(ratio))))


def test_a_metric_without_any_error_has_an_interval_of_no_width():
    rows = np.stack([np.zeros(30), np.ones(30)], axis=1)
    assert half_widths(metric_of_rows("rmse", 1.0, rows)) == 0.0


@pytest.mark.parametrize("count", [100, 400])
@pytest.mark.parametrize("kind", ["rmse", "tokens"])
def test_intervals_hold_about_as_often_as_they_say(kind, count):
    """The rmse of heavy errors, and the share of right tokens in documents of unequal lengths and difficulty."""
    generator = np.random.default_rng(2)
    trials = 1000
    inside = 0
    for _ in range(trials):
        if kind == "rmse":
            metric, truth, counts = "rmse", 1.0, np.ones(count)
            sums = generator.gamma(0.5, 2.0, count)  # mean 1
        else:
            metric, truth, counts = "accuracy", 0.6, generator.integers(5, 200, count)
            sums = generator.binomial(counts, generator.beta(3, 2, count))
        parts = metric_of_rows(metric, 1.0, np.stack([sums, counts], axis=1))
        inside += abs(parts.mean() - truth) <= half_widths(parts)
    assert stats.binomtest(inside, trials, 0.95, alternative="less").pvalue > 1e-3
    assert inside < 0.99 * trials


def test_rows_in_which_a_metric_counts_nothing_still_count_for_the_loss():
    def recall(logits, labels):
        positive = labels == 0
        return ((logits.argmax(-1) == labels) & positive).sum(), positive.sum()

    rows = classification_data(360)
    curve = noise_curve(bert(), rows, [0.0, 1.0], metric=recall, batch_size=4)
    plain = noise_curve(bert(), rows, [0.0, 1.0], batch_size=4)
    np.testing.assert_array_equal(curve.losses, plain.losses)
    assert len(curve.parts) == sum(int(row["labels"]) == 0 for row in rows)
    assert np.isfinite(curve.radius("mean")).all()
    with pytest.raises(ValueError, match="no labels that count"):
        noise_curve(bert(), [row for row in rows if row["labels"]], [0.0], metric=recall)


def test_a_metric_whose_rows_do_not_add_up_counts_batches():
    def largest(logits, labels):
        return logits.max(), 1

    curve = noise_curve(bert(), classification_data(40), [0.0], metric=largest, batch_size=4)
    assert len(curve.parts) == 10 and np.isnan(curve.radius("mean")).all()


def test_rows_of_processes_are_in_the_order_of_the_data(monkeypatch):
    class Accelerator:
        num_processes = 2

    rows = np.random.default_rng(0).random((10, 3, 2)) + 0.1
    parts = [MetricRows(Accelerator()) for _ in range(2)]
    for index in range(5):
        parts[index % 2].add(index, rows[2 * index : 2 * index + 2])
    everything = [*parts[0]._batches, *parts[1]._batches]
    monkeypatch.setattr(row_sums, "gather_object", lambda mine: list(everything))
    np.testing.assert_array_equal(parts[0].gathered(), rows)


def test_more_rows_are_added_up_in_groups(monkeypatch):
    monkeypatch.setattr(row_sums, "MOST_ROWS", 100)
    monkeypatch.setattr(row_sums, "GROUPS", 50)
    curve = noise_curve(bert(), classification_data(120), [1.0], batch_size=8)
    assert 40 < len(curve.parts) <= 50
    np.testing.assert_allclose(curve.parts.mean(axis=0), curve.mean, rtol=1e-6)
