"""Fingerprints of the data that was evaluated, and curves on disk."""

import numpy as np
import torch
from tiny.data import classification_data
from tiny.models import bert

from hf_descent.evaluation import NoiseCurve, layer_profile, noise_curve
from hf_descent.evaluation.fingerprints import fingerprint_of_tensors


def test_the_fingerprint_is_of_the_data_alone():
    """The same for every model and what stands beside the data; another one for other rows, labels or batches."""

    def fingerprint(rows, seed=0, batch_size=8):
        return noise_curve(bert(seed=seed), rows, [1.0], draws=1, batch_size=batch_size).settings[
            "data"
        ]

    rows = classification_data(16)
    masked = [{**row, "attention_mask": torch.ones(10, dtype=torch.long)} for row in rows]
    same = {fingerprint(rows), fingerprint(rows, seed=1), fingerprint(masked)}
    assert same == {layer_profile(bert(num_layers=2), rows, batch_size=8).data}
    last = [*rows[:15], {**rows[15], "labels": (rows[15]["labels"] + 1) % 3}]
    others = [
        classification_data(16, seed=1),
        classification_data(16, length=9),
        rows[:15],
        rows[::-1],
        last,
    ]
    found = [*map(fingerprint, others), fingerprint(rows, batch_size=4)]
    assert len(set(found)) == 6 and not same & set(found)


def test_a_curve_of_numpy_s_numbers_survives_the_disk(tmp_path):
    settings = {
        "scale": np.float32(0.5),
        "batch_size": np.int64(4),
        "draws": np.int64(2),
        "seed": np.int64(1),
    }
    levels = np.float32([0.0, 0.5])  # training's are a range, whose upper end counts
    given = noise_curve(bert(), classification_data(8), [0.0], gamma_train=levels, **settings)
    given.to_json(tmp_path / "curve.json")
    plain = {name: value.item() for name, value in settings.items()}
    expected = noise_curve(bert(), classification_data(8), [0.0], gamma_train=0.5, **plain)
    read = NoiseCurve.from_json(tmp_path / "curve.json")
    assert read.to_dict() == expected.to_dict()
    assert (read.gamma_train, read.settings) == (0.5, expected.settings)


def test_a_tensor_is_itself_however_it_lies_in_memory():
    found = [
        fingerprint_of_tensors([("x", x)])
        for x in (torch.ones(4), torch.ones(1).expand(4), torch.ones(8)[::2])
    ]
    assert len(set(found)) == 1 and fingerprint_of_tensors([("x", torch.zeros(4))]) != found[0]
