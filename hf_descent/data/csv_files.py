"""Rows of csv files. Every value is text, as written: `01`, `1e3`, `NA` and dates stay what they are."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Dataset, Features, Value

from .files import cached_rows, open_text


SEPARATORS = (",", ";", "\t", "|")


def load_csv(path: str, columns: Sequence[str]) -> Dataset:
    """The rows of a csv file, of which `columns` will be used. ValueError where its lines make no table."""
    separator, names = read_header(path, columns)
    features = Features(dict.fromkeys(names, Value("string")))
    return cached_rows(csv_rows, features, path, separator=separator, names=names)


def read_header(path: str, columns: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The separator under which the first line names most of `columns`, and the names that it then has."""
    with open_text(path) as file:
        line = file.readline()

    headers = {}
    for separator in SEPARATORS:
        cells = next(csv.reader([line], delimiter=separator), [])
        headers[separator] = tuple(name.strip() for name in cells)

    def columns_named(separator: str) -> int:
        return len(set(columns).intersection(headers[separator]))

    separator = max(SEPARATORS, key=columns_named)
    if ".tsv" in Path(path.lower()).suffixes:
        separator = "\t"
    names = headers[separator]
    if not names:
        raise ValueError("its first line is empty")
    for name in columns:
        if names.count(name) > 1:
            raise ValueError(f"two of its columns have the name {name!r}")
    return separator, names


def csv_rows(
    path: str, version: tuple, separator: str, names: tuple[str, ...]
) -> Iterator[dict[str, str]]:
    """The rows of a csv file. ValueError for a line with more or fewer values than `names`, and for quotes out of
    place."""
    with open_text(path) as file:
        lines = csv.reader(file, delimiter=separator, strict=True)
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
                yield dict(zip(names, cells))
        except csv.Error as error:
            raise ValueError(
                f"line {lines.line_num}: {error}; double each quote in a value and put the value in quotes"
            ) from error
