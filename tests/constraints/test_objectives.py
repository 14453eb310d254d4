import pytest
import torch
from naive_head import Watch
from tiny import config

from hf_descent.constraints.objectives import penalty
from hf_descent.constraints.state import DescentState


def state(tmp_path, objective, **settings):
    given = {"descent_alpha": [0.1, 0.2, 0.3], "initial_loss_bound": 1.0, "penalty_coefficient": 0.4} | settings
    made = DescentState(config(tmp_path, objective=objective, dual_warmup_steps=0, **given), 3, 10, 0)
    made.multipliers.values = torch.tensor([0.5, 1.0, 2.0])
    return made


LAGRANGIAN = [0.5 - 0.8 * 1.0, 1.0 - 0.7 * 2.0, 1 + 2.0]


@pytest.mark.parametrize(
    ("objective", "settings", "expected"),
    [
        ("deep_supervision", {}, [0.4, 0.4, 1]),
        ("deep_supervision", {"constrained_layers": [2, 3]}, [0, 0.4, 1]),
        ("descent", {"negative_weights": "keep"}, LAGRANGIAN),
        ("descent", {"negative_weights": "clip"}, [0, 0, 3]),
        ("descent", {"negative_weights": "detach"}, [0.5, 1, 3]),
        ("descent", {"negative_weights": "keep", "normalize_weights": True}, [w / 3.7 for w in LAGRANGIAN]),
    ],
)
def test_the_weights_of_linear_objectives(tmp_path, objective, settings, expected):
    made = state(tmp_path, objective, **settings)
    made.weights()
    with Watch() as watch:
        weights = made.weights()
    assert weights.tolist() == pytest.approx(expected)
    assert not watch.waits
    losses = torch.tensor([1.2, 0.7, 0.8])
    value = made.objective_at(0).value(losses, torch.ones(()))
    assert value.item() == pytest.approx(sum(w * f for w, f in zip(expected, losses.tolist())))


@pytest.mark.parametrize("detach", [False, True])
def test_penalties_by_hand(tmp_path, detach):
    losses = torch.tensor([1.2, 0.7, 0.8], requires_grad=True)
    excess = [1.2 - 0.9, 0.0, 0.8 - 0.7 * 0.7]  # the second constraint holds: 0.7 <= 0.8 * 1.2
    assert penalty("hinge", torch.tensor(excess), 2.0).item() == pytest.approx(2 * sum(excess))
    for objective, slopes in (("hinge", [0.4, 0.4]), ("quadratic", [0.4 * excess[0], 0.4 * excess[2]])):
        made = state(tmp_path, objective, negative_weights="detach" if detach else "keep")
        value = made.objective_at(0).value(losses, torch.ones(()))
        squares = sum(e * e for e in excess) / 2
        assert value.item() == pytest.approx(0.8 + 0.4 * (sum(excess) if objective == "hinge" else squares))
        (gradient,) = torch.autograd.grad(value, losses)
        reference = 0.0 if detach else -0.7 * slopes[1]
        assert gradient.tolist() == pytest.approx([slopes[0], reference, 1 + slopes[1]])
