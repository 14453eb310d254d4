"""A run's files: atomic writes, and reads with errors that name the file."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from transformers.utils import cached_file


@contextmanager
def atomic_write(path: str | os.PathLike, mode: str = "w") -> Iterator[IO]:
    """Within it, write to a new file, which replaces `path` at the end. If the block fails, `path` stays as it was."""
    with open(f"{path}.tmp", mode, encoding=None if "b" in mode else "utf-8") as file:
        yield file
    os.replace(f"{path}.tmp", path)


def write_json(path: str | os.PathLike, value: Any, indent: int | None = 2, **options: Any) -> None:
    """Write a json file, whole or not at all; `options` of `json.dump`."""
    with atomic_write(path) as file:
        json.dump(value, file, indent=indent, **options)


def read_json(path: str | os.PathLike) -> dict:
    """The contents of a json file; ValueError names the file if it is missing or unreadable."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); write it again, or name another run."
        ) from error


def find_json(name: str, file: str) -> dict:
    """The contents of a json file in a folder or a repository on the Hub; empty if there is none. ValueError as in
    [`read_json`]."""
    try:
        path = cached_file(name, file)
    except OSError:  # also where a model was loaded from a folder that is gone
        return {}
    return {} if path is None else read_json(path)


def plain(value: Any) -> Any:
    """`value` in the types of JSON and YAML: scalars of NumPy and torch become numbers, NaN and infinity `None`."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or type(value) in (bool, int, str):
        return value
    return getattr(value, "value", str(value))  # an enumeration's
