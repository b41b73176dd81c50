"""Input files, their splits and their bytes.

A split is a byte range of a file. Ranges of one file are read exactly once between them, whatever they are, so a
split is an idempotent unit of work.
"""

import bz2
import codecs
import glob
import gzip
import io
import mmap
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from data_prep.errors import UserError

FORMATS = ("auto", "sentences", "documents", "jsonl", "csv", "mediawiki")


@dataclass(frozen=True)
class ReadOptions:
    """How to read the inputs.

    format: one of FORMATS; language: the code that chooses the sentence rules; text_field: the JSONL key or
    CSV column; document_start: a regular expression, for format "documents" only, that is searched in each
    line; a line in which it is found begins a document and is its first sentence.
    """

    format: str = "auto"
    language: str = "en"
    text_field: str = "text"
    document_start: str | None = None


@dataclass(frozen=True)
class InputFile:
    """A file to read: its format (never "auto"), bytes on disk, time of the last change."""

    path: str
    format: str
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class InputSplit:
    """The byte range [start, end) of a file; a whole file is [0, size)."""

    path: str
    format: str
    start: int
    end: int


def find_inputs(paths: Sequence[str], options: ReadOptions) -> list[InputFile]:
    """Find all input files below `paths` (files, folders, glob patterns), in the order of their paths.

    Folders are walked whole, hidden files and folders left out. A file that is reached twice, by a link or
    by two arguments, is there once. Raises UserError for a missing path, a folder without files, nothing at
    all, and options that contradict each other.
    """
    _check_options(options)
    if not paths:
        raise UserError("no input was given: name at least one file, folder or pattern")
    names = sorted({os.path.normpath(name) for path in paths for name in _expand(path)})
    real: dict[str, str] = {}
    for name in names:
        real.setdefault(os.path.realpath(name), name)
    files = [_input_file(name, options) for name in real.values()]
    if options.document_start is not None and not any(file.format == "documents" for file in files):
        raise UserError('document_start works only with format "documents": set that format or leave it out')
    return files


def _check_options(options: ReadOptions) -> None:
    if options.format not in FORMATS:
        raise UserError(f'unknown input format "{options.format}": choose one of {", ".join(FORMATS)}')
    if options.document_start is not None:
        try:
            re.compile(options.document_start)
        except re.error as error:
            raise UserError(
                f'document_start "{options.document_start}" is not a regular expression: {error}'
            ) from error


def _expand(path: str) -> list[str]:
    if os.path.isdir(path):
        return _walk(path)
    if os.path.lexists(path):
        return [path]
    matches = glob.glob(path, recursive=True)
    if not matches:
        raise UserError(f"{path}: there is no such file or folder, and no file matches it as a pattern")
    return [name for match in matches for name in (_walk(match) if os.path.isdir(match) else [match])]


def _walk(folder: str) -> list[str]:
    names: list[str] = []
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: the folder cannot be read ({error.strerror})") from error

    for root, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        if os.path.realpath(root) in seen:  # a link that leads back up
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names += [os.path.join(root, name) for name in files if not name.startswith(".")]
    if not names:
        raise UserError(f"{folder}: the folder holds no files (hidden ones are not read)")
    return names


def _input_file(path: str, options: ReadOptions) -> InputFile:
    with user_errors(path):
        status = os.stat(path)
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file: write its content to a file first")
    kind = _format_of(path) if options.format == "auto" else options.format
    return InputFile(path, kind, status.st_size, status.st_mtime_ns)


def bare_name(path: str) -> str:
    """File name in lower case without the extension of its compression."""
    return re.sub(r"\.(gz|bz2)$", "", os.path.basename(path).lower())


def _format_of(path: str) -> str:
    name = bare_name(path)
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    if name.endswith((".csv", ".tsv")):
        return "csv"
    # Parts of a dump carry page numbers behind the extension: articles1.xml-p10p30302.
    return "mediawiki" if ".xml" in name else "sentences"


def split_inputs(files: Sequence[InputFile], split_bytes: int) -> list[InputSplit]:
    """Cut uncompressed "sentences" and "jsonl" files at every `split_bytes` bytes; others are one split.

    The cuts depend on sizes only. They fall anywhere; `read_documents` moves them to document borders.
    """
    if split_bytes < 1:
        raise ValueError(f"split_bytes is {split_bytes}, not positive")
    splits = []
    for file in files:
        step = split_bytes if _can_be_cut(file) else max(file.size, 1)
        starts = range(0, max(file.size, 1), step)
        splits += [
            InputSplit(file.path, file.format, start, min(start + step, file.size)) for start in starts
        ]
    return splits


def _can_be_cut(file: InputFile) -> bool:
    with user_errors(file.path):
        return file.format in _BORDERS and _opener(file.path) is open


class LineError(Exception):
    """Something wrong in a line, counted from 1 at the beginning of the range that is read."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


@contextmanager
def user_errors(path: str) -> Iterator[None]:
    """Turn what the system says about a file into a sentence that names it."""
    try:
        yield
    except UnicodeDecodeError:
        check_utf8(path)
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path}: the compressed file is cut short or damaged ({error}); get it again"
        ) from error
    except OSError as error:
        reason = error.strerror or f"damaged: {error}; get it again"
        raise UserError(f"{path}: the file cannot be read ({reason})") from error


def _opener(path: str) -> Callable[..., BinaryIO]:
    """Judge by the first bytes: files without their extension, or with a wrong one, are common."""
    with open(path, "rb") as file:
        head = file.read(10)
    if head.startswith(b"\x1f\x8b\x08"):
        return gzip.open
    if re.match(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", head):
        return bz2.open
    return open


class _ByteRange(io.RawIOBase):
    """The bytes [begin, stop) of a file as a stream."""

    def __init__(self, path: str, begin: int, stop: int):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this object
        self._file.seek(begin)
        self._left = stop - begin

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:
        count = self._file.readinto(memoryview(buffer)[: max(self._left, 0)])
        self._left -= count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def open_range(path: str, begin: int, stop: int | None) -> BinaryIO:
    """Open [begin, stop) of an uncompressed file, or all of any file where stop is None."""
    if stop is None:
        return _opener(path)(path, "rb")
    return io.BufferedReader(_ByteRange(path, begin, stop), buffer_size=1 << 20)


# Exactly the bytes of a line that cleaning turns into nothing.
_BLANK = (
    rb"(?:[\x00-\x09\x0b\x0c\x0e-\x20\x7f]|\xc2[\x80-\xa0]|\xe1\x9a\x80"
    rb"|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)*"
)
_LINE_END = rb"(?:\n|\r(?!\n))"
# The end of a line and what must follow it so that a split may begin or end there.
_BORDERS = {
    "jsonl": re.compile(_LINE_END),
    "sentences": re.compile(_LINE_END + _BLANK + rb"[\r\n]"),
}


def whole_documents(split: InputSplit) -> tuple[int, int | None]:
    """Move a split's byte range to document borders; (0, None) is the whole file."""
    size = os.path.getsize(split.path)
    if split.start == 0 and split.end >= size:
        return 0, None
    if split.format not in _BORDERS:
        raise ValueError(f"{split.format} files are read whole, not from {split.start} to {split.end}")
    with open(split.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pattern = _BORDERS[split.format]
        return _border(data, split.start, pattern), _border(data, split.end, pattern)


def _border(data: mmap.mmap, position: int, pattern: re.Pattern[bytes]) -> int:
    """The first byte, at or behind `position`, of a line at which documents part."""
    if position == 0:
        return 0
    match = pattern.search(data, position - 1)
    return match.start() + 1 if match else len(data)


def check_utf8(path: str) -> None:
    """Read the whole file again to raise UserError for its first invalid byte, if it has one."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, chunk = 0, b"-"
    with _opener(path)(path, "rb") as stream:
        while chunk:
            chunk = stream.read(1 << 20)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                offset += error.start - pending
                raise UserError(
                    f"{path}, line {line_number(path, offset)}, byte {offset}: the text is not valid UTF-8; "
                    "convert it first, for example with `iconv -f LATIN1 -t UTF-8`, or repair the line"
                ) from error
            offset += len(chunk)


def line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line in which byte `offset` of the decompressed file lies."""
    ends, last = 0, b""
    with _opener(path)(path, "rb") as stream:
        while offset > 0 and (chunk := stream.read(min(1 << 20, offset))):
            offset -= len(chunk)
            ends += chunk.count(b"\n") + chunk.count(b"\r") - (last + chunk).count(b"\r\n")
            last = chunk[-1:]
    return ends + 1
