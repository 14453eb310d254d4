import pytest
import torch
from naive_head import Watch

from hf_descent import DescentProblem
from hf_descent.constraints.objectives import linear_weights, penalty


PROBLEM = DescentProblem([0.1, 0.2, 0.3], 1.0, 3)
ALL = torch.arange(3)
LOSSES = torch.tensor([1.2, 0.7, 0.8], dtype=torch.float64)


@pytest.mark.parametrize(
    ("objective", "trained", "expected"),
    [
        ("erm", [2], [0, 0, 1]),
        ("deep_supervision", [0, 1, 2], [0.4, 0.4, 1]),
        ("deep_supervision", [1, 2], [0, 0.4, 1]),
        ("descent", [0, 1, 2], [0.5 - 0.8 * 1.0, 1.0 - 0.7 * 2.0, 1 + 2.0]),
        ("fixed", [0, 1, 2], [0.5 - 0.8 * 1.0, 1.0 - 0.7 * 2.0, 1 + 2.0]),
    ],
)
def test_linear_weights(objective, trained, expected):
    multipliers, trained = torch.tensor([0.5, 1.0, 2.0]), torch.tensor(trained)
    with Watch() as watch:
        weights = linear_weights(objective, PROBLEM, multipliers, 0.4, "keep", trained)
    assert weights.tolist() == pytest.approx(expected)
    assert not watch.waits


@pytest.mark.parametrize("objective", ["descent", "fixed"])
def test_clipping_touches_negative_weights_of_the_lagrangian_only(objective):
    weights = linear_weights(objective, PROBLEM, torch.tensor([0.5, 1.0, 2.0]), 0.4, "clip", ALL)
    assert weights.tolist() == pytest.approx([0, 0, 3])


def test_penalties_by_hand():
    excess = [1.2 - 0.9, 0.0, 0.8 - 0.7 * 0.7]  # the second constraint holds: 0.7 <= 0.8 * 1.2
    hinge = penalty("hinge", PROBLEM, LOSSES, 2.0)
    assert hinge.item() == pytest.approx(0.8 + 2 * sum(excess))
    quadratic = penalty("quadratic", PROBLEM, LOSSES, 2.0)
    assert quadratic.item() == pytest.approx(0.8 + 2 * sum(e * e for e in excess) / 2)
    assert linear_weights("hinge", PROBLEM, torch.zeros(3), 1.0, "keep", ALL) is None
