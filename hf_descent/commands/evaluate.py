"""`hf-descent evaluate MODEL`: how good a model is under noise and at every layer, on held-out examples.

The model's architecture says which task it is. The data comes from flags, from a recipe (`--config`), or else from the
record of the model's training. All models see the same noise on the same data, so that `hf-descent compare` can pair
them. Results go into the model's folder: `noise_curve.json`, `layer_profile.json`, and for a constrained run
`verdict.json`; the last two also at noise levels (`..._gamma_<level>.json`). A results folder elsewhere also gets the
model's `descent_config.json`.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedModel
from transformers.hf_argparser import HfArg
from transformers.trainer_pt_utils import LabelSmoother

from ..configs import DescentArguments, upper_level
from ..constraints.arguments import LARGEST
from ..constraints.objectives import objective_class
from ..constraints.problem import DescentProblem
from ..constraints.state import DualState
from ..data.alpaca import AlpacaArguments, completion_labels, load_alpaca
from ..data.denoising import load_denoiser
from ..data.splits import check_arguments
from ..data.text import DataArguments, load_for_model
from ..data.video import VideoArguments, load_clips
from ..evaluation import LayerProfile, layer_profiles, noise_curve
from ..evaluation.intervals import check_confidence
from ..evaluation.price import Reference
from ..evaluation.scoring import Evaluation
from ..evaluation.side_by_side import plain_folder, plain_profile
from ..loading import architecture_of, best_device, load_model, load_tokenizer, position_limit
from ..readout.labels import IGNORE_INDEX
from ..readout.pooling import reads_one_token
from ..runs import RunFolder, tables
from ..training.origin import scoring_by
from ..training.references import references_of
from .arguments import absolute, parse_model, record_of
from .closing import next_step


@dataclass
class EvaluateArguments:
    """What to measure."""

    eval_gammas: list[float] = HfArg(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0],
        help="Noise levels at which the whole model is measured.",
    )
    draws: int = HfArg(default=3, help="How often the noise is drawn at each level.")
    profile_gammas: list[float] | None = HfArg(
        default=None,
        help="Noise levels at which every layer is measured. Default: 0, that of the training, and the largest of "
        "`eval_gammas`.",
    )
    confidence: float = HfArg(default=0.95, help="Confidence level of the verdicts.")
    per_device_eval_batch_size: int = HfArg(
        default=32, help="Examples in a batch. Another size draws other noise."
    )
    results_dir: str | None = HfArg(
        default=None,
        help="Folder that gets a folder of the model's name for the results. Default: the model's own folder, "
        "whose former results they replace.",
    )

    def __post_init__(self):
        check_confidence(self.confidence)
        limits = {
            "draws": 1,
            "per_device_eval_batch_size": 1,
            "eval_gammas": (0, LARGEST),
            "profile_gammas": (0, LARGEST),
        }
        check_arguments(self, limits)


@dataclass
class Task:
    """A model with the held-out examples that it is measured on."""

    model: PreTrainedModel
    rows: Dataset
    also_selected: bool  # see `Certificate`
    settings: dict[str, Any]  # of `noise_curve` and `layer_profiles`


def classification_task(name: str, args: DataArguments) -> Task:
    """Accuracy of a text classifier."""
    tokenizer = load_tokenizer(name)
    model = load_model(name)
    splits = load_for_model(args, tokenizer, model)
    split, also_selected = _held_out(splits, name, args)
    return Task(model, splits[split], also_selected, {"processing_class": tokenizer})


def language_task(name: str, args: AlpacaArguments) -> Task:
    """Mean token accuracy of a causal language model on the completions of held-out prompts."""
    summary = RunFolder(name).summary
    trained = summary.get("arguments", {})
    truncation = trained.get("truncation_mode", "keep_start")
    if trained.get("assistant_only_loss") or truncation != "keep_start":
        raise ValueError(
            "The labels of `assistant_only_loss` or `truncation_mode` need `trainer.evaluate_layers`."
        )

    tokenizer = load_tokenizer(name)
    model = load_model(name)
    splits = load_alpaca(args, tokenizer)
    split, also_selected = _held_out(splits, name, args)

    limits = [position_limit(model), record_of(name).get("max_seq_length")]
    limit = min((limit for limit in limits if limit), default=None)
    rows = splits[split].map(
        completion_labels,
        fn_kwargs={"tokenizer": tokenizer, "limit": limit},
        remove_columns=splits[split].column_names,
    )
    if summary.get("completion_only_loss", trained.get("completion_only_loss")) is False:
        rows = rows.map(lambda row: {"labels": row["input_ids"]})
    answered = rows.filter(_has_labels)
    if len(answered) < len(rows):
        print(
            f"Dropped {len(rows) - len(answered)} of the {len(rows)} {split} examples: their prompts leave no room "
            f"for an answer in {limit} tokens."
        )

    return Task(
        model, answered, also_selected, {"data_collator": DataCollatorForSeq2Seq(tokenizer)}
    )


def _has_labels(row: Mapping[str, Any]) -> bool:
    return any(label != IGNORE_INDEX for label in row["labels"])


def denoising_task(name: str, args: VideoArguments) -> Task:
    """RMSE of a denoiser on the 0-255 scale."""
    model, task = load_denoiser(name)
    clips = load_clips(args)
    split, also_selected = _held_out(clips, name, args)
    rows = args.draw("test", task.rows(clips[split]))
    settings = {"metric": "rmse", "scale": 255 / task.pixel_range, "data_collator": task.collate}
    return Task(model, rows, also_selected, settings)


@dataclass
class InstructionArguments(AlpacaArguments):
    """Where the instructions come from: no data set but the training's own, or one that is named."""

    dataset_name: str | None = HfArg(
        default=None, help="Data set on the Hub, unless `train_file` is given."
    )


# A draw of validation examples from training examples depends on these.
DRAWS = {"split_seed", "split_by", "validation_split_percentage", "validation_percentage"}
# Ending of the architecture's name -> (arguments of its data, how to build the task).
TASKS = {
    "ForSequenceClassification": (DataArguments, classification_task),
    "ForCausalLM": (InstructionArguments, language_task),
    "LMHeadModel": (InstructionArguments, language_task),
    "Denoising": (VideoArguments, denoising_task),
}


def task_of(model: str) -> tuple[type, Any]:
    """The data arguments and the builder for a model's architecture; ValueError if there is none."""
    architecture = architecture_of(model)
    for ending, task in TASKS.items():
        if architecture.endswith(ending):
            return task
    raise ValueError(
        f"{model} is a {architecture}; give architectures that end in {', '.join(TASKS)}, or a script."
    )


def parse(argv: Sequence[str], prog: str, description: str) -> tuple[str, EvaluateArguments, Any]:
    """The model, what is measured, and the data of the model's task."""
    data_arguments = DataArguments
    if argv and not argv[0].startswith("-"):
        data_arguments, _ = task_of(argv[0])
    return parse_model((EvaluateArguments, data_arguments), argv, prog, description)


def run(name: str, args: EvaluateArguments, data_args: Any) -> None:
    """Evaluate the model; see the module."""
    folder = _results_folder(name, args.results_dir)
    os.makedirs(folder, exist_ok=True)  # raises here what it would after the measurement
    _, task_for = task_of(name)
    results, headline = evaluate(task_for(name, data_args), args, name, folder)
    print(f"{results}\n\nWritten to {folder}")
    if headline is not None:
        print(headline)
        if "price unknown" in headline and os.path.isdir(plain_folder(name)):
            # Trained by a script, or in other batches: its evaluation is of other data than this one.
            purpose = "with the same flags measures plain training; repeat this command then for the price"
            print(next_step(f"evaluate {plain_folder(name)}", purpose))
    print(next_step(f"card {folder}", "writes the model card"))


def _results_folder(name: str, results_dir: str | None) -> str:
    """The folder for the results of the model `name`; never outside `results_dir`, also for ".."."""
    if results_dir is not None:
        return os.path.join(results_dir, os.path.basename(os.path.abspath(name)))
    if not os.path.isdir(name):
        raise ValueError(f"{name} is no local folder; say where its results go by `--results_dir`.")
    return name


def evaluate(task: Task, args: EvaluateArguments, name: str, folder: str) -> tuple[str, str | None]:
    """Measure the model of `task`, saved in `name`, and write the results into `folder`. Returns them as tables, and
    the verdict in one line if there are constraints."""
    summary = RunFolder(name).summary
    loss = summary.get("layer_loss_fn")
    if loss:
        raise ValueError(
            f"{name} was trained with the loss `{loss}`, which no file holds: use `evaluate_layers` in a script."
        )

    run = RunFolder(folder)
    run.remove_evaluations()  # before anything is written: a killed call would leave them beside new ones
    if os.path.abspath(folder) != os.path.abspath(name):
        run.write_summary(summary)  # by which `hf-descent compare` tells seeds from settings

    task.model.to(best_device())
    settings = _settings(task, args, summary)
    gamma_train = upper_level(summary.get("noise_gamma"))
    curve = noise_curve(
        task.model,
        task.rows,
        args.eval_gammas,
        gamma_train=gamma_train,
        draws=args.draws,
        **settings,
    )
    results = {"noise_curve": curve}
    headline = None
    for profile in _profiles(task, args, settings, name, gamma_train):
        results[f"layer_profile{profile.ending}"] = profile
        if profile.problem is not None:
            verdict = profile.certificate(args.confidence)
            results[f"verdict{profile.ending}"] = verdict
            if profile.gamma == (0.0 if gamma_train is None else gamma_train):
                headline = verdict.headline

    run.write(results)
    return tables(results), headline


def _settings(task: Task, args: EvaluateArguments, summary: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that curves and profiles have in common."""
    settings = {
        **task.settings,
        "batch_size": args.per_device_eval_batch_size,
        "progress": True,
    }
    epsilon = summary.get("arguments", {}).get("label_smoothing_factor")
    if epsilon:  # as in training, whose targets the verdict is about
        settings["layer_loss_fn"] = LabelSmoother(epsilon)
    return settings


def _profiles(
    task: Task,
    args: EvaluateArguments,
    settings: Mapping[str, Any],
    name: str,
    gamma_train: float | None,
) -> list[LayerProfile]:
    """The profiles at each noise level. If the run in `name` has a problem, with the facts that a verdict tells."""
    summary = RunFolder(name).summary
    problem = DescentProblem.saved_in(summary)
    gammas = args.profile_gammas
    if not gammas:
        gammas = [0.0, 0.0 if gamma_train is None else float(gamma_train), max(args.eval_gammas)]
    levels = sorted(set(map(float, gammas)))
    profiles = layer_profiles(task.model, task.rows, levels, problem=problem, **settings)
    for profile in profiles:
        if not profile.gamma:  # as they were read
            profile.references = _earlier_last_layer(task, settings, summary)

    if problem is None:
        problem = stated_problem(summary, profiles)
    if problem is None:
        return profiles

    for profile in profiles:
        profile.problem = problem.state_dict()
        profile.facts = _facts(task, summary, problem)
        plain = plain_profile(name, summary, profile)
        if plain is not None:
            profile.keep_plain(plain)

    return profiles


def _earlier_last_layer(
    task: Task, settings: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[Reference]:
    """f_L at earlier times of the training. It is of these rows if training read the same."""
    data = Evaluation(task.model, task.rows, **settings).fingerprint_of_rows()
    smoothing = summary.get("arguments", {}).get("label_smoothing_factor") or 0.0
    return references_of(summary, data, scoring_by(task.model, smoothing=smoothing))


def _facts(task: Task, summary: Mapping[str, Any], problem: DescentProblem) -> dict[str, Any]:
    """The facts about the training that a verdict reports."""
    objective = summary.get("objective")
    share = None
    warmup = summary.get("warmup_layer_losses")
    if warmup is not None:
        share = problem.descent_share(torch.tensor(warmup))
    return {
        "warmup_share": share,
        "multipliers": summary.get("multipliers"),
        "also_selected": task.also_selected,
        "reads_one_token": reads_one_token(task.model),
        "max_last_layer_rise": summary.get("arguments", {}).get("max_last_layer_rise"),
        "has_price": objective is None or not objective_class(objective).is_plain,
    }


def stated_problem(
    summary: Mapping[str, Any], profiles: Sequence[LayerProfile]
) -> DescentProblem | None:
    """The problem that the arguments of a run state, for a `summary` without one, as after plain training that was not
    evaluated. f_0 comes from the evaluated labels at the training's noise level; `None` if it is not known."""
    recorded = summary.get("arguments", {})
    names = {argument.name for argument in dataclasses.fields(DescentArguments)}
    known = {name: value for name, value in recorded.items() if name in names}
    if not known:
        return None  # of plain `Trainer`

    args = DescentArguments(**known)
    chances = {profile.gamma: profile.chance for profile in profiles}
    chance = chances.get(args.gamma_train)
    if not chance and args.initial_loss_bound == "auto":
        return None

    return DualState(args, len(profiles[0].losses), 0, 0, chance).problem


def _held_out(splits: Mapping[str, Any], name: str, args: Any) -> tuple[str, bool]:
    """The split to measure on, and whether its rows may have trained the model, or chosen checkpoint or settings."""
    split = "test" if "test" in splits else "validation"
    record = record_of(name)
    arguments = {argument: absolute(argument, value) for argument, value in vars(args).items()}
    was_selected = "select_rows" in RunFolder(name).summary
    trained_on = _sources(record, "train")
    if not trained_on:  # of a run that comes from elsewhere
        return split, was_selected and split == "validation"

    chosen_by = _sources(record, "validation")
    own = _sources(arguments, split)
    if own:
        seen = trained_on | chosen_by if was_selected else trained_on
        return split, not own.isdisjoint(seen)
    # Drawn from training examples: those of the model, unless it was held out from the same by the same draw.
    if _sources(arguments, "train").isdisjoint(trained_on):
        return split, False
    is_same_draw = all(
        record.get(argument, arguments[argument]) == arguments[argument]
        for argument in DRAWS.intersection(arguments)
    )

    return split, was_selected or bool(chosen_by) or not is_same_draw


def _sources(arguments: Mapping[str, Any], part: str) -> set:
    """Where the rows of a part of the data come from: files, or a split of a data set on the Hub."""
    files = [arguments.get(f"{part}_file")]
    files.extend(arguments.get(f"{part}_files") or [])
    named = {file for file in files if file}
    if named:
        return named
    on_hub = (arguments.get("dataset_name"), arguments.get(f"{part}_split"))
    return {on_hub} if all(on_hub) else set()
