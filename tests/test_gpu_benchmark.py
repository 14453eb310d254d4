"""The benchmark for a GPU, in toy sizes on a CPU."""

import argparse
import json
import re
import time

import gpu
import pytest
from programs import ROOT, python


def run(folder, *words):
    printed = python(
        "-m", "recipes.benchmarks.gpu", "--toy", "--output", folder / "found", *words, cwd=ROOT
    )
    text = (folder / "found.md").read_text()
    assert text in printed
    return text, json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_it_runs_and_says_which_targets_hold(tmp_path):
    text, facts = run(tmp_path, "--minutes", "999", "--tests", "bfloat16")
    assert facts["device"] in text.lower() and "toy sizes" in text and "failed" not in text.lower()
    assert "4 test_bfloat16_accumulates_in_float32 passed" in text
    assert facts["commit"]
    for target in (
        "tests that fail <= 0", "default: step / ERM <= 1.1", "all tokens: step / ERM <= 3.2", "products >= 0.7",
        "memory / ERM <= 1.02", "descent / stock Trainer, median <= 1.1", "median <= 1.2",
        "median <= 1.3", "median <= 2", "BERT, 12 layers, median <= 1.12",
        "start in steps <= 3", "RoBERTa, 24 layers, median <= 1.08",
    ):  # fmt: skip
        assert re.search(rf"\| .*{target} \| (\d\S* \| (yes|NO)|not measured \| ) \|", text), target


@pytest.mark.slow
def test_a_case_that_fails_is_named_and_the_others_run_on(tmp_path):
    text, facts = run(tmp_path, "--minutes", "0")
    assert text.count("Failed: TimeoutError") == len(facts["cases"]) == 11


def test_targets_hold_at_their_limits():
    found = [
        gpu.target("a", value, 1.0, least)[2]
        for least in (False, True)
        for value in (0.9, 1.0, 1.1, None)
    ]
    assert found == [True, True, False, None, False, True, True, None]


def test_the_cases_have_eight_minutes_and_are_cut_off():
    given = argparse.Namespace(tests="")
    assert sum(seconds for seconds, _ in gpu.cases(given, False).values()) <= 60 * gpu.MINUTES
    with pytest.raises(TimeoutError), gpu.deadline(0.1):
        time.sleep(5)
