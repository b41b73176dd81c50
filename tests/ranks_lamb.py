"""One rank of test_lamb.py: LAMB under ZeRO against the dense float64 one, on gradients that are exact in any precision.

    python -m torch.distributed.run --nproc_per_node 3 tests/ranks_lamb.py OUTPUT

Rank 0 writes what was measured; the tests hold the expectations. The loss is linear in the parameters and its
coefficients are small whole numbers that 1 to 4 ranks divide evenly, so neither the 16-bit formats nor the reduction
round the gradient: what is left of a difference is the optimizer's.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from dense_lamb import DenseLamb

from pretraining import distributed
from pretraining.distributed import World, accumulate_in_fp32, gather_objects, gradient_accumulation
from pretraining.lamb import Lamb
from pretraining.optimizer import LambSettings, choose_optimizer, parameter_groups
from pretraining.unsharded import Unsharded

STEPS, MICRO_STEPS, CLIP = 20, 2, 30.0
# The large matrix is longer than a piece, and on 2 to 4 ranks a border of the partitions cuts one of these.
SHAPES = {
    "embeddings": (181, 211), "query": (37, 11), "zeros": (5, 8), "key": (64, 13), "bias": (37,), "scalar": (1,),
    "norm": (130,), "output": (9, 70),
}  # fmt: skip
OPTIONS = {"lr": 0.02, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01}
FIRST, UNAWARE = "NVIDIA's", "slices taken for parameters"
VARIANTS = {
    FIRST: {},
    "DeepSpeed's": {
        "bias_correction": False,
        "trust_ratio_clamp": [0.01, 0.3],
        "layer_adaptation_for_no_decay": True,
    },
    "neither averaged nor decayed": {"grad_averaging": False, "weight_decay": 0.0},
}


class LinearLoss(torch.nn.Module):
    """Its gradients are the coefficients that it is given."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            value = torch.zeros(shape) if name == "zeros" else torch.randn(shape, generator=generator) * 0.05
            # 16-bit numbers, so that every precision starts from the same weights.
            setattr(self, name, torch.nn.Parameter(value.bfloat16().float()))

    def forward(self, coefficients: dict[str, torch.Tensor]) -> torch.Tensor:
        parameters = dict(self.named_parameters())
        return sum((parameters[name].float() * c).sum() for name, c in coefficients.items())


def coefficients(step: int, micro_step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro_step)
    found = {
        name: torch.randint(-5, 6, shape, generator=generator).float() * 12 * 2.0 ** -(step % 5 + 4)
        for name, shape in SHAPES.items()
    }
    if step % 3 == 0:
        found["query"].zero_()
    return found


def rates() -> Iterator[float]:
    return (OPTIONS["lr"] * min(1.0, (step + 1) / 5) for step in range(STEPS))


def make_engine(world: World, settings: LambSettings, stage: int, precision: str, *, shard: bool = True):
    import deepspeed

    model = LinearLoss()
    optimizer = choose_optimizer(settings, "cpu").build(
        parameter_groups(model, settings.weight_decay), settings
    )
    config = {
        "train_batch_size": world.world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if precision == "fp16":
        config["fp16"]["initial_scale_power"] = 4
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[
        0
    ]
    if stage == 0:
        engine.optimizer = Unsharded(optimizer, CLIP)
    elif shard:
        optimizer.shard(engine.optimizer)
    accumulate_in_fp32(engine)
    return engine, optimizer


def train(engine, micro_steps: int) -> None:
    for step, rate in enumerate(rates()):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        with gradient_accumulation(engine, MICRO_STEPS):
            for micro_step in range(micro_steps):
                # A rank that runs fewer micro-steps takes the coefficients of several at once.
                pieces = [coefficients(step, m) for m in range(micro_step, MICRO_STEPS, micro_steps)]
                engine.backward(engine({name: sum(piece[name] for piece in pieces) for name in SHAPES}))
        engine.step()


def masters(engine) -> dict[str, torch.Tensor]:
    """The whole fp32 parameters, put together from the partitions of all ranks."""
    if not engine.zero_optimization():
        return dict(engine.module.named_parameters())
    zero, found = engine.optimizer, {}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for number, parameters in enumerate(zero.bit16_groups):
        line = torch.cat(gather_objects(zero.single_partition_of_fp32_groups[number].detach().clone()))
        offsets = zero.round_robin_bit16_offsets[number]
        for parameter, offset in zip(parameters, offsets, strict=True):
            numbers = line[offset : offset + parameter.numel()]
            found[names[id(parameter)]] = numbers.view(parameter.shape)
    return found


def named_ratios(model: LinearLoss, optimizer: Lamb, weight_decay: float) -> dict[str, float]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for ours, group in zip(optimizer.param_groups, parameter_groups(model, weight_decay), strict=True):
        ratios = optimizer.trust_ratios(ours)
        if ratios is not None:
            found |= dict(zip([names[id(p)] for p in group["params"]], ratios.tolist(), strict=True))
    return found


def oracle(settings: LambSettings) -> DenseLamb:
    model = LinearLoss()
    clamp = settings.trust_ratio_clamp
    dense = DenseLamb(
        dict(model.named_parameters()), {name for name, shape in SHAPES.items() if len(shape) > 1},
        betas=tuple(settings.betas), eps=settings.eps, weight_decay=settings.weight_decay,
        bias_correction=settings.bias_correction, grad_averaging=settings.grad_averaging,
        clamp=tuple(clamp) if clamp else None, adapt_all=settings.layer_adaptation_for_no_decay, max_grad_norm=CLIP,
    )  # fmt: skip
    for step, rate in enumerate(rates()):
        pieces = [coefficients(step, micro_step) for micro_step in range(MICRO_STEPS)]
        dense.step({name: sum(piece[name] for piece in pieces) for name in SHAPES}, rate)
    return dense


def one_process(settings: LambSettings) -> dict[str, torch.Tensor]:
    """Our LAMB in float32 without DeepSpeed: every parameter whole."""
    model = LinearLoss()
    optimizer = choose_optimizer(settings, "cpu").build(
        parameter_groups(model, settings.weight_decay), settings
    )
    for step, rate in enumerate(rates()):
        for micro_step in range(MICRO_STEPS):
            model(coefficients(step, micro_step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a parameter, by its norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - value).norm() / value.norm()) for name, value in expected.items()
    )


def ratio_difference(found: dict[str, float], expected: dict[str, float]) -> float:
    assert found.keys() == expected.keys()
    return max(abs(found[name] / value - 1) for name, value in expected.items())


def straddling(zero) -> int:
    """How many parameters a border of the partitions cuts, in all groups."""
    count = 0
    for number, size in enumerate(zero.partition_size):
        offsets, metas = zero.round_robin_bit16_offsets[number], zero.round_robin_bit16_meta[number]
        count += sum(
            offset // size != (offset + meta.numel() - 1) // size
            for offset, meta in zip(offsets, metas, strict=True)
        )
    return count


def case(world: World, settings: LambSettings, stage: int, precision: str, dense: DenseLamb) -> dict:
    engine, optimizer = make_engine(world, settings, stage, precision)
    train(engine, MICRO_STEPS - world.rank % 2)
    ratios = named_ratios(LinearLoss(), optimizer, settings.weight_decay)
    found = {
        "weights": difference(masters(engine), dense.weights),
        "trust_ratios": ratio_difference(ratios, dense.trust_ratios),
    }
    if stage:
        found["straddling"] = straddling(engine.optimizer)
    engine.destroy()
    return found


def measure(world: World) -> dict:
    found = {}
    for variant, changes in VARIANTS.items():
        settings = LambSettings(**OPTIONS | changes)
        dense = oracle(settings)
        found[f"one process, {variant}"] = {"weights": difference(one_process(settings), dense.weights)}
        kinds = [(0, "fp32"), (1, "fp32"), (2, "bf16"), (2, "fp16")] if variant == FIRST else [(2, "fp32")]
        for stage, precision in kinds:
            found[f"stage {stage}, {precision}, {variant}"] = case(world, settings, stage, precision, dense)
    settings = LambSettings(**OPTIONS)
    engine, _ = make_engine(world, settings, 2, "fp32", shard=False)
    train(engine, MICRO_STEPS)
    found[UNAWARE] = {"weights": difference(masters(engine), oracle(settings).weights)}
    return found


def main() -> None:
    world = distributed.start()
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: (
        True
    )  # DeepSpeed refuses fp16 on CPUs, which is slow but right
    found = measure(world)
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    distributed.shutdown()


if __name__ == "__main__":
    main()
