"""`hf-descent denoise` from its smoke recipes, on a small video and a tiny random ViT."""

import shutil

import numpy as np
import pytest
import torch
from smoke import SMOKE, results_of, smoke_command
from tiny.files import write_video
from transformers import AutoModelForImageToImage, ViTConfig, ViTImageProcessor, ViTModel

from hf_descent import cli
from hf_descent.commands.denoise import ModelArguments, build_model, measure_sigma
from hf_descent.data.denoising import ImageTask, PatchTask, load_denoiser
from hf_descent.data.video import VideoArguments, load_clips
from recipes.reproduce import tune


SIZES = {"split_by": "time", "split_gap": 0, "num_frames": 4, "frame_size": 32, "patch_size": 8}
RECIPES = sorted(path.relative_to(SMOKE) for path in SMOKE.glob("video-*/*.yaml"))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("denoise")
    write_video(folder / "train.avi", 60, 1)
    write_video(folder / "test.avi", 12, 2)
    torch.manual_seed(0)
    sizes = {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
    }
    ViTModel(ViTConfig(hidden_size=48, patch_size=4, **sizes)).save_pretrained(folder / "vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder / "vit")
    return folder


@pytest.fixture
def smoke(workplace, tmp_path):
    """Runs the README's command of a smoke recipe on the small videos, and gives its output folder."""

    def run(recipe, *flags):
        argv = [
            str(workplace / word) if word.endswith(".avi") else word
            for word in smoke_command(recipe)
        ]
        argv = [str(workplace / "vit") if word == "path/to/vit" else word for word in argv]
        cli.main([*argv, "--output_dir", str(tmp_path / "out"), *flags])
        return tmp_path / "out"

    return run


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_smoke_recipes_run(smoke, recipe, capsys):
    folder = smoke(recipe)
    results = results_of(folder)
    for split in ("validation", "test"):
        # The losses are in units of the noisy input's own at level 0.15, whose RMSE in 0-255 is known.
        config = AutoModelForImageToImage.from_pretrained(folder).config
        scale = 255 * (0.5 if "vit" in str(recipe) else 1)
        if recipe.stem != "erm":
            by_loss = 0.15 * config.noise_sigma * scale * results[f"{split}_layer_loss_3"] ** 0.5
            assert results[f"{split}_layer_rmse_3"] == pytest.approx(by_loss, rel=1e-3)
        curve = [results[f"{split}_rmse@{gamma}"] for gamma in ("0", "0.15", "0.5")]
        assert results[f"{split}_mean_rmse"] == pytest.approx(np.mean(curve))
        assert f"{split}_feasible" in results  # plain training is judged, too
    assert f"{results['test_rmse@0.5']:.5g}" in capsys.readouterr().out


def test_plain_training_comes_first_and_stands_beside(smoke, workplace, capsys):
    """The arms are the runs that their commands make alone, and the table has the losses of both."""
    folder = smoke("video-ut/descent.yaml", "--with_plain")
    printed = capsys.readouterr().out
    layers = {
        name: results_of(path, "layer_profile")
        for name, path in (("plain", folder / "_plain"), ("descent", folder))
    }
    curves = [results_of(path, "noise_curve") for path in (folder / "_plain", folder)]
    title = "Plain training and 'descent' side by side, at noise level 0.15"
    table = printed.split(title)[1].splitlines()
    for layer, (plain, loss) in enumerate(zip(*(each["losses"] for each in layers.values())), 1):
        assert table[layer + 1].split()[:3] == [f"{layer}", f"{plain:.4g}", f"{loss:.4g}"]
    assert "Last layer: " in "\n".join(table) and "Plain training meets" in "\n".join(table)
    cli.main(["compare", str(folder), str(folder / "_plain"), "--output_dir", str(folder / "both")])
    printed = capsys.readouterr().out
    assert table[1] in printed and "plain against out" in printed
    alone = smoke("video-ut/descent.yaml", "--overwrite_output_dir")
    assert results_of(alone, "noise_curve")["values"] == curves[1]["values"]
    plain = smoke("video-ut/descent.yaml", "--objective", "erm", "--overwrite_output_dir")
    assert results_of(plain, "noise_curve")["values"] == curves[0]["values"]


def test_the_saved_model_is_the_evaluated_one(smoke, workplace):
    folder = smoke("video-dust/erm.yaml")
    assert results_of(folder, "noise_curve")["values"][0][0] == results_of(folder)["test_rmse@0"]
    assert (
        results_of(folder, "layer_profile")["losses"][2] == results_of(folder)["test_layer_loss_3"]
    )
    model = AutoModelForImageToImage.from_pretrained(folder).eval()
    args = VideoArguments(
        train_files=[str(workplace / "test.avi")], validation_percentage=34, **SIZES
    )
    errors = []
    for split in load_clips(args).values():
        clean = PatchTask(8).rows(split)[:]["pixel_values"].float() / 255
        errors.append((model(clean).logits - clean).square().detach())
    assert results_of(folder)["test_rmse@0"] == pytest.approx(
        255 * torch.cat(errors).mean().sqrt().item(), rel=1e-4
    )


def test_training_beats_the_noisy_input_and_constraints_hold(smoke):
    flags = [
        "--max_steps",
        "200",
        "--save_strategy",
        "no",
        "--attention_step",
        "0.4",
        "--learning_rate",
        "3e-4",
    ]
    folder = smoke("video-ut/descent.yaml", *flags)
    results = results_of(folder)
    assert results["validation_max_violation"] < 0
    noisy_rmse = 0.15 * AutoModelForImageToImage.from_pretrained(folder).config.noise_sigma * 255
    assert results["validation_rmse@0.15"] < 0.8 * noisy_rmse


@pytest.mark.parametrize("limit", [None, 10])
def test_rows_are_drawn_at_random(workplace, limit):
    args = VideoArguments(
        train_files=[str(workplace / "train.avi")],
        max_train_samples=limit,
        max_eval_samples=limit,
        **SIZES,
    )
    for split, clips in load_clips(args).items():
        rows = PatchTask(8).rows(clips)
        drawn, in_order = (each[:]["pixel_values"] for each in (args.draw(split, rows), rows))
        places = np.random.default_rng(0).permutation(len(rows))[:limit]
        assert torch.equal(drawn, in_order[places]) and not torch.equal(
            drawn, in_order[: len(drawn)]
        )


def test_tuning_reads_no_test_videos(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_descent.evaluation.comparison.Run.load", lambda folder: 1 / 0)
    videos = [
        "--train_files",
        str(workplace / "train.avi"),
        "--test_files",
        "unreadable.avi",
        "--split_gap",
        "0",
    ]
    flags = [
        "--split_by",
        "time",
        "--max_steps",
        "1",
        "--output_dir",
        str(tmp_path),
        "--n_trials",
        "1",
    ]
    with pytest.raises(ZeroDivisionError):
        tune.main(["denoise", "--config", str(SMOKE / "video-ut/descent.yaml"), *videos, *flags])
    assert not any(name.startswith("test") for name in results_of(tmp_path / "trial-0"))


def test_sigma_is_the_deviation_of_the_training_pixels(workplace):
    args = VideoArguments(train_files=[str(workplace / "train.avi")], **SIZES | {"split_gap": 4})
    clips = load_clips(args)["train"]
    expected = np.stack(clips.with_format("numpy")["frames"][:]).astype(float).std() / 255
    assert measure_sigma(PatchTask(8).rows(clips), PatchTask(8)) == pytest.approx(
        expected, rel=1e-5
    )
    assert clips["start"][-1] == 44  # 12 clips
    black = PatchTask(8).rows(clips.map(lambda row: {"frames": np.zeros((4, 32, 32), np.uint8)}))
    with pytest.raises(ValueError, match="clean signal has variance 0"):
        measure_sigma(black, PatchTask(8))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"architecture": "vit"}, "needs a pretrained encoder"),
        ({"architecture": "ut", "model_name_or_path": "x"}, "the others take none"),
        ({"architecture": "ut", "num_layers": 0}, "`num_layers` is 0; give at least 1"),
        (
            {"architecture": "ut", "attention_step": 3.0},
            "`attention_step` is 3.0; give numbers from",
        ),
        ({"architecture": "dust", "sparsity": -1.0}, "`sparsity` is -1.0"),
    ],
)
def test_bad_arguments_are_refused(values, match):
    with pytest.raises(ValueError, match=match):
        ModelArguments(**values)


def test_patches_that_do_not_fill_a_frame_are_refused(workplace):
    clips = load_clips(VideoArguments(train_files=[str(workplace / "train.avi")], **SIZES))["train"]
    with pytest.raises(
        ValueError, match="`patch_size` is 7; give one that divides `frame_size`, 32"
    ):
        PatchTask(7).rows(clips)


def test_damaged_weights_are_named(workplace, tmp_path):
    shutil.copytree(workplace / "vit", tmp_path / "vit")
    args, task = (
        ModelArguments("vit", model_name_or_path=str(tmp_path / "vit")),
        ImageTask(str(tmp_path / "vit")),
    )
    row = {"pixel_values": torch.zeros(32, 32, dtype=torch.uint8)}
    build_model(args, task, 0.5, row).save_pretrained(tmp_path / "run")
    for name in ("vit", "run"):
        (tmp_path / name / "model.safetensors").write_bytes(
            b"version https://git-lfs.github.com/spec/v1"
        )
    with pytest.raises(ValueError, match="vit' are damaged"):
        build_model(args, task, 0.5, row)
    with pytest.raises(ValueError, match="run' are damaged"):
        load_denoiser(str(tmp_path / "run"))
