"""`python -m recipes.reproduce`: which commands make the paper's tables. `test_reproduced_table.py` runs some."""

import json
import re
import shlex
from pathlib import Path

import pytest

from recipes.reproduce import __main__ as reproduce
from recipes.reproduce.collect import published
from recipes.reproduce.experiments import ARMS, SCALES, TABLES, Panel, Way, panels, searched
from recipes.reproduce.runner import Options, jobs, parse, train_job, tune_job


ROOT = Path(__file__).parent.parent
DOCUMENTED = re.findall(
    r"^python -m recipes\.reproduce .*", (ROOT / "recipes/reproduce/README.md").read_text(), re.M
)


def training_arguments(job):
    """What a job's command line sets of the training."""
    return parse(job.words)[-1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", TABLES)
def test_panels_differ_in_training_alone(scale, table):
    names = set()
    for panel in panels(table, SCALES[scale]):
        assert panel.name not in names
        names.add(panel.name)

        assert len(panel.ways) == len(set(panel.ways.values())) > 1
        assert len({way.setting for way in panel.ways.values()}) == 1
    assert names


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", TABLES)
def test_plain_training_alone_has_no_noise(scale, table):
    for panel in panels(table, SCALES[scale]):
        for way in panel.ways.values():
            if way.arm == "erm":
                assert way.gamma == 0
            if way.arm == "erm+noise":
                assert way.gamma > 0


def test_every_figure_that_the_paper_states_has_its_runs():
    figures = set()
    for table in ("table3", "table4"):
        for panel in panels(table, SCALES["gpu"]):
            for way in panel.ways.values():
                if published(way) is not None:
                    figures.add((way, published(way)))

    rows = (ROOT / "recipes/reproduce/published.csv").read_text().splitlines()[1:]
    assert len(figures) == 2 * len(rows) == 2 * (15 * 7 + 36 * 2)
    assert (Way("dust", "avenue", "erm+noise", 0.15, 5), 28.269) in figures
    assert (Way("dust", "avenue", "descent", 0.15, 5), 14.724) in figures
    assert (Way("roberta", "imdb", "erm", 0.0), 1.651) in figures


def test_arms_of_one_setting_share_all_but_their_objective():
    options = Options(SCALES["cpu"], Path("out"), n_trials=0)
    arguments = {}
    for arm in ARMS:
        way = Way("distilbert", "mnli", arm, 0.0 if arm == "erm" else 0.4)
        words = [*train_job(way, 7, options).words, "--model_name_or_path", "m"]
        arguments[arm] = {}
        for part in parse(words):
            arguments[arm].update(vars(part))
        assert arguments[arm]["seed"] == 7
        assert arguments[arm]["noise_gamma"] == way.gamma

    differing = set()
    for name in arguments["erm"]:
        values = {str(arguments[arm][name]) for arm in ARMS}
        if len(values) > 1 and not name.startswith("_"):
            differing.add(name)

    of_the_problem = {
        "max_last_layer_rise",
        "resilience",
        "resilience_form",
        "slack_restart",
        "dual_learning_rate",
        "dual_warmup_steps",
        "dual_optim",
        "logging_dir",
    }
    assert differing - of_the_problem == {"noise_gamma", "eval_gammas", "objective", "output_dir"}


# ---- `--set`, which takes settings out of the search ----

WAYS = {arm: Way("distilbert", "imdb", arm, 0.0 if arm == "erm" else 0.4) for arm in ARMS}
DESCENT = WAYS["descent"]


@pytest.fixture
def options(tmp_path):
    """Options that set some of what is searched otherwise, one of it for an arm alone."""
    settings = {
        "learning_rate": 0.01,
        "max_steps": 7,
        "descent.max_steps": 9,
        "descent.dual_learning_rate": 0.07,
    }
    return Options(SCALES["cpu"], tmp_path, {"distilbert": "m"}, settings=settings)


@pytest.fixture
def study(options):
    """The folder of the search of `DESCENT`, with its best settings."""
    folder = options.study_folder(DESCENT)
    folder.mkdir(parents=True)
    best = {"settings": {"resilience": 0.01, "descent_strength": 0.5}}
    (folder / "study.json").write_text(json.dumps({"trials": [best]}))
    return folder


def test_an_arm_of_which_all_is_set_has_no_search(options):
    searches = [job.folder for job in jobs([Panel("all", WAYS)], options) if job.kind == "tune"]
    arms = ("deep_supervision", "hinge", "descent")
    assert set(searches) == {options.study_folder(WAYS[arm]) for arm in arms}


def test_one_search_at_the_last_level_serves_all_levels():
    assert searched(WAYS["erm"], SCALES["cpu"]).gamma == 0.0
    assert searched(DESCENT, SCALES["cpu"]).gamma == 1.0


def test_what_is_set_is_not_searched(options):
    search = parse(tune_job(DESCENT, options).words)[1]
    assert search.n_trials == 5
    assert json.loads(search.search_space).keys() == {"resilience", "descent_strength"}


@pytest.mark.usefixtures("study")
def test_a_training_has_what_is_set_and_what_was_found(options):
    args = training_arguments(train_job(DESCENT, 0, options))
    assert (args.learning_rate, args.max_steps, args.dual_learning_rate) == (0.01, 9, 0.07)
    assert (args.resilience, args.descent_strength) == (0.01, 0.5)


def test_an_ablation_takes_the_search_of_the_whole_but_for_its_own_settings(options, study):
    ablated = Way("distilbert", "imdb", "descent", 0.4, changes=(("resilience", 0.0),))
    assert options.study_folder(ablated) == study
    args = training_arguments(train_job(ablated, 0, options))
    assert (args.resilience, args.descent_strength) == (0.0, 0.5)


def test_a_setting_that_tells_the_runs_of_a_table_apart_cannot_be_set(tmp_path):
    options = Options(SCALES["cpu"], tmp_path, settings={"noise_gamma": 0.3})
    with pytest.raises(ValueError, match="`--set noise_gamma=...`: leave it out"):
        tune_job(DESCENT, options)


# ---- command lines ----


def first_panel_of(table, model, scale):
    return next(
        panel
        for panel in panels(table, SCALES[scale])
        if next(iter(panel.ways.values())).model == model
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize(
    ("table", "model"), [(table, m) for table in TABLES for m in TABLES[table]["models"]]
)
def test_commands_parse(scale, table, model):
    options = Options(
        SCALES[scale],
        Path("out"),
        models={"vit": "v", "stories260k": "s"},
        data=dict.fromkeys(("ucsd", "shanghaitech", "clips"), ("a.avi,b.avi", "c.avi")),
        settings={"logging_steps": 7},
        seeds=(0,),
    )
    model = SCALES[scale]["stand_ins"].get(model, model)
    panel = first_panel_of(table, model, scale)
    of_panel = list(jobs([panel], options))

    kinds = [job.kind for job in of_panel]
    assert {"tune", "train", "evaluate"} <= set(kinds)
    assert kinds.count("train") == len(panel.ways)
    answers = [kind for kind in kinds if kind.startswith("answers")]
    assert len(answers) == (2 * len(ARMS) if table == "sft" else 0)

    for job in of_panel:
        if job.kind in ("tune", "train"):
            data_args, args = parse(job.words)[-2:]
            assert args.logging_steps == 7
            if table == "table3":
                assert data_args.train_files == ["a.avi", "b.avi"]
                assert data_args.test_files == ["c.avi"]


@pytest.mark.parametrize("line", DOCUMENTED)
def test_documented_commands_have_panels(line):
    args = reproduce.parser().parse_args(shlex.split(line, comments=True)[3:])
    of_table = list(panels(args.table, SCALES[args.scale]))
    assert of_table
    for word in args.panels or []:
        assert any(panel.has(word) for panel in of_table)
    assert {name for name, *_ in args.data} <= reproduce.DATA


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--set max_steps", "'max_steps' is not NAME=VALUE"),
        ("--model distilbrt path", "`--model distilbrt`: the names are"),
        ("--data imbd setup.cfg", "`--data imbd`: the names are"),
        ("--data imdb setup.cfg none.csv", "`--data imdb none.csv`: there is no such file"),
        ("--set hing.max_steps=1", "`--set hing.max_steps=...`: the arms are erm"),
        (
            "--data imdb setup.cfg --model distilbert tests --set learning_rat=1",
            "learning_rat",
        ),
    ],
)
def test_mistaken_words_are_named(words, match, capsys):
    with pytest.raises((SystemExit, ValueError)) as error:
        reproduce.main(["table4", "--dry_run", *words.split()])
    assert match in capsys.readouterr().err + str(error.value)


def test_a_dry_run_counts_the_commands_of_a_large_table_and_lists_those_of_a_panel(capsys):
    words = ["table4", "--scale", "gpu", "--dry_run", "--seeds", "0"]
    reproduce.main(words)
    counted = capsys.readouterr().out
    assert "hf-descent" not in counted
    (panel,) = [line for line in counted.splitlines() if line.startswith("imdb-distilbert-gamma1:")]
    total = int(re.search(r"0 of (\d+) done", panel)[1])

    reproduce.main([*words, "--panels", "imdb-distilbert-gamma1"])
    listed = capsys.readouterr().out
    searches = listed.count("to do python -m recipes.reproduce.tune ")
    assert searches > 0 and listed.count("to do hf-descent ") == total - searches
