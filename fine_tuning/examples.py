"""Labelled examples out of CSV, TSV and JSONL files, checked while they are read.

Fields stay as they are written, but for labels, whose outer spaces go. An empty text teaches nothing, so
it is left out of training; in dev and test it stays and is scored, since leaving it out would change the score.
"""

import csv
import hashlib
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.inputs import LineError, bare_name, open_range, user_errors
from fine_tuning.tasks import Task

JSON_LINES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    Attributes:
        path: the file.
        columns: for each text column the text of every example.
        labels: as written.
        lines: the line in the file (the last one, where a field holds line ends).
    """

    path: Path
    columns: tuple[list[str], ...]
    labels: list[str]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> "Examples":
        """The examples with these numbers."""
        return replace(
            self,
            columns=tuple([column[i] for i in rows] for column in self.columns),
            labels=[self.labels[i] for i in rows],
            lines=[self.lines[i] for i in rows],
        )

    def empty(self) -> list[int]:
        """Numbers of the examples with no text in any column."""
        return [i for i, texts in enumerate(zip(*self.columns, strict=True)) if not "".join(texts).strip()]


@dataclass(frozen=True)
class LabelledData:
    """Split → examples, the labels in the order in which the model numbers them, and sentences for the user."""

    splits: dict[str, Examples]
    labels: tuple[str, ...]
    notes: list[str]


def read_data(task: Task, train_examples: int | None) -> LabelledData:
    """Read all files of a task.

    Args:
        task: what to read.
        train_examples: how many training examples to keep, chosen by hash; None: all.
    Raises:
        UserError: a file, column, row or label is not as it must be.
    """
    splits = {split: read_examples(path, task) for split, path in task.files.items()}
    labels = label_order(splits["train"])
    for split in splits.keys() - {"train"}:
        _check_labels(splits[split], labels, splits["train"].path)
    notes = []
    for split, examples in splits.items():
        if empty := examples.empty():
            fate = "left out" if split == "train" else "kept and scored"
            notes.append(
                f"{examples.path}: {len(empty):,} empty texts are {fate} (first: line {examples.lines[empty[0]]})"
            )
    empty = set(splits["train"].empty())
    splits["train"] = splits["train"].select([i for i in range(len(splits["train"])) if i not in empty])
    if train_examples is not None:
        splits["train"] = choose_subset(splits["train"], train_examples)
    counts = Counter(splits["train"].labels)
    if len(counts) < 2:
        raise UserError(
            f"{splits['train'].path}: what is left for training has {len(counts)} class; give more examples"
        )
    if absent := [label for label in labels if label not in counts]:
        notes.append(f"no training example is left with the label {_listed(absent)}")
    return LabelledData(splits, labels, notes)


def choose_subset(examples: Examples, number: int) -> Examples:
    """The `number` examples with the smallest hash of their text, in the order of the file.

    No seed takes part, and a smaller subset lies inside a larger one, so curves over their size compare like
    with like.
    """
    if number > len(examples):
        raise UserError(
            f"--train_examples {number}: {examples.path} has {len(examples):,} examples with text; ask for fewer"
        )
    texts = ["\0".join(texts) for texts in zip(*examples.columns, strict=True)]
    # A hash of its own: with that of data preparation, texts held out there would be chosen first here.
    hashes = [
        hashlib.blake2b(text.encode(), digest_size=8, person=b"train_examples").digest() for text in texts
    ]
    return examples.select(sorted(sorted(range(len(texts)), key=hashes.__getitem__)[:number]))


def label_order(examples: Examples) -> tuple[str, ...]:
    """The labels of the training examples: in numeric order where all are numbers, else sorted as text."""
    labels = sorted(set(examples.labels))
    if len(labels) < 2:
        raise UserError(
            f"{examples.path}: all {len(examples):,} examples have the label {_listed(labels)}; a classifier needs two classes"
        )
    try:
        values = {label: float(label) for label in labels}
    except ValueError:
        return tuple(labels)
    # "nan" is a word here: it has no place in an order.
    return tuple(sorted(labels, key=values.get) if all(map(math.isfinite, values.values())) else labels)


def _check_labels(examples: Examples, labels: Sequence[str], train: Path) -> None:
    known = set(labels)
    for label, line in zip(examples.labels, examples.lines, strict=True):
        if label not in known:
            raise UserError(
                f"{examples.path}, line {line}: the label {_listed([label])} is not in {train}, which has "
                f"{_listed(labels)}; add training examples with it or remove the row"
            )


def read_examples(path: Path, task: Task) -> Examples:
    """Read one file. Raises UserError naming file and line for whatever cannot be used."""
    names = [*task.text_columns, task.label_column]
    lines, values = [], []
    with user_errors(str(path)), open_range(str(path), 0, None) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            for line, row in _rows(path, text, names, task.quoted):
                lines.append(line)
                values.append([*row[:-1], _label(line, row[-1], task.label_column)])
        except LineError as error:
            raise UserError(f"{path}, line {error.line}: {error}") from error
    if not values:
        raise UserError(f"{path}: the file is empty; expected rows with {_listed(names)}")
    *columns, labels = (list(column) for column in zip(*values, strict=True))
    return Examples(path, tuple(columns), labels, lines)


def _rows(path: Path, text: Iterable[str], names: list[str], quoted: bool) -> Iterator[tuple[int, list[str]]]:
    """The line number and the named fields of each row."""
    name = bare_name(str(path))
    if name.endswith(JSON_LINES):
        return _json_rows(text, names)
    delimiter = next((mark for extension, mark in DELIMITERS.items() if name.endswith(extension)), None)
    if delimiter is None:
        known = ", ".join([*DELIMITERS, *JSON_LINES])
        raise UserError(f"{path}: the extension says how to read a file; expected one of {known}")
    return _csv_rows(text, names, delimiter, quoted)


def _csv_rows(
    text: Iterable[str], names: list[str], delimiter: str, quoted: bool
) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(2**31 - 1)
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    # strict: a quotation mark that is out of place would otherwise swallow rows without a word.
    rows = csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True)
    header: list[str] = []
    places: list[int] = []
    try:
        for row in filter(None, rows):
            if not header:
                header, places = row, [_place(row, name, rows.line_num) for name in names]
            elif len(row) != len(header):
                raise LineError(
                    rows.line_num, f"the row has {len(row)} columns, the header {len(header)}; repair it"
                )
            else:
                yield rows.line_num, [row[place] for place in places]
    except csv.Error as error:
        raise LineError(
            max(rows.line_num, 1),
            f"malformed CSV ({error}); a field that holds a quotation mark must be quoted, the mark doubled",
        ) from error


def _place(header: list[str], name: str, line: int) -> int:
    if header.count(name) != 1:
        found = "no" if name not in header else "more than one"
        raise LineError(line, f"there is {found} column {_listed([name])}; the columns are {_listed(header)}")
    return header.index(name)


def _json_rows(text: Iterable[str], names: list[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text, start=1):
        if not line.isspace():
            yield number, json_fields(line, number, names)


def json_fields(line: str, number: int, names: list[str]) -> list[str]:
    """The named fields of one JSON line; numbers and truth values as JSON writes them, "" for null.

    Raises LineError if the line is not an object with these keys.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineError(
            number, f"expected one JSON object a line, but it does not parse ({error})"
        ) from error
    if not isinstance(record, dict):
        raise LineError(number, f"expected one JSON object a line, found {type(record).__name__}")
    for name in names:
        if name not in record:
            raise LineError(number, f"there is no field {_listed([name])}; the fields are {_listed(record)}")
    return [_json_text(record[name], name, number) for name in names]


def _json_text(value: Any, name: str, number: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        # Half a surrogate pair, which only a JSON escape can bring in, becomes U+FFFD: UTF-8 cannot hold it.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict | list):
        raise LineError(
            number, f"field {_listed([name])} must be a string or a number, found {type(value).__name__}"
        )
    return json.dumps(value)


def _label(line: int, value: str, name: str) -> str:
    label = value.strip()
    if not label:
        raise LineError(
            line, f"the label is missing (column {_listed([name])}); texts without labels are for predict.py"
        )
    return label


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none at all"
