"""Surveillance video (CUHK Avenue, UCSD Ped1 and Ped2, ShanghaiTech Campus, or your own) as clips of gray frames.

A video is a file that PyAV decodes, or a folder of images, which it decodes as well. Frames are gray, square (160x160)
and cut into patches (16x16), as in the paper (arXiv 2601.17257, appendix B.2). A clip is T consecutive frames; clips
do not overlap. The trainer adds the noise (`EmbeddingNoise`).
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from datasets import Array3D, Dataset, DatasetDict, Features, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from .splits import RowArguments, check_arguments


logger = logging.get_logger(__name__)

CLIPS_AT_ONCE = 50  # held and written together: Arrow cannot write 2**31 bytes at once
IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff")


@dataclass
class VideoArguments(RowArguments):
    """Which videos, how they are split, and how they are cut into clips."""

    train_files: list[str] | None = HfArg(
        default=None, help="Videos (files, folders of frames, or patterns of them) to train on."
    )
    test_files: list[str] | None = HfArg(
        default=None, help="Videos for the final report, read after training."
    )
    split_by: Literal["video", "time"] = HfArg(
        default="video",
        help="Hold out whole training videos for validation (`video`), or the end of each (`time`).",
    )
    validation_percentage: float = HfArg(
        default=10.0, help="Share of the videos, or of their frames, to hold out."
    )
    split_gap: int = HfArg(
        default=50, help="With `split_by` time: frames left out before the end of a video."
    )
    num_frames: int = HfArg(default=10, help="Frames T in a clip.")
    frame_size: int = HfArg(default=160, help="Height and width of a frame, in pixels.")
    patch_size: int = HfArg(default=16, help="Height and width of a patch, in pixels.")
    cache_dir: str | None = HfArg(default=None, help="Folder for the decoded clips.")

    def __post_init__(self):
        super().__post_init__()
        check_arguments(self, {"split_gap": 0, "num_frames": 1, "frame_size": 1, "patch_size": 1})
        if not self.train_files:
            raise ValueError("No videos: give `train_files`.")


class VideoPart(NamedTuple):
    """The frames `first` to `last` (not included) of one video. `stamp` changes when its files change."""

    path: str
    first: int
    last: int
    stamp: str


def load_clips(args: VideoArguments) -> DatasetDict:
    """Decode the videos into clips: "train", "validation" and, if there are `test_files`, "test". The result is
    cached.

    A row is a clip: `frames` (uint8 `[num_frames, frame_size, frame_size]`), `video` (its path) and `start` (number of
    its first frame). ValueError if a folder or file is missing or unreadable, or a split holds no clip."""
    shape = (args.num_frames, args.frame_size, args.frame_size)
    features = Features(
        {"frames": Array3D(shape, "uint8"), "video": Value("string"), "start": Value("int64")}
    )

    splits = DatasetDict()
    for name, parts in split_videos(args).items():
        try:
            splits[name] = Dataset.from_generator(
                read_clips,
                features=features,
                gen_kwargs={
                    "parts": list(map(tuple, parts)),
                    "num_frames": shape[0],
                    "size": args.frame_size,
                },
                cache_dir=args.cache_dir,
                writer_batch_size=CLIPS_AT_ONCE,
            )
        except DatasetGenerationError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # it names the file

    return splits


def split_videos(args: VideoArguments) -> dict[str, list[VideoPart]]:
    """The parts of the videos in each split; ValueError if there are none, or none is long enough."""
    train = [_whole(path) for path in find_videos(args.train_files)]
    test = [_whole(path) for path in find_videos(args.test_files or [])]
    shared = {video.path for video in train}.intersection(video.path for video in test)
    if shared:
        raise ValueError(
            f"{shared.pop()} is in `train_files` and in `test_files`: leave it out of one."
        )

    splits = (
        _split_by_time(train, args) if args.split_by == "time" else _split_by_video(train, args)
    )
    if test:
        splits["test"] = test
    return {name: _long_parts(parts, name, args.num_frames) for name, parts in splits.items()}


def _split_by_time(videos: list[VideoPart], args: VideoArguments) -> dict[str, list[VideoPart]]:
    """The beginning of each video for training, and its end for validation."""
    parts = {"train": [], "validation": []}
    for video in videos:
        border = round((1 - args.validation_percentage / 100) * (video.last - args.split_gap))
        parts["train"].append(video._replace(last=border))
        parts["validation"].append(video._replace(first=border + args.split_gap))
    return parts


def _split_by_video(videos: list[VideoPart], args: VideoArguments) -> dict[str, list[VideoPart]]:
    """Some videos for validation, drawn at random, and the others for training."""
    if len(videos) < 2:
        raise ValueError(
            f"`split_by` video needs two training videos, and there is {videos[0].path}: use 'time'."
        )

    order = np.random.default_rng(args.split_seed).permutation(len(videos)).tolist()
    count = round(args.validation_percentage / 100 * len(videos))
    count = min(max(1, count), len(videos) - 1)

    return {
        "train": [videos[index] for index in sorted(order[count:])],
        "validation": [videos[index] for index in sorted(order[:count])],
    }


def _long_parts(parts: list[VideoPart], split: str, num_frames: int) -> list[VideoPart]:
    """The parts that are as long as a clip. Shows how many are not; ValueError if none is."""
    long_enough = [part for part in parts if part.last - part.first >= num_frames]
    if not long_enough:
        part = parts[0]
        raise ValueError(
            f"The {split} split holds no clip of `num_frames` {num_frames}: it has frames {part.first} to {part.last} "
            f"of {part.path} (in between, `split_gap` frames are left out)."
        )

    if len(long_enough) < len(parts):
        logger.warning(
            f"Dropped {len(parts) - len(long_enough)} of the {len(parts)} videos of the {split} split: there they "
            f"have fewer than `num_frames` {num_frames} frames."
        )
    return long_enough


def find_videos(patterns: Sequence[str]) -> list[str]:
    """Video files and folders of frames, each once, in natural order; ValueError names a pattern without any."""

    videos = []
    for pattern in patterns:
        paths = glob.glob(pattern)
        if os.path.exists(pattern):
            paths = [pattern]
        if not paths:
            raise ValueError(f"There is no video at {pattern!r}: check the path.")
        videos.extend(map(os.path.realpath, sorted(paths, key=_natural)))

    return list(dict.fromkeys(videos))


def read_frames(path: str, size: int) -> Iterator[np.ndarray]:
    """The frames of a video, gray and resized, uint8 `[size, size]` each; ValueError if it cannot be read."""
    for file in _files(path):
        with _opened(file) as container:
            container.streams.video[0].thread_type = "AUTO"
            for frame in container.decode(video=0):
                yield frame.reformat(size, size, "gray", interpolation="BILINEAR").to_ndarray()


def read_clips(parts: Iterable[tuple], num_frames: int, size: int) -> Iterator[dict[str, Any]]:
    """Rows of [`load_clips`], decoded one clip at a time; `parts` are [`VideoPart`]s as tuples."""
    for path, start, last, _ in parts:
        frames = islice(read_frames(path, size), start, last)
        clip = list(islice(frames, num_frames))
        while len(clip) == num_frames:
            yield {"frames": np.stack(clip), "video": path, "start": start}
            start += num_frames
            clip = list(islice(frames, num_frames))


def _whole(path: str) -> VideoPart:
    """A whole video. Its frames are counted without decoding them; ValueError names it if it cannot be read."""
    files = _files(path)
    count = len(files)
    if not os.path.isdir(path):
        with _opened(path) as container:
            count = sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))

    states = []
    for file in files:
        stat = os.stat(file)
        states.append((file, stat.st_size, stat.st_mtime_ns))
    return VideoPart(path, 0, count, Hasher.hash(states))


def _files(path: str) -> list[str]:
    """A video file alone, or the images of a folder in natural order."""
    if not os.path.isdir(path):
        return [path]

    # A pattern leaves out hidden files, as UCSD's "._001.tif".
    files = [
        file
        for file in glob.glob(f"{glob.escape(path)}/*")
        if file.lower().endswith(IMAGE_SUFFIXES)
    ]

    if not files:
        raise ValueError(
            f"The folder {path} holds no frames: no file ends in {', '.join(IMAGE_SUFFIXES)}."
        )
    return sorted(files, key=_natural)


def _natural(path: str) -> list:
    """Sort key that puts frame 2 before frame 10."""
    words = re.split(r"(\d+)", path)
    words[1::2] = map(int, words[1::2])
    return words


@contextmanager
def _opened(path: str):
    """A video file or an image; ValueError names it if it, or one of its frames, cannot be read."""
    import av

    try:
        with av.open(path) as container:
            yield container
    except (av.error.FFmpegError, IndexError) as error:  # IndexError: there is no video stream
        raise ValueError(f"{path} cannot be read as a video or an image ({error}).") from error
