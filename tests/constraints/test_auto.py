import math

import pytest

from hf_descent.constraints.auto import geometric_alpha


def test_geometric_schedule_reaches_the_warm_up_loss_at_strength_one():
    alpha = geometric_alpha(2.0, 0.5, 4, strength=1.0)
    assert 2.0 * (1 - alpha) ** 4 == pytest.approx(0.5)
    half = geometric_alpha(2.0, 0.5, 4, strength=0.5)
    assert 2.0 * (1 - half) ** 4 == pytest.approx(math.sqrt(2.0 * 0.5))


@pytest.mark.parametrize("final", [2.0, 3.0, 1e9])
def test_a_model_no_better_than_a_constant_still_gets_a_schedule(final):
    assert 0 < geometric_alpha(2.0, final, 4, strength=1.0) < 0.05


@pytest.mark.parametrize("final", [float("nan"), float("inf"), 0.0, -1.0])
def test_no_schedule_from_a_meaningless_loss(final):
    with pytest.raises(ValueError, match="descent_alpha"):
        geometric_alpha(2.0, final, 4, strength=1.0)
