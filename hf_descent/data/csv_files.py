"""Rows of csv files. Every value is text, as written: `01`, `1e3`, `NA` and dates stay what they are."""

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value
from transformers.utils import logging

from .files import cached_rows, open_text


logger = logging.get_logger(__name__)

SEPARATORS = (",", ";", "\t", "|")
RARE_SEPARATORS = ("\t", "|")  # in texts; such files are often written without quotes
MOST_CATEGORIES = 1000  # values of a column that repeats few of them, as one of labels does
MOST_CHARACTERS = 60  # of such a value
LINE_END = re.compile(r"[\r\n]+")


@dataclass(frozen=True)
class CsvLayout:
    """How a csv file is written.

    Args:
        separator (`str`): Between two values of a line.
        skips_blanks (`bool`): Whether blanks after a separator are part of no value.
        names (`tuple[str, ...]`): Those of the columns.
    """

    separator: str
    skips_blanks: bool
    names: tuple[str, ...]


def load_csv(path: str, columns: Sequence[str]) -> Dataset:
    """The rows of a csv file, of which `columns` will be used. ValueError where its lines make no table."""
    layout = find_layout(path, columns)
    features = Features(dict.fromkeys(layout.names, Value("string")))
    return cached_rows(csv_rows, features, path, layout=layout)


def find_layout(path: str, columns: Sequence[str]) -> CsvLayout:
    """The layout by the first line that is not blank: of the separators, the one that makes most of `columns`."""
    separators = list(SEPARATORS)
    if ".tsv" in Path(path.lower()).suffixes:
        separators.sort(key="\t".__ne__)  # tabs first, so that they win a draw
    headers = {separator: _header(path, separator) for separator in separators}

    def columns_named(separator: str) -> int:
        names = {name.strip() for name in headers[separator]}
        return len(names.intersection(columns))

    separator = max(separators, key=columns_named)
    header = headers[separator]
    skips_blanks = len(header) > 1 and all(name.startswith(" ") for name in header[1:])
    return CsvLayout(separator, skips_blanks, _unique_names(header, columns))


def _header(path: str, separator: str) -> list[str]:
    """The cells of the first line that is not blank."""
    with open_text(path) as file, _long_values():
        for cells in csv.reader(file, delimiter=separator):
            if cells:
                return cells
    raise ValueError("it is empty")


@contextmanager
def _long_values() -> Iterator[None]:
    """Lets the csv reader take values of more than 131,072 characters."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _unique_names(header: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Names of the columns: those without one, and repeated ones that nobody asks for, are numbered."""
    names = []
    for number, name in enumerate(map(str.strip, header), start=1):
        if name in names and name in columns:
            raise ValueError(f"two of its columns have the name {name!r}")
        if name == "":
            name = f"column {number}"
        elif name in names:
            name = f"{name} {number}"
        names.append(name)
    return tuple(names)


def csv_rows(path: str, version: tuple, layout: CsvLayout) -> Iterator[dict[str, str | None]]:
    """The rows of a csv file; a line that ends early lacks its last values (None).

    ValueError for a line that has more values than others, for one that repeats the names of the columns, and for
    quotes out of place.
    """
    with open_text(path) as file, _long_values():
        lines = csv.reader(
            file, delimiter=layout.separator, skipinitialspace=layout.skips_blanks, strict=True
        )
        try:
            yield from _rows_of_lines(lines, layout, path)
        except csv.Error as error:
            raise ValueError(
                f"line {lines.line_num}: {error}; double each quote in a value and put the value in quotes"
            ) from error


def _rows_of_lines(lines: Any, layout: CsvLayout, path: str) -> Iterator[dict[str, str | None]]:
    names = layout.names
    filled = (cells for cells in lines if cells)
    next(filled)  # the names of the columns
    width = None
    merged = MergedRows(layout.separator, len(names))

    for cells in filled:
        # Blank values at the end are no column if all lines have them. If some do, a value was cut in two.
        own_width = max(len(cells), len(names))
        if width is None:
            width = own_width
        _check_line(cells, lines.line_num, width, layout)
        merged.see(cells, lines.line_num)
        yield dict(zip_longest(names, cells[: len(names)]))

    if width is None:
        raise ValueError("it has no rows below its first line")
    merged.check(path)


def _check_line(cells: list[str], number: int, width: int, layout: CsvLayout) -> None:
    count = len(layout.names)
    place = f"line {number} has {len(cells)} values"
    remedy = f"put a value that holds the separator {layout.separator!r} in double quotes"
    if any(cells[count:]):
        raise ValueError(f"{place} for {count} columns; {remedy}")
    if max(len(cells), count) != width:
        raise ValueError(
            f"{place}, and lines above have {width}; {remedy}, or give all lines as many separators"
        )
    if count > 1 and tuple(map(str.strip, cells)) == layout.names:
        raise ValueError(
            f"line {number} repeats the names of the columns, as where files were joined; delete it"
        )


class MergedRows:
    """Finds values that hold whole rows: where one text begins with a quote and a later one ends with a quote, csv
    makes one value of all between them.

    Each line of such a value has as many separators as a row. Lines of a text that was meant so seldom have, if the
    separator is rare. If it is a comma or semicolon, the lines are taken for rows where another column has the values
    that they would give it, as one of labels has; otherwise they are reported on the screen.
    """

    def __init__(self, separator: str, width: int):
        self.separator = separator
        self.values = [set() for _ in range(width)]  # of each column
        self.suspects: list[tuple[int, list[list[str]]]] = []  # lines and what they hold as rows

    def see(self, cells: list[str], number: int) -> None:
        """Looks at the row that ends in a line."""
        is_long = False
        for values, cell in zip(self.values, cells):
            if LINE_END.search(cell):
                is_long = True
            elif len(values) <= MOST_CATEGORIES and len(cell) <= MOST_CHARACTERS:
                values.add(cell)
        if not is_long or len(cells) == 1:
            return
        lines = LINE_END.split(self.separator.join(cells))
        rows = [line.split(self.separator) for line in lines if line.strip()]
        if all(len(row) == len(cells) for row in rows):
            self.suspects.append((number, rows))

    def check(self, path: str) -> None:
        """ValueError where a value holds rows; what may be rows is said on the screen."""
        for number, rows in self.suspects:
            if self.separator in RARE_SEPARATORS or self._repeat_a_column(rows):
                raise ValueError(
                    f"line {number} ends a value in quotes that holds several lines, each of them like a row; double "
                    "each quote that is part of a value and put the value in quotes, or give the rows as JSON lines "
                    "if the value is meant so"
                )
        if self.suspects:
            logger.warning(
                f"{path}: {len(self.suspects)} values in quotes hold several lines, each with as many "
                f"{self.separator!r} as a row; the first ends in line {self.suspects[0][0]}. If these lines are rows, "
                "a quote is out of place."
            )

    def _repeat_a_column(self, rows: list[list[str]]) -> bool:
        """Whether all values that rows give some column are among the few that it has elsewhere."""
        return any(
            values.issuperset(column)
            for values, column in zip(self.values, zip(*rows))
            if len(values) <= MOST_CATEGORIES
        )
