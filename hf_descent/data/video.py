"""Surveillance video (CUHK Avenue, UCSD Ped1 and Ped2, ShanghaiTech Campus, or your own) as clips of gray frames.

A video is a file that PyAV decodes, or a folder of frames. Frames are gray, square (160x160) and cut into patches
(16x16), as in the paper (arXiv 2601.17257, appendix B.2). A clip is T consecutive frames; clips do not overlap. The
trainer adds the noise (`EmbeddingNoise`).
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Array3D, Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, Value
from datasets.exceptions import DatasetGenerationError
from datasets.fingerprint import Hasher
from PIL import Image
from transformers.utils import logging

from .patches import rows_at_once


logger = logging.get_logger(__name__)

IMAGE_SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff")
# As the sets are published. The masks in UCSD's Test/Test001_gt are no frames.
LAYOUTS = {
    "avenue": {"train": "training_videos/*.avi", "test": "testing_videos/*.avi"},
    "ucsd": {"train": "Train/Train[0-9][0-9][0-9]", "test": "Test/Test[0-9][0-9][0-9]"},
    "shanghaitech": {"train": "training/videos/*.avi", "test": "testing/frames/*"},
}


@dataclass
class VideoArguments:
    """Which videos, how they are split, and how they are cut into clips."""

    data_layout: str | None = field(
        default=None,
        metadata={"help": f"Published layout of `data_dir`: {', '.join(LAYOUTS)} (UCSDped1 or UCSDped2 itself)."},
    )
    data_dir: str | None = field(default=None, metadata={"help": "Folder of that data set."})
    train_files: list[str] | None = field(
        default=None,
        metadata={"help": "In place of a layout: video files or folders of frames to train on, or patterns of them."},
    )
    test_files: list[str] | None = field(
        default=None, metadata={"help": "The same for the final report, read once, after training."}
    )
    split_by: str = field(
        default="video",
        metadata={
            "help": "What is held out of the training videos for validation: whole videos (`video`), or the end of "
            "each (`time`)."
        },
    )
    validation_percentage: float = field(
        default=10.0, metadata={"help": "Share of the videos, or of the frames of each, that is held out so."}
    )
    later_percentage: float = field(
        default=0.0,
        metadata={"help": "With `split_by` time: share of the frames at the very end for a test split `later`."},
    )
    split_gap: int = field(default=50, metadata={"help": "Frames left out between parts of one video."})
    split_seed: int = field(
        default=0,
        metadata={"help": "Seed of the draws of this data. Not `seed`: runs that differ by it share their data."},
    )
    num_frames: int = field(default=10, metadata={"help": "Frames T in a clip."})
    frame_size: int = field(default=160, metadata={"help": "Height and width of a frame, in pixels."})
    patch_size: int = field(default=16, metadata={"help": "Height and width of a patch, in pixels."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on this many rows, drawn at random."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on this many rows of every other split, drawn at random."}
    )
    without_tests: bool = field(
        default=False, metadata={"help": "Leave out the splits `later` and `test`, as `hf-descent tune` does."}
    )
    streaming: bool = field(default=False, metadata={"help": "Decode the videos at every pass; nothing is cached."})
    cache_dir: str | None = field(default=None, metadata={"help": "Folder for the decoded clips."})

    def __post_init__(self):
        given = tuple(name for name in ("data_layout", "data_dir", "train_files", "test_files") if getattr(self, name))
        if given not in (("data_layout", "data_dir"), ("train_files",), ("train_files", "test_files")):
            raise ValueError(
                f"The videos are named by {', '.join(given) or 'nothing'}; give `data_layout` with `data_dir`, or "
                "`train_files` and perhaps `test_files`."
            )
        if self.data_layout is not None and self.data_layout not in LAYOUTS:
            raise ValueError(f"`data_layout` is {self.data_layout!r}; choose one of {', '.join(LAYOUTS)}.")
        if self.split_by not in ("video", "time"):
            raise ValueError(f"`split_by` is {self.split_by!r}; choose 'video' or 'time'.")
        if not 0 < self.validation_percentage <= self.validation_percentage + self.later_percentage < 100:
            raise ValueError(
                f"`validation_percentage` is {self.validation_percentage} and `later_percentage` "
                f"{self.later_percentage}; the first must be positive, and something must be left to train on."
            )
        if self.later_percentage and self.split_by != "time":
            raise ValueError("`later_percentage` needs `split_by` time: it is the end of every training video.")
        for name in ("num_frames", "frame_size", "patch_size", "max_train_samples", "max_eval_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; give a positive number or leave it out.")
        if self.split_gap < 0:
            raise ValueError(f"`split_gap` is {self.split_gap}; give 0 or more frames.")
        for name in ("train_files", "test_files"):
            if isinstance(getattr(self, name), str):  # of a YAML file
                setattr(self, name, [getattr(self, name)])


@dataclass(frozen=True)
class VideoPart:
    """The frames `first` to `last` (not included) of one video; `stamp` differs where its files do."""

    path: str
    first: int
    last: int
    stamp: str


def load_clips(args: VideoArguments) -> DatasetDict | IterableDatasetDict:
    """Decodes the videos into clips; once, as the result is cached.

    Returns:
        The splits "train", "validation" and, where they are given, "later" (the end of each training video) and
        "test" (the layout's, or `test_files`). A row is a clip: `frames` (uint8 `[num_frames, frame_size,
        frame_size]`), `video` (its path) and `start` (number of its first frame). With `streaming`, an
        `IterableDatasetDict`, decoded anew at every pass.

    Raises:
        ValueError: a folder or file is missing or unreadable, or a split holds no clip.
    """
    parts = split_videos(args)
    features = Features(
        {
            "frames": Array3D((args.num_frames, args.frame_size, args.frame_size), "uint8"),
            "video": Value("string"),
            "start": Value("int64"),
        }
    )
    splits = IterableDatasetDict() if args.streaming else DatasetDict()
    for name, of_split in parts.items():
        fields = {"parts": list(map(astuple, of_split)), "num_frames": args.num_frames, "size": args.frame_size}
        settings = {"features": features, "gen_kwargs": fields}
        if args.streaming:
            splits[name] = IterableDataset.from_generator(read_clips, **settings)
            continue
        settings |= {"cache_dir": args.cache_dir, "writer_batch_size": rows_at_once(features["frames"].shape)}
        try:
            splits[name] = Dataset.from_generator(read_clips, **settings)
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None  # the cause names the file
    return splits


def split_videos(args: VideoArguments) -> dict[str, list[VideoPart]]:
    """The parts of the videos in each split; ValueError if there are none, or none is long enough."""
    if args.data_layout is not None:
        folder = Path(glob.escape(args.data_dir))
        patterns = {split: [str(folder / pattern)] for split, pattern in LAYOUTS[args.data_layout].items()}
    else:
        patterns = {"train": args.train_files, "test": args.test_files or []}
    whole = {
        split: [VideoPart(path, 0, count_frames(path), _stamp(path)) for path in find_videos(given)]
        for split, given in patterns.items()
        if given and not (split == "test" and args.without_tests)
    }
    trained_on = {os.path.realpath(video.path) for video in whole["train"]}
    for video in whole.get("test", ()):
        if os.path.realpath(video.path) in trained_on:
            raise ValueError(
                f"`test_files` has {video.path}, which `train_files` has too. Leave it out of one of the two, or hold "
                "out its end (`split_by` time, `later_percentage`)."
            )
    validation, later = (share / 100 for share in (args.validation_percentage, args.later_percentage))
    if args.split_by == "time":
        shares = {"train": 1 - validation - later, "validation": validation} | ({"later": later} if later else {})
        divided = [_divide(video, list(shares.values()), args.split_gap) for video in whole["train"]]
        parts = dict(zip(shares, map(list, zip(*divided))))
    else:
        videos = whole["train"]
        if len(videos) < 2:
            raise ValueError(f"`split_by` video needs two training videos, and there is {videos[0].path}: use 'time'.")
        order = np.random.default_rng(args.split_seed).permutation(len(videos))
        count = min(max(1, round(validation * len(videos))), len(videos) - 1)
        held_out = set(order[:count].tolist())
        parts = {
            "train": [video for i, video in enumerate(videos) if i not in held_out],
            "validation": [video for i, video in enumerate(videos) if i in held_out],
        }
    parts |= {split: videos for split, videos in whole.items() if split == "test"}
    if args.without_tests:
        parts.pop("later", None)
    return {name: _long_enough(name, of_split, args.num_frames) for name, of_split in parts.items()}


def find_videos(patterns: Sequence[str]) -> list[str]:
    """Video files and folders of frames, each once, in natural order; ValueError naming a pattern without any."""
    found = {}
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else glob.glob(pattern)
        matches = [path for path in matches if not Path(path).name.startswith(".")]
        if not matches:
            raise ValueError(f"There is no video at {pattern!r}: check the path, or the layout of the data set.")
        for path in sorted(matches, key=_natural):
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def count_frames(path: str) -> int:
    """Number of frames of a video, without decoding it; ValueError naming the file when it cannot be read."""
    if Path(path).is_dir():
        return len(_frame_files(path))
    with _opened(path) as container:
        return sum(packet.size > 0 for packet in container.demux(container.streams.video[0]))


def read_frames(path: str, size: int) -> Iterator[np.ndarray]:
    """The frames of a video, gray and resized (bilinear, antialiased): uint8 `[size, size]` each.

    Raises:
        ValueError: naming the file that cannot be read.
    """
    if Path(path).is_dir():
        for file in _frame_files(path):
            try:
                with Image.open(file) as image:
                    if image.mode[0] in "IF":  # which `convert` cuts off at 255
                        raise ValueError(f"pixels of mode {image.mode}: give frames of 8 bits")
                    image.draft("L", None)  # of a color JPEG, decode the brightness alone: a third less time
                    frame = np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR))
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise ValueError(f"{file} cannot be read as an image ({error}).") from error
            yield frame
        return
    with _opened(path) as container:
        container.streams.video[0].thread_type = "AUTO"
        for frame in container.decode(video=0):
            yield frame.reformat(size, size, "gray", interpolation="BILINEAR").to_ndarray()


def read_clips(parts: Iterable[tuple], num_frames: int, size: int) -> Iterator[dict[str, Any]]:
    """Rows of [`load_clips`], decoded one clip at a time; `parts` are [`VideoPart`]s as tuples.

    Raises:
        ValueError: a file cannot be read, or a part has fewer than `num_frames` frames that can.
    """
    for path, first, last, _ in parts:
        frames = islice(read_frames(path, size), first, last)
        start = first
        while len(clip := list(islice(frames, num_frames))) == num_frames:
            yield {"frames": np.stack(clip), "video": path, "start": start}
            start += num_frames
        if start == first:
            raise ValueError(
                f"{path}: of its frames {first} to {last}, fewer than `num_frames` {num_frames} can be decoded."
            )


def _divide(video: VideoPart, shares: Sequence[float], gap: int) -> list[VideoPart]:
    """Consecutive parts of a video, with `gap` frames between them."""
    borders = np.round(np.cumsum([0, *shares]) * (video.last - gap * (len(shares) - 1))).astype(int).tolist()
    parts = enumerate(pairwise(borders))
    return [VideoPart(video.path, first + gap * i, last + gap * i, video.stamp) for i, (first, last) in parts]


def _long_enough(split: str, parts: list[VideoPart], num_frames: int) -> list[VideoPart]:
    kept = [part for part in parts if part.last - part.first >= num_frames]
    if not kept:
        longest = max(parts, key=lambda part: part.last - part.first)
        raise ValueError(
            f"The {split} split holds no clip of `num_frames` {num_frames}: its longest part is frames "
            f"{longest.first} to {longest.last} of {longest.path} (between parts, `split_gap` frames are left out)."
        )
    if len(kept) < len(parts):
        logger.info(f"The {split} split: {len(parts) - len(kept)} of {len(parts)} videos are shorter than a clip.")
    return kept


def _frame_files(folder: str) -> list[Path]:
    files = [
        file
        for file in Path(folder).iterdir()
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")  # UCSD ships "._001.tif" files
    ]
    if not files:
        raise ValueError(f"The folder {folder} holds no frames: no file ends in {', '.join(IMAGE_SUFFIXES)}.")
    return sorted(files, key=_natural)


def _natural(path: str | Path) -> list:
    """Sort key that puts frame 2 before frame 10."""
    return [int(word) if word.isdecimal() else word for word in re.split(r"(\d+)", str(path))]


def _stamp(path: str) -> str:
    """A hash of a video's path and of the names, sizes and times of its files."""
    files = [(file.name, file.stat()) for file in (_frame_files(path) if Path(path).is_dir() else [Path(path)])]
    return Hasher.hash([os.path.realpath(path), *((name, s.st_size, s.st_mtime_ns) for name, s in files)])


@contextmanager
def _opened(path: str):
    """A video file; ValueError naming it where it or one of its frames cannot be read."""
    try:
        import av
    except ImportError as error:
        raise ImportError("Video files are decoded by PyAV: `pip install hf_descent[video]`.") from error
    try:
        with av.open(path) as container:
            yield container
    except (av.error.FFmpegError, IndexError) as error:  # a file without a video stream has no first one
        raise ValueError(f"{path} cannot be read as a video ({error}).") from error
