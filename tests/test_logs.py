"""What people see beside results."""

import os
import subprocess
import sys

import pytest


PROGRAM = """
from tiny.data import toy_rows
from tiny.models import bert
from tiny.training import config
from hf_descent import DescentTrainer
from hf_descent.early_exit import exit_profile

trainer = DescentTrainer(bert(), config("out", disable_tqdm=False, noise_sigma=1.0), eval_dataset=toy_rows(16))
trainer.evaluate_layers()
trainer.evaluate_robustness(gammas=[0.0, 1.0])
exit_profile(trainer.model, toy_rows(16), repeats=1, progress=True)
"""


@pytest.mark.parametrize("disabled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tqdm_s_own_switch_turns_every_bar_off(tmp_path, disabled):
    """In a process of its own: tqdm reads its switch when it is imported."""
    environment = dict(os.environ)
    environment.pop("TQDM_DISABLE", None)
    if disabled:
        environment["TQDM_DISABLE"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.getcwd(), os.path.join(os.getcwd(), "tests"), environment.get("PYTHONPATH", "")]
    )
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    bars = [name for name in ("Layer profile", "Noise curve", "Timing") if name in run.stderr]
    assert bool(bars) != disabled
