import json
import math
import re
from functools import partial

import numpy as np
import pytest
import torch

from hf_descent import DescentProblem
from hf_descent.constraints.problem import largest_rise


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
    assert lagrangian.item() == pytest.approx(
        0.2 + sum(m * g for m, g in zip(multipliers.tolist(), expected))
    )
    # The weight of a layer loss is the derivative of the Lagrangian with respect to it.
    (gradient,) = torch.autograd.grad(lagrangian, f)
    assert problem.weights(multipliers).tolist() == pytest.approx(gradient.tolist())


def test_whole_numbers_are_no_reason_to_round():
    problem, losses, multipliers = (
        DescentProblem(0.3, 4.0, 3),
        torch.tensor([3, 2, 1]),
        torch.tensor([1, 2, 3]),
    )
    assert problem.violations(losses).tolist() == pytest.approx([0.2, -0.1, -0.4])
    assert problem.weights(multipliers).tolist() == pytest.approx([1 - 0.7 * 2, 2 - 0.7 * 3, 1 + 3])
    assert problem.lagrangian(losses, multipliers).item() == pytest.approx(-0.2, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_small_alpha_is_kept_in_every_precision(dtype):
    alpha, close = (
        0.003,
        partial(pytest.approx, rel=0, abs=1e-15 if dtype == torch.float64 else 2e-7),
    )
    problem = DescentProblem(alpha, 1.0, 2)
    losses, multipliers = torch.tensor([0.5, 0.499], dtype=dtype), torch.tensor([0.125, 0.125])
    expected = naive_violations(losses.tolist(), [alpha] * 2, 1.0, [1, 2])
    assert problem.violations(losses).tolist() == close(expected)
    assert problem.lagrangian(losses, multipliers).item() == close(
        losses[1].item() + 0.125 * sum(expected)
    )
    assert problem.weights(multipliers.to(dtype)).tolist() == close(
        [0.125 - (1 - alpha) * 0.125, 1.125]
    )


def test_losses_and_multipliers_are_one_per_layer():
    problem = DescentProblem(0.3, 4.0, 3)
    with pytest.raises(ValueError, match=r"`layer_losses` has shape \[2\]; give \[3\]"):
        problem.violations(torch.ones(2))
    with pytest.raises(ValueError, match=r"`layer_losses` has shape \[2\]; give \[3\]"):
        problem.violations([1.0, 1.0])
    with pytest.raises(ValueError, match=r"`multipliers` has shape \[5\]; give \[3\]"):
        problem.weights(torch.ones(5))


def test_a_weight_can_be_negative_and_no_multiplier_means_the_last_loss_alone():
    problem = DescentProblem(0.1, 1.0, 3)
    assert problem.weights(torch.tensor([0.0, 0.0, 2.0]))[1].item() == pytest.approx(-1.8)
    assert problem.weights(torch.zeros(3)).tolist() == [0, 0, 1]


def test_weights_of_steps_need_the_last_loss():
    problem = DescentProblem("steps", 1.0, 3)
    losses = torch.tensor([1.5, 1.2, 0.8], requires_grad=True)
    multipliers = torch.tensor([0.1, 0.2, 0.3])
    (gradient,) = torch.autograd.grad(problem.lagrangian(losses, multipliers), losses)
    weights = problem.weights(multipliers, 0.8)
    assert weights.tolist() == pytest.approx(gradient.tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="give f_L"):
        problem.weights(multipliers)


def test_feasibility_counts_constrained_layers_only():
    problem = DescentProblem(0.5, 1.0, 3, [1, 3])
    losses = torch.tensor([0.5, 9.0, 0.26])
    assert problem.max_violation(losses).item() == pytest.approx(0.01, abs=1e-6)
    assert not problem.feasible(losses, tol=0.0) and problem.feasible(losses, tol=0.011)
    assert not problem.feasible(losses, tol=0.009) and problem.feasible(losses)  # a tenth of 0.25
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
    assert repr(problem.state_dict()) == repr(
        DescentProblem([0.25, 0.5, 0.75], 1.5, 3, [1, 3]).state_dict()
    )
    assert DescentProblem(array(0.5), 1.0, 3, array([1, 3])).alpha == [0.5] * 3


@pytest.mark.parametrize("layers", [3, [1, 2.0], (), (2, 1), "1"])
def test_bad_constrained_layers_are_shown_as_they_were_given(layers):
    with pytest.raises(
        ValueError, match=re.escape(f"`constrained_layers` is {layers!r}; ") + ".*integers"
    ):
        DescentProblem(0.1, 1.0, 3, layers)


EXITS, BOUNDS = {1: 0.25, 3: 0.0}, {2: 0.4, 4: 0.28}
F = [0.9, 0.5, 0.35, 0.3]


def naive_rows(alpha, f, level, f0=2.0, layers=(1, 2, 4), strength=0.6):
    """(kind, layer, what is asked, the reference of the tolerance) of every constraint, written out one by one."""
    rows, previous, ratio = [], f0, level / f0
    for layer in layers:
        if alpha == "steps":
            rows.append(("steps", layer, ratio ** (strength / len(layers)) * previous, previous))
        elif alpha == "line" and layer < 4:
            rows.append(
                (
                    "line",
                    layer,
                    f0 ** (1 - strength * layer / 4) * level ** (strength * layer / 4),
                    f0,
                )
            )
        elif alpha == 0.3:
            rows.append(("descent", layer, 0.7 * previous, previous))
        previous = f[layer - 1]
    rows += [("exit", layer, (1 + share) * f[3], None) for layer, share in EXITS.items()]
    return rows + [("bound", layer, loss, None) for layer, loss in BOUNDS.items()]


def mixed(alpha, **others):
    return DescentProblem(
        alpha,
        2.0,
        4,
        [1, 2, 4],
        descent_strength=0.6,
        exit_targets=EXITS,
        loss_targets=BOUNDS,
        **others,
    )


@pytest.mark.parametrize("alpha", [None, 0.3, "line", "steps"])
@pytest.mark.parametrize("level", [None, 0.7])
def test_every_kind_of_row_asks_what_is_written_out(alpha, level):
    problem, f = mixed(alpha), torch.tensor(F, dtype=torch.float64)
    rows = naive_rows(alpha, F, level or F[-1])
    assert [(row.kind, row.layer) for row in problem.rows] == [row[:2] for row in rows]
    assert problem.num_rows == (4 if alpha else 0) + 4 and problem.layers == [1, 2, 3, 4]
    index = [row.index for row in problem.rows]
    found = problem.violations(f, None if level is None else torch.tensor(level))
    assert found[index].tolist() == pytest.approx(
        [F[layer - 1] - asked for _, layer, asked, _ in rows]
    )
    assert found.count_nonzero() == len(rows)


@pytest.mark.parametrize("alpha", [None, 0.3, "line", "steps"])
@pytest.mark.parametrize("level", [None, 0.7])
def test_a_margin_lowers_what_targets_ask(alpha, level):
    problem, f = mixed(alpha), torch.tensor(F, dtype=torch.float64)
    rows = naive_rows(alpha, F, level or F[-1])
    index = [row.index for row in problem.rows]
    tight = problem.violations(f, level, margin=0.1)
    least = {"exit": F[-1], "bound": 0.0}  # to which a margin may lower what is asked
    asked = [max(0.9 * asked, least.get(kind, asked)) for kind, _, asked, _ in rows]
    assert tight[index].tolist() == pytest.approx(
        [F[row[1] - 1] - a for row, a in zip(rows, asked)]
    )


@pytest.mark.parametrize("alpha", [None, 0.3, "line", "steps"])
def test_the_tolerance_is_a_tenth_of_the_decrease(alpha):
    problem, f = mixed(alpha), torch.tensor(F, dtype=torch.float64)
    rows = naive_rows(alpha, F, F[-1])
    index = [row.index for row in problem.rows]
    asked, tolerances = problem.bounds(f)
    assert asked[index].tolist() == pytest.approx([row[2] for row in rows])
    expected = [
        0 if reference is None else 0.1 * (reference - asked) for _, _, asked, reference in rows
    ]
    assert tolerances[index].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("alpha", [None, 0.3, "line", "steps"])
def test_a_problem_is_the_same_after_json(alpha):
    problem = mixed(alpha)
    again = DescentProblem(**json.loads(json.dumps(problem.state_dict())))
    assert again.rows == problem.rows and again.state_dict() == problem.state_dict()
    assert DescentProblem.saved_in(problem.state_dict()).rows == problem.rows


@pytest.mark.parametrize("alpha", [None, 0.3, "line", "steps"])
@pytest.mark.parametrize("level", [0.7, 2.5])
def test_lists_give_the_numbers_of_tensors(alpha, level):
    problem, f = mixed(alpha), torch.tensor(F, dtype=torch.float64)
    multipliers = torch.linspace(0, 1, problem.num_rows, dtype=torch.float64)
    for margin in (0.0, 0.1):
        expected = problem.violations(f, level, margin)
        np.testing.assert_allclose(problem.violations(F, level, margin), expected)
        assert problem.violations(np.array(F), level, margin) == problem.violations(
            F, level, margin
        )
    for expected, values in zip(problem.bounds(f), problem.bounds(F)):
        np.testing.assert_allclose(values, expected)
    for detach in (False, True):
        expected = problem.weights(multipliers, level, detach)
        np.testing.assert_allclose(problem.weights(multipliers.tolist(), level, detach), expected)


@pytest.mark.parametrize(("eps", "asked"), [(0.0, 1.0), (0.02, 1.0), (0.5, 1.35)])
def test_a_margin_asks_no_exit_for_less_than_the_last_layer_reaches(eps, asked):
    """A layer as good as the last one would else be violated for ever, and its multiplier rise for ever."""
    problem = DescentProblem(None, 1.0, 3, exit_targets={1: eps})
    assert problem.violations(torch.tensor([0.4, 0.4, 0.4]), margin=0.1).item() == pytest.approx(
        0.4 * (1 - asked)
    )


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("alpha", [None, 0.3, "line", "steps"])
def test_the_weights_are_the_gradient_and_fixed_references_have_none(alpha, detach):
    problem, level = mixed(alpha), torch.tensor(0.7, dtype=torch.float64)
    f = torch.tensor(F, dtype=torch.float64, requires_grad=True)
    multipliers = torch.rand(
        problem.num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    weights = problem.weights(multipliers, level, detach)
    (gradient,) = torch.autograd.grad(
        f[-1] + multipliers @ problem.violations(f, level, detach=detach), f
    )
    assert weights.tolist() == pytest.approx(gradient.tolist())
    (gradient,) = torch.autograd.grad(problem.lagrangian(f, multipliers, level), f)
    assert problem.weights(multipliers, level).tolist() == pytest.approx(gradient.tolist())
    if detach or alpha in (None, "line"):  # each layer's own rows alone
        own = [
            sum(multipliers[row.index].item() for row in problem.rows if row.layer == layer)
            for layer in range(1, 5)
        ]
        assert weights.tolist() == pytest.approx([*own[:3], 1 + own[3]])


@pytest.mark.parametrize("alpha", ["line", "steps"])
@pytest.mark.parametrize("level", [2.0, 2.5, 0.0, -1.0, float("nan")])
def test_rows_that_follow_ask_for_nothing_unless_f_L_is_below_chance(alpha, level):
    problem, f = DescentProblem(alpha, 2.0, 3), torch.tensor([3.0, 2.5, 2.2])
    assert (problem.violations(f, torch.tensor(level)) <= 0).all()
    assert not problem.feasible(torch.tensor([2.0, 2.0, 2.0])) and not problem.feasible(f)


def test_an_untrained_model_meets_no_row_whatever_is_asked():
    """Layers at chance or above, against each kind of row; f_0 may be given far above chance."""
    for losses in ([0.69, 0.69, 0.69], [0.6935, 0.6935, 0.6935]):
        problems = [
            DescentProblem(alpha, 0.69, 3, chance_loss=0.69) for alpha in (0.01, "line", "steps")
        ]
        problems += [DescentProblem(0.1, 1.7, 3, chance_loss=0.69, constrained_layers=[1])]
        targets = {"exit_targets": {1: 0.1}}, {"loss_targets": {1: 0.8}}
        problems += [DescentProblem(None, 0.69, 3, **each) for each in targets]
        assert not any(problem.feasible(torch.tensor(losses)) for problem in problems)


def test_share_and_rise_by_hand():
    problem = DescentProblem("line", 1.0, 4, chance_loss=1.0, descent_strength=0.5)
    even = torch.tensor([0.5 ** (layer / 4) for layer in range(1, 5)])
    assert problem.descent_share(even) == pytest.approx(1.0) and largest_rise(
        even
    ) == pytest.approx(0.5**0.25 - 1)
    bent = torch.tensor([1.0, 0.9, 0.99, 0.5])
    assert problem.descent_share(bent) == pytest.approx(0.0) and largest_rise(
        bent
    ) == pytest.approx(0.1)
    bent[0] = 0.95
    shares = [
        math.log(1 / f) / (layer / 4 * math.log(2))
        for layer, f in enumerate(bent[:3].tolist(), start=1)
    ]
    assert problem.descent_share(bent) == pytest.approx(min(shares))
    for nothing in (
        torch.ones(4),
        torch.tensor([0.9, 0.8, 0.7, 1.0]),
        torch.tensor([0.5, -0.1, 0.4, 0.3]),
    ):
        assert problem.descent_share(nothing) is None
    assert DescentProblem(0.1, 1.0, 1, chance_loss=1.0).descent_share(torch.tensor([0.5])) is None
    assert (
        DescentProblem("line", 1.0, 4).descent_share(even) is None
    )  # f_0 was given, chance not measured
    assert (
        largest_rise(torch.tensor([0.5, -0.1])) is None
        and largest_rise(torch.tensor([0.5])) is None
    )


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("exit_targets", {4: 0.1}), ("exit_targets", {0: 0.1}), ("exit_targets", {1: -0.1}), ("exit_targets", [0.1]),
        ("exit_targets", {"first": 0.1}), ("loss_targets", {5: 0.1}), ("loss_targets", {1: 0.0}),
        ("loss_targets", {1: float("nan")}),
    ],
)  # fmt: skip
def test_targets_name_layers_and_numbers(name, targets):
    with pytest.raises(ValueError, match=f"`{name}` is "):
        DescentProblem(None, 1.0, 4, **{name: targets})


def test_a_problem_has_constraints():
    for nothing in ({"alpha": None}, {"alpha": "line", "constrained_layers": [3]}):
        with pytest.raises(ValueError, match="No layer has a constraint"):
            DescentProblem(**nothing, initial_loss_bound=1.0, num_layers=3)


@pytest.mark.parametrize("bound", [0.5, 1.7])
def test_layers_are_judged_by_the_measured_chance_whatever_f_0_is(bound):
    """Losses of 0.55 and 0.3 are below a chance of 0.69; by an f_0 of 0.5 the first would only guess."""
    problem = DescentProblem(None, bound, 2, [1, 2], chance_loss=math.log(2), loss_targets={1: 0.6})
    losses = torch.tensor([0.55, 0.3])
    _, beyond_chance = problem.excess(losses)
    assert beyond_chance.tolist() == pytest.approx(
        [0.55 - 0.98 * math.log(2), 0.3 - 0.98 * math.log(2)]
    )
    assert problem.feasible(losses)
    assert problem.descent_share(losses) == pytest.approx(
        2 * math.log(math.log(2) / 0.55) / math.log(math.log(2) / 0.3)
    )
