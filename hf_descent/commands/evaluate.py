"""`hf-descent evaluate MODEL...`: how good models are under noise and at every layer, on the same held-out rows.

The task is read off the models' architecture; the data comes from flags, from a recipe (`--config`) or, as far as
these do not say, from the records of the models' training. All models see the same batches and, per batch and level,
the same noise, so that `hf-descent compare` can pair them. Results go into each model's folder: `noise_curve.json` and
`layer_profile.json` and, of a constrained run, `verdict.json`, both also at noise levels
(`..._gamma_<level>.json`); with `--perturbation_rates` a curve named after the perturbation. A results folder
elsewhere also gets the model's `descent_config.json`.
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
from ..constraints.problem import LARGEST, SMALLEST, DescentProblem
from ..constraints.state import DescentState
from ..data.alpaca import AlpacaArguments, completion_labels, load_alpaca
from ..data.denoising import load_denoiser
from ..data.splits import check_arguments
from ..data.text import (
    DataArguments,
    align_classes,
    load_text_classification,
    most_tokens,
    tokenize,
)
from ..data.video import VideoArguments, load_clips
from ..evaluation import LayerProfile, layer_profiles, noise_curve
from ..evaluation.perturbations import Typos, salt_and_pepper
from ..evaluation.side_by_side import plain_profile
from ..evaluation.sums import check_confidence
from ..loading import architecture_of, best_device, load_model, load_tokenizer, position_limit
from ..readout.labels import IGNORE_INDEX
from ..runs import RunFolder, tables
from ..training.references import references_of
from .arguments import absolute, models_of, parse_models, record_of
from .closing import next_step


@dataclass
class EvaluateArguments:
    """What is measured."""

    eval_gammas: list[float] = HfArg(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0],
        help="Noise levels of the curve.",
    )
    draws: int = HfArg(default=3, help="Draws of the noise at each level.")
    noise_seed: int = HfArg(
        default=0, help="Seed of the noise. Not `seed`: runs that differ in it share their noise."
    )
    noise_sigma: float | None = HfArg(
        default=None, help="Deviation of the clean signal; None: each model's own."
    )
    profile_gammas: list[float] | None = HfArg(
        default=None,
        help="Noise levels of the layer profiles; None: 0, the training's, the largest of the curve.",
    )
    perturbation_rates: list[float] | None = HfArg(
        default=None,
        help="Also measure typing errors (text) or salt and pepper (images) at these rates in [0, 1].",
    )
    confidence: float = HfArg(default=0.95, help="Confidence of the verdicts.")
    per_device_eval_batch_size: int = HfArg(
        default=32, help="Rows in a batch; the noise depends on it."
    )
    results_dir: str | None = HfArg(
        default=None, help="Gets a folder of results per model; None: the models' own."
    )

    def __post_init__(self):
        check_confidence(self.confidence)
        check_arguments(self, dict.fromkeys(("draws", "per_device_eval_batch_size"), 1))
        check_arguments(
            self, {"noise_seed": 0, "noise_sigma": SMALLEST, "perturbation_rates": (0, 1)}
        )
        check_arguments(self, dict.fromkeys(("eval_gammas", "profile_gammas"), (0, LARGEST)))


@dataclass
class Task:
    """A model with the held-out rows that it is measured on."""

    model: PreTrainedModel
    rows: Dataset
    also_selected: bool  # see `Certificate`
    settings: dict[str, Any]  # of `noise_curve` and `layer_profiles`
    perturbed_rows: Dataset | None = None  # as a perturbation takes them
    perturbation: Any = None


def classification_task(name: str, args: DataArguments) -> Task:
    """Accuracy of a text classifier; typing errors perturb its raw texts."""
    tokenizer, model = load_tokenizer(name), load_model(name)
    texts = align_classes(load_text_classification(args), model.config.id2label)
    limit = most_tokens(tokenizer, model, args.max_seq_length)
    split, also_selected = _held_out(texts, name, args)
    rows, settings = tokenize(texts, tokenizer, limit)[split], {"processing_class": tokenizer}
    return Task(model, rows, also_selected, settings, texts[split], Typos(tokenizer, limit))


def language_task(name: str, args: AlpacaArguments) -> Task:
    """Mean token accuracy of a causal language model on the completions of held-out prompts."""
    tokenizer, model = load_tokenizer(name), load_model(name)
    splits = load_alpaca(args, tokenizer)
    split, also_selected = _held_out(splits, name, args)
    limits = (position_limit(model), record_of(name).get("max_seq_length"))
    settings = {
        "tokenizer": tokenizer,
        "limit": min((limit for limit in limits if limit), default=None),
    }
    summary = RunFolder(name).summary
    trained = summary.get("arguments", {})
    if (
        trained.get("assistant_only_loss")
        or trained.get("truncation_mode", "keep_start") != "keep_start"
    ):
        raise ValueError(
            "The labels of `assistant_only_loss` or `truncation_mode` need `trainer.evaluate_layers`."
        )
    rows = splits[split].map(
        completion_labels, fn_kwargs=settings, remove_columns=splits[split].column_names
    )
    if summary.get("completion_only_loss", trained.get("completion_only_loss")) is False:
        rows = rows.map(lambda row: {"labels": row["input_ids"]})
    answered = rows.filter(_has_labels)
    if dropped := len(rows) - len(answered):
        print(
            f"Dropped {dropped} of the {len(rows)} {split} rows: their prompts leave no room for an answer in "
            f"{settings['limit']} tokens."
        )
    collator = DataCollatorForSeq2Seq(tokenizer)
    return Task(model, answered, also_selected, {"data_collator": collator})


def _has_labels(row: Mapping[str, Any]) -> bool:
    return any(label != IGNORE_INDEX for label in row["labels"])


def denoising_task(name: str, args: VideoArguments) -> Task:
    """RMSE of a denoiser on the 0-255 scale."""
    model, task = load_denoiser(name)
    clips = load_clips(args)
    split, also_selected = _held_out(clips, name, args)
    rows = args.draw("test", task.rows(clips[split]))
    settings = {"metric": "rmse", "scale": 255 / task.pixel_range, "data_collator": task.collate}
    return Task(model, rows, also_selected, settings, rows, salt_and_pepper)


@dataclass
class InstructionArguments(AlpacaArguments):
    """Where the instructions come from: no data set but the training's own, or one that is named."""

    dataset_name: str | None = HfArg(
        default=None, help="Data set on the Hub, unless `train_file` is given."
    )


# Ending of the architecture's name -> (arguments of its data, how to build the task).
TASKS = {
    "ForSequenceClassification": (DataArguments, classification_task),
    "ForCausalLM": (InstructionArguments, language_task),
    "LMHeadModel": (InstructionArguments, language_task),
    "Denoising": (VideoArguments, denoising_task),
}


def task_of(model: str) -> tuple[type, Any]:
    """The data arguments and the builder for a model's architecture; ValueError where there is none."""
    architecture = architecture_of(model)
    for ending, task in TASKS.items():
        if architecture.endswith(ending):
            return task
    raise ValueError(
        f"{model} is a {architecture}; give architectures that end in {', '.join(TASKS)}, or a script."
    )


def parse(
    argv: Sequence[str], prog: str, description: str
) -> tuple[list[str], EvaluateArguments, Any]:
    """The models, what is measured, and the data of the first model's task."""
    names = models_of(argv)
    data_arguments = task_of(names[0])[0] if names else DataArguments
    return parse_models(
        (EvaluateArguments, data_arguments), argv, prog, description, takes_several=True
    )


def run(names: list[str], args: EvaluateArguments, data_args: Any) -> None:
    """Evaluates the models one after the other; see the module."""
    kinds = {name: task_of(name) for name in names}
    if len({data_arguments for data_arguments, _ in kinds.values()}) > 1:
        raise ValueError(
            f"The models {names} have different tasks; evaluate them one task at a time."
        )
    folders = [_results_folder(name, args.results_dir) for name in names]
    if len(set(folders)) < len(folders):
        raise ValueError(
            f"Models of one name would overwrite each other's results: {folders}; evaluate them apart."
        )
    for folder in folders:
        os.makedirs(folder, exist_ok=True)  # raises here what it would after the measurement
    for name, folder in zip(names, folders):
        print(
            f"{name}\n{evaluate(kinds[name][1](name, data_args), args, name, folder)}\nWritten to {folder}\n"
        )
    if len(folders) > 1:
        print(next_step(f"compare {' '.join(folders)}", "says whether the models differ"))
    else:
        print(next_step(f"card {folders[0]}", "writes the model card"))


def _results_folder(name: str, results_dir: str | None) -> str:
    """Where the results of the model `name` go; never outside `results_dir`, also for ".."."""
    if results_dir is not None:
        return os.path.join(results_dir, os.path.basename(os.path.abspath(name)))
    if not os.path.isdir(name):
        raise ValueError(f"{name} is no local folder; say where its results go by `--results_dir`.")
    return name


def evaluate(task: Task, args: EvaluateArguments, name: str, folder: str) -> str:
    """Measures the model of `task`, saved in `name`; writes the results into `folder` and returns them as tables."""
    if args.perturbation_rates is not None and task.perturbation is None:
        raise ValueError(
            "`perturbation_rates` is given, but there are no typing errors for completions."
        )
    summary = RunFolder(name).summary
    if loss := summary.get("layer_loss_fn"):
        raise ValueError(
            f"{name} was trained with the loss `{loss}`, which no file holds: use `evaluate_layers` in a script."
        )
    gamma_train = upper_level(summary.get("noise_gamma"))
    model, noise = (
        task.model.to(best_device()),
        {"seed": args.noise_seed, "sigma": args.noise_sigma},
    )
    shared = (
        task.settings | noise | {"batch_size": args.per_device_eval_batch_size, "progress": True}
    )
    if epsilon := summary.get("arguments", {}).get("label_smoothing_factor"):
        shared["layer_loss_fn"] = LabelSmoother(
            epsilon
        )  # as in training, whose targets the verdict is about

    run = RunFolder(folder)
    run.remove_evaluations()  # before anything is written: a killed call would leave them beside new ones
    if os.path.abspath(folder) != os.path.abspath(name):
        run.write_summary(summary)  # by which `hf-descent compare` tells seeds from settings
    settings = shared | {"draws": args.draws}
    results = {
        "noise_curve": noise_curve(
            model, task.rows, args.eval_gammas, gamma_train=gamma_train, **settings
        )
    }
    if args.perturbation_rates is not None:
        settings["perturbation"] = task.perturbation
        curve = noise_curve(model, task.perturbed_rows, args.perturbation_rates, **settings)
        results[f"{curve.settings['perturbation']}_curve"] = curve

    problem = DescentProblem.saved_in(summary)
    gammas = sorted(
        set(args.profile_gammas or (0.0, float(gamma_train or 0.0), float(max(args.eval_gammas))))
    )
    profiles = layer_profiles(model, task.rows, gammas, problem=problem, **shared)
    if problem is None:
        problem = stated_problem(summary, profiles)
        for profile in profiles if problem is not None else ():
            profile.problem = problem.state_dict()
    warmup, multipliers = map(summary.get, ("warmup_layer_losses", "multipliers"))
    share = (
        None if problem is None or warmup is None else problem.descent_share(torch.tensor(warmup))
    )
    arguments = summary.get("arguments", {})
    facts = {
        "warmup_share": share,
        "multipliers": multipliers,
        "also_selected": task.also_selected,
        "max_last_layer_rise": arguments.get("max_last_layer_rise"),
        "has_price": summary.get("objective") != "erm",
    }
    headline = None  # of the verdict at the noise level of the training
    for profile in profiles:
        if not profile.gamma:  # as they were read
            profile.references = references_of(summary)
        results[f"layer_profile{profile.ending}"] = profile
        if problem is not None:
            plain = plain_profile(name, summary, profile)
            profile.facts = facts | {"plain": None if plain is None else float(plain.losses[-1])}
            verdict = profile.certificate(args.confidence)
            results[f"verdict{profile.ending}"] = verdict
            if profile.gamma == (gamma_train or 0.0):
                headline = verdict.headline
    run.write(results)
    return "\n".join(filter(None, [tables(results), headline]))


def stated_problem(
    summary: Mapping[str, Any], profiles: Sequence[LayerProfile]
) -> DescentProblem | None:
    """The problem that the arguments of a run state, where its `summary` has none, as after plain training that was
    not evaluated; f_0 is that of the evaluated labels at the training's noise level. `None` where it is not known."""
    recorded = summary.get("arguments", {})
    names = [argument.name for argument in dataclasses.fields(DescentArguments)]
    if not set(names) & recorded.keys():
        return None  # of plain `Trainer`
    args = DescentArguments(**{name: recorded[name] for name in names if name in recorded})
    chances = {profile.gamma: profile.chance for profile in profiles}
    chance = chances.get(args.gamma_train)
    if not chance and args.initial_loss_bound == "auto":
        return None
    return DescentState(args, len(profiles[0].losses), 0, 0, chance).problem


def _held_out(splits: Mapping[str, Any], name: str, args: Any) -> tuple[str, bool]:
    """The split to measure on, and whether its rows may have trained the model, or chosen checkpoint or settings."""
    split, record = "test" if "test" in splits else "validation", record_of(name)
    given = {argument: absolute(argument, value) for argument, value in vars(args).items()}
    selected, trained_on = "select_rows" in RunFolder(name).summary, _sources(record, "train")
    chose, own = _sources(record, "validation"), _sources(given, split)
    if not trained_on:  # of a run that comes from elsewhere
        return split, selected and split == "validation"
    if own:
        return split, bool(own & (trained_on | chose if selected else trained_on))
    # Drawn from training rows: those of the model, unless it was held out from the same by the same draw.
    drawn = {
        "split_seed",
        "split_by",
        "validation_split_percentage",
        "validation_percentage",
    } & given.keys()
    others = (
        selected
        or bool(chose)
        or any(record.get(each, given[each]) != given[each] for each in drawn)
    )
    return split, others and bool(_sources(given, "train") & trained_on)


def _sources(arguments: Mapping[str, Any], part: str) -> set:
    """Where the rows of a part of the data come from: files, or a split of a data set on the Hub."""
    files = [arguments.get(f"{part}_file"), *(arguments.get(f"{part}_files") or [])]
    on_hub = arguments.get("dataset_name"), arguments.get(f"{part}_split")
    return {*filter(None, files)} or ({on_hub} if all(on_hub) else set())
