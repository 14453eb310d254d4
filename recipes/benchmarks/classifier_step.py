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
HELD_OUT = "descent, held-out rows"  # half of them move the multipliers
ARMS = {
    "stock Trainer": None,
    **{name: {"objective": name} for name in ("erm", "descent")},
    "descent, compiled": {"objective": "descent", "torch_compile": True},
    HELD_OUT: {"objective": "descent"},
    "neftune": {"objective": "erm", "neftune_noise_alpha": 5.0},
    **{f"{name}+noise": {"objective": name} for name in OBJECTIVES},
}


def model_and_data(options):
    """A new model, and rows for a run's steps."""
    count = max(400, options.batch * options.steps)  # half of them are enough to be held out
    if options.model != "bert":
        classes = {
            "ut": (UTForVideoDenoising, UTConfig),
            "dust": (DustForVideoDenoising, DustConfig),
        }
        model_class, config_class = classes[options.model]
        clips = torch.rand(count, 10, 256)  # [clips, frames, pixels]
        return model_class(config_class(num_hidden_layers=options.layers)), [
            {"pixel_values": clip, "labels": clip} for clip in clips
        ]
    config = BertConfig(
        vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 32,
    )  # fmt: skip
    mask = torch.ones(options.length, dtype=torch.long)
    ids = torch.randint(5, options.vocab, (count, options.length))
    rows = [
        {"input_ids": row, "attention_mask": mask, "labels": index % 2}
        for index, row in enumerate(ids)
    ]
    return BertForSequenceClassification(config), rows


def measure(options):
    """Seconds of a step of each arm, and the start of each, in each round."""
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "use_cpu": not torch.cuda.is_available(), "log_level": "error", "learning_rate": 1e-5,
    }  # fmt: skip
    problem = {
        "descent_alpha": 0.05, "initial_loss_bound": 0.7, "dual_warmup_steps": 0, "negative_weights": "keep",
        "fixed_multipliers": [1.0] * options.layers,
    }  # fmt: skip
    names = (
        options.arms
        if all("noise" in name for name in options.arms)
        else ["stock Trainer", *options.arms]
    )
    arms = {}
    for name in dict.fromkeys(names):
        torch.manual_seed(0)
        (model, data), clock = model_and_data(options), Clock()
        if ARMS[name] is None:
            trainer = Trainer(
                model, TrainingArguments(**settings), train_dataset=data, callbacks=[clock]
            )
        else:
            noise = NOISE[options.model] if "noise" in name else {}
            args = DescentConfig(**settings, **problem, **ARMS[name], **noise)
            rows = {"train_dataset": data}
            if name == HELD_OUT:
                half = len(data) // 2
                rows = {"train_dataset": data[:half], "dual_dataset": data[half:]}
            trainer = DescentTrainer(model, args, callbacks=[clock], **rows)

        def step(trainer=trainer, clock=clock):
            trainer.train()
            first, *others = [
                times[options.processor_time] for times in clock.steps[-options.steps :]
            ]
            return statistics.fmean(others), first - statistics.median(others)

        arms[name] = step
    found = take_turns(arms, options.rounds)
    seconds = {name: [step for step, _ in turns] for name, turns in found.items()}
    plain = next(iter(found.values()))
    return seconds, {
        name: [(start - base) / step for (step, start), (_, base) in zip(turns, plain)]
        for name, turns in found.items()
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
