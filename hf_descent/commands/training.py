"""What the commands that train have in common: where they start, what they save, and what they report."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from datasets import DatasetDict
from transformers.hf_argparser import HfArg

from ..configs import CONSTRAINT_METRICS, LAYER_LOSS, DescentConfig
from ..evaluation.scoring import Result
from ..evaluation.side_by_side import PLAIN_FOLDER, side_by_side
from ..files import find_json, write_json
from ..loading import ADAPTER
from ..runs import RunFolder, json_value, tables
from ..trainer import DescentMixin
from ..training.plain_arm import is_finished, plain_arm, where_to_go_on
from .arguments import absolute
from .closing import after_training, verdict_lines


@dataclass(kw_only=True)
class OutputArguments:
    """Whether a training may start in a folder that is not empty."""

    searched: ClassVar[bool] = (
        False  # whether the validation rows choose between this run and others
    )

    overwrite_output_dir: bool = HfArg(
        default=False, help="Train from scratch in a used folder; checkpoints stay."
    )
    with_plain: bool = HfArg(
        default=False,
        help="Train plainly, too, first and from the same start, in the folder `_plain` of the output folder; print "
        "both side by side.",
    )


def resume_choice(args: DescentConfig, model_args: OutputArguments) -> str | bool | None:
    """What `Trainer.train` takes: a checkpoint folder, True (the newest of the output folder) or None (from scratch);
    ValueError for an adapter, or where the output folder holds something, and nothing says to resume or overwrite."""
    if (name := model_args.model_name_or_path) and find_json(name, ADAPTER):
        raise ValueError(
            f"`model_name_or_path` {name!r} is an adapter: start from what `hf-descent export` makes."
        )
    # The Trainer's own argument is a string, also where the command line or a recipe says `true`.
    given = args.resume_from_checkpoint
    resume = {"true": True, "false": None, "none": None}.get(str(given).lower(), given)
    # A run that was refused has left no more than the record of its data.
    is_used = os.path.isdir(args.output_dir) and {*os.listdir(args.output_dir)} - {RunFolder.DATA}
    if is_used and not (resume or model_args.overwrite_output_dir):
        raise ValueError(
            f"`output_dir` {args.output_dir!r} is not empty: go on with `--resume_from_checkpoint true`, start "
            "afresh in it with `--overwrite_output_dir`, or name another."
        )
    return resume


def train_and_report(
    trainer: DescentMixin,
    resume: str | bool | None,
    report: Callable[[], None],
    model_args: OutputArguments,
    data_args: Any,
    score: str = "loss",
) -> None:
    """Trains (see [`resume_choice`]) and saves; calls `report`, and pushes where the arguments say so. With
    `with_plain` all this is done twice, of plain training first, and both are printed side by side.

    `model_args` and `data_args` are those of the command beside the trainer's; the run's `descent_config.json` gets
    them. What was measured, on which rows, is recorded for later commands; `score` is what an evaluation has beside
    losses.
    """
    chosen_by = (trainer.args.metric_for_best_model or "loss").removeprefix("eval_")
    if chosen_by not in ("loss", score, *CONSTRAINT_METRICS) and not LAYER_LOSS.match(chosen_by):
        raise ValueError(
            f"`metric_for_best_model` is {chosen_by!r}; choose {score!r}, 'feasible_score' or 'loss'."
        )
    arm = partial(_train_arm, trainer, report, model_args, data_args)
    if not model_args.with_plain:
        arm(resume)
        return

    if not (resume and is_finished(trainer)):
        with plain_arm(trainer):
            _print_once(trainer, f"Plain training, in {trainer.args.output_dir}\n")
            arm(where_to_go_on(trainer, bool(resume)))
    _print_once(trainer, f"\nTraining with the objective {trainer.args.objective!r}\n")
    arm(where_to_go_on(trainer, resume))
    for found in side_by_side(trainer.args.output_dir):
        level = f", at noise level {found.plain.gamma:g}" if found.plain.gamma else ""
        _print_once(
            trainer, f"\nPlain training and {found.objective!r} side by side{level}\n{found}"
        )


def _print_once(trainer: DescentMixin, text: str) -> None:
    if trainer.is_world_process_zero():
        print(text, flush=True)


def _train_arm(
    trainer: DescentMixin,
    report: Callable[[], None],
    model_args: OutputArguments,
    data_args: Any,
    resume: str | bool | None,
) -> None:
    """Trains, saves and reports once, by the arguments that the trainer has now."""
    trainer.command = json_value(
        {name: value for each in (model_args, data_args) for name, value in vars(each).items()}
    )
    args, folder = trainer.args, RunFolder(trainer.args.output_dir)
    record = {"max_seq_length": getattr(args, "max_length", None), "eval_gammas": args.eval_gammas}
    record |= {"per_device_eval_batch_size": args.per_device_eval_batch_size}
    record |= {name: absolute(name, value) for name, value in vars(data_args).items()}
    if trainer.is_world_process_zero():
        write_json(folder.path / folder.DATA, record)  # for the checkpoints of a killed run
    metrics = trainer.train(resume_from_checkpoint=resume).metrics
    if trainer.is_fsdp_enabled:
        # Checkpoints are sharded for speed; of the model in this form Trainer would save nothing.
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    if trainer.is_world_process_zero():
        # Of the weights that are overwritten now.
        card = ["README.md"] * (
            folder.path / folder.CARD
        ).exists()  # else the text is the user's own
        folder.remove_evaluations("*_results.json", "*_profile.json", "confidence_exit.json", *card)
        write_json(folder.path / folder.DATA, record)
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", metrics)
    report()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()  # what was saved before is without the results


def report(trainer: DescentMixin, dataset: DatasetDict, accuracy: str = "accuracy") -> None:
    """Evaluates on the validation and test rows, writes the result files, and prints them as short tables.

    `all_results.json` has the metrics and layer losses on both. Of the test rows where there are any there is
    `layer_profile.json`, also at the training level (`layer_profile_gamma_LEVEL.json`) and, where noise levels are
    given, `noise_curve.json`.
    """
    args = trainer.args
    drop_last, args.dataloader_drop_last = (
        args.dataloader_drop_last,
        False,
    )  # Trainer would drop evaluated rows, too
    scores = f"{'':10} {'accuracy':>10} {'loss':>10}"
    prefixes = {"validation": "eval"} | ({"test": "test"} if "test" in dataset else {})
    for split, prefix in prefixes.items():
        metrics = trainer.evaluate(dataset[split], metric_key_prefix=prefix)
        # TRL calls its own metrics `eval_...` whatever the prefix.
        metrics = {name.replace("eval_", f"{prefix}_", 1): value for name, value in metrics.items()}
        trainer.save_metrics(prefix, metrics)
        scores += f"\n{split:10} {metrics[f'{prefix}_{accuracy}']:10.4f} {metrics[f'{prefix}_loss']:10.4f}"

    # `split`, `prefix` and `metrics` are those of the last one from here on: of the test rows where there are any.
    gammas = sorted(
        {args.gamma_train, 0.0}, reverse=True
    )  # last without noise: metrics and card have that one
    profiles = [trainer.evaluate_layers(dataset[split], gamma=gamma) for gamma in gammas]
    results = {f"layer_profile{profile.ending}": profile for profile in profiles}
    if args.eval_gammas:
        results["noise_curve"] = trainer.evaluate_robustness(dataset[split])
    args.dataloader_drop_last = drop_last
    trainer.save_metrics(prefix, metrics | metrics_of(results, prefix))
    if trainer.is_world_process_zero():
        folder = RunFolder(args.output_dir)
        folder.write(results)
        closing = [f"Written to {args.output_dir}", *verdict_lines(profiles[-1:])]
        if folder.path.name != PLAIN_FOLDER:  # else the run beside it says what comes next
            closing.append(after_training(args.output_dir))
        parts = [scores, f"Of the {split} rows:", tables(results), "\n".join(closing)]
        print("\n\n".join(parts))


def metrics_of(results: Mapping[str, Result], prefix: str) -> dict[str, float]:
    """The metrics of all results, with a prefix; where they share a name, those of the later one."""
    return {
        f"{prefix}_{name}": value
        for result in results.values()
        for name, value in result.to_dict().items()
    }
