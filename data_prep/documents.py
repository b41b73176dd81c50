"""From input paths to clean, sentence-split documents, one at a time.

Memory is bounded by one document. Byte ranges of one file are read exactly once between them, whatever
the ranges, so that a split is an idempotent unit of work.

Cleaning. Control characters (Unicode Cc) and all Unicode spaces become a space, runs of spaces one space.
A lone surrogate, which only a JSON escape can bring in and which UTF-8 cannot hold, becomes U+FFFD; a
U+FFFD of the input stays, since it stands where a character was. Everything else (joiners, variation
selectors, composed or decomposed letters) is the tokenizer's to judge.
"""

import bz2
import codecs
import csv
import glob
import gzip
import hashlib
import io
import json
import mmap
import os
import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import unescape
from typing import BinaryIO

import mwparserfromhell
import sentencex
from mwparserfromhell import nodes
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

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
    with _user_errors(path):
        status = os.stat(path)
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a regular file: write its content to a file first")
    kind = _format_of(path) if options.format == "auto" else options.format
    return InputFile(path, kind, status.st_size, status.st_mtime_ns)


def _bare_name(path: str) -> str:
    return re.sub(r"\.(gz|bz2)$", "", os.path.basename(path).lower())


def _format_of(path: str) -> str:
    name = _bare_name(path)
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
    with _user_errors(file.path):
        return file.format in _BORDERS and _opener(file.path) is open


def read_documents(split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    """Yield the documents of a split, each a list of clean sentences; a document without any is left out.

    A JSON line belongs to the split in which its first byte lies. In "sentences" files a split with
    start > 0 begins behind the first blank line whose first byte is at or behind `start`, and each ends at
    the first one at or behind `end`. Raises UserError, with the file and where possible the line, for
    whatever cannot be read.
    """
    with _user_errors(split.path):
        begin, stop = _whole_documents(split)
        with _open_range(split.path, begin, stop) as stream:
            try:
                yield from filter(None, _READERS[split.format](stream, split, options))
            except _LineError as error:
                line = _line_number(split.path, begin) + error.line - 1
                raise UserError(f"{split.path}, line {line}: {error}") from error


def document_hash(sentences: Sequence[str]) -> bytes:
    """Hash the text of clean sentences to 16 bytes (BLAKE2b).

    Spaces do not count, so the hash depends neither on spacing nor on where sentences were cut.
    """
    text = "".join(sentences).replace(" ", "")
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


# Bytes, ranges and errors


class _LineError(Exception):
    """Something wrong in a line, counted from 1 at the beginning of the range that is read."""

    def __init__(self, line: int, message: str):
        super().__init__(message)
        self.line = line


@contextmanager
def _user_errors(path: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        _check_utf8(path)
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


def _open_range(path: str, begin: int, stop: int | None) -> BinaryIO:
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


def _whole_documents(split: InputSplit) -> tuple[int, int | None]:
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


def _check_utf8(path: str) -> None:
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
                    f"{path}, line {_line_number(path, offset)}, byte {offset}: the text is not valid UTF-8; "
                    "convert it first, for example with `iconv -f LATIN1 -t UTF-8`, or repair the line"
                ) from error
            offset += len(chunk)


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line in which byte `offset` of the decompressed file lies."""
    ends, last = 0, b""
    with _opener(path)(path, "rb") as stream:
        while offset > 0 and (chunk := stream.read(min(1 << 20, offset))):
            offset -= len(chunk)
            ends += chunk.count(b"\n") + chunk.count(b"\r") - (last + chunk).count(b"\r\n")
            last = chunk[-1:]
    return ends + 1


# Cleaning and sentences

_NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)

# Longer lines than this were never wrapped by hand or by an editor: each is a paragraph.
_LONGEST_WRAPPED_LINE = 200
# sentencex slows down with the square of a paragraph's length, and one quotation mark that is never closed
# hides all sentence ends behind it: longer paragraphs are handed over in pieces of so many characters.
_PIECE = 2000
# Languages that put no space between words, so that a line end is none either; foreign words keep theirs.
_WITHOUT_SPACES = ("zh", "ja", "yue", "wuu", "lzh", "th", "lo", "km", "my", "bo")
_INNER_LINE_END = re.compile(r"(?<=[^\x00-\x7f])\n(?=[^\x00-\x7f])")


def _clean(line: str) -> str:
    line = line.strip()
    # The only space that is printable is U+0020, so this finds nearly every clean line in two fast scans.
    if line.isprintable() and "  " not in line:
        return line
    return " ".join(_SURROGATE.sub("\ufffd", _NOT_TEXT.sub(" ", line)).split())


def _lines(text: str) -> list[str]:
    """Cut at line feeds and carriage returns only; str.splitlines also cuts at U+2028, form feeds…"""
    if "<" in text:
        text = _BREAK.sub("\n", text)
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _segment(lines: Iterable[str], language: str) -> list[str]:
    """Clean lines, join those of a paragraph, and cut paragraphs into sentences."""
    return [
        sentence
        for paragraph in _paragraphs(lines, language)
        for piece in _sentences(paragraph, language)
        if (sentence := piece.strip())
    ]


def _paragraphs(lines: Iterable[str], language: str) -> Iterator[str]:
    block: list[str] = []
    for line in map(_clean, lines):
        if line:
            block.append(line)
        elif block:
            yield from _unwrap(block, language)
            block = []
    yield from _unwrap(block, language)


def _unwrap(block: list[str], language: str) -> list[str]:
    if len(block) < 2 or max(map(len, block)) > _LONGEST_WRAPPED_LINE:
        return block
    paragraph = "\n".join(block)
    if language.lower().startswith(_WITHOUT_SPACES):
        paragraph = _INNER_LINE_END.sub("", paragraph)
    return [paragraph.replace("\n", " ")]


def _sentences(paragraph: str, language: str) -> Iterator[str]:
    """Cut a paragraph into sentences whose concatenation is the paragraph."""
    start = 0
    while len(paragraph) - start > _PIECE:
        piece = paragraph[start : start + _PIECE]
        # The last sentence of a piece may go on, so it is read again at the head of the next piece.
        sentences = sentencex.segment(language, piece)[:-1] or [piece[: piece.rfind(" ") + 1] or piece]
        yield from sentences
        start += sum(map(len, sentences))
    yield from sentencex.segment(language, paragraph[start:])


# Readers: a decompressed stream, its split and the options become documents


def _text(stream: BinaryIO, split: InputSplit, newline: str | None = None) -> io.TextIOWrapper:
    # A byte order mark is one at the beginning of a file only.
    encoding = "utf-8-sig" if split.start == 0 else "utf-8"
    return io.TextIOWrapper(stream, encoding=encoding, newline=newline)


def _read_sentences(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    document: list[str] = []
    for line in map(_clean, _text(stream, split)):
        if line:
            document.append(line)
        elif document:
            yield document
            document = []
    yield document


def _read_plain(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    lines: list[str] = []
    if options.document_start is None:
        yield _segment(_text(stream, split), options.language)
        return
    starts = re.compile(options.document_start)
    title = ""
    for line in _text(stream, split):
        if starts.search(line.rstrip("\n")):
            yield [title] * bool(title) + _segment(lines, options.language)
            title, lines = _clean(line), []
        else:
            lines.append(line)
    yield [title] * bool(title) + _segment(lines, options.language)


def _read_jsonl(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    for number, line in enumerate(_text(stream, split), start=1):
        if not line.isspace():
            yield _segment(_lines(_json_text(line, number, options.text_field)), options.language)


def _json_text(line: str, number: int, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _LineError(
            number, f"expected one JSON object a line, but it does not parse ({error})"
        ) from error
    if not isinstance(record, dict):
        raise _LineError(
            number,
            f"expected one JSON object a line, found {type(record).__name__}; `jq -c '.[]'` makes lines of a list",
        )
    if field not in record:
        raise _LineError(number, f'there is no field "{field}"; the fields are {_listed(record)}')
    if not isinstance(record[field], str):
        raise _LineError(
            number,
            f'field "{field}" must be a string, found {type(record[field]).__name__}; '
            f"the fields are {_listed(record)}",
        )
    return record[field]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names) or "none at all"


def _read_csv(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if _bare_name(split.path).endswith(".tsv") else ","
    # strict: a quotation mark that is out of place would otherwise swallow rows without a word.
    rows = csv.reader(_without_nul(_text(stream, split, newline="")), delimiter=delimiter, strict=True)
    header: list[str] = []
    try:
        for row in filter(None, rows):
            if not header:
                header = row
                if header.count(options.text_field) != 1:
                    wanted = f'expected one column "{options.text_field}"'
                    raise _LineError(rows.line_num, f"{wanted}, the columns are {_listed(header)}")
                column = header.index(options.text_field)
            elif len(row) != len(header):
                message = f"the row has {len(row)} columns, the header {len(header)}; repair it"
                raise _LineError(rows.line_num, message)
            else:
                yield _segment(_lines(row[column]), options.language)
    except csv.Error as error:
        message = (
            f"malformed CSV ({error}); a field that holds a quotation mark must be quoted, the mark doubled"
        )
        raise _LineError(max(rows.line_num, 1), message) from error


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise _LineError(
                number, "there is a NUL byte, which no CSV text holds; is it another kind of file?"
            )
        yield line


# MediaWiki. As in BERT (Devlin et al. 2019, section 3.1) only running text is kept: lists, tables and
# headings are dropped. So are titles: nearly every article says its title again in its first sentence.

_FILE_KEYS = {"-2", "6", "14"}  # Media, File, Category
_FILE_NAMES = {"media", "file", "image", "category"}  # every wiki knows them beside its own names
# Wikis have further names for File that no dump lists; the extension says it in every language.
_FILE_LINK = re.compile(
    r"[^|]*:.*\.(jpe?g|png|gif|svg|tiff?|webp|xcf|pdf|djvu|og[agv]|webm|mp3|wav|midi?)\s*$", re.I
)
_INTERLANGUAGE = re.compile(r"([a-z]{2,3}(-[a-z-]+)?|simple):")

# MediaWiki takes these out before it looks at any other markup; mwparserfromhell does not.
_OPAQUE = (
    "ref|references|gallery|math|chem|ce|hiero|score|timeline|graph|imagemap|inputbox|templatedata|mapframe"
    "|maplink|templatestyles|pre|source|syntaxhighlight|categorytree|indicator|style|script"
)
_HIDDEN = re.compile(
    r"<!--.*?(?:-->|\Z)|(<nowiki>.*?</nowiki>)"
    # A formula without commands, <math>x + 1</math>, reads well and its sentence does not without it.
    r"|<math\b[^<>/]*>([^\\{}<>]{1,30})</math>"
    rf"|<({_OPAQUE})\b[^>]*?(?:/>|>.*?</\3\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_LIST_TAGS = {"ul", "ol", "dl", "li", "dd", "dt", "table"}
_BLOCK_TAGS = {"p", "div", "blockquote", "center", "poem", "hr"}
# Two characters that no XML document can hold mark the line of a list and the place of a template.
_LIST_ITEM, _GAP = "\0", "\1"

# Templates that show one of their arguments as a part of the sentence, and which (-1: the last).
_SHOWN = {
    **dict.fromkeys(
        ("nowrap", "nobr", "small", "smaller", "quote", "angbr", "vanchor", "math", "nihongo"), 0
    ),
    **dict.fromkeys(("lang", "transl", "transliteration"), -1),
}
_RANGES = {"to", "to(-)", "-", "–", "and", "or", "by", "x", "×", "+/-"}

_TABLE_ROWS = ("{|", "|}", "|", "!")  # of a table that is not closed, or whose ends are in templates
_LITTER = [
    (re.compile(rf"(?<=\w){_GAP}+(?=\w)"), " "),  # many wikis write a dash as a template
    (re.compile(_GAP), ""),
    (re.compile("'{2,}"), ""),
    (re.compile(r"</?[A-Za-z][^<>\n]*>"), ""),
    (re.compile(r"__[^\W\d_]{3,}__"), ""),
    (re.compile(r"\[\[(?:[^\[\]|\n]*\|)*|\]\]|\{\{+|\}\}+"), ""),
    # What a template leaves behind when it stood in parentheses, before a comma or first in a sentence.
    # Bounds keep the time linear on long runs.
    (re.compile(r"([(（])[ ,;:\xa0]{1,9}"), r"\1"),
    (re.compile(r"[ ,;:\xa0]{1,9}([)）])"), r"\1"),
    (re.compile(r"\(\)|（）"), ""),
    (re.compile(r"(?:^|(?<=[.!?])[ \xa0]+)[,;:][ ,;:\xa0]*(?=\w)", re.MULTILINE), " "),
    (re.compile(r"[ \xa0]{1,9}(?=[,.](?:\s|$))"), ""),
    (re.compile(r",(?:[ \xa0]*,)+"), ","),
]


def _read_mediawiki(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    for title, text, file_names in _pages(stream, split.path):
        try:
            plain = _plain_text(text, file_names)
        except (ParserError, RecursionError) as error:
            raise UserError(f'{split.path}: the markup of page "{title}" does not parse ({error})') from error
        yield _segment(plain.split("\n"), options.language)


def _xml_events(stream: BinaryIO, path: str) -> Iterator[tuple[str, ET.Element]]:
    try:
        yield from ET.iterparse(stream, events=("start", "end"))
    except (ET.ParseError, LookupError, ValueError) as error:  # the last two: unknown encodings
        _check_utf8(path)
        raise UserError(f"{path}: the XML is cut short or malformed ({error}); get it again") from error


def _pages(stream: BinaryIO, path: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield title and newest wikitext of each article, and the wiki's names for files and categories."""
    events = _xml_events(stream, path)
    _, root = next(events)
    if _local_name(root) != "mediawiki":
        raise UserError(
            f'{path}: expected a MediaWiki dump, the XML is "{_local_name(root)}"; extract its text to a '
            "text or JSONL file first"
        )
    file_names = set(_FILE_NAMES)
    newest = ("", "")  # time and text; ISO times sort as strings
    for event, element in events:
        name = _local_name(element) if event == "end" else ""
        if name == "namespace" and element.get("key") in _FILE_KEYS:
            file_names.add((element.text or "").lower())
        elif name == "revision":
            if element.findtext("{*}model", "wikitext") == "wikitext":
                time, text = (element.findtext(f"{{*}}{part}", "") for part in ("timestamp", "text"))
                if time >= newest[0]:
                    newest = (time, text)
            element.clear()
        elif name == "page":
            if _is_article(element, path):
                yield element.findtext("{*}title", ""), newest[1], file_names
            newest = ("", "")
            root.clear()  # or the tree of the whole dump would grow in memory


def _local_name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _is_article(page: ET.Element, path: str) -> bool:
    namespace = page.findtext("{*}ns")
    if namespace is None:
        title = page.findtext("{*}title")
        raise UserError(f'{path}: page "{title}" has no <ns>; export the dump in format 0.6 or later')
    return namespace == "0" and page.find("{*}redirect") is None


def _plain_text(text: str, file_names: set[str]) -> str:
    """Turn wikitext to paragraphs of running text."""
    text = _HIDDEN.sub(lambda match: match[1] or match[2] or "", text)
    # Quotes for bold and italics cost the parser most of its time and are found as well below.
    plain = _render(mwparserfromhell.parse(text, skip_style_tags=True), file_names)
    for pattern, replacement in _LITTER:
        plain = pattern.sub(replacement, plain)
    lines = plain.split("\n")
    return "\n".join(line if _is_prose(line) else "" for line in lines)


def _is_prose(line: str) -> bool:
    is_markup = _LIST_ITEM in line or line.lstrip().startswith(_TABLE_ROWS)
    return not is_markup and re.search(r"\w", line) is not None


def _render(code: Wikicode | None, file_names: set[str]) -> str:
    return "".join(_render_node(node, file_names) for node in code.nodes) if code else ""


def _render_node(node: nodes.Node, file_names: set[str]) -> str:
    match node:
        case nodes.Text():
            return node.value
        case nodes.HTMLEntity():
            return unescape(str(node))
        case nodes.Wikilink():
            return _render_link(node, file_names)
        case nodes.ExternalLink():
            return _render(node.title, file_names)
        case nodes.Template():
            return _render_template(node, file_names)
        case nodes.Tag():
            return _render_tag(node, file_names)
        case nodes.Heading():
            return "\n\n"
    return ""


def _render_link(link: nodes.Wikilink, file_names: set[str]) -> str:
    title = str(link.title).strip()
    prefix = title.partition(":")[0].replace("_", " ").strip().lower()
    if (":" in title and prefix in file_names) or _FILE_LINK.match(title):
        return ""
    if link.text:
        return _render(link.text, file_names)
    return "" if _INTERLANGUAGE.match(title) else _render(link.title, file_names).lstrip(":")


def _render_template(template: nodes.Template, file_names: set[str]) -> str:
    name = str(template.name).strip().lower()
    shown = [param.value for param in template.params if not param.showkey]
    if name in ("convert", "cvt"):
        values = [str(value).strip() for value in shown]
        return " ".join(values[: 4 if values[1:2] and values[1] in _RANGES else 2])
    return _render(shown[_SHOWN[name]], file_names) if shown and name in _SHOWN else _GAP


def _render_tag(tag: nodes.Tag, file_names: set[str]) -> str:
    name = str(tag.tag).strip().lower()
    if name in _LIST_TAGS:
        return _LIST_ITEM if tag.wiki_markup and name != "table" else "\n\n"
    if name == "br":
        return "\n"
    text = _render(tag.contents, file_names)
    return f"\n\n{text}\n\n" if name in _BLOCK_TAGS else text


_READERS = {
    "sentences": _read_sentences,
    "documents": _read_plain,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "mediawiki": _read_mediawiki,
}
