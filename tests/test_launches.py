"""The number of kernels stays what the results say: it repeats exactly with the same libraries."""

import json

import launches
import pytest
import torch
import transformers
from programs import ROOT


RECORDED = json.loads((ROOT / "recipes/benchmarks/results/launches.json").read_text())
QUICK = ("bert", "vit", "ut")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in launches.CASES
    ],
)
def test_kernels_are_no_more_than_recorded(name):
    found = launches.facts(name, launches.count(name))
    recorded = RECORDED["cases"][name]
    versions = (RECORDED["torch"], RECORDED["transformers"])
    for what in ("step", "evaluation"):
        if versions == (torch.__version__, transformers.__version__):
            assert found[what]["plain"] == recorded[what]["plain"]
            assert found[what]["ours"] <= recorded[what]["ours"]
        ratio = found[what]["ours"] / found[what]["plain"]
        assert ratio <= 1.05 * recorded[what]["ours"] / recorded[what]["plain"]


def test_what_is_beyond_plain_training_adds_up():
    windows = launches.count("ut", finds_functions=True)
    calls = launches.count_calls("ut")
    found = launches.beyond_plain(windows, calls)
    step = launches.facts("ut", windows)["step"]
    assert sum(found["kernels"].values()) == step["ours"] - step["plain"]
    totals = {arm: sum(window.places.values()) for arm, window in calls.items()}
    assert sum(found["calls"].values()) == totals["ours"] - totals["plain"]
    assert found["calls"]["readout"] > 0


@pytest.mark.slow
def test_every_process_gives_its_rounds():
    seconds = launches.time_in_processes("ut", rounds=2, processes=2)
    assert {arm: len(measured) for arm, measured in seconds.items()} == {"plain": 4, "ours": 4}
    assert all(value > 0 for measured in seconds.values() for value in measured)


def test_a_kernel_is_what_computes():
    x = torch.ones(3, 4)
    with launches.KernelCount() as counted:
        y = x.t()[1:].reshape(-1)  # a view, a view, and a copy
        y.add_(1)
        torch.empty(3)
    assert counted.kernels == 2
