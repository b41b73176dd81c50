"""One rank of test_loss_scale.py: steps of the real trainer in fp16, with DeepSpeed's dynamic scaler on a processor.

Each case returns values that rank 0 writes as JSON to OUTPUT, the first argument; the others name the cases. The
shard set `shards` lies beside OUTPUT. The test holds the expectations.
"""

import itertools
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from injections import allow_fp16
from ranks_distributed import (
    ENCODER,
    ENCODER_BATCH,
    LONGEST,
    batch_of,
    batches_of,
    initialised,
    make_engine,
    make_model,
)
from training_runs import flat

from data_prep.shards import ShardSet
from pretraining import distributed, trainer
from pretraining.checkpoint import TrainState
from pretraining.distributed import World, accumulate_in_fp32, gather_objects
from pretraining.loss_scale import hold_loss_scale
from pretraining.model import BertConfig, BertForPreTraining
from pretraining.repartition import load
from pretraining.schedules import ConstantSchedule, ScheduleSettings, WarmupLR
from pretraining.trainer import RunSettings, Trainer
from pretraining.trouble import loss_scale_cannot_fall

LR = 0.05
MICRO_BATCH = 6  # instances, so that each rank's share of 11 takes 2 micro-steps
# Its update is linear in the gradient.
SGD = {"optimizer": torch.optim.SGD, "zero_allow_untested_optimizer": True}


def model_of_floats() -> BertForPreTraining:
    return initialised(BertForPreTraining(BertConfig(**ENCODER)))


class Run:
    """A trainer in fp16 whose every step is watched.

    Args:
        world: this rank.
        shards: the shard set.
        scaler: options of "fp16".
        overflows: steps, from 0, in which the last rank's loss is infinite.
        clip: of the gradient norm; 0 for none.
        optimizer: its class.
        schedule: of the learning rate.
        changes: to what DeepSpeed gets.
    """

    def __init__(
        self, world: World, shards: ShardSet, scaler: dict, *, overflows=(), clip: float = 0.0,
        optimizer=torch.optim.AdamW, schedule: ScheduleSettings | None = None, **changes,
    ):  # fmt: skip
        import deepspeed

        self.world, self.shards, self.clip, self.overflows = world, shards, clip, set(overflows)
        model = model_of_floats()
        config = {
            "train_batch_size": world.world_size,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": clip,
            "zero_optimization": {"stage": 2},
            "fp16": {"enabled": True} | scaler,
        }
        self.engine = deepspeed.initialize(
            model=model,
            optimizer=optimizer(model.parameters(), lr=LR),
            config=config | changes,
            dist_init_required=False,
        )[0]
        accumulate_in_fp32(self.engine)
        settings = RunSettings(
            seed=0, seq_len=LONGEST, train_batch_size=ENCODER_BATCH, micro_batch_size=MICRO_BATCH,
            micro_batch_tokens=None, max_micro_steps=2, spike_factor=0,
            schedule=schedule or ConstantSchedule(warmup_max_lr=LR), max_steps=10**6, log_interval=1, save_interval=0,
            eval_interval=0, eval_instances=0, keep=1, keep_every=0,
        )  # fmt: skip
        self.lines: list[dict] = []
        self.trainer = Trainer(
            self.engine,
            world,
            settings,
            TrainState(0, 6, 16, ""),
            SimpleNamespace(is_written=False),
            shards,
            SimpleNamespace(record=lambda step, values: self.lines.append(values)),
            None,
            SimpleNamespace(raised=lambda: False),
        )
        self._watch()

    def _watch(self) -> None:
        """Keep what the loss of each micro-step is multiplied by, as it arrives in the backward pass."""
        self.scales: list[float] = []
        forward_backward = self.trainer._forward_backward

        def keep_factor(share, masked):
            self.factor = self.world.world_size / masked
            return forward_backward(share, masked)

        def watch(module, inputs, output):
            if not torch.is_grad_enabled():
                return output
            is_bad = (
                self.trainer.state.step in self.overflows and self.world.rank == self.world.world_size - 1
            )
            loss = output.masked_lm_loss_sum * (float("inf") if is_bad else 1.0)
            loss.register_hook(lambda gradient: self.scales.append(round(float(gradient) / self.factor, 3)))
            return output._replace(masked_lm_loss_sum=loss)

        self.trainer._forward_backward = keep_factor
        self.engine.module.register_forward_hook(watch)

    def weights(self) -> torch.Tensor:
        """The fp32 weights of all ranks in one line."""
        (own,) = self.engine.optimizer.single_partition_of_fp32_groups
        numel = sum(parameter.numel() for parameter in self.engine.module.parameters())
        return torch.cat(gather_objects(own.detach()))[:numel]

    def step(self, share) -> dict:
        """One step: what the losses were multiplied by, what was logged of it, and the scale of the next one."""
        self.scales.clear()
        assert self.trainer.train_step(share)
        return {
            "scales": sum(gather_objects(self.scales), []),
            "logged": self.lines[-1]["optimizer/loss_scale"],
            "next": self.engine.optimizer.loss_scaler.cur_scale,
            "skipped": self.trainer.state.skipped_steps,
            "norm": self.lines[-1]["optimizer/gradient_norm"],
        }

    def shares(self):
        return closing(
            batches_of(self.shards, self.world.rank, self.world.world_size, max_instances=MICRO_BATCH)
        )

    def steps(self, count: int) -> list[dict]:
        """Steps, each compared with the update that one process in float32 makes of the same weights."""
        seen = []
        with self.shares() as shares, closing(batches_of(self.shards, 0, 1, max_instances=99)) as whole:
            before = self.weights()
            for share, batch in itertools.islice(zip(shares, whole, strict=True), count):
                entry = self.step(share)
                after = self.weights()
                moved, gradient = before - after, float32_gradient(before, batch)
                before = after
                norm = float(gradient.norm())
                expected = LR * gradient * (min(1.0, self.clip / norm) if self.clip else 1.0)
                entry |= {
                    "share": float(moved.dot(expected) / expected.dot(expected)),
                    "error": float((moved - expected).norm() / expected.norm()),
                    "true_norm": norm,
                }
                seen.append(entry)
        return seen

    def snapshot(self) -> dict[str, list[torch.Tensor]]:
        """Copies of all that an update changes on this rank."""
        zero = self.engine.optimizer
        states = [state for _, state in sorted(zero.optimizer.state_dict()["state"].items())]
        held = {
            "parameters": list(self.engine.module.state_dict().values()),
            "fp32 weights": zero.single_partition_of_fp32_groups,
            "moments": [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")],
            "step": [state["step"] for state in states],
        }
        return {name: [value.detach().clone() for value in values] for name, values in held.items()}


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def float32_gradient(weights: torch.Tensor, share) -> torch.Tensor:
    """The gradient of a whole batch in one process and float32, without DeepSpeed."""
    model = model_of_floats()
    values = list(model.parameters())
    with torch.no_grad():
        for value, piece in zip(values, weights.split([value.numel() for value in values]), strict=True):
            value.copy_(piece.view_as(value))
    (batch,) = share.micro_batches
    output = model(batch)
    loss = output.masked_lm_loss_sum / len(batch.masked_lm_labels)
    (loss + output.next_sentence_loss_sum / ENCODER_BATCH).backward()
    return torch.cat([value.grad.flatten() for value in values])


GROWTH = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
CLIP = 0.36  # between the gradient norms of the two steps on which the scale grows


def case_growth(world: World, shards: ShardSet) -> dict:
    """Five steps that let the scale grow twice, as the trainer lets DeepSpeed use it, and as DeepSpeed does by itself."""
    seen = {"ours": Run(world, shards, GROWTH, clip=CLIP, **SGD).steps(5)}
    hold, trainer.hold_loss_scale = trainer.hold_loss_scale, lambda optimizer: None
    seen["DeepSpeed's own"] = Run(world, shards, GROWTH, clip=CLIP, **SGD).steps(5)
    trainer.hold_loss_scale = hold
    seen["static"] = Run(world, shards, {"loss_scale": 128}, **SGD).steps(2)
    return seen


def case_growth_elsewhere(world: World, shards: ShardSet) -> dict:
    """The same steps under other ways of partitioning."""
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    variants = {
        "stage 1": {"zero_optimization": {"stage": 1}},
        "offload": {"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False},
    }
    return {
        name: Run(world, shards, GROWTH, clip=CLIP, **SGD | changes).steps(5)
        for name, changes in variants.items()
    }


def case_overflow(world: World, shards: ShardSet) -> list[dict]:
    """What changes in each of five AdamW steps in a warm-up, the third with an infinite loss on the last rank only."""
    warmup = WarmupLR(warmup_max_lr=LR, warmup_num_steps=20, warmup_type="linear")
    run = Run(
        world, shards, {"initial_scale_power": 8, "hysteresis": 1}, overflows={2}, clip=1.0, schedule=warmup
    )
    seen = []
    with run.shares() as shares:
        for share in itertools.islice(shares, 5):
            before, state = run.snapshot(), run.trainer.state
            consumed, applied = state.consumed, state.applied_steps
            entry, after = run.step(share), run.snapshot()
            changed = [name for name in before if not same(before[name], after[name])]
            entry |= {
                "changed": gather_objects(changed),
                "consumed": state.consumed - consumed,
                "applied": state.applied_steps - applied,
                "learning_rate": run.lines[-1]["optimizer/learning_rate"],
            }
            seen.append(entry)
    return seen


def case_options(world: World, shards: ShardSet) -> dict:
    """The scale of each step under scripted overflows ("x"), for options of "fp16"; "!" where it could not fall."""
    seen = {}
    for name, (scaler, script) in OPTIONS.items():
        options = {"enabled": True, "initial_scale_power": 8} | scaler
        engine = make_engine(world, make_model(), "fp16", fp16=options)
        zero, scales = engine.optimizer, []
        for step, sign in enumerate(script):
            hold_loss_scale(zero)
            cannot_fall = loss_scale_cannot_fall(zero.loss_scaler)
            features, labels = batch_of(step)
            loss = F.cross_entropy(engine(features.half()).float(), labels)
            is_bad = sign == "x" and world.rank == 0
            engine.backward(loss * (float("inf") if is_bad else 1.0))
            engine.step()
            assert zero.overflow == (sign == "x")
            scales.append("!" if zero.overflow and cannot_fall else zero.loss_scale)
        seen[name] = scales
    return seen


OPTIONS = {
    "window": ({"hysteresis": 1, "loss_scale_window": 3}, ".....x......"),
    "hysteresis": ({"hysteresis": 3, "loss_scale_window": 4}, "x.x.x..x.....xxx."),
    "consecutive": (
        {"hysteresis": 2, "loss_scale_window": 100, "consecutive_hysteresis": True},
        "x.x.xx.xx.",
    ),
    "floor": ({"hysteresis": 1, "loss_scale_window": 2, "min_loss_scale": 64}, "xx.x...."),
}


def case_going_on(world: World, shards: ShardSet) -> dict:
    """The scaler after another one's checkpoint was loaded, by the options that the JSON has then."""
    saved = Run(world, shards, SAVED, overflows={1}, clip=1.0)
    with saved.shares() as shares:
        for share in itertools.islice(shares, 3):
            saved.step(share)
    checkpoint = SimpleNamespace(path=shards.folder.with_name("checkpoint"), world_size=world.world_size)
    saved.engine.save_checkpoint(str(checkpoint.path.parent), tag=checkpoint.path.name, save_latest=False)
    seen = {"saved": state_of(saved.engine.optimizer)}
    for name, changes in GOING_ON.items():
        run = Run(world, shards, SAVED | changes, clip=1.0)
        load(run.engine, checkpoint, world.rank, world.world_size)
        seen[name] = state_of(run.engine.optimizer)
        assert same(flat(saved.snapshot()), flat(run.snapshot()))
    return seen


SAVED = {"initial_scale_power": 8, "hysteresis": 3, "loss_scale_window": 50, "min_loss_scale": 2}
GOING_ON = {
    "the same": {},
    "others": {
        "initial_scale_power": 12,
        "hysteresis": 4,
        "loss_scale_window": 7,
        "min_loss_scale": 4,
        "consecutive_hysteresis": True,
    },
    "bounds": {"initial_scale_power": 12, "hysteresis": 1, "min_loss_scale": 1024},
    "static": {"loss_scale": 32},
}


def state_of(optimizer) -> dict:
    return vars(optimizer.loss_scaler) | {
        "dtype": "",
        "raise_error_at_min_scale": None,
        "optimizer": optimizer.dynamic_loss_scale,
    }


def main(argv: list[str]) -> int:
    output, *cases = argv
    allow_fp16()
    world = distributed.start()
    shards = ShardSet.open(Path(output).with_name("shards"))
    results = {name: globals()[f"case_{name}"](world, shards) for name in cases}
    if world.rank == 0:
        Path(output).write_text(json.dumps(results))
    distributed.shutdown()
    return 0
