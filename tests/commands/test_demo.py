import json

import numpy as np
import pytest

from hf_descent import DescentConfig
from hf_descent.commands.demo import ARMS, GAMMA_TRAIN, GAMMAS, NUM_LAYERS, demo


def test_a_short_demo_trains_every_arm_and_writes_table_figure_and_numbers(tmp_path, capsys):
    results = demo(str(tmp_path), seeds=(0,), max_steps=8)
    assert json.loads((tmp_path / "demo.json").read_text()) == json.loads(json.dumps(results))
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    for arm in ARMS:
        (run,) = results["arms"][arm]
        assert len(run["layer_losses"]) == NUM_LAYERS and len(run["rmse"]) == len(GAMMAS)
        assert run["rmse"] == sorted(run["rmse"])  # more noise, more error
    printed = capsys.readouterr().out
    assert "layer 1" in printed and "without noise" in printed


@pytest.mark.parametrize("given", [{"max_steps": 0}, {"seeds": ()}, {"seeds": (-1, 0)}, {"seeds": (1, 0, 1)}])
def test_runs_that_would_say_nothing_are_refused(given, tmp_path):
    with pytest.raises(ValueError, match="`seeds` is .* and `max_steps` .*; give seeds that differ"):
        demo(str(tmp_path / "demo"), **{"max_steps": 8} | given)
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_the_demo_shows_what_the_readme_says(tmp_path):
    arms = demo(str(tmp_path))["arms"]
    assert all(run["max_violation"] <= 0.02 for run in arms["descent"])
    assert all(run["max_violation"] >= 1 for run in arms["erm"])
    plain = np.mean([run["rmse"] for run in arms["erm"]], axis=0)  # [gammas]
    constrained = np.mean([run["rmse"] for run in arms["descent"]], axis=0)  # [gammas]
    assert constrained.mean() <= 0.98 * plain.mean()
    level = GAMMAS.index(GAMMA_TRAIN)
    assert constrained[level] <= 1.01 * plain[level]


@pytest.mark.slow
def test_the_package_s_defaults_are_feasible_here(tmp_path):
    arms = demo(str(tmp_path), seeds=(0,), auto=DescentConfig.descent_strength)["arms"]
    assert arms["descent"][0]["max_violation"] <= 0.01
