import re
from functools import partial

import numpy as np
import pytest
import torch

from hf_descent import DescentProblem


def naive_violations(f, alpha, f0, layers):
    """The constraints written out one by one."""
    violations, previous = [0.0] * len(f), f0
    for layer in layers:
        violations[layer - 1] = f[layer - 1] - (1 - alpha[layer - 1]) * previous
        previous = f[layer - 1]
    return violations


@pytest.mark.parametrize("layers", [None, [1, 2, 3, 4], [2, 4], [3], [1, 3]])
@pytest.mark.parametrize("alpha", [0.25, [0.1, 0.2, 0.3, 0.4]])
def test_violations_weights_and_lagrangian_agree_with_the_written_out_problem(layers, alpha):
    problem = DescentProblem(alpha, 2.0, 4, layers)
    f = torch.tensor([1.5, 0.3, 0.9, 0.2], dtype=torch.float64, requires_grad=True)
    chosen = layers or [1, 2, 3, 4]
    expected = naive_violations(f.tolist(), problem.alpha, 2.0, chosen)
    assert problem.violations(f).tolist() == pytest.approx(expected)

    multipliers = torch.tensor([0.7, 0.5, 0.2, 1.1], dtype=torch.float64)
    multipliers *= torch.tensor([layer in chosen for layer in range(1, 5)])
    lagrangian = problem.lagrangian(f, multipliers)
    assert lagrangian.item() == pytest.approx(0.2 + sum(m * g for m, g in zip(multipliers.tolist(), expected)))
    # The weight of a layer loss is the derivative of the Lagrangian with respect to it.
    (gradient,) = torch.autograd.grad(lagrangian, f)
    assert problem.weights(multipliers).tolist() == pytest.approx(gradient.tolist())


def test_weights_of_three_layers_by_hand():
    weights = DescentProblem([0.1, 0.2, 0.5], 1.0, 3).weights(torch.tensor([1.0, 2.0, 4.0]))
    assert weights.tolist() == pytest.approx([1 - 0.8 * 2, 2 - 0.5 * 4, 1 + 4])


def test_whole_numbers_are_no_reason_to_round():
    problem, losses, multipliers = DescentProblem(0.3, 4.0, 3), torch.tensor([3, 2, 1]), torch.tensor([1, 2, 3])
    assert problem.violations(losses).tolist() == pytest.approx([0.2, -0.1, -0.4])
    assert problem.weights(multipliers).tolist() == pytest.approx([1 - 0.7 * 2, 2 - 0.7 * 3, 1 + 3])
    assert problem.lagrangian(losses, multipliers).item() == pytest.approx(-0.2, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_small_alpha_is_kept_in_every_precision(dtype):
    alpha, close = 0.003, partial(pytest.approx, rel=0, abs=1e-15 if dtype == torch.float64 else 2e-7)
    problem = DescentProblem(alpha, 1.0, 2)
    losses, multipliers = torch.tensor([0.5, 0.499], dtype=dtype), torch.tensor([0.125, 0.125])
    expected = naive_violations(losses.tolist(), [alpha] * 2, 1.0, [1, 2])
    assert problem.violations(losses).tolist() == close(expected)
    assert problem.lagrangian(losses, multipliers).item() == close(losses[1].item() + 0.125 * sum(expected))
    assert problem.weights(multipliers.to(dtype)).tolist() == close([0.125 - (1 - alpha) * 0.125, 1.125])


def test_losses_and_multipliers_are_one_per_layer():
    problem = DescentProblem(0.3, 4.0, 3)
    with pytest.raises(ValueError, match=r"`layer_losses` has shape \[2\]; give \[3\]"):
        problem.violations(torch.ones(2))
    with pytest.raises(ValueError, match=r"`multipliers` has shape \[5\]; give \[3\]"):
        problem.weights(torch.ones(5))


def test_a_weight_can_be_negative_and_no_multiplier_means_the_last_loss_alone():
    problem = DescentProblem(0.1, 1.0, 3)
    assert problem.weights(torch.tensor([0.0, 0.0, 2.0]))[1].item() == pytest.approx(-1.8)
    assert problem.weights(torch.zeros(3)).tolist() == [0, 0, 1]


def test_feasibility_counts_constrained_layers_only():
    problem = DescentProblem(0.5, 1.0, 3, [1, 3])
    losses = torch.tensor([0.5, 9.0, 0.26])
    assert problem.max_violation(losses).item() == pytest.approx(0.01, abs=1e-6)
    assert not problem.feasible(losses) and problem.feasible(losses, tol=0.011)
    assert not problem.feasible(torch.tensor([0.5, 0.1, float("nan")]), tol=1.0)
    assert problem.max_violation(torch.tensor([0.25, 9.0, 0.0])).item() == -0.125
    # A loss that no constraint names cannot spoil the others.
    assert problem.feasible(torch.tensor([0.5, float("inf"), 0.2]))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0.0, 1.0, 3), "`alpha` is 0.0"),
        ((1.0, 1.0, 3), "`alpha` is 1.0"),
        (([0.1, 0.2], 1.0, 3), "`alpha` has 2 values but the model has 3 layers"),
        (([0.1, 0.2, float("nan")], 1.0, 3), "`alpha` is "),
        ((0.1, 0.0, 3), "initial_loss_bound"),
        ((0.1, 1e13, 3), "initial_loss_bound"),
        ((0.1, 1.0, 0), "num_layers"),
        ((0.1, 1.0, 3, []), "constrained_layers"),
        ((0.1, 1.0, 3, [0, 1]), "constrained_layers"),
        ((0.1, 1.0, 3, [2, 2]), "constrained_layers"),
        ((0.1, 1.0, 3, [2, 4]), "names layer 4 but the model has 3"),
    ],
)
def test_bad_input_names_the_argument(arguments, match):
    with pytest.raises(ValueError, match=match):
        DescentProblem(*arguments)


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_and_their_numbers_are_taken_as_python_s_own(array):
    problem = DescentProblem(array([0.25, 0.5, 0.75]), array(1.5), 3, [array(1), array(3)])
    assert repr(problem.state_dict()) == repr(DescentProblem([0.25, 0.5, 0.75], 1.5, 3, [1, 3]).state_dict())
    assert DescentProblem(array(0.5), 1.0, 3, array([1, 3])).alpha == [0.5] * 3


@pytest.mark.parametrize("layers", [3, [1, 2.0], (), (2, 1), "1"])
def test_bad_constrained_layers_are_shown_as_they_were_given(layers):
    with pytest.raises(ValueError, match=re.escape(f"`constrained_layers` is {layers!r}; ") + ".*integers"):
        DescentProblem(0.1, 1.0, 3, layers)
