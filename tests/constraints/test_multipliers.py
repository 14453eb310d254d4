import numpy as np
import pytest
import torch

from hf_descent import Multipliers


def violations(steps, seed=0):
    return torch.randn(steps, 3, generator=torch.Generator().manual_seed(seed)) * torch.tensor(
        [1.0, 0.1, 10.0]
    )


@pytest.mark.parametrize("optim", ["sgd", "adam"])
@pytest.mark.parametrize("resilience", [0.0, 0.3])
def test_steps_equal_a_torch_optimizer_with_projection(optim, resilience):
    multipliers = Multipliers(3, 0.05, optim=optim, resilience=resilience)
    reference = torch.zeros(3, requires_grad=True)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optim]
    optimizer = optimizer_class([reference], lr=0.05, maximize=True)
    for violation in violations(200):
        multipliers.step(violation.double())
        reference.grad = violation - resilience * reference.detach()
        optimizer.step()
        with torch.no_grad():
            reference.clamp_(min=0)
        torch.testing.assert_close(multipliers.values, reference.detach(), rtol=1e-5, atol=1e-6)
    assert multipliers.values.dtype == torch.float32


def test_the_first_step_of_adam_is_of_the_step_size_whatever_the_violation():
    multipliers = Multipliers(3, 0.05, optim="adam")
    multipliers.step(torch.tensor([0.1, 3.0, 20.0]))
    expected = torch.full((3,), 0.05)
    torch.testing.assert_close(multipliers.values, expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("optim", "given", "taken"), [("adam", 0.03, 0.03), ("sgd", 0.7, 0.7), ("sgd", 1.0, 0.5)]
)
def test_slack_steps_equal_two_torch_optimizers(optim, given, taken):
    multipliers = Multipliers(
        3, 0.05, optim, resilience=0.5, resilience_form="slack", slack_learning_rate=given
    )
    lam, slack = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer_class = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optim]
    ascent, descent = (
        optimizer_class([lam], lr=0.05, maximize=True),
        optimizer_class([slack], lr=taken),
    )
    for violation in violations(200):
        multipliers.step(violation)
        lam.grad, slack.grad = violation - slack.detach(), slack.detach() / 0.5 - lam.detach()
        ascent.step(), descent.step()
        with torch.no_grad():
            lam.clamp_(min=0), slack.clamp_(min=0)
    torch.testing.assert_close(multipliers.values, lam.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(multipliers.slacks, slack.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["weight_decay", "slack"])
@pytest.mark.parametrize("optim", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_constant_violation_settles_at_its_positive_part_over_the_resilience(form, optim):
    multipliers = Multipliers(
        3, 0.02, optim=optim, resilience=0.5, resilience_form=form, slack_learning_rate=0.02
    )
    for _ in range(20000 if optim == "adam" else 4000):
        multipliers.step(torch.tensor([0.2, -0.3, 0.05]))
    assert multipliers.values.tolist() == pytest.approx([0.4, 0.0, 0.1], abs=5e-3)
    if form == "slack":
        assert multipliers.slacks.tolist() == pytest.approx([0.2, 0.0, 0.05], abs=5e-3)


def test_the_controller_equals_its_formula():
    """nuPI of arXiv 2406.04558, with x = the violations in units of 0.05, cut at 1."""
    multipliers, value, mean = Multipliers(3, 0.05, optim="pi"), torch.zeros(3), None
    for violation in violations(200):
        multipliers.step(violation)
        error = (20 * violation).clamp(-1, 1)
        before = error if mean is None else mean
        mean = 0.9 * before + 0.1 * error
        value = (value + 0.05 * (error + 200 * (mean - before))).clamp(min=0)
        torch.testing.assert_close(multipliers.values, value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("start", [1.0, 100.0])
def test_the_controller_settles_without_overshooting(start):
    """min x^2 / 2 subject to b - x <= 0 by gradient steps: x = lambda = b, far from which it starts."""
    found = {}
    for optim in ("adam", "pi"):
        multipliers, x = Multipliers(1, 0.02, optim=optim), torch.tensor([-start])
        path = []
        for _ in range(1500):
            x = x - 0.05 * (x - multipliers.values)
            multipliers.step(0.5 - x)
            path.append(x.item())
        found[optim] = max(path), sum(abs(each - 0.5) for each in path[-200:]) / 200
    assert found["pi"] == (pytest.approx(0.5, abs=0.06), pytest.approx(0, abs=5e-3))
    assert found["adam"][0] > 0.6  # it swings


@pytest.mark.parametrize("optim", ["sgd", "adam"])
def test_the_default_slacks_settle_where_they_should(optim):
    """min (x - 1)^2 / 2 subject to x <= 0, relaxed by u^2 / (2 c): x = u = c / (1 + c)."""
    multipliers, found = (
        Multipliers(1, 0.02, optim=optim, resilience=0.001, resilience_form="slack"),
        [],
    )
    for _ in range(6000):
        found.append(1 - multipliers.values)
        multipliers.step(found[-1])
    assert torch.stack(found[-2000:]).mean().item() == pytest.approx(0.001 / 1.001, rel=0.1)


@pytest.mark.parametrize("form", ["weight_decay", "slack"])
def test_hard_constraints_keep_rising_up_to_the_cap(form):
    multipliers = Multipliers(2, 0.1, optim="sgd", maximum=1.5, resilience_form=form)
    for _ in range(10):
        multipliers.step(torch.tensor([1.0, -1.0]))
    assert multipliers.values.tolist() == pytest.approx([1.0, 0.0])
    for _ in range(10):
        multipliers.step(torch.tensor([1.0, 1.0]))
    assert multipliers.values.tolist() == pytest.approx([1.5, 1.0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_step_changes_nothing(bad):
    multipliers, skipped = (
        Multipliers(3, 0.1, resilience=0.1, resilience_form="slack") for _ in range(2)
    )
    for index, violation in enumerate(violations(20)):
        multipliers.step(violation)
        skipped.step(violation)
        if index % 5 == 0:
            skipped.step(torch.tensor([0.1, bad, 0.1]))
    torch.testing.assert_close(skipped.state_dict(), multipliers.state_dict(), rtol=0, atol=0)


def test_restart_clears_slacks_only():
    multipliers = Multipliers(
        2, 0.1, resilience=0.5, resilience_form="slack", slack_learning_rate=0.1
    )
    fresh = multipliers.state_dict()
    for _ in range(5):
        multipliers.step(torch.tensor([1.0, 1.0]))
    before = multipliers.state_dict()
    assert multipliers.slacks.min() > 0
    multipliers.restart_slacks()
    for name, tensor in multipliers.state_dict().items():
        assert torch.equal(tensor, (fresh if "slack" in name else before)[name]), name


def test_state_round_trip_and_its_checks():
    straight, resumed = (
        Multipliers(3, 0.1, resilience=0.1, resilience_form="slack") for _ in range(2)
    )
    steps = violations(20)
    for violation in steps[:10]:
        straight.step(violation)
    saved = straight.state_dict()
    for violation in steps[10:]:
        straight.step(violation)
    resumed.load_state_dict(saved)
    for violation in steps[10:]:
        resumed.step(violation)
    assert torch.equal(straight.values, resumed.values) and torch.equal(
        straight.slacks, resumed.slacks
    )

    state = straight.state_dict()
    for bad, match in (
        ({**state, "values": torch.zeros(4)}, "values"),
        ({name: t for name, t in state.items() if name != "mean"}, "nothing"),
    ):
        with pytest.raises(ValueError, match=match):
            resumed.load_state_dict(bad)


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [("optim", "momentumm", "adam, pi, sgd"), ("resilience_form", "slak", "weight_decay, slack")],
)
def test_a_rule_of_another_name_is_refused(name, value, choices):
    with pytest.raises(ValueError, match=f"`{name}` is '{value}'; choose one of {choices}"):
        Multipliers(3, 0.1, resilience=0.5, **{name: value})


def test_one_number_for_each_row():
    multipliers = Multipliers(3, 0.1, optim="sgd")
    for numbers in ([1.0], [1.0] * 4, torch.ones(2), np.ones(5)):
        with pytest.raises(ValueError, match="`violations` has .* each of 3 rows"):
            multipliers.step(numbers)
        for name in ("values", "slacks"):
            with pytest.raises(ValueError, match=f"`{name}` has .* each of 3 rows"):
                setattr(multipliers, name, numbers)
    for numbers in ([1.0] * 3, torch.ones(3).double(), np.ones(3)):
        multipliers.step(numbers)
    torch.testing.assert_close(multipliers.values, torch.full((3,), 0.3))


def test_writes_into_the_values_count_and_kept_values_stay():
    multipliers = Multipliers(2, 0.1, optim="sgd")
    multipliers.values.fill_(1.0)
    kept = multipliers.values
    multipliers.step([1.0, -1.0])
    assert kept.tolist() == [1.0, 1.0]
    torch.testing.assert_close(multipliers.values, torch.tensor([1.1, 0.9]))
    multipliers.values = kept
    kept.zero_()
    assert multipliers.values.tolist() == [1.0, 1.0]
