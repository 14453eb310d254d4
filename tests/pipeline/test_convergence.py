"""The trainer reaches the optimum and the multipliers of a convex constrained problem that is solved by hand.

One parameter theta; layer 1 outputs theta, layer 2 outputs theta - 1.5, the target is 0, so that
f_1 = theta^2 / 2 and f_2 = (theta - 1.5)^2 / 2. With alpha = 0.5 and f_0 = 1:

    minimise (theta - 1.5)^2 / 2   subject to   theta^2 / 2 <= 0.5   and   f_2 <= 0.5 f_1

The first constraint is active, theta* = 1, and stationarity (theta - 1.5) + lambda_1 theta = 0 gives lambda_1* = 0.5;
the second holds with room (0.125 <= 0.25), lambda_2* = 0.
"""

import numpy as np
import pytest
import torch
from tiny.training import config, trained
from torch import nn


class Shift(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift

    def forward(self, x):
        return x - self.shift


class Parabolas(nn.Module):
    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList([Shift(0.0), Shift(1.5)])

    def forward(self, x, labels=None):
        hidden = x[..., None] * 0 + self.theta  # [batch, 1, 1]
        for layer in self.layers:
            hidden = layer(hidden)
        logits = hidden[..., 0]  # [batch, 1]
        return {"loss": 0.5 * (logits - labels).square().mean(), "logits": logits}


def solve(tmp_path, steps, model=None, rows=8, dual_rows=0, **arguments):
    torch.manual_seed(0)
    data = [{"x": torch.zeros(1), "labels": torch.zeros(1)} for _ in range(rows + dual_rows)]
    settings = {
        "descent_alpha": 0.5, "initial_loss_bound": 1.0, "max_steps": steps, "optim": "sgd", "learning_rate": 0.4,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "logging_steps": 500, "negative_weights": "keep",
        "max_last_layer_rise": None,  # the problem as it stands, whatever it costs f_2
    }  # fmt: skip
    args = config(tmp_path, **settings | arguments)
    dual_dataset = data[rows:] if dual_rows else None
    return trained(model or Parabolas(), args, train_dataset=data[:rows], dual_dataset=dual_dataset)


def rest(trainer):
    return trainer.model.theta.item(), trainer.multipliers.values.tolist()


@pytest.mark.parametrize(
    ("dual_optim", "normalize", "rate"),
    [("sgd", False, 0.3), ("sgd", True, 0.3), ("adam", True, 0.03)],
)
@pytest.mark.parametrize("held_out", [{}, {"dual_rows": 200}])
def test_hard_constraints(tmp_path, dual_optim, normalize, rate, held_out):
    """In as many steps on held-out rows, which are read once in several."""
    settings = {
        "dual_optim": dual_optim,
        "normalize_violations": normalize,
        "dual_learning_rate": rate,
    }
    theta, multipliers = rest(solve(tmp_path, 150, **settings, **held_out))
    assert theta == pytest.approx(1.0, abs=0.002)
    assert multipliers == pytest.approx([0.5, 0.0], abs=0.004)


ROOT = np.sqrt(2) * np.array([1, 1.5])


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        # f_1 = (1 + eps) f_2: theta = sqrt(1 + eps) (1.5 - theta).
        ({"exit_targets": {1: 0.0}}, 0.75),
        ({"exit_targets": {1: 0.5}}, 1.5 * 1.5**0.5 / (1 + 1.5**0.5)),
        # f_1 = f_0^(1/2) f_2^(1/2), of two layers with s = 1: theta^2 + sqrt(2) theta - 1.5 sqrt(2) = 0.
        (
            {"descent_alpha": "line", "descent_strength": 1.0},
            np.roots([1, ROOT[0], -ROOT[1]]).max(),
        ),
        ({"loss_targets": {1: 0.32}}, 0.8),
        ({"loss_targets": {1: 0.32}, "target_margin": 0.36}, 0.64),
    ],
)
@pytest.mark.parametrize("scheme", ["keep", pytest.param("detach", marks=pytest.mark.slow)])
def test_rows_with_fixed_references_rest_where_each_holds_the_other_losses_fixed(
    tmp_path, constraint, expected, scheme
):
    """Stationarity lambda theta + (theta - 1.5) = 0, whatever the reference: an equilibrium. In the optimum of the
    constrained problem the multiplier of the exit at eps = 0 would be 0.5, since it weighs f_2 by 1 - lambda."""
    settings = {
        "descent_alpha": None,
        "target_margin": 0.0,
        "negative_weights": scheme,
    } | constraint
    theta, multipliers = rest(
        solve(tmp_path, 250, dual_optim="sgd", dual_learning_rate=0.2, **settings)
    )

    assert theta == pytest.approx(expected, abs=0.003)
    assert multipliers[0] == pytest.approx((1.5 - expected) / expected, abs=0.01)


@pytest.mark.parametrize(("scheme", "expected"), [("keep", 1 / 3), ("detach", 1 / 2)])
def test_descent_rows_rest_at_the_optimum_or_where_the_layer_before_is_held_fixed(
    tmp_path, scheme, expected
):
    """Layers at theta, theta - 3 and theta - 1.5: f_2 <= f_1 / 4 alone is active, at theta = 2. Stationarity there,
    (theta - 1.5) + lambda ((theta - 3) - theta / 4) = 0, or without the last term where f_1 is held fixed."""
    model = Parabolas()
    model.layers = nn.ModuleList([Shift(0.0), Shift(3.0), Shift(-1.5)])
    settings = {
        "descent_alpha": [0.1, 0.75, 0.5],
        "initial_loss_bound": 10.0,
        "normalize_violations": False,
    }
    settings.update(
        dual_optim="sgd", dual_learning_rate=0.2, learning_rate=0.2, negative_weights=scheme
    )
    theta, multipliers = rest(solve(tmp_path, 300, model, **settings))

    assert theta == pytest.approx(2.0, abs=0.002)
    assert multipliers == pytest.approx([0.0, expected, 0.0], abs=0.004)


@pytest.mark.parametrize("form", ["weight_decay", "slack"])
@pytest.mark.parametrize(("dual_optim", "rate"), [("sgd", 0.3), ("adam", 0.03)])
def test_both_forms_of_resilience_settle_at_the_same_point(tmp_path, form, dual_optim, rate):
    c = 0.4
    settings = {
        "resilience": c,
        "resilience_form": form,
        "slack_learning_rate": rate,
        "slack_restart": False,
    }
    theta, multipliers = rest(
        solve(tmp_path, 150, dual_optim=dual_optim, dual_learning_rate=rate, **settings)
    )
    # Stationarity lambda = (1.5 - theta) / theta in g_1 = c lambda: theta^3 / 2 - 0.5 theta - c (1.5 - theta) = 0.
    roots = np.roots([0.5, 0.0, c - 0.5, -1.5 * c])
    expected = roots[np.isreal(roots)].real.item()

    assert theta == pytest.approx(expected, abs=0.002)
    assert multipliers == pytest.approx([(1.5 - expected) / expected, 0.0], abs=0.004)


def test_the_optimum_does_not_depend_on_the_unit_of_the_loss_with_normalized_violations(tmp_path):
    """The same problem with every loss, and f_0, times 1000: the multipliers follow the same path."""

    class Scaled(Parabolas):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {"loss": 1000 * outputs["loss"], "logits": outputs["logits"]}

    paths = []

    for model, scale in ((Parabolas(), 1.0), (Scaled(), 1000.0)):
        settings = {"initial_loss_bound": scale, "learning_rate": 0.05 / scale, "logging_steps": 1}
        logs = solve(tmp_path, 50, model, **settings).state.log_history
        paths.append([log["multiplier_1"] for log in logs if "multiplier_1" in log])

    assert paths[0] == pytest.approx(paths[1], rel=1e-3)
    assert paths[0][-1] > 0.1
