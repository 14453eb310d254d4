import pytest
import torch
from naive_head import Watch
from tiny.training import config

from hf_descent.constraints.objectives import Hinge
from hf_descent.constraints.state import DualState


def state(tmp_path, objective, **settings):
    given = {
        "descent_alpha": [0.1, 0.2, 0.3],
        "initial_loss_bound": 1.0,
        "penalty_coefficient": 0.4,
    } | settings
    made = DualState(config(tmp_path, objective=objective, dual_warmup_steps=0, **given), 3, 10, 0)
    made.multipliers.values = torch.tensor([0.5, 1.0, 2.0])
    return made


LAGRANGIAN = [0.5 - 0.8 * 1.0, 1.0 - 0.7 * 2.0, 1 + 2.0]


@pytest.mark.parametrize(
    ("objective", "settings", "expected"),
    [
        ("deep_supervision", {}, [0.4, 0.4, 1]),
        ("deep_supervision", {"constrained_layers": [2, 3]}, [0, 0.4, 1]),
        ("layerskip", {}, [0, 0, 1]),  # of which the last layer alone is trained at first
        ("descent", {"negative_weights": "keep"}, LAGRANGIAN),
        ("descent", {"negative_weights": "clip"}, [0, 0, 3]),
        ("descent", {"negative_weights": "detach"}, [0.5, 1, 3]),
        (
            "descent",
            {"negative_weights": "keep", "normalize_weights": True},
            [w / 3.7 for w in LAGRANGIAN],
        ),
    ],
)
def test_the_weights_of_linear_objectives(tmp_path, objective, settings, expected):
    made = state(tmp_path, objective, **settings)
    made.layer_weights(0)
    with Watch() as watch:
        weights = made.layer_weights(0)
    assert weights == pytest.approx(expected)
    assert not watch.waits
    losses = torch.tensor([1.2, 0.7, 0.8])
    value = made.objective_at(0).value(losses, torch.ones(()))
    assert value.item() == pytest.approx(sum(w * f for w, f in zip(expected, losses.tolist())))


@pytest.mark.parametrize("objective", ["descent", "hinge", "quadratic"])
def test_the_warm_up_is_f_l_alone_also_where_another_loss_is_infinite(tmp_path, objective):
    args = config(tmp_path, objective=objective, dual_warmup_steps=10, initial_loss_bound=1.0)
    dual = DualState(args, num_layers=3, max_steps=100, start_step=0)
    losses = torch.tensor([torch.inf, torch.nan, 0.5])
    assert dual.objective_at(0).value(losses, torch.ones(())) == 0.5


@pytest.mark.parametrize("detach", [False, True])
def test_penalties_by_hand(tmp_path, detach):
    losses = torch.tensor([1.2, 0.7, 0.8], requires_grad=True)
    excess = [1.2 - 0.9, 0.0, 0.8 - 0.7 * 0.7]  # the second constraint holds: 0.7 <= 0.8 * 1.2
    assert Hinge().penalty(torch.tensor(excess), 2.0).item() == pytest.approx(2 * sum(excess))
    for objective, slopes in (
        ("hinge", [0.4, 0.4]),
        ("quadratic", [0.4 * excess[0], 0.4 * excess[2]]),
    ):
        made = state(tmp_path, objective, negative_weights="detach" if detach else "keep")
        value = made.objective_at(0).value(losses, torch.ones(()))
        squares = sum(e * e for e in excess) / 2
        assert value.item() == pytest.approx(
            0.8 + 0.4 * (sum(excess) if objective == "hinge" else squares)
        )
        (gradient,) = torch.autograd.grad(value, losses)
        reference = 0.0 if detach else -0.7 * slopes[1]
        assert gradient.tolist() == pytest.approx([slopes[0], reference, 1 + slopes[1]])


def published(count, t, steps, scale):
    """Equations 4 to 6 of arXiv 2404.16710 one by one, l from 0; the last layer always, as in the authors' code."""
    # From layer L - 1 down, one more every T / 2L steps.
    enabled = {count - 1 - more for more in range(count) if t >= more * steps / (2 * count)}
    enabled.add(count - 1)
    e = [scale * sum(range(place + 1)) for place in range(count - 1)] + [
        count - 1 + scale * sum(range(count - 1))
    ]
    total = sum(e[place] for place in enabled)
    return [e[place] / total if place in enabled else 0.0 for place in range(count)]


@pytest.mark.parametrize("scale", [0.0, 0.2, 1.0])
def test_the_weights_of_layerskip_are_those_of_its_paper(tmp_path, scale):
    settings = {"penalty_coefficient": scale, "dual_warmup_steps": 0}
    made = DualState(config(tmp_path, objective="layerskip", **settings), 6, 24, 0)
    losses = torch.tensor([3.0, 2.5, 2.0, 1.5, 1.2, 1.0])
    for step in range(24):
        expected = published(6, step, 24, scale)
        assert made.layer_weights(step) == pytest.approx(expected), step
        objective = made.objective_at(step)
        assert objective.value(losses, torch.ones(())).item() == pytest.approx(
            (losses @ torch.tensor(expected)).item()
        )
        assert (
            {layer for layer, weight in enumerate(expected, start=1) if weight}
            <= {*objective.weighted}
            <= {*objective.trained}
        )


def test_the_curriculum_of_layerskip_by_hand(tmp_path):
    def weighted(step):
        made = DualState(config(tmp_path, objective="layerskip", dual_warmup_steps=0), 5, 20, 0)
        return made.objective_at(step).weighted

    # T / 2L = 2 steps a layer, all after half of the steps; the first layer's e is 0.
    assert [weighted(step) for step in (0, 1, 2, 4, 6, 19)] == [
        [5],
        [5],
        [4, 5],
        [3, 4, 5],
        [2, 3, 4, 5],
        [2, 3, 4, 5],
    ]
    one_layer = DualState(config(tmp_path, objective="layerskip"), 1, 4, 0)
    assert one_layer.layer_weights(0) == [1]
