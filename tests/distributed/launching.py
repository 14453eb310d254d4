"""Has two processes, under one of the recipes' accelerate configs, do the jobs of `train_steps.py`."""

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
    **os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{os.environ.get('PYTHONPATH', '')}", "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def job(task, batch=4, accumulation=1, **settings):
    return (task, batch, accumulation), settings


def launch(folder, jobs, backend="cpu_ddp"):
    """What each job led to, by its name."""
    done = start(folder, jobs, backend)
    assert done.returncode == 0, done.stderr[-6000:]
    return {name: read(folder / name) for name in jobs}


def start(folder, jobs, backend="cpu_ddp"):
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    return run(backend, HERE / "train_steps.py", folder)


def run(backend, *words):
    """Two processes of a script, with the words behind it."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / f"{backend}.yaml"),
    ]
    command += ["--num_processes", "2", "--mixed_precision", "no", *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=1500)


def read(folder):
    return json.loads((folder / "result.json").read_text()), torch.load(
        folder / "weights.pt", weights_only=True
    )


def assert_same(single, double, coarse=1):
    """The same losses, multipliers and weights to float32 rounding (or `coarse` times that), from the same steps."""
    (single, single_weights) = single
    (double, weights) = double

    assert all(values == double["multipliers"][0] for values in double["multipliers"])

    tolerance = {"rel": 1e-3 * coarse, "abs": 1e-5 * coarse}

    assert double["multipliers"][0] == pytest.approx(single["multipliers"][0], **tolerance)
    assert double["losses"] == pytest.approx(single["losses"], rel=1e-4 * coarse)
    assert double["path"] == pytest.approx(single["path"], **tolerance)
    assert double["eval"] == pytest.approx(single["eval"], rel=1e-4 * coarse)

    one, two = (
        json.loads(json.dumps(run["problem"])) for run in (single, double)
    )  # the latter was written

    for name in ("initial_loss_bound", "chance_loss"):
        # Of a number alone: plain training has none.
        assert (two.pop(name, None) or 0.0) == pytest.approx(one.pop(name, None) or 0.0, rel=1e-4)

    assert one == two

    weights = {name: weight.float() for name, weight in weights.items()}
    torch.testing.assert_close(weights, single_weights, rtol=1e-3 * coarse, atol=1e-5 * coarse)
