"""How far sharded training in each precision is from one process without ZeRO in float32, after some steps.

    python tests/benchmarks/bench_exactness.py data/shards --steps 20

Runs the real program, `--model tiny` without dropout, on 1 to 4 ranks (ZeRO-2) with AdamW and with LAMB in fp32, bf16 and
fp16 with dynamic loss scaling (on a CPU both are emulated), and LAMB that takes its slices for parameters, as any other
LAMB does under ZeRO. Prints the largest difference of an fp32 weight over the largest weight, and the median seconds of a
step. Gradients are rounded in 16 bits before any optimizer sees them: that is what is left there (tests/test_lamb.py
shows the optimizer alone).
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from forked_ranks import run
from training_runs import optimizer_lines

OPTIMIZERS = {
    "AdamW": {"lr": 1e-3, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01},
    "Lamb": {"lr": 1e-2, "eps": 1e-6, "weight_decay": 0.01},
}
PRECISIONS = ("fp32", "bf16", "fp16")


def prepare(unaware: bool) -> None:
    """In a rank, before the program: let DeepSpeed take fp16 on a CPU, and keep LAMB from knowing its slices."""
    from pretraining.distributed import import_deepspeed

    import_deepspeed().accelerator.get_accelerator().is_fp16_supported = lambda: True
    if unaware:
        from pretraining.lamb import Lamb

        Lamb.shard = lambda self, zero: None


def train(
    arguments: argparse.Namespace, folder: Path, ranks: int, changes: dict, unaware: bool = False
) -> Path:
    """One run; returns its folder."""
    folder.mkdir()
    content = {
        "train_batch_size": arguments.train_batch_size,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    }
    (folder / "config.json").write_text(json.dumps(content | changes))
    argv = [
        "--deepspeed_config",
        folder / "config.json",
        "--data",
        arguments.shards,
        "--output",
        folder / "run",
    ]
    argv += ["--model", "tiny", "--dropout", "0", "--max_steps", arguments.steps, "--log_interval", 1]
    argv += ["--eval_interval", 0, "--diagnostics_interval", 0, "--eval_instances", 1]
    run([str(part) for part in argv], ranks, folder / "logs", functools.partial(prepare, unaware))
    return folder / "run"


def weights(folder: Path) -> torch.Tensor:
    """All fp32 weights of a run's checkpoint, in one line."""
    (checkpoint,) = (folder / "checkpoints").glob("step-*")
    return optimizer_lines(checkpoint)["weights"].detach().double()


def step_seconds(folder: Path) -> float:
    """The median over the logged steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "speed/tokens_per_second" in line]
    tokens = [now["progress/tokens"] - before["progress/tokens"] for before, now in itertools.pairwise(lines)]
    return statistics.median(
        count / line["speed/tokens_per_second"] for count, line in zip(tokens, lines[1:], strict=True)
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("shards", type=Path, help="a shard set")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    parser.add_argument("--train_batch_size", type=int, default=29, help="instances of a step")
    arguments = parser.parse_args()
    print(f"{'':<36}" + "".join(f"{ranks} rank{'s' * (ranks > 1)}".rjust(22) for ranks in (1, 2, 3, 4)))
    with tempfile.TemporaryDirectory() as folder:
        for name, params in OPTIMIZERS.items():
            optimizer = {"optimizer": {"type": name, "params": params}}
            plain = {"zero_optimization": {"stage": 0}}
            reference = weights(train(arguments, Path(folder) / name, 1, optimizer | plain))
            cases = [(precision, False) for precision in PRECISIONS]
            cases += [("fp32", True)] if name == "Lamb" else []
            for precision, unaware in cases:
                row = f"{name}, {precision}{', slices for parameters' * unaware}".ljust(36)
                for ranks in (1, 2, 3, 4):
                    section = {} if precision == "fp32" else {precision: {"enabled": True}}
                    path = Path(folder) / f"{name}-{precision}-{ranks}-{unaware}"
                    done = train(arguments, path, ranks, optimizer | section, unaware)
                    far = float((weights(done) - reference).abs().max() / reference.abs().max())
                    row += f"{far:.1e} ({step_seconds(done):.2f} s)".rjust(22)
                print(row, flush=True)


if __name__ == "__main__":
    main()
