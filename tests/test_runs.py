"""One rule for all result files of a run's folder: those older than its last training do not count."""

import os

import pytest
from runs import make_curve, make_profile

from hf_descent.evaluation import LayerProfile, NoiseCurve
from hf_descent.hub.facts import collect
from hf_descent.runs import RunFolder


@pytest.fixture
def run(tmp_path):
    """Results of which the first half is older than the training."""
    run = RunFolder(tmp_path / "a [run]")
    profiles = [make_profile([0.9, 0.5], gamma) for gamma in (0.0, 1.0)]
    results = {"noise_curve": make_curve([0.5, 0.6])} | {
        f"layer_profile{each.ending}": each for each in profiles
    }
    run.write(results)
    run.write_summary({"objective": "descent", "training_started": 1000.0})
    (run.path / "config.json").write_text('{"architectures": ["BertModel"]}')
    (run.path / "eval_results.json").write_text('{"eval_accuracy": 0.5}')
    for path in run.path.iterdir():
        os.utime(path, (2000.0, 2000.0))
    return run


def test_results_are_read_by_their_names(run):
    (curve,) = run.results(NoiseCurve, "noise_curve")
    assert curve.metric == "accuracy"
    assert sorted(profile.gamma for profile in run.results(LayerProfile, "layer_profile*")) == [
        0.0,
        1.0,
    ]
    assert (
        run.read("eval_results.json") == {"eval_accuracy": 0.5}
        and run.read("test_results.json") == {}
    )
    assert run.results(NoiseCurve, "other_curve") == []
    card = collect(run.path)
    assert card["evaluation"] and card["noise_curve"] and card["layer_profile"]


@pytest.mark.parametrize("name", ["noise_curve.json", "layer_profile.json", "eval_results.json"])
def test_a_file_older_than_the_training_is_no_result(run, name, caplog):
    os.utime(run.path / name, (999.0, 999.0))
    assert run.fresh(name) == [] and f"{name} is older than the training" in caplog.text
    assert run.read(name) == {}
    missing = {"noise_curve.json": "noise_curve", "layer_profile.json": "layer_profile"}.get(name)
    assert (missing in collect(run.path)) is False
    run.write_summary({"objective": "descent"})  # without a time all results count
    assert run.fresh(name) == [run.path / name]


def test_a_summary_names_the_versions_and_the_file_that_cannot_be_read(run):
    assert run.summary["versions"]["hf_descent"] and RunFolder(run.path / "none").summary == {}
    (run.path / "descent_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"descent_config\.json cannot be read"):
        assert run.summary


def test_an_evaluation_takes_the_place_of_the_one_before(run):
    (run.path / "mine_curve.json").write_text("[]")
    run.remove_evaluations()
    assert not [*run.path.glob("layer_profile*"), *run.path.glob("noise_curve*")]
    assert run.summary and (run.path / "mine_curve.json").is_file()
