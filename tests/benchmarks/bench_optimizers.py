"""One optimizer step at BERT's shapes: our LAMB, torch's fused AdamW, DeepSpeed's kernels, and the memory's limit.

    python tests/benchmarks/bench_optimizers.py --model large --ranks 8

Times one rank's share of the update, on a flat partition as ZeRO gives it, without the all-reduce of the norms (some
hundred numbers). The runs are interleaved and medians are printed. The limit is the number of bytes that an update has
to move over the bandwidth of a copy measured beside it: AdamW reads gradient, weight and two moments and writes the
last three, 28 bytes a parameter; LAMB knows its trust ratios only when all updates are known, and so reads and writes
the weight and the update again, 44.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from pretraining.distributed import import_deepspeed
from pretraining.lamb import Lamb
from pretraining.model import PRESETS, BertConfig, BertForPreTraining
from pretraining.slices import Layout, Slices

BYTES = {"AdamW": 28, "LAMB": 44}


def partition(lengths: list[int], ranks: int) -> list[tuple[int, int]]:
    """The first rank's slices of parameters that lie end to end."""
    room, slices = -(-sum(lengths) // ranks), []
    for number, length in enumerate(lengths):
        if room:
            slices.append((number, min(length, room)))
            room -= slices[-1][1]
    return slices


def our_lamb(flat: Tensor, slices: list[tuple[int, int]], parameters: int) -> torch.optim.Optimizer:
    """LAMB that has been told where the parameters lie, without other ranks to add norms up with."""
    lamb = Lamb([flat], 1e-3, weight_decay=0.01)
    lamb.set_layout([flat], Layout(Slices(parameters, [slices]), flat.device))
    return lamb


def rivals(flat: Tensor) -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """DeepSpeed's optimizers for this device, which compile themselves when they are made."""
    import_deepspeed()
    if flat.device.type == "cpu":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return {"AdamW, DeepSpeed's CPU kernel": lambda: DeepSpeedCPUAdam([flat], lr=1e-3, weight_decay=0.01)}
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb

    return {
        "AdamW, DeepSpeed's FusedAdam": lambda: FusedAdam([flat], lr=1e-3, weight_decay=0.01),
        "LAMB, DeepSpeed's FusedLamb (takes the slice for a parameter)": lambda: FusedLamb(
            [flat], lr=1e-3, weight_decay=0.01
        ),
    }


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=PRESETS, default="large", help="whose matrices are updated")
    parser.add_argument(
        "--ranks", type=int, default=8, help="ranks that share the update; one of them is timed"
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where")
    parser.add_argument(
        "--deepspeed", action="store_true", help="time DeepSpeed's kernels too (compiles them)"
    )
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig.preset(arguments.model, vocab_size=30_522))
    lengths = [parameter.numel() for parameter in model.parameters() if parameter.dim() > 1]
    slices = partition(lengths, arguments.ranks)
    size = sum(length for _, length in slices)
    print(
        f"{arguments.model}: {len(lengths)} matrices, {sum(lengths):,} parameters; of {arguments.ranks} ranks one has "
        f"{size:,} in {len(slices)} slices; {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    flat = torch.nn.Parameter(torch.randn(size, device=device) * 0.02)
    gradient, target = torch.randn(size, device=device), torch.empty(size, device=device)
    optimizers = {
        "LAMB, ours": our_lamb(flat, slices, len(lengths)),
        "AdamW, torch's fused": torch.optim.AdamW([flat], lr=1e-3, weight_decay=0.01, fused=True),
    }
    if arguments.deepspeed:
        optimizers |= {name: make() for name, make in rivals(flat).items()}
    times: dict[str, list[float]] = {"copy": [], **{name: [] for name in optimizers}}
    for round_number in range(arguments.rounds + 2):
        for name, optimizer in optimizers.items():
            flat.grad = gradient.clone()
            taken = seconds(optimizer.step, device)
            times[name] += [taken] if round_number >= 2 else []
        taken = seconds(lambda: target.copy_(gradient), device)
        times["copy"] += [taken] if round_number >= 2 else []
    report(times, size)


def report(times: dict[str, list[float]], size: int) -> None:
    """A row per optimizer: median, against torch's AdamW, and against its own limit."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    bandwidth = 8 * size / medians["copy"]
    print(f"copy: {bandwidth / 1e9:.1f} GB/s")
    print(f"{'':<64}{'ms':>9}{'× AdamW':>9}{'limit, ms':>11}{'of limit':>10}")
    for name in times:
        if name != "copy":
            limit = BYTES[name.split(",")[0]] * size / bandwidth
            ratio = medians[name] / medians["AdamW, torch's fused"]
            print(
                f"{name:<64}{medians[name] * 1e3:>9.1f}{ratio:>9.2f}{limit * 1e3:>11.1f}{limit / medians[name]:>10.0%}"
            )


if __name__ == "__main__":
    main()
