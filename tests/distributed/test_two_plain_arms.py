"""Plain training beside constrained training, in two processes."""

import pytest
from launching import HERE, run


@pytest.mark.slow
def test_both_arms_are_the_trainings_that_they_would_be_alone_under_ddp(tmp_path):
    done = run("cpu_ddp", HERE / "plain_arm.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
