"""Search spaces, and `hf-descent tune` on a tiny recipe."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from test_recipes import save_tiny_model, write_rows
from tiny import bert, classification_data, config

from hf_descent import DescentTrainer, cli, hp_space, noise_curve
from hf_descent.commands import tune


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    save_tiny_model(folder / "base", "distilbert")
    write_rows(folder)
    (folder / "test.csv").write_text("text,label\nunreadable,9\n")  # a class that training does not have
    return [
        "tune", "classify", "--config", "recipes/smoke/imdb-descent.yaml",
        "--model_name_or_path", str(folder / "base"),
        "--train_file", str(folder / "train.csv"), "--test_file", str(folder / "test.csv"), "--max_steps", "4",
        "--report_to", "none", "--disable_tqdm", "true",
    ]  # fmt: skip


def test_values_lie_in_their_ranges():
    study = optuna.create_study()
    values = [hp_space(study.ask()) for _ in range(50)]
    assert set(values[0]) == {
        "learning_rate", "descent_alpha", "initial_loss_bound", "dual_learning_rate", "resilience"
    }  # fmt: skip
    for name, (low, high) in tune.RANGES.items():
        found = [value[name] for value in values]
        assert low <= min(found) < (low * high) ** 0.5 < max(found) <= high
    assert hp_space(optuna.create_study().ask(), {"resilience": [1, 2, 4]})["resilience"] in (1, 2, 4)
    name = "gradient_accumulation_steps"
    steps = [hp_space(study.ask(), {name: np.array([1, 3])})[name] for _ in range(9)]
    assert {type(value) for value in steps} == {int} and set(steps) <= {1, 2, 3}
    for values in ([0.0, 0.2], ["adam", "sgd"], "adam", 3):
        with pytest.raises(ValueError, match=f"The range of `resilience` is {re.escape(str(values))}; give two pos"):
            hp_space(study.ask(), {"resilience": values})


def test_trainers_search_takes_space_and_objective(tmp_path):
    """The arguments reach the run as numbers, and the objective is the metric under noise."""
    data, seen = classification_data(32), []
    args = config(tmp_path, max_steps=3, descent_alpha="auto", initial_loss_bound="auto", dual_warmup_steps=1)
    trainer = DescentTrainer(args=args, model_init=lambda: bert(num_layers=2), train_dataset=data, eval_dataset=data)
    objective = tune.noisy_objective(trainer, 1.0, draws=2)

    def judged(metrics):
        seen.append(
            (trainer.args.descent_alpha, noise_curve(trainer.model, data, [1.0], draws=2, batch_size=8).mean[0])
        )
        return objective(metrics)

    best = trainer.hyperparameter_search(
        hp_space,
        judged,
        n_trials=2,
        direction="maximize",
        backend="optuna",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    assert best.objective == max(value for _, value in seen)
    assert len({alpha for alpha, _ in seen}) == 2
    assert all(isinstance(alpha, float) for alpha, _ in seen)


def test_a_study_ranks_its_trials_and_goes_on(command, tmp_path, capsys):
    argv = [*command, "--output_dir", str(tmp_path), "--tune_gamma", "0.5"]
    cli.main([*argv, "--n_trials", "1"])
    cli.main([*argv, "--n_trials", "3"])
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
    assert "The last is the best" in capsys.readouterr().out


def test_trials_are_feasible_at_the_training_level_and_baselines_need_not_be(command, tmp_path):
    argv = [*command, "--n_trials", "1", "--noise_gamma", "0.5", "--negative_weights", "clip", "--output_dir"]
    cli.main([*argv, str(tmp_path / "descent")])
    trial = json.loads((tmp_path / "descent" / "study.json").read_text())["trials"][0]
    folder = tmp_path / "descent" / "trial-0"
    noisy = json.loads((folder / "layer_profile_gamma_0.5.json").read_text())
    assert noisy["losses"] != json.loads((folder / "layer_profile.json").read_text())["losses"]
    noisy["feasible"] = not noisy["feasible"]
    (folder / "layer_profile_gamma_0.5.json").write_text(json.dumps(noisy))
    assert tune.judge(str(folder), 0.0)["feasible"] is noisy["feasible"] is not trial["feasible"]

    problem = ["--descent_alpha", "0.1", "--initial_loss_bound", "0.7"]
    cli.main([*argv, str(tmp_path / "supervised"), "--objective", "deep_supervision", *problem])
    trial = json.loads((tmp_path / "supervised" / "study.json").read_text())["trials"][0]
    assert trial["feasible"] is None
    assert json.loads((tmp_path / "supervised" / "trial-0" / "layer_profile.json").read_text())["feasible"] is not None


def test_trials_of_another_search_are_not_ranked_with_these(command, tmp_path, monkeypatch):
    argv = [*command, "--output_dir", str(tmp_path), "--n_trials"]

    def killed(*arguments):
        raise KeyboardInterrupt

    def main_killed(argv):
        with monkeypatch.context() as patch:
            patch.setattr("hf_descent.commands.classify.run", killed)
            with pytest.raises(KeyboardInterrupt):
                cli.main(argv)

    main_killed([*argv, "1", "--max_steps", "3", "--search_space", '{"learning_rate": [1e-5, 1e-4, 1e-3]}'])
    cli.main([*argv, "1"])  # nothing was made with the other settings
    for flags, named in (
        (["--tune_gamma", "0.5"], "gamma"),
        (["--search_space", '{"learning_rate": [1e-4, 1e-3]}'], "search_space"),
        (["--max_steps", "5"], "max_steps"),
    ):
        with pytest.raises(ValueError, match=rf"made with other settings \({named}\)"):
            cli.main([*argv, "2", *flags])
    train_file = Path(command[command.index("--train_file") + 1])
    rows = train_file.read_text()
    train_file.write_text(f"{rows}\na bad film,1")
    with pytest.raises(ValueError, match=r"made with other settings \(files\)"):
        cli.main([*argv, "2"])
    study = optuna.load_study(study_name="hf_descent", storage=f"sqlite:///{tmp_path / 'study.db'}")
    told = {name: value for name, value in study.user_attrs["setup"].items() if name != "files"}
    study.set_user_attr("setup", told)  # as earlier versions left it
    train_file.write_text(rows)
    main_killed([*argv, "2"])
    cli.main([*argv, "2"])
    trials = json.loads((tmp_path / "study.json").read_text())["trials"]
    assert sorted(trial["trial"] for trial in trials) == [0, 2]  # the killed one is made up for


def judged_by_settings(monkeypatch, stop_at=None, value=None, greater_is_better=True):
    """Replaces training by a formula of the settings, which it lists; raises in the run of that number."""
    seen = []

    def run(model_args, data_args, args):
        seen.append({name: getattr(args, name) for name in ("learning_rate", "resilience")})
        if len(seen) - 1 == stop_at:
            raise KeyboardInterrupt

    def judge(folder, gamma):
        distance = abs(math.log(seen[-1]["learning_rate"] / 2e-4)) + abs(math.log(seen[-1]["resilience"] / 0.01))
        found = (-distance if greater_is_better else distance) if value is None else value
        return {"value": found, "clean": 0.0, "feasible": None, "greater_is_better": greater_is_better}

    monkeypatch.setattr("hf_descent.commands.classify.run", run)
    monkeypatch.setattr(tune, "judge", judge)
    return seen


@pytest.mark.parametrize("search", ["bayes", "grid"])
@pytest.mark.parametrize("stop_at", [1, 3])
def test_an_interrupted_search_is_the_same_search(command, tmp_path, monkeypatch, search, stop_at):
    space = {"learning_rate": [1e-4, 1e-3], "resilience": [0.001, 0.1]}
    if search == "grid":
        space = {name: [low, 2 * low, high] for name, (low, high) in space.items()}
    argv = [*command, "--search", search, "--search_space", json.dumps(space), "--n_trials", "5"]
    straight = judged_by_settings(monkeypatch)
    cli.main([*argv, "--output_dir", str(tmp_path / "straight")])
    assert len({tuple(settings.values()) for settings in straight}) == len(straight) == 5

    first = judged_by_settings(monkeypatch, stop_at=stop_at)
    with pytest.raises(KeyboardInterrupt):
        cli.main([*argv, "--output_dir", str(tmp_path / "stopped")])
    second = judged_by_settings(monkeypatch)
    cli.main([*argv, "--output_dir", str(tmp_path / "stopped")])
    assert first[:-1] + second == straight


def test_two_trials_are_made_by_chance_and_the_others_by_what_was_found(command, tmp_path, monkeypatch):
    found = []
    for value in (None, 0.5):
        found.append(judged_by_settings(monkeypatch, value=value))
        cli.main([*command, "--output_dir", str(tmp_path / str(value)), "--n_trials", "3"])
    assert found[0][:2] == found[1][:2] and found[0][2] != found[1][2]


def test_the_least_error_is_the_best(command, tmp_path, monkeypatch):
    judged_by_settings(monkeypatch, greater_is_better=False)
    cli.main([*command, "--output_dir", str(tmp_path), "--n_trials", "3"])
    values = [trial["value"] for trial in json.loads((tmp_path / "study.json").read_text())["trials"]]
    assert 0 < values[0] < values[1] < values[2]


def test_two_processes_do_not_search_in_one_folder(command, tmp_path, monkeypatch):
    argv = [*command, "--output_dir", str(tmp_path), "--n_trials", "1"]
    seen = judged_by_settings(monkeypatch)
    holder = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"
    held = str(tmp_path / "study.lock")
    with subprocess.Popen([sys.executable, "-c", holder, held], stdin=PIPE, stdout=PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match="Another process searches in `output_dir`"):
            cli.main(argv)
        other.kill()
    assert not seen and not (tmp_path / "study.db").exists()
    cli.main(argv)
    assert len(seen) == 1


def test_a_search_without_a_finite_metric_says_so(command, tmp_path, monkeypatch):
    seen = judged_by_settings(monkeypatch, value=math.nan)
    for _ in range(2):
        with pytest.raises(ValueError, match="none of the 2 trials is finite"):
            cli.main([*command, "--output_dir", str(tmp_path), "--n_trials", "2"])
    assert len(seen) == 2
    assert not (tmp_path / "study.json").exists()


def test_a_grid_makes_every_combination_once(command, tmp_path):
    space = '{"descent_alpha": [0.1, 0.2], "resilience": [0.05, 0.5]}'
    cli.main([*command, "--output_dir", str(tmp_path), "--search", "grid", "--n_trials", "9", "--search_space", space])
    trials = json.loads((tmp_path / "study.json").read_text())["trials"]
    pairs = {(trial["settings"]["descent_alpha"], trial["settings"]["resilience"]) for trial in trials}
    assert len(trials) == 4
    assert pairs == {(0.1, 0.05), (0.1, 0.5), (0.2, 0.05), (0.2, 0.5)}


def test_feasible_trials_rank_first():
    trials = [
        SimpleNamespace(value=value, user_attrs={"feasible": feasible})
        for value, feasible in ((0.9, False), (0.7, True), (0.8, True), (None, None), (0.75, None))
    ]
    assert [trial.value for trial in tune.rank(trials)] == [0.8, 0.75, 0.7, 0.9]


def space(tmp_path, objective="descent", **tune_args):
    problem = {"penalty_coefficient": 1.0} if objective in ("hinge", "deep_supervision") else {}
    return tune.search_space(tune.TuneArguments(**tune_args), config(tmp_path, objective=objective, **problem))


def test_spaces_suit_the_objective(tmp_path):
    assert set(space(tmp_path, "erm")) == {"learning_rate"}
    for objective, names in (
        ("descent", set(tune.RANGES)),
        ("hinge", {"learning_rate", "descent_alpha", "initial_loss_bound", "penalty_coefficient"}),
        ("deep_supervision", {"learning_rate", "penalty_coefficient"}),
    ):
        assert set(space(tmp_path, objective)) == names
        assert set(space(tmp_path, objective, search="grid")) == names - {"learning_rate"}
    assert space(tmp_path, search="grid") == tune.GRID
    found = space(tmp_path, search_space='{"learning_rate": [1, 2], "per_device_train_batch_size": [2, 8]}')
    assert found == {"learning_rate": [1.0, 2.0], "per_device_train_batch_size": [2, 8]}
    values = hp_space(optuna.create_study().ask(), found)
    assert [type(value) for value in values.values()] == [float, int] and 2 <= values.popitem()[1] <= 8
    assert type(hp_space(optuna.create_study().ask(), {"initial_loss_bound": (1, 4)})["initial_loss_bound"]) is float
    assert space(tmp_path, search_space='{"save_total_limit": [1, 2]}') == {"save_total_limit": [1, 2]}
    assert type(space(tmp_path, search_space='{"save_total_limit": [1, 2]}')["save_total_limit"][0]) is int


def test_a_search_space_is_checked_before_there_is_a_study(command, tmp_path, monkeypatch):
    argv = [*command, "--output_dir", str(tmp_path), "--n_trials", "1", "--search_space"]
    seen = judged_by_settings(monkeypatch)
    for text, message in (
        ("fast", "give a JSON mapping"),
        ("[1]", "give a JSON mapping"),
        ("{}", "give a JSON mapping"),
        ('{"learning_rate": 3}', "give a JSON mapping"),
        ('{"per_device_train_batch_size": [2, 3.5]}', "whole ones for settings that are"),
        ('{"lr": [1e-4, 1e-3]}', "has lr, which is no setting of `DescentConfig`"),
        ('{"learning_rate": [1e-4]}', "The range of `learning_rate` is"),
        ('{"learning_rate": [1e-4, 1e-4]}', "The range of `learning_rate` is"),
        ('{"learning_rate": [1e-3, 1e-4]}', "the least first"),
        ('{"descent_alpha": [0.1, 2]}', "`descent_alpha` is 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            cli.main([*argv, text])
    cli.main([*argv, '{"learning_rate": [1e-4, 1e-3]}'])  # no study of another search is in its way
    assert len(seen) == 1


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="`search` is 'tpe'"):
        tune.TuneArguments(search="tpe")
    for gamma in ("nan", "inf", "-0.5"):
        with pytest.raises(ValueError, match=f"`tune_gamma` is {gamma}; give a noise level from 0"):
            tune.TuneArguments(tune_gamma=float(gamma))
    with pytest.raises(ValueError, match="Say what to tune"):
        cli.main(["tune", "--model_name_or_path", "x", "--output_dir", "y"])
