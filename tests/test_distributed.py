"""Start-up under each launcher, agreement between ranks, and accumulation under ZeRO, with real processes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from random_shards import make_shard_set

from data_prep.errors import UserError
from pretraining import distributed
from pretraining.distributed import Placement, find_placement

REPOSITORY = Path(__file__).resolve().parent.parent
RANKS = REPOSITORY / "tests" / "ranks_distributed.py"
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[07-09]",
    "SLURM_JOB_NODELIST": "node[01-09]",
    "SLURM_NTASKS": "18",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def clean_environment(**extra: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in names and not k.startswith(("SLURM_", "TORCHELASTIC_"))
    }
    return kept | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"} | extra


def run_ranks(output: Path, *cases: str) -> dict:
    """Run the cases on two ranks under torchrun and return rank 0's results; the exit code must be 0."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ]
    command += [str(RANKS), str(output), *cases]
    done = subprocess.run(
        command, env=clean_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """One launch for all cases, since start-up costs more than they do."""
    cases = (
        "agreement",
        "equal_to_the_whole_batch",
        "reductions_per_step",
        "deepspeeds_own_accumulation",
        "many_micro_steps_in_bf16",
        "overflow",
        "partition",
    )
    return run_ranks(tmp_path_factory.mktemp("ranks") / "two.json", *cases)


def test_ranks_agree_on_sums_and_flags(two_ranks):
    """Sums are exact over the ranks, a flag is true only if it is so everywhere, each rank knows its place."""
    seen = two_ranks["agreement"]
    assert seen["sums"] == [3.0, 1.0, 2**52 + 1]
    assert seen["all"] == [True, False, False]
    assert seen["world"][:3] == [0, 0, 2]
    assert seen["threads"] == 1


def test_micro_steps_on_two_ranks_equal_the_whole_batch(two_ranks):
    """Three clipped AdamW steps end where one process without DeepSpeed ends; bf16 within its rounding."""
    seen = two_ranks["equal_to_the_whole_batch"]
    assert len(seen) == 18
    for name, found in seen.items():
        assert found["moved"] > 0.02, name
        is_exact = "fp32" in name
        assert found["parameters"] < (1e-6 if is_exact else 4e-3), (name, found)
        assert found["norms"] < (1e-5 if is_exact else 1e-2), (name, found)


def test_gradients_are_reduced_once_per_step(two_ranks):
    """Six micro-steps communicate as much as one; left to DeepSpeed they would six times as often, for each bucket."""
    seen = two_ranks["reductions_per_step"]
    for buckets, reductions in (("one bucket", 1), ("several buckets", 4), ("whole", 1)):
        assert seen[f"one, {buckets}"] == seen[f"six, {buckets}"] == reductions
        assert seen[f"six without, {buckets}"] == 6 * reductions


def test_accumulation_is_deepspeeds_own_in_one_reduction(two_ranks):
    """Three clipped steps of 4 micro-steps end where DeepSpeed's default path, which reduces each, ends too."""
    seen = two_ranks["deepspeeds_own_accumulation"]
    for precision, tolerance in (("fp32", 1e-6), ("bf16", 4e-3)):
        assert seen[precision] < tolerance < 0.02 < seen[f"{precision} moved"]


def test_two_ranks_halve_the_optimizer_state(two_ranks):
    """ZeRO-2 partitions gradients, and each of two ranks keeps half of both moments (and padding)."""
    seen = two_ranks["partition"]
    assert seen["partition_gradients"] is True
    assert seen["exp_avg"] == seen["exp_avg_sq"] == pytest.approx(0.5, abs=0.01)


def test_gradients_add_up_in_float32(two_ranks):
    """1,024 micro-steps in bf16 give the gradient to 0.5 % (0.17 %); summed in bf16, half of it is lost (50 %)."""
    seen = two_ranks["many_micro_steps_in_bf16"]
    assert seen["fp32 gradients"] < 5e-3
    assert seen["as DeepSpeed does"] > 1 / 3


@pytest.mark.parametrize("precision", ["whole", "fp32", "bf16", "fp16"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks, precision):
    """Nothing moves at that step, it is counted, and the next one is applied, without ZeRO ("whole") too; only fp16 has
    a scale to halve."""
    steps = two_ranks["overflow"][precision]
    assert [applied for applied, *_ in steps] == [True, False, True, True]
    assert [moved for _, moved, *_ in steps] == [True, False, True, True]
    assert [skipped for _, _, skipped, _ in steps] == [0, 1, 1, 1]
    scales = [256, 128, 128, 128] if precision == "fp16" else [1, 1, 1, 1]
    assert [scale for *_, scale in steps] == scales


@pytest.fixture(scope="module")
def started_by_hand(tmp_path_factory):
    """A bare `python program`, and at the same time three ranks with RANK and the rest set, rank 0 last."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "shards").mkdir()
    make_shard_set(folder / "shards", [(100, 17, 1), (60,)])
    bare, output = folder / "bare.json", folder / "three.json"
    script, port = str(RANKS), str(distributed._free_port())
    started = [subprocess.Popen([sys.executable, script, str(bare), "agreement"], env=clean_environment())]
    for rank in ("2", "1", "0"):
        place = {
            "RANK": rank,
            "WORLD_SIZE": "3",
            "LOCAL_RANK": rank,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, script, str(output), "agreement", "unequal_micro_steps", "micro_batches"]
        started.append(subprocess.Popen(command, env=clean_environment(**place)))
    try:
        codes = [process.wait(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    return codes, json.loads(bare.read_text()), json.loads(output.read_text())


def test_bare_python_and_ranks_by_hand_start_and_end_with_0(started_by_hand):
    """Without a launcher there is one rank; ranks wait for rank 0; every process ends with exit code 0."""
    codes, bare, three = started_by_hand
    assert codes == [0, 0, 0, 0]
    assert bare["agreement"]["world"][:3] == [0, 0, 1]
    assert three["agreement"]["sums"] == [6.0, 1.5, 2**52 + 2]


def test_three_ranks_may_run_unequal_micro_steps(started_by_hand):
    """Ranks with 4, 2 and 3 micro-steps train the same batch as one process, clipped, under ZeRO-2 and without it."""
    _, _, three = started_by_hand
    seen = three["unequal_micro_steps"]
    assert seen.pop("least norm") > 0.6  # so that all steps are clipped
    assert seen.keys() == {"ZeRO-2", "whole", "between"} and max(seen.values()) < 1e-6, seen


def test_micro_batches_may_be_cut_by_tokens(started_by_hand):
    """Three steps of 22 instances on three ranks = one process in plain PyTorch, with whole shares, with micro-batches
    of 3 instances, and of 60 or 24 tokens, as many on each rank as its lengths need; each step reduces as often."""
    _, _, three = started_by_hand
    seen = three["micro_batches"]
    assert seen.pop("moved") > 0.02
    for name, found in seen.items():
        assert found["parameters"] < 1e-6 and found["losses"] < 1e-6, (name, found)
    assert [max(map(max, found["micro_steps"])) for found in seen.values()][:2] == [1, 3]
    assert seen["budget"]["tokens"] <= 60 and seen["tightest"]["tokens"] <= 24
    steps = zip(*seen["budget"]["micro_steps"], strict=True)
    assert any(len(set(by_rank)) > 1 for by_rank in steps), seen["budget"]
    assert len({found["all_reduces"] for found in seen.values()}) == 1


def test_a_bare_process_is_a_world_of_one():
    """Without any launcher there is one rank, on a free port of this machine."""
    placement = find_placement({})
    assert (placement.rank, placement.world_size, placement.local_world_size) == (0, 1, 1)
    assert placement.master_address == "127.0.0.1"
    assert placement.master_port != find_placement({}).master_port


def test_launchers_say_who_is_who():
    """torchrun's and the deepspeed launcher's variables are taken as they are, before any of Slurm's."""
    place = dict(rank=3, local_rank=1, world_size=4, master_address="node1", master_port=29500)  # noqa: C408
    elastic = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    assert find_placement(SRUN | TORCHRUN | elastic) == Placement("torchrun", local_world_size=2, **place)
    assert find_placement(TORCHRUN | {"LOCAL_SIZE": "2"}) == Placement(
        "deepspeed", local_world_size=2, **place
    )
    assert find_placement(TORCHRUN) == Placement("deepspeed", local_world_size=4, **place)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"WORLD_SIZE": None}, "RANK set in the environment but not WORLD_SIZE"),
        ({"RANK": None}, "WORLD_SIZE set in the environment but not RANK"),
        (
            {"MASTER_ADDR": None, "MASTER_PORT": None},
            "RANK and WORLD_SIZE set .* but not MASTER_ADDR, MASTER_PORT",
        ),
        ({"RANK": "4"}, "RANK=4 is outside the ranks 0 to 3"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; expected a whole number"),
    ],
)
def test_half_a_launcher_is_a_user_error(change, message):
    """Variables that do not fit together are named, with what to do."""
    environment = {key: value for key, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(UserError, match=message):
        find_placement(environment)


def with_scontrol(tmp_path, monkeypatch, body: str) -> None:
    """Put a program named scontrol first on the PATH."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_an_srun_step_is_translated(tmp_path, monkeypatch):
    """Ranks come from the step (not from the job), the master is its first host, the port depends on job and step."""
    with_scontrol(
        tmp_path,
        monkeypatch,
        '[ "$*" = "show hostnames node[07-09]" ] && printf "node07\\nnode08\\nnode09\\n"',
    )
    placement = find_placement(SRUN)
    assert (placement.launcher, placement.rank, placement.local_rank) == ("srun", 4, 0)
    assert (placement.world_size, placement.local_world_size, placement.master_address) == (5, 1, "node07")
    others = [find_placement(SRUN | {"SLURM_STEP_ID": "1"}), find_placement(SRUN | {"SLURM_JOB_ID": "1235"})]
    ports = {placement.master_port, *(other.master_port for other in others)}
    assert len(ports) == 3
    assert all(20_000 <= port < 32_768 for port in ports)
    assert find_placement(SRUN | {"SLURM_PROCID": "3", "SLURM_NODEID": "1"}).local_world_size == 2


def test_an_srun_step_keeps_the_master_that_was_set():
    """MASTER_ADDR and MASTER_PORT exported by a job script win, and no scontrol is needed then."""
    placement = find_placement(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345"})
    assert (placement.master_address, placement.master_port) == ("10.0.0.1", 12345)
    assert find_placement(SRUN | {"SLURM_STEP_NUM_NODES": "1"}).master_address == "127.0.0.1"


@pytest.mark.parametrize(
    "environment",
    [
        {key: value for key, value in SRUN.items() if "STEP" not in key},  # sbatch script or salloc shell
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # salloc shell as an interactive step
        SRUN | {"SLURM_STEP_ID": "4294967291"},  # batch step
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_inside_slurm_but_not_in_a_parallel_step_is_one_process(environment):
    """`python` in a batch script or an allocation's shell is alone, whatever SLURM_NTASKS says."""
    assert find_placement(environment).world_size == 1


def test_a_failing_scontrol_is_a_user_error(tmp_path, monkeypatch):
    """The sentence says what to set instead."""
    with_scontrol(tmp_path, monkeypatch, "exit 1")
    with pytest.raises(UserError, match="set MASTER_ADDR"):
        find_placement(SRUN)


def test_nobody_at_the_master_address_is_a_user_error():
    """A rank that cannot find rank 0 stops with the address, instead of waiting for the collectives' timeout."""
    placement = Placement("deepspeed", 1, 1, 2, 2, "127.0.0.1", distributed._free_port())
    with pytest.raises(UserError, match=r"rank 1 found nobody at .*127\.0\.0\.1"):
        distributed._wait_for_master(placement, seconds=0.3)


def test_threads_are_the_ranks_share():
    """Cores are divided by the ranks of the node; Slurm's own share wins."""
    cores = len(os.sched_getaffinity(0))
    assert distributed._threads({}, 1) == cores
    assert distributed._threads({}, cores) == 1
    assert distributed._threads({}, 1000) == 1
    assert distributed._threads({"SLURM_CPUS_PER_TASK": "6"}, 2) == 6


def test_a_processor_with_bf16_instructions_is_known_by_their_name(monkeypatch):
    """The capability is what torch reads from the processor, so that fp16 can give way to bf16."""
    import torch

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": False})
    device, capabilities = distributed.machine_capabilities()
    if device == "cpu":
        assert capabilities.bf16 == "avx512_bf16"
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
        assert distributed.machine_capabilities()[1].bf16 is None


def test_importing_the_module_costs_no_torch():
    """The programs' --help and errors in their flags do not wait for torch."""
    code = textwrap.dedent("""
        import sys, pretraining.distributed, pretraining.optimizer
        sys.exit(bool({"torch", "deepspeed"} & sys.modules.keys()))
    """)
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0
