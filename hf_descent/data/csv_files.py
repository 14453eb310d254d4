"""Rows of csv files. Every value is text, as written: `01`, `1e3`, `NA` and dates stay what they are."""

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value

from .files import cached_rows, open_text
from .joined_rows import check_joined_rows


SEPARATORS = (",", ";", "\t", "|")


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
    rows = cached_rows(csv_rows, features, path, layout=layout)
    check_joined_rows(rows.data.table, path, layout.separator, layout.skips_blanks)
    return rows


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
    if header[0].startswith("sep="):
        raise ValueError(f"its first line is {header[0]!r}, which only Excel reads: delete it")

    written = _header(path, separator, skips_blanks=False)
    skips_blanks = len(written) > 1 and all(name.startswith(" ") for name in written[1:])
    return CsvLayout(separator, skips_blanks, _unique_names(header, columns))


def _header(path: str, separator: str, skips_blanks: bool = True) -> list[str]:
    """The cells of the first line that is not blank, without the blanks before them or with them."""
    with open_text(path) as file, _long_values():
        for cells in csv.reader(file, delimiter=separator, skipinitialspace=skips_blanks):
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
    written = [name.strip() for name in header]
    names = []
    for number, name in enumerate(written, start=1):
        if name in names and name in columns:
            raise ValueError(f"two of its columns have the name {name!r}")
        if name == "" or name in names:
            name = _numbered(name, number, [*written, *names])
        names.append(name)
    return tuple(names)


def _numbered(name: str, number: int, taken: Sequence[str]) -> str:
    """A name with a number that is none of the names that are `taken`."""
    if name == "":
        name = "column"
    numbered = f"{name} {number}"
    while numbered in taken:
        numbered += f" {number}"
    return numbered


def csv_rows(path: str, version: tuple, layout: CsvLayout) -> Iterator[dict[str, str | None]]:
    """The rows of a csv file; a line that ends early lacks its last values (None).

    ValueError for a line that has more values than others or another end, for one that repeats the names of the
    columns, and for quotes out of place.
    """
    with open_text(path) as file, _long_values():
        ends = LineEnds(file)
        lines = csv.reader(
            ends, delimiter=layout.separator, skipinitialspace=layout.skips_blanks, strict=True
        )
        try:
            yield from _rows_of_lines(lines, layout, ends)
        except csv.Error as error:
            raise ValueError(
                f"line {lines.line_num}: {error}; double each quote in a value and put the value in quotes"
            ) from error


class LineEnds:
    """The lines of a file, and whether the rows end alike: a carriage return by itself is part of a value where other
    rows end in a line feed."""

    def __init__(self, file: Iterable[str]):
        self.file = file
        self.line = ""
        self.returns: bool | None = None  # whether rows end in a carriage return

    def __iter__(self) -> Iterator[str]:
        for line in self.file:
            self.line = line
            yield line

    def check(self, number: int) -> None:
        """ValueError where the row that ends in the present line ends otherwise than those before."""
        if not self.line.endswith(("\r", "\n")):  # the last line
            return
        returns = self.line.endswith("\r")
        if self.returns is None:
            self.returns = returns
        if self.returns != returns:
            raise ValueError(
                f"line {number} ends in {self.line[-1]!r}, and lines above do not; put a value that holds a carriage "
                "return in double quotes"
            )


def _rows_of_lines(
    lines: Any, layout: CsvLayout, ends: LineEnds
) -> Iterator[dict[str, str | None]]:
    names = layout.names
    width = None
    filled = (cells for cells in lines if cells)
    next(filled)  # the names of the columns
    ends.check(lines.line_num)

    for cells in filled:
        # Blank values at the end are no column if all lines have them. If some do, a value was cut in two.
        if width is None:
            width = max(len(cells), len(names))
        ends.check(lines.line_num)
        _check_line(cells, lines.line_num, width, layout)
        yield dict(zip_longest(names, cells[: len(names)]))

    if width is None:
        raise ValueError("it has no examples below its first line")


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
    # A file that was put behind another may begin with a byte order mark.
    values = tuple(cell.removeprefix("\ufeff").strip() for cell in cells)
    if count > 1 and values == layout.names:
        raise ValueError(
            f"line {number} repeats the names of the columns, as where files were joined; delete it"
        )
