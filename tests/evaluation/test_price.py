"""What a verdict says of the last layer: beside plain training, and beside what it was before."""

import numpy as np
import pytest

from hf_descent import DescentProblem
from hf_descent.evaluation import Certificate, LayerProfile, certify
from hf_descent.evaluation.price import PLAIN, START, WARMUP, Reference, percent, price_of


def rows_of(first, last):
    return np.column_stack([first, last, np.ones(len(last))])


def sums_of(losses):
    return np.column_stack([losses, np.ones(len(losses))])


PROBLEM = DescentProblem(None, 10.0, 2, loss_targets={1: 4.0})


def verdict(last, then=None, is_same_data=True, is_paired=True, **settings):
    references = []
    if then is not None:
        references = [Reference.measured(START, sums_of(then), is_same_data, is_paired)]
    settings = {"chance": 10.0, "references": references, "max_last_layer_rise": 0.02} | settings
    return certify(PROBLEM, rows_of(np.full(len(last), 1.0), last), **settings)


def losses(mean, spread=1.0, rows=400, seed=0):
    """Of rows that differ much; whose mean is exact."""
    noise = spread * np.random.default_rng(seed).normal(size=rows)
    return mean + noise - noise.mean()


def test_the_verdict_begins_with_the_price():
    found = verdict(losses(2.61), plain=2.54)
    assert str(found).startswith("Last layer: 2.61, plain training 2.54 (+2.8 %).\n")
    assert found.headline == "VERDICT: MET, price +2.8 %"
    alone = verdict(losses(2.61))
    assert str(alone).startswith(
        "Last layer: 2.61; price unknown, since plain training was not measured on these data.\n"
    )
    assert alone.headline == "VERDICT: MET, price unknown"
    assert not str(verdict(losses(2.61), has_price=False)).startswith("Last layer")
    few = verdict(losses(2.61, rows=20))
    assert few.headline == "VERDICT: NOT SHOWN, price unknown"


def test_a_last_layer_that_became_worse_meets_nothing():
    then = losses(3.0)
    worse = verdict(then * 1.03, then)
    assert worse.verdicts == ["not met"] and not worse.feasible
    assert worse.reasons == ["f_L is 3.0 % above its value before training; 2 % is allowed"]
    assert worse.headline.startswith("VERDICT: NOT MET")
    assert f"before training {3:.4g} (+3.0 %)" in str(worse)
    allowed = verdict(then * 1.01, then)
    assert allowed.verdicts == ["met"] and "before training 3 (+1.0 %)" in str(allowed)
    assert verdict(then * 1.03, then, max_last_layer_rise=None).verdicts == ["met"]
    assert verdict(then * 1.03, then, max_last_layer_rise=0.05).verdicts == ["met"]


def test_rows_that_are_the_same_are_compared_by_pairs():
    """Unpaired, the intervals of such rows are wider than the rise."""
    then = losses(3.0)
    now = then * 1.03
    assert verdict(now, then).verdicts == ["not met"]
    assert verdict(now, then, is_paired=False).verdicts == ["met"]
    assert verdict(then * 1.5, then, is_paired=False).verdicts == ["not met"]
    # Within the noise of the rows nothing is shown, also by pairs.
    assert verdict(losses(3.1, seed=1), then).verdicts == ["met"]


def test_a_loss_of_other_data_is_shown_and_decides_nothing():
    then = losses(3.0)
    harder = verdict(then * 1.5, then, is_same_data=False)
    assert harder.verdicts == ["met"] and harder.price.exceeded is None
    assert "; before training 3 (on the evaluation set of training)." in str(harder)

    as_json = {"name": START, "loss": 3.0, "upper": 3.1}  # as `descent_config.json` has it
    assert price_of(rows_of(then, then * 1.5), [as_json], 0.02).exceeded is None


def test_rows_that_were_left_out_do_not_count():
    then, now = losses(3.0), losses(3.0)
    sums = sums_of(then)
    sums[::2] = 0
    now[::2] = 9.0  # only in the rows that were left out
    reference = Reference.measured(WARMUP, sums, is_same_data=True)
    assert reference.loss == pytest.approx(then[1::2].mean())
    assert not reference.is_exceeded(sums_of(now), 0.02)
    assert reference.is_exceeded(sums_of(now * 1.1), 0.02)


def test_a_false_alarm_is_as_rare_as_stated():
    """f_L exactly above by as much as is allowed: half of 5 % are told that it is more."""
    generator, wrong = np.random.default_rng(0), 0
    for _ in range(1000):
        then = 3 + generator.normal(size=100)
        now = 1.02 * then + 0.1 * generator.normal(size=100)
        reference = Reference.measured(START, sums_of(then), is_same_data=True)
        wrong += reference.is_exceeded(sums_of(now), 0.02)
    assert wrong <= 40


def test_prices_survive_the_disk(tmp_path):
    then = losses(3.0)
    found = verdict(then * 1.03, then, plain=2.5)
    path = str(tmp_path / "verdict.json")
    found.to_json(path)
    read = Certificate.from_json(path)
    assert (str(read), read.headline) == (str(found), found.headline)
    as_json = {"name": START, "loss": 3.0, "upper": 3.1, "rows": sums_of(then).tolist()}
    assert price_of(rows_of(then, then * 1.03), [as_json], 0.02).exceeded == START


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (-0.0004, "+0.0 %"),
        (0.0004, "+0.0 %"),
        (0.0, "+0.0 %"),
        (-0.0006, "-0.1 %"),
        (0.5, "+50.0 %"),
    ],
)
def test_a_change_that_rounds_to_none_has_no_minus(share, expected):
    assert percent(share) == expected
    price = price_of(
        rows_of([1.0, 1.0], [1.0 + share] * 2),
        [Reference(START, 1.0, is_same_data=True)],
        plain=Reference(PLAIN, 1.0),
    )
    assert str(price).count(f"({expected})") == 2
    headline = verdict(losses(2.0 * (1 + share)), plain=2.0).headline
    assert headline == f"VERDICT: MET, price {expected}"


def test_a_loss_that_was_zero_has_no_percentage():
    """A denoiser that copies its clean input has a loss of 0 before training."""
    found = verdict(losses(2.0), np.zeros(400))
    assert found.reasons == ["f_L was 0 before training"]
    assert "; before training 0.\n" in str(found)


def profile(last):
    rows = rows_of(np.full(len(last), 1.0), last)
    return LayerProfile("accuracy", rows.mean(axis=0)[:2], np.zeros(2), row_sums=rows)


def test_a_verdict_that_is_met_says_that_the_model_is_worse_than_plain_training(tmp_path):
    plain = losses(3.0)
    dear = verdict(plain * 1.147, plain=profile(plain))
    warning = "the last layer is 14.7 % worse than plain training (2 % is allowed)"
    assert dear.verdicts == ["met"]
    assert dear.headline == f"VERDICT: MET, price +14.7 % (+14.7 % to +14.7 %), but {warning}"

    dear.to_json(str(tmp_path / "verdict.json"))
    assert Certificate.from_json(str(tmp_path / "verdict.json")).headline == dear.headline

    # Nothing is shown within the limit, within the noise of the rows, without a limit, nor by a number alone.
    for last, other, settings in (
        (plain * 1.01, profile(plain), {}),
        (losses(3.1, seed=1), profile(plain), {}),
        (plain * 1.147, profile(plain), {"max_last_layer_rise": None}),
        (plain * 1.147, 3.0, {}),
    ):
        headline = verdict(last, plain=other, **settings).headline
        assert headline.startswith("VERDICT: MET, price +") and "worse" not in headline
    few = verdict(losses(3.5, rows=20), plain=profile(losses(3.0, rows=20)))
    assert few.headline == "VERDICT: NOT SHOWN, price +16.7 %"


def test_a_plain_profile_of_as_many_other_examples_is_refused():
    trained = profile(losses(3.0))
    trained.problem = PROBLEM.state_dict()
    trained.data = "these"
    plain = profile(losses(3.0, seed=1))
    plain.data = "others"
    with pytest.raises(ValueError, match="not of the same examples .*: measure both alike"):
        trained.certificate(plain=plain)


def test_a_profile_keeps_that_of_plain_training_on_the_disk(tmp_path):
    trained = profile(losses(3.0) * 1.147)
    trained.problem = PROBLEM.state_dict()
    trained.chance = 10.0
    trained.facts = {"max_last_layer_rise": 0.02}
    trained.keep_plain(profile(losses(3.0)))
    trained.to_json(str(tmp_path / "layer_profile.json"))
    read = LayerProfile.from_json(str(tmp_path / "layer_profile.json"))
    headline = read.certificate().headline
    assert headline == trained.certificate().headline
    assert headline.endswith(
        "but the last layer is 14.7 % worse than plain training (2 % is allowed)"
    )


def test_the_interval_of_the_price_is_paired_by_example_and_holds_as_often_as_stated():
    generator = np.random.default_rng(5)
    true_share = 0.05
    covered = 0
    for _ in range(200):
        plain = 1 + generator.exponential(size=300)  # examples differ far more than both models do
        trained = (1 + true_share) * plain + 0.1 * generator.normal(size=300)
        price = verdict(trained, plain=profile(plain)).price
        low, high = price.limits
        covered += low <= true_share <= high
        assert high - low < 0.03

    assert covered >= 180
    assert price.text == f"{percent(price.share)} ({percent(low)} to {percent(high)})"
    assert f", 95 % interval {percent(low)} to {percent(high)})" in str(price)
    assert verdict(losses(2.61), plain=2.54).price.limits is None  # a number has no examples
