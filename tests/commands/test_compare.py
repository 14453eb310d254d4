"""`hf-descent compare`: what it prints and writes."""

import json
import shutil

import numpy as np
import pytest
from runs import make_curve, make_run, save_run
from tiny.data import classification_data
from tiny.models import bert
from tiny.training import config, fitted

from hf_descent import DescentTrainer, cli


@pytest.fixture
def folders(tmp_path):
    generator = np.random.default_rng(0)
    return {
        (name, seed): save_run(
            tmp_path / f"{name}-{seed}",
            make_run(mean + 0.01 * generator.random(6), objective=name, seed=seed),
        )
        for name, mean in (("erm", 0.5), ("descent", 0.7))
        for seed in (1, 2, 3)
    }


def test_table_verdict_and_files(folders, tmp_path, capsys):
    cli.main(["compare", *folders.values(), "--output_dir", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "descent against erm: descent is better, statistically significant at 95 %" in printed
    assert (tmp_path / "out" / "comparison.txt").read_text() in printed
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written["differences"][0]["verdict"] == "better"
    assert (tmp_path / "out" / "metric_against_noise.svg").is_file()


def test_groups_can_be_named(folders, tmp_path, capsys):
    named = [
        f"{'plain' if name == 'erm' else 'ours'}={folder}" for (name, _), folder in folders.items()
    ]
    cli.main(["compare", *named, "--baseline", "ours", "--output_dir", str(tmp_path / "out")])
    assert "plain against ours: plain is worse" in capsys.readouterr().out
    with pytest.raises(ValueError, match="all of them as GROUP=RUN, or none"):
        cli.main(["compare", named[0], *folders.values()])


@pytest.mark.parametrize("named", [False, True])
def test_a_folder_may_have_an_equals_sign_in_its_name(folders, tmp_path, capsys, named):
    (tmp_path / "sweep").mkdir()
    words = []
    for (name, seed), folder in folders.items():
        shutil.move(folder, tmp_path / "sweep" / f"{name}={seed}")
        words.append(f"{name}=" * named + f"{tmp_path}/sweep/{name}={seed}")
    cli.main(["compare", *words, "--output_dir", str(tmp_path / "out")])
    assert "descent against erm: descent is better" in capsys.readouterr().out


@pytest.mark.parametrize("named", [False, True])
def test_runs_are_compared_at_another_confidence(folders, tmp_path, capsys, named):
    for (name, seed), folder in folders.items():
        accuracies = np.linspace(0.4, 0.5, 6) + 0.2 * (name == "erm") + 0.01 * seed
        make_curve(accuracies).to_json(f"{folder}/noise_curve.json")
    words = [f"{name}={folder}" if named else folder for (name, _), folder in folders.items()]
    words += [
        "--confidence",
        "0.9",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    cli.main(["compare", *words])
    assert (
        "descent against erm: descent is worse, statistically significant at 90 %"
        in capsys.readouterr().out
    )


def test_plain_training_stands_beside_a_saved_run_that_saw_no_noise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = {
        "train_dataset": classification_data(32),
        "eval_dataset": classification_data(40, seed=1),
    }
    args = config("out", max_steps=2, descent_alpha=None, exit_targets={2: 0.1})
    trainer = DescentTrainer(bert(), args, **rows)
    arms = trainer.train_with_plain()
    trainer.save_model()
    for measured in (None, "out"):  # one curve alone cannot be compared
        if measured is not None:
            make_curve(np.linspace(0.4, 0.5, 6)).to_json(f"{measured}/noise_curve.json")
        cli.main(["compare", "out", "out/_plain"])
        printed = capsys.readouterr().out
        assert arms.headline in printed and "loss: plain" in printed
        assert "Training took " in printed  # which no `save_state` has written down
    assert "Training took " in str(arms) and min(arms.seconds) > 0

    assert "the price is not that" not in printed
    other = DescentTrainer(bert(seed=1), config("other", max_steps=2), **rows)
    fitted(other).evaluate_layers()
    other.save_model()
    cli.main(["compare", "other", "out/_plain"])
    assert "Plain training had other weights before training: " in capsys.readouterr().out

    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match=r"`trainer.save_model\(\)` after `train_with_plain\(\)`"):
        cli.main(["compare", "elsewhere", "nowhere"])
