"""Rows of CSV, TSV and JSON lines: read the same everywhere, and held out for a score without a leak."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import os
import random
import re
from collections import Counter
from math import sqrt
from pathlib import Path

import pytest
from corpora import files
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_prep.documents import clean_text, document_hash
from data_prep.errors import UserError, run_program
from data_prep.inputs import LineError
from data_prep.plan import held_out
from data_prep.rows import kind_of, parse_json_line, parse_rows, read_rows
from data_prep.run import main
from data_prep.split import SIDES, SplitSettings, side_of

FAST = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FIELD = st.text(st.sampled_from('ab ,\t"\n\r\\é한😀\u2028\x85\x0c'), max_size=6)


def rows_of(text: str, kind: str, names=("text",), **options) -> list:
    return list(parse_rows(io.StringIO(text, newline=""), kind, names, **options))


# Reading


@FAST
@given(
    st.lists(st.tuples(FIELD, FIELD), min_size=1),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([",", "\t"]),
)
def test_fields_and_sources_of_csv_come_back(table, end, delimiter):
    """Whatever csv.writer writes comes back: fields by name, and sources that are, joined, the text as it stands."""
    # What looks like rows swallowed by a stray quotation mark is refused; see the test below.
    assume(delimiter == "," or not any(0 < x.count("\t") == x.count("\n") for x in sum(table, ())))
    out = io.StringIO(newline="")
    # The writer itself forgets to quote a line end that is not its own.
    quoting = csv.QUOTE_ALL if re.search("[\r\n]", "".join(sum(table, ()))) else csv.QUOTE_MINIMAL
    out.write(header := f"id{delimiter}text{end}")
    csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=quoting).writerows(table)
    found = rows_of(out.getvalue(), "csv" if delimiter == "," else "tsv")
    assert [(row.field("id"), row.field("text")) for row in found] == table
    assert header + "".join(row.source for row in found) == out.getvalue()
    assert all(list(row.columns) == ["id", "text"] for row in found)


@FAST
@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), FIELD)), st.sampled_from(["\n", "\r\n", "\r", "\n\n"])
)
def test_fields_and_sources_of_json_lines_come_back(records, end):
    """Each object comes back with its fields in their order, its own line, and its line's number."""
    lines = [json.dumps({"text": "x"} | record) for record in records]
    found = rows_of("".join(line + end for line in lines), "jsonl")
    assert [dict(zip(row.columns, row.values, strict=True)) for row in found] == [
        {"text": "x"} | record for record in records
    ]
    assert [row.source.rstrip("\r\n") for row in found] == lines
    assert [row.line for row in found] == [
        1 + number * (2 if end == "\n\n" else 1) for number in range(len(lines))
    ]


def test_line_numbers_count_lines_inside_fields():
    """A row's number is that of its last line; blank lines count and are no rows."""
    found = rows_of('id,text\n\n1,"a\nb"\n\r\n2,c', "csv")
    assert [(row.line, row.field("text"), row.source) for row in found] == [
        (4, "a\nb", '1,"a\nb"\n'),
        (6, "c", "2,c"),
    ]


def test_unquoted_rows_hold_quotation_marks():
    """With quoted=False a quotation mark is a character, wherever it stands."""
    found = rows_of('text\tx\n"odd\t"\na"b""\t\n', "tsv", quoted=False)
    assert [row.values for row in found] == [['"odd', '"'], ['a"b""', ""]]


def test_only_named_columns_must_be_there_once():
    """Columns nobody asked for may be there twice or without a name, and a named one is found wherever it stands."""
    (row,) = rows_of(",x,x,text\n0,1,2,a\n", "csv")
    assert row.field("text") == "a" and row.values == ["0", "1", "2", "a"]


def test_values_of_json_are_left_as_they_are():
    """Where strings are not asked for, numbers, null and lists come through; in other fields always."""
    (row,) = rows_of('{"text": null, "x": [1]}\n', "jsonl", strings=False)
    assert row.field("text") is None and row.field("x") == [1]
    assert rows_of('{"text": "a", "x": 1}', "jsonl")[0].field("x") == 1
    assert parse_json_line('{"text": 1.50}', 7, ["text"])[0::2] == (7, [1.5])


BAD_TEXTS = {
    "no column": ("csv", "id,body\n", 1, 'there is no column "text"; the columns are "id", "body"'),
    "column twice": ("csv", "\ntext,text\n", 2, 'there is more than one column "text"'),
    "wide row": ("csv", "id,text\n\n1,a,b\n", 3, "the row has 3 columns, the header 2; repair it"),
    "narrow row": ("tsv", "id\ttext\n1\n", 2, "the row has 1 columns, the header 2"),
    "text behind a quotation": (
        "csv",
        'text\n"a" b\n',
        2,
        "malformed CSV .*must be quoted, the mark doubled",
    ),
    "open quotation": ("csv", 'text\n"a\nb\n', 3, "malformed CSV"),
    "NUL": ("csv", "text\na\0\n", 2, "there is a NUL byte"),
    "half an object": (
        "jsonl",
        '\n{"text": "a"',
        2,
        "expected one JSON object a line, but it does not parse",
    ),
    "no object": ("jsonl", '["a"]\n', 1, "expected one JSON object a line, found list; `jq -c '.\\[\\]'`"),
    "no field": (
        "jsonl",
        '{"body": 1, "id": 2}\n',
        1,
        'there is no field "text"; the fields are "body", "id"',
    ),
    "no string": (
        "jsonl",
        '{"text": 1}\n',
        1,
        'field "text" must be a string, found int; the fields are "text"',
    ),
    "deep": ("jsonl", "[" * 100_000, 1, "does not parse"),
}


@pytest.mark.parametrize(("kind", "text", "line", "pattern"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_malformed_rows_are_named(kind, text, line, pattern):
    """Each fault is one sentence with the number of its line."""
    with pytest.raises(LineError, match=pattern) as caught:
        rows_of(text, kind)
    assert caught.value.line == line and "\n" not in str(caught.value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_files_are_read_whole(tmp_path, pack):
    """A byte order mark is no part of the header, any compression is seen, and messages name file and line."""
    path = tmp_path / "a.csv"
    path.write_bytes(pack(b"\xef\xbb\xbftext,id\r\n\xed\x95\x9c,1\r\n"))
    assert [row.field("text") for row in read_rows(str(path), "csv", ["text"])] == ["한"]
    for content, wanted in (
        (b"text,id\n1\n", f"{path}, line 2: the row has 1 columns"),
        (b"text\na\nb\xff\n", f"{path}, line 3, byte 8: the text is not valid UTF-8"),
        (b"", f'{path}: the file is empty; expected rows with "text"'),
        (b"\xef\xbb\xbftext\n\n", f'{path}: the file is empty; expected rows with "text"'),
    ):
        path.write_bytes(pack(content))
        with pytest.raises(UserError, match=re.escape(wanted)):
            list(read_rows(str(path), "csv", ["text"]))
    with pytest.raises(UserError, match=r"gone\.csv: the file cannot be read"):
        list(read_rows(str(tmp_path / "gone.csv"), "csv", ["text"]))


def test_kinds_go_by_name_or_format():
    """The extension below .gz and .bz2 says the kind; a named format overrules it, but .tsv is the CSV with tabs."""
    names = {
        "A.CSV": "csv",
        "a.tsv.gz": "tsv",
        "a.jsonl": "jsonl",
        "a.ndjson.bz2": "jsonl",
        "a.json": "jsonl",
    }
    assert {name: kind_of(f"/x.y/{name}") for name in names} == names
    assert [kind_of(name, "csv") for name in ("a.txt", "a.tsv.gz", "a.jsonl")] == ["csv", "tsv", "csv"]
    assert kind_of("a.tsv", "jsonl") == "jsonl"
    with pytest.raises(UserError, match=r"a\.txt: the extension says .*\.csv, \.tsv, \.jsonl"):
        kind_of("a.txt")


# Holding rows out

WORDS = ["good", "bad", "film", "plot", "words", "seen", "ever", "never", "again"]


def make_rows(number: int, seed: int = 0) -> list[list[str]]:
    """id, text, label; the number in a text makes it different from all others."""
    draw = random.Random(seed)
    return [[str(i), f"{' '.join(draw.choices(WORDS, k=6))} {i}", str(i % 2)] for i in range(number)]


def write_rows(path: Path, rows: list[list[str]], columns: str = "id,text,label") -> Path:
    """A CSV or TSV file, or JSON lines, by the extension; .gz and .bz2 are packed."""
    kind, out = kind_of(str(path)), io.StringIO(newline="")
    names = columns.split(",")
    if kind == "jsonl":
        out.write("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    else:
        csv.writer(out, delimiter="\t" if kind == "tsv" else ",", lineterminator="\n").writerows(
            [names, *rows]
        )
    pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(out.getvalue().encode()))
    return path


def split(inputs: Path | list[Path], output: Path, *options: str) -> list[str]:
    """The command line; later options override."""
    paths = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    fractions = ["--dev_fraction", "0.1", "--test_fraction", "0.2"]
    return ["split", "--input", *paths, "--output", str(output), *fractions, *options]


def table(path: Path) -> list[list[str]]:
    """The rows of a file."""
    return [list(row.values) for row in read_rows(str(path), kind_of(str(path)), [], strings=False)]


def sides(folder: Path, kind: str = "csv") -> dict[str, list[list[str]]]:
    return {side: table(folder / f"{side}.{kind}") for side in SIDES}


@pytest.mark.parametrize("name", ["r.csv", "r.tsv.gz", "r.jsonl", "r.ndjson.bz2"])
def test_rows_are_dealt_whole_and_in_order(tmp_path, name):
    """The three files have the input's columns and between them exactly its rows, in order, byte for byte."""
    rows = [[i, f'{text}\n"quoted", so', label] for i, text, label in make_rows(300)]
    path = write_rows(tmp_path / name, rows)
    assert main(split(path, tmp_path / "out")) is None
    kind = kind_of(name)
    dealt = sides(tmp_path / "out", kind)
    assert [sum(row in dealt[side] for side in SIDES) for row in rows] == [1] * 300
    for side in SIDES:
        assert dealt[side] == [row for row in rows if row in dealt[side]]
    pack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    lines = pack(path.read_bytes()).splitlines(keepends=True)
    for side in SIDES:
        written = (tmp_path / "out" / f"{side}.{kind}").read_bytes().splitlines(keepends=True)
        assert set(written) <= set(lines) and (kind == "jsonl" or written[0] == lines[0])
    said = json.loads((tmp_path / "out/split.json").read_text())
    assert said["inputs"] == [
        {"name": name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    ]
    assert {name: file["rows"] for name, file in said["files"].items()} == {
        f"{side}.{kind}": len(dealt[side]) for side in SIDES
    }
    assert said["columns"] == ["id", "text", "label"]


def test_the_side_is_a_function_of_the_text_alone(tmp_path):
    """Other neighbours, labels, spaces, line breaks and kinds of file leave each text on its side; a reference
    computes it from the hash."""
    rows = make_rows(400)
    changed = [[i, text.replace(" ", " \u3000<br />\n", 1), "z"] for i, text, _ in rows[::-1] if int(i) % 3]
    main(split(write_rows(tmp_path / "a.csv", rows), tmp_path / "a"))
    main(split(write_rows(tmp_path / "b.jsonl", changed), tmp_path / "b"))
    first = {row[0]: side for side, part in sides(tmp_path / "a").items() for row in part}
    second = {row[0]: side for side, part in sides(tmp_path / "b", "jsonl").items() for row in part}
    assert second == {number: side for number, side in first.items() if int(number) % 3}
    for number, text, _ in rows:
        digest = hashlib.blake2b(text.replace(" ", "").encode(), digest_size=16).digest()
        word = hashlib.blake2b(digest, digest_size=8, person=b"split").digest()
        share = int.from_bytes(word, "big") / 2**64
        assert first[number] == ("test" if share < 0.2 else "dev" if share >= 0.9 else "train")


def test_fractions_are_kept_and_sets_are_nested():
    """Of 20,000 texts the shares are right to 5 standard errors, and a larger fraction only adds to its own side."""
    digests = [document_hash([f"text {i}"]) for i in range(20_000)]

    def dealt(dev: float, test: float) -> dict[str, set[bytes]]:
        chosen = SplitSettings("text", dev, test)
        where = [(side_of(digest, chosen), digest) for digest in digests]
        return {side: {digest for found, digest in where if found == side} for side in SIDES}

    small, large = dealt(0.03, 0.06), dealt(0.3, 0.1)
    for side, share in (("dev", 0.03), ("test", 0.06)):
        assert abs(len(small[side]) / 20_000 - share) < 5 * sqrt(share * (1 - share) / 20_000)
        assert small[side] < large[side]
    # Nor is --eval_fraction touched: of each side, as many as of all texts are held out from pretraining.
    for side in SIDES:
        found = sum(held_out(digest, 0.05) for digest in large[side]) / len(large[side])
        assert abs(found - 0.05) < 5 * sqrt(0.05 * 0.95 / len(large[side]))


def test_a_text_stands_in_one_row_of_one_side(tmp_path, capsys):
    """Of rows with one text, spaces and line breaks aside, the first stays; those dropped are counted, and by column
    those that say something else; rows without text go too."""
    rows = make_rows(200)
    twins = [
        ["0", rows[0][1], rows[0][2]],  # the same row again
        ["900", rows[1][1].replace(" ", "  "), rows[1][2]],
        ["901", rows[1][1].replace(" ", "<br />", 1), "9"],
        ["902", " <br>\u3000\x0b", "1"],
        ["903", rows[2][1].upper(), rows[2][2]],
        ["904", rows[3][1].replace("3", "\uff13"), rows[3][2]],
    ]
    path = write_rows(tmp_path / "r.csv", rows + twins)
    main(split(path, tmp_path / "out"))
    dealt = [row for part in sides(tmp_path / "out").values() for row in part]
    assert sorted(dealt) == sorted(rows)
    said = json.loads((tmp_path / "out/split.json").read_text())
    assert (said["duplicates"], said["without_text"]) == (5, 1)
    assert said["contradictions"] == {"id": 4, "label": 1}
    out = capsys.readouterr().out
    assert (
        '5 rows with a text that was there before; of these 4 have another "id", 1 have another "label"'
        in out
    )
    assert "1 rows without text" in out


def test_rows_swallowed_by_stray_quotation_marks_are_refused(tmp_path, capsys):
    """In a TSV that was written without quoting, two fields with an opening and a closing mark do not become one."""
    lines = [f"{i}\tfilm {i}\t{i % 2}" for i in range(60)]
    lines[10], lines[13] = '10\t"good film\t1', '13\tbad film"\t0'
    (tmp_path / "r.tsv").write_text("\n".join(["id\ttext\tlabel", *lines]) + "\n")
    assert run_program(main, split(tmp_path / "r.tsv", tmp_path / "out")) == 2
    assert "line 15: a quoted field that ends here holds 3 whole rows" in capsys.readouterr().err
    quoted = 'id\ttext\tlabel\n1\t"a\tb\nc"\t0\n'
    assert rows_of(quoted, "tsv")[0].field("text") == "a\tb\nc"


def test_two_columns_of_one_name_are_refused(tmp_path, capsys):
    """Any name, not only the text's: later programs could not tell the columns apart."""
    (tmp_path / "r.csv").write_text("text,label,label\n" + "".join(f"film {i},0,1\n" for i in range(50)))
    assert run_program(main, split(tmp_path / "r.csv", tmp_path / "out")) == 2
    assert 'there is more than one column "label"' in capsys.readouterr().err


def test_fields_that_only_some_json_lines_have_are_compared(tmp_path):
    """A field that the earlier row with that text lacks contradicts unless it is null."""
    lines = [{"text": text} for _, text, _ in make_rows(100)]
    lines += [lines[0] | {"x": 1}, lines[1] | {"x": None}, lines[2] | {"y": [1]}]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    main(split(tmp_path / "r.jsonl", tmp_path / "out"))
    said = json.loads((tmp_path / "out/split.json").read_text())
    assert said["duplicates"] == 3 and said["contradictions"] == {"x": 1, "y": 1}


def test_several_inputs_are_one(tmp_path):
    """Inputs with the same columns are read in the order of their paths, whatever their line ends and compression, and
    a last line without an end is a whole row."""
    rows = make_rows(200)
    write_rows(tmp_path / "b.csv.gz", rows[100:])
    whole = write_rows(tmp_path / "a.csv", rows[:100]).read_bytes()
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n")[:-2])
    main(split([tmp_path / "b.csv.gz", tmp_path / "a.csv"], tmp_path / "out"))
    write_rows(tmp_path / "all.csv", rows)
    main(split(tmp_path / "all.csv", tmp_path / "one"))
    assert sides(tmp_path / "out") == sides(tmp_path / "one")


def test_a_second_run_has_nothing_to_do(tmp_path, capsys, monkeypatch):
    """The same command again says so and writes nothing, also from elsewhere; a file that is gone is made again."""
    path = write_rows(tmp_path / "r.csv", make_rows(100))
    main(split(path, tmp_path / "out"))
    first, said = files(tmp_path / "out"), capsys.readouterr().out
    times = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in first}
    monkeypatch.chdir(tmp_path)
    main(split(Path("r.csv"), Path("out")))
    again = capsys.readouterr().out
    assert again.startswith("out: this split is finished; there is nothing to do\n")
    assert again.count("\n") == said.count("\n") + 1
    assert times == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in first}
    (tmp_path / "out/dev.csv").unlink()
    main(split(path, tmp_path / "out"))
    assert "nothing to do" not in capsys.readouterr().out
    assert files(tmp_path / "out") == first


def test_a_killed_split_leaves_whole_files_only(tmp_path, monkeypatch):
    """Killed before each of its renames, the command leaves no half file, and run again gives the same bytes."""
    path = write_rows(tmp_path / "r.csv", make_rows(100))
    main(split(path, tmp_path / "whole"))
    whole = files(tmp_path / "whole")
    replace = os.replace
    for last in range(4):
        output, calls = tmp_path / f"out{last}", []

        def killed(source, target, calls=calls, last=last):
            calls.append(target)
            if len(calls) > last:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", killed)
        assert run_program(main, split(path, output)) == 130
        monkeypatch.setattr(os, "replace", replace)
        left = {name: content for name, content in files(output).items() if not name.startswith(".")}
        assert len(left) == last and left.items() <= whole.items()
        (output / ".train.csv.partial").write_text("what a SIGKILL leaves")
        main(split(path, output))
        assert files(output) == whole


def sentence(capsys, arguments: list[str]) -> str:
    """The one line that the program prints for bad input; it exits with 2."""
    capsys.readouterr()
    assert run_program(main, arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err


def test_another_split_in_the_same_folder_is_refused(tmp_path, capsys):
    """Other fractions, columns or inputs, a changed result, a damaged split.json and files of somebody else are refused
    by name, and stay."""
    path = write_rows(tmp_path / "r.csv", make_rows(100))
    output = tmp_path / "out"
    main(split(path, output))
    before = files(output)
    for change, wanted in (
        (["--dev_fraction", "0.15"], f"{output}: it holds a split that was made with other settings "
         "(settings.dev_fraction: 0.1 there, 0.15 now)"),
        (["--text_field", "label"], "settings.text_field: text there, label now"),
    ):  # fmt: skip
        assert wanted in sentence(capsys, split(path, output, *change))
    write_rows(path, make_rows(100, seed=1))
    assert "inputs: r.csv is not the same" in sentence(capsys, split(path, output))
    write_rows(path, make_rows(100))
    (output / "train.csv").write_text("text\nmine\n")
    assert f"{output / 'train.csv'}: it was changed" in sentence(capsys, split(path, output))
    (output / "train.csv").write_bytes(before["train.csv"])
    assert files(output) == before
    (output / "split.json").write_text("{")
    assert f"{output / 'split.json'}: the file is damaged" in sentence(capsys, split(path, output))
    (output / "split.json").unlink()
    assert f"{output / 'train.csv'}: no split.json says" in sentence(capsys, split(path, output))
    assert files(output) == {name: content for name, content in before.items() if name != "split.json"}


BAD_SPLITS = {
    "fractions of all": ({}, ["--dev_fraction", "0.5", "--test_fraction", "0.5"], "each must be above 0 and both together below 1"),
    "no dev": ({}, ["--dev_fraction", "0"], "--dev_fraction 0.0 --test_fraction 0.2: each must be above 0"),
    "too few for dev": ({}, ["--dev_fraction", "0.0001"], "of 60 different texts none is left for dev with --dev_fraction 0.0001"),
    "all for test": ({}, ["--dev_fraction", "0.00001", "--test_fraction", "0.99998"], "none is left for train"),
    "no such column": ({}, ["--text_field", "body"], 'r.csv, line 1: there is no column "body"; the columns are "id", "text", "label"'),
    "empty file": ({"r.csv": b""}, [], 'r.csv: the file is empty; expected rows with "text"'),
    "an empty one of two": ({"s.csv": b"id,text,label\n"}, [], "s.csv: the file is empty"),
    "a wide row": ({"r.csv": b"id,text,label\n1,a,0\n2,b,c,0\n"}, [], "r.csv, line 3: the row has 4 columns"),
    "other columns": ({"s.csv": b"text,label,id\na,1,1\n"}, [], 's.csv: its columns are "text", "label", "id" and those of '),
    "other fields": ({"r.csv": None, "r.jsonl": b'{"text": "a"}\n', "s.jsonl": b'{"text": "b", "x": 1}\n'}, [], 's.jsonl: its columns are "text", "x"'),
    "other kind": ({"s.tsv": b"id\ttext\tlabel\n1\ta\t0\n"}, [], "s.tsv: it is another kind of file than"),
    "no rows in it": ({"r.csv": None, "r.txt": b"text\n"}, [], "r.txt: the extension says how to read a file"),
    "a number for text": ({"r.csv": None, "r.jsonl": b'{"text": 1}\n'}, [], 'r.jsonl, line 1: field "text" must be a string, found int'),
    "not UTF-8": ({"r.csv": b"text\na\n\xff\n"}, [], "r.csv, line 3, byte 7: the text is not valid UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "options", "wanted"), BAD_SPLITS.values(), ids=BAD_SPLITS)
def test_bad_input_is_one_sentence(tmp_path, capsys, contents, options, wanted):
    """Each fault is one sentence with exit code 2, and no file appears."""
    folder = tmp_path / "in"
    folder.mkdir()
    write_rows(folder / "r.csv", make_rows(60))
    for name, content in contents.items():
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    assert wanted in sentence(capsys, split(folder, tmp_path / "out", *options))
    assert not [name for name in files(tmp_path / "out") if name != ".lock"]


def test_wrong_places_are_refused(tmp_path, capsys):
    """An output that is a file, an input inside the output and an input that is not there are named."""
    path = write_rows(tmp_path / "r.csv", make_rows(60))
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path / 'file'} is a file; name a folder" in sentence(capsys, split(path, tmp_path / "file"))
    assert f"{path}: this input lies in --output" in sentence(capsys, split(path, tmp_path))
    assert "gone.csv: there is no such file" in sentence(
        capsys, split(tmp_path / "gone.csv", tmp_path / "out")
    )
    assert (tmp_path / "file").read_text() == "mine" and set(files(tmp_path)) == {"r.csv", "file"}


def test_a_file_that_changes_meanwhile_is_refused(tmp_path, capsys, monkeypatch):
    """An input that is written to while it is read gives no result."""
    from data_prep import split as module

    path = write_rows(tmp_path / "r.csv", make_rows(60))
    deal = module.Dealer.deal

    def deal_and_touch(self, row):
        os.utime(path, ns=(0, 0))
        return deal(self, row)

    monkeypatch.setattr(module.Dealer, "deal", deal_and_touch)
    assert f"{path}: it was changed while it was read" in sentence(capsys, split(path, tmp_path / "out"))
    assert not (tmp_path / "out/train.csv").exists()


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ("id,text,label", "", ["", "", ""]),
        ("body,sentiment", "--text_field body", [" --text_field body"] * 2 + [" --text_column body --label_column sentiment"]),
        ("a b,x,y", "--text_field=a b", [" --text_field 'a b'"] * 2 + [" --text_column 'a b' --label_column COLUMN"]),
        ("text", "", ["", ""]),
    ],
)  # fmt: skip
def test_the_last_lines_say_what_to_type(tmp_path, capsys, columns, options, expected):
    """The next commands name the three files and the columns as they are; plain text has none for fine-tuning."""
    width = len(columns.split(","))
    rows = [[text, number, label][:width] for number, text, label in make_rows(60)]
    if columns.startswith("id"):
        rows = make_rows(60)
    output = tmp_path / "the reviews"
    options = [options] if "=" in options else options.split()
    main(split(write_rows(tmp_path / "r.csv", rows, columns), output, *options))
    *_, said = capsys.readouterr().out.partition("next: ")
    train, dev, test = (f"'{output / side}.csv'" for side in SIDES)
    commands = [
        f"python data_prep/run.py tokenizer --input {train}{{}} --output data/tokenizer",
        f"python data_prep/run.py shards --input {train}{{}} --tokenizer data/tokenizer --output data/shards",
        f"python fine_tuning/run.py --train {train} --dev {dev} --test {test}{{}} --init_from RUN --output runs/NAME",
    ]
    wanted = [command.format(part) for command, part in zip(commands, expected, strict=False)]
    assert [line.strip() for line in said.splitlines()] == wanted


def test_korean_reviews(shared_data, tmp_path):
    """Real reviews come out once each: no text on two sides, all rows accounted for, and shares near those asked for."""
    source = (shared_data / "nsmc/ratings_valid.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "r.tsv").write_text("".join(source[:8001]), encoding="utf-8")
    main(split(tmp_path / "r.tsv", tmp_path / "out", "--text_field", "document"))
    dealt = sides(tmp_path / "out", "tsv")
    said = json.loads((tmp_path / "out/split.json").read_text())
    counts = {side: len(part) for side, part in dealt.items()}
    assert sum(counts.values()) + said["duplicates"] + said["without_text"] == 8000
    texts = Counter(clean_text(row[1]).replace(" ", "") for part in dealt.values() for row in part)
    assert set(texts.values()) == {1}
    assert 20 < said["duplicates"] < 400 and said["contradictions"]["label"] > 0
    assert abs(counts["test"] / sum(counts.values()) - 0.2) < 0.025
    assert abs(counts["dev"] / sum(counts.values()) - 0.1) < 0.02
