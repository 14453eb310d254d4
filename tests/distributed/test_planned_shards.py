"""What a plan says of shards, against FSDP2 in two processes."""

import json

import pytest
from launching import HERE, run
from shard_sizes import ODD
from tiny import config, language_data, llama
from torch import stack

from hf_descent.training.planning import PlannedModel


@pytest.mark.slow
def test_shards_are_those_of_two_real_processes(tmp_path):
    done = run("fsdp2", HERE / "shard_sizes.py", tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    measured = json.loads((tmp_path / "sizes.json").read_text())
    rows = language_data(4)
    batch = {name: stack([row[name] for row in rows]) for name in rows[0]}
    planned = PlannedModel(lambda shape: llama(vocab_size=ODD), batch)
    whole = planned.step(batch, config(tmp_path, optim="adamw_torch_fused"))
    update = planned.launched(whole, 2)["fsdp2"].moments[1]
    assert update["weights"] == measured["weights"] > whole.memory["weights"] / 2
    assert update["gradients"] == pytest.approx(measured["gradients"], abs=1)
    assert update["optimizer"] == pytest.approx(measured["optimizer"], rel=0.01)  # with the counts of steps
