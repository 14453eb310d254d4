"""`hf-descent denoise`: train a video denoiser, then report it per layer and under noise.

UT and DUST denoise the patches that the frames of a clip show at one place; a ViT denoises each frame by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from datasets import Dataset
from transformers import PreTrainedModel, set_seed
from transformers.hf_argparser import HfArg

from ..configs import DescentConfig
from ..constraints.arguments import SMALLEST
from ..data.denoising import DenoisingTask, ImageTask, PatchTask
from ..data.splits import check_arguments
from ..data.video import VideoArguments, load_clips
from ..loading import weights_of
from ..models import (
    DustConfig,
    DustForVideoDenoising,
    UTConfig,
    UTForVideoDenoising,
    ViTForDenoising,
)
from ..noise.embedding_noise import deviation_from_moments, moments_of
from ..runs import RunFolder, tables
from ..trainer import DescentTrainer
from .arguments import parse_recipe
from .closing import closing_lines, next_step
from .training import OutputArguments, metrics_of, resume_choice, train_and_report


SIGMA_ROWS = 4096  # rows from which the deviation of the clean signal is measured


@dataclass
class ModelArguments(OutputArguments):
    """Which denoiser, and how it is reported."""

    architecture: Literal["ut", "dust", "vit"] = HfArg(help="Kind of the denoiser.")
    num_layers: int = HfArg(default=5, help="Number of layers of UT and DUST. A ViT has its own.")
    attention_step: float | None = HfArg(
        default=None,
        help="UT: share of the way to the attention output that a layer goes. Default: 2 / num_layers.",
    )
    dictionary_size: int = HfArg(default=512, help="DUST: columns of the dictionary.")
    shared_dictionary: bool = HfArg(default=False, help="DUST: one dictionary for all layers.")
    sparsity: float = HfArg(
        default=0.01, help="DUST: weight of the sum of the codes' absolute values."
    )
    coupling: float = HfArg(default=5.0, help="DUST: weight of the attention energy.")
    curvature: float = HfArg(default=3.0, help="DUST: c, the inverse of the step size.")
    model_name_or_path: str | None = HfArg(
        default=None, help="ViT: pretrained encoder, on the Hub or in a folder."
    )
    readout: Literal["patches", "linear"] = HfArg(
        default="patches", help="ViT: `linear` where the sizes differ."
    )
    loss_gamma: float | None = HfArg(
        default=None,
        help="Divide losses by that of the noisy input at this level. Default: half the sum of squares, undivided.",
    )
    noise_draws: int = HfArg(
        default=1, help="How often the noise is drawn at each level of the final report."
    )

    def __post_init__(self):
        limits = {
            "noise_draws": 1,
            "num_layers": 1,
            "dictionary_size": 1,
            "sparsity": 0,
            "coupling": 0,
            "loss_gamma": SMALLEST,
            "curvature": SMALLEST,
            "attention_step": (SMALLEST, 1),
        }
        check_arguments(self, limits)
        if (self.architecture == "vit") != (self.model_name_or_path is not None):
            raise ValueError(
                f"`model_name_or_path` is {self.model_name_or_path!r} and `architecture` {self.architecture!r}: a ViT "
                "needs a pretrained encoder, and the others take none."
            )


argument_types = (ModelArguments, VideoArguments, DescentConfig)
parse = partial(parse_recipe, argument_types)


def run(model_args: ModelArguments, data_args: VideoArguments, args: DescentConfig) -> None:
    """Train and evaluate. Beside the model, `args.output_dir` gets `all_results.json` (RMSE per noise level, their
    mean, layer losses), `layer_profile.json` (at the training level) and `noise_curve.json`. The last two are of the
    test examples, or without any of the validation examples."""
    resume = resume_choice(args, model_args)
    set_seed(args.seed)
    name = model_args.model_name_or_path
    task = PatchTask(data_args.patch_size) if name is None else ImageTask(name)
    with args.main_process_first(desc="decoding the videos"):
        rows = {
            split: data_args.draw(split, task.rows(clips))
            for split, clips in load_clips(data_args).items()
        }

    if args.noise_sigma is None:
        args.noise_sigma = measure_sigma(rows["train"], task)
    model = build_model(model_args, task, args.noise_sigma, rows["train"][0])
    # Also where training is without noise: the tests are not.
    model.config.noise_sigma = args.noise_sigma
    args.remove_unused_columns = False  # there are none

    trainer = DescentTrainer(
        model,
        args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=task.collate,
        # Saved with the model, for those who evaluate it.
        processing_class=getattr(task, "processor", None),
    )

    settings = {"metric": "rmse", "scale": 255 / task.pixel_range}
    reports = partial(report, trainer, rows, settings, model_args.noise_draws)
    train_and_report(trainer, resume, reports, model_args, data_args)


def report(
    trainer: DescentTrainer, rows: Mapping[str, Dataset], settings: dict[str, Any], draws: int
) -> str:
    """Measure the validation and test examples, print both, and write the results of the last. Returns the last lines
    of the command."""
    args = trainer.args
    is_first = trainer.is_world_process_zero()
    # The test examples come last, since the trainer's card shows the last measurement.
    for split in ("validation", "test"):
        if split not in rows:
            continue
        profile = trainer.evaluate_layers(rows[split], gamma=args.gamma_train, **settings)
        results = {"layer_profile": profile}
        metrics = {}
        if args.eval_gammas:
            curve = trainer.evaluate_robustness(rows[split], draws=draws, **settings)
            results["noise_curve"] = curve
            metrics[f"{split}_mean_rmse"] = curve.mean_over_levels
        trainer.save_metrics(split, {**metrics_of(results, split), **metrics})
        if is_first:
            print(
                f"Of the {split} examples (RMSE on the 0-255 scale; layers at noise level {args.gamma_train:g}):\n"
            )
            print(tables(results), end="\n\n")
            if profile.problem is not None:
                print(f"{profile.certificate()}\n")

    folder = args.output_dir  # plain training beside this has its own
    if is_first:
        RunFolder(folder).write(results)
    measures = next_step(f"evaluate {folder}", "measures it at other noise levels")
    return closing_lines(folder, profile, measures)


def measure_sigma(rows: Dataset, task: DenoisingTask) -> float:
    """Standard deviation of the clean signal in the model's units, from the first rows."""
    rows = rows.select(range(min(SIGMA_ROWS, len(rows))))
    return deviation_from_moments(
        sum(moments_of(task.batch(batch["pixel_values"])) for batch in rows.iter(64))
    )


def build_model(
    args: ModelArguments, task: DenoisingTask, sigma: float, row: dict
) -> PreTrainedModel:
    """The denoiser that `args` names, for rows like `row`."""
    loss_scale = 0.5
    if args.loss_gamma is not None:
        num_values = task.collate([row])["pixel_values"].numel()
        loss_scale = 1 / ((args.loss_gamma * sigma) ** 2 * num_values)

    if args.architecture == "vit":
        name = args.model_name_or_path
        with weights_of(name):
            return ViTForDenoising.from_encoder(
                name, readout=args.readout, loss_scale=loss_scale
            ).train()

    sizes = {
        "hidden_size": task.patch_size**2,
        "num_hidden_layers": args.num_layers,
        "loss_scale": loss_scale,
    }
    if args.architecture == "ut":
        # Untrained layers only average frames. Together, those of a deep model do so as much as those of a shallow
        # one.
        step = min(1.0, 2 / args.num_layers) if args.attention_step is None else args.attention_step
        return UTForVideoDenoising(UTConfig(**sizes, attention_step=step))

    names = ("dictionary_size", "shared_dictionary", "sparsity", "coupling", "curvature")
    return DustForVideoDenoising(
        DustConfig(**sizes, **{name: getattr(args, name) for name in names})
    )
