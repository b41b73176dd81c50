"""Pretrain BERT on shards under DeepSpeed.

    deepspeed pretraining/run.py --deepspeed_config ds_configs/zero2.json
    deepspeed --num_accelerators 2 pretraining/run.py --deepspeed_config ds_configs/zero2.json --model tiny
    srun python pretraining/run.py --deepspeed_config ds_configs/zero2.json

The same command goes on from the last checkpoint of its run folder.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import UserError, run_program

PRESET_NAMES = ("tiny", "mini", "small", "medium", "base", "large")
EXIT_STOPPED = 75


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="pretraining/run.py", description=__doc__, formatter_class=_Help)
    add = parser.add_argument_group("model and data").add_argument
    add(
        "--deepspeed_config",
        type=Path,
        required=True,
        metavar="JSON",
        help="batch sizes, precision, ZeRO, optimizer, schedule",
    )
    add(
        "--data",
        type=Path,
        default=Path("data/shards"),
        metavar="FOLDER",
        help="shards made by data_prep/run.py",
    )
    add(
        "--model",
        choices=PRESET_NAMES,
        default="base",
        help="layers/hidden size: 2/128, 4/256, 4/512, 8/512, 12/768, 24/1024",
    )
    add("--seq_len", type=_positive, help="longest instance in tokens (none: that of the shards)")
    add("--max_position_embeddings", type=_positive, default=512, help="positions that the model has")
    add("--dropout", type=_share, default=0.1, help="dropout probability, in attention too")
    add("--no_next_sentence", action="store_true", help="train the masked LM alone")
    add(
        "--masking",
        choices=("dynamic", "static"),
        default="dynamic",
        help="draw masks anew in each epoch, or use the stored ones",
    )
    add = parser.add_argument_group("run").add_argument
    add("--output", type=Path, metavar="FOLDER", help="run folder (none: runs/MODEL-NAME_OF_THE_JSON)")
    add(
        "--max_steps",
        type=_positive,
        help="optimizer steps of the whole run (none: total_num_steps of the JSON's scheduler)",
    )
    add("--seed", type=int, default=0, help="of initialisation, order, masks and dropout")
    add(
        "--resume",
        choices=("auto", "never"),
        default="auto",
        help="go on from the newest whole checkpoint; never: refuse if there is one",
    )
    add("--log_interval", type=_whole, default=10, help="steps between points of the curves (0: none)")
    add(
        "--eval_interval",
        type=_whole,
        default=1000,
        help="steps between evaluations on held-out shards (0: only at the end)",
    )
    add(
        "--eval_instances",
        type=_whole,
        default=10000,
        help="held-out instances per evaluation at most (0: all)",
    )
    add("--save_interval", type=_whole, default=1000, help="steps between checkpoints (0: only at the end)")
    add("--keep", type=_positive, default=3, help="checkpoints to keep")
    add(
        "--dry_run",
        action="store_true",
        help="say what the run will be, and what is replaced on this machine, and stop",
    )
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    return parser.parse_args(argv)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults behind every option, examples as they were written."""


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return int(text)


def _share(text: str) -> float:
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to below 1")
    return float(text)


@dataclass(frozen=True)
class Preparation:
    """All that is known before the ranks meet; the same on every rank."""

    arguments: argparse.Namespace
    run_folder: Path
    shard_set: object
    config: object
    lowered: object
    schedule: object
    seq_len: int
    max_steps: int
    notes: list[str]


def prepare(arguments: argparse.Namespace, world_size: int) -> Preparation:
    """Check everything that can be checked before the ranks meet.

    Raises:
        UserError: something in the command, the JSON or the shards is wrong.
    """
    from data_prep.shards import ShardSet
    from pretraining.config import lower, read_deepspeed_json
    from pretraining.distributed import machine_capabilities
    from pretraining.model import BertConfig
    from pretraining.optimizer import schedule_for

    settings = read_deepspeed_json(arguments.deepspeed_config)
    shard_set = ShardSet.open(arguments.data)
    seq_len = _check_lengths(arguments, shard_set)
    next_sentence = not arguments.no_next_sentence
    config = BertConfig.preset(
        arguments.model,
        shard_set.manifest["tokenizer"]["vocab_size"],
        max_position_embeddings=arguments.max_position_embeddings,
        hidden_dropout_prob=arguments.dropout,
        attention_probs_dropout_prob=arguments.dropout,
        next_sentence=next_sentence,
    )
    device, capabilities = machine_capabilities()
    lowered = lower(settings, world_size=world_size, device=device, capabilities=capabilities)
    _check_batch(lowered.train_batch_size, shard_set, arguments)
    schedule, note = schedule_for(lowered.schedule, arguments.max_steps)
    max_steps = arguments.max_steps or schedule.total_num_steps
    if max_steps is None:
        raise UserError(
            f"{arguments.deepspeed_config}: its scheduler has no total_num_steps; give --max_steps"
        )
    run_folder = arguments.output or Path("runs") / f"{arguments.model}-{arguments.deepspeed_config.stem}"
    notes = [*settings.notes, *lowered.replacements, *([note] if note else [])]
    return Preparation(arguments, run_folder, shard_set, config, lowered, schedule, seq_len, max_steps, notes)


def _check_lengths(arguments: argparse.Namespace, shard_set) -> int:
    made = shard_set.settings["instances"]["seq_len"]
    seq_len = arguments.seq_len or made
    if seq_len != made:
        raise UserError(
            f"--seq_len {seq_len}: the shards in {arguments.data} hold instances of up to {made} tokens; "
            f"make shards with --seq_len {seq_len}, or leave the option out"
        )
    if seq_len > arguments.max_position_embeddings:
        raise UserError(
            f"--seq_len {seq_len}: the model has {arguments.max_position_embeddings} positions; "
            f"give --max_position_embeddings {seq_len} or shorter shards"
        )
    return seq_len


def _check_batch(train_batch_size: int, shard_set, arguments: argparse.Namespace) -> None:
    instances = int(shard_set.block_offsets("train")[-1])
    if train_batch_size > instances:
        raise UserError(
            f"train_batch_size {train_batch_size:,} is more than the {instances:,} training instances in {arguments.data}; "
            "make more shards (--duplicates) or lower it"
        )


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit code: 0 finished, 2 bad input, 75 stopped and to be started again."""
    started = time.monotonic()
    arguments = parse_arguments(argv)
    from pretraining.distributed import find_placement

    placement = find_placement(os.environ)
    try:
        preparation = prepare(arguments, placement.world_size)
    except UserError:
        if placement.rank == 0:
            raise
        # Every rank finds the same fault; rank 0 says it, and has to be left the time before its launcher kills it.
        time.sleep(3)
        return 2
    if arguments.dry_run:
        if placement.rank == 0:
            print("\n".join(_description(preparation, placement.world_size)))
        return 0
    return _run(preparation, started)


def _description(preparation: Preparation, world_size: int) -> list[str]:
    from pretraining.dry_run import describe

    return describe(
        preparation.config,
        preparation.lowered,
        preparation.shard_set,
        seq_len=preparation.seq_len,
        world_size=world_size,
        max_steps=preparation.max_steps,
        notes=preparation.notes,
    )


def _run(preparation: Preparation, started: float) -> int:
    """Start the ranks, build or load everything, train, and leave a status behind."""
    from pretraining import distributed
    from pretraining.metrics import write_status
    from pretraining.trainer import StopFlag

    stop = StopFlag(preparation.run_folder, distributed.find_placement(os.environ).rank)
    world = distributed.start()
    folder = preparation.run_folder
    trainer = None

    def leave_status(state: str, reason: str) -> None:
        if world.rank == 0 and folder.is_dir():
            write_status(folder, state, reason, trainer.state.step if trainer else 0)

    try:
        trainer, batches = _build(preparation, world, stop, started)
        leave_status("running", "")
        finished = trainer.run(batches)
        batches.close()
        if finished:
            leave_status("finished", f"{preparation.max_steps} steps are done")
            _say_end(preparation, world.rank)
            return 0
        reason = stop.reason or "another rank was asked to stop"
        leave_status("stopped", reason)
        if world.rank == 0:
            print(
                f"stopped by {reason}; the same command goes on from step {trainer.state.step:,}", flush=True
            )
        return EXIT_STOPPED
    except UserError as error:
        leave_status("failed", str(error))
        raise
    except Exception as error:
        leave_status("failed", f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    finally:
        distributed.shutdown()


def _build(preparation: Preparation, world, stop, started: float):
    """Make the engine, load the newest checkpoint if there is one, and set the trainer up."""
    from pretraining.checkpoint import Checkpoints, TrainState, load
    from pretraining.data import TrainingBatches
    from pretraining.distributed import gather_objects
    from pretraining.metrics import ProgressLine, Recorder
    from pretraining.order import DEFAULT_LANES, DEFAULT_WINDOW, Order
    from pretraining.trainer import LoopSettings, Recipe, Trainer

    arguments, lowered, shard_set = preparation.arguments, preparation.lowered, preparation.shard_set
    checkpoints = Checkpoints(
        preparation.run_folder, _identity(preparation), world.rank, world.world_size, gather_objects, print
    )
    checkpoint = checkpoints.newest_whole()
    if checkpoint:
        if arguments.resume == "never":
            raise UserError(
                f"{checkpoint.path}: there is a checkpoint and --resume is never; choose another --output"
            )
        checkpoints.check_identity(checkpoint)
        state = checkpoint.state
    else:
        state = TrainState(arguments.seed, DEFAULT_LANES, DEFAULT_WINDOW, shard_set.manifest_sha256)
    engine, optimizer_name = _make_engine(preparation, world)
    if checkpoint:
        load(engine, checkpoint)
    recorder = progress = None
    if world.rank == 0:
        preparation.run_folder.mkdir(parents=True, exist_ok=True)
        _write_settings(preparation, world, optimizer_name)
        recorder = Recorder(preparation.run_folder, state.step)
        progress = ProgressLine(preparation.max_steps, state.step)
        _say_start(preparation, world, state, optimizer_name, started)
        recorder.note("run", f"started at step {state.step} on {world.world_size} ranks", state.step)
    order = Order(shard_set.block_offsets("train"), state.seed, state.lanes, state.window)
    batches = TrainingBatches(
        order,
        shard_set,
        consumed=state.consumed,
        train_batch_size=lowered.train_batch_size,
        rank=world.rank,
        world_size=world.world_size,
        max_instances=lowered.micro_batch_size,
        masking=arguments.masking,
        seed=arguments.seed,
        skipped_ranges=state.skipped_ranges,
        pin=world.device.type == "cuda",
    )
    recipe = Recipe(
        seed=arguments.seed,
        seq_len=preparation.seq_len,
        train_batch_size=lowered.train_batch_size,
        micro_batch_size=lowered.micro_batch_size,
        max_micro_steps=lowered.max_micro_steps,
        schedule=preparation.schedule,
        has_next_sentence=not arguments.no_next_sentence,
    )
    loop = LoopSettings(
        preparation.max_steps,
        arguments.log_interval,
        arguments.save_interval,
        arguments.eval_interval,
        arguments.eval_instances,
        arguments.keep,
    )
    trainer = Trainer(engine, world, recipe, loop, state, checkpoints, shard_set, recorder, progress, stop)
    return trainer, batches


def _identity(preparation: Preparation) -> dict:
    """What a resumed run must share with the run that it goes on with."""
    return {
        "shards": preparation.shard_set.manifest_sha256,
        "model": preparation.config.to_dict(),
        "seed": preparation.arguments.seed,
        "masking": preparation.arguments.masking,
        "train_batch_size": preparation.lowered.train_batch_size,
        "precision": preparation.lowered.precision,
        "optimizer": "AdamW",
    }


def _make_engine(preparation: Preparation, world):
    """Initialise model, optimizer and DeepSpeed engine; returns the engine and what the optimizer is."""
    import torch

    from data_prep.counter_rng import Stream, key
    from pretraining.distributed import accumulate_in_fp32, import_deepspeed
    from pretraining.model import BertForPreTraining
    from pretraining.optimizer import choose_adamw, parameter_groups

    lowered = preparation.lowered
    torch.manual_seed(key(preparation.arguments.seed, Stream.INITIALISATION))
    model = BertForPreTraining(preparation.config)
    choice = choose_adamw(lowered.optimizer_device)
    groups = parameter_groups(model, lowered.optimizer.weight_decay)
    engine, *_ = import_deepspeed().initialize(
        model=model,
        optimizer=choice.build(groups, lowered.optimizer),
        config=lowered.engine_config,
        dist_init_required=False,
    )
    if lowered.max_micro_steps > 1:
        accumulate_in_fp32(engine)
    return engine, f"{choice.name}: {choice.why}"


def _write_settings(preparation: Preparation, world, optimizer_name: str) -> None:
    """settings.json: everything that the run was started with, so that its folder explains itself."""
    from importlib.metadata import version

    from data_prep.shards import write_atomically

    content = {
        "arguments": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(preparation.arguments).items()
        },
        "model": preparation.config.to_dict(),
        "deepspeed": preparation.lowered.engine_config,
        "train_batch_size": preparation.lowered.train_batch_size,
        "precision": preparation.lowered.precision,
        "optimizer": optimizer_name,
        "notes": preparation.notes,
        "world_size": world.world_size,
        "device": str(world.device),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy", "webdataset")},
        "commit": _commit(),
    }
    write_atomically(
        preparation.run_folder / "settings.json", (json.dumps(content, indent=1) + "\n").encode()
    )


def _commit() -> str | None:
    """The commit of this code, if it runs from a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _say_start(preparation: Preparation, world, state, optimizer_name: str, started: float) -> None:
    print("\n".join(_description(preparation, world.world_size)))
    print(f"optimizer: {optimizer_name}")
    if state.step:
        print(f"going on from step {state.step:,}, {state.consumed:,} instances read")
    print(f"curves: tensorboard --logdir {preparation.run_folder.parent}")
    print(f"started in {time.monotonic() - started:.1f} s", flush=True)


def _say_end(preparation: Preparation, rank: int) -> None:
    if rank == 0:
        folder = preparation.run_folder
        print(
            f"\n{preparation.max_steps:,} steps are done: checkpoints in {folder / 'checkpoints'}, numbers in {folder / 'metrics.jsonl'}"
        )
        print(f"next: tensorboard --logdir {folder.parent}", flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
