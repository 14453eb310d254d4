"""The benchmark for a GPU, in toy sizes on a CPU."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import gpu


ROOT = Path(__file__).parent.parent


def test_it_runs_and_says_which_targets_hold(tmp_path):
    words = [sys.executable, "-m", "recipes.benchmarks.gpu", "--toy", "--rounds", "1", "--output", tmp_path / "found"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    text, facts = (tmp_path / "found.md").read_text(), json.loads((tmp_path / "found.json").read_text())
    assert text in done.stdout and facts["device"] in text.lower() and "toy sizes" in text
    assert not [case for case in facts["cases"].values() if "error" in case]
    for case in facts["cases"].values():
        assert case["figures"]["erm"]["times"] == 1.0
        for what, value, holds in case["targets"]:
            limit = float(re.search(r"[<>]= ([\d.]+)", what)[1])
            assert holds is (None if value is None else value >= limit if ">=" in what else value <= limit), what
    for target in ("default: step <= 1.2", "all tokens: step <= 3.2", ">= 0.7 of the rate", "memory <= 1.02"):
        assert re.search(rf"\| .*{target}.* \| (\d|not measured)", text), target


def test_a_case_that_fails_is_named_and_the_others_run_on(tmp_path):
    words = [sys.executable, "-m", "recipes.benchmarks.gpu", "--minutes", "0", "--output", tmp_path / "found"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "found.md").read_text().count("Failed: TimeoutError") == 5


def test_ratios_and_starts_are_those_within_a_round():
    def runs(*rounds):
        return [{"steps": [(seconds, 0.0)], "start": start, "peak": 1} for seconds, start in rounds]

    floor = [{"steps": [(1.0, 1.0)], "product": 1, "erm": 1}] * 2
    options = argparse.Namespace(classes=2, layers=2, lora=False)
    found = gpu.figures(options, {"floor": floor, "erm": runs((1, 4), (10, 4)), "exact": runs((2, 5), (20, 5))})
    assert found["exact"]["times"] == found["exact"]["times_at_most"] == 2.0
    assert found["exact"]["start"] == 3.0 and found["erm"]["start"] == 0.0
