"""What people see beside results."""

import importlib
import sys

import pytest
from tiny.data import toy_rows
from tiny.models import bert
from tiny.training import config

from hf_descent import DescentTrainer, logs
from hf_descent.early_exit import exit_profile


@pytest.mark.parametrize("disabled", [False, True])
def test_tqdm_s_own_switch_turns_every_bar_off(tmp_path, monkeypatch, capsys, disabled):
    """With a tqdm that is imported afresh, for it reads its switch then."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    if disabled:
        monkeypatch.setenv("TQDM_DISABLE", "1")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(logs, "tqdm", importlib.import_module("tqdm.auto").tqdm)

    args = config(tmp_path, disable_tqdm=False, noise_sigma=1.0)
    trainer = DescentTrainer(bert(), args, eval_dataset=toy_rows(16))
    trainer.evaluate_layers()
    trainer.evaluate_robustness(gammas=[0.0, 1.0])
    exit_profile(trainer.model, toy_rows(16), repeats=1, progress=True)

    shown = capsys.readouterr().err
    bars = [name for name in ("Layer profile", "Noise curve", "Timing") if name in shown]
    assert len(bars) == (0 if disabled else 3)
