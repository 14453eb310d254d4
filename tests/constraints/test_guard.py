"""The limit on the rise of the last layer's loss: its statistics, its point of rest, and how it is saved."""

import json
import math
import re
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import InOrder, config, dual_step, trained

from hf_descent import DescentProblem, Multipliers
from hf_descent.configs import DescentArguments
from hf_descent.constraints.guard import LastLayerGuard
from hf_descent.constraints.saved_state import STATE_NAME
from hf_descent.constraints.state import DualState


DATA = classification_data()


def draws(kind: str, steps: int, seed: int) -> list[float]:
    """Losses of a model that does not change: those of batches, give or take."""
    normal = torch.randn(steps, generator=torch.Generator().manual_seed(seed))
    relative = {
        "narrow": 1 + 0.02 * normal,
        "wide": 1 + 0.1 * normal,
        "skewed": (0.2 * normal - 0.02).exp(),
        "near zero": (0.2 * normal - 0.02).exp() * 1e-6,
    }
    return relative[kind].tolist()


@pytest.mark.parametrize("kind", ["narrow", "wide", "skewed", "near zero"])
def test_noise_alone_hardly_slows_the_multipliers_down(kind):
    grown = []
    for seed in range(5):
        guard, multipliers = LastLayerGuard(0.02), Multipliers(1, 0.02, optim="sgd")
        for loss in draws(kind, 600, seed):
            guard.observe(loss, acts=True)
            multipliers.step(torch.ones(1), guard.share, guard.shrinks)
        grown.append(multipliers.values.item() / (600 * 0.02))
    assert sum(grown) / len(grown) > 0.85


@pytest.mark.parametrize("kind", ["narrow", "wide", "skewed", "near zero"])
def test_a_rise_makes_the_multipliers_shrink_until_the_loss_is_back(kind):
    guard = LastLayerGuard(0.02)
    losses = draws(kind, 300, seed=0)
    for loss in losses[:150]:
        guard.observe(loss, acts=True)
    shrinks = []
    for loss in losses[150:200]:
        guard.observe(1.5 * loss, acts=True)
        shrinks.append(guard.shrinks)
    assert not shrinks[0] and all(shrinks[15:])
    assert guard.rise == pytest.approx(0.5, abs=0.2)
    for loss in losses[200:250]:
        guard.observe(loss, acts=True)
    assert not guard.shrinks and guard.share > 0


def test_a_short_rise_holds_the_multipliers_where_they_are():
    """As after a step of the optimizer that went too far: the loss comes back by itself."""
    guard = LastLayerGuard(0.02)
    multipliers = Multipliers(1, 0.02, optim="sgd")
    values = []
    for loss in [1.0] * 60 + [1.5] * 7 + [1.0] * 60:
        guard.observe(loss, acts=True)
        multipliers.step(torch.ones(1), guard.share, guard.shrinks)
        values.append(multipliers.values.item())

    growth = torch.tensor(values).diff()
    assert growth.min() == 0  # they stood still
    assert guard.share == 1
    assert growth[-1].item() == pytest.approx(0.02, rel=1e-4)


def test_a_rise_that_began_without_multipliers_is_not_held_against_them():
    guard = LastLayerGuard(0.02)
    for loss in [1.0] * 60:
        guard.observe(loss, acts=False)
    for _ in range(60):
        guard.observe(1.5, acts=True)
        assert not guard.shrinks
    assert guard.share == 1 and guard.rise == pytest.approx(0, abs=1e-3)

    for _ in range(20):  # now they may have done it
        guard.observe(1.8, acts=True)
    assert guard.shrinks


@pytest.mark.parametrize("optim", ["sgd", "adam", "pi"])
def test_a_share_of_each_change_is_a_smaller_step_size(optim):
    """Up and down alike: a share of growth alone would take multipliers down where violations swing around zero."""
    violations = 0.05 * torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    shared, slower = Multipliers(2, 0.02, optim), Multipliers(2, 0.005, optim)
    for multipliers in (shared, slower):
        multipliers.values += 5  # far from zero, where both would stop
    for violation in violations:
        shared.step(violation, share=0.25)
        slower.step(violation)
    torch.testing.assert_close(shared.values, slower.values, rtol=1e-4, atol=0)


def test_after_a_rise_growth_begins_at_a_fifth_and_is_whole_again_after_82_steps():
    guard = LastLayerGuard(0.02)
    for loss in [1.0] * 60 + [1.5] * 20:
        guard.observe(loss, acts=True)
    assert guard.shrinks and guard.share == 0

    growths = []
    while not growths or growths[-1] < 1:
        guard.observe(0.9, acts=True)
        if not guard.shrinks:
            growths.append(guard.share)
    assert growths[0] == pytest.approx(0.2 * 1.02)
    assert len(growths) == math.ceil(math.log(5) / math.log(1.02)) == 82


def test_the_statistics_are_those_of_sums_written_out():
    guard, losses = LastLayerGuard(0.1), draws("wide", 60, seed=1)
    for loss in losses:
        guard.observe(loss, acts=True)
    newest_weights = (
        lambda step: max(1 / step, 1 / 10),
        lambda step: min(max(1 / step, 1 / 10), 4 / (step + 3)),
    )
    for mean_of, newest in zip((guard.present, guard.slow), newest_weights):
        weights = []
        for step in range(1, 61):
            weights = [weight * (1 - newest(step)) for weight in weights] + [newest(step)]
        mean = sum(weight * loss for weight, loss in zip(weights, losses))
        assert mean_of.mean == pytest.approx(mean, rel=1e-5)
        squares = sum(weight**2 for weight in weights)
        assert mean_of.square_weight == pytest.approx(squares, rel=1e-5)
        halves = [(after - before) ** 2 / 2 for before, after in pairwise(losses)]
        variance = halves[0]
        for step, half in enumerate(halves[1:], start=3):
            variance += newest(step) * (half - variance)
        assert mean_of.variance == pytest.approx(variance, rel=1e-5)


def test_a_falling_loss_is_no_rise_and_its_trend_no_noise():
    guard = LastLayerGuard(0.0)
    for step in range(100):
        guard.observe(5.0 - 0.04 * step, acts=True)
        assert not guard.shrinks and guard.share == 1
    assert math.sqrt(guard.variance) < 0.04


def test_a_loss_that_is_not_finite_changes_nothing():
    guard = LastLayerGuard(0.02)
    for loss in draws("wide", 50, seed=0):
        guard.observe(loss, acts=True)
    before = guard.state_dict()
    for loss in (math.nan, math.inf):
        guard.observe(loss, acts=True)
    for name, tensor in guard.state_dict().items():
        assert torch.equal(tensor, before[name]), name


# ---- the point of rest, on a convex problem ----

# f_1 = 2 - x_1, f_2 = 2 - x_2, f_3 = 1 + (x_1^2 + x_2^2) / 2, with the constraints x_1 >= b_1 and x_2 >= b_2. For
# multipliers lambda the Lagrangian is least at x = lambda. Within f_3 <= 1 + delta x lies in a circle of the radius
# sqrt(2 delta): the point that violates the constraints least is b cut to that length.


def rest(needs: list[float], steps: int = 6000, **settings) -> tuple[torch.Tensor, float]:
    """The multipliers, and the f_3, at which training of the convex problem rests: means over the last half."""
    targets = {layer: 2 - need for layer, need in enumerate(needs, start=1)}
    given = {"loss_targets": targets, "initial_loss_bound": 4.0, "dual_warmup_steps": 50}
    args = DescentArguments(target_margin=0.0, normalize_violations=False, **given, **settings)
    state = DualState(args, 3, steps, 0)
    found = []
    for step in range(steps):
        x = state.multipliers.values * (step >= 50)
        losses = torch.tensor([2 - x[0], 2 - x[1], 1 + x.square().sum() / 2])
        dual_step(state, losses, step)
        found.append(torch.cat([x, losses[-1:]]))
    *x, last = torch.stack(found)[steps // 2 :].mean(0)
    return torch.stack(x), last.item()


PLAIN = {"dual_optim": "sgd", "dual_learning_rate": 0.002}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.02, 0.1])
def test_constraints_beyond_the_limit_are_violated_as_little_as_it_allows(limit):
    needs = torch.tensor([0.9, 0.3])
    x, last = rest(needs.tolist(), max_last_layer_rise=limit, **PLAIN)
    # Growth backs off after each rise, so that f_3 lies below its limit on average.
    assert 1 + 0.5 * limit <= last <= 1 + limit
    expected = math.sqrt(2 * (last - 1)) * needs / needs.norm()
    torch.testing.assert_close(x, expected, rtol=0.1, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [0.1, None])
def test_constraints_within_the_limit_are_met_as_without_it(limit):
    x, last = rest([0.3, 0.2], max_last_layer_rise=limit, **PLAIN)
    torch.testing.assert_close(x, torch.tensor([0.3, 0.2]), rtol=0, atol=0.01)
    assert last == pytest.approx(1 + 0.13 / 2, abs=0.01)


RULES = {
    "adam": {"dual_optim": "adam", "dual_learning_rate": 0.005},
    "pi": {"dual_optim": "pi", "dual_learning_rate": 0.005},
    "weight decay": PLAIN | {"resilience": 0.01},
    "slack": PLAIN | {"resilience": 0.01, "resilience_form": "slack"},
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_dual_rule_keeps_to_the_limit(rule):
    for limit in (0.05, None):
        _, last = rest([0.9, 0.3], max_last_layer_rise=limit, **RULES[rule])
        if limit is None:
            assert last > 1.3
        else:
            assert last == pytest.approx(1 + limit, abs=0.5 * limit)


# ---- in a state, and on disk ----


def state_of(**settings) -> DualState:
    given = {"loss_targets": {1: 0.1}, "initial_loss_bound": 4.0, "dual_optim": "sgd"}
    return DualState(DescentArguments(**given, **settings), 2, 200, 0)


def rising(step: int) -> torch.Tensor:
    return torch.tensor([2.0, 1.0 if step < 60 else 1.5])


@pytest.mark.parametrize(
    "objective", ["descent", "fixed", "hinge", "quadratic", "deep_supervision"]
)
def test_only_multipliers_that_move_are_limited(objective):
    given = {"fixed_multipliers": [1.0]} if objective == "fixed" else {}
    guarded, free = (
        state_of(objective=objective, max_last_layer_rise=limit, **given) for limit in (0.02, None)
    )
    for step in range(100):
        for state in (guarded, free):
            dual_step(state, rising(step), step)
    differs = not torch.equal(guarded.multipliers.values, free.multipliers.values)
    assert differs == (objective == "descent")
    if objective == "fixed":
        assert guarded.multipliers.values.tolist() == [1.0]


def test_held_out_losses_are_what_the_limit_is_about():
    """The training loss rises, that of held-out rows does not; and the other way round."""

    class Rows:
        count = 200

        def __init__(self, rises):
            self._rises = rises

        def layer_losses(self, layers, turn):
            return rising(2 * turn if self._rises else 0)

    args = DescentArguments(loss_targets={1: 0.1}, initial_loss_bound=4.0)
    for held_out_rises in (True, False):
        state = DualState(args, 2, 800, 0, held_out=Rows(held_out_rises))
        for step in range(800):
            dual_step(state, rising(0 if held_out_rises else step // 4), step)
        assert state.settled().guard.shrinks == held_out_rises


def test_a_rise_is_said_once_with_numbers_and_what_to_ask_less(caplog):
    state = state_of(descent_alpha="line")
    for step in range(200):
        dual_step(state, rising(step), step)
        if step % 10 == 9:
            logs = state.logs(step + 1)
    (told,) = [
        record.message
        for record in caplog.records
        if "rose under the constraints" in record.message
    ]
    numbers = re.search(r"loss rose under the constraints, from (\S+) to (\S+) \(\+(\S+)%\)", told)
    best, highest, percent = (float(number) for number in numbers.groups())
    assert best == 1 and 1.1 < highest <= 1.5
    assert percent == pytest.approx(100 * (highest - 1), abs=0.1)
    for remedy in (
        "a `descent_strength` below 0.5",
        "fewer `constrained_layers`",
        "`exit_targets`",
    ):
        assert remedy in told
    assert "dual_learning_rate" not in caplog.text
    assert logs["last_layer_rise"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_last_layer_rise": None}, "(`max_last_layer_rise=None`)"),
        ({"objective": "quadratic"}, "is for the objective 'descent'"),
    ],
    ids=str,
)
def test_a_rise_that_nothing_limits_is_said_too(caplog, settings, why):
    state = state_of(**settings)
    for step in range(200):
        dual_step(state, rising(step), step)
    state.logs(200)
    (told,) = [
        record.message
        for record in caplog.records
        if "rose under the constraints" in record.message
    ]
    assert "Nothing limits this" in told and why in told and "shrink" not in told


def test_a_rise_in_the_warm_up_does_not_keep_the_multipliers_from_growing(caplog):
    guarded, free = (
        state_of(max_last_layer_rise=limit, dual_warmup_steps=80) for limit in (0.02, None)
    )
    for step in range(110):
        for state in (guarded, free):
            dual_step(state, rising(step), step)
    assert guarded.multipliers.values.item() > 0
    assert torch.equal(guarded.multipliers.values, free.multipliers.values)
    guarded.logs(110)
    assert "rose under the constraints" not in caplog.text


@pytest.mark.parametrize("warmup", [0, 80])
def test_the_limit_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path, warmup):
    straight, first, second = (state_of(dual_warmup_steps=warmup) for _ in range(3))
    for step in range(200):
        dual_step(straight, rising(step), step)
    for step in range(64):
        dual_step(first, rising(step), step)
    first.save(str(tmp_path))
    second.load(str(tmp_path))
    for step in range(64, 200):
        dual_step(second, rising(step), step)
    ours, theirs = straight.state_dict()[0], second.state_dict()[0]
    assert ours.keys() == theirs.keys() and any(name.startswith("guard.") for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("limit", [0.02, None])
@pytest.mark.parametrize("absent", ["guard.", "guard.acted_before"])
def test_a_checkpoint_without_the_limit_s_state_can_be_resumed_from(tmp_path, limit, absent):
    saved = state_of(max_last_layer_rise=0.02)
    for step in range(70):
        dual_step(saved, rising(step), step)
    saved.save(str(tmp_path))
    path = tmp_path / STATE_NAME
    _, meta = saved.state_dict()
    old = {"closing_losses"}
    tensors = {
        name: tensor
        for name, tensor in load_file(path).items()
        if name not in old and not name.startswith(absent)
    }
    save_file(tensors, path, metadata={"state": json.dumps(meta)})
    state = state_of(max_last_layer_rise=limit)
    state.load(str(tmp_path))
    assert torch.equal(state.multipliers.values, saved.multipliers.values)


def test_the_limit_counts_optimizer_steps_however_they_are_accumulated(tmp_path):
    found = []
    for size, accumulation in ((8, 1), (2, 4)):
        args = config(
            tmp_path, max_steps=24, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
            dual_warmup_steps=2, learning_rate=1e-3,
        )  # fmt: skip
        trainer = trained(bert(), args, InOrder, train_dataset=DATA)
        found.append(trainer._run.dual.settled().guard.state_dict())
    assert found[0]["count"] == 24
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-3, atol=1e-5)


def test_a_run_that_is_ruined_without_the_limit_is_not_with_it():
    """The multiplier of a bound that cannot be met grows without end, and with it the loss of the last layer."""
    problem = DescentProblem(None, 4.0, 2, loss_targets={1: 0.1})
    ends = {}
    for limit in (0.02, None):
        args = DescentArguments(
            loss_targets={1: 0.1}, initial_loss_bound=4.0, max_last_layer_rise=limit
        )
        state = DualState(args, 2, 400, 0)
        x = torch.zeros(())
        for step in range(400):
            losses = torch.stack([1.5 + (x - 1) ** 2, 1 + x**2])
            dual_step(state, losses, step)
            slope = 2 * x + state.multipliers.values[0] * 2 * (x - 1)
            x = x - 0.05 * slope / (1 + state.multipliers.values[0])
        ends[limit] = losses[-1].item()
    assert problem.violations(torch.tensor([1.5, 1.0]))[0] > 0
    assert ends[0.02] < 1.1 and ends[None] > 1.5
