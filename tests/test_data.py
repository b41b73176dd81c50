"""From shards to micro-batches: the right tensors, the same on every cluster and after a seek."""

import functools
import itertools
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.counter_rng import Stream, derive, key
from data_prep.errors import UserError
from data_prep.masking import draw_masks
from data_prep.shards import FORMAT, FORMAT_VERSION, MANIFEST, Block, ShardSet, manifest_bytes, write_shard
from pretraining.data import (
    BlockCache,
    TrainingBatches,
    cut_micro_batches,
    evaluation_batches,
    gather_instances,
    load_share,
    mask_policy,
)
from pretraining.order import Order, share

VOCAB_SIZE = 500
SPECIAL_IDS = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
SEED = 77
TENSORS = (
    "input_ids",
    "token_type_ids",
    "position_ids",
    "cls_positions",
    "masked_lm_positions",
    "masked_lm_labels",
    "next_sentence_labels",
)


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


@pytest.fixture(scope="module")
def shard_set(tmp_path_factory):
    """1,000 training instances in blocks of very different sizes in three shards."""
    sizes = [(100, 17, 1), (200, 150, 32, 100), (250, 150)]
    return make_shard_set(tmp_path_factory.mktemp("shards"), sizes, [(60, 60), (23,)])


@pytest.fixture(scope="module")
def order(shard_set):
    """An order with few lanes and small windows, so that a short test crosses many."""
    return Order(shard_set.block_offsets("train"), SEED, lanes=6, window=16)


@functools.lru_cache(maxsize=64)
def _read_block(shard_set: ShardSet, split: str, number: int) -> Block:
    return shard_set.read_block(split, number)


def read_instance(shard_set: ShardSet, split: str, storage: int) -> dict:
    """One instance by plain slicing of its block: the reference for everything below."""
    offsets = shard_set.block_offsets(split)
    number = int(np.searchsorted(offsets, storage, side="right")) - 1
    block, row = _read_block(shard_set, split, number), storage - int(offsets[number])
    tokens = block.tokens[block.offsets[row] : block.offsets[row + 1]]
    chosen = slice(block.masked_lm_offsets[row], block.masked_lm_offsets[row + 1])
    return {
        "tokens": tokens.tolist(),
        "segment_a": int(block.segment_a[row]),
        "label": None if block.next_sentence_labels is None else int(block.next_sentence_labels[row]),
        "positions": block.masked_lm_positions[chosen].tolist(),
        "inputs": block.masked_lm_inputs[chosen].tolist(),
    }


def mask_again(instance: dict, storage: int, epoch: int, policy) -> dict:
    """The instance with the dynamic masks of an epoch, drawn alone."""
    tokens = np.array(instance["tokens"], dtype=np.uint16)
    keys = derive(key(SEED, Stream.DYNAMIC_MASK, epoch), np.array([storage]))
    masks = draw_masks(tokens, np.array([0, len(tokens)]), keys, policy)
    return instance | {"positions": masks.positions.tolist(), "inputs": masks.inputs.tolist()}


def collate(instances: list[dict]) -> dict[str, list]:
    """What the tensors of a micro-batch must be, one token at a time."""
    batch = {name: [] for name in (*TENSORS, "lengths")}
    for instance in instances:
        start = len(batch["input_ids"])
        batch["cls_positions"].append(start)
        batch["lengths"].append(len(instance["tokens"]))
        shown = dict(zip(instance["positions"], instance["inputs"], strict=True))
        for position, token in enumerate(instance["tokens"]):
            batch["input_ids"].append(shown.get(position, token))
            batch["token_type_ids"].append(int(position >= instance["segment_a"]))
            batch["position_ids"].append(position)
        for position in instance["positions"]:
            batch["masked_lm_positions"].append(start + position)
            batch["masked_lm_labels"].append(instance["tokens"][position])
        batch["next_sentence_labels"].append(instance["label"])
    return batch


def as_lists(micro_batch) -> dict[str, list]:
    """A micro-batch as plain lists, after checking that every tensor is int64."""
    found = {"lengths": micro_batch.lengths.tolist()}
    for name in TENSORS:
        tensor = getattr(micro_batch, name)
        assert tensor is None or tensor.dtype == torch.int64
        found[name] = [None] * len(micro_batch.lengths) if tensor is None else tensor.tolist()
    return found


def split_up(micro_batches) -> list[tuple]:
    """The instances of some micro-batches as comparable tuples, in a canonical order."""
    found = []
    for batch in micro_batches:
        x = as_lists(batch)
        bounds = [*x["cls_positions"], len(x["input_ids"])]
        for row, (start, stop) in enumerate(itertools.pairwise(bounds)):
            masked = [
                (p - start, label)
                for p, label in zip(x["masked_lm_positions"], x["masked_lm_labels"], strict=True)
                if start <= p < stop
            ]
            columns = (x[name][start:stop] for name in ("input_ids", "token_type_ids", "position_ids"))
            found.append((*map(tuple, columns), tuple(masked), x["next_sentence_labels"][row]))
    return sorted(found)


def batches_of(order, shard_set, **options) -> TrainingBatches:
    defaults = {
        "consumed": 0,
        "train_batch_size": 40,
        "rank": 0,
        "world_size": 1,
        "masking": "dynamic",
        "seed": SEED,
        "max_instances": 7,
    }
    return TrainingBatches(order, shard_set, **defaults | options)


def steps_of(order, shard_set, steps, **options) -> list:
    with closing(batches_of(order, shard_set, **options)) as batches:
        return list(itertools.islice(batches, steps))


def contents(step) -> list[dict]:
    return [as_lists(batch) for batch in step.micro_batches]


@pytest.mark.parametrize("masking", ["static", "dynamic"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_tensors_equal_a_plain_reference(order, shard_set, masking, world_size):
    """Every tensor over 2.4 epochs, whose ends lie inside batches, is what one token at a time gives."""
    rank = world_size - 1
    policy = mask_policy(shard_set)
    steps = steps_of(
        order, shard_set, 8, masking=masking, train_batch_size=300, world_size=world_size, rank=rank
    )
    for number, step in enumerate(steps):
        assert (step.start, step.stop) == (300 * number, 300 * number + 300)
        g = share(step.start, step.stop, rank, world_size)
        instances = []
        for position, storage in zip(g.tolist(), order.instances(g).tolist(), strict=True):
            instance = read_instance(shard_set, "train", storage)
            if masking == "dynamic":
                instance = mask_again(instance, storage, position // 1000, policy)
            instances.append(instance)
        instances.sort(key=lambda instance: -len(instance["tokens"]))
        expected = [collate(instances[first : first + 7]) for first in range(0, len(instances), 7)]
        assert contents(step) == expected
        assert step.instances == len(instances)
        assert step.tokens == sum(len(instance["tokens"]) for instance in instances)
        assert step.masked_lm_count == sum(len(instance["positions"]) for instance in instances)
        assert step.max_length == len(instances[0]["tokens"])


def test_without_a_sentence_task_there_are_no_labels(tmp_path):
    """Shards without next-sentence labels give None and one segment."""
    shard_set = make_shard_set(tmp_path, [(30, 20)], sentence_task=False)
    order = Order(shard_set.block_offsets("train"), SEED)
    for step in steps_of(order, shard_set, 2, train_batch_size=25):
        for batch in step.micro_batches:
            assert batch.next_sentence_labels is None
            assert not batch.token_type_ids.any()


def test_masks_change_with_the_epoch_only_if_dynamic(order, shard_set):
    """Static masks are those of the shards in every epoch; dynamic ones differ from those and each other."""

    def positions(masking, epoch):
        (step,) = steps_of(order, shard_set, 1, masking=masking, consumed=1000 * epoch, train_batch_size=1000)
        rows = split_up(step.micro_batches)
        tokens = []
        for shown, _, _, masked, _ in rows:
            original = list(shown)
            for position, label in masked:
                original[position] = label
            tokens.append((tuple(original), masked))
        return dict(tokens)

    stored, again = positions("static", 0), positions("static", 1)
    first, second = positions("dynamic", 0), positions("dynamic", 1)
    assert len(stored) == 1000 and stored == again
    assert stored.keys() == first.keys() == second.keys()
    for a, b in ((stored, first), (first, second)):
        assert np.mean([a[tokens] == b[tokens] for tokens in a]) < 0.3


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 12, 17, 60])
def test_the_global_batch_is_the_same_on_every_cluster(order, shard_set, world_size):
    """Masked instances of all ranks together = those of one rank, with more ranks than instances too."""
    alone = steps_of(order, shard_set, 30)
    ranks = [steps_of(order, shard_set, 30, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        together = itertools.chain(*(part.micro_batches for part in parts))
        assert split_up(together) == split_up(step.micro_batches)
        assert sum(part.masked_lm_count for part in parts) == step.masked_lm_count
        assert sum(part.tokens for part in parts) == step.tokens
    if world_size > 40:
        assert any(len(part.micro_batches) == 0 and part.max_length == 0 for part in ranks[-1])


def test_a_seek_gives_what_a_replay_gives(order, shard_set):
    """Starting in the middle, in another epoch too, gives the batches of a run that came there by itself."""
    replayed = steps_of(order, shard_set, 60)
    for first in (1, 13, 24, 25, 49):
        sought = steps_of(order, shard_set, 3, consumed=40 * first)
        for a, b in zip(sought, replayed[first:], strict=False):
            assert (a.start, a.stop) == (b.start, b.stop)
            assert contents(a) == contents(b)


def test_prefetch_depth_changes_nothing(order, shard_set):
    """Depths of 1, 2 and 9 yield the same steps."""
    reference = [contents(step) for step in steps_of(order, shard_set, 20, depth=1)]
    for depth in (2, 9):
        assert [contents(step) for step in steps_of(order, shard_set, 20, depth=depth)] == reference


def test_prefetch_stays_its_depth_ahead(order, shard_set):
    """The thread prepares `depth` steps and then waits, so memory is bounded; a step taken lets it go on."""
    with closing(batches_of(order, shard_set, depth=3)) as batches:
        for taken in range(3):
            while batches._ready.qsize() < 3:
                threading.Event().wait(0.001)
            threading.Event().wait(0.02)
            assert batches._ready.qsize() == 3
            assert batches._consumed == 40 * (taken + 3)
            next(batches)


def test_skipped_ranges_are_left_out(order, shard_set):
    """Skipped positions are trained by nobody, everything around them is, and the batch keeps its size."""
    skipped = [(50, 90), (130, 131), (1000, 1500)]
    steps = steps_of(order, shard_set, 20, skipped_ranges=skipped)
    seen = [g for step in steps for start, stop in step.ranges for g in range(start, stop)]
    out = {g for start, stop in skipped for g in range(start, stop)}
    assert seen == [g for g in range(steps[-1].stop) if g not in out]
    assert [step.instances for step in steps] == [40] * 20
    step = steps[1]
    assert (step.start, step.stop, step.ranges) == (40, 120, [(40, 50), (90, 120)])
    g = np.concatenate([np.arange(40, 50), np.arange(90, 120)])
    cache = BlockCache(shard_set, "train")
    options = {"masking": "dynamic", "seed": SEED, "policy": mask_policy(shard_set)}
    expected = cut_micro_batches(load_share(order, cache, g, **options), 7)
    assert contents(step) == [as_lists(batch) for batch in expected]


def test_blocks_are_read_as_the_order_promises(tmp_path):
    """One rank reads each block once per epoch and once more per lane cut in it; R ranks no more."""
    shard_set = make_shard_set(tmp_path, [(64,) * 40], max_length=8)
    total, lanes = 64 * 40, 6
    order = Order(shard_set.block_offsets("train"), SEED, lanes=lanes, window=32)
    lane_starts, _ = order.lane_span(np.arange(lanes))
    cuts = sum(int(start) % 64 != 0 for start in lane_starts[1:])
    for world_size in (1, 2, 3, 6):
        read = 0
        for rank in range(world_size):
            with closing(
                batches_of(order, shard_set, rank=rank, world_size=world_size, train_batch_size=total // 20)
            ) as batches:
                instances = sum(step.instances for step in itertools.islice(batches, 20))
                assert abs(instances - total / world_size) <= 20
            batches.close()
            cache = BlockCache(shard_set, "train")
            for start in range(0, total, 128):
                g = share(start, start + 128, rank, world_size)
                load_share(order, cache, g, masking="static", seed=0, policy=None)
            read += cache.blocks_read
        assert 40 <= read <= 40 + cuts


def test_memory_is_flat_over_epochs(tmp_path):
    """After the first epoch the cache sets no more memory aside, and holds about two blocks per lane."""
    shard_set = make_shard_set(tmp_path, [(64,) * 60], max_length=8)
    total, lanes = 64 * 60, 4
    order = Order(shard_set.block_offsets("train"), SEED, lanes=lanes, window=32)
    cache = BlockCache(shard_set, "train")
    aside, held = [], []
    for start in range(0, 8 * total, 96):
        g = np.arange(start, start + 96)
        load_share(order, cache, g, masking="static", seed=0, policy=None)
        aside.append(sum(column.nbytes for column in cache.columns.values()))
        held.append(int((cache._block_in_slot >= 0).sum()))
    epoch = total // 96
    assert max(held) <= 3 * lanes
    assert np.mean(held) < 2.2 * lanes
    assert aside[-1] == aside[2 * epoch]
    assert cache.blocks_read <= 8 * (60 + lanes)


def test_columns_widen_for_longer_blocks(tmp_path):
    """Blocks that are much longer than the first ones are held beside them without harm."""
    rng = np.random.default_rng(1)
    blocks = [
        make_block(rng, n, length, True) for n, length in ((3, 6), (4, 6), (50, 200), (2, 6), (90, 150))
    ]

    class InMemory:
        """The part of ShardSet that a cache uses."""

        def block_offsets(self, _split):
            return np.concatenate([[0], np.cumsum([len(block) for block in blocks])])

        def read_block(self, _split, number):
            return blocks[number]

    in_memory = InMemory()
    cache = BlockCache(in_memory, "train")
    for storage in ([0, 5], [0, 6, 8, 50], [58, 0, 148, 60]):
        numbers = np.array(storage)
        slot, row = cache.hold(numbers, 0, np.full(len(numbers), 9))
        for s, r, number in zip(slot, row, storage, strict=True):
            expected = read_instance(in_memory, "train", number)["tokens"]
            start, stop = cache.columns["offsets"][s, r : r + 2]
            assert cache.columns["tokens"][s, start:stop].tolist() == expected
    assert cache.blocks_read == 5


def corrupt(shard_set: ShardSet, split: str, shard: int, block: int) -> None:
    entry = shard_set.manifest["splits"][split]["shards"][shard]
    offset, length = entry["blocks"][block][:2]
    with open(shard_set.folder / entry["name"], "r+b") as file:
        file.seek(offset + length // 2)
        byte = file.read(1)
        file.seek(offset + length // 2)
        file.write(bytes([byte[0] ^ 1]))


def test_a_corrupted_block_stops_the_consumer(tmp_path):
    """A flipped bit is a UserError naming the shard, raised where the loop asks, each time, and no hang."""
    shard_set = make_shard_set(tmp_path, [(50, 50), (50, 50)])
    order = Order(shard_set.block_offsets("train"), SEED, lanes=2, window=16)
    corrupt(shard_set, "train", 1, 0)
    with closing(batches_of(order, shard_set, train_batch_size=10)) as batches:
        with pytest.raises(UserError, match=r"train-000001\.tar.*crc32"):
            for step in itertools.islice(batches, 40):
                assert step.instances == 10
        with pytest.raises(UserError, match="crc32"):
            next(batches)
        batches._thread.join(timeout=10)
        assert not batches._thread.is_alive()
    corrupt(shard_set, "eval", 0, 1)
    with pytest.raises(UserError, match=r"eval-000000\.tar"):
        list(evaluation_batches(shard_set, "eval", 0, 1, 4))


def test_close_ends_the_thread(order, shard_set):
    """`close` ends the thread at once, waiting or working, may be called twice, and iteration stops."""
    batches = batches_of(order, shard_set, depth=2)
    next(batches)
    batches.close()
    batches.close()
    assert not batches._thread.is_alive()
    assert len(list(batches)) <= 2


def test_tensors_are_built_on_demand(order, shard_set):
    """A share holds 2 bytes per token; its micro-batches are built anew, in any order, always equal."""
    (step,) = steps_of(order, shard_set, 1, train_batch_size=300)
    assert step.micro_batches.instances.tokens.dtype == np.uint16
    assert len(step.micro_batches) == -(-300 // 7)
    last, again = step.micro_batches[-1], step.micro_batches[len(step.micro_batches) - 1]
    assert as_lists(last) == as_lists(again) == contents(step)[-1]
    last.input_ids.zero_()
    assert as_lists(step.micro_batches[-1]) == as_lists(again)
    with pytest.raises(IndexError):
        step.micro_batches[len(step.micro_batches)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 90), st.integers(1, 40), st.one_of(st.none(), st.integers(1, 300)), st.integers(0, 10**6)
)
def test_cutting(n, max_instances, max_tokens, seed):
    """Both bounds hold (but for a long instance alone), lengths fall, nothing is lost, no cut is needless."""
    block = make_block(np.random.default_rng(seed), n, 60, True)
    instances = replace(
        block,
        offsets=block.offsets.astype(np.int64),
        masked_lm_offsets=block.masked_lm_offsets.astype(np.int64),
    )
    found = list(cut_micro_batches(instances, max_instances, max_tokens))
    lengths = np.concatenate([batch.lengths for batch in found])
    assert lengths.tolist() == sorted(np.diff(block.offsets).tolist(), reverse=True)
    assert split_up(found) == split_up(cut_micro_batches(instances, n))
    limit = max_tokens or 10**9
    for batch in found:
        assert len(batch.lengths) <= max_instances
        assert batch.lengths.sum() <= limit or len(batch.lengths) == 1
    for batch, following in itertools.pairwise(found):
        full = len(batch.lengths) == max_instances
        assert full or batch.lengths.sum() + following.lengths[0] > limit


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_gather_any_instances(shard_set, data):
    """Any storage numbers, in any order and repeated, give those instances with their stored masks."""
    numbers = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=30))
    found = gather_instances(shard_set, "train", np.array(numbers))
    assert len(found) == len(numbers)
    for row, number in enumerate(numbers):
        expected = read_instance(shard_set, "train", number)
        assert found.tokens[found.offsets[row] : found.offsets[row + 1]].tolist() == expected["tokens"]
        chosen = slice(found.masked_lm_offsets[row], found.masked_lm_offsets[row + 1])
        assert found.masked_lm_positions[chosen].tolist() == expected["positions"]
        assert found.masked_lm_inputs[chosen].tolist() == expected["inputs"]
        assert (found.segment_a[row], found.next_sentence_labels[row]) == (
            expected["segment_a"],
            expected["label"],
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("limit", "count"), [(0, 143), (50, 50), (10**6, 143), (3, 3)])
def test_evaluation_sees_everything_once(shard_set, world_size, limit, count, monkeypatch):
    """All ranks together evaluate each held-out instance once, with its stored masks."""
    monkeypatch.setattr("pretraining.data._EVALUATION_POOL", 20)
    found = [
        list(evaluation_batches(shard_set, "eval", rank, world_size, 8, limit)) for rank in range(world_size)
    ]
    expected = collate([read_instance(shard_set, "eval", number) for number in range(count)])
    everything = itertools.chain(*found)
    one_batch = cut_micro_batches(gather_instances(shard_set, "eval", np.arange(count)), count)
    assert split_up(everything) == split_up(one_batch)
    assert sum(len(batch.lengths) for rank in found for batch in rank) == len(expected["lengths"])
    for rank, batches in enumerate(found):
        assert sum(len(batch.lengths) for batch in batches) == len(range(rank, count, world_size))
        assert all(len(batch.lengths) <= 8 for batch in batches)


def test_mask_policy_is_that_of_the_shards(shard_set):
    """Dynamic masks follow the rate and the bound of the stored ones, or have a rate of their own and no bound; [CLS] is
    never masked."""
    policy = mask_policy(shard_set)
    assert (policy.rate, policy.max_predictions, policy.mask_id) == (0.2, 4, SPECIAL_IDS["mask"])
    assert set(policy.never_masked_ids) == {0, 2, 3, 4}
    other = mask_policy(shard_set, 0.4)
    assert (other.rate, other.max_predictions, other.mask_id) == (0.4, None, policy.mask_id)
