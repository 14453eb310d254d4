"""Objectives compared under control of the learning rate, each at its own best one.

    python recipes/benchmarks/controlled.py photos
    python recipes/benchmarks/controlled.py video --videos HIGHWAY.avi PLAZA.avi  # or dust, or vit
    python recipes/benchmarks/controlled.py imdb --minilm FOLDER --imdb FOLDER --rt_polarity FOLDER  # or rt_polarity

For each arm the first seed is trained at three learning rates, a factor of 2 apart, and at further ones until the best
lies between two others (8 at most). The best is that of the lowest loss of the last layer on rows (select) that are
neither trained on nor reported. The other seeds train at it; where their mean is no longer the lowest (a run broke
down), the next best takes its place. What is reported is measured once, on the test rows.
Finished runs are kept in `--output`, a JSON line each, and are not repeated; `docs/results_page.py` shows them.
"""

import argparse
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, DatasetDict, load_dataset
from harness import InTurn, RisingWeights, Runs, fit
from scipy.ndimage import gaussian_filter
from transformers import ViTConfig, set_seed

from hf_descent import models
from hf_descent.commands import demo
from hf_descent.data.pans import photo_pans
from hf_descent.data.text import tokenize
from hf_descent.data.video import VideoArguments, load_clips
from hf_descent.early_exit import truncate
from hf_descent.loading import load_tokenizer


TEXTS = ("imdb", "rt_polarity")  # reported on the other one, too
DENOISERS = ("photos", "video", "dust", "vit")
TEXT_GAMMAS = (0.0, 0.5, 1.0, 1.5, 2.0)
# Where a search begins, and the levels of noise at which is measured.
RATES = {**dict.fromkeys(TEXTS, 1e-4), **dict.fromkeys(DENOISERS, 1e-3)}
GAMMAS = {**dict.fromkeys(TEXTS, TEXT_GAMMAS), **dict.fromkeys(DENOISERS, demo.GAMMAS)}
MOST_RATES = 8
STEPS = 1200  # of a denoiser
CUT_TO = 3  # layers of the models that are cut first
SMOKE_STEPS = 4
WINDOW = 8  # side of the patches of video, in pixels
RESULTS = Path(__file__).parent / "results" / "controlled.jsonl"


def depth_of(task: str) -> int:
    if task in TEXTS:
        return 6
    return demo.NUM_LAYERS


def arms(task: str) -> dict[str, dict]:
    """The arguments of `DescentConfig` that make each arm of a task. A model with `cut_to` is first cut to so many
    layers, and trains `longer` times as long."""
    known = {}
    if task in DENOISERS:
        known = {"initial_loss_bound": 1.0}  # the noisy input's own loss
    steps = {"objective": "descent", "descent_alpha": 0.3, **known}

    chosen = {
        **plain_arms(),
        **cut_first_arms(depth_of(task)),
        **fixed_weight_arms(depth_of(task)),
        "hinge": {**steps, "objective": "hinge"},
        "descent": {"objective": "descent", **known},
        "descent, weight decay": {"objective": "descent", "weight_decay": 0.1, **known},
        "descent, weights normalised": {"objective": "descent", "normalize_weights": True, **known},
        "descent, whole path": {"objective": "descent", "descent_strength": 1.0, **known},
    }
    if task in TEXTS:
        # The paper's form and, of its DistilBERT, f_0; a strong alpha, which asks for 0.40 of the last layer.
        chosen["paper"] = {
            "objective": "descent",
            "descent_alpha": 0.15,
            "initial_loss_bound": 1.07,
            "negative_weights": "keep",
            "normalize_violations": False,
            "resilience": 0.05,
        }
        return chosen

    chosen["paper"] = {"objective": "descent", **demo.PAPER}
    for name in ("keep", "clip", "detach"):
        chosen[f"alpha 0.3, {name}"] = {**steps, "negative_weights": name}
    for layer in (2, 3):
        hard = {"objective": "descent", "exit_targets": {layer: 0.0}, **known}
        chosen[f"layer {layer} hard"] = hard
        chosen[f"layer {layer} hard, dual rate 0.08"] = {**hard, "dual_learning_rate": 0.08}
    for name in ("alpha 0.3, detach", "layer 3 hard, dual rate 0.08"):
        chosen[f"{name}, weights normalised"] = {**chosen[name], "normalize_weights": True}
    return chosen


def plain_arms() -> dict[str, dict]:
    best_of_20_checkpoints = {
        "load_best_model_at_end": True,  # by the select rows
        "save_total_limit": 1,
        "eval_strategy": "steps",
        "eval_steps": 0.05,
        "save_strategy": "steps",
        "save_steps": 0.05,
    }
    return {
        "plain": {"objective": "erm"},
        "plain, trained without noise": {"objective": "erm", "noise_gamma": 0.0},
        "plain, early stopping": {"objective": "erm", **best_of_20_checkpoints},
        "plain, weight decay": {"objective": "erm", "weight_decay": 0.1},
        "plain, weight decay 0.3": {"objective": "erm", "weight_decay": 0.3},
    }


def cut_first_arms(depth: int) -> dict[str, dict]:
    """One model of fewer layers, which is no model of several depths."""
    cut = {"objective": "erm", "cut_to": CUT_TO}
    return {
        "cut first": cut,
        "cut first, same compute": {**cut, "longer": depth / CUT_TO},
    }


def fixed_weight_arms(depth: int) -> dict[str, dict]:
    """Weights on all layers below the last, which do not depend on the losses."""
    weighted = {
        "objective": "fixed",
        "exit_targets": dict.fromkeys(range(1, depth), 1.0),  # rows that name these layers
        "dual_warmup_steps": 0.0,
    }
    rising = [layer / depth for layer in range(1, depth)]
    zeros = [0.0] * (depth - 1)
    return {
        "deep supervision": {"objective": "deep_supervision"},
        "deep supervision, weight decay": {"objective": "deep_supervision", "weight_decay": 0.1},
        "deep supervision, rising with depth": {**weighted, "fixed_multipliers": rising},
        "deep supervision, rising with training": {
            **weighted,
            "fixed_multipliers": zeros,
            "callbacks": [RisingWeights],
        },
        "layerskip": {"objective": "layerskip"},
        "sorted": {
            **weighted,
            "fixed_multipliers": zeros,
            "normalize_weights": True,
            "callbacks": [InTurn],
        },
    }


# ---- tasks: training rows, rows to select on, rows to report by name ----


def photos(
    options: argparse.Namespace,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    train, select = photo_pans(4608).split([4096, 512])
    return train, select, {"test": photo_pans(512, held_out=True)}


@cache
def windows(path: str, whole: bool) -> torch.Tensor:
    """Windows of 8 x 8 pixels, `[windows, T, 64]`, or `whole` frames, `[frames, 1, 80, 80]`, in the order of time."""
    arguments = VideoArguments(train_files=[path], split_by="time", split_gap=0, frame_size=80)
    clips = load_clips(arguments)
    parts = [np.stack(clips[name]["frames"]) for name in ("train", "validation")]
    frames = torch.cat([torch.tensor(part) for part in parts])
    if whole:
        return frames.flatten(0, 1)[:, None] / 255

    cut = frames.float().unfold(2, WINDOW, WINDOW).unfold(3, WINDOW, WINDOW)
    cut = cut / 255  # [clips, T, 10, 10, 8, 8]
    return cut.permute(0, 2, 3, 1, 4, 5).flatten(4).flatten(0, 2)


def video(
    options: argparse.Namespace,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The beginning of the first video to train on, then its later parts, and the second video."""
    first, second = [windows(path, options.task == "vit") for path in options.videos]
    border = len(first) // 10
    parts = [
        first[: 6 * border],
        first[7 * border : 8 * border],
        first[9 * border :],
        second,
    ]  # gaps lie between

    generator = torch.Generator().manual_seed(0)
    shuffled = [part[torch.randperm(len(part), generator=generator)] for part in parts]
    train, select, test, other = shuffled
    return train[:4096], select[:512], {"test": test[:512], "another video": other[:512]}


def blur(row: dict) -> dict:
    """Each frame, or window of one, under a Gaussian of one pixel."""
    pixels = row["pixel_values"]
    shape = (WINDOW, WINDOW)
    if pixels.dim() == 3:
        shape = pixels.shape[1:]

    frames = pixels.reshape(len(pixels), *shape).numpy()
    blurred = torch.from_numpy(gaussian_filter(frames, (0, 1, 1)))
    return {**row, "pixel_values": blurred.reshape(pixels.shape)}


def salt_and_pepper(row: dict, generator: np.random.Generator) -> dict:
    """A tenth of the pixels are dead: they have the least or the greatest value. The labels stay clean."""
    pixels = row["pixel_values"].numpy().copy()
    is_dead = generator.random(pixels.shape) < 0.1
    extremes = np.where(generator.random(pixels.shape) < 0.5, pixels.min(), pixels.max())
    pixels[is_dead] = extremes[is_dead]
    return {**row, "pixel_values": torch.from_numpy(pixels)}


def misspell(text: str, generator: np.random.Generator) -> str:
    """`text`, a tenth of whose letters are left out, doubled, swapped with the next character, or replaced by a
    neighbour on an English keyboard."""
    typed = []
    characters = iter(text)
    for letter in characters:
        if letter.isalpha() and generator.random() < 0.1:
            kind = generator.integers(4)
            if kind == 0:
                letter = ""
            elif kind == 1:
                letter *= 2
            elif kind == 2:
                letter = next(characters, "") + letter
            else:
                letter = generator.choice(neighbours(letter))
        typed.append(letter)
    return "".join(typed)


def neighbours(letter: str) -> list[str]:
    for row in ("qwertyuiop", "asdfghjkl", "zxcvbnm"):
        place = row.find(letter.lower())
        if place >= 0:
            return [*row[max(0, place - 1) : place], *row[place + 1 : place + 2]]
    return [letter]


# ---- runs ----


def denoiser(task: str, train: torch.Tensor, steps: int):
    """A model for clips as these, and settings to train it by."""
    model, settings = demo.denoiser(train, steps)
    scale = {"loss_scale": model.config.loss_scale}
    sizes = {"hidden_size": WINDOW**2, "num_hidden_layers": demo.NUM_LAYERS}
    if task == "dust":
        config = models.DustConfig(**sizes, **scale, dictionary_size=2 * WINDOW**2)
        model = models.DustForVideoDenoising(config)
    elif task == "vit":
        encoder = ViTConfig(
            **sizes,
            intermediate_size=2 * WINDOW**2,
            num_attention_heads=4,
            num_channels=1,
            image_size=train.shape[-1],
            patch_size=WINDOW,
        )
        config = models.ViTDenoiserConfig(encoder_config=encoder, **scale)
        model = models.ViTForDenoising(config)
    return model, settings


def denoise(task: str, options: argparse.Namespace, settings: dict, rate: float, seed: int) -> dict:
    train, select, tests = data_of(task, options)
    settings = dict(settings)
    cut_to = settings.pop("cut_to", None)
    longer = settings.pop("longer", 1.0)
    steps = STEPS
    if options.smoke:
        steps = SMOKE_STEPS

    set_seed(seed)
    model, config = denoiser(task, train, steps)
    if cut_to is not None:
        model = truncate(model, cut_to)

    config.update(
        learning_rate=rate,
        per_device_train_batch_size=32,
        max_steps=round(longer * steps),
        seed=seed,
    )
    config.update(settings)
    noisy = noisy_rows(select, train.std())
    trainer, seconds = fit(model, demo.rows_of(train), config, eval_dataset=noisy)

    measure = {"metric": "rmse", "scale": 255, "batch_size": 64}
    layers = partial(trainer.evaluate_layers, gamma=demo.GAMMA_TRAIN, problem=None, **measure)
    curve = partial(trainer.evaluate_robustness, **measure)
    result = {"select": layers(demo.rows_of(select)).losses.tolist(), "seconds": seconds}
    for name, clips in tests.items():
        rows = demo.rows_of(clips)
        generator = np.random.default_rng(0)
        dead = [salt_and_pepper(row, generator) for row in rows]
        blurred = [blur(row) for row in rows]
        result[name] = {
            "losses": layers(rows).losses.tolist(),
            "noise": curve(rows, GAMMAS[task]).mean.tolist(),
            "salt and pepper": curve(dead, [0.0]).mean.tolist(),
            "blur": curve(blurred, [0.0]).mean.tolist(),
        }
    return result


def data_of(task: str, options: argparse.Namespace):
    if task == "photos":
        return photos(options)
    return video(options)


def noisy_rows(clips: torch.Tensor, deviation: torch.Tensor) -> list[dict]:
    """Clips under the noise of training, which is the same each time, for Trainer's own evaluations."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(clips.shape, generator=generator) * demo.GAMMA_TRAIN * deviation
    return [{"pixel_values": noisy, "labels": clean} for noisy, clean in zip(clips + noise, clips)]


def classify(
    task: str, options: argparse.Namespace, settings: dict, rate: float, seed: int
) -> dict:
    """MiniLM on all training rows but 1,000 to select on; reported on up to 4,000 test rows of both sets."""
    tokenizer = load_tokenizer(options.minilm)
    texts = texts_of(task, options)
    tokens = {
        name: tokenize(DatasetDict(train=data), tokenizer, 64)["train"]
        for name, data in texts.items()
    }
    rows = tokens.pop("rows")
    train = rows.select(range(1000, len(rows)))
    select = rows.select(range(1000))
    if options.smoke:
        train = train.select(range(256))
        select = select.select(range(64))
        tokens = {name: data.select(range(64)) for name, data in tokens.items()}

    settings = dict(settings)
    cut_to = settings.pop("cut_to", None)
    longer = settings.pop("longer", 1.0)
    set_seed(seed)
    model = models.LinearReadoutForSequenceClassification.from_encoder(
        options.minilm, "mean", num_labels=2
    )
    if cut_to is not None:
        model = truncate(model, cut_to)

    config = {
        "learning_rate": rate,
        "per_device_train_batch_size": 32,
        "num_train_epochs": longer * options.epochs,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.06,
        "noise_gamma": 1.0,
        "seed": seed,
    }
    config.update(settings)
    trainer, seconds = fit(model, train, config, eval_dataset=select, processing_class=tokenizer)

    layers = partial(trainer.evaluate_layers, problem=None, metric="accuracy", batch_size=64)
    result = {"select": layers(select).losses.tolist(), "seconds": seconds}
    for name, data in tokens.items():
        profile = layers(data)
        result[name] = {"losses": profile.losses.tolist(), "accuracy": profile.values.tolist()}

    curve = partial(trainer.evaluate_robustness, metric="accuracy")
    first = range(min(1000, len(tokens["test"])))
    typed = misspelt(texts["test"].select(first), tokenizer)
    result["test"]["noise"] = curve(tokens["test"].select(first), GAMMAS[task]).mean.tolist()
    result["test"]["typos"] = curve(typed, [0.0]).mean.tolist()
    return result


def misspelt(texts: Dataset, tokenizer) -> Dataset:
    generator = np.random.default_rng(0)
    typed = texts.map(lambda row: {"text": misspell(row["text"], generator)})
    return tokenize(DatasetDict(train=typed), tokenizer, 64)["train"]


def texts_of(task: str, options: argparse.Namespace) -> dict[str, Dataset]:
    """The training file's rows, and up to 4,000 test rows of both sets."""
    (other,) = set(TEXTS) - {task}
    own_folder = getattr(options, task)
    other_folder = getattr(options, other)
    files = {
        "rows": f"{own_folder}/train.parquet",
        "test": f"{own_folder}/test.parquet",
        other.replace("_", "-"): f"{other_folder}/test.parquet",
    }

    texts = {}
    for name, file in files.items():
        data = load_dataset("parquet", data_files=file, split="train").shuffle(seed=0)
        if name != "rows":
            data = data.select(range(min(4000, len(data))))
        texts[name] = data.select_columns(["text", "label"])
    return texts


def search(arm: str, first: float, seeds: list[int], run) -> None:
    """Train the arm with each seed at the learning rate of the least last loss on the select rows, which lies between
    two others where it can."""
    losses = {}  # of each exponent of 2, the mean of the seeds that ran

    def try_out(exponent: int, seeds: list[int]) -> None:
        rate = first * 2.0**exponent
        last = [run(arm, rate, seed)["select"][-1] for seed in seeds]
        losses[exponent] = np.nan_to_num(last, nan=np.inf).mean()

    for exponent in (-1, 0, 1):
        try_out(exponent, seeds[:1])
    while True:
        best = min(losses, key=losses.get)
        beside = [exponent for exponent in (best - 1, best + 1) if exponent not in losses]
        if beside and len(losses) < MOST_RATES:
            for exponent in beside:
                try_out(exponent, seeds[:1])
            continue

        try_out(best, seeds)
        if min(losses, key=losses.get) == best:
            return


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=RATES)
    parser.add_argument("--arms", nargs="+", help="all where not given")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=float, default=1.0, help="of imdb and rt_polarity")
    parser.add_argument("--videos", nargs=2, help="to train on, and another")
    for name in ("minilm", *TEXTS):
        parser.add_argument(f"--{name}", help="folder")
    parser.add_argument(
        "--output", default=str(RESULTS), help="finished runs; read and appended to"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it works")
    options = parser.parse_args(argv)
    needed = []
    if options.task in TEXTS:
        needed = ["minilm", *TEXTS]
    elif options.task != "photos":
        needed = ["videos"]
    if not all(getattr(options, name) for name in needed):
        parser.error(f"{options.task} needs --{' and --'.join(needed)}.")

    known = arms(options.task)
    if options.arms is None:
        options.arms = list(known)
    unknown = set(options.arms) - set(known)
    if unknown:
        parser.error(f"There is no arm {unknown.pop()!r}: the arms are {', '.join(known)}.")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(1)
    Path(options.output).parent.mkdir(exist_ok=True)
    finished = Runs(options.output)
    chosen = arms(options.task)
    train = denoise
    if options.task in TEXTS:
        train = classify

    def run(arm: str, rate: float, seed: int) -> dict:
        key = {"task": options.task, "arm": arm, "rate": rate, "seed": seed, "smoke": options.smoke}
        if options.task in TEXTS:
            key["epochs"] = options.epochs
        result = finished.get(key, lambda: train(options.task, options, chosen[arm], rate, seed))
        losses = [round(loss, 4) for loss in result["select"]]
        print(f"{arm}, {rate:g}, seed {seed}: {losses}", flush=True)
        return result

    for arm in options.arms:
        search(arm, RATES[options.task], options.seeds, run)


if __name__ == "__main__":
    main()
