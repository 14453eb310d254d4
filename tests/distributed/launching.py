"""Runs `train_steps.py` in one process, or in several under one of the recipes' accelerate configs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


HERE = Path(__file__).parent
CONFIGS = HERE.parent.parent / "recipes" / "accelerate_configs"
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": f"{HERE.parent.parent}:{os.environ.get('PYTHONPATH', '')}",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}


def launch(output, task, batch, accumulation, processes, backend="cpu_ddp", **settings):
    """What the script wrote: results, and weights by name."""
    run = start(output, task, batch, accumulation, processes, backend, **settings)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((output / "result.json").read_text()), torch.load(output / "weights.pt", weights_only=True)


def start(output, task, batch, accumulation, processes, backend="cpu_ddp", **settings):
    environment = {**ENVIRONMENT, **settings.pop("environment", {})}
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{backend}.yaml")]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
        command += ["--mixed_precision", settings.pop("mixed_precision", "no")]
    arguments = [task, str(output), str(batch), str(accumulation), json.dumps(settings)]
    return subprocess.run(
        [*command, str(HERE / "train_steps.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def assert_same(single, double):
    """The same losses, multipliers and weights to float32 rounding, from the same steps."""
    (single, single_weights), (double, weights) = single, double
    assert all(values == double["multipliers"][0] for values in double["multipliers"])
    assert double["multipliers"][0] == pytest.approx(single["multipliers"][0], rel=1e-3, abs=1e-5)
    assert double["losses"] == pytest.approx(single["losses"], rel=1e-4)
    assert double["path"] == pytest.approx(single["path"], rel=1e-3, abs=1e-5)
    assert double["eval"] == pytest.approx(single["eval"], rel=1e-4)
    assert double["problem"]["alpha"] == pytest.approx(single["problem"]["alpha"], rel=1e-4)
    assert weights.keys() == single_weights.keys()
    for parameter, value in single_weights.items():
        torch.testing.assert_close(weights[parameter], value, rtol=1e-3, atol=1e-5, msg=parameter)
