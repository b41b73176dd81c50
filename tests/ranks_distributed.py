"""One rank of test_distributed.py: runs the cases named on the command line and prints what it saw as JSON.

    python -m torch.distributed.run --nproc_per_node 2 tests/ranks_distributed.py OUTPUT CASE…

Each case returns values that rank 0 writes to OUTPUT; the test holds the expectations.
"""

import json
import sys
from contextlib import nullcontext

import torch
import torch.nn.functional as F

from pretraining import distributed
from pretraining.distributed import World, accumulate_in_fp32, all_sum, all_true, gradient_accumulation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH, FEATURES, CLASSES, STEPS = 24, 12, 5, 3
# With a large eps the update is smooth in the gradient, so that errors of the gradient stay visible in size.
ADAMW = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.01, "fused": True}
CLIP = 0.5


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(FEATURES, 37),
        torch.nn.GELU(),
        torch.nn.LayerNorm(37),
        torch.nn.Linear(37, CLASSES),
    ]
    return torch.nn.Sequential(*layers)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(BATCH, FEATURES, generator=generator)
    return features, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def make_engine(world: World, model: torch.nn.Module, precision: str = "fp32", **changes):
    import deepspeed

    config = {
        "train_batch_size": world.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 2},
        "steps_per_print": 10**9,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=config | changes, dist_init_required=False
    )[0]


def parameters_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def train_whole_batches() -> tuple[torch.Tensor, list[float]]:
    """The parameters and gradient norms of one process, in float32, without DeepSpeed."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    norms = []
    for step in range(STEPS):
        features, labels = batch_of(step)
        F.cross_entropy(model(features), labels).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(model), norms


def train_shares(world: World, engine, micro_steps: int, precision: str) -> list[float]:
    """Train as the real loop does: instance i on rank i mod world size, that share in `micro_steps` pieces."""
    norms = []
    for step in range(STEPS):
        features, labels = batch_of(step)
        share = torch.arange(world.rank, BATCH, world.world_size)
        with gradient_accumulation(engine, micro_steps):
            for piece in share.tensor_split(micro_steps):
                scores = engine(features[piece].to(DTYPES[precision]))
                loss = F.cross_entropy(scores.float(), labels[piece], reduction="sum")
                engine.backward(loss * world.world_size / BATCH)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def difference(world: World, micro_steps: int, precision: str = "fp32", **changes) -> dict:
    """How far a sharded run is from whole batches: parameters absolutely, gradient norms relatively."""
    engine = make_engine(world, make_model(), precision, **changes)
    if micro_steps > 1:
        accumulate_in_fp32(engine)
    norms = train_shares(world, engine, micro_steps, precision)
    expected, expected_norms = train_whole_batches()
    return {
        "parameters": float((parameters_of(engine.module) - expected).abs().max()),
        "moved": float((parameters_of(make_model()) - expected).abs().max()),
        "norms": max(abs(a / b - 1) for a, b in zip(norms, expected_norms, strict=True)),
    }


def case_equal_to_the_whole_batch(world: World) -> dict:
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    variants = {
        "stage 1": {"zero_optimization": {"stage": 1}},
        "stage 2": {},
        "small buckets": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 100, "overlap_comm": True}},
        "offload": {"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False},
    }
    return {
        f"{name}, {precision}, {micro_steps} micro-steps": difference(
            world, micro_steps, precision, **changes
        )
        for name, changes in variants.items()
        for precision in ("fp32", "bf16")
        for micro_steps in (1, 4)
    }


def case_unequal_micro_steps(world: World) -> dict:
    # 24 instances on 3 ranks are 8 each; ranks cut them into 4, 2 and 3 pieces.
    engine = make_engine(world, make_model())
    pieces = (4, 2, 3)[world.rank % 3]
    for step in range(STEPS):
        features, labels = batch_of(step)
        with gradient_accumulation(engine, 4):
            for piece in torch.arange(world.rank, BATCH, world.world_size).tensor_split(pieces):
                loss = F.cross_entropy(engine(features[piece]), labels[piece], reduction="sum")
                engine.backward(loss * world.world_size / BATCH)
        engine.step()
    return {"parameters": float((parameters_of(engine.module) - train_whole_batches()[0]).abs().max())}


def case_reductions_per_step(world: World) -> dict:
    """All-reduces of the backward passes of one step, by number of micro-steps, with and without our context."""
    counts = {}
    real = torch.distributed.all_reduce
    features, _ = batch_of(0)
    for name, micro_steps, context in (("one", 1, True), ("six", 6, True), ("six without", 6, False)):
        engine = make_engine(world, make_model())
        calls = []

        def counting(*arguments, calls=calls, **options):
            calls.append(1)
            return real(*arguments, **options)

        torch.distributed.all_reduce = counting
        with gradient_accumulation(engine, micro_steps) if context else nullcontext():
            for _ in range(micro_steps):
                engine.backward(engine(features).sum())
        torch.distributed.all_reduce = real
        engine.step()
        counts[name] = len(calls)
    return counts


def case_partition(world: World) -> dict:
    """What a rank of ZeRO-2 holds, in numbers per parameter of the model."""
    engine = make_engine(world, make_model())
    train_shares(world, engine, 1, "fp32")
    parameters = sum(parameter.numel() for parameter in engine.module.parameters())
    (state,) = engine.optimizer.optimizer.state.values()
    return {
        "partition_gradients": engine.optimizer.partition_gradients,
        "exp_avg": state["exp_avg"].numel() / parameters,
        "exp_avg_sq": state["exp_avg_sq"].numel() / parameters,
    }


def case_many_micro_steps_in_bf16(world: World) -> dict:
    """The gradient norm of 1,024 like micro-steps over the norm expected, in fp32 gradients and without."""
    ratios = {}
    for name, prepare in (("fp32 gradients", accumulate_in_fp32), ("as DeepSpeed does", lambda engine: None)):
        engine = make_engine(world, torch.nn.Linear(4, 1, bias=False), "bf16")
        prepare(engine)
        ones = torch.ones(1, 4, dtype=torch.bfloat16)
        with gradient_accumulation(engine, 1024):
            for _ in range(1024):
                engine.backward(engine(ones).sum() * (world.world_size / 1024))
        engine.step()
        # Each rank's mean loss has gradient 1 in all 4 weights, and the ranks are averaged.
        ratios[name] = float(engine.get_global_grad_norm()) / (world.world_size * 2)
    return ratios


def case_overflow(world: World) -> dict:
    """What an infinite loss on the last rank, at the second of four steps, leaves behind on this rank."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    seen = {}
    for precision in ("fp32", "bf16", "fp16"):
        scaler = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        changes = {"fp16": scaler} if precision == "fp16" else {}
        engine = make_engine(world, make_model(), precision, **changes)
        accumulate_in_fp32(engine)
        steps = []
        for step in range(4):
            before = parameters_of(engine.module)
            features, labels = batch_of(step)
            with gradient_accumulation(engine, 2):
                for piece in torch.arange(world.rank, BATCH, world.world_size).tensor_split(2):
                    scores = engine(features[piece].to(DTYPES[precision]))
                    loss = (
                        F.cross_entropy(scores.float(), labels[piece], reduction="sum")
                        * world.world_size
                        / BATCH
                    )
                    is_bad = step == 1 and world.rank == world.world_size - 1
                    engine.backward(loss * (float("inf") if is_bad else 1.0))
            engine.step()
            moved = bool((parameters_of(engine.module) != before).any())
            steps.append(
                [engine.was_step_applied(), moved, engine.skipped_steps, engine.optimizer.loss_scale]
            )
        seen[precision] = steps
    return seen


def case_agreement(world: World) -> dict:
    large = 2**52 if world.rank == 0 else 1
    return {
        "sums": all_sum([world.rank + 1, 0.5, large]),
        "all": [all_true(True), all_true(world.rank == 0), all_true(False)],
        "world": [world.rank, world.local_rank, world.world_size, world.device.type],
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    output, *cases = sys.argv[1:]
    world = distributed.start()
    results = {name: globals()[f"case_{name}"](world) for name in cases}
    if world.rank == 0:
        with open(output, "w") as file:
            json.dump(results, file)
    distributed.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
