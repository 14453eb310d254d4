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
        "late": [None, None, "7"], "long": [2**70, 1, 0],
    }  # fmt: skip
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    loaded = read(write_lines(tmp_path / "rows.jsonl", rows))
    for name in columns.keys() - {"long"}:
        found = loaded[name][:]
        assert found == columns[name]
        assert list(map(type, found)) == list(map(type, columns[name]))


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "a", "label": 0}, {"text": "b", "label": 1}]',
        '{"text": "a", "label": 0}\r\n\r\n{"text": "b", "label": 1}\r\n',
        '\ufeff{"text": "a", "label": 0}\n{"text": "b", "label": 1}',
        '{"text": ["a", "b"], "label": [0, 1]}',
        '{\n"text": {"0": "a", "1": "b"},\n"label": {"0": 0, "1": 1}\n}',
        '{"text": {"0": "a", "1": "b"}, "label": {"1": 1, "0": 0}}',
    ],
    ids=["list", "lines", "byte order mark", "columns", "pandas", "pandas in another order"],
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
    (tmp_path / "twice.jsonl").write_text(
        '{"label": 1, "x": {"y": 1, "y": 1e-400, "label": 1, "label": 2}, "z": "\\ud83d"}'
    )
    assert read(tmp_path / "twice.jsonl")["label"][:] == [1]

    table = {"text": ["a"], "label": [1], "day": [datetime.date(2020, 1, 1)], "raw": [b"\xff"]}
    table["map"] = pyarrow.array([[("x", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(pyarrow.table(table), tmp_path / "rows.parquet")
    assert read(tmp_path / "rows.parquet")["label"][:] == [1]


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        ("a,b;text;label\n1;x,y;z\n", ("text", "label"), {"text": "x,y", "label": "z"}),
        ("text\n\"x; y\"\n", ("text",), {"text": "x; y"}),
        ("text, label\nx, \"y, z\"\n", ("text", "label"), {"text": "x", "label": "y, z"}),
        ('text, "label"\n"x", "y, z"\n', ("text", "label"), {"text": "x", "label": "y, z"}),
        ("\n\ntext , label\nx,y\n", ("text", "label"), {"text": "x", "label": "y"}),
        ("text,label,\nx,y,\n", ("text", "label"), {"text": "x", "label": "y"}),
    ],
    ids=["separators in names", "one column", "blanks", "quotes after blanks", "blank lines", "last separator"],
)  # fmt: skip
def test_the_first_line_tells_the_separator(tmp_path, content, columns, expected):
    (tmp_path / "rows.csv").write_text(content)
    (row,) = read(tmp_path / "rows.csv", columns).to_list()
    assert {name: row[name] for name in columns} == expected


@pytest.mark.parametrize(
    ("content", "text", "is_said"),
    [
        ('text,label\n"a,b\nc",1\ne,0\n', "a,b\nc", True),
        ('text, label\n"a, b\nc", 1\ne, 0\n', "a, b\nc", True),
        ('text,label\n"a, b\nc",1\ne,0\n', "a, b\nc", False),
        ('text,label\n"a, b\nc, d",1\ne,0\n', "a, b\nc, d", False),
        ('text|label\n"a | b\nc | d"|1\n', "a | b\nc | d", False),
        ('text\n"a\nb"\n', "a\nb", False),
    ],
)
def test_lines_of_a_text_that_could_be_rows_are_said(tmp_path, caplog, content, text, is_said):
    (tmp_path / "rows.csv").write_text(content)
    assert read(tmp_path / "rows.csv")["text"][0] == text
    assert ("1 values in quotes hold several lines" in caplog.text) == is_said


@pytest.mark.parametrize(
    "content",
    [
        'text,label\nfine,0\n"Wow,1\nbad\nmeh,0\nlast one",1\nq,0\n',
        'text\tlabel\nfine\t0\n"Wow\t1\nbad\nmeh\t0\nlast one"\t1\nq\t0\n',
        'id\ttext\tlabel\n1\ta\t0\n2\t"b\t1\n3\tc\t0\textra\n4\td"\t1\n5\te\t0\n',
        'text,label,note\na,0,ok\n"b,1,good\nc,0\nd,0,so\ne,1\nf",1,z\ng,0,x\n',
        'text,label,note\na,0,ok\n"b,1\nc,0\nd,0,so\ne",1,z\ng,0,x\n',
        'text,label,note\na,0,\n"b,1\nc,0,x,y\nd,0\ne",1,z\ng,0,\n',
        'one,other,label\na,b,0\n"c,d,1\ne,f",0\ng,h,1\n',
        'text, label\na, 0\n"b, 1\nc\nd, 0\ne", 1\n',
        ',text,label\n0,a,0\n1,"b,1\n2,c\n3,d",1\n4,e,0\n',
    ],
)
def test_rows_in_a_value_are_found_though_some_lack_separators(tmp_path, content):
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match="value in quotes .* in example [12] holds"):
        read(path)


@pytest.mark.parametrize("separator", [",", "\t", ";"])
@pytest.mark.parametrize("has_number", [False, True])
@pytest.mark.parametrize("is_label_first", [False, True])
def test_texts_of_several_lines_are_read(tmp_path, caplog, separator, has_number, is_label_first):
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
    assert "several lines" not in caplog.text


def test_lines_that_could_be_rows_are_said_every_time(tmp_path, caplog):
    path = tmp_path / "rows.csv"
    path.write_text('text,label\n"one\ntwo,1\nthree\nfour\nfive",1\nsix,0\n')
    for _ in range(2):
        caplog.clear()
        assert len(read(path)) == 2
        assert (
            "1 values in quotes hold several lines, some of which look like examples" in caplog.text
        )
        assert "in example 1" in caplog.text


@pytest.mark.parametrize(
    ("header", "columns", "expected"),
    [
        ("text,score,score 4,score", ("text", "score 4"), "z"),
        ("score 2,,column 2,text", ("column 2", "text"), "z"),
        ("text,label,,column 3", ("text", "column 3"), "w"),
        ("text,label,column 3,", ("text", "column 3"), "z"),
    ],
)
def test_a_made_up_name_is_no_name_of_the_file(tmp_path, header, columns, expected):
    (tmp_path / "rows.csv").write_text(f"{header}\nx,y,z,w\n")
    name = next(name for name in columns if name != "text")
    assert read(tmp_path / "rows.csv", columns)[name][:] == [expected]


def test_a_lone_carriage_return_is_no_end_of_a_row(tmp_path):
    path = tmp_path / "rows.csv"
    for content in ("text,label\nfoo\rbar,0\nb,1\n", "label,text\r\n0,foo\rbar\r\n1,b"):
        path.write_text(content, newline="")
        with pytest.raises(ValueError, match=r"line 2 ends in '\\r', and lines above do not; put"):
            read(path)
    for end in ("\r", "\r\n", "\r\r\n"):
        path.write_text(end.join(["text,label", '"foo\rbar",0', "b,1", ""]), newline="")
        assert read(path)["text"][:] == ["foo\rbar", "b"]


def test_a_column_of_many_values_does_not_make_lines_rows(tmp_path):
    rows = [[str(number), "x"] for number in range(2_000)]
    path = write_csv(tmp_path / "rows.csv", [["id", "text"], *rows, ["2000", "a\n5,b"]])
    assert read(path, ("text",))["text"][-1] == "a\n5,b"


def test_long_texts_are_read(tmp_path):
    path = write_csv(tmp_path / "rows.csv", [["y" * 200_000, "text"], ["1", "x" * 200_000]])
    assert len(read(path)["text"][0]) == 200_000
    assert csv.field_size_limit() == 131_072  # as it was


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", 'text,label\n"Great" film,1\n', "line 2: .*double each quote"),
        ("rows.csv", 'text,label\nb,0\n"a,1\nb,0\n', "unexpected end of data"),
        ("rows.csv", "text,label\nx,1\na, b,1\n", "line 3 has 3 values for 2 columns"),
        ("rows.csv", "text,label\na,b,c,d,1\n", "line 2 has 5 values for 2 columns"),
        (
            "rows.tsv",
            'text\tlabel\n"a\t0\nb\t1\nc"\t1\n',
            "value in quotes .* in example 1 holds several lines, most",
        ),
        ("rows.csv", "text,label,label\na,0,1\n", "two of its columns have the name 'label'"),
        ("rows.csv", "text,label\n", "no examples below its first line"),
        ("rows.csv", "", "it is empty"),
        ("rows.csv", "sep=;\ntext;label\na;0\n", "first line is 'sep=;', which only Excel reads"),
        ("rows.csv", "text,label\na,1\nä,1\n".encode("latin-1"), "line 3 .*Save the file as UTF-8"),
        (
            "rows.csv",
            b"text,label\n" + b"a,1\n" * 20_000 + b"\xe4,1\n",
            "line 20002 is not in UTF-8",
        ),
        ("rows.csv.gz", gzip.compress(b"text,label\n\xe4,1\n", mtime=0), "line 2 is not in UTF-8"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xe4"}', "line 2 .*Save the file as UTF-8"),
        ("rows.csv", "text,label\na,1\n".encode("utf-16"), "line 1 is not in UTF-8"),
        ("rows.csv.gz", "text,label\na,1\n", "Not a gzipped file.*cut or damaged"),
        (
            "rows.csv.gz",
            gzip.compress(b"text,label\n" + b"a,1\n" * 99, mtime=0)[:30],
            "ended before .*was cut or damaged.* copy it again",
        ),
        ("rows.jsonl", '{"text": "a"}\n{"text":\n', "line 2"),
        ("rows.jsonl", '{"text": "a"}\n{"text": "b"} x\n', "line 2"),
        ("rows.jsonl", '{"text": "a"}\n[1]\n', r"example 2 is \[1\]"),
        ("rows.json", "3", "neither examples nor columns"),
        ("rows.json", "", "it is empty"),
        ("rows.json", '{"text": ', "Expecting value"),
        ("rows.parquet", "", "as parquet"),
        ("rows.parquet", "no parquet", "as parquet"),
        ("rows.json", "[]", "it has no examples"),
        ("rows.csv", "text,label\na, b,\nc,1\n", "line 3 has 2 values, and lines above have 3"),
        ("rows.csv", "text,label\nc,1\na, b,\n", "line 3 has 3 values, and lines above have 2"),
        (
            "rows.csv",
            'label|text\n1|"a\n0|b"\n',
            "value in quotes .* in example 1 holds several lines, most",
        ),
        (
            "rows.tsv",
            'label\ttext\r1\t"a\r0\tb"\r',
            "value in quotes .* in example 1 holds several lines, most",
        ),
        (
            "rows.csv",
            'label,text\n1,"a\n0,b\n1,c"\n0,d\n',
            "value in quotes .* in example 1 holds several lines, most",
        ),
        (
            "rows.csv",
            'text;label\n"a;1\n\nb;0\nc";1\nd;0\n',
            "value in quotes .* in example 1 holds several lines, most",
        ),
        (
            "rows.csv",
            'text,pair,label\n"a,,1\nb,,0\nc",,7\nd,,9\n',
            "value in quotes .* in example 1 holds several lines, most",
        ),
        ("rows.csv", "text,label\na,1\ntext, label\nb,0\n", "line 3 repeats the names of the col"),
        ("rows.csv", "text,label\na,1\n\ufefftext,label\nb,0\n", "line 3 repeats the names"),
        ("rows.csv", "text,label\na,1\n".encode("utf-16-le"), "null character.* not in UTF-8"),
        ("rows.csv", gzip.compress(b"text,label\na,1\n", mtime=0), "let its name end in .gz"),
        ("rows.jsonl.gz", gzip.compress(b"", mtime=0), "it is empty"),
        (
            "rows.jsonl",
            '{"text": "a"}\n{"label": 9007199254740993.0}',
            "example 2: `label` .* digits",
        ),
        (
            "rows.jsonl",
            '{"label": 1}\n{"label": 1.00000000000000000001}',
            "example 2: `label` .* digits",
        ),
        (
            "rows.json",
            '{"0": {"text": "a", "label": 0}}',
            'one object without .* `orient="records"`',
        ),
        ("rows.json", '{"data": [{"text": "a"}]}', "one object without"),
        (
            "rows.json",
            '{\n"columns": ["text"], "index": [0],\n"data": [["a"]]}',
            "one object without",
        ),
        ("rows.json", '{"text": ["a", "b"], "label": [0]}', "different lengths, .1, 2."),
        ("rows.csv.xz", lzma.compress(b"text,label\n" + b"a,1\n" * 99)[:-9], "cut or damaged"),
        ("rows.jsonl.bz2", bz2.compress(b'{"text": "a"}\n' * 99)[:-9], "cut or damaged"),
        (
            "rows.json",
            '{"text": {"0": "a", "1": "b", "1": "c"}, "label": {"0": 1, "1": 0}}',
            "a column has two values of one key",
        ),
        ("rows.json", '{"text": {"0": "a"}, "label": [1]}', "columns are lists, and others obj"),
        ("rows.csv.bz2", "text,label\na,1\n", "Invalid data stream.*cut or damaged"),
        ("rows.jsonl", '{"text": "a", "label": 0, "label": 1}', "two values of 'label'"),
        ("rows.json", '[{"text": "a", "text": "b"}]', "two values of 'text'"),
        (
            "rows.jsonl",
            '{"text": "a\\ud83d"}\n{"text": 1}',
            "example 1: `text` .* half a character",
        ),
        pytest.param(
            "rows.jsonl",
            '{"text": "a"}\n{"text": ' + "1" * 5000 + "}",
            "line 2: ",
            id="long number",
        ),
        pytest.param(
            "rows.jsonl",
            '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "recursion",
            id="many brackets",
        ),
        (
            "rows.json",
            '{"text": {"0": "a"},\n"label": {"1": 0}}',
            "its columns have different keys",
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


@pytest.mark.parametrize(
    "unused",
    [
        {"version": 1},
        {"meta": {"n": 1}},
        {"classes": ["n", "p", "q"]},
        {"note": None, "text": ["a", "b"]},
    ],
)
@pytest.mark.parametrize("by_key", [False, True])
def test_unused_keys_of_a_table_by_column_do_not_matter(tmp_path, unused, by_key):
    table = {"text": ["a", "b"], "label": [0, 1]}
    if by_key:
        table = {name: dict(enumerate(column)) for name, column in table.items()}
    (tmp_path / "rows.json").write_text(json.dumps({**unused, **table}))
    expected = [{"text": "a", "label": 0}, {"text": "b", "label": 1}]
    assert read(tmp_path / "rows.json").to_list() == expected
    assert "text" in read(tmp_path / "rows.json", ()).column_names


@pytest.mark.parametrize("label", [[1], [], {"a": 1}, {}])
def test_one_json_row_with_a_nested_value_is_a_row(tmp_path, label):
    row = {"text": "a", "label": label}
    assert read(write_lines(tmp_path / "rows.jsonl", [row])).to_list() == [row]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_name_that_means_a_file_within_another_is_refused(tmp_path, suffix):
    path = tmp_path / f"x::y{suffix}"
    write_lines(path, [{"text": "a"}])
    with pytest.raises(ValueError, match="'::' stands for a file within another; rename the file"):
        read(path)


@pytest.mark.parametrize("name", ["rows", "rows.csv", "rows.jsonl", "rows.parquet"])
def test_a_folder_is_no_file(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(
        ValueError, match=rf"^`train_file` is '.*{name}', which is a folder; give a file.$"
    ):
        read(tmp_path / name)


def test_damaged_parquet_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", "b"], "label": [0, 1]}), path)
    content = bytearray(path.read_bytes())
    content[-60:-40] = b"\xff" * 20
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"`train_file` is .*rows.parquet', which cannot be read"):
        read(path)


def test_parquet_without_rows_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": [], "label": []}), path)
    with pytest.raises(ValueError, match="it has no examples"):
        read(path)


def test_parquet_columns_of_one_name_matter_only_where_they_are_used(tmp_path):
    path = tmp_path / "rows.parquet"
    arrays = [pyarrow.array(values) for values in (["a"], [0], [1], [2])]
    table = pyarrow.Table.from_arrays(arrays, names=["text", "label", "x", "x"])
    parquet.write_table(table, path)
    assert read(path).to_list() == [{"text": "a", "label": 0}]
    with pytest.raises(ValueError, match="two of its columns have the name 'x'"):
        read(path, ("text", "x"))


def test_a_column_of_pairs_of_keys_and_values_is_no_label(tmp_path):
    labels = pyarrow.array([[("x", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(pyarrow.table({"text": ["a"], "label": labels}), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match=r"has the type map<.*; give one text, number or b"):
        read(tmp_path / "rows.parquet")
