"""The benchmark of models that are cut first: its arms train what they say."""

import cut_first
import pytest
import torch
from harness import InTurn, Runs


def test_every_arm_of_the_denoiser_runs_and_is_kept(tmp_path, capsys):
    file = tmp_path / "runs.jsonl"
    words = ["denoiser", "--smoke", "--seeds", "0", "--output", str(file)]
    cut_first.main([*words, "--arms", "plain", "sorted", "cut 2", "cut 2, same compute"])
    runs = Runs(str(file)).all()
    depths = {run["settings"]["arm"]: len(run["report"]) for run in runs}
    assert depths == {"plain": 5, "sorted": 5, "cut 2": 2, "cut 2, same compute": 2}
    assert len(runs) == 4 * len(cut_first.RATES["denoiser"])
    lines = capsys.readouterr().out.count("seed 0: ")
    cut_first.main([*words, "--arms", "plain"])  # nothing is trained again
    assert len(Runs(str(file)).all()) == len(runs) and lines == len(runs)


@pytest.mark.parametrize("turn", range(4))
def test_one_depth_a_step_has_all_the_weight(turn):
    class Trainer:
        class multipliers:
            values = torch.ones(3)

    class State:
        global_step = 8 + turn

    InTurn(Trainer).on_step_begin(None, State, None)
    expected = torch.zeros(3)
    if turn < 3:
        expected[turn] = InTurn.MOST
    assert torch.equal(Trainer.multipliers.values, expected)


def test_a_rate_at_which_a_seed_breaks_down_is_passed_over(tmp_path, monkeypatch):
    # Of the first seed the larger rate is best; there the second seed breaks down.
    losses = {(5e-4, 0): 0.5, (1e-3, 0): 0.45, (2e-3, 0): 0.4, (4e-3, 0): 0.6}
    losses |= {(2e-3, 1): 3.0, (2e-3, 2): 0.4, (1e-3, 1): 0.46, (1e-3, 2): 0.44}

    def train(task, options, settings, rate, seed):
        return {"select": [9.0, losses[rate, seed]], "report": [1.0], "seconds": 1.0}

    monkeypatch.setattr(cut_first, "train", train)
    words = ["denoiser", "--arms", "plain", "--output", str(tmp_path / "runs.jsonl")]
    runs = [(rate, seed) for _, rate, seed, _ in cut_first.runs(cut_first.parse(words))]
    assert runs[:4] == [(rate, 0) for rate in (5e-4, 1e-3, 2e-3, 4e-3)]
    assert runs[4:] == [(2e-3, 1), (2e-3, 2), (1e-3, 1), (1e-3, 2)]
