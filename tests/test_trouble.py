"""Trouble that is injected into real runs: what is noticed, what is kept, where the run goes on, and when it ends."""

import itertools
import json
import math
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import injections
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from forked_ranks import Ranks, run
from small_runs import make_training_shards
from training_runs import arguments, assert_checkpoints_equal, deepspeed_json, flat, metrics

from data_prep.shards import ShardSet
from pretraining import trouble
from pretraining.arguments import parse_arguments
from pretraining.checkpoint import TrainState
from pretraining.trouble import (
    SPIKE_STEPS,
    SPIKE_WINDOW,
    TroubleError,
    find_trouble,
    is_spike,
    loss_scale_cannot_fall,
)

STEPS = 8
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": STEPS},
}
NAN = float("nan")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards of some hundred instances."""
    return make_training_shards(tmp_path_factory.mktemp("trouble"), at_least=8 * 13 + 1)


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


@pytest.mark.parametrize("stage", [2, 0])
def test_a_run_goes_back_and_on_without_the_bad_batches(shards, tmp_path, stage):
    """NaN on one rank of two in steps 5 and 7, SIGKILL after the second rollback: all is that of a run that was told,
    with ZeRO and without."""
    zero = {"zero_optimization": {"stage": stage}}
    told, hit = tmp_path / "a" / "run", tmp_path / "b" / "run"
    skipped = [(52, 65), (91, 104)]
    run(program(shards, told, **zero), 2, tmp_path / "logs", partial(injections.skip_from_the_start, skipped))
    argv = program(shards, hit, **zero)
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
    assert [event.step for event in curve] == [2, 4, 6, 8]
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


def test_a_loss_scale_at_its_floor_and_a_spike_are_trouble(shards, tmp_path):
    """fp16 with DeepSpeed's scaler: one overflow is passed over, a second at the floor is not, nor are two high losses."""
    output = tmp_path / "run"
    prepare = partial(
        injections.each,
        partial(injections.tiny_in_fp16, {}),
        injections.small_spikes,
        partial(injections.scale_losses, {8: NAN, 12: NAN, 28: 3.0, 32: 3.0}, rank=0),
    )
    fp16 = {"enabled": True, "initial_scale_power": 5, "min_loss_scale": 16, "hysteresis": 1}
    options = ("--save_interval", "1", "--spike_factor", "4", "--keep", "9", "--eval_instances", "4")
    options += ("--log_interval", "1")
    argv = program(shards, output, *options, "--max_steps", "7", fp16=fp16, train_batch_size=4)
    printed = run(argv, 1, tmp_path / "logs", prepare)
    floor, spike = (line for line in printed.splitlines() if "(rollback " in line)
    assert "step 4: gradients overflow at the smallest loss scale, 16 (min_loss_scale)" in floor
    assert "gone back to step 1 and leaves out the batches of steps 2 to 4" in floor
    evidence = json.loads((output / "trouble" / "step-4.json").read_text())
    assert evidence["loss_scale"] == 16 and evidence["positions"] == [[4, 16]]
    assert [loss is None for _, loss in evidence["losses"]] == [False, False, True, True]
    assert (
        "step 6: the loss is" in spike
        and "gone back to step 3 and leaves out the batches of steps 4 to 6" in spike
    )
    state = train_state(newest(output))
    assert state["skipped_ranges"] == [[4, 16], [24, 36]] and state["rollbacks"] == 2
    assert state["skipped_steps"] == 0 and state["step"] == 7 and status(output)["state"] == "finished"
    # It had fallen to 16 in the steps that were left out.
    assert [line["optimizer/loss_scale"] for line in metrics(output) if "train/loss" in line] == [32] * 7


def scalers() -> list[DynamicLossScaler]:
    return [
        DynamicLossScaler(2.0**power, 10, 4.0, hysteresis, consecutive, dtype=torch.float32)
        for power in (2, 3, 4)
        for hysteresis in (1, 2, 3)
        for consecutive in (False, True)
    ]


def test_the_floor_is_where_deepspeed_would_raise(monkeypatch):
    """Whatever the scale and the hysteresis: the scale cannot fall exactly where DeepSpeed's scaler raises its error."""
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    draw, raised = random.Random(1), 0
    for ours, theirs in zip(scalers(), scalers(), strict=True):
        for _ in range(40):
            overflow, cannot_fall = draw.random() < 0.6, loss_scale_cannot_fall(ours)
            ours.update_scale(overflow)
            if overflow and cannot_fall:
                raised += 1
                with pytest.raises(Exception, match="already at minimum"):
                    theirs.update_scale(overflow)
                break
            theirs.update_scale(overflow)
            assert ours.cur_scale == theirs.cur_scale
    assert raised > 10 and loss_scale_cannot_fall(LossScaler(128.0))


def found(losses: list[float | None], loss: float, scaler, cannot_fall: bool = True, factor: float = 0.0):
    """Steps and positions of the trouble that is found at the end of these losses, 10 instances a step; or None."""
    history = [(100 + 10 * i, value) for i, value in enumerate(losses)]
    state = TrainState(0, 1, 1, "", step=50, consumed=100 + 10 * len(losses), history=history)
    try:
        find_trouble(state, loss, scaler, cannot_fall, factor)
    except TroubleError as error:
        return error.first_step, error.step, error.start, error.stop
    return None


def test_rules_of_trouble():
    """What is trouble with and without dynamic loss scaling, and which steps are at fault."""
    fixed, dynamic = LossScaler(1.0), DynamicLossScaler(2.0**4, 10, 1.0, 1, False)
    assert found([2.0, 1.9], 1.9, fixed) is None
    for scaler in (fixed, dynamic):
        assert (
            found([2.0, NAN], NAN, scaler) == found([2.0, math.inf], math.inf, scaler) == (50, 50, 110, 120)
        )
    assert found([2.0, None], 1.9, fixed) == (50, 50, 110, 120)
    assert found([2.0, None], NAN, dynamic, cannot_fall=False) is None
    assert found([2.1, 2.0, None, None, None], NAN, dynamic) == (47, 50, 110, 150)
    assert found([None, None], NAN, dynamic) == (49, 50, 100, 120)  # the history goes no further back


def test_a_spike_lasts_and_stands_out():
    """Five losses in a row beyond the deviations and the tenth are a spike; four, slow rises, noise and falls are not."""
    draw = random.Random(2)
    calm = [7 - i / 100 + draw.gauss(0, 0.05) for i in range(SPIKE_WINDOW)]
    high = [8.1] * SPIKE_STEPS
    assert is_spike(calm + high, 5) and not is_spike(calm[1:] + high, 5)
    assert not is_spike(calm + high, 20)
    assert not is_spike(calm + [*high[1:], 6.5], 5) and not is_spike([*calm, 6.5, *high[1:]], 5)
    assert not is_spike([2.0] * SPIKE_WINDOW + [2.19] * SPIKE_STEPS, 5)
    assert is_spike([2.0] * SPIKE_WINDOW + [2.21] * SPIKE_STEPS, 5)
    for slope in (-0.02, 0.0, 0.01):
        losses = [5 + slope * i + draw.gauss(0, 0.05) for i in range(1000)]
        assert not any(is_spike(losses[:end], 10) for end in range(1000))
    dynamic = DynamicLossScaler(2.0**4, 10, 1.0, 1, False)
    assert found(calm + high, 8.1, dynamic, factor=5.0) == (45, 50, 1040, 1100)
    assert found(calm + high, 8.1, dynamic, factor=0.0) is None
    row = [None, *calm, *high[1:], None, None, 8.1]  # updates that were skipped have no loss
    assert found(row, 8.1, dynamic, cannot_fall=False, factor=5.0)[:2] == (43, 50)


def test_skipped_ranges_stay_sorted_and_disjoint():
    """Random steps that are skipped one after the other: exactly their positions are left out, whatever touches whatever."""
    draw = random.Random(3)
    for _ in range(200):
        state, expected = TrainState(0, 1, 1, ""), set()
        for number in range(5):
            start = draw.randrange(60)
            stop = start + draw.randint(1, 12)
            left = {
                g
                for first, last in trouble._left_between(start, stop, state.skipped_ranges)
                for g in range(first, last)
            }
            assert left == set(range(start, stop)) - expected
            state = trouble.skip(state, TroubleError("", 9, 9, start, stop))
            expected |= set(range(start, stop))
            assert state.rollbacks == number + 1
            assert expected == {g for first, last in state.skipped_ranges for g in range(first, last)}
            assert all(a[1] < b[0] for a, b in itertools.pairwise(state.skipped_ranges))


def flip_a_byte(shards: Path, split: str) -> str:
    """Change one byte inside the first block of a split; returns the shard's name."""
    shard = ShardSet.open(shards).manifest["splits"][split]["shards"][0]
    start, length = shard["blocks"][0][:2]
    with open(shards / shard["name"], "r+b") as file:
        file.seek(start + length // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    return shard["name"]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_a_bad_block_on_one_rank_ends_all_with_one_sentence(shards, tmp_path, split):
    """Two nodes with copies of their own, one byte wrong in the second's: exit code 2 on both, said once, and a status."""
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    for node in nodes:
        shutil.copytree(shards, node / "shards")
    name = flip_a_byte(nodes[1] / "shards", split)
    output = tmp_path / "out" / "run"
    options = ("--data", "shards", "--eval_interval", "2", "--save_interval", "1")
    argv = program(shards, output, *options)
    ranks = Ranks(argv, 2, tmp_path / "logs", partial(injections.work_in, nodes))
    assert ranks.wait() == [2, 2], ranks.printed()[-3000:]
    printed = ranks.printed()
    sentence = f"shards/{name}: block 0 (bytes"
    assert printed.count(sentence) == 1 and "(found by rank 1 on " in printed
    assert "Traceback" not in printed and "Connection" not in printed
    assert status(output)["state"] == "failed" and sentence in status(output)["reason"]
    saved = [path.name for path in (output / "checkpoints").glob("step-*")]
    assert saved == ([] if split == "train" else ["step-00000001"])


def test_a_fault_of_one_node_alone_is_said(shards, tmp_path):
    """Shards that the second node lacks: rank 1 says so and exits with 2, although rank 0 waits for it."""
    nodes = [tmp_path / "node-0", tmp_path / "node-1"]
    nodes[1].mkdir()
    shutil.copytree(shards, nodes[0] / "shards")
    argv = program(shards, tmp_path / "out" / "run", "--data", "shards")
    ranks = Ranks(argv, 2, tmp_path / "logs", partial(injections.work_in, nodes))
    ranks.processes[1].join(timeout=100)
    ranks.signal_when(lambda: True, signal.SIGKILL)
    assert ranks.wait() == [-signal.SIGKILL, 2]
    assert "error: shards" in ranks.logs[1].read_text()


@pytest.mark.parametrize(
    ("option", "advice"), [("--data", "copy the folder to a disk"), ("--output", "a run locks its folder")]
)
def test_folders_at_a_url_are_refused(capsys, option, advice):
    """--data s3://… and --output s3://… are one sentence that says what to do, and exit code 2."""
    with pytest.raises(SystemExit) as error:
        parse_arguments(["--deepspeed_config", "x.json", option, "s3://bucket/folder"])
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert "'s3://bucket/folder' is a URL" in said and advice in said
