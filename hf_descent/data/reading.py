"""Rows of csv, json and parquet files as they are written there: no type is guessed.

- csv: every column is text, as written. Leading zeros, `1e3`, `NA`, `null` and dates stay what they are, and an empty
  cell is the empty text. The first line names the columns. The separator is the one of comma, semicolon, tab and bar
  under which it names the columns that are asked for; where it has a blank after each separator, such blanks are
  skipped in all lines.
- json (lines, a list of rows, or lists by column): JSON's own types. A text stays a text, also if it looks like a
  date, and a column of several types is a `datasets.Json`, which gives back what the file holds.
- parquet: the types that are stored in the file.
"""

import csv
import glob
import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pyarrow
from datasets import Dataset, Features, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import parquet

from .csv_files import load_csv
from .files import file_version, first_line_not_utf8
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
# Of a compressed file; those of `OSError` have no number.
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error, OSError)
UNREADABLE = (
    DatasetGenerationError,
    ValueError,
    OverflowError,
    RecursionError,  # of json with too many brackets in each other
    csv.Error,
    *DAMAGED,
)
REMEDIES = {
    "csv": "Give examples in UTF-8 under a first line that names the columns.",
    "json": "Give examples in UTF-8, as JSON lines or a list of objects.",
    "parquet": "Give a parquet file of such columns.",
}


def load_file(argument: str, path: str, columns: Sequence[str]) -> Dataset:
    """The rows of a csv, json or parquet file, local or on the Hub (`hf://...`), by the rule of this module.

    `columns` are those that will be used; the other ones need not be in order. The ending may be in capitals, and that
    of a compressed csv or json file has another one behind it, as in `.csv.gz`. ValueError where `path`, which
    `argument` gives, has another ending or cannot be read.
    """
    if "::" in path:
        raise ValueError(
            f"`{argument}` is {path!r}, where '::' stands for a file within another; rename the file."
        )
    if Path(path).is_dir():
        raise ValueError(f"`{argument}` is {path!r}, which is a folder; give a file.")

    file_type = _file_type(path)
    if file_type is None:
        endings = f"{', '.join(FILE_TYPES)} (csv and json also with {', '.join(COMPRESSIONS)})"
        raise ValueError(f"`{argument}` is {path!r}; give a file that ends in one of {endings}.")

    load = {"csv": load_csv, "json": load_json, "parquet": load_parquet}[file_type]
    try:
        return load(path, columns)
    except FileNotFoundError as error:
        raise ValueError(
            f"`{argument}` is {path!r}, and there is no such file; give the path of a file."
        ) from error
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:  # damaged data has no number
            raise ValueError(
                f"`{argument}` is {path!r}, which cannot be opened ({error.strerror})."
            ) from error
        reason = _reason(error, path, REMEDIES[file_type])
        raise ValueError(
            f"`{argument}` is {path!r}, which cannot be read as {file_type} {reason}"
        ) from error


def _file_type(path: str) -> str | None:
    name = Path(path.lower())
    if name.suffix not in COMPRESSIONS:
        return FILE_TYPES.get(name.suffix)
    file_type = FILE_TYPES.get(name.with_suffix("").suffix)
    if file_type == "parquet":  # it compresses its own columns
        return None
    return file_type


def _reason(error: Exception, path: str, remedy: str) -> str:
    """Why a file cannot be read, in brackets, and what to do about it."""
    cause = error
    if isinstance(error, DatasetGenerationError) and error.__cause__:
        cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        line = first_line_not_utf8(path)
        return (
            f"(line {line} is not in UTF-8). Save the file as UTF-8; if it is compressed, let its name end in "
            f"{', '.join(COMPRESSIONS)}."
        )

    reason = str(cause).removesuffix(".")
    has_number = isinstance(cause, OSError) and cause.errno is not None
    if isinstance(cause, DAMAGED) and not has_number:
        return f"({reason}). The file was cut or damaged, or is of another kind than its name says: copy it again."
    return f"({reason}). {remedy}"


def load_parquet(path: str, columns: Sequence[str]) -> Dataset:
    """The rows of a parquet file, of which `columns` will be used: those columns, and others that can be loaded."""
    with fsspec.open(path, "rb", expand=False) as file:
        content = parquet.ParquetFile(file)
        schema = content.schema_arrow
        count = content.metadata.num_rows

    if count == 0:
        raise ValueError("it has no examples")

    times = Counter(schema.names)
    fields = []
    for field in schema:
        is_known = _is_known(field)
        if times[field.name] == 1 and is_known:
            fields.append(field)
        elif field.name in columns and is_known:
            raise ValueError(f"two of its columns have the name {field.name!r}")
        elif field.name in columns:
            raise ValueError(
                f"its column {field.name!r} has the type {field.type}, which cannot be used; give one text, number or "
                "boolean per example"
            )

    selection = {}
    if len(fields) < len(schema):
        features = Features.from_arrow_schema(pyarrow.schema(fields, schema.metadata))
        selection = {"columns": list(features), "features": features}

    return load_dataset(
        "parquet",
        name=f"version-{file_version(path)}",  # or rows of a former one come from the cache
        data_files=glob.escape(path),  # or brackets in it would make it a pattern
        split="train",
        **selection,
    )


def _is_known(field: pyarrow.Field) -> bool:
    """Whether `datasets` has a type for a column of a parquet file; of maps and the like it has none."""
    try:
        Features.from_arrow_schema(pyarrow.schema([field]))
    except (ValueError, NotImplementedError):
        return False
    return True
