"""Runs of the training program for tests: its files, its command line, and what it leaves behind."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
from forked_ranks import free_port

from pretraining.repartition import MOMENTS, STATES, WEIGHTS, Group, as_partition, repartition

BATCH, MICRO_BATCH, STEPS = 13, 4, 8


def deepspeed_json(folder: Path, **changes) -> Path:
    content = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_num_steps": 2, "warmup_type": "linear", "total_num_steps": STEPS},
        },
    }
    path = folder / "test.json"
    path.write_text(
        json.dumps({name: value for name, value in (content | changes).items() if value is not None})
    )
    return path


def arguments(shards: Path, output: Path, *options: str, config: Path | None = None) -> list[str]:
    """The program's arguments; without a config the file of `deepspeed_json` as it is."""
    config = config or deepspeed_json(shards.parent)
    files = ["--deepspeed_config", str(config), "--data", str(shards), "--output", str(output)]
    return [*files, "--model", "tiny", "--log_interval", "1", *options]


def command(
    shards: Path, output: Path, ranks: int = 1, launcher: str = "torchrun", options: tuple[str, ...] = ()
) -> list[str]:
    repository = Path(__file__).parent.parent
    program = [str(repository / "pretraining" / "run.py"), *arguments(shards, output, *options)]
    if launcher == "deepspeed":
        binary = str(Path(sys.executable).parent / "deepspeed")
        return [binary, "--num_accelerators", str(ranks), "--master_port", str(free_port()), *program]
    if ranks == 1:
        return [sys.executable, *program]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    return [*torchrun, "--master_port", str(free_port()), *program]


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"OMP_NUM_THREADS": "1", "PATH": path}


def train(*arguments, **options) -> str:
    """Run to the end and return what was printed."""
    done = subprocess.run(
        command(*arguments, **options), env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def kill_when(run: list[str], condition, signal_number: int) -> int:
    """Start a run, signal all of its processes when the condition holds, and give its exit code."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(run, env=environment(), **pipes) as process:
        deadline = time.monotonic() + 200
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline, process.stdout.read().decode()[
                -3000:
            ]
            time.sleep(0.02)
        # torchrun gives its workers sessions of their own, so a process group would not hold them all.
        parent = psutil.Process(process.pid)
        for member in [parent, *parent.children(recursive=True)]:
            member.send_signal(signal_number)
        process.stdout.read()
        return process.wait()


def metrics(output: Path) -> list[dict]:
    """The lines of metrics.jsonl without the numbers that depend on the clock."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            name: value
            for name, value in line.items()
            if name not in ("speed/tokens_per_second", "speed/data_wait_share")
        }
        for line in lines
    ]


def logged_step(output: Path) -> int:
    path = output / "metrics.jsonl"
    return (
        len([line for line in path.read_text().splitlines() if "train/loss" in line]) if path.is_file() else 0
    )


def final_parameters(output: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    path = output / "checkpoints" / f"step-{step:08d}" / "mp_rank_00_model_states.pt"
    return torch.load(path, weights_only=False)["module"]


def flat(value) -> list:
    """The leaves of a checkpoint in a fixed order."""
    if isinstance(value, dict):
        return [leaf for name in sorted(value, key=str) for leaf in flat(value[name])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def assert_checkpoints_equal(left: Path, right: Path) -> None:
    names = sorted(path.name for path in left.glob("*.pt"))
    # Of two ranks, or of any number without ZeRO.
    assert names == sorted(path.name for path in right.glob("*.pt")) and len(names) in (1, 3)
    for name in names:
        a, b = (flat(torch.load(folder / name, weights_only=False)) for folder in (left, right))
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            if isinstance(x, torch.Tensor):
                assert x.dtype == y.dtype and torch.equal(x, y), name


def optimizer_lines(folder: Path, states: Path | None = None) -> dict[str, torch.Tensor]:
    """fp32 weights and moments as one rank would hold them, whatever the ranks that saved them.

    Args:
        folder: a checkpoint.
        states: another folder with optimizer states of the same model, under ZeRO.
    """
    states = states or folder
    ranks = len(list(states.glob("*zero_pp_rank_*")))
    saved = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    groups = [
        [value for value in saved["module"].values() if (value.dim() > 1) == matrix]
        for matrix in (True, False)
    ]

    def state_of(rank: int) -> dict:
        if not ranks:
            return as_partition(groups, saved["optimizer"])
        (path,) = states.glob(f"*zero_pp_rank_{rank}_*")
        return torch.load(path, weights_only=False)[STATES]

    numels = [sum(value.numel() for value in group) for group in groups]
    state = repartition(state_of, max(1, ranks), [Group(numel, numel) for numel in numels], 0)
    moments = state[MOMENTS]["state"]
    lines = {
        name: torch.cat([moments[group][name] for group in range(2)]) for name in ("exp_avg", "exp_avg_sq")
    }
    return lines | {"weights": torch.cat(state[WEIGHTS]), "step": moments[0]["step"].reshape(1)}
