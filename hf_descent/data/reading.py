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
import io
import json
import lzma
import re
import reprlib
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
from datasets import Dataset, Features, Json, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow import parquet

from .. import __version__


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
RARE_SEPARATORS = ("\t", "|")  # in texts; such files are often written without quotes
HEADER_CHARACTERS = 1 << 20  # in which the first line of a csv file ends
HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")  # a surrogate by itself, which UTF-8 has not
JSON_TYPES = {
    str: Value("string"),
    bool: Value("bool"),
    int: Value("int64"),
    float: Value("float64"),
}
UNREADABLE = (
    DatasetGenerationError,
    ValueError,
    OverflowError,
    EOFError,  # of a compressed file that was cut
    RecursionError,  # of json with too many brackets in each other
    csv.Error,
    gzip.BadGzipFile,
    lzma.LZMAError,
    zlib.error,
)
REMEDIES = {
    "csv": "Give rows in UTF-8 under a first line that names the columns.",
    "json": "Give rows in UTF-8, as JSON lines or a list of objects.",
    "parquet": "Write the file again.",
}


def load_file(argument: str, path: str, columns: Sequence[str] = ()) -> Dataset:
    """The rows of a csv, json or parquet file, local or on the Hub (`hf://...`), by the rule of this module.

    `columns` are those that will be used; the other ones need not be in order. The ending may be in capitals, and that
    of a compressed csv or json file has another one behind it, as in `.csv.gz`. ValueError where `path`, which
    `argument` gives, has another ending or cannot be read.
    """
    if Path(path).is_dir():
        raise ValueError(f"`{argument}` is {path!r}, which is a folder; give a file.")
    file_type = _file_type(path)
    if file_type is None:
        endings = f"{', '.join(FILE_TYPES)} (csv and json also with {', '.join(COMPRESSIONS)})"
        raise ValueError(f"`{argument}` is {path!r}; give a file that ends in one of {endings}.")
    try:
        if file_type == "parquet":
            return _load_parquet(path, columns)
        if file_type == "csv":
            return _load_csv(path, columns)
        return _load_json(path, columns)
    except FileNotFoundError as error:
        raise ValueError(
            f"`{argument}` is {path!r}, and there is no such file; give the path of a file."
        ) from error
    except (*UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # no right to read it and the like; of damaged data there is no number
        is_wrapped = isinstance(error, DatasetGenerationError) and error.__cause__
        cause = error.__cause__ if is_wrapped else error
        reason = str(cause).removesuffix(".")
        remedy = REMEDIES[file_type]
        if isinstance(cause, UnicodeDecodeError):
            reason = f"line {_first_line_not_utf8(path)} is not in UTF-8"
            remedy = "Save the file as UTF-8."
        raise ValueError(
            f"`{argument}` is {path!r}, which cannot be read as {file_type} ({reason}). {remedy}"
        ) from error


def _file_type(path: str) -> str | None:
    name = Path(path.lower())
    if name.suffix not in COMPRESSIONS:
        return FILE_TYPES.get(name.suffix)
    file_type = FILE_TYPES.get(name.with_suffix("").suffix)
    return None if file_type == "parquet" else file_type  # parquet compresses its own columns


def _first_line_not_utf8(path: str) -> int:
    """The number of a text file's first line that is not in UTF-8; ValueError where all lines are."""
    with fsspec.open(path, "rb", compression="infer", expand=False) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    raise ValueError(f"{path!r} is in UTF-8.")


@contextmanager
def _opened(path: str) -> Iterator[io.TextIOBase]:
    """A file as text, without its mark of byte order; line ends stay as they are."""
    with fsspec.open(
        path, "rt", encoding="utf-8-sig", newline="", compression="infer", expand=False
    ) as file:
        yield file


def _stored(rows: Any, features: Features, path: str, **settings: Any) -> Dataset:
    """What the function `rows` yields for the file, in the cache of `datasets`: read again where the file changed."""
    system, address = fsspec.url_to_fs(path)
    version = (system.ukey(address), __version__)
    return Dataset.from_generator(
        rows, features, gen_kwargs={"path": path, "version": version, **settings}
    )


def _load_parquet(path: str, columns: Sequence[str]) -> Dataset:
    with fsspec.open(path, "rb", expand=False) as file:
        content = parquet.ParquetFile(file)
        schema, count = content.schema_arrow, content.metadata.num_rows
    if count == 0:
        raise ValueError("it has no rows")
    times = Counter(schema.names)
    for name in columns:
        if times[name] > 1:
            raise ValueError(f"two of its columns have the name {name!r}")
    fields = [
        field
        for field in schema
        if field.name in columns or (times[field.name] == 1 and _is_known(field))
    ]
    selection = {}
    if len(fields) < len(schema):
        features = Features.from_arrow_schema(pyarrow.schema(fields, schema.metadata))
        selection = {"columns": list(features), "features": features}
    # Brackets and the like in a name would make it a pattern, which other files match.
    return load_dataset("parquet", data_files=glob.escape(path), split="train", **selection)


def _is_known(field: pyarrow.Field) -> bool:
    """Whether `datasets` has a type for a column of a parquet file; of maps and the like it has none."""
    try:
        Features.from_arrow_schema(pyarrow.schema([field]))
    except (ValueError, NotImplementedError):
        return False
    return True


def _load_csv(path: str, columns: Sequence[str]) -> Dataset:
    layout = _csv_layout(path, columns)
    features = Features(dict.fromkeys(layout["names"], Value("string")))
    return _stored(csv_rows, features, path, **layout)


def _csv_layout(path: str, columns: Sequence[str]) -> dict[str, Any]:
    """How a csv file is written: its `separator`, whether it `skips_blanks` after each, and the `names` of columns."""
    with _opened(path) as file:
        head = file.read(HEADER_CHARACTERS)
    is_tsv = ".tsv" in Path(path.lower()).suffixes
    separators = sorted(SEPARATORS, key="\t".__ne__) if is_tsv else SEPARATORS

    headers = {separator: _header(head, separator) for separator in separators}
    # The first of several that name as many of the columns.
    separator = max(headers, key=lambda each: len({*columns} & {*map(str.strip, headers[each])}))
    header = headers[separator]
    skips_blanks = len(header) > 1 and all(name.startswith(" ") for name in header[1:])
    names = _unique(tuple(map(str.strip, header)), columns)
    return {"separator": separator, "skips_blanks": skips_blanks, "names": names}


def _header(head: str, separator: str) -> list[str]:
    """The cells of the first line that is not blank."""
    lines = csv.reader(io.StringIO(head, newline=""), delimiter=separator, skipinitialspace=False)
    for cells in lines:
        if cells:
            return cells
    raise ValueError("it is empty")


def _unique(header: tuple[str, ...], columns: Sequence[str]) -> tuple[str, ...]:
    """Names of the columns: those without one, and repeated ones that nobody asks for, are numbered."""
    names = []
    for number, name in enumerate(header, start=1):
        if name in names and name in columns:
            raise ValueError(f"two of its columns have the name {name!r}")
        names.append(f"{name or 'column'} {number}" if name in ("", *names) else name)
    return tuple(names)


def csv_rows(
    path: str, version: tuple, separator: str, skips_blanks: bool, names: tuple[str, ...]
) -> Iterator[dict[str, str | None]]:
    """The rows of a csv file; a line that ends early lacks its last values (None). ValueError for a line that has more
    than the first, and for quotes out of place."""
    limit = csv.field_size_limit(sys.maxsize)  # 131,072 characters by default
    try:
        with _opened(path) as file:
            lines = csv.reader(
                file, delimiter=separator, skipinitialspace=skips_blanks, strict=True
            )
            try:
                yield from _rows_of_lines(lines, separator, names)
            except csv.Error as error:
                raise ValueError(
                    f"line {lines.line_num}: {error}; double each quote in a value and put the value in quotes"
                ) from error
    finally:
        csv.field_size_limit(limit)


def _rows_of_lines(
    lines: Any, separator: str, names: tuple[str, ...]
) -> Iterator[dict[str, str | None]]:
    filled = (cells for cells in lines if cells)
    next(filled)  # the names of the columns
    width = None
    for cells in filled:
        if any(cells[len(names) :]):
            raise ValueError(
                f"line {lines.line_num} has {len(cells)} values for {len(names)} columns; put a value that "
                f"holds the separator {separator!r} in double quotes"
            )
        # Blank values at the end are no column if all lines have them. If some do, a value was cut in two.
        own_width = max(len(cells), len(names))
        width = width or own_width
        if own_width != width:
            raise ValueError(
                f"line {lines.line_num} has {len(cells)} values, and lines above have {width}; put a value that holds "
                f"the separator {separator!r} in double quotes, or give all lines as many separators"
            )
        if separator in RARE_SEPARATORS and any(_holds_lines(cell, separator) for cell in cells):
            raise ValueError(
                f"line {lines.line_num} ends a value in quotes that holds several lines with the separator "
                f"{separator!r}; double each quote that is part of a value and put the value in quotes, or give the "
                "rows as JSON lines if the value is meant so"
            )
        yield dict(zip_longest(names, cells[: len(names)]))
    if width is None:
        raise ValueError("it has no rows below its first line")


def _holds_lines(cell: str, separator: str) -> bool:
    return separator in cell and ("\n" in cell or "\r" in cell)


def _load_json(path: str, columns: Sequence[str]) -> Dataset:
    types: dict[str, set[type]] = {}
    for row in json_objects(path):
        for name, value in row.items():
            of_column = types.setdefault(name, set())
            if value is not None:
                of_column.add(_json_type(value))
    if not types:
        raise ValueError("it has no rows")
    features = Features({name: _json_feature(of_column) for name, of_column in types.items()})
    mixed = tuple(name for name, feature in features.items() if isinstance(feature, Json))
    return _stored(
        json_rows, features, path, names=tuple(types), mixed=mixed, columns=tuple(columns)
    )


def _json_type(value: Any) -> type:
    is_long = type(value) is int and not -(2**63) <= value < 2**63
    return object if is_long else type(value)


def _json_feature(types: set[type]) -> Value | Json:
    if not types:  # a column of nulls
        return Value("string")
    if len(types) > 1:
        return Json()
    return JSON_TYPES.get(*types, Json())


def json_rows(
    path: str,
    version: tuple,
    names: tuple[str, ...],
    mixed: tuple[str, ...],
    columns: tuple[str, ...],
) -> Iterator[dict[str, Any]]:
    """The rows of a json file with all of `names`; values of the columns in `mixed` as JSON. ValueError where a text
    of `columns` holds half a character."""
    for number, row in enumerate(json_objects(path), start=1):
        values = dict.fromkeys(names) | row
        for name, value in values.items():
            if not isinstance(value, str) or not HALF_CHARACTER.search(value):
                continue
            if name in columns:
                raise ValueError(
                    f"row {number}: `{name}` is {reprlib.repr(value)}, which holds half a character, as of an emoji "
                    "that was cut; repair or drop the row"
                )
            values[name] = HALF_CHARACTER.sub("\ufffd", value)
        for name in mixed:
            if values[name] is not None:
                values[name] = json.dumps(values[name])
        yield values


def json_objects(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a json file: its lines, or the members or columns of its one value. ValueError naming a row that is
    no object."""
    rows = _json_lines(path) if _has_json_lines(path) else enumerate(_json_members(path), start=1)
    for number, row in rows:
        if isinstance(row, str):  # a list of texts
            row = {"text": row}
        if not isinstance(row, dict):
            raise ValueError(f"row {number} is {row!r}, which is no object")
        yield row


def _has_json_lines(path: str) -> bool:
    """Whether the first line is an object by itself, and not one that holds all the columns."""
    with _opened(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, ""), next(lines, None)
    try:
        value = json.loads(first)
    except json.JSONDecodeError:
        return False
    return isinstance(value, dict) and (second is not None or not _holds_columns(value))


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line, object_pairs_hook=_object)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _json_members(path: str) -> list[Any]:
    with _opened(path) as file:
        value = json.load(file, object_pairs_hook=_object)
    if isinstance(value, list):
        return value
    if not _holds_columns(value):
        raise ValueError("it holds neither rows nor columns")
    # As pandas writes them: lists, or objects with the number of the row as key.
    columns = list(value.values())
    if isinstance(columns[0], dict):
        columns = [[column[key] for key in columns[0]] for column in columns]
    return [dict(zip(value, values)) for values in zip(*columns)]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of json; ValueError where a name has two values, of which only the last would be kept."""
    value = dict(pairs)
    if len(value) < len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has two values of {name!r}")
    return value


def _holds_columns(value: Any) -> bool:
    """Whether an object is a table by column: lists of one length, or objects with the same keys."""
    if not isinstance(value, dict) or not value:
        return False
    types = {type(column) for column in value.values()}
    if types not in ({list}, {dict}):
        return False
    if types == {dict}:
        return len({frozenset(column) for column in value.values()}) == 1
    return len({len(column) for column in value.values()}) == 1
