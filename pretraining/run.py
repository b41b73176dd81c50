"""Pretrain BERT on shards under DeepSpeed.

    deepspeed pretraining/run.py --deepspeed_config ds_configs/zero2.json
    deepspeed --num_accelerators 2 pretraining/run.py --deepspeed_config ds_configs/zero2.json --model tiny
    srun python pretraining/run.py --deepspeed_config ds_configs/zero2.json

The same command goes on from the last checkpoint of its run folder.
"""

import os
import sys
import time

from data_prep.errors import UserError, run_program
from pretraining.stop import StopFlag


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit code: 0 finished, 2 bad input, 75 stopped and to be started again."""
    stop = StopFlag()
    started = time.monotonic()
    from pretraining.arguments import parse_arguments, prepare, run_folder

    arguments = parse_arguments(argv, __doc__)
    stop.watch(run_folder(arguments))
    # From here on it takes seconds: torch and DeepSpeed are imported.
    from pretraining.distributed import find_placement

    placement = find_placement(os.environ)
    try:
        preparation = prepare(arguments, placement.world_size)
    except UserError:
        if placement.rank == 0:
            raise
        # Mostly every rank finds the same fault, rank 0 says it, and the launcher ends all. If it has not after a
        # while, the fault is on this node alone.
        time.sleep(3)
        if stop.raised():
            return 2
        raise
    if arguments.dry_run:
        if placement.rank == 0:
            print("\n".join(preparation.describe(placement.world_size)))
        return 0
    from pretraining.launch import launch

    return launch(preparation, stop, started)


if __name__ == "__main__":
    sys.exit(run_program(main))
