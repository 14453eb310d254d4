"""Searches the settings of a recipe on validation examples, by Optuna.

    python -m recipes.reproduce.tune COMMAND --config RECIPE [--n_trials N] [--search_space JSON] [flags]

Every trial is a whole run of the command (`classify`, ...) in its own folder, judged by the metric at the noise level
of training on the VALIDATION rows; test examples are never read. Optuna keeps the trials in `study.db` in the output
folder, under a name made of their settings: the same search goes on after an interruption (one process at a time),
another one starts from the beginning. Feasible trials rank before infeasible ones; baselines have no constraints.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from datasets.fingerprint import Hasher
from transformers.hf_argparser import HfArg

from hf_descent.commands.arguments import HELP, TRAINING, parse_recipe
from hf_descent.commands.closing import next_step, verdict_of
from hf_descent.data.splits import check_arguments
from hf_descent.evaluation.comparison import Run
from hf_descent.evaluation.scoring import format_table
from hf_descent.files import write_json
from hf_descent.runs import training_arguments
from hf_descent.training.search import hp_space, ranges_for


BASELINES = {"descent_alpha": (0.01, 0.5), "penalty_coefficient": (0.03, 10.0)}


@dataclass
class TuneArguments:
    """How to search."""

    n_trials: int = HfArg(
        default=5,
        help="Number of runs (5 in the paper). A search that was interrupted makes those that are left.",
    )
    search_space: str | None = HfArg(
        default=None,
        help=(
            "Ranges as JSON, such as '{\"learning_rate\": [1e-5, 1e-4]}'. Of three or more values, and of values that "
            "are no numbers, one is taken: '{\"fixed_multipliers\": [[1, 1], [4, 4]]}'. Default: the learning rate, "
            "and those that the objective has of the dual rate, the strength (or alpha) and the penalty coefficient. "
            "All other settings stay as they are, `fixed_multipliers` too."
        ),
    )

    def __post_init__(self):
        check_arguments(self, {"n_trials": 1})


PROGRAM = "python -m recipes.reproduce.tune"


def main(argv: Sequence[str]) -> None:
    """Searches as the words after the module's name say."""
    run(*parse(argv))


def parse(argv: Sequence[str]) -> tuple:
    """The training command, then its own arguments and those of the search."""
    command, *words = argv if argv else [""]
    if command not in TRAINING:
        if not HELP.intersection(argv):
            raise ValueError(
                f"Say what to tune: `{PROGRAM} COMMAND --config RECIPE`; COMMAND is one of {', '.join(TRAINING)}."
            )
        command, words = TRAINING[0], argv
    module = importlib.import_module(f"hf_descent.commands.{command}")
    usage = f"{PROGRAM} {{{','.join(TRAINING)}}} --config RECIPE [--n_trials N] [--search_space JSON] [flags]"
    types = (TuneArguments, *module.argument_types)
    return module, *parse_recipe(types, words, PROGRAM, usage=usage)


def run(module, tune_args: TuneArguments, model_args: Any, data_args: Any, args: Any) -> None:
    """Runs the trials and prints them, the best last; `args.output_dir` gets `trial-<n>` folders and `study.json`."""
    if model_args.with_plain:
        raise ValueError(
            "`with_plain` is for a single training, not for every trial: leave it out."
        )

    gamma = float(args.gamma_train)
    ranges = search_space(tune_args, args)
    for name in ("test_split", "test_file", "test_files"):
        # So that the reports of the command are on validation examples.
        if hasattr(data_args, name):
            data_args = replace(data_args, **{name: None})

    def train(trial) -> float:
        return _train(trial, ranges, gamma, module, model_args, data_args, args)

    setup = {
        "gamma": gamma,
        "search": "bayes",
        "search_space": ranges,
        **asdict(model_args),
    }
    setup.update(asdict(data_args))
    setup.update(training_arguments(args))
    ranked = _search(train, setup, tune_args.n_trials, args)

    trials = [
        {
            "trial": trial.number,
            "value": abs(trial.value),
            **trial.user_attrs,
            "settings": trial.params,
        }
        for trial in ranked
    ]

    study = {"gamma": gamma, "search": "bayes", "trials": trials}
    write_json(os.path.join(args.output_dir, "study.json"), study, indent=1)
    print(f"{table(trials, gamma)}\n\nWritten to {args.output_dir}")
    best = trials[0]
    level = f" at noise level {gamma:g}" if gamma else ""
    print(
        f"Trial {best['trial']} of {len(trials)} is the best, with {best['value']:.4g} on the validation examples"
        f"{level}."
    )
    verdict = verdict_of(os.path.join(args.output_dir, f"trial-{best['trial']}"))
    if verdict is not None:
        print(verdict.headline)
    command = module.__name__.rpartition(".")[2]
    trains = "trains the best settings with another seed; a trial is only one run"
    print(next_step(f"{command} --seed 1 ...", trains))


def _train(
    trial,
    ranges: Mapping[str, Sequence[float]],
    gamma: float,
    module,
    model_args: Any,
    data_args: Any,
    args: Any,
) -> float:
    """A whole run of the command with the settings of a trial; its metric, of which more is better."""
    from optuna import TrialPruned

    folder = os.path.join(args.output_dir, f"trial-{trial.number}")
    settings = hp_space(trial, ranges)
    trial_args = replace(model_args, overwrite_output_dir=True)
    trial_args.searched = True
    try:
        own_args = args.from_training_arguments(
            args, output_dir=folder, eval_gammas=sorted({0.0, gamma}), **settings
        )
    except ValueError as error:  # values that do not go together
        raise TrialPruned(str(error)) from error

    module.run(trial_args, data_args, own_args)

    value, facts = judge(folder, gamma)
    for name, fact in facts.items():
        trial.set_user_attr(name, fact)
    if not math.isfinite(value):
        raise TrialPruned("the metric is not finite")
    return value if facts["greater_is_better"] else -value


def _search(
    train: Callable[[Any], float], setup: Mapping[str, Any], n_trials: int, args: Any
) -> list:
    """The trials of a study that goes on until it has `n_trials`, best first; ValueError where none has a metric."""
    import optuna

    folder = args.output_dir
    os.makedirs(folder, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{os.path.join(folder, 'study.db')}",
        study_name=f"bayes {Hasher.hash(setup)[:12]}",
        direction="maximize",
        load_if_exists=True,
    )
    if not study.trials and any(name.startswith("trial-") for name in os.listdir(folder)):
        raise ValueError(
            f"`output_dir` {folder!r} holds the trials of another search: name another folder."
        )
    state = optuna.trial.TrialState
    for killed in study.get_trials(deepcopy=False, states=(state.RUNNING,)):
        # Or a sampler would keep away from its settings.
        study.tell(killed.number, state=state.FAIL)

    # A killed or failed run is made again.
    finished = study.get_trials(deepcopy=False, states=(state.COMPLETE, state.PRUNED))
    for number in range(len(finished), n_trials):
        # A sampler for each run, so that a search that goes on is the same search. Two trials by chance, then the
        # model decides: with Optuna's own ten, five trials would all be chance.
        study.sampler = optuna.samplers.GPSampler(seed=args.seed + number, n_startup_trials=2)
        study.optimize(train, n_trials=1)
    ranked = rank(study.trials)
    if not ranked:
        raise ValueError(
            f"The metric of none of the {len(study.trials)} trials is finite; try lower learning rates."
        )

    return ranked


def table(trials: Sequence[Mapping[str, Any]], gamma: float) -> str:
    """The trials, best first, as a table, the best last."""
    rows = [
        ["trial", f"at noise {gamma:g}", "without noise", "constraints met", *trials[0]["settings"]]
    ]
    for trial in reversed(trials):
        is_met = {True: "yes", False: "no", None: ""}[trial["feasible"]]
        numbers = [trial["value"], trial["clean"], is_met, *trial["settings"].values()]
        cells = [f"{number:.4g}" if type(number) is float else str(number) for number in numbers]
        rows.append([str(trial["trial"]), *cells])
    return format_table(rows)


def search_space(tune_args: TuneArguments, args: Any) -> dict[str, Sequence[float]]:
    """The ranges of a search: those given, checked against the settings `args`, or the package's for the objective."""
    if tune_args.search_space is None:
        return _default_ranges(args)
    try:
        ranges = json.loads(tune_args.search_space)
    except ValueError:
        ranges = None
    is_mapping = isinstance(ranges, dict) and bool(ranges)
    if not is_mapping or not all(isinstance(values, list) for values in ranges.values()):
        raise ValueError(
            f"`search_space` is {tune_args.search_space!r}; give a JSON mapping of settings to lists."
        )

    for name, values in ranges.items():
        for value in values:
            args.from_training_arguments(args, **{name: value})  # raises here what a trial would

    return ranges


def _default_ranges(args: Any) -> dict[str, Sequence[float]]:
    names = ["learning_rate"]
    objective = args.objective_class
    if objective.moves_multipliers:
        names.append("dual_learning_rate")
    if objective.takes_coefficient:
        names.append("penalty_coefficient")
    can_meet_rows = objective.moves_multipliers or not objective.is_linear
    if can_meet_rows and args.layer_rows is not None:
        names.append("descent_strength" if args.follows else "descent_alpha")
    ranges = ranges_for(args)
    ranges.update(BASELINES)
    return {name: ranges[name] for name in names}


def judge(folder: str, gamma: float) -> tuple[float, dict[str, Any]]:
    """The metric at `gamma` in a trial's folder, and the metric without noise, feasibility (see [`Run`]) and order."""
    trained = Run.load(folder)
    curve = trained.curve
    values = dict(zip(curve.gammas.tolist(), curve.mean.tolist()))
    facts = {
        "clean": values[0.0],
        "feasible": trained.feasible if trained.was_constrained else None,
        "greater_is_better": curve.greater_is_better,
    }
    return values[gamma], facts


def rank(trials) -> list:
    """The completed trials, best first: feasible ones (and those without constraints) before infeasible ones."""

    def worth(trial) -> tuple[bool, float]:
        return trial.user_attrs.get("feasible") is not False, trial.value

    completed = [trial for trial in trials if trial.value is not None]
    return sorted(completed, key=worth, reverse=True)


if __name__ == "__main__":
    main(sys.argv[1:])
