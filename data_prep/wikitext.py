"""MediaWiki dumps: articles, and their markup turned into running text.

As in BERT (Devlin et al. 2019, section 3.1) only running text is kept: lists, tables and headings are dropped. So
are titles: nearly every article says its title again in its first sentence.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html import unescape
from typing import BinaryIO

import mwparserfromhell
from mwparserfromhell import nodes
from mwparserfromhell.parser import ParserError
from mwparserfromhell.wikicode import Wikicode

from data_prep.errors import UserError
from data_prep.inputs import check_utf8

# What `plain_text` raises for markup that cannot be parsed.
MarkupError = (ParserError, RecursionError)

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


def _xml_events(stream: BinaryIO, path: str) -> Iterator[tuple[str, ET.Element]]:
    try:
        yield from ET.iterparse(stream, events=("start", "end"))
    except (ET.ParseError, LookupError, ValueError) as error:  # the last two: unknown encodings
        check_utf8(path)
        raise UserError(f"{path}: the XML is cut short or malformed ({error}); get it again") from error


def read_articles(stream: BinaryIO, path: str) -> Iterator[tuple[str, str, set[str]]]:
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


def plain_text(text: str, file_names: set[str]) -> str:
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
