"""Shard sets of random instances, through the real writer and reader."""

import numpy as np

from data_prep.shards import FORMAT, FORMAT_VERSION, MANIFEST, Block, ShardSet, manifest_bytes, write_shard

VOCAB_SIZE = 500
SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def make_block(rng: np.random.Generator, n: int, max_length: int, sentence_task: bool) -> Block:
    lengths = rng.integers(5, max_length + 1, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
    tokens = rng.integers(5, VOCAB_SIZE, offsets[-1]).astype(np.uint16)
    segment_a = (lengths - 2 if sentence_task else lengths).astype(np.uint16)
    tokens[offsets[:-1]] = SPECIAL_IDS["cls"]
    tokens[offsets[1:] - 1] = SPECIAL_IDS["sep"]
    masked = [np.sort(rng.choice(np.arange(1, k - 1), max(1, k // 7), replace=False)) for k in lengths]
    mask_offsets = np.concatenate([[0], np.cumsum([len(m) for m in masked])]).astype(np.uint32)
    inputs = rng.integers(4, VOCAB_SIZE, mask_offsets[-1]).astype(np.uint16)
    labels = rng.integers(0, 2, n).astype(np.uint8) if sentence_task else None
    positions = np.concatenate(masked).astype(np.uint16)
    return Block(tokens, offsets, segment_a, labels, mask_offsets, positions, inputs)


def make_shard_set(folder, train_sizes, eval_sizes=((7, 3),), max_length=24, sentence_task=True) -> ShardSet:
    """A shard set of random instances through the real writer; sizes are the blocks of each shard."""
    rng = np.random.default_rng(5)
    splits = {}
    for split, shards in (("train", train_sizes), ("eval", eval_sizes)):
        entries = [
            write_shard(
                folder / f"{split}-{number:06d}.tar",
                [make_block(rng, size, max_length, sentence_task) for size in sizes],
            )
            for number, sizes in enumerate(shards)
        ]
        splits[split] = {"shards": entries}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": {"masked_lm_prob": 0.2, "max_predictions": 4},
        "tokenizer": {"vocab_size": VOCAB_SIZE, "special_ids": SPECIAL_IDS, "files": {}},
        "splits": splits,
    }
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))
    return ShardSet.open(folder)
