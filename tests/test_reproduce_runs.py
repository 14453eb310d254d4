"""Tables of `recipes.reproduce` are run, interrupted, resumed and collected, and what was run is not run again."""

import hashlib
import json
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_files import save_generator, save_tiny_model, write_rows
from transformers.trainer import Trainer

from hf_descent import cli
from hf_descent.commands import generate
from hf_descent.evaluation import LayerProfile
from recipes.reproduce import __main__ as reproduce
from recipes.reproduce.collect import render
from recipes.reproduce.facts import fingerprint, fingerprints
from recipes.reproduce.runner import Job, Options, answer_job
from recipes.reproduce.scales import SCALES
from recipes.reproduce.tables import Way


class Interrupted(Exception):
    pass


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path):
    job = Job(["classify"], tmp_path, "train", [])
    assert job.resumption() == ["--overwrite_output_dir", "true"]
    for step, state in ((4, "{}"), (8, '{"global_step"')):  # killed while it wrote the second
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
        save_file({"weight": torch.zeros(1)}, tmp_path / f"checkpoint-{step}" / "model.safetensors")
    assert job.resumption() == ["--resume_from_checkpoint", str(tmp_path / "checkpoint-4")]


def test_what_was_made_of_other_files_is_not_finished(tmp_path):
    made = {"words": ["classify"], "files": ["imdb: train.csv (0)"], "finished": True}
    for kind in ("train", "evaluate"):
        (tmp_path / f"{kind}.job.json").write_text(json.dumps(made))
        assert Job(made["words"], tmp_path, kind, made["files"]).finished()
    (tmp_path / "evaluate.job.json").write_text(json.dumps({**made, "files": None}))  # of an earlier version
    assert not Job(made["words"], tmp_path, "evaluate", made["files"]).finished()
    other = ["imdb: train.csv (1)"]
    assert not Job(made["words"], tmp_path, "evaluate", other).finished()  # which is just made again
    with pytest.raises(ValueError, match="remove that folder"):
        Job(made["words"], tmp_path, "train", other).finished()


def test_answers_are_of_the_instructions_that_are_there(tmp_path, monkeypatch):
    way, path = Way("stories260k", "alpaca", "erm+noise", 0.5), tmp_path / "instructions.json"
    options = Options(SCALES["cpu"], tmp_path, data={"alpaca_eval": [str(path)]}, seeds=(0,))
    save_generator(options.run_folder(way, 0))

    def job(*instructions):
        path.write_text(json.dumps([{"instruction": text} for text in instructions]))
        fingerprint.cache_clear()
        return answer_job(way, 0.5, options)

    def answered(job):
        job.run()
        assert job.finished()
        rows = json.loads((job.folder / "answers-0.5.json").read_text())
        return [row["instruction"] for row in rows]

    def killed(*args, **kwargs):
        raise Interrupted

    first = job("a good film", "the plot")
    with monkeypatch.context() as patch:
        patch.setattr(
            generate, "print", killed, raising=False
        )  # the answers are written, their record and end are not
        with pytest.raises(Interrupted):
            first.run()
    assert (first.folder / "answers-0.5.json").exists() and not first.finished()
    assert answered(first) == ["a good film", "the plot"]
    record = json.loads(first.record.read_text())
    first.record.write_text(json.dumps(record | {"files": []}))  # as earlier versions left it
    assert first.finished()
    first.record.write_text(json.dumps(record))

    assert answered(job("the acting")) == ["the acting"]


def test_every_file_of_the_data_is_named(tmp_path):
    (tmp_path / "a.avi").write_bytes(b"a")
    (found,) = fingerprints({"clips": [f"{tmp_path}/a.avi,{tmp_path}/b*.avi", "c.avi"]}).values()
    assert found == [f"a.avi ({hashlib.sha256(b'a').hexdigest()[:12]})", "b*.avi", "c.avi"]
    for name, weight in (("1", 0.0), ("2", 1.0)):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text("{}")
        save_file({"weight": torch.tensor([weight])}, tmp_path / name / "model" / "model.safetensors")
    first, second = fingerprints({"ut": [f"{tmp_path}/1/model", f"{tmp_path}/2/model"]})["ut"]
    assert first != second


def test_what_patterns_and_folders_hold_is_told_apart(tmp_path):
    model, clips = tmp_path / "model", tmp_path / "clips" / "Train"
    clips.mkdir(parents=True)
    (clips / "a.avi").write_bytes(b"a" * 10)
    given = [str(tmp_path / "clips"), str(clips / "*.avi"), str(tmp_path / "c*"), str(model)]

    def told():
        fingerprint.cache_clear()
        return fingerprints({"clips": given})["clips"]

    save_tiny_model(model, "distilbert")
    seen = [told()]
    for change in (b"b" * 10, b"b" * 11):
        (clips / "a.avi").write_bytes(change)
        seen.append(told())
    (clips / "a.avi").rename(clips / "b.avi")
    seen.append(told())
    assert all(len(set(found)) == 4 for found in list(zip(*seen))[:3])
    with (model / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert told()[:3] == seen[-1][:3] and told()[3] != seen[-1][3]
    # The record of an earlier version knew these names, and the model's config and weights.
    told_then = ["clips", "*.avi", "c*", told()[3].split(",")[0]]
    record = {"words": ["denoise"], "files": told_then, "finished": True}
    (tmp_path / "train.job.json").write_text(json.dumps(record))
    assert Job(["denoise"], tmp_path, "train", told()).finished()


# ---- a tiny table from end to end ----

SETTINGS = "max_steps=8 save_steps=4 per_device_train_batch_size=8 per_device_eval_batch_size=8 max_seq_length=16 "
SETTINGS += "report_to=none disable_tqdm=true logging_steps=2"


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduce")
    save_tiny_model(folder / "model", "distilbert")
    write_rows(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield folder


@pytest.fixture
def started(monkeypatch):
    """The words of every command that is started."""
    words, command = [], cli.main

    def main(argv):
        words.append(list(argv))
        command(argv)

    monkeypatch.setattr(cli, "main", main)
    return words


def figure1(workplace, out, *words):
    rows = str(workplace / "train.csv")
    argv = ["figure1", "--scale", "cpu", "--output_dir", str(workplace / out), "--data", "imdb", rows, rows, *words]
    argv += ["--model", "distilbert", str(workplace / "model"), "--set", "use_cpu=true", "--set", *SETTINGS.split()]
    return argv


def test_a_table_is_run_interrupted_resumed_and_collected(workplace, started, monkeypatch, capsys):
    argv = figure1(workplace, "out", "--arms", "erm+noise", "descent", "--seeds", "0", "1", "--n_trials", "2")
    options = Options(SCALES["cpu"], workplace / "out" / "cpu", seeds=(0, 1))
    descent = Way("distilbert", "imdb", "descent", 1.0)

    save = Trainer._save_checkpoint

    def save_and_stop(self, *args, **kwargs):
        save(self, *args, **kwargs)
        if self.args.output_dir == str(options.run_folder(descent, 0)):
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", save_and_stop)
        with pytest.raises(Interrupted):
            reproduce.main(argv)
    assert [words[0] for words in started] == ["tune", "tune", "classify", "evaluate", "classify"]
    studies = [json.loads(path.read_text()) for path in (workplace / "out").rglob("study.json")]
    assert [len(study["trials"]) for study in studies] == [2, 2]

    started.clear()
    reproduce.main(argv)
    assert [words[0] for words in started] == ["classify", "evaluate"] + ["classify", "evaluate"] * 2 + ["compare"]
    resumed = options.run_folder(descent, 0) / "checkpoint-4"
    assert started[0][-2:] == ["--resume_from_checkpoint", str(resumed)]
    assert not list((workplace / "out").rglob("checkpoint-*"))
    history = json.loads((options.run_folder(descent, 0) / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if "loss" in entry] == [2, 4, 6, 8]
    best_settings = json.loads((options.study_folder(descent) / "study.json").read_text())["trials"][0]["settings"]
    arguments = json.loads((options.run_folder(descent, 1) / "descent_config.json").read_text())["arguments"]
    assert arguments["dual_learning_rate"] == best_settings["dual_learning_rate"]
    assert arguments["seed"] == 1

    started.clear()
    capsys.readouterr()
    reproduce.main([*argv, "--dry_run"])
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 10 and all(line.startswith("done  hf-descent ") for line in listed)
    reproduce.main(argv)
    assert [words[0] for words in started] == ["compare"]  # nothing is run again

    evaluated = options.run_folder(descent, 0)
    curve = (evaluated / "noise_curve.json").read_text()
    rows = ["--train_file", str(workplace / "train.csv"), "--max_eval_samples", "8"]
    cli.main(["evaluate", str(evaluated), *rows, "--eval_gammas", "0", "1"])  # by hand, and not the table's
    assert (evaluated / "noise_curve.json").read_text() != curve
    started.clear()
    reproduce.main(argv)
    assert [words[0] for words in started] == ["evaluate", "compare"]
    assert (evaluated / "noise_curve.json").read_text() == curve

    folder = workplace / "out" / "cpu" / "figure1"
    result = json.loads((folder / "results.json").read_text())
    (panel,) = result["panels"]
    for arm, way in (("erm+noise", Way("distilbert", "imdb", "erm+noise", 1.0)), ("descent", descent)):
        for seed, area in enumerate(panel["groups"][arm]["auc"]):
            curve = json.loads((options.run_folder(way, seed) / "noise_curve.json").read_text())
            assert curve["gammas"] == list(SCALES["cpu"].eval_gammas["classify"])
            accuracy = np.mean(curve["values"], axis=1)
            steps = np.diff(curve["gammas"])
            assert area == pytest.approx(float(np.sum(steps * (accuracy[1:] + accuracy[:-1]) / 2)))
            profile = LayerProfile.from_json(options.run_folder(way, seed) / "layer_profile_gamma_1.json")
            assert panel["groups"][arm]["descending_share"][seed] == profile.descending_share
    assert panel["groups"]["descent"]["feasible"] != [None, None] == panel["groups"]["erm+noise"]["feasible"]
    assert result["seeds"] == [0, 1] and re.fullmatch(r"train.csv \(\w{12}\)", result["data"]["imdb"][0])
    assert {"commit", "machine", "versions"} <= result.keys()
    assert result["runs"] == [{name: result[name] for name in ("commit", "date", "versions", "machine")}]
    text = (folder / "results.md").read_text()
    assert text == render(result)
    assert "AUC over [0, 3]" in text and f"commit {result['commit']}" in text and panel["verdicts"][0] in text
    for name in re.findall(r"\]\((.*?\.png)\)", text):
        assert (folder / name).is_file()
    assert "metric_against_noise.png" in panel["figures"] and "layer_losses.png" in panel["figures"]

    # One arm alone, its record of another commit; what the others left is not shown.
    record = options.run_folder(descent, 1) / "train.job.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"commit": "0123456"}))
    reproduce.main([*argv, "--arms", "descent", "--panels", "imdb", "--collect_only"])
    alone = json.loads((folder / "results.json").read_text())
    assert alone["panels"][0]["groups"] == {"descent": panel["groups"]["descent"]}
    assert alone["panels"][0]["verdicts"] == alone["panels"][0]["figures"] == []
    text = (folder / "results.md").read_text()
    assert re.search(r"run at commit [^ ]+, 0123456 on", text) and "the parts with `imdb` in their name" in text

    with pytest.raises(ValueError, match=r"seed-0 was made by .*remove that folder, or name another"):
        reproduce.main([*argv, "max_steps=6", "--n_trials", "0", "--collect_only"])


@pytest.mark.parametrize("n_trials", ["0", "1"])
def test_a_failed_start_does_not_bind_its_folder(workplace, started, n_trials):
    argv = figure1(workplace, f"failed-{n_trials}", "--arms", "erm+noise", "--seeds", "0", "--n_trials", n_trials)
    with pytest.raises(ValueError, match="32 tokens at most"):
        reproduce.main([*argv, "max_seq_length=99"])
    started.clear()
    reproduce.main([*argv, "max_steps=2"])
    assert [words[0] for words in started] == ["tune"] * int(n_trials) + ["classify", "evaluate"]
    with pytest.raises(ValueError, match="remove that folder"):
        reproduce.main(argv)
