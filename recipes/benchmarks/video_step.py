"""Time of a constrained training step of UT or DUST against its ERM step, and of the preprocessing of video.

    python recipes/benchmarks/video_step.py [--architecture ut --layers 7 --threads 2] [--video clip.avi]

Both trainers take turns in one process, a few steps each, so that a noisy machine slows both; the figure is the ratio
of the median step times. Random clips: the cost does not depend on them. With `--video` the time to decode it into
clips and cut these into patches is given too, per 10,000 frames.
"""

import argparse
import statistics
import tempfile
import time

import torch
from classifier_step import Clock

from hf_descent import DescentConfig, DescentTrainer
from hf_descent.data.patches import patch_rows
from hf_descent.data.video import VideoArguments, load_clips
from hf_descent.models import DustConfig, DustForVideoDenoising, UTConfig, UTForVideoDenoising


MODELS = {"ut": (UTForVideoDenoising, UTConfig), "dust": (DustForVideoDenoising, DustConfig)}


def time_steps(options) -> dict[str, list[float]]:
    """Seconds of a step of each objective: quartiles."""
    clips = torch.rand(options.batch * options.steps, 10, 256)
    settings = {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "noise_gamma": 0.15, "descent_alpha": 0.05, "initial_loss_bound": 1.0, "dual_warmup_steps": 0,
        "learning_rate": 1e-5, "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "logging_strategy": "no", "use_cpu": True,
    }  # fmt: skip
    clocks = {}
    for objective in ("erm", "descent"):
        torch.manual_seed(0)
        model_class, config_class = MODELS[options.architecture]
        model = model_class(config_class(num_hidden_layers=options.layers))
        data = [{"pixel_values": clip, "labels": clip} for clip in clips]
        clock = Clock()
        config = DescentConfig(objective=objective, **settings)
        clocks[objective] = clock, DescentTrainer(model, config, train_dataset=data, callbacks=[clock])
    for _ in range(options.rounds):
        for _, trainer in clocks.values():
            trainer.train()
    # The first round warms up.
    return {name: statistics.quantiles(clock.seconds[options.steps :], n=4) for name, (clock, _) in clocks.items()}


def time_preprocessing(video: str) -> tuple[float, float]:
    """Seconds to make patches of a video, as if it had 10,000 frames: on the clock, and of all processors together."""
    with tempfile.TemporaryDirectory() as cache:
        args = VideoArguments(train_files=[video], split_by="time", split_gap=0, cache_dir=cache)
        start = time.perf_counter(), time.process_time()
        rows = [patch_rows(clips, args.patch_size) for clips in load_clips(args).values()]
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    places = (args.frame_size // args.patch_size) ** 2
    frames = sum(len(split) for split in rows) // places * args.num_frames
    return tuple(part / frames * 10_000 for part in seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--architecture", choices=MODELS, default="ut")
    parser.add_argument("--video", help="video file to preprocess")
    for name, default in (("layers", 7), ("batch", 64), ("steps", 4), ("rounds", 7), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    seconds = time_steps(options)
    for name, (low, middle, high) in seconds.items():
        ratio = middle / seconds["erm"][1]
        print(
            f"{options.architecture}-{options.layers} {name:8} {middle:.3f} s a step (quartiles {low:.3f} to "
            f"{high:.3f}), ratio {ratio:.3f}"
        )
    if options.video:
        clock, processors = time_preprocessing(options.video)
        print(f"{options.video}: {clock:.0f} s for 10,000 frames, {processors:.0f} s of processor time")


if __name__ == "__main__":
    main()
