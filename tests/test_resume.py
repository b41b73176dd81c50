"""Runs that are killed, stopped and started again, on as many ranks as before and on others."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from forked_ranks import Ranks, run
from small_runs import make_shards, make_tokenizer, random_model, tiny_config, write_run
from training_runs import (
    arguments,
    assert_checkpoints_equal,
    deepspeed_json,
    environment,
    logged_step,
    metrics,
    optimizer_lines,
)

from data_prep.errors import UserError
from data_prep.shards import ShardSet, file_sha256
from pretraining import checkpoint_writer, launch
from pretraining.arguments import parse_arguments, prepare
from pretraining.checkpoint import Checkpoint, Checkpoints, TrainState
from pretraining.distributed import World
from pretraining.repartition import MOMENTS, PADDINGS, WEIGHTS, Group, repartition

STEPS = 14
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": STEPS},
}
RESUMED = ("--save_interval", "3", "--eval_interval", "6")
BF16 = {"bf16": {"enabled": True}}
WHOLE = {"zero_optimization": {"stage": 0}}
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 2e-3, "eps": 1e-6, "weight_decay": 0.01}}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards whose epoch ends within a run, and whose evaluation lasts long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("resume")
    tokenizer = make_tokenizer(folder, eval_fraction=0.7)
    shards = make_shards(folder, tokenizer, seed=5, documents=75, eval_fraction=0.7)
    assert 7 * 13 < ShardSet.open(shards).block_offsets("train")[-1] < 11 * 13
    return shards


def program(shards: Path, output: Path, *options: str, **changes) -> list[str]:
    """Arguments of a run of STEPS steps in `output`, with a DeepSpeed JSON of its own."""
    output.parent.mkdir(parents=True, exist_ok=True)
    config = deepspeed_json(output.parent, scheduler=SCHEDULE, **changes)
    return arguments(shards, output, *options, config=config)


def newest(output: Path) -> Path:
    return max((output / "checkpoints").glob("step-????????"))


def evaluated_steps(output: Path) -> list[int]:
    return [line["step"] for line in metrics(output) if "eval/loss" in line]


def is_saving(output: Path, step: int) -> bool:
    return (output / "checkpoints" / f"step-{step:08d}.partial").exists()


def undisturbed_and_killed(shards: Path, folder: Path, **changes) -> tuple[Path, Path]:
    """A run on two ranks, and one that was killed in an evaluation, in a save and between, and went on each time."""
    undisturbed, killed = folder / "a" / "run", folder / "b" / "run"
    run(program(shards, undisturbed, *RESUMED, **changes), 2, folder / "logs")
    argv = program(shards, killed, *RESUMED, **changes)

    def kill_when(condition) -> None:
        ranks = Ranks(argv, 2, folder / "logs")
        ranks.signal_when(condition, signal.SIGKILL)
        assert ranks.wait() == [-signal.SIGKILL] * 2

    kill_when(lambda: logged_step(killed) >= 6)
    assert logged_step(killed) == 6 and not evaluated_steps(killed)  # so it was in the evaluation
    assert newest(killed).name == "step-00000003"
    kill_when(lambda: is_saving(killed, 6))
    assert is_saving(killed, 6) and evaluated_steps(killed) == [6]
    kill_when(lambda: logged_step(killed) >= 11)
    # What earlier kills can have left behind.
    (killed / "checkpoints" / "step-00000099.partial").mkdir()
    with open(killed / "metrics.jsonl", "a") as file:
        file.write('{"step": 12, "train/lo')
    run(argv, 2, folder / "logs")
    return undisturbed, killed


def assert_same_run(left: Path, right: Path) -> None:
    assert_checkpoints_equal(newest(left), newest(right))
    states = [json.loads((newest(output) / "checkpoint.json").read_text()) for output in (left, right)]
    assert states[0]["train_state"] == states[1]["train_state"] and states[0]["train_state"]["step"] == STEPS
    assert metrics(left) == metrics(right)
    assert not list((right / "checkpoints").glob("*.partial"))


def test_killed_run_goes_on_bit_for_bit(shards, tmp_path):
    """SIGKILL in an evaluation, in a save, and in the second epoch, dropout 0.1: all is that of an undisturbed run."""
    assert_same_run(*undisturbed_and_killed(shards, tmp_path))


@pytest.mark.slow
def test_killed_run_in_bf16_goes_on_bit_for_bit(shards, tmp_path):
    """The same with bf16 parameters and fp32 weights beside them."""
    assert_same_run(*undisturbed_and_killed(shards, tmp_path, **BF16))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("changes", [{}, BF16, LAMB], ids=["fp32", "bf16", "LAMB"])
def test_random_kills_change_nothing(shards, tmp_path, changes):
    """SIGKILL of one rank or of all at random moments, start-up too, again and again until the run is done."""
    draw = random.Random(4)
    undisturbed, killed = tmp_path / "a" / "run", tmp_path / "b" / "run"
    options = ("--save_interval", "1", "--eval_interval", "2", "--eval_instances", "40", "--keep", "2")
    run(program(shards, undisturbed, *options, **changes), 2, tmp_path / "logs")
    argv, kills = program(shards, killed, *options, **changes), 0
    while (step := logged_step(killed)) < STEPS - 1:
        ranks, goal = Ranks(argv, 2, tmp_path / "logs"), min(step + draw.randint(0, 3), STEPS - 1)
        # A goal that is reached already means start-up, where a rank that is left alone waits long for the others.
        delay, victims = draw.uniform(0, 3), [0, 1]
        if goal > step:
            delay, victims = draw.uniform(0, 0.3), draw.choice([[0], [1], [0, 1]])
        ranks.signal_when(lambda goal=goal: logged_step(killed) >= goal, signal.SIGCONT)
        time.sleep(delay)
        ranks.signal_when(lambda: True, signal.SIGKILL, victims)
        ranks.wait()
        kills += 1
    print(f"{kills} kills")
    run(argv, 2, tmp_path / "logs")
    assert_same_run(undisturbed, killed)


def relative_difference(left: Path, right: Path) -> dict[str, float]:
    """The largest difference of weights and moments over the largest number of its kind."""
    a, b = optimizer_lines(newest(left)), optimizer_lines(newest(right))
    return {
        name: float((a[name] - b[name]).detach().abs().max() / a[name].detach().abs().max()) for name in a
    }


LAYOUTS = (
    (1, {"train_micro_batch_size_per_gpu": 13}),
    (4, {}),
    (2, {"zero_optimization": {"stage": 1}}),
    (3, {"train_micro_batch_size_per_gpu": 2}),
    (1, {}),
)
IN_FP32 = (*LAYOUTS[:3], (3, WHOLE | {"train_micro_batch_size_per_gpu": 2}), (2, WHOLE), (1, {}))


def one_process_and_others(
    shards: Path, folder: Path, layouts: tuple, **changes
) -> tuple[Path, Path, list[str]]:
    """A run of one process, one that went on with other ranks all the time, and what was said about going on."""
    alone, moved = folder / "a" / "run", folder / "b" / "run"
    run(program(shards, alone, "--dropout", "0", **changes), 1, folder / "logs")
    said = []
    for number, (count, layout) in enumerate(layouts):
        argv = program(shards, moved, "--dropout", "0", **changes | layout)
        ranks, goal = Ranks(argv, count, folder / "logs"), logged_step(moved) + 2
        if number < len(layouts) - 1:
            ranks.signal_when(lambda goal=goal: logged_step(moved) >= goal, signal.SIGTERM, [count - 1])
        assert set(ranks.wait()) == {0 if number == len(layouts) - 1 else 75}, ranks.printed()[-3000:]
        said += [
            line
            for line in ranks.printed().splitlines()
            if "going on from step" in line and "same" not in line
        ]
        settings = json.loads((moved / "settings.json").read_text())
        assert settings["world_size"] == count and (not said or said[-1] in settings["notes"])
    return alone, moved, said


@pytest.mark.parametrize("changes", [LAMB, pytest.param({}, marks=pytest.mark.slow)], ids=["LAMB", "AdamW"])
def test_run_goes_on_with_other_ranks(shards, tmp_path, changes):
    """1 → 4 → 2 ranks of ZeRO → 3 → 2 without → 1 of ZeRO, 13 instances a step: weights, moments and metrics are those
    of one process."""
    alone, moved, said = one_process_and_others(shards, tmp_path, IN_FP32, **changes)
    assert max(relative_difference(alone, moved).values()) < 1e-6
    moves = (
        "on 4 ranks (was on 1)",
        "on 2 ranks (was on 4)",
        "on 3 ranks (was on 2)",
        "on 2 ranks (was on 3)",
        "on 1 rank (was on 2)",
    )
    assert len(said) == 5 and all(move in line for move, line in zip(moves, said, strict=True))
    left, right = metrics(alone), metrics(moved)
    assert [line["step"] for line in left if "train/loss" in line] == list(range(1, STEPS + 1))
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=1e-4, abs=1e-6)
        exact = ("step", "optimizer/learning_rate", "progress/tokens", "progress/epoch", "progress/samples")
        assert {name: a.get(name) for name in exact} == {name: b.get(name) for name in exact}


@pytest.mark.slow
def test_run_in_bf16_goes_on_with_other_ranks(shards, tmp_path):
    """bf16 gradients are rounded in each micro-batch, so other ranks move the last digits, as they do in undisturbed runs."""
    alone, moved, _ = one_process_and_others(shards, tmp_path, LAYOUTS, **BF16)
    for a, b in zip(metrics(alone), metrics(moved), strict=True):
        name = "train/loss" if "train/loss" in a else "eval/loss"
        assert a[name] == pytest.approx(b[name], rel=1e-3)
    assert relative_difference(alone, moved)["weights"] < 0.005


def test_dropout_on_other_ranks_is_said_to_differ(shards, tmp_path):
    """Going on with another number of ranks is one line more with dropout, none without, none on the same ranks."""
    lines = {}
    for dropout, before in (("0.1", 3), ("0", 3), ("0.1", 2)):
        preparation = prepare(parse_arguments(program(shards, tmp_path / "run", "--dropout", dropout)), 2)
        state = asdict(TrainState(0, 384, 256, "", step=1200, consumed=15600))
        checkpoint = Checkpoint(tmp_path, {"train_state": state, "world_size": before})
        lines[dropout, before] = launch._going_on(
            preparation, World(0, 0, 2, torch.device("cpu")), checkpoint
        )
    moved = "going on from step 1,200 on 2 ranks (was on 3), 15,600 instances read"
    assert lines["0", 3] == [moved] and lines["0.1", 3][0] == moved and "other draws" in lines["0.1", 3][1]
    assert lines["0.1", 2] == ["going on from step 1,200 on 2 ranks, 15,600 instances read"]


def made_up_states(ranks: int, numels: list[int], draw: torch.Generator) -> tuple[list[dict], list[Group]]:
    """States as DeepSpeed saves them: the end padded to 2 · ranks numbers, the weights without that padding."""
    states = [
        {MOMENTS: {"state": {}, "param_groups": []}, WEIGHTS: [], PADDINGS: [], "zero_stage": 2}
        for _ in range(ranks)
    ]
    groups = []
    for number, numel in enumerate(numels):
        size = -(-numel // (2 * ranks)) * 2
        groups.append(Group(numel, size))
        line = {name: torch.randn(numel, generator=draw) for name in ("weights", "exp_avg")}
        for rank, state in enumerate(states):
            padding = size - len(line["weights"][rank * size : (rank + 1) * size])
            pieces = {
                name: torch.nn.functional.pad(values[rank * size : (rank + 1) * size], (0, padding))
                for name, values in line.items()
            }
            state[WEIGHTS].append(pieces["weights"][: size - padding])
            state[PADDINGS].append(padding)
            state[MOMENTS]["state"][number] = {"exp_avg": pieces["exp_avg"], "step": torch.tensor(7.0)}
            state[MOMENTS]["param_groups"].append({"params": [number], "lr": 0.1})
    return states, groups


def test_partitions_are_cut_anew_to_the_last_bit():
    """Any ranks → any others: every number is in its place, the padding is zero, what is not partitioned stays."""
    draw, sizes = torch.Generator().manual_seed(0), random.Random(0)
    for _ in range(150):
        before, after = sizes.randint(1, 9), sizes.randint(1, 9)
        numels = [sizes.randint(1, 60) for _ in range(sizes.randint(1, 3))]
        states, _ = made_up_states(before, numels, draw)
        groups = [Group(numel, -(-numel // (2 * after)) * 2) for numel in numels]
        cut = [repartition(states.__getitem__, before, groups, rank) for rank in range(after)]
        for number, numel in enumerate(numels):
            for pick in (
                lambda state, n=number: state[WEIGHTS][n],
                lambda state, n=number: state[MOMENTS]["state"][n]["exp_avg"],
            ):
                line = torch.cat([pick(state) for state in cut])
                assert torch.equal(line[:numel], torch.cat([pick(state) for state in states])[:numel])
                assert not line[numel:].any() and len(line) == after * groups[number].partition_size
        assert all(state[MOMENTS]["state"][0]["step"] == 7 and state["zero_stage"] == 2 for state in cut)
        assert all(PADDINGS not in state for state in cut)


def test_partitions_of_another_model_are_refused():
    """A group with more or fewer numbers than the model's is named, and nothing is loaded."""
    states, groups = made_up_states(2, [40, 11], torch.Generator())
    for numel in (30, 60):
        with pytest.raises(UserError, match="another model"):
            repartition(states.__getitem__, 2, [groups[0], Group(numel, numel)], 0)


@pytest.fixture
def run_of(tmp_path):
    """Writes checkpoints of a small model into a run folder."""
    tokenizer = make_tokenizer(tmp_path)
    model = random_model(tiny_config())

    def write(*steps: int) -> Checkpoints:
        for step in steps:
            write_run(tmp_path / "run", model, tokenizer, step)
        return Checkpoints(tmp_path / "run", {}, 0, 1, lambda value: [value], print)

    return write


def names(checkpoints: Checkpoints) -> list[int]:
    return sorted(
        int(path.name[5:]) for path in checkpoints.folder.glob("step-*") if path.suffix != ".partial"
    )


def test_old_checkpoints_are_deleted_but_for_the_chosen_ones(run_of):
    """--keep counts the newest whole ones, --keep_every adds its multiples, and a damaged newer one saves nobody's life."""
    checkpoints = run_of(2, 3, 4, 5, 6, 7)
    checkpoints.prune(7, keep=2, keep_every=3)
    assert names(checkpoints) == [3, 6, 7]
    os.truncate(checkpoints.folder / "step-00000007" / "mp_rank_00_model_states.pt", 100)
    assert checkpoints.newest_whole().state.step == 6
    run_of(6)
    checkpoints.prune(6, keep=1)
    assert names(checkpoints) == [6, 7] and checkpoints.newest_whole().state.step == 6


def test_training_goes_on_while_a_checkpoint_is_written(run_of, tmp_path, monkeypatch):
    """save returns before a byte is on the disk, and what is written are the numbers of that moment."""
    from small_runs import _Engine

    gate, real = threading.Event(), checkpoint_writer._write
    monkeypatch.setattr(checkpoint_writer, "_write", lambda *file: gate.wait(60) and real(*file))
    model = random_model(tiny_config())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints = Checkpoints(tmp_path / "other", {}, 0, 1, lambda value: [value], print)
    checkpoints.save(_Engine(model), TrainState(0, 384, 256, "", step=1))
    assert not checkpoints.is_written and names(checkpoints) == []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    gate.set()
    path = checkpoints.finish()
    saved = torch.load(path / "mp_rank_00_model_states.pt", weights_only=True)["module"]
    assert saved.keys() == before.keys() and all(torch.equal(saved[name], before[name]) for name in before)
    entry = json.loads((path / "checkpoint.json").read_text())["files"]["mp_rank_00_model_states.pt"]
    assert entry["sha256"] == file_sha256(path / "mp_rank_00_model_states.pt")
    assert checkpoints.finish() is None and not checkpoints.is_written


def test_a_disk_that_fills_up_meanwhile_leaves_the_old_checkpoint_good(run_of, monkeypatch):
    """A thread that runs out of room is reported by finish; the part that it wrote is removed."""

    def full(path: Path, _chunks: list[bytes]) -> dict:
        path.write_bytes(b"begun")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    checkpoints = run_of(2)
    monkeypatch.setattr(checkpoint_writer, "_write", full)
    with pytest.raises(
        UserError, match="could not be written .No space left on device.; make room on the disk"
    ):
        run_of(4)
    assert [path.name for path in checkpoints.folder.glob("step-*")] == ["step-00000002"]
    assert checkpoints.newest_whole().state.step == 2


def test_further_signals_during_the_last_save_change_nothing(shards, tmp_path):
    """After Ctrl-C, all stop signals again and again while it saves, a second Ctrl-C too: exit 75, a whole checkpoint."""
    output = tmp_path / "run"
    ranks = Ranks(program(shards, output), 2, tmp_path / "logs")
    ranks.signal_when(lambda: logged_step(output) >= 2, signal.SIGINT)
    # Ranks save after they have met, so all of them are at it when the first one makes the folder.
    ranks.signal_when(lambda: list((output / "checkpoints").glob("*.partial")), signal.SIGINT)
    while any(process.exitcode is None for process in ranks.processes):
        for process in ranks.processes:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        time.sleep(0.002)
    assert ranks.wait() == [75, 75], ranks.printed()[-3000:]
    status = json.loads((output / "status.json").read_text())
    checkpoint = Checkpoints(output, {}, 0, 1, lambda value: [value], print).newest_whole()
    assert status["state"] == "stopped" and status["step"] == checkpoint.state.step == logged_step(output)


def test_a_failing_save_ends_all_ranks(shards, tmp_path):
    """What rank 0 alone cannot write ends both ranks with one sentence at the next step, and leaves no part of it."""
    output = tmp_path / "run"
    (output / "checkpoints" / "zero_to_fp32.py").mkdir(parents=True)
    ranks = Ranks(program(shards, output, "--save_interval", "2"), 2, tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    printed = ranks.printed()
    assert "a checkpoint could not be written" in printed and "Traceback" not in printed
    assert json.loads((output / "status.json").read_text())["state"] == "failed"
    assert not list((output / "checkpoints").glob("step-*"))


def test_metrics_that_cannot_be_written_end_all_ranks(shards, tmp_path):
    """Metrics on a full disk end both ranks with one sentence, and no checkpoint lacks the lines before it."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "metrics.jsonl").symlink_to("/dev/full")
    ranks = Ranks(program(shards, output, "--save_interval", "1"), 2, tmp_path / "logs")
    assert ranks.wait() == [2, 2]
    printed = ranks.printed()
    assert "metrics could not be written" in printed and "No space left on device" in printed
    assert "Traceback" not in printed and not (output / "checkpoints").exists()


def test_a_signal_during_start_up_is_not_lost(shards, tmp_path):
    """USR1 as soon as it can be caught, before torch is imported, and SIGTERM until the end: exit 75, no model is made."""
    output = tmp_path / "run"
    run_py = Path(__file__).parent.parent / "pretraining" / "run.py"
    argv = [sys.executable, str(run_py), *program(shards, output)]
    with subprocess.Popen(
        argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        started, place = time.monotonic(), Path("/proc") / str(process.pid)
        caught = 0
        while not caught >> (signal.SIGUSR1 - 1) & 1:
            assert process.poll() is None and time.monotonic() < started + 60
            caught = int((place / "status").read_text().partition("SigCgt:")[2].split()[0], 16)
        assert "libtorch" not in (place / "maps").read_text()
        process.send_signal(signal.SIGUSR1)
        while process.poll() is None:  # until Python itself has ended
            process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        printed = process.stdout.read().decode()
    assert process.returncode == 75, printed
    status = json.loads((output / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("stopped", "SIGUSR1", 0)
    assert "optimizer:" not in printed and not (output / "checkpoints").exists()
