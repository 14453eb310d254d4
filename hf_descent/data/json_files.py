"""Rows of json files with JSON's own types. A text stays a text, also if it looks like a date."""

import json
import re
import reprlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from decimal import Decimal
from typing import Any

from datasets import Dataset, Features, Json, Value

from .files import cached_rows, open_text


HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")  # a surrogate by itself, which UTF-8 has not
TYPES = {
    str: Value("string"),
    bool: Value("bool"),
    int: Value("int64"),
    float: Value("float64"),
}


class RoundedFloat(float):
    """A float that is a whole number only because the one in the file has too many digits, as 9007199254740993.0."""


class RepeatedKeys(dict):
    """An object that has several values of the keys `repeated` in the file; it keeps the last of each."""

    def __init__(self, value: dict, repeated: Collection[str]):
        super().__init__(value)
        self.repeated = repeated


def load_json(path: str, columns: Sequence[str]) -> Dataset:
    """The rows of a json file (lines, a list of rows, or lists by column), of which `columns` will be used.

    A column of several types is a `datasets.Json`, which gives back what the file holds. ValueError where the file
    holds no rows, or a value of `columns` cannot be kept as it is.
    """
    types: dict[str, set[type]] = {}
    for number, row in enumerate(json_objects(path, columns), start=1):
        for name in columns:
            _check_value(row.get(name), name, number)
        for name, value in row.items():
            types.setdefault(name, set()).update(_types_of(value))

    if not types:
        raise ValueError("it has no examples")
    features = Features({name: _feature(of_column) for name, of_column in types.items()})
    return cached_rows(json_rows, features, path, columns=tuple(columns), types=features)


def _check_value(value: Any, name: str, number: int) -> None:
    if isinstance(value, RoundedFloat):
        raise ValueError(
            f"example {number}: `{name}` is a number with more digits than a float keeps ({value!r}); write it "
            "without a point, or as a text"
        )
    if isinstance(value, str) and HALF_CHARACTER.search(value):
        raise ValueError(
            f"example {number}: `{name}` is {reprlib.repr(value)}, which holds half a character, as of an emoji that "
            "was cut; repair or drop the example"
        )


def _types_of(value: Any) -> set[type]:
    """The type of a value, none for null."""
    if value is None:
        return set()
    if isinstance(value, float):
        return {float}
    if type(value) is int and not -(2**63) <= value < 2**63:
        return {object}  # more than an int64 holds
    return {type(value)}


def _feature(types: set[type]) -> Value | Json:
    if not types:  # a column of nulls
        return Value("string")
    if len(types) > 1:
        return Json()
    return TYPES.get(*types, Json())


def json_rows(
    path: str, version: tuple, columns: tuple[str, ...], types: Features
) -> Iterator[dict[str, Any]]:
    """The rows of a json file with all columns of `types`, those of several types as JSON."""
    for row in json_objects(path, columns):
        values = dict.fromkeys(types)
        for name, value in row.items():
            if isinstance(value, str):  # in columns that are not used
                value = HALF_CHARACTER.sub("\ufffd", value)
            if isinstance(types[name], Json) and value is not None:
                value = json.dumps(value)
            values[name] = value
        yield values


def json_objects(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a json file: its lines, or the members or columns of its one value. ValueError naming a row that is
    no object."""
    rows = _lines(path) if _has_lines(path) else _members(path, columns)
    for number, row in enumerate(rows, start=1):
        if isinstance(row, str):  # a list of texts
            row = {"text": row}
        if not isinstance(row, dict):
            raise ValueError(f"example {number} is {reprlib.repr(row)}, which is no object")
        _check_keys(row, columns)
        yield row


def _has_lines(path: str) -> bool:
    """Whether the file has several lines, the first of which is an object by itself."""
    with open_text(path) as file:
        filled = (line for line in file if line.strip())
        first = next(filled, None)
        if first is None:
            raise ValueError("it is empty")
        if next(filled, None) is None:
            return False

    try:
        return isinstance(json.loads(first), dict)
    except json.JSONDecodeError:
        return False


def _lines(path: str) -> Iterator[Any]:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield _parse(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error


def _members(path: str, columns: Sequence[str]) -> list[Any]:
    """The rows of a file that is one value: its members, its columns, or the object that it is."""
    with open_text(path) as file:
        value = _parse(file.read())
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ValueError("it holds neither examples nor columns")

    _check_keys(value, columns)
    used = {name: value[name] for name in columns if name in value}
    if columns and not used:
        raise ValueError(
            f"it is one object without {list(columns)}, but with {reprlib.repr(list(value))}; pandas writes a list of "
            'objects by `orient="records"`'
        )
    if used and all(isinstance(column, list | dict) for column in used.values()):
        first = next(iter(used.values()))
        table = {
            name: column
            for name, column in value.items()
            if name in used or _is_beside(column, first)
        }
        return _rows_of_columns(table)
    return [value]


def _is_beside(value: Any, column: list | dict) -> bool:
    """Whether a value of a table by column is a column, too, as names of classes or the like are not."""
    if isinstance(value, list) and isinstance(column, list):
        return len(value) == len(column)
    if isinstance(value, dict) and isinstance(column, dict):
        return value.keys() == column.keys() and not isinstance(value, RepeatedKeys)
    return False


def _rows_of_columns(table: dict[str, list | dict]) -> list[dict[str, Any]]:
    """Rows of a table by column, as pandas writes it: lists, or objects with the number of the row as key."""
    columns = list(table.values())
    if all(isinstance(column, dict) for column in columns):
        keys = columns[0].keys()
        if any(column.keys() != keys for column in columns):
            raise ValueError("its columns have different keys")
        if any(isinstance(column, RepeatedKeys) for column in columns):
            raise ValueError("a column has two values of one key")
        columns = [[column[key] for key in keys] for column in columns]

    if any(isinstance(column, dict) for column in columns):
        raise ValueError("some of its columns are lists, and others objects")
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"its columns have different lengths, {sorted(lengths)}")
    return [dict(zip(table, values)) for values in zip(*columns)]


def _parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_object, parse_float=_number_with_point)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    times = Counter(name for name, _ in pairs)
    return RepeatedKeys(value, {name for name, count in times.items() if count > 1})


def _check_keys(value: dict, columns: Sequence[str]) -> None:
    """ValueError where the file has several values of one of `columns`, of which only the last would be kept."""
    if not isinstance(value, RepeatedKeys):
        return
    for name in columns:
        if name in value.repeated:
            raise ValueError(f"an object has two values of {name!r}")


def _number_with_point(text: str) -> float:
    number = float(text)
    if number.is_integer() and number != Decimal(text):
        return RoundedFloat(number)
    return number
