"""Whatever the settings are: multipliers that a naive reference agrees with, or an error that names the setting."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny.training import config, dual_step

from hf_descent.constraints.state import DualState


NUMBERS = st.one_of(
    st.floats(), st.floats(0.01, 0.99), st.floats(0.5, 5.0), st.integers(-2, 3),
    st.sampled_from(["auto", "steps", "0.3", "[0.1, 0.2, 0.3]", "much", "", None, [0.1] * 3, [0.5, 2.0, 0.1]]),
)  # fmt: skip
OBJECTIVES = ["descent", "descent", "hinge", "quadratic", "deep_supervision", "fixed", "erm", "x"]
NUMERIC = [
    "descent_alpha", "initial_loss_bound", "descent_strength", "dual_learning_rate", "dual_warmup_steps", "resilience",
    "slack_learning_rate", "multiplier_max", "penalty_coefficient", "target_margin", "fixed_multipliers",
]  # fmt: skip
SETTINGS = {
    "objective": st.sampled_from(OBJECTIVES), **dict.fromkeys(NUMERIC, NUMBERS),
    "constrained_layers": st.sampled_from([None, [1, 3], [3], "[2, 3]", [2, 1], [0], [4], 2, "all", [1.5], []]),
    "dual_optim": st.sampled_from(["sgd", "sgd", "adam", "lion"]),
    "resilience_form": st.sampled_from(["weight_decay", "weight_decay", "slack", "none"]),
    "negative_weights": st.sampled_from(["keep", "clip", "detach", "abs"]), "normalize_violations": st.booleans(),
}  # fmt: skip
LOSSES = st.lists(
    st.one_of(st.floats(0.0, 9.0), st.sampled_from([math.inf, math.nan])), min_size=3, max_size=3
)


def naive_multipliers(args, problem, steps):
    """Plain projected ascent, as the paper writes it (Algorithm 1), in python's numbers."""
    values = [0.0] * 3
    layers = problem["constrained_layers"]
    alpha = problem["alpha"]
    bound = problem["initial_loss_bound"]
    average = 0.0
    weight = 0.0
    scale = bound if args.normalize_violations else 1.0

    for losses in steps:
        if not all(map(math.isfinite, losses)):
            continue
        average = 0.98 * average + 0.02 * losses[2]
        weight = 0.98 * weight + 0.02
        ratio = average / weight / bound
        for index, layer in enumerate(layers):
            before = bound if index == 0 or alpha == "line" else losses[layers[index - 1] - 1]
            if alpha in ("line", "steps"):
                if alpha == "line" and layer == 3:
                    continue
                power = args.descent_strength * (layer / 3 if alpha == "line" else 1 / len(layers))
                factor = ratio**power if 0 < ratio < 1 else 1.0
            else:
                factor = 1 - alpha[layer - 1]
            violation = (losses[layer - 1] - factor * before) / scale
            if alpha in ("line", "steps") and not 0 < ratio < 1:
                violation = min(violation, 0.0)
            raised = values[layer - 1] + args.dual_settings.dual_learning_rate * (
                violation - args.resilience * values[layer - 1]
            )
            values[layer - 1] = min(max(raised, 0.0), args.multiplier_max or math.inf)

    return values


def test_any_settings_give_right_multipliers_or_an_error_that_names_them(tmp_path):
    outcomes = {"taken": 0, "refused": 0}
    compared = 0
    unnamed = []

    @settings(derandomize=True, database=None, deadline=None, max_examples=300)
    @given(st.fixed_dictionaries({}, optional=SETTINGS), st.lists(LOSSES, min_size=2, max_size=6))
    def check(given, steps):
        nonlocal compared
        try:
            args = config(tmp_path, **{"dual_optim": "sgd", **given})
            state = DualState(args, 3, len(steps), 0, 1.05)
            for step, losses in enumerate(steps):
                dual_step(state, torch.tensor(losses), step)
        except ValueError as error:
            outcomes["refused"] += 1
            unnamed.extend([] if any(name in str(error) for name in SETTINGS) else [str(error)])
            return
        outcomes["taken"] += 1
        values = state.multipliers.values
        assert torch.isfinite(values).all() and (values >= 0).all()
        assert args.multiplier_max is None or (values <= args.multiplier_max + 1e-6).all()
        plain = (
            args.dual_settings.dual_optim == "sgd"
            and args.resilience_form == "weight_decay"
            and state.active_from == 0
        )
        if plain and args.objective == "descent":
            compared += 1
            expected = naive_multipliers(args, state.problem.state_dict(), steps)
            assert values.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)

    check()

    assert not unnamed
    assert min(*outcomes.values(), compared) > 20
