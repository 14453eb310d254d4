import json
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import MODELS, build
from scipy.stats import norm
from tiny.data import Stream, classification_data, language_data
from tiny.models import bert
from torch import nn
from torch.utils.data import DataLoader
from transformers import default_data_collator

from hf_descent import DescentProblem, EmbeddingNoise
from hf_descent.evaluation import NoiseCurve, layer_profile, noise_curve


def curve(
    gammas=(0.0, 0.5, 1.0, 2.0), values=((0.9, 0.9), (0.8, 0.9), (0.6, 0.8), (0.5, 0.5)), **options
):
    losses = np.arange(2.0 * len(gammas)).reshape(-1, 2)
    return NoiseCurve("accuracy", np.array(gammas), np.array(values), losses, **options)


def test_summaries_equal_hand_computed_values():
    result = curve(gamma_train=0.5)
    np.testing.assert_allclose(result.mean, [0.9, 0.85, 0.7, 0.5])
    # 0.5 * (0.9 + 0.85) / 2 + 0.5 * (0.85 + 0.7) / 2 + 1 * (0.7 + 0.5) / 2
    assert result.auc == pytest.approx(0.4375 + 0.3875 + 0.6)
    assert result.auc_over_range == pytest.approx(1.425 / 2)
    assert result.auc_id == pytest.approx(0.875)
    assert result.auc_ood == pytest.approx((0.3875 + 0.6) / 1.5)


@pytest.mark.parametrize(
    ("gamma_train", "auc_id", "auc_ood"),
    [
        (
            0.8,
            (0.4375 + 0.3 * (0.85 + 0.76) / 2) / 0.8,
            (0.2 * (0.76 + 0.7) / 2 + 0.6) / 1.2,
        ),  # the curve is 0.76 there
        (None, None, None),
        (0.0, 0.9, 0.7125),
        (2.0, 0.7125, None),
        (9.0, 0.7125, None),
    ],
)
def test_training_level_between_two_levels_and_at_the_ends(gamma_train, auc_id, auc_ood):
    result = curve(gamma_train=gamma_train)
    assert result.auc_id == (auc_id if auc_id is None else pytest.approx(auc_id))
    assert result.auc_ood == (auc_ood if auc_ood is None else pytest.approx(auc_ood))


def test_a_summary_that_there_is_not_has_no_interval():
    model, data = bert(), classification_data(100)
    result = noise_curve(model, data, [0.5, 1.0], batch_size=5, gamma_train=0.25)
    assert result.auc_id is None and math.isnan(result.radius("auc_id"))
    assert result.radius("auc_ood") == result.radius("auc_over_range") > 0


def test_a_table_shows_no_interval_that_there_is_not():
    shown = str(curve([0.0, 1.0], [[0.9], [0.7]]))
    assert (
        "nan" not in shown
        and shown.endswith("averaged over the range 0.8")
        and "Area" not in str(curve([0.5], [[0.9]]))
    )
    assert "accuracy_auc" not in curve([0.5], [[0.9]]).to_dict()


def test_flat_dict_holds_plain_floats():
    flat = curve(gamma_train=0.5).to_dict()
    assert flat["accuracy@0.5"] == pytest.approx(0.85)
    assert flat["loss@2"] == 6.5
    assert flat["accuracy_auc"] == pytest.approx(1.425)
    assert {"accuracy_auc_over_range", "accuracy_auc_id", "accuracy_auc_ood"} <= set(flat)
    assert {type(value) for value in flat.values()} == {float}


def test_results_survive_the_disk(tmp_path):
    path = str(tmp_path / "curve.json")
    problem = DescentProblem(0.1, 1.0, 3)
    for before in (
        layer_profile(bert(), classification_data(20), problem=problem),
        curve(gamma_train=0.5),
    ):
        before.to_json(path)
        after = type(before).from_json(path)
        assert after.to_dict() == before.to_dict()
        assert str(after) == str(before)
    assert str(before).splitlines()[2].split() == ["0.5", "0.85", "-", "2.5"]
    np.testing.assert_array_equal(after.losses, before.losses)
    former = json.loads((tmp_path / "curve.json").read_text()) | {"gone": 1}
    (tmp_path / "former.json").write_text(
        json.dumps(former)
    )  # with an attribute that there is no more
    assert str(NoiseCurve.from_json(tmp_path / "former.json")) == str(before)
    with pytest.raises(TypeError):
        curve(settings={"seed": {0}}).to_json(path)
    assert NoiseCurve.from_json(path).to_dict() == before.to_dict()


def test_noisy_levels_equal_a_loop_by_hand():
    model, data = bert().eval(), classification_data(20)
    result = noise_curve(model, data, [0.5, 2.0], draws=2, seed=3, batch_size=8)
    noise = EmbeddingNoise(model, 2.0, seed=3)
    losses = []
    for draw in range(2):
        total = 0.0
        for index, batch in enumerate(DataLoader(data, 8, collate_fn=default_data_collator)):
            noise.reseed(draw, 2_000_000, index)
            with noise, torch.no_grad():
                total += float(model(**batch).loss) * len(batch["labels"])
        losses.append(total / 20)
    np.testing.assert_allclose(result.losses[1], losses, rtol=1e-6)
    assert losses[0] != losses[1]
    for gamma in (0.0, 1.0, (0.5, 2.0)):  # the level of a given noise is not used
        given = EmbeddingNoise(model, gamma, seed=3)
        found = noise_curve(model, data, [0.5, 2.0], draws=2, batch_size=8, noise=given)
        np.testing.assert_array_equal(found.losses, result.losses)
        assert found.settings == result.settings


@pytest.mark.parametrize("failing", [False, True], ids=["measured", "failing"])
def test_a_given_noise_stays_as_it_is(failing):
    def fail(outputs, labels, num_items_in_batch=None):
        raise ZeroDivisionError

    def noisy_logits():
        with noise:
            return model(**inputs).logits

    model, data = bert().eval(), classification_data(20)
    inputs = default_data_collator(data)
    noise = EmbeddingNoise(model, 1e-3, seed=0)
    with torch.no_grad():
        expected = noisy_logits(), noisy_logits()
        noise.reseed()
        assert torch.equal(noisy_logits(), expected[0])
        with pytest.raises(ZeroDivisionError) if failing else nullcontext():
            noise_curve(
                model, data, [1.0, 2.0], noise=noise, layer_loss_fn=fail if failing else None
            )
        assert torch.equal(noisy_logits(), expected[1])


def test_a_routers_loss_is_none_of_the_task():
    fields = MODELS["MixtralForCausalLM"]
    model, data = (
        build("MixtralForCausalLM", fields | {"router_aux_loss_coef": 0.5}),
        language_data(6, ragged=False),
    )
    curve = noise_curve(model, data, [0.0, 1.0], batch_size=4, draws=1)
    assert curve.losses[0, 0] == pytest.approx(
        layer_profile(model, data, batch_size=4).losses[-1], rel=1e-6
    )
    assert model.config.output_router_logits
    model.config.output_router_logits = False
    plain = noise_curve(model, data, [0.0, 1.0], batch_size=4, draws=1)
    np.testing.assert_allclose(curve.losses, plain.losses, rtol=1e-6)


def test_two_models_see_the_same_noise():
    def noise_seen_by(model):
        """The noise of (batch, draw), in order: what reaches the first LayerNorm, minus the same of level 0."""
        sums = []
        model.bert.embeddings.LayerNorm.register_forward_pre_hook(
            lambda module, args: sums.append(args[0])
        )
        noise_curve(model, classification_data(16), [0.0, 1.0], draws=2, batch_size=8, sigma=1.0)
        return [noisy - clean for clean, *draws in (sums[:3], sums[3:]) for noisy in draws]

    first, second = (
        noise_seen_by(bert(num_layers=2, seed=0)),
        noise_seen_by(bert(num_layers=3, seed=1)),
    )
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    assert len(first) == 4
    assert not any(torch.allclose(a, b) for index, a in enumerate(first) for b in first[:index])


def test_a_level_has_the_same_noise_in_every_grid():
    model, data = bert(), classification_data(20)
    coarse, fine = noise_curve(model, data, [1.0]), noise_curve(model, data, [0.0, 0.3, 1.0, 2.0])
    np.testing.assert_array_equal(coarse.losses[0], fine.losses[2])


def test_accuracy_under_noise_follows_the_normal_law():
    """One token whose embedding decides between two classes: accuracy is Phi(1 / (gamma sigma))."""

    class Sign(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding.from_pretrained(torch.tensor([[-1.0], [1.0]]))

        def get_input_embeddings(self):
            return self.table

        def forward(self, input_ids, labels=None):
            value = self.table(input_ids)[:, 0]  # [batch, 1]
            logits = torch.cat([-value, value], dim=1)  # [batch, 2]
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    data = [{"input_ids": torch.tensor([label]), "labels": label} for label in (0, 1) * 2000]
    result = noise_curve(Sign(), data, [0.0, 0.5, 1.0, 2.0], batch_size=1000, draws=5, sigma=2.0)
    expected = [1.0, *norm.cdf(1.0 / (2.0 * np.array([0.5, 1.0, 2.0])))]
    np.testing.assert_allclose(result.mean, expected, atol=4 * 0.5 / math.sqrt(20000))


def test_bad_input_is_refused():
    model, data = bert(), classification_data(8)
    with (
        EmbeddingNoise(model, 1.0) as noise,
        pytest.raises(ValueError, match="`noise` is attached"),
    ):
        noise_curve(model, data, [1.0], noise=noise)
    with pytest.raises(ValueError, match="`gammas` is"):
        noise_curve(model, data, [])
    with pytest.raises(ValueError, match="`draws` is 0"):
        noise_curve(model, data, [1.0], draws=0)
    for gammas in ([-1.0, 1.0], [0.0, math.inf], [math.nan]):
        with pytest.raises(ValueError, match="`gammas` is"):
            noise_curve(model, data, gammas)


def test_streams_and_loaders_are_read_once_and_say_no_number_of_samples():
    rows = classification_data(20)
    expected = noise_curve(bert(), rows, [0.0, 1.0], batch_size=8)
    assert expected.settings["samples"] == 20
    loaders = (
        DataLoader(data, 8, collate_fn=default_data_collator) for data in (rows, Stream(iter(rows)))
    )
    for data in (Stream(iter(rows)), *loaders):
        curve = noise_curve(bert(), data, [0.0, 1.0], batch_size=8)
        np.testing.assert_array_equal(curve.losses, expected.losses)
        assert (
            curve.settings["samples"] is None
            and curve.settings["data"] == expected.settings["data"]
        )
