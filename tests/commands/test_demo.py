import json

import numpy as np
import pytest

from hf_descent import DescentConfig, cli
from hf_descent.commands.demo import ARMS, GAMMA_TRAIN, GAMMAS, NUM_LAYERS, demo


def test_a_short_demo_trains_every_arm_and_writes_table_figures_and_runs(tmp_path, capsys):
    comparison = demo(str(tmp_path), seeds=(0, 0), max_steps=8)
    assert list(comparison.groups) == list(ARMS.values())
    for runs in comparison.groups.values():
        (run,) = runs
        assert len(run.profiles[GAMMA_TRAIN].losses) == NUM_LAYERS
        assert run.curve.mean.tolist() == sorted(run.curve.mean) and len(run.curve.gammas) == len(
            GAMMAS
        )
    assert list(json.loads((tmp_path / "comparison.json").read_text())["groups"]) == list(
        ARMS.values()
    )
    assert {"metric_against_noise.png", "layer_losses.png"} <= {
        path.name for path in tmp_path.iterdir()
    }
    printed = capsys.readouterr().out
    losses = comparison.groups["constrained"][0].profiles[GAMMA_TRAIN].losses
    assert f"{losses[0]:.2f}  {losses[1]:.2f}" in printed and str(comparison) in printed
    verdict, following = printed.strip().splitlines()[-2:]
    assert verdict.startswith("VERDICT: NOT MET, price ") and following.startswith("Next: ")


def test_a_demo_without_steps_is_refused():
    with pytest.raises(ValueError, match="`max_steps` is 0; give at least 1"):
        cli.main(["demo", "--max_steps", "0"])


@pytest.mark.slow
def test_the_demo_shows_what_the_readme_says(tmp_path):
    groups = demo(str(tmp_path)).groups
    plain, constrained = groups["plain training"], groups["constrained"]
    largest = [
        [run.profiles[GAMMA_TRAIN].to_dict()["max_violation"] for run in runs]
        for runs in (plain, constrained)
    ]
    assert (
        min(largest[0]) >= 1
        and max(largest[1]) <= 0.02
        and all(run.feasible for run in constrained)
    )
    plain, constrained = (
        np.mean([run.curve.mean for run in runs], axis=0) for runs in (plain, constrained)
    )
    assert constrained.mean() <= 0.98 * plain.mean()
    level = GAMMAS.index(GAMMA_TRAIN)
    assert constrained[level] <= 1.01 * plain[level]


@pytest.mark.slow
def test_the_package_s_defaults_are_feasible_here(tmp_path):
    (run,) = demo(str(tmp_path), seeds=(0,), auto=True).groups["constrained"]
    assert (
        run.feasible and run.profiles[GAMMA_TRAIN].descent_share >= DescentConfig.descent_strength
    )
