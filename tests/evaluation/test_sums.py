"""What is kept of a noise curve: sums over blocks, on disk while they grow and once they are whole."""

import importlib
import json
import os
import shutil
import sys
from functools import partial

import numpy as np
import pytest
import torch
from tiny import Stream, bert, classification_data
from transformers import default_data_collator

from hf_descent.evaluation import NoiseCurve, noise_curve
from hf_descent.evaluation.sums import fingerprint_of_tensors


def test_a_killed_measurement_goes_on_and_a_finished_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_descent.evaluation.sums.SAVE_SECONDS", -1)  # save after every batch
    model, data, path = bert(), classification_data(40), tmp_path / "curve.json"
    straight = noise_curve(model, data, [0.0, 1.0], batch_size=8)
    collated = []

    def collate(rows):
        collated.append(len(rows))
        if len(collated) == 5:
            raise KeyboardInterrupt
        return default_data_collator(rows)

    settings = {"batch_size": 8, "data_collator": collate, "path": str(path)}
    with pytest.raises(KeyboardInterrupt):
        noise_curve(model, data, [0.0, 1.0], **settings)
    assert not path.exists()
    shutil.copy(f"{path}.partial", tmp_path / "other.partial")
    other = noise_curve(model, data, [0.0, 1.0], batch_size=8, seed=1, path=str(tmp_path / "other"))
    np.testing.assert_array_equal(other.losses, noise_curve(model, data, [0.0, 1.0], batch_size=8, seed=1).losses)
    resumed = noise_curve(model, data, [0.0, 1.0], **settings)
    # Each time the first batch, to know partial sums by; three, the fatal one, and the two that were left.
    assert collated == [8] * 8
    np.testing.assert_array_equal(resumed.losses, straight.losses)
    assert {file.name for file in tmp_path.glob("curve*")} == {"curve.json", "curve.csv"}
    lines = path.with_suffix(".csv").read_text().splitlines()
    assert lines[0] == "gamma,accuracy,radius_95,std_over_draws,loss"
    assert [float(cell) for cell in lines[2].split(",")] == pytest.approx(
        [1.0, resumed.mean[1], resumed.radius("mean")[1], resumed.std[1], resumed.losses[1].mean()]
    )

    os.utime(path, (0, 0))
    again = noise_curve(model, data, [0.0, 1.0], **settings)
    assert path.stat().st_mtime > 0  # as new: a training since then may have changed nothing
    assert len(collated) == 13  # all batches, to know that no row is another
    assert again.to_dict() == resumed.to_dict()
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight.flip(0))  # the same numbers
    assert noise_curve(model, data, [0.0, 1.0], **settings).losses[0, 0] != resumed.losses[0, 0]
    assert len(collated) == 19


def test_a_finished_curve_is_not_that_of_other_rows(tmp_path):
    """Validation and test rows can be equally many, and be cut to another length."""
    model, path = bert(), str(tmp_path / "curve.json")
    first = noise_curve(model, classification_data(16), [1.0], path=path)
    for rows in (classification_data(16, seed=1), classification_data(16, length=9)):
        assert noise_curve(model, rows, [1.0], path=path).losses[0, 0] == noise_curve(model, rows, [1.0]).losses[0, 0]
    swapped = [{**row, "labels": (row["labels"] + 1) % 3} for row in classification_data(16)]
    assert noise_curve(model, swapped, [1.0], path=path).losses[0, 0] != first.losses[0, 0]
    rows, path = classification_data(40), str(tmp_path / "batches.json")
    first = noise_curve(model, rows, [1.0], path=path, batch_size=8)
    later = rows[:32] + [{**row, "labels": (row["labels"] + 1) % 3} for row in rows[32:]]
    second = noise_curve(model, later, [1.0], path=path, batch_size=8)
    assert second.losses[0, 0] != first.losses[0, 0] and second.settings["data"] != first.settings["data"]


def test_a_finished_curve_is_not_that_of_other_inputs_beside_the_same_data(tmp_path):
    """The rows that runs of any architecture are compared on, with a mask or token types of another call."""
    model, rows, path = bert(), classification_data(16), tmp_path / "curve.json"
    first = noise_curve(model, rows, [1.0], path=str(path))
    for name in ("attention_mask", "token_type_ids"):
        others = [{**row, name: torch.ones(10, dtype=torch.long)} for row in rows]
        found, fresh = (noise_curve(model, others, [1.0], path=file) for file in (str(path), None))
        assert found.losses[0, 0] == fresh.losses[0, 0] != first.losses[0, 0]
        assert found.settings["data"] == first.settings["data"]
    finished = json.loads(path.read_text()) | {"greater_is_better": "read"}
    path.write_text(json.dumps(finished))
    assert noise_curve(model, others, [1.0], path=str(path)).greater_is_better == "read"
    del finished["settings"]["inputs"]  # as curves were written that did not know theirs
    path.write_text(json.dumps(finished))
    assert noise_curve(model, others, [1.0], path=str(path)).greater_is_better is True


def test_a_finished_curve_is_not_that_of_other_settings(tmp_path):
    def misses(logits, labels):
        return (logits.argmax(-1) != labels).sum(), labels.numel()

    model, rows = bert(), classification_data(16)
    changes = {"metric": misses, "scale": 2.0, "gamma_train": 0.5, "seed": 1, "sigma": 1.0, "draws": 2}
    for name, value in changes.items():
        path, fresh = tmp_path / f"{name}.json", tmp_path / f"fresh-{name}.json"
        noise_curve(model, rows, [1.0], path=str(path))
        for file in (path, fresh):
            noise_curve(model, rows, [1.0], path=str(file), **{name: value})
        assert path.read_text() == fresh.read_text(), name


def squares(outputs, labels, num_items_in_batch, k):
    return k * outputs["logits"].square().mean()


def swap_to(token):
    def swap(row, level, generator):
        ids = torch.where(torch.as_tensor(generator.random(10)) < level, token, row["input_ids"])
        return {**row, "input_ids": ids}

    swap.name = "swap"
    return swap


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("metric", lambda k: lambda logits, labels: (k * labels.sum(), labels.numel())),
        ("layer_loss_fn", lambda k: partial(squares, k=k)),
        ("readout", lambda k: lambda model, hidden, inputs: k * model.classifier(hidden[:, 0])),
        ("perturbation", swap_to),
    ],
)
def test_a_finished_curve_is_that_of_the_same_functions(tmp_path, name, make):
    """Two functions of one name differ in a number that they hold."""
    model, rows, path = bert(), classification_data(16), tmp_path / "curve.json"

    def measure(k, **settings):
        return noise_curve(model, rows, [0.0, 1.0], **settings, **{name: make(k)})

    first, second = (measure(k).to_dict() for k in (2, 3))
    assert first != second
    assert [measure(k, path=path).to_dict() for k in (2, 3)] == [first, second]
    # That it is read shows in what no measurement would give.
    finished = json.loads(path.read_text()) | {"greater_is_better": "read"}
    path.write_text(json.dumps(finished))
    assert measure(3, path=path).greater_is_better == "read"
    del finished["settings"]["functions"]  # as curves were written that did not know theirs
    path.write_text(json.dumps(finished))
    assert measure(3, path=path).greater_is_better is True


@pytest.mark.parametrize(
    "code",
    [
        "def own(logits, labels):\n    return {}, 1",
        "def own(logits, labels, k={}):\n    return k, 1",
        "def own(logits, labels, *, k={}):\n    return k, 1",
        "import torch\n@torch.no_grad()\ndef own(logits, labels):\n    return {}, 1",
        "class Own:\n    def __call__(self, logits, labels):\n        return self.k(), 1\n"
        "    def k(self):\n        return {}\nown = Own()",
        "class Base:\n    k = {}\n    def __call__(self, logits, labels):\n        return self.k, 1\n"
        "class Own(Base):\n    pass\nown = Own()",
    ],
)
def test_a_function_of_a_module_is_known_by_its_code(tmp_path, monkeypatch, code):
    curves = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files of one size, written in one second
    for number in (1, 2):
        (tmp_path / "own_metrics.py").write_text(code.format(number))
        monkeypatch.delitem(sys.modules, "own_metrics", raising=False)
        importlib.invalidate_caches()
        own = importlib.import_module("own_metrics").own
        curves.append(noise_curve(bert(), classification_data(8), [0.0], metric=own, path=tmp_path / "curve.json"))
    assert [curve.values[0, 0] for curve in curves] == [1.0, 2.0]


class Held:
    def __init__(self, value):
        self.value, self.rows = value, (row for row in ())  # which cannot be pickled

    def metric(self, logits, labels):
        return self.value * labels.numel(), labels.numel()


@pytest.mark.parametrize("make", [lambda held: held.metric, lambda held: lambda *scored: held.metric(*scored)])
def test_functions_that_cannot_be_compared_are_measured_anew(tmp_path, make):
    for value in (1, 2):
        metric = make(Held(value))
        curve = noise_curve(bert(), classification_data(8), [0.0], metric=metric, path=tmp_path / "curve.json")
        assert curve.values[0, 0] == value


def test_a_stream_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_descent.evaluation.sums.SAVE_SECONDS", -1)  # save after every batch
    first, killed, last = (classification_data(20, seed=seed) for seed in range(3))

    def collate(rows):
        if rows[0] is killed[8]:
            raise KeyboardInterrupt
        return default_data_collator(rows)

    def measure(rows):
        settings = {"batch_size": 4, "data_collator": collate, "path": tmp_path / "curve.json"}
        return noise_curve(bert(), Stream(rows), [0.0, 1.0], remove_unused_columns=False, **settings)

    measure(first)
    with pytest.raises(KeyboardInterrupt):
        measure(killed)
    expected = noise_curve(bert(), last, [0.0, 1.0], batch_size=4)
    np.testing.assert_array_equal(measure(last).losses, expected.losses)


def test_a_path_that_cannot_be_written_is_refused_before_the_measurement(tmp_path):
    model = bert()
    model.register_forward_pre_hook(lambda module, args: pytest.fail("the model was run"))
    with pytest.raises(ValueError, match="`path` is .*, a folder"):
        noise_curve(model, classification_data(8), [0.0], path=tmp_path)
    assert not list(tmp_path.parent.glob("*.tmp"))


def test_a_curve_of_numpy_s_numbers_is_kept_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "curve.json"
    settings = {"scale": np.float32(0.5), "batch_size": np.int64(4), "draws": np.int64(2), "seed": np.int64(1)}
    levels = np.float32([0.0, 0.5])  # training's are a range, whose upper end counts
    given = noise_curve(bert(), classification_data(8), [0.0], gamma_train=levels, path=path, **settings)
    plain = {name: value.item() for name, value in settings.items()}
    expected = noise_curve(bert(), classification_data(8), [0.0], gamma_train=0.5, **plain)
    assert json.loads(path.read_text())["gamma_train"] == 0.5
    assert given.to_dict() == expected.to_dict()
    assert NoiseCurve.from_json(path).settings["batch_size"] == 4


def test_blocks_in_which_a_metric_counts_nothing_still_count_for_the_loss():
    def recall(logits, labels):
        positive = labels == 0
        return ((logits.argmax(-1) == labels) & positive).sum(), positive.sum()

    rows = sorted(classification_data(40), key=lambda row: row["labels"] == 0)
    curve = noise_curve(bert(), rows, [0.0, 1.0], metric=recall, batch_size=4)
    np.testing.assert_array_equal(curve.losses, noise_curve(bert(), rows, [0.0, 1.0], batch_size=4).losses)
    assert curve.blocks.shape[0] == 10
    assert np.isfinite(curve.radius("mean")).all()
    with pytest.raises(ValueError, match="no labels that count"):
        noise_curve(bert(), [row for row in rows if row["labels"]], [0.0], metric=recall)


def test_sums_do_not_grow_with_the_data():
    few, many = (noise_curve(bert(), classification_data(n), [1.0], batch_size=2, draws=1) for n in (8, 200))
    assert few.blocks.shape == (4, 1, 1, 4)
    assert many.blocks.shape == (32, 1, 1, 4)
    np.testing.assert_array_equal(many.blocks[..., 1].sum(), 200)


def test_a_tensor_is_itself_however_it_lies_in_memory():
    found = [fingerprint_of_tensors([("x", x)]) for x in (torch.ones(4), torch.ones(1).expand(4), torch.ones(8)[::2])]
    assert len(set(found)) == 1 and fingerprint_of_tensors([("x", torch.zeros(4))]) != found[0]
