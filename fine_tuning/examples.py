"""Labelled examples out of CSV, TSV and JSONL files, checked while they are read.

Texts are cleaned as they are for pretraining, labels lose their outer spaces. A text with nothing left teaches
nothing, so it is left out of training; in dev and test it stays and is scored, since leaving it out would change
the score.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.documents import clean_text
from data_prep.errors import UserError
from data_prep.rows import kind_of, listed, read_rows
from fine_tuning.tasks import Task


@dataclass(frozen=True)
class Examples:
    """The examples of a split.

    Attributes:
        path: the file.
        columns: for each text column the cleaned text of every example.
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
        return [i for i, texts in enumerate(zip(*self.columns, strict=True)) if not any(texts)]


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
        notes.append(f"no training example is left with the label {listed(absent)}")
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
            f"{examples.path}: all {len(examples):,} examples have the label {listed(labels)}; a classifier needs two classes"
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
                f"{examples.path}, line {line}: the label {listed([label])} is not in {train}, which has "
                f"{listed(labels)}; add training examples with it or remove the row"
            )


def read_examples(path: Path, task: Task) -> Examples:
    """Read one file. Raises UserError naming file and line for whatever cannot be used."""
    names = [*task.text_columns, task.label_column]
    lines, values = [], []
    for row in read_rows(str(path), kind_of(str(path)), names, quoted=task.quoted, strings=False):
        place = f"{path}, line {row.line}"
        *texts, label = (field_text(row.field(name), name, place) for name in names)
        lines.append(row.line)
        values.append([*map(clean_text, texts), _label(label, task.label_column, place)])
    *columns, labels = (list(column) for column in zip(*values, strict=True))
    return Examples(path, tuple(columns), labels, lines)


def field_text(value: Any, name: str, place: str) -> str:
    """A field as text: numbers and truth values as JSON writes them, "" for null.

    Args:
        value: what a file holds there.
        name, place: of the field, and file and line, for the UserError that is raised for a list or an object.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        # Half a surrogate pair, which only a JSON escape can bring in, becomes U+FFFD: UTF-8 cannot hold it.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict | list):
        raise UserError(
            f"{place}: field {listed([name])} must be a string or a number, found {type(value).__name__}"
        )
    return json.dumps(value)


def _label(value: str, name: str, place: str) -> str:
    label = value.strip()
    if not label:
        raise UserError(
            f"{place}: the label is missing (column {listed([name])}); texts without labels are for predict.py"
        )
    return label
