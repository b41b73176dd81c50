"""SentencePiece's normalisation rules, and the same function out of the normalizers that `tokenizers` has.

SentencePiece rewrites text by its longest matching rule: characters (`Ａ` → `A`, tab → space) and sequences that have
a composed form (`ㄱ` `ㅏ` → `가`, e + acute → é). `tokenizers` can read the same rules (`Precompiled`), but looks
up whole grapheme clusters below six bytes by their *shortest* rule and drops the rest of the cluster, and all others
one character at a time, so that decomposed Hangul is not composed and accents get lost. Here Precompiled sees single
characters only, and NFC composes afterwards, kept by separators from composing or reordering anything that no rule
composes.
"""

import base64
import itertools
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache

import numpy as np
from tokenizers import normalizers

from data_prep.errors import UserError

# Characters without a meaning that end a grapheme cluster on both sides (they are unassigned "control" characters).
SEPARATORS = [chr(number) for number in range(0xFFF0, 0xFFF9)]
# What may continue a grapheme cluster, besides what the rules themselves join: marks, joiners, emoji modifiers, what
# may have become a mark since, conjoining jamo, and the vowel signs of Thai and Lao that are letters.
_CONTINUATIONS = r"\p{M}\p{Cf}\p{Sk}\p{Cn}\x{1160}-\x{11ff}\x{d7b0}-\x{d7ff}\x{e33}\x{eb3}"
# Rules that NFC does not know are written out one by one; more than this would be too slow to use.
_MAX_WRITTEN_OUT = 256


def read_rules(charsmap: bytes) -> dict[str, str]:
    """All rules of a precompiled charsmap: text → what it becomes, longest match first.

    The format: uint32 size of a double-array trie (darts-clone's units of 32 bits), the trie, and the right-hand sides
    as zero-terminated UTF-8, to which the trie's values are offsets.
    """
    size = struct.unpack_from("<I", charsmap)[0]
    units = np.frombuffer(charsmap, dtype="<u4", count=size // 4, offset=4).astype(np.int64)
    results = charsmap[4 + size :]
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    labels = units & ((1 << 31) | 0xFF)
    bases = np.arange(len(units)) ^ offsets

    @cache
    def children(base: int) -> list[tuple[int, int, int]]:
        positions = base ^ np.arange(1, 256)
        inside = positions < len(units)
        found = np.flatnonzero(inside & (labels[np.where(inside, positions, 0)] == np.arange(1, 256))) + 1
        return [(int(byte), int(bases[base ^ byte]), int(units[base ^ byte] >> 8 & 1)) for byte in found]

    rules = {}
    pending = [(int(offsets[0]), b"")]
    while pending:
        base, prefix = pending.pop()
        for byte, next_base, is_end in children(base):
            key = prefix + bytes([byte])
            if is_end:
                start = int(units[next_base]) & ((1 << 31) - 1)
                rules[key.decode()] = results[start : results.index(b"\0", start)].decode()
            pending.append((next_base, key))
    return rules


def same_normalization(charsmap: bytes, characters: Iterable[str]) -> list[dict]:
    """Normalizers, as tokenizer.json has them, that do what SentencePiece does with this charsmap.

    Args:
        charsmap: `normalizer_spec.precompiled_charsmap` of a model; empty if it changes nothing.
        characters: all characters of the model's pieces; the separators are none of them.
    Raises:
        UserError: the rules are of a kind that cannot be had this way.
    """
    if not charsmap:
        return []
    return _normalizers(charsmap, frozenset(SEPARATORS).intersection(characters))


@lru_cache(maxsize=4)
def _normalizers(charsmap: bytes, taken: frozenset[str]) -> list[dict]:
    rules = read_rules(charsmap)
    separator, joiner, other = _free_separators(rules, taken)
    targets = _sequence_targets(rules)
    nfc = normalizers.NFC().normalize_str
    composed = {sequence for sequence, target in targets.items() if nfc(sequence) == target}
    written_out = sorted(targets.keys() - composed, key=lambda sequence: (-len(sequence), sequence))
    if len(written_out) > _MAX_WRITTEN_OUT:
        raise UserError(
            f"the tokenizer composes {len(written_out):,} sequences that Unicode does not compose: no Hugging Face "
            "normalizer does that; use a tokenizer with one of SentencePiece's own normalisation rules"
        )
    return [
        # Text that has the separators itself: the other is as unknown to the model.
        replace_pattern(f"[{_members((separator, joiner))}]", other),
        # Two separators stand where the neighbours have no rule, although those that they become have one.
        replace_pattern(_apart(rules, targets), separator),
        # Not at the very start: an insertion there breaks the alignment that `tokenizers` keeps, and it panics later.
        replace_pattern(rf"(?!\A)(?={_continuation(rules)})", separator),
        {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()},
        *_written_out({sequence: targets[sequence] for sequence in written_out}, separator, joiner),
        replace_pattern(_joints(composed, separator), ""),
        {"type": "NFC"},
        replace_pattern(escaped(separator), ""),
    ]


def _written_out(targets: Mapping[str, str], separator: str, joiner: str) -> list[dict]:
    """Replacements for each of the sequences, longest first: of its first character, then of the rest.

    What replaces several characters counts as made of the last: at the start of a text `tokenizers` would no longer
    see that it is the start.
    """
    rests = {
        sequence: escaped("".join(separator + character for character in sequence[1:]))
        for sequence in targets
    }
    steps = [
        replace_pattern(f"{escaped(sequence[0])}(?={rests[sequence]})", targets[sequence] + joiner)
        for sequence in targets
    ]
    endings = [f"(?<={escaped(target + joiner)}){rests[sequence]}" for sequence, target in targets.items()]
    return (
        [*steps, replace_pattern(f"{escaped(joiner)}(?:{'|'.join(endings)})", separator)] if targets else []
    )


def _free_separators(rules: Mapping[str, str], taken: frozenset[str]) -> list[str]:
    used = taken.union(*rules)
    free = [separator for separator in SEPARATORS if separator not in used]
    if len(free) < 3:
        raise UserError(
            "the tokenizer has pieces of unassigned characters (U+FFF0 to U+FFF8), which stand for nothing"
        )
    return free[:3]


def _sequence_targets(rules: Mapping[str, str]) -> dict[str, str]:
    """Sequences of characters that no rule changes → their composed form.

    The rules for sequences list all variants (`ㄱ`, `㉠`, `ᄀ` followed by …); seen through the rules for characters
    they are few.
    """
    targets: dict[str, str] = {}
    for left, right in rules.items():
        if len(left) > 1:
            parts = [rules.get(character, character) for character in left]
            sequence = "".join(parts)
            if len(sequence) != len(left) or targets.setdefault(sequence, right) != right:
                raise UserError(
                    f"the tokenizer's normalisation makes {right!r} of {left!r}, but not of {sequence!r}: no Hugging Face "
                    "normalizer does that; use a tokenizer with one of SentencePiece's own normalisation rules"
                )
    return targets


def _joined(rules: Mapping[str, str]) -> set[str]:
    return {character for left in rules for character in left[1:]}


def _apart(rules: Mapping[str, str], targets: Mapping[str, str]) -> str:
    """Matches between neighbours that no rule joins, although rules make them a sequence that one does."""
    not_one = _members(left for left, right in rules.items() if len(left) == 1 and len(right) != 1)
    sources = defaultdict(list)
    for character in set().union(*targets):
        if character not in rules:
            sources[character].append(character)
    for left, right in rules.items():
        if len(left) == len(right) == 1:
            sources[right].append(left)
    joined = _joined(rules)
    joining = {right: [left for left in lefts if left in joined] for right, lefts in sources.items()}
    firsts = defaultdict(set)
    for sequence in targets:
        for rest in itertools.product(*(joining[character] for character in sequence[1:])):
            ending = "".join(rest)
            firsts[ending].update(first for first in sources[sequence[0]] if first + ending not in rules)
    places = [f"(?<=[{not_one}])", f"(?=[{not_one}])"] if not_one else []
    for ending, characters in sorted(firsts.items()):
        if characters:
            places.append(f"(?<=[{_members(characters)}]{escaped(ending[:-1])})(?={escaped(ending[-1])})")
    return f"(?!\\A)(?={_continuation(rules)})(?:{'|'.join(places)})"


def _continuation(rules: Mapping[str, str]) -> str:
    return f"[{_CONTINUATIONS}{_members(_joined(rules))}]"


def _joints(sequences: set[str], separator: str) -> str:
    """Matches the separators inside of the sequences, `a|b|c`, each behind a beginning that can be composed."""
    firsts = defaultdict(set)
    for sequence in sequences:
        firsts[sequence[1:]].add(sequence[0])
    lasts = defaultdict(set)
    for rest, characters in firsts.items():
        lasts[_members(characters), rest[:-1]].add(rest[-1])
    seconds = defaultdict(set)
    for (first, middle), characters in lasts.items():
        seconds[first, len(middle), middle[1:], _members(characters)].update(middle[:1])
    mark = escaped(separator)
    joints = []
    for (first, _, middle, last), characters in sorted(seconds.items()):
        before = [first, *([_members(characters)] if characters else []), *map(_members, middle)]
        joints.append(f"(?<={''.join(f'[{members}]{mark}' for members in before)})(?=[{last}])")
    return f"{mark}(?:{'|'.join(joints)})"


def _members(characters: Iterable[str]) -> str:
    """Characters as a regular expression's class has them, in ascending order and as ranges."""
    numbers = sorted(map(ord, characters))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "".join(
        f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in runs
    )


def escaped(text: str) -> str:
    """A regular expression that matches the text."""
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def replace_pattern(pattern: str, content: str) -> dict:
    """A normalizer that writes `content` for what matches the regular expression (Oniguruma's syntax)."""
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}
