import os
import re
import time
import wave

import numpy as np
import pytest
import torch
from PIL import Image
from tiny.files import encode_video

from hf_descent.data.denoising import ImageTask, PatchTask, to_patches
from hf_descent.data.video import VideoArguments, find_videos, load_clips, read_frames, split_videos


SIZE = 32


def pixels(number, height=SIZE, width=SIZE, seed=0):
    """Frame `number` of a video: smooth, different from all others, and never quite black."""
    rows, columns = np.mgrid[:height, :width]
    return (20 + number + 3 * seed + rows + 2 * columns).astype(np.uint8)


def write_video(path, count, seed=0, **size):
    path.parent.mkdir(parents=True, exist_ok=True)
    return encode_video(path, [pixels(number, seed=seed, **size) for number in range(count)])


def write_frames(folder, count, suffix, seed=0):
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(pixels(number, seed=seed)).save(folder / f"{number + 1}{suffix}")
    return str(folder)


def arguments(**values):
    sizes = {
        "num_frames": 4,
        "frame_size": SIZE,
        "patch_size": 8,
        "split_gap": 2,
        "validation_percentage": 20,
    }
    return VideoArguments(**{**sizes, "split_by": "time", **values})


@pytest.mark.parametrize("suffix", [".tif", ".png", ".bmp", ".avi"])
def test_frames_come_in_natural_order(tmp_path, suffix):
    path = tmp_path / f"frames{suffix}"
    (write_video if suffix == ".avi" else lambda path, count: write_frames(path, count, suffix))(
        path, 12
    )
    if path.is_dir():
        (path / "notes.txt").write_text("no frame")
        (path / f"._3{suffix}").write_bytes(b"no frame either")
    parts = split_videos(arguments(train_files=[str(path)], num_frames=2))
    assert sum(part.last - part.first for (part,) in parts.values()) == 12 - 2
    frames = np.stack(list(read_frames(str(path), SIZE))).astype(int)
    # Within one of 255: a gray bitmap has a palette, of colors.
    assert np.abs(frames - [pixels(i) for i in range(12)]).max() <= (suffix == ".bmp")


def test_files_and_folders_are_resized_alike(tmp_path):
    path = write_video(tmp_path / "video.avi", 1, height=48, width=80)
    (tmp_path / "frames").mkdir()
    Image.fromarray(np.stack([pixels(0, 48, 80)] * 3, axis=2)).save(
        tmp_path / "frames" / "1.png"
    )  # color
    decoded, loaded = (
        next(read_frames(str(p), SIZE)).astype(int) for p in (path, tmp_path / "frames")
    )
    assert decoded.shape == loaded.shape == (SIZE, SIZE)
    assert np.abs(decoded - loaded).max() <= 2
    assert (
        np.corrcoef(decoded.ravel(), np.mgrid[:SIZE, :SIZE].T.reshape(-1, 2) @ [160, 48])[0, 1]
        > 0.9
    )


def test_color_jpegs_are_read_as_the_gray_of_their_colors(tmp_path):
    rows, columns = np.mgrid[:SIZE, :SIZE] * 7
    colors = Image.fromarray(np.stack([rows, columns, 255 - rows], axis=2).astype(np.uint8))
    colors.save(tmp_path / "1.jpg", quality=90)
    with Image.open(tmp_path / "1.jpg") as image:
        expected = np.asarray(image.convert("RGB").convert("L")).astype(int)
    assert np.ptp(expected) > 100
    assert np.abs(next(read_frames(str(tmp_path), SIZE)) - expected).max() <= 2


def test_videos_are_held_out_whole_and_patterns_leave_other_folders_out(tmp_path):
    for number in range(1, 4):
        write_frames(tmp_path / "Train" / f"Train{number:03}", 9, ".tif", seed=number)
    write_frames(tmp_path / "Test" / "Test001", 9, ".tif")
    write_frames(tmp_path / "Test" / "Test001_gt", 9, ".bmp", seed=9)  # masks, as in UCSD
    files = {
        f"{name.lower()}_files": [f"{tmp_path}/{name}/{name}[0-9][0-9][0-9]"]
        for name in ("Train", "Test")
    }
    clips = load_clips(arguments(**files, split_by="video"))
    assert {name: len(split) for name, split in clips.items()} == {
        "train": 4,
        "validation": 2,
        "test": 2,
    }
    videos = {name: set(split["video"]) for name, split in clips.items()}
    assert len(videos["train"]) == 2 and not videos["train"] & videos["validation"]
    row = clips["test"].with_format("numpy")[1]
    assert row["start"] == 4  # of 9 frames two clips of 4
    np.testing.assert_array_equal(row["frames"], [pixels(i) for i in range(4, 8)])


def test_parts_of_a_video_lie_a_gap_apart(tmp_path):
    path = write_video(tmp_path / "video.avi", 44)
    clips = load_clips(arguments(train_files=[path], validation_percentage=30))
    frames = {
        name: {start + i for start in split["start"] for i in range(4)}
        for name, split in clips.items()
    }
    assert frames == {
        "train": set(range(28)),
        "validation": set(range(31, 43)),
    }  # 44 frames less a gap of 2: 29 and 13
    for split in clips.values():
        for row in split.with_format("numpy"):
            np.testing.assert_array_equal(
                row["frames"], [pixels(row["start"] + i) for i in range(4)]
            )


def test_patches_are_cut_row_by_row():
    frames = torch.rand(3, 4, 16, 24)  # [clips, frames, height, width]
    patches = to_patches(frames, 8)
    assert patches.shape == (3, 6, 4, 64)
    for place in range(6):
        row, column = divmod(place, 3)
        expected = frames[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8].flatten(2)
        assert torch.equal(patches[:, place], expected)
    assert torch.equal(to_patches(frames[0], 8), patches[0])


def test_rows_hold_every_pixel_once(tmp_path):
    clips = load_clips(arguments(train_files=[write_video(tmp_path / "video.avi", 30)]))["train"]
    frames = torch.from_numpy(np.stack(clips.with_format("numpy")["frames"][:]))
    patches = PatchTask(8).rows(clips)
    assert len(patches) == len(clips) * 16
    batch = PatchTask(8).collate(list(patches))
    assert batch["pixel_values"].dtype == torch.float32 and torch.equal(
        batch["pixel_values"], batch["labels"]
    )
    torch.testing.assert_close(batch["labels"], to_patches(frames, 8).flatten(0, 1) / 255)
    images = ImageTask.rows(clips)
    assert torch.equal(
        torch.stack([row["pixel_values"] for row in images]).to(torch.uint8), frames.flatten(0, 1)
    )


def test_decoded_once_until_the_file_changes(tmp_path, monkeypatch):
    def first_frame(path):
        return load_clips(arguments(train_files=[path]))["train"].with_format("numpy")[0]["frames"][
            0
        ]

    path = write_video(tmp_path / "video.avi", 30)
    np.testing.assert_array_equal(first_frame(path), pixels(0))
    with monkeypatch.context() as patch:
        patch.setattr("hf_descent.data.video.read_frames", None)
        np.testing.assert_array_equal(first_frame(path), pixels(0))
    write_video(tmp_path / "video.avi", 30, seed=5)
    os.utime(path, (time.time() + 10,) * 2)
    np.testing.assert_array_equal(first_frame(path), pixels(0, seed=5))
    folder = write_frames(tmp_path / "frames", 30, ".png")
    np.testing.assert_array_equal(first_frame(folder), pixels(0))
    Image.fromarray(pixels(0, seed=7)).save(tmp_path / "frames" / "1.png")
    os.utime(tmp_path / "frames" / "1.png", (1e9, 1e9))  # a copy that keeps its time
    np.testing.assert_array_equal(first_frame(folder), pixels(0, seed=7))
    for seed in (1, 2):  # another file of this name and time
        path = write_video(tmp_path / str(seed) / "video.avi", 30, seed=seed)
        os.utime(path, (1e9, 1e9))
        monkeypatch.chdir(os.path.dirname(path))
        np.testing.assert_array_equal(first_frame("video.avi"), pixels(0, seed=seed))


def test_patterns_and_missing_videos(tmp_path):
    for number in (10, 9):
        write_frames(tmp_path / f"v{number}", 1, ".png")
    assert [os.path.basename(path) for path in find_videos([str(tmp_path / "v*")])] == ["v9", "v10"]
    with pytest.raises(ValueError, match="no video at .*nothing"):
        find_videos([str(tmp_path / "nothing")])


def test_the_videos_held_out_are_drawn_by_the_split_seed(tmp_path):
    paths = [write_frames(tmp_path / str(number), 4, ".bmp") for number in range(6)]

    def held_out(seed):
        (video,) = split_videos(arguments(train_files=paths, split_by="video", split_seed=seed))[
            "validation"
        ]
        return video.path

    assert held_out(0) == held_out(0) and len({held_out(seed) for seed in range(5)}) > 1
    most = split_videos(
        arguments(train_files=paths[:2], split_by="video", validation_percentage=90)
    )
    assert len(most["train"]) == 1


def test_no_video_is_in_two_splits(tmp_path):
    for number in range(3):
        write_video(tmp_path / f"{number}.avi", 8)
    (tmp_path / "link.avi").symlink_to(tmp_path / "1.avi")
    twice = [str(tmp_path / "[0-9].avi"), str(tmp_path / "1.avi"), str(tmp_path / "link.avi")]
    assert [os.path.basename(path) for path in find_videos(twice)] == ["0.avi", "1.avi", "2.avi"]
    for name in ("1.avi", "link.avi"):
        args = arguments(train_files=twice[:1], test_files=[str(tmp_path / name)], split_by="video")
        with pytest.raises(ValueError, match=r"1\.avi is in `train_files` and in `test_files`"):
            split_videos(args)


@pytest.mark.parametrize("name", ["3.png", "3.tif"])
def test_an_image_that_cannot_be_read_is_named(tmp_path, name):
    write_frames(tmp_path / "frames", 20, ".png")
    (tmp_path / "frames" / "3.png").write_bytes(b"no image")
    if name == "3.tif":  # in colors that the decoder does not know
        (tmp_path / "frames" / "3.png").unlink()
        Image.fromarray(np.zeros((8, 8, 3), np.uint8), "LAB").save(tmp_path / "frames" / name)
    with pytest.raises(
        ValueError, match=rf"frames/{re.escape(name)} cannot be read as a video or an image"
    ):
        load_clips(arguments(train_files=[str(tmp_path / "frames")]))


def test_a_video_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "bad.avi").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"bad\.avi cannot be read as a video"):
        load_clips(arguments(train_files=[str(tmp_path / "bad.avi")]))
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 8, "NONE", None))
        sound.writeframes(bytes(16))
    with pytest.raises(ValueError, match=r"sound\.wav cannot be read as a video"):
        load_clips(arguments(train_files=[str(tmp_path / "sound.wav")]))
    (tmp_path / "frames").mkdir()
    with pytest.raises(ValueError, match="frames holds no frames"):
        load_clips(arguments(train_files=[str(tmp_path / "frames")]))


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        ({}, r"validation split holds no clip.*frames 10 to 12 of .*short\.avi .*`split_gap`"),
        ({"validation_percentage": 0}, "validation split holds no clip"),
        ({"validation_percentage": 100}, "train split holds no clip"),
    ],
)
def test_splits_without_a_clip_are_refused(tmp_path, shares, match):
    path = write_video(tmp_path / "short.avi", 12)
    with pytest.raises(ValueError, match=match):
        load_clips(arguments(train_files=[path], **shares))
    with pytest.raises(ValueError, match=r"needs two training videos.*use 'time'"):
        load_clips(arguments(train_files=[path], split_by="video"))
    with pytest.raises(ValueError, match="No videos: give `train_files`"):
        arguments()


def test_a_video_too_short_for_the_gaps_between_parts_is_left_out(tmp_path, caplog):
    paths = [write_video(tmp_path / "long.avi", 60), write_video(tmp_path / "short.avi", 3, seed=1)]
    splits = load_clips(arguments(train_files=paths, split_gap=10))
    assert {name for split in splits.values() for name in split["video"]} == {
        os.path.realpath(paths[0])
    }
    for split in ("train", "validation"):
        assert f"Dropped 1 of the 2 videos of the {split} split" in caplog.text
