"""What a file holds is what is read: against the values that were written, for every kind of file."""

import bz2
import csv
import datetime
import gzip
import json
import lzma
import os

import pyarrow
import pytest
from pyarrow import parquet

from hf_descent.data.reading import load_file


# Texts that a reader might take for numbers, dates, booleans or nothing.
TEXTS = [
    *(
        "007",
        "7",
        "01",
        "1",
        "1.0",
        "1e3",
        "+5",
        "-1",
        "0x1F",
        "1_000",
        "1,5",
        "12345678901234567890",
    ),
    *(
        "2020-01-01",
        "2020-01-01T10:00:00Z",
        "10:30",
        "NA",
        "nan",
        "null",
        "None",
        "N/A",
        "-",
        "inf",
    ),
    *("true", "False", "", " ", "  leading", "trailing  ", 'a "quoted" word', '"', "two\nlines"),
    *("a, b; c | d", "tab\there", "\u2028", "ä😀", "#comment", "'", "\\n", "=1+1", '{"a": 1}'),
]
COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def read(path, columns=("text", "label")):
    return load_file("train_file", str(path), columns)


def write_csv(path, rows, separator=",", encoding="utf-8", end="\n"):
    with open(path, "w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=separator, lineterminator=end).writerows(rows)
    return path


def write_lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_values_are_texts_as_written(tmp_path, separator, end, encoding):
    texts = [text for text in TEXTS if not ("\t" in text or "\n" in text)]
    rows = [["text", "label"], *([text, str(i % 2)] for i, text in enumerate(texts))]
    path = write_csv(tmp_path / "rows.csv", rows, separator, encoding, end)
    assert read(path)["text"][:] == texts
    assert read(path)["label"][:] == [row[1] for row in rows[1:]]


def test_quoted_csv_values_hold_lines_and_tabs(tmp_path):
    rows = [["text", "label"], *([text, "x"] for text in TEXTS)]
    assert read(write_csv(tmp_path / "rows.csv", rows))["text"][:] == TEXTS


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".ndjson", ".parquet"])
def test_texts_stay_texts(tmp_path, suffix):
    rows = [{"text": text, "label": text} for text in TEXTS]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        write_lines(path, rows)
    assert read(path)["text"][:] == read(path)["label"][:] == TEXTS


@pytest.mark.parametrize("late", ["001", "", "text", "2020-01-01", "1e400"])
def test_late_rows_do_not_change_the_early_ones(tmp_path, late):
    values = [str(i) for i in range(12_000)]
    values[11_500] = late
    rows = [["unused", "text", "label"], *([value, value, "1"] for value in values)]
    assert read(write_csv(tmp_path / "rows.csv", rows))["text"][:] == values
    lines = write_lines(tmp_path / "rows.jsonl", [{"unused": v, "text": v} for v in values])
    assert read(lines)["text"][:] == values


def test_json_values_keep_their_types(tmp_path):
    columns = {
        "whole": [1, 2, None], "float": [1.0, 0.5, None], "truth": [True, None, False],
        "mixed": [1, "1", True], "numbers": [1, 1.5, None], "nested": [[1], {"a": "7"}, "007"],
        "late": [None, None, "7"],
    }  # fmt: skip
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    loaded = read(write_lines(tmp_path / "rows.jsonl", rows))
    for name in columns:
        found = loaded[name][:]
        assert found == columns[name]
        assert list(map(type, found)) == list(map(type, columns[name]))


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a", "label": 0}, {"text": "b", "label": 1}]',
        '{"text": "a", "label": 0}\r\n\r\n{"text": "b", "label": 1}\r\n',
        '\ufeff{"text": "a", "label": 0}\n{"text": "b", "label": 1}',
        '\n [\n{"text": "a", "label": 0},\n{"text": "b", "label": 1}\n]',
    ],
    ids=["list", "lines", "byte order mark", "list over lines"],
)
def test_forms_of_json(tmp_path, content):
    (tmp_path / "rows.json").write_bytes(content.encode())
    assert read(tmp_path / "rows.json").to_list() == [
        {"text": "a", "label": 0},
        {"text": "b", "label": 1},
    ]


def test_rows_without_a_key_have_no_value(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b", "label": "x"}])
    assert read(path)["label"][:] == [None, "x"]


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl"])
@pytest.mark.parametrize("compression", ["", *COMPRESSIONS])
@pytest.mark.parametrize("case", [str.lower, str.upper])
def test_endings(tmp_path, kind, compression, case):
    separator = "\t" if kind == ".tsv" else ","
    content = f"text{separator}label\nsome{separator}1\n"
    if "json" in kind:
        content = '{"text": "some", "label": "1"}'
    compress = COMPRESSIONS.get(compression, bytes)
    path = tmp_path / case(f"rows{kind}{compression}")
    path.write_bytes(compress(content.encode()))
    assert read(path).to_list() == [{"text": "some", "label": "1"}]


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.parquet.gz", "rows.gz", "csv"])
def test_other_endings_are_refused(name):
    with pytest.raises(ValueError, match=r"ends in one of .csv, .tsv, .json.*\.gz"):
        read(name)


def test_a_changed_file_is_read_again(tmp_path):
    for suffix, content in ((".csv.gz", "text,label\n{},1\n"), (".jsonl", '{{"text": "{}"}}')):
        path = tmp_path / f"rows{suffix}"
        for word in ("first", "other"):
            raw = content.format(word).encode()
            path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
            assert read(path)["text"][:] == [word]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_file_that_was_changed_at_the_same_time_is_read_again(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    for label in (1, 0):
        if suffix == ".parquet":
            parquet.write_table(pyarrow.table({"text": ["a"], "label": [label]}), path)
        elif suffix == ".jsonl":
            write_lines(path, [{"text": "a", "label": label}])
        else:
            write_csv(path, [["text", "label"], ["a", label]])
        os.utime(path, (10**9, 10**9))
        assert int(read(path)["label"][0]) == label


def test_unused_columns_do_not_matter(tmp_path):
    lines = ["id,text,label,score,,score,", "1,a,x,0.5,,,", ",b,y,,oops,2020-01-01,"]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    loaded = read(tmp_path / "rows.csv")
    assert loaded["text"][:] == ["a", "b"] and loaded["label"][:] == ["x", "y"]

    rows = [{"text": "a", "label": 1, "x": 1}, {"text": "b", "label": 0, "x": {"y": [None, "z"]}}]
    assert read(write_lines(tmp_path / "rows.jsonl", rows))["label"][:] == [1, 0]
    table = {"text": ["a"], "label": [1], "day": [datetime.date(2020, 1, 1)], "raw": [b"\xff"]}
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet")["label"][:] == [1]


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        ("a,b;text;label\n1;x,y;z\n", ("text", "label"), {"text": "x,y", "label": "z"}),
        ("text\n\"x; y\"\n", ("text",), {"text": "x; y"}),
        ("text , label\nx,y\n\n", ("text", "label"), {"text": "x", "label": "y"}),
    ],
    ids=["separators in names", "one column", "blanks"],
)  # fmt: skip
def test_the_first_line_tells_the_separator(tmp_path, content, columns, expected):
    (tmp_path / "rows.csv").write_text(content)
    (row,) = read(tmp_path / "rows.csv", columns).to_list()
    assert {name: row[name] for name in columns} == expected


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize("has_number", [False, True])
@pytest.mark.parametrize("is_label_first", [False, True])
def test_texts_of_several_lines_are_read(tmp_path, separator, has_number, is_label_first):
    texts = [
        "Dear all,\n\nthank you, bye",
        "one\ntwo",
        "a\nb\nc; d\n",
        "1\n0",
        "yes\nno",
        "yes",
    ]
    rows = [["text", "label"], *([text, str(i % 2)] for i, text in enumerate(texts))]
    if is_label_first:
        rows = [row[::-1] for row in rows]
    if has_number:
        rows = [[str(number), *row] for number, row in enumerate(rows)]
    path = write_csv(tmp_path / "rows.csv", rows, separator)
    assert read(path)["text"][:] == texts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", 'text,label\n"Great" film,1\n', "line 2: .*double each quote"),
        ("rows.csv", 'text,label\nb,0\n"a,1\nb,0\n', "unexpected end of data"),
        ("rows.csv", "text,label\nx,1\na, b,1\n", "line 3 has 3 values for 2 columns"),
        ("rows.csv", "text,label\nx,1\na\n", "line 3 has 1 values for 2 columns"),
        ("rows.csv", "text,label\nfoo\rbar,0\n", "line 2 has 1 values for 2 columns"),
        ("rows.csv", "text,label,label\na,0,1\n", "two of its columns have the name 'label'"),
        ("rows.csv", "text,label\n", "it has no examples"),
        ("rows.csv", "", "its first line is empty"),
        ("rows.csv", "text,label\na,1\nä,1\n".encode("latin-1"), "can't decode .* in UTF-8"),
        ("rows.csv.gz", gzip.compress(b"text,label\n\xe4,1\n", mtime=0), "can't decode"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xe4"}', "can't decode .* in UTF-8"),
        ("rows.csv", "text,label\na,1\n".encode("utf-16"), "can't decode"),
        ("rows.csv", gzip.compress(b"text,label\na,1\n", mtime=0), "can't decode"),
        ("rows.csv.gz", "text,label\na,1\n", "Not a gzipped file"),
        (
            "rows.csv.gz",
            gzip.compress(b"text,label\n" + b"a,1\n" * 99, mtime=0)[:30],
            "ended before",
        ),
        ("rows.csv.xz", lzma.compress(b"text,label\n" + b"a,1\n" * 99)[:-9], "ended before"),
        ("rows.jsonl.bz2", bz2.compress(b'{"text": "a"}\n' * 99)[:-9], "ended before"),
        ("rows.csv.bz2", "text,label\na,1\n", "Invalid data stream"),
        ("rows.jsonl", '{"text": "a"}\n{"text":\n', "line 2"),
        ("rows.jsonl", '{"text": "a"}\n{"text": "b"} x\n', "line 2"),
        ("rows.jsonl", '{"text": "a"}\n[1]\n', r"example 2 is \[1\]"),
        ("rows.json", "3", "example 1 is 3, which is no object"),
        ("rows.json", '{\n"text": ["a", "b"]\n}', "line 1: .*JSON lines or a list of objects"),
        ("rows.json", '{"text": ', "Expecting value"),
        ("rows.json", "", "it has no examples"),
        ("rows.json", "[]", "it has no examples"),
        ("rows.parquet", "", "as parquet"),
        ("rows.parquet", "no parquet", "as parquet"),
        pytest.param(
            "rows.jsonl",
            '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "recursion",
            id="many brackets",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    raw = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ValueError, match=rf"`train_file` is .*{name}', which cannot .*{message}"):
        read(tmp_path / name)


@pytest.mark.parametrize("suffix", [".csv", ".csv.gz", ".jsonl", ".parquet"])
def test_a_missing_file_is_named(tmp_path, suffix):
    message = (
        rf"^`train_file` is '.*rows{suffix}', and there is no such file; give the path of a file.$"
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path / f"rows{suffix}")


def test_a_file_may_hold_one_column_of_several_types(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"text": 1}, {"text": "1"}])
    assert read(path)["text"][:] == [1, "1"]


@pytest.mark.parametrize("label", [[1], [], {"a": 1}, {}])
def test_one_json_row_with_a_nested_value_is_a_row(tmp_path, label):
    row = {"text": "a", "label": label}
    assert read(write_lines(tmp_path / "rows.jsonl", [row])).to_list() == [row]


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [0, 1]}), path)
    content = bytearray(path.read_bytes())
    content[-60:-40] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"`train_file` is .*rows.parquet', which cannot be read"):
        read(path)
