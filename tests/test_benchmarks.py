"""The benchmarks run at toy size and time every arm."""

import argparse
import json
import math
import os
import time
from collections import defaultdict

import controlled
import harness
import pytest
from programs import ROOT, python


TOY = "--layers 2 --hidden 64 --batch 2 --length 8 --threads 1 "
COMMANDS = {
    "classifier_step.py": TOY + "--rounds 2 --steps 3 --arms erm descent+noise",
    "classifier_step.py --model ut": TOY + "--rounds 2 --steps 3 --arms erm+noise descent+noise",
    "lm_step.py": TOY + "--rounds 1 --intermediate 64 --vocab 99 --steps 4 --compiler aot_eager "
    "--arms naive subsampled+ subsampled-compiled",
    "evaluation_cost.py --model llama": TOY + "--rounds 2 --samples 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_times_every_arm(name, tmp_path):
    script, *words = f"{name} {COMMANDS[name]} --output {tmp_path}/out.json".split()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    python(ROOT / "recipes" / "benchmarks" / script, *words, timeout=600, env=environment)
    found = json.loads((tmp_path / "out.json").read_text())
    runs = {arm: runs[0]["steps"] for arm, runs in found.get("runs", {}).items()}
    arms = runs or found.get("wall") or found["seconds"]
    assert len(arms) >= 2 and all(len(values) >= 2 for values in arms.values())


@pytest.mark.parametrize(("arm", "depth"), [("cut first, same compute", 3), ("sorted", 5)])
def test_an_arm_of_the_controlled_comparison_trains_a_model_of_its_depth(arm, depth):
    options = argparse.Namespace(smoke=True)
    settings = controlled.arms("photos")[arm]
    result = controlled.denoise("photos", options, settings, 1e-3, 0)
    assert len(result["select"]) == len(result["test"]["losses"]) == depth
    assert "cut_to" in settings or depth == 5  # the arm stays as it is for the next run


@pytest.mark.parametrize(
    ("losses", "tried", "trained"),
    [
        # By the exponent of 2 of the learning rate, the loss of each of two seeds.
        ({-1: (3, 3), 0: (1, 1), 1: (2, 2)}, {-1, 0, 1}, {0}),
        ({-1: (3, 3), 0: (2, 2), 1: (1, 1), 2: (1.5, 1)}, {-1, 0, 1, 2}, {1}),
        ({-1: (3, 3), 0: (2, 2), 1: (1, 9), 2: (4, 4)}, {-1, 0, 1, 2}, {0, 1}),  # breaks down at 1
        ({-2: (4, 4), -1: (1, math.inf), 0: (2, math.nan), 1: (3, 3)}, {-2, -1, 0, 1}, {-1, 0, 1}),
    ],
)
def test_a_learning_rate_is_chosen_on_all_seeds_between_two_others(losses, tried, trained):
    known = defaultdict(lambda: (8, 8), losses)
    calls = []

    def run(arm, rate, seed):
        exponent = round(math.log2(rate / 1e-3))
        calls.append((exponent, seed))
        return {"select": [0.0, known[exponent][seed]]}

    controlled.search("plain", 1e-3, [0, 1], run)
    assert {exponent for exponent, seed in calls if seed == 0} >= tried
    assert {exponent for exponent, seed in calls if seed == 1} == trained
    means = {exponent: sum(known[exponent]) for exponent in trained}
    best = min(
        trained,
        key=lambda exponent: means[exponent] if math.isfinite(means[exponent]) else math.inf,
    )
    assert {best - 1, best + 1} <= {exponent for exponent, _ in calls}


def test_finished_runs_are_found_by_settings_of_any_number_of_digits(tmp_path):
    path, settings = str(tmp_path / "runs.jsonl"), {"coefficient": 10**0.5}
    made = harness.Runs(path).get(settings, lambda: {"losses": [2 / 3]})
    assert harness.Runs(path).get(settings, None) == made
    assert made["settings"] == settings and made["losses"] == [0.666667] and made["commit"]


def test_the_clock_counts_what_precedes_the_first_step_alone():
    clock = harness.Clock()
    clock.on_train_begin(None, None, None)
    for _ in range(2):
        time.sleep(0.2)
        clock.on_step_begin(None, None, None)
        clock.on_step_end(None, None, None)
    assert clock.steps[0][0] >= 0.2 > clock.steps[1][0]
