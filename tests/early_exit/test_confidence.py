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


@pytest.fixture
def batch_sizes():
    """A BERT of four layers, and a list of the batch sizes that its layers get."""
    model = spread(bert(num_layers=4))
    sizes = []
    for layer in model.bert.encoder.layer:
        layer.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    return model, sizes


def test_samples_that_are_sure_leave_the_batch_for_good(batch_sizes):
    model, sizes = batch_sizes
    batch = default_data_collator(toy_rows(16))
    fast = ConfidenceExit(model, threshold=0.5)
    fast(**batch)  # finds the layers

    sizes.clear()
    exits = fast(**batch).exit_layers
    assert len(set(exits.tolist())) > 2
    left = [int((exits >= layer).sum()) for layer in range(1, 5)]
    assert sizes == [count for count in left if count]


def test_no_layer_is_computed_of_a_batch_that_has_left(batch_sizes):
    model, sizes = batch_sizes
    batch = default_data_collator(toy_rows(16))
    fast = ConfidenceExit(model, threshold=1.0)
    fast(**batch)  # finds the layers

    sizes.clear()
    assert fast(**batch).exit_layers.tolist() == [1] * 16
    assert sizes == [16]


def test_the_model_is_left_as_it_was():
    model = spread(bert(num_layers=4, dropout=0.3)).train()
    batch = default_data_collator(toy_rows(16))
    fast = ConfidenceExit(model, threshold=0.5)
    assert torch.equal(fast(**batch).logits, fast(**batch).logits)

    assert model.training
    assert model(**batch).logits.requires_grad
    for module in model.modules():
        assert not {"_call_impl", "forward"} & vars(module).keys()


def llama_classifier():
    config = llama(num_layers=4, num_labels=3, pad_token_id=0).config
    return spread(transformers.LlamaForSequenceClassification(config))


def with_positions(batch):
    """The batch with positions for each sample."""
    rows, length = batch["input_ids"].shape
    return {**batch, "position_ids": torch.arange(length).repeat(rows, 1)}


PLAIN = default_data_collator(toy_rows(16))
PADDED = default_data_collator(classification_data(16, seed=5))


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda: spread(bert(num_layers=4)), (PLAIN, PADDED, PLAIN)),
        (llama_classifier, (PLAIN, with_positions(PLAIN), PLAIN)),
    ],
    ids=["padding", "positions"],
)
def test_inputs_that_a_later_batch_has_for_the_first_time_are_shrunk_with_it(make, batches):
    model = make()
    fast = ConfidenceExit(model, threshold=0.5)
    for batch in batches:
        with torch.no_grad():
            layers = torch.stack(layer_logits(model, batch))  # [layers, batch, classes]
        output = fast(**batch)
        assert len(output.exit_layers.unique()) > 1
        expected = layers[output.exit_layers - 1, torch.arange(16)]
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-5)


def may_lose_more(lost, allowed):
    """Whether samples, of which each `lost` 1, 0 or -1, may lose more than allowed, with a chance above 5 %."""
    samples = len(lost)
    chances = [
        math.comb(samples, count) * allowed**count * (1 - allowed) ** (samples - count)
        for count in range(max(sum(lost), 0) + 1)
    ]
    lost = [*lost, 1]  # one loss more than seen
    deviation = statistics.pstdev(lost) / len(lost) ** 0.5
    return sum(chances) > 0.05 or statistics.mean(lost) + 1.6449 * deviation > allowed


def naive_exits(uncertainty, hits, max_loss):
    """Exits `[samples]` at the last threshold before the first one that may lose more than allowed."""
    num_layers, samples = hits.shape
    exits = torch.full((samples,), num_layers)
    for threshold in sorted(uncertainty[:-1].flatten().tolist()):
        tried = expected_exits(uncertainty, threshold + 1e-7)
        kept = hits[tried - 1, torch.arange(samples)].int()
        if may_lose_more((hits[-1].int() - kept).tolist(), max_loss):
            break
        exits = tried
    return exits


@pytest.mark.parametrize("max_loss", [0.0, 0.1, 0.2, 1.0])
def test_calibration_goes_up_to_the_first_threshold_that_may_cost_more_than_allowed(max_loss):
    model = spread(bert(num_layers=4))
    rows = toy_rows(60)
    batch = default_data_collator(rows)
    with torch.no_grad():
        layers = torch.stack(layer_logits(model, batch))  # [layers, samples, classes]
    hits = layers.argmax(-1) == batch["labels"]  # [layers, samples]
    uncertainty = torch.distributions.Categorical(logits=layers).entropy() / math.log(3)
    exits = naive_exits(uncertainty, hits, max_loss)

    fast = ConfidenceExit(model).calibrate(rows, max_loss, batch_size=16)
    report = fast.evaluate(rows, batch_size=16, repeats=1)
    assert report.mean_layers == pytest.approx(exits.double().mean().item(), abs=0.02)
    assert (report.mean_layers == 4) == (max_loss == 0)
    assert (report.mean_layers == 1) == (max_loss == 1)


def test_a_report_has_the_accuracies_of_exits_and_of_the_last_layer():
    model = spread(bert(num_layers=4))
    rows = toy_rows(60)
    batch = default_data_collator(rows)
    fast = ConfidenceExit(model, threshold=0.5)
    report = fast.evaluate(rows, batch_size=16, repeats=1)

    def accuracy(logits):
        return (logits.argmax(-1) == batch["labels"]).double().mean().item()

    with torch.no_grad():
        assert report.full_accuracy == pytest.approx(accuracy(model(**batch).logits))
    assert report.accuracy == pytest.approx(accuracy(fast(**batch).logits))
    assert report.exit_shares.sum() == pytest.approx(1.0)
    assert report.speedup > 0


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


def test_samples_that_are_all_right_may_leave_at_any_uncertainty():
    uncertainty = np.stack([np.arange(3000) / 3000, np.full(3000, -1.0)])
    assert _loosest_threshold(uncertainty, np.ones((2, 3000), bool), 0.01, 0.95) == 1.0


@pytest.fixture
def two_layers():
    """100 samples that are unsure at the first of two layers, and all of which both have right."""
    return np.stack([np.full(100, 0.5), np.full(100, -1.0)]), np.ones((2, 100), bool)


@pytest.mark.parametrize(("allowed", "leaves"), [(0.04, False), (0.05, True)])
def test_one_loss_more_than_seen_is_counted(two_layers, allowed, leaves):
    uncertainty, correct = two_layers
    correct[0, :2] = False
    correct[1, 2:4] = False  # as many are won as lost
    threshold = _loosest_threshold(uncertainty, correct, allowed, 0.95)
    assert (threshold > 0) == leaves


def test_candidates_are_tried_up_to_the_first_that_fails(two_layers):
    uncertainty, correct = two_layers
    uncertainty[0, :40] = 0.2  # which may cost much, and the others nothing
    correct[0, :20] = False
    correct[1, 20:70] = False
    assert _loosest_threshold(uncertainty, correct, 0.05, 0.95) == 0.0


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


ROWS = toy_rows(4)
IDS = default_data_collator(ROWS)["input_ids"]
NUMBERS = [{**row, "labels": torch.rand(3)} for row in ROWS]


def xlnet():
    name = "XLNetForSequenceClassification"
    return build(name, MODELS[name])


BAD_CALLS = {
    "`threshold` is 2": lambda: ConfidenceExit(bert(), threshold=2),
    "several labels a sample": lambda: ConfidenceExit(
        bert(problem_type="multi_label_classification")
    ),
    "`threshold` is not set": lambda: ConfidenceExit(bert())(input_ids=IDS),
    r"shape \[4, \d+, 4\d\]; .* needs \[batch": lambda: ConfidenceExit(llama(), 0.5)(input_ids=IDS),
    r"shape \[4, 1\]; .* needs \[batch": lambda: ConfidenceExit(bert(num_labels=1), 0.5)(
        input_ids=IDS
    ),
    "is not the batch; use `truncate`": lambda: ConfidenceExit(xlnet(), 0.5)(input_ids=IDS),
    "is not the batch; use `truncat": lambda: ConfidenceExit(xlnet()).calibrate(ROWS),
    "`max_loss` is -1": lambda: ConfidenceExit(bert()).calibrate(ROWS, -1),
    "`max_loss` is 5": lambda: ConfidenceExit(bert()).calibrate(ROWS, 5),  # per cent, perhaps
    "`confidence` is 95": lambda: ConfidenceExit(bert()).calibrate(ROWS, confidence=95),
    "no `labels` that are classes": lambda: ConfidenceExit(bert()).calibrate(NUMBERS),
    "`dataset` is empty": lambda: ConfidenceExit(bert(), threshold=0.5).evaluate([]),
    "`repeats` is 0": lambda: ConfidenceExit(bert(), threshold=0.5).evaluate(ROWS, repeats=0),
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_bad_arguments_to_confidence_exit_are_named(message):
    with pytest.raises(ValueError, match=message):
        BAD_CALLS[message]()


@pytest.fixture(scope="module")
def without_a_threshold():
    """Of a model whose layers below the last guess, so that each exit costs accuracy."""
    fast = ConfidenceExit(bert()).calibrate(toy_rows(64), max_loss=0.0)
    assert fast.threshold == 0
    return fast


def test_where_no_threshold_is_found_samples_get_the_model_s_own_logits(without_a_threshold):
    batch = default_data_collator(toy_rows(8))
    output = without_a_threshold(**batch)
    with torch.no_grad():
        assert output.logits.equal(without_a_threshold.model(**batch).logits)
    assert output.exit_layers.tolist() == [3] * 8


def test_where_no_threshold_is_found_it_is_said(caplog):
    ConfidenceExit(bert()).calibrate(toy_rows(64), max_loss=0.0)
    assert "No early exit is shown to lose at most 0 of the accuracy on these 64" in caplog.text


def test_where_no_threshold_is_found_nobody_is_told_of_a_speed(without_a_threshold):
    text = str(without_a_threshold.evaluate(toy_rows(64), repeats=1))
    assert text.startswith("No sample stops early")
    assert "larger `max_loss`" in text
    assert "times as fast" not in text
    assert "entropy <" not in text


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
