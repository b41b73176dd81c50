"""One rank of test_distributed.py: runs the cases named on the command line and prints what it saw as JSON.

    python -m torch.distributed.run --nproc_per_node 2 tests/ranks_distributed.py OUTPUT CASE…

Each case returns values that rank 0 writes to OUTPUT; the test holds the expectations. The case `micro_batches` reads
the shard set `shards` beside OUTPUT.
"""

import itertools
import json
import sys
import tempfile
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from data_prep.shards import ShardSet
from pretraining import distributed
from pretraining.checkpoint import TrainState
from pretraining.config import Lowered, lower, read_deepspeed_json
from pretraining.data import TrainingBatches
from pretraining.distributed import (
    Capabilities,
    World,
    accumulate_in_fp32,
    all_sum,
    all_true,
    gather_objects,
    gradient_accumulation,
)
from pretraining.model import BertConfig, BertForPreTraining
from pretraining.order import Order
from pretraining.schedules import ConstantSchedule
from pretraining.trainer import RunSettings, Trainer
from pretraining.unsharded import Unsharded

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WHOLE = {"zero_optimization": {"stage": 0}}
BATCH, FEATURES, CLASSES, STEPS = 24, 12, 5, 3
# With a large eps the update is smooth in the gradient, so that errors of the gradient stay visible in size.
ADAMW = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.01, "fused": True}
CLIP = 0.5
ENCODER_BATCH = 22
LONGEST = 24  # tokens
ENCODER = {
    "vocab_size": 500,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": LONGEST,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


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
    config |= changes
    is_whole = config["zero_optimization"]["stage"] == 0
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, dist_init_required=False,
        config=config | ({"gradient_clipping": 0.0} if is_whole else {}),
    )  # fmt: skip
    if is_whole:
        engine.optimizer = Unsharded(optimizer, CLIP)
    return engine


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
        "stage 0": WHOLE,
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
        for precision in (("fp32",) if changes is WHOLE else ("fp32", "bf16"))
        for micro_steps in (1, 4)
    }


def case_unequal_micro_steps(world: World) -> dict:
    # 24 instances on 3 ranks are 8 each; ranks cut them into 4, 2 and 3 pieces.
    pieces, ends = (4, 2, 3)[world.rank % 3], {}
    for name, changes in (("ZeRO-2", {}), ("whole", WHOLE)):
        engine = make_engine(world, make_model(), **changes)
        for step in range(STEPS):
            features, labels = batch_of(step)
            with gradient_accumulation(engine, 4):
                for piece in torch.arange(world.rank, BATCH, world.world_size).tensor_split(pieces):
                    loss = F.cross_entropy(engine(features[piece]), labels[piece], reduction="sum")
                    engine.backward(loss * world.world_size / BATCH)
            engine.step()
        ends[name] = parameters_of(engine.module)
    expected, norms = train_whole_batches()
    differences = {name: float((end - expected).abs().max()) for name, end in ends.items()}
    between = float((ends["whole"] - ends["ZeRO-2"]).abs().max())
    return differences | {"between": between, "least norm": min(norms)}


@contextmanager
def counted_all_reduces():
    """A list that grows by one for each all-reduce of this rank."""
    real, calls = torch.distributed.all_reduce, []

    def counting(*arguments, **options):
        calls.append(1)
        return real(*arguments, **options)

    torch.distributed.all_reduce = counting
    try:
        yield calls
    finally:
        torch.distributed.all_reduce = real


def case_reductions_per_step(world: World) -> dict:
    """All-reduces of the backward passes of one step, by number of micro-steps, with and without our context, when
    the gradients are one bucket and when they are several."""
    features, _ = batch_of(0)
    several = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 300}}
    counts = {}
    for buckets, changes in (("one bucket", {}), ("several buckets", several), ("whole", WHOLE)):
        for name, micro_steps, context in (("one", 1, True), ("six", 6, True), ("six without", 6, False)):
            engine = make_engine(world, make_model(), **changes)
            with (
                counted_all_reduces() as calls,
                gradient_accumulation(engine, micro_steps) if context else nullcontext(),
            ):
                for _ in range(micro_steps):
                    engine.backward(engine(features).sum())
            engine.step()
            counts[f"{name}, {buckets}"] = len(calls)
    return counts


def case_deepspeeds_own_accumulation(world: World) -> dict:
    """How far our steps of 4 micro-steps are from those that DeepSpeed accumulates by itself."""
    micro_steps, found = 4, {}
    accumulation = {
        "gradient_accumulation_steps": micro_steps,
        "train_batch_size": micro_steps * world.world_size,
    }
    for precision, changes in (("fp32", {}), ("bf16", {"data_types": {"grad_accum_dtype": "fp32"}})):
        ours = make_engine(world, make_model(), precision)
        accumulate_in_fp32(ours)
        train_shares(world, ours, micro_steps, precision)
        theirs = make_engine(world, make_model(), precision, **accumulation, **changes)
        for step in range(STEPS):
            features, labels = batch_of(step)
            for piece in torch.arange(world.rank, BATCH, world.world_size).tensor_split(micro_steps):
                scores = theirs(features[piece].to(DTYPES[precision]))
                loss = F.cross_entropy(scores.float(), labels[piece], reduction="sum")
                # DeepSpeed divides by the micro-steps.
                theirs.backward(loss * world.world_size / BATCH * micro_steps)
                theirs.step()
        found[precision] = float((parameters_of(ours.module) - parameters_of(theirs.module)).abs().max())
        found[f"{precision} moved"] = float(
            (parameters_of(make_model()) - parameters_of(ours.module)).abs().max()
        )
    return found


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
    """The relative error of the gradient of 1,024 micro-steps in bf16, in fp32 gradients and without.

    A linear layer's gradient is the mean of its inputs, so it is known exactly. The inputs scatter around 1, as
    gradients do that agree on a direction.
    """
    from deepspeed.utils import safe_get_full_grad

    generator = torch.Generator().manual_seed(0)
    inputs = 1 + 0.3 * torch.randn(world.world_size, 1024, 1, 8, generator=generator)
    inputs = inputs.to(torch.bfloat16)
    expected = inputs.double().mean(dim=(0, 1, 2))
    errors = {}
    for name, prepare in (("fp32 gradients", accumulate_in_fp32), ("as DeepSpeed does", lambda engine: None)):
        engine = make_engine(world, torch.nn.Linear(8, 1, bias=False), "bf16")
        prepare(engine)
        with gradient_accumulation(engine, 1024):
            for row in inputs[world.rank]:
                engine.backward(engine(row).sum() / 1024)
        gradient = safe_get_full_grad(engine.module.weight).double().flatten()
        errors[name] = float((gradient - expected).norm() / expected.norm())
    return errors


def lower_encoder(world: World, max_instances: int, max_tokens: int | None = None) -> Lowered:
    """What a run on these ranks would be told about its micro-batches."""
    content = {
        "train_batch_size": ENCODER_BATCH,
        "train_micro_batch_size_per_gpu": max_instances,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": ADAMW["lr"]}},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        settings = read_deepspeed_json(file.name)
    machine = {
        "world_size": world.world_size,
        "device": "cpu",
        "capabilities": Capabilities(None, fp16=False),
    }
    return lower(settings, **machine, seq_len=LONGEST, micro_batch_tokens=max_tokens)


def train_micro_batches(world: World, shard_set: ShardSet, bounds: dict) -> dict:
    """Three steps of the real loop over batches cut within `bounds`; what this rank saw and the parameters."""
    model = BertForPreTraining(BertConfig(**ENCODER))
    engine = make_engine(world, initialised(model))
    lowered = lower_encoder(world, **bounds)
    settings = RunSettings(
        seed=0, seq_len=LONGEST, train_batch_size=ENCODER_BATCH, micro_batch_size=lowered.micro_batch_size,
        micro_batch_tokens=lowered.micro_batch_tokens, max_micro_steps=lowered.max_micro_steps, spike_factor=0,
        schedule=ConstantSchedule(warmup_max_lr=ADAMW["lr"]), max_steps=10**6, log_interval=0, diagnostics_interval=0,
        save_interval=0,
        eval_interval=0, eval_instances=0, keep=1, keep_every=0,
    )  # fmt: skip
    state, stop = TrainState(0, 6, 16, ""), SimpleNamespace(raised=lambda: False)
    checkpoints = SimpleNamespace(is_written=False)
    trainer = Trainer(engine, world, settings, state, checkpoints, shard_set, None, None, stop)
    batches = batches_of(shard_set, world.rank, world.world_size, **bounds)
    micro_steps, tokens, losses, all_reduces = [], [], [], []
    with closing(batches):
        for share in itertools.islice(batches, STEPS):
            with counted_all_reduces() as calls:
                assert trainer.train_step(share)
            micro_steps.append(len(share.micro_batches))
            tokens.append(max(len(batch.input_ids) for batch in share.micro_batches))
            losses.append(trainer.last_means()["loss"])
            all_reduces.append(len(calls))
    return {
        "parameters": parameters_of(engine.module),
        "micro_steps": micro_steps,
        "tokens": max(tokens),
        "losses": losses,
        "all_reduces": max(all_reduces),
    }


def batches_of(shard_set: ShardSet, rank: int, world_size: int, **bounds) -> TrainingBatches:
    order = Order(shard_set.block_offsets("train"), 0, 6, 16)
    return TrainingBatches(
        order, shard_set, consumed=0, train_batch_size=ENCODER_BATCH, rank=rank, world_size=world_size,
        masking="dynamic", seed=0, **bounds,
    )  # fmt: skip


def initialised(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in every process and every call."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def train_encoder_alone(shard_set: ShardSet) -> tuple[torch.Tensor, list[float]]:
    """The parameters and losses of one process in plain PyTorch, each batch in one piece."""
    model = initialised(BertForPreTraining(BertConfig(**ENCODER)))
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    with closing(batches_of(shard_set, 0, 1, max_instances=ENCODER_BATCH)) as batches:
        for share in itertools.islice(batches, STEPS):
            (batch,) = share.micro_batches
            output = model(batch)
            loss = output.masked_lm_loss_sum / len(batch.masked_lm_labels)
            loss = loss + output.next_sentence_loss_sum / ENCODER_BATCH
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return parameters_of(model), losses


def case_micro_batches(world: World) -> dict:
    """The real loop on micro-batches cut in different ways, against one process in plain PyTorch."""
    shard_set = ShardSet.open(Path(sys.argv[1]).with_name("shards"))
    expected, losses = train_encoder_alone(shard_set)
    ways = {
        "whole shares": {"max_instances": ENCODER_BATCH},
        "fixed": {"max_instances": 3},
        "budget": {"max_instances": ENCODER_BATCH, "max_tokens": 60},
        "tightest": {"max_instances": ENCODER_BATCH, "max_tokens": 24},
    }
    seen = {}
    for name, bounds in ways.items():
        found = train_micro_batches(world, shard_set, bounds)
        found["parameters"] = float((found["parameters"] - expected).abs().max())
        found["losses"] = max(abs(a / b - 1) for a, b in zip(found["losses"], losses, strict=True))
        found["micro_steps"] = gather_objects(found["micro_steps"])
        found["tokens"] = max(gather_objects(found["tokens"]))
        seen[name] = found
    seen["moved"] = float(
        (expected - parameters_of(initialised(BertForPreTraining(BertConfig(**ENCODER))))).abs().max()
    )
    return seen


def case_overflow(world: World) -> dict:
    """What an infinite loss on the last rank, at the second of four steps, leaves behind on this rank."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True
    seen = {}
    for name in ("whole", "fp32", "bf16", "fp16"):
        precision = "fp32" if name == "whole" else name
        scaler = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        changes = {"whole": WHOLE, "fp16": {"fp16": scaler}}.get(name, {})
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
        seen[name] = steps
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
