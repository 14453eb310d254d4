import math
from functools import partial

import numpy as np
import pytest
import torch
from tiny.data import toy_rows
from tiny.models import bert, spread
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_descent.early_exit import ConfidenceExit, ExitProfile, exit_profile, truncate


def test_the_exit_profile_has_the_metric_of_every_truncated_model():
    model, rows = spread(bert(num_layers=3)), toy_rows(24)
    profile = exit_profile(model, rows, batch_size=8, repeats=2)
    batch = default_data_collator(rows)
    for layer in range(1, 4):
        with torch.no_grad():
            outputs = truncate(model, layer, batch)(**batch)
        hits = (outputs.logits.argmax(-1) == batch["labels"]).float().mean()
        assert profile.values[layer - 1] == pytest.approx(hits.item())
        assert profile.losses[layer - 1] == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert (profile.seconds > 0).all() and profile.speedups[-1] == 1.0 and profile.batch_size == 8


def test_the_profile_says_how_large_its_batches_were_and_which_way_its_metric_goes():
    def wrong(logits, labels):
        return (logits.argmax(-1) != labels).sum(), labels.numel()

    wrong.greater_is_better = False
    loader = DataLoader(toy_rows(6), 3, collate_fn=default_data_collator)
    for metric in (wrong, partial(wrong)):
        profile = exit_profile(bert(num_layers=2), loader, metric=metric, repeats=1)
        assert profile.batch_size == 3 and not profile.greater_is_better
    assert (
        ConfidenceExit(bert(num_layers=2), threshold=1.0).evaluate(loader, repeats=1).batch_size
        == 3
    )


def test_the_first_exit_that_keeps_the_share_asked_for_and_is_not_at_chance(tmp_path):
    profile = ExitProfile(
        "accuracy",
        [0.5, 0.81, 0.79, 0.9],
        [1.0] * 4,
        [1.0, 2.0, 3.0, 4.0],
        8,
        kept_low=[0.5, 0.9, 0.85, 1.0],
        learned=[False, True, True, True],
    )
    assert [profile.shown(share) for share in (0.99, 0.9, 0.85, 0.5)] == [None, 2, 2, 2]
    assert profile.speedups.tolist() == [4.0, 2.0, 4 / 3, 1.0]
    profile.to_json(str(tmp_path / "exit_profile.json"))
    assert str(ExitProfile.from_json(str(tmp_path / "exit_profile.json"))) == str(profile)
    with pytest.raises(ValueError, match="`repeats` is 0"):
        exit_profile(bert(), toy_rows(4), repeats=0)


def test_no_exit_is_offered_at_a_layer_at_chance():
    """A model that gives every row the most frequent label has the same accuracy at all layers."""
    model, rows = (
        bert(),
        [{**row, "labels": int(index % 8 == 0)} for index, row in enumerate(toy_rows(24))],
    )
    model.classifier.weight.data.zero_()
    model.classifier.bias.data = torch.tensor([7 / 8, 1 / 8, 1e-6]).log()
    profile = exit_profile(model, rows, batch_size=8, repeats=1)
    assert profile.values.tolist() == [7 / 8] * 3 and profile.shown() is None
    assert profile.chance == pytest.approx(-sum(p * math.log(p) for p in (7 / 8, 1 / 8)))


@pytest.mark.parametrize(("count", "expected"), [(40, None), (2000, 2)])
def test_only_rows_that_suffice_show_that_a_layer_keeps_the_metric(count, expected):
    """Layer 2 predicts what the last one does. A few rows do not show that it would on others."""
    model = spread(bert(num_layers=3))
    for name, parameter in model.bert.encoder.layer[2].named_parameters():
        if "output.dense" in name:  # the layer adds nothing
            parameter.data.zero_()

    batch = default_data_collator(toy_rows(count))
    with torch.no_grad():
        predicted = model(**batch).logits.argmax(-1).tolist()
    for parameter in model.classifier.parameters():
        parameter.data *= 20  # sure of it, so that no layer is at chance
    rows = [{**row, "labels": label} for row, label in zip(toy_rows(count), predicted)]
    profile = exit_profile(model, rows, batch_size=100, repeats=1)

    assert profile.kept[1] == 1 and profile.kept_low[1] < 1
    assert profile.kept_low[-1] == 1
    assert profile.shown() == expected
    verb = "No layer before the last is shown" if expected is None else "Layer 2 of 3 is shown"
    assert f"{verb} to keep 99 % of the accuracy" in str(profile)


def test_a_dash_stands_where_the_examples_tell_no_share():
    profile = exit_profile(bert(num_layers=3), toy_rows(8), batch_size=8, repeats=1)
    assert not np.isfinite(profile.kept_low[:-1]).any()
    assert "inf" not in str(profile) and "nan" not in str(profile)
