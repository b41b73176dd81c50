"""A batch of 65,536 instances in one optimizer step, by accumulation on two ranks: its memory and its gradient."""

import functools
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from corpora import make_documents, write_corpus
from forked_ranks import run
from injections import watch_steps
from small_runs import make_tokenizer, random_model, tiny_config, write_run
from training_runs import deepspeed_json, metrics

from data_prep.run import main as data_prep
from data_prep.shards import ShardSet
from pretraining.data import TrainingBatches
from pretraining.micro_batches import MicroBatches
from pretraining.order import DEFAULT_LANES, DEFAULT_WINDOW, Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEQ_LEN, MICRO_BATCH, PART = 16, 64, 1000
LARGE, SMALL, SMALL_STEPS = 65_536, 4_096, 3
# Two steps are prepared ahead of the one that is trained: three times 32,768 instances of 2 bytes per token and some
# for lengths and masks are 6 MB, what is in hand while the next are prepared about as much again.
FLAT = 12.0  # MB
NVIDIAS = {"warmup_ratio": 0.2843, "degree": 0.5, "rebase": False, "first_step": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Shards of more instances than the batch, all of SEQ_LEN tokens, and an encoder of random weights."""
    folder = tmp_path_factory.mktemp("large_batch")
    tokenizer = make_tokenizer(folder)
    text = write_corpus(folder / "text.txt", make_documents(1500, seed=5))
    files = ["--input", str(text), "--tokenizer", str(tokenizer), "--output", str(folder / "shards")]
    options = ["--seq_len", str(SEQ_LEN), "--duplicates", "9", "--eval_fraction", "0.02", "--workers", "1"]
    assert not data_prep(["shards", *files, *options])
    write_run(folder / "start", random_model(tiny_config()), tokenizer)
    return folder


@pytest.fixture(scope="module")
def train(home):
    """Train in one step after the other on two ranks, and give the folder with what was written down."""

    @functools.cache
    def train_batch(batch: int, steps: int) -> Path:
        folder = home / f"batch-{batch}"
        folder.mkdir()
        changes = {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "scheduler": {"type": "WarmupPolynomialLR", "params": NVIDIAS},
        }
        paths = {
            "--deepspeed_config": deepspeed_json(folder, **changes),
            "--data": home / "shards",
            "--init_from": home / "start",
            "--output": folder / "run",
        }
        argv = [str(part) for pair in paths.items() for part in pair]
        argv += ["--max_steps", str(steps), "--dropout", "0", "--log_interval", "1"]
        run(argv, 2, folder / "logs", functools.partial(watch_steps, folder))
        return folder

    return train_batch


def steps_of(folder: Path, rank: int) -> list[dict]:
    return json.loads((folder / f"rank-{rank}.json").read_text())


def test_memory_is_flat_over_the_batch(train):
    """On each rank a step of 65,536 instances, 512 micro-batches, takes no more than FLAT MB more than one of 4,096."""
    small, large = train(SMALL, SMALL_STEPS), train(LARGE, 1)
    for rank in range(2):
        peaks = [[step["peak"] for step in steps_of(folder, rank)] for folder in (small, large)]
        print(f"rank {rank}: peaks {peaks} MB, seconds {steps_of(large, rank)[0]['seconds']:.1f}")
        assert (len(peaks[0]), len(peaks[1])) == (SMALL_STEPS, 1)
        assert peaks[1][0] < max(peaks[0]) + FLAT
    rates = [line["optimizer/learning_rate"] for line in metrics(small / "run") if "train/loss" in line]
    assert rates == pytest.approx([2e-3 * (2 / 3) ** 0.5, 2e-3 * (1 / 3) ** 0.5, 0.0])


def parts_of_the_large_batch(home: Path) -> MicroBatches:
    """The first global batch, as one process cuts it into parts of PART instances."""
    shard_set = ShardSet.open(home / "shards")
    assert shard_set.block_offsets("train")[-1] > LARGE
    order = Order(shard_set.block_offsets("train"), 0, DEFAULT_LANES, DEFAULT_WINDOW)
    batches = TrainingBatches(
        order, shard_set, consumed=0, train_batch_size=LARGE, rank=0, world_size=1, masking="dynamic", seed=0,
        max_instances=PART,
    )  # fmt: skip
    with closing(batches):
        return next(batches).micro_batches


def test_the_gradient_is_the_sum_of_its_parts(home, train):
    """The gradient that the one update sees, of 1,024 micro-batches on two ranks, is that of 66 parts which one process
    computes one by one and adds up in float64: to 1e-5 of its length, over all and for each parameter."""
    parts = parts_of_the_large_batch(home)
    masked = sum(len(part.masked_lm_labels) for part in parts)
    assert sum(len(part.lengths) for part in parts) == LARGE and masked > LARGE
    model = random_model(tiny_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    total = 0.0
    for part in parts:
        output = model(part)
        loss = output.masked_lm_loss_sum / masked + output.next_sentence_loss_sum / LARGE
        loss.backward()
        total += loss.item()
        for name, parameter in model.named_parameters():
            expected[name] += parameter.grad.double()
            parameter.grad = None
    folder = train(LARGE, 1)
    found = torch.load(folder / "gradients.pt")
    assert found.keys() == expected.keys()
    length = torch.cat([value.flatten() for value in expected.values()]).norm()
    off = {name: (found[name].double() - value).norm() for name, value in expected.items()}
    worst = max(off, key=lambda name: off[name] / expected[name].norm())
    whole, single = torch.stack([*off.values()]).norm() / length, off[worst] / expected[worst].norm()
    print(f"relative difference {whole:.1e}, of {worst} alone {single:.1e}")
    assert whole < 1e-5 and single < 1e-5
    (line,) = [line for line in metrics(folder / "run") if "train/loss" in line]
    assert line["train/loss"] == pytest.approx(total, rel=1e-6)
    assert line["progress/samples"] == LARGE
