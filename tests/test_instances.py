"""Instances: what the documented rules say, nothing of a document lost, and no label that can be guessed."""

from math import sqrt

import numpy as np
import pytest
from corpora import token_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.counter_rng import Stream, derive, key, uniform
from data_prep.instances import InstanceSettings, Pairs, TokenDocuments, assemble_blocks, build_pairs
from data_prep.masking import MaskPolicy, draw_masks

LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=8), min_size=2, max_size=7)
SPECIAL = {"pad": 100_000, "unk": 100_001, "cls": 100_002, "sep": 100_003, "mask": 100_004}
POLICY = MaskPolicy.for_tokenizer({"vocab_size": 100_010, "special_ids": SPECIAL})


def ranges(pairs: Pairs) -> list[tuple[int, int, int, int, int]]:
    columns = (pairs.a_start, pairs.a_end, pairs.b_start, pairs.b_end, pairs.labels)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# The slow reference: the documented rules in plain Python; only the draws come from counter_rng


def plain_documents(documents: TokenDocuments) -> list[list[list[int]]]:
    sentences = np.split(documents.tokens, documents.sentence_offsets[1:-1])
    bounds = documents.document_offsets.tolist()
    return [
        [sentence.tolist() for sentence in sentences[low:high]]
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]


def reference_segments(text, document: int, draws, options: InstanceSettings) -> tuple[list, list, int, int]:
    """A and B as lists of sentences, the label and the sentence to go on from, from `document`'s sentence `i`."""
    i, short, target_draw, coin, cut, other, place = draws
    longest = options.seq_len - 3
    target = 2 + int(target_draw * (longest - 1)) if short < options.short_seq_prob else longest
    own, chunk = text[document], []
    while i + len(chunk) < len(own) and sum(map(len, chunk)) < target:
        chunk.append(own[i + len(chunk)])
    behind = i + len(chunk)
    if coin < options.random_next_prob or sum(map(len, own)) == 1:
        a = chunk[: 1 + int(cut * (len(chunk) - 1))]
        partners = text[:document] + text[document + 1 :]
        partner = partners[int(other * len(partners))]
        b = []
        for sentence in partner[int(place * len(partner)) :]:
            if b and sum(map(len, a + b)) >= target:
                break
            b.append(sentence)
        return a, b, 1, i + len(a)
    if len(chunk) == 1 and behind < len(own):
        chunk.append(own[behind])
        behind += 1
    elif len(chunk) == 1 and i > 0:
        chunk.insert(0, own[i - 1])
    elif len(chunk) == 1:
        middle = 1 + int(cut * (len(chunk[0]) - 1))
        return [chunk[0][:middle]], [chunk[0][middle:]], 0, behind
    middle = 1 + int(cut * (len(chunk) - 1))
    return chunk[:middle], chunk[middle:], 0, behind


def reference_truncate(a: list[int], b: list[int], longest: int, instance_key: int) -> tuple[list, list]:
    """Take tokens off one by one: the longer of A and B loses (B if equal), at the end that a coin says."""
    coins = derive(instance_key, int(Stream.TRUNCATION))
    tosses = [0, 0]
    while len(a) + len(b) > longest:
        side = 0 if len(a) > len(b) else 1
        word = int(derive(derive(coins, side), tosses[side] // 64))
        # The last word of a side is used from its top: only how many heads there are matters.
        front = word >> 63 - tosses[side] % 64 & 1
        tosses[side] += 1
        if side == 0:
            a = a[1:] if front else a[:-1]
        else:
            b = b[1:] if front else b[:-1]
    return a, b


def reference(documents: TokenDocuments, options: InstanceSettings) -> list[dict]:
    """All instances in their order, with the segments before truncation."""
    text, made = plain_documents(documents), []
    for duplicate in range(options.duplicates):
        for document, (high, low) in enumerate(documents.hashes):
            own = derive(derive(derive(key(options.seed, Stream.INSTANCE), high), low), duplicate)
            i = k = 0
            while i < len(text[document]):
                instance_key = derive(own, k)
                words = derive(derive(instance_key, int(Stream.SEGMENTS)), np.arange(6))
                a, b, label, following = reference_segments(
                    text, document, (i, *uniform(words).tolist()), options
                )
                flat_a, flat_b = sum(a, []), sum(b, [])
                shown = reference_truncate(flat_a, flat_b, options.seq_len - 3, instance_key)
                place = int(derive(instance_key, int(Stream.INSTANCE_ORDER)))
                made.append(
                    {
                        "a": flat_a,
                        "b": flat_b,
                        "shown": shown,
                        "label": label,
                        "place": place,
                        "document": document,
                    }
                )
                i, k = following, k + 1
    return sorted(made, key=lambda instance: instance["place"])


OPTIONS = st.builds(
    InstanceSettings,
    seq_len=st.integers(8, 40),
    short_seq_prob=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    random_next_prob=st.sampled_from([0.0, 0.5, 1.0]),
    duplicates=st.integers(1, 3),
    seed=st.integers(0, 1 << 40),
)


@settings(max_examples=80, deadline=None)
@given(LENGTHS, OPTIONS)
def test_instances_are_those_of_the_documented_rules(lengths, options):
    """The vectorised code gives, in the same order, the instances of a slow reference that follows the rules."""
    documents = token_documents(lengths)
    found = build_pairs(documents, options)
    tokens = documents.tokens.tolist()
    assert [(tokens[a:a_end], tokens[b:b_end], label) for a, a_end, b, b_end, label in ranges(found)] == [
        (*instance["shown"], instance["label"]) for instance in reference(documents, options)
    ]


@settings(max_examples=80, deadline=None)
@given(LENGTHS, OPTIONS)
def test_every_sentence_is_used(lengths, options):
    """Before truncation every sentence of every document is whole in an instance of its own document, in each
    duplicate: short sequences, random next and the ends of documents lose nothing."""
    documents = token_documents(lengths)
    text = plain_documents(documents)
    used = np.zeros(len(documents.tokens), dtype=int)
    for instance in reference(documents, options):
        own = instance["a"] + (instance["b"] if instance["label"] == 0 else [])
        assert set(own) <= {token for sentence in text[instance["document"]] for token in sentence}
        used[own] += 1
    assert used.min() >= options.duplicates


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 1 << 40), st.sampled_from([0.0, 0.5, 1.0]))
def test_no_token_is_lost_where_all_fits(lengths, seed, random_next_prob):
    """With room for the whole corpus nothing is truncated: every token is there in an instance of its own
    document, in A or in an actual next B."""
    documents = token_documents(lengths)
    pairs = build_pairs(
        documents, InstanceSettings(len(documents.tokens) + 20, 0.0, random_next_prob, seed=seed)
    )
    used = np.zeros(len(documents.tokens), dtype=bool)
    for a, a_end, b, b_end, label in ranges(pairs):
        used[a:a_end] = True
        if not label:
            used[b:b_end] = True
    assert used.all()


@settings(max_examples=80, deadline=None)
@given(LENGTHS, OPTIONS)
def test_form_of_an_instance(lengths, options):
    """Each instance is `[CLS] A [SEP] B [SEP]` of at most seq_len tokens, A and B not empty; B of label 1 comes
    from another document, B of label 0 follows A in the same one, directly where nothing was truncated."""
    documents = token_documents(lengths)
    owner = np.repeat(
        np.arange(len(documents)), np.diff(documents.sentence_offsets[documents.document_offsets])
    )
    blocks = assemble_blocks(documents, build_pairs(documents, options), SPECIAL, POLICY)
    for block in blocks:
        for i, label in enumerate(block.next_sentence_labels):
            tokens = block.tokens[block.offsets[i] : block.offsets[i + 1]].astype(int).tolist()
            cut = int(block.segment_a[i])
            a, b = tokens[1 : cut - 1], tokens[cut:-1]
            assert (tokens[0], tokens[cut - 1], tokens[-1]) == (
                SPECIAL["cls"],
                SPECIAL["sep"],
                SPECIAL["sep"],
            )
            assert len(tokens) <= options.seq_len
            assert a and a == list(range(a[0], a[-1] + 1))
            assert b and b == list(range(b[0], b[-1] + 1))
            assert len(set(owner[a])) == len(set(owner[b])) == 1
            if label:
                assert owner[a[0]] != owner[b[0]]
            else:
                assert owner[a[0]] == owner[b[0]]
                assert b[0] > a[-1]
                if len(tokens) < options.seq_len:
                    assert b[0] == a[-1] + 1


# Statistics


def corpus(kind: str, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    sizes = {
        "one sentence": lambda: 1,
        "two sentences": lambda: 2,
        "one or two": lambda: int(random.integers(1, 3)),
        "long": lambda: int(random.integers(1, 80)),
    }[kind]
    count = {"one sentence": 8000, "two sentences": 5000, "one or two": 6000, "long": 1500}[kind]
    return [random.integers(2, 40, sizes()).tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", ["one sentence", "two sentences", "one or two", "long"])
def test_half_are_random_next(kind):
    """Half of the instances are random next within 5 standard errors, on corpora of one-sentence and
    two-sentence documents too; another share is kept as well."""
    pairs = build_pairs(token_documents(corpus(kind)), InstanceSettings(seq_len=64, seed=1))
    assert len(pairs.labels) > 7000
    assert abs(pairs.labels.mean() - 0.5) < 5 * sqrt(0.25 / len(pairs.labels))
    fifth = build_pairs(token_documents(corpus(kind)), InstanceSettings(64, random_next_prob=0.2)).labels
    assert abs(fifth.mean() - 0.2) < 5 * sqrt(0.16 / len(fifth))


def test_labels_and_lengths_are_in_random_order():
    """Labels and lengths of neighbouring instances are independent, and neighbours come from other documents:
    a block is a random sample of its bucket."""
    documents = token_documents(corpus("long"))
    pairs = build_pairs(documents, InstanceSettings(seq_len=64, short_seq_prob=0.5, seed=2))
    number = len(pairs.labels)
    length = (pairs.a_end - pairs.a_start + pairs.b_end - pairs.b_start).astype(float)
    owner = np.searchsorted(
        documents.sentence_offsets[documents.document_offsets], pairs.a_start, side="right"
    )
    for series in (pairs.labels.astype(float), length, owner.astype(float)):
        assert abs(np.corrcoef(series[:-1], series[1:])[0, 1]) < 5 / sqrt(number)
        assert abs(np.corrcoef(series, np.arange(number))[0, 1]) < 5 / sqrt(number)


def test_random_next_is_uniform_over_the_other_documents():
    """Every other document is equally likely to be the partner, and every sentence of it to be the first of B
    (chi-square over the ordered pairs of 12 documents and over the sentences)."""
    documents = token_documents(
        [[2] * 4] * 12
    )  # two, or four, tokens of A and as many as fit of B: nothing is cut
    options = InstanceSettings(seq_len=9, short_seq_prob=0, random_next_prob=1, duplicates=700, seed=3)
    pairs = build_pairs(documents, options)
    cells = np.zeros((12, 12))
    np.add.at(cells, (pairs.a_start // 8, pairs.b_start // 8), 1)
    assert cells.sum() > 20_000
    assert np.trace(cells) == 0
    for observed in (cells[~np.eye(12, dtype=bool)], np.bincount(pairs.b_start % 8 // 2)):
        degrees = len(observed) - 1
        statistic = ((observed - observed.mean()) ** 2 / observed.mean()).sum()
        assert abs(statistic - degrees) < 5 * sqrt(2 * degrees)


def test_a_tenth_is_short():
    """In documents of 4,000 short sentences 10 % of the instances are shorter than the room, within 5 standard
    errors, and their lengths are spread evenly from the shortest to the longest."""
    pairs = build_pairs(token_documents([[4] * 4000] * 20), InstanceSettings(seq_len=67, seed=4))
    length = pairs.a_end - pairs.a_start + pairs.b_end - pairs.b_start
    number = len(length)
    # Targets above 60 of 64 fill the room like all others; a twentieth of a percent ends with its document.
    expected = 0.1 * 59 / 63
    short = length[length <= 60]
    assert number > 5000
    assert abs(len(short) / number - expected) < 5 * sqrt(expected / number) + 0.002
    quarters = np.histogram(short, bins=[4, 18, 32, 46, 61])[0] / len(short)
    assert (abs(quarters - 0.25) < 0.1).all()


def test_truncation_takes_from_both_ends_by_fair_coins():
    """What a long segment loses is taken from its front in half of the tosses, with the spread of independent
    coins: the variance is the binomial's, for more than 64 tosses too."""
    documents = token_documents([[300, 300]] * 3000)
    options = InstanceSettings(seq_len=43, short_seq_prob=0, random_next_prob=0, seed=5)
    pairs = build_pairs(documents, options)
    assert (pairs.a_end - pairs.a_start == 20).all()
    assert (pairs.b_end - pairs.b_start == 20).all()
    front_a, front_b = pairs.a_start % 600, pairs.b_start % 600 - 300
    for front in (front_a, front_b):  # 280 tosses each
        assert abs(front.mean() - 140) < 5 * sqrt(70 / len(front))
        assert 0.85 < front.var() / 70 < 1.15
    assert abs(np.corrcoef(front_a, front_b)[0, 1]) < 5 / sqrt(len(front_a))


def test_the_longer_segment_loses():
    """A short segment keeps all its tokens beside a long one, and two long ones end up equal, B one shorter."""
    documents = token_documents([[5, 300], [300, 5], [200, 300]])
    pairs = build_pairs(documents, InstanceSettings(44, 0, 0, seed=0))
    sizes = sorted((a_end - a, b_end - b) for a, a_end, b, b_end, _ in ranges(pairs))
    assert sizes == [(5, 36), (21, 20), (36, 5)]


# The rest


def test_an_instance_depends_on_its_document_not_on_the_others():
    """Cuts, labels, masks and keys of a document's actual-next instances stay when the rest of the corpus changes."""
    options = InstanceSettings(seq_len=24, random_next_prob=0, duplicates=2)
    lengths = corpus("long")[:30]
    whole = token_documents(lengths)
    part = whole.take(np.arange(0, 30, 3))
    shown = []
    for documents in (whole, part):
        pairs = build_pairs(documents, options)
        shown.append(
            {
                int(pairs.keys[i]): (documents.tokens[a:a_end].tolist(), documents.tokens[b:b_end].tolist())
                for i, (a, a_end, b, b_end, _) in enumerate(ranges(pairs))
            }
        )
    assert shown[1]
    assert shown[1].items() <= shown[0].items()


def test_duplicates_and_seeds_differ():
    """Three duplicates use a document three times with other cuts and masks; another seed gives other instances."""
    documents = token_documents(corpus("long")[:50])
    one = build_pairs(documents, InstanceSettings(64))
    three = build_pairs(documents, InstanceSettings(64, duplicates=3))
    assert len(set(three.keys.tolist())) == len(three.keys)
    assert 2.5 < len(three.keys) / len(one.keys) < 3.5
    assert set(one.keys.tolist()) <= set(three.keys.tolist())
    assert len(set(ranges(three))) > 0.8 * len(three.keys)
    assert not set(one.keys.tolist()) & set(
        build_pairs(documents, InstanceSettings(64, seed=1)).keys.tolist()
    )


def test_blocks_hold_the_pairs_in_order():
    """Blocks of 512 hold all instances in their order, with the masks that their keys give, in the dtype of the
    tokens."""
    documents = token_documents(corpus("long")[:60], dtype=np.uint32)
    pairs = build_pairs(documents, InstanceSettings(32, duplicates=2))
    blocks = list(assemble_blocks(documents, pairs, SPECIAL, POLICY))
    assert [len(block) for block in blocks[:-1]] == [512] * (len(blocks) - 1)
    assert sum(map(len, blocks)) == len(pairs.keys) > 512
    assert np.concatenate([block.next_sentence_labels for block in blocks]).tolist() == pairs.labels.tolist()
    for number, block in enumerate(blocks):
        masks = draw_masks(block.tokens, block.offsets, pairs.keys[number * 512 :][:512], POLICY)
        assert np.array_equal(block.masked_lm_positions, masks.positions)
        assert np.array_equal(block.masked_lm_inputs, masks.inputs)
        assert np.array_equal(block.masked_lm_offsets, masks.offsets)
        assert block.tokens.dtype == block.masked_lm_inputs.dtype == np.uint32
        assert (block.offsets.dtype, block.segment_a.dtype, block.next_sentence_labels.dtype) == (
            "uint32",
            "uint16",
            "uint8",
        )


@given(LENGTHS, st.data())
def test_take_gives_documents_whole(lengths, data):
    """`take` gives the documents at these places, with their sentences, tokens and hashes."""
    documents = token_documents(lengths)
    index = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1))), dtype=np.int64)
    taken = documents.take(index)
    text = plain_documents(documents)
    assert len(taken) == len(index)
    assert np.array_equal(taken.hashes, documents.hashes[index])
    if len(index):
        assert plain_documents(taken) == [text[i] for i in index]


def test_one_document_is_a_programmers_error():
    """Without a second document there is no random next."""
    with pytest.raises(ValueError, match="two documents"):
        build_pairs(token_documents([[3, 4]]), InstanceSettings(16))
