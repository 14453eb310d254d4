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


def cached_rows(
    read_rows: Callable[..., Iterator[dict]], features: Features, path: str, **settings: Any
) -> Dataset:
    """What `read_rows` yields for the file, in the cache of `datasets`: it is read again when the file changes.
    ValueError where it has no rows."""
    settings.update(path=path, version=(file_version(path), __version__))
    if next(read_rows(**settings), None) is None:
        raise ValueError("it has no examples")
    return Dataset.from_generator(read_rows, features, gen_kwargs=settings)


def file_version(path: str) -> str:
    """A text that differs when the file has changed, even if its size and the time of its change are as before."""
    system, address = fsspec.url_to_fs(path)
    return system.ukey(address)
