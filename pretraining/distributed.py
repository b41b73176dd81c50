"""Start-up on any launcher, small agreements between ranks, and gradient accumulation under ZeRO.

One process per device. The deepspeed launcher and torchrun say who is who through RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT; srun says it through SLURM_* variables, which are translated here;
a bare `python` is a world of one.
"""

import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from data_prep.errors import UserError

if TYPE_CHECKING:
    import torch

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# Slurm numbers the batch script, the interactive shell and the extern step from the top of 32 bits; only
# steps below are parallel programs (slurm.h, SLURM_MAX_NORMAL_STEP_ID).
FIRST_SPECIAL_SLURM_STEP = 0xFFFFFFF0
SLURM_PORTS = range(20_000, 32_000)  # below Linux's ephemeral ports, so no client has taken one by chance
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # rank 0 may hash a large checkpoint while the others wait
MASTER_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Placement:
    """Who this process is among the ranks, before anything is initialised."""

    launcher: str
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_address: str
    master_port: int


@dataclass(frozen=True)
class World:
    """A started rank. `local_rank` counts on this node; `device` is where this rank computes."""

    rank: int
    local_rank: int
    world_size: int
    device: "torch.device"


@dataclass(frozen=True)
class Capabilities:
    """What a device computes by itself: the name of its bf16 instructions (None: emulated, slow), and fp16."""

    bf16: str | None
    fp16: bool


def import_deepspeed() -> ModuleType:
    """Import DeepSpeed without its notices about a missing GPU and its own use of deprecated torch calls."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    import deepspeed

    return deepspeed


def start() -> World:
    """Find this process's place, choose its device and join the other ranks.

    Backend nccl on CUDA, gloo on CPU. The number of CPU threads is this rank's share of the cores unless
    OMP_NUM_THREADS is set. Raises UserError when the environment is incomplete or rank 0 cannot be reached.
    """
    placement = find_placement(os.environ)
    _export(placement)
    deepspeed = import_deepspeed()
    import torch

    device = _choose_device(placement)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(_threads(os.environ, placement.local_world_size))
    # init_distributed would compile this op with g++ (25-75 s); only inference uses it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _wait_for_master(placement, MASTER_TIMEOUT_SECONDS)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=COLLECTIVE_TIMEOUT, verbose=False)
    except torch.distributed.DistError as error:
        raise UserError(
            f"rank {placement.rank} of {placement.world_size} could not join the others through "
            f"{placement.master_address}:{placement.master_port} ({error}); check that all ranks run and that "
            "MASTER_ADDR and MASTER_PORT name a free port on the node of rank 0"
        ) from error
    return World(placement.rank, placement.local_rank, placement.world_size, device)


def shutdown() -> None:
    """Leave the group without waiting for anybody; without it gloo may end a finished rank with an error."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def find_placement(environment: Mapping[str, str]) -> Placement:
    """Read the launcher's variables; raises UserError when they are there but do not fit together."""
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _placement_from_launcher(environment)
    if _in_parallel_slurm_step(environment):
        return _placement_from_slurm(environment, expand_hosts)
    return Placement("one process", 0, 0, 1, 1, "127.0.0.1", _free_port())


def _placement_from_launcher(environment: Mapping[str, str]) -> Placement:
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing:
        present = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name in environment)
        raise UserError(
            f"{present} set in the environment but not {', '.join(missing)}: start with `deepspeed`, `torchrun` "
            "or `srun`, which set them all, or unset RANK and WORLD_SIZE to train in one process"
        )
    rank, world_size = _integer(environment, "RANK"), _integer(environment, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise UserError(
            f"RANK={rank} is outside the ranks 0 to {world_size - 1} that WORLD_SIZE={world_size} gives"
        )
    # torchrun says LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE; by hand it is mostly one node.
    sizes = [name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in environment]
    return Placement(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environment else "deepspeed",
        rank=rank,
        local_rank=_integer(environment, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(environment, sizes[0]) if sizes else world_size,
        master_address=environment["MASTER_ADDR"],
        master_port=_integer(environment, "MASTER_PORT"),
    )


def _in_parallel_slurm_step(environment: Mapping[str, str]) -> bool:
    """True only in a task of a real srun step: batch scripts and salloc shells carry SLURM_* variables too."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    if _integer(environment, "SLURM_STEP_ID") >= FIRST_SPECIAL_SLURM_STEP:
        return False
    return _slurm_tasks(environment) > 1


def _slurm_tasks(environment: Mapping[str, str]) -> int:
    # SLURM_NTASKS is what was asked for; SLURM_STEP_NUM_TASKS is what this step runs.
    return _integer(
        environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    )


def _placement_from_slurm(
    environment: Mapping[str, str], expand: Callable[[str], Sequence[str]]
) -> Placement:
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if "MASTER_ADDR" in environment:
        master = environment["MASTER_ADDR"]
    elif environment.get("SLURM_STEP_NUM_NODES") == "1":
        master = "127.0.0.1"  # needs no name resolution
    else:
        master = expand(nodes)[0]
    # Steps of one job may run side by side, so the step moves the port too.
    seed = 64 * _integer(environment, "SLURM_JOB_ID") + _integer(environment, "SLURM_STEP_ID")
    has_port = "MASTER_PORT" in environment
    return Placement(
        launcher="srun",
        rank=_integer(environment, "SLURM_PROCID"),
        local_rank=_integer(environment, "SLURM_LOCALID"),
        world_size=_slurm_tasks(environment),
        local_world_size=_slurm_tasks_here(environment),
        master_address=master,
        master_port=_integer(environment, "MASTER_PORT")
        if has_port
        else SLURM_PORTS[seed % len(SLURM_PORTS)],
    )


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """The number of tasks on this node, from the run-length form "2(x3),1" and this node's number."""
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, repeat = part.partition("(x")
        if count:
            counts += [int(count)] * int(repeat.rstrip(")") or 1)
    node = _integer(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0
    return counts[node] if node < len(counts) else _slurm_tasks(environment)


def expand_hosts(nodes: str) -> list[str]:
    """Expand Slurm's "node[01-03]" through scontrol, the one program that knows all its forms."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(
            f"`scontrol show hostnames {nodes}` failed ({error}): set MASTER_ADDR to the first node of the job"
        ) from error
    return done.stdout.split()


def _integer(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise UserError(f"the environment variable {name} is {value!r}; expected a whole number") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _export(placement: Placement) -> None:
    """Say the placement in the variables that torch and DeepSpeed read."""
    values = (placement.rank, placement.world_size, placement.local_rank)
    values += (placement.master_address, placement.master_port)
    os.environ.update(zip(LAUNCHER_VARIABLES, map(str, values), strict=True))
    # Two environments with one Python would rebuild each other's compiled operators.
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    name = f"torch_extensions_{hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]}"
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(cache / name))
    if placement.local_world_size == placement.world_size and Path("/sys/class/net/lo").exists():
        # gloo looks the host's own name up, which containers often cannot answer.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _choose_device(placement: Placement) -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    # With --gpus-per-task each task sees its own GPU only, as number 0.
    index = 0 if visible == 1 else placement.local_rank
    if index >= visible:
        raise UserError(
            f"local rank {placement.local_rank} has no GPU: {visible} are visible to {placement.local_world_size} "
            "processes on this node; start at most one process per GPU"
        )
    os.environ["LOCAL_RANK"] = str(index)  # DeepSpeed takes this as the number of the device
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def machine_capabilities() -> tuple[str, Capabilities]:
    """The device type that a rank here would use ("cuda" or "cpu"), and what it computes in hardware."""
    deepspeed = import_deepspeed()
    import torch

    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return "cuda", Capabilities(bf16="bf16 tensor cores" if has_bf16 else None, fp16=True)
    has = torch.cpu.get_capabilities()
    names = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if has.get(name)]
    accelerator = deepspeed.accelerator.get_accelerator()
    return "cpu", Capabilities(bf16=names[0] if names else None, fp16=bool(accelerator.is_fp16_supported()))


def _threads(environment: Mapping[str, str], local_world_size: int) -> int:
    """CPU threads for this rank: Slurm's share if it made one, else an equal share of the cores allowed."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return max(1, _integer(environment, "SLURM_CPUS_PER_TASK"))
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // local_world_size)


def _wait_for_master(placement: Placement, seconds: float) -> None:
    """Wait until rank 0 listens. The collectives' own timeout is too long for a misspelt address."""
    if placement.rank == 0 or placement.launcher == "torchrun":  # torchrun's agent has listened already
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((placement.master_address, placement.master_port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {placement.rank} found nobody at MASTER_ADDR:MASTER_PORT = {placement.master_address}:"
                    f"{placement.master_port} for {seconds:.0f} s ({error}); check that rank 0 runs there"
                ) from error
        time.sleep(0.2)


def all_sum(values: Sequence[float]) -> list[float]:
    """Sum each number over the ranks, in one float64 all-reduce (whole numbers are exact up to 2^53)."""
    import torch

    on_gpu = torch.distributed.get_backend() == "nccl"
    total = torch.tensor(values, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
    torch.distributed.all_reduce(total)
    return total.tolist()


def all_true(flag: bool) -> bool:
    """True on every rank if `flag` is true on every rank; a collective call."""
    return all_sum([0.0 if flag else 1.0]) == [0.0]


def gather_objects(value: object) -> list:
    """The value of each rank, in the order of ranks, on all ranks; a collective call."""
    import torch

    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class AgreedError(UserError):
    """An error of the user's that all ranks raise together; rank 0 says it for all."""


def raise_together(problem: UserError | None) -> None:
    """Raise the problem of the first rank that has one, on all ranks; a collective call.

    A rank that raised it alone would leave the others waiting, until they end with an error of the network's.
    """
    problems = gather_objects((str(problem), socket.gethostname()) if problem else None)
    for rank, found in enumerate(problems):
        if found:
            text, host = found
            raise AgreedError(f"{text} (found by rank {rank} on {host})" if rank else text)


def gradient_accumulation(engine, max_micro_steps: int) -> AbstractContextManager[None]:
    """The context for all backward passes of one optimizer step; `engine.step()` comes after it.

    With one micro-step DeepSpeed reduces gradients while the backward pass runs. With more, they stay local and
    are reduced once, when the context ends; ranks may then run unequal numbers of micro-steps (at least one).

    Args:
        engine: a DeepSpeed engine with gradient_accumulation_steps 1, at ZeRO stage 1 or 2, or in fp32 at 0.
        max_micro_steps: the largest number on any rank (`Lowered.max_micro_steps`). All ranks must give the
            same number, since the two ways do not communicate alike.
    """
    if max_micro_steps == 1:
        return contextlib.nullcontext()
    return engine.coalesce_grad_reduction() if engine.zero_optimization() else _reduced_at_the_end(engine)


@contextlib.contextmanager
def _reduced_at_the_end(engine) -> Iterator[None]:
    """What DeepSpeed's coalesce_grad_reduction does, which refuses stage 0."""
    with engine.no_sync():
        yield
    engine.allreduce_gradients()


def accumulate_in_fp32(engine) -> None:
    """Let `.grad` of every parameter be float32; call once after `deepspeed.initialize`.

    The coalesced reduction sums micro-steps in `.grad`, whose dtype is the parameter's by default, and ignores
    DeepSpeed's grad_accum_dtype. With bf16's 8 bits a sum of equal gradients stops growing after 256 of them.
    """
    import torch

    for parameter in engine.module.parameters():
        parameter.grad_dtype = torch.float32
