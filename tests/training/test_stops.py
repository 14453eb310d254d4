"""A newcomer can follow a batch: few functions hand it on, and nothing is found out inside a step."""

import pytest
from stops import MODELS, MOST_STOPS, stops_of_a_batch


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_passes_few_functions_on_its_way_to_the_loss(kind):
    assert 1 < len(stops_of_a_batch(kind)) <= MOST_STOPS


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_what_a_run_finds_out_is_known_before_its_first_loss(kind, phase):
    stops = stops_of_a_batch(kind, phase)
    assert not any(
        "preparation.py" in stop or "find_" in stop or ".probe" in stop for stop in stops
    )
