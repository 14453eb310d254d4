"""Search spaces, and `recipes.reproduce.tune` on a tiny recipe."""

import json
import math
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from tiny.files import save_tiny_model, write_rows
from tiny.training import config

from hf_descent import SFTDescentConfig, hp_space
from hf_descent.evaluation.comparison import Run
from hf_descent.training.search import RANGES, space_for
from recipes.reproduce import tune


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    save_tiny_model(folder / "base")
    write_rows(folder)
    (folder / "test.csv").write_text(
        "text,label\nunreadable,9\n"
    )  # a class that training does not have
    return [
        "classify", "--config", "recipes/smoke/imdb-descent.yaml",
        "--model_name_or_path", str(folder / "base"),
        "--train_file", str(folder / "train.csv"), "--test_file", str(folder / "test.csv"), "--max_steps", "4",
        "--report_to", "none", "--disable_tqdm", "true",
    ]  # fmt: skip


def test_values_lie_in_their_ranges():
    study = optuna.create_study()
    values = [hp_space(study.ask()) for _ in range(50)]
    assert set(values[0]) == {"learning_rate", "descent_strength", "dual_learning_rate"}
    for name, (low, high) in RANGES.items():
        found = [value[name] for value in values]
        assert low <= min(found) < (low * high) ** 0.5 < max(found) <= high
    assert hp_space(optuna.create_study().ask(), {"resilience": [1, 2, 4]})["resilience"] in (
        1,
        2,
        4,
    )
    name = "gradient_accumulation_steps"
    steps = [hp_space(study.ask(), {name: np.array([1, 3])})[name] for _ in range(9)]
    assert {type(value) for value in steps} == {int} and set(steps) <= {1, 2, 3}
    assert hp_space(study.ask(), {"optim": ["adamw_torch", "sgd"]})["optim"] in (
        "adamw_torch",
        "sgd",
    )
    with pytest.raises(ValueError, match="low.*0"):
        hp_space(study.ask(), {"resilience": [0.0, 0.2]})


def test_trials_have_no_plain_training_beside_them(command, tmp_path):
    with pytest.raises(ValueError, match="`with_plain` is for a single training"):
        tune.main([*command, "--output_dir", str(tmp_path), "--with_plain"])


def test_a_study_ranks_its_trials_and_goes_on(command, tmp_path, capsys):
    argv = [*command, "--output_dir", str(tmp_path), "--noise_gamma", "0.5"]
    tune.main([*argv, "--n_trials", "1"])
    tune.main([*argv, "--n_trials", "3"])
    written = json.loads((tmp_path / "study.json").read_text())
    assert sorted(trial["trial"] for trial in written["trials"]) == [0, 1, 2]
    ranks = [(trial["feasible"] is not False, trial["value"]) for trial in written["trials"]]
    assert ranks == sorted(ranks, reverse=True)
    assert written["gamma"] == 0.5
    last = json.loads((tmp_path / "trial-2" / "noise_curve.json").read_text())
    assert last["gammas"] == [0.0, 0.5]
    settings = json.loads((tmp_path / "trial-2" / "descent_config.json").read_text())["arguments"]
    found = next(trial for trial in written["trials"] if trial["trial"] == 2)
    assert {name: settings[name] for name in found["settings"]} == pytest.approx(found["settings"])
    assert found["value"] == pytest.approx(sum(last["values"][1]) / len(last["values"][1]))
    best = written["trials"][0]["trial"]
    assert f"Trial {best} of 3 is the best, with " in capsys.readouterr().out


def test_trials_are_feasible_or_not_and_baselines_neither(command, tmp_path, capsys):
    argv = [
        *command,
        "--n_trials",
        "1",
        "--noise_gamma",
        "0.5",
        "--negative_weights",
        "clip",
        "--eval_strategy",
        "no",
    ]
    argv.append("--output_dir")
    tune.main([*argv, str(tmp_path / "descent")])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-2].startswith("VERDICT: NOT ") and lines[-1].startswith("Next: ")
    trial = json.loads((tmp_path / "descent" / "study.json").read_text())["trials"][0]
    assert trial["feasible"] is Run.load(str(tmp_path / "descent" / "trial-0")).feasible is False
    # The validation rows, which are none of the weights', chose between trials.
    assert (
        json.loads((tmp_path / "descent" / "trial-0" / "descent_config.json").read_text())[
            "select_rows"
        ]
        > 0
    )
    with pytest.raises(ValueError, match="holds the trials of another search: name another folder"):
        tune.main([*argv, str(tmp_path / "descent"), "--max_steps", "5"])
    problem = ["--descent_alpha", "0.1", "--initial_loss_bound", "0.7"]
    tune.main([*argv, str(tmp_path / "supervised"), "--objective", "deep_supervision", *problem])
    trial = json.loads((tmp_path / "supervised" / "study.json").read_text())["trials"][0]
    assert trial["feasible"] is None
    assert (
        json.loads((tmp_path / "supervised" / "trial-0" / "layer_profile.json").read_text())[
            "problem"
        ]
        is not None
    )


def test_each_search_has_a_study_of_its_own(command, tmp_path, monkeypatch):
    """Trials that do not compare are not ranked together, and a search that is asked for again goes on."""
    argv = [*command, "--output_dir", str(tmp_path), "--n_trials"]
    seen = judged_by_settings(monkeypatch)

    def trials():
        return [
            trial["settings"]
            for trial in json.loads((tmp_path / "study.json").read_text())["trials"]
        ]

    tune.main([*argv, "2"])
    first = trials()
    space = '{"learning_rate": [1e-4, 1e-3], "resilience": [0.001, 0.1]}'
    for flags in (["--noise_gamma", "0.5"], ["--search_space", space], ["--max_steps", "5"]):
        tune.main([*argv, "1", *flags])
        assert len(trials()) == 1
    tune.main([*argv, "3"])
    assert (
        len(seen) == 2 + 3 + 1
        and len(trials()) == 3
        and all(settings in trials() for settings in first)
    )


def judged_by_settings(monkeypatch, stop_at=None, value=None, greater_is_better=True):
    """Replaces training by a formula of the settings, which it lists; raises in the run of that number."""
    seen = []

    def run(model_args, data_args, args):
        seen.append({name: getattr(args, name) for name in ("learning_rate", "resilience")})
        if len(seen) - 1 == stop_at:
            raise KeyboardInterrupt

    def judge(folder, gamma):
        distance = abs(math.log(seen[-1]["learning_rate"] / 2e-4)) + abs(
            math.log(seen[-1]["resilience"] / 0.01)
        )
        found = (-distance if greater_is_better else distance) if value is None else value
        return found, {"clean": 0.0, "feasible": None, "greater_is_better": greater_is_better}

    monkeypatch.setattr("hf_descent.commands.classify.run", run)
    monkeypatch.setattr(tune, "judge", judge)
    return seen


def test_an_interrupted_search_is_the_same_search(command, tmp_path, monkeypatch):
    values = {"learning_rate": [1e-4, 1e-3], "resilience": [0.001, 0.1]}
    argv = [*command, "--search_space", json.dumps(values), "--n_trials", "5"]
    straight = judged_by_settings(monkeypatch)
    tune.main([*argv, "--output_dir", str(tmp_path / "straight")])
    assert len({tuple(settings.values()) for settings in straight}) == len(straight) == 5

    first = judged_by_settings(monkeypatch, stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        tune.main([*argv, "--output_dir", str(tmp_path / "stopped")])
    second = judged_by_settings(monkeypatch)
    tune.main([*argv, "--output_dir", str(tmp_path / "stopped")])
    assert first[:-1] + second == straight


def test_values_that_do_not_go_together_are_passed_over(command, tmp_path, monkeypatch):
    seen = judged_by_settings(monkeypatch)
    space = '{"dual_optim": ["adam", "pi", "sgd"], "resilience": [0.01, 0.02, 0.05]}'
    argv = [*command, "--resilience", "0", "--search_space", space, "--n_trials", "6"]
    tune.main([*argv, "--output_dir", str(tmp_path)])
    assert 0 < len(json.loads((tmp_path / "study.json").read_text())["trials"]) == len(seen) < 6


def test_the_least_error_is_the_best(command, tmp_path, monkeypatch):
    judged_by_settings(monkeypatch, greater_is_better=False)
    tune.main([*command, "--output_dir", str(tmp_path), "--n_trials", "3"])
    values = [
        trial["value"] for trial in json.loads((tmp_path / "study.json").read_text())["trials"]
    ]
    assert 0 < values[0] < values[1] < values[2]


def test_a_search_without_a_finite_metric_says_so(command, tmp_path, monkeypatch):
    seen = judged_by_settings(monkeypatch, value=math.nan)
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the 2 trials is finite"):
            tune.main([*command, "--output_dir", str(tmp_path), "--n_trials", "2"])
    assert len(seen) == 2
    assert not (tmp_path / "study.json").exists()


def test_feasible_trials_rank_first():
    trials = [
        SimpleNamespace(value=value, user_attrs={"feasible": feasible})
        for value, feasible in ((0.9, False), (0.7, True), (0.8, True), (None, None), (0.75, None))
    ]
    assert [trial.value for trial in tune.rank(trials)] == [0.8, 0.75, 0.7, 0.9]


def space(tmp_path, objective="descent", descent_alpha="line", exit_targets=None, **tune_args):
    args = config(
        tmp_path, objective=objective, descent_alpha=descent_alpha, exit_targets=exit_targets
    )
    return tune.search_space(tune.TuneArguments(**tune_args), args)


def test_spaces_suit_the_objective(tmp_path):
    assert set(space(tmp_path, "erm")) == {"learning_rate"}
    for objective, names in (
        ("descent", set(RANGES)),
        ("hinge", {"learning_rate", "descent_strength", "penalty_coefficient"}),
        ("deep_supervision", {"learning_rate", "penalty_coefficient"}),
    ):
        assert set(space(tmp_path, objective)) == names
    assert set(space(tmp_path, descent_alpha=0.2)) == {
        "learning_rate",
        "descent_alpha",
        "dual_learning_rate",
    }
    targets = {"descent_alpha": None, "exit_targets": {1: 0.1}}
    assert set(space(tmp_path, **targets)) == {"learning_rate", "dual_learning_rate"}


def test_language_models_are_searched_around_their_lower_dual_rate(tmp_path):
    args = SFTDescentConfig(str(tmp_path), use_cpu=True, report_to="none")
    low, high = tune.search_space(tune.TuneArguments(), args)["dual_learning_rate"]
    own = args.dual_settings.dual_learning_rate
    assert 5 * low < own < high < RANGES["dual_learning_rate"][1]
    study = optuna.create_study()

    suggest = space_for(args, hp_space)  # as the trainer's search does
    rates = [suggest(study.ask())["dual_learning_rate"] for _ in range(50)]

    assert low <= min(rates) < own < max(rates) <= high
    assert space_for(args, None) is None and space_for(args, suggest) is suggest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "give a JSON mapping") for text in ("fast", "[1]", "{}", '{"learning_rate": 3}')),
        ('{"lr": [1e-4, 1e-3]}', "unexpected keyword argument 'lr'"),
        ('{"descent_alpha": [0.1, 2]}', "`descent_alpha` is 2"),
    ],
)
def test_a_search_space_is_checked_before_there_is_a_study(command, tmp_path, text, message):
    with pytest.raises((ValueError, TypeError), match=message):
        tune.main(
            [*command, "--output_dir", str(tmp_path), "--n_trials", "1", "--search_space", text]
        )
    assert not (tmp_path / "study.db").exists()


def test_lists_of_multipliers_are_searched_one_by_one():
    trial = optuna.trial.FixedTrial({"fixed_multipliers": [4, 4]})
    space = {"fixed_multipliers": [[1, 1], [4, 4]]}
    assert hp_space(trial, space) == {"fixed_multipliers": [4, 4]}


def test_a_search_says_of_what():
    with pytest.raises(ValueError, match="Say what to tune"):
        tune.main(["--model_name_or_path", "x", "--output_dir", "y"])
