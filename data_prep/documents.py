"""From input splits to clean, sentence-split documents, one at a time: memory is bounded by one document.

Cleaning. Control characters (Unicode Cc) and all Unicode spaces become a space, runs of spaces one space.
A lone surrogate, which only a JSON escape can bring in and which UTF-8 cannot hold, becomes U+FFFD; a
U+FFFD of the input stays, since it stands where a character was. Everything else (joiners, variation
selectors, composed or decomposed letters) is the tokenizer's to judge.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import sentencex

from data_prep.errors import UserError
from data_prep.inputs import (
    InputSplit,
    LineError,
    ReadOptions,
    line_number,
    open_range,
    user_errors,
    whole_documents,
)
from data_prep.rows import kind_of, parse_rows
from data_prep.wikitext import MarkupError, plain_text, read_articles


def read_documents(split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    """Yield the documents of a split, each a list of clean sentences; a document without any is left out.

    A JSON line belongs to the split in which its first byte lies. In "sentences" files a split with
    start > 0 begins behind the first blank line whose first byte is at or behind `start`, and each ends at
    the first one at or behind `end`. Raises UserError, with the file and where possible the line, for
    whatever cannot be read.
    """
    with user_errors(split.path):
        begin, stop = whole_documents(split)
        with open_range(split.path, begin, stop) as stream:
            try:
                yield from filter(None, _READERS[split.format](stream, split, options))
            except LineError as error:
                line = line_number(split.path, begin) + error.line - 1
                raise UserError(f"{split.path}, line {line}: {error}") from error


def document_hash(sentences: Sequence[str]) -> bytes:
    """Hash the text of clean sentences to 16 bytes (BLAKE2b).

    Spaces do not count, so the hash depends neither on spacing nor on where sentences were cut.
    """
    text = "".join(sentences).replace(" ", "")
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def clean_text(text: str) -> str:
    """Clean a text that is read as one piece, as a document's sentences are cleaned; a `<br>` becomes a space.

    A classifier that reads texts this way reads the words that its encoder was pretrained on, and
    `document_hash([clean_text(text)])` is the hash of the document that `read_documents` makes of the text.
    """
    return _clean(_break_at(text, " "))


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
    return _break_at(text, "\n").replace("\r\n", "\n").replace("\r", "\n").split("\n")


def _break_at(text: str, mark: str) -> str:
    """Put a mark in the place of HTML's line breaks."""
    return _BREAK.sub(mark, text) if "<" in text else text


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


def _read_rows(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    lines = _text(stream, split, newline="")
    for row in parse_rows(lines, kind_of(split.path, split.format), [options.text_field]):
        yield _segment(_lines(row.field(options.text_field)), options.language)


def _read_mediawiki(stream: BinaryIO, split: InputSplit, options: ReadOptions) -> Iterator[list[str]]:
    for title, text, file_names in read_articles(stream, split.path):
        try:
            plain = plain_text(text, file_names)
        except MarkupError as error:
            raise UserError(f'{split.path}: the markup of page "{title}" does not parse ({error})') from error
        yield _segment(plain.split("\n"), options.language)


_READERS = {
    "sentences": _read_sentences,
    "documents": _read_plain,
    "jsonl": _read_rows,
    "csv": _read_rows,
    "mediawiki": _read_mediawiki,
}
