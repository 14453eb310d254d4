import json
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest

from hf_descent import cli
from hf_descent.commands.demo import ARMS, GAMMA_TRAIN, GAMMAS, NUM_LAYERS, demo


@pytest.fixture(scope="module")
def short_demo(tmp_path_factory):
    """The folder of a demo with the package's constraints, its comparison, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    with redirect_stdout(StringIO()) as printed:
        comparison = demo(str(folder), seeds=(0, 0), max_steps=8)
    return folder, comparison, printed.getvalue()


def test_a_short_demo_trains_every_arm_and_writes_table_figures_and_runs(short_demo, capsys):
    folder, comparison, printed = short_demo
    assert list(comparison.groups) == list(ARMS.values())
    for runs in comparison.groups.values():
        (run,) = runs
        assert len(run.profiles[GAMMA_TRAIN].losses) == NUM_LAYERS
        assert run.curve.mean.tolist() == sorted(run.curve.mean) and len(run.curve.gammas) == len(
            GAMMAS
        )
    assert list(json.loads((folder / "comparison.json").read_text())["groups"]) == list(
        ARMS.values()
    )
    assert {"metric_against_noise.png", "layer_losses.png"} <= {
        path.name for path in folder.iterdir()
    }
    losses = comparison.groups["constrained"][0].profiles[GAMMA_TRAIN].losses
    assert f"{losses[0]:.2f}  {losses[1]:.2f}" in printed and str(comparison) in printed
    supervision, verdict, card, recipe = printed.strip().splitlines()[-4:]
    assert verdict.startswith("VERDICT: NOT MET, price ")
    assert card.startswith(f"Next: `hf-descent card {folder / 'descent-0'}` ")
    assert recipe.startswith("Next: `hf-descent classify ")
    assert supervision.startswith("With deep supervision the loss is lower in this demo (layers 1-")

    cli.main(["card", str(folder / "descent-0")])
    *_, of_card, following = capsys.readouterr().out.strip().splitlines()
    assert of_card.startswith(verdict)  # with the interval of the price, of 512 clips
    assert following.startswith(f"Next: `hf-descent card {folder / 'descent-0'} --push_to_hub ")
    text = (folder / "descent-0" / "README.md").read_text()
    assert "price unknown" not in text and "hf-descent exit" not in text  # it refuses denoisers


def test_the_demo_has_the_package_s_constraints_or_those_of_the_paper(short_demo, tmp_path):
    _, ours, _ = short_demo
    theirs = demo(str(tmp_path), seeds=(0,), max_steps=2, paper=True)
    for paper, comparison, rows in ((False, ours, 4), (True, theirs, 5)):
        groups = comparison.groups
        verdicts = [runs[0].certificate for runs in groups.values()]
        assert [len(verdict.rows) for verdict in verdicts] == [rows] * len(ARMS)
        settings = groups["constrained"][0].summary["arguments"]
        assert (settings["max_last_layer_rise"] is None) == paper


def test_a_demo_without_steps_is_refused():
    with pytest.raises(ValueError, match="`max_steps` is 0; give at least 1"):
        cli.main(["demo", "--max_steps", "0"])


@pytest.mark.slow
def test_the_demo_shows_what_the_readme_says(tmp_path):
    groups = demo(str(tmp_path)).groups
    assert all(run.feasible for run in groups["constrained"])


@pytest.mark.slow
def test_the_paper_s_constraints_are_met_and_help_beyond_the_noise_of_training(tmp_path):
    groups = demo(str(tmp_path), paper=True).groups
    plain, constrained = groups["plain training"], groups["constrained"]
    largest = [
        [run.profiles[GAMMA_TRAIN].to_dict()["max_violation"] for run in runs]
        for runs in (plain, constrained)
    ]
    assert (
        min(largest[0]) >= 1
        and max(largest[1]) <= 0.02
        and all(run.feasible for run in constrained)
    )
    plain, constrained = (
        np.mean([run.curve.mean for run in runs], axis=0) for runs in (plain, constrained)
    )
    assert constrained.mean() <= 0.98 * plain.mean()
    level = GAMMAS.index(GAMMA_TRAIN)
    assert constrained[level] <= 1.01 * plain[level]
