"""Trouble that is injected into real runs: what is noticed, what is kept, where the run goes on, and when it ends."""

import json
import math
import random
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import injections
import pytest
import torch
from corpora import make_documents, write_corpus
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from forked_ranks import Ranks, run
from small_runs import make_tokenizer
from training_runs import arguments, assert_checkpoints_equal, deepspeed_json, flat, metrics

from data_prep.run import main as data_prep
from data_prep.shards import ShardSet
from pretraining import trouble
from pretraining.checkpoint import TrainState
from pretraining.trouble import HISTORY, SPIKE_STEPS, SPIKE_WINDOW, TroubleError, find_trouble, is_spike

STEPS = 10
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": STEPS},
}
NAN = float("nan")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards of some hundred instances."""
    folder = tmp_path_factory.mktemp("trouble")
    tokenizer = make_tokenizer(folder, eval_fraction=0.2)
    text = write_corpus(folder / "text.txt", make_documents(60, seed=5))
    options = ["--tokenizer", str(tokenizer), "--output", str(folder / "shards"), "--eval_fraction", "0.2"]
    assert not data_prep(["shards", "--input", str(text), *options, "--seq_len", "48", "--workers", "1"])
    assert ShardSet.open(folder / "shards").block_offsets("train")[-1] > 8 * 13
    return folder / "shards"


def program(shards: Path, output: Path, *options: str, **changes) -> list[str]:
    output.parent.mkdir(parents=True, exist_ok=True)
    config = deepspeed_json(output.parent, scheduler=SCHEDULE, **changes)
    return arguments(shards, output, "--log_interval", "2", "--save_interval", "3", *options, config=config)


def newest(output: Path) -> Path:
    return max((output / "checkpoints").glob("step-????????"))


def status(output: Path) -> dict:
    path = output / "status.json"
    return json.loads(path.read_text()) if path.is_file() else {"reason": ""}


def train_state(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "checkpoint.json").read_text())["train_state"]


def test_a_run_goes_back_and_on_without_the_bad_batches(shards, tmp_path):
    """NaN on one rank of two in steps 5 and 7, SIGKILL after the second rollback: all is that of a run that was told."""
    told, hit = tmp_path / "a" / "run", tmp_path / "b" / "run"
    skipped = [(52, 65), (91, 104)]
    run(program(shards, told), 2, tmp_path / "logs", partial(injections.skip_from_the_start, skipped))
    argv = program(shards, hit)
    ranks = Ranks(argv, 2, tmp_path / "logs", partial(injections.scale_losses, {54: NAN, 95: NAN}, rank=1))
    ranks.signal_when(lambda: "rollback 2" in status(hit)["reason"], signal.SIGKILL)
    assert ranks.wait() == [-signal.SIGKILL] * 2
    assert status(hit)["skipped_ranges"] == [[52, 65], [91, 104]]
    printed = run(argv, 2, tmp_path / "logs")
    # At the start and at the end.
    assert printed.count("leaves out the instances at the positions 52 to 64, 91 to 103") == 2
    assert_checkpoints_equal(newest(told), newest(hit))
    left, right = (train_state(newest(output)) for output in (told, hit))
    assert (left.pop("rollbacks"), right.pop("rollbacks")) == (0, 2)
    assert left == right and left["skipped_ranges"] == [[52, 65], [91, 104]]
    assert metrics(told) == metrics(hit)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curve = EventAccumulator(str(hit)).Reload().Scalars("train/loss")
    assert [event.step for event in curve] == [2, 4, 6, 8, 10]
    evidence = json.loads((hit / "trouble" / "step-5.json").read_text())
    assert (evidence["positions"], evidence["ranks_not_finite"]) == ([[52, 65]], [1])
    assert "gradient is not finite" in evidence["reason"] and evidence["gradient_norm"] is None
    assert [step for step, _ in evidence["losses"]] == [1, 2, 3, 4, 5] and evidence["losses"][4][1] is None
    assert all(norm > 0 for name, norm in evidence["parameter_norms"].items() if "weight" in name)
    settings = json.loads((hit / "settings.json").read_text())
    assert any("positions 52 to 64, 91 to 103" in note for note in settings["notes"])


def test_bad_weights_are_never_saved_and_rollbacks_end(shards, tmp_path):
    """NaN in one rank's weights after step 6, whose checkpoint is due; then in a loss: the second time the run ends."""
    output = tmp_path / "run"
    prepare = partial(
        injections.each,
        partial(injections.poison_weights, 70, rank=1),
        partial(injections.scale_losses, {95: NAN}, rank=0),
    )
    ranks = Ranks(program(shards, output, "--max_rollbacks", "1"), 2, tmp_path / "logs", prepare)
    assert ranks.wait() == [2, 2], ranks.printed()[-3000:]
    printed = ranks.printed()
    assert "step 6: a weight or moment is not finite" in printed and "gone back to step 3" in printed
    assert printed.count("as often as --max_rollbacks allows") == 1 and "Traceback" not in printed
    ended = status(output)
    assert ended["state"] == "failed" and "as --max_rollbacks allows" in ended["reason"]
    assert ended["skipped_ranges"] == [[65, 78]]
    assert sorted(path.name for path in (output / "trouble").iterdir()) == ["step-6.json", "step-7.json"]
    for path in (output / "checkpoints").glob("step-*/*.pt"):
        leaves = flat(torch.load(path, weights_only=False))
        assert all(leaf.isfinite().all() for leaf in leaves if isinstance(leaf, torch.Tensor))
    assert (output / "checkpoints" / "latest").read_text() == "step-00000006\n"
