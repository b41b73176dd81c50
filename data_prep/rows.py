"""Rows of CSV, TSV and JSON lines: the one place that parses them, checked while they are read."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from data_prep.errors import UserError
from data_prep.inputs import LineError, bare_name, open_range, user_errors

JSON_LINES = "jsonl"
DELIMITERS = {"csv": ",", "tsv": "\t"}
KINDS = {".csv": "csv", ".tsv": "tsv", ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES}


class Row(NamedTuple):
    """A row of a file.

    line: its number in the text, from 1; the last one, where a field holds line ends.
    columns: the names of its fields: the header, or the keys of the JSON object.
    values: what the fields hold; in CSV and TSV strings.
    source: the row as it is written, with its line end if it has one.
    """

    line: int
    columns: Sequence[str]
    values: Sequence[Any]
    source: str

    def field(self, name: str) -> Any:
        """What the field with this name holds."""
        return self.values[self.columns.index(name)]


def kind_of(path: str, format: str = "auto") -> str:
    """The kind of rows in a file: "csv", "tsv" or "jsonl".

    Args:
        path: its extension, below that of a compression, says the kind.
        format: "jsonl", "csv" (which the extension .tsv makes "tsv"), or "auto" to go by the extension alone.
    Raises:
        UserError: the extension has to say it and is another one.
    """
    name = bare_name(path)
    by_name = next((kind for extension, kind in KINDS.items() if name.endswith(extension)), None)
    if format != "auto":
        return "tsv" if (format, by_name) == ("csv", "tsv") else format
    if by_name is None:
        raise UserError(f"{path}: the extension says how to read a file; expected one of {', '.join(KINDS)}")
    return by_name


def listed(names: Iterable[str]) -> str:
    """Names for a message."""
    return ", ".join(f'"{name}"' for name in names) or "none at all"


def read_rows(
    path: str, kind: str, names: Sequence[str], *, quoted: bool = True, strings: bool = True
) -> Iterator[Row]:
    """Yield the rows of a file, plain or compressed, as `parse_rows` does.

    Raises:
        UserError: with file and line, for whatever cannot be read, and if there is no row.
    """
    empty = True
    with user_errors(path), open_range(path, 0, None) as stream:
        lines = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            for row in parse_rows(lines, kind, names, quoted=quoted, strings=strings):
                empty = False
                yield row
        except LineError as error:
            raise UserError(f"{path}, line {error.line}: {error}") from error
    if empty:
        raise UserError(f"{path}: the file is empty; expected rows with {listed(names)}")


def parse_rows(
    lines: Iterable[str], kind: str, names: Sequence[str], *, quoted: bool = True, strings: bool = True
) -> Iterator[Row]:
    """Yield the rows of a text; blank lines are none.

    Args:
        lines: with the line ends as they are (of a file that was opened with newline="").
        kind: "csv", "tsv" (both with a header) or "jsonl".
        names: fields that every row must have, once.
        quoted: whether a quotation mark in CSV and TSV encloses a field (else it is a character like others).
        strings: whether JSON must have strings in these fields.
    Raises:
        LineError: the text is malformed, or a field is not as it must be.
    """
    if kind == JSON_LINES:
        return _json_rows(lines, names, strings)
    return _csv_rows(lines, names, DELIMITERS[kind], quoted)


def _csv_rows(lines: Iterable[str], names: Sequence[str], delimiter: str, quoted: bool) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    taken: list[str] = []
    # strict: a quotation mark that is out of place would otherwise swallow rows without a word.
    reader = csv.reader(_taken(lines, taken), delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] = []
    try:
        for values in reader:
            # The reader takes a line only when the row needs it, so these are the lines of this row.
            source = "".join(taken)
            taken.clear()
            if values and header:
                _check_width(values, header, reader.line_num)
                if delimiter == "\t":
                    _check_marks(values, len(header), reader.line_num)
                yield Row(reader.line_num, header, values, source)
            elif values:
                header = values
                _check_header(header, names, reader.line_num)
    except csv.Error as error:
        raise LineError(
            max(reader.line_num, 1),
            f"malformed CSV ({error}); a field that holds a quotation mark must be quoted, the mark doubled",
        ) from error


def _taken(lines: Iterable[str], taken: list[str]) -> Iterator[str]:
    """The lines, each also appended to `taken`."""
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise LineError(
                number, "there is a NUL byte, which no CSV text holds; is it another kind of file?"
            )
        taken.append(line)
        yield line


def _check_header(header: Sequence[str], names: Sequence[str], line: int) -> None:
    for name in names:
        if header.count(name) != 1:
            found = "no" if name not in header else "more than one"
            raise LineError(
                line, f"there is {found} column {listed([name])}; the columns are {listed(header)}"
            )


def _check_width(values: Sequence[str], header: Sequence[str], line: int) -> None:
    if len(values) != len(header):
        raise LineError(line, f"the row has {len(values)} columns, the header {len(header)}; repair it")


def _check_marks(values: Sequence[str], columns: int, line: int) -> None:
    """Refuse a field that a quotation mark meant as text has opened, and another some rows below has closed.

    Such a field holds the tabs of whole rows.
    """
    for value in values:
        line_ends, tabs = value.count("\n"), value.count("\t")
        if tabs and tabs == line_ends * (columns - 1):
            raise LineError(
                line,
                f"a quoted field that ends here holds {line_ends} whole rows: a quotation mark above it is text, not a "
                "quote; quote that field and double the mark",
            )


def _json_rows(lines: Iterable[str], names: Sequence[str], strings: bool) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if not line.isspace():
            row = parse_json_line(line, number, names)
            for name in names if strings else ():
                _check_string(row, name)
            yield row


def _check_string(row: Row, name: str) -> None:
    value = row.field(name)
    if not isinstance(value, str):
        raise LineError(
            row.line,
            f"field {listed([name])} must be a string, found {type(value).__name__}; "
            f"the fields are {listed(row.columns)}",
        )


def parse_json_line(line: str, number: int, names: Sequence[str]) -> Row:
    """The row of one JSON line.

    Raises:
        LineError: the line is not an object with these keys.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(
            number, f"expected one JSON object a line, but it does not parse ({error})"
        ) from error
    if not isinstance(record, dict):
        raise LineError(
            number,
            f"expected one JSON object a line, found {type(record).__name__}; `jq -c '.[]'` makes lines of a list",
        )
    for name in names:
        if name not in record:
            raise LineError(number, f"there is no field {listed([name])}; the fields are {listed(record)}")
    return Row(number, list(record), list(record.values()), line)
