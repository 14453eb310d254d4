"""`python -m recipes.reproduce`: its tables are the paper's, and are run, interrupted, resumed and collected."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from tiny.files import save_tiny_model, write_rows
from transformers.trainer import Trainer

from hf_descent import cli
from hf_descent.evaluation import LayerProfile
from recipes.reproduce import __main__ as reproduce
from recipes.reproduce.collect import published
from recipes.reproduce.experiments import ARMS, SCALES, TABLES, Panel, Way, panels, searched
from recipes.reproduce.runner import Options, jobs, train_job, tune_job


ROOT = Path(__file__).parent.parent
DOCUMENTED = re.findall(
    r"^python -m recipes\.reproduce .*", (ROOT / "recipes/reproduce/README.md").read_text(), re.M
)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", TABLES)
def test_panels_differ_in_training_alone(scale, table):
    found = list(panels(table, SCALES[scale]))
    assert len({panel.name for panel in found}) == len(found) > 0
    for panel in found:
        assert len(panel.ways) == len(set(panel.ways.values())) > 1
        assert len({way.setting for way in panel.ways.values()}) == 1
        for way in panel.ways.values():
            assert (way.gamma == 0 or way.arm != "erm") and (
                way.gamma > 0 or way.arm != "erm+noise"
            )


def test_every_figure_that_the_paper_states_has_its_runs():
    found = [panel for table in ("table3", "table4") for panel in panels(table, SCALES["gpu"])]
    ways = {way for panel in found for way in panel.ways.values()}
    figures = {(way, published(way)) for way in ways if published(way) is not None}
    rows = (ROOT / "recipes/reproduce/published.csv").read_text().splitlines()[1:]
    assert len(figures) == 2 * len(rows) == 2 * (15 * 7 + 36 * 2)
    assert (Way("dust", "avenue", "erm+noise", 0.15, 5), 28.269) in figures
    assert (Way("dust", "avenue", "descent", 0.15, 5), 14.724) in figures
    assert (Way("roberta", "imdb", "erm", 0.0), 1.651) in figures


def test_arms_of_one_setting_share_all_but_their_objective():
    options, arguments = Options(SCALES["cpu"], Path("out"), n_trials=0), {}
    for arm in ARMS:
        way = Way("distilbert", "mnli", arm, 0.0 if arm == "erm" else 0.4)
        _, parsed = cli.parse_arguments(
            [*train_job(way, 7, options).words, "--model_name_or_path", "m"]
        )
        arguments[arm] = {
            name: value for part in parsed for name, value in vars(part).items() if name[0] != "_"
        }
        assert (arguments[arm]["seed"], arguments[arm]["noise_gamma"]) == (7, way.gamma)
    values = {name: [str(each[name]) for each in arguments.values()] for name in arguments["erm"]}
    differing = {name for name, found in values.items() if len(set(found)) > 1}
    problem = {
        "max_last_layer_rise",
        "resilience",
        "resilience_form",
        "slack_restart",
        "dual_learning_rate",
        "dual_warmup_steps",
        "dual_optim",
        "logging_dir",
    }
    assert differing - problem == {"noise_gamma", "eval_gammas", "objective", "output_dir"}


def test_what_is_set_is_not_searched(tmp_path):
    ways = {arm: Way("distilbert", "imdb", arm, 0.0 if arm == "erm" else 0.4) for arm in ARMS}
    settings = {
        "learning_rate": 0.01,
        "max_steps": 7,
        "descent.max_steps": 9,
        "descent.dual_learning_rate": 0.07,
    }
    options = Options(SCALES["cpu"], tmp_path, {"distilbert": "m"}, settings=settings)
    tuned = {job.folder: job for job in jobs([Panel("all", ways)], options) if job.kind == "tune"}
    # Of plain training nothing is left to be searched; one search at the last level serves all.
    assert tuned.keys() == {
        options.study_folder(ways[arm]) for arm in ("deep_supervision", "hinge", "descent")
    }
    assert [searched(ways[arm], options.scale).gamma for arm in ("erm", "descent")] == [0.0, 1.0]
    folder = options.study_folder(ways["descent"])
    search = cli.parse_arguments(tuned[folder].words)[1][1]
    assert search.n_trials == 5
    assert json.loads(search.search_space).keys() == {"resilience", "descent_strength"}
    folder.mkdir(parents=True)
    best = {"settings": {"resilience": 0.01, "descent_strength": 0.5}}
    (folder / "study.json").write_text(json.dumps({"trials": [best]}))
    args = cli.parse_arguments(train_job(ways["descent"], 0, options).words)[1][-1]
    found = (
        args.learning_rate,
        args.max_steps,
        args.dual_learning_rate,
        args.resilience,
        args.descent_strength,
    )
    assert found == (0.01, 9, 0.07, 0.01, 0.5)
    ablated = Way("distilbert", "imdb", "descent", 0.4, changes=(("resilience", 0.0),))
    assert cli.parse_arguments(train_job(ablated, 0, options).words)[1][-1].resilience == 0.0
    assert options.study_folder(ablated) == folder
    with pytest.raises(ValueError, match="`--set noise_gamma=...`: leave it out"):
        tune_job(ways["descent"], Options(SCALES["cpu"], tmp_path, settings={"noise_gamma": 0.3}))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("table", "model"), [(table, m) for table in TABLES for m in TABLES[table]["models"]]
)
def test_commands_parse(scale, table, model):
    data = dict.fromkeys(("ucsd", "shanghaitech", "clips"), ("a.avi,b.avi", "c.avi"))
    models = {"vit": "v", "stories260k": "s"}
    options = Options(
        SCALES[scale], Path("out"), models, data, settings={"logging_steps": 7}, seeds=(0,)
    )
    model = SCALES[scale]["stand_ins"].get(model, model)
    found = [
        panel
        for panel in panels(table, SCALES[scale])
        if next(iter(panel.ways.values())).model == model
    ]
    kinds = [job.kind for job in jobs(found[:1], options)]
    assert {"tune", "train", "evaluate"} <= {*kinds} and kinds.count("train") == len(found[0].ways)
    assert sum(kind.startswith("answers") for kind in kinds) == (
        2 * len(ARMS) if table == "sft" else 0
    )
    for job in jobs(found[:1], options):
        if job.kind in ("tune", "train"):
            data_args, args = cli.parse_arguments(job.words)[1][-2:]
            assert args.logging_steps == 7
    if table == "table3":
        assert (data_args.train_files, data_args.test_files) == (["a.avi", "b.avi"], ["c.avi"])


def test_documented_commands_have_panels():
    assert DOCUMENTED
    for line in DOCUMENTED:
        args = reproduce.parser().parse_args(shlex.split(line, comments=True)[3:])
        for word in args.panels or [""]:
            assert any(
                panel.has(word) or not word for panel in panels(args.table, SCALES[args.scale])
            ), line
        assert {name for name, *_ in args.data} <= reproduce.DATA


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--set", "max_steps"], "'max_steps' is not NAME=VALUE"),
        (["--model", "distilbrt", "path"], "`--model distilbrt`: the names are"),
        (["--data", "imbd", "setup.cfg"], "`--data imbd`: the names are"),
        (
            ["--data", "imdb", "setup.cfg", "none.csv"],
            "`--data imdb none.csv`: there is no such file",
        ),
        (["--set", "hing.max_steps=1"], "`--set hing.max_steps=...`: the arms are erm"),
        (
            [
                "--data",
                "imdb",
                "setup.cfg",
                "--model",
                "distilbert",
                "tests",
                "--set",
                "learning_rat=1",
            ],
            "learning_rat",
        ),
    ],
)
def test_mistaken_words_are_named(words, match, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        reproduce.main(["table4", "--dry_run", *words])
    assert match in capsys.readouterr().err + str(error.value)


# ---- a tiny table from end to end ----

SETTINGS = "use_cpu=true max_steps=8 save_steps=4 per_device_train_batch_size=8 per_device_eval_batch_size=8 "
SETTINGS += "max_seq_length=16 report_to=none disable_tqdm=true logging_steps=2"


class Interrupted(Exception):
    pass


@pytest.mark.slow
def test_a_table_is_run_interrupted_resumed_and_collected(tmp_path, monkeypatch, capsys):
    write_rows(tmp_path)
    rows, out = str(tmp_path / "train.csv"), tmp_path / "out"
    argv = [
        "table4",
        "--output_dir",
        str(out),
        "--panels",
        "imdb-distilbert-gamma1",
        "--data",
        "imdb",
        rows,
        rows,
    ]
    argv += [
        "--arms",
        "erm+noise",
        "descent",
        "--seeds",
        "0",
        "1",
        "--n_trials",
        "2",
        "--set",
        *SETTINGS.split(),
    ]
    argv += ["--model", "distilbert", save_tiny_model(tmp_path / "model")]
    options = Options(SCALES["cpu"], out / "cpu", seeds=(0, 1))
    descent, baseline = (Way("distilbert", "imdb", arm, 1.0) for arm in ("descent", "erm+noise"))
    started, command, save = [], cli.main, Trainer._save_checkpoint

    def main(words):
        started.append(words)
        command(words)

    def save_and_stop(self, *args, **kwargs):
        save(self, *args, **kwargs)
        if self.args.output_dir == str(options.run_folder(descent, 0)):
            raise Interrupted

    monkeypatch.setattr(cli, "main", main)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_checkpoint", save_and_stop)
        with pytest.raises(Interrupted):
            reproduce.main(argv)
    assert [words[0] for words in started] == ["tune", "tune", "classify", "evaluate", "classify"]

    started.clear()
    reproduce.main(argv)
    assert [words[0] for words in started] == ["classify", "evaluate"] * 3
    assert started[0][-2:] == [
        "--resume_from_checkpoint",
        f"{options.run_folder(descent, 0)}/checkpoint-4",
    ]
    assert not list(out.rglob("checkpoint-*"))
    best = json.loads((options.study_folder(descent) / "study.json").read_text())["trials"][0][
        "settings"
    ]
    arguments = json.loads((options.run_folder(descent, 1) / "descent_config.json").read_text())[
        "arguments"
    ]
    assert (arguments["dual_learning_rate"], arguments["seed"]) == (best["dual_learning_rate"], 1)

    started.clear()
    capsys.readouterr()
    reproduce.main([*argv, "--dry_run"])
    assert capsys.readouterr().out.count("done  hf-descent ") == 10
    reproduce.main(argv)
    assert not started  # nothing is run again

    result = json.loads((out / "cpu" / "table4" / "results.json").read_text())
    (panel,) = result["panels"]
    for arm, way in (("erm+noise", baseline), ("descent", descent)):
        for seed, area in enumerate(panel["rows"][arm]["summary"]):
            curve = json.loads((options.results_folder(way, seed) / "noise_curve.json").read_text())
            assert curve["gammas"] == SCALES["cpu"]["classify"]["eval_gammas"]
            accuracy, steps = np.mean(curve["values"], axis=1), np.diff(curve["gammas"])
            assert area == pytest.approx(float(np.sum(steps * (accuracy[1:] + accuracy[:-1]) / 2)))
            profile = LayerProfile.from_json(
                options.results_folder(way, seed) / "layer_profile_gamma_1.json"
            )
            assert panel["rows"][arm]["layer_losses"][seed] == profile.losses.tolist()
    for arm in ("descent", "erm+noise"):  # plain training is judged, too
        assert {type(met) for met in panel["rows"][arm]["feasible"]} == {bool}
    text = (out / "cpu" / "table4" / "results.md").read_text()
    assert (
        "AUC over [0, 3]" in text
        and f"commit {result['runs'][0]['commit']}" in text
        and panel["verdicts"][0] in text
    )
    figures = re.findall(r"\]\((.*?\.png)\)", text)
    assert figures and all((out / "cpu" / "table4" / name).is_file() for name in figures)

    with pytest.raises(
        ValueError, match=r"seed-0 was made by .*remove that folder, or name another"
    ):
        reproduce.main([*argv, "--n_trials", "0"])
