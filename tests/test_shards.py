"""The shard format: any WebDataset reader reads it, and no byte of it changes unseen."""

import json
import random
import resource
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from corpora import make_documents, write_corpus

from data_prep.errors import UserError
from data_prep.run import main
from data_prep.shards import (
    MANIFEST,
    Block,
    ShardSet,
    canonical_json,
    manifest_bytes,
    parse_block,
    token_dtype,
    verify,
    write_atomically,
    write_shard,
)

NAMES = [field.name for field in fields(Block)]


def make_block(number: int, seed: int, vocab_size: int = 1000, sentence_task: bool = True) -> Block:
    """A block of `number` instances with random content."""
    draw = np.random.default_rng(seed)
    dtype = token_dtype(vocab_size)
    lengths, masks = draw.integers(5, 60, number), draw.integers(1, 6, number)
    return Block(
        tokens=draw.integers(0, vocab_size, lengths.sum()).astype(dtype),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
        segment_a=draw.integers(3, 6, number).astype(np.uint16),
        next_sentence_labels=draw.integers(0, 2, number).astype(np.uint8) if sentence_task else None,
        masked_lm_offsets=np.concatenate([[0], np.cumsum(masks)]).astype(np.uint32),
        masked_lm_positions=draw.integers(0, 5, masks.sum()).astype(np.uint16),
        masked_lm_inputs=draw.integers(0, vocab_size, masks.sum()).astype(dtype),
    )


def assert_equal(found: dict, block: Block) -> None:
    for name in NAMES:
        array = getattr(block, name)
        if array is None:
            assert found.get(name) is None
        else:
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A shard set of about 4 training shards and an evaluation shard, made by the program."""
    folder = tmp_path_factory.mktemp("shards")
    text = str(write_corpus(folder / "corpus.txt", make_documents(150)))
    common = ["--input", text, "--eval_fraction", "0.1", "--workers", "1"]
    main(["tokenizer", *common, "--output", str(folder / "tokenizer"), "--vocab_size", "300"])
    main(
        ["shards", *common, "--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "set")]
        + ["--seq_len", "24", "--bucket_mb", "0.02"]
    )
    return folder / "set"


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "set"))


def open_and_verify(folder: Path) -> list[tuple[str, int]]:
    return list(verify(folder))


def refused(folder: Path, call=open_and_verify) -> str:
    with pytest.raises(UserError) as caught:
        call(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def flipped(path: Path, offset: int, bits: int):
    """A file with some bits of a byte turned over."""
    with open(path, "r+b", buffering=0) as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bits]))
        try:
            yield
        finally:
            file.seek(offset)
            file.write(bytes([byte]))


# Writing


@pytest.mark.parametrize("vocab_size", [1000, 1 << 16, (1 << 16) + 1, 250_000])
@pytest.mark.parametrize("sentence_task", [True, False])
def test_plain_webdataset_reads_what_was_written(tmp_path, vocab_size, sentence_task):
    """webdataset.WebDataset(path).decode() gives every block with its keys, dtypes and values; ids above 65,535
    are uint32, others uint16, and without a sentence task there are no labels."""
    import webdataset

    blocks = [make_block(n, n, vocab_size, sentence_task) for n in (512, 512, 1, 77)]
    path = tmp_path / "train-000003.tar"
    entry = write_shard(path, blocks)
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"train-000003-{n:06d}" for n in range(4)]
    for sample, block in zip(samples, blocks, strict=True):
        members = {f"{name}.npy" for name in NAMES if sentence_task or name != "next_sentence_labels"}
        assert {name for name in sample if not name.startswith("__")} == members
        assert_equal({name.removesuffix(".npy"): array for name, array in sample.items()}, block)
        assert sample["tokens.npy"].dtype == (np.uint32 if vocab_size > 1 << 16 else np.uint16)
        assert int(sample["tokens.npy"].max()) > 0.99 * vocab_size or len(block) == 1
    assert (entry["instances"], entry["tokens"]) == (1102, sum(len(block.tokens) for block in blocks))
    assert [span[2] for span in entry["blocks"]] == [512, 512, 1, 77]


def test_spans_of_the_manifest_are_the_blocks(tmp_path):
    """The byte range of each block in the manifest entry parses to that block alone."""
    blocks = [make_block(n, n) for n in (3, 512, 20)]
    entry = write_shard(tmp_path / "train-000000.tar", blocks)
    data = (tmp_path / "train-000000.tar").read_bytes()
    for (start, length, _, _), block in zip(entry["blocks"], blocks, strict=True):
        assert_equal(vars(parse_block(data[start : start + length])), block)


def test_writing_is_byte_stable(tmp_path, monkeypatch):
    """The bytes depend on the blocks alone: not on the time, the folder, the user's umask or arrays' memory order."""
    import os
    import time

    blocks = [make_block(n, n) for n in (512, 20)]
    write_shard(tmp_path / "train-000000.tar", blocks)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    (tmp_path / "elsewhere").mkdir()
    strided = [replace(block, tokens=np.repeat(block.tokens, 2)[::2]) for block in blocks]
    before = os.umask(0o077)
    try:
        write_shard(tmp_path / "elsewhere/train-000000.tar", strided)
    finally:
        os.umask(before)
    assert (tmp_path / "train-000000.tar").read_bytes() == (
        tmp_path / "elsewhere/train-000000.tar"
    ).read_bytes()


def test_a_failed_write_leaves_no_shard(tmp_path):
    """When the blocks end in an error the shard's name is not there, so a half-written one is never taken for it."""

    def blocks():
        yield make_block(5, 0)
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        write_shard(tmp_path / "train-000000.tar", blocks())
    assert list(tmp_path.glob("*.tar")) == []


# Reading


def test_read_block_gives_every_block_from_many_threads(finished):
    """Eight threads that read all blocks at once get what plain WebDataset gives, and storage numbers add up."""
    import webdataset

    shard_set = ShardSet.open(finished)
    for split in ("train", "eval"):
        offsets = shard_set.block_offsets(split)
        shards = shard_set.manifest["splits"][split]["shards"]
        samples = [
            sample
            for shard in shards
            for sample in webdataset.WebDataset(str(finished / shard["name"]), shardshuffle=False).decode()
        ]
        assert offsets[0] == 0
        assert np.diff(offsets).tolist() == [len(sample["segment_a.npy"]) for sample in samples]
        assert offsets[-1] == shard_set.manifest["splits"][split]["counts"]["instances"]
        with ThreadPoolExecutor(8) as pool:
            jobs = [(n, pool.submit(shard_set.read_block, split, n)) for n in list(range(len(samples))) * 5]
        for number, job in jobs:
            assert_equal({name: samples[number][f"{name}.npy"] for name in NAMES}, job.result())
    shard_set.close()


def test_manifest_counts_are_those_of_the_blocks(finished):
    """Totals and the length histogram of the manifest are those of the arrays."""
    shard_set = ShardSet.open(finished)
    for split in ("train", "eval"):
        content = shard_set.manifest["splits"][split]
        blocks = [shard_set.read_block(split, n) for n in range(len(shard_set.block_offsets(split)) - 1)]
        lengths = np.concatenate([np.diff(block.offsets) for block in blocks])
        assert content["length_histogram"] == np.bincount(lengths, minlength=25).tolist()
        counts = content["counts"]
        assert counts["instances"] == len(lengths)
        assert counts["tokens"] == lengths.sum()
        assert counts["masked_tokens"] == sum(len(block.masked_lm_positions) for block in blocks)
        assert counts["random_next"] == sum(int(block.next_sentence_labels.sum()) for block in blocks)
    shard_set.close()


# Damage


def test_verify_accepts_an_intact_set(finished):
    """All shards, and nothing else, come back with their sizes."""
    tars = sorted(finished.glob("*.tar"))
    assert len(tars) >= 4
    assert sorted(verify(finished)) == [(path.name, path.stat().st_size) for path in tars]


def test_verify_finds_a_flipped_byte_anywhere(copy):
    """A changed byte at any place is found and its file named: 60 random places in every tar
    and tokenizer file, its first header and the padding at its end among them, and every 7th of the manifest."""
    draw = random.Random(0)
    for path in sorted(copy.rglob("*")):
        if not path.is_file() or path.name == ".lock":
            continue
        size = path.stat().st_size
        if path.name == MANIFEST:
            offsets = list(range(0, size, 7)) + [size - 1]
        else:
            ends = [draw.randrange(512) for _ in range(10)] + [
                size - 1 - draw.randrange(1024) for _ in range(10)
            ]
            offsets = [0, size - 1] + [place for place in ends if 0 <= place < size]
            offsets += [draw.randrange(size) for _ in range(40)]
        for offset in offsets:
            with flipped(path, offset, 1 << draw.randrange(8)):
                assert str(path) in refused(copy), (path, offset)
    open_and_verify(copy)


def test_read_block_finds_a_changed_byte(copy):
    """A byte that changes in a block after the set was opened is found when that block is read, and the others
    still can be read."""
    shard_set = ShardSet.open(copy)
    shard = shard_set.manifest["splits"]["train"]["shards"][1]
    first = len(shard_set.manifest["splits"]["train"]["shards"][0]["blocks"])
    start, length, *_ = shard["blocks"][0]
    draw = random.Random(1)
    for offset in [start, start + length - 1] + [start + draw.randrange(length) for _ in range(50)]:
        with flipped(copy / shard["name"], offset, 1 << draw.randrange(8)):
            with pytest.raises(UserError, match=f"{shard['name']}: block 0 .*crc32"):
                shard_set.read_block("train", first)
            shard_set.read_block("train", 0)
    shard_set.read_block("train", first)
    shard_set.close()


def test_wrong_files_are_refused_by_name(copy):
    """A missing, cut, longer or additional shard, a missing tokenizer file and a missing manifest are refused on
    opening, in a sentence with the file."""
    shard = copy / "train-000001.tar"
    data = shard.read_bytes()
    for damage, words in (
        (shard.unlink, "not in the folder"),
        (lambda: shard.write_bytes(data[:-512]), "bytes, but"),
        (lambda: shard.write_bytes(data + bytes(512)), "bytes, but"),
        (lambda: shard.write_bytes(b""), "0 bytes, but"),
    ):
        damage()
        sentence = refused(copy, ShardSet.open)
        assert str(shard) in sentence
        assert words in sentence
        shard.write_bytes(data)
    extra = copy / "train-000099.tar"
    extra.write_bytes(data)
    assert str(extra) in refused(copy, ShardSet.open)
    extra.unlink()
    model = copy / "tokenizer/sentencepiece.model"
    model.rename(model.with_suffix(".moved"))
    assert str(model) in refused(copy, ShardSet.open)
    model.with_suffix(".moved").rename(model)
    (copy / MANIFEST).unlink()
    assert str(copy / MANIFEST) in refused(copy, ShardSet.open)
    assert "no such shard folder" in refused(copy / "nowhere", ShardSet.open)


def test_another_tokenizer_is_refused(copy, finished):
    """A tokenizer that was trained on other text is not the one the ids belong to."""
    main(
        ["tokenizer", "--input", str(write_corpus(copy.parent / "other.txt", make_documents(100, seed=9)))]
        + ["--output", str(copy.parent / "other"), "--vocab_size", "200", "--workers", "1"]
    )
    shutil.copytree(copy.parent / "other", copy / "tokenizer", dirs_exist_ok=True)
    assert "not the tokenizer that the shards were made with" in refused(copy, ShardSet.open)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"7",
        b"not JSON",
        b"\xff\xfe",
        b'{"format": "bert-shards"}',
        b'{"format": null, "format_version": {}}',
    ],
)
def test_what_is_no_manifest_is_refused(copy, content):
    """Whatever stands in manifest.json instead of a manifest gives a sentence with the file."""
    (copy / MANIFEST).write_bytes(content)
    assert str(copy / MANIFEST) in refused(copy, ShardSet.open)


def test_another_format_version_is_refused(copy):
    """Version 2, whole and with the right digest, is refused with both versions."""
    manifest = json.loads((copy / MANIFEST).read_bytes())
    (copy / MANIFEST).write_bytes(manifest_bytes(manifest | {"format_version": 2}))
    sentence = refused(copy, ShardSet.open)
    assert "version 2" in sentence
    assert "reads 'bert-shards' version 1" in sentence


def test_impossible_numbers_are_refused(copy):
    """A shard whose checksums are right but whose arrays contradict each other is found by verify."""
    manifest = json.loads((copy / MANIFEST).read_bytes())
    shards = manifest["splits"]["train"]["shards"]
    good = make_block(9, 0, vocab_size=300)
    positions = good.masked_lm_positions.copy()
    positions[-1] = 999
    for changes in (
        {"masked_lm_positions": positions},
        {"tokens": good.tokens + 1000},
        {"segment_a": good.segment_a + 100},
        {"segment_a": good.segment_a[:-1]},
        {"masked_lm_offsets": good.masked_lm_offsets[:-1]},
        {"offsets": good.offsets + 1},
    ):
        shards[0] = write_shard(copy / shards[0]["name"], [replace(good, **changes)])
        (copy / MANIFEST).write_bytes(manifest_bytes(manifest))
        assert shards[0]["name"] in refused(copy), changes


def test_canonical_json_holds_any_name():
    """Equal values have one spelling, whatever the order of keys, and names that are not UTF-8 survive."""
    value = {"b": [1, 0.1], "a": {"name": "한글 \udcff"}}
    text = canonical_json(value)
    assert text == canonical_json({"a": value["a"], "b": value["b"]})
    assert json.loads(text.encode()) == value


def test_a_write_that_fails_leaves_nothing(tmp_path):
    """A file that cannot be written whole leaves neither itself nor its temporary, and the old one stays."""
    write_atomically(tmp_path / "a.json", b"old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(tmp_path / "a.json", b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": b"old"}
