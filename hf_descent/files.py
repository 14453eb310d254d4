"""A run's files: atomic writes, and reads with errors that name the file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from transformers.utils import cached_file


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
