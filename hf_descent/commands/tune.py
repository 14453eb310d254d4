"""`hf-descent tune COMMAND --config RECIPE`: search the settings of a recipe on validation rows, by Optuna.

Every trial is a whole run of the command (`classify`, ...) in a folder of its own, judged by the metric at one stated
noise level on the VALIDATION rows; test rows are never read. The study lies in the output folder and goes on after an
interruption. Feasible trials rank before infeasible ones, but for baselines, which have no constraints.

The paper tuned alpha, f_0, both learning rates and the resilience: by Bayesian search with 5 runs for language (the
ERM model also run 5 times), by a grid for video (section 4, appendix B). Its ranges and grids are not given; `RANGES`
and `GRID` are this package's, for losses of the size of a classifier's: give your own by `--search_space` for others.
"""

import importlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from operator import index
from typing import Any

from filelock import FileLock, Timeout

from ..cli import parse_recipe
from ..configs import DescentConfig
from ..constraints.problem import LARGEST, as_python
from ..files import fingerprint, whole_file
from ..recorded_arguments import training_arguments


TRAINING_COMMANDS = ("classify", "sft", "denoise")
FILES = ("model_name_or_path", "train_file", "validation_file", "train_files", "data_dir")  # what trials read
# Setting -> least and greatest value; all are searched on a logarithmic scale.
RANGES = {
    "learning_rate": (1e-5, 1e-3),
    "descent_alpha": (0.01, 0.5),
    "initial_loss_bound": (0.5, 4.0),
    "dual_learning_rate": (1e-3, 1e-1),
    "resilience": (1e-4, 1e-1),
}
GRID = {
    "descent_alpha": (0.05, 0.1, 0.2),
    "initial_loss_bound": (0.7, 1.1),
    "dual_learning_rate": (1e-3, 1e-2, 1e-1),
    "resilience": (0.001, 0.05),
}
PENALTY_RANGE, PENALTY_GRID = (0.03, 10.0), (0.1, 1.0, 10.0)  # of the baselines with a `penalty_coefficient`


def hp_space(trial, ranges: Mapping[str, Sequence[float]] | None = None) -> dict[str, float]:
    """A search space for `hyperparameter_search(hp_space=hf_descent.hp_space, backend="optuna")`.

    Args:
        trial (`optuna.Trial`): suggests the values.
        ranges (mapping, *optional*): setting -> (least, greatest) on a logarithmic scale, whole numbers for settings
            that are, or more than two values, of which one is taken. `RANGES` where not given.

    Raises:
        ValueError: a range of fewer than two values, of two in descending order, or with one that is no positive
            number.
    """
    space, whole = {}, whole_settings(DescentConfig)
    for name, values in (RANGES if ranges is None else ranges).items():
        values = check_range(name, values)
        if len(values) > 2:
            space[name] = trial.suggest_categorical(name, values)
        elif all(isinstance(value, int) for value in values) and whole.get(name, True):
            space[name] = trial.suggest_int(name, *values, log=True)
        else:
            space[name] = trial.suggest_float(name, *values, log=True)
    return space


def check_range(name: str, values: Sequence[float]) -> list[float]:
    """The values of a range in Python's own numbers; ValueError where it cannot be searched."""
    found = as_python(values)
    positive = isinstance(found, list) and all(
        isinstance(value, int | float) and 0 < value < math.inf for value in found
    )
    if not positive or len(set(found)) < 2 or (len(found) == 2 and found[0] > found[1]):
        raise ValueError(
            f"The range of `{name}` is {values}; give two positive numbers, the least first, or more to choose from."
        )
    return found


def noisy_objective(trainer, gamma: float, **settings) -> Callable[[Mapping[str, float]], float]:
    """A `compute_objective` for `hyperparameter_search`: the metric at noise level `gamma` on the trainer's evaluation
    rows, which should be validation rows. `settings` are those of [`DescentTrainer.evaluate_robustness`]."""

    def objective(metrics: Mapping[str, float]) -> float:
        given = {"metric": "accuracy", **settings}  # not rmse unasked: a search maximizes
        return float(trainer.evaluate_robustness(gammas=[gamma], **given).mean[0])

    return objective


@dataclass
class TuneArguments:
    """How settings are searched."""

    n_trials: int = field(default=5, metadata={"help": "Runs to make in all; a resumed study makes the rest."})
    search: str = field(
        default="bayes",
        metadata={"help": "`bayes` (Gaussian process), or `grid` (`n_trials` of all combinations, in random order)."},
    )
    search_space: str | None = field(
        default=None,
        metadata={"help": "Ranges (or values, for a grid) as JSON: '{\"learning_rate\": [1e-5, 1e-4]}'."},
    )
    tune_gamma: float | None = field(
        default=None,
        metadata={"help": "Noise level at which trials are judged; the (largest) training level where not given."},
    )

    def __post_init__(self):
        if self.search not in ("bayes", "grid"):
            raise ValueError(f"`search` is {self.search!r}; choose 'bayes' or 'grid'.")
        if self.n_trials < 1:
            raise ValueError(f"`n_trials` is {self.n_trials}; make at least one.")
        if self.tune_gamma is not None and not 0 <= self.tune_gamma <= LARGEST:
            raise ValueError(f"`tune_gamma` is {self.tune_gamma}; give a noise level from 0 to {LARGEST:g}.")


def parse(argv: Sequence[str], prog: str, description: str) -> tuple:
    """The training command, then its own arguments and those of the search."""
    command = argv[0] if argv and argv[0] in TRAINING_COMMANDS else None
    module = importlib.import_module(f"hf_descent.commands.{command or TRAINING_COMMANDS[0]}")
    arguments = parse_recipe(
        (TuneArguments, *module.argument_types),
        argv[1:] if command else argv,
        prog=prog,
        usage=f"{prog} {{{','.join(TRAINING_COMMANDS)}}} --config RECIPE [flags]",
        description=description,
    )
    if command is None:
        raise ValueError(f"Say what to tune: `{prog} COMMAND --config RECIPE`, of {', '.join(TRAINING_COMMANDS)}.")
    return (module, *arguments)


def run(module, tune_args: TuneArguments, model_args: Any, data_args: Any, args: Any) -> None:
    """Runs the trials and prints them, the best last; `args.output_dir` gets `trial-<n>` folders and `study.json`.

    Raises:
        ValueError: a search space that is no JSON mapping, or has settings or values that the command does not take;
            the command leaves no noise curve; the folder holds the study of another search, or another process
            searches in it; no trial has a finite metric.
        ImportError: no Optuna.
    """
    try:
        import optuna
    except ImportError:
        raise ImportError("Tuning needs Optuna: `pip install hf_descent[tune]`.") from None
    gamma = float(args.gamma_train if tune_args.tune_gamma is None else tune_args.tune_gamma)
    ranges = search_space(tune_args, args)
    data_args = without_test_rows(data_args)

    def objective(trial) -> float:
        folder = os.path.join(args.output_dir, f"trial-{trial.number}")
        settings = hp_space(trial, ranges) | {"output_dir": folder, "eval_gammas": sorted({0.0, gamma})}
        module.run(replace(model_args, overwrite_output_dir=True), data_args, replace(args, **settings))
        result = judge(folder, gamma)
        trial.set_user_attr("clean", result["clean"])
        trial.set_user_attr("feasible", result["feasible"])
        if not math.isfinite(result["value"]):
            raise optuna.TrialPruned("the metric is not finite")
        trial.set_user_attr("greater_is_better", result["greater_is_better"])
        return result["value"] if result["greater_is_better"] else -result["value"]

    setup = {
        "gamma": gamma,
        "search": tune_args.search,
        "search_space": ranges,
        **asdict(model_args),
        **asdict(data_args),
        **training_arguments(args),
        "files": fingerprints(vars(model_args) | vars(data_args)),
    }
    os.makedirs(args.output_dir, exist_ok=True)
    with alone(args.output_dir):
        place = f"sqlite:///{os.path.join(args.output_dir, 'study.db')}"
        where = {"storage": place, "study_name": "hf_descent"}
        study = optuna.create_study(**where, direction="maximize", load_if_exists=True)
        state = optuna.trial.TrialState
        # A killed or failed run is made again.
        finished = study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))
        if not finished:  # a failed start must not bind its correction, neither here nor in Optuna's parameters
            optuna.delete_study(**where)
            study = optuna.create_study(**where, direction="maximize")
        check_same_search(study, setup)
        for killed in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
            study.tell(killed.number, state=state.FAIL)  # or a sampler would keep away from its settings
        for study.sampler in samplers(tune_args, ranges, args.seed, [trial.params for trial in finished]):
            study.optimize(objective, n_trials=1)
    ranked = rank(study.trials)
    if not ranked:
        raise ValueError(f"The metric of none of the {len(study.trials)} trials is finite; try lower learning rates.")
    trials = [
        {"trial": trial.number, "value": abs(trial.value), **trial.user_attrs, "settings": trial.params}
        for trial in ranked
    ]
    with whole_file(os.path.join(args.output_dir, "study.json")) as file:
        json.dump({"gamma": gamma, "search": tune_args.search, "trials": trials}, file, indent=1)
    print(f"{'trial':>6} {f'at {gamma:g}':>10} {'clean':>10} {'feasible':>9}  settings")
    for trial in reversed(trials):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in trial["settings"].items())
        print(f"{trial['trial']:6d} {trial['value']:10.4g} {trial['clean']:10.4g} {trial['feasible']!s:>9}  {shown}")
    print(f"The last is the best (validation rows, noise level {gamma:g}). Written to {args.output_dir}")


@contextmanager
def alone(folder: str) -> Iterator[None]:
    """ValueError where another process searches in the folder: each would take the other's trial for a killed one."""
    try:
        held = FileLock(os.path.join(folder, "study.lock")).acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"Another process searches in `output_dir` {folder}: wait until it has finished, or name another folder."
        ) from None
    with held:
        yield


def samplers(args: TuneArguments, ranges: Mapping[str, Sequence[float]], seed: int, made: Sequence[dict]) -> list:
    """One sampler for each run that lacks beside those `made`, so that a search that goes on is the same search."""
    from optuna.samplers import GPSampler, GridSampler

    if args.search == "grid":
        grid = [dict(zip(ranges, values)) for values in product(*ranges.values())]
        random.Random(seed).shuffle(grid)
        left = [{name: [value] for name, value in settings.items()} for settings in grid if settings not in made]
        return [GridSampler(cell) for cell in left[: max(0, args.n_trials - len(made))]]
    # Two trials by chance, then the model decides: with Optuna's own ten, five trials would all be chance.
    return [GPSampler(seed=seed + n, n_startup_trials=2) for n in range(len(made), args.n_trials)]


def check_same_search(study, setup: Mapping[str, Any]) -> None:
    """ValueError where the study in the folder is another search, whose trials do not compare with these."""
    setup = json.loads(json.dumps(setup, default=str))
    saved = {"files": setup["files"]} | study.user_attrs.get("setup", setup)  # earlier versions did not tell them
    if changed := sorted(name for name in {*setup, *saved} if setup.get(name) != saved.get(name)):
        raise ValueError(
            f"The study in `output_dir` was made with other settings ({', '.join(changed)}), and its trials do not "
            "compare with new ones; give the same again, or another folder."
        )
    study.set_user_attr("setup", setup)


def fingerprints(arguments: Mapping[str, Any]) -> dict[str, list[str]]:
    """Argument -> the fingerprints of the files that it names."""
    named = {name: arguments[name] for name in FILES if arguments.get(name)}
    return {name: [fingerprint(each) for each in ([v] if isinstance(v, str) else v)] for name, v in named.items()}


def without_test_rows(data_args: Any) -> Any:
    """The same data without its test rows, so that every report of a command is on validation rows."""
    changes = {name: None for name in ("test_split", "test_file", "test_files") if hasattr(data_args, name)}
    if hasattr(data_args, "without_tests"):  # a published layout's, and the end of the videos trained on
        changes["without_tests"] = True
    return replace(data_args, **changes)


def search_space(tune_args: TuneArguments, args: Any) -> dict[str, Sequence[float]]:
    """The ranges of a search: those given, checked against the settings `args` of the command, or the package's for
    the objective."""
    if tune_args.search_space is None:
        ranges, penalty = (GRID, PENALTY_GRID) if tune_args.search == "grid" else (RANGES, PENALTY_RANGE)
        rate = {"learning_rate": RANGES["learning_rate"]}
        without_duals = {name: ranges[name] for name in ranges if name not in ("dual_learning_rate", "resilience")}
        spaces = {
            "descent": ranges,
            **dict.fromkeys(("hinge", "quadratic"), without_duals | {"penalty_coefficient": penalty}),
            "deep_supervision": {"penalty_coefficient": penalty} | (rate if ranges is RANGES else {}),
        }
        return spaces.get(args.objective, rate)
    whole = whole_settings(args)
    try:
        ranges = {
            name: [(index if whole.get(name) else float)(value) for value in values]
            for name, values in json.loads(tune_args.search_space).items()
        }
    except (ValueError, AttributeError, TypeError):
        ranges = {}
    if not ranges:
        raise ValueError(
            f"`search_space` is {tune_args.search_space!r}; give a JSON mapping of settings to lists of numbers, "
            "whole ones for settings that are."
        )
    if unknown := sorted(ranges.keys() - whole.keys()):
        raise ValueError(f"`search_space` has {', '.join(unknown)}, which is no setting of `{type(args).__name__}`.")
    for name, values in ranges.items():
        check_range(name, values)
        for value in values:
            replace(args, **{name: value})  # raises here what a trial would
    return ranges


def whole_settings(args: Any) -> dict[str, bool]:
    """Which settings of a dataclass are whole numbers."""
    return {setting.name: setting.type in (int, int | None) for setting in fields(args)}


def judge(folder: str, gamma: float) -> dict[str, Any]:
    """What a trial's folder says: metric at `gamma` and without noise, whether it is feasible (see [`Run`])."""
    from ..runs import Run

    found = Run.load(folder)
    values = dict(zip(found.curve.gammas.tolist(), found.curve.mean.tolist()))
    return {
        "value": values[gamma],
        "clean": values[0.0],
        "feasible": found.feasible,
        "greater_is_better": found.curve.greater_is_better,
    }


def rank(trials) -> list:
    """The completed trials, best first: feasible ones (and those without constraints) before infeasible ones."""
    completed = [trial for trial in trials if trial.value is not None]
    return sorted(completed, key=lambda t: (t.user_attrs.get("feasible") is not False, t.value), reverse=True)
