"""Text files, local or on the Hub, and a cache of the rows that are read from them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import fsspec
from datasets import Dataset, Features

from .. import __version__


@contextmanager
def open_text(path: str) -> Iterator[TextIO]:
    """A file as text, without its byte order mark; compressed files are unpacked, and line ends stay as they are."""
    with fsspec.open(
        path, "rt", encoding="utf-8-sig", newline="", compression="infer", expand=False
    ) as file:
        yield file


def first_line_not_utf8(path: str) -> int:
    """The number of a text file's first line that is not in UTF-8; ValueError where all lines are."""
    with fsspec.open(path, "rb", compression="infer", expand=False) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise ValueError(f"{path!r} is in UTF-8.")


def cached_rows(
    read_rows: Callable[..., Iterator[dict]], features: Features, path: str, **settings: Any
) -> Dataset:
    """What `read_rows` yields for the file, in the cache of `datasets`: it is read again when the file changes."""
    for name in features:
        if "\0" in name:
            raise ValueError(
                f"the name of the column {name!r} holds a null character, as in a file that is not in UTF-8"
            )
    version = (file_version(path), __version__)
    return Dataset.from_generator(
        read_rows, features, gen_kwargs={"path": path, "version": version, **settings}
    )


def file_version(path: str) -> str:
    """A text that differs when the file has changed, even if its size and the time of its change are as before."""
    system, address = fsspec.url_to_fs(path)
    return system.ukey(address)
