"""Rows of json files with JSON's own types. A text stays a text, also if it looks like a date."""

import json
import reprlib
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, Json, Value

from .files import cached_rows, open_text


TYPES = {
    str: Value("string"),
    bool: Value("bool"),
    int: Value("int64"),
    float: Value("float64"),
}


def load_json(path: str) -> Dataset:
    """The rows of a json file: a list of objects, or an object in each line. ValueError where it is neither.

    A column of several types is a `datasets.Json`, which gives back what the file holds.
    """
    types: dict[str, set[type]] = {}
    for row in json_objects(path):
        for name, value in row.items():
            kinds = types.setdefault(name, set())
            if value is not None:
                kinds.add(type(value))

    features = Features({name: _feature(kinds) for name, kinds in types.items()})
    return cached_rows(json_rows, features, path, types=features)


def _feature(kinds: set[type]) -> Value | Json:
    if not kinds:  # a column of nulls
        return Value("string")
    if len(kinds) > 1:
        return Json()
    return TYPES.get(*kinds, Json())


def json_rows(path: str, version: tuple, types: Features) -> Iterator[dict[str, Any]]:
    """The rows of a json file with all columns of `types`, those of several types as JSON."""
    for row in json_objects(path):
        values = dict.fromkeys(types)
        for name, value in row.items():
            if isinstance(types[name], Json) and value is not None:
                value = json.dumps(value)
            values[name] = value
        yield values


def json_objects(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a json file, of which each has to be an object."""
    with open_text(path) as file:
        is_list = file.read(1000).lstrip().startswith("[")
    rows = _members(path) if is_list else _lines(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"example {number} is {reprlib.repr(row)}, which is no object")
        yield row


def _members(path: str) -> list[Any]:
    with open_text(path) as file:
        return json.load(file)


def _lines(path: str) -> Iterator[Any]:
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error
