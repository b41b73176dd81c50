"""Tokenizers: the same bytes from the same text, fixed special ids, and a sample that no order changes."""

import json
import os
import random
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from corpora import files, make_documents, marker, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.documents import document_hash
from data_prep.errors import UserError, run_program
from data_prep.inputs import ReadOptions, find_inputs
from data_prep.plan import held_out
from data_prep.run import main
from data_prep.tokenizer import MAX_SENTENCE_BYTES, BottomSample, Tokenizer, train_tokenizer
from data_prep.tokenizer_sample import sample_sentences

DESCRIPTION = {
    "vocab_size": 300,
    "character_coverage": 1.0,
    "normalization": "nmt_nfkc",
    "eval_fraction": 0.0,
}


def sentences(number: int = 120, seed: int = 0) -> list[str]:
    return [sentence for document in make_documents(number, seed) for sentence in document]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of 300 pieces, trained on text that mentions the special pieces."""
    place = tmp_path_factory.mktemp("tokenizer")
    mentions = ["The text [MASK] and [CLS] is not special, nor [SEP] [PAD] [UNK]."] * 50
    train_tokenizer(iter(sentences() + mentions), place, DESCRIPTION)
    return place


loaded = cache(Tokenizer)


# The tokenizer


def test_special_ids(folder):
    """[PAD], [UNK], [CLS], [SEP] and [MASK] have ids 0 to 4, and the vocabulary has the size asked for."""
    tokenizer = Tokenizer(folder)
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert tokenizer.pieces(ids) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert tokenizer.vocab_size == 300
    assert tokenizer.describe()["special_ids"] == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            ["[MASK]", "[CLS]", "[SEP]", "[PAD]", "[UNK]", "[", "]", "MASK", " ", "▁", "<s>", "</s>", "\x00"]
        )
        | st.text(max_size=3)
    ).map("".join)
)
def test_text_never_becomes_special_ids(folder, text):
    """The texts "[MASK]", "[CLS]" and so on, alone and among others, are encoded as ordinary pieces."""
    (ids,) = loaded(folder).encode([text])
    assert not set(ids.tolist()) & {0, 2, 3, 4}


def test_encode_gives_each_sentence_its_own_ids(folder):
    """Sentences encoded in one call have the ids they have alone, the ids spell the text, and none is special."""
    tokenizer = Tokenizer(folder)
    text = sentences(20, seed=5) + ["", " ", "漢字"]
    together = tokenizer.encode(text)
    for sentence, ids in zip(text, together, strict=True):
        assert np.array_equal(ids, tokenizer.encode([sentence])[0])
        if "漢" not in sentence:
            assert "".join(tokenizer.pieces(ids)).replace("▁", " ").strip() == sentence.strip()
    assert together[-3].size == together[-2].size == 0
    assert tokenizer.unk_id in together[-1]


def test_lower_case_folds(tmp_path):
    """With the case-folding normalisation, words in capitals have the ids of small ones."""
    train_tokenizer(iter(sentences()), tmp_path, DESCRIPTION | {"normalization": "nmt_nfkc_cf"})
    tokenizer = Tokenizer(tmp_path)
    upper, lower = tokenizer.encode(["DONDAS NAN", "dondas nan"])
    assert upper.tolist() == lower.tolist()


def test_damaged_folders_are_refused(folder, tmp_path):
    """No model, a model that is none, one without our special pieces, and a broken description give a sentence
    with the file."""
    import sentencepiece

    with pytest.raises(UserError, match=r"sentencepiece\.model: there is no tokenizer here"):
        Tokenizer(tmp_path)
    for content in (b"", b"not a model", (folder / "sentencepiece.model").read_bytes()[:1000]):
        (tmp_path / "sentencepiece.model").write_bytes(content)
        with pytest.raises(UserError, match=r"sentencepiece\.model"):
            Tokenizer(tmp_path)
    prefix = str(tmp_path / "sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()), model_prefix=prefix, vocab_size=200, minloglevel=2
    )
    with pytest.raises(UserError, match=r"no piece \[PAD\]"):
        Tokenizer(tmp_path)
    for content in ("{", "[1]", "7"):
        (tmp_path / "sentencepiece.model").write_bytes((folder / "sentencepiece.model").read_bytes())
        (tmp_path / "tokenizer_description.json").write_text(content)
        with pytest.raises(UserError, match=r"tokenizer_description\.json"):
            Tokenizer(tmp_path)


# Training


def test_too_large_a_vocabulary_names_the_largest(tmp_path):
    """Where the text does not support the vocabulary the sentence says the largest value; training with exactly
    that value works, and one more does not."""
    with pytest.raises(UserError, match="supports at most") as caught:
        train_tokenizer(iter(sentences(30)), tmp_path, DESCRIPTION | {"vocab_size": 30_000})
    largest = int(str(caught.value).split("at most ")[1].split(";")[0])
    with pytest.raises(UserError, match=f"supports at most {largest}"):
        train_tokenizer(iter(sentences(30)), tmp_path, DESCRIPTION | {"vocab_size": largest + 1})
    train_tokenizer(iter(sentences(30)), tmp_path, DESCRIPTION | {"vocab_size": largest})
    assert Tokenizer(tmp_path).vocab_size == largest


def test_too_small_a_vocabulary_says_what_the_characters_need(tmp_path):
    """Where the characters alone need more the sentence says how many, and a vocabulary above that works; a
    vocabulary of nothing but special pieces is refused."""
    with pytest.raises(UserError, match="characters of this text alone need") as caught:
        train_tokenizer(iter(sentences(30)), tmp_path, DESCRIPTION | {"vocab_size": 10})
    needed = int(str(caught.value).split("alone need ")[1].split(";")[0])
    train_tokenizer(iter(sentences(30)), tmp_path, DESCRIPTION | {"vocab_size": needed + 1})
    assert Tokenizer(tmp_path).vocab_size == needed + 1
    for size in (1, 5):
        with pytest.raises(UserError, match=f"--vocab_size {size}: the special pieces alone are 5"):
            train_tokenizer(iter(sentences(30)), tmp_path, DESCRIPTION | {"vocab_size": size})


def test_the_program_gives_the_same_bytes(tmp_path, repository):
    """The model is byte-identical for any order of the documents, cut into files, number of workers, size of the
    tasks, OMP_NUM_THREADS and PYTHONHASHSEED; the description differs in the names of the files only."""
    documents = make_documents(200)
    write_corpus(tmp_path / "all.txt", documents)
    random.Random(1).shuffle(documents)
    (tmp_path / "parts").mkdir()
    write_corpus(tmp_path / "parts/b.txt", documents[:80])
    write_corpus(tmp_path / "parts/a.txt", documents[80:])
    results = []
    for number, (text, workers, split_mb, threads, hash_seed) in enumerate(
        [("all.txt", "1", "64", "1", "0"), ("parts", "2", "0.02", "3", "17")]
    ):
        subprocess.run(
            [sys.executable, str(repository / "data_prep/run.py"), "tokenizer", "--input", text]
            + [
                "--output",
                f"out{number}",
                "--vocab_size",
                "400",
                "--eval_fraction",
                "0.1",
                "--workers",
                workers,
            ]
            + ["--split_mb", split_mb, "--sample_mb", "0.05"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        )
        results.append(files(tmp_path / f"out{number}"))
    assert set(results[0]) == {"sentencepiece.model", "tokenizer_description.json"}
    assert results[0]["sentencepiece.model"] == results[1]["sentencepiece.model"]
    descriptions = [json.loads(result["tokenizer_description.json"]) for result in results]
    assert [len(description.pop("inputs")) for description in descriptions] == [1, 2]
    assert descriptions[0] == descriptions[1]


# The sample


def hashed(sentence: str) -> int:
    return random.Random(sentence).getrandbits(64)


def brute_force(offered: list[str], budget: int) -> list[str]:
    """Different sentences by ascending hash, as many from the first on as the budget holds together."""
    kept, size = [], 0
    for sentence in sorted(set(offered), key=hashed):
        size += len(sentence.encode())
        if size > budget:
            break
        kept.append(sentence)
    return kept


def fill(offered: list[str], budget: int) -> BottomSample:
    sample = BottomSample(budget)
    for sentence in offered:
        sample.add(hashed(sentence), sentence)
    return sample


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("aé한", min_size=1, max_size=12), max_size=40),
    st.integers(1, 120),
    st.randoms(use_true_random=False),
    st.integers(1, 5),
)
def test_bottom_sample_is_its_definition(offered, budget, chance, parts):
    """Whatever the order, the repetitions and the way the text is cut into parts that are merged in any order,
    the sample is the brute-force one: sentences by ascending hash while the budget holds."""
    expected = [(hashed(sentence), sentence) for sentence in brute_force(offered, budget)]
    for _ in range(2):
        chance.shuffle(offered)
        assert fill(offered, budget).items() == expected
    samples = [fill(offered[part::parts] + offered[:part], budget) for part in range(parts)]
    chance.shuffle(samples)
    merged = BottomSample(budget)
    for sample in samples:
        merged.merge(sample.limit, sample.items())
    assert merged.items() == expected


def test_held_out_documents_are_never_sampled(tmp_path):
    """No sentence of a held-out document is in the sample that a tokenizer is trained on; all others are, where
    the budget allows it. Every document has a word of its own."""
    documents = make_documents(300)
    path = str(write_corpus(tmp_path / "corpus.txt", documents))
    out = {n for n, document in enumerate(documents) if held_out(document_hash(document), 0.3)}
    assert 60 < len(out) < 120
    sample = sample_sentences(
        find_inputs([path], ReadOptions()),
        ReadOptions(),
        eval_fraction=0.3,
        budget_bytes=1 << 30,
        split_bytes=1000,
        workers=1,
    )
    seen = {n for n in range(300) if any(marker(n) in sentence.lower() for sentence in sample)}
    assert seen == set(range(300)) - out
    assert len(sample) == sum(len(documents[n]) for n in seen)


def test_sample_fits_the_budget_and_is_spread(tmp_path):
    """A small budget is kept and nearly used up, and what it takes comes from all over the corpus."""
    path = str(write_corpus(tmp_path / "corpus.txt", make_documents(300)))
    sample = sample_sentences(
        find_inputs([path], ReadOptions()),
        ReadOptions(),
        eval_fraction=0,
        budget_bytes=20_000,
        split_bytes=10_000,
        workers=1,
    )
    size = sum(len(sentence.encode()) for sentence in sample)
    assert 19_800 < size <= 20_000
    places = [
        int(word[1:5]) for sentence in sample for word in sentence.lower().split() if word[1:5].isdigit()
    ]
    assert (np.histogram(places, bins=3, range=(0, 300))[0] > 0.2 * len(places)).all()


def test_nested_held_out_sets():
    """The documents that a smaller fraction holds out are among those of a larger one, and the share is right."""
    hashes = [document_hash([f"document {n}"]) for n in range(5000)]
    sets = [
        {digest for digest in hashes if held_out(digest, fraction)} for fraction in (0, 0.01, 0.1, 0.5, 1)
    ]
    assert all(small <= large for small, large in zip(sets[:-1], sets[1:], strict=True))
    assert (len(sets[0]), len(sets[-1])) == (0, 5000)
    assert 400 < len(sets[2]) < 600


@pytest.mark.parametrize("text", ["", "\n\n \n", "\x00\n"])
def test_no_text_is_a_sentence(tmp_path, text):
    """An empty file, one of blank lines and one of control characters say that there is no text to train on."""
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(UserError, match=r"empty\.txt: no text to train on"):
        main(["tokenizer", "--input", str(tmp_path / "empty.txt"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_training_again_changes_nothing(tmp_path, capsys):
    """The same command says that there is nothing to do; other settings or other text are refused by name, and a
    model that a kill left without its description is trained again."""
    text = write_corpus(tmp_path / "corpus.txt", make_documents(60))
    arguments = ["tokenizer", "--input", str(text), "--output", str(tmp_path / "out"), "--workers", "1"]
    size = ["--vocab_size", "200"]
    assert run_program(main, [*arguments, *size]) == 0
    before = files(tmp_path / "out")
    assert run_program(main, [*arguments, *size]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run_program(main, [*arguments, "--vocab_size", "190"]) == 2
    assert "vocab_size: 200 there, 190 now" in capsys.readouterr().err
    write_corpus(text, make_documents(61))
    assert run_program(main, [*arguments, *size]) == 2
    assert "corpus.txt is not the same" in capsys.readouterr().err
    write_corpus(text, make_documents(60))
    (tmp_path / "out/tokenizer_description.json").unlink()
    (tmp_path / "out/sentencepiece.model").write_bytes(b"half a mod")
    assert run_program(main, [*arguments, *size]) == 0
    assert files(tmp_path / "out") == before
    (tmp_path / "out/sentencepiece.model").write_bytes(b"another model")
    with pytest.raises(UserError, match="SentencePiece cannot read it"):
        Tokenizer(tmp_path / "out")


def test_a_sentence_beyond_sentencepieces_limit_is_not_lost(tmp_path):
    """A sentence that SentencePiece's trainer would leave out silently is in the sample, cut to what it takes."""
    text = tmp_path / "corpus.txt"
    text.write_text("가나다라 " * 20_000 + "\n\nshort one\n", encoding="utf-8")
    sample = sample_sentences(
        find_inputs([str(text)], ReadOptions()),
        ReadOptions(),
        eval_fraction=0,
        budget_bytes=1 << 20,
        split_bytes=1 << 20,
        workers=1,
    )
    assert sorted(len(sentence) for sentence in sample) == [9, MAX_SENTENCE_BYTES // 4]
