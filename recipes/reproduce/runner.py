"""From ways of training to commands: what is finished is not run again, what was interrupted goes on."""

import contextlib
import dataclasses
import importlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_descent import cli
from hf_descent.files import write_json
from hf_descent.training.checkpoints import newest_complete_checkpoint

from . import generate, tune
from .experiments import ARMS, MODELS, Panel, Way, searched


RECIPES = Path(__file__).parent.parent
# The commands that are modules of this folder; the others are those of `hf-descent`.
OWN_COMMANDS = {"tune": tune, "generate": generate}


def parse(words: Sequence[str]) -> tuple:
    """The arguments of a command; ValueError where it is wrong."""
    name, *flags = words
    if name in OWN_COMMANDS:
        return OWN_COMMANDS[name].parse(flags)
    return cli.parse_arguments(words)[1]


def run_command(words: Sequence[str]) -> None:
    """Runs a command."""
    name, *flags = words
    if name in OWN_COMMANDS:
        OWN_COMMANDS[name].main(flags)
    else:
        cli.main(words)


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        scale (mapping): one of `SCALES`.
        folder (`Path`): for runs and results.
        models, data (mapping): name -> path, or paths (training, test and perhaps validation), in place of the Hub.
        seeds (`tuple[int, ...]`): of the training; the search has its recipe's.
        n_trials (`int`): runs of each search; 0 takes the recipes' settings.
        settings (mapping): set over everything else but an ablation's own, and not searched: in every run, or, as
            "ARM.NAME", in that arm's.
    """

    scale: Mapping[str, Any]
    folder: Path
    models: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, Sequence[str]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    n_trials: int = 5
    settings: Mapping[str, Any] = field(default_factory=dict)

    def run_folder(self, way: Way, seed: int) -> Path:
        return self.folder / way.name / f"seed-{seed}"

    def results_folder(self, way: Way, seed: int) -> Path:
        return self.folder / way.name / "test" / f"seed-{seed}"

    def study_folder(self, way: Way) -> Path:
        return self.folder / searched(way, self.scale).name / "study"

    def set_for(self, way: Way) -> dict[str, Any]:
        """What is set in this way of training; an arm's own value goes before that of all."""
        given = [(*name.rpartition("."), value) for name, value in self.settings.items()]
        return {name: value for of in ("", way.arm) for arm, _, name, value in given if arm == of}

    def missing(self, way: Way) -> str | None:
        """What the command line would have to give for this way of training, where it does not."""
        if way.data not in self.data and (way.command == "denoise" or self.scale["needs_paths"]):
            return f"--data {way.data}"
        if (
            way.model not in self.models
            and way.model not in ("ut", "dust")
            and self.scale["needs_paths"]
        ):
            return f"--model {way.model}"
        return None


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        words (`list[str]`): the command and its flags.
        folder (`Path`): of the run or the search, where its record `<kind>.job.json` lies.
        kind (`str`): "tune", "train", "evaluate" or the name of the answers.
    """

    words: list[str]
    folder: Path
    kind: str

    def __str__(self) -> str:
        name, *flags = self.words
        if name in OWN_COMMANDS:
            return shlex.join(["python", "-m", f"recipes.reproduce.{name}", *flags])
        return shlex.join(["hf-descent", *self.words])

    @property
    def path(self) -> Path:
        return self.folder / f"{self.kind}.job.json"

    def record(self) -> dict[str, Any]:
        """Of its last start: words, whether it ended, where and with what it was made; empty before the first."""
        return json.loads(self.path.read_text()) if self.path.is_file() else {}

    def finished(self) -> bool:
        """Whether this very command ran to its end; ValueError where the folder holds another one's model or trials.
        Evaluations and answers are just made again."""
        record = self.record()
        if (
            record.get("finished")
            and record["words"] != self.words
            and self.kind in ("tune", "train")
        ):
            raise ValueError(
                f"{self.folder} was made by `{shlex.join(record['words'])}`, and this would be "
                f"`{shlex.join(self.words)}`: remove that folder, or name another `--output_dir`."
            )
        return record.get("finished", False) and record["words"] == self.words

    def run(self) -> None:
        """Runs the command, a training from its last whole checkpoint on."""
        more = []
        if self.kind == "train":
            more = ["--overwrite_output_dir", "true"]
            if self.record().get("words") == self.words:
                with contextlib.suppress(ValueError):  # there is none
                    more = [
                        "--resume_from_checkpoint",
                        newest_complete_checkpoint(str(self.folder)),
                    ]
        elif self.kind.startswith("answers"):  # `generate` writes over none
            (self.folder / f"{self.kind}.json").unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {"words": self.words, "finished": False, **facts()}
        self._write(record)
        start = time.perf_counter()
        run_command([*self.words, *more])
        self._write(record | {"finished": True, "seconds": round(time.perf_counter() - start, 1)})
        if self.kind in ("tune", "train"):
            for path in [
                *self.folder.rglob("checkpoint-*"),
                *self.folder.glob("trial-*/*.safetensors"),
            ]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _write(self, record: Mapping[str, Any]) -> None:
        write_json(self.path, record, indent=1)


def facts() -> dict[str, Any]:
    """Commit (with a plus where the package or the recipes differ from it), date, versions and machine."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", RECIPES, *words], capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", ".", "../hf_descent")
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return {
        "commit": (git("rev-parse", "--short", "HEAD") or "not a checkout")
        + ("+" if changed else ""),
        "date": time.strftime("%Y-%m-%d"),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "machine": machine,
    }


# ---- the commands ----


def jobs(panels: Sequence[Panel], options: Options) -> Iterator[Job]:
    """All commands of the panels in order, each once. A training command is made only when it is asked for, since it
    takes its settings from the search before it."""
    ways = list(dict.fromkeys(way for panel in panels for way in panel.ways.values()))
    for way in dict.fromkeys(searched(way, options.scale) for way in ways):
        if search_space(way, options):  # else trials would differ in nothing
            yield tune_job(way, options)
    for (
        seed
    ) in options.seeds:  # outside, so that what is there after an interruption can be compared
        for way in ways:
            yield train_job(way, seed, options)
            yield evaluate_job(way, seed, options)
    for way in ways:
        if way.command == "sft":
            yield from (
                answer_job(way, gamma, options)
                for gamma in (0.0, options.scale[way.command]["gammas"][-1])
            )


def flags(way: Way, options: Options) -> dict[str, Any]:
    """What is set beside the recipe, in any run of this way of training; later ones win.

    Raises:
        ValueError: a setting is given that tells the runs of a table apart.
    """
    model, paths = MODELS[way.model], list(options.data.get(way.data, ()))
    own = {"noise_gamma": way.gamma, "objective": ARMS[way.arm][1]}
    if way.layers is not None:
        own[model["depth"]] = way.layers
    if way.model in options.models:
        own["model_name_or_path"] = options.models[way.model]
    if way.command != "denoise":
        own |= dict(zip(("train_file", "test_file", "validation_file"), paths))
    else:
        own |= dict(zip(("train_files", "test_files"), (path.split(",") for path in paths)))
    if fixed := {*own, "seed", "output_dir", "eval_gammas"} & options.set_for(way).keys():
        raise ValueError(
            f"`--set {min(fixed)}=...`: leave it out; the table and the other flags say which runs there are."
        )
    return {
        **options.scale[way.command]["settings"],
        **own,
        **model.get("settings", {}),
        **options.set_for(way),
    }


def search_space(way: Way, options: Options) -> dict[str, Sequence[float]]:
    """What is searched, with its ranges: nothing that `--set` fixes for this arm, nor anything without trials."""
    if not options.n_trials:
        return {}
    space = {"learning_rate": MODELS[way.model]["learning_rate"]}
    space |= options.scale[way.command]["search"].get(way.arm, {})
    return {name: values for name, values in space.items() if name not in options.set_for(way)}


def study(way: Way, options: Options) -> dict[str, Any]:
    """The search's trials on validation rows, the best first; empty where none is asked for, or made yet."""
    path = options.study_folder(way) / "study.json"
    return json.loads(path.read_text()) if search_space(way, options) and path.is_file() else {}


def same_for_all(command: str) -> set[str]:
    """Settings that say which rows and batches are evaluated."""
    data_arguments = importlib.import_module(f"hf_descent.commands.{command}").argument_types[1]
    return {each.name for each in dataclasses.fields(data_arguments)} | {
        "per_device_eval_batch_size"
    }


def tune_job(way: Way, options: Options) -> Job:
    folder = options.study_folder(way)
    given = flags(way, options) | {"n_trials": options.n_trials, "output_dir": folder}
    given["search_space"] = json.dumps(search_space(way, options))
    return Job(["tune", way.command, "--config", recipe(way), *words(given)], folder, "tune")


def train_job(way: Way, seed: int, options: Options) -> Job:
    """With the settings of the best trial; without these as long as the search is still to be made."""
    folder, trials = (
        options.run_folder(way, seed),
        study(way, options).get("trials", [{"settings": {}}]),
    )
    given = flags(way, options) | trials[0]["settings"] | dict(way.changes)
    if way.command != "denoise":  # which reports its RMSE on validation rows at these levels
        # `evaluate` follows. A level makes a run without noise measure sigma before training, as those with noise do.
        given["eval_gammas"] = "[]" if way.gamma else "[0.0]"
    given |= {"seed": seed, "output_dir": folder}
    return Job([way.command, "--config", recipe(way), *words(given)], folder, "train")


def evaluate_job(way: Way, seed: int, options: Options) -> Job:
    """All runs of a data set are evaluated at the same levels on the same rows, batches and noise."""
    scale, folder = options.scale[way.command], options.run_folder(way, seed)
    given = {
        name: value
        for name, value in flags(way, options).items()
        if name in same_for_all(way.command)
    }
    levels, last = scale["gammas"], scale["eval_gammas"][-1]
    trained = (
        (way.gamma, levels[-1]) if way.gamma else levels
    )  # runs without noise stand beside all others
    given |= {"eval_gammas": scale["eval_gammas"], "profile_gammas": sorted({0.0, *trained, last})}
    given |= {"draws": scale["draws"], "results_dir": options.results_folder(way, seed).parent}
    return Job(
        ["evaluate", str(folder), "--config", recipe(way), *words(given)], folder, "evaluate"
    )


def answer_job(way: Way, gamma: float, options: Options) -> Job:
    """The answers of the first seed's model."""
    folder, kind = options.run_folder(way, options.seeds[0]), f"answers-{gamma:g}"
    given = {"gamma": gamma, "output": folder / f"{kind}.json", "prompt_format": "alpaca"}
    given |= options.scale[way.command].get("answers", {})
    if "alpaca_eval" in options.data:
        given["instructions"] = options.data["alpaca_eval"][0]
    return Job(["generate", str(folder), *words(given)], folder, kind)


def recipe(way: Way) -> str:
    path = RECIPES / MODELS[way.model]["recipes"][way.data] / f"{ARMS[way.arm][0]}.yaml"
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def words(given: Mapping[str, Any]) -> list[str]:
    """Flags of a command line."""
    found = []
    for name, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        found += [
            f"--{name}",
            *(str(each).lower() if isinstance(each, bool) else str(each) for each in values),
        ]
    return found
