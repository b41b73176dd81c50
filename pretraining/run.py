"""Pretrain BERT on shards under DeepSpeed.

    deepspeed pretraining/run.py --deepspeed_config ds_configs/zero2.json
    deepspeed --num_accelerators 2 pretraining/run.py --deepspeed_config ds_configs/zero2.json --model tiny
    srun python pretraining/run.py --deepspeed_config ds_configs/zero2.json

The same command goes on from the last checkpoint of its run folder.
"""

import argparse
import json
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
    from pretraining.config import lower, machine_capabilities, read_deepspeed_json
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
    import os

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
