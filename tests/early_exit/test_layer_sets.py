"""Sets of layers: models with layers left out, the greedy search, and what is said of them."""

import copy
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from architectures import FAMILIES, LAYERS, MODELS, batch_for, build
from scipy import stats
from tiny.data import batches, classification_data, language_data
from tiny.models import bert, llama, spread
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_descent import DescentProblem, layer_profile
from hf_descent.early_exit import (
    find_layer_sets,
    keep_layers,
    layer_set_profile,
    truncate,
)
from hf_descent.early_exit.layer_sets import LayerSetProfile, layers_in, spans
from hf_descent.evaluation.intervals import confidence_limits
from hf_descent.readout.replay import output_logits


# Refused: layers that are one module, and lists of parts of layers, each in a container of its own.
REFUSED = ("AlbertForMaskedLM", "XLMWithLMHeadModel")


def stack_of(model):
    """The list that holds the layers of a tiny BERT or Llama."""
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers


def without(model, kept):
    """An oracle that shares no code with the package: a copy whose other layers are taken out of their list."""
    model = copy.deepcopy(model)
    layers = torch.nn.ModuleList([stack_of(model)[layer - 1] for layer in kept])
    for place, layer in enumerate(layers):
        if hasattr(layer, "self_attn"):
            layer.self_attn.layer_idx = place
    if hasattr(model, "bert"):
        model.bert.encoder.layer = layers
    else:
        model.model.layers = layers
        model.config.num_hidden_layers = len(layers)
    return model.eval()


def mean_loss(model, data):
    """The mean loss over items, batch by batch of one row."""
    total = count = 0
    with torch.no_grad():
        for batch in batches(data, size=1):
            labels = batch["labels"]
            items = int((labels[..., 1:] if labels.dim() > 1 else labels).ne(-100).sum())
            total += float(model(**batch).loss) * items
            count += items
    return total / count


MODELS_AND_DATA = {
    "bert": (lambda: spread(bert(num_layers=4)), classification_data, AutoModelForSequenceClassification),
    "llama": (lambda: spread(llama(num_layers=4)), language_data, AutoModelForCausalLM),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS_AND_DATA)
@pytest.mark.parametrize("kept", [[1, 3, 4], [2, 4], [1, 4], [3], [1, 2]])
def test_a_model_with_some_layers_is_the_one_whose_list_lacks_the_others(name, kept, tmp_path):
    make, data, auto_class = MODELS_AND_DATA[name]
    model = make()
    batch = next(batches(data(4)))
    short = keep_layers(model, kept, batch)
    with torch.no_grad():
        truth = without(model, kept)(**batch)
        torch.testing.assert_close(short(**batch).logits, truth.logits)
        short.save_pretrained(tmp_path)
        loaded = auto_class.from_pretrained(tmp_path)
        torch.testing.assert_close(loaded(**batch).loss, truth.loss)
    assert loaded.config.num_hidden_layers == len(kept)
    assert model.config.num_hidden_layers == 4 and len(stack_of(model)) == 4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_middle_layer_left_out_or_is_refused(name):
    model = build(name, MODELS[name])
    inputs = batch_for(model)
    if name in REFUSED:
        with pytest.raises(ValueError, match=r"cannot be (left out|cut to)"):
            keep_layers(model, [1, LAYERS], inputs)
        return
    short = keep_layers(model, [1, LAYERS], inputs)
    with torch.no_grad():
        logits = output_logits(short(**inputs))
        assert not torch.equal(logits, output_logits(model(**inputs)))
        # The same model, cut in two steps: first behind the last layer, which is put in the place of the second.
        everything = keep_layers(model, list(range(1, LAYERS + 1)), inputs)
        assert torch.equal(output_logits(everything(**inputs)), output_logits(model(**inputs)))
        first = keep_layers(model, [1], inputs)
        assert torch.equal(
            output_logits(first(**inputs)), output_logits(truncate(model, 1, inputs)(**inputs))
        )


@pytest.mark.parametrize("layers", [[], [0, 1], [2, 1], [1, 1], [1, 5]])
def test_other_layers_are_refused(layers):
    with pytest.raises(ValueError, match=r"`layers` is .* increasing numbers from 1 to 4"):
        keep_layers(bert(num_layers=4), layers)


@pytest.mark.parametrize("name", MODELS_AND_DATA)
def test_the_search_leaves_out_what_costs_least(name):
    make, data, _ = MODELS_AND_DATA[name]
    model = make()
    rows = data(24)
    sets = find_layer_sets(model, rows, fewest=1, batch_size=7)
    assert [len(kept) for kept in sets] == [4, 3, 2, 1]
    for larger, smaller in pairwise(sets):
        losses = {
            kept: mean_loss(without(model, kept), rows)
            for kept in combinations(larger, len(smaller))
        }
        assert tuple(smaller) == min(losses, key=losses.get)


@pytest.mark.parametrize("name", MODELS_AND_DATA)
def test_the_profile_is_that_of_the_shorter_models(name):
    make, data, _ = MODELS_AND_DATA[name]
    model = make()
    rows = data(30)
    profile = layer_set_profile(model, rows, [[1, 2, 4], [1, 4]], batch_size=1)
    assert profile.layers == [[1, 2, 3, 4], [1, 2, 4], [1, 4]]
    expected = [mean_loss(without(model, kept), rows) for kept in profile.layers]
    np.testing.assert_allclose(profile.losses, expected, rtol=1e-5)
    np.testing.assert_allclose(profile.ratios, np.divide(expected, expected[0]), rtol=1e-5)


@pytest.fixture(scope="module")
def losses_of_rows():
    """A model, 200 rows, and the loss of each row `[rows, 2]`: with all four layers, and without the third."""
    rows = classification_data(200, pad=False)
    model = spread(bert(num_layers=4))
    losses = []
    for kept in ([1, 2, 3, 4], [1, 2, 4]):
        shorter = without(model, kept)
        losses.append([mean_loss(shorter, [row]) for row in rows])
    return model, rows, np.transpose(losses)


@pytest.mark.parametrize("batch_size", [1, 7])
def test_the_interval_of_a_ratio_is_paired_and_of_rows(batch_size, losses_of_rows):
    """By the delta method: the ratio of two means over rows is nearly a mean over rows."""
    model, rows, losses = losses_of_rows
    profile = layer_set_profile(model, rows, [[1, 2, 4]], batch_size=batch_size)
    whole, short = losses.mean(0)
    of_rows = short / whole + (losses[:, 1] - short / whole * losses[:, 0]) / whole
    lower, upper = confidence_limits(of_rows)
    assert profile.lower[1] == pytest.approx(lower, rel=1e-4)
    assert profile.upper[1] == pytest.approx(upper, rel=1e-4)
    assert profile.lower[0] == profile.upper[0] == 1
    counts = np.bincount([int(row["labels"]) for row in rows]) / len(rows)
    assert profile.chance == pytest.approx(stats.entropy(counts), rel=1e-4)


def test_too_few_rows_show_nothing():
    model = spread(bert(num_layers=2))
    profile = layer_set_profile(model, classification_data(10), [[1]], max_rise=1e6)
    assert profile.verdicts()[1] == "not shown" and profile.smallest() == [1, 2]


def test_a_set_at_chance_is_not_met_as_the_exit_of_the_same_layers():
    """Against the verdict on the model that stops after layer 1."""
    rows = classification_data(200)
    model = spread(bert(num_layers=2))
    profile = layer_set_profile(model, rows, [[1]], max_rise=1e6)
    asked = DescentProblem(None, 1e6, 2, loss_targets={1: 1e6})
    exits = layer_profile(model, rows, problem=asked)

    assert profile.learned == [False, False] and profile.at_chance == [True, True]
    assert profile.verdicts()[1:] == exits.certificate().verdicts == ["not met"]


def profile_with(max_rise, chance=None, learned=None, at_chance=None):
    return LayerSetProfile(
        layers=[[1, 2, 3, 4], [1, 3, 4], [1, 3], [3]],
        metric="accuracy",
        losses=[1.0, 1.04, 1.5, 1.02],
        values=[0.9, 0.9, 0.5, 0.9],
        ratios=[1.0, 1.04, 1.5, 1.02],
        lower=[1.0, 1.02, 1.4, 1.01],
        upper=[1.0, 1.06, 1.6, 1.03],
        items=100,
        max_rise=max_rise,
        chance=chance,
        learned=learned,
        at_chance=at_chance,
    )


@pytest.mark.parametrize(
    ("max_rise", "chance", "verdicts", "smallest", "headline"),
    [
        # The last set is good enough, but a larger one is not: that is luck more often than not.
        (0.1, None, ["met", "not met", "met"], 1, "VERDICT: MET, price +4.0 %"),
        (0.05, None, ["not shown", "not met", "met"], 0, "VERDICT: NOT SHOWN, price +4.0 %"),
        (0.015, None, ["not met", "not met", "not shown"], 0, "VERDICT: NOT MET, price +4.0 %"),
        (0.7, None, ["met", "met", "met"], 3, "VERDICT: MET, price +2.0 %"),
        (0.7, 1.2, ["met", "not shown", "met"], 1, "VERDICT: MET, price +4.0 %"),
        (0.7, 1.5, ["met", "not met", "met"], 1, "VERDICT: MET, price +4.0 %"),
    ],
)
def test_the_verdict_on_sets(max_rise, chance, verdicts, smallest, headline, tmp_path):
    """The third set may be at chance where `chance` is 1.2, and is at chance where it is 1.5."""
    flags = {}
    if chance:
        flags = {"learned": [True, True, False, True], "at_chance": [False] * 4}
        flags["at_chance"][2] = chance == 1.5
    profile = profile_with(max_rise, chance, **flags)
    profile.to_json(tmp_path / "sets.json")
    for known in (profile, LayerSetProfile.from_json(tmp_path / "sets.json")):
        assert known.verdicts()[1:] == verdicts
        assert known.smallest() == known.layers[smallest]
        assert profile_with(0.0).smallest(max_rise) == known.layers[smallest] or chance
        assert known.headline == headline


def test_sets_are_told_by_what_they_leave_out():
    lines = str(profile_with(0.1)).splitlines()
    assert lines[0].split()[:2] == ["layers", "left"] and "at most +10 %" in lines[0]
    assert lines[2].split()[:2] == ["3", "2"] and "+2.0 to +6.0 %" in lines[2]
    assert lines[4].split()[:2] == ["1", "1-2,4"]


@pytest.mark.parametrize(
    ("layers", "text"),
    [([1], "1"), ([1, 2, 3, 5, 7, 8], "1-3,5,7-8"), ([4, 6, 8], "4,6,8")],
)
def test_layers_are_written_as_spans_and_read_again(layers, text):
    assert spans(layers) == text
    assert layers_in(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "1,,2", "3-1"])
def test_a_text_without_layers_is_refused(text):
    with pytest.raises(ValueError, match=r"name layers as in '1-12,19-30'"):
        layers_in(text)


def test_no_rows_are_refused():
    model = spread(bert(num_layers=2))
    with pytest.raises(ValueError, match="`dataset` is empty"):
        find_layer_sets(model, [], fewest=1)
    with pytest.raises(ValueError, match="`dataset` is empty"):
        layer_set_profile(model, [], [[1]])
