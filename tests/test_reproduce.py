"""`python -m recipes.reproduce`: its tables name commands that exist, and mistaken words are refused."""

import json
import math
import re
import shlex
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest

from hf_descent import cli
from recipes.reproduce import __main__ as reproduce
from recipes.reproduce.collect import _comparison, best, published, study
from recipes.reproduce.runner import Options, evaluate_job, jobs, search_space, train_job, tune_job
from recipes.reproduce.scales import ARMS, MODELS, SCALES
from recipes.reproduce.tables import TABLES, Way, searched


ROOT = Path(__file__).parent.parent
DOCUMENTED = re.findall(r"^python -m recipes\.reproduce .*", (ROOT / "recipes/reproduce/README.md").read_text(), re.M)


@pytest.fixture(autouse=True)
def repository_root(monkeypatch):
    monkeypatch.chdir(ROOT)


# ---- what is declared ----


def panels_of(scale, table):
    return list(TABLES[table].panels(SCALES[scale], list(ARMS)))


def chosen(table, *words, scale="cpu"):
    found, left_out = reproduce.possible(panels_of(scale, table), Options(SCALES[scale], Path("out"), panels=words))
    return {*left_out, *(panel.name for panel in found)}


@pytest.mark.parametrize("scale", SCALES)
def test_every_table_and_figure_of_the_paper_has_panels(scale):
    assert {*(f"table{n}" for n in range(1, 6)), *(f"figure{n}" for n in range(1, 17)), "sft"} == set(TABLES)
    for table in TABLES:
        panels = panels_of(scale, table)
        assert len({panel.name for panel in panels}) == len(panels) > 0
        for panel in panels:
            first, *others = panel.groups
            assert others and all(panel.groups.values())
            (before,) = {way.model for way in panel.groups[first]}
            for way in (way for ways in panel.groups.values() for way in ways):
                assert way.model == before  # models differ between panels, ways of training within one
                assert (way.gamma == 0 or way.arm != "erm") and (way.gamma > 0 or way.arm != "erm+noise")


def test_the_grids_of_tables_3_and_4_are_the_papers():
    panels = panels_of("gpu", "table3") + panels_of("gpu", "table4")
    ways = {way for panel in panels for (way,) in panel.groups.values()}
    figures = {(way, published(way)) for way in ways if published(way) is not None}
    rows = (ROOT / "recipes/reproduce/published.csv").read_text().splitlines()[1:]
    assert len(figures) == 2 * len(rows) == 2 * (15 * 7 + 36 * 2)
    assert (Way("dust", "avenue", "erm+noise", 0.15, 5), 28.269) in figures
    assert (Way("dust", "avenue", "descent", 0.15, 5), 14.724) in figures
    assert (Way("roberta", "imdb", "erm", 0.0), 1.651) in figures
    assert published(Way("roberta", "imdb", "hinge", 1.0)) is None
    assert not any(published(replace(way, overrides=(("descent_alpha", 0.1),))) for way, _ in figures)


def test_arms_of_one_setting_share_all_but_their_objective():
    panel = next(panel for panel in panels_of("cpu", "table4") if panel.name == "mnli-distilbert-gamma0.4")
    assert list(panel.groups) == list(ARMS)
    options = Options(SCALES["cpu"], Path("out"), n_trials=0)
    arguments = {}
    for arm, (way,) in panel.groups.items():
        _, parsed = cli.parse_arguments([*train_job(way, 7, options).words, "--model_name_or_path", "m"])
        arguments[arm] = {name: value for part in parsed for name, value in vars(part).items()}
        assert (arguments[arm]["seed"], arguments[arm]["noise_gamma"]) == (7, 0.0 if arm == "erm" else 0.4)
    values = {name: [str(each[name]) for each in arguments.values()] for name in arguments["erm"]}
    differing = {name for name, found in values.items() if len(set(found)) > 1}
    problem = {"resilience", "resilience_form", "slack_restart", "dual_warmup_steps", "dual_optim", "logging_dir"}
    assert differing - problem == {"noise_gamma", "eval_gammas", "objective", "output_dir"}
    # Only a run that sees noise, in training or after it, measures sigma; the levels of all tests are in units of it.
    assert all(each["noise_gamma"] or each["eval_gammas"] for each in arguments.values())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("table", ["table3", "table4"])
def test_arms_of_one_setting_are_profiled_at_its_training_level(scale, table, tmp_path):
    options = Options(SCALES[scale], tmp_path, settings={"per_device_eval_batch_size": 7})
    for panel in panels_of(scale, table):
        ways = [way for ways in panel.groups.values() for way in ways]
        for way in ways:
            words = evaluate_job(way, 0, options).words
            assert words[words.index("--per_device_eval_batch_size") + 1] == "7"
            assert words[words.index("--draws") + 1] == str(SCALES[scale].draws)
            flags = words[words.index("--profile_gammas") + 1 :]
            levels = [float(word) for word in takewhile(lambda word: not word.startswith("--"), flags)]
            assert max(each.gamma for each in ways) in levels


def test_every_arm_has_the_same_number_of_trials_and_none_reads_test_rows():
    options = Options(SCALES["cpu"], Path("out"), data={"imdb": ["train.csv", "test.csv"]}, n_trials=5)
    for arm in ARMS:
        way = Way("distilbert", "imdb", arm, 0.0 if arm == "erm" else 0.4)
        assert searched(options.scale, way).gamma == (0.0 if arm == "erm" else 1.0)
        _, parsed = cli.parse_arguments([*tune_job(searched(options.scale, way), options).words])
        assert parsed[1].n_trials == 5
        space = json.loads(parsed[1].search_space)
        assert ("resilience" in space) == ("dual_learning_rate" in space) == (arm == "descent")
        assert all(hasattr(parsed[-1], name) for name in space)


@pytest.mark.parametrize("arms", [["erm+noise"], ["erm+noise", "descent"]])
def test_without_noise_the_noisy_baseline_is_plain_training(arms):
    for panel in (panel for table in TABLES.values() for panel in table.panels(SCALES["gpu"], arms)):
        assert len(panel.groups) >= (len(arms) if "by-" not in panel.name else 1)
        if panel.has("gamma0"):
            assert list(panel.groups) == ["erm", *arms[1:]]
            assert {way.gamma for (way,) in panel.groups.values()} == {0.0}


def test_models_come_from_the_hub_where_nothing_else_is_said():
    ways = [Way(model, "ucsd", "erm", 0.0) for model in ("vit", "ut")]
    assert [Options(SCALES["gpu"], Path("out")).missing(way) for way in ways] == ["--data ucsd"] * 2
    given = {"ucsd": ["Train*", "Test*"]}
    assert [Options(SCALES["gpu"], Path("out"), data=given).missing(way) for way in ways] == [None, None]
    assert [Options(SCALES["cpu"], Path("out"), data=given).missing(way) for way in ways] == ["--model vit", None]


def test_what_is_set_is_not_searched(tmp_path):
    way = Way("distilbert", "imdb", "descent", 0.4)
    options = Options(SCALES["cpu"], tmp_path, {"distilbert": "m"}, settings={"dual_learning_rate": 0.07})
    tuned = tune_job(searched(options.scale, way), options)
    found = json.loads(cli.parse_arguments(tuned.words)[1][1].search_space)
    assert {"learning_rate", "resilience"} <= found.keys() and "dual_learning_rate" not in found
    tuned.folder.mkdir(parents=True)
    settings = dict.fromkeys(found, 0.01)
    (tuned.folder / "study.json").write_text(json.dumps({"trials": [{"settings": settings}]}))
    args = cli.parse_arguments(train_job(way, 0, options).words)[1][-1]
    assert (args.dual_learning_rate, args.resilience) == (0.07, 0.01)
    ablated = replace(way, overrides=(("dual_learning_rate", 0.5), ("resilience", 0.0)))
    args = cli.parse_arguments(train_job(ablated, 0, options).words)[1][-1]
    assert (args.dual_learning_rate, args.resilience) == (0.5, 0.0)
    assert searched(SCALES["gpu"], ablated) == way
    options = Options(SCALES["cpu"], tmp_path, {"distilbert": "m"}, settings={"learning_rate": 1e-3}, seeds=(0,))
    (panel,) = [each for each in panels_of("cpu", "table4") if each.name == "imdb-distilbert-gamma1"]
    tuned = {job.folder for job in jobs([panel], options) if job.kind == "tune"}
    assert tuned == {options.study_folder(way) for (way,) in panel.groups.values() if not way.arm.startswith("erm")}


def test_an_arm_may_have_settings_of_its_own_in_place_of_a_search(tmp_path):
    settings = {"learning_rate": 0.01, "max_steps": 7, "erm+noise.learning_rate": 0.02, "descent.max_steps": 9}
    settings |= {"descent.dual_learning_rate": 0.03, "descent.resilience": 0.04, "descent.descent_strength": 0.5}
    options = Options(SCALES["cpu"], tmp_path, {"distilbert": "m"}, settings=settings)
    ways = {arm: Way("distilbert", "imdb", arm, 0.4) for arm in ARMS}
    rates = {"erm+noise": 0.02}
    for arm in ("erm+noise", "erm", "descent"):  # the hinge's and deep supervision's weights are still searched
        options.study_folder(ways[arm]).mkdir(parents=True)
        made = {"gamma": 1.0, "trials": [{"settings": {"learning_rate": 0.5}}]}
        (options.study_folder(ways[arm]) / "study.json").write_text(json.dumps(made))  # of another search
        assert search_space(ways[arm], options) == study(ways[arm], options) == {}
        args = cli.parse_arguments(train_job(ways[arm], 0, options).words)[1][-1]
        assert (args.learning_rate, args.max_steps) == (rates.get(arm, 0.01), 9 if arm == "descent" else 7)
    assert (args.dual_learning_rate, args.resilience, args.descent_strength) == (0.03, 0.04, 0.5)
    (panel,) = [each for each in panels_of("cpu", "table4") if each.name == "imdb-distilbert-gamma1"]
    tuned = {job.folder for job in jobs([panel], options) if job.kind == "tune"}
    assert tuned == {options.study_folder(ways[arm]) for arm in ("deep_supervision", "hinge")}


def test_a_search_that_was_not_asked_for_is_not_shown(tmp_path):
    way, best_trial = Way("ut", "clips", "descent", 0.15, 5), {"value": 1.0, "settings": {"learning_rate": 0.1}}
    options = Options(SCALES["cpu"], tmp_path)
    options.study_folder(way).mkdir(parents=True)
    (options.study_folder(way) / "study.json").write_text(json.dumps({"gamma": 0.15, "trials": [best_trial]}))
    assert study(way, options) == {"gamma": 0.15, "trials": 1, **best_trial}
    assert study(way, replace(options, n_trials=0)) == {}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("model", ["distilbert", "roberta", "ut-text", "ut", "dust", "vit"])
def test_training_commands_parse(scale, model):
    data = {"clips": ["a.avi,b.avi", "c.avi"], "ucsd": ["Train*", "Test*"]}
    options = Options(SCALES[scale], Path("out"), {"vit": "v"}, data, n_trials=0, settings={"logging_steps": 7})
    where = next(name for name in (*SCALES[scale].text, *SCALES[scale].video) if name in MODELS[model].recipes)
    layers = None if MODELS[model].depth is None else 4
    words = train_job(Way(model, where, "descent", 0.1, layers, (("descent_alpha", 0.3),)), 0, options).words
    (model_args, data_args, args) = cli.parse_arguments(words)[1]
    assert (args.descent_alpha, args.noise_gamma, args.logging_steps) == (0.3, 0.1, 7)
    if layers is not None:
        assert getattr(model_args, MODELS[model].depth) == 4
    if where == "clips":
        assert (data_args.train_files, data_args.test_files) == (["a.avi", "b.avi"], ["c.avi"])
    if where == "ucsd":
        assert (data_args.train_files, data_args.test_files) == (["Train*"], ["Test*"])


def test_documented_commands_parse():
    assert DOCUMENTED
    for line in DOCUMENTED:
        args = reproduce.parser().parse_args(shlex.split(line, comments=True)[3:])
        assert chosen(args.table, *args.panels, scale=args.scale), line


def test_a_part_of_a_name_is_whole():
    assert chosen("table3", "clips-ut-3-gamma0", "vit-gamma0.09") == {"clips-ut-3-gamma0", "clips-vit-gamma0.09"}


def test_what_is_not_given_is_left_out():
    with pytest.raises(ValueError, match=r"Nothing is left of figure1 \(imdb-distilbert-gamma1: needs --data imdb\)"):
        reproduce.main(["figure1", "--collect_only"])
    with pytest.raises(ValueError, match="Nothing is left of figure9 .it has none of these arms"):
        reproduce.main(["figure9", "--arms", "erm"])


def test_a_strategy_may_be_no():
    given = ("save_strategy=no", "max_steps=3", "learning_rate=1.0e-3", "seeds=[1]")
    assert [reproduce.setting(word)[1] for word in given] == ["no", 3, 1e-3, [1]]


GIVEN = ["--data", "imdb", "setup.cfg", "--model", "distilbert", "tests"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--set", "max_steps"], "'max_steps' is not NAME=VALUE"),
        (["--model", "distilbrt", "path"], "`--model distilbrt`: the names are distilbert,"),
        (["--data", "imbd", "path"], "`--data imbd`: the names are imdb,"),
        (["--seeds", "0", "1", "0"], "`--seeds 0 1 0`: each is a run"),
        (["--set", "noise_gamma=0.3"], "`--set noise_gamma=0.3`: leave it out"),
        (["--set", "unrolled_layers=2"], "`--set unrolled_layers=2`: leave it out"),
        ([*GIVEN, "--set", "learning_rat=1"], "`--set learning_rat=1`: `hf-descent classify` has no such setting"),
        ([*GIVEN, "--set", "hinge.learning_rat=1"], "`--set hinge.learning_rat=1`: `hf-descent classify` has no such"),
        ([*GIVEN, "--set", "erm.seed=1"], "`--set erm.seed=1`: leave it out"),
        (
            [*GIVEN, "--set", "hing.max_steps=1"],
            "`--set hing.max_steps=1`: the arms are deep_supervision, descent, erm,",
        ),
        ([*GIVEN, "--set", "hinge.max_eval_samples=9"], "`--set hinge.max_eval_samples=9`: all arms take"),
        (["--data", "imdb", *["setup.cfg"] * 4], "`--data imdb` has 4 files after it: give 1 to 3"),
        (["--data", "clips", *["tests/*.py"] * 3], "`--data clips` has 3 files after it: give 1 to 2"),
        (["--data", "imdb"], "`--data imdb` has 0 files after it"),
        (["--data", "imdb", "setup.cfg", "none.csv"], "`--data imdb none.csv`: there is no such file"),
        (["--data", "clips", "setup.cfg,*.avi"], "`--data clips *.avi`: there is no such file"),
        (["--model", "distilbert", "../none"], "`--model distilbert ../none`: there is no such folder"),
        (["--panels", "imdb", "roberta-gamma"], "`--panels roberta-gamma`: table4 has imdb-ut-text-3-gamma0, "),
    ],
)
def test_mistaken_words_are_named(words, match, capsys):
    with pytest.raises(SystemExit):
        reproduce.main(["table4", "--dry_run", *words])
    assert match in capsys.readouterr().err


def test_the_best_of_several_depths_is_chosen_on_validation_rows(tmp_path):
    options = Options(SCALES["cpu"], tmp_path, seeds=(0, 1))
    ways = [Way("ut", "clips", "descent", 0.15, layers) for layers in (7, 3, 5)]
    for way, errors in zip(ways, ((6.0, math.nan), (9.0, 7.0), (8.0, 7.5))):
        for seed, error in enumerate(errors):
            folder = options.run_folder(way, seed)
            folder.mkdir(parents=True)
            results = json.dumps({"validation_mean_rmse": error, "test_mean_rmse": 20 - error})
            (folder / "all_results.json").write_text(results)
    assert best(ways, options) == ways[2]


def test_completions_are_made_without_noise_and_under_it():
    panels = panels_of("cpu", "figure16")
    kinds = [job.kind for job in jobs(panels, Options(SCALES["cpu"], Path("out"), seeds=(0,)), answers=True)]
    assert kinds.count("answers-0") == kinds.count("answers-0.5") == kinds.count("train") == len(ARMS)


def test_a_row_has_mean_and_deviation_over_seeds_feasible_runs_and_cost():
    def group(auc, seconds, feasible):
        runs = {"auc": auc, "average": auc, "step_seconds": [seconds] * 3, "descending_share": [0.5, 0.5, 0.8]}
        metric = [[value, value / 2] for value in auc]
        return {**runs, "gammas": [0.0, 1.0], "metric": metric, "feasible": feasible, "published": None, "search": {}}

    groups = {"erm": group([1.0, 2.0, 3.0], 0.2, [None] * 3)}
    groups["descent"] = group([2.0, 4.0, 6.0], 0.3, [True, False, True])
    panel = {"groups": groups, "summary": "auc", "summary_title": "AUC", "metric": "accuracy", "profile_gamma": 1.0}
    rows = _comparison({**panel, "verdicts": [], "figures": []})
    assert rows[3] == "| descent | 4 +- 2 | 4 +- 2 | 4 +- 2 | 2 +- 1 | 2 of 3 | 60.0% | x1.50 |"
