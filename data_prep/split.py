"""Rows held out for a score: files of rows become a training, a dev and a test file.

The side of a row is a function of its text alone, and a text stands on one side, once. So the training file can
serve for pretraining as well as for fine-tuning, and neither sees a text of the score.
"""

import csv
import hashlib
import json
import os
import shlex
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

from data_prep.documents import clean_text, document_hash
from data_prep.errors import UserError
from data_prep.inputs import InputFile, ReadOptions, find_inputs
from data_prep.plan import differences, input_names
from data_prep.rows import DELIMITERS, Row, kind_of, listed, read_rows
from data_prep.shards import file_sha256, sync
from data_prep.workers import work_lock

SIDES = ("train", "dev", "test")
DESCRIPTION = "split.json"


@dataclass(frozen=True)
class SplitSettings:
    """What decides where a row goes.

    Attributes:
        text_field: the column that holds the text.
        dev_fraction, test_fraction: shares of the different texts; above 0, together below 1.
    """

    text_field: str
    dev_fraction: float
    test_fraction: float


def side_of(digest: bytes, settings: SplitSettings) -> str:
    """The side of the text with this document_hash.

    Dev sets of growing fractions are nested, and so are test sets: they grow from different ends.
    """
    # A hash of its own. With the document's, --eval_fraction would look in the training file for the lowest
    # hashes, which are just those that had been taken away.
    word = int.from_bytes(hashlib.blake2b(digest, digest_size=8, person=b"split").digest(), "big")
    if word < settings.test_fraction * 2.0**64:
        return "test"
    return "dev" if word >= (1 - settings.dev_fraction) * 2.0**64 else "train"


class Dealer:
    """Deals rows to sides; of the rows with one text, the first. Memory: about 200 bytes for each text.

    Attributes:
        rows: side → rows dealt to it.
        without_text: rows dropped because nothing is left of their text once it is clean.
        duplicates: rows dropped because an earlier one has the same text; spaces, case and Unicode form aside.
        contradictions: column → duplicates that hold something else there than the row that stayed.
    """

    def __init__(self, settings: SplitSettings):
        self.settings = settings
        self.rows = dict.fromkeys(SIDES, 0)
        self.without_text = 0
        self.duplicates = 0
        self.contradictions: Counter[str] = Counter()
        self._columns: dict[str, None] = {}
        self._stayed: dict[bytes, array] = {}

    def deal(self, row: Row) -> str | None:
        """The side of a row, or None if it is dropped."""
        text = clean_text(row.field(self.settings.text_field))
        if not text:
            self.without_text += 1
            return None
        # Compatible forms and case are folded, as tokenizers fold them: what reads the same is one text.
        digest = document_hash([unicodedata.normalize("NFKC", text).casefold()])
        others = self._hash_others(row)
        if digest in self._stayed:
            self.duplicates += 1
            self._compare(self._stayed[digest], others)
            return None
        self._stayed[digest] = others
        side = side_of(digest, self.settings)
        self.rows[side] += 1
        return side

    def _hash_others(self, row: Row) -> array:
        """A hash of what each column but the text holds, in the order in which the columns were first seen."""
        fields = dict(zip(row.columns, row.values, strict=True))
        del fields[self.settings.text_field]
        self._columns |= dict.fromkeys(fields)
        return array("q", [_value_hash(fields.get(name)) for name in self._columns])

    def _compare(self, stayed: array, others: array) -> None:
        pairs = zip_longest(stayed, others, fillvalue=_value_hash(None))
        for name, (one, other) in zip(self._columns, pairs, strict=True):
            if one != other:
                self.contradictions[name] += 1


def _value_hash(value: object) -> int:
    return hash(json.dumps(value, sort_keys=True))


def make_split(inputs: list[str], format: str, output: Path, settings: SplitSettings) -> tuple[dict, bool]:
    """Write the files of the three sides and split.json, or find them there.

    Args:
        inputs: files, folders or patterns; all of one kind, with the same columns.
        format: "auto", "csv" or "jsonl".
        output: folder for train, dev and test; their rows are the inputs' as they are written there.
        settings: where a row goes.
    Returns:
        What split.json says, and whether it was written now.
    Raises:
        UserError: a row cannot be read, a side gets no row, or the folder holds something else.
    """
    _check_fractions(settings)
    files, kind = _find_files(inputs, format, output)
    asked = {
        "settings": {"kind": kind} | asdict(settings),
        "inputs": [
            entry | {"sha256": file_sha256(Path(file.path))}
            for entry, file in zip(input_names(files), files, strict=True)
        ],
    }
    names = [f"{side}.{kind}" for side in SIDES]
    with work_lock(output, shared=False):
        there = _read_finished(output, asked, names)
        return (there, False) if there else (_write_split(files, kind, output, settings, asked), True)


def _check_fractions(settings: SplitSettings) -> None:
    dev, test = settings.dev_fraction, settings.test_fraction
    if not (dev > 0 and test > 0 and dev + test < 1):
        raise UserError(
            f"--dev_fraction {dev} --test_fraction {test}: each must be above 0 and both together below 1, since the "
            "rest is the training file"
        )


def _find_files(inputs: list[str], format: str, output: Path) -> tuple[list[InputFile], str]:
    """The input files in the order of their absolute paths, and the kind of rows that all of them have."""
    found = find_inputs(inputs, ReadOptions(format))
    files = sorted(
        (replace(file, path=os.path.abspath(file.path)) for file in found), key=lambda file: file.path
    )
    first, kind = files[0].path, kind_of(files[0].path, format)
    for file in files:
        if kind_of(file.path, format) != kind:
            raise UserError(
                f"{file.path}: it is another kind of file than {first}; split them into folders of their own"
            )
        if output.resolve() in Path(file.path).resolve().parents:
            raise UserError(
                f"{file.path}: this input lies in --output {output}; name another folder, or the inputs without it"
            )
    return files, kind


def _read_finished(output: Path, asked: dict, names: Sequence[str]) -> dict | None:
    """What split.json says if the same split is finished in the folder, None if there is none.

    Raises:
        UserError: the folder holds another split, or files that are not a split's.
    """
    path = output / DESCRIPTION
    there = [output / name for name in names if (output / name).exists()]
    if not path.is_file():
        if there:
            raise UserError(
                f"{there[0]}: no {DESCRIPTION} says that this command wrote it; choose another --output"
            )
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {output / name: entry["sha256"] for name, entry in content["files"].items()}
        old = {name: content[name] for name in asked}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: the file is damaged; delete {output} and split again") from None
    if old != asked:
        raise UserError(
            f"{output}: it holds a split that was made with other settings ({differences(old, asked)}); choose another "
            "--output or delete the folder"
        )
    for file in there:
        if file_sha256(file) != files[file]:
            raise UserError(f"{file}: it was changed after it was written; delete {output} and split again")
    return content if len(there) == len(names) else None


def _write_split(
    files: Sequence[InputFile], kind: str, output: Path, settings: SplitSettings, asked: dict
) -> dict:
    dealer = Dealer(settings)
    names = [f"{side}.{kind}" for side in SIDES]
    with _partial_files(output, [DESCRIPTION, *names]) as partial:
        columns = _deal_files(files, kind, dealer, [partial[name] for name in names])
        _check_sides(dealer, files)
        content = asked | {
            "columns": columns,
            "files": {
                name: {
                    "rows": rows,
                    "bytes": partial[name].stat().st_size,
                    "sha256": file_sha256(partial[name]),
                }
                for name, rows in zip(names, dealer.rows.values(), strict=True)
            },
            "duplicates": dealer.duplicates,
            "contradictions": dict(dealer.contradictions),
            "without_text": dealer.without_text,
        }
        partial[DESCRIPTION].write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        # split.json is the first to appear: files beside it are known as this command's, if it is killed now.
        for name, path in partial.items():
            sync(path)
            os.replace(path, output / name)
            sync(output)
    return content


@contextmanager
def _partial_files(folder: Path, names: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Name → where a file of that name lies until it is whole; whatever still lies there in the end is removed."""
    partial = {name: folder / f".{name}.partial" for name in names}
    try:
        yield partial
    finally:
        for path in partial.values():
            path.unlink(missing_ok=True)


def _deal_files(files: Sequence[InputFile], kind: str, dealer: Dealer, paths: Sequence[Path]) -> list[str]:
    """Write each row to the path of its side; returns the columns.

    Raises:
        UserError: a row cannot be read, columns differ, or a file changes meanwhile.
    """
    columns: list[str] = []
    with ExitStack() as stack:
        streams = [stack.enter_context(open(path, "w", encoding="utf-8", newline="")) for path in paths]
        sides = dict(zip(SIDES, streams, strict=True))
        for file in files:
            for number, row in enumerate(read_rows(file.path, kind, [dealer.settings.text_field])):
                if not columns:
                    columns = list(row.columns)
                    _check_names(columns, file)
                    _write_header(streams, columns, kind)
                if number == 0:
                    _check_columns(row.columns, columns, kind, file, files[0])
                side = dealer.deal(row)
                if side is not None:
                    is_whole = row.source.endswith(("\n", "\r"))
                    sides[side].write(row.source if is_whole else row.source + "\n")
            _check_unchanged(file)
    return columns


def _check_names(columns: Sequence[str], file: InputFile) -> None:
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise UserError(f"{file.path}: there is more than one column {listed(twice)}; give each its own name")


def _write_header(streams: Iterable[TextIO], columns: Sequence[str], kind: str) -> None:
    for stream in streams:
        if kind in DELIMITERS:
            csv.writer(stream, delimiter=DELIMITERS[kind], lineterminator="\n").writerow(columns)


def _check_columns(
    found: Sequence[str], expected: Sequence[str], kind: str, file: InputFile, first: InputFile
) -> None:
    # Rows are copied as they stand, and those of CSV know their columns by the order only.
    same = list(found) == list(expected) if kind in DELIMITERS else set(found) == set(expected)
    if not same:
        raise UserError(
            f"{file.path}: its columns are {listed(found)} and those of {first.path} {listed(expected)}; make them the "
            "same, or split the files into folders of their own"
        )


def _check_unchanged(file: InputFile) -> None:
    status = os.stat(file.path)
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        raise UserError(f"{file.path}: it was changed while it was read; run the same command again")


def _check_sides(dealer: Dealer, files: Sequence[InputFile]) -> None:
    settings, texts = dealer.settings, sum(dealer.rows.values())
    place = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    for side, rows in dealer.rows.items():
        if not rows:
            raise UserError(
                f"{place}: of {texts:,} different texts none is left for {side} with --dev_fraction "
                f"{settings.dev_fraction} --test_fraction {settings.test_fraction}; change the fractions or give more rows"
            )


def report(content: dict, output: Path) -> list[str]:
    """Lines for the user: where the rows are, what was dropped, what to type next."""
    lines = [f"{output / name}: {file['rows']:,} rows" for name, file in content["files"].items()]
    others = [f'{count:,} have another "{name}"' for name, count in content["contradictions"].items()]
    differ = f"; of these {', '.join(others)}, and the first row stayed" * bool(others)
    lines.append(f"dropped: {content['duplicates']:,} rows with a text that was there before{differ}")
    lines.append(f"dropped: {content['without_text']:,} rows without text")
    return lines + _next_commands(content, output)


def _next_commands(content: dict, output: Path) -> list[str]:
    train, dev, test = (shlex.quote(str(output / name)) for name in content["files"])
    text_field = content["settings"]["text_field"]
    read = "" if text_field == "text" else f" --text_field {shlex.quote(text_field)}"
    lines = [
        f"next: python data_prep/run.py tokenizer --input {train}{read} --output data/tokenizer",
        f"      python data_prep/run.py shards --input {train}{read} --tokenizer data/tokenizer --output data/shards",
    ]
    if others := [name for name in content["columns"] if name != text_field]:
        columns = "" if text_field == "text" else f" --text_column {shlex.quote(text_field)}"
        if "label" not in others:
            columns += f" --label_column {shlex.quote(others[0]) if len(others) == 1 else 'COLUMN'}"
        lines.append(
            f"      python fine_tuning/run.py --train {train} --dev {dev} --test {test}{columns} --init_from RUN "
            "--output runs/NAME"
        )
    return lines
