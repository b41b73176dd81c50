"""fp16 with DeepSpeed's dynamic loss scaler, forced on a processor: steps that overflow, grow, are clipped, go on."""

import json
import math
import shutil
import signal
from functools import partial
from pathlib import Path

import injections
import pytest
import ranks_loss_scale
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from forked_ranks import Ranks, run
from hypothesis import given, settings
from hypothesis import strategies as st
from random_shards import make_shard_set
from small_runs import make_training_shards
from training_runs import arguments, assert_checkpoints_equal, deepspeed_json, logged_step, metrics

from pretraining.loss_scale import hold_loss_scale
from pretraining.trouble import loss_scale_cannot_fall

CLIP = ranks_loss_scale.CLIP


def run_cases(folder: Path, *cases: str) -> dict:
    """What the cases have returned on rank 0 of two."""
    (folder / "shards").mkdir()
    make_shard_set(folder / "shards", [(100, 17, 1), (60,)])
    run([str(folder / "two.json"), *cases], 2, folder / "logs", program=ranks_loss_scale.main)
    return json.loads((folder / "two.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """One launch for all cases, since start-up costs more than they do."""
    return run_cases(tmp_path_factory.mktemp("scale"), "growth", "overflow", "options", "going_on")


def assert_full_updates(steps: list[dict]) -> None:
    """The scale has grown in the third and the fifth step, the second time with clipping, and each update is whole."""
    assert [set(step["scales"]) for step in steps] == [{256}, {256}, {256}, {512}, {512}]
    assert [step["next"] for step in steps] == [256, 256, 512, 512, 1024]
    assert all(len(step["scales"]) == 4 for step in steps)  # 2 micro-steps on each of 2 ranks
    assert steps[2]["true_norm"] < CLIP < steps[4]["true_norm"] < 2 * CLIP
    for step in steps:
        assert step["share"] == pytest.approx(1, abs=2e-3) and step["error"] < 3e-3, step
        assert step["norm"] == pytest.approx(step["true_norm"], rel=2e-3)


def test_a_step_on_which_the_scale_grows_applies_the_full_update(two_ranks):
    """SGD's update is lr × the clipped gradient of one float32 process to 0.3 %, in steps that grow the scale too."""
    assert_full_updates(two_ranks["growth"]["ours"])


@pytest.mark.slow
def test_full_updates_under_stage_1_and_offload(tmp_path):
    """The same holds when gradients are partitioned in other ways."""
    seen = run_cases(tmp_path, "growth_elsewhere")["growth_elsewhere"]
    assert len(seen) == 2
    for steps in seen.values():
        assert_full_updates(steps)


def test_left_to_deepspeed_half_of_that_update_is_lost(two_ranks):
    """The fault that is mended is there: 0.50 of the update, and where clipping should act, half of the norm counts."""
    steps = two_ranks["growth"]["DeepSpeed's own"]
    assert [step["next"] for step in steps] == [256, 256, 512, 512, 1024]
    shares = [step["share"] for step in steps]
    assert [shares[i] for i in (0, 1, 3)] == pytest.approx([1, 1, 1], abs=2e-3)
    assert shares[2] == pytest.approx(0.5, abs=2e-3) and steps[2]["true_norm"] < CLIP
    clipped = steps[4]["true_norm"]
    assert CLIP < clipped < 2 * CLIP and shares[4] == pytest.approx(clipped / 2 / CLIP, abs=2e-3)
    # DeepSpeed reports the norm by the old scale: that number was right.
    assert steps[4]["norm"] == pytest.approx(clipped, rel=2e-3)


def test_a_static_scale_cancels(two_ranks):
    """With "loss_scale": 128 losses are multiplied by 128 in each step, and the updates are those of float32."""
    for step in two_ranks["growth"]["static"]:
        assert set(step["scales"]) == {128} and step["logged"] == step["next"] == 128
        assert step["share"] == pytest.approx(1, abs=2e-3) and step["error"] < 3e-3


def test_the_logged_scale_is_that_of_the_step(two_ranks):
    """optimizer/loss_scale is what the step's losses were multiplied by, when the scale grows or falls at its end too."""
    steps = two_ranks["growth"]["ours"] + two_ranks["overflow"]
    assert all({step["logged"]} == set(step["scales"]) for step in steps)
    changes = [step["next"] / step["logged"] for step in steps]
    assert changes.count(2) == 2 and changes.count(0.5) == 1


def test_an_overflow_moves_nothing_but_the_data(two_ranks):
    """An infinite loss on one rank of two: no bit of weights, moments or counts changes on either, the scale is halved."""
    steps = two_ranks["overflow"]
    every = ["parameters", "fp32 weights", "moments", "step"]
    # In the first step the learning rate is 0, and in the third the loss is infinite.
    assert [step["changed"] for step in steps] == [
        [every[2:]] * 2,
        [every] * 2,
        [[], []],
        [every] * 2,
        [every] * 2,
    ]
    assert [step["consumed"] for step in steps] == [ranks_loss_scale.ENCODER_BATCH] * 5
    assert [step["applied"] for step in steps] == [1, 1, 0, 1, 1]
    assert [step["skipped"] for step in steps] == [0, 0, 1, 1, 1]
    assert [set(step["scales"]) for step in steps] == [{256}, {256}, {256}, {128}, {128}]
    assert [math.isinf(step["norm"]) for step in steps] == [False, False, True, False, False]
    rates = [step["learning_rate"] / ranks_loss_scale.LR * 20 for step in steps]
    assert rates == pytest.approx([0, 1, 2, 2, 3])  # the warm-up waits for the skipped step


def test_options_of_fp16_mean_what_deepspeed_says(two_ranks):
    """Window, hysteresis, its refill and the floor, by scripted overflows; the scale is that of the step, 256 at first."""
    seen = two_ranks["options"]
    # The sixth step overflows: the window of 3 is counted from there.
    assert seen["window"] == [256] * 4 + [512] * 2 + [256] * 4 + [512] * 2
    # Two overflows are borne, the third and all after it are not; growth, after 4 steps without, allows two more.
    assert seen["hysteresis"] == [256] * 5 + [128] * 3 + [64] * 5 + [128] * 3 + [64]
    # A step without an overflow allows one more; only two in a row let the scale fall.
    assert seen["consecutive"] == [256] * 6 + [128] * 3 + [64]
    # At the floor of 64 another overflow is trouble ("!"), and the scale stays; then it grows again.
    assert seen["floor"] == [256, 128, 64, "!", 64, 64, 64, 128]


def test_a_run_that_goes_on_keeps_the_state_and_takes_the_options(two_ranks):
    """After a checkpoint is loaded: the scale, its counts and the hysteresis left; the options are the JSON's of now."""
    seen = two_ranks["going_on"]
    saved = seen["saved"]
    assert (saved["cur_iter"], saved["last_overflow_iter"], saved["cur_hysteresis"]) == (3, 1, 2)
    assert seen["the same"] == saved
    changed = {"scale_window": 7, "min_scale": 4, "delayed_shift": 4, "consecutive_hysteresis": True}
    assert seen["others"] == saved | changed
    bounds = {"min_scale": 1024, "cur_scale": 1024, "delayed_shift": 1, "cur_hysteresis": 1}
    assert seen["bounds"] == saved | bounds
    assert seen["static"]["cur_scale"] == 32 and not seen["static"]["dynamic"] | seen["static"]["optimizer"]


def zero_with(scaler: DynamicLossScaler) -> DeepSpeedZeroOptimizer:
    """As much of ZeRO's optimizer as concerns the loss scale."""
    zero = object.__new__(DeepSpeedZeroOptimizer)
    zero.loss_scaler, zero.dynamic_loss_scale = scaler, True
    zero.custom_loss_scaler, zero.external_loss_scale, zero.torch_autocast_gradscaler = False, None, None
    return zero


def test_the_scale_is_deepspeeds_for_any_overflows(monkeypatch):
    """Up to 200 steps, any options: losses are multiplied by the scale that DeepSpeed's scaler has then, and gradients
    are divided by the same, whatever the scaler has decided meanwhile."""
    monkeypatch.setattr("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", lambda: 1)
    loss = torch.ones((), dtype=torch.float64, requires_grad=True) * 1  # the scale may reach 2^200
    options = st.tuples(
        st.sampled_from([2.0**4, 2.0**9]), st.integers(1, 6), st.sampled_from([1.0, 4.0]), st.integers(1, 4), st.booleans()
    )  # fmt: skip
    rises, falls, floors = [], [], []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(options, st.lists(st.sampled_from([False] * 5 + [True]), min_size=100, max_size=200))
    def check(options, overflows):
        theirs = DynamicLossScaler(*options, raise_error_at_min_scale=False, dtype=torch.float32)
        zero = zero_with(DynamicLossScaler(*options, dtype=torch.float32))
        for overflow in overflows:
            hold_loss_scale(zero)
            floors.append(loss_scale_cannot_fall(zero.loss_scaler) and overflow)
            before = theirs.cur_scale
            for _ in range(2):  # micro-steps
                assert zero.scale_if_loss(loss).item() == before
            zero._update_scale(overflow)
            theirs.update_scale(overflow)
            assert zero.loss_scale == before  # what gradients and norm are divided by
            rises.append(theirs.cur_scale > before)
            falls.append(theirs.cur_scale < before)

    check()
    assert all(map(any, (rises, falls, floors)))


FP16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}
STEPS = 14
NINTH = 8 * 13  # a position in the ninth step
SCALES = [256] * 4 + [512] * 3 + [1024] * 2 + [512] * 4 + [1024]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Shards of some hundred instances."""
    return make_training_shards(tmp_path_factory.mktemp("fp16"), at_least=9 * 13 + 1)


def program(shards: Path, output: Path, *options: str, **fp16) -> list[str]:
    output.parent.mkdir(parents=True, exist_ok=True)
    constant = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    config = deepspeed_json(output.parent, fp16=FP16 | fp16, scheduler=constant)
    options = ("--save_interval", "4", "--eval_instances", "4", "--max_steps", str(STEPS), *options)
    return arguments(shards, output, *options, config=config)


def scales(output: Path) -> list[float]:
    return [line["optimizer/loss_scale"] for line in metrics(output) if "train/loss" in line]


def newest(output: Path) -> Path:
    return max((output / "checkpoints").glob("step-????????"))


@pytest.fixture(scope="module")
def killed(shards, tmp_path_factory) -> Path:
    """A run on two ranks that was killed after the checkpoint of its fourth step, in which the scale grew."""
    folder = tmp_path_factory.mktemp("killed")
    output = folder / "run"
    ranks = Ranks(program(shards, output), 2, folder / "logs", partial(injections.tiny_in_fp16, {NINTH: 1}))
    saved = output / "checkpoints" / "step-00000004"
    ranks.signal_when(lambda: saved.exists() and logged_step(output) >= 6, signal.SIGKILL)
    assert ranks.wait() == [-signal.SIGKILL] * 2
    assert newest(output) == saved and len(scales(output)) < 8
    return output


def test_scale_and_weights_go_on_bit_for_bit(shards, killed, tmp_path):
    """SIGKILL with a growth just saved, another growth and an overflow on one rank after it: all is as if undisturbed."""
    undisturbed, resumed = tmp_path / "a" / "run", tmp_path / "b" / "run"
    shutil.copytree(killed, resumed)
    for output in (undisturbed, resumed):
        run(program(shards, output), 2, tmp_path / "logs", partial(injections.tiny_in_fp16, {NINTH: 1}))
    assert scales(undisturbed) == scales(resumed) == SCALES
    assert metrics(undisturbed) == metrics(resumed)
    assert_checkpoints_equal(newest(undisturbed), newest(resumed))
    assert json.loads((newest(resumed) / "checkpoint.json").read_text())["train_state"]["skipped_steps"] == 1


def test_the_scale_goes_on_with_other_ranks_and_begins_anew_in_a_phase(shards, killed, tmp_path):
    """Two ranks' run has the same scales when one rank goes on with it; in the phase after it they are the JSON's."""
    alone, phase = tmp_path / "a" / "run", tmp_path / "b" / "run"
    shutil.copytree(killed, alone)
    run(program(shards, alone), 1, tmp_path / "logs", partial(injections.tiny_in_fp16, {NINTH: 0}))
    assert scales(alone) == SCALES
    argv = program(
        shards,
        phase,
        "--phase_from",
        str(alone),
        "--max_steps",
        "5",
        initial_scale_power=5,
        loss_scale_window=2,
    )
    place = argv.index("--model")
    run(argv[:place] + argv[place + 2 :], 1, tmp_path / "logs", partial(injections.tiny_in_fp16, {}))
    assert scales(phase) == [32, 32, 32, 64, 64]
