import math
import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from architectures import FAMILIES, MODELS, batch_for, build
from tiny.data import classification_data, toy_rows
from tiny.models import bert, llama, spread
from transformers import default_data_collator

from hf_descent import layer_logits
from hf_descent.early_exit import ConfidenceExit
from hf_descent.early_exit.confidence import _loosest_threshold


def expected_exits(uncertainty, threshold):
    """First layer that is sure, in plain Python; `[layers, batch]` -> `[batch]`."""
    layers = []
    for sample in uncertainty.T.tolist():
        sure = [layer for layer, value in enumerate(sample[:-1], start=1) if value < threshold]
        layers.append(sure[0] if sure else len(sample))
    return torch.tensor(layers)


CLASSIFIERS = [
    name
    for name in FAMILIES
    if name.endswith(("ForSequenceClassification", "ForImageClassification"))
]
CLASSIFIERS.remove("XLNetForSequenceClassification")  # whose states are [seq, batch, width]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_each_sample_gets_the_logits_of_the_first_layer_that_is_sure(name):
    model = build(name, MODELS[name])
    batch = {
        key: torch.cat([value, value.flip(0), value[:1]]) for key, value in batch_for(model).items()
    }
    if "input_ids" in batch:
        batch["input_ids"][2:, 0] = torch.tensor([11, 12, 13])
    with torch.no_grad():
        layers = torch.stack(layer_logits(model, batch))  # [layers, batch, classes]
    probabilities = layers.double().softmax(-1)
    uncertainty = -(probabilities * probabilities.log()).sum(-1) / math.log(
        layers.shape[-1]
    )  # [layers, batch]
    values = uncertainty.flatten().sort().values
    gaps = values.diff() > 1e-5  # equal ones are told apart by rounding
    thresholds = ((values[1:] + values[:-1]) / 2)[gaps].tolist()[::2]
    for threshold in (0.0, *thresholds, 1.0):
        output = ConfidenceExit(model, threshold)(**batch)
        exits = expected_exits(uncertainty, threshold)
        assert output.exit_layers.tolist() == exits.tolist()
        torch.testing.assert_close(
            output.logits, layers[exits - 1, torch.arange(len(exits))], rtol=1e-4, atol=1e-5
        )


def test_samples_that_are_sure_leave_the_batch_for_good():
    model, batch = spread(bert(num_layers=4)), default_data_collator(toy_rows(16))
    sizes = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    fast = ConfidenceExit(model, threshold=0.5)
    fast(**batch)  # finds the layers
    sizes.clear()
    exits = fast(**batch).exit_layers
    assert len(set(exits.tolist())) > 2
    assert sizes == [n for layer in range(1, 5) if (n := int((exits >= layer).sum()))]
    fast.threshold = 1.0
    sizes.clear()
    assert fast(**batch).exit_layers.tolist() == [1] * 16 and sizes == [16]


def test_the_model_is_left_as_it_was():
    model, batch = (
        spread(bert(num_layers=4, dropout=0.3)).train(),
        default_data_collator(toy_rows(16)),
    )
    fast = ConfidenceExit(model, threshold=0.5)
    assert torch.equal(fast(**batch).logits, fast(**batch).logits)
    assert model.training and model(**batch).logits.requires_grad
    assert not any(
        "_call_impl" in vars(module) or "forward" in vars(module) for module in model.modules()
    )


def test_inputs_that_a_later_batch_has_for_the_first_time_are_shrunk_with_it():
    """Padding, and positions for each sample."""
    config = llama(num_layers=4, num_labels=3, pad_token_id=0).config
    decoder = spread(transformers.LlamaForSequenceClassification(config))
    plain, padded = (
        default_data_collator(rows) for rows in (toy_rows(16), classification_data(16, seed=5))
    )
    placed = plain | {"position_ids": torch.arange(plain["input_ids"].shape[1]).repeat(16, 1)}
    for model, batches in (
        (spread(bert(num_layers=4)), (plain, padded, plain)),
        (decoder, (plain, placed, plain)),
    ):
        fast = ConfidenceExit(model, threshold=0.5)
        for batch in batches:
            with torch.no_grad():
                layers = torch.stack(layer_logits(model, batch))  # [layers, batch, classes]
            output = fast(**batch)
            assert len(output.exit_layers.unique()) > 1
            expected = layers[output.exit_layers - 1, torch.arange(16)]
            torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_loss", [0.0, 0.1, 0.2, 1.0])
def test_calibration_goes_up_to_the_first_threshold_that_may_cost_more_than_allowed(max_loss):
    model, rows = spread(bert(num_layers=4)), toy_rows(60)
    fast = ConfidenceExit(model).calibrate(rows, max_loss, batch_size=16)
    batch = default_data_collator(rows)
    with torch.no_grad():
        layers = torch.stack(layer_logits(model, batch))
    hits = layers.argmax(-1) == batch["labels"]  # [layers, samples]
    entropy = torch.distributions.Categorical(logits=layers).entropy() / math.log(3)
    exits = torch.full((60,), 4)
    for threshold in sorted(entropy[:-1].flatten().tolist()):
        tried = expected_exits(entropy, threshold + 1e-7)
        lost = [int(hits[3, k]) - int(hits[tried[k] - 1, k]) for k in range(60)]
        chances = [
            math.comb(60, k) * max_loss**k * (1 - max_loss) ** (60 - k)
            for k in range(max(sum(lost), 0) + 1)
        ]
        lost.append(1)
        if (
            sum(chances) > 0.05
            or statistics.mean(lost) + 1.6449 * statistics.pstdev(lost) / 61**0.5 > max_loss
        ):
            break
        exits = tried
    report = fast.evaluate(rows, batch_size=16, repeats=1)
    assert report.full_accuracy == pytest.approx(hits[3].double().mean().item())
    assert report.mean_layers == pytest.approx(exits.double().mean().item(), abs=0.02)
    assert report.exit_shares.sum() == pytest.approx(1.0) and report.speedup > 0
    hits = fast(**batch).logits.argmax(-1) == batch["labels"]
    assert report.accuracy == pytest.approx(hits.double().mean().item())
    assert (report.mean_layers == 4) == (max_loss == 0) and (report.mean_layers == 1) == (
        max_loss == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_no_more_is_lost_on_other_data_than_was_stated_as_often_as_was_stated(confidence):
    rng = np.random.default_rng(0)

    def draw(samples):
        # The last layer mends half of what the first one has wrong and is unsure of, and spoils a little.
        unsure, chance = rng.uniform(size=(2, samples))
        first = rng.uniform(size=samples) < 1 - 0.4 * unsure
        last = np.where(first, chance > 0.1 * unsure, chance < 0.5 * unsure)
        return np.stack([unsure, np.full(samples, -1.0)]), np.stack([first, last])

    unsure, correct = draw(400_000)
    broken, leave = 0, []
    for _ in range(200):
        threshold = _loosest_threshold(*draw(1000), 0.01, confidence)
        exits = unsure[0] < threshold
        broken += (correct[1][exits].astype(float) - correct[0][exits]).sum() / len(exits) > 0.01
        leave.append(exits.mean())
    assert broken / 200 <= 1 - confidence + 2 * (confidence * (1 - confidence) / 200) ** 0.5
    assert np.mean(leave) > 0.3  # by not leaving at all it would be kept as well


@pytest.mark.parametrize(("samples", "confidence"), [(264, 0.95), (432, 0.95), (420, 0.999)])
def test_few_samples_of_which_few_are_lost_prove_no_more_than_the_binomial(samples, confidence):
    """At a true loss just above the allowed one, of which the number in a sample is far from normal."""
    rng = np.random.default_rng(0)
    broken = 0
    for lost in rng.binomial(samples, 0.0101, size=2000):
        correct = np.ones((2, samples), bool)
        correct[0, :lost] = False
        unsure = np.stack([np.full(samples, 0.5), np.full(samples, -1.0)])
        broken += _loosest_threshold(unsure, correct, 0.01, confidence) > 0
    assert broken / 2000 <= 1 - confidence + 2 * (confidence * (1 - confidence) / 2000) ** 0.5


def test_candidates_are_tried_up_to_the_first_that_fails_with_one_loss_more_than_seen():
    sure, few, many = np.full(100, -1.0), np.full(100, 0.5), np.arange(3000) / 3000
    assert (
        _loosest_threshold(
            np.stack([many, np.full(3000, -1.0)]), np.ones((2, 3000), bool), 0.01, 0.95
        )
        == 1.0
    )
    correct = np.ones((2, 100), bool)
    correct[0, :2] = correct[1, 2:4] = False  # as many are won as lost
    assert _loosest_threshold(np.stack([few, sure]), correct, 0.04, 0.95) == 0.0
    assert _loosest_threshold(np.stack([few, sure]), correct, 0.05, 0.95) > 0
    correct[0, :20] = correct[1, 20:70] = False  # the first 40 may cost much, and the others none
    few[:40] = 0.2
    assert _loosest_threshold(np.stack([few, sure]), correct, 0.05, 0.95) == 0.0


def test_samples_without_a_label_do_not_count_in_an_accuracy():
    model, rows = spread(bert(num_layers=3)), toy_rows(40)
    labelled = rows[::2]
    rows = [row if index % 2 == 0 else row | {"labels": -100} for index, row in enumerate(rows)]
    fast = ConfidenceExit(model).calibrate(rows, 0.9, 0.5)
    assert fast.threshold == ConfidenceExit(model).calibrate(labelled, 0.9, 0.5).threshold > 0
    fast.threshold = 0.5
    report, other = fast.evaluate(rows, repeats=1), fast.evaluate(labelled, repeats=1)
    assert (report.accuracy, report.full_accuracy) == (other.accuracy, other.full_accuracy)


def test_leaving_early_is_faster_by_the_clock():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=512,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config)
    rows = classification_data(64, length=32, pad=False)
    report = ConfidenceExit(model, threshold=1.0).evaluate(rows, batch_size=64)
    assert report.mean_layers == 1.0 and report.speedup > 2.0


def test_uncertainty_has_full_precision_where_the_model_has_not():
    model, batch = spread(bert(num_layers=4)).bfloat16(), default_data_collator(toy_rows(16))
    with torch.no_grad():
        layers = torch.stack(layer_logits(model, batch)).float()
    uncertainty = torch.distributions.Categorical(logits=layers).entropy() / math.log(3)
    values = uncertainty.flatten().sort().values
    for threshold in ((values[1:] + values[:-1]) / 2).tolist()[::6]:
        exits = ConfidenceExit(model, threshold)(**batch).exit_layers
        assert exits.tolist() == expected_exits(uncertainty, threshold).tolist()


def test_bad_arguments_to_confidence_exit_are_named():
    rows, multi_label = toy_rows(4), bert()
    xlnet = build("XLNetForSequenceClassification", MODELS["XLNetForSequenceClassification"])
    batch, numbers = default_data_collator(rows), [row | {"labels": torch.rand(3)} for row in rows]
    multi_label.config.problem_type = "multi_label_classification"
    for match, call in {
        "`threshold` is 2": lambda: ConfidenceExit(bert(), threshold=2),
        "several labels a sample": lambda: ConfidenceExit(multi_label),
        "`threshold` is not set": lambda: ConfidenceExit(bert())(**batch),
        r"shape \[4, \d+, 4\d\]; .* needs \[batch": lambda: ConfidenceExit(llama(), 0.5)(
            input_ids=batch["input_ids"]
        ),
        "is not the batch; use `truncate`": lambda: ConfidenceExit(xlnet, 0.5)(
            input_ids=batch["input_ids"]
        ),
        "is not the batch; use `truncat": lambda: ConfidenceExit(xlnet).calibrate(rows),
        r"shape \[4, 1\]; .* needs \[batch": lambda: ConfidenceExit(bert(num_labels=1), 0.5)(
            input_ids=batch["input_ids"]
        ),
        "`max_loss` is -1": lambda: ConfidenceExit(bert()).calibrate(rows, -1),
        "`max_loss` is 5": lambda: ConfidenceExit(bert()).calibrate(rows, 5),  # per cent, perhaps
        "`confidence` is 95": lambda: ConfidenceExit(bert()).calibrate(rows, confidence=95),
        "no `labels` that are classes": lambda: ConfidenceExit(bert()).calibrate(numbers),
        "`dataset` is empty": lambda: ConfidenceExit(bert(), threshold=0.5).evaluate([]),
        "`repeats` is 0": lambda: ConfidenceExit(bert(), threshold=0.5).evaluate(rows, repeats=0),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_where_no_threshold_is_found_nobody_is_told_of_a_speed(caplog):
    """Layers below the last guess, so that each exit costs accuracy: samples get the model's own logits."""
    model = bert()
    rows = toy_rows(64)
    fast = ConfidenceExit(model).calibrate(rows, max_loss=0.0)
    assert fast.threshold == 0
    assert "No early exit is shown to lose at most 0 of the accuracy on these 64" in caplog.text
    batch = default_data_collator(rows[:8])
    with torch.no_grad():
        assert fast(**batch).logits.equal(model(**batch).logits)
    assert fast(**batch).exit_layers.tolist() == [3] * 8
    text = str(fast.evaluate(rows, repeats=1))
    assert text.startswith("No sample stops early") and "larger `max_loss`" in text
    assert "times as fast" not in text and "entropy <" not in text


def test_other_threads_run_the_model_whole_and_do_not_stop_early():
    model = spread(bert(num_layers=3)).eval()
    batch = default_data_collator(classification_data(8))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    fast = ConfidenceExit(model, threshold=0.5)
    reading = fast._read(inputs, 0.0)
    next(reading)  # it is within the model

    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(lambda: model(**inputs).logits).result()
        stopping = pool.submit(lambda: fast(**inputs))
        with pytest.raises(ValueError, match="stops early in another thread"):
            stopping.result()

    *_, (_, last) = reading
    torch.testing.assert_close(whole, last)
    fast(**inputs)
