"""Shared by the commands that train: where they start, what they save, and what they report."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from datasets import Dataset, DatasetDict
from transformers.hf_argparser import HfArg

from ..configs import CONSTRAINT_METRICS, LAYER_LOSS, DescentConfig
from ..evaluation.scoring import Result, format_table
from ..evaluation.side_by_side import side_by_side
from ..files import find_json, write_json
from ..loading import ADAPTER
from ..readout.tape import assigned
from ..runs import RunFolder, json_value, tables
from ..trainer import DescentMixin
from ..training.plain_arm import plain_arm
from .arguments import absolute
from .closing import after_training, closing_lines


@dataclass(kw_only=True)
class OutputArguments:
    """Whether a training may start in a folder that is not empty."""

    # Whether the validation examples choose between this run and others.
    searched: ClassVar[bool] = False

    overwrite_output_dir: bool = HfArg(
        default=False,
        help="Train from scratch in a folder that is not empty. Its checkpoints stay.",
    )
    with_plain: bool = HfArg(
        default=False,
        help="Also train plainly, first and from the same start, in the folder `_plain` of the output folder, and "
        "print both side by side.",
    )


def resume_choice(args: DescentConfig, model_args: OutputArguments) -> str | bool | None:
    """What `Trainer.train` takes: a checkpoint folder, `True` (the newest of the output folder) or `None` (from
    scratch). ValueError for an adapter, and if the output folder holds something but nothing says to resume or
    overwrite."""
    name = model_args.model_name_or_path
    if name and find_json(name, ADAPTER):
        raise ValueError(
            f"`model_name_or_path` {name!r} is an adapter: start from what `hf-descent export` makes."
        )

    # The Trainer's own argument is a string, also where the command line or a recipe says `true`.
    choice = args.resume_from_checkpoint
    resume = {"true": True, "false": None, "none": None}.get(str(choice).lower(), choice)
    if resume or model_args.overwrite_output_dir or not os.path.isdir(args.output_dir):
        return resume
    # A run that was refused has left only the record of its data.
    if set(os.listdir(args.output_dir)) - {RunFolder.DATA}:
        raise ValueError(
            f"`output_dir` {args.output_dir!r} is not empty: go on with `--resume_from_checkpoint true`, start "
            "afresh in it with `--overwrite_output_dir`, or name another."
        )

    return resume


def train_and_report(
    trainer: DescentMixin,
    resume: str | bool | None,
    report: Callable[[], str],
    model_args: OutputArguments,
    data_args: Any,
    score: str = "loss",
) -> None:
    """Train (see [`resume_choice`]), save, call `report`, and push if the arguments say so. With `with_plain` all this
    is done twice, first for plain training, and both are printed side by side.

    `report` prints what it measures, and returns the last lines of the command. `model_args` and `data_args` are those
    of the command beside the trainer's; the run's `descent_config.json` gets them. What was measured, on which rows,
    is recorded for later commands; `score` is the metric of an evaluation beside losses.
    """
    _check_metric(trainer.args.metric_for_best_model, score)
    arm = partial(_train_arm, trainer, report, model_args, data_args)
    if not model_args.with_plain:
        _print_once(trainer, arm(resume))
        return

    if resume:
        raise ValueError(
            "`with_plain` trains twice from the start, and `resume_from_checkpoint` goes on with one training: leave "
            "`with_plain` out. A plain training that is finished is found beside the run."
        )
    with plain_arm(trainer):
        _print_once(trainer, f"Plain training, in {trainer.args.output_dir}\n")
        arm(None)

    _print_once(trainer, f"\nTraining with the objective {trainer.args.objective!r}\n")
    closing = arm(None)
    for pair in side_by_side(trainer.args.output_dir):
        level = f", at noise level {pair.plain.gamma:g}" if pair.plain.gamma else ""
        title = f"Plain training and {pair.objective!r} side by side{level}"
        _print_once(trainer, f"{title}\n{pair.tables}\n")
    _print_once(trainer, closing)


def _check_metric(metric: str | None, score: str) -> None:
    """ValueError if the best checkpoint is to be chosen by what no evaluation has."""
    if metric is None:
        return
    name = metric.removeprefix("eval_")
    if name not in ("loss", score, *CONSTRAINT_METRICS) and not LAYER_LOSS.match(name):
        raise ValueError(
            f"`metric_for_best_model` is {name!r}; choose {score!r}, 'feasible_score' or 'loss'."
        )


def _print_once(trainer: DescentMixin, text: str) -> None:
    if trainer.is_world_process_zero():
        print(text, flush=True)


def _train_arm(
    trainer: DescentMixin,
    report: Callable[[], str],
    model_args: OutputArguments,
    data_args: Any,
    resume: str | bool | None,
) -> str:
    """Train, save and report once, with the present arguments of the trainer; returns the last lines of the report."""
    trainer.command = json_value(vars(model_args))
    trainer.command.update(json_value(vars(data_args)))
    args = trainer.args
    folder = RunFolder(args.output_dir)
    record = {
        "max_seq_length": getattr(args, "max_length", None),
        "eval_gammas": args.eval_gammas,
        "per_device_eval_batch_size": args.per_device_eval_batch_size,
    }
    for name, value in vars(data_args).items():
        record[name] = absolute(name, value)
    if trainer.is_world_process_zero():
        write_json(folder.path / folder.DATA, record)  # for the checkpoints of a killed run

    metrics = trainer.train(resume_from_checkpoint=resume).metrics

    if trainer.is_fsdp_enabled:
        # Checkpoints are sharded for speed, but Trainer would save nothing of a sharded model.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")

    trainer.save_model()
    if trainer.is_world_process_zero():
        # Of former weights, and of the validation during training. Without a card, the text is the user's own.
        stale = ["*_results.json", "*_profile.json", "confidence_exit.json", "layer_sets.json"]
        if (folder.path / folder.CARD).exists():
            stale.append("README.md")
        folder.remove_evaluations(*stale)
        write_json(folder.path / folder.DATA, record)

    trainer.save_state()
    trainer.save_metrics("train", metrics)
    closing = report()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()  # what was saved before is without the results
    return closing


def report(trainer: DescentMixin, dataset: DatasetDict, accuracy: str = "accuracy") -> str:
    """Evaluate on the validation and test examples, write the result files, and print them as short tables. Returns
    the last lines of the command.

    `all_results.json` has the metrics and layer losses on both. `layer_profile.json`, also at the training level
    (`layer_profile_gamma_LEVEL.json`), and with noise levels `noise_curve.json`, are of the test examples, if any.
    """
    args = trainer.args
    with assigned([(args, "dataloader_drop_last")], False):  # it would drop evaluated rows, too
        scores = [["", "accuracy", "loss"]]
        for split, prefix in {"validation": "eval", "test": "test"}.items():
            if split not in dataset:
                continue
            # None: the trainer's own, whose last layer's loss before training it knows.
            rows = None if split == "validation" else dataset[split]
            # From here on these are of the last one: of the test examples where there are any.
            metrics = _metrics(trainer, rows, prefix)
            measured = (split, prefix, rows)
            numbers = [metrics[f"{prefix}_{name}"] for name in (accuracy, "loss")]
            scores.append([split, *(f"{number:.4f}" for number in numbers)])

        split, prefix, rows = measured
        # Last without noise: metrics and card have that one.
        gammas = sorted({args.gamma_train, 0.0}, reverse=True)
        profiles = [trainer.evaluate_layers(rows, gamma=gamma) for gamma in gammas]
        results = {f"layer_profile{profile.ending}": profile for profile in profiles}
        if args.eval_gammas:
            results["noise_curve"] = trainer.evaluate_robustness(rows)

    metrics.update(metrics_of(results, prefix))
    trainer.save_metrics(prefix, metrics)
    if trainer.is_world_process_zero():
        RunFolder(args.output_dir).write(results)
        parts = [format_table(scores), f"Of the {split} examples:", tables(results)]
        print("\n\n".join(parts), end="\n\n")

    return closing_lines(args.output_dir, profiles[-1], after_training(args.output_dir))


def _metrics(trainer: DescentMixin, rows: Dataset | None, prefix: str) -> dict[str, float]:
    """Measure, and save, the metrics of an evaluation."""
    metrics = trainer.evaluate(rows, metric_key_prefix=prefix)
    # TRL calls its own metrics `eval_...` whatever the prefix.
    metrics = {name.replace("eval_", f"{prefix}_", 1): value for name, value in metrics.items()}
    trainer.save_metrics(prefix, metrics)
    return metrics


def metrics_of(results: Mapping[str, Result], prefix: str) -> dict[str, float]:
    """The metrics of all results, with a prefix. If two share a name, the later one counts."""
    return {
        f"{prefix}_{name}": value
        for result in results.values()
        for name, value in result.to_dict().items()
    }
