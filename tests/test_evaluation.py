import json
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import norm
from tiny import VOCAB, bert, classification_data, language_data, llama
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
    default_data_collator,
)

from hf_descent import DescentProblem, EmbeddingNoise
from hf_descent.evaluation import LayerProfile, NoiseCurve, layer_profile, noise_curve


CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def causal_xlnet():
    torch.manual_seed(0)
    return XLNetLMHeadModel(XLNetConfig(vocab_size=VOCAB, d_model=16, n_layer=2, n_head=2, d_inner=16))


def token_classifier():
    torch.manual_seed(0)
    return BertForTokenClassification(BertConfig(**CONFIG, num_labels=VOCAB))


def curve(gammas=(0.0, 0.5, 1.0, 2.0), values=((0.9, 0.9), (0.8, 0.9), (0.6, 0.8), (0.5, 0.5)), **options):
    losses = np.arange(2.0 * len(gammas)).reshape(-1, 2)
    return NoiseCurve("accuracy", np.array(gammas), np.array(values), losses, **options)


# ---- the noise curve's summaries, by hand ----


def test_summaries_equal_hand_computed_values():
    result = curve(gamma_train=0.5)
    np.testing.assert_allclose(result.mean, [0.9, 0.85, 0.7, 0.5])
    np.testing.assert_allclose(result.std, [0.0, 0.1 / math.sqrt(2), 0.2 / math.sqrt(2), 0.0], atol=1e-15)
    # 0.5 * (0.9 + 0.85) / 2 + 0.5 * (0.85 + 0.7) / 2 + 1 * (0.7 + 0.5) / 2
    assert result.auc == pytest.approx(0.4375 + 0.3875 + 0.6)
    assert result.auc_over_range == pytest.approx(1.425 / 2)
    assert result.retention == pytest.approx(1.425 / 2 / 0.9)
    assert result.auc_id == pytest.approx(0.875)
    assert result.auc_ood == pytest.approx((0.3875 + 0.6) / 1.5)


def test_training_level_between_two_levels_is_interpolated():
    result = curve(gamma_train=0.8)  # the curve is 0.76 there
    assert result.auc_id == pytest.approx((0.4375 + 0.3 * (0.85 + 0.76) / 2) / 0.8)
    assert result.auc_id * 0.8 + result.auc_ood * 1.2 == pytest.approx(result.auc)


@pytest.mark.parametrize(
    ("gamma_train", "auc_id", "auc_ood"),
    [(None, None, None), (0.0, 0.9, 0.7125), (2.0, 0.7125, None), (9.0, 0.7125, None)],
)
def test_training_level_at_the_ends(gamma_train, auc_id, auc_ood):
    result = curve(gamma_train=gamma_train)
    assert result.auc_id == (auc_id if auc_id is None else pytest.approx(auc_id))
    assert result.auc_ood == (auc_ood if auc_ood is None else pytest.approx(auc_ood))


def test_flat_dict_holds_plain_floats():
    flat = curve(gamma_train=0.5).to_dict()
    assert flat["accuracy@0.5"] == pytest.approx(0.85)
    assert flat["loss@2"] == 6.5
    assert flat["accuracy_auc"] == pytest.approx(1.425)
    assert {"accuracy_auc_over_range", "accuracy_retention", "accuracy_auc_id", "accuracy_auc_ood"} <= set(flat)
    assert {type(value) for value in flat.values()} == {float}
    assert "accuracy_retention" not in curve((0.5, 1.0), ((0.9,), (0.8,))).to_dict()


def test_results_survive_the_disk(tmp_path):
    path = str(tmp_path / "curve.json")
    before = curve(gamma_train=0.5)
    before.to_json(path)
    after = NoiseCurve.from_json(path)
    assert after.to_dict() == before.to_dict()
    assert str(after) == str(before)
    np.testing.assert_array_equal(after.losses, before.losses)
    problem = DescentProblem(0.1, 1.0, 3)
    before = layer_profile(bert(), classification_data(20), problem=problem)
    before.to_json(path)
    after = LayerProfile.from_json(path)
    assert after.to_dict() == before.to_dict()
    assert str(after) == str(before)


def test_table_has_a_row_for_each_level():
    lines = str(curve()).splitlines()
    assert len(lines) == 6
    assert lines[2].split() == ["0.5", "0.85", "nan", "0.071", "2.5"]


# ---- the noise curve, measured ----


def test_clean_level_equals_a_naive_loop_and_stock_evaluation(tmp_path):
    model, data = bert(), classification_data(60)
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
    arguments = TrainingArguments(str(tmp_path), per_device_eval_batch_size=20, report_to="none", use_cpu=True)
    assert result.losses[0, 0] == pytest.approx(Trainer(model, arguments).evaluate(data)["eval_loss"], rel=1e-6)
    ragged = noise_curve(model, data, [0.0], batch_size=23)
    assert ragged.values[0, 0] == correct / 60
    assert ragged.losses[0, 0] == pytest.approx(loss / 60, rel=1e-6)


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


def test_causal_models_are_scored_on_shifted_tokens():
    model, data = llama().eval(), language_data(20)
    result = noise_curve(model, data, [0.0], batch_size=6)
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
    torch.manual_seed(0)
    model = BertForQuestionAnswering(BertConfig(**CONFIG)).eval()
    data = [
        {"input_ids": row["input_ids"], "start_positions": index - 1, "end_positions": 99}  # both ends lie outside
        for index, row in enumerate(language_data(10))
    ]
    result = layer_profile(model, data, batch_size=5)
    hits, losses = [], []
    for row in data:
        outputs = model(row["input_ids"][None])
        start = max(row["start_positions"], 0)
        hits.append(float(outputs.start_logits.argmax() == start))
        losses.append(F.cross_entropy(outputs.start_logits, torch.tensor([start])).item())
    assert result.values[-1] == np.mean(hits)
    np.testing.assert_allclose(result.sample_losses[:, -1], losses, rtol=1e-5)


def test_two_models_see_the_same_noise():
    def noise_seen_by(model):
        """The noise of (batch, draw), in order: what reaches the first LayerNorm, minus the same of level 0."""
        sums = []
        model.bert.embeddings.LayerNorm.register_forward_pre_hook(lambda module, args: sums.append(args[0]))
        noise_curve(model, classification_data(16), [0.0, 1.0], draws=2, batch_size=8, sigma=1.0)
        return [noisy - clean for clean, *draws in (sums[:3], sums[3:]) for noisy in draws]

    first, second = noise_seen_by(bert(num_layers=2, seed=0)), noise_seen_by(bert(num_layers=3, seed=1))
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


def test_rmse_and_own_metrics():
    class Identity(nn.Module):
        main_input_name = "pixel_values"

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(()))

        def forward(self, pixel_values, labels=None):
            return {"loss": F.mse_loss(pixel_values * self.gain, labels), "logits": pixel_values * self.gain}

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


def test_data_is_collated_once_for_all_levels():
    collated = []

    def collate(rows):
        collated.append(len(rows))
        return default_data_collator(rows)

    noise_curve(bert(), classification_data(20), [0.0, 0.5, 1.0], draws=3, batch_size=8, data_collator=collate)
    assert collated == [8, 8, 4]


@pytest.mark.parametrize("evaluate", [lambda *a, **k: noise_curve(*a, [0.0, 1.0], **k), layer_profile])
def test_batches_are_dropped_once_scored(evaluate):
    batches, alive = [], []

    def collate(rows):
        alive.append(sum(batch() is not None for batch in batches))
        batch = default_data_collator(rows)
        batches.append(weakref.ref(batch["input_ids"]))
        return batch

    evaluate(bert(), classification_data(40), batch_size=4, data_collator=collate)
    assert len(alive) == 10
    assert max(alive) <= 1


def test_columns_that_the_model_does_not_take_are_dropped():
    data = [{**row, "text": "words"} for row in classification_data(8)]
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
    profile, curve = layer_profile(model, data, **options), noise_curve(model, data, [0.0], **options)
    batch = default_data_collator(data)
    labels = batch.pop("labels")
    model.eval()
    hidden = model(**batch, output_hidden_states=True).hidden_states[1:]
    logits = [head(state[:, 0]).detach() for state in hidden]
    np.testing.assert_allclose(profile.losses, [F.cross_entropy(x, labels).item() ** 2 for x in logits], rtol=1e-5)
    np.testing.assert_allclose(profile.values, [(x.argmax(-1) == labels).double().mean() for x in logits])
    np.testing.assert_allclose(curve.losses[0], profile.losses[-1])


def test_mixed_modes_are_restored_after_an_error():
    model = bert().train()
    model.bert.embeddings.eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="rmse"):
        noise_curve(model, classification_data(8), [0.0, 1.0], metric="rmse")
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())


# ---- the layer profile ----


def truncated(depth):
    model = bert(num_layers=3).eval()
    model.bert.encoder.layer = model.bert.encoder.layer[:depth]
    return model


@pytest.mark.parametrize("gamma", [0.0, 1.5])
def test_layer_losses_and_metrics_are_those_of_truncated_models(gamma):
    data = classification_data(30)
    profile = layer_profile(bert(num_layers=3), data, gamma=gamma, seed=5, batch_size=8)
    curves = [noise_curve(truncated(depth), data, [gamma], draws=1, seed=5, batch_size=8) for depth in (1, 2, 3)]
    np.testing.assert_allclose(profile.losses, [curve.losses[0, 0] for curve in curves], rtol=1e-6)
    np.testing.assert_allclose(profile.values, [curve.values[0, 0] for curve in curves])
    assert profile.gamma == gamma


def test_ratios_equal_numpy_on_truncated_models():
    data = classification_data(30)
    losses = np.zeros((30, 3))
    for layer in range(3):
        for n, row in enumerate(data):
            batch = {name: torch.as_tensor(value)[None] for name, value in row.items()}
            losses[n, layer] = truncated(layer + 1)(**batch).loss.item()
    profile = layer_profile(bert(num_layers=3), data, batch_size=8)
    np.testing.assert_allclose(profile.sample_losses, losses, rtol=1e-5)
    ratios = losses[:, 1:] / losses[:, :-1]
    flat = profile.to_dict()
    assert flat["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert flat["ratio_median"] == pytest.approx(np.median(ratios), rel=1e-5)
    assert flat["descending_share"] == (ratios < 1).mean()
    np.testing.assert_allclose(profile.losses, losses.mean(0), rtol=1e-5)


def test_causal_samples_average_over_their_own_tokens():
    model, data = llama().eval(), language_data(12)
    data[3]["labels"][:] = -100
    profile = layer_profile(model, data, batch_size=5)
    expected = []
    for row in data:
        logits, target = model(row["input_ids"][None]).logits[0, :-1].detach(), row["labels"][1:]
        expected.append(F.cross_entropy(logits, target).item())
    assert math.isnan(expected.pop(3))
    np.testing.assert_allclose(profile.sample_losses[:, -1], expected, rtol=1e-5)
    assert np.isfinite(profile.losses).all()


def test_problem_gives_violations_and_feasibility():
    model, data = bert(num_layers=3), classification_data(30)
    losses = layer_profile(model, data).losses
    problem = DescentProblem([0.1, 0.2, 0.3], 2.0, 3)
    profile = layer_profile(model, data, problem=problem)
    previous = [2.0, *losses[:2]]
    violations = [f - (1 - a) * p for f, a, p in zip(losses, (0.1, 0.2, 0.3), previous)]
    np.testing.assert_allclose(profile.violations, violations, rtol=1e-6)
    flat = profile.to_dict()
    assert flat["max_violation"] == pytest.approx(max(violations))
    assert flat["feasible"] == float(max(violations) <= 0) == 0.0
    tolerant = layer_profile(model, data, problem=problem, tolerance=max(violations) + 1e-6)
    assert tolerant.feasible
    assert "violation" in str(tolerant)
    assert "violation" not in str(layer_profile(model, data))


def test_ratios_of_zero_losses():
    losses = np.array([[1.0, 0.0, 0.0], [0.0, 2.0, 1.0]])
    ratios = LayerProfile("accuracy", losses[0], losses[0], losses).ratios
    np.testing.assert_array_equal(ratios, [[0.0, 1.0], [np.inf, 0.5]])


def test_flat_profile_holds_plain_floats():
    flat = layer_profile(bert(num_layers=2), classification_data(8), problem=DescentProblem(0.1, 1.0, 2)).to_dict()
    assert {type(value) for value in flat.values()} == {float}
    assert json.loads(json.dumps(flat)) == flat
    assert {"layer_loss_1", "layer_accuracy_2", "max_violation", "feasible"} <= set(flat)


# ---- bad input ----


def test_bad_input_is_refused():
    model, data = bert(), classification_data(8)
    with pytest.raises(ValueError, match="`gammas` is"):
        noise_curve(model, data, [])
    with pytest.raises(ValueError, match="`draws` is 0"):
        noise_curve(model, data, [1.0], draws=0)
    with pytest.raises(ValueError, match="`gamma` is"):
        noise_curve(model, data, [-1.0, 1.0])
    with pytest.raises(ValueError, match="`metric` is 'f1'"):
        noise_curve(model, data, [0.0], metric="f1")
    for evaluate in (lambda rows: noise_curve(model, rows, [0.0]), lambda rows: layer_profile(model, rows)):
        with pytest.raises(ValueError, match="empty"):
            evaluate([])
        with pytest.raises(ValueError, match="no labels"):
            evaluate([{k: v for k, v in row.items() if k != "labels"} for row in data])
    with pytest.raises(ValueError, match="'accuracy'"):
        noise_curve(bert(num_labels=1), [{**row, "labels": 0.5} for row in data], [0.0])
