"""The simulation of false verdicts: what it measures is what `certify` says, and what it found is within its noise."""

import json

import numpy as np
import pytest
import verdict_coverage
from scipy import stats

from hf_descent.evaluation.intervals import LEAST_ROWS, LEAST_SKEWED_ROWS


@pytest.mark.parametrize("kind", verdict_coverage.kinds(), ids=lambda kind: kind.name)
def test_losses_lie_on_the_edge_and_certify_agrees(kind):
    first, last = kind.edge
    assert kind.excess(first, last) == pytest.approx(0, abs=1e-12)
    generator = np.random.default_rng(0)
    law = verdict_coverage.LAWS[1]
    found = verdict_coverage.measure(
        law, kind, 100, 30, generator
    )  # raises where `certify` differs
    assert 0 <= found["met"]["ours"] <= 20


@pytest.mark.parametrize("law", verdict_coverage.LAWS, ids=lambda law: law.name)
def test_the_means_of_laws_are_those_of_their_draws(law):
    draws = law.of(np.random.default_rng(0).standard_normal(400_000))
    error = draws.std() / len(draws) ** 0.5
    assert abs(draws.mean() - law.mean) < 5 * error


def test_false_verdicts_were_as_rare_as_stated():
    found = json.loads((verdict_coverage.RESULTS / "verdict_coverage.json").read_text())
    single = [case for case in found if "looks" not in case["row"]]
    assert {case["rows"] for case in single} == set(verdict_coverage.ROWS)
    assert min(verdict_coverage.ROWS) == LEAST_ROWS and LEAST_SKEWED_ROWS in verdict_coverage.ROWS
    for case in single:
        wrong = round(case["met"]["ours"] / 100 * case["sets"])
        # Of all cases together one in a hundred would fail by chance.
        least = 0.01 / len(single)
        found = stats.binomtest(wrong, case["sets"], 0.025, alternative="greater").pvalue
        assert found > least, case
    text = (verdict_coverage.RESULTS / "verdict_coverage.md").read_text()
    assert verdict_coverage.table(json.loads(
        (verdict_coverage.RESULTS / "verdict_coverage.json").read_text()
    )) in text  # fmt: skip
