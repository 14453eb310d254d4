"""The limit on the last layer's loss acts in two processes as in one, and goes on from a checkpoint of either."""

import pytest
import torch
from launching import assert_same, job, launch
from safetensors.torch import load_file
from train_steps import train

from hf_descent.constraints.saved_state import STATE_NAME


# From step 30 on the rows have labels of their own, not one for all, so that f_L rises and the multipliers shrink.
RISING = {
    "rows": 400,
    "labels_change_at": 240,
    "max_steps": 50,
    "descent_alpha": 0.1,
    "dual_learning_rate": 0.1,
    "save_strategy": "steps",
    "save_steps": 5,
}
ACTIVE = "checkpoint-45"  # by then the multipliers have begun to shrink


def guard_states(run):
    """The guard's tensors in every checkpoint of a run, by the checkpoint's name."""
    result, _ = run
    states = {}
    for step in range(5, 51, 5):
        name = f"checkpoint-{step}"
        tensors = load_file(f"{result['folder']}/{name}/{STATE_NAME}")
        states[name] = {key: value for key, value in tensors.items() if key.startswith("guard.")}
    return states


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    alone = train(folder / "alone", "classification", **RISING)
    checkpoint = str(folder / "alone" / ACTIVE)
    jobs = {
        "2x4": job("classification", **RISING),
        "2x2x2": job("classification", 2, 2, **RISING),
        "resumed": job("classification", **RISING, resume_from=checkpoint),
    }
    return alone, launch(folder / "double", jobs)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["2x4", "2x2x2"])
def test_the_limit_acts_in_two_processes_as_in_one(runs, way):
    alone = runs[0]
    double = runs[1][way]
    assert_same(alone, double)
    assert double[0]["rises"] == pytest.approx(alone[0]["rises"], rel=1e-3, abs=1e-5)
    ours = guard_states(alone)
    theirs = guard_states(double)
    for name, state in ours.items():
        torch.testing.assert_close(theirs[name], state, rtol=1e-3, atol=1e-5)
    # It acts at all: f_L rises beyond its limit, and the multipliers of layers that violate their rows shrink.
    assert not ours["checkpoint-30"]["guard.shrinks"] and ours[ACTIVE]["guard.shrinks"]
    assert max(alone[0]["rises"]) > 0.02
    assert alone[0]["path"][-1] < 0.5 * max(alone[0]["path"])


@pytest.mark.slow
def test_a_run_whose_multipliers_shrink_resumes_in_any_number_of_processes(tmp_path, runs):
    alone, double = runs
    checkpoint = f"{double['2x4'][0]['folder']}/{ACTIVE}"
    in_one = train(tmp_path, "classification", **RISING, resume_from=checkpoint)
    for resumed in (in_one, double["resumed"]):
        assert_same(alone, resumed)
