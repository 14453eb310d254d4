"""What an argument must be is said by name before anything is loaded."""

import re

import pytest

from hf_descent import cli
from hf_descent.commands import denoise, evaluate, exit
from hf_descent.data.alpaca import AlpacaArguments
from hf_descent.data.text import DataArguments
from hf_descent.data.video import VideoArguments
from recipes.reproduce import generate, tune


COUNTS = ("batch_size", "max_new_tokens", "max_samples")
LEVELS = {
    "eval_gammas": [0.0, -1.0],
    "profile_gammas": [-1.0],
    "confidence": 95.0,
}
NOISE = {"draws": 0, "per_device_eval_batch_size": 0}
DENOISER = {"architecture": "unet", "loss_gamma": 0.0, "noise_draws": 0}
VIDEO = {"num_frames": 0, "split_gap": -1, "split_by": "frame"}


@pytest.mark.parametrize(
    ("arguments", "given", "refused"),
    [
        (evaluate.EvaluateArguments, {}, LEVELS | NOISE),
        (exit.ExitArguments, {}, dict.fromkeys(("batch_size", "repeats", "fewest_layers"), 0)),
        (exit.ExitArguments, {}, {"max_loss": -0.1}),
        (generate.GenerateArguments, {"output": "a"}, dict.fromkeys(COUNTS, 0)),
        (generate.GenerateArguments, {"output": "a"}, {"gamma": -1.0, "seed": -1}),
        (tune.TuneArguments, {}, {"n_trials": 0}),
        (denoise.ModelArguments, {"architecture": "ut"}, DENOISER),
        (VideoArguments, {"train_files": ["x"]}, VIDEO),
        (DataArguments, {}, {"max_train_samples": 0, "max_eval_samples": 0, "max_seq_length": 0}),
        (AlpacaArguments, {}, {"prompt_format": "llama", "validation_split_percentage": 0.05}),
    ],
)
def test_what_is_out_of_range_is_refused(arguments, given, refused):
    for name, value in refused.items():
        with pytest.raises(
            ValueError, match=rf"`{name}` is {re.escape(repr(value))}; (give|choose) "
        ):
            arguments(**given | {name: value})


def test_nothing_is_written_before(tmp_path):
    flags = ["--output_dir", str(tmp_path / "out"), "--batch_size", "0"]
    with pytest.raises(ValueError, match="`batch_size` is 0; give at least 1"):
        cli.main(["exit", str(tmp_path / "none"), *flags])
    assert not list(tmp_path.iterdir())
