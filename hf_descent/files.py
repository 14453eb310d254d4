"""A run's files: written whole, read with errors that name them; short texts that tell whether they are the same."""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from transformers.utils import cached_file


MODEL_FILES = ("config.json", "*.safetensors", "*.bin")
PROCESSOR_FILES = ("*token*", "vocab.*", "merges.txt", "*.model", "*processor_config.json", "chat_template*")
BEGINNING = 2**14  # bytes: past the header of a video, whose frames are too many to be read whole


@contextmanager
def whole_file(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """A file that takes the place of `path` when the block ends; one killed or failed before leaves what was there."""
    with open(f"{path}.tmp", mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file
    os.replace(f"{path}.tmp", path)


def read_json(path: str | os.PathLike) -> dict:
    """What a json file holds; ValueError naming the file when it is missing or unreadable."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); write it again, or name another run.") from error


def find_json(name: str, file: str) -> dict:
    """A json file of a folder or of a repository on the Hub; empty where there is none. ValueError as above."""
    quietly = {
        f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    try:
        path = cached_file(name, file, **quietly)
    except OSError:  # nor is there such a repository: the model was loaded from a folder that is gone
        path = None
    return {} if path is None else read_json(path)


def fingerprint(path: str) -> str:
    """The last part of a path, with the beginning of a SHA-256.

    That is of the whole file; of a model in a folder, of its config and weights, and another one of its tokenizer or
    image processor; of any other folder, and of what a pattern finds, of the files' names, sizes and beginnings. Of
    what is not on this machine, as a name on the Hub, it is nothing more than the name.
    """
    found = Path(path)
    if found.is_file():
        return f"{found.name} ({digest([found])})"
    model, processor = (
        [file for pattern in patterns for file in sorted(found.glob(pattern)) if file.is_file()]
        for patterns in (MODEL_FILES, PROCESSOR_FILES)
    )
    if model:
        return f"{found.name} ({digest(model)})" + (f", tokenizer ({digest(processor)})" if processor else "")
    beginnings = hashlib.sha256()
    roots = [found] if found.exists() else [Path(match) for match in sorted(glob.glob(path))]
    for root in roots:
        for file in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if file.is_file() and not file.name.startswith("."):
                beginnings.update(f"{file.relative_to(root.parent)} {file.stat().st_size} ".encode())
                with file.open("rb") as opened:
                    beginnings.update(opened.read(BEGINNING))
    if roots:
        return f"{found.name} ({beginnings.hexdigest()[:12]})"
    return found.name if found.parent.exists() else path


def digest(files: Iterable[Path]) -> str:
    """The beginning of the SHA-256 of a file, or of those of several."""
    digests = []
    for each in files:
        with each.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return (digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest())[:12]
