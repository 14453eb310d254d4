"""`python -m recipes.reproduce` runs a tiny table: it is interrupted, goes on, and writes its results."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from tiny.files import save_tiny_model, write_rows
from transformers.trainer import Trainer

from hf_descent.evaluation import LayerProfile
from recipes.reproduce import __main__ as reproduce
from recipes.reproduce import runner
from recipes.reproduce.experiments import SCALES, Way
from recipes.reproduce.runner import Options


pytestmark = pytest.mark.slow

DESCENT = Way("distilbert", "imdb", "descent", 1.0)
BASELINE = Way("distilbert", "imdb", "erm+noise", 1.0)
SETTINGS = [
    "use_cpu=true",
    "max_steps=8",
    "save_steps=4",
    "per_device_train_batch_size=8",
    "per_device_eval_batch_size=8",
    "max_seq_length=16",
    "report_to=none",
    "disable_tqdm=true",
    "logging_steps=2",
]


class Interrupted(Exception):
    pass


def words_of_table(folder, out):
    """The command line: two arms of one panel, two seeds each, with a search of two runs."""
    write_rows(folder)
    rows = str(folder / "train.csv")
    model = save_tiny_model(folder / "model")
    return [
        "table4",
        *("--output_dir", str(out)),
        *("--panels", "imdb-distilbert-gamma1"),
        *("--model", "distilbert", model),
        *("--data", "imdb", rows, rows),
        *("--arms", "erm+noise", "descent"),
        *("--seeds", "0", "1"),
        *("--n_trials", "2"),
        *("--set", *SETTINGS),
    ]


def run_until_the_first_checkpoint(words, folder):
    """Runs the table, until the training in this folder has written a checkpoint."""
    save_checkpoint = Trainer._save_checkpoint

    def save_and_stop(self, *args, **kwargs):
        save_checkpoint(self, *args, **kwargs)
        if self.args.output_dir == str(folder):
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", save_and_stop)
        with pytest.raises(Interrupted):
            reproduce.main(words)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table that was interrupted and went on, with the commands that were started before and after."""
    folder = tmp_path_factory.mktemp("table")
    out = folder / "out"
    words = words_of_table(folder, out)
    options = Options(SCALES["cpu"], out / "cpu", seeds=(0, 1))
    started = []
    run_command = runner.run_command

    def note_and_run(command):
        started.append(command)
        run_command(command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run_command", note_and_run)

        run_until_the_first_checkpoint(words, options.run_folder(DESCENT, 0))
        before = list(started)

        started.clear()
        reproduce.main(words)
        after = list(started)

        started.clear()
        yield SimpleNamespace(
            words=words,
            out=out,
            options=options,
            before=before,
            after=after,
            started=started,
            results=json.loads((out / "cpu/table4/results.json").read_text()),
            page=(out / "cpu/table4/results.md").read_text(),
        )


def names(commands):
    return [command[0] for command in commands]


def test_the_searches_come_first_and_every_training_is_evaluated(table):
    assert names(table.before) == ["tune", "tune", "classify", "evaluate", "classify"]
    assert names(table.after) == ["classify", "evaluate"] * 3


def test_an_interrupted_training_goes_on_from_its_checkpoint(table):
    checkpoint = table.options.run_folder(DESCENT, 0) / "checkpoint-4"
    assert table.after[0][-2:] == ["--resume_from_checkpoint", str(checkpoint)]


def test_no_checkpoint_is_left_of_what_is_finished(table):
    assert not list(table.out.rglob("checkpoint-*"))


def test_a_training_has_its_seed_and_the_best_settings_of_the_search(table):
    study = json.loads((table.options.study_folder(DESCENT) / "study.json").read_text())
    run = json.loads((table.options.run_folder(DESCENT, 1) / "descent_config.json").read_text())

    best = study["trials"][0]["settings"]
    assert run["arguments"]["dual_learning_rate"] == best["dual_learning_rate"]
    assert run["arguments"]["seed"] == 1


def test_what_is_finished_is_listed_as_done_and_not_run_again(table, capsys):
    reproduce.main([*table.words, "--dry_run"])
    assert capsys.readouterr().out.count("done  ") == 10

    reproduce.main(table.words)
    assert not table.started


def test_a_folder_of_other_settings_is_refused(table):
    with pytest.raises(
        ValueError, match=r"seed-0 was made by .*remove that folder, or name another"
    ):
        reproduce.main([*table.words, "--n_trials", "0"])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("way", [BASELINE, DESCENT], ids=lambda way: way.arm)
def test_results_are_those_of_the_runs(table, way, seed):
    (panel,) = table.results["panels"]
    row = panel["rows"][way.arm]
    folder = table.options.results_folder(way, seed)

    curve = json.loads((folder / "noise_curve.json").read_text())
    assert curve["gammas"] == SCALES["cpu"]["classify"]["eval_gammas"]

    accuracy = np.mean(curve["values"], axis=1)
    area = np.trapezoid(accuracy, curve["gammas"])
    assert row["summary"][seed] == pytest.approx(float(area))

    profile = LayerProfile.from_json(folder / "layer_profile_gamma_1.json")
    assert row["layer_losses"][seed] == profile.losses.tolist()
    assert isinstance(row["feasible"][seed], bool)  # plain training is judged, too


def test_the_page_has_verdicts_figures_and_the_commit(table):
    (panel,) = table.results["panels"]
    assert "AUC over [0, 3]" in table.page
    assert f"commit {table.results['runs'][0]['commit']}" in table.page
    assert panel["verdicts"][0] in table.page

    figures = re.findall(r"\]\((.*?\.png)\)", table.page)
    assert figures
    for figure in figures:
        assert (table.out / "cpu/table4" / figure).is_file()
