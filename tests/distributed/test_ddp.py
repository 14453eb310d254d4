"""One process with batch 8, two with batch 4, and two with batch 2 twice accumulated take the same steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


HERE = Path(__file__).parent
CONFIG = HERE.parent.parent / "recipes" / "accelerate_configs" / "cpu_ddp.yaml"


def launch(output, task, batch, accumulation, processes, **settings):
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
        command += ["--num_processes", str(processes), "--main_process_port", "0"]
    arguments = [task, str(output), str(batch), str(accumulation), json.dumps(settings)]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent.parent}:{os.environ.get('PYTHONPATH', '')}"}
    run = subprocess.run(
        [*command, str(HERE / "train_steps.py"), *arguments],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads((output / "result.json").read_text()), torch.load(output / "weights.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("classification", {}),
        ("language", {"initial_loss_bound": 4.0, "dual_learning_rate": 0.1}),
        ("image", {"ddp_find_unused_parameters": False}),
        ("image", {"ddp_find_unused_parameters": True}),
        ("image", {"objective": "erm"}),
        ("language", {"descent_alpha": "auto", "initial_loss_bound": "auto", "dual_warmup_steps": 4}),
    ],
)
def test_the_number_of_processes_does_not_matter(tmp_path, task, settings):
    single, single_weights = launch(tmp_path / "1x8", task, 8, 1, 1, **settings)
    for name, batch, accumulation in (("2x4", 4, 1), ("2x2x2", 2, 2)):
        double, weights = launch(tmp_path / name, task, batch, accumulation, 2, **settings)
        assert (single["processes"], double["processes"]) == (1, 2)
        assert double["multipliers"][0] == double["multipliers"][1]
        assert double["multipliers"][0] == pytest.approx(single["multipliers"][0], rel=1e-3, abs=1e-5)
        assert double["losses"] == pytest.approx(single["losses"], rel=1e-4)
        assert double["path"] == pytest.approx(single["path"], rel=1e-3, abs=1e-5)
        for name in ("eval", "curve", "profile"):
            assert double[name] == pytest.approx(single[name], rel=1e-4), name
        assert double["problem"]["alpha"] == pytest.approx(single["problem"]["alpha"], rel=1e-4)
        for parameter, value in single_weights.items():
            torch.testing.assert_close(weights[parameter], value, rtol=1e-3, atol=1e-5, msg=parameter)
    assert max(single["multipliers"][0]) > 0.01 or "objective" in settings
