"""From ways of training to `hf-descent` commands: what is finished is not run again, what was interrupted goes on."""

import dataclasses
import importlib
import json
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_descent import cli
from hf_descent.files import atomic_write
from hf_descent.training.checkpoints import newest_complete_checkpoint

from .facts import digest, facts, fingerprints
from .scales import ARMS, VIDEO, Scale
from .tables import Panel, Way, searched


RECIPES = Path(__file__).parent.parent


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        scale ([`Scale`]): the size.
        folder (`Path`): for runs and results.
        models, data (mapping): name -> path, or paths (training, test and perhaps validation), in place of the Hub.
        seeds (`tuple[int, ...]`): of the training; the search has its recipe's.
        n_trials (`int`): runs of each search; 0 takes the recipes' settings.
        settings (mapping): set over everything else but what an ablation fixes, and not searched: in every run, or,
            as "ARM.NAME", in that arm's.
        panels (`tuple[str, ...]`): only those with one of these as a part, or parts, of their name; empty for all.
    """

    scale: Scale
    folder: Path
    models: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    n_trials: int = 5
    settings: Mapping[str, Any] = field(default_factory=dict)
    panels: tuple[str, ...] = ()

    def run_folder(self, found: Way, seed: int) -> Path:
        return self.folder / found.name / f"seed-{seed}"

    def study_folder(self, found: Way) -> Path:
        return self.folder / searched(self.scale, found).name / "study"

    def set_for(self, found: Way) -> dict[str, Any]:
        """What is set in this way of training; an arm's own value goes before that of all."""
        given = [(*name.rpartition("."), value) for name, value in self.settings.items()]
        return {name: value for of in ("", found.arm) for arm, _, name, value in given if arm == of}

    def missing(self, found: Way) -> str | None:
        """What the command line would have to give for this way of training, where it does not."""
        if found.data not in self.data and (found.data in VIDEO or self.scale.needs_paths):
            return f"--data {found.data}"
        if found.model not in self.models and found.model not in ("ut", "dust") and self.scale.needs_paths:
            return f"--model {found.model}"
        return None


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        words (`list[str]`): after `hf-descent`.
        folder (`Path`): where its record `<kind>.job.json` lies.
        kind (`str`): "tune", "train", "evaluate" or the name of the answers.
        files (`list[str]`): the files that it reads, with the beginning of their SHA-256.
    """

    words: list[str]
    folder: Path
    kind: str
    files: list[str]

    @property
    def record(self) -> Path:
        return self.folder / f"{self.kind}.job.json"

    def __str__(self) -> str:
        return shlex.join(["hf-descent", *self.words])

    def finished(self) -> bool:
        """Whether it ran to its end, and an evaluation's results are still its own; ValueError where the folder holds
        what another command made: checkpoints, trials or a model. Evaluations and answers are just made again."""
        record = self.last()
        if self.is_that_of(record):
            return record["finished"] and ("measured" not in record or record["measured"] == self.measured())
        if record and self.kind in ("tune", "train") and (record["finished"] or self.has_begun()):
            made, would_be = (shlex.join([*each["words"], *each.get("files", ())]) for each in (record, vars(self)))
            raise ValueError(
                f"{self.folder} was made by `{made}`, and this would be `{would_be}`: remove that folder, or name "
                "another `--output_dir`."
            )
        return False

    def last(self) -> dict[str, Any]:
        """What the record says; empty where nothing was started yet."""
        return json.loads(self.record.read_text()) if self.record.is_file() else {}

    def is_that_of(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is of this command and these files. One of an earlier version says less of the files: it
        lacks the last ones, or the end of what is said of each."""
        if self.kind == "evaluate" and record.get("files") is None:
            return False  # it may be of any rows
        same = (now.startswith(then) for then, now in zip(record.get("files", ()), self.files))
        return record.get("words") == self.words and all(same)

    def has_begun(self) -> bool:
        """Whether an unfinished command left something to go on from; a failed start did not, and binds no other."""
        if self.kind == "tune":
            return any(self.folder.glob("trial-*/noise_curve.json"))
        return "--resume_from_checkpoint" in self.resumption()

    def run(self) -> None:
        """Runs the command from where it was; its record says with what it was last started and, in the end, how long
        that took."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.kind.startswith("answers"):  # `generate` writes over none
            (self.folder / f"{self.kind}.json").unlink(missing_ok=True)
        record = {"words": self.words, "files": self.files, "finished": False, **facts()}
        _write(self.record, record)
        start = time.perf_counter()
        cli.main([*self.words, *self.resumption()])
        record |= {"finished": True, "seconds": round(time.perf_counter() - start, 1)}
        if self.kind == "evaluate":
            record["measured"] = self.measured()
        # Only now: until the record says so, a run that is killed goes on from its checkpoint.
        _write(self.record, record)
        if self.kind in ("tune", "train"):
            for path in [*self.folder.rglob("checkpoint-*"), *self.folder.glob("trial-*/*.safetensors")]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def measured(self) -> str:
        """Tells the results in the folder from those of an evaluation by hand."""
        return digest(sorted([*self.folder.glob("noise_curve.json"), *self.folder.glob("layer_profile*.json")]))

    def resumption(self) -> list[str]:
        """Flags by which a training run goes on from its last whole checkpoint."""
        if self.kind != "train":
            return []
        try:
            return ["--resume_from_checkpoint", newest_complete_checkpoint(str(self.folder))]
        except ValueError:  # there is none
            return ["--overwrite_output_dir", "true"]


def jobs(panels: Sequence[Panel], options: Options, answers: bool = False, search_only: bool = False) -> Iterator[Job]:
    """All commands of the panels in order, each once. A training command is made only when it is asked for, since it
    takes its settings from the search before it."""
    ways = list(dict.fromkeys(found for panel in panels for group in panel.groups.values() for found in group))
    for found in dict.fromkeys(searched(options.scale, found) for found in ways):
        if search_space(found, options):  # else trials would differ in nothing
            yield tune_job(found, options)
    if search_only:
        return
    for seed in options.seeds:  # outside, so that what is there after an interruption can be compared
        for found in ways:
            yield train_job(found, seed, options)
            yield evaluate_job(found, seed, options)
    if answers:
        for found in ways:
            for gamma in (0.0, options.scale.gammas["sft"][-1]):
                yield answer_job(found, gamma, options)


def files(found: Way, options: Options, *more: str) -> list[str]:
    """The data and the model that a way of training is given by path, and what `more` data names, each with a
    fingerprint."""
    given = {found.data: options.data.get(found.data, ())}
    if found.model in options.models:
        given[found.model] = [options.models[found.model]]
    given |= {name: options.data.get(name, ()) for name in more}
    return [f"{name}: {file}" for name, each in fingerprints(given).items() for file in each]


def recipe(found: Way) -> str:
    path = RECIPES / found.spec.recipes[found.data] / f"{ARMS[found.arm][0]}.yaml"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def flags(found: Way, options: Options) -> dict[str, Any]:
    """What is set beside the recipe, in any run of this way of training; later ones win."""
    given: dict[str, Any] = dict(options.scale.settings[found.spec.command])
    given |= {"noise_gamma": found.gamma, "objective": ARMS[found.arm][1], **found.spec.settings}
    if found.layers is not None:
        given[found.spec.depth] = found.layers
    if found.model in options.models:
        given["model_name_or_path"] = options.models[found.model]
    paths = list(options.data.get(found.data, ()))
    if found.data not in VIDEO:
        given |= dict(zip(("train_file", "test_file", "validation_file"), paths))
    else:
        given |= dict(zip(("train_files", "test_files"), (path.split(",") for path in paths)))
    return given | options.set_for(found)


def tune_job(found: Way, options: Options) -> Job:
    folder = options.study_folder(found)
    given = flags(found, options) | {"n_trials": options.n_trials, "output_dir": folder}
    given["search_space"] = json.dumps(search_space(found, options))
    return Job(
        ["tune", found.spec.command, "--config", recipe(found), *words(given)], folder, "tune", files(found, options)
    )


def search_space(found: Way, options: Options) -> dict[str, tuple[float, float]]:
    """What is searched, with its ranges: nothing that `--set` fixes for this arm, nor anything without trials."""
    if not options.n_trials:
        return {}
    space = {"learning_rate": found.spec.learning_rates, **options.scale.search[found.spec.command][found.arm]}
    return {name: values for name, values in space.items() if name not in options.set_for(found)}


def train_job(found: Way, seed: int, options: Options) -> Job:
    folder = options.run_folder(found, seed)
    given = flags(found, options) | chosen(found, options) | dict(found.overrides)
    if found.spec.command != "denoise":  # which reports its RMSE on validation rows at these levels
        # `evaluate` follows. A level makes a run without noise measure sigma before training, as those with noise do.
        given["eval_gammas"] = "[]" if found.gamma else "[0.0]"
    given |= {"seed": seed, "output_dir": folder}
    return Job([found.spec.command, "--config", recipe(found), *words(given)], folder, "train", files(found, options))


def evaluate_job(found: Way, seed: int, options: Options) -> Job:
    """All runs of a data set are evaluated at the same levels on the same rows, batches and noise."""
    scale, command, folder = options.scale, found.spec.command, options.run_folder(found, seed)
    given = {name: value for name, value in flags(found, options).items() if name in same_for_all(command)}
    levels = scale.gammas[command]
    trained = (found.gamma, levels[-1]) if found.gamma else levels  # runs without noise stand beside all others
    given |= {
        "eval_gammas": scale.eval_gammas[command],
        "profile_gammas": sorted({0.0, *trained, scale.eval_gammas[command][-1]}),
        "draws": scale.draws,
    }
    return Job(
        ["evaluate", str(folder), "--config", recipe(found), *words(given)], folder, "evaluate", files(found, options)
    )


def same_for_all(command: str) -> set[str]:
    """Settings that say which rows and batches are evaluated."""
    data_arguments = importlib.import_module(f"hf_descent.commands.{command}").argument_types[1]
    return {each.name for each in dataclasses.fields(data_arguments)} | {"per_device_eval_batch_size"}


def answer_job(found: Way, gamma: float, options: Options) -> Job:
    """The answers of the first seed's model."""
    folder = options.run_folder(found, options.seeds[0])
    given = {"gamma": gamma, "output": folder / f"answers-{gamma:g}.json", "prompt_format": "alpaca"}
    if "alpaca_eval" in options.data:
        given["instructions"] = options.data["alpaca_eval"][0]
    if options.scale.answers is not None:
        given |= {"max_samples": options.scale.answers, "max_new_tokens": 128}
    read = files(found, options, "alpaca_eval")
    return Job(["generate", str(folder), *words(given)], folder, f"answers-{gamma:g}", read)


def chosen(found: Way, options: Options) -> dict[str, Any]:
    """The settings of the best trial on validation rows; words that say so where the search is still to be made."""
    space, path = search_space(found, options), options.study_folder(found) / "study.json"
    if space and path.is_file():
        return json.loads(path.read_text())["trials"][0]["settings"]
    return dict.fromkeys(space, f"BEST_OF:{path}")


def words(given: Mapping[str, Any]) -> list[str]:
    """Flags of a command line."""
    found = []
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        found += [f"--{name}", *(str(each).lower() if isinstance(each, bool) else str(each) for each in values)]
    return found


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with atomic_write(path) as file:
        json.dump(values, file, indent=1)
