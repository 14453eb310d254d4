import math
from dataclasses import replace

import cut_first
import pytest
import runs_to_specification as benchmark
from harness import Runs

from hf_descent import DescentConfig


# For each arm, what each of two exits needs, the coefficient at which training breaks down, and the coefficients that
# a search with one learning rate then tries.
@pytest.mark.parametrize(
    ("arm", "needs", "breaks", "tried"),
    [
        ("ours", (1, 1), math.inf, [(1,)]),
        ("ours", (3, 1), math.inf, [(1,), (2,), (4,)]),
        (
            "ours",
            (99, 1),
            math.inf,
            [(1,), (2,), (4,), (8,), (16,)],
        ),  # from there on settings are the same
        ("fixed", (0.5, 30), math.inf, [(1, 1), (1, 10), (1, 100)]),
        ("fixed", (0.5, 30), 50, [(1, 1), (1, 10), (1, 100), (1, math.sqrt(1000))]),
        ("quadratic", (5, 20), math.inf, [(1,), (10,), (100,)]),
        ("hinge", (5, 20), math.inf, [(1,), (10,), (100,)]),
        ("deep_supervision", (5, 20), math.inf, [(1,)]),
        ("sorted", (5, 20), math.inf, [(1,)]),
        ("cut_first", (5, 20), math.inf, [(1,)]),
        ("quadratic", (5, 200), 150, [(1,), (10,), (100,), (1000,)]),
    ],
)
def test_a_search_tries_what_is_fixed_beforehand_until_it_is_met(arm, needs, breaks, tried):
    def run(coefficients, rate):
        values = coefficients if len(coefficients) == 2 else coefficients * 2
        missed = [value < need for value, need in zip(values, needs)]
        broke = max(values) > breaks
        met = not any(missed) and not broke
        found = {"missed": missed, "broke": broke, "met": met, "select": [1.0], "beyond": 0.0}
        return found | {"coefficients": coefficients, "rate": rate}

    runs = benchmark.search(arm, 2, (1e-3,), 4 if breaks == 150 else 8, run)
    assert [found["coefficients"] for found in runs] == [pytest.approx(values) for values in tried]


@pytest.mark.parametrize("run", range(8))
def test_every_run_of_ours_is_a_setting_that_the_package_takes(run, tmp_path):
    DescentConfig(str(tmp_path), **benchmark.settings_of("ours", {3: 0.1}, (2.0**run,)))


def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    output = tmp_path / "runs.jsonl"
    options = [
        "--smoke",
        "--seeds",
        "0",
        "--tasks",
        "denoiser_two",
        "--arms",
        "ours",
        "fixed",
        "--budget",
        "3",
    ]
    table = benchmark.main([*options, "--output", str(output)])
    assert len(output.read_text().splitlines()) == 6 and table.count("not in 3") == 2
    monkeypatch.setattr(benchmark, "train", None)
    assert benchmark.main([*options, "--output", str(output)]) == table
    assert len(output.read_text().splitlines()) == 6


def last_loss(run):
    return run["select"][-1]


def test_models_that_are_cut_first_stand_in_the_place_of_the_layers(tmp_path):
    words = ["--smoke", "--tasks", "denoiser_two", "--seeds", "0"]
    arms = ["--arms", "plain", "cut_first", "cut_first_longer"]
    file = str(tmp_path / "runs.jsonl")
    table = benchmark.main([*words, *arms, "--output", file])
    runs = {}
    for run in Runs(file).all():
        settings = run["settings"]
        arm = settings.get("cut_first", "plain")
        if arm == "plain":
            runs.setdefault(arm, run)
            runs[arm] = min(runs[arm], run, key=last_loss)
        else:
            runs[arm] = run

    plain = runs["plain"]
    same_steps = runs["same steps"]
    words = ["denoiser", "--smoke", "--seeds", "0", "--rates", "1e-3", "2e-3"]
    file = str(tmp_path / "cut.jsonl")
    cut_first.main([*words, "--arms", "cut 2", "cut 4, same compute", "--output", file])
    shorter = Runs(file).all()
    cut_2 = min(shorter[:2], key=last_loss)
    longer_4 = min(shorter[2:], key=last_loss)

    for what, of_short in (("select", "select"), ("certify", "report"), ("values", "values")):
        expected = list(plain[what])
        expected[1] = cut_2[of_short][-1]
        assert same_steps[what][:3] == expected[:3] and same_steps[what][4] == expected[4]
        assert runs["same compute"][what][3] == longer_4[of_short][-1]
    assert plain["verdicts"] != same_steps["verdicts"] or plain["radii"] != same_steps["radii"]
    assert len(same_steps["seconds_each"]) == 6
    assert table.count("not in 6") == 2  # three models at each of two rates


def test_one_depth_a_step_trains_the_exits_alone(tmp_path):
    words = ["--smoke", "--tasks", "denoiser_one", "--seeds", "0", "--arms", "sorted"]
    benchmark.main([*words, "--output", str(tmp_path / "runs.jsonl")])
    run, *_ = Runs(str(tmp_path / "runs.jsonl")).all()
    assert run["settings"]["in_turn"] and run["multipliers"] == [
        0.0
    ]  # the fourth step is that of layer 5


def test_rising_weights_rise_with_the_steps_alone(tmp_path):
    words = ["--smoke", "--tasks", "denoiser_two", "--seeds", "0", "--arms", "rising"]
    benchmark.main([*words, "--output", str(tmp_path / "runs.jsonl")])
    for run in Runs(str(tmp_path / "runs.jsonl")).all():
        assert run["multipliers"] == [15.0, 15.0]  # in the last of four steps, of 20


def test_settings_that_a_search_found_are_tried_with_the_other_seeds(tmp_path, monkeypatch):
    """Each seed needs a coefficient of its own: the first two hold for the third, too, which finds its own at once."""
    needs, trained = {0: 2.0, 1: 2.0, 2: 1.0}, []

    def train(task, options, exits, settings, rate, seed):
        trained.append(seed)
        met = settings["dual_learning_rate"] >= needs[seed] * benchmark.OURS["dual_learning_rate"]
        return {
            "met": met,
            "missed": [not met],
            "broke": False,
            "select": [1.0] * 5,
            "certify": [1.0] * 5,
        }

    monkeypatch.setattr(benchmark, "train", train)
    one_rate = replace(benchmark.TASKS["denoiser"], rates=(1e-3,))
    monkeypatch.setitem(benchmark.TASKS, "denoiser", one_rate)
    options = ["--holds", "--tasks", "denoiser_one", "--arms", "ours", "--seeds", "0", "1", "2"]
    table = benchmark.main([*options, "--output", str(tmp_path / "runs.jsonl")])
    assert table.splitlines()[-1] == "| denoiser_one | ours | 3 of 3 | 4 of 6 |"
    assert sorted(trained) == [0, 0, 1, 1, 2, 2]
