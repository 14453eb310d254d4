"""Time of a training step of each objective, layers read by replay, on a classifier or a video denoiser.

    python recipes/benchmarks/classifier_step.py [--arms descent] [--layers 12 --hidden 384 --batch 16 --length 128]
    python recipes/benchmarks/classifier_step.py --model ut --layers 7 --batch 64 --arms erm+noise descent+noise

All arms take turns, a few steps each, so that a noisy machine slows all of them; the figure is the ratio to the first
arm in the same round (without noise, the stock Trainer). Random weights and data: the cost does not depend on them.
A time is the mean of a round's steps but the first. Held-out rows are read in every eighth step: `--steps 9`.
The start is the first step beyond the others, in steps, less that of the first arm: the search for the readout.
"""

import statistics
import tempfile
from functools import partial

import torch
from harness import Clock, parser, report, take_turns
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.models import DustConfig, DustForVideoDenoising, UTConfig, UTForVideoDenoising


NOISE = {
    "bert": {"noise_gamma": 1.0, "noise_sigma": 0.02},
    "ut": {"noise_gamma": 0.15},
    "dust": {"noise_gamma": 0.15},
}
OBJECTIVES = ("erm", "descent", "deep_supervision", "hinge", "quadratic", "fixed")
STOCK = "stock Trainer"
HELD_OUT = "descent, held-out rows"  # half of them move the multipliers
ARMS = {
    STOCK: None,
    "erm": {"objective": "erm"},
    "descent": {"objective": "descent"},
    "descent, compiled": {"objective": "descent", "torch_compile": True},
    HELD_OUT: {"objective": "descent"},
    "neftune": {"objective": "erm", "neftune_noise_alpha": 5.0},
    **{f"{name}+noise": {"objective": name} for name in OBJECTIVES},
}
FEWEST_ROWS = 400  # half of them are enough to be held out


def model_and_data(options):
    """A new model, and rows for a run's steps."""
    count = max(FEWEST_ROWS, options.batch * options.steps)
    if options.model == "bert":
        return text_classifier(options), text_rows(options, count)
    return video_denoiser(options), clip_rows(count)


def text_classifier(options):
    config = BertConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
    )
    return BertForSequenceClassification(config)


def text_rows(options, count):
    mask = torch.ones(options.length, dtype=torch.long)
    ids = torch.randint(5, options.vocab, (count, options.length))
    return [
        {"input_ids": row, "attention_mask": mask, "labels": index % 2}
        for index, row in enumerate(ids)
    ]


def video_denoiser(options):
    if options.model == "ut":
        return UTForVideoDenoising(UTConfig(num_hidden_layers=options.layers))
    return DustForVideoDenoising(DustConfig(num_hidden_layers=options.layers))


def clip_rows(count):
    clips = torch.rand(count, 10, 256)  # [clips, frames, pixels]
    return [{"pixel_values": clip, "labels": clip} for clip in clips]


def stock_settings(options):
    """The arguments that every arm has."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": options.batch,
        "max_steps": options.steps,
        "learning_rate": 1e-5,
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
        "log_level": "error",
    }


def descent_settings(name, options):
    """The further arguments of an arm of this package."""
    settings = {
        "descent_alpha": 0.05,
        "initial_loss_bound": 0.7,
        "dual_warmup_steps": 0,
        "negative_weights": "keep",
        "fixed_multipliers": [1.0] * options.layers,
    }
    settings.update(ARMS[name])
    if "noise" in name:
        settings.update(NOISE[options.model])
    return settings


def build_trainer(name, options, clock):
    """The trainer of an arm, with a model of its own."""
    torch.manual_seed(0)
    model, data = model_and_data(options)
    settings = stock_settings(options)
    if name == STOCK:
        args = TrainingArguments(**settings)
        return Trainer(model, args, train_dataset=data, callbacks=[clock])

    rows = {"train_dataset": data}
    if name == HELD_OUT:
        half = len(data) // 2
        rows = {"train_dataset": data[:half], "dual_dataset": data[half:]}

    args = DescentConfig(**settings, **descent_settings(name, options))
    return DescentTrainer(model, args, callbacks=[clock], **rows)


def train_once(trainer, clock, options):
    """Seconds of a step, the first one left out, and those that the first one takes more."""
    trainer.train()
    which = 0
    if options.processor_time:
        which = 1

    seconds = [step[which] for step in clock.steps[-options.steps :]]
    first, *others = seconds
    return statistics.fmean(others), first - statistics.median(others)


def measure(options):
    """Seconds of a step of each arm, and the start of each, in each round."""
    names = options.arms
    if not all("noise" in name for name in names):
        names = [STOCK, *names]

    arms = {}
    for name in dict.fromkeys(names):
        clock = Clock()
        trainer = build_trainer(name, options, clock)
        arms[name] = partial(train_once, trainer, clock, options)

    turns = take_turns(arms, options.rounds)
    seconds = {name: [step for step, _ in of_arm] for name, of_arm in turns.items()}
    return seconds, starts_of(turns)


def starts_of(turns):
    """The start of each arm in steps of its own, less that of the first arm, in each round."""
    first_arm = next(iter(turns.values()))
    plain = [start for _, start in first_arm]
    return {
        name: [(start - base) / step for (step, start), base in zip(of_arm, plain)]
        for name, of_arm in turns.items()
    }


def main():
    command = parser(__doc__, layers=12, hidden=384, batch=16, length=128, steps=4, vocab=1000)
    command.add_argument("--model", choices=NOISE, default="bert")
    command.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    command.add_argument(
        "--processor_time", action="store_true", help="instead of the clock's, on a busy machine"
    )
    options = command.parse_args()

    torch.set_num_threads(options.threads)
    seconds, starts = measure(options)
    for name, steps in starts.items():
        print(f"{name:28} starts in {statistics.median(steps):.1f} steps more")
    report(seconds, next(iter(seconds)), options.output, options=vars(options), starts=starts)


if __name__ == "__main__":
    main()
