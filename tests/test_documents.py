"""Reading: nothing lost, nothing twice, nothing dirty, and one clear sentence for what cannot be read."""

import bz2
import csv
import gzip
import io
import json
import os
import re
import tracemalloc
import unicodedata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data_prep.documents import clean_text, document_hash, read_documents
from data_prep.errors import UserError
from data_prep.inputs import FORMATS, InputFile, InputSplit, ReadOptions, find_inputs, split_inputs

FAST = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
# What can go wrong at a border: every line end, blank lines of odd spaces, a mark, characters of 1-4 bytes.
TEXT = st.lists(
    st.sampled_from(
        ["a", "é", "한", "😀", ".", " ", "\t", "\u3000", "\xa0", "\x85", "\u2028", "\x0c", "\x00"]
    )
    | st.sampled_from(["\n", "\r", "\r\n", "\n\n", "\ufeff", "\x1c", "\u200d"])
).map("".join)


def write(folder: Path, name: str, content: str | bytes) -> str:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def read(path: str | Path, split_bytes: int = 1 << 40, **options) -> list[list[str]]:
    chosen = ReadOptions(**options)
    splits = split_inputs(find_inputs([str(path)], chosen), split_bytes)
    return [document for split in splits for document in read_documents(split, chosen)]


def message(path: str | Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value).strip()
    return str(caught.value)


# Finding and splitting


def test_order_does_not_depend_on_arguments_and_nothing_is_there_twice(tmp_path):
    """Folders, patterns, files and links that name the same files give each once, sorted by path."""
    for name in ("b.txt", "a.jsonl", "sub/c.csv", "sub/deep/d.txt", ".hidden", "sub/.git/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path, name, name)
    os.symlink(tmp_path / "b.txt", tmp_path / "link.txt")
    os.symlink(tmp_path, tmp_path / "sub" / "up")
    arguments = [str(tmp_path), str(tmp_path / "*.txt"), str(tmp_path / "sub" / ".." / "a.jsonl")]
    files = find_inputs(arguments, ReadOptions())
    names = [os.path.relpath(file.path, tmp_path) for file in files]
    assert names == ["a.jsonl", "b.txt", "sub/c.csv", "sub/deep/d.txt"]
    assert files == find_inputs(arguments[::-1], ReadOptions())
    assert [file.size for file in files] == [len(name) for name in names]
    assert files[0].mtime_ns == os.stat(files[0].path).st_mtime_ns
    assert [file.path for file in find_inputs([str(tmp_path / ".hidden")], ReadOptions())]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.txt", "sentences"),
        ("a", "sentences"),
        ("a.JSONL.gz", "jsonl"),
        ("a.ndjson", "jsonl"),
        ("a.json.bz2", "jsonl"),
        ("a.csv", "csv"),
        ("a.tsv.gz", "csv"),
        ("a.xml", "mediawiki"),
        ("enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2", "mediawiki"),
    ],
)
def test_auto_goes_by_the_name(tmp_path, name, expected):
    """The extension below .gz and .bz2 says the format; a named format overrules it."""
    path = write(tmp_path, name, "x")
    assert find_inputs([path], ReadOptions())[0].format == expected
    assert find_inputs([path], ReadOptions(format="documents"))[0].format == "documents"


def test_wrong_arguments_are_refused_by_name(tmp_path):
    """What cannot be found or does not fit together raises a UserError that names it."""
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    file = write(tmp_path, "a.txt", "x")
    os.symlink(tmp_path / "gone", tmp_path / "dangling")
    os.mkfifo(tmp_path / "pipe")
    cases = [
        ([], {}, "no input"),
        ([str(tmp_path / "missing.txt")], {}, "missing.txt"),
        ([str(tmp_path / "*.nothing")], {}, "nothing"),
        ([str(tmp_path / "empty")], {}, "holds no files"),
        ([str(tmp_path / "dangling")], {}, "dangling"),
        ([str(tmp_path / "pipe")], {}, "not a regular file"),
        ([file], {"format": "parquet"}, "parquet.*sentences"),
        ([file], {"document_start": "^="}, "document_start"),
        ([file], {"document_start": "(", "format": "documents"}, "regular expression"),
    ]
    for paths, options, pattern in cases:
        with pytest.raises(UserError, match=pattern):
            find_inputs(paths, ReadOptions(**options))


def test_splits_cover_each_file_and_depend_on_bytes_only(tmp_path):
    """Plain sentences and JSONL are cut at multiples; what cannot be entered in the middle is one split."""
    plain = [write(tmp_path, name, b"x" * 25) for name in ("a.txt", "b.jsonl", "c.csv", "d.xml")]
    packed = write(tmp_path, "e.txt", gzip.compress(b"x" * 1000))  # its name does not say so
    empty = write(tmp_path, "f.txt", b"")
    splits = split_inputs(find_inputs([*plain, packed, empty], ReadOptions()), 10)
    ranges = {}
    for split in splits:
        ranges.setdefault(os.path.basename(split.path), []).append((split.start, split.end))
    cut = [(0, 10), (10, 20), (20, 25)]
    size = os.path.getsize(packed)
    assert ranges == {
        "a.txt": cut, "b.jsonl": cut, "c.csv": [(0, 25)], "d.xml": [(0, 25)], "e.txt": [(0, size)], "f.txt": [(0, 0)],
    }  # fmt: skip


# Exactly once


def reference_documents(text: str) -> list[list[str]]:
    """A slow reading of the "sentences" format, written from its definition."""
    space = "".join(" " if unicodedata.category(c) in ("Cc", "Zs", "Zl", "Zp") and c != "\n" else c for c in
                    re.sub("\r\n|\r", "\n", text.removeprefix("\ufeff")))  # fmt: skip
    lines = [re.sub(" +", " ", line).strip(" ") for line in space.split("\n")]
    return [block.split("\n") for block in re.split("\n\n+", "\n".join(lines).strip("\n")) if block]


@FAST
@given(TEXT, st.integers(1, 40))
@example("a\r\n\r\nb\r\r\nc\n\u3000\nd", 1)
@example("\ufeff\ufeffa\n\n\ufeffb", 1)
def test_sentence_files_are_read_exactly_once_however_they_are_cut(tmp_path, text, split_bytes):
    """The splits of any text at any number of bytes give the documents of the whole, once and in order."""
    path = write(tmp_path, "t.txt", text)
    expected = reference_documents(text)
    assert read(path) == expected
    assert read(path, split_bytes) == expected
    assert read(write(tmp_path, "t.gz", gzip.compress(text.encode())), split_bytes) == expected


@FAST
@given(
    st.lists(TEXT, max_size=6),
    st.sampled_from(["\n", "\r\n", "\r", "\n\n"]),
    st.booleans(),
    st.integers(1, 60),
)
def test_json_lines_are_read_exactly_once_however_they_are_cut(tmp_path, texts, end, mark, split_bytes):
    """The splits of JSON lines with any line end give each line's document once and in order."""
    lines = [
        json.dumps({"id": i, "text": f"n{i} {text}"}, ensure_ascii=i % 2) for i, text in enumerate(texts)
    ]
    path = write(tmp_path, "t.jsonl", "\ufeff" * mark + end.join(lines))
    whole = read(path)
    assert [document[0].split()[0] for document in whole] == [f"n{i}" for i in range(len(texts))]
    assert read(path, split_bytes) == whole


@FAST
@given(st.text())
@example("Mr. Smith came. He  left.\n\nOh\x00no\ud800!")
@example("x" * 5000 + ". " + "Y. " * 3000)
def test_cleaning_and_cutting_lose_nothing_but_spaces(tmp_path, text):
    """All characters but spaces and controls come through, and sentences are clean and not empty."""
    sentences = [s for d in read(write(tmp_path, "t.jsonl", json.dumps({"text": text}))) for s in d]
    text = re.sub(r"<br\s*/?>", "\n", text, flags=re.IGNORECASE)
    kept = [c for c in text if unicodedata.category(c) not in ("Cc", "Zs", "Zl", "Zp")]
    expected = "".join("\ufffd" if unicodedata.category(c) == "Cs" else c for c in kept)
    assert "".join(sentences).replace(" ", "") == expected
    for sentence in sentences:
        assert sentence and sentence == " ".join(sentence.split())
        assert not any(unicodedata.category(c) == "Cc" for c in sentence)


def test_documents_belong_to_the_split_of_their_first_byte(tmp_path):
    """A JSON line that begins on a cut is behind it; so are sentences behind a blank line on a cut."""
    lines = write(tmp_path, "t.jsonl", '{"text":"a"}\r\n{"text":"b"}\r\n')
    blocks = write(tmp_path, "t.txt", "a\n\nb\n\u3000\r\nc\n \nd")  # blank lines begin at 2, 5 and 12

    def parts(path: str, kind: str, cut: int) -> list[int]:
        size = os.path.getsize(path)
        splits = [InputSplit(path, kind, 0, cut), InputSplit(path, kind, cut, size)]
        return [len(list(read_documents(split, ReadOptions()))) for split in splits]

    assert [parts(lines, "jsonl", cut) for cut in (1, 13, 14, 15)] == [[1, 1], [1, 1], [1, 1], [2, 0]]
    assert [parts(blocks, "sentences", cut) for cut in (2, 3, 5, 6, 12, 13)] == [
        [1, 3], [2, 2], [2, 2], [3, 1], [3, 1], [4, 0],
    ]  # fmt: skip


# Formats


def test_sentence_lines_are_not_cut_again(tmp_path):
    """In "sentences" a line is a sentence and a blank line ends the document."""
    path = write(tmp_path, "t", "One. Two.\n\tThree\u3000 four \n\n\n \nFive\n")
    assert read(path) == [["One. Two.", "Three four"], ["Five"]]


def test_wrapped_lines_are_joined_within_a_paragraph_only(tmp_path):
    """In "documents" a sentence runs over line ends, never over a blank line; the file is one document."""
    text = "The first\nsentence. The\nsecond\n\nis cut\r\n \t\r\nOff."
    path = write(tmp_path, "t", text)
    assert read(path, format="documents") == [["The first sentence.", "The second", "is cut", "Off."]]
    assert read(
        write(tmp_path, "z", "你好世\n界。New\nYork再见。"), format="documents", language="zh-CN"
    ) == [["你好世界。", "New York再见。"]]


def test_lines_that_were_never_wrapped_are_paragraphs(tmp_path):
    """A block with a line longer than any wrapped one holds a paragraph a line, headings among them."""
    path = write(tmp_path, "t", f"Chapter I\n{'word ' * 60}end.\nChapter II\nMore")
    assert read(path, format="documents")[0][::2] == ["Chapter I", "Chapter II"]


def test_document_start_cuts_a_file(tmp_path):
    """A matching line begins a document and is its first sentence as it stands; text before it is one too."""
    path = write(tmp_path, "t", "Before.\n = A. B = \nText one. Text two.\n = = Part = = \nMore.\n = C = \n")
    documents = read(path, format="documents", document_start="^ = [^=].* = $")
    assert documents == [
        ["Before."],
        ["= A. B =", "Text one.", "Text two.", "= = Part = = More."],
        ["= C ="],
    ]


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lambda b: bz2.compress(b[:9]) + bz2.compress(b[9:])]
)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "auto"])
def test_compression_is_seen_in_the_bytes(tmp_path, kind, pack):
    """Each format reads the same plain, .gz, .bz2 and multistream .bz2, whatever the name says."""
    page = "<page><title>T</title><ns>0</ns><revision><text>One. Two.</text></revision></page>"
    content = {
        "sentences": "One.\nTwo.", "documents": "One. Two.", "jsonl": '{"text": "One. Two."}',
        "csv": "id,text\n1,One. Two.\n", "mediawiki": f"<mediawiki>{page}</mediawiki>",
    }[kind]  # fmt: skip
    assert read(write(tmp_path, "t", pack(content.encode())), format=kind) == [["One.", "Two."]]


def test_csv_and_tsv(tmp_path):
    """Quoted line ends, delimiters and marks, a huge field, HTML breaks, empty lines and a mark at the start."""
    out = io.StringIO()
    huge = "Word. " * 50_000
    rows = [["1", 'He said "no".\nThen,\r\nhe left.'], ["2", "One<br /><BR>two"], ["3", huge], ["4", " "]]
    csv.writer(out).writerows([["id", "text"], *rows])
    documents = read(write(tmp_path, "t.csv", "\ufeff" + out.getvalue() + "\r\n"))
    assert documents == [['He said "no".', "Then, he left."], ["One", "two"], ["Word."] * 50_000]
    assert read(write(tmp_path, "t.tsv.gz", "body\tid\nOne, two. Three.\t1\n"), text_field="body") == [
        ["One, two.", "Three."]
    ]


WIKI = """Intro ''it'' '''bold''' ({{IPAc-en|x}}; born 1900){{cn}} of [[Foo (x)|Foo]]s<ref name="a">{{cite|[[x]]}}</ref>.<ref name=b />
[[Fichier:A.jpg|thumb|Bildunterschrift mit [[link]] {{x}}]] [[Bild:B.png|mini|alt]]
{| class="wikitext"
! a || b
|-
| [[c]]
|}
== See also ==
* [[Item]] of a list
#: numbered
----
A dash{{mdash}}here, {{convert|5|to|7|km|mi|abbr=on}} or {{lang|fr|mot}}, <nowiki>[[raw]]</nowiki> x&nbsp;&lt;&nbsp;yes.
H<sub>2</sub>O, <math>x + 1</math><math>\\frac{1}{2}</math><br/>[http://a.b title] [http://a.b] __NOTOC__<!-- gone
-->[[:Kategorie:Z]] [[de:Fremd]]
<gallery>
File:A.jpg|Caption
</gallery>[[Kategorie:X|sort]]{{Infobox
| name = {{y}}
}}"""


def wiki_dump(*pages: str) -> str:
    names = "".join(
        f'<namespace key="{key}">{name}</namespace>' for key, name in ((6, "Fichier"), (14, "Kategorie"))
    )
    head = f"<siteinfo><namespaces>{names}</namespaces></siteinfo>"
    return f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{head}{"".join(pages)}</mediawiki>'


def wiki_page(*texts: str, ns: int = 0, extra: str = "", model: str = "wikitext") -> str:
    revisions = "".join(
        f"<revision><timestamp>20{text[:2]}-01-01T00:00:00Z</timestamp><model>{model}</model><text>"
        + text[2:].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        + "</text></revision>"
        for text in texts
    )
    return f"<page><title>T</title><ns>{ns}</ns>{extra}{revisions}</page>"


def test_wikitext_becomes_prose(tmp_path):
    """Templates, files in the wiki's own names, tables, lists, headings and references leave no litter."""
    path = write(tmp_path, "t.xml", wiki_dump(wiki_page("10" + WIKI)))
    assert read(path) == [
        [
            "Intro it bold (born 1900) of Foos.",
            "A dash here, 5 to 7 km or mot, raw x < yes.",
            "H2O, x + 1 title Kategorie:Z",
        ]
    ]


def test_wiki_pages_that_are_not_articles_are_left_out(tmp_path):
    """Only namespace 0, no redirects, wikitext only, and of several revisions the newest, in any order."""
    pages = [
        wiki_page("10Talk.", ns=1),
        wiki_page("10Redirect.", extra='<redirect title="X" />'),
        wiki_page("10{}", model="json"),
        wiki_page("10Old.", "12Newest.", "11Older."),
        wiki_page(),
        wiki_page("10Next."),
    ]
    assert read(write(tmp_path, "t.xml", wiki_dump(*pages))) == [["Newest."], ["Next."]]


@pytest.mark.parametrize("kind", ["sentences", "jsonl", "csv", "mediawiki"])
def test_memory_is_bounded_by_a_document(tmp_path, kind):
    """Ten times the documents take no more memory."""

    def peak(count: int) -> int:
        text = "A sentence of some words. " * 40
        content = {
            "sentences": f"{text}\n\n" * count, "jsonl": json.dumps({"text": text}) + "\n",
            "csv": "text\n" + f"{text}\n" * count, "mediawiki": wiki_dump(wiki_page("10" + text) * count),
        }[kind]  # fmt: skip
        content *= count if kind == "jsonl" else 1
        path = write(tmp_path, f"{kind}{count}", gzip.compress(content.encode()))
        splits = split_inputs(find_inputs([path], ReadOptions(format=kind)), 1 << 20)
        del content
        tracemalloc.start()
        assert sum(1 for _ in read_documents(splits[0], ReadOptions(format=kind))) == count
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    peak(10)
    assert peak(1000) < peak(100) + 200_000


# Errors


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("split_bytes", [1 << 40, 7])
def test_invalid_utf8_is_located(tmp_path, end, split_bytes):
    """File, line and byte in the decompressed file are named, from any split and any compression."""
    good = f"한 a{end}{end}b{end}{end}" * 120_000 if split_bytes > 7 else f"한 a{end}{end}b{end}{end}" * 9
    content = good.encode() + b"ok \xff bad" + end.encode() + b"more"
    where = f"line {good.count(end) + 1}, byte {len(good.encode()) + 3}:"
    for name, packed in (("t.txt", content), ("t.gz", gzip.compress(content, 1))):
        path = write(tmp_path, name, packed)
        with pytest.raises(UserError, match=where) as caught:
            read(path, split_bytes)
        assert path in str(caught.value) and "iconv" in str(caught.value)


def test_a_character_cut_off_at_the_end_is_found(tmp_path):
    """A file that ends within a character is invalid, not short."""
    assert "line 2, byte 3" in message(write(tmp_path, "t.txt", b"ab\n\xed\x95"))
    # A CRLF that lies across two reads of 1 MiB is one line end.
    across = b"a" * (2**20 - 1) + b"\r\n\xff"
    assert "line 2, byte 1048577" in message(write(tmp_path, "u.txt", across))


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        ('{"text": "a"', "does not parse"),
        ('\ufeff{"text": "a"}', "does not parse"),
        ('["a"]', "found list.*jq"),
        ('"a"', "found str"),
        ('{"body": "a", "id": 1}', '"text"; the fields are "body", "id"'),
        ('{"text": ["a"], "id": 1}', 'found list; the fields are "text", "id"'),
        ("{}", "none at all"),
        ('{"text": null}', "found NoneType"),
        ("[" * 100_000, "does not parse"),
        ('{"text": ' + "9" * 5000 + "}", "does not parse|found int"),
    ],
)
@pytest.mark.parametrize("split_bytes", [1 << 40, 20, 36])
def test_bad_json_lines_are_named(tmp_path, line, pattern, split_bytes):
    """File, line in the file (not in the split) and the keys that there are."""
    path = write(tmp_path, "t.jsonl", '{"text": "fine"}\r\n\r\n{"text": "too"}\n' + line)
    with pytest.raises(UserError, match=pattern) as caught:
        read(path, split_bytes)
    assert f"{path}, line 4:" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("id,body\n1,a\n", 'line 1: there is no column "text"; the columns are "id", "body"'),
        ("text,text\na,b\n", 'line 1: there is more than one column "text"'),
        ("id,text\n1,a\n\n2,b,c\n", "line 4: the row has 3 columns, the header 2"),
        ("id,text\n1,a\n2\n", "line 3: the row has 1 columns"),
        ('id,text\n1,"a" b\n', "line 2: malformed"),
        ('id,text\n1,"a\nb\n', "line 3: malformed"),
        ("id,text\n1,a\0\n", "line 2: there is a NUL"),
    ],
)
def test_malformed_csv_is_named(tmp_path, content, pattern):
    """File and line, and for a missing column those that there are."""
    path = write(tmp_path, "t.csv", content)
    assert re.search(pattern, message(path))
    assert path in message(path)


def test_damaged_files_are_named(tmp_path):
    """Cut or changed compressed files, cut, malformed or foreign XML: the file is named, never a traceback."""
    text = os.urandom(50_000).hex().encode()
    flipped = bytearray(gzip.compress(text))
    flipped[2000] ^= 0xFF
    flipped_bz2 = bytearray(bz2.compress(text))
    flipped_bz2[2000] ^= 0xFF
    dump = wiki_dump(wiki_page("10Text."))
    cases = {
        "a.gz": gzip.compress(text)[:-3000], "b.bz2": bz2.compress(text)[:-3000], "c.gz": bytes(flipped),
        "d.bz2": bytes(flipped_bz2), "e.gz": gzip.compress(text)[:-2], "f.xml": dump[:-30].encode(),
        "g.xml": dump.replace("<title>", "<title").encode(), "h.xml": b"<rss></rss>", "i.xml": b"",
        "j.xml": dump.replace("<ns>0</ns>", "").encode(),
    }  # fmt: skip
    for name, content in cases.items():
        path = write(tmp_path, name, content)
        assert path in message(path), name
    for encoding in ("EUC-JP", "unheard-of"):
        head = f'<?xml version="1.0" encoding="{encoding}"?>'
        assert "encoding" in message(write(tmp_path, "l.xml", head + dump))
    assert "MediaWiki" in message(tmp_path / "h.xml")
    assert "line 1, column" in message(tmp_path / "f.xml")
    bad = write(tmp_path, "k.xml", dump.encode().replace(b"Text", b"Te\xff"))
    assert re.search(r"line 1, byte \d+: the text is not valid UTF-8", message(bad))


def test_a_file_that_went_away_is_named(tmp_path):
    """A file that is gone by the time it is read raises a UserError that names it."""
    split = InputSplit(str(tmp_path / "gone.txt"), "sentences", 0, 10)
    with pytest.raises(UserError, match=r"gone\.txt"):
        list(read_documents(split, ReadOptions()))
    with pytest.raises(UserError, match=r"gone\.txt"):
        split_inputs([InputFile(split.path, "sentences", 10, 0)], 5)


def test_hash_depends_on_letters_only():
    """Spacing and cuts do not change the hash; a letter does."""
    digest = document_hash(["One two.", "Three."])
    assert len(digest) == 16
    assert digest == document_hash(["One", "two. Three."]) == document_hash(["Onetwo.Three."])
    assert digest != document_hash(["One two.", "Three!"])
    assert document_hash(["Three.", "One two."]) != digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Great<br /><br />film. <BR>Really<br\n>!", "Great film. Really !"),
        (" \tnames \x00 and\xa0spaces\u3000\u2028of\x85all\r\nkinds\x0b", "names and spaces of all kinds"),
        ("한\u200d국  어 <b>a</b> < br> 2 < 3", "한\u200d국 어 <b>a</b> < br> 2 < 3"),
        ("a\ud800b \ufffd", "a\ufffdb \ufffd"),
        ("<br>\u3000\x00 \n", ""),
        ("", ""),
    ],
)
def test_a_clean_text_is_one_line(text, expected):
    """Line breaks of HTML, controls and all Unicode spaces become single spaces, and nothing else is touched."""
    assert clean_text(text) == expected == clean_text(expected)


@FAST
@given(
    st.text()
    | TEXT
    | st.lists(st.sampled_from(["a", "한.", "<br />", "<BR>", "<", "\n", "!", " "])).map("".join)
)
@example("Mr. Smith came.<br /><br />He  left.\r\n\r\nOh\x00no\ud800!")
def test_a_clean_text_is_what_the_document_holds(tmp_path, text):
    """clean_text keeps the characters of the document that read_documents makes of the text, so both have one hash; and
    where one is empty so is the other."""
    documents = read(write(tmp_path, "t.jsonl", json.dumps({"text": text})))
    assert [document_hash([clean_text(text)])] == (
        [document_hash(sentences) for sentences in documents] or [document_hash([])]
    )
    assert bool(clean_text(text)) == bool(documents)


def test_a_clean_review_is_its_sentences(tmp_path):
    """A review as they come is, cleaned, the sentences that the encoder is pretrained on, in one line."""
    text = "I saw  it twice.<br /><br />The\u3000plot is\x85 thin,\tbut who cares? Go!"
    (sentences,) = read(write(tmp_path, "t.jsonl", json.dumps({"text": text})))
    assert len(sentences) > 2 and " ".join(sentences) == clean_text(text)


# Real text


def test_wikipedia_dump(shared_data):
    """Every article of a real dump gives prose, as many as the XML says, and no markup is left in it."""
    path = next((shared_data / "pretrain_wiki_xml").glob("enwiki*.bz2"))
    raw = bz2.decompress(path.read_bytes()).decode()
    pages = re.findall(r"<page>.*?</page>", raw, re.DOTALL)
    articles = [page for page in pages if "<ns>0</ns>" in page and "<redirect" not in page]
    # A list of anthropologists is nothing but a list.
    only_lists = [page for page in articles if "<title>List of anthropologists<" in page]
    documents = read(path)
    assert len(documents) == len(articles) - len(only_lists) == 105
    sentences = [sentence for document in documents for sentence in document]
    litter = re.compile(
        r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|thumb\||</?[a-z]|''|==|https?:|__|&[a-z]+;|\( | \)|\(\)|\x00|\x01"
    )
    assert [sentence for sentence in sentences if litter.search(sentence)] == []
    # An article on ASCII shows a vertical bar between letters.
    assert len([sentence for sentence in sentences if re.search(r"\w\|\w", sentence)]) <= 1
    text = " ".join(sentences)
    assert sum(map(len, sentences)) > 2_000_000
    assert (
        "The albedo is an important concept in climatology, astronomy, and calculating reflectivity" in text
    )


def test_wikitext_and_reviews(shared_data):
    """WikiText-2's test set has its 60-odd articles; reviews are one document a film, lines as they stand."""
    path = shared_data / "pretrain_en_wikitext2" / "wikitext-2-raw.test.gz"
    titles = re.findall(r"^ = [^=\n]* = $", gzip.decompress(path.read_bytes()).decode(), re.MULTILINE)
    documents = read(path, format="documents", document_start="^ = [^=].* = $")
    assert len(documents) >= len(titles) > 50
    assert {title.strip() for title in titles} <= {document[0] for document in documents}
    reviews = shared_data / "pretrain_ko_nsmc" / "nsmc_raw_reviews_by_movie.txt"
    whole = read(reviews)
    assert whole == reference_documents(reviews.read_bytes().decode())
    assert whole == read(reviews, 300_007)


def test_novels(shared_data):
    """Books with a byte order mark and CRLF, wrapped or not, are one document each of sane sentences."""
    for path in sorted((shared_data / "pretrain_en_novels").glob("*.txt"))[:6]:
        (document,) = read(path, format="documents")
        text = path.read_bytes().decode("utf-8-sig")
        assert "".join(document).replace(" ", "") == "".join(text.split())
        assert len(text) / len(document) < 250
        assert max(map(len, document)) <= 10_000


def test_hostile_text(shared_data):
    """Naughty strings and Unicode's own test files either give clean sentences or a clear error."""
    files = [*(shared_data / "hostile_blns").iterdir(), *(shared_data / "hostile_unicode").iterdir()]
    assert len(files) > 8
    for path in files:
        for kind in (kind for kind in FORMATS if kind != "auto"):
            try:
                documents = read(path, format=kind)
            except UserError as error:
                assert str(path) in str(error)
                assert kind in ("jsonl", "csv", "mediawiki")
                continue
            assert documents and all(" ".join(s.split()) == s != "" for d in documents for s in d)
