"""Rows of csv, json and parquet files as they are written there: no type is guessed.

- csv: every column is text, as written. Leading zeros, `1e3`, `NA`, `null` and dates stay what they are, and an empty
  cell is the empty text. The first line names the columns. The separator is the one of comma, semicolon, tab and bar
  under which it names the columns that are asked for.
- json (lines, or a list of rows): JSON's own types. A text stays a text, also if it looks like a date, and a column of
  several types is a `datasets.Json`, which gives back what the file holds.
- parquet: the types that are stored in the file.

Rows of csv and json files are held in memory.
"""

import csv
import glob
import io
import json
import lzma
import reprlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
from datasets import Dataset, Json, load_dataset
from datasets.exceptions import DatasetGenerationError


FILE_TYPES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".bz2", ".xz")
SEPARATORS = (",", ";", "\t", "|")
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

    `columns` are those that will be used. The ending may be in capitals; a compressed csv or json file has a second
    one, as in `.csv.gz`. ValueError names the `argument` if its `path` has another ending or cannot be read.
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
    if file_type == "parquet":
        system, address = fsspec.url_to_fs(path)
        return load_dataset(
            "parquet",
            name=f"version-{system.ukey(address)}",  # or rows of a former one come from the cache
            data_files=glob.escape(path),  # or brackets in it would make it a pattern
            split="train",
        )

    # Without a byte order mark; line ends stay as they are.
    with fsspec.open(
        path, "rt", encoding="utf-8-sig", newline="", compression="infer", expand=False
    ) as file:
        text = file.read()
    rows = _json_rows(text) if file_type == "json" else _csv_rows(text, columns)
    if not rows:
        raise ValueError("it has no examples")

    return _as_dataset(rows)


def _as_dataset(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    """The rows as a data set, all with the same columns. A column of several types becomes a `datasets.Json`."""
    columns = {}
    mixed = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if len({type(value) for value in values if value is not None}) > 1:
            mixed.append(name)
            values = [None if value is None else json.dumps(value) for value in values]
        columns[name] = values

    dataset = Dataset.from_dict(columns, on_mixed_types="use_json")
    for name in mixed:
        dataset = dataset.cast_column(name, Json())
    return dataset


def _csv_rows(text: str, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a csv file; ValueError if a line has more or fewer values than there are names, or misplaced
    quotes."""
    separator, names = _header(text, columns)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows = []
    try:
        next(lines)
        for cells in lines:
            if not cells:  # a blank line
                continue
            if len(cells) != len(names):
                raise ValueError(
                    f"line {lines.line_num} has {len(cells)} values for {len(names)} columns; put a value that "
                    f"holds the separator {separator!r} in double quotes"
                )
            rows.append(dict(zip(names, cells)))
    except csv.Error as error:
        raise ValueError(
            f"line {lines.line_num}: {error}; double each quote in a value and put the value in quotes"
        ) from error
    return rows


def _header(text: str, columns: Sequence[str]) -> tuple[str, list[str]]:
    """The separator with which the first line has most of `columns`, and the names that it then has."""
    line = io.StringIO(text, newline="").readline()
    headers = {}
    for separator in SEPARATORS:
        cells = next(csv.reader([line], delimiter=separator), [])
        headers[separator] = [name.strip() for name in cells]

    def columns_named(separator: str) -> int:
        return len(set(columns).intersection(headers[separator]))

    separator = max(SEPARATORS, key=columns_named)
    names = headers[separator]
    if not names:
        raise ValueError("its first line is empty")
    for name in columns:
        if names.count(name) > 1:
            raise ValueError(f"two of its columns have the name {name!r}")
    return separator, names


def _json_rows(text: str) -> list[dict[str, Any]]:
    """The rows of a json file; ValueError if it is no JSON, or a row is no object."""
    is_list = text.lstrip().startswith("[")
    rows = json.loads(text) if is_list else _json_lines(text)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"example {number} is {reprlib.repr(row)}, which is no object")
    return rows


def _json_lines(text: str) -> list[Any]:
    values = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            values.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
    return values
