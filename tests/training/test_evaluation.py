"""What evaluations measure: `evaluate`, `evaluate_layers` and `evaluate_robustness` of the same rows agree."""

import logging
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from noisy import vit
from tiny.data import batches, classification_data, language_data
from tiny.models import bert, gpt2, llama, spread
from tiny.oracles import naive_layer_losses
from tiny.training import config
from transformers import default_data_collator

from hf_descent import DescentTrainer, layer_profile
from hf_descent.evaluation import layer_profiles
from hf_descent.evaluation.row_sums import RowSums


DATA = classification_data()
DATA_TEST = classification_data(32, seed=1)


def layer_losses_of(metrics):
    return [metrics[f"eval_layer_loss_{layer}"] for layer in (1, 2, 3)]


def per_token(outputs, labels, num_items_in_batch=None):
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


# ---- how rows and batches are put together ----


@pytest.mark.parametrize(
    "settings",
    [{}, {"objective": "fixed", "fixed_multipliers": [1.0] * 3}],
    ids=["descent", "fixed"],
)
def test_evaluation_before_training_and_by_batches_of_unequal_size(tmp_path, settings):
    args = config(tmp_path, per_device_eval_batch_size=7, **settings)
    metrics = DescentTrainer(bert(), args, eval_dataset=DATA_TEST).evaluate()

    whole = next(batches(DATA_TEST, 32))
    with torch.no_grad():
        expected = naive_layer_losses(bert().eval(), whole)
    assert layer_losses_of(metrics) == pytest.approx(expected.tolist(), rel=1e-5)
    assert "eval_feasible" in metrics


def test_equal_losses_of_many_batches_are_not_less_in_the_mean():
    rows = RowSums()
    batch = torch.tensor([[math.log(2)] * 2 + [1.0]] * 8)
    for _ in range(12_800):  # added up in float32 1.7e-6 less
        rows = rows.plus(batch)
    sums = rows.gathered(False).sums
    assert (sums[:, :2] / sums[:, 2:]).ravel() == pytest.approx(math.log(2), rel=1e-7)


def test_batches_count_by_their_labels(tmp_path):
    data = language_data(16, ragged=False)
    for row in data[5:]:
        row["labels"] = torch.full_like(row["labels"], -100)
    args = config(tmp_path, per_device_eval_batch_size=4)

    trainer = DescentTrainer(llama(), args, layer_loss_fn=per_token)
    whole = trainer.evaluate(data)
    labelled = trainer.evaluate(data[:5])
    for name in ("eval_loss", "eval_layer_loss_1"):
        assert whole[name] == pytest.approx(labelled[name], rel=1e-6), name


def test_a_loss_of_ones_own_gets_the_items_wherever_layers_are_evaluated(tmp_path):
    def total(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    args = config(tmp_path, noise_sigma=1.0)
    trainer = DescentTrainer(bert(), args, eval_dataset=DATA_TEST, layer_loss_fn=total)
    expected = layer_losses_of(trainer.evaluate())
    profile = trainer.evaluate_layers()
    curve = trainer.evaluate_robustness(gammas=[0.0])
    np.testing.assert_allclose(profile.losses, expected, rtol=1e-5)
    assert curve.losses[0, 0] == pytest.approx(expected[-1], rel=1e-5)


def test_a_collator_may_make_several_rows_of_an_example(tmp_path):
    def windows(rows):
        batch = default_data_collator(rows)
        return {name: torch.cat([tensor, tensor.flip(0), tensor]) for name, tensor in batch.items()}

    rows = DATA_TEST[:10]
    trainer = DescentTrainer(bert(), config(tmp_path), eval_dataset=rows, data_collator=windows)
    with torch.no_grad():
        expected = bert().eval()(**windows(rows)).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_collator_of_one_s_own_gets_the_columns_that_it_needs(tmp_path):
    rows = []
    for row in classification_data(12):
        rows.append({"words": row["input_ids"].tolist(), "labels": row["labels"]})

    def collate(rows):
        ids = torch.tensor([row["words"] for row in rows])
        return {"input_ids": ids, "labels": torch.tensor([int(row["labels"]) for row in rows])}

    args = config(tmp_path, remove_unused_columns=False, eval_gammas=[0.0], noise_sigma=1.0)
    trainer = DescentTrainer(bert(), args, eval_dataset=rows, data_collator=collate)
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate_layers().losses[-1] == pytest.approx(loss, rel=1e-5)
    assert trainer.evaluate_robustness().losses[0, 0] == pytest.approx(loss, rel=1e-5)


def test_hidden_states_do_not_pile_up_as_predictions(tmp_path):
    model = bert()
    model.config.output_hidden_states = True
    trainer = DescentTrainer(model, config(tmp_path), train_dataset=DATA)
    trainer.train()
    assert trainer.predict(DATA_TEST).predictions.shape == (32, 3)


@pytest.mark.parametrize("loss_only", [True, False])
def test_a_step_of_evaluation_takes_a_model_in_training_mode(tmp_path, loss_only):
    """As Trainer's does, which leaves the mode to its evaluation loop."""
    trainer = DescentTrainer(bert(), config(tmp_path), train_dataset=classification_data(8))
    batch = trainer.data_collator(classification_data(8))

    def loss_of_step(training):
        trainer.model.train(training)
        return trainer.prediction_step(trainer.model, batch, loss_only)[0]

    assert torch.equal(loss_of_step(True), loss_of_step(False))


# ---- several evaluation sets ----


@pytest.fixture
def of_two_sets(tmp_path):
    args = config(tmp_path, noise_sigma=1.0, eval_gammas=[0.0])
    return DescentTrainer(bert(), args, eval_dataset={"a": DATA[:16], "b": DATA_TEST})


def test_one_of_several_evaluation_sets_is_named(of_two_sets):
    metrics = of_two_sets.evaluate()
    profile = of_two_sets.evaluate_layers("a")
    assert profile.losses[-1] == pytest.approx(metrics["eval_a_loss"], rel=1e-5)
    violation = profile.to_dict()["max_violation"]
    assert violation == pytest.approx(metrics["eval_a_max_violation"], abs=1e-6)

    curve = of_two_sets.evaluate_robustness("b", gammas=[0.0])
    assert curve.losses[0, 0] == pytest.approx(metrics["eval_b_loss"], rel=1e-5)


def test_a_named_set_is_measured_at_a_level_of_noise(of_two_sets):
    noisy = layer_profile(bert(), DATA[:16], gamma=2.0, sigma=1.0, batch_size=8)
    found = of_two_sets.evaluate_layers("a", gamma=2.0)
    assert found.losses.tolist() == noisy.losses.tolist()


@pytest.mark.parametrize("measure", ["evaluate_layers", "evaluate_robustness"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "several evaluation sets: name one of them, 'a', 'b'"),
        (("c",), "is 'c'; give one of 'a', 'b'"),
        (({"x": DATA},), "is a dict of x; give one dataset"),
    ],
    ids=["none", "unknown", "dict"],
)
def test_what_names_none_of_several_sets_is_refused(of_two_sets, measure, rows, message):
    with pytest.raises(ValueError, match=message):
        getattr(of_two_sets, measure)(*rows)


# ---- levels of noise ----


@pytest.mark.parametrize(
    ("gammas", "levels"),
    [
        (np.linspace(0, 1, 3), [0.0, 0.5, 1.0]),
        (torch.linspace(0, 1, 3), [0.0, 0.5, 1.0]),
        (range(2), [0.0, 1.0]),
        ({0.0, 1.0}, [0.0, 1.0]),
        (0.5, [0.5]),
        (np.float32(0.5), [0.5]),
        (0, [0.0]),
    ],
    ids=["array", "tensor", "range", "set", "float", "scalar", "int"],
)
def test_noise_levels_are_taken_as_one_number_or_several(tmp_path, gammas, levels):
    trainer = DescentTrainer(bert(), config(tmp_path, noise_sigma=1.0), eval_dataset=DATA[:8])
    curve = trainer.evaluate_robustness(gammas=gammas)
    assert curve.gammas.tolist() == levels
    profiles = layer_profiles(bert(), DATA[:8], gammas)
    assert [profile.gamma for profile in profiles] == levels


@pytest.mark.parametrize(
    ("gammas", "message"),
    [(None, "set `eval_gammas`"), ([], r"`gammas` is \[\]"), ("all", "`gammas` is 'all'")],
)
def test_noise_levels_that_are_none_are_refused(tmp_path, gammas, message):
    trainer = DescentTrainer(bert(), config(tmp_path, noise_sigma=1.0), eval_dataset=DATA)
    with pytest.raises(ValueError, match=message):
        trainer.evaluate_robustness(None, gammas)


# ---- metrics that suit the task ----


def assert_metric(trainer, expected):
    """Both measures give this number for the last layer."""
    assert trainer.evaluate_layers().values[-1] == pytest.approx(expected, rel=1e-5)
    curve = trainer.evaluate_robustness(gammas=[0.0])
    assert curve.values[0, 0] == pytest.approx(expected, rel=1e-5)


def with_labels(labels):
    return [{**row, "labels": label} for row, label in zip(DATA, labels)]


def test_the_metric_of_a_regression_is_its_error(tmp_path):
    labels = torch.rand(8, generator=torch.Generator().manual_seed(0))
    data = with_labels(labels)
    args = config(tmp_path, noise_sigma=1.0)
    trainer = DescentTrainer(spread(bert(num_labels=1)), args, eval_dataset=data)
    predicted = torch.from_numpy(trainer.predict(data).predictions)[:, 0]
    assert_metric(trainer, (predicted - labels).square().mean().sqrt().item())


def test_the_metric_of_several_labels_is_the_share_of_right_ones(tmp_path):
    labels = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).round()
    data = with_labels(labels)
    model = spread(bert(problem_type="multi_label_classification"))
    trainer = DescentTrainer(model, config(tmp_path, noise_sigma=1.0), eval_dataset=data)
    logits = torch.from_numpy(trainer.predict(data).predictions)
    assert_metric(trainer, ((logits > 0) == (labels == 1)).float().mean().item())


def test_numbers_for_images_are_a_regression_before_the_model_knows(tmp_path):
    rows = [{"pixel_values": torch.rand(3, 8, 8), "labels": torch.rand(())} for _ in range(8)]
    trainer = DescentTrainer(vit(num_labels=1), config(tmp_path), eval_dataset=rows)
    assert trainer.evaluate_layers().metric == "rmse"


def test_tokens_are_no_regression_whatever_the_number_of_labels_says(tmp_path):
    trainer = DescentTrainer(llama(num_labels=1), config(tmp_path), eval_dataset=language_data(8))
    assert trainer.evaluate_layers().metric == "accuracy"


# ---- labels ----


@pytest.mark.parametrize("objective", ["erm", "descent"])
def test_smoothed_labels_are_those_of_the_next_tokens_also_before_training(tmp_path, objective):
    """GPT2LMHeadModel, whose class does not tell it; plain training never asks the model."""
    model = spread(gpt2(num_layers=2))
    data = language_data(8, ragged=False)
    args = config(tmp_path, objective=objective, label_smoothing_factor=0.1, noise_sigma=1.0)
    trainer = DescentTrainer(model, args, eval_dataset=data)
    by_profile = trainer.evaluate_layers().losses[-1]
    by_curve = trainer.evaluate_robustness(gammas=[0.0]).losses[0, 0]

    batch = default_data_collator(data)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits  # [batch, seq, vocab]
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1
    )
    assert [by_profile, by_curve] == pytest.approx([expected.item()] * 2, rel=1e-5)


@pytest.mark.parametrize("loss", [None, per_token])
def test_rows_without_a_label_that_counts_have_no_loss(tmp_path, loss):
    data = [{**row, "labels": torch.full_like(row["labels"], -100)} for row in language_data(8)]
    metrics = DescentTrainer(llama(), config(tmp_path), layer_loss_fn=loss).evaluate(data)
    assert np.isnan(metrics["eval_loss"])  # 0 would make it the best checkpoint
    assert "eval_layer_loss_1" not in metrics


def test_rows_without_labels_do_not_decide_which_labels_count_later(tmp_path):
    def own_head(model, hidden, inputs):
        return model.lm_head(hidden)

    data = language_data(8, seed=1)
    unlabelled = [{"input_ids": row["input_ids"]} for row in data]
    args = config(tmp_path, per_device_eval_batch_size=2)
    fresh = DescentTrainer(spread(llama()), args, readout=own_head)
    after = DescentTrainer(spread(llama()), args, readout=own_head)
    after.predict(unlabelled)
    assert after.evaluate(data)["eval_loss"] == fresh.evaluate(data)["eval_loss"]


# ---- mixed precision ----


def multiplied(outputs, labels, num_items_in_batch=None):
    """A loss with a product that autocast would round."""
    logits = outputs["logits"]
    return F.cross_entropy(logits @ torch.eye(3, dtype=logits.dtype), labels)


@pytest.mark.parametrize("loss", [None, multiplied])
def test_mixed_precision_holds_for_layers_and_levels_before_the_first_evaluation_too(
    tmp_path, loss
):
    """That of the model alone: losses and metrics are computed as `evaluate` does, on its float32 logits."""
    data = classification_data(16)
    args = config(tmp_path, bf16=True, noise_sigma=1.0)
    trainer = DescentTrainer(spread(bert()), args, eval_dataset=data, layer_loss_fn=loss)

    def measured():
        by_profile = trainer.evaluate_layers().losses[-1]
        by_curve = trainer.evaluate_robustness(gammas=[0.0]).losses[0, 0]
        return [by_profile, by_curve]

    before = measured()
    expected = trainer.evaluate()["eval_loss"]
    assert before + measured() == pytest.approx([expected] * 4, rel=1e-6)
    assert trainer.evaluate()["eval_loss"] == expected

    in_single_precision = layer_profile(spread(bert()), data).losses[-1]
    assert expected != pytest.approx(in_single_precision, rel=1e-4)


def test_an_evaluation_in_a_script_ends_with_the_verdict_in_one_line(tmp_path, caplog):
    settings = {"max_steps": 1, "descent_alpha": None, "exit_targets": {2: 0.1}}
    ends = {}
    for objective in ("descent", "erm"):
        args = config(tmp_path, objective=objective, **settings)
        trainer = DescentTrainer(bert(), args, train_dataset=DATA, eval_dataset=DATA_TEST)
        trainer.train()
        with caplog.at_level(logging.INFO):
            trainer.evaluate()
        ends[objective] = caplog.records[-1].message.splitlines()

    assert ends["descent"][0] == "Verdict on the evaluation data:"
    assert ends["descent"][-1].startswith("VERDICT: NOT ")
    assert ends["erm"][0] == "Verdict on the evaluation data after plain training:"
    assert not ends["erm"][-1].startswith("VERDICT")
