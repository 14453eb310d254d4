"""Rows of csv, json and parquet files as they are written there: no type is guessed.

- csv: every column is text, as written. Leading zeros, `1e3`, `NA`, `null` and dates stay what they are, and an empty
  cell is the empty text. The first line names the columns. The separator is the one of comma, semicolon, tab and bar
  under which it names the columns that are asked for.
- json (lines, or a list of rows): JSON's own types. A text stays a text, also if it looks like a date, and a column of
  several types is a `datasets.Json`, which gives back what the file holds.
- parquet: the types that are stored in the file.
"""

import glob
import lzma
import zlib
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from .csv_files import load_csv
from .files import file_version
from .json_files import load_json


FILE_TYPES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz")
UNREADABLE = (
    DatasetGenerationError,
    ValueError,
    OverflowError,
    RecursionError,  # of json with too many brackets in each other
    EOFError,  # this and the next three: of a compressed file
    OSError,
    lzma.LZMAError,
    zlib.error,
)
REMEDIES = {
    "csv": "Give examples in UTF-8 under a first line that names the columns.",
    "json": "Give examples in UTF-8, as JSON lines or a list of objects.",
    "parquet": "Give a parquet file.",
}


def load_file(argument: str, path: str, columns: Sequence[str]) -> Dataset:
    """The rows of a csv, json or parquet file, local or on the Hub (`hf://...`), by the rule of this module.

    `columns` are those that will be used. The ending may be in capitals, and that of a compressed csv or json file has
    another one behind it, as in `.csv.gz`. ValueError where `path`, which `argument` gives, has another ending or
    cannot be read.
    """
    file_type = _file_type(path)
    if file_type is None:
        endings = f"{', '.join(FILE_TYPES)} (csv and json also with {', '.join(COMPRESSIONS)})"
        raise ValueError(f"`{argument}` is {path!r}; give a file that ends in one of {endings}.")

    try:
        return _load(path, file_type, columns)
    except FileNotFoundError as error:
        raise ValueError(
            f"`{argument}` is {path!r}, and there is no such file; give the path of a file."
        ) from error
    except UNREADABLE as error:
        cause = error
        if isinstance(error, DatasetGenerationError) and error.__cause__:
            cause = error.__cause__
        reason = str(cause).removesuffix(".")
        raise ValueError(
            f"`{argument}` is {path!r}, which cannot be read as {file_type} ({reason}). {REMEDIES[file_type]}"
        ) from error


def _file_type(path: str) -> str | None:
    name = Path(path.lower())
    if name.suffix not in COMPRESSIONS:
        return FILE_TYPES.get(name.suffix)
    file_type = FILE_TYPES.get(name.with_suffix("").suffix)
    if file_type == "parquet":  # it compresses its own columns
        return None
    return file_type


def _load(path: str, file_type: str, columns: Sequence[str]) -> Dataset:
    if file_type == "csv":
        return load_csv(path, columns)
    if file_type == "json":
        return load_json(path)
    return load_dataset(
        "parquet",
        name=f"version-{file_version(path)}",  # or rows of a former one come from the cache
        data_files=glob.escape(path),  # or brackets in it would make it a pattern
        split="train",
    )
