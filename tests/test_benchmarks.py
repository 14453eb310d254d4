"""The benchmarks run at toy size and time every arm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
TOY = "--layers 2 --hidden 64 --batch 2 --length 8 --threads 1 "
COMMANDS = {
    "classifier_step.py": TOY + "--rounds 2 --steps 3 --arms erm descent+noise",
    "classifier_step.py --model ut": TOY + "--rounds 2 --steps 3 --arms erm+noise descent+noise",
    "lm_step.py": TOY + "--rounds 1 --intermediate 64 --vocab 99 --steps 4 --arms naive subsampled+",
    "evaluation_cost.py --model llama": TOY + "--rounds 2 --samples 4",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_times_every_arm(name, tmp_path):
    script, *words = f"{name} {COMMANDS[name]} --output {tmp_path}/out.json".split()
    command = [sys.executable, str(ROOT / "recipes" / "benchmarks" / script), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    arms = found["seconds"] if "seconds" in found else {arm: runs[0]["steps"] for arm, runs in found["runs"].items()}
    assert len(arms) >= 2 and all(len(values) >= 2 for values in arms.values())
