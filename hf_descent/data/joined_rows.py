"""Finds csv values that hold whole rows.

Where one text begins with a quote and a later one ends with a quote, csv makes one value of all between them. A value
of several lines is taken for rows by one rule:

- A line of it is like a row if another column has few values, and the line has one of them at the place of that
  column, as rows have their labels. If the separator is rare in texts, a line is also like a row if it has as many
  separators.
- If most lines are like rows, the file is refused. If two lines are, or most others than the first or last have as
  many separators as a row, without a blank behind them, the value is reported on the screen.
"""

import re
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import pyarrow
from pyarrow import compute
from transformers.utils import logging


logger = logging.get_logger(__name__)

RARE_SEPARATORS = ("\t", "|")  # in texts; such files are often written without quotes
MOST_CATEGORIES = 1000  # values of a column that repeats few of them, as one of labels does
MOST_CHARACTERS = 60  # of such a value
LINE_END = re.compile(r"[\r\n]+")


@dataclass(frozen=True)
class CountedLines:
    """How many lines a row has in the file, and how many of them are like rows or as wide as rows."""

    lines: int
    like_rows: int
    as_wide: int

    @property
    def are_rows(self) -> bool:
        return 2 * self.like_rows > self.lines

    @property
    def may_be_rows(self) -> bool:
        # One line holds the rest of the row, so that a text with one separator makes it as wide.
        return self.like_rows >= 2 or 2 * (self.as_wide - 1) > self.lines - 1


def check_joined_rows(table: pyarrow.Table, path: str, separator: str, skips_blanks: bool) -> None:
    """ValueError where a value of a csv file, whose cells are texts or None, holds rows; what may be rows is said on
    the screen. `skips_blanks`: whether values of the file have blanks before them."""
    if table.num_columns < 2:
        return
    is_long = [compute.match_substring_regex(column, LINE_END.pattern) for column in table.columns]
    categories = [_categories(column, mask) for column, mask in zip(table.columns, is_long)]

    has_long = reduce(compute.or_kleene, is_long)
    indices = compute.indices_nonzero(compute.fill_null(has_long, False)).to_pylist()

    suspects = []
    for index, cells in zip(indices, _rows(table.filter(has_long))):
        counts = _count_lines(cells, categories, separator, skips_blanks)
        place = f"{_long_value(cells)} in example {index + 1}"
        if counts.are_rows:
            raise ValueError(
                f"the value in quotes {place} holds several lines, most of which look like examples of their own; "
                "double each quote that is part of a value and put the value in quotes. If the value is right, give "
                "the examples as JSON lines"
            )
        if counts.may_be_rows:
            suspects.append(place)

    if suspects:
        logger.warning(
            f"{path}: {len(suspects)} values in quotes hold several lines, some of which look like examples of their "
            f"own; the first is {suspects[0]}. If these lines are examples, a quote is out of place."
        )


def _rows(table: pyarrow.Table) -> Iterator[tuple[str | None, ...]]:
    for batch in table.to_batches(max_chunksize=1000):
        yield from zip(*(column.to_pylist() for column in batch.columns))


def _categories(column: pyarrow.ChunkedArray, is_long: pyarrow.ChunkedArray) -> set[str]:
    """The values of a column that has few of them; blank is one only where there is no other. Empty for others."""
    is_short = compute.less_equal(compute.utf8_length(column), MOST_CHARACTERS)
    short = column.filter(compute.and_(is_short, compute.invert(is_long)))

    values = compute.unique(short)
    if len(values) > MOST_CATEGORIES:
        return set()

    names = {value.strip() for value in values.to_pylist()}
    if names == {""}:
        return names
    return names - {""}


def _long_value(cells: Sequence[str | None]) -> str:
    return next(reprlib.repr(cell) for cell in cells if cell and LINE_END.search(cell))


def _count_lines(
    cells: Sequence[str | None],
    categories: Sequence[set[str]],
    separator: str,
    skips_blanks: bool,
) -> CountedLines:
    """The lines of a row, by the `categories` of all columns."""
    row = separator.join(cell for cell in cells if cell is not None)
    lines = [line.split(separator) for line in LINE_END.split(row) if line.strip()]
    as_wide = sum(_is_as_wide(line, len(cells), skips_blanks) for line in lines)

    like_rows = 0
    if separator in RARE_SEPARATORS:
        like_rows = as_wide

    for place, values in enumerate(categories):
        cell = cells[place]
        if cell is not None and LINE_END.search(cell):
            continue
        known = sum(_has_category(line, place, values) for line in lines)
        like_rows = max(like_rows, known)

    return CountedLines(len(lines), like_rows, as_wide)


def _is_as_wide(line: Sequence[str], width: int, skips_blanks: bool) -> bool:
    """Whether a line has as many values as there are columns, but for blank ones at its end. A comma before a blank is
    one of a text."""
    if not skips_blanks and any(value.startswith(" ") for value in line[1:]):
        return False
    return len(line) >= width and not any(line[width:])


def _has_category(line: Sequence[str], place: int, values: set[str]) -> bool:
    if len(line) < 2 or place >= len(line):
        return False
    return line[place].strip() in values
