"""How even the work of a step is, with micro-batches of a fixed number of instances and with a token budget.

    python tests/benchmarks/bench_micro_batches.py data/shards --train_batch_size 256 --ranks 8 --micro_batch_size 8

Plays the steps of every rank on the real order and the real lengths of a shard set, without training. The token budget
is micro_batch_size × seq_len: what a fixed micro-batch needs memory for at worst. Work is counted in tokens, and in
FLOPs of an encoder layer and its attention, 8·H² + 4·H·F per token and 4·H·length² per instance.
"""

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np

from data_prep.ragged import offsets_of
from data_prep.shards import ShardSet
from pretraining.micro_batches import micro_batch_bounds
from pretraining.order import DEFAULT_LANES, DEFAULT_WINDOW, Order, step_share


def lengths_of(shard_set: ShardSet) -> np.ndarray:
    """Tokens of every training instance, int64 [N]."""
    blocks = len(shard_set.block_offsets("train")) - 1
    return np.concatenate(
        [np.diff(shard_set.read_block("train", block).offsets.astype(np.int64)) for block in range(blocks)]
    )


def cut(lengths: np.ndarray, max_instances: int, max_tokens: int | None) -> list[np.ndarray]:
    """The lengths of each micro-batch of a share."""
    lengths = np.sort(lengths)[::-1]
    bounds = micro_batch_bounds(offsets_of(lengths), max_instances, max_tokens)
    return [lengths[first:stop] for first, stop in itertools.pairwise(bounds)]


def work(lengths: np.ndarray, hidden_size: int) -> float:
    """FLOPs of one layer's forward pass over instances of these lengths, with an inner size of 4·hidden_size."""
    return 24 * hidden_size**2 * lengths.sum() + 4 * hidden_size * (lengths.astype(float) ** 2).sum()


def max_over_mean(values: np.ndarray) -> float:
    """1 when all are equal."""
    return float(np.max(values) / np.mean(values))


def measure(
    lengths: np.ndarray, order: Order, arguments: argparse.Namespace, bounds: tuple[int, int | None]
) -> dict:
    """Means over the steps, and the largest micro-batch in any."""
    rows = []
    largest = 0
    for step in range(arguments.steps):
        batch = (step * arguments.train_batch_size, (step + 1) * arguments.train_batch_size)
        ranks = []
        for rank in range(arguments.ranks):
            mine = lengths[order.instances(step_share([batch], rank, arguments.ranks))]
            ranks.append([(len(x), x.sum(), work(x, arguments.hidden_size)) for x in cut(mine, *bounds)])
        micro_batches = np.array([piece for pieces in ranks for piece in pieces])
        per_rank = np.array([np.sum(pieces, axis=0) for pieces in ranks])
        steps = np.array([len(pieces) for pieces in ranks])
        largest = max(largest, int(micro_batches[:, 1].max()))
        rows.append(
            {
                "tokens": max_over_mean(per_rank[:, 1]),
                "work": max_over_mean(per_rank[:, 2]),
                "micro-steps": steps.mean(),
                "most": steps.max(),
                "micro-batch tokens": max_over_mean(micro_batches[:, 1]),
                "micro-batch work": max_over_mean(micro_batches[:, 2]),
                "tokens each": micro_batches[:, 1].mean(),
            }
        )
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]} | {"largest": largest}


def main(argv: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", type=Path)
    parser.add_argument("--train_batch_size", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro_batch_size", type=int, default=8, help="of the fixed micro-batches")
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args(argv)
    shard_set = ShardSet.open(arguments.shards)
    lengths = lengths_of(shard_set)
    order = Order(shard_set.block_offsets("train"), 0, DEFAULT_LANES, DEFAULT_WINDOW)
    seq_len = shard_set.settings["instances"]["seq_len"]
    budget = arguments.micro_batch_size * seq_len
    print(
        f"{len(lengths):,} instances of {lengths.mean():.0f} tokens ({lengths.mean() / seq_len:.0%} of {seq_len}); "
        f"batch {arguments.train_batch_size} on {arguments.ranks} ranks, means of {arguments.steps} steps\n"
    )
    print(
        "| micro-batches | micro-steps, mean | most of a rank | tokens of one, mean | largest | max/mean of one: tokens, work | max/mean of ranks: tokens, work |"
    )
    print("|---|---|---|---|---|---|---|")
    ways = {
        f"{arguments.micro_batch_size} instances": (arguments.micro_batch_size, None),
        f"{budget:,} tokens": (arguments.train_batch_size, budget),
    }
    for name, bounds in ways.items():
        x = measure(lengths, order, arguments, bounds)
        print(
            f"| {name} | {x['micro-steps']:.2f} | {x['most']:.2f} | {x['tokens each']:,.0f} | {x['largest']:,} | "
            f"{x['micro-batch tokens']:.2f}, {x['micro-batch work']:.2f} | {x['tokens']:.3f}, {x['work']:.3f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
