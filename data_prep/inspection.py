"""What is in shards, in words: readable instances, the lengths, the padding that training will not compute."""

import numpy as np

from data_prep.errors import UserError
from data_prep.shards import SPLITS, Block, ShardSet
from data_prep.tokenizer import Tokenizer

BAR_WIDTH = 50
ROWS = 16


def print_instances(shard_set: ShardSet, split: str, start: int, count: int) -> None:
    """Print instances from storage number `start` on.

    Raises:
        UserError: there are not that many.
    """
    offsets = shard_set.block_offsets(split)
    if offsets[-1] == 0:
        raise UserError(f"--split {split}: {shard_set.folder} has no such instances")
    if not 0 <= start < offsets[-1]:
        raise UserError(
            f"--start {start}: the {split} split of {shard_set.folder} has instances 0 to {offsets[-1] - 1}"
        )
    tokenizer = Tokenizer(shard_set.tokenizer_folder)
    for number in range(start, min(start + count, int(offsets[-1]))):
        block_index = int(np.searchsorted(offsets, number, side="right")) - 1
        block = shard_set.read_block(split, block_index)
        print(f"{split} instance {number:,}")
        _print_instance(block, number - int(offsets[block_index]), tokenizer)


def _print_instance(block: Block, row: int, tokenizer: Tokenizer) -> None:
    tokens = block.tokens[block.offsets[row] : block.offsets[row + 1]]
    masked = slice(block.masked_lm_offsets[row], block.masked_lm_offsets[row + 1])
    shown = tokens.copy()
    shown[block.masked_lm_positions[masked]] = block.masked_lm_inputs[masked]
    pieces, originals = tokenizer.pieces(shown), tokenizer.pieces(tokens)
    a = int(block.segment_a[row])
    for position in block.masked_lm_positions[masked]:
        pieces[position] = f"{pieces[position]}⟨{originals[position]}⟩"
    if block.next_sentence_labels is not None:
        print(f"  next sentence: {'random' if block.next_sentence_labels[row] else 'actual'}")
    print(f"  {len(tokens)} tokens, {len(block.masked_lm_positions[masked])} to predict, shown⟨to predict⟩:")
    print(f"  A: {' '.join(pieces[:a])}")
    print(f"  B: {' '.join(pieces[a:])}\n")


def print_statistics(shard_set: ShardSet) -> None:
    """Print counts, the length histogram of training and the padding that it saves."""
    manifest = shard_set.manifest
    seq_len = manifest["settings"]["instances"]["seq_len"]
    for split in SPLITS:
        content = manifest["splits"][split]
        counts = content["counts"]
        if counts:
            print(
                f"{split}: {counts['instances']:,} instances in {len(content['shards'])} shards, {counts['tokens']:,} tokens, "
                f"{counts['masked_tokens'] / counts['tokens']:.1%} to predict, "
                f"{counts['random_next'] / counts['instances']:.1%} random next"
            )
    read = manifest["read"]
    print(
        f"read: {read['documents']:,} documents, {read['sentences']:,} sentences, {read['characters']:,} characters, "
        f"{read['unknown_tokens'] / max(1, read['tokens']):.3%} unknown pieces"
    )
    histogram = np.array(manifest["splits"]["train"]["length_histogram"])
    print("\ninstance lengths (training)")
    edges = np.unique(np.linspace(0, seq_len, ROWS + 1).astype(int))
    rows = [histogram[low + 1 : high + 1].sum() for low, high in zip(edges[:-1], edges[1:], strict=True)]
    for low, high, count in zip(edges[:-1], edges[1:], rows, strict=True):
        print(f"  {low + 1:4d}–{high:<4d} {count:>12,} {'█' * round(BAR_WIDTH * count / max(rows))}")
    real = int((histogram * np.arange(len(histogram))).sum())
    padded = int(histogram.sum()) * seq_len
    print(
        f"\npadding to {seq_len} would be {1 - real / padded:.1%} of all positions; none of it is computed in training"
    )
